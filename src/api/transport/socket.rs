//! The glue between hyper and the executor: a socket, a timer, and where tasks are spawned.

use std::future::Future;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::{AsyncRead, AsyncReadExt, AsyncWrite};
use glommio::net::TcpStream;
use hyper::rt::ReadBufCursor;

use super::deal::{Connection, Seat};
use crate::runtime::executor::{self, Sleep};

/// What every HTTP/2 client says first (RFC 9113, 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Slices that one vectored write takes: an answer is two or three, and a connection gathers many.
const SLICES_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaks {
    Http1,
    Http2,
}

/// A connection as part of this core's executor.
pub(super) struct Socket {
    stream: TcpStream,
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
        Socket { stream, head: [0; PREFACE.len()], head_filled: 0, head_taken: 0, _seat: seat }
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
            match self.stream.read(&mut self.head[self.head_filled..]).await {
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
        let read =
            std::task::ready!(Pin::new(&mut this.stream).poll_read(context, buffer.initialize_unfilled()))?;
        // SAFETY: `read` bytes of the unfilled part, which is initialized, were written.
        unsafe { buffer.advance(read) };
        Poll::Ready(Ok(()))
    }
}

impl hyper::rt::Write for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// The executor's socket would send the first slice only: a system call for each answer.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let slices = &slices[..slices.len().min(SLICES_MAX)];
        // SAFETY: an all-zero msghdr is a valid empty one.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = slices.as_ptr().cast_mut().cast();
        message.msg_iovlen = slices.len();
        // SAFETY: IoSlice has the layout of iovec; the slices live for the call, which only reads them.
        let sent = unsafe {
            libc::sendmsg(
                self.stream.as_raw_fd(),
                &raw const message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if sent >= 0 {
            return Poll::Ready(Ok(sent as usize));
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            // This tries once more and then waits until the socket takes something.
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {
                let first = slices.iter().find(|slice| !slice.is_empty()).map_or(&[][..], |slice| slice);
                Pin::new(&mut self.stream).poll_write(context, first)
            }
            _ => Poll::Ready(Err(error)),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_close(context)
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
