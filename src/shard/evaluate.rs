//! Evaluation: from a request and the latest state to its answer and its effect (design 3.2; etcd: semantics 2
//! to 6). Done in two halves, because a revision may only be taken by what will change something:
//!
//! - [`prepare`] decides everything: compares, whether anything changes, and every error. After it nothing can
//!   fail, so a revision that was taken is never given back.
//! - [`execute`] makes the answer and the changes, at the revision taken or, if nothing changes, at the point
//!   that evaluation has seen.
//!
//! Both are functions of the view and the request alone; between them the view must stay as it is. Evaluation
//! knows neither who asks nor where keys live: it is the same in a shard and over several
//! (`gather`). Fields were validated before (`api/validate`); what it relied on there is asserted here.

use super::view::{KeyMeta, OwnWrites, View};
use crate::model::{
    Change, KeyRange, KeyValue, KvRef, Rejection, Request, Response, limits::DELETE_KEYS_LOGGED_MAX, select,
};
use crate::proto::etcdserverpb::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, PutRequest, PutResponse, RangeRequest, RangeResponse,
    RequestOp, ResponseHeader, ResponseOp, TxnRequest, TxnResponse,
    compare::{CompareResult, CompareTarget, TargetUnion},
    request_op, response_op,
};
use bytes::Bytes;
use smallvec::SmallVec;
use std::cmp::Ordering;
use std::ops::ControlFlow;

/// As in a record.
pub type Changes = SmallVec<[Change; 1]>;

/// A request that cannot fail any more.
#[derive(Debug)]
pub struct Prepared<'r> {
    /// It changes something: [`execute`] needs a revision of its own.
    pub changes: bool,
    plan: Plan<'r>,
}

#[derive(Debug)]
enum Plan<'r> {
    Range { request: &'r RangeRequest, count: bool },
    Put { request: &'r PutRequest, previous: Option<Previous> },
    DeleteRange(Doomed),
    Txn { request: &'r TxnRequest, path: Path },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The header holds the revision only; ids and term are the caller's to fill.
    pub response: Response,
    /// In the order of their sub-revisions, which count from 0 (etcd: semantics 1.3).
    pub changes: Changes,
}

/// Decides a Range, Put, DeleteRange or Txn; no other request is evaluated.
pub fn prepare<'r, V: View>(view: &V, request: &'r Request) -> Result<Prepared<'r>, Rejection> {
    match request {
        Request::Range { request, count } => {
            select::readable(request.revision, view.point(), view.compacted())?;
            Ok(Prepared { changes: false, plan: Plan::Range { request, count: *count } })
        }
        Request::Put(request) => {
            check_lease(view, request)?;
            let previous = Previous::of(view, request);
            if previous.is_none() && (request.ignore_value || request.ignore_lease) {
                return Err(Rejection::KeyNotFound);
            }
            Ok(Prepared { changes: true, plan: Plan::Put { request, previous } })
        }
        Request::DeleteRange(request) => {
            let doomed = Doomed::of(view, request);
            Ok(Prepared { changes: doomed.count() > 0, plan: Plan::DeleteRange(doomed) })
        }
        Request::Txn(request) => {
            let path = Path::of(view, request);
            path.check(view, request)?;
            Ok(Prepared { changes: path.changes(view, request), plan: Plan::Txn { request, path } })
        }
        other => panic!("{other:?} is not decided by evaluation"),
    }
}

/// Answer and effect of what was prepared on this very view. `rev` is the revision taken, or the view's point
/// if nothing changes.
pub fn execute<V: View>(view: &V, prepared: Prepared<'_>, rev: i64) -> Outcome {
    assert!(
        if prepared.changes { rev > view.point() } else { rev == view.point() },
        "a change has a revision of its own, anything else the point it has seen"
    );
    let mut changes = Changes::new();
    let response = match prepared.plan {
        Plan::Range { request, count } => {
            let mut response = range(view, request, rev);
            if !count {
                response.count = 0;
            }
            Response::Range(response)
        }
        Plan::Put { request, previous } => {
            let (kv, response) = put(request, previous, rev);
            changes.push(Change::Put { sub: 0, kv });
            Response::Put(response)
        }
        Plan::DeleteRange(doomed) => {
            doomed.log(0, &mut changes);
            Response::DeleteRange(doomed.into_response(rev))
        }
        Plan::Txn { request, path } => {
            // Revisions between the point and the one taken belong to other shards and touch nothing that this
            // change looks at: the state before it is the state at the revision before its own.
            let before = if prepared.changes { rev - 1 } else { rev };
            let mut run =
                Run { own: OwnWrites::new(view), path: path.0.iter(), before, rev, sub: 0, changes };
            let mut response = run.txn(request, true);
            changes = run.changes;
            assert_eq!(changes.is_empty(), !prepared.changes, "prepare knew whether the transaction writes");
            response.header = header(rev);
            Response::Txn(response)
        }
    };
    Outcome { response, changes }
}

/// Whether a compaction to `revision` is accepted (etcd: semantics 6.1). `compacted` is -1 if nothing was ever
/// compacted.
pub fn check_compact(revision: i64, current: i64, compacted: i64) -> Result<(), Rejection> {
    match revision {
        r if r <= compacted => Err(Rejection::Compacted),
        r if r > current => Err(Rejection::FutureRev),
        _ => Ok(()),
    }
}

fn header(revision: i64) -> Option<ResponseHeader> {
    Some(ResponseHeader { revision, ..Default::default() })
}

// ---- Range ----

fn range<V: View>(view: &V, request: &RangeRequest, header_revision: i64) -> RangeResponse {
    let at = (request.revision > 0).then_some(request.revision);
    let mut response = if request.range_end.is_empty() {
        let kv = match at {
            Some(rev) => view.get_at(&request.key, rev),
            None if select::values(request) => view.get(&request.key),
            None => view.meta(&request.key).map(|meta| meta.with(request.key.clone(), Bytes::new())),
        };
        let count = u64::from(kv.is_some());
        let mut selector = select::Selector::new(request);
        if let Some(kv) = kv.filter(|_| !request.count_only) {
            let _ = selector.take_owned(kv);
        }
        selector.finish(count)
    } else {
        let range = KeyRange::from_request(&request.key, &request.range_end);
        select::answer(request, |visit| view.scan(&range, at, visit), || view.count(&range, at))
    };
    response.header = header(header_revision);
    response
}

// ---- Put ----

/// What a Put needs to know of the key it overwrites.
#[derive(Debug)]
struct Previous {
    meta: KeyMeta,
    /// Fetched only if the request asks for it.
    kv: Option<KeyValue>,
}

impl Previous {
    fn of<V: View>(view: &V, request: &PutRequest) -> Option<Previous> {
        if request.prev_kv || request.ignore_value {
            let kv = view.get(&request.key)?;
            Some(Previous { meta: KeyMeta::from(&kv), kv: Some(kv) })
        } else {
            view.meta(&request.key).map(|meta| Previous { meta, kv: None })
        }
    }
}

/// etcd: semantics 3.2; looked at before the key's existence.
fn check_lease<V: View>(view: &V, request: &PutRequest) -> Result<(), Rejection> {
    match request.lease {
        0 => Ok(()),
        lease if view.lease_exists(lease) => Ok(()),
        _ => Err(Rejection::LeaseNotFound),
    }
}

fn put(request: &PutRequest, previous: Option<Previous>, rev: i64) -> (KeyValue, PutResponse) {
    let (meta, previous) = match previous {
        Some(previous) => (Some(previous.meta), previous.kv),
        None => (None, None),
    };
    let known = "the key that a Put keeps something of exists";
    let kv = KeyValue {
        key: request.key.clone(),
        create_revision: meta.map_or(rev, |meta| meta.create_revision),
        mod_revision: rev,
        version: meta.map_or(1, |meta| meta.version + 1),
        value: match request.ignore_value {
            true => previous.as_ref().expect(known).value.clone(),
            false => request.value.clone(),
        },
        lease: if request.ignore_lease { meta.expect(known).lease } else { request.lease },
    };
    (kv, PutResponse { header: header(rev), prev_kv: previous.filter(|_| request.prev_kv) })
}

// ---- DeleteRange ----

/// What a DeleteRange will remove.
#[derive(Debug)]
struct Doomed {
    keys: DoomedKeys,
    /// For the answer, if asked for; in key order.
    previous: Vec<KeyValue>,
}

#[derive(Debug)]
enum DoomedKeys {
    /// In key order.
    Each(SmallVec<[Bytes; 1]>),
    /// Too many to log one by one (design 3.2): each piece of the range map with its count, none of them 0.
    Ranges(SmallVec<[(KeyRange, u32); 1]>),
}

impl Doomed {
    fn of<V: View>(view: &V, request: &DeleteRangeRequest) -> Doomed {
        if request.range_end.is_empty() {
            return Doomed::point(view, request);
        }
        let range = KeyRange::from_request(&request.key, &request.range_end);
        let count = view.count(&range, None);
        let mut keys = SmallVec::new();
        let mut previous = Vec::new();
        if request.prev_kv {
            scan_all(view, &range, |kv| previous.push(kv.to_owned()));
            assert_eq!(previous.len() as u64, count, "a scan finds as many keys as a count");
        }
        if count > DELETE_KEYS_LOGGED_MAX as u64 {
            let pieces = view.pieces(&range).into_iter().map(|piece| {
                let count = u32::try_from(view.count(&piece, None)).expect("fewer keys than sub-revisions");
                (piece, count)
            });
            return Doomed {
                keys: DoomedKeys::Ranges(pieces.filter(|(_, count)| *count > 0).collect()),
                previous,
            };
        }
        match request.prev_kv {
            true => keys.extend(previous.iter().map(|kv| kv.key.clone())),
            false if count == 0 => {}
            false => scan_all(view, &range, |kv| keys.push(Bytes::copy_from_slice(kv.key))),
        }
        Doomed { keys: DoomedKeys::Each(keys), previous }
    }

    fn point<V: View>(view: &V, request: &DeleteRangeRequest) -> Doomed {
        let mut previous = Vec::new();
        let exists = match request.prev_kv {
            true => {
                previous.extend(view.get(&request.key));
                !previous.is_empty()
            }
            false => view.meta(&request.key).is_some(),
        };
        let keys = exists.then(|| request.key.clone()).into_iter().collect();
        Doomed { keys: DoomedKeys::Each(keys), previous }
    }

    fn count(&self) -> u64 {
        match &self.keys {
            DoomedKeys::Each(keys) => keys.len() as u64,
            DoomedKeys::Ranges(ranges) => ranges.iter().map(|(_, count)| u64::from(*count)).sum(),
        }
    }

    /// Appends the changes, numbered from `sub`; returns the next number.
    fn log(&self, mut sub: u32, changes: &mut Changes) -> u32 {
        match &self.keys {
            DoomedKeys::Each(keys) => {
                for key in keys {
                    changes.push(Change::Delete { sub, key: key.clone() });
                    sub += 1;
                }
            }
            DoomedKeys::Ranges(ranges) => {
                for (range, count) in ranges {
                    let (range, count) = (range.clone(), *count);
                    changes.push(Change::DeleteRange { first_sub: sub, count, range, lease: 0 });
                    sub = sub.checked_add(count).expect("fewer changes than sub-revisions");
                }
            }
        }
        sub
    }

    fn into_response(self, header_revision: i64) -> DeleteRangeResponse {
        DeleteRangeResponse {
            header: header(header_revision),
            deleted: self.count() as i64,
            prev_kvs: self.previous,
        }
    }
}

fn scan_all<V: View>(view: &V, range: &KeyRange, mut visit: impl FnMut(KvRef<'_>)) {
    view.scan(range, None, &mut |kv| {
        visit(kv);
        ControlFlow::Continue(())
    });
}

// ---- Txn ----

/// The way through a transaction: what the compares of each transaction on the way said, in the order in which
/// operations run. All of them look at the state before the transaction (etcd: semantics 5.9).
#[derive(Debug)]
struct Path(Vec<bool>);

impl Path {
    fn of<V: View>(view: &V, request: &TxnRequest) -> Path {
        let mut path = Path(Vec::new());
        path.extend(view, request);
        path
    }

    fn extend<V: View>(&mut self, view: &V, request: &TxnRequest) {
        let succeeded = request.compare.iter().all(|compare| holds(view, compare));
        self.0.push(succeeded);
        for op in branch(request, succeeded) {
            if let request_op::Request::RequestTxn(nested) = member(op) {
                self.extend(view, nested);
            }
        }
    }

    /// Calls `visit` for each operation that runs, in order, nested transactions unfolded.
    fn walk<'r>(
        &self,
        request: &'r TxnRequest,
        visit: &mut impl FnMut(&'r request_op::Request) -> Result<(), Rejection>,
    ) -> Result<(), Rejection> {
        fn step<'r>(
            succeeded: &mut impl Iterator<Item = bool>,
            request: &'r TxnRequest,
            visit: &mut impl FnMut(&'r request_op::Request) -> Result<(), Rejection>,
        ) -> Result<(), Rejection> {
            let here = succeeded.next().expect("the path covers every transaction on the way");
            branch(request, here).iter().try_for_each(|op| match member(op) {
                request_op::Request::RequestTxn(nested) => step(succeeded, nested, visit),
                other => visit(other),
            })
        }
        step(&mut self.0.iter().copied(), request, visit)
    }

    /// Every error that etcd reports when it applies a transaction, in its order; all of it is held against
    /// the state before the transaction (etcd: semantics 5.11).
    fn check<V: View>(&self, view: &V, request: &TxnRequest) -> Result<(), Rejection> {
        use request_op::Request::{RequestDeleteRange, RequestPut, RequestRange};
        // Keeping puts after range deletions: only these can meet the case below.
        let mut deletes = false;
        let mut keeps_deleted = false;
        self.walk(request, &mut |op| match op {
            RequestRange(range) => select::readable_in_txn(range.revision, view.point(), view.compacted()),
            RequestPut(put) => {
                check_lease(view, put)?;
                let keeps = put.ignore_value || put.ignore_lease;
                if keeps && view.meta(&put.key).is_none() {
                    return Err(Rejection::KeyNotFound);
                }
                keeps_deleted |= keeps && deletes;
                Ok(())
            }
            RequestDeleteRange(_) => {
                deletes = true;
                Ok(())
            }
            _ => Ok(()),
        })?;
        if !keeps_deleted {
            return Ok(());
        }
        // A put that keeps value or lease of a key that this very transaction deletes before it. Validation
        // refuses most of these as duplicates, but not a deletion with an open end (etcd: semantics 5.4; trap
        // B9: etcd itself dies of it).
        let mut own = OwnWrites::new(view);
        self.walk(request, &mut |op| {
            match op {
                RequestPut(put) => {
                    let existed = own.meta(&put.key).is_some();
                    if !existed && (put.ignore_value || put.ignore_lease) {
                        return Err(Rejection::KeyNotFound);
                    }
                    own.put(KeyValue { key: put.key.clone(), ..Default::default() }, existed);
                }
                RequestDeleteRange(delete) => {
                    let range = KeyRange::from_request(&delete.key, &delete.range_end);
                    if !range.is_empty() {
                        own.delete_range(&range);
                    }
                }
                _ => {}
            }
            Ok(())
        })
    }

    /// A put always changes something; without one, the first deletion that does still sees the state before
    /// the transaction.
    fn changes<V: View>(&self, view: &V, request: &TxnRequest) -> bool {
        use request_op::Request::{RequestDeleteRange, RequestPut};
        let mut puts = false;
        let mut deletes = Vec::new();
        let walked = self.walk(request, &mut |op| {
            match op {
                RequestPut(_) => puts = true,
                RequestDeleteRange(delete) => deletes.push(delete),
                _ => {}
            }
            Ok(())
        });
        walked.expect("nothing was refused");
        puts || deletes.iter().any(|delete| {
            if delete.range_end.is_empty() {
                view.meta(&delete.key).is_some()
            } else {
                view.count(&KeyRange::from_request(&delete.key, &delete.range_end), None) > 0
            }
        })
    }
}

fn branch(request: &TxnRequest, succeeded: bool) -> &[RequestOp] {
    if succeeded { &request.success } else { &request.failure }
}

fn member(op: &RequestOp) -> &request_op::Request {
    op.request.as_ref().expect("validation refuses operations without a request")
}

/// etcd: semantics 5.5 to 5.8.
fn holds<V: View>(view: &V, compare: &Compare) -> bool {
    let by_value = compare.target == CompareTarget::Value as i32;
    let mut empty = true;
    let mut holds = true;
    let mut look = |kv: KvRef<'_>| {
        empty = false;
        holds = related(compare, kv);
        if holds { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    if !compare.range_end.is_empty() {
        view.scan(&KeyRange::from_request(&compare.key, &compare.range_end), None, &mut look);
    } else {
        let kv = match by_value {
            true => view.get(&compare.key),
            false => view.meta(&compare.key).map(|meta| meta.with(Bytes::new(), Bytes::new())),
        };
        let _ = kv.as_ref().map(|kv| look(kv.into()));
    }
    if empty { !by_value && related(compare, (&KeyValue::default()).into()) } else { holds }
}

/// A target or a result with a number that etcd does not know counts as equal, or as true.
fn related(compare: &Compare, kv: KvRef<'_>) -> bool {
    let union = compare.target_union.as_ref();
    let order = match CompareTarget::try_from(compare.target) {
        Ok(CompareTarget::Value) => kv.value.cmp(match union {
            Some(TargetUnion::Value(value)) => value.as_ref(),
            _ => &[],
        }),
        Ok(CompareTarget::Version) => kv.version.cmp(match union {
            Some(TargetUnion::Version(version)) => version,
            _ => &0,
        }),
        Ok(CompareTarget::Create) => kv.create_revision.cmp(match union {
            Some(TargetUnion::CreateRevision(revision)) => revision,
            _ => &0,
        }),
        Ok(CompareTarget::Mod) => kv.mod_revision.cmp(match union {
            Some(TargetUnion::ModRevision(revision)) => revision,
            _ => &0,
        }),
        Ok(CompareTarget::Lease) => kv.lease.cmp(match union {
            Some(TargetUnion::Lease(lease)) => lease,
            _ => &0,
        }),
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

/// A transaction being executed.
struct Run<'v, 'p, V> {
    own: OwnWrites<'v, V>,
    path: std::slice::Iter<'p, bool>,
    /// The view's point: what headers show before the first change.
    before: i64,
    rev: i64,
    /// The next sub-revision.
    sub: u32,
    changes: Changes,
}

impl<V: View> Run<'_, '_, V> {
    /// `last`: nothing runs after this transaction, so that nobody looks at what its last operation wrote.
    fn txn(&mut self, request: &TxnRequest, last: bool) -> TxnResponse {
        let succeeded = *self.path.next().expect("the path covers every transaction on the way");
        let ops = branch(request, succeeded);
        let responses = ops.iter().enumerate().map(|(i, op)| {
            let last = last && i + 1 == ops.len();
            ResponseOp { response: Some(self.op(member(op), last)) }
        });
        // A nested transaction has a header, and it is empty (etcd: api, section 3).
        TxnResponse { header: Some(ResponseHeader::default()), succeeded, responses: responses.collect() }
    }

    fn op(&mut self, op: &request_op::Request, last: bool) -> response_op::Response {
        use {request_op::Request::*, response_op::Response::*};
        match op {
            RequestRange(request) => ResponseRange(range(&self.own, request, self.shown())),
            RequestPut(request) => {
                let previous = Previous::of(&self.own, request);
                let existed = previous.is_some();
                let (kv, response) = put(request, previous, self.rev);
                if !last {
                    self.own.put(kv.clone(), existed);
                }
                self.changes.push(Change::Put { sub: self.sub, kv });
                self.sub += 1;
                ResponsePut(response)
            }
            RequestDeleteRange(request) => {
                let doomed = Doomed::of(&self.own, request);
                if !last && doomed.count() > 0 {
                    match request.range_end.is_empty() {
                        true => self.own.delete(request.key.clone()),
                        false => {
                            self.own.delete_range(&KeyRange::from_request(&request.key, &request.range_end))
                        }
                    }
                }
                self.sub = doomed.log(self.sub, &mut self.changes);
                ResponseDeleteRange(doomed.into_response(self.shown()))
            }
            RequestTxn(request) => ResponseTxn(self.txn(request, last)),
        }
    }

    /// What a header shows now (etcd: semantics 5.13).
    fn shown(&self) -> i64 {
        if self.changes.is_empty() { self.before } else { self.rev }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Dice, World, bytes, compare, delete, op, put, range};
    use super::*;
    use CompareResult::{Equal, Greater, Less, NotEqual};
    use Rejection::*;
    use rand::{SeedableRng, rngs::SmallRng};

    impl World {
        fn put(&mut self, request: PutRequest) -> Result<PutResponse, Rejection> {
            match self.run(Request::Put(request))? {
                Response::Put(response) => Ok(response),
                other => panic!("{other:?}"),
            }
        }

        fn delete(&mut self, request: DeleteRangeRequest) -> DeleteRangeResponse {
            match self.run(Request::DeleteRange(request)) {
                Ok(Response::DeleteRange(response)) => response,
                other => panic!("{other:?}"),
            }
        }

        fn range(&mut self, request: RangeRequest) -> Result<RangeResponse, Rejection> {
            match self.run(Request::Range { request, count: true })? {
                Response::Range(response) => Ok(response),
                other => panic!("{other:?}"),
            }
        }

        fn txn(&mut self, request: TxnRequest) -> Result<TxnResponse, Rejection> {
            match self.run(Request::Txn(request))? {
                Response::Txn(response) => Ok(response),
                other => panic!("{other:?}"),
            }
        }

        fn get(&mut self, key: &str) -> Option<KeyValue> {
            self.range(range(key, "")).unwrap().kvs.pop()
        }

        fn holds(&mut self, compare: Compare) -> bool {
            self.txn(TxnRequest { compare: vec![compare], ..Default::default() }).unwrap().succeeded
        }
    }

    fn shown(header: &Option<ResponseHeader>) -> i64 {
        header.expect("a header").revision
    }

    fn all(success: Vec<RequestOp>) -> TxnRequest {
        TxnRequest { success, ..Default::default() }
    }

    fn keys(kvs: &[KeyValue]) -> Vec<&[u8]> {
        kvs.iter().map(|kv| kv.key.as_ref()).collect()
    }

    /// etcd: semantics 1.1 to 1.6, 3.4, 3.5, 4.2 to 4.5; traps A1, D6.
    #[test]
    fn revisions_versions_and_leases_of_a_key() {
        let mut world = World::new();
        world.leases = vec![7, 8];
        assert_eq!(shown(&world.range(range("k", "")).unwrap().header), 1);

        let response = world.put(PutRequest { lease: 7, prev_kv: true, ..put("k", "v") }).unwrap();
        assert_eq!((shown(&response.header), response.prev_kv), (2, None));
        let first = world.get("k").unwrap();
        assert_eq!((first.create_revision, first.mod_revision, first.version, first.lease), (2, 2, 1, 7));

        // An equal value is a change all the same; no lease detaches.
        let response = world.put(PutRequest { prev_kv: true, ..put("k", "v") }).unwrap();
        assert_eq!(response.prev_kv, Some(first));
        let second = world.get("k").unwrap();
        assert_eq!((second.create_revision, second.mod_revision, second.version, second.lease), (2, 3, 2, 0));
        world.put(PutRequest { lease: 8, ..put("k", "v") }).unwrap();
        assert_eq!(world.get("k").unwrap().lease, 8);

        let response = world.delete(delete("absent", ""));
        assert_eq!((shown(&response.header), response.deleted), (4, 0));
        let last = world.get("k").unwrap();
        let response = world.delete(DeleteRangeRequest { prev_kv: true, ..delete("k", "") });
        assert_eq!((shown(&response.header), response.deleted, response.prev_kvs), (5, 1, vec![last]));

        world.put(put("k", "")).unwrap();
        let again = world.get("k").unwrap();
        assert_eq!((again.create_revision, again.version, again.value.len()), (6, 1, 0));
        assert_eq!(shown(&world.txn(TxnRequest::default()).unwrap().header), 6, "an empty transaction");
    }

    /// etcd: semantics 2.2 to 2.5, 4.4; traps A4, A11.
    #[test]
    fn ranges_of_keys_and_revisions() {
        let mut world = World::new();
        for key in ["a", "aa", "b", "c", "c2"] {
            world.put(put(key, key)).unwrap();
        }
        let cases: [(&str, &str, &[&str]); 6] = [
            ("a", "", &["a"]),
            ("a", "b", &["a", "aa"]),
            ("b", "\0", &["b", "c", "c2"]),
            ("\0", "\0", &["a", "aa", "b", "c", "c2"]),
            ("b", "a", &[]),
            ("b", "b", &[]),
        ];
        for (key, end, expected) in cases {
            let expected: Vec<&[u8]> = expected.iter().map(|key| key.as_bytes()).collect();
            let response = world.range(range(key, end)).unwrap();
            assert_eq!((keys(&response.kvs), response.count), (expected.clone(), expected.len() as i64));
            let response = world.range(RangeRequest { count_only: true, ..range(key, end) }).unwrap();
            assert_eq!((response.kvs.len(), response.count), (0, expected.len() as i64));
            let past = world.range(RangeRequest { revision: 6, ..range(key, end) }).unwrap();
            assert_eq!(keys(&past.kvs), expected);
        }
        let past = world.range(RangeRequest { revision: 3, ..range("a", "\0") }).unwrap();
        assert_eq!((keys(&past.kvs), shown(&past.header)), (vec![&b"a"[..], b"aa"], 6));
        let future = RangeRequest { revision: 7, ..range("a", "") };
        assert_eq!(world.range(future), Err(FutureRev));
        world.compacted = 4;
        assert_eq!(world.range(RangeRequest { revision: 3, ..range("a", "") }), Err(Compacted));
        assert!(world.range(RangeRequest { revision: 4, ..range("a", "") }).is_ok());
        assert!(world.range(RangeRequest { revision: -1, ..range("a", "") }).is_ok());

        let response = world.delete(DeleteRangeRequest { prev_kv: true, ..delete("aa", "c2") });
        assert_eq!((response.deleted, keys(&response.prev_kvs)), (3, vec![&b"aa"[..], b"b", b"c"]));
        assert_eq!(world.delete(delete("b", "a")).deleted, 0);
        assert_eq!(world.delete(delete("\0", "\0")).deleted, 2);
    }

    /// etcd: semantics 3.2, 3.3.
    #[test]
    fn a_put_may_keep_value_and_lease() {
        let mut world = World::new();
        world.leases = vec![7];
        let keep = PutRequest { ignore_value: true, ..put("k", "") };
        assert_eq!(world.put(PutRequest { lease: 5, ..keep.clone() }), Err(LeaseNotFound), "before the key");
        assert_eq!(world.put(keep.clone()), Err(KeyNotFound));
        assert_eq!(world.put(PutRequest { ignore_lease: true, ..put("k", "v") }), Err(KeyNotFound));
        assert_eq!(world.rev, 1);

        world.put(PutRequest { lease: 7, ..put("k", "v") }).unwrap();
        world.put(PutRequest { ignore_lease: true, ..put("k", "w") }).unwrap();
        let kv = world.get("k").unwrap();
        assert_eq!((kv.value.as_ref(), kv.lease, kv.version), (&b"w"[..], 7, 2));
        let both = PutRequest { ignore_lease: true, prev_kv: true, ..keep.clone() };
        assert_eq!(world.put(both).unwrap().prev_kv, Some(kv));
        let kv = world.get("k").unwrap();
        assert_eq!((kv.value.as_ref(), kv.lease, kv.version, kv.mod_revision), (&b"w"[..], 7, 3, 4));
        assert_eq!(world.put(keep).unwrap().prev_kv, None, "fetched, but not asked for");
        assert_eq!(world.get("k").unwrap().lease, 0);
    }

    /// etcd: semantics 5.5 to 5.8; trap B2.
    #[test]
    fn compares() {
        let mut world = World::new();
        world.leases = vec![7];
        world.put(PutRequest { lease: 7, ..put("a", "v") }).unwrap();
        world.put(put("a", "v")).unwrap();
        world.put(PutRequest { lease: 7, ..put("b", "w") }).unwrap();
        use TargetUnion::*;
        let value = |text| Value(bytes(text));
        for (key, result, union, expected) in [
            ("a", Equal, Version(2), true),
            ("a", Greater, Version(1), true),
            ("a", Less, Version(2), false),
            ("a", NotEqual, CreateRevision(2), false),
            ("a", Equal, ModRevision(3), true),
            ("a", Equal, Lease(0), true),
            ("b", Equal, Lease(7), true),
            ("a", Equal, value("v"), true),
            ("a", Less, value("w"), true),
            ("a", NotEqual, value("v"), false),
            // 5.6
            ("absent", Equal, Version(0), true),
            ("absent", Equal, CreateRevision(0), true),
            ("absent", Less, ModRevision(1), true),
            ("absent", Greater, Lease(-1), true),
            ("absent", Equal, value(""), false),
            ("absent", NotEqual, value("x"), false),
        ] {
            let asked = compare(key, result, union);
            assert_eq!(world.holds(asked.clone()), expected, "{asked:?}");
        }
        // 5.7
        let over = |key, end, result, union| Compare { range_end: bytes(end), ..compare(key, result, union) };
        for (asked, expected) in [
            (over("a", "c", Greater, Version(0)), true),
            (over("a", "c", Equal, Version(2)), false),
            (over("a", "\0", Greater, CreateRevision(1)), true),
            (over("a", "c", Less, value("x")), true),
            (over("a", "c", Equal, value("v")), false),
            (over("x", "z", Equal, Version(0)), true),
            (over("x", "z", NotEqual, value("")), false),
            (over("c", "a", Equal, Version(0)), true),
        ] {
            assert_eq!(world.holds(asked.clone()), expected, "{asked:?}");
        }
        // 5.8, and numbers that nobody knows: a target is equal to all, a result is true.
        let mismatch = Compare { target_union: Some(Version(9)), ..compare("absent", Equal, ModRevision(9)) };
        assert!(world.holds(mismatch));
        assert!(world.holds(Compare { target_union: None, ..compare("a", Greater, Version(0)) }));
        assert!(world.holds(Compare { target: 9, ..compare("a", Equal, Version(9)) }));
        assert!(!world.holds(Compare { target: 9, ..compare("absent", Less, Version(9)) }));
        assert!(world.holds(Compare { result: 9, ..compare("a", Equal, Version(9)) }));
        // 5.5
        let both = vec![compare("a", Equal, Version(2)), compare("b", Equal, Version(2))];
        assert!(!world.txn(TxnRequest { compare: both, ..Default::default() }).unwrap().succeeded);
    }

    /// etcd: semantics 5.9, 5.10, 5.12, 5.13; traps B1, B7, B8.
    #[test]
    fn a_transaction_sees_its_own_writes_but_compares_the_past() {
        let mut world = World::new();
        world.put(put("c", "old")).unwrap();
        let nested = TxnRequest {
            compare: vec![compare("a", Equal, TargetUnion::Value(bytes("1")))],
            success: vec![op(put("never", ""))],
            failure: vec![op(range("a", "")), op(delete("c", ""))],
        };
        let response = world
            .txn(all(vec![
                op(range("a", "")),
                op(delete("absent", "")),
                op(put("a", "1")),
                op(nested),
                op(range("\0", "\0")),
                op(RangeRequest { count_only: true, ..range("\0", "\0") }),
                op(RangeRequest { revision: 2, ..range("\0", "\0") }),
                op(delete("absent", "")),
            ]))
            .unwrap();
        assert_eq!((shown(&response.header), response.succeeded), (3, true));
        use response_op::Response::*;
        let responses: Vec<_> = response.responses.into_iter().map(|op| op.response.unwrap()).collect();
        let [
            ResponseRange(before),
            ResponseDeleteRange(nothing),
            ResponsePut(put),
            ResponseTxn(nested),
            ResponseRange(after),
            ResponseRange(count),
            ResponseRange(past),
            ResponseDeleteRange(still_nothing),
        ] = &responses[..]
        else {
            panic!("{responses:?}")
        };
        // Before the first change headers show the old revision, then the new one, whatever is read.
        assert_eq!((shown(&before.header), before.count), (2, 0));
        assert_eq!((shown(&nothing.header), nothing.deleted), (2, 0));
        assert_eq!(put.header, header(3));
        assert_eq!(nested.header, Some(ResponseHeader::default()));
        assert!(!nested.succeeded, "compares look at the state before the transaction");
        let Some(ResponseRange(inner)) = &nested.responses[0].response else { panic!("{nested:?}") };
        assert_eq!((inner.kvs[0].value.as_ref(), inner.kvs[0].mod_revision), (&b"1"[..], 3));
        assert_eq!((keys(&after.kvs), shown(&after.header)), (vec![&b"a"[..]], 3));
        assert_eq!((count.count, count.kvs.len()), (1, 0));
        assert_eq!((keys(&past.kvs), shown(&past.header)), (vec![&b"c"[..]], 3));
        assert_eq!((shown(&still_nothing.header), still_nothing.deleted), (3, 0));
        assert_eq!(world.rev, 3, "one revision for all");

        let read = world.txn(all(vec![op(range("a", "")), op(delete("x", "z"))])).unwrap();
        assert_eq!((shown(&read.header), world.rev), (3, 3));
        let failed = TxnRequest {
            compare: vec![compare("a", Equal, TargetUnion::Version(7))],
            success: vec![op(super::super::testing::put("x", ""))],
            failure: vec![],
        };
        let failed = world.txn(failed).unwrap();
        assert_eq!((failed.succeeded, failed.responses.len(), world.rev), (false, 0, 3));
    }

    /// etcd: semantics 5.11, 5.13, 5.14; trap B5.
    #[test]
    fn a_failing_operation_fails_the_transaction() {
        let mut world = World::new();
        world.put(put("a", "1")).unwrap();
        world.put(put("a", "2")).unwrap();
        let at = |revision| op(RangeRequest { revision, ..range("a", "") });
        let first = || op(put("new", ""));
        let keep = |key| op(PutRequest { ignore_value: true, ..put(key, "") });
        let lease = || op(PutRequest { lease: 5, ..put("l", "") });
        let nested = |ops| op(all(ops));
        for (ops, expected) in [
            // rev + 1 is the future even behind a write.
            (vec![first(), at(4)], FutureRev),
            (vec![first(), at(-2)], Compacted),
            (vec![first(), lease()], LeaseNotFound),
            (vec![first(), keep("absent")], KeyNotFound),
            // The state before the transaction decides, not the put before.
            (vec![first(), nested(vec![keep("new")])], KeyNotFound),
            (vec![first(), nested(vec![at(4)]), lease()], FutureRev),
            (vec![lease(), at(4)], LeaseNotFound),
        ] {
            assert_eq!(world.txn(all(ops.clone())), Err(expected.clone()), "{ops:?}");
            let other = TxnRequest {
                compare: vec![compare("a", Less, TargetUnion::Version(0))],
                success: vec![],
                failure: ops.clone(),
            };
            assert_eq!(world.txn(other), Err(expected));
            let not_taken = TxnRequest { failure: ops, ..Default::default() };
            assert!(world.txn(not_taken).is_ok(), "what does not run cannot fail");
        }
        assert_eq!((world.rev, world.get("new")), (3, None));
        assert!(world.txn(all(vec![at(-1)])).is_ok());
        world.compacted = 3;
        assert_eq!(world.txn(all(vec![first(), at(2)])), Err(Compacted));
        assert_eq!(world.txn(all(vec![at(-1)])), Err(Compacted));
        assert!(world.txn(all(vec![first(), at(3)])).is_ok());
    }

    /// Trap B9: etcd dies of these; nothing must change and the next request must find the store alive.
    #[test]
    fn a_key_deleted_through_an_open_end_cannot_be_kept() {
        for keep in [
            PutRequest { ignore_value: true, ..put("k", "") },
            PutRequest { ignore_lease: true, ..put("k", "v") },
        ] {
            let mut world = World::new();
            world.put(put("k", "v")).unwrap();
            let before = world.history.latest().clone();
            for ops in [
                vec![op(delete("a", "\0")), op(keep.clone())],
                vec![op(delete("a", "\0")), op(all(vec![op(keep.clone())]))],
                vec![op(all(vec![op(delete("k", "\0"))])), op(keep.clone())],
            ] {
                assert_eq!(world.txn(all(ops)), Err(KeyNotFound));
                assert_eq!((world.rev, world.history.latest()), (2, &before));
            }
            // Deletions elsewhere, or after it, are nobody's business.
            let ops = vec![op(delete("l", "\0")), op(keep.clone()), op(delete("j", "k"))];
            assert!(world.txn(all(ops)).is_ok());
            assert_eq!(world.get("k").unwrap().version, 2);
            let ops = vec![op(keep.clone()), op(all(vec![op(delete("a", "\0"))]))];
            assert!(world.txn(all(ops)).is_ok());
            assert_eq!(world.get("k"), None);
        }
    }

    /// etcd: semantics 5.4: with an open end a key can be deleted and put in one transaction; it is a new key.
    #[test]
    fn a_key_deleted_and_put_in_one_transaction_is_new() {
        let mut world = World::new();
        world.put(put("b", "1")).unwrap();
        world.put(put("c", "1")).unwrap();
        let again = PutRequest { prev_kv: true, ..put("b", "2") };
        let ops = vec![op(delete("a", "\0")), op(again), op(range("a", "\0")), op(delete("b", "\0"))];
        let response = world.txn(all(ops)).unwrap();
        use response_op::Response::*;
        let Some(ResponsePut(response_put)) = &response.responses[1].response else { panic!() };
        assert_eq!(response_put.prev_kv, None);
        let Some(ResponseRange(seen)) = &response.responses[2].response else { panic!() };
        assert_eq!(
            (keys(&seen.kvs), seen.kvs[0].version, seen.kvs[0].create_revision),
            (vec![&b"b"[..]], 1, 4)
        );
        let Some(ResponseDeleteRange(deleted)) = &response.responses[3].response else { panic!() };
        assert_eq!(deleted.deleted, 1);
        assert!(world.history.latest().is_empty());
    }

    /// Design 3.2: many keys go as a range with its count; what follows in the transaction sees them gone.
    #[test]
    fn a_long_deletion_is_logged_as_a_range() {
        let mut world = World::new();
        let many = DELETE_KEYS_LOGGED_MAX + 1;
        let puts: Vec<_> = (0..many).map(|i| op(put(&format!("k{i:04}"), "v"))).collect();
        world.txn(all(puts)).unwrap();
        world.put(put("b", "v")).unwrap();

        let evaluated = |world: &World, request: &Request| {
            let overlay = super::super::overlay::Overlay::new();
            let (rev, compacted) = (world.rev, world.compacted);
            let latest = super::super::overlay::Latest {
                base: &world.history,
                overlay: &overlay,
                point: rev,
                compacted,
                lease_exists: &|_| false,
            };
            super::super::testing::evaluate(&latest, request).unwrap().changes
        };
        let exactly = Request::DeleteRange(delete("k0001", "l"));
        assert_eq!(evaluated(&world, &exactly).len(), DELETE_KEYS_LOGGED_MAX);
        let more = Request::DeleteRange(delete("k", "l"));
        assert_eq!(
            evaluated(&world, &more)[..],
            [Change::DeleteRange {
                first_sub: 0,
                count: many as u32,
                range: KeyRange { start: bytes("k"), end: Some(bytes("l")) },
                lease: 0
            }]
        );

        let response = world
            .txn(all(vec![
                op(put("a", "v")),
                op(DeleteRangeRequest { prev_kv: true, ..delete("a", "\0") }),
                op(range("a", "\0")),
                op(put("k0500", "w")),
                op(RangeRequest { count_only: true, ..range("b", "\0") }),
            ]))
            .unwrap();
        use response_op::Response::*;
        let responses: Vec<_> = response.responses.into_iter().map(|op| op.response.unwrap()).collect();
        let [_, ResponseDeleteRange(deleted), ResponseRange(seen), _, ResponseRange(count)] = &responses[..]
        else {
            panic!("{responses:?}")
        };
        assert_eq!((deleted.deleted as usize, deleted.prev_kvs.len()), (many + 2, many + 2));
        assert_eq!((seen.count, count.count), (0, 1));
        assert_eq!(world.get("k0500").unwrap().version, 1);
    }

    /// etcd: semantics 6.1.
    #[test]
    fn compactions() {
        for (revision, current, compacted, expected) in [
            (0, 1, -1, Ok(())),
            (-1, 1, -1, Err(Compacted)),
            (5, 5, 3, Ok(())),
            (3, 5, 3, Err(Compacted)),
            (6, 5, 3, Err(FutureRev)),
        ] {
            assert_eq!(check_compact(revision, current, compacted), expected, "{revision}");
        }
    }

    /// Random requests: the world compares the store as a whole with shards of it, and every record is applied
    /// to a store that knows what a record may say.
    #[test]
    fn random_requests_over_shards() {
        for seed in 0..40 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut world = World::new();
            world.leases = vec![1, 2];
            for step in 0..150 {
                let request = Dice { rng: &mut rng, rev: world.rev }.request();
                let before = world.rev;
                if let Ok(response) = world.run(request.clone()) {
                    let header = match response {
                        Response::Range(response) => response.header,
                        Response::Put(response) => response.header,
                        Response::DeleteRange(response) => response.header,
                        Response::Txn(response) => response.header,
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(shown(&header), world.rev);
                } else {
                    assert_eq!(world.rev, before, "a rejection changes nothing");
                }
                if step == 100 {
                    world.compacted = world.rev - 2;
                }
            }
        }
    }
}
