//! More data than memory: the tree lies in the page cache, not in memory of its own.
//!
//! The limit is of anonymous memory (`RLIMIT_DATA`). `MEMORY_DATA_MIB=2048 MEMORY_LIMIT_MIB=300 cargo test --test
//! process memory` is the full size; by default it is a part of it.

use crate::client::Client;
use crate::model::{Request, Response};
use crate::server::{Recipe, Server};
use crate::{THREE_SHARDS, put};
use etcore::proto::etcdserverpb as pb;
use std::os::unix::process::{CommandExt, ExitStatusExt};

const DATA_MIB: usize = 400;
const LIMIT_MIB: usize = 300;
const VALUE_BYTES: usize = 16 << 10;

fn number(name: &str, default: usize) -> usize {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Asks for `limit` keys from `start` on; all for 0.
fn range(start: &str, limit: i64) -> pb::RangeRequest {
    let (key, range_end) = (start.as_bytes().to_vec().into(), b"\0".as_slice().into());
    pb::RangeRequest { key, range_end, limit, ..pb::RangeRequest::default() }
}

#[test]
fn more_data_than_memory() {
    let values = number("MEMORY_DATA_MIB", DATA_MIB) * (1 << 20) / VALUE_BYTES;
    let limit = (number("MEMORY_LIMIT_MIB", LIMIT_MIB) as u64) << 20;
    let place = tempfile::tempdir().unwrap();
    let mut recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    // What the flushes cost is no part of this test.
    recipe.arguments.extend(["--dirty-bytes=67108864".to_owned(), "--unsafe-no-fsync".to_owned()]);
    let start = || {
        let mut command = recipe.command();
        // SAFETY: a plain system call, safe between fork and exec, that reads a value made here.
        unsafe {
            command.pre_exec(move || {
                let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
                if libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) == 0 {
                    Ok(())
                } else {
                    Err(std::io::Error::last_os_error())
                }
            });
        }
        let mut server = Server::spawn(command, recipe.port);
        server.wait_ready();
        server
    };
    let server = start();
    let mut client = Client::connect(server.port).unwrap();
    let key = |number: usize| format!("{}{number:06}", ["a", "k", "z"][number % 3]);
    for number in 0..values {
        put(&mut client, &key(number), vec![number as u8; VALUE_BYTES]).unwrap();
    }
    let read = |port: u16| {
        let mut client = Client::connect(port).unwrap();
        for first in ["a", "k", "z"] {
            match client.call(&Request::Range(range(first, 1_000))) {
                Ok(Ok(Response::Range(response))) => assert_eq!(response.kvs.len(), 1_000.min(values / 3)),
                other => panic!("{:?}", other.map(|_| "another answer")),
            }
        }
        match client.call(&Request::RangeStream(range("\0", 0))) {
            Ok(Ok(Response::Range(response))) => assert_eq!(response.kvs.len(), values),
            Ok(Ok(_)) => panic!("another answer"),
            Ok(Err(refusal)) => panic!("{refusal:?}"),
            Err(error) => panic!("{error}"),
        }
    };
    read(server.port);
    // A restart that replays, and an end that makes everything durable.
    server.kill();
    let server = start();
    read(server.port);
    let ended = server.terminate();
    assert_eq!(ended.status.signal(), Some(libc::SIGTERM), "{}", ended.log);
    let server = start();
    read(server.port);
}
