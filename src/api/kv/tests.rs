use super::*;
use crate::model::{Answer, KeyRange, KeyValue};
use futures::executor::block_on;
use pb::kv_server::Kv as _;
use pb::range_request::SortOrder;
use pb::request_op;
use std::sync::{Arc, Mutex};

/// A store with its whole history, which knows ranges and counts what it is asked. When `busy`, each read is
/// followed by a write of a new first key, as if another client wrote between the chunks.
#[derive(Clone, Default)]
struct Store(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    /// By revision; all are puts of different keys.
    history: Vec<KeyValue>,
    busy: bool,
    compacted: i64,
    reads: Vec<(pb::RangeRequest, bool)>,
}

impl Inner {
    fn revision(&self) -> i64 {
        1 + self.history.len() as i64
    }

    fn put(&mut self, key: String, value: Vec<u8>) {
        let revision = self.revision() + 1;
        self.history.push(KeyValue {
            key: key.into(),
            value: value.into(),
            create_revision: revision,
            mod_revision: revision,
            version: 1,
            lease: 0,
        });
    }

    fn range(&self, request: &pb::RangeRequest, count: bool) -> Answer {
        let at = if request.revision > 0 { request.revision } else { self.revision() };
        if at < self.compacted {
            return Err(Rejection::Compacted);
        }
        let range = KeyRange::from_request(&request.key, &request.range_end);
        let mut kvs: Vec<_> = self
            .history
            .iter()
            .filter(|kv| kv.mod_revision <= at && range.contains(&kv.key))
            .cloned()
            .collect();
        kvs.sort_by(|a, b| a.key.cmp(&b.key));
        let total = kvs.len() as i64;
        let limit = if request.limit > 0 { request.limit as usize } else { usize::MAX };
        let more = kvs.len() > limit;
        kvs.truncate(limit);
        if request.sort_target == SortTarget::Mod as i32 {
            kvs.sort_by_key(|kv| kv.mod_revision);
        }
        if request.count_only {
            kvs.clear();
        }
        Ok(model::Response::Range(pb::RangeResponse {
            header: Some(pb::ResponseHeader {
                cluster_id: 1,
                member_id: 2,
                revision: self.revision(),
                raft_term: 3,
            }),
            kvs,
            more: more && !request.count_only,
            count: if count { total } else { 0 },
        }))
    }
}

impl Node for Store {
    async fn call(&self, request: model::Request) -> Answer {
        let model::Request::Range { request, count } = request else {
            unreachable!("only reads are asked for");
        };
        let mut store = self.0.lock().unwrap();
        let answer = store.range(&request, count);
        store.reads.push((request, count));
        if store.busy {
            let key = format!("key-{:05}-new", store.reads.len());
            store.put(key, Vec::new());
        }
        answer
    }
}

const LIMITS: Limits = Limits { max_request_bytes: 4096, max_txn_ops: 128, member_id: 0 };

/// Keys in an order in which revisions are not that of the keys.
fn store(keys: usize, value_bytes: usize) -> Store {
    let store = Store::default();
    for at in 0..keys {
        let key = format!("key-{:05}", at * 7919 % keys);
        store.0.lock().unwrap().put(key, vec![b'x'; value_bytes]);
    }
    store
}

fn everything() -> pb::RangeRequest {
    pb::RangeRequest { key: "k".into(), range_end: "l".into(), ..Default::default() }
}

fn unary(store: &Store, request: &pb::RangeRequest) -> pb::RangeResponse {
    let kv = Kv::new(store.clone(), LIMITS);
    block_on(kv.range(Request::new(request.clone()))).unwrap().into_inner()
}

fn streamed(store: &Store, request: &pb::RangeRequest) -> Vec<Result<pb::RangeResponse, Status>> {
    let kv = Kv::new(store.clone(), LIMITS);
    let stream = block_on(kv.range_stream(Request::new(request.clone()))).unwrap().into_inner();
    let messages: Vec<_> = block_on(stream.collect());
    messages.into_iter().map(|message| message.map(|message| message.range_response.unwrap())).collect()
}

/// The messages as one answer, after checking that only the last says more than keys (etcd: trap A13).
fn joined(messages: Vec<Result<pb::RangeResponse, Status>>) -> pb::RangeResponse {
    let mut messages: Vec<_> = messages.into_iter().map(Result::unwrap).collect();
    let mut whole = messages.pop().expect("at least one message");
    let mut kvs = Vec::new();
    for message in messages {
        assert!(!message.kvs.is_empty());
        assert_eq!((message.header, message.count, message.more), (None, 0, false));
        kvs.extend(message.kvs);
    }
    kvs.append(&mut whole.kvs);
    pb::RangeResponse { kvs, ..whole }
}

#[test]
fn a_stream_is_the_unary_answer_in_pieces() {
    for keys in [0, 1, 9, 10, 11, 25, 500] {
        let store = store(keys, 40);
        for limit in [0, -1, 1, 9, 10, 11, 25, 30, 499, 500, 501] {
            for (order, target) in [
                (SortOrder::None, SortTarget::Key),
                (SortOrder::Ascend, SortTarget::Key),
                // Sorted although no order is named (etcd: semantics 2.12, trap A14).
                (SortOrder::None, SortTarget::Mod),
            ] {
                for count_only in [false, true] {
                    let request = pb::RangeRequest {
                        limit,
                        sort_order: order.into(),
                        sort_target: target.into(),
                        count_only,
                        ..everything()
                    };
                    let whole = unary(&store, &request);
                    assert_eq!(joined(streamed(&store, &request)), whole, "{keys} keys, {request:?}");
                }
            }
        }
    }
}

#[test]
fn chunks_grow_while_they_are_small_and_shrink_when_they_are_big() {
    let sizes = |value_bytes| -> Vec<_> {
        let messages = streamed(&store(60, value_bytes), &everything());
        messages.into_iter().map(|message| message.unwrap().kvs.len()).collect()
    };
    assert_eq!(sizes(1), [10, 20, 30]);
    // About 4 KiB each is what was asked for.
    assert_eq!(sizes(400), [10, 10, 10, 10, 10, 10]);
    assert_eq!(sizes(1500)[..5], [10, 5, 5, 5, 5]);
    // A value above twice the aim still goes, one at a time.
    assert_eq!(sizes(9000)[..5], [10, 5, 2, 1, 1]);
}

#[test]
fn the_count_is_taken_once() {
    let store = store(100, 1);
    streamed(&store, &everything());
    let counts: Vec<_> = store.0.lock().unwrap().reads.iter().map(|(_, count)| *count).collect();
    assert_eq!(counts, [true, false, false, false]);
}

/// etcd: trap A15, for each way to say "the newest", and 2.16 for a named revision.
#[test]
fn a_stream_shows_one_revision_under_writes() {
    for revision in [0, -1, i64::MIN, 201, 150] {
        let store = store(200, 1);
        let request = pb::RangeRequest { revision, ..everything() };
        let whole = unary(&store, &request);
        store.0.lock().unwrap().busy = true;
        assert_eq!(joined(streamed(&store, &request)), whole, "revision {revision}");
        let store = store.0.lock().unwrap();
        assert!(store.reads.len() > 3 && store.revision() > 201, "there were writes between the chunks");
    }
}

#[test]
fn compaction_ends_a_stream_after_what_was_sent() {
    let store = store(50, 1);
    let kv = Kv::new(store.clone(), LIMITS);
    let mut stream = block_on(kv.range_stream(Request::new(everything()))).unwrap().into_inner();
    assert!(block_on(stream.next()).unwrap().is_ok());
    store.0.lock().unwrap().compacted = 1000;
    let ended = block_on(stream.next()).unwrap().unwrap_err();
    assert_eq!(ended.message(), "etcdserver: mvcc: required revision has been compacted");
    assert!(block_on(stream.next()).is_none());
}

#[test]
fn what_a_stream_refuses() {
    let kv = Kv::new(store(1, 1), LIMITS);
    let refused = |request: pb::RangeRequest| {
        let Err(status) = block_on(kv.range_stream(Request::new(request.clone()))) else {
            panic!("{request:?} was not refused");
        };
        (status.code() as i32, status.message().to_owned())
    };
    let sort = "RangeStream does not support custom sort orders";
    let filter = "RangeStream does not support revision filters";
    let descend = SortOrder::Descend.into();
    assert_eq!(refused(pb::RangeRequest { sort_order: descend, ..everything() }), (12, sort.into()));
    assert_eq!(
        refused(pb::RangeRequest {
            sort_order: SortOrder::Ascend.into(),
            sort_target: SortTarget::Mod.into(),
            ..everything()
        }),
        (12, sort.into())
    );
    assert_eq!(refused(pb::RangeRequest { min_mod_revision: 1, ..everything() }), (12, filter.into()));
    assert_eq!(refused(pb::RangeRequest { max_create_revision: -1, ..everything() }), (12, filter.into()));
    // Fields first.
    let empty = pb::RangeRequest { sort_order: descend, ..Default::default() };
    assert_eq!(refused(empty), (3, "etcdserver: key is not provided".into()));
}

#[test]
fn a_proposal_that_is_too_long_never_reaches_the_store() {
    let kv = Kv::new(store(0, 0), LIMITS);
    let value = vec![0; LIMITS.max_request_bytes];
    let put = pb::PutRequest { key: "k".into(), value: value.clone().into(), ..Default::default() };
    let refused = block_on(kv.put(Request::new(put.clone()))).unwrap_err();
    assert_eq!((refused.code() as i32, refused.message()), (3, "etcdserver: request is too large"));
    let op = pb::RequestOp { request: Some(request_op::Request::RequestPut(put)) };
    let txn = pb::TxnRequest { success: vec![op], ..Default::default() };
    let refused = block_on(kv.txn(Request::new(txn))).unwrap_err();
    assert_eq!((refused.code() as i32, refused.message()), (3, "etcdserver: request is too large"));
}
