//! Full load on the runtime for a while: no call may take longer than a second.
//!
//! `cargo test --release --test soak -- SECONDS [CONNECTIONS] [IN_FLIGHT] [hop|echo]`
//!
//! Puts over real connections; with `hop` (the default) each one crosses to another core, there to a log thread
//! and back, and home again: mailbox, wake from a core, wake from a thread, answer. With `echo` the service answers
//! at once: the cost of HTTP/2 and protobuf alone. Prints latencies, CPU of the server's threads per million calls,
//! and how often the watchdog had to wake an executor. The library under the executors can sleep with work at hand
//! (see `runtime/watchdog.rs`); this is what shows whether the watchdog copes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use etcore::api::transport::deal::{Arrivals, Dealer, bind};
use etcore::api::transport::{Handler, Server, Settings};
use etcore::proto::etcdserverpb::kv_server::{Kv, KvServer};
use etcore::proto::etcdserverpb::{
    CompactionRequest, CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, PutRequest, PutResponse,
    RangeRequest, RangeResponse, RangeStreamResponse, TxnRequest, TxnResponse,
};
use etcore::runtime::executor::{Cores, Main, OnCore, Options, Signal, cpus_allowed, spawn};
use etcore::runtime::mailbox::{Outbox, Receiver, Sender, mailbox};
use etcore::runtime::worker::{Crew, Desk, Turns};
use futures::channel::oneshot;
use futures::stream::BoxStream;
use prost::Message as _;
use tonic::codegen::Service as _;
use tonic::{Request, Response, Status};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const STALL: Duration = Duration::from_secs(1);

enum Message {
    /// A call that came over `from`.
    Ask {
        from: usize,
        call: u64,
        value: Bytes,
    },
    /// The log thread is done with these.
    Logged(Vec<(usize, u64, Bytes)>),
    Answer {
        call: u64,
        value: Bytes,
    },
    Stop,
}

/// One core: what came over its connections waits in `calls`.
struct Core {
    number: usize,
    calls: RefCell<BTreeMap<u64, oneshot::Sender<Bytes>>>,
    call_next: Cell<u64>,
    outboxes: RefCell<Vec<Outbox<Message>>>,
    pushed: Signal,
}

impl Core {
    fn ask(&self, value: Bytes) -> oneshot::Receiver<Bytes> {
        let (answer, answered) = oneshot::channel();
        let call = self.call_next.replace(self.call_next.get() + 1);
        self.calls.borrow_mut().insert(call, answer);
        let target = (self.number + 1) % self.outboxes.borrow().len();
        self.push(target, Message::Ask { from: self.number, call, value });
        answered
    }

    fn push(&self, target: usize, message: Message) {
        self.outboxes.borrow_mut()[target].push(message);
        self.pushed.raise();
    }

    /// Turns until it is told to stop.
    async fn run(&self, mut receiver: Receiver<Message>, own: Sender<Message>, log: Desk) {
        let mut batch = Vec::new();
        loop {
            std::future::poll_fn(|context| self.poll_turn(context, &mut receiver, &mut batch)).await;
            let mut asked = Vec::new();
            for message in batch.drain(..) {
                match message {
                    Message::Ask { from, call, value } => asked.push((from, call, value)),
                    Message::Logged(asked) => {
                        for (from, call, value) in asked {
                            self.push(from, Message::Answer { call, value });
                        }
                    }
                    Message::Answer { call, value } => {
                        if let Some(answer) = self.calls.borrow_mut().remove(&call) {
                            let _ = answer.send(value);
                        }
                    }
                    Message::Stop => return,
                }
            }
            if !asked.is_empty() {
                let own = own.clone();
                let job = Box::new(move || assert!(own.send(Message::Logged(asked)).is_ok(), "mailbox full"));
                assert!(log.submit(job).is_ok(), "the log thread is behind");
            }
        }
    }

    /// Ready when there is something to do; sends what the last turn left.
    fn poll_turn(
        &self,
        context: &mut Context<'_>,
        receiver: &mut Receiver<Message>,
        batch: &mut Vec<Message>,
    ) -> Poll<()> {
        while self.pushed.poll(context).is_ready() {}
        for outbox in &mut *self.outboxes.borrow_mut() {
            // Pending: the task is woken when there is room.
            let _ = outbox.poll_flush(context);
        }
        receiver.poll_batch(context, batch).map(|_| ())
    }
}

/// Tonic asks for `Send`; the value never leaves its core.
struct Echo {
    core: OnCore<Rc<Core>>,
    hop: bool,
}

#[tonic::async_trait]
impl Kv for Echo {
    type RangeStreamStream = BoxStream<'static, Result<RangeStreamResponse, Status>>;

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutResponse>, Status> {
        let value = request.into_inner().value;
        if self.hop {
            let answered = self.core.ask(value);
            answered.await.map_err(|_| Status::unavailable("the core has ended"))?;
        }
        Ok(Response::new(PutResponse::default()))
    }

    async fn range(&self, _: Request<RangeRequest>) -> Result<Response<RangeResponse>, Status> {
        Err(Status::unimplemented("puts only"))
    }

    async fn range_stream(
        &self,
        _: Request<RangeRequest>,
    ) -> Result<Response<Self::RangeStreamStream>, Status> {
        Err(Status::unimplemented("puts only"))
    }

    async fn delete_range(
        &self,
        _: Request<DeleteRangeRequest>,
    ) -> Result<Response<DeleteRangeResponse>, Status> {
        Err(Status::unimplemented("puts only"))
    }

    async fn txn(&self, _: Request<TxnRequest>) -> Result<Response<TxnResponse>, Status> {
        Err(Status::unimplemented("puts only"))
    }

    async fn compact(&self, _: Request<CompactionRequest>) -> Result<Response<CompactionResponse>, Status> {
        Err(Status::unimplemented("puts only"))
    }
}

async fn serve(
    core: Rc<Core>,
    receiver: Receiver<Message>,
    own: Sender<Message>,
    arrivals: Arrivals,
    log: Desk,
    hop: bool,
) {
    let service = KvServer::new(Echo { core: OnCore::new(Rc::clone(&core)), hop });
    let grpc: Handler = Rc::new(move |request| {
        let call = service.clone().call(request);
        Box::pin(async move {
            let Ok(response) = call.await;
            response
        })
    });
    let plain: Handler = Rc::new(|_| Box::pin(std::future::ready(http::Response::default())));
    let server = Server::new(Settings::default(), grpc, plain);
    spawn(Rc::clone(&server).run(arrivals));
    core.run(receiver, own, log).await;
    server.drain(Duration::ZERO).await;
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let number = |at: usize, default| arguments.get(at).map_or(default, |word| word.parse().unwrap());
    let (seconds, connections, in_flight) = (number(0, 30), number(1, 8) as usize, number(2, 512) as usize);
    let hop = arguments.get(3).is_none_or(|word| word == "hop");

    let cpus = cpus_allowed().unwrap();
    let cpus: Vec<_> = (0..cpus.len().max(2)).map(|core| cpus[core % cpus.len()]).collect();
    let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let (dealer, arrivals) = Dealer::new(cpus.len());
    let (senders, receivers): (Vec<_>, Vec<_>) = cpus.iter().map(|_| mailbox::<Message>(8192)).unzip();
    let logs: Vec<_> = (0..cpus.len())
        .map(|core| Crew::start(&format!("log{core}"), 1, Turns::LOG, 8192, |_| {}).unwrap())
        .collect();
    let mains =
        arrivals.into_iter().zip(receivers).enumerate().map(|(number, (arrivals, receiver))| -> Main {
            let (senders, log) = (senders.clone(), logs[number].desk());
            Box::new(move || {
                let core = Rc::new(Core {
                    number,
                    calls: RefCell::default(),
                    call_next: Cell::new(0),
                    outboxes: RefCell::new(senders.iter().cloned().map(Outbox::new).collect()),
                    pushed: Signal::default(),
                });
                let own = senders[number].clone();
                Box::pin(serve(core, receiver, own, arrivals, log, hop))
            })
        });
    let cores = Cores::start(&cpus, &Options::default(), mains.collect(), |_, _| {}).unwrap();
    let pokes = cores.pokes();
    let acceptor = dealer.listen(listener).unwrap();

    let done = Arc::new(AtomicU64::new(0));
    let (before, pokes_before) = (server_cpu(), pokes.load(Ordering::Relaxed));
    let began = Instant::now();
    let client = {
        let done = Arc::clone(&done);
        std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(load(
                address,
                connections,
                in_flight,
                Duration::from_secs(seconds),
                done,
            ))
        })
    };
    let mut seen = 0;
    let mut moved = Instant::now();
    while !client.is_finished() {
        std::thread::park_timeout(Duration::from_millis(100));
        let now = done.load(Ordering::Relaxed);
        if std::mem::replace(&mut seen, now) != now {
            moved = Instant::now();
        }
        assert!(moved.elapsed() < 3 * STALL, "no call was answered for {:?}, {now} before", moved.elapsed());
    }
    let mut latencies = client.join().unwrap();
    let elapsed = began.elapsed().as_secs_f64();
    let cpu = (server_cpu() - before).as_secs_f64();
    latencies.sort_unstable();
    let calls = latencies.len();
    let at = |share: f64| f64::from(latencies[((calls - 1) as f64 * share) as usize]) / 1000.0;
    println!(
        "{calls} calls in {elapsed:.1} s: {:.0}/s, server CPU {:.1} s per million; \
         p50 {:.2} p99 {:.2} p99.9 {:.2} worst {:.1} ms; {} pokes",
        calls as f64 / elapsed,
        cpu / calls as f64 * 1e6,
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
        pokes.load(Ordering::Relaxed) - pokes_before,
    );
    drop(acceptor);
    for sender in &senders {
        assert!(sender.send(Message::Stop).is_ok(), "a core has ended");
    }
    cores.join().unwrap();
    assert!(u128::from(*latencies.last().unwrap()) < STALL.as_micros(), "a call stalled");
}

/// Keeps `in_flight` puts under way and returns what each took, in µs.
async fn load(
    address: SocketAddr,
    connections: usize,
    in_flight: usize,
    duration: Duration,
    done: Arc<AtomicU64>,
) -> Vec<u32> {
    let put = PutRequest { key: vec![b'k'; 24].into(), value: vec![b'v'; 256].into(), ..Default::default() };
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(put.encoded_len() as u32);
    put.encode(&mut frame).unwrap();
    let frame = frame.freeze();
    let end = Instant::now() + duration;
    let mut tasks = Vec::new();
    for _ in 0..connections {
        let socket = tokio::net::TcpStream::connect(address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        let (requests, connection) = h2::client::handshake(socket).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..in_flight / connections {
            let (requests, frame, done) = (requests.clone(), frame.clone(), Arc::clone(&done));
            tasks.push(tokio::spawn(async move {
                let mut latencies = Vec::new();
                while Instant::now() < end {
                    let began = Instant::now();
                    one(&requests, frame.clone()).await;
                    latencies.push(began.elapsed().as_micros() as u32);
                    done.fetch_add(1, Ordering::Relaxed);
                }
                latencies
            }));
        }
    }
    let mut latencies = Vec::new();
    for task in tasks {
        let limit = end.saturating_duration_since(Instant::now()) + 3 * STALL;
        latencies
            .extend(tokio::time::timeout(limit, task).await.expect("a call was never answered").unwrap());
    }
    latencies
}

async fn one(requests: &h2::client::SendRequest<Bytes>, frame: Bytes) {
    let mut requests = requests.clone().ready().await.unwrap();
    let request = http::Request::post("http://etcore/etcdserverpb.KV/Put")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap();
    let (response, mut stream) = requests.send_request(request, false).unwrap();
    stream.send_data(frame, true).unwrap();
    let mut body = response.await.unwrap().into_body();
    while let Some(chunk) = body.data().await {
        body.flow_control().release_capacity(chunk.unwrap().len()).unwrap();
    }
    let trailers = body.trailers().await.unwrap().unwrap();
    assert_eq!(trailers["grpc-status"], "0");
}

/// CPU time of the cores, log threads and watchdog so far.
fn server_cpu() -> Duration {
    let mut sum = Duration::ZERO;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        if ["core-", "log", "watchdog"].iter().any(|prefix| name.starts_with(prefix)) {
            let spent = std::fs::read_to_string(task.join("schedstat")).unwrap_or_default();
            let spent = spent.split(' ').next().and_then(|spent| spent.parse().ok()).unwrap_or(0);
            sum += Duration::from_nanos(spent);
        }
    }
    sum
}
