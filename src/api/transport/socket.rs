//! The glue between hyper and the executor: a socket, a timer, and where tasks are spawned.

use std::cell::RefCell;
use std::future::Future;
use std::io::{self, IoSlice};
use std::os::fd::{FromRawFd, IntoRawFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::{AsyncRead, AsyncWrite};
use glommio::net::TcpStream;
use hyper::rt::ReadBufCursor;

use super::deal::{Connection, Seat};
use crate::runtime::executor::{self, Sleep};

/// What every HTTP/2 client says first (RFC 9113, 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of answers that are gathered before the socket is asked to take some.
const GATHERED_BYTES_MAX: usize = 64 << 10;
/// Bytes that a connection may send before others have a turn: a long answer to a quick reader would stop a core.
const TURN_BYTES_MAX: usize = 256 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaks {
    Http1,
    Http2,
}

/// The sending side of a connection: what hyper writes in one turn is gathered and leaves together. HTTP/2 framing
/// flushes after every answer of more than a few hundred bytes, which would be a system call for each.
pub(super) struct Outgoing {
    stream: RefCell<TcpStream>,
    gathered: RefCell<Gathered>,
}

#[derive(Default)]
struct Gathered {
    bytes: Vec<u8>,
    sent: usize,
    /// Bytes taken in this turn of the connection.
    turn: usize,
}

impl Outgoing {
    /// Sends what was gathered. Pending: the task is woken when the socket takes more.
    pub(super) fn poll_send(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut gathered = self.gathered.borrow_mut();
        while gathered.sent < gathered.bytes.len() {
            let rest = &gathered.bytes[gathered.sent..];
            let sent = std::task::ready!(Pin::new(&mut *self.stream.borrow_mut()).poll_write(context, rest))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            gathered.sent += sent;
        }
        // An idle connection holds no buffer.
        *gathered = Gathered { turn: gathered.turn, ..Gathered::default() };
        Poll::Ready(Ok(()))
    }

    /// The connection is about to be polled.
    pub(super) fn begin_turn(&self) {
        self.gathered.borrow_mut().turn = 0;
    }

    /// Makes room and takes as much as fits.
    fn poll_gather(&self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if self.gathered.borrow().bytes.len() >= GATHERED_BYTES_MAX {
            std::task::ready!(self.poll_send(context))?;
        }
        let mut gathered = self.gathered.borrow_mut();
        if gathered.turn >= TURN_BYTES_MAX {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut room = GATHERED_BYTES_MAX - gathered.bytes.len();
        let before = room;
        for slice in slices {
            let taken = slice.len().min(room);
            gathered.bytes.extend_from_slice(&slice[..taken]);
            room -= taken;
        }
        gathered.turn += before - room;
        Poll::Ready(Ok(before - room))
    }
}

/// A connection as part of this core's executor.
pub(super) struct Socket {
    outgoing: Rc<Outgoing>,
    /// What was read to find out what the client speaks; hyper reads it again.
    head: [u8; PREFACE.len()],
    head_filled: usize,
    head_taken: usize,
    /// Given back to the dealer's count when the connection ends.
    _seat: Seat,
}

impl Socket {
    pub(super) fn new(connection: Connection) -> Self {
        let Connection { socket, seat, .. } = connection;
        // SAFETY: the descriptor is open, is a stream socket, and nobody else owns it.
        let stream = unsafe { TcpStream::from_raw_fd(socket.into_raw_fd()) };
        let outgoing = Outgoing { stream: RefCell::new(stream), gathered: RefCell::default() };
        let outgoing = Rc::new(outgoing);
        Socket { outgoing, head: [0; PREFACE.len()], head_filled: 0, head_taken: 0, _seat: seat }
    }

    /// The sending side, for who polls the connection: after each poll it sends what was gathered.
    pub(super) fn outgoing(&self) -> Rc<Outgoing> {
        Rc::clone(&self.outgoing)
    }

    /// Reads until it is clear what the client speaks; None for what is neither, or a connection that ended.
    pub(super) async fn sniff(&mut self) -> Option<Speaks> {
        loop {
            let head = &self.head[..self.head_filled];
            if head == PREFACE {
                return Some(Speaks::Http2);
            }
            if !PREFACE.starts_with(head) {
                // A method in capitals; hyper judges the rest.
                return head[0].is_ascii_uppercase().then_some(Speaks::Http1);
            }
            let (outgoing, head) = (&self.outgoing, &mut self.head[self.head_filled..]);
            let read = std::future::poll_fn(|context| {
                Pin::new(&mut *outgoing.stream.borrow_mut()).poll_read(context, head)
            });
            match read.await {
                Ok(0) | Err(_) => return None,
                Ok(read) => self.head_filled += read,
            }
        }
    }
}

impl hyper::rt::Read for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let head = &this.head[this.head_taken..this.head_filled];
        if !head.is_empty() {
            let taken = head.len().min(buffer.remaining());
            buffer.put_slice(&head[..taken]);
            this.head_taken += taken;
            return Poll::Ready(Ok(()));
        }
        let mut stream = this.outgoing.stream.borrow_mut();
        let read =
            std::task::ready!(Pin::new(&mut *stream).poll_read(context, buffer.initialize_unfilled()))?;
        // SAFETY: `read` bytes of the unfilled part, which is initialized, were written.
        unsafe { buffer.advance(read) };
        Poll::Ready(Ok(()))
    }
}

impl hyper::rt::Write for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.outgoing.poll_gather(context, &[IoSlice::new(bytes)])
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.outgoing.poll_gather(context, slices)
    }

    /// What was gathered is sent when the connection's turn ends ([`Outgoing::poll_send`]).
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        std::task::ready!(self.outgoing.poll_send(context))?;
        Pin::new(&mut *self.outgoing.stream.borrow_mut()).poll_close(context)
    }
}

/// Spawns on the calling executor.
#[derive(Clone, Copy)]
pub(super) struct Tasks;

impl<F: Future<Output = ()> + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, task: F) {
        executor::spawn(task);
    }
}

/// The calling executor's timer.
#[derive(Clone, Copy)]
pub(super) struct Clock;

impl hyper::rt::Timer for Clock {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(executor::sleep(duration))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn hyper::rt::Sleep>> {
        self.sleep(deadline.saturating_duration_since(Instant::now()))
    }
}

impl hyper::rt::Sleep for Sleep {}
