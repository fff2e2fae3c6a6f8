//! The overlay: what a shard has logged but not yet applied (design 3.2), and [`Latest`], the view that lays it
//! over the applied state.
//!
//! Changes come in by [`Overlay::push`] in the order of their revisions and leave at the same end in the same
//! order as they are applied; a range record stays until its expansion is complete, and hides what it deletes
//! whether the base has got there or not. So at any time: the latest state = the base, then the overlay on top.
//! An overlay belongs to one reign (rule Z2): it is dropped and made anew, never cleared.

use super::view::{Base, KeyMeta, View, Visit, bounds, merged_scan};
use crate::model::{Change, KeyRange, KeyValue, KvRef, RangeSet, Record, Rev};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;

/// What one change weighs beside its key and value: entries in the maps, and the record itself.
const CHANGE_BYTES: usize = 256;

#[derive(Debug, Default)]
pub struct Overlay {
    /// Every change held, oldest first.
    held: VecDeque<Held>,
    /// The states of each key that some change names, oldest first, none empty.
    keys: BTreeMap<Bytes, VecDeque<Version>>,
    /// The range deletions, oldest first.
    tombs: VecDeque<Tomb>,
    bytes: usize,
}

#[derive(Debug)]
struct Held {
    /// The revision behind the change's last one.
    end: Rev,
    /// The key it names; `None` for a range deletion.
    key: Option<Bytes>,
    bytes: usize,
}

#[derive(Debug)]
struct Version {
    rev: Rev,
    /// `None`: deleted.
    state: Option<KeyValue>,
    /// The key was alive just before this change.
    existed: bool,
}

#[derive(Debug)]
struct Tomb {
    rev: Rev,
    range: KeyRange,
    /// Other than 0: only the keys attached to it die.
    lease: i64,
}

/// What the overlay knows of a key.
enum Known<'o> {
    Alive(&'o KeyValue),
    Dead,
    /// The base decides; what it has is dead if it is attached to one of these leases.
    Unknown,
}

impl Overlay {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Number of changes held; a range deletion is one.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// About the memory that the held changes take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a record that was logged. Records come in the order of their revisions.
    pub fn push(&mut self, record: &Record) {
        for change in &record.changes {
            let rev = Rev::new(record.rev, change.first_sub());
            let end = Rev::new(record.rev, change.first_sub() + change.width());
            assert!(self.held.back().is_none_or(|last| last.end <= rev), "changes come in order");
            let (key, bytes) = match change {
                Change::Put { kv, .. } => {
                    self.version(&kv.key, rev, Some(kv.clone()), kv.version > 1);
                    (Some(kv.key.clone()), kv.key.len() + kv.value.len())
                }
                Change::Delete { key, .. } => {
                    self.version(key, rev, None, true);
                    (Some(key.clone()), key.len())
                }
                Change::DeleteRange { range, lease, .. } => {
                    assert!(!range.is_empty(), "a range deletion that deletes nothing is not logged");
                    self.tombs.push_back(Tomb { rev, range: range.clone(), lease: *lease });
                    (None, range.start.len() + range.end.as_ref().map_or(0, Bytes::len))
                }
            };
            let bytes = bytes + CHANGE_BYTES;
            self.bytes += bytes;
            self.held.push_back(Held { end, key, bytes });
        }
    }

    /// The base has applied everything below `upto`. In the middle of a record this is the first revision of
    /// the range deletion being expanded, which stays on until it is complete.
    pub fn applied(&mut self, upto: Rev) {
        while self.held.front().is_some_and(|held| held.end <= upto) {
            let held = self.held.pop_front().expect("looked at just now");
            self.bytes -= held.bytes;
            match held.key {
                None => drop(self.tombs.pop_front()),
                Some(key) => {
                    let versions = self.keys.get_mut(&key).expect("a held change has its version");
                    versions.pop_front();
                    if versions.is_empty() {
                        self.keys.remove(&key);
                    }
                }
            }
        }
    }

    /// The base has applied this record and all before it.
    pub fn applied_through(&mut self, record: &Record) {
        self.applied(Rev::new(record.rev + 1, 0));
    }

    /// What must hold between any two calls; for tests and the simulator.
    pub fn invariants(&self) {
        let versions: usize = self.keys.values().map(VecDeque::len).sum();
        assert_eq!(versions + self.tombs.len(), self.held.len(), "each change is held once");
        assert_eq!(self.bytes, self.held.iter().map(|held| held.bytes).sum::<usize>());
        assert!(self.keys.values().all(|versions| !versions.is_empty()), "no key without a version");
        assert!(
            self.keys.values().all(|v| v.iter().zip(v.iter().skip(1)).all(|(a, b)| a.rev < b.rev)),
            "versions ascend"
        );
    }

    fn version(&mut self, key: &Bytes, rev: Rev, state: Option<KeyValue>, existed: bool) {
        let version = Version { rev, state, existed };
        match self.keys.get_mut(key) {
            Some(versions) => versions.push_back(version),
            None => {
                self.keys.insert(key.clone(), VecDeque::from([version]));
            }
        }
    }

    /// True if nothing held is as old as `at`: the base alone has that state.
    fn is_newer_than(&self, at: i64) -> bool {
        self.held.front().is_none_or(|held| held.end.main > at)
    }

    /// Range deletions up to `at`, the newest first.
    fn tombs(&self, at: i64) -> impl Iterator<Item = &Tomb> {
        self.tombs.iter().rev().skip_while(move |tomb| tomb.rev.main > at)
    }

    fn known(&self, key: &[u8], at: i64) -> Known<'_> {
        match self.keys.get(key).and_then(|versions| newest(versions, at)) {
            Some(version) => self.alive(key, version, at).map_or(Known::Dead, Known::Alive),
            None if self.tombs(at).any(|tomb| tomb.lease == 0 && tomb.range.contains(key)) => Known::Dead,
            None => Known::Unknown,
        }
    }

    /// The state that `version` gave its key, unless a later range deletion took it.
    fn alive<'o>(&'o self, key: &[u8], version: &'o Version, at: i64) -> Option<&'o KeyValue> {
        version.state.as_ref().filter(|kv| {
            !self
                .tombs(at)
                .take_while(|tomb| tomb.rev > version.rev)
                .any(|tomb| (tomb.lease == 0 || tomb.lease == kv.lease) && tomb.range.contains(key))
        })
    }

    /// True if a range deletion by lease takes what the base has of this key.
    fn hides(&self, key: &[u8], lease: i64, at: i64) -> bool {
        lease != 0 && self.tombs(at).any(|tomb| tomb.lease == lease && tomb.range.contains(key))
    }

    /// The keys of `range` that some change up to `at` names, with their oldest version held and their state.
    fn over(
        &self,
        range: &KeyRange,
        at: i64,
    ) -> impl Iterator<Item = (&[u8], &Version, Option<&KeyValue>)> + Clone {
        self.keys.range::<[u8], _>(bounds(range)).filter_map(move |(key, versions)| {
            let version = newest(versions, at)?;
            Some((key.as_ref(), versions.front()?, self.alive(key, version, at)))
        })
    }

    /// Where no key of the base is left.
    fn covered(&self, at: i64) -> RangeSet {
        let mut covered = RangeSet::default();
        for tomb in self.tombs(at).filter(|tomb| tomb.lease == 0) {
            covered.insert(tomb.range.clone());
        }
        covered
    }
}

fn newest(versions: &VecDeque<Version>, at: i64) -> Option<&Version> {
    versions.iter().rev().find(|version| version.rev.main <= at)
}

/// The latest state of a shard, as evaluation sees it.
pub struct Latest<'a, B> {
    pub base: &'a B,
    pub overlay: &'a Overlay,
    /// See [`View::point`].
    pub point: i64,
    /// See [`View::compacted`].
    pub compacted: i64,
    pub lease_exists: &'a dyn Fn(i64) -> bool,
}

impl<B: Base> View for Latest<'_, B> {
    fn get(&self, key: &[u8]) -> Option<KeyValue> {
        match self.overlay.known(key, i64::MAX) {
            Known::Alive(kv) => Some(kv.clone()),
            Known::Dead => None,
            Known::Unknown => self.base.get(key).filter(|kv| !self.overlay.hides(key, kv.lease, i64::MAX)),
        }
    }

    fn meta(&self, key: &[u8]) -> Option<KeyMeta> {
        match self.overlay.known(key, i64::MAX) {
            Known::Alive(kv) => Some(kv.into()),
            Known::Dead => None,
            Known::Unknown => {
                self.base.meta(key).filter(|meta| !self.overlay.hides(key, meta.lease, i64::MAX))
            }
        }
    }

    fn get_at(&self, key: &[u8], rev: i64) -> Option<KeyValue> {
        if self.overlay.is_newer_than(rev) {
            return self.base.get_at(key, rev);
        }
        match self.overlay.known(key, rev) {
            Known::Alive(kv) => Some(kv.clone()),
            Known::Dead => None,
            Known::Unknown => self.base.get(key).filter(|kv| !self.overlay.hides(key, kv.lease, rev)),
        }
    }

    fn scan(&self, range: &KeyRange, at: Option<i64>, visit: &mut Visit<'_>) {
        let Overlaid::Held(at) = self.overlaid(at) else {
            return self.base.scan(range, at, visit);
        };
        if range.is_empty() {
            return;
        }
        let over = self.overlay.over(range, at).map(|(key, _, state)| (key, state.map(KvRef::from)));
        let by_lease = self.overlay.tombs(at).any(|tomb| tomb.lease != 0);
        let base = |range: &KeyRange, visit: &mut Visit<'_>| match by_lease {
            false => self.base.scan(range, None, visit),
            true => self.base.scan(range, None, &mut |kv| match self.overlay.hides(kv.key, kv.lease, at) {
                true => ControlFlow::Continue(()),
                false => visit(kv),
            }),
        };
        merged_scan(range, &self.overlay.covered(at), over, base, visit);
    }

    fn count(&self, range: &KeyRange, at: Option<i64>) -> u64 {
        let Overlaid::Held(held_at) = self.overlaid(at) else {
            return self.base.count(range, at);
        };
        if self.overlay.tombs(held_at).any(|tomb| tomb.lease != 0) {
            // Which keys hang on a lease is known only by looking at them.
            let mut count = 0;
            self.scan(range, at, &mut |_| {
                count += 1;
                ControlFlow::Continue(())
            });
            return count;
        }
        let mut count = 0;
        for (segment, gone) in self.overlay.covered(held_at).segments(range) {
            let over = self.overlay.over(&segment, held_at);
            let alive = over.clone().filter(|(_, _, state)| state.is_some()).count() as u64;
            count += match gone {
                true => alive,
                // What the oldest change held found is what the base has.
                false => {
                    let in_base = over.filter(|(_, oldest, _)| oldest.existed).count() as u64;
                    self.base.count(&segment, None) + alive - in_base
                }
            };
        }
        count
    }

    fn point(&self) -> i64 {
        self.point
    }

    fn compacted(&self) -> i64 {
        self.compacted
    }

    fn lease_exists(&self, lease: i64) -> bool {
        (self.lease_exists)(lease)
    }
}

enum Overlaid {
    /// The base alone answers.
    Base,
    /// The newest base with what is held up to this revision.
    Held(i64),
}

impl<B> Latest<'_, B> {
    fn overlaid(&self, at: Option<i64>) -> Overlaid {
        let at = at.unwrap_or(i64::MAX);
        if self.overlay.is_empty() || self.overlay.is_newer_than(at) {
            Overlaid::Base
        } else {
            Overlaid::Held(at)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Dice, History, bytes, evaluate, gathered, owners};
    use super::*;
    use crate::btree;
    use crate::env::{Disk, sim::SimDisk};
    use crate::model::ShardId;
    use crate::mvcc::Store;
    use rand::{Rng, SeedableRng, rngs::SmallRng};
    use std::path::Path;
    use std::sync::Arc;

    fn put(rev: i64, key: &str, version: i64) -> Record {
        let kv = KeyValue {
            key: bytes(key),
            create_revision: rev - version + 1,
            mod_revision: rev,
            version,
            ..Default::default()
        };
        Record { rev, parts: Default::default(), changes: [Change::Put { sub: 0, kv }].into_iter().collect() }
    }

    fn latest<'a, B: Base>(base: &'a B, overlay: &'a Overlay, point: i64) -> Latest<'a, B> {
        Latest { base, overlay, point, compacted: -1, lease_exists: &|lease| lease < 3 }
    }

    #[test]
    fn what_was_applied_leaves_nothing_behind() {
        let mut overlay = Overlay::new();
        let records: Vec<Record> = (1..=500).map(|version| put(version + 1, "hot", version)).collect();
        records.iter().for_each(|record| overlay.push(record));
        assert_eq!(overlay.len(), 500);
        assert!(overlay.bytes() > 500 * "hot".len());
        let base = History::default();
        let view = latest(&base, &overlay, 501);
        assert_eq!(view.meta(b"hot").unwrap().version, 500);
        assert_eq!(view.get_at(b"hot", 250).unwrap().version, 249);
        assert_eq!(view.get_at(b"hot", 1), None);

        overlay.applied_through(&records[498]);
        overlay.invariants();
        assert_eq!(overlay.len(), 1);
        overlay.applied_through(&records[499]);
        overlay.invariants();
        assert!(overlay.is_empty());
        assert_eq!(overlay.bytes(), 0);
    }

    #[test]
    #[should_panic(expected = "changes come in order")]
    fn records_out_of_order_are_refused() {
        let mut overlay = Overlay::new();
        overlay.push(&put(5, "a", 1));
        overlay.push(&put(4, "b", 1));
    }

    fn scanned(view: &impl View, range: &KeyRange, at: Option<i64>) -> Vec<KeyValue> {
        let mut kvs = Vec::new();
        view.scan(range, at, &mut |kv| {
            kvs.push(kv.to_owned());
            ControlFlow::Continue(())
        });
        kvs
    }

    /// Everything a view can be asked is answered alike by `overlay` on `base` and by the store that has
    /// applied it all.
    fn assert_same<B: Base>(
        dice: &mut Dice<'_>,
        base: &B,
        overlay: &Overlay,
        full: &History,
        owners: &[(KeyRange, ShardId)],
    ) {
        let nothing = Overlay::new();
        let (split, whole) = (latest(base, overlay, dice.rev), latest(full, &nothing, dice.rev));
        let key = dice.key();
        assert_eq!(split.get(&key), whole.get(&key), "{key:?}");
        assert_eq!(split.meta(&key), whole.meta(&key));
        let range = KeyRange::from_request(&key, &dice.range_end());
        let newest = dice.rev + 2;
        for at in std::iter::once(None).chain((1..=newest).rev().take(12).map(Some)) {
            let kvs = scanned(&whole, &range, at);
            assert_eq!(scanned(&split, &range, at), kvs, "{range:?} at {at:?}");
            assert_eq!(split.count(&range, at), kvs.len() as u64, "{range:?} at {at:?}");
            if let Some(first) = kvs.first() {
                let mut met = None;
                split.scan(&range, at, &mut |kv| {
                    assert_eq!(met.replace(kv.to_owned()), None, "a scan ends when it is told to");
                    ControlFlow::Break(())
                });
                assert_eq!(met.as_ref(), Some(first));
            }
            if let Some(at) = at {
                assert_eq!(split.get_at(&key, at), whole.get_at(&key, at), "{key:?} at {at}");
            }
        }
        let request = dice.request();
        let outcome = evaluate(&whole, &request);
        assert_eq!(evaluate(&split, &request), outcome, "{request:?}");
        let apart = evaluate(&gathered(&split, &request, owners), &request);
        assert_eq!(apart, outcome, "{request:?} over shards");
    }

    /// Random histories, applied up to a random point, in the middle of range deletions too.
    #[test]
    fn an_overlay_on_a_base_equals_the_whole() {
        for seed in 0..60 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let (mut full, mut base, mut overlay) = (History::default(), History::default(), Overlay::new());
            let mut unapplied: VecDeque<(i64, Change)> = VecDeque::new();
            let owners = owners(&["aa", "b", "c1"]);
            let mut dice = Dice { rng: &mut rng, rev: 1 };
            for _ in 0..120 {
                let record = if dice.rng.random() {
                    dice.record(&full)
                } else {
                    let request = dice.request();
                    let outcome = evaluate(&latest(&base, &overlay, dice.rev), &request);
                    let changes = outcome.map(|outcome| outcome.changes).unwrap_or_default();
                    let record = Record { rev: dice.rev + 1, parts: Default::default(), changes };
                    (!record.changes.is_empty()).then_some(record)
                };
                if let Some(record) = record {
                    full.apply(&record);
                    overlay.push(&record);
                    unapplied.extend(record.changes.iter().map(|change| (record.rev, change.clone())));
                    dice.rev = record.rev;
                }
                for _ in 0..dice.rng.random_range(0..4) {
                    let Some((rev, change)) = unapplied.pop_front() else { break };
                    let partly = matches!(change, Change::DeleteRange { .. }) && dice.rng.random();
                    if partly {
                        base.apply_partly(rev, &change, dice.rng.random_range(0..3));
                        overlay.applied(Rev::new(rev, change.first_sub()));
                        unapplied.push_front((rev, change));
                        break;
                    }
                    base.apply_partly(rev, &change, usize::MAX);
                    overlay.applied(Rev::new(rev, change.first_sub() + change.width()));
                }
                overlay.invariants();
                assert_same(&mut dice, &base, &overlay, &full, &owners);
            }
        }
    }

    /// As above, on the tree: whole records, and slices of those with range deletions.
    #[test]
    fn an_overlay_on_a_tree_equals_the_whole() {
        for seed in 0..12 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let disk = SimDisk::new(seed);
            disk.create_dir(Path::new("/data")).expect("a fresh disk");
            let path = Path::new("/data/tree");
            let mut store = Store::open(Arc::new(disk), path, btree::Options::default()).expect("a new tree");
            let (mut full, mut overlay) = (History::default(), Overlay::new());
            let mut unapplied: VecDeque<Record> = VecDeque::new();
            let owners = owners(&["aa", "b", "c1"]);
            let mut dice = Dice { rng: &mut rng, rev: 1 };
            for _ in 0..120 {
                if let Some(record) = dice.record(&full) {
                    full.apply(&record);
                    overlay.push(&record);
                    dice.rev = record.rev;
                    unapplied.push_back(record);
                }
                while dice.rng.random()
                    && let Some(record) = unapplied.front()
                {
                    let slice = dice.rng.random_range(1..4);
                    store.apply_slice(record, slice).expect("a record that fits");
                    match store.applied().position.cursor {
                        Some(cursor) => {
                            let under_way = &record.changes[cursor.change as usize];
                            overlay.applied(Rev::new(record.rev, under_way.first_sub()));
                        }
                        None => {
                            overlay.applied_through(record);
                            unapplied.pop_front();
                        }
                    }
                }
                overlay.invariants();
                assert_same(&mut dice, &store.reader(), &overlay, &full, &owners);
            }
        }
    }
}
