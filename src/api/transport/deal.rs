//! Accepting connections, in one place, and dealing each to the core that has the fewest.
//!
//! The port is bound without SO_REUSEPORT: a second server on it must fail, not take half of the clients. The
//! accept thread hands a bare socket over; only the core that serves it makes it part of its executor.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::model::Fault;
use crate::runtime::mailbox::{Receiver, Sender, mailbox};

/// Connections that may wait for a core to take them; beyond that they wait in the kernel's backlog or are closed.
const ARRIVALS_MAX: usize = 1024;
/// How long to wait when the system refuses to accept (no file left, no memory): trying at once would spin.
const REFUSED_PAUSE: Duration = Duration::from_millis(10);
const BACKLOG: i32 = 4096;

/// An accepted connection on its way to its core. Counts as the core's until it is dropped.
pub struct Connection {
    pub(super) socket: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) seat: Seat,
}

/// One connection in the count of a core.
pub(super) struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where a core receives its connections.
pub type Arrivals = Receiver<Connection>;

/// Knows how many connections each core has.
#[derive(Clone)]
pub struct Dealer {
    doors: Arc<[Door]>,
}

struct Door {
    sender: Sender<Connection>,
    taken: Arc<AtomicUsize>,
}

impl Dealer {
    /// A dealer for this many cores, and each one's arrivals.
    pub fn new(cores: usize) -> (Dealer, Vec<Arrivals>) {
        let (doors, arrivals): (Vec<_>, Vec<_>) = (0..cores)
            .map(|_| {
                let (sender, arrivals) = mailbox(ARRIVALS_MAX);
                (Door { sender, taken: Arc::new(AtomicUsize::new(0)) }, arrivals)
            })
            .unzip();
        (Dealer { doors: doors.into() }, arrivals)
    }

    /// Connections by core; for the metrics.
    pub fn taken(&self) -> Vec<usize> {
        self.doors.iter().map(|door| door.taken.load(Ordering::Relaxed)).collect()
    }

    /// Accepts on a thread of its own until the returned handle is dropped.
    pub fn listen(&self, listener: TcpListener) -> Result<Acceptor, Fault> {
        let stop = Arc::new(AtomicBool::new(false));
        let (dealer, stopped) = (self.clone(), Arc::clone(&stop));
        let listener = Arc::new(listener);
        let accepting = Arc::clone(&listener);
        let thread = std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || accept(&accepting, &dealer, &stopped))
            .map_err(|source| Fault::io("thread accept", "start", source))?;
        Ok(Acceptor { stop, listener, thread: Some(thread) })
    }

    fn deal(&self, socket: TcpStream, peer: SocketAddr) {
        let door = self
            .doors
            .iter()
            .min_by_key(|door| door.taken.load(Ordering::Relaxed))
            .expect("there is at least one core");
        door.taken.fetch_add(1, Ordering::Relaxed);
        let seat = Seat(Arc::clone(&door.taken));
        // The door with the fewest connections is full only when its core has stopped taking any.
        if door.sender.send(Connection { socket, peer, seat }).is_err() {
            tracing::warn!(%peer, "connection closed: the core takes no more");
        }
    }
}

/// Binds a listener; says so clearly when the address is taken.
pub fn bind(address: SocketAddr) -> Result<TcpListener, Fault> {
    let listener = TcpListener::bind(address).map_err(|error| {
        let (cause, remedy) = match error.kind() {
            io::ErrorKind::AddrInUse => (
                "address already in use".to_owned(),
                "another process listens there: stop it or choose another --listen-client-urls",
            ),
            io::ErrorKind::PermissionDenied => {
                (error.to_string(), "ports below 1024 need CAP_NET_BIND_SERVICE")
            }
            _ => (error.to_string(), "check --listen-client-urls"),
        };
        Fault::Refused(format!("listen tcp {address}: bind: {cause}; {remedy}"))
    })?;
    // SAFETY: the descriptor is open. A longer backlog than std's; a refusal leaves std's.
    unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) };
    Ok(listener)
}

/// The accept thread of one listener; closes the listener when dropped.
pub struct Acceptor {
    stop: Arc<AtomicBool>,
    listener: Arc<TcpListener>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // SAFETY: the descriptor is open as long as `listener`. Linux wakes a blocked `accept` by this.
            unsafe { libc::shutdown(self.listener.as_raw_fd(), libc::SHUT_RDWR) };
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, dealer: &Dealer, stop: &AtomicBool) {
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::Acquire) {
            return;
        }
        match accepted {
            Ok((socket, peer)) => {
                // Answers are small and already gathered; waiting for more would only delay them.
                let _ = socket.set_nodelay(true);
                dealer.deal(socket, peer);
            }
            // The client went away while it waited.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::park_timeout(REFUSED_PAUSE);
            }
        }
    }
}
