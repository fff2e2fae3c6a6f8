//! Peers that do not behave: each gets an error or loses its connection, and nobody else notices.

use crate::server::{Recipe, Server};
use crate::wire::{bare, call, converse, framed, head};
use crate::{THREE_SHARDS, assert_filled, client::Client, fill, put};
use bytes::{BufMut, Bytes, BytesMut};
use etcore::proto::etcdserverpb as pb;
use prost::Message;
use std::io::Write;
use std::net::TcpStream;

struct Place {
    server: Server,
    _directory: tempfile::TempDir,
}

/// A server with a key in every shard.
fn place() -> Place {
    let directory = tempfile::tempdir().unwrap();
    let server = Recipe::new(&directory.path().join("data"), &THREE_SHARDS).start();
    fill(server.port);
    Place { server, _directory: directory }
}

impl Place {
    /// It still serves, and ends as it should.
    fn assert_well(self) {
        assert_filled(self.server.port);
        let ended = self.server.terminate();
        assert!(!ended.log.contains(r#""level":"fatal""#) && !ended.log.contains("panic"), "{}", ended.log);
    }
}

#[test]
fn bytes_that_are_no_protocol() {
    let place = place();
    let port = place.server.port;
    for bytes in
        [b"\x16\x03\x01\x02\x00\x01\x00\x01".as_slice(), &[0; 100], b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"]
    {
        bare(port, bytes);
    }
    // A good preface, then frames of nonsense.
    bare(port, &[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &[0xFF; 64]].concat());
    bare(port, b"nonsense\r\n\r\n");
    let answer = bare(port, b"GET nonsense\r\n\r\n");
    assert!(answer.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&answer));
    place.assert_well();
}

#[test]
fn http_1() {
    let place = place();
    let ask =
        |request: &str| String::from_utf8_lossy(&bare(place.server.port, request.as_bytes())).into_owned();
    let end = "Host: localhost\r\nConnection: close\r\n";
    let version = ask(&format!("GET /version HTTP/1.1\r\n{end}\r\n"));
    assert!(version.starts_with("HTTP/1.1 200") && version.contains(r#""etcdserver":"3.7.1""#), "{version}");
    let put = ask(&format!(
        "POST /etcdserverpb.KV/Put HTTP/1.1\r\n{end}content-type: application/grpc\r\nContent-Length: 5\r\n\r\n\0\0\0\0\0"
    ));
    assert!(put.starts_with("HTTP/1.1 4"), "{put}");
    place.assert_well();
}

#[test]
fn messages_that_cannot_be_read() {
    let place = place();
    let long = pb::PutRequest { key: "k".into(), value: vec![b'v'; 1_600_000].into(), ..Default::default() };
    let longer =
        pb::PutRequest { key: "k".into(), value: vec![b'v'; 2_200_000].into(), ..Default::default() };
    let many = pb::TxnRequest {
        success: vec![
            pb::RequestOp {
                request: Some(pb::request_op::Request::RequestRange(pb::RangeRequest {
                    key: "a".into(),
                    ..Default::default()
                }))
            };
            129
        ],
        ..Default::default()
    };
    // A message that claims to be longer than anything.
    let mut endless = BytesMut::from(&b"\0"[..]);
    endless.put_u32(u32::MAX);
    for (path, body, code, text) in [
        ("/etcdserverpb.KV/Put", framed(b"\xFF\xFF\xFF"), 13, "error unmarshalling request"),
        ("/etcdserverpb.KV/Put", framed(&long.encode_to_vec()), 3, "etcdserver: request is too large"),
        ("/etcdserverpb.KV/Put", framed(&longer.encode_to_vec()), 8, "received message larger than max"),
        ("/etcdserverpb.KV/Put", endless.freeze(), 8, "received message larger than max"),
        (
            "/etcdserverpb.KV/Txn",
            framed(&many.encode_to_vec()),
            3,
            "etcdserver: too many operations in txn request",
        ),
        ("/etcdserverpb.KV/Nothing", framed(b""), 12, "unknown method Nothing"),
        ("/nobody.Knows/This", framed(b""), 12, "unknown service nobody.Knows"),
        ("/etcdserverpb.KV/Put", Bytes::from_static(b"\0\0\0\0\x09half"), 13, ""),
        ("/etcdserverpb.KV/Put", Bytes::from_static(b"\x01\0\0\0\0"), 13, ""),
        ("/etcdserverpb.KV/Put", Bytes::new(), 13, ""),
    ] {
        let answer = converse(place.server.port, async |sender| {
            let answer = call(&sender, path, body.clone()).await.expect("an answer");
            // The connection goes on.
            let range = pb::RangeRequest { key: "a".into(), ..Default::default() };
            let next = call(&sender, "/etcdserverpb.KV/Range", framed(&range.encode_to_vec())).await;
            assert_eq!(next.expect("an answer").0, 0, "after {path} {text}");
            answer
        });
        assert!(answer.0 == code && answer.1.contains(text), "{path}: {answer:?}, expected {code} {text:?}");
    }
    place.assert_well();
}

#[test]
fn five_thousand_streams_cancelled_at_once() {
    let place = place();
    converse(place.server.port, async |sender| {
        let mut calls = Vec::new();
        for number in 0..5_000 {
            let mut sender = sender.clone().ready().await.unwrap();
            let (response, mut stream) = sender.send_request(head("/etcdserverpb.KV/Put"), false).unwrap();
            let put = pb::PutRequest { key: format!("s{number}").into(), ..Default::default() };
            // Half of them are under way, half have not said what they want.
            if number % 2 == 0 {
                stream.send_data(framed(&put.encode_to_vec()), true).unwrap();
            }
            calls.push((response, stream));
        }
        for (_, stream) in &mut calls {
            stream.send_reset(h2::Reason::CANCEL);
        }
        drop(calls);
        let range = pb::RangeRequest { key: "a".into(), ..Default::default() };
        let next = call(&sender, "/etcdserverpb.KV/Range", framed(&range.encode_to_vec())).await;
        assert_eq!(next.expect("the connection lives").0, 0);
    });
    place.assert_well();
}

/// Asks for much and reads nothing: the answers must not pile up, and others are served.
#[test]
fn a_client_that_never_reads() {
    const REQUESTS: u32 = 2_000;
    const VALUE_BYTES: usize = 1 << 20;
    /// All answers together would be 2 GB.
    const GROWTH_KIB_MAX: u64 = 300 << 10;
    let place = place();
    let mut other = Client::connect(place.server.port).unwrap();
    put(&mut other, "large", vec![b'v'; VALUE_BYTES]).unwrap();
    let before = anonymous_kib(place.server.id());
    let mut stream = TcpStream::connect(("127.0.0.1", place.server.port)).unwrap();
    let mut bytes = Vec::from(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    // Its windows are as wide as they can be: only the socket holds the server back.
    frame(&mut bytes, 4, 0, 0, &[0, 4, 0x7F, 0xFF, 0xFF, 0xFF]);
    frame(&mut bytes, 8, 0, 0, &(0x7FFF_FFFF_u32 - 65_535).to_be_bytes());
    let range = pb::RangeRequest { key: "large".into(), ..Default::default() };
    let range = framed(&range.encode_to_vec());
    for number in 0..REQUESTS {
        let stream = number * 2 + 1;
        let mut headers = Vec::new();
        for (name, value) in [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/etcdserverpb.KV/Range"),
            (":authority", "x"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ] {
            // A literal without index and without Huffman's code (RFC 7541, 6.2.2).
            headers.extend([0, name.len() as u8]);
            headers.extend(name.bytes());
            headers.push(value.len() as u8);
            headers.extend(value.bytes());
        }
        frame(&mut bytes, 1, 4, stream, &headers);
        frame(&mut bytes, 0, 1, stream, &range);
    }
    // The server stops reading at some point; whatever it has not taken then stays here.
    stream.set_write_timeout(Some(std::time::Duration::from_millis(500))).unwrap();
    let _ = stream.write_all(&bytes);
    for number in 0..200 {
        put(&mut other, &format!("other{number}"), "v").unwrap();
    }
    let after = anonymous_kib(place.server.id());
    assert!(after < before + GROWTH_KIB_MAX, "{before} KiB before, {after} KiB after");
    drop(stream);
    place.assert_well();
}

fn frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    bytes.extend(&(payload.len() as u32).to_be_bytes()[1..]);
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
}

fn anonymous_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse().unwrap()
}
