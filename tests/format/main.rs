//! Old files that must open for ever.
//!
//! `store-1/` is a data directory of version 1, as a process left it that was killed: three shards, checkpoints, and
//! a tail of the logs that only replay brings back, with everything in it that a store writes: long keys, values in
//! runs, history, a compaction, changes over all shards, a deletion that is logged as a range. Files are kept up to
//! their last byte that is not zero. What must be found in it is what the plain model of the history test says.
//! `tree-1` is a file of the tree alone; its test stands beside the tree.
//!
//! A format that changes gets a directory of its own beside this one, made by
//! `ETCORE_BLESS=store-N cargo test --test format`; the old ones stay.

#[allow(dead_code, reason = "shared with the history test, which asks for all of it")]
#[path = "../history/client.rs"]
mod client;
#[allow(dead_code, reason = "shared with the history test, which asks for all of it")]
#[path = "../history/model.rs"]
mod model;
#[allow(dead_code, reason = "shared with the process tests, which ask for all of it")]
#[path = "../process/server.rs"]
mod server;

use client::Client;
use etcore::proto::etcdserverpb as pb;
use model::{Model, Request};
use server::Recipe;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SHARDS: &[&str] = &["--shards=3", "--shard-splits=h,p"];
/// Lengths of files are whole multiples of this: a page of the tree, two blocks of the log.
const UNIT_BYTES: usize = 8192;

fn put(key: String, value: Vec<u8>) -> pb::PutRequest {
    pb::PutRequest { key: key.into_bytes().into(), value: value.into(), ..Default::default() }
}

fn txn(puts: impl IntoIterator<Item = pb::PutRequest>) -> Request {
    let op = |put| pb::RequestOp { request: Some(pb::request_op::Request::RequestPut(put)) };
    Request::Txn(pb::TxnRequest { success: puts.into_iter().map(op).collect(), ..Default::default() })
}

fn delete(key: &'static str, range_end: &'static str) -> Request {
    Request::DeleteRange(pb::DeleteRangeRequest {
        key: key.into(),
        range_end: range_end.into(),
        prev_kv: false,
    })
}

/// Up to the orderly end, which leaves everything in the trees.
fn before_the_checkpoint() -> Vec<Request> {
    let letters = ["a", "k", "z"];
    let mut requests = Vec::new();
    for round in 0..3 {
        for letter in letters {
            requests.push(txn((0..120).map(|n| put(format!("{letter}{n:03}"), vec![round; 10 + n]))));
        }
    }
    requests.push(Request::Put(put("k/long value".into(), vec![7; 20_000])));
    requests.push(Request::Put(put("z".repeat(6000), vec![1; 3])));
    requests.push(txn(letters.map(|letter| put(format!("{letter}/everywhere"), vec![2; 100]))));
    requests.push(delete("a05", "a09"));
    requests.push(Request::Compact(pb::CompactionRequest { revision: 7, physical: true }));
    for hundred in 0..11 {
        requests.push(txn((0..100).map(|n| put(format!("many/{hundred:02}{n:02}"), vec![b'm'; 5]))));
    }
    requests
}

/// What stands in the logs only.
fn after_it() -> Vec<Request> {
    vec![
        Request::Put(put("a/last".into(), b"tail".to_vec())),
        // More keys than are logged one by one.
        delete("many/", "many0"),
        txn(["b", "l", "zz"].map(|key| put(key.into(), vec![9; 3000]))),
        delete("k00", "z01"),
        Request::Put(put("k/after".into(), vec![8; 9000])),
    ]
}

/// Everything that can be asked of what is there.
fn questions(model: &Model) -> Vec<Request> {
    let all = |revision| pb::RangeRequest {
        key: b"\0".to_vec().into(),
        range_end: b"\0".to_vec().into(),
        revision,
        ..Default::default()
    };
    let mut requests = vec![
        Request::Range(all(0)),
        Request::RangeStream(all(0)),
        Request::HashKv(pb::HashKvRequest { revision: 0 }),
    ];
    for revision in model.compacted()..=model.revision() {
        requests.push(Request::Range(all(revision)));
        requests.push(Request::HashKv(pb::HashKvRequest { revision }));
    }
    // It can go on, too.
    requests.push(Request::Put(put("a/new".into(), b"life".to_vec())));
    requests.push(delete("a", "b"));
    requests.push(Request::Range(all(0)));
    requests
}

#[track_caller]
fn ask(client: &mut Client, model: &mut Model, requests: Vec<Request>) {
    for request in requests {
        let expected = model.call(&request).reply;
        let reply = client.call(&request).expect("an answer in etcd's form");
        assert!(reply == expected, "{request:?}\n{reply:?}\nshould be\n{expected:?}");
    }
}

fn kept(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/format").join(name)
}

/// Copies a data directory without its lock; `change` sees each file's content.
fn copy(from: &Path, to: &Path, change: &dyn Fn(&mut Vec<u8>)) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy(&from, &to, change);
        } else if entry.file_name() != "LOCK" && entry.file_name() != "FLUSH-METHOD" {
            let mut content = fs::read(&from).unwrap();
            change(&mut content);
            fs::write(&to, content).unwrap();
        }
    }
}

/// Makes the directory of the format of today.
fn bless(name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let recipe = Recipe::new(&data, SHARDS);
    let mut model = Model::new();
    let server = recipe.start();
    ask(&mut Client::connect(recipe.port).unwrap(), &mut model, before_the_checkpoint());
    server.terminate();
    let server = recipe.start();
    ask(&mut Client::connect(recipe.port).unwrap(), &mut model, after_it());
    server.kill();
    copy(&data, &kept(name), &|content| {
        if content.len() % UNIT_BYTES == 0 {
            let used = content.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
            content.truncate(used.next_multiple_of(UNIT_BYTES));
        }
    });
}

#[test]
fn a_store_of_version_1() {
    if let Ok(name) = std::env::var("ETCORE_BLESS") {
        bless(&name);
    }
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    copy(&kept("store-1"), &data, &|_| {});

    let check = || {
        let check = Command::new(env!("CARGO_BIN_EXE_etcore")).arg("check").arg(&data).output().unwrap();
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    };
    check();
    let mut model = Model::new();
    for request in before_the_checkpoint().iter().chain(&after_it()) {
        model.call(request).reply.expect("it was answered");
    }
    let recipe = Recipe::new(&data, SHARDS);
    let server = recipe.start();
    let asked = questions(&model);
    ask(&mut Client::connect(recipe.port).unwrap(), &mut model, asked);
    server.terminate();
    check();
}
