//! The KV service: fields are checked here, everything else is decided where the state is.
//!
//! RangeStream is made here out of bounded reads (etcd: semantics 2.16): each chunk is one read at the revision
//! of the first, and no snapshot is held while the client takes its time. A chunk whose revision was compacted
//! meanwhile ends the stream with that error.

use super::node::{Limits, Node};
use super::{status, validate};
use crate::model::{self, Rejection, encoded, range::successor};
use crate::proto::etcdserverpb as pb;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use pb::range_request::SortTarget;
use prost::Message;
use tonic::{Request, Response, Status};

#[derive(Clone, Debug)]
pub struct Kv<N> {
    node: N,
    limits: Limits,
}

impl<N: Node> Kv<N> {
    pub fn new(node: N, limits: Limits) -> Self {
        Kv { node, limits }
    }
}

/// An answer that is encoded already, as an extension of a response without one.
#[derive(Clone, Debug)]
pub(super) struct Encoded(pub Vec<Bytes>);

async fn read<N: Node>(
    node: &N,
    request: pb::RangeRequest,
    count: bool,
) -> Result<pb::RangeResponse, Rejection> {
    match node.call(model::Request::Range { request, count }).await? {
        model::Response::Range(response) => Ok(response),
        model::Response::RangeEncoded(pieces) => {
            Ok(encoded::decode(&pieces).expect("what was just encoded can be decoded"))
        }
        other => unreachable!("Range was answered with {other:?}"),
    }
}

#[tonic::async_trait]
impl<N: Node> pb::kv_server::Kv for Kv<N> {
    async fn range(&self, request: Request<pb::RangeRequest>) -> Result<Response<pb::RangeResponse>, Status> {
        let request = request.into_inner();
        validate::range(&request).map_err(status::of)?;
        match self.node.call(model::Request::Range { request, count: true }).await.map_err(status::of)? {
            model::Response::Range(response) => Ok(Response::new(response)),
            model::Response::RangeEncoded(pieces) => {
                // `Services` puts the pieces in the place of the empty message.
                let mut response = Response::new(pb::RangeResponse::default());
                response.extensions_mut().insert(Encoded(pieces));
                Ok(response)
            }
            other => unreachable!("Range was answered with {other:?}"),
        }
    }

    type RangeStreamStream = BoxStream<'static, Result<pb::RangeStreamResponse, Status>>;

    async fn range_stream(
        &self,
        request: Request<pb::RangeRequest>,
    ) -> Result<Response<Self::RangeStreamStream>, Status> {
        let request = request.into_inner();
        validate::range_stream(&request).map_err(status::of)?;
        let chunks = Chunks::new(self.node.clone(), request, self.limits.max_request_bytes);
        Ok(Response::new(chunks.into_stream().boxed()))
    }

    async fn put(&self, request: Request<pb::PutRequest>) -> Result<Response<pb::PutResponse>, Status> {
        let request = request.into_inner();
        validate::put(&request, &self.limits).map_err(status::of)?;
        match self.node.call(model::Request::Put(request)).await.map_err(status::of)? {
            model::Response::Put(response) => Ok(Response::new(response)),
            other => unreachable!("Put was answered with {other:?}"),
        }
    }

    async fn delete_range(
        &self,
        request: Request<pb::DeleteRangeRequest>,
    ) -> Result<Response<pb::DeleteRangeResponse>, Status> {
        let request = request.into_inner();
        validate::delete_range(&request, &self.limits).map_err(status::of)?;
        match self.node.call(model::Request::DeleteRange(request)).await.map_err(status::of)? {
            model::Response::DeleteRange(response) => Ok(Response::new(response)),
            other => unreachable!("DeleteRange was answered with {other:?}"),
        }
    }

    async fn txn(&self, request: Request<pb::TxnRequest>) -> Result<Response<pb::TxnResponse>, Status> {
        let request = request.into_inner();
        validate::txn(&request, &self.limits).map_err(status::of)?;
        match self.node.call(model::Request::Txn(request)).await.map_err(status::of)? {
            model::Response::Txn(response) => Ok(Response::new(response)),
            other => unreachable!("Txn was answered with {other:?}"),
        }
    }

    async fn compact(
        &self,
        request: Request<pb::CompactionRequest>,
    ) -> Result<Response<pb::CompactionResponse>, Status> {
        let request = request.into_inner();
        validate::compact(&request, &self.limits).map_err(status::of)?;
        match self.node.call(model::Request::Compact(request)).await.map_err(status::of)? {
            model::Response::Compact(response) => Ok(Response::new(response)),
            other => unreachable!("Compact was answered with {other:?}"),
        }
    }
}

/// Keys of a stream's first chunk.
const CHUNK_KEYS_FIRST: i64 = 10;

/// A RangeStream under way.
struct Chunks<N> {
    node: N,
    /// Bytes that a chunk should have, about.
    chunk_bytes: usize,
    /// Keys that the next chunk may have.
    chunk_keys: i64,
    stage: Stage,
}

/// ```text
///            the answer as a whole is small         every key was sent
///   Start ─────────────────────────────────────────────────┬──▶ End
///     │                                                     │
///     ├─ first chunk, more to come ─▶ Reading ─ last chunk ─┤
///     └─ sorted by something else ──▶ Cutting ─ last chunk ─┘
/// ```
enum Stage {
    Start(pb::RangeRequest),
    /// Each chunk is read when its turn comes. `request.limit` is what the client may still get, 0 for all.
    Reading {
        request: pb::RangeRequest,
        header: Option<pb::ResponseHeader>,
        count: i64,
    },
    /// The answer was read as a whole, since it is not in key order; `kvs` is what is left of it.
    Cutting {
        kvs: std::vec::IntoIter<model::KeyValue>,
        end: pb::RangeResponse,
    },
    End,
}

impl<N: Node> Chunks<N> {
    fn new(node: N, request: pb::RangeRequest, chunk_bytes: usize) -> Self {
        Chunks { node, chunk_bytes, chunk_keys: CHUNK_KEYS_FIRST, stage: Stage::Start(request) }
    }

    fn into_stream(self) -> impl stream::Stream<Item = Result<pb::RangeStreamResponse, Status>> {
        stream::unfold(self, |mut chunks| async move {
            let next = chunks.next().await.transpose()?;
            Some((next.map_err(status::of), chunks))
        })
    }

    /// The next message; `None` after the last. Only the last has header, count and `more`.
    async fn next(&mut self) -> Result<Option<pb::RangeStreamResponse>, Rejection> {
        let response = match std::mem::replace(&mut self.stage, Stage::End) {
            Stage::Start(request) if request.count_only => {
                let response = read(&self.node, request, true).await?;
                pb::RangeResponse { kvs: Vec::new(), more: false, ..response }
            }
            Stage::Start(request) if request.sort_target != SortTarget::Key as i32 => {
                let mut end = read(&self.node, request, true).await?;
                let kvs = std::mem::take(&mut end.kvs).into_iter();
                self.cut(kvs, end)
            }
            Stage::Start(request) => self.read_chunk(request, None).await?,
            Stage::Reading { request, header, count } => {
                self.read_chunk(request, Some((header, count))).await?
            }
            Stage::Cutting { kvs, end } => self.cut(kvs, end),
            Stage::End => return Ok(None),
        };
        Ok(Some(pb::RangeStreamResponse { range_response: Some(response) }))
    }

    /// Reads a chunk. `first` is what the first chunk brought: header and count of the whole.
    async fn read_chunk(
        &mut self,
        mut request: pb::RangeRequest,
        first: Option<(Option<pb::ResponseHeader>, i64)>,
    ) -> Result<pb::RangeResponse, Rejection> {
        let limit = if request.limit > 0 { request.limit } else { i64::MAX };
        let ask = pb::RangeRequest { limit: self.chunk_keys.min(limit), ..request.clone() };
        let mut response = read(&self.node, ask, first.is_none()).await?;
        let (header, count) = first.unwrap_or((response.header, response.count));

        let left = limit - response.kvs.len() as i64;
        let Some(last) = response.kvs.last().filter(|_| response.more && left > 0) else {
            return Ok(pb::RangeResponse { header, count, ..response });
        };
        request.key = successor(&last.key);
        if request.limit > 0 {
            request.limit = left;
        }
        if request.revision <= 0 {
            // From here on everything is read at one revision, also if the client asked for "the newest" by a
            // negative number (etcd: trap A15). The first read was as fresh as was asked; an older revision
            // needs no further agreement.
            request.revision = header.as_ref().map_or(0, |header| header.revision);
        }
        request.serializable = true;
        let bytes = response.encoded_len();
        self.resize(bytes);
        self.stage = Stage::Reading { request, header, count };
        (response.header, response.more, response.count) = (None, false, 0);
        Ok(response)
    }

    fn cut(
        &mut self,
        mut kvs: std::vec::IntoIter<model::KeyValue>,
        end: pb::RangeResponse,
    ) -> pb::RangeResponse {
        let chunk: Vec<_> = kvs.by_ref().take(self.chunk_keys as usize).collect();
        if kvs.len() == 0 {
            return pb::RangeResponse { kvs: chunk, ..end };
        }
        let response = pb::RangeResponse { kvs: chunk, ..Default::default() };
        self.resize(response.encoded_len());
        self.stage = Stage::Cutting { kvs, end };
        response
    }

    /// Twice as many keys while chunks are small, half as many when they are big.
    fn resize(&mut self, bytes: usize) {
        if bytes < self.chunk_bytes / 2 {
            self.chunk_keys = self.chunk_keys.saturating_mul(2);
        } else if bytes > self.chunk_bytes.saturating_mul(2) {
            self.chunk_keys = (self.chunk_keys / 2).max(1);
        }
    }
}

#[cfg(test)]
mod tests;
