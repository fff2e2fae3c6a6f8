//! Everything that parses bytes from outside or from a disk, fed with what nobody wrote: arbitrary bytes, and sound
//! ones with some of them changed. `cargo test` runs each target for a moment; `cargo bolero test` runs one for as
//! long as it is told to. The records of the log are fuzzed beside their parser, in `src/wal/tests.rs`.
//!
//! What must hold everywhere: no panic but one that carries a `Fault`, which is how readers refuse a damaged page.

use bytes::Bytes;
use etcore::api::{Limits, validate};
use etcore::btree::{self, Read, Table, Tree};
use etcore::env::sim::SimDisk;
use etcore::env::{Disk, Open};
use etcore::model::limits::PAGE_BYTES;
use etcore::model::{Change, Fault, KeyRange, KeyValue, Record, Request};
use etcore::mvcc::{self, Applied, Store};
use etcore::proto::{authpb, etcdserverpb as pb, health, v3electionpb, v3lockpb};
use etcore::raft::{Birth, Body, Encoder, Payload, codec};
use etcore::router::RangeMap;
use etcore::shard::evaluate::{execute, prepare};
use etcore::shard::view::{KeyMeta, View, Visit};
use prost::Message;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// Which sound bytes to begin with, what to change in them, and how much of them to leave.
type Damage = (u8, Vec<(u16, u8)>, u16);

fn damaged(corpus: &[Vec<u8>], (which, flips, keep): &Damage) -> Vec<u8> {
    let mut bytes = corpus[*which as usize % corpus.len()].clone();
    for (at, xor) in flips {
        let length = bytes.len().max(1);
        if let Some(byte) = bytes.get_mut(*at as usize % length) {
            *byte ^= xor;
        }
    }
    // Rarely cut: most of the corpus is far shorter.
    bytes.truncate(*keep as usize);
    bytes
}

// ---- requests ---------------------------------------------------------------------------------------------------

/// A store without keys.
struct Nothing;

impl View for Nothing {
    fn get(&self, _: &[u8]) -> Option<KeyValue> {
        None
    }

    fn meta(&self, _: &[u8]) -> Option<KeyMeta> {
        None
    }

    fn get_at(&self, _: &[u8], _: i64) -> Option<KeyValue> {
        None
    }

    fn scan(&self, _: &KeyRange, _: Option<i64>, _: &mut Visit<'_>) {}

    fn count(&self, _: &KeyRange, _: Option<i64>) -> u64 {
        0
    }

    fn point(&self) -> i64 {
        1
    }

    fn compacted(&self) -> i64 {
        -1
    }

    fn lease_exists(&self, _: i64) -> bool {
        false
    }
}

const LIMITS: Limits = Limits { max_request_bytes: 1 << 20, max_txn_ops: 128, member_id: 1 };

/// From the bytes to the answer, as a request goes.
fn serve(bytes: &[u8]) {
    let evaluate = |request: Request| {
        if let Ok(prepared) = prepare(&Nothing, &request) {
            let rev = Nothing.point() + i64::from(prepared.changes);
            execute(&Nothing, prepared, rev);
        }
    };
    if let Ok(request) = pb::PutRequest::decode(bytes)
        && validate::put(&request, &LIMITS).is_ok()
    {
        evaluate(Request::Put(request));
    }
    if let Ok(request) = pb::DeleteRangeRequest::decode(bytes)
        && validate::delete_range(&request, &LIMITS).is_ok()
    {
        evaluate(Request::DeleteRange(request));
    }
    if let Ok(request) = pb::TxnRequest::decode(bytes)
        && validate::txn(&request, &LIMITS).is_ok()
    {
        evaluate(Request::Txn(request));
    }
    if let Ok(request) = pb::RangeRequest::decode(bytes) {
        let _ = (validate::range(&request), validate::range_stream(&request));
    }
    if let Ok(request) = pb::CompactionRequest::decode(bytes) {
        let _ = validate::compact(&request, &LIMITS);
    }
}

macro_rules! decode_all {
    ($bytes:expr, $($message:ty),+ $(,)?) => { $( let _ = <$message>::decode($bytes); )+ };
}

fn decode(bytes: &[u8]) {
    decode_all!(
        bytes,
        pb::HashRequest,
        pb::HashKvRequest,
        pb::SnapshotRequest,
        pb::WatchRequest,
        pb::LeaseGrantRequest,
        pb::LeaseRevokeRequest,
        pb::LeaseCheckpointRequest,
        pb::LeaseKeepAliveRequest,
        pb::LeaseTimeToLiveRequest,
        pb::LeaseLeasesRequest,
        pb::MemberAddRequest,
        pb::MemberRemoveRequest,
        pb::MemberUpdateRequest,
        pb::MemberListRequest,
        pb::MemberPromoteRequest,
        pb::DefragmentRequest,
        pb::MoveLeaderRequest,
        pb::AlarmRequest,
        pb::DowngradeRequest,
        pb::StatusRequest,
        pb::AuthEnableRequest,
        pb::AuthDisableRequest,
        pb::AuthStatusRequest,
        pb::AuthenticateRequest,
        pb::AuthUserAddRequest,
        pb::AuthUserGetRequest,
        pb::AuthUserDeleteRequest,
        pb::AuthUserChangePasswordRequest,
        pb::AuthUserGrantRoleRequest,
        pb::AuthUserRevokeRoleRequest,
        pb::AuthUserListRequest,
        pb::AuthRoleAddRequest,
        pb::AuthRoleGetRequest,
        pb::AuthRoleListRequest,
        pb::AuthRoleDeleteRequest,
        pb::AuthRoleGrantPermissionRequest,
        pb::AuthRoleRevokePermissionRequest,
        authpb::User,
        health::HealthCheckRequest,
        v3electionpb::CampaignRequest,
        v3electionpb::LeaderRequest,
        v3electionpb::ProclaimRequest,
        v3electionpb::ResignRequest,
        v3lockpb::LockRequest,
        v3lockpb::UnlockRequest,
    );
}

/// Sound requests, so that changing a byte of one gets past the first field.
fn requests() -> Vec<Vec<u8>> {
    use pb::{compare, request_op};
    let put =
        pb::PutRequest { key: "key".into(), value: "value".into(), prev_kv: true, ..Default::default() };
    let range = pb::RangeRequest {
        key: "a".into(),
        range_end: "z".into(),
        limit: 3,
        revision: 1,
        sort_order: 2,
        sort_target: 3,
        ..Default::default()
    };
    let delete = pb::DeleteRangeRequest { key: "a".into(), range_end: "\0".into(), prev_kv: true };
    let op = |request| pb::RequestOp { request: Some(request) };
    let compare = pb::Compare {
        result: 1,
        target: 2,
        key: "key".into(),
        range_end: "kez".into(),
        target_union: Some(compare::TargetUnion::ModRevision(0)),
    };
    let inner = pb::TxnRequest {
        compare: vec![compare.clone()],
        success: vec![op(request_op::Request::RequestPut(put.clone()))],
        failure: vec![op(request_op::Request::RequestRange(range.clone()))],
    };
    let txn = pb::TxnRequest {
        compare: vec![compare.clone(), compare],
        success: vec![
            op(request_op::Request::RequestTxn(inner)),
            op(request_op::Request::RequestDeleteRange(delete.clone())),
        ],
        failure: vec![op(request_op::Request::RequestPut(put.clone()))],
    };
    let compact = pb::CompactionRequest { revision: 1, physical: true };
    vec![
        put.encode_to_vec(),
        range.encode_to_vec(),
        delete.encode_to_vec(),
        txn.encode_to_vec(),
        compact.encode_to_vec(),
    ]
}

#[test]
fn requests_of_arbitrary_bytes() {
    bolero::check!().with_type::<Vec<u8>>().with_iterations(3_000).for_each(|bytes| {
        serve(bytes);
        decode(bytes);
    });
}

#[test]
fn requests_with_bytes_changed() {
    let corpus = requests();
    bolero::check!().with_type::<Damage>().with_iterations(10_000).for_each(|damage| {
        let bytes = damaged(&corpus, damage);
        serve(&bytes);
        decode(&bytes);
    });
}

// ---- what the log and the meta group carry -----------------------------------------------------------------------

fn bodies() -> Vec<Vec<u8>> {
    let mut encoder = Encoder::default();
    let kv = KeyValue { key: "k".into(), value: "v".into(), version: 1, ..Default::default() };
    let range = KeyRange { start: "a".into(), end: None };
    let records = vec![
        Record {
            rev: 7,
            parts: [1, 2].into_iter().collect(),
            changes: [
                Change::Put { sub: 0, kv },
                Change::Delete { sub: 1, key: "d".into() },
                Change::DeleteRange { first_sub: 2, count: 2000, range, lease: 5 },
            ]
            .into_iter()
            .collect(),
        },
        Record { rev: 8, parts: Default::default(), changes: Default::default() },
    ];
    let birth = Birth { name: "name".into(), peer_urls: vec!["http://a".into()], ..Default::default() };
    let bodies = [
        Body::Batch(records),
        Body::Cut { r_star: 3 },
        Body::Barrier,
        Body::Init(birth),
        Body::Reign { node: 1 },
        Body::Compact { revision: 9 },
    ];
    bodies.into_iter().map(|body| encoder.payload(&Payload { epoch: 3, v: 2, body }).to_vec()).collect()
}

fn decode_bodies(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    if let Ok(payload) = codec::decode_payload(&bytes) {
        // What was understood can be said again, and means the same.
        let again = Encoder::default().payload(&payload);
        assert_eq!(codec::decode_payload(&again).unwrap(), payload);
    }
    let _ = codec::decode_entry(&bytes);
    let _ = codec::decode_hard_state(&bytes);
}

#[test]
fn bodies_of_arbitrary_bytes() {
    bolero::check!().with_type::<Vec<u8>>().with_iterations(3_000).for_each(|bytes| decode_bodies(bytes));
}

#[test]
fn bodies_with_bytes_changed() {
    let corpus = bodies();
    bolero::check!()
        .with_type::<Damage>()
        .with_iterations(10_000)
        .for_each(|damage| decode_bodies(&damaged(&corpus, damage)));
}

#[test]
fn range_maps() {
    let split = |keys: &[&'static str]| {
        let keys: Vec<Bytes> = keys.iter().map(|key| Bytes::from_static(key.as_bytes())).collect();
        RangeMap::from_splits(&keys).unwrap().to_bytes().to_vec()
    };
    let corpus = [split(&[]), split(&["b"]), split(&["b", "c", "longer"])];
    bolero::check!().with_type::<(Vec<u8>, Damage)>().with_iterations(5_000).for_each(|(bytes, damage)| {
        for bytes in [bytes.clone(), damaged(&corpus, damage)] {
            let Some(map) = RangeMap::from_bytes(bytes.clone().into()) else { continue };
            assert_eq!(map.to_bytes(), bytes);
            let pieces: Vec<_> = map.pieces(&KeyRange::everything()).collect();
            assert!(pieces[0].0.start.is_empty() && pieces.last().unwrap().0.end.is_none());
            for (range, owner) in pieces {
                assert_eq!(map.shard_of(&range.start), owner);
            }
        }
    });
}

#[test]
fn applied_states() {
    let mut whole = Vec::new();
    Applied { configuration: "c".into(), range_set: "r".into(), ..Applied::default() }.encode(&mut whole);
    let corpus = [whole];
    bolero::check!().with_type::<(Vec<u8>, Damage)>().with_iterations(5_000).for_each(|(bytes, damage)| {
        for bytes in [bytes.clone(), damaged(&corpus, damage)] {
            let Ok(applied) = Applied::decode(&bytes) else { continue };
            let mut again = Vec::new();
            applied.encode(&mut again);
            assert_eq!(again, bytes);
        }
    });
}

// ---- pages --------------------------------------------------------------------------------------------------------

const TREE: &str = "/tree";
const TREE_BYTES_MAX: usize = 4 << 20;

/// The file of a shard's tree with all that there can be in one: long keys, runs, inner nodes, a bitmap.
fn tree_file() -> Vec<u8> {
    let disk = SimDisk::with_file_bytes_max(1, TREE_BYTES_MAX);
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let mut store = Store::open(shared, Path::new(TREE), tree_options()).unwrap();
    for rev in 2..120_i64 {
        let key = match rev % 5 {
            0 => "long".repeat(600) + &rev.to_string(),
            _ => format!("key{}", rev % 60),
        };
        let value = vec![rev as u8; if rev % 7 == 0 { 9000 } else { 200 }];
        let known = store.reader().get(key.as_bytes());
        let kv = KeyValue {
            create_revision: known.as_ref().map_or(rev, |kv| kv.create_revision),
            mod_revision: rev,
            version: known.as_ref().map_or(1, |kv| kv.version + 1),
            lease: if rev % 11 == 0 { 5 } else { 0 },
            key: key.into(),
            value: value.into(),
        };
        let change = Change::Put { sub: 0, kv };
        store
            .apply(&Record { rev, parts: Default::default(), changes: [change].into_iter().collect() })
            .unwrap();
        store.applied_mut().revision = rev;
        if rev % 40 == 0 {
            checkpoint(&mut store);
        }
    }
    checkpoint(&mut store);
    drop(store);
    disk.contents(Path::new(TREE)).unwrap()
}

fn checkpoint(store: &mut Store) {
    let mut job = store.checkpoint().unwrap();
    while !job.step().unwrap() {}
    store.checkpoint_finished(job);
}

fn tree_options() -> btree::Options {
    btree::Options { reserve_bytes: TREE_BYTES_MAX as u64 }
}

/// Gives a page the checksum of what it holds now (`btree/page.rs`).
fn sign(page: &mut [u8]) {
    const RUN: u8 = 4;
    let len = u32::from_le_bytes(page[12..16].try_into().unwrap()) as usize;
    // A run's checksum covers its used bytes; where they do not end in this page it stays wrong.
    let end = if page[8] == RUN { (16 + len).min(PAGE_BYTES) } else { PAGE_BYTES };
    let crc = crc32c::crc32c(&page[4..end]);
    page[..4].copy_from_slice(&crc.to_le_bytes());
}

/// A panic must carry a fault.
fn raised<T>(read: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(done) => Some(done),
        Err(panic) if panic.is::<Fault>() => None,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn read_tree(bytes: &[u8]) {
    let disk: Arc<dyn Disk> = Arc::new(SimDisk::with_file_bytes_max(1, TREE_BYTES_MAX));
    let path = Path::new(TREE);
    let file = disk.open(path, Open::Create, false).unwrap();
    file.write_at(0, bytes).unwrap();
    let report = btree::check(&*disk, path, &mvcc::owned_run).unwrap();
    let sound = report.findings.is_empty();
    let opened = raised(|| Tree::open(disk.clone(), path, tree_options()));
    let Some(Ok(tree)) = opened else {
        assert!(!sound, "a file without findings opens");
        return;
    };
    let whole = raised(|| {
        for table in Table::ALL {
            let mut cursor = tree.cursor(table);
            let mut more = cursor.seek(&[]);
            while more {
                std::hint::black_box(cursor.entry());
                more = cursor.next();
            }
            std::hint::black_box((tree.get(table, b"key7"), tree.count(table, b"a", Some(b"z"))));
        }
    });
    assert!(!sound || whole.is_some(), "a file without findings can be read");
}

#[test]
fn pages_with_bytes_changed() {
    let sound = tree_file();
    read_tree(&sound);
    // Faults that readers raise are expected, and too many to be told.
    bolero::check!().with_type::<(bool, Vec<(u8, u16, u8)>, u8)>().with_iterations(300).for_each(
        |(forge, flips, cut)| {
            let mut bytes = sound.clone();
            let pages = bytes.len() / PAGE_BYTES;
            for (page, at, xor) in flips.iter().take(4) {
                let page = *page as usize % pages * PAGE_BYTES;
                // Most of what decides stands in the first bytes.
                let at = if xor % 2 == 0 { *at as usize % PAGE_BYTES } else { *at as usize % 100 };
                bytes[page + at] ^= xor;
                if *forge {
                    sign(&mut bytes[page..page + PAGE_BYTES]);
                }
            }
            if *cut == 0 {
                bytes.truncate(pages / 2 * PAGE_BYTES);
            }
            read_tree(&bytes);
        },
    );
}
