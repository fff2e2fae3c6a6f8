//! A real server on one or two cores, and clients that speak HTTP byte by byte or frame by frame.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::{BufMut, Bytes, BytesMut};
use futures::StreamExt;
use futures::future::join_all;
use futures::stream::{BoxStream, FuturesUnordered};
use h2::client::SendRequest;
use http::HeaderMap;
use prost::Message;
use tonic::codegen::Service;
use tonic::{Code, Request, Response, Status};

use super::*;
use crate::proto::etcdserverpb::kv_server::{Kv, KvServer};
use crate::proto::etcdserverpb::{
    CompactionRequest, CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, PutRequest, PutResponse,
    RangeRequest, RangeResponse, RangeStreamResponse, TxnRequest, TxnResponse,
};
use crate::proto::mvccpb::KeyValue;
use crate::runtime::executor::{Cores, Main, Options, cpus_allowed};
use crate::runtime::mailbox::{Sender, mailbox};

const MIB: usize = 1 << 20;

/// Echoes what is put; a put of `never` is never answered, a range answers a value of `limit` bytes.
#[derive(Clone, Default)]
struct Echo {
    waiting: Arc<AtomicUsize>,
    ranges: Arc<AtomicUsize>,
}

struct Waiting(Arc<AtomicUsize>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[tonic::async_trait]
impl Kv for Echo {
    type RangeStreamStream = BoxStream<'static, Result<RangeStreamResponse, Status>>;

    async fn range(&self, request: Request<RangeRequest>) -> Result<Response<RangeResponse>, Status> {
        self.ranges.fetch_add(1, Ordering::Relaxed);
        let value = vec![7; request.into_inner().limit as usize].into();
        Ok(Response::new(RangeResponse {
            kvs: vec![KeyValue { value, ..Default::default() }],
            ..Default::default()
        }))
    }

    async fn range_stream(
        &self,
        _: Request<RangeRequest>,
    ) -> Result<Response<Self::RangeStreamStream>, Status> {
        let first = futures::stream::iter([Ok(RangeStreamResponse::default())]);
        Ok(Response::new(first.chain(futures::stream::pending()).boxed()))
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutResponse>, Status> {
        let request = request.into_inner();
        if &request.key[..] == b"never" {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let _waiting = Waiting(Arc::clone(&self.waiting));
            std::future::pending::<()>().await;
        }
        let prev_kv = Some(KeyValue { key: request.key, value: request.value, ..Default::default() });
        Ok(Response::new(PutResponse { prev_kv, ..Default::default() }))
    }

    async fn delete_range(
        &self,
        _: Request<DeleteRangeRequest>,
    ) -> Result<Response<DeleteRangeResponse>, Status> {
        Err(Status::invalid_argument("etcdserver: key is not provided"))
    }

    async fn txn(&self, _: Request<TxnRequest>) -> Result<Response<TxnResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn compact(&self, _: Request<CompactionRequest>) -> Result<Response<CompactionResponse>, Status> {
        Ok(Response::new(Default::default()))
    }
}

/// A server on some cores; ends when dropped.
struct House {
    address: SocketAddr,
    echo: Echo,
    dealer: deal::Dealer,
    acceptor: Option<deal::Acceptor>,
    stops: Vec<Sender<Duration>>,
    cores: Option<Cores>,
}

impl House {
    fn start(cores: usize, settings: Settings) -> House {
        let listener = deal::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let echo = Echo::default();
        let (dealer, arrivals) = deal::Dealer::new(cores);
        let mut stops = Vec::new();
        let mains = arrivals.into_iter().enumerate().map(|(core, arrivals)| -> Main {
            let (stop, mut stopped) = mailbox(1);
            stops.push(stop);
            let (echo, settings) = (echo.clone(), settings.clone());
            Box::new(move || {
                Box::pin(async move {
                    let service = KvServer::new(echo);
                    let grpc: Handler = Rc::new(move |request| {
                        let call = service.clone().call(request);
                        Box::pin(async move {
                            let Ok(response) = call.await;
                            response
                        })
                    });
                    let plain: Handler = Rc::new(move |request| {
                        Box::pin(async move {
                            let body = format!("{} on {core}", request.uri().path());
                            http::Response::new(Body::new(http_body_util::Full::from(body)))
                        })
                    });
                    let server = Server::new(settings, grpc, plain);
                    spawn(Rc::clone(&server).run(arrivals));
                    let mut limit = Vec::new();
                    stopped.recv_batch(&mut limit).await;
                    server.drain(limit[0]).await;
                })
            })
        });
        // Several cores share the CPUs where the machine has fewer.
        let cpus = cpus_allowed().unwrap();
        let cpus: Vec<_> = (0..cores).map(|core| cpus[core % cpus.len()]).collect();
        let cores = Cores::start(&cpus, &Options::default(), mains.collect(), |_, _| {}).unwrap();
        let acceptor = Some(dealer.listen(listener).unwrap());
        House { address, echo, dealer, acceptor, stops, cores: Some(cores) }
    }

    /// Drains every core, within `limit`.
    fn end(&mut self, limit: Duration) {
        self.acceptor.take();
        for stop in self.stops.drain(..) {
            stop.send(limit).unwrap();
        }
        if let Some(cores) = self.cores.take() {
            cores.join().unwrap();
        }
    }

    /// What the server sends to a client that sends this and then listens.
    fn raw(&self, bytes: &[u8]) -> Vec<u8> {
        let mut socket = TcpStream::connect(self.address).unwrap();
        socket.write_all(bytes).unwrap();
        let mut heard = Vec::new();
        // A reset is an end too: the server closed with something unread.
        let _ = socket.read_to_end(&mut heard);
        heard
    }
}

impl Drop for House {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.end(Duration::ZERO);
        }
    }
}

/// Runs a client on the calling thread.
fn client<T>(body: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(body)
}

async fn connect(address: SocketAddr) -> SendRequest<Bytes> {
    let socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let (requests, connection) = h2::client::handshake(socket).await.unwrap();
    tokio::spawn(connection);
    requests.ready().await.unwrap()
}

fn framed(message: &impl Message) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(message.encoded_len() as u32);
    message.encode(&mut frame).unwrap();
    frame.freeze()
}

fn put(key: &[u8], value: &[u8]) -> Bytes {
    framed(&PutRequest {
        key: Bytes::copy_from_slice(key),
        value: Bytes::copy_from_slice(value),
        ..Default::default()
    })
}

/// Opens a stream and sends one message on it.
async fn open(
    requests: &SendRequest<Bytes>,
    path: &str,
    timeout: Option<&str>,
    message: Bytes,
) -> (h2::client::ResponseFuture, h2::SendStream<Bytes>) {
    let mut requests = requests.clone().ready().await.unwrap();
    let mut request = http::Request::post(format!("http://etcore{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    if let Some(timeout) = timeout {
        request = request.header("grpc-timeout", timeout);
    }
    let (response, mut stream) = requests.send_request(request.body(()).unwrap(), false).unwrap();
    stream.send_data(message, true).unwrap();
    (response, stream)
}

/// Headers, body and trailers of an answer.
async fn read(response: h2::client::ResponseFuture) -> Result<(HeaderMap, Vec<u8>, HeaderMap), h2::Error> {
    let (head, mut body) = response.await?.into_parts();
    assert_eq!(head.status, 200);
    let mut bytes = Vec::new();
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        bytes.extend_from_slice(&chunk);
    }
    Ok((head.headers, bytes, body.trailers().await?.unwrap_or_default()))
}

/// A whole call: its status (from the headers where there are no trailers) and message bytes.
async fn call(
    requests: &SendRequest<Bytes>,
    path: &str,
    timeout: Option<&str>,
    message: Bytes,
) -> (Status, Vec<u8>) {
    let (response, _stream) = open(requests, path, timeout, message).await;
    let (headers, body, trailers) = read(response).await.unwrap();
    let status = Status::from_header_map(&trailers).or_else(|| Status::from_header_map(&headers));
    (status.expect("every answer has a status"), body)
}

const PUT: &str = "/etcdserverpb.KV/Put";

#[test]
fn a_call_is_answered_and_an_error_keeps_its_words() {
    let house = House::start(1, Settings::default());
    client(async {
        let requests = connect(house.address).await;
        let (status, body) = call(&requests, PUT, Some("5S"), put(b"a", b"1")).await;
        assert_eq!(status.code(), Code::Ok);
        let kv = PutResponse::decode(&body[5..]).unwrap().prev_kv.unwrap();
        assert_eq!((&kv.key[..], &kv.value[..]), (&b"a"[..], &b"1"[..]));
        let message = framed(&DeleteRangeRequest::default());
        let (status, _) = call(&requests, "/etcdserverpb.KV/DeleteRange", None, message).await;
        assert_eq!(
            (status.code(), status.message()),
            (Code::InvalidArgument, "etcdserver: key is not provided")
        );
    });
}

#[test]
fn a_call_ends_when_its_time_is_up_and_is_forgotten() {
    let house = House::start(1, Settings::default());
    client(async {
        let requests = connect(house.address).await;
        let (status, _) = call(&requests, PUT, Some("20m"), put(b"never", b"")).await;
        assert_eq!((status.code(), status.message()), (Code::DeadlineExceeded, "context deadline exceeded"));
        assert_eq!(house.echo.waiting.load(Ordering::Relaxed), 0, "the call still waits");
        // A stream that has begun ends with the status in its trailers.
        let message = framed(&RangeRequest::default());
        let (status, body) = call(&requests, "/etcdserverpb.KV/RangeStream", Some("20m"), message).await;
        assert_eq!((status.code(), body.len()), (Code::DeadlineExceeded, 5));
    });
}

#[test]
fn plain_requests_reach_the_plain_handler_over_both_versions() {
    let house = House::start(1, Settings::default());
    let answer = house.raw(b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("/version on 0"), "{answer}");
    client(async {
        let mut requests = connect(house.address).await;
        let request = http::Request::get("http://etcore/health").body(()).unwrap();
        let (response, _) = requests.send_request(request, true).unwrap();
        assert_eq!(read(response).await.unwrap().1, b"/health on 0");
    });
}

#[test]
fn what_is_no_http_is_closed() {
    let house = House::start(1, Settings::default());
    assert!(house.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").is_empty());
    assert!(house.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n and then nonsense").len() < 100);
    assert!(house.raw(b"NONSENSE\r\n\r\n").starts_with(b"HTTP/1.1 400"));
}

#[test]
fn a_client_that_says_nothing_is_closed_in_time() {
    let settings = Settings { handshake_timeout: Duration::from_millis(30), ..Settings::default() };
    let house = House::start(1, settings);
    assert!(house.raw(b"").is_empty());
    assert!(house.raw(b"PRI * HT").is_empty());
    house.raw(b"GET /version HTTP/1.1\r\nHost:");
}

#[test]
fn a_port_in_use_is_refused_with_a_sentence() {
    let house = House::start(1, Settings::default());
    let fault = deal::bind(house.address).unwrap_err().to_string();
    let start = format!("listen tcp {}: bind: address already in use", house.address);
    assert!(fault.starts_with(&start), "{fault}");
}

#[test]
fn each_connection_goes_to_the_core_with_the_fewest() {
    let house = House::start(2, Settings::default());
    let ask = |socket: &mut TcpStream| {
        socket.write_all(b"GET /core HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let mut answer = String::new();
        while !answer.contains("/core on ") || answer.ends_with(' ') {
            let mut byte = [0];
            socket.read_exact(&mut byte).unwrap();
            answer.push(char::from(byte[0]));
        }
        answer.pop().unwrap()
    };
    let mut sockets: Vec<_> = (0..4).map(|_| TcpStream::connect(house.address).unwrap()).collect();
    let mut cores: Vec<_> = sockets.iter_mut().map(ask).collect();
    cores.sort_unstable();
    assert_eq!(cores, ['0', '0', '1', '1']);
    assert_eq!(house.dealer.taken(), [2, 2]);
}

#[test]
fn thousands_of_streams_at_once_and_cancelled_at_once_leave_the_connection_whole() {
    const STREAMS: usize = 5_000;
    let house = House::start(1, Settings::default());
    client(async {
        let requests = connect(house.address).await;
        // Cancelled before the server can have looked at them.
        for _ in 0..STREAMS {
            let (_, mut stream) = open(&requests, PUT, None, put(b"never", b"")).await;
            stream.send_reset(h2::Reason::CANCEL);
        }
        assert_eq!(call(&requests, PUT, None, put(b"a", b"1")).await.0.code(), Code::Ok);
        // Cancelled while the server works on all of them.
        let calls = join_all((0..STREAMS).map(|_| open(&requests, PUT, None, put(b"never", b"")))).await;
        while house.echo.waiting.load(Ordering::Relaxed) < STREAMS {
            assert_eq!(call(&requests, PUT, None, put(b"a", b"1")).await.0.code(), Code::Ok);
        }
        drop(calls);
        while house.echo.waiting.load(Ordering::Relaxed) > 0 {
            assert_eq!(call(&requests, PUT, None, put(b"a", b"1")).await.0.code(), Code::Ok);
        }
    });
}

#[test]
fn a_client_that_never_reads_holds_little_and_delays_nobody() {
    const CALLS: usize = 100;
    let house = House::start(1, Settings::default());
    client(async {
        let lazy = connect(house.address).await;
        let message = framed(&RangeRequest { limit: MIB as i64, ..Default::default() });
        let calls =
            join_all((0..CALLS).map(|_| open(&lazy, "/etcdserverpb.KV/Range", None, message.clone()))).await;
        // Each answer is a little more than its value.
        let most = REPLY_BYTES_MAX / MIB;
        let other = connect(house.address).await;
        while house.echo.ranges.load(Ordering::Relaxed) < most {
            assert_eq!(call(&other, PUT, None, put(b"a", b"1")).await.0.code(), Code::Ok);
        }
        for _ in 0..100 {
            assert_eq!(call(&other, PUT, None, put(b"a", b"1")).await.0.code(), Code::Ok);
        }
        assert_eq!(house.echo.ranges.load(Ordering::Relaxed), most);
        // It reads at last, but for the first half, which it gives up: everything else arrives.
        let mut answers: FuturesUnordered<_> = calls
            .into_iter()
            .skip(CALLS / 2)
            .map(|(response, stream)| async {
                let answer = read(response).await;
                drop(stream);
                answer
            })
            .collect();
        while let Some(answer) = answers.next().await {
            assert!(answer.unwrap().1.len() > MIB);
        }
    });
}

#[test]
fn a_drain_finishes_what_is_under_way_and_gives_up_in_time() {
    let mut house = House::start(1, Settings::default());
    let address = house.address;
    client(async {
        let requests = connect(address).await;
        let (stuck, _stream) = open(&requests, PUT, None, put(b"never", b"")).await;
        let (timed, _other) = open(&requests, PUT, Some("100m"), put(b"never", b"")).await;
        while house.echo.waiting.load(Ordering::Relaxed) < 2 {
            assert_eq!(call(&requests, PUT, None, put(b"a", b"1")).await.0.code(), Code::Ok);
        }
        let ending = std::thread::spawn(move || {
            house.end(Duration::from_millis(300));
            house
        });
        let (headers, ..) = read(timed).await.unwrap();
        assert_eq!(Status::from_header_map(&headers).unwrap().code(), Code::DeadlineExceeded);
        read(stuck).await.unwrap_err();
        ending.join().unwrap();
    });
    assert!(TcpStream::connect(address).is_err(), "the port still listens");
}
