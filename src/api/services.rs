//! Every gRPC service of the client port behind one function from HTTP request to HTTP response, for whatever
//! transport. It knows paths and metadata, not what the services do.

use super::cluster::Cluster;
use super::health::Health;
use super::kv::{Encoded, Kv};
use super::maintenance::Maintenance;
use super::node::{Limits, Node};
use super::{status, unimplemented};
use crate::model::Rejection;
use crate::proto::etcdserverpb::cluster_server::ClusterServer;
use crate::proto::etcdserverpb::kv_server::KvServer;
use crate::proto::etcdserverpb::maintenance_server::MaintenanceServer;
use crate::proto::health::health_server::HealthServer;
use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body::Frame;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, StdError};

/// Cheap to clone; each connection, or each request, has its own.
#[derive(Clone, Debug)]
pub struct Services<N> {
    kv: KvServer<Kv<N>>,
    cluster: ClusterServer<Cluster<N>>,
    maintenance: MaintenanceServer<Maintenance<N>>,
    health: HealthServer<Health>,
}

impl<N: Node> Services<N> {
    pub fn new(node: N, limits: Limits) -> Self {
        let bytes_max = limits.message_bytes_max();
        Services {
            kv: KvServer::new(Kv::new(node.clone(), limits)).max_decoding_message_size(bytes_max),
            cluster: ClusterServer::new(Cluster::new(node.clone())).max_decoding_message_size(bytes_max),
            maintenance: MaintenanceServer::new(Maintenance::new(node)).max_decoding_message_size(bytes_max),
            health: HealthServer::new(Health).max_decoding_message_size(bytes_max),
        }
    }

    /// Answers one gRPC call. A refusal is a gRPC status where the client speaks gRPC, a plain HTTP status
    /// where it does not.
    pub async fn call<B>(&mut self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body + Send + 'static,
        B::Error: Into<StdError> + Send + 'static,
    {
        if let Err(status) = check_head(request.method(), request.headers()) {
            let mut refused = Response::new(Body::empty());
            *refused.status_mut() = status;
            return refused;
        }
        let path = request.uri().path().to_owned();
        let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.rsplit_once('/')) else {
            return unimplemented::path(&path).into_http();
        };
        let known = matches!(
            service,
            "etcdserverpb.KV" | "etcdserverpb.Cluster" | "etcdserverpb.Maintenance" | "grpc.health.v1.Health"
        );
        if !known {
            return unimplemented::path(&path).into_http();
        }
        if let Err(rejection) = check_metadata(request.headers()) {
            return status::of(rejection).into_http();
        }
        let answer = match service {
            "etcdserverpb.KV" => self.kv.call(request).await,
            "etcdserverpb.Cluster" => self.cluster.call(request).await,
            "etcdserverpb.Maintenance" => self.maintenance.call(request).await,
            _ => self.health.call(request).await,
        };
        let Ok(mut response) = answer;
        if let Some(Encoded(pieces)) = response.extensions_mut().remove() {
            return response.map(|_| Body::new(Pieces::new(pieces)));
        }
        reword(response, service, method)
    }
}

/// The body of a unary answer that is encoded already: the prefix of a gRPC message, its pieces, an OK.
struct Pieces {
    pieces: std::vec::IntoIter<Bytes>,
    prefix: Option<Bytes>,
    ended: bool,
}

impl Pieces {
    fn new(pieces: Vec<Bytes>) -> Self {
        let length: usize = pieces.iter().map(Bytes::len).sum();
        let mut prefix = BytesMut::with_capacity(5);
        prefix.put_u8(0);
        prefix.put_u32(length as u32);
        Pieces { pieces: pieces.into_iter(), prefix: Some(prefix.freeze()), ended: false }
    }
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(piece) = self.prefix.take().or_else(|| self.pieces.next()) {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        if std::mem::replace(&mut self.ended, true) {
            return Poll::Ready(None);
        }
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }
}

/// gRPC is POST with its own content type; what Go's library answers to others.
fn check_head(method: &Method, headers: &HeaderMap) -> Result<(), StatusCode> {
    if method != Method::POST {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    let content_type = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    match content_type.strip_prefix(b"application/grpc").map(|rest| rest.first()) {
        Some(None | Some(b'+' | b';')) => Ok(()),
        _ => Err(StatusCode::UNSUPPORTED_MEDIA_TYPE),
    }
}

/// The client's version is a label in etcd's metrics and must be text (etcd: trap G10).
fn check_metadata(headers: &HeaderMap) -> Result<(), Rejection> {
    match headers.get("client-api-version").map(|value| std::str::from_utf8(value.as_bytes())) {
        Some(Err(_)) => Err(Rejection::InvalidClientApiVersion),
        _ => Ok(()),
    }
}

/// Gives refusals of tonic the words of Go's library. They end a call before its first message, so they stand
/// in the headers.
fn reword(response: Response<Body>, service: &str, method: &str) -> Response<Body> {
    let Some(refused) = Status::from_header_map(response.headers()) else {
        return response;
    };
    // The generated services answer a method they do not have without a word.
    if refused.code() == tonic::Code::Unimplemented && refused.message().is_empty() {
        return unimplemented::method(service, method).into_http();
    }
    let (code, words) = (refused.code(), refused.message().to_owned());
    let reworded = status::from_transport(refused);
    match reworded.code() == code && reworded.message() == words {
        true => response,
        false => reworded.into_http(),
    }
}

#[cfg(test)]
mod tests;
