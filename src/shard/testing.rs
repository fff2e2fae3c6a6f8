//! For tests: a store as plain as can be, a world that evaluates requests on it in every way there is, and
//! random requests.

use super::evaluate::{Outcome, execute, prepare};
use super::gather::{Gathered, gather, touched};
use super::overlay::{Latest, Overlay};
use super::view::{Base, View, Visit, bounds};
use crate::model::{Answer, Change, KeyRange, KeyValue, Record, Rejection, Request, ShardId};
use crate::proto::etcdserverpb::{
    Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    compare::{CompareResult, CompareTarget, TargetUnion},
    request_op,
};
use bytes::Bytes;
use rand::{Rng, rngs::SmallRng, seq::IndexedRandom};
use std::collections::BTreeMap;

/// Every state that the store ever had.
#[derive(Clone, Debug, Default)]
pub struct History {
    states: BTreeMap<i64, BTreeMap<Bytes, KeyValue>>,
    empty: BTreeMap<Bytes, KeyValue>,
}

impl History {
    pub fn apply(&mut self, record: &Record) {
        record.changes.iter().for_each(|change| self.apply_change(record.rev, change));
    }

    pub fn apply_change(&mut self, rev: i64, change: &Change) {
        if let Change::DeleteRange { count, range, lease, .. } = change {
            let doomed = self.doomed(range, *lease);
            assert_eq!(doomed.len(), *count as usize, "{change:?} counts what it deletes");
        }
        self.apply_partly(rev, change, usize::MAX);
    }

    /// As [`History::apply_change`]; of a range deletion no more than `keys` keys.
    pub fn apply_partly(&mut self, rev: i64, change: &Change, keys: usize) {
        let doomed = match change {
            Change::DeleteRange { range, lease, .. } => self.doomed(range, *lease),
            _ => Vec::new(),
        };
        let state = self.state_for(rev);
        match change {
            Change::Put { kv, .. } => {
                assert_eq!(kv.mod_revision, rev);
                let previous = state.insert(kv.key.clone(), kv.clone());
                assert_eq!(kv.version, previous.map_or(1, |previous| previous.version + 1));
            }
            Change::Delete { key, .. } => assert!(state.remove(key).is_some(), "{key:?} is alive"),
            Change::DeleteRange { .. } => doomed.iter().take(keys).for_each(|key| drop(state.remove(key))),
        }
    }

    pub fn latest(&self) -> &BTreeMap<Bytes, KeyValue> {
        self.at(None)
    }

    pub fn at(&self, at: Option<i64>) -> &BTreeMap<Bytes, KeyValue> {
        self.states.range(..=at.unwrap_or(i64::MAX)).next_back().map_or(&self.empty, |(_, state)| state)
    }

    fn state_for(&mut self, rev: i64) -> &mut BTreeMap<Bytes, KeyValue> {
        let latest = self.latest().clone();
        self.states.entry(rev).or_insert(latest)
    }

    fn doomed(&self, range: &KeyRange, lease: i64) -> Vec<Bytes> {
        let of_lease = |kv: &&KeyValue| lease == 0 || kv.lease == lease;
        let kvs = self.latest().values().filter(|kv| range.contains(&kv.key));
        kvs.filter(of_lease).map(|kv| kv.key.clone()).collect()
    }
}

impl Base for History {
    fn get(&self, key: &[u8]) -> Option<KeyValue> {
        self.latest().get(key).cloned()
    }

    fn get_at(&self, key: &[u8], rev: i64) -> Option<KeyValue> {
        self.at(Some(rev)).get(key).cloned()
    }

    fn scan(&self, range: &KeyRange, at: Option<i64>, visit: &mut Visit<'_>) {
        if range.is_empty() {
            return;
        }
        let mut kvs = self.at(at).range::<[u8], _>(bounds(range));
        let _ = kvs.try_for_each(|(_, kv)| visit(kv.into()));
    }

    fn count(&self, range: &KeyRange, at: Option<i64>) -> u64 {
        self.at(at).keys().filter(|key| range.contains(key)).count() as u64
    }
}

/// Evaluates `request` and takes the next revision if it needs one.
pub fn evaluate<V: View>(view: &V, request: &Request) -> Result<Outcome, Rejection> {
    let prepared = prepare(view, request)?;
    let rev = view.point() + i64::from(prepared.changes);
    Ok(execute(view, prepared, rev))
}

/// The pieces of a range map with these boundaries, owned by shards 1, 2, 3, 1, 2, ...
pub fn owners(boundaries: &[&str]) -> Vec<(KeyRange, ShardId)> {
    let ends: Vec<Bytes> = boundaries.iter().map(|key| bytes(key)).collect();
    let starts = std::iter::once(Bytes::new()).chain(ends.iter().cloned());
    let ends = ends.iter().cloned().map(Some).chain([None]);
    let shards = (1..=3).cycle();
    starts.zip(ends).zip(shards).map(|((start, end), shard)| (KeyRange { start, end }, shard)).collect()
}

/// What a coordinator would see of `view` if these shards held it.
pub fn gathered<V: View>(view: &V, request: &Request, owners: &[(KeyRange, ShardId)]) -> Gathered {
    let needs = touched(request);
    let involved = owners.iter().filter(|(owned, _)| {
        needs.keys.is_empty() || needs.keys.iter().any(|need| !need.range.intersect(owned).is_empty())
    });
    let pieces = involved.map(|(owned, shard)| (*shard, gather(view, &needs, owned))).collect();
    Gathered::new(&needs, pieces).expect("the owners cover everything")
}

/// The changes number their effects from 0 without a gap.
pub fn assert_numbered<'c>(changes: impl IntoIterator<Item = &'c Change>) {
    let mut next = 0;
    for change in changes {
        assert_eq!(change.first_sub(), next, "sub-revisions have no gaps");
        next += change.width();
    }
}

/// A store with its revision, to which requests are put one after the other. Each is evaluated on the store as
/// a whole and on pieces gathered from several shards, which must agree.
pub struct World {
    pub history: History,
    pub rev: i64,
    pub compacted: i64,
    pub leases: Vec<i64>,
}

impl World {
    pub fn new() -> Self {
        World { history: History::default(), rev: 1, compacted: -1, leases: vec![] }
    }

    pub fn run(&mut self, request: Request) -> Answer {
        let leases = &self.leases;
        let lease_exists = |lease| leases.contains(&lease);
        let latest = Latest {
            base: &self.history,
            overlay: &Overlay::new(),
            point: self.rev,
            compacted: self.compacted,
            lease_exists: &lease_exists,
        };
        let outcome = evaluate(&latest, &request);
        for boundaries in [&["b"][..], &["a\0", "b", "bb", "c", "c2", "k0300"]] {
            let owners = owners(boundaries);
            let gathered = gathered(&latest, &request, &owners);
            let apart = evaluate(&gathered, &request);
            assert_eq!(
                apart.as_ref().map(|outcome| &outcome.response),
                outcome.as_ref().map(|outcome| &outcome.response),
                "over shards split at {boundaries:?}: {request:?}"
            );
            let Ok(apart) = apart else { continue };
            let mut together = self.history.clone();
            let mut parts: Vec<Change> = Vec::new();
            for (shard, changes) in gathered.split(apart.changes.clone()) {
                for change in &changes {
                    let (owned, owner) =
                        owners.iter().find(|(owned, _)| owned.contains(key(change))).unwrap();
                    assert_eq!(*owner, shard, "each part goes to the owner of its keys");
                    if let Change::DeleteRange { range, .. } = change {
                        assert_eq!(&range.intersect(owned), range, "no range deletion crosses a boundary");
                    }
                }
                parts.extend(changes);
            }
            parts.sort_by_key(Change::first_sub);
            assert_numbered(&parts);
            parts.iter().for_each(|change| together.apply_change(self.rev + 1, change));
            let mut alone = self.history.clone();
            let changes = &outcome.as_ref().expect("both or none").changes;
            changes.iter().for_each(|change| alone.apply_change(self.rev + 1, change));
            assert_eq!(together.latest(), alone.latest());
        }
        let outcome = outcome?;
        assert_numbered(&outcome.changes);
        if !outcome.changes.is_empty() {
            self.rev += 1;
            self.history.apply(&Record {
                rev: self.rev,
                parts: Default::default(),
                changes: outcome.changes,
            });
        }
        Ok(outcome.response)
    }
}

fn key(change: &Change) -> &Bytes {
    match change {
        Change::Put { kv, .. } => &kv.key,
        Change::Delete { key, .. } => key,
        Change::DeleteRange { range, .. } => &range.start,
    }
}

pub fn bytes(text: &str) -> Bytes {
    text.to_owned().into()
}

pub fn put(key: &str, value: &str) -> PutRequest {
    PutRequest { key: bytes(key), value: bytes(value), ..Default::default() }
}

pub fn delete(key: &str, range_end: &str) -> DeleteRangeRequest {
    DeleteRangeRequest { key: bytes(key), range_end: bytes(range_end), prev_kv: false }
}

pub fn range(key: &str, range_end: &str) -> RangeRequest {
    RangeRequest { key: bytes(key), range_end: bytes(range_end), ..Default::default() }
}

pub fn op(request: impl Into<request_op::Request>) -> RequestOp {
    RequestOp { request: Some(request.into()) }
}

impl From<PutRequest> for request_op::Request {
    fn from(request: PutRequest) -> Self {
        request_op::Request::RequestPut(request)
    }
}
impl From<DeleteRangeRequest> for request_op::Request {
    fn from(request: DeleteRangeRequest) -> Self {
        request_op::Request::RequestDeleteRange(request)
    }
}
impl From<RangeRequest> for request_op::Request {
    fn from(request: RangeRequest) -> Self {
        request_op::Request::RequestRange(request)
    }
}
impl From<TxnRequest> for request_op::Request {
    fn from(request: TxnRequest) -> Self {
        request_op::Request::RequestTxn(request)
    }
}

pub fn compare(key: &str, result: CompareResult, union: TargetUnion) -> Compare {
    let target = match union {
        TargetUnion::Version(_) => CompareTarget::Version,
        TargetUnion::CreateRevision(_) => CompareTarget::Create,
        TargetUnion::ModRevision(_) => CompareTarget::Mod,
        TargetUnion::Value(_) => CompareTarget::Value,
        TargetUnion::Lease(_) => CompareTarget::Lease,
    };
    Compare {
        result: result as i32,
        target: target as i32,
        key: bytes(key),
        range_end: Bytes::new(),
        target_union: Some(union),
    }
}

/// Random requests over few keys, so that they meet.
pub struct Dice<'r> {
    pub rng: &'r mut SmallRng,
    /// The store's revision, for revisions asked for.
    pub rev: i64,
}

impl Dice<'_> {
    pub fn request(&mut self) -> Request {
        match self.rng.random_range(0..10) {
            0..4 => Request::Put(self.put()),
            4..6 => Request::DeleteRange(self.delete()),
            6 => Request::Range { request: self.range(), count: true },
            _ => Request::Txn(self.txn(2)),
        }
    }

    fn one(&mut self, of: &[&str]) -> Bytes {
        bytes(of.choose(self.rng).expect("something to choose from"))
    }

    pub fn key(&mut self) -> Bytes {
        self.one(&["a", "a\0", "aa", "b", "ba", "bb", "c", "c1", "c2", "d"])
    }

    pub fn range_end(&mut self) -> Bytes {
        match self.rng.random_range(0..10) {
            0..4 => Bytes::new(),
            4 => Bytes::from_static(b"\0"),
            _ => self.one(&["a", "ab", "b", "bb", "c", "c2", "e"]),
        }
    }

    fn often(&mut self) -> bool {
        self.rng.random_ratio(1, 3)
    }

    fn put(&mut self) -> PutRequest {
        PutRequest {
            key: self.key(),
            value: self.one(&["", "x", "y", "z"]),
            lease: *[0, 0, 0, 1, 2, 9].choose(self.rng).expect("leases"),
            prev_kv: self.often(),
            ignore_value: self.rng.random_ratio(1, 8),
            ignore_lease: self.rng.random_ratio(1, 8),
        }
    }

    fn delete(&mut self) -> DeleteRangeRequest {
        DeleteRangeRequest { key: self.key(), range_end: self.range_end(), prev_kv: self.often() }
    }

    fn range(&mut self) -> RangeRequest {
        let revision = match self.rng.random_range(0..8) {
            0 => self.rng.random_range(-2..self.rev + 2),
            1 => self.rng.random_range((self.rev - 3).max(1)..=self.rev),
            _ => 0,
        };
        RangeRequest {
            key: self.key(),
            range_end: self.range_end(),
            limit: *[0, 0, 1, 2, 5].choose(self.rng).expect("limits"),
            revision,
            sort_order: *[0, 0, 1, 2].choose(self.rng).expect("orders"),
            sort_target: *[0, 0, 1, 2, 3, 4].choose(self.rng).expect("targets"),
            keys_only: self.often(),
            count_only: self.rng.random_ratio(1, 6),
            min_mod_revision: *[0, 0, 0, self.rev - 2].choose(self.rng).expect("filters"),
            max_create_revision: *[0, 0, 0, self.rev - 1].choose(self.rng).expect("filters"),
            ..Default::default()
        }
    }

    fn compare(&mut self) -> Compare {
        let number = *[0, 1, 2, self.rev, self.rev - 1].choose(self.rng).expect("numbers");
        Compare {
            result: self.rng.random_range(0..5),
            target: self.rng.random_range(0..6),
            key: self.key(),
            range_end: self.range_end(),
            target_union: match self.rng.random_range(0..6) {
                0 => Some(TargetUnion::Version(number)),
                1 => Some(TargetUnion::CreateRevision(number)),
                2 => Some(TargetUnion::ModRevision(number)),
                3 => Some(TargetUnion::Value(self.one(&["", "x", "y"]))),
                4 => Some(TargetUnion::Lease(number)),
                _ => None,
            },
        }
    }

    fn ops(&mut self, depth: u32) -> Vec<RequestOp> {
        (0..self.rng.random_range(0..4))
            .map(|_| match self.rng.random_range(0..8) {
                0..3 => op(self.put()),
                3..5 => op(self.delete()),
                5 | 6 => op(self.range()),
                _ if depth > 0 => op(self.txn(depth - 1)),
                _ => op(self.range()),
            })
            .collect()
    }

    fn txn(&mut self, depth: u32) -> TxnRequest {
        TxnRequest {
            compare: (0..self.rng.random_range(0..3)).map(|_| self.compare()).collect(),
            success: self.ops(depth),
            failure: self.ops(depth),
        }
    }

    /// A record of changes that fit the newest state of `history`, range deletions of a few keys and those of
    /// a lease among them; `None` if the dice found nothing to change.
    pub fn record(&mut self, history: &History) -> Option<Record> {
        let rev = self.rev + 1;
        let mut after = history.clone();
        let mut record = Record { rev, parts: Default::default(), changes: Default::default() };
        let mut sub = 0;
        for _ in 0..self.rng.random_range(1..5) {
            let key = self.key();
            let alive = after.latest().get(&key);
            let change = match (self.rng.random_range(0..6), alive) {
                (0, Some(_)) => Change::Delete { sub, key },
                (1 | 2, _) => {
                    let range = KeyRange::from_request(&key, &self.range_end());
                    let lease = *[0, 0, 1, 2].choose(self.rng).expect("leases");
                    let count = after.doomed(&range, lease).len() as u32;
                    Change::DeleteRange { first_sub: sub, count, range, lease }
                }
                (_, alive) => {
                    let kv = KeyValue {
                        create_revision: alive.map_or(rev, |kv| kv.create_revision),
                        mod_revision: rev,
                        version: alive.map_or(1, |kv| kv.version + 1),
                        value: self.one(&["x", "y"]),
                        lease: *[0, 1, 2].choose(self.rng).expect("leases"),
                        key,
                    };
                    Change::Put { sub, kv }
                }
            };
            if change.width() > 0 {
                after.apply_change(rev, &change);
                sub += change.width();
                record.changes.push(change);
            }
        }
        (!record.changes.is_empty()).then_some(record)
    }
}
