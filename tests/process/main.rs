//! The server as a process: what it refuses to start with, what it bears, how it ends.
//!
//! Each test has a directory, a port and a process of its own and waits for events only. Answers and their
//! meaning are tested elsewhere; here it is the world around them that misbehaves: directories, disks, peers,
//! signals.

#[allow(dead_code, reason = "shared with the history test, which makes every call")]
#[path = "../history/client.rs"]
mod client;
mod disks;
mod ends;
mod memory;
#[allow(dead_code, reason = "shared with the history test, which asks for all of it")]
#[path = "../history/model.rs"]
mod model;
mod peers;
mod places;
mod server;
mod threads;
mod wire;

use client::Client;
use etcore::proto::etcdserverpb as pb;
use model::{Request, Response};
use std::collections::BTreeMap;
use std::path::Path;

/// Keys of three shards, and their boundaries.
const KEYS: [&str; 3] = ["a", "k", "z"];
const THREE_SHARDS: [&str; 2] = ["--shards=3", "--shard-splits=k,m"];

fn put(client: &mut Client, key: &str, value: impl AsRef<[u8]>) -> Result<i64, String> {
    let value = value.as_ref().to_vec().into();
    let put = pb::PutRequest { key: key.as_bytes().to_vec().into(), value, ..pb::PutRequest::default() };
    match client.call(&Request::Put(put))? {
        Ok(Response::Put(response)) => Ok(response.header.map_or(0, |header| header.revision)),
        other => Err(format!("{other:?}")),
    }
}

/// The value of a key.
fn get(client: &mut Client, key: &str) -> Option<Vec<u8>> {
    let range = pb::RangeRequest { key: key.as_bytes().to_vec().into(), ..pb::RangeRequest::default() };
    match client.call(&Request::Range(range)) {
        Ok(Ok(Response::Range(response))) => response.kvs.first().map(|kv| kv.value.to_vec()),
        other => panic!("get {key}: {other:?}"),
    }
}

/// One put in each shard; their values are their keys.
fn fill(port: u16) {
    let mut client = Client::connect(port).unwrap();
    for key in KEYS {
        put(&mut client, key, key).unwrap();
    }
}

fn assert_filled(port: u16) {
    let mut client = Client::connect(port).unwrap();
    for key in KEYS {
        assert_eq!(get(&mut client, key).as_deref(), Some(key.as_bytes()));
    }
}

/// Every file below a directory with its content.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(at) = dirs.pop() {
        for entry in std::fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(dir).unwrap().display().to_string();
            if path.is_dir() {
                found.insert(format!("{name}/"), Vec::new());
                dirs.push(path);
            } else {
                found.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    found
}
