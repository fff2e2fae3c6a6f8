//! Answers on their way out: how much of them a connection holds, and how long they may take.
//!
//! HTTP/2 lets a client ask on many streams and read none of the answers. The answers are encoded and held until
//! the client's windows open. So every connection counts the bytes it holds ([`Pressure`]); above a limit what
//! its further requests say is not delivered ([`Inbound`]), so that no work is done for them. The count goes down
//! when the bytes are handed to the kernel or their stream is reset: each chunk carries its share and gives it
//! back when dropped.
//!
//! One answer may be larger than the limit (a Range over everything); a chunk counts for at most a quarter, so
//! that a client which does read such an answer can go on asking meanwhile. Answers to what was delivered before
//! the limit was reached come on top: the limit is where a connection stops, not its exact size.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tonic::Status;
use tonic::body::Body;

use super::deadline;
use crate::runtime::executor::{OnCore, Sleep};

/// Smaller chunks are not counted: the streams of a connection bound their sum, and most answers are small.
const CHUNK_COUNTED_BYTES_MIN: usize = 512;
/// Requests let in at once when room is made; each lets in others when it is done.
const LET_IN: usize = 16;

/// The bytes of answers that one connection holds.
pub(super) struct Pressure {
    held: Cell<usize>,
    limit: usize,
    /// Requests at the door, by ticket: the longest wait comes first.
    waiting: RefCell<BTreeMap<u64, Waker>>,
    ticket_next: Cell<u64>,
}

impl Pressure {
    pub(super) fn new(limit: usize) -> Rc<Pressure> {
        Rc::new(Pressure {
            held: Cell::new(0),
            limit,
            waiting: RefCell::default(),
            ticket_next: Cell::new(0),
        })
    }

    fn let_in(&self) {
        for _ in 0..LET_IN {
            if self.held.get() > self.limit {
                return;
            }
            let Some((_, waker)) = self.waiting.borrow_mut().pop_first() else { return };
            waker.wake();
        }
    }
}

/// The body of a request: each piece of it waits until the connection holds less than its limit.
pub struct Inbound {
    body: Incoming,
    door: OnCore<Door>,
}

struct Door {
    pressure: Rc<Pressure>,
    /// Set once it had to wait.
    ticket: Option<u64>,
}

impl Inbound {
    pub(super) fn new(body: Incoming, pressure: &Rc<Pressure>) -> Inbound {
        Inbound { body, door: OnCore::new(Door { pressure: Rc::clone(pressure), ticket: None }) }
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
        let pressure = &self.pressure;
        if pressure.held.get() <= pressure.limit {
            if let Some(ticket) = self.ticket.take() {
                pressure.waiting.borrow_mut().remove(&ticket);
            }
            return Poll::Ready(());
        }
        let ticket = *self.ticket.get_or_insert_with(|| {
            let next = &pressure.ticket_next;
            next.replace(next.get() + 1)
        });
        pressure.waiting.borrow_mut().insert(ticket, context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.pressure.waiting.borrow_mut().remove(&ticket);
        }
    }
}

/// A request under way; dropped with its answer, or with the request when that is cancelled. A turn that it was
/// given at the door then goes to the next.
pub(super) struct Passage(Rc<Pressure>);

impl Passage {
    pub(super) fn new(pressure: &Rc<Pressure>) -> Passage {
        Passage(Rc::clone(pressure))
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.0.let_in();
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
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context) {
            let pressure = &this.passage.0;
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
