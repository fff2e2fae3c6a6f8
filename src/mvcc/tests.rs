//! The store against a plain model that keeps every version: random records with slices, checkpoints, restarts and
//! compactions in between, read at every revision that is readable; and etcd's golden hashes.

use super::*;
use crate::btree::{self, Read, Table};
use crate::env::Disk;
use crate::env::sim::{Crash, SimDisk};
use crate::model::limits::VALUE_INLINE_BYTES_MAX;
use crate::model::range::successor;
use crate::model::record::Parts;
use crate::model::{Change, KeyRange, KeyValue, KvRef, Record, Rev};
use crate::proto::etcdserverpb as pb;
use bytes::Bytes;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;
use std::sync::Arc;

/// A shard's store on a simulated disk, with the log it would be given again after a crash.
struct Shard {
    disk: SimDisk,
    store: Store,
    log: Vec<Record>,
}

impl Shard {
    fn new(seed: u64) -> Shard {
        let disk = SimDisk::new(seed);
        disk.create_dir(Path::new("/data")).expect("a fresh disk");
        let store = Shard::open(&disk);
        Shard { disk, store, log: Vec::new() }
    }

    fn open(disk: &SimDisk) -> Store {
        Store::open(Arc::new(disk.clone()), Path::new("/data/tree"), btree::Options::default())
            .expect("opens")
    }

    /// One slice of the next record; true if there is nothing to apply.
    fn step(&mut self, keys_max: usize) -> bool {
        let position = self.store.applied().position.clone();
        let Some(record) = self.log.get(position.record as usize) else { return true };
        if self.store.apply_slice(record, keys_max).expect("applies") == Progress::Done {
            self.store.applied_mut().position.record += 1;
        }
        false
    }

    fn catch_up(&mut self) {
        while !self.step(usize::MAX) {}
    }

    fn apply(&mut self, rev: i64, changes: impl IntoIterator<Item = Change>) {
        self.log.push(Record { rev, parts: Parts::new(), changes: changes.into_iter().collect() });
        self.catch_up();
    }

    fn checkpoint(&mut self) {
        if let Some(mut job) = self.store.checkpoint() {
            while !job.step().expect("writes") {}
            self.store.checkpoint_finished(job);
        }
    }

    fn crash(&mut self, seed: u64) {
        self.disk.crash(Crash { seed, tear: true });
        self.store = Shard::open(&self.disk);
    }

    fn check(&self) -> Vec<String> {
        check(self.store.tree(), self.store.applied())
    }

    /// Every page of the last checkpoint is used once: no run leaks, none is freed twice.
    fn check_file(&mut self) {
        self.checkpoint();
        let report = btree::check(&self.disk, Path::new("/data/tree"), &owned_run).expect("reads");
        assert_eq!(report.findings, []);
    }

    fn compact(&mut self, revision: i64) {
        self.store.compact(revision);
        while self.store.compact_slice(revision, 100).expect("compacts") == Progress::More {}
        assert_eq!(self.store.applied().compaction.finished, revision);
    }
}

fn put(sub: u32, rev: i64, key: &str, value: &str, create_revision: i64, version: i64) -> Change {
    let (key, value) = (key.to_owned().into(), value.to_owned().into());
    Change::Put { sub, kv: KeyValue { key, value, create_revision, mod_revision: rev, version, lease: 0 } }
}

fn delete(sub: u32, key: &str) -> Change {
    Change::Delete { sub, key: key.to_owned().into() }
}

fn range(start: &str, end: &str) -> KeyRange {
    KeyRange { start: start.to_owned().into(), end: Some(end.to_owned().into()) }
}

/// What the store should be.
#[derive(Default)]
struct Model {
    /// Ascending; None is a tombstone.
    versions: BTreeMap<Bytes, Vec<(Rev, Option<KeyValue>)>>,
    revision: i64,
    parts: BTreeMap<i64, Parts>,
}

impl Model {
    fn new() -> Model {
        Model { revision: 1, ..Model::default() }
    }

    fn at(&self, key: &[u8], revision: i64) -> Option<&KeyValue> {
        let (_, version) = self.versions.get(key)?.iter().rev().find(|(rev, _)| rev.main <= revision)?;
        version.as_ref()
    }

    fn live(&self, range: &KeyRange, revision: i64) -> Vec<KeyValue> {
        self.versions
            .keys()
            .filter(|key| range.contains(key))
            .filter_map(|key| self.at(key, revision).cloned())
            .collect()
    }

    /// The revisions that etcd stores when compaction to `compacted` is done, in order.
    fn stored(&self, compacted: i64) -> Vec<(Rev, Bytes, Option<KeyValue>)> {
        let mut stored = Vec::new();
        for (key, versions) in &self.versions {
            let kept = versions.iter().rposition(|(rev, _)| rev.main <= compacted).unwrap_or(0);
            for (rev, version) in &versions[kept..] {
                if version.is_some() || rev.main >= compacted {
                    stored.push((*rev, key.clone(), version.clone()));
                }
            }
        }
        stored.sort_by_key(|(rev, ..)| *rev);
        stored
    }

    fn record(&mut self, changes: Vec<Change>, parts: Parts) -> Record {
        self.revision += 1;
        self.parts.insert(self.revision, parts.clone());
        Record { rev: self.revision, parts, changes: changes.into_iter().collect() }
    }
}

/// Draws histories.
struct Writer {
    rng: SmallRng,
    keys: Vec<Bytes>,
    model: Model,
}

impl Writer {
    fn new(seed: u64) -> Writer {
        let mut keys: Vec<Bytes> =
            ["", "\0", "\0\0", "\0\u{1}", "a", "a\0", "a\0\0", "a\0b", "ab", "b", "b\u{1}"]
                .iter()
                .map(|key| Bytes::from_static(key.as_bytes()))
                .collect();
        keys.push(vec![0xff; 3].into());
        keys.push(vec![b'a'; 3000].into());
        keys.push([&[b'a'; 3000][..], &[0]].concat().into());
        keys.push(vec![0; 20_000].into());
        keys.extend((0..30).map(|number| Bytes::from(format!("key/{number:02}"))));
        Writer { rng: SmallRng::seed_from_u64(seed), keys, model: Model::new() }
    }

    fn value(&mut self) -> Bytes {
        let length = match self.rng.random_range(0..20) {
            0 => 0,
            1 => VALUE_INLINE_BYTES_MAX,
            2 => VALUE_INLINE_BYTES_MAX + 1,
            3 => self.rng.random_range(0..60_000),
            _ => self.rng.random_range(1..40),
        };
        vec![self.rng.random(); length].into()
    }

    fn range(&mut self) -> KeyRange {
        let start = self.keys.choose(&mut self.rng).expect("keys").clone();
        let end = match self.rng.random_range(0..6) {
            0 => None,
            1 => Some(successor(&start)),
            _ => Some(self.keys.choose(&mut self.rng).expect("keys").clone()),
        };
        KeyRange { start, end }
    }

    /// A record that changes something.
    fn record(&mut self) -> Record {
        let mut changes = Vec::new();
        let rev = self.model.revision + 1;
        let mut sub = self.rng.random_range(0..3);
        for _ in 0..*[1, 1, 1, 4].choose(&mut self.rng).expect("not empty") {
            let key = self.keys.choose(&mut self.rng).expect("keys").clone();
            let before = self.model.at(&key, rev).cloned();
            match self.rng.random_range(0..10) {
                0 if before.is_some() => {
                    self.write(&key, Rev::new(rev, sub), None);
                    changes.push(Change::Delete { sub, key });
                    sub += 1;
                }
                1 => {
                    let range = self.range();
                    let lease = *[0, 0, 7, -9].choose(&mut self.rng).expect("not empty");
                    let doomed: Vec<_> = self
                        .model
                        .live(&range, rev)
                        .into_iter()
                        .filter(|kv| lease == 0 || kv.lease == lease)
                        .collect();
                    if doomed.is_empty() {
                        continue;
                    }
                    let count = doomed.len() as u32;
                    changes.push(Change::DeleteRange { first_sub: sub, count, range, lease });
                    for kv in doomed {
                        self.write(&kv.key, Rev::new(rev, sub), None);
                        sub += 1;
                    }
                }
                _ => {
                    let kv = KeyValue {
                        key: key.clone(),
                        create_revision: before.as_ref().map_or(rev, |before| before.create_revision),
                        mod_revision: rev,
                        version: before.map_or(1, |before| before.version + 1),
                        value: self.value(),
                        lease: *[0, 0, 7, -9].choose(&mut self.rng).expect("not empty"),
                    };
                    self.write(&key, Rev::new(rev, sub), Some(kv.clone()));
                    changes.push(Change::Put { sub, kv });
                    sub += 1;
                }
            }
            sub += self.rng.random_range(0..2);
        }
        if changes.is_empty() {
            return self.record();
        }
        let parts = match self.rng.random_range(0..8) {
            0 => Parts::from_slice(&[1, 300]),
            1 => (1..200).collect(),
            _ => Parts::new(),
        };
        self.model.record(changes, parts)
    }

    fn write(&mut self, key: &Bytes, rev: Rev, version: Option<KeyValue>) {
        self.model.versions.entry(key.clone()).or_default().push((rev, version));
    }
}

fn collect<R: Read>(reader: Reader<'_, R>, range: &KeyRange, at: Option<i64>) -> Vec<KeyValue> {
    let mut kvs = Vec::new();
    assert!(
        reader
            .scan(range, at, &mut |kv| {
                kvs.push(kv.to_owned());
                Continue(())
            })
            .is_continue()
    );
    kvs
}

/// Every read at one revision agrees with the model.
fn compare<R: Read>(writer: &mut Writer, reader: Reader<'_, R>, at: Option<i64>) {
    let revision = at.unwrap_or(writer.model.revision);
    for key in &writer.keys {
        let expected = writer.model.at(key, revision);
        assert_eq!(reader.find(key, at).map(|kv| kv.to_owned()).as_ref(), expected, "{key:?} at {at:?}");
    }
    let mut ranges = vec![KeyRange::everything(), writer.range(), writer.range(), writer.range()];
    ranges.push(KeyRange::point(&writer.keys[4]));
    for range in ranges {
        let expected = writer.model.live(&range, revision);
        assert_eq!(collect(reader, &range, at), expected, "{range:?} at {at:?}");
        assert_eq!(reader.count(&range, at), expected.len() as u64, "{range:?} at {at:?}");
        let mut first = None;
        let _ = reader.scan(&range, at, &mut |kv| {
            first = Some(kv.to_owned());
            Break(())
        });
        assert_eq!(first.as_ref(), expected.first());
        let few = reader.count_within(&range, at, 1);
        assert!(few.is_none_or(|count| count == expected.len() as u64));
    }
}

fn stored<R: Read>(reader: Reader<'_, R>) -> Vec<(Rev, Bytes, Option<KeyValue>)> {
    let mut rows = Vec::new();
    let mut revisions = reader.revisions(Rev::default());
    while let Some(row) = revisions.current() {
        let kv = (!row.tombstone).then(|| row.kv.to_owned());
        rows.push((row.rev, Bytes::copy_from_slice(row.kv.key), kv));
        revisions.advance();
    }
    rows
}

/// One random history: slices of records, compaction, checkpoints and power cuts in any order.
fn history(seed: u64, records: usize) {
    let mut writer = Writer::new(seed);
    let mut shard = Shard::new(seed);
    let mut compacted = -1;
    let mut snapshots: Vec<(btree::Snapshot, i64, i64)> = Vec::new();
    for number in 0..records {
        let record = writer.record();
        shard.log.push(record);
        while !shard.step(writer.rng.random_range(1..6)) {
            match writer.rng.random_range(0..25) {
                0 => shard.checkpoint(),
                1 => {
                    shard.crash(writer.rng.random());
                    snapshots.clear();
                    // The wish for compaction is the caller's to repeat, as meta holds it.
                    shard.store.compact(compacted);
                }
                _ => {}
            }
        }
        let revision = writer.model.revision;
        assert_eq!(shard.store.applied().revision, revision);
        match writer.rng.random_range(0..10) {
            0 => {
                let floor = compacted.max(revision - 30);
                compacted = writer.rng.random_range(floor..=revision);
                shard.store.compact(compacted);
            }
            1 => snapshots.push((shard.store.snapshot(), revision, compacted)),
            2 | 3 => {
                let rows = writer.rng.random_range(1..40);
                shard.store.compact_slice(revision, rows).expect("compacts");
            }
            _ => {}
        }
        compare(&mut writer, shard.store.reader(), None);
        let at = writer.rng.random_range(compacted.max(1)..=revision);
        compare(&mut writer, shard.store.reader(), Some(at));
        if number % 16 == 0 {
            assert_eq!(shard.check(), [""; 0]);
        }
        if let Some((snapshot, revision, compacted)) = snapshots.choose(&mut writer.rng).cloned() {
            let at = writer.rng.random_range(compacted.max(1)..=revision);
            compare(&mut writer, Reader::new(&snapshot), Some(at));
        }
    }
    let revision = writer.model.revision;
    for at in compacted.max(1)..=revision {
        compare(&mut writer, shard.store.reader(), Some(at));
    }
    while shard.store.compact_slice(revision, 7).expect("compacts") == Progress::More {}
    assert_eq!(shard.store.applied().compaction.finished, compacted);
    assert_eq!(stored(shard.store.reader()), writer.model.stored(compacted));
    shard.check_file();
    assert_eq!(shard.check(), [""; 0]);
    for main in compacted.max(1) + 1..=revision {
        assert_eq!(shard.store.reader().rev_record(main), writer.model.parts.get(&main).cloned(), "{main}");
    }
    assert_eq!(shard.store.reader().rev_record(revision + 1), None);
}

#[test]
fn random_histories_read_as_the_model_does_at_every_revision() {
    for seed in 0..12 {
        history(seed, 120);
    }
}

/// A read at V while applying goes on corrects the newest versions; one far below merges the tables. Both ways of
/// the same read, by the length of what lies behind it.
#[test]
fn reads_agree_however_many_changes_lie_behind_them() {
    let mut writer = Writer::new(77);
    let mut shard = Shard::new(77);
    for _ in 0..150 {
        let record = writer.record();
        shard.log.push(record);
        shard.catch_up();
    }
    for revision in 1..=writer.model.revision {
        compare(&mut writer, shard.store.reader(), Some(revision));
    }
}

#[test]
fn a_range_record_goes_on_at_its_cursor_after_a_crash() {
    let mut shard = Shard::new(1);
    shard.apply(2, (0..50).map(|number| put(number, 2, &format!("k{number:02}"), "v", 2, 1)));
    let change = Change::DeleteRange { first_sub: 4, count: 48, range: range("k01", "k49"), lease: 0 };
    let changes = [delete(0, "k00"), change, put(60, 3, "k20", "again", 3, 1)];
    shard.log.push(Record { rev: 3, parts: Parts::new(), changes: changes.into_iter().collect() });
    shard.step(20);
    shard.checkpoint();
    assert_eq!(shard.store.applied().position.cursor, Some(Cursor { change: 1, next_sub: 24 }));
    assert_eq!(shard.store.applied().revision, 2, "a record applied in part does not count");
    shard.step(20);
    shard.crash(3);
    assert_eq!(shard.store.applied().position.cursor, Some(Cursor { change: 1, next_sub: 24 }));
    shard.catch_up();
    let rows: Vec<_> = stored(shard.store.reader()).into_iter().filter(|(rev, ..)| rev.main == 3).collect();
    let subs: Vec<_> = rows.iter().map(|(rev, ..)| rev.sub).collect();
    assert_eq!(subs, [0].into_iter().chain(4..52).chain([60]).collect::<Vec<_>>());
    assert!(rows[1..49].iter().enumerate().all(|(n, row)| row.1 == format!("k{:02}", n + 1)), "in key order");
    let live = collect(shard.store.reader(), &KeyRange::everything(), None);
    assert_eq!(live.iter().map(|kv| &kv.key[..]).collect::<Vec<_>>(), [&b"k20"[..], b"k49"]);
}

#[test]
fn a_range_record_that_finds_another_number_of_keys_is_a_fault() {
    for count in [1, 3] {
        let mut shard = Shard::new(2);
        shard.apply(2, [put(0, 2, "a", "", 2, 1), put(1, 2, "b", "", 2, 1)]);
        let change = Change::DeleteRange { first_sub: 0, count, range: range("a", "z"), lease: 0 };
        let record = Record { rev: 3, parts: Parts::new(), changes: [change].into_iter().collect() };
        assert!(matches!(shard.store.apply(&record), Err(crate::model::Fault::Broken(_))), "{count}");
    }
}

#[test]
fn a_tombstone_at_the_compaction_point_stays_until_the_next() {
    let mut shard = Shard::new(3);
    shard.apply(2, [put(0, 2, "a", "1", 2, 1)]);
    shard.apply(3, [delete(0, "a")]);
    shard.apply(4, [put(0, 4, "b", "1", 4, 1)]);
    let mains =
        |shard: &Shard| stored(shard.store.reader()).iter().map(|(rev, ..)| rev.main).collect::<Vec<_>>();
    shard.compact(2);
    assert_eq!(mains(&shard), [2, 3, 4]);
    shard.compact(3);
    assert_eq!(mains(&shard), [3, 4]);
    shard.compact(4);
    assert_eq!(mains(&shard), [4]);
}

#[test]
fn removal_waits_for_what_it_would_remove() {
    let mut shard = Shard::new(4);
    shard.apply(2, [put(0, 2, "a", "1", 2, 1)]);
    shard.store.compact(3);
    assert_eq!(shard.store.compact_slice(2, 10).expect("compacts"), Progress::Done);
    assert_eq!(shard.store.applied().compaction.finished, -1);
    shard.apply(3, [put(0, 3, "a", "2", 2, 2)]);
    while shard.store.compact_slice(3, 10).expect("compacts") == Progress::More {}
    assert_eq!(shard.store.applied().compaction.finished, 3);
    assert_eq!(stored(shard.store.reader()).len(), 1);
}

/// Long values and spilled rows give their pages back.
#[test]
fn compaction_frees_the_pages_of_long_values() {
    let mut shard = Shard::new(5);
    let long = "x".repeat(100_000);
    let used = |shard: &mut Shard| {
        shard.checkpoint();
        shard.checkpoint();
        shard.store.tree().used_bytes()
    };
    let key = "k".repeat(5000);
    shard.apply(2, [put(0, 2, &key, &long, 2, 1), put(1, 2, "b", "", 2, 1)]);
    let one = used(&mut shard);
    for rev in 3..30 {
        shard.apply(rev, [put(0, rev, &key, &long, 2, rev - 1)]);
    }
    assert!(used(&mut shard) > one + 26 * 100_000);
    shard.compact(29);
    assert!(used(&mut shard) <= one + 50_000, "{} {one}", used(&mut shard));
    assert_eq!(shard.store.reader().get(key.as_bytes()).expect("lives").value, long);
    shard.apply(30, [delete(0, &key)]);
    shard.apply(31, [put(0, 31, "b", "", 2, 2)]);
    shard.compact(31);
    assert!(used(&mut shard) < 100_000);
}

#[test]
fn the_applied_state_survives_with_the_data_whatever_its_size() {
    let mut shard = Shard::new(6);
    for size in [10, 100_000, 100_001, 0] {
        let applied = shard.store.applied_mut();
        applied.fence = size as u64;
        applied.range_set = vec![7; size].into();
        let written = applied.clone();
        shard.checkpoint();
        shard.store.applied_mut().fence = 99;
        shard.crash(size as u64);
        assert_eq!(shard.store.applied(), &written);
        shard.check_file();
    }
}

fn hash(shards: &mut [&mut Shard], revision: i64, compacted: i64) -> u32 {
    let snapshots: Vec<_> = shards.iter_mut().map(|shard| shard.store.snapshot()).collect();
    let whole = HashWalk::new(snapshots.clone(), revision, compacted, Basis::Request).run();
    let mut walk = HashWalk::new(snapshots, revision, compacted, Basis::Request);
    let sliced = loop {
        if let Some(hash) = walk.step(1) {
            break hash;
        }
    };
    assert_eq!(whole, sliced);
    assert_eq!((whole.revision, whole.compact_revision), (revision, compacted));
    whole.hash
}

/// etcd: semantics 11.7b.
#[test]
fn hashes_are_those_of_etcd() {
    let mut shard = Shard::new(7);
    assert_eq!(hash(&mut [&mut shard], 1, -1), 1084519789);
    shard.apply(2, [put(0, 2, "foo", "bar", 2, 1)]);
    assert_eq!(hash(&mut [&mut shard], 2, -1), 3305255506);
    shard.apply(3, [put(0, 3, "foo", "baz", 2, 2)]);
    assert_eq!(hash(&mut [&mut shard], 3, -1), 2020292994);
    shard.apply(4, [delete(0, "foo")]);
    assert_eq!(hash(&mut [&mut shard], 4, -1), 3153096970);
    assert_eq!(hash(&mut [&mut shard], 3, -1), 2020292994);
}

#[test]
fn hashes_over_shards_and_compactions_are_those_of_etcd() {
    let (mut left, mut right) = (Shard::new(8), Shard::new(9));
    left.apply(2, [put(0, 2, "a", "1", 2, 1)]);
    right.apply(2, [put(1, 2, "b", "2", 2, 1)]);
    assert_eq!(hash(&mut [&mut left, &mut right], 2, -1), 2787448889);
    left.apply(3, [put(0, 3, "a", "3", 2, 2)]);
    assert_eq!(hash(&mut [&mut right, &mut left], 3, -1), 2026694491);
    // Removal need not have begun for the hash to be that after it, and may be finished in one shard only.
    assert_eq!(hash(&mut [&mut left, &mut right], 3, 2), 1100288988);
    left.compact(2);
    assert_eq!(hash(&mut [&mut left, &mut right], 3, 2), 1100288988);
    right.compact(2);
    assert_eq!(hash(&mut [&mut left, &mut right], 3, 2), 1100288988);
    right.apply(4, [put(0, 4, "c", "4", 4, 1)]);
    assert_eq!(hash(&mut [&mut left, &mut right], 4, 3), 3936090454);
    left.compact(3);
    assert_eq!(hash(&mut [&mut left, &mut right], 4, 3), 3936090454);
}

fn hash_row(bytes: &mut Vec<u8>, rev: Rev, key: Bytes, version: Option<KeyValue>) {
    bytes.extend_from_slice(&rev.main.to_be_bytes());
    bytes.push(b'_');
    bytes.extend_from_slice(&u64::from(rev.sub).to_be_bytes());
    if version.is_none() {
        bytes.push(b't');
    }
    let kv = version.unwrap_or_else(|| KeyValue { key, ..KeyValue::default() });
    bytes.extend_from_slice(&prost::Message::encode_to_vec(&kv));
}

/// The rule of semantics 11.7 as it is written there, over what etcd has stored when compaction is finished.
fn model_hash(model: &Model, revision: i64, compacted: i64) -> u32 {
    let alive = !model.live(&KeyRange::everything(), revision).is_empty();
    let mut bytes = b"key".to_vec();
    for (rev, key, version) in model.stored(compacted) {
        if rev.main > revision {
            continue;
        }
        let current = || version.is_some() && model.at(&key, revision) == version.as_ref();
        if rev.main <= compacted && alive && !current() {
            continue;
        }
        if rev.main == compacted && version.is_none() {
            continue;
        }
        hash_row(&mut bytes, rev, key, version);
    }
    crc32c::crc32c(&bytes)
}

#[test]
fn hashes_do_not_depend_on_how_far_removal_has_got() {
    for seed in 0..6 {
        let mut writer = Writer::new(100 + seed);
        // Few keys, so that now and then none lives.
        writer.keys.truncate(3);
        let mut shard = Shard::new(seed);
        let mut compacted = -1;
        for _ in 0..60 {
            shard.log.push(writer.record());
            shard.catch_up();
            let revision = writer.model.revision;
            if writer.rng.random_ratio(1, 6) {
                compacted = writer.rng.random_range(compacted.max(1)..=revision);
                shard.store.compact(compacted);
            }
            shard.store.compact_slice(revision, 2).expect("compacts");
            let at = writer.rng.random_range(compacted.max(1)..=revision);
            assert_eq!(hash(&mut [&mut shard], at, compacted), model_hash(&writer.model, at, compacted));
        }
    }
}

/// What etcd caches when compaction from `before` to `point` is done: a hash over what was stored until then, with
/// what that compaction keeps in place of what is current.
fn model_compaction_hash(model: &Model, point: i64, before: i64) -> u32 {
    let kept: Vec<Rev> =
        model.stored(point).into_iter().map(|(rev, ..)| rev).filter(|rev| rev.main <= point).collect();
    let mut bytes = b"key".to_vec();
    for (rev, key, version) in model.stored(before) {
        let skipped = rev.main <= before && !kept.is_empty() && !kept.contains(&rev);
        if rev.main > point || skipped || (rev.main == before && version.is_none()) {
            continue;
        }
        hash_row(&mut bytes, rev, key, version);
    }
    crc32c::crc32c(&bytes)
}

#[test]
fn hashes_for_the_cache_are_those_of_the_compaction() {
    for seed in 0..6 {
        let mut writer = Writer::new(200 + seed);
        writer.keys.truncate(2);
        let mut shard = Shard::new(seed);
        let mut before = -1;
        for _ in 0..80 {
            shard.log.push(writer.record());
            shard.catch_up();
            let revision = writer.model.revision;
            if revision <= before.max(1) + 1 || writer.rng.random_ratio(2, 3) {
                continue;
            }
            let point = writer.rng.random_range(before.max(1) + 1..=revision);
            let walk = HashWalk::new(vec![shard.store.snapshot()], point, before, Basis::Compaction);
            assert_eq!(
                walk.run().hash,
                model_compaction_hash(&writer.model, point, before),
                "{before} {point}"
            );
            shard.compact(point);
            before = point;
        }
    }
}

fn five(shards: usize) -> Vec<Shard> {
    let mut all: Vec<_> = (0..shards).map(|seed| Shard::new(seed as u64)).collect();
    for (number, value) in ["v3", "v5", "v1", "v5", "v2"].iter().enumerate() {
        let key = ["a", "b", "c", "d", "e"][number];
        all[number * shards / 5].apply(2 + number as i64, [put(0, 2 + number as i64, key, value, 2, 1)]);
    }
    all
}

/// Every combination of options gives with two and three shards what it gives with one.
#[test]
fn ranges_over_shards_are_those_over_one() {
    let (one, two, three) = (five(1), five(2), five(3));
    let ask = |shards: &[Shard], request: &pb::RangeRequest| {
        let range = KeyRange::from_request(&request.key, &request.range_end);
        let at = (request.revision > 0).then_some(request.revision);
        let pieces = shards.iter().map(|shard| {
            piece(shard.store.reader(), request, &range, at, true, Budget::UNBOUNDED).expect("no bound")
        });
        assemble(pieces, request)
    };
    let mut request = pb::RangeRequest { key: "a".into(), range_end: "\0".into(), ..Default::default() };
    for options in 0..3 * 5 * 4 * 3 * 3 * 3 {
        let mut left = options;
        let mut draw = |bound: i64| {
            let drawn = left % bound;
            left /= bound;
            drawn
        };
        request.sort_order = draw(3) as i32;
        request.sort_target = draw(5) as i32;
        request.limit = [0, 1, 2, 9][draw(4) as usize];
        request.revision = [0, 4, 6][draw(3) as usize];
        request.min_mod_revision = [0, 3, 5][draw(3) as usize];
        (request.keys_only, request.count_only) =
            [(false, false), (true, false), (false, true)][draw(3) as usize];
        let expected = ask(&one, &request);
        assert_eq!(ask(&two, &request), expected, "{request:?}");
        assert_eq!(ask(&three, &request), expected, "{request:?}");
        assert_eq!(expected.count, if request.revision == 4 { 3 } else { 5 });
    }
}

#[test]
fn a_range_beyond_its_budget_is_given_up() {
    let shard = &five(1)[0];
    let everything = KeyRange::everything();
    let ask = |limit, keys, bytes, at| {
        let request = pb::RangeRequest { limit, ..Default::default() };
        piece(shard.store.reader(), &request, &everything, at, true, Budget { keys, bytes })
    };
    assert!(ask(0, 4, 1000, None).is_none(), "five keys are there");
    assert!(ask(0, 5, 14, None).is_none(), "of three bytes each");
    assert_eq!(ask(0, 5, 15, None).expect("just enough").count, 5);
    assert_eq!(ask(1, 2, 6, None).expect("the limit stops it").count, 5);
    let request = pb::RangeRequest { count_only: true, ..Default::default() };
    let counted =
        piece(shard.store.reader(), &request, &everything, None, true, Budget { keys: 0, bytes: 0 });
    assert_eq!(counted.expect("counting looks at no key").count, 5);
    let uncounted = piece(shard.store.reader(), &request, &everything, None, false, Budget::ON_CORE);
    assert_eq!(uncounted.expect("nothing to do"), Piece::default());
}

#[test]
fn a_tombstone_shows_its_key_and_revision_only() {
    let mut shard = Shard::new(10);
    shard.apply(2, [put(0, 2, "a", "1", 2, 1)]);
    shard.apply(3, [delete(0, "a")]);
    let reader = shard.store.reader();
    let row = reader.revisions(Rev::new(3, 0)).current().expect("stored");
    let kv = KvRef { key: b"a", value: b"", create_revision: 0, mod_revision: 3, version: 0, lease: 0 };
    assert_eq!(row, Revision { rev: Rev::new(3, 0), tombstone: true, kv });
}

#[test]
fn tables_that_contradict_each_other_are_found() {
    let shard = || {
        let mut shard = Shard::new(11);
        shard.apply(2, [put(0, 2, "a", "1", 2, 1), put(1, 2, "b", "1", 2, 1)]);
        let mut kv = KeyValue {
            key: "a".into(),
            create_revision: 2,
            mod_revision: 3,
            version: 2,
            ..Default::default()
        };
        kv.lease = 7;
        shard.apply(3, [Change::Put { sub: 0, kv }]);
        assert_eq!(shard.check(), [""; 0]);
        shard
    };
    for table in [Table::Kv, Table::Rev, Table::Old, Table::Lease] {
        let mut shard = shard();
        let key = {
            let mut cursor = shard.store.tree().cursor(table);
            cursor.seek_last();
            cursor.key().expect("not empty").to_vec()
        };
        shard.store.tree.remove(table, &key);
        assert_ne!(shard.check(), [""; 0], "a row of {table:?} is missing");
    }
    let mut other = shard();
    let row = other.store.tree().get(Table::Kv, b"b").expect("lives").to_vec();
    other.store.tree.insert(Table::Kv, b"a", &row);
    assert_ne!(other.check(), [""; 0], "a row of another key");
    let mut other = shard();
    other.store.applied_mut().revision = 2;
    assert_ne!(other.check(), [""; 0], "revision 3 is not applied");
}
