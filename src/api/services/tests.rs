use super::*;
use crate::model::{self, Answer};
use crate::proto::etcdserverpb as pb;
use bytes::{BufMut, Bytes, BytesMut};
use futures::executor::block_on;
use http_body_util::{BodyExt, Full};
use prost::Message;

/// Answers every put with its lease as the revision, and knows nothing else.
#[derive(Clone)]
struct Puts;

impl Node for Puts {
    async fn call(&self, request: model::Request) -> Answer {
        match request {
            model::Request::Put(put) => Ok(model::Response::Put(pb::PutResponse {
                header: Some(pb::ResponseHeader { revision: put.lease, ..Default::default() }),
                prev_kv: None,
            })),
            _ => Err(Rejection::Stopped),
        }
    }
}

const LIMITS: Limits = Limits { max_request_bytes: 1 << 20, max_txn_ops: 128, member_id: 0 };

fn framed(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(message.len() as u32);
    frame.put_slice(message);
    frame.freeze()
}

fn request(path: &str, body: Bytes) -> Request<Full<Bytes>> {
    Request::post(path).header("content-type", "application/grpc").body(Full::new(body)).unwrap()
}

fn answer(request: Request<Full<Bytes>>) -> Response<Body> {
    block_on(Services::new(Puts, LIMITS).call(request))
}

/// Code and text of a call that was refused before its first message.
fn refused(request: Request<Full<Bytes>>) -> (i32, String) {
    let response = answer(request);
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "application/grpc");
    let status = Status::from_header_map(response.headers()).expect("a status in the headers");
    (status.code() as i32, status.message().to_owned())
}

#[test]
fn a_call_reaches_its_service() {
    let put = pb::PutRequest { key: "k".into(), lease: 7, ..Default::default() };
    let response = answer(request("/etcdserverpb.KV/Put", framed(&put.encode_to_vec())));
    let body = block_on(response.into_body().collect()).unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
    let message = pb::PutResponse::decode(&body.to_bytes()[5..]).unwrap();
    assert_eq!(message.header.unwrap().revision, 7);
}

#[test]
fn refusals_of_a_request() {
    let put = |put: pb::PutRequest| request("/etcdserverpb.KV/Put", framed(&put.encode_to_vec()));
    assert_eq!(refused(put(Default::default())), (3, "etcdserver: key is not provided".into()));

    // Between the two limits it is etcd's own refusal, above them the transport's (etcd: trap G4).
    let long =
        |bytes: usize| pb::PutRequest { key: "k".into(), value: vec![0; bytes].into(), ..Default::default() };
    assert_eq!(refused(put(long(1 << 20))), (3, "etcdserver: request is too large".into()));
    let too_long = long(2 << 20);
    assert_eq!(
        refused(put(too_long.clone())),
        (
            8,
            format!(
                "grpc: received message larger than max ({} vs. {})",
                too_long.encoded_len(),
                (1 << 20) + (512 << 10)
            )
        )
    );

    assert_eq!(
        refused(request("/etcdserverpb.KV/Put", framed(b"\xff\xff\xff"))),
        (13, "grpc: error unmarshalling request: proto: cannot parse invalid wire-format data".into())
    );
}

#[test]
fn what_is_not_offered() {
    for (path, text) in [
        ("/etcdserverpb.Watch/Watch", "unknown service etcdserverpb.Watch"),
        ("/etcdserverpb.Lease/LeaseGrant", "unknown service etcdserverpb.Lease"),
        ("/etcdserverpb.Auth/AuthStatus", "unknown service etcdserverpb.Auth"),
        ("/v3lockpb.Lock/Lock", "unknown service v3lockpb.Lock"),
        ("/v3electionpb.Election/Campaign", "unknown service v3electionpb.Election"),
        (
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            "unknown service grpc.reflection.v1.ServerReflection",
        ),
        ("/etcdserverpb.KV/Get", "unknown method Get for service etcdserverpb.KV"),
        ("/etcdserverpb.Maintenance/Alarm", "unknown method Alarm for service etcdserverpb.Maintenance"),
        (
            "/etcdserverpb.Maintenance/Snapshot",
            "unknown method Snapshot for service etcdserverpb.Maintenance",
        ),
        ("/etcdserverpb.Cluster/MemberAdd", "unknown method MemberAdd for service etcdserverpb.Cluster"),
        ("/nothing", "malformed method name: \"/nothing\""),
    ] {
        assert_eq!(refused(request(path, framed(b""))), (12, text.into()), "{path}");
    }
}

/// etcd: trap G10.
#[test]
fn the_version_of_a_client_is_text() {
    let with = |name: &'static str, value: &[u8]| {
        let mut request = request("/grpc.health.v1.Health/Check", framed(b""));
        request.headers_mut().insert(name, http::HeaderValue::from_bytes(value).unwrap());
        request
    };
    assert_eq!(
        refused(with("client-api-version", b"3.\xff")),
        (3, "etcdserver: invalid client api version".into())
    );
    for (name, value) in [("client-api-version", "3.7é".as_bytes()), ("anything-else", b"\xff")] {
        let response = answer(with(name, value));
        assert!(Status::from_header_map(response.headers()).is_none(), "{name} is answered");
    }
}

#[test]
fn what_is_not_grpc() {
    let get = Request::get("/etcdserverpb.KV/Put").body(Full::new(Bytes::new())).unwrap();
    assert_eq!(answer(get).status(), StatusCode::METHOD_NOT_ALLOWED);
    for (content_type, accepted) in [
        ("application/grpc+proto", true),
        ("application/grpc;x", true),
        ("application/grpc-web", false),
        ("application/json", false),
    ] {
        let mut request = request("/grpc.health.v1.Health/Check", framed(b""));
        request.headers_mut().insert("content-type", content_type.parse().unwrap());
        let status = answer(request).status();
        assert_eq!(status != StatusCode::UNSUPPORTED_MEDIA_TYPE, accepted, "{content_type}");
    }
}
