//! Evaluation over several shards (design 4): the coordinator asks for what a request may look at, each frozen
//! shard answers with a piece of plain data, and the pieces together are a [`View`], so that the very same
//! evaluation runs on them. What came out is then split into the parts of the shards.
//!
//! ```text
//! touched(request) -> Needs -> gather(view, needs, owned) per piece of the range map
//!                                  -> Gathered::new(needs, pieces) -> prepare, execute -> split(changes)
//! ```
//!
//! Both branches of a transaction are asked for, since nobody knows yet which one runs. Ranges are cut at the
//! ends of all others, so that whatever the operations do to each other, a range still is a whole number of
//! gathered ones. Knows nothing of messages, freezing and revisions.

use super::evaluate::Changes;
use super::view::{KeyMeta, View, Visit};
use crate::model::{
    Change, KeyRange, KeyValue, KvRef, Request, ShardId, limits::DELETE_KEYS_LOGGED_MAX, select,
};
use crate::proto::etcdserverpb::{
    Compare, DeleteRangeRequest, PutRequest, RangeRequest, TxnRequest, compare::CompareTarget, request_op,
};
use bytes::Bytes;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// All of a shard's answer that evaluation of a request may want.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Ascending by `at` and start, none empty, disjoint where `at` is the same.
    pub keys: Vec<Need>,
    pub leases: Vec<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    pub range: KeyRange,
    /// `None`: the latest state.
    pub at: Option<i64>,
    pub depth: Depth,
}

/// How much of a range: its count always, and of its keys ...
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// ... that many in key order. `u64::MAX` is all.
    pub first: u64,
    /// ... all, if there are no more than this.
    pub few: u64,
    /// With their values.
    pub values: bool,
}

const ALL: u64 = u64::MAX;

/// What of the store `request` may look at. Nothing at all, for a transaction without compares and operations.
pub fn touched(request: &Request) -> Needs {
    let mut wanted = Wanted::default();
    match request {
        Request::Range { request, .. } => wanted.range(request),
        Request::Put(request) => wanted.put(request),
        Request::DeleteRange(request) => wanted.delete_range(request),
        Request::Txn(request) => wanted.txn(request),
        other => panic!("{other:?} is not decided by evaluation"),
    }
    wanted.into_needs()
}

/// Needs as the operations have them: overlapping, in any order.
#[derive(Default)]
struct Wanted {
    keys: BTreeMap<Option<i64>, Vec<(KeyRange, Depth)>>,
    leases: Vec<i64>,
}

impl Wanted {
    fn want(&mut self, range: KeyRange, at: Option<i64>, depth: Depth) {
        if !range.is_empty() {
            self.keys.entry(at).or_default().push((range, depth));
        }
    }

    fn range(&mut self, request: &RangeRequest) {
        let range = KeyRange::from_request(&request.key, &request.range_end);
        let at = (request.revision > 0).then_some(request.revision);
        let first = if request.range_end.is_empty() { ALL } else { select::deciding(request) };
        self.want(range, at, Depth { first, few: 0, values: select::values(request) });
    }

    fn put(&mut self, request: &PutRequest) {
        let values = request.prev_kv || request.ignore_value;
        self.want(KeyRange::point(&request.key), None, Depth { first: ALL, few: 0, values });
        if request.lease != 0 {
            self.leases.push(request.lease);
        }
    }

    fn delete_range(&mut self, request: &DeleteRangeRequest) {
        let depth = match request.prev_kv || request.range_end.is_empty() {
            true => Depth { first: ALL, few: 0, values: request.prev_kv },
            false => Depth { first: 0, few: DELETE_KEYS_LOGGED_MAX as u64, values: false },
        };
        self.want(KeyRange::from_request(&request.key, &request.range_end), None, depth);
    }

    fn compare(&mut self, compare: &Compare) {
        let values = compare.target == CompareTarget::Value as i32;
        let range = KeyRange::from_request(&compare.key, &compare.range_end);
        self.want(range, None, Depth { first: ALL, few: 0, values });
    }

    fn txn(&mut self, request: &TxnRequest) {
        request.compare.iter().for_each(|compare| self.compare(compare));
        for op in request.success.iter().chain(&request.failure) {
            match op.request.as_ref().expect("validation refuses operations without a request") {
                request_op::Request::RequestRange(request) => self.range(request),
                request_op::Request::RequestPut(request) => self.put(request),
                request_op::Request::RequestDeleteRange(request) => self.delete_range(request),
                request_op::Request::RequestTxn(request) => self.txn(request),
            }
        }
    }

    fn into_needs(mut self) -> Needs {
        self.leases.sort_unstable();
        self.leases.dedup();
        let keys = self.keys.into_iter().flat_map(|(at, wanted)| {
            cut(wanted).into_iter().map(move |(range, depth)| Need { range, at, depth })
        });
        Needs { keys: keys.collect(), leases: self.leases }
    }
}

/// Cuts overlapping ranges at each other's ends; each piece with the deepest of what covers it.
fn cut(wanted: Vec<(KeyRange, Depth)>) -> Vec<(KeyRange, Depth)> {
    // A sweep over the ends; an open end is never reached.
    let mut events: Vec<(&Bytes, bool, Depth)> = Vec::with_capacity(wanted.len() * 2);
    for (range, depth) in &wanted {
        events.push((&range.start, true, *depth));
        events.extend(range.end.as_ref().map(|end| (end, false, *depth)));
    }
    events.sort_by(|a, b| a.0.cmp(b.0));
    let mut active = Active::default();
    let mut pieces = Vec::new();
    for (i, (key, begins, depth)) in events.iter().enumerate() {
        active.count(*depth, *begins);
        let next = events.get(i + 1).map(|next| next.0);
        if next != Some(*key)
            && let Some(depth) = active.deepest()
        {
            pieces.push((KeyRange { start: (*key).clone(), end: next.cloned() }, depth));
        }
    }
    pieces
}

/// The depths of the ranges over one point of the sweep, each with how often it occurs.
#[derive(Default)]
struct Active {
    first: BTreeMap<u64, usize>,
    few: BTreeMap<u64, usize>,
    values: usize,
}

impl Active {
    fn count(&mut self, depth: Depth, begins: bool) {
        for (counts, what) in [(&mut self.first, depth.first), (&mut self.few, depth.few)] {
            let times = counts.entry(what).or_default();
            match begins {
                true => *times += 1,
                false => *times -= 1,
            }
            if *times == 0 {
                counts.remove(&what);
            }
        }
        match begins {
            true => self.values += usize::from(depth.values),
            false => self.values -= usize::from(depth.values),
        }
    }

    fn deepest(&self) -> Option<Depth> {
        let (first, _) = self.first.last_key_value()?;
        let (few, _) = self.few.last_key_value()?;
        Some(Depth { first: *first, few: *few, values: self.values > 0 })
    }
}

/// What one shard answers for one piece of the range map: plain data.
#[derive(Clone, Debug, PartialEq)]
pub struct GatheredPiece {
    owned: KeyRange,
    point: i64,
    compacted: i64,
    /// Those of the needed leases that do not exist.
    leases_missing: Vec<i64>,
    parts: Vec<Part>,
}

/// What a piece has of one need.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    range: KeyRange,
    at: Option<i64>,
    count: u64,
    /// In key order; all of them, or the first few.
    kvs: Vec<KeyValue>,
    values: bool,
}

/// Reads what of `needs` lies in `owned`, a piece of the range map that the shard of this view owns.
pub fn gather<V: View>(view: &V, needs: &Needs, owned: &KeyRange) -> GatheredPiece {
    let parts = needs.keys.iter().filter_map(|need| {
        let range = need.range.intersect(owned);
        (!range.is_empty()).then(|| part(view, need, range))
    });
    GatheredPiece {
        owned: owned.clone(),
        point: view.point(),
        compacted: view.compacted(),
        leases_missing: needs.leases.iter().copied().filter(|lease| !view.lease_exists(*lease)).collect(),
        parts: parts.collect(),
    }
}

fn part<V: View>(view: &V, need: &Need, range: KeyRange) -> Part {
    let Need { at, depth: Depth { first, few, values }, .. } = *need;
    let mut part = Part { range, at, count: 0, kvs: Vec::new(), values };
    if at.is_some_and(|at| at < view.compacted()) {
        // Not readable; evaluation refuses it, if it gets there at all.
        return part;
    }
    if part.range.is_point() && first > 0 {
        let key = &part.range.start;
        part.kvs = match at {
            Some(rev) => view.get_at(key, rev),
            None if values => view.get(key),
            None => view.meta(key).map(|meta| meta.with(key.clone(), Bytes::new())),
        }
        .into_iter()
        .collect();
        part.count = part.kvs.len() as u64;
        return part;
    }
    let wanted = match first {
        ALL => ALL,
        _ => {
            part.count = view.count(&part.range, at);
            if part.count <= few { part.count } else { first.min(part.count) }
        }
    };
    if wanted > 0 {
        view.scan(&part.range, at, &mut |kv: KvRef<'_>| {
            part.kvs.push(if values { kv.to_owned() } else { kv.without_value() });
            if part.kvs.len() as u64 == wanted { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
    }
    if wanted == ALL {
        part.count = part.kvs.len() as u64;
    }
    part
}

impl Part {
    fn complete(&self) -> bool {
        self.kvs.len() as u64 == self.count
    }

    /// The gathered keys in `range`.
    fn within(&self, range: &KeyRange) -> &[KeyValue] {
        let from = self.kvs.partition_point(|kv| kv.key < range.start);
        let to = match &range.end {
            Some(end) => self.kvs.partition_point(|kv| kv.key < *end),
            None => self.kvs.len(),
        };
        &self.kvs[from..to.max(from)]
    }
}

/// The pieces of all shards involved, as one view. It answers what the needs asked for; to look at anything
/// else is a fault of ours and panics.
#[derive(Debug)]
pub struct Gathered {
    /// Ascending, without overlap.
    owners: Vec<(KeyRange, ShardId)>,
    /// Ascending, without overlap.
    parts: BTreeMap<Option<i64>, Vec<Part>>,
    point: i64,
    compacted: i64,
    leases_missing: Vec<i64>,
}

impl Gathered {
    /// `None` if the pieces do not cover the needs exactly: the range map has changed in between, or there is
    /// no piece at all.
    pub fn new(needs: &Needs, pieces: Vec<(ShardId, GatheredPiece)>) -> Option<Gathered> {
        let mut gathered = Gathered {
            owners: Vec::with_capacity(pieces.len()),
            parts: BTreeMap::new(),
            point: pieces.iter().map(|(_, piece)| piece.point).max()?,
            compacted: pieces.iter().map(|(_, piece)| piece.compacted).max()?,
            leases_missing: Vec::new(),
        };
        for (shard, piece) in pieces {
            gathered.owners.push((piece.owned, shard));
            gathered.leases_missing.extend(piece.leases_missing);
            for part in piece.parts {
                gathered.parts.entry(part.at).or_default().push(part);
            }
        }
        gathered.owners.sort_by(|a, b| a.0.start.cmp(&b.0.start));
        for parts in gathered.parts.values_mut() {
            parts.sort_by(|a, b| a.range.start.cmp(&b.range.start));
        }
        gathered.covers(needs).then_some(gathered)
    }

    fn covers(&self, needs: &Needs) -> bool {
        let mut parts = self.parts.values().flatten();
        for need in &needs.keys {
            let mut at = Some(&need.range.start);
            while at != need.range.end.as_ref() {
                match parts.next() {
                    Some(part) if part.at == need.at && Some(&part.range.start) == at => {
                        at = part.range.end.as_ref();
                    }
                    _ => return false,
                }
            }
        }
        parts.next().is_none()
    }

    /// The part of each shard that changes something, by ascending shard. Sub-revisions stay as they are.
    pub fn split(&self, changes: Changes) -> Vec<(ShardId, Changes)> {
        let mut split: BTreeMap<ShardId, Changes> = BTreeMap::new();
        for change in changes {
            let key = match &change {
                Change::Put { kv, .. } => &kv.key,
                Change::Delete { key, .. } => key,
                Change::DeleteRange { range, .. } => &range.start,
            };
            let (owned, shard) = self.owner(key);
            if let Change::DeleteRange { range, .. } = &change {
                assert_eq!(
                    range.intersect(owned),
                    *range,
                    "evaluation cuts range deletions at the owners' ends"
                );
            }
            split.entry(*shard).or_default().push(change);
        }
        split.into_iter().collect()
    }

    fn owner(&self, key: &[u8]) -> &(KeyRange, ShardId) {
        let after = self.owners.partition_point(|(owned, _)| owned.start.as_ref() <= key);
        let owner = after.checked_sub(1).map(|i| &self.owners[i]);
        owner.filter(|(owned, _)| owned.contains(key)).expect("every key in question has an owner")
    }

    /// The parts that meet `range`, in key order.
    fn parts(&self, range: &KeyRange, at: Option<i64>) -> &[Part] {
        let parts = self.parts.get(&at).map_or(&[][..], Vec::as_slice);
        let from =
            parts.partition_point(|part| part.range.end.as_ref().is_some_and(|end| *end <= range.start));
        let to = match &range.end {
            Some(end) => parts.partition_point(|part| part.range.start < *end),
            None => parts.len(),
        };
        &parts[from..to.max(from)]
    }

    fn find(&self, key: &[u8], at: Option<i64>) -> (&Part, Option<&KeyValue>) {
        let parts = self.parts.get(&at).map_or(&[][..], Vec::as_slice);
        let after = parts.partition_point(|part| part.range.start.as_ref() <= key);
        let part = after.checked_sub(1).map(|i| &parts[i]).filter(|part| part.range.contains(key));
        let part = part.expect("evaluation looks at what was gathered only");
        let kv = part.kvs.binary_search_by(|kv| kv.key.as_ref().cmp(key)).ok().map(|i| &part.kvs[i]);
        assert!(kv.is_some() || part.complete(), "whether the key is alive was not gathered");
        (part, kv)
    }
}

impl View for Gathered {
    fn get(&self, key: &[u8]) -> Option<KeyValue> {
        let (part, kv) = self.find(key, None);
        assert!(part.values, "the value was not gathered");
        kv.cloned()
    }

    fn meta(&self, key: &[u8]) -> Option<KeyMeta> {
        self.find(key, None).1.map(KeyMeta::from)
    }

    fn get_at(&self, key: &[u8], rev: i64) -> Option<KeyValue> {
        self.find(key, Some(rev)).1.cloned()
    }

    fn scan(&self, range: &KeyRange, at: Option<i64>, visit: &mut Visit<'_>) {
        if range.is_empty() {
            return;
        }
        for part in self.parts(range, at) {
            for kv in part.within(range) {
                if visit(kv.into()).is_break() {
                    return;
                }
            }
            assert!(part.complete(), "a scan ends with what was gathered");
        }
    }

    fn count(&self, range: &KeyRange, at: Option<i64>) -> u64 {
        if range.is_empty() {
            return 0;
        }
        let count = |part: &Part| {
            if part.range.intersect(range) == part.range {
                return part.count;
            }
            assert!(part.complete(), "a range is a whole number of gathered ones");
            part.within(range).len() as u64
        };
        self.parts(range, at).iter().map(count).sum()
    }

    fn point(&self) -> i64 {
        self.point
    }

    fn compacted(&self) -> i64 {
        self.compacted
    }

    fn lease_exists(&self, lease: i64) -> bool {
        !self.leases_missing.contains(&lease)
    }

    fn pieces(&self, range: &KeyRange) -> SmallVec<[KeyRange; 1]> {
        let pieces = self.owners.iter().map(|(owned, _)| owned.intersect(range));
        pieces.filter(|piece| !piece.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::overlay::{Latest, Overlay};
    use super::super::testing::{History, bytes, compare, delete, gathered, op, owners, put, range};
    use super::*;
    use crate::proto::etcdserverpb::compare::{CompareResult, TargetUnion};

    const NEW: i64 = 2;

    /// `many` keys k0000, k0001, ...
    fn store(many: usize) -> History {
        let mut history = History::default();
        for i in 0..many {
            let kv = KeyValue {
                key: bytes(&format!("k{i:04}")),
                create_revision: NEW,
                mod_revision: NEW,
                version: 1,
                value: bytes("value"),
                lease: 0,
            };
            history.apply_change(NEW, &Change::Put { sub: i as u32, kv });
        }
        history
    }

    fn with_view<T>(history: &History, look: impl FnOnce(&Latest<'_, History>) -> T) -> T {
        let overlay = Overlay::new();
        let lease_exists = |lease| lease == 7;
        look(&Latest {
            base: history,
            overlay: &overlay,
            point: NEW,
            compacted: -1,
            lease_exists: &lease_exists,
        })
    }

    fn kvs(piece: &GatheredPiece) -> usize {
        piece.parts.iter().map(|part| part.kvs.len()).sum()
    }

    fn txn(success: Vec<crate::proto::etcdserverpb::RequestOp>) -> Request {
        Request::Txn(TxnRequest { success, ..Default::default() })
    }

    #[test]
    fn a_long_deletion_gathers_counts_only() {
        let history = store(DELETE_KEYS_LOGGED_MAX + 1);
        let everything = KeyRange::everything();
        with_view(&history, |view| {
            let long = Request::DeleteRange(delete("k", "l"));
            let piece = gather(view, &touched(&long), &everything);
            assert_eq!((kvs(&piece), piece.parts[0].count as usize), (0, DELETE_KEYS_LOGGED_MAX + 1));

            let short = Request::DeleteRange(delete("k", "k0003"));
            let piece = gather(view, &touched(&short), &everything);
            assert_eq!(kvs(&piece), 3);
            assert!(piece.parts[0].kvs.iter().all(|kv| kv.value.is_empty()), "nobody asked for values");

            let told = Request::DeleteRange(DeleteRangeRequest { prev_kv: true, ..delete("k", "l") });
            assert_eq!(kvs(&gather(view, &touched(&told), &everything)), DELETE_KEYS_LOGGED_MAX + 1);
        });
    }

    #[test]
    fn a_limited_range_gathers_what_decides_it() {
        let history = store(100);
        with_view(&history, |view| {
            let owners = owners(&["k0001"]);
            let limited = RangeRequest { limit: 2, ..range("k", "l") };
            for (limited, expected) in [
                (limited.clone(), [1, 3]),
                (RangeRequest { count_only: true, ..limited.clone() }, [0, 0]),
                (RangeRequest { sort_order: 2, ..limited.clone() }, [1, 99]),
                (RangeRequest { revision: NEW, ..limited }, [1, 3]),
            ] {
                let needs = touched(&txn(vec![op(limited)]));
                let gathered = owners.iter().map(|(owned, _)| kvs(&gather(view, &needs, owned)));
                assert_eq!(gathered.collect::<Vec<_>>(), expected);
            }
        });
    }

    #[test]
    fn needs_are_disjoint_and_deepest_where_they_met() {
        let needs = touched(&Request::Txn(TxnRequest {
            compare: vec![compare("m", CompareResult::Equal, TargetUnion::Version(0))],
            success: vec![op(put("c", "")), op(delete("b", "d"))],
            failure: vec![
                op(RangeRequest { count_only: true, ..range("a", "\0") }),
                op(PutRequest { lease: 9, ..put("m", "") }),
                op(PutRequest { prev_kv: true, lease: 7, ..put("m", "") }),
                op(RangeRequest { revision: 2, ..range("c", "") }),
                op(range("z", "a")),
            ],
        }));
        let shape: Vec<_> = needs
            .keys
            .iter()
            .map(|need| {
                let KeyRange { start, end } = &need.range;
                let text = |key: &Bytes| String::from_utf8_lossy(key).into_owned();
                let Depth { first, few, values } = need.depth;
                (text(start), end.as_ref().map(text), need.at, first == ALL, few > 0, values)
            })
            .collect();
        let row = |start: &str, end: Option<&str>, at, all, few, values| {
            (start.to_owned(), end.map(str::to_owned), at, all, few, values)
        };
        assert_eq!(
            shape,
            [
                row("a", Some("b"), None, false, false, false),
                row("b", Some("c"), None, false, true, false),
                row("c", Some("c\0"), None, true, true, false),
                row("c\0", Some("d"), None, false, true, false),
                row("d", Some("m"), None, false, false, false),
                row("m", Some("m\0"), None, true, false, true),
                row("m\0", None, None, false, false, false),
                row("c", Some("c\0"), Some(2), true, false, true),
            ]
        );
        assert_eq!(needs.leases, [7, 9]);
    }

    #[test]
    fn pieces_must_cover_the_needs_exactly() {
        let history = store(10);
        with_view(&history, |view| {
            let request = Request::DeleteRange(delete("a", "\0"));
            let needs = touched(&request);
            let piece = |start: &str, end: Option<&str>| {
                (1, gather(view, &needs, &KeyRange { start: bytes(start), end: end.map(bytes) }))
            };
            let covered = |pieces| Gathered::new(&needs, pieces).is_some();
            assert!(covered(vec![piece("k0005", None), piece("", Some("k0005"))]), "in any order");
            assert!(!covered(vec![piece("", Some("k0005"))]), "the end is missing");
            assert!(!covered(vec![piece("", Some("k0004")), piece("k0005", None)]), "a hole");
            assert!(!covered(vec![piece("", Some("k0006")), piece("k0005", None)]), "an overlap");
            assert!(!covered(vec![]));
        });
    }

    #[test]
    fn point_compaction_and_leases_are_those_of_all_pieces() {
        let request = txn(vec![
            op(PutRequest { lease: 7, ..put("a", "") }),
            op(PutRequest { lease: 8, ..put("z", "") }),
        ]);
        let needs = touched(&request);
        let owners = owners(&["m"]);
        with_view(&store(1), |view| {
            let mut pieces: Vec<_> =
                owners.iter().map(|(owned, shard)| (*shard, gather(view, &needs, owned))).collect();
            (pieces[0].1.point, pieces[1].1.compacted) = (9, 3);
            let gathered = Gathered::new(&needs, pieces).unwrap();
            assert_eq!((gathered.point(), gathered.compacted()), (9, 3));
            assert!(gathered.lease_exists(7) && !gathered.lease_exists(8));
        });
    }

    #[test]
    fn parts_keep_their_numbers() {
        let history = store(DELETE_KEYS_LOGGED_MAX + 500);
        with_view(&history, |view| {
            let request = txn(vec![op(put("a", "")), op(delete("k", "l")), op(put("z", ""))]);
            let owners = owners(&["b", "k1200", "y"]);
            let gathered = gathered(view, &request, &owners);
            let outcome = super::super::testing::evaluate(&gathered, &request).unwrap();
            let split = gathered.split(outcome.changes);
            let numbers: Vec<(ShardId, Vec<(u32, u32)>)> = split
                .iter()
                .map(|(shard, part)| (*shard, part.iter().map(|c| (c.first_sub(), c.width())).collect()))
                .collect();
            assert_eq!(numbers, [(1, vec![(0, 1), (1501, 1)]), (2, vec![(1, 1200)]), (3, vec![(1201, 300)])]);
        });
    }
}
