//! The tree against a `BTreeMap`, against power cuts and against damage.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::env::Disk;
use crate::env::sim::{Crash, Dice, SimDisk};
use crate::model::Fault;
use crate::model::limits::PAGE_BYTES;

const FILE: &str = "/tree";

type Model = BTreeMap<(Table, Vec<u8>), Vec<u8>>;

fn open(disk: &SimDisk) -> Tree {
    Tree::open(Arc::new(disk.clone()), Path::new(FILE), Options::default()).expect("opens")
}

fn checkpoint(tree: &mut Tree) {
    if let Some(mut job) = tree.checkpoint() {
        while !job.step().expect("a sound disk") {}
        tree.checkpoint_finished(job);
    }
}

/// In these tests a value of table `rev` that begins with '@' names the run that its entry owns.
fn owner(table: Table, _key: &[u8], value: &[u8]) -> Option<OverflowRef> {
    (table == Table::Rev && value.first() == Some(&b'@'))
        .then(|| OverflowRef::from_bytes(&value[1..]).expect("a reference"))
}

fn sound(tree: &Tree) {
    assert_eq!(tree.invariants(&owner), Vec::new());
}

fn file_sound(disk: &SimDisk) {
    assert_eq!(check(disk, Path::new(FILE), &owner).expect("readable").findings, Vec::new());
}

/// Everything that a reader says must be what the model says.
fn same(read: &impl Read, model: &Model) {
    for table in Table::ALL {
        let expected: Vec<_> = model.iter().filter(|((t, _), _)| *t == table).collect();
        assert_eq!(read.len(table), expected.len() as u64);
        let mut cursor = read.cursor(table);
        let mut on = cursor.seek(&[]);
        for ((_, key), value) in &expected {
            assert!(on, "an entry is missing");
            assert!(cursor.entry() == Some((&key[..], &value[..])), "another entry");
            if let Some(place) = owner(table, key, value) {
                assert!(read.overflow(place) == run_of(place.len), "another run");
            }
            on = cursor.next();
        }
        assert!(!on && cursor.key().is_none());
        let mut on = cursor.seek_last();
        for ((_, key), value) in expected.iter().rev() {
            assert!(on && cursor.entry() == Some((&key[..], &value[..])), "another entry, backwards");
            on = cursor.prev();
        }
        assert!(!on && cursor.value().is_none());
    }
}

/// What a run of this length holds.
fn run_of(len: u32) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + len) as u8).collect()
}

/// Keys of all kinds: few short ones, deep common prefixes, longer than a page keeps, longer than many pages.
fn key(dice: &mut Dice) -> Vec<u8> {
    let number = dice.below(300);
    match dice.below(20) {
        0..8 => format!("/registry/pods/default/some-name-{number:03}").into_bytes(),
        8..12 => (number as u32 % 64).to_be_bytes()[..dice.below(5) as usize].to_vec(),
        12..15 => (0..1 + dice.below(40)).map(|_| dice.below(3) as u8).collect(),
        15..17 => [vec![b'p'; 600], number.to_be_bytes().to_vec()].concat(),
        17 => vec![b'q'; 900 + number as usize],
        18 => [vec![b'r'; 500 + 40 * (number as usize % 30)], vec![number as u8 % 3]].concat(),
        _ => [vec![b's'; 30_000], vec![number as u8 % 16, 0]].concat(),
    }
}

fn value(dice: &mut Dice) -> Vec<u8> {
    let len = match dice.below(8) {
        0 => 0,
        1..6 => dice.below(350),
        _ => dice.below(VALUE_MAX as u64 + 1),
    };
    vec![dice.draw() as u8 | 0x80; len as usize]
}

fn table(dice: &mut Dice) -> Table {
    Table::ALL[dice.below(8).min(4) as usize]
}

fn change(tree: &mut Tree, model: &mut Model, dice: &mut Dice, removals: u64) {
    let (table, key) = (table(dice), key(dice));
    if let Some(place) = tree.get(table, &key).and_then(|value| owner(table, &key, value)) {
        tree.free_overflow(place);
    }
    if dice.below(10) < removals {
        let removed = tree.remove(table, &key);
        assert_eq!(removed, model.remove(&(table, key)).is_some());
        return;
    }
    let value = if table == Table::Rev && dice.one_in(8) {
        let place = tree.write_overflow(&run_of(dice.below(60_000) as u32));
        [&b"@"[..], &place.to_bytes()].concat()
    } else {
        value(dice)
    };
    let replaced = tree.insert(table, &key, &value);
    assert_eq!(replaced, model.insert((table, key), value).is_some());
}

fn probe(read: &impl Read, model: &Model, dice: &mut Dice) {
    let (table, low, high) = (table(dice), key(dice), key(dice));
    assert_eq!(read.get(table, &low), model.get(&(table, low.clone())).map(|value| &value[..]));
    let in_table = |key: &Vec<u8>| (table, key.clone());
    let counted = if low < high { model.range(in_table(&low)..in_table(&high)).count() } else { 0 };
    assert_eq!(read.count(table, &low, Some(&high)), counted as u64);
    let all_from = model.range(in_table(&low)..).filter(|((t, _), _)| *t == table).count();
    assert_eq!(read.count(table, &low, None), all_from as u64);
    let mut cursor = read.cursor(table);
    cursor.seek(&low);
    let next = model.range(in_table(&low)..).next().filter(|((t, _), _)| *t == table);
    assert_eq!(cursor.key(), next.map(|((_, key), _)| &key[..]));
    cursor.seek_before(&low);
    let before = model.range(..in_table(&low)).next_back().filter(|((t, _), _)| *t == table);
    assert_eq!(cursor.entry(), before.map(|((_, key), value)| (&key[..], &value[..])));
}

#[test]
fn a_tree_is_a_sorted_map_whatever_is_done_to_it() {
    for seed in 0..12 {
        let mut dice = Dice::new(seed);
        let disk = SimDisk::new(seed);
        let mut tree = open(&disk);
        let mut model = Model::new();
        let mut snapshots: Vec<(Snapshot, Model)> = Vec::new();
        let mut job: Option<Checkpoint> = None;
        for turn in 0..1500 {
            // It grows, shrinks to little, grows again.
            change(&mut tree, &mut model, &mut dice, if turn % 500 < 300 { 2 } else { 8 });
            probe(&tree, &model, &mut dice);
            match dice.below(120) {
                0 => snapshots.push((tree.snapshot(), model.clone())),
                1 if !snapshots.is_empty() => {
                    let at = dice.below(snapshots.len() as u64) as usize;
                    let (snapshot, then) = snapshots.swap_remove(at);
                    probe(&snapshot, &then, &mut dice);
                    same(&snapshot, &then);
                }
                2 if job.is_none() => job = tree.checkpoint(),
                3 => {
                    if let Some(mut job) = job.take() {
                        while !job.step().expect("a sound disk") {}
                        tree.checkpoint_finished(job);
                    }
                    checkpoint(&mut tree);
                    file_sound(&disk);
                    if dice.coin() {
                        // Another process: no snapshot outlives the tree it is of.
                        snapshots.clear();
                        tree = open(&disk);
                        same(&tree, &model);
                    }
                }
                4 => sound(&tree),
                _ => {}
            }
            if let Some(mut running) = job.take() {
                if running.step().expect("a sound disk") {
                    tree.checkpoint_finished(running);
                } else {
                    job = Some(running);
                }
            }
        }
        sound(&tree);
        same(&tree, &model);
        for (snapshot, then) in &snapshots {
            same(snapshot, then);
        }
        for (table, key) in model.keys() {
            assert!(tree.remove(*table, key));
        }
        assert!(tree.stats().iter().all(|stats| stats.depth == 0));
    }
}

#[test]
fn a_key_of_the_largest_request_is_a_key() {
    let disk = SimDisk::new(1);
    let mut tree = open(&disk);
    let long = |last: u8| [vec![7; 1_500_000], vec![last]].concat();
    for last in [3, 1, 2, 5, 4] {
        for _ in 0..2 {
            tree.insert(Table::Kv, &long(last), &[last; 2000]);
        }
    }
    checkpoint(&mut tree);
    let tree = open(&disk);
    let mut cursor = tree.cursor(Table::Kv);
    cursor.seek(&long(2));
    assert!(cursor.entry() == Some((&long(2)[..], &[2; 2000][..])));
    cursor.seek_before(&long(2));
    assert!(cursor.key() == Some(&long(1)[..]));
    assert_eq!(tree.count(Table::Kv, &long(2), Some(&long(5))), 3);
    file_sound(&disk);
}

#[test]
fn appended_tables_fill_their_pages() {
    let disk = SimDisk::new(2);
    let mut tree = open(&disk);
    for revision in 0..5000u64 {
        tree.insert(Table::Rev, &[revision.to_be_bytes(), [0; 8]].concat(), &[1; 300]);
    }
    let least = 5000 * (300 + 16) / PAGE_BYTES as u64;
    let used = tree.used_bytes() / PAGE_BYTES as u64;
    assert!(used * 10 < least * 11, "{used} pages for what fits {least}");
}

#[test]
fn freed_pages_are_used_again() {
    let disk = SimDisk::new(3);
    let mut tree = open(&disk);
    let mut longest = 0;
    for round in 0..60u64 {
        for at in 0..200u64 {
            tree.insert(Table::Kv, &(at * 7919 % 200).to_be_bytes(), &[round as u8; 1000]);
        }
        checkpoint(&mut tree);
        if round == 10 {
            longest = tree.file_bytes();
        }
    }
    assert_eq!(tree.file_bytes(), longest, "the file stops growing");
    file_sound(&disk);
}

#[test]
fn a_snapshot_is_read_on_another_thread_while_the_tree_changes() {
    let disk = SimDisk::new(4);
    let mut tree = open(&disk);
    for at in 0..2000u32 {
        tree.insert(Table::Kv, &at.to_be_bytes(), &[1; 100]);
    }
    checkpoint(&mut tree);
    for at in 0..2000u32 {
        tree.insert(Table::Kv, &at.to_be_bytes(), &[2; 100]);
    }
    let snapshot = tree.snapshot();
    let reader = std::thread::spawn(move || {
        let mut cursor = snapshot.cursor(Table::Kv);
        let mut on = cursor.seek(&[]);
        let mut entries = 0;
        while on {
            assert_eq!(cursor.value(), Some(&[2; 100][..]));
            entries += 1;
            on = cursor.next();
        }
        entries
    });
    for round in 3..6 {
        for at in 0..2000u32 {
            tree.insert(Table::Kv, &at.to_be_bytes(), &[round; 100]);
        }
        checkpoint(&mut tree);
    }
    assert_eq!(reader.join().expect("what it read did not change"), 2000);
}

#[test]
fn overlapping_snapshots_cost_no_pile_of_layers() {
    let disk = SimDisk::new(5);
    let mut tree = open(&disk);
    let mut last = tree.snapshot();
    for at in 0..500u32 {
        tree.insert(Table::Kv, &at.to_be_bytes(), &[1; 200]);
        last = tree.snapshot();
    }
    assert_eq!(last.len(Table::Kv), 500);
    let layers = tree.state().0.frozen.len();
    assert!(layers <= 8, "{layers} layers");
    drop(last);
    let pages = tree.used_bytes() / PAGE_BYTES as u64;
    tree.insert(Table::Kv, b"x", b"y");
    tree.snapshot();
    let held = tree.dirty_bytes() / PAGE_BYTES;
    assert!(held as u64 <= pages * 4, "{held} pages in memory for {pages} in use");
}

/// After every step that a checkpoint can be cut at, and whatever the cut leaves: one of the two states, whole.
#[test]
fn a_power_cut_leaves_the_checkpoint_before_or_the_new_one() {
    let mut new_found = 0;
    for seed in 0..150 {
        let mut dice = Dice::new(1000 + seed);
        let disk = SimDisk::new(seed);
        let mut tree = open(&disk);
        let mut model = Model::new();
        let mut durable = vec![model.clone()];
        for _ in 0..1 + dice.below(6) {
            for _ in 0..40 {
                change(&mut tree, &mut model, &mut dice, 3);
            }
            let Some(mut job) = tree.checkpoint() else { continue };
            durable.push(model.clone());
            for _ in 0..20 {
                change(&mut tree, &mut model, &mut dice, 3);
            }
            while !job.step().expect("a sound disk") {}
            tree.checkpoint_finished(job);
            durable.remove(0);
        }
        for _ in 0..60 {
            change(&mut tree, &mut model, &mut dice, 3);
        }
        let Some(mut job) = tree.checkpoint() else { continue };
        durable.push(model.clone());
        disk.cut_power_after(dice.below(8));
        let finished = loop {
            match job.step() {
                Ok(false) => {}
                Ok(true) => break true,
                Err(_) => break false,
            }
        };
        drop((tree, job));
        disk.crash(Crash { seed, tear: dice.coin() });
        let mut tree = open(&disk);
        sound(&tree);
        let is_new = matches(&tree, &durable[1]);
        assert!(is_new || !finished && matches(&tree, &durable[0]), "seed {seed}");
        new_found += u32::from(is_new);
        // And it goes on from there.
        let mut model = if is_new { durable[1].clone() } else { durable[0].clone() };
        for _ in 0..3 {
            for _ in 0..30 {
                change(&mut tree, &mut model, &mut dice, 3);
            }
            checkpoint(&mut tree);
        }
        let tree = open(&disk);
        sound(&tree);
        same(&tree, &model);
        file_sound(&disk);
    }
    assert!((20..130).contains(&new_found), "both outcomes are met: {new_found} times the new state");
}

fn matches(tree: &Tree, model: &Model) -> bool {
    let found: Model = Table::ALL
        .into_iter()
        .flat_map(|table| {
            let mut cursor = tree.cursor(table);
            let mut on = cursor.seek(&[]);
            std::iter::from_fn(move || {
                let entry = cursor.entry().filter(|_| on)?;
                let entry = ((table, entry.0.to_vec()), entry.1.to_vec());
                on = cursor.next();
                Some(entry)
            })
        })
        .collect();
    found == *model
}

#[test]
fn a_file_that_was_never_finished_is_made_anew() {
    for calls in 0..7 {
        let disk = SimDisk::new(calls);
        disk.cut_power_after(calls);
        let made = Tree::open(Arc::new(disk.clone()), Path::new(FILE), Options::default());
        drop(made);
        disk.crash(Crash { seed: calls, tear: true });
        let mut tree = open(&disk);
        tree.insert(Table::Meta, b"k", b"v");
        checkpoint(&mut tree);
        drop(tree);
        disk.crash(Crash { seed: calls, tear: true });
        assert_eq!(open(&disk).get(Table::Meta, b"k"), Some(&b"v"[..]));
    }
}

/// A tree with all kinds of pages, twice checkpointed.
fn furnished(seed: u64) -> (SimDisk, Model) {
    let disk = SimDisk::new(seed);
    let mut dice = Dice::new(seed);
    let mut tree = open(&disk);
    let mut model = Model::new();
    for _ in 0..2 {
        for _ in 0..400 {
            change(&mut tree, &mut model, &mut dice, 2);
        }
        checkpoint(&mut tree);
    }
    (disk, model)
}

#[test]
fn a_changed_byte_in_use_is_found() {
    let (disk, _) = furnished(7);
    file_sound(&disk);
    let report = check(&disk, Path::new(FILE), &owner).expect("readable");
    assert!(report.pages > 100);
    let space = open(&disk);
    let bitmap = space.state().2.bitmap();
    let mut pages = Vec::new();
    super::space::each_bit(&bitmap, |page| pages.push(page));
    for (number, page) in pages.into_iter().enumerate() {
        // Some byte of what the checksum covers; the rest of a run's last page is not read.
        let offset = u64::from(page) * PAGE_BYTES as u64 + number as u64 * 31 % 16;
        let offset = if offset % 16 == 9 { offset - 1 } else { offset };
        assert!(disk.corrupt(Path::new(FILE), offset, 0x40));
        let found = check(&disk, Path::new(FILE), &owner).expect("readable").findings;
        assert!(!found.is_empty(), "page {page}, offset {offset}");
        assert!(disk.corrupt(Path::new(FILE), offset, 0x40));
    }
    file_sound(&disk);
}

#[test]
fn a_read_of_a_damaged_page_raises_a_fault_that_names_it() {
    let disk = SimDisk::new(8);
    let mut tree = open(&disk);
    tree.insert(Table::Kv, b"key", b"value");
    checkpoint(&mut tree);
    let page = tree.state().1[0].page;
    drop(tree);
    disk.corrupt(Path::new(FILE), u64::from(page) * PAGE_BYTES as u64 + 5000, 1);
    let tree = open(&disk);
    let read = std::panic::AssertUnwindSafe(|| tree.get(Table::Kv, b"key").map(<[u8]>::to_vec));
    let raised = std::panic::catch_unwind(read).expect_err("damage");
    let fault = raised.downcast::<Fault>().expect("a fault");
    let text = fault.to_string();
    assert!(text.contains("/tree: page 2 (offset 16384): checksum"), "{text}");
    assert!(text.contains("etcore check"), "{text}");
}

#[test]
fn one_damaged_meta_page_is_borne_two_are_not() {
    let (disk, model) = furnished(9);
    let newest = (0..2).max_by_key(|&number| {
        let bytes = disk.contents(Path::new(FILE)).expect("there");
        super::page::u64_at(&bytes, number * PAGE_BYTES + 40)
    });
    let newest = newest.expect("two") as u64 * PAGE_BYTES as u64;
    let older = PAGE_BYTES as u64 - newest;
    disk.corrupt(Path::new(FILE), older + 70, 1);
    let mut tree = open(&disk);
    same(&tree, &model);
    sound(&tree);
    tree.insert(Table::Kv, b"more", b"");
    checkpoint(&mut tree);
    file_sound(&disk);
    // What was written over the damaged one is now the newest; without it, the state before is there.
    disk.corrupt(Path::new(FILE), older + 70, 1);
    same(&open(&disk), &model);
    disk.corrupt(Path::new(FILE), newest + 70, 1);
    let fault =
        Tree::open(Arc::new(disk), Path::new(FILE), Options::default()).expect_err("neither is whole");
    assert!(matches!(&fault, Fault::Damage { .. }), "{fault}");
}

#[test]
fn a_file_of_a_later_version_is_refused_with_a_sentence() {
    let disk = SimDisk::new(10);
    drop(open(&disk));
    let file = disk.open(Path::new(FILE), crate::env::Open::Write, false).expect("there");
    let mut page = super::meta::Meta { generation: 1, pages: 2, ..Default::default() }.encode();
    page[32] = 2;
    let crc = super::page::checksum(&page[..]);
    page[..4].copy_from_slice(&crc.to_le_bytes());
    file.write_at(PAGE_BYTES as u64, &page[..]).expect("written");
    let fault = Tree::open(Arc::new(disk), Path::new(FILE), Options::default()).expect_err("too new");
    assert!(matches!(&fault, Fault::Refused(text) if text.contains("version 2")), "{fault}");
}

#[test]
fn a_file_that_was_cut_off_is_damaged() {
    let (disk, _) = furnished(11);
    let file = disk.open(Path::new(FILE), crate::env::Open::Write, false).expect("there");
    file.truncate(20 * PAGE_BYTES as u64).expect("cut");
    assert!(!check(&disk, Path::new(FILE), &owner).expect("readable").findings.is_empty());
    let fault = Tree::open(Arc::new(disk), Path::new(FILE), Options::default()).expect_err("cut off");
    assert!(fault.to_string().contains("cut off"), "{fault}");
}

#[test]
fn a_file_of_the_kernel_is_mapped_further_as_it_grows() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let path = place.path().join("tree");
    let disk = || Arc::new(crate::env::real::RealDisk::new(Default::default()));
    let mut tree = Tree::open(disk(), &path, Options::default()).expect("made");
    let mut runs = Vec::new();
    let mut before = Vec::new();
    for round in 0..4u32 {
        for part in 0..6 {
            let place = tree.write_overflow(&run_of(1_000_000 + round * 10 + part));
            tree.insert(
                Table::Rev,
                &(round * 10 + part).to_be_bytes(),
                &[&b"@"[..], &place.to_bytes()].concat(),
            );
            runs.push(place);
        }
        checkpoint(&mut tree);
        before.push((tree.snapshot(), runs.clone()));
        for (snapshot, runs) in &before {
            for run in runs {
                assert!(snapshot.overflow(*run) == run_of(run.len));
            }
        }
    }
    assert!(tree.file_bytes() > 24_000_000, "more than one piece of the mapping");
    drop((tree, before));
    let tree = Tree::open(disk(), &path, Options { reserve_bytes: 1 << 30 }).expect("opens");
    assert_eq!(tree.len(Table::Rev), 24);
    for run in &runs {
        assert!(tree.overflow(*run) == run_of(run.len));
    }
    assert_eq!(check(disk().as_ref(), &path, &owner).expect("readable").findings, Vec::new());
}

/// What stands in `tests/format/tree-1`: every kind of page, kept so for ever.
fn entries_of_version_1() -> Model {
    let mut entries = Model::new();
    for number in 0..400u32 {
        let key = format!("/registry/pods/default/pod-{number:05}").into_bytes();
        entries.insert((Table::Kv, key), vec![b'v'; number as usize % 40]);
        entries.insert((Table::Old, number.wrapping_mul(2_654_435_761).to_be_bytes().to_vec()), vec![1]);
    }
    for number in 0..6u8 {
        entries.insert((Table::Lease, [vec![b'l'; 10_000], vec![number]].concat()), vec![number; 5]);
    }
    entries.insert((Table::Meta, b"applied".to_vec()), vec![0; VALUE_MAX]);
    entries
}

#[test]
fn a_file_of_version_1_opens_for_ever() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/format/tree-1");
    let disk = SimDisk::new(12);
    let stored = disk.open(Path::new(FILE), crate::env::Open::Create, false).expect("made");
    stored.write_at(0, &std::fs::read(file).expect("it is part of the project")).expect("written");
    file_sound(&disk);
    let mut tree = open(&disk);
    let run =
        OverflowRef::from_bytes(&tree.get(Table::Rev, b"run").expect("there")[1..]).expect("a reference");
    assert!(tree.overflow(run) == run_of(20_000));
    assert!(tree.remove(Table::Rev, b"run"));
    tree.free_overflow(run);
    same(&tree, &entries_of_version_1());
    sound(&tree);
}
