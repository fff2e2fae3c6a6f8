//! A closed loop of gRPC calls over HTTP/2, in one thread.
//!
//! A slot is one call in flight: when its answer is complete, its next request goes out. The frames are
//! written and read by hand, many per system call, so that the machine's time goes to the server. Every
//! answer's status is looked at, and its size where the load knows a least one. The client keeps the
//! protocol's duties (settings, pings, both windows) and gives up on a server that breaks them, that
//! refuses streams, or that is silent for too long. It does not know what the requests mean.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::hpack::{Decoder, RequestHeaders};
use crate::wire::Method;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_BYTES_MAX: usize = 16_384;
/// What HTTP/2 gives each side before settings say otherwise.
const WINDOW_DEFAULT: i64 = 65_535;
/// Silence after which a server with calls in flight counts as hanging.
const SILENCE_MAX: Duration = Duration::from_secs(20);

mod frame {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;

    pub const END_STREAM: u8 = 0x1;
    pub const ACK: u8 = 0x1;
    pub const END_HEADERS: u8 = 0x4;
    pub const PADDED: u8 = 0x8;
    pub const PRIORITY: u8 = 0x20;
}

/// A request that a load has written, and what is expected of its answer.
pub struct Request {
    pub method: Method,
    /// The load reads the answer's message.
    pub keep: bool,
    /// An answer of fewer bytes is a failure, whatever its status says.
    pub answer_bytes_min: usize,
}

/// What a load is told about a finished call.
pub struct Answer<'a> {
    pub ok: bool,
    /// The first message without gRPC's prefix, if the request asked to keep it.
    pub message: &'a [u8],
}

/// Makes the requests.
pub trait Load {
    /// Writes the next message of `slot`, gRPC prefix included; `None` ends the slot.
    fn next(&mut self, slot: usize, message: &mut Vec<u8>) -> Option<Request>;
    fn done(&mut self, slot: usize, answer: &Answer<'_>);
}

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub connections: usize,
    pub inflight: usize,
    /// Bytes per second that are taken from the server, if it is to meet a slow reader.
    pub pace: Option<u64>,
}

/// How long a run takes.
#[derive(Debug, Clone, Copy)]
pub enum Span {
    /// Warms up, then counts.
    Time { warm: Duration, count: Duration },
    /// Until the load has no more requests.
    All,
}

/// The moments at which the caller looks at the server's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edge {
    Begin,
    End,
}

/// What a run counted.
#[derive(Debug, Default, Clone)]
pub struct Tally {
    pub operations: u64,
    /// By gRPC status; see `Failure` for the negative ones.
    pub failures: BTreeMap<i64, u64>,
    pub failure_first: Option<String>,
    pub elapsed: Duration,
    /// Of the good answers that came within the span; sorted.
    pub latencies_ns: Vec<u64>,
    pub received_bytes: u64,
    /// CPU time of the client's thread.
    pub client_cpu: Duration,
}

impl Tally {
    /// The latency that `share` of the calls did not exceed.
    pub fn percentile(&self, share: f64) -> Duration {
        let rank = (self.latencies_ns.len() as f64 * share).ceil() as usize;
        let place = rank.clamp(1, self.latencies_ns.len().max(1)) - 1;
        Duration::from_nanos(self.latencies_ns.get(place).copied().unwrap_or(0))
    }

    pub fn failed(&self) -> u64 {
        self.failures.values().sum()
    }
}

/// The statuses of `Tally::failures` that are no gRPC code.
pub struct Failure;

impl Failure {
    pub const NO_STATUS: i64 = -1;
    pub const SHORT: i64 = -2;
    pub const RESET: i64 = -3;
}

/// CPU time of the calling thread.
pub fn thread_cpu() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a whole rusage, which the call fills.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    assert_eq!(result, 0, "getrusage of the own thread cannot fail");
    // SAFETY: zeroed is a valid rusage, and the call succeeded.
    let usage = unsafe { usage.assume_init() };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// One call, for set-up and questions; the error is a sentence.
pub fn call(address: SocketAddr, method: Method, message: &[u8]) -> Result<Vec<u8>, String> {
    struct One<'a> {
        request: Option<(Method, &'a [u8])>,
        answer: Vec<u8>,
    }
    impl Load for One<'_> {
        fn next(&mut self, _slot: usize, out: &mut Vec<u8>) -> Option<Request> {
            let (method, message) = self.request.take()?;
            crate::wire::message(out, |out| out.extend_from_slice(message));
            Some(Request { method, keep: true, answer_bytes_min: 0 })
        }
        fn done(&mut self, _slot: usize, answer: &Answer<'_>) {
            self.answer = answer.message.to_vec();
        }
    }
    let mut one = One { request: Some((method, message)), answer: Vec::new() };
    let shape = Shape { connections: 1, inflight: 1, pace: None };
    let tally = run(address, shape, Span::All, &mut one, &mut |_| {}).map_err(|error| error.to_string())?;
    match tally.failure_first {
        Some(failure) => Err(failure),
        None => Ok(one.answer),
    }
}

/// Runs `load` against the server at `address`.
pub fn run(
    address: SocketAddr,
    shape: Shape,
    span: Span,
    load: &mut dyn Load,
    at_edge: &mut dyn FnMut(Edge),
) -> io::Result<Tally> {
    let mut engine = Engine::connect(address, shape)?;
    engine.run(span, load, at_edge)
}

/// Stream ids are small odd numbers; one multiplication spreads them.
#[derive(Default)]
struct StreamHasher(u64);

impl Hasher for StreamHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("the only keys are u32");
    }
    fn write_u32(&mut self, id: u32) {
        self.0 = u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A call in flight.
struct Call {
    started: Instant,
    keep: bool,
    answer_bytes_min: usize,
    answer_bytes: usize,
    /// Received but not given back to the server's window.
    owed: u32,
    status: Option<u32>,
    failure: Option<String>,
    body: Vec<u8>,
}

struct Engine {
    poll: OwnedFd,
    connections: Vec<Connection>,
    calls: Vec<Option<Call>>,
    shape: Shape,
    windows: Windows,
    /// Bytes that a slow reader may take now, and since when the account stands so.
    budget: (u64, Instant),
    message: Vec<u8>,
}

/// The receive windows of a connection and of each of its streams.
#[derive(Clone, Copy)]
struct Windows {
    connection: u32,
    stream: u32,
}

struct Connection {
    socket: TcpStream,
    headers: RequestHeaders,
    decoder: Decoder,
    input: Vec<u8>,
    input_start: usize,
    input_end: usize,
    output: Vec<u8>,
    output_start: usize,
    /// The poll reports when the socket takes bytes again.
    blocked: bool,
    streams: HashMap<u32, usize, BuildHasherDefault<StreamHasher>>,
    stream_next: u32,
    send_window: i64,
    stream_window: i64,
    /// Requests that the server's window does not take yet: the frames and the size of their data.
    held: VecDeque<(Vec<u8>, i64)>,
    owed: u32,
    /// A stream that received this much gets its window opened again.
    stream_credit: u32,
    /// A header block whose end has not come: stream, END_STREAM, bytes.
    block: Option<(u32, bool, Vec<u8>)>,
    finished: Vec<usize>,
}

fn broken(text: impl Into<String>) -> io::Error {
    io::Error::other(text.into())
}

impl Engine {
    fn connect(address: SocketAddr, shape: Shape) -> io::Result<Self> {
        assert!(shape.connections >= 1 && shape.inflight >= 1, "a load needs a connection and a call");
        let windows = match shape.pace {
            None => Windows { connection: 1 << 28, stream: 1 << 24 },
            // As small as the default of most clients, so that the server feels the pace at once.
            Some(_) => Windows { connection: 1 << 20, stream: 1 << 20 },
        };
        // SAFETY: a plain system call; the result is checked.
        let poll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if poll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let poll = unsafe { OwnedFd::from_raw_fd(poll) };
        let connections = shape.connections.min(shape.inflight);
        let connections =
            (0..connections).map(|_| Connection::open(address, windows)).collect::<io::Result<Vec<_>>>()?;
        let engine = Self {
            poll,
            connections,
            calls: (0..shape.inflight).map(|_| None).collect(),
            shape,
            windows,
            budget: (0, Instant::now()),
            message: Vec::new(),
        };
        for at in 0..engine.connections.len() {
            engine.interest(at, libc::EPOLL_CTL_ADD, false)?;
        }
        Ok(engine)
    }

    fn interest(&self, at: usize, operation: libc::c_int, writable: bool) -> io::Result<()> {
        let events = if writable { libc::EPOLLIN | libc::EPOLLOUT } else { libc::EPOLLIN };
        let mut event = libc::epoll_event { events: events as u32, u64: at as u64 };
        let socket = self.connections[at].socket.as_raw_fd();
        // SAFETY: both descriptors are open and the event outlives the call.
        let result = unsafe { libc::epoll_ctl(self.poll.as_raw_fd(), operation, socket, &mut event) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn run(&mut self, span: Span, load: &mut dyn Load, at_edge: &mut dyn FnMut(Edge)) -> io::Result<Tally> {
        let mut tally = Tally::default();
        let mut counting = matches!(span, Span::All);
        let mut stopped = false;
        let mut origin = Instant::now();
        let mut cpu = thread_cpu();
        let mut heard = origin;
        let mut active = 0;
        if counting {
            at_edge(Edge::Begin);
        }
        for slot in 0..self.shape.inflight {
            active += usize::from(self.issue(slot, Instant::now(), load)?);
        }
        for at in 0..self.connections.len() {
            self.flush(at)?;
        }
        let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; self.connections.len()];
        while active > 0 {
            let mut now = Instant::now();
            let mut wait = SILENCE_MAX.saturating_sub(now - heard);
            if let (Span::Time { warm, count }, false) = (span, stopped) {
                if !counting && now - origin >= warm {
                    at_edge(Edge::Begin);
                    counting = true;
                    tally = Tally::default();
                    cpu = thread_cpu();
                    origin = Instant::now();
                    // Nobody read answers meanwhile; that is not the server's time.
                    for call in self.calls.iter_mut().flatten() {
                        call.started += origin - now;
                    }
                    now = origin;
                } else if counting && now - origin >= count {
                    tally.elapsed = now - origin;
                    tally.client_cpu = thread_cpu() - cpu;
                    at_edge(Edge::End);
                    stopped = true;
                    heard = Instant::now();
                    continue;
                }
                let edge = if counting { count } else { warm };
                wait = wait.min(edge.saturating_sub(now - origin) + Duration::from_micros(500));
            }
            if self.shape.pace.is_some() {
                self.refill();
                wait = wait.min(Duration::from_millis(5));
            }
            // SAFETY: the array is as long as it says and lives through the call.
            let ready = unsafe {
                libc::epoll_wait(
                    self.poll.as_raw_fd(),
                    events.as_mut_ptr(),
                    events.len() as i32,
                    wait.as_millis() as i32,
                )
            };
            if ready < 0 {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return Err(error);
            }
            if ready == 0 && heard.elapsed() >= SILENCE_MAX && self.shape.pace.is_none() {
                return Err(broken(format!("silent for {SILENCE_MAX:?} with {active} calls in flight")));
            }
            for event in events.iter().take(ready as usize) {
                let at = event.u64 as usize;
                let connection = &mut self.connections[at];
                let received = connection.receive(&mut self.calls)?;
                let now = Instant::now();
                if received > 0 {
                    heard = now;
                }
                if counting && !stopped {
                    tally.received_bytes += received as u64;
                }
                let finished = std::mem::take(&mut connection.finished);
                for &slot in &finished {
                    let call = self.calls[slot].take().expect("a finished call was in flight");
                    let verdict = call.verdict();
                    let answer =
                        Answer { ok: verdict.is_ok(), message: call.body.get(5..).unwrap_or_default() };
                    load.done(slot, &answer);
                    if counting && !stopped {
                        match verdict {
                            Ok(()) => {
                                tally.operations += 1;
                                tally.latencies_ns.push((now - call.started).as_nanos() as u64);
                            }
                            Err((status, text)) => {
                                *tally.failures.entry(status).or_default() += 1;
                                tally.failure_first.get_or_insert(text);
                            }
                        }
                    }
                    if stopped || !self.issue(slot, now, load)? {
                        active -= 1;
                    }
                }
                let mut finished = finished;
                finished.clear();
                self.connections[at].finished = finished;
                self.give_back(at);
                self.flush(at)?;
            }
            if self.shape.pace.is_some() {
                for at in 0..self.connections.len() {
                    self.give_back(at);
                    self.flush(at)?;
                }
            }
        }
        if matches!(span, Span::All) {
            tally.elapsed = origin.elapsed();
            tally.client_cpu = thread_cpu() - cpu;
            at_edge(Edge::End);
        }
        tally.latencies_ns.sort_unstable();
        Ok(tally)
    }

    /// Puts the slot's next request into its connection's output; false if there is none.
    fn issue(&mut self, slot: usize, now: Instant, load: &mut dyn Load) -> io::Result<bool> {
        self.message.clear();
        let Some(request) = load.next(slot, &mut self.message) else { return Ok(false) };
        let count = self.connections.len();
        let connection = &mut self.connections[slot % count];
        self.calls[slot] = Some(Call {
            started: now,
            keep: request.keep,
            answer_bytes_min: request.answer_bytes_min,
            answer_bytes: 0,
            owed: 0,
            status: None,
            failure: None,
            body: Vec::new(),
        });
        connection.request(slot, request.method, &self.message)?;
        Ok(true)
    }

    fn flush(&mut self, at: usize) -> io::Result<()> {
        let was = self.connections[at].blocked;
        self.connections[at].flush()?;
        let is = self.connections[at].blocked;
        if was != is {
            self.interest(at, libc::EPOLL_CTL_MOD, is)?;
        }
        Ok(())
    }

    fn refill(&mut self) {
        let Some(pace) = self.shape.pace else { return };
        let now = Instant::now();
        let earned = (now - self.budget.1).as_secs_f64() * pace as f64;
        // What was not taken within a tenth of a second is lost: the reader is slow, not bursty.
        self.budget = ((self.budget.0 + earned as u64).min(pace / 10), now);
    }

    /// Opens the windows again by what was read.
    fn give_back(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        let mut allowance = match self.shape.pace {
            None => u64::MAX,
            Some(_) => self.budget.0,
        };
        let before = allowance;
        let share = if self.shape.pace.is_some() { 64 } else { 2 };
        if connection.owed >= self.windows.connection / share {
            let credit = u64::from(connection.owed).min(allowance) as u32;
            // A credit of zero is an error in HTTP/2.
            if credit > 0 {
                connection.owed -= credit;
                allowance -= u64::from(credit);
                window_update(&mut connection.output, 0, credit);
            }
        }
        if self.shape.pace.is_some() {
            self.budget.0 -= before - allowance;
        }
    }
}

impl Call {
    fn verdict(&self) -> Result<(), (i64, String)> {
        if let Some(failure) = &self.failure {
            return Err((self.status.map_or(Failure::RESET, i64::from), failure.clone()));
        }
        match self.status {
            Some(0) if self.answer_bytes >= self.answer_bytes_min.max(5) => Ok(()),
            Some(0) => Err((
                Failure::SHORT,
                format!(
                    "an answer of {} bytes, at least {} expected",
                    self.answer_bytes, self.answer_bytes_min
                ),
            )),
            Some(status) => Err((i64::from(status), format!("gRPC status {status}"))),
            None => Err((Failure::NO_STATUS, "the stream ended without a gRPC status".into())),
        }
    }
}

impl Connection {
    fn open(address: SocketAddr, windows: Windows) -> io::Result<Self> {
        let socket = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        socket.set_nodelay(true)?;
        let mut output = PREFACE.to_vec();
        // No push, and the window of a stream.
        frame(&mut output, frame::SETTINGS, 0, 0, 12);
        output.extend_from_slice(&[0, 2, 0, 0, 0, 0, 0, 4]);
        output.extend_from_slice(&windows.stream.to_be_bytes());
        window_update(&mut output, 0, windows.connection - WINDOW_DEFAULT as u32);
        let mut connection = Self {
            socket,
            headers: RequestHeaders::new(address.to_string()),
            decoder: Decoder::new(),
            input: vec![0; 1 << 18],
            input_start: 0,
            input_end: 0,
            output,
            output_start: 0,
            blocked: false,
            streams: HashMap::default(),
            stream_next: 1,
            send_window: WINDOW_DEFAULT,
            stream_window: WINDOW_DEFAULT,
            held: VecDeque::new(),
            owed: 0,
            stream_credit: windows.stream / 4,
            block: None,
            finished: Vec::new(),
        };
        // Waits for the server's settings, so that no request has to guess them.
        connection.socket.set_read_timeout(Some(Duration::from_secs(5)))?;
        connection.flush()?;
        let mut settled = false;
        while !settled {
            if connection.fill()? == 0 {
                return Err(broken("no HTTP/2 settings within 5 s"));
            }
            settled = connection.peek_type() == Some(frame::SETTINGS);
            if !settled && connection.peek_type().is_some() {
                return Err(broken("the first frame is not SETTINGS: no HTTP/2 server"));
            }
        }
        connection.parse(&mut [])?;
        connection.flush()?;
        connection.socket.set_nonblocking(true)?;
        Ok(connection)
    }

    /// The type of the first frame, if all of it is there.
    fn peek_type(&self) -> Option<u8> {
        let input = &self.input[self.input_start..self.input_end];
        (input.len() >= 9 && input.len() >= 9 + length(input)).then(|| input[3])
    }

    fn request(&mut self, slot: usize, method: Method, message: &[u8]) -> io::Result<()> {
        let size = message.len() as i64;
        if size > self.stream_window.min(WINDOW_DEFAULT) {
            return Err(broken(format!("a request of {size} bytes does not fit the server's stream window")));
        }
        let id = self.stream_next;
        self.stream_next += 2;
        self.streams.insert(id, slot);
        let fits = self.held.is_empty() && size <= self.send_window;
        let mut apart = Vec::new();
        let out = if fits { &mut self.output } else { &mut apart };
        let start = out.len();
        frame(out, frame::HEADERS, frame::END_HEADERS, id, 0);
        self.headers.block(method, out);
        let block = out.len() - start - 9;
        out[start..start + 3].copy_from_slice(&(block as u32).to_be_bytes()[1..]);
        let mut rest = message;
        loop {
            let (data, after) = rest.split_at(rest.len().min(FRAME_BYTES_MAX));
            rest = after;
            let flags = if rest.is_empty() { frame::END_STREAM } else { 0 };
            frame(out, frame::DATA, flags, id, data.len());
            out.extend_from_slice(data);
            if rest.is_empty() {
                break;
            }
        }
        if fits {
            self.send_window -= size;
        } else {
            self.held.push_back((apart, size));
        }
        Ok(())
    }

    fn release_held(&mut self) {
        while let Some((_, size)) = self.held.front()
            && *size <= self.send_window
        {
            let (frames, size) = self.held.pop_front().expect("looked at just now");
            self.send_window -= size;
            self.output.extend_from_slice(&frames);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.output_start < self.output.len() {
            match self.socket.write(&self.output[self.output_start..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => self.output_start += written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.output_start = 0;
        self.blocked = false;
        Ok(())
    }

    /// Reads what is there, once; the length is zero where nothing is.
    fn fill(&mut self) -> io::Result<usize> {
        if self.input_start > 0 {
            self.input.copy_within(self.input_start..self.input_end, 0);
            self.input_end -= self.input_start;
            self.input_start = 0;
        }
        loop {
            return match self.socket.read(&mut self.input[self.input_end..]) {
                Ok(0) => Err(broken("the server closed the connection")),
                Ok(received) => {
                    self.input_end += received;
                    Ok(received)
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
        }
    }

    fn receive(&mut self, calls: &mut [Option<Call>]) -> io::Result<usize> {
        let received = self.fill()?;
        if received > 0 {
            self.parse(calls)?;
        }
        Ok(received)
    }

    fn parse(&mut self, calls: &mut [Option<Call>]) -> io::Result<()> {
        // The buffer is out of the way while its frames change the rest of the connection.
        let input = std::mem::take(&mut self.input);
        let mut start = self.input_start;
        let outcome = loop {
            let rest = &input[start..self.input_end];
            if rest.len() < 9 {
                break Ok(());
            }
            let size = length(rest);
            if size > FRAME_BYTES_MAX {
                break Err(broken(format!("a frame of {size} bytes, more than was allowed")));
            }
            if rest.len() < 9 + size {
                break Ok(());
            }
            let id = u32::from_be_bytes([rest[5], rest[6], rest[7], rest[8]]) & 0x7fff_ffff;
            if let Err(error) = self.frame(rest[3], rest[4], id, &rest[9..9 + size], calls) {
                break Err(error);
            }
            start += 9 + size;
        };
        self.input_start = start;
        self.input = input;
        outcome
    }

    fn frame(
        &mut self,
        kind: u8,
        flags: u8,
        id: u32,
        mut payload: &[u8],
        calls: &mut [Option<Call>],
    ) -> io::Result<()> {
        let short = || broken("a frame shorter than its type allows");
        let whole = payload.len() as u32;
        if flags & frame::PADDED != 0 && (kind == frame::DATA || kind == frame::HEADERS) {
            let (&padding, rest) = payload.split_first().ok_or_else(short)?;
            payload = rest.get(..rest.len() - usize::from(padding)).ok_or_else(short)?;
        }
        match kind {
            frame::DATA => {
                self.owed += whole;
                if let Some(&slot) = self.streams.get(&id) {
                    let call = calls[slot].as_mut().expect("a stream belongs to a call");
                    call.owed += whole;
                    call.answer_bytes += payload.len();
                    if call.keep {
                        call.body.extend_from_slice(payload);
                    }
                    if flags & frame::END_STREAM != 0 {
                        self.finish(id);
                    } else if call.owed >= self.stream_credit {
                        // At once even for a slow reader: the connection's window is what it holds back.
                        window_update(&mut self.output, id, call.owed);
                        call.owed = 0;
                    }
                }
            }
            frame::HEADERS => {
                if flags & frame::PRIORITY != 0 {
                    payload = payload.get(5..).ok_or_else(short)?;
                }
                let end = flags & frame::END_STREAM != 0;
                if flags & frame::END_HEADERS == 0 {
                    self.block = Some((id, end, payload.to_vec()));
                } else {
                    self.fields(id, end, payload, calls)?;
                }
            }
            frame::CONTINUATION => {
                let Some((at, end, mut block)) = self.block.take().filter(|(at, ..)| *at == id) else {
                    return Err(broken("a CONTINUATION that continues nothing"));
                };
                block.extend_from_slice(payload);
                if flags & frame::END_HEADERS == 0 {
                    self.block = Some((at, end, block));
                } else {
                    self.fields(at, end, &block, calls)?;
                }
            }
            frame::RST_STREAM => {
                if let Some(&slot) = self.streams.get(&id) {
                    let code = payload.try_into().map(u32::from_be_bytes).map_err(|_| short())?;
                    let call = calls[slot].as_mut().expect("a stream belongs to a call");
                    // A reset without error after the status only says that the rest of the request is not needed.
                    if code != 0 || call.status.is_none() {
                        call.failure = Some(format!("the stream was reset with code {code}"));
                    }
                    self.finish(id);
                }
            }
            frame::SETTINGS if flags & frame::ACK == 0 => {
                self.settings(payload)?;
                frame(&mut self.output, frame::SETTINGS, frame::ACK, 0, 0);
            }
            frame::PING if flags & frame::ACK == 0 => {
                frame(&mut self.output, frame::PING, frame::ACK, 0, payload.len());
                self.output.extend_from_slice(payload);
            }
            frame::GOAWAY => {
                let text = String::from_utf8_lossy(payload.get(8..).unwrap_or_default()).into_owned();
                return Err(broken(format!("the server ends the connection: {text:?}")));
            }
            frame::WINDOW_UPDATE => {
                let credit = payload.try_into().map(u32::from_be_bytes).map_err(|_| short())?;
                // A stream's own window never runs out: no request is longer than its first value.
                if id == 0 {
                    self.send_window += i64::from(credit & 0x7fff_ffff);
                    self.release_held();
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn settings(&mut self, payload: &[u8]) -> io::Result<()> {
        for setting in payload.chunks_exact(6) {
            let value = u32::from_be_bytes([setting[2], setting[3], setting[4], setting[5]]);
            match (setting[0], setting[1]) {
                (0, 1) if (value as usize) < crate::hpack::TABLE_BYTES => {
                    return Err(broken(format!("the server allows a header table of {value} bytes only")));
                }
                (0, 4) => self.stream_window = i64::from(value),
                _ => {}
            }
        }
        Ok(())
    }

    fn fields(&mut self, id: u32, end: bool, block: &[u8], calls: &mut [Option<Call>]) -> io::Result<()> {
        let fields =
            self.decoder.block(block).ok_or_else(|| broken("a header block that cannot be understood"))?;
        let Some(&slot) = self.streams.get(&id) else { return Ok(()) };
        let call = calls[slot].as_mut().expect("a stream belongs to a call");
        if let Some(status) = fields.grpc_status {
            call.status = Some(status);
            if status != 0 {
                let text = fields.grpc_message.as_deref().unwrap_or("no message");
                call.failure = Some(format!("gRPC status {status}: {text}"));
            }
        }
        if let Some(status) = fields.http_status.filter(|status| *status != 200) {
            call.failure = Some(format!("HTTP status {status}"));
        }
        if end {
            self.finish(id);
        }
        Ok(())
    }

    fn finish(&mut self, id: u32) {
        if let Some(slot) = self.streams.remove(&id) {
            self.finished.push(slot);
        }
    }
}

fn length(frame: &[u8]) -> usize {
    u32::from_be_bytes([0, frame[0], frame[1], frame[2]]) as usize
}

/// The nine bytes before each frame's payload.
fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, length: usize) {
    out.extend_from_slice(&(length as u32).to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
}

fn window_update(out: &mut Vec<u8>, stream: u32, credit: u32) {
    frame(out, frame::WINDOW_UPDATE, 0, stream, 4);
    out.extend_from_slice(&credit.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    /// Trailers that say `grpc-status: N`, as a literal that is not kept.
    fn status(code: &str) -> Vec<u8> {
        let mut block = vec![0, 11];
        block.extend_from_slice(b"grpc-status");
        block.push(code.len() as u8);
        block.extend_from_slice(code.as_bytes());
        block
    }

    fn put(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        frame(out, kind, flags, stream, payload.len());
        out.extend_from_slice(payload);
    }

    /// A server of one connection: `answer` is given every frame and writes what comes back.
    fn server(
        mut answer: impl FnMut(u8, u8, u32, &[u8], &mut Vec<u8>) + Send + 'static,
    ) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let thread = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut preface = [0; PREFACE.len()];
            socket.read_exact(&mut preface).unwrap();
            assert_eq!(preface, PREFACE);
            let mut out = Vec::new();
            put(&mut out, frame::SETTINGS, 0, 0, &[]);
            socket.write_all(&out).unwrap();
            let mut head = [0; 9];
            while socket.read_exact(&mut head).is_ok() {
                let mut payload = vec![0; length(&head)];
                socket.read_exact(&mut payload).unwrap();
                let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                out.clear();
                answer(head[3], head[4], id, &payload, &mut out);
                if socket.write_all(&out).is_err() {
                    return;
                }
            }
        });
        (address, thread)
    }

    /// So many requests of so many bytes.
    struct Plain {
        left: usize,
        bytes: usize,
    }

    impl Load for Plain {
        fn next(&mut self, _slot: usize, message: &mut Vec<u8>) -> Option<Request> {
            self.left = self.left.checked_sub(1)?;
            crate::wire::message(message, |out| out.resize(out.len() + self.bytes, 0));
            Some(Request { method: Method::Range, keep: false, answer_bytes_min: 8 })
        }
        fn done(&mut self, _slot: usize, _answer: &Answer<'_>) {}
    }

    fn tally(address: SocketAddr, inflight: usize, mut load: Plain) -> io::Result<Tally> {
        run(address, Shape { connections: 1, inflight, pace: None }, Span::All, &mut load, &mut |_| {})
    }

    #[test]
    fn every_way_in_which_an_answer_is_no_success_is_counted() {
        let (address, thread) = server(|kind, flags, id, _, out| {
            if kind != frame::DATA || flags & frame::END_STREAM == 0 {
                return;
            }
            let end = frame::END_HEADERS | frame::END_STREAM;
            let message = [0, 0, 0, 0, 3, 1, 2, 3];
            match id {
                // A good answer whose data and trailers come in pieces.
                1 => {
                    put(out, frame::HEADERS, frame::END_HEADERS, id, &[0x88]);
                    put(out, frame::DATA, 0, id, &message[..6]);
                    put(out, frame::DATA, frame::PADDED, id, &[1, 2, 3, 0]);
                    put(out, frame::HEADERS, frame::END_STREAM, id, &status("0")[..4]);
                    put(out, frame::CONTINUATION, frame::END_HEADERS, id, &status("0")[4..]);
                }
                // Trailers only.
                3 => put(out, frame::HEADERS, end, id, &[&[0x88], &status("14")[..]].concat()),
                // Success without a message.
                5 => put(out, frame::HEADERS, end, id, &[&[0x88], &status("0")[..]].concat()),
                7 => put(out, frame::RST_STREAM, 0, id, &[0, 0, 0, 2]),
                // No gRPC at all.
                9 => put(out, frame::HEADERS, end, id, &[0x8d]),
                _ => {
                    put(out, frame::HEADERS, frame::END_HEADERS, id, &[0x88]);
                    put(out, frame::DATA, frame::END_STREAM, id, &message);
                }
            }
        });
        let tally = tally(address, 1, Plain { left: 6, bytes: 10 }).unwrap();
        thread.join().unwrap();
        assert_eq!(tally.operations, 1);
        let expected = [(14, 1), (Failure::SHORT, 1), (Failure::RESET, 2), (Failure::NO_STATUS, 1)];
        assert_eq!(tally.failures, BTreeMap::from(expected));
        assert_eq!(tally.failure_first.as_deref(), Some("gRPC status 14: no message"));
    }

    #[test]
    fn requests_wait_for_the_servers_window_and_go_out_in_order() {
        let mut owed = 0;
        let mut last = 0;
        let mut open = Vec::new();
        let (address, thread) = server(move |kind, flags, id, payload, out| {
            match kind {
                frame::HEADERS => {
                    assert!(id > last, "stream {id} after stream {last}");
                    last = id;
                }
                frame::DATA => owed += payload.len() as u32,
                _ => {}
            }
            assert!(owed <= WINDOW_DEFAULT as u32, "more than the window allows");
            if kind == frame::DATA && flags & frame::END_STREAM != 0 {
                open.push(id);
            }
            // Three requests of 20 kB fit; the fourth must wait for this.
            if open.len() == 3 {
                window_update(out, 0, owed);
                owed = 0;
                for id in open.drain(..) {
                    put(out, frame::HEADERS, frame::END_HEADERS, id, &[0x88]);
                    put(out, frame::DATA, 0, id, &[0, 0, 0, 0, 3, 1, 2, 3]);
                    put(out, frame::HEADERS, frame::END_HEADERS | frame::END_STREAM, id, &status("0"));
                }
            }
        });
        let tally = tally(address, 12, Plain { left: 60, bytes: 20_000 }).unwrap();
        thread.join().unwrap();
        assert_eq!((tally.operations, tally.failed()), (60, 0));
    }

    #[test]
    fn a_server_that_goes_away_is_an_error_and_no_result() {
        let (address, thread) = server(|kind, _, _, _, out| {
            if kind == frame::DATA {
                put(out, frame::GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\x0bcalm down");
            }
        });
        let error = tally(address, 4, Plain { left: 100, bytes: 10 }).unwrap_err();
        thread.join().unwrap();
        assert!(error.to_string().contains("calm down"), "{error}");
    }
}
