//! Connections: accepted in one place ([`deal`]), dealt to the core that has the fewest, served there.
//!
//! ```text
//!   accept thread          core
//!   accept ──► fewest ──►  first bytes ─┬─ HTTP/2 preface ─► hyper http2 ─┬─ application/grpc ─► gRPC handler
//!                                       ├─ a letter ───────► hyper http1 ─┴─ anything else ────► plain handler
//!                                       └─ anything else, or nothing in time: closed
//! ```
//!
//! What it promises: a connection costs others nothing. One that never reads holds at most
//! [`REPLY_BYTES_MAX`] of answers (then its requests wait; see [`Inbound`]), its unread requests are bounded by the
//! windows below, its streams by [`STREAMS_MAX`]. Bursts of cancelled streams do not end a connection. A request
//! whose stream is cancelled, or whose time is up, is dropped where it waits: whoever must finish what it began
//! owns that work elsewhere.
//!
//! What it does not know: what a request means. It has one [`Handler`] for gRPC and one for plain HTTP.

mod deadline;
pub mod deal;
mod reply;
mod socket;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::future::LocalBoxFuture;
use hyper::body::Incoming;
use hyper::service::service_fn;
use tonic::body::Body;

use self::deal::{Arrivals, Connection};
pub use self::reply::Inbound;
use self::reply::{Passage, Pressure, Reply};
use self::socket::{Clock, Outgoing, Socket, Tasks};
use crate::runtime::executor::{Signal, sleep, spawn};

/// Answers a request. Called on the core's own thread; need not be `Send`.
pub type Handler = Rc<dyn Fn(http::Request<Inbound>) -> LocalBoxFuture<'static, http::Response<Body>>>;

/// Bytes of answers that one connection may hold unsent before its further requests wait.
pub const REPLY_BYTES_MAX: usize = 64 << 20;
/// Streams that one connection may have open, whatever the setting allows. Etcd sets no limit by default and a
/// client that opens ever more fills its memory.
pub const STREAMS_MAX: u32 = 1 << 16;
/// Bytes that a client may send on one stream, and on all streams of a connection, before they are read.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
/// Streams that were cancelled before anybody looked at them, and those that we had to reset, which a connection
/// may have had before it is taken for an attack. Clients cancel thousands at once when their deadline passes.
const RESET_STREAMS_MAX: usize = STREAMS_MAX as usize;

/// The peer of the connection that a request came over; an extension of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// What the flags say about connections.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `--max-concurrent-streams`; capped at [`STREAMS_MAX`].
    pub streams_max: u32,
    /// How long a connection may take until it is clear what it speaks, and an HTTP/1 client for its head.
    pub handshake_timeout: Duration,
    /// `--grpc-keepalive-interval`: a connection silent for so long is asked whether it lives; zero: never.
    pub keepalive_interval: Duration,
    /// `--grpc-keepalive-timeout`: and is closed when it does not say so within this.
    pub keepalive_timeout: Duration,
    /// Bytes of a request's headers.
    pub header_bytes_max: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            streams_max: u32::MAX,
            handshake_timeout: Duration::from_secs(20),
            keepalive_interval: Duration::from_secs(2 * 60 * 60),
            keepalive_timeout: Duration::from_secs(20),
            header_bytes_max: 256 << 10,
        }
    }
}

/// The connections of one core.
pub struct Server {
    settings: Settings,
    grpc: Handler,
    plain: Handler,
    phase: Cell<Phase>,
    /// Connections by number, with the waker of each one's task.
    open: RefCell<BTreeMap<u64, Waker>>,
    number_next: Cell<u64>,
    emptied: Signal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    /// No new streams; those under way are finished.
    Draining,
    /// Every connection is closed as it is.
    Closing,
}

impl Server {
    /// `grpc` answers requests over HTTP/2 whose content type is gRPC's, `plain` all others.
    pub fn new(settings: Settings, grpc: Handler, plain: Handler) -> Rc<Server> {
        Rc::new(Server {
            settings,
            grpc,
            plain,
            phase: Cell::new(Phase::Serving),
            open: RefCell::default(),
            number_next: Cell::new(0),
            emptied: Signal::default(),
        })
    }

    /// Serves what is dealt to this core until no listener is left.
    pub async fn run(self: Rc<Self>, mut arrivals: Arrivals) {
        let mut batch = Vec::new();
        while arrivals.recv_batch(&mut batch).await > 0 {
            for connection in batch.drain(..) {
                self.serve(connection);
            }
        }
    }

    /// Serves one connection, as a task of its own.
    pub fn serve(self: &Rc<Self>, connection: Connection) {
        if self.phase.get() != Phase::Serving {
            return;
        }
        let number = self.number_next.replace(self.number_next.get() + 1);
        let server = Rc::clone(self);
        spawn(async move {
            let place = Place { server: &server, number };
            let mut work = pin!(server.converse(connection));
            let mut listed = false;
            // A drain wakes the task; the conversation looks at the phase itself, the end is seen here.
            std::future::poll_fn(|context| {
                if !std::mem::replace(&mut listed, true) {
                    server.open.borrow_mut().insert(number, context.waker().clone());
                }
                if server.phase.get() == Phase::Closing {
                    return Poll::Ready(());
                }
                work.as_mut().poll(context)
            })
            .await;
            drop(place);
        });
    }

    /// Connections that this core serves.
    pub fn connections(&self) -> usize {
        self.open.borrow().len()
    }

    /// Says goodbye on every connection (GOAWAY; HTTP/1: no further request), lets requests under way finish,
    /// and closes what is left after `limit`. New connections are refused from now on.
    pub async fn drain(&self, limit: Duration) {
        self.enter(Phase::Draining);
        let mut limit = pin!(sleep(limit));
        std::future::poll_fn(|context| {
            if self.open.borrow().is_empty() || limit.as_mut().poll(context).is_ready() {
                return Poll::Ready(());
            }
            // Each end of a connection raises it; looked at again because the count may just have fallen.
            while self.emptied.poll(context).is_ready() {
                if self.open.borrow().is_empty() {
                    return Poll::Ready(());
                }
            }
            Poll::Pending
        })
        .await;
        self.enter(Phase::Closing);
    }

    fn enter(&self, phase: Phase) {
        self.phase.set(phase);
        self.open.borrow().values().for_each(Waker::wake_by_ref);
    }

    async fn converse(&self, connection: Connection) {
        let peer = connection.peer;
        let mut socket = Socket::new(connection);
        let speaks = {
            let mut sniff = pin!(socket.sniff());
            let mut limit = pin!(sleep(self.settings.handshake_timeout));
            std::future::poll_fn(|context| {
                if let Poll::Ready(speaks) = sniff.as_mut().poll(context) {
                    return Poll::Ready(speaks);
                }
                // Nothing was asked yet, so there is nothing to finish.
                if self.phase.get() != Phase::Serving {
                    return Poll::Ready(None);
                }
                limit.as_mut().poll(context).map(|()| None)
            })
            .await
        };
        let outcome = match speaks {
            Some(socket::Speaks::Http2) => self.converse_http2(socket, peer).await,
            Some(socket::Speaks::Http1) => self.converse_http1(socket, peer).await,
            None => return,
        };
        if let Err(error) = outcome {
            tracing::debug!(%peer, %error, "connection ended");
        }
    }

    async fn converse_http2(&self, socket: Socket, peer: SocketAddr) -> hyper::Result<()> {
        let pressure = Pressure::new(REPLY_BYTES_MAX);
        let (grpc, plain) = (Rc::clone(&self.grpc), Rc::clone(&self.plain));
        let service = service_fn(move |mut request: http::Request<Incoming>| {
            request.extensions_mut().insert(Peer(peer));
            answer(&grpc, &plain, Rc::clone(&pressure), request)
        });
        let mut builder = hyper::server::conn::http2::Builder::new(Tasks);
        builder
            .timer(Clock)
            .max_concurrent_streams(self.settings.streams_max.min(STREAMS_MAX))
            .max_pending_accept_reset_streams(RESET_STREAMS_MAX)
            .max_local_error_reset_streams(RESET_STREAMS_MAX)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_header_list_size(self.settings.header_bytes_max)
            .auto_date_header(false);
        if !self.settings.keepalive_interval.is_zero() {
            builder
                .keep_alive_interval(self.settings.keepalive_interval)
                .keep_alive_timeout(self.settings.keepalive_timeout);
        }
        let outgoing = socket.outgoing();
        let connection = builder.serve_connection(socket, service);
        self.see_through(connection, &outgoing, |connection| connection.graceful_shutdown()).await
    }

    async fn converse_http1(&self, socket: Socket, peer: SocketAddr) -> hyper::Result<()> {
        let pressure = Pressure::new(REPLY_BYTES_MAX);
        let plain = Rc::clone(&self.plain);
        let service = service_fn(move |mut request: http::Request<Incoming>| {
            request.extensions_mut().insert(Peer(peer));
            let (plain, pressure) = (Rc::clone(&plain), Rc::clone(&pressure));
            async move {
                let passage = Passage::new(&pressure);
                let response = plain(request.map(|body| Inbound::new(body, &passage))).await;
                Ok::<_, Infallible>(response.map(|body| Reply::new(body, passage, None)))
            }
        });
        let outgoing = socket.outgoing();
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(Clock)
            .header_read_timeout(self.settings.handshake_timeout)
            .serve_connection(socket, service);
        self.see_through(connection, &outgoing, |connection| connection.graceful_shutdown()).await
    }

    /// Polls a connection to its end, sends what each poll wrote, and says goodbye once when the core drains.
    async fn see_through<C: Future<Output = hyper::Result<()>>>(
        &self,
        connection: C,
        outgoing: &Outgoing,
        goodbye: impl Fn(Pin<&mut C>),
    ) -> hyper::Result<()> {
        let mut connection = pin!(connection);
        let (mut said, mut ended) = (false, None);
        std::future::poll_fn(|context: &mut Context<'_>| {
            if ended.is_none() && self.phase.get() != Phase::Serving && !std::mem::replace(&mut said, true) {
                goodbye(connection.as_mut());
            }
            outgoing.begin_turn();
            if ended.is_none()
                && let Poll::Ready(result) = connection.as_mut().poll(context)
            {
                ended = Some(result);
            }
            // Pending: woken when the socket takes more. An error: the connection learns of it with its next read.
            let sent = outgoing.poll_send(context);
            if ended.is_some() && sent.is_pending() {
                return Poll::Pending;
            }
            ended.take().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// Takes a connection off the list when its task ends, however it ends.
struct Place<'a> {
    server: &'a Server,
    number: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.server.open.borrow_mut().remove(&self.number);
        self.server.emptied.raise();
    }
}

fn answer(
    grpc: &Handler,
    plain: &Handler,
    pressure: Rc<Pressure>,
    request: http::Request<Incoming>,
) -> impl Future<Output = Result<http::Response<Reply>, Infallible>> + use<> {
    let passage = Passage::new(&pressure);
    let speaks_grpc = request
        .headers()
        .get(http::header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    let mut deadline = if speaks_grpc { deadline::timer(request.headers()) } else { None };
    let handler = if speaks_grpc { grpc } else { plain };
    let call = handler(request.map(|body| Inbound::new(body, &passage)));
    async move {
        let response = deadline::within(&mut deadline, call).await;
        Ok(response.map(|body| Reply::new(body, passage, deadline)))
    }
}

#[cfg(test)]
mod tests;
