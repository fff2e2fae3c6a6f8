//! Answers on their way out: how much of them a connection holds, and how long they may take.
//!
//! HTTP/2 lets a client ask on many streams and read none of the answers. The answers are encoded and held until
//! the client's windows open. So every connection counts the bytes it holds ([`Pressure`]); above a limit what
//! its further requests say is not delivered ([`Inbound`]), so that no work is done for them. The count goes down
//! when the bytes are handed to the kernel or their stream is reset: each chunk carries its share and gives it
//! back when dropped.
//!
//! One answer may be larger than the limit (a Range over everything); a chunk counts for at most a quarter, so
//! that a client which does read such an answer can go on asking meanwhile.
//!
//! A client can also ask thousands of times before the first answer is there. So a request that is delivered
//! reserves what its answer may hold, as far as that is known: as much as the largest of the last answers on
//! this connection did. Where reservations alone hold requests back and no answer comes for [`PATIENCE`], they
//! are given up, and the next ones are half as large: what is under way waits for something, maybe for those that
//! are held back. Answers larger than those before them come on top: the limit is where a connection stops, not
//! its exact size.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tonic::Status;
use tonic::body::Body;

use super::deadline;
use crate::runtime::executor::{OnCore, Sleep, sleep};

/// Smaller chunks are not counted: the streams of a connection bound their sum, and most answers are small.
const CHUNK_COUNTED_BYTES_MIN: usize = 512;
/// Requests let in at once when room is made; each lets in others when it is done.
const LET_IN: usize = 16;
/// What the first answers of a connection are taken for, and what every answer at least is.
const EXPECTED_BYTES_FIRST: usize = 1 << 20;
const EXPECTED_BYTES_MIN: usize = 1 << 10;
/// How fast a large answer is forgotten: by this part with each that follows.
const EXPECTED_DECAY: usize = 16;
/// How long no answer may come while requests wait for nothing but answers. Long enough that a busy machine is not
/// taken for calls that wait for each other: each time that patience ends, a client that never reads may hold more.
const PATIENCE: Duration = Duration::from_millis(500);

/// The bytes of answers that one connection holds.
pub(super) struct Pressure {
    held: Cell<usize>,
    /// What is expected of requests that are under way.
    reserved: Cell<usize>,
    /// Counts how often reservations were given up: older ones are not in `reserved` any more.
    round: Cell<u64>,
    /// Bytes that the next answer is expected to have: the largest of the last ones.
    expected: Cell<usize>,
    /// Counts requests delivered and answers made.
    progress: Cell<u64>,
    limit: usize,
    /// Requests at the door, by ticket: the longest wait comes first.
    waiting: RefCell<BTreeMap<u64, Waker>>,
    ticket_next: Cell<u64>,
}

impl Pressure {
    pub(super) fn new(limit: usize) -> Rc<Pressure> {
        Rc::new(Pressure {
            held: Cell::new(0),
            reserved: Cell::new(0),
            round: Cell::new(0),
            expected: Cell::new(EXPECTED_BYTES_FIRST),
            progress: Cell::new(0),
            limit,
            waiting: RefCell::default(),
            ticket_next: Cell::new(0),
        })
    }

    fn has_room(&self) -> bool {
        self.held.get() + self.reserved.get() <= self.limit
    }

    /// Learns from the size of an answer.
    fn expect(&self, bytes: usize) {
        let expected = self.expected.get();
        let next = bytes.max(expected - expected / EXPECTED_DECAY);
        self.expected.set(next.clamp(EXPECTED_BYTES_MIN, self.limit / 4));
    }

    fn is_full(&self) -> bool {
        self.held.get() > self.limit
    }

    fn advance(&self) {
        self.progress.set(self.progress.get() + 1);
    }

    fn give_up_reservations(&self) {
        self.reserved.set(0);
        self.round.set(self.round.get() + 1);
        self.expected.set((self.expected.get() / 2).max(EXPECTED_BYTES_MIN));
    }

    fn give_back(&self, expected: usize, round: u64) {
        if round == self.round.get() {
            self.reserved.set(self.reserved.get() - expected);
        }
    }

    fn let_in(&self) {
        for _ in 0..LET_IN {
            if !self.has_room() {
                return self.wake_first();
            }
            let Some((_, waker)) = self.waiting.borrow_mut().pop_first() else { return };
            waker.wake();
        }
    }

    /// The first of the waiting looks after its patience; the others rely on it.
    fn wake_first(&self) {
        if !self.is_full()
            && let Some(waker) = self.waiting.borrow().values().next()
        {
            waker.wake_by_ref();
        }
    }

    fn is_first(&self, ticket: u64) -> bool {
        self.waiting.borrow().keys().next().is_none_or(|first| *first >= ticket)
    }
}

/// The body of a request: each piece of it waits until the connection holds less than its limit.
pub struct Inbound {
    body: Incoming,
    door: OnCore<Door>,
}

struct Door {
    call: Rc<Call>,
    /// Set once it had to wait.
    ticket: Option<u64>,
    /// The timer of the first that waits, and the progress when it was set.
    patience: Option<(Sleep, u64)>,
}

impl Inbound {
    pub(super) fn new(body: Incoming, passage: &Passage) -> Inbound {
        let door = Door { call: Rc::clone(&passage.0), ticket: None, patience: None };
        Inbound { body, door: OnCore::new(door) }
    }
}

impl http_body::Body for Inbound {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        std::task::ready!(self.door.poll_open(context));
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Door {
    fn poll_open(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let call = Rc::clone(&self.call);
        let pressure = &call.pressure;
        // What follows the first piece belongs to a request that has its reservation.
        let entered = call.stage.get() != Stage::Outside;
        let mut opens = !pressure.is_full() && (entered || pressure.has_room());
        if !opens {
            let ticket = *self.ticket.get_or_insert_with(|| {
                let next = &pressure.ticket_next;
                next.replace(next.get() + 1)
            });
            pressure.waiting.borrow_mut().insert(ticket, context.waker().clone());
            if !pressure.is_full() && pressure.is_first(ticket) && self.is_out_of_patience(context) {
                pressure.give_up_reservations();
                opens = true;
            }
        }
        if !opens {
            return Poll::Pending;
        }
        call.enter();
        self.leave();
        Poll::Ready(())
    }

    fn is_out_of_patience(&mut self, context: &mut Context<'_>) -> bool {
        let progress = self.call.pressure.progress.get();
        loop {
            let (timer, seen) = self.patience.get_or_insert_with(|| (sleep(PATIENCE), progress));
            if Pin::new(timer).poll(context).is_pending() {
                return false;
            }
            if *seen == progress {
                return true;
            }
            self.patience = None;
        }
    }

    fn leave(&mut self) {
        self.patience = None;
        if let Some(ticket) = self.ticket.take() {
            let pressure = &self.call.pressure;
            pressure.waiting.borrow_mut().remove(&ticket);
            pressure.wake_first();
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.leave();
    }
}

/// One request of a connection and what it counts for.
struct Call {
    pressure: Rc<Pressure>,
    stage: Cell<Stage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing of it was delivered.
    Outside,
    /// Delivered; its answer is expected to have so many bytes, which were reserved in this round.
    UnderWay { expected: usize, round: u64 },
    /// The answer is there and so many bytes are taken for it, until the first of it is counted.
    Answered(usize),
    /// The answer counts for itself.
    Counted,
}

impl Call {
    fn enter(&self) {
        if self.stage.get() == Stage::Outside {
            let expected = self.pressure.expected.get();
            self.pressure.reserved.set(self.pressure.reserved.get() + expected);
            self.stage.set(Stage::UnderWay { expected, round: self.pressure.round.get() });
            self.pressure.advance();
        }
    }

    /// From now on no patience helps: it is the client's turn to take the answer.
    fn answered(&self) {
        if let Stage::UnderWay { expected, round } = self.stage.get() {
            self.pressure.give_back(expected, round);
            self.pressure.held.set(self.pressure.held.get() + expected);
            self.stage.set(Stage::Answered(expected));
            self.pressure.advance();
        }
    }

    fn counted(&self) {
        match self.stage.replace(Stage::Counted) {
            Stage::UnderWay { expected, round } => self.pressure.give_back(expected, round),
            Stage::Answered(expected) => self.pressure.held.set(self.pressure.held.get() - expected),
            Stage::Outside | Stage::Counted => {}
        }
    }
}

/// A request under way; dropped with its answer, or with the request when that is cancelled. A turn that it was
/// given at the door then goes to the next.
pub(super) struct Passage(Rc<Call>);

impl Passage {
    pub(super) fn new(pressure: &Rc<Pressure>) -> Passage {
        Passage(Rc::new(Call { pressure: Rc::clone(pressure), stage: Cell::new(Stage::Outside) }))
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.0.counted();
        self.0.pressure.let_in();
    }
}

/// A chunk of an answer and its share of the pressure.
struct Chunk {
    bytes: Bytes,
    share: usize,
    pressure: OnCore<Rc<Pressure>>,
}

impl Chunk {
    fn counted(bytes: Bytes, pressure: &Rc<Pressure>) -> Bytes {
        if bytes.len() < CHUNK_COUNTED_BYTES_MIN {
            return bytes;
        }
        let share = bytes.len().min(pressure.limit / 4);
        pressure.held.set(pressure.held.get() + share);
        Bytes::from_owner(Chunk { bytes, share, pressure: OnCore::new(Rc::clone(pressure)) })
    }
}

impl AsRef<[u8]> for Chunk {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.pressure.held.set(self.pressure.held.get() - self.share);
        self.pressure.let_in();
    }
}

/// The body of an answer: counted, and ended by its deadline.
pub(super) struct Reply {
    body: Body,
    passage: Passage,
    /// Of a gRPC call that has one: what is not out when it passes ends with a status instead.
    deadline: Option<Sleep>,
    ended: bool,
}

impl Reply {
    pub(super) fn new(body: Body, passage: Passage, deadline: Option<Sleep>) -> Reply {
        passage.0.answered();
        Reply { body, passage, deadline, ended: false }
    }
}

impl http_body::Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let call = &this.passage.0;
        let polled = Pin::new(&mut this.body).poll_frame(context);
        // Pending: an answer that is not made yet holds nothing.
        if let Stage::UnderWay { .. } | Stage::Answered(_) = call.stage.get() {
            if let Poll::Ready(Some(Ok(frame))) = &polled {
                call.pressure.expect(frame.data_ref().map_or(0, Bytes::len));
            }
            call.counted();
        }
        if let Poll::Ready(frame) = polled {
            let pressure = &call.pressure;
            return Poll::Ready(
                frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| Chunk::counted(bytes, pressure)))),
            );
        }
        let Some(timer) = &mut this.deadline else { return Poll::Pending };
        std::task::ready!(Pin::new(timer).poll(context));
        this.ended = true;
        let mut trailers = http::HeaderMap::new();
        Poll::Ready(Some(deadline::exceeded().add_header(&mut trailers).map(|()| Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
