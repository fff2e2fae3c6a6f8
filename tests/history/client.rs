//! A gRPC client of one connection that asks and waits.
//!
//! It returns what was on the wire: the code and text of a status, every message of a stream. It knows no
//! retries and no deadlines but one: a server that does not answer within [`ANSWER_TIME_MAX`] has failed.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use etcore::proto::etcdserverpb as pb;
use prost::Message;

use crate::model::{Refusal, Reply, Request, Response};

const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
const WINDOW_BYTES: u32 = 16 << 20;

pub struct Client {
    runtime: tokio::runtime::Runtime,
    sender: h2::client::SendRequest<Bytes>,
}

impl Client {
    pub fn connect(port: u16) -> Result<Client, String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let sender = runtime
            .block_on(async {
                let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
                stream.set_nodelay(true)?;
                let (sender, connection) = h2::client::Builder::new()
                    .initial_window_size(WINDOW_BYTES)
                    .initial_connection_window_size(WINDOW_BYTES)
                    .handshake::<_, Bytes>(stream)
                    .await
                    .map_err(std::io::Error::other)?;
                // Its end shows in the calls.
                tokio::spawn(async move { drop(connection.await) });
                std::io::Result::Ok(sender)
            })
            .map_err(|error| format!("connect to port {port}: {error}"))?;
        Ok(Client { runtime, sender })
    }

    /// The answer with its headers stripped to the revision, or a sentence about what is wrong with its form.
    pub fn call(&mut self, request: &Request) -> Result<Reply, String> {
        match request {
            Request::Range(range) => self.unary("KV/Range", range, |response: pb::RangeResponse| {
                let header = stripped(response.header)?;
                Ok(Response::Range(pb::RangeResponse { header, ..response }))
            }),
            Request::RangeStream(range) => match self.exchange("KV/RangeStream", range)? {
                Err(refusal) => Ok(Err(refusal)),
                Ok(messages) => {
                    let chunks = messages.into_iter().map(decoded).collect::<Result<Vec<_>, _>>()?;
                    joined(range, chunks).map(Response::Range).map(Ok)
                }
            },
            Request::Put(put) => self.unary("KV/Put", put, |response: pb::PutResponse| {
                let header = stripped(response.header)?;
                Ok(Response::Put(pb::PutResponse { header, ..response }))
            }),
            Request::DeleteRange(delete) => {
                self.unary("KV/DeleteRange", delete, |response: pb::DeleteRangeResponse| {
                    let header = stripped(response.header)?;
                    Ok(Response::DeleteRange(pb::DeleteRangeResponse { header, ..response }))
                })
            }
            Request::Txn(txn) => self.unary("KV/Txn", txn, |response: pb::TxnResponse| {
                let header = stripped(response.header)?;
                Ok(Response::Txn(pb::TxnResponse { header, ..response }))
            }),
            Request::Compact(compact) => {
                self.unary("KV/Compact", compact, |response: pb::CompactionResponse| {
                    Ok(Response::Compact(pb::CompactionResponse { header: stripped(response.header)? }))
                })
            }
            Request::HashKv(hash) => {
                self.unary("Maintenance/HashKV", hash, |response: pb::HashKvResponse| {
                    let header = stripped(response.header)?;
                    Ok(Response::HashKv(pb::HashKvResponse { header, ..response }))
                })
            }
            Request::Status => {
                self.unary("Maintenance/Status", &pb::StatusRequest {}, |response: pb::StatusResponse| {
                    if response.db_size <= 0 || response.db_size_in_use <= 0 {
                        return Err(format!("Status without sizes: {response:?}"));
                    }
                    let revision = stripped(response.header)?.map_or(0, |header| header.revision);
                    Ok(Response::Status { revision, version: response.version, errors: response.errors })
                })
            }
            Request::Defragment => self.unary(
                "Maintenance/Defragment",
                &pb::DefragmentRequest {},
                |response: pb::DefragmentResponse| match response.header {
                    None => Ok(Response::Defragment),
                    Some(header) => Err(format!("Defragment answers without a header, not with {header:?}")),
                },
            ),
        }
    }

    fn unary<R: Message + Default>(
        &mut self,
        method: &str,
        request: &impl Message,
        response: impl FnOnce(R) -> Result<Response, String>,
    ) -> Result<Reply, String> {
        match self.exchange(method, request)? {
            Err(refusal) => Ok(Err(refusal)),
            Ok(messages) => match <[Bytes; 1]>::try_from(messages) {
                Ok([message]) => response(decoded(message)?).map(Ok),
                Err(messages) => Err(format!("{method} answered OK with {} messages", messages.len())),
            },
        }
    }

    /// One call: the messages of an answer that ended well, or its status.
    fn exchange(
        &mut self,
        method: &str,
        request: &impl Message,
    ) -> Result<Result<Vec<Bytes>, Refusal>, String> {
        let mut body = BytesMut::with_capacity(5 + request.encoded_len());
        body.put_u8(0);
        body.put_u32(request.encoded_len() as u32);
        request.encode(&mut body).map_err(|error| error.to_string())?;
        let head = http::Request::post(format!("http://127.0.0.1/etcdserverpb.{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .map_err(|error| error.to_string())?;
        let sender = self.sender.clone();
        self.runtime.block_on(async {
            let answer = tokio::time::timeout(ANSWER_TIME_MAX, answer(sender, head, body.freeze())).await;
            match answer {
                Ok(Ok(answer)) => Ok(answer),
                Ok(Err(error)) => Err(format!("{method}: {error}")),
                Err(_) => Err(format!("{method}: no answer within {ANSWER_TIME_MAX:?}")),
            }
        })
    }
}

async fn answer(
    sender: h2::client::SendRequest<Bytes>,
    head: http::Request<()>,
    body: Bytes,
) -> Result<Result<Vec<Bytes>, Refusal>, String> {
    let say = |error: h2::Error| error.to_string();
    let mut sender = sender.ready().await.map_err(say)?;
    let (response, mut stream) = sender.send_request(head, false).map_err(say)?;
    stream.send_data(body, true).map_err(say)?;
    let response = response.await.map_err(say)?;
    if response.status() != http::StatusCode::OK {
        return Err(format!("HTTP status {}", response.status()));
    }
    if let Some(status) = status(response.headers())? {
        return Ok(Err(status).or_else(ended_well));
    }
    let mut stream = response.into_body();
    let mut received = BytesMut::new();
    while let Some(data) = stream.data().await {
        let data = data.map_err(say)?;
        stream.flow_control().release_capacity(data.len()).map_err(say)?;
        received.extend_from_slice(&data);
    }
    let trailers = stream.trailers().await.map_err(say)?.ok_or("no trailers")?;
    let status = status(&trailers)?.ok_or("no grpc-status")?;
    if status.code != 0 {
        return Ok(Err(status));
    }
    let mut received = received.freeze();
    let mut messages = Vec::new();
    while received.len() >= 5 {
        if received.get_u8() != 0 {
            return Err("a compressed message".to_owned());
        }
        let length = received.get_u32() as usize;
        if received.len() < length {
            return Err("a message that ends early".to_owned());
        }
        messages.push(received.split_to(length));
    }
    if received.is_empty() { Ok(Ok(messages)) } else { Err("half a message".to_owned()) }
}

/// A status OK among the headers is an answer without messages.
fn ended_well(status: Refusal) -> Result<Vec<Bytes>, Refusal> {
    if status.code == 0 { Ok(Vec::new()) } else { Err(status) }
}

fn status(headers: &http::HeaderMap) -> Result<Option<Refusal>, String> {
    let text = |name: &str| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let Some(code) = text("grpc-status") else { return Ok(None) };
    let code = code.parse().map_err(|_| format!("grpc-status {code}"))?;
    Ok(Some(Refusal { code, text: percent_decoded(&text("grpc-message").unwrap_or_default()) }))
}

fn percent_decoded(text: &str) -> String {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let coded = (*first == b'%').then(|| tail.get(..2)).flatten();
        let byte =
            coded.and_then(|hex| str::from_utf8(hex).ok()).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        out.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn decoded<M: Message + Default>(message: Bytes) -> Result<M, String> {
    M::decode(message).map_err(|error| error.to_string())
}

/// All four fields must be there (etcd: api 3); only the revision can be compared.
fn stripped(header: Option<pb::ResponseHeader>) -> Result<Option<pb::ResponseHeader>, String> {
    match header {
        Some(header) if header.cluster_id != 0 && header.member_id != 0 && header.raft_term != 0 => {
            Ok(Some(pb::ResponseHeader { revision: header.revision, ..pb::ResponseHeader::default() }))
        }
        other => Err(format!("a header that is not filled: {other:?}")),
    }
}

/// The unary answer that a stream amounts to, if its chunks have the right form (etcd: semantics 2.16). For a
/// negative limit etcd sends a single chunk of any length, so there the lengths are left open.
fn joined(
    request: &pb::RangeRequest,
    chunks: Vec<pb::RangeStreamResponse>,
) -> Result<pb::RangeResponse, String> {
    let mut chunks: Vec<pb::RangeResponse> = chunks
        .into_iter()
        .map(|chunk| chunk.range_response.ok_or("a chunk without a range response"))
        .collect::<Result<_, _>>()?;
    let last = chunks.pop().ok_or("a stream without a chunk")?;
    let mut keys_max = if request.limit < 0 { usize::MAX } else { 10 };
    let mut kvs = Vec::new();
    for chunk in chunks {
        if chunk.header.is_some() || chunk.more || chunk.count != 0 {
            return Err("a chunk that is not the last has a header, a count or more".to_owned());
        }
        if chunk.kvs.is_empty() || chunk.kvs.len() > keys_max {
            return Err(format!("a chunk of {} keys where {keys_max} are allowed", chunk.kvs.len()));
        }
        keys_max = keys_max.saturating_mul(2);
        kvs.extend(chunk.kvs);
    }
    if last.kvs.len() > keys_max {
        return Err(format!("a chunk of {} keys where {keys_max} are allowed", last.kvs.len()));
    }
    kvs.extend(last.kvs);
    let header = stripped(last.header)?;
    Ok(pb::RangeResponse { header, kvs, more: last.more, count: last.count })
}
