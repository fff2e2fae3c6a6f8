//! etcd's key-value semantics as plainly as they can be written.
//!
//! A list of every change ever made and a map of the present; a look at the past folds the list again. It is
//! slow, and it is written from the description of etcd's behaviour alone (etcd: semantics 0 to 6 and 11.7):
//! it shares no code with the server that it judges, and none may be borrowed. It knows one client at a time,
//! no leases, no users, no alarms.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use etcore::proto::etcdserverpb as pb;
use etcore::proto::mvccpb::KeyValue;
use pb::compare::TargetUnion;
use pb::range_request::{SortOrder, SortTarget};
use pb::request_op::Request as Op;
use pb::response_op::Response as OpResponse;
use prost::Message;

/// One call of a client.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    Range(pb::RangeRequest),
    RangeStream(pb::RangeRequest),
    Put(pb::PutRequest),
    DeleteRange(pb::DeleteRangeRequest),
    Txn(pb::TxnRequest),
    Compact(pb::CompactionRequest),
    HashKv(pb::HashKvRequest),
    Status,
    Defragment,
}

/// What the client got. Of headers only the revision is kept; a stream is folded into the unary answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Response {
    Range(pb::RangeResponse),
    Put(pb::PutResponse),
    DeleteRange(pb::DeleteRangeResponse),
    Txn(pb::TxnResponse),
    Compact(pb::CompactionResponse),
    HashKv(pb::HashKvResponse),
    Status { revision: i64, version: String, errors: Vec<String> },
    Defragment,
}

/// A gRPC status that is not OK.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub code: i32,
    pub text: String,
}

pub type Reply = Result<Response, Refusal>;

/// The answer, and others that are right too because etcd's depends on work in the background.
#[derive(Clone, Debug)]
pub struct Expected {
    pub reply: Reply,
    pub or: Vec<Reply>,
}

const TXN_OPS_MAX: usize = 128;
/// A proposal may have so many bytes, a message so many more (etcd: api 1). The model does not encode
/// proposals; it takes the request's own length, so the generator keeps away from the exact boundary.
pub const REQUEST_BYTES_MAX: usize = 1_572_864;
pub const MESSAGE_BYTES_MAX: usize = REQUEST_BYTES_MAX + 524_288;
/// So many finished compactions keep their hash (etcd: semantics 11.7a).
const HASHES_KEPT: usize = 10;

fn refuse<T>(code: i32, text: &str) -> Result<T, Refusal> {
    Err(Refusal { code, text: text.to_owned() })
}

fn key_empty<T>() -> Result<T, Refusal> {
    refuse(3, "etcdserver: key is not provided")
}

fn key_missing<T>() -> Result<T, Refusal> {
    refuse(3, "etcdserver: key not found")
}

fn key_twice<T>() -> Result<T, Refusal> {
    refuse(3, "etcdserver: duplicate key given in txn request")
}

fn compacted<T>() -> Result<T, Refusal> {
    refuse(11, "etcdserver: mvcc: required revision has been compacted")
}

fn future<T>() -> Result<T, Refusal> {
    refuse(11, "etcdserver: mvcc: required revision is a future revision")
}

/// The live keys at one revision.
type State = BTreeMap<Bytes, KeyValue>;

/// One stored revision; without a value it is a tombstone.
#[derive(Clone)]
struct Change {
    main: i64,
    sub: i64,
    key: Bytes,
    put: Option<KeyValue>,
}

pub struct Model {
    revision: i64,
    /// -1 as long as nothing was ever compacted.
    compacted: i64,
    state: State,
    changes: Vec<Change>,
    /// Every compaction so far, oldest first, with the one before it.
    compactions: Vec<(i64, i64)>,
    /// The compaction that is physically done for certain: a client waited for it.
    removed: i64,
}

/// A mutation under way: nothing of it exists until it is committed.
struct Draft {
    main: i64,
    state: State,
    changes: Vec<Change>,
}

impl Model {
    pub fn new() -> Self {
        Model {
            revision: 1,
            compacted: -1,
            state: State::new(),
            changes: Vec::new(),
            compactions: Vec::new(),
            removed: -1,
        }
    }

    pub fn revision(&self) -> i64 {
        self.revision
    }

    pub fn compacted(&self) -> i64 {
        self.compacted
    }

    pub fn call(&mut self, request: &Request) -> Expected {
        let mut or = Vec::new();
        let reply = message_fits(request).and_then(|()| match request {
            Request::Range(range) => self.range(range).map(Response::Range),
            Request::RangeStream(range) => self.range_stream(range).map(Response::Range),
            Request::Put(put) => self.put(put).map(Response::Put),
            Request::DeleteRange(delete) => self.delete_range(delete).map(Response::DeleteRange),
            Request::Txn(txn) => self.txn(txn).map(Response::Txn),
            Request::Compact(compact) => self.compact(compact).map(Response::Compact),
            Request::HashKv(hash) => {
                or = self.hashes_also_right(hash);
                self.hash_kv(hash.revision)
            }
            Request::Status => Ok(Response::Status {
                revision: self.revision,
                version: "3.7.1".to_owned(),
                errors: Vec::new(),
            }),
            Request::Defragment => Ok(Response::Defragment),
        });
        Expected { reply, or }
    }

    // ---- Range ----

    fn range(&self, request: &pb::RangeRequest) -> Result<pb::RangeResponse, Refusal> {
        range_valid(request)?;
        let state = self.state_at(self.readable(request.revision.max(0))?);
        Ok(pb::RangeResponse { header: header(self.revision), ..list(request, &state) })
    }

    fn range_stream(&self, request: &pb::RangeRequest) -> Result<pb::RangeResponse, Refusal> {
        range_valid(request)?;
        let order = request.sort_order();
        let by_key = order == SortOrder::Ascend && request.sort_target() == SortTarget::Key;
        if order != SortOrder::None && !by_key {
            return refuse(12, "RangeStream does not support custom sort orders");
        }
        if filtered(request) {
            return refuse(12, "RangeStream does not support revision filters");
        }
        self.range(request)
    }

    /// Semantics 2.4.
    fn readable(&self, revision: i64) -> Result<i64, Refusal> {
        match revision {
            revision if revision > self.revision => future(),
            0 => Ok(self.revision),
            revision if revision < self.compacted => compacted(),
            revision => Ok(revision),
        }
    }

    fn state_at(&self, revision: i64) -> State {
        if revision == self.revision {
            return self.state.clone();
        }
        let mut state = State::new();
        for change in self.changes.iter().take_while(|change| change.main <= revision) {
            match &change.put {
                Some(put) => state.insert(change.key.clone(), put.clone()),
                None => state.remove(&change.key),
            };
        }
        state
    }

    // ---- single writes ----

    fn put(&mut self, request: &pb::PutRequest) -> Result<pb::PutResponse, Refusal> {
        put_valid(request)?;
        proposal_fits(request.encoded_len())?;
        put_possible(request, &self.state)?;
        let mut draft = self.draft();
        let prev_kv = draft.put(request)?;
        self.commit(draft);
        Ok(pb::PutResponse { header: header(self.revision), prev_kv })
    }

    fn delete_range(&mut self, request: &pb::DeleteRangeRequest) -> Result<pb::DeleteRangeResponse, Refusal> {
        delete_valid(request)?;
        proposal_fits(request.encoded_len())?;
        let mut draft = self.draft();
        let response = draft.delete(request);
        self.commit(draft);
        Ok(pb::DeleteRangeResponse { header: header(self.revision), ..response })
    }

    fn draft(&self) -> Draft {
        Draft { main: self.revision + 1, state: self.state.clone(), changes: Vec::new() }
    }

    fn commit(&mut self, draft: Draft) {
        if !draft.changes.is_empty() {
            self.revision = draft.main;
            self.state = draft.state;
            self.changes.extend(draft.changes);
        }
    }

    // ---- Txn ----

    fn txn(&mut self, request: &pb::TxnRequest) -> Result<pb::TxnResponse, Refusal> {
        txn_valid(request, TXN_OPS_MAX)?;
        for branch in [&request.success, &request.failure] {
            Touched::by(branch)?;
        }
        if !txn_reads(request) {
            proposal_fits(request.encoded_len())?;
        }
        self.txn_possible(request)?;
        let mut draft = self.draft();
        let response = self.txn_run(request, &mut draft)?;
        self.commit(draft);
        Ok(pb::TxnResponse { header: header(self.revision), ..response })
    }

    /// The branch that is taken: all compares look at the state before the whole transaction (5.9).
    fn taken<'a>(&self, txn: &'a pb::TxnRequest) -> (bool, &'a [pb::RequestOp]) {
        let succeeded = txn.compare.iter().all(|compare| holds(compare, &self.state));
        (succeeded, if succeeded { &txn.success } else { &txn.failure })
    }

    /// What would fail is found before anything is done, in the order of the operations (5.11). Unlike in a plain
    /// Range a negative revision is compared as it is (5.14).
    fn txn_possible(&self, txn: &pb::TxnRequest) -> Result<(), Refusal> {
        for op in self.taken(txn).1 {
            match op.request.as_ref() {
                Some(Op::RequestPut(put)) => put_possible(put, &self.state)?,
                Some(Op::RequestRange(range)) => {
                    if range.revision > self.revision {
                        return future();
                    }
                    if range.revision != 0 && range.revision < self.compacted {
                        return compacted();
                    }
                }
                Some(Op::RequestTxn(txn)) => self.txn_possible(txn)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Headers of the answers inside carry the revision that the draft has come to (5.13).
    fn txn_run(&self, txn: &pb::TxnRequest, draft: &mut Draft) -> Result<pb::TxnResponse, Refusal> {
        let (succeeded, ops) = self.taken(txn);
        let mut responses = Vec::new();
        for op in ops {
            let response = match op.request.as_ref().expect("validated") {
                Op::RequestRange(range) => {
                    let mut response = if range.revision > 0 {
                        list(range, &self.state_at(range.revision))
                    } else {
                        list(range, &draft.state)
                    };
                    response.header = header(draft.revision());
                    OpResponse::ResponseRange(response)
                }
                Op::RequestPut(put) => {
                    let prev_kv = draft.put(put)?;
                    OpResponse::ResponsePut(pb::PutResponse { header: header(draft.revision()), prev_kv })
                }
                Op::RequestDeleteRange(delete) => {
                    let response = draft.delete(delete);
                    let header = header(draft.revision());
                    OpResponse::ResponseDeleteRange(pb::DeleteRangeResponse { header, ..response })
                }
                Op::RequestTxn(nested) => {
                    let response = self.txn_run(nested, draft)?;
                    OpResponse::ResponseTxn(pb::TxnResponse { header: header(0), ..response })
                }
            };
            responses.push(pb::ResponseOp { response: Some(response) });
        }
        Ok(pb::TxnResponse { header: None, succeeded, responses })
    }

    // ---- Compact, HashKV ----

    fn compact(&mut self, request: &pb::CompactionRequest) -> Result<pb::CompactionResponse, Refusal> {
        if request.revision <= self.compacted {
            if request.physical {
                self.removed = self.compacted;
            }
            return compacted();
        }
        if request.revision > self.revision {
            return future();
        }
        self.compactions.push((request.revision, self.compacted));
        self.compacted = request.revision;
        if request.physical {
            self.removed = self.compacted;
        }
        Ok(pb::CompactionResponse { header: header(self.revision) })
    }

    fn hash_kv(&self, revision: i64) -> Reply {
        let revision = if revision == 0 { self.revision } else { revision };
        if revision > 0 && revision < self.compacted {
            return compacted();
        }
        if revision > self.revision {
            return future();
        }
        Ok(self.hash_response(revision, self.compacted, self.compacted, false))
    }

    /// Hashes kept from finished compactions (11.7a), and the one case in which it shows whether a compaction
    /// has removed anything yet: no key is alive (11.7).
    fn hashes_also_right(&self, request: &pb::HashKvRequest) -> Vec<Reply> {
        let revision = if request.revision == 0 { self.revision } else { request.revision };
        let mut right = Vec::new();
        for (to, from) in self.compactions.iter().rev().take(HASHES_KEPT) {
            // Looked up as asked: 0 means the newest only where no hash was kept for 0.
            if *to == request.revision {
                right.push(Ok(self.hash_response(request.revision, *from, *from, true)));
            }
        }
        if (self.compacted..=self.revision).contains(&revision) {
            for (_, from) in self.compactions.iter().filter(|(to, _)| *to > self.removed) {
                right.push(Ok(self.hash_response(revision, self.compacted, *from, false)));
            }
        }
        right
    }

    fn hash_response(&self, revision: i64, compacted: i64, removed: i64, by_compaction: bool) -> Response {
        Response::HashKv(pb::HashKvResponse {
            header: header(self.revision),
            hash: self.hash(revision, compacted, removed, by_compaction),
            compact_revision: compacted,
            hash_revision: revision,
        })
    }

    /// The hash over everything stored up to `revision` once `compacted` was compacted and what `removed`
    /// made superfluous is gone (11.7). A compaction to `revision` itself counts what it keeps, tombstones at
    /// `revision` included, when it asks whether there is anything alive.
    fn hash(&self, revision: i64, compacted: i64, removed: i64, by_compaction: bool) -> u32 {
        let alive: BTreeMap<&Bytes, (i64, i64)> = {
            let mut alive = BTreeMap::new();
            for change in self.changes.iter().take_while(|change| change.main <= revision) {
                match change.put {
                    Some(_) => alive.insert(&change.key, (change.main, change.sub)),
                    None => alive.remove(&change.key),
                };
            }
            alive
        };
        let buried = self.changes.iter().any(|change| change.main == revision && change.put.is_none());
        let any_alive = !alive.is_empty() || (by_compaction && buried);
        let mut newest_removed = BTreeMap::new();
        for change in self.changes.iter().take_while(|change| change.main <= removed) {
            newest_removed.insert(&change.key, (change.main, change.sub));
        }
        let mut hash = crc32c::crc32c(b"key");
        for change in self.changes.iter().take_while(|change| change.main <= revision) {
            let place = (change.main, change.sub);
            if change.main <= removed {
                let newest = newest_removed[&change.key] == place;
                let kept = newest && (change.put.is_some() || change.main == removed);
                if !kept {
                    continue;
                }
            }
            if change.main <= compacted && any_alive && alive.get(&change.key) != Some(&place) {
                continue;
            }
            if change.main == compacted && change.put.is_none() {
                continue;
            }
            let mut key = Vec::new();
            key.extend(change.main.to_be_bytes());
            key.push(b'_');
            key.extend(change.sub.to_be_bytes());
            let value = match &change.put {
                Some(put) => put.encode_to_vec(),
                None => {
                    key.push(b't');
                    KeyValue { key: change.key.clone(), ..KeyValue::default() }.encode_to_vec()
                }
            };
            hash = crc32c::crc32c_append(hash, &key);
            hash = crc32c::crc32c_append(hash, &value);
        }
        hash
    }
}

impl Draft {
    /// What a header inside a transaction says: the new revision as soon as something has changed.
    fn revision(&self) -> i64 {
        if self.changes.is_empty() { self.main - 1 } else { self.main }
    }

    fn record(&mut self, key: &Bytes, put: Option<KeyValue>) {
        let sub = self.changes.len() as i64;
        self.changes.push(Change { main: self.main, sub, key: key.clone(), put });
    }

    fn put(&mut self, request: &pb::PutRequest) -> Result<Option<KeyValue>, Refusal> {
        let previous = self.state.get(&request.key).cloned();
        if previous.is_none() && (request.ignore_value || request.ignore_lease) {
            return key_missing();
        }
        let mut next = KeyValue {
            key: request.key.clone(),
            create_revision: self.main,
            mod_revision: self.main,
            version: 1,
            value: request.value.clone(),
            lease: request.lease,
        };
        if let Some(previous) = &previous {
            next.create_revision = previous.create_revision;
            next.version = previous.version + 1;
            if request.ignore_value {
                next.value = previous.value.clone();
            }
            if request.ignore_lease {
                next.lease = previous.lease;
            }
        }
        self.record(&request.key, Some(next.clone()));
        self.state.insert(request.key.clone(), next);
        Ok(previous.filter(|_| request.prev_kv))
    }

    fn delete(&mut self, request: &pb::DeleteRangeRequest) -> pb::DeleteRangeResponse {
        let gone: Vec<KeyValue> = within(&self.state, &request.key, &request.range_end).cloned().collect();
        for kv in &gone {
            self.state.remove(&kv.key);
            self.record(&kv.key, None);
        }
        pb::DeleteRangeResponse {
            header: None,
            deleted: gone.len() as i64,
            prev_kvs: if request.prev_kv { gone } else { Vec::new() },
        }
    }
}

fn header(revision: i64) -> Option<pb::ResponseHeader> {
    Some(pb::ResponseHeader { revision, ..pb::ResponseHeader::default() })
}

// ---- ranges ----

/// Semantics 2.2.
fn in_range(key: &[u8], start: &[u8], end: &[u8]) -> bool {
    match end {
        [] => key == start,
        [0] => key >= start,
        end => key >= start && key < end,
    }
}

fn within<'a>(state: &'a State, start: &'a [u8], end: &'a [u8]) -> impl Iterator<Item = &'a KeyValue> {
    state.values().filter(move |kv| in_range(&kv.key, start, end))
}

fn filtered(request: &pb::RangeRequest) -> bool {
    request.min_mod_revision != 0
        || request.max_mod_revision != 0
        || request.min_create_revision != 0
        || request.max_create_revision != 0
}

/// Everything of a Range but its header: range, filters, sort, limit (2.11).
fn list(request: &pb::RangeRequest, state: &State) -> pb::RangeResponse {
    let mut kvs: Vec<KeyValue> = within(state, &request.key, &request.range_end).cloned().collect();
    let count = kvs.len() as i64;
    if request.count_only {
        return pb::RangeResponse { count, ..pb::RangeResponse::default() };
    }
    kvs.retain(|kv| {
        let at_least = |bound, value| bound == 0 || value >= bound;
        let at_most = |bound, value| bound == 0 || value <= bound;
        at_least(request.min_mod_revision, kv.mod_revision)
            && at_most(request.max_mod_revision, kv.mod_revision)
            && at_least(request.min_create_revision, kv.create_revision)
            && at_most(request.max_create_revision, kv.create_revision)
    });
    let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    if request.sort_order() == SortOrder::None && !filtered(request) {
        // Unsorted answers are cut first, even if a target then sorts them after all (2.13).
        kvs.truncate(limit.saturating_add(1));
    }
    kvs.sort_by(|a, b| {
        let order = by_target(request.sort_target(), a, b);
        if request.sort_order() == SortOrder::Descend { order.reverse() } else { order }
    });
    let more = kvs.len() > limit;
    kvs.truncate(limit);
    if request.keys_only {
        for kv in &mut kvs {
            kv.value.clear();
            if request.sort_target() != SortTarget::Value {
                kv.lease = 0;
            }
        }
    }
    pb::RangeResponse { header: None, kvs, more, count }
}

pub fn by_target(target: SortTarget, a: &KeyValue, b: &KeyValue) -> Ordering {
    match target {
        SortTarget::Key => a.key.cmp(&b.key),
        SortTarget::Version => a.version.cmp(&b.version),
        SortTarget::Create => a.create_revision.cmp(&b.create_revision),
        SortTarget::Mod => a.mod_revision.cmp(&b.mod_revision),
        SortTarget::Value => a.value.cmp(&b.value),
    }
}

// ---- compares ----

/// Semantics 5.6 to 5.8; an unknown result is true (api 1).
fn holds(compare: &pb::Compare, state: &State) -> bool {
    let found: Vec<&KeyValue> = within(state, &compare.key, &compare.range_end).collect();
    if found.is_empty() {
        let by_value = compare.target == pb::compare::CompareTarget::Value as i32;
        return !by_value && holds_for(compare, &KeyValue::default());
    }
    found.iter().all(|kv| holds_for(compare, kv))
}

fn holds_for(compare: &pb::Compare, kv: &KeyValue) -> bool {
    use pb::compare::{CompareResult, CompareTarget};
    let number = |value: i64, wanted: Option<i64>| value.cmp(&wanted.unwrap_or(0));
    let union = compare.target_union.as_ref();
    let order = match CompareTarget::try_from(compare.target) {
        Ok(CompareTarget::Version) => number(
            kv.version,
            match union {
                Some(TargetUnion::Version(version)) => Some(*version),
                _ => None,
            },
        ),
        Ok(CompareTarget::Create) => number(
            kv.create_revision,
            match union {
                Some(TargetUnion::CreateRevision(revision)) => Some(*revision),
                _ => None,
            },
        ),
        Ok(CompareTarget::Mod) => number(
            kv.mod_revision,
            match union {
                Some(TargetUnion::ModRevision(revision)) => Some(*revision),
                _ => None,
            },
        ),
        Ok(CompareTarget::Lease) => number(
            kv.lease,
            match union {
                Some(TargetUnion::Lease(lease)) => Some(*lease),
                _ => None,
            },
        ),
        Ok(CompareTarget::Value) => match union {
            Some(TargetUnion::Value(value)) => kv.value.cmp(value),
            _ => kv.value.cmp(&Bytes::new()),
        },
        Err(_) => Ordering::Equal,
    };
    match CompareResult::try_from(compare.result) {
        Ok(CompareResult::Equal) => order.is_eq(),
        Ok(CompareResult::NotEqual) => order.is_ne(),
        Ok(CompareResult::Greater) => order.is_gt(),
        Ok(CompareResult::Less) => order.is_lt(),
        Err(_) => true,
    }
}

// ---- validation ----

fn message_fits(request: &Request) -> Result<(), Refusal> {
    let length = encoded_len(request);
    if length > MESSAGE_BYTES_MAX {
        return refuse(
            8,
            &format!("grpc: received message larger than max ({length} vs. {MESSAGE_BYTES_MAX})"),
        );
    }
    Ok(())
}

pub fn encoded_len(request: &Request) -> usize {
    match request {
        Request::Range(range) | Request::RangeStream(range) => range.encoded_len(),
        Request::Put(put) => put.encoded_len(),
        Request::DeleteRange(delete) => delete.encoded_len(),
        Request::Txn(txn) => txn.encoded_len(),
        Request::Compact(compact) => compact.encoded_len(),
        Request::HashKv(hash) => hash.encoded_len(),
        Request::Status | Request::Defragment => 0,
    }
}

fn proposal_fits(length: usize) -> Result<(), Refusal> {
    if length > REQUEST_BYTES_MAX {
        return refuse(3, "etcdserver: request is too large");
    }
    Ok(())
}

fn range_valid(request: &pb::RangeRequest) -> Result<(), Refusal> {
    if request.key.is_empty() {
        return key_empty();
    }
    if SortOrder::try_from(request.sort_order).is_err() || SortTarget::try_from(request.sort_target).is_err()
    {
        return refuse(3, "etcdserver: invalid sort option");
    }
    Ok(())
}

fn put_valid(request: &pb::PutRequest) -> Result<(), Refusal> {
    if request.key.is_empty() {
        return key_empty();
    }
    if request.ignore_value && !request.value.is_empty() {
        return refuse(3, "etcdserver: value is provided");
    }
    if request.ignore_lease && request.lease != 0 {
        return refuse(3, "etcdserver: lease is provided");
    }
    Ok(())
}

/// Semantics 3.2, 3.3. There are no leases yet, so none is found.
fn put_possible(request: &pb::PutRequest, state: &State) -> Result<(), Refusal> {
    if request.lease != 0 {
        return refuse(5, "etcdserver: requested lease not found");
    }
    if (request.ignore_value || request.ignore_lease) && !state.contains_key(&request.key) {
        return key_missing();
    }
    Ok(())
}

fn delete_valid(request: &pb::DeleteRangeRequest) -> Result<(), Refusal> {
    if request.key.is_empty() { key_empty() } else { Ok(()) }
}

/// Semantics 5.1, 5.2.
fn txn_valid(txn: &pb::TxnRequest, ops_max: usize) -> Result<(), Refusal> {
    let ops = txn.compare.len().max(txn.success.len()).max(txn.failure.len());
    if ops > ops_max {
        return refuse(3, "etcdserver: too many operations in txn request");
    }
    if txn.compare.iter().any(|compare| compare.key.is_empty()) {
        return key_empty();
    }
    for op in txn.success.iter().chain(&txn.failure) {
        match op.request.as_ref() {
            Some(Op::RequestRange(range)) => range_valid(range)?,
            Some(Op::RequestPut(put)) => put_valid(put)?,
            Some(Op::RequestDeleteRange(delete)) => delete_valid(delete)?,
            Some(Op::RequestTxn(nested)) => txn_valid(nested, ops_max - ops)?,
            None => return key_missing(),
        }
    }
    Ok(())
}

/// Nothing but ranges in both branches: it is not proposed, so its length does not matter (5.15).
fn txn_reads(txn: &pb::TxnRequest) -> bool {
    txn.success.iter().chain(&txn.failure).all(|op| matches!(op.request, Some(Op::RequestRange(_))))
}

/// Keys put and ranges deleted by one branch, for the rule against duplicates (5.3).
#[derive(Default)]
struct Touched {
    puts: BTreeSet<Bytes>,
    deletes: Vec<(Bytes, Bytes)>,
}

impl Touched {
    fn by(branch: &[pb::RequestOp]) -> Result<Touched, Refusal> {
        let mut touched = Touched::default();
        for op in branch {
            if let Some(Op::RequestDeleteRange(delete)) = op.request.as_ref() {
                touched.deletes.push((delete.key.clone(), delete.range_end.clone()));
            }
        }
        // The puts of a nested transaction stand against the deletes of this branch and of nested transactions
        // before it, not against its own other branch and not against nested transactions after it.
        for op in branch {
            if let Some(Op::RequestTxn(nested)) = op.request.as_ref() {
                let then = Touched::by(&nested.success)?;
                let otherwise = Touched::by(&nested.failure)?;
                for key in then.puts.union(&otherwise.puts) {
                    touched.put(key)?;
                }
                touched.deletes.extend(then.deletes);
                touched.deletes.extend(otherwise.deletes);
            }
        }
        for op in branch {
            if let Some(Op::RequestPut(put)) = op.request.as_ref() {
                touched.put(&put.key)?;
            }
        }
        Ok(touched)
    }

    fn put(&mut self, key: &Bytes) -> Result<(), Refusal> {
        // An open end is not understood here and taken literally: an empty interval (5.4).
        let deleted = |(start, end): &(Bytes, Bytes)| end.as_ref() != [0] && in_range(key, start, end);
        if self.deletes.iter().any(deleted) || !self.puts.insert(key.clone()) {
            return key_twice();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &'static str, value: &'static str) -> pb::PutRequest {
        pb::PutRequest { key: key.into(), value: value.into(), ..pb::PutRequest::default() }
    }

    fn hash(model: &mut Model, revision: i64) -> (u32, i64) {
        match model.call(&Request::HashKv(pb::HashKvRequest { revision })).reply {
            Ok(Response::HashKv(response)) => (response.hash, response.compact_revision),
            other => panic!("{other:?}"),
        }
    }

    fn done(model: &mut Model, request: Request) {
        model.call(&request).reply.expect("the request is valid");
    }

    /// Values that etcd's own tests hold (etcd: semantics 11.7b).
    #[test]
    fn hash_has_etcds_golden_values() {
        let mut model = Model::new();
        assert_eq!(hash(&mut model, 0), (1084519789, -1));
        done(&mut model, Request::Put(put("foo", "bar")));
        assert_eq!(hash(&mut model, 0), (3305255506, -1));
        done(&mut model, Request::Put(put("foo", "baz")));
        assert_eq!(hash(&mut model, 0), (2020292994, -1));
        let delete = pb::DeleteRangeRequest { key: "foo".into(), ..pb::DeleteRangeRequest::default() };
        done(&mut model, Request::DeleteRange(delete));
        assert_eq!(hash(&mut model, 0), (3153096970, -1));

        let mut model = Model::new();
        let success = [put("a", "1"), put("b", "2")]
            .map(|put| pb::RequestOp { request: Some(Op::RequestPut(put)) })
            .to_vec();
        done(&mut model, Request::Txn(pb::TxnRequest { success, ..pb::TxnRequest::default() }));
        assert_eq!(hash(&mut model, 0), (2787448889, -1));
        done(&mut model, Request::Put(put("a", "3")));
        assert_eq!(hash(&mut model, 0), (2026694491, -1));
        done(&mut model, Request::Compact(pb::CompactionRequest { revision: 2, physical: true }));
        assert_eq!(hash(&mut model, 0), (1100288988, 2));
        done(&mut model, Request::Compact(pb::CompactionRequest { revision: 3, physical: true }));
        done(&mut model, Request::Put(put("c", "4")));
        assert_eq!(hash(&mut model, 0), (3936090454, 3));
    }
}
