//! The tree against LMDB, in one run: the same inserts into two tables each, keys of 40 random bytes, values of
//! 300, batches of 100, on the same file system. Counts CPU time of the process (user and system), which a busy
//! machine disturbs less than the clock, and the wall clock beside it.
//!
//! Both lose what was not flushed, as both would stand behind a log: LMDB commits each batch without a flush and
//! flushes at the end, once with its usual page writes and once with its writable map; the tree checkpoints when
//! 256 MiB are dirty, and at the end.
//!
//! `cargo bench --bench tree -- [--entries N] [--dir DIR] [--only tree|lmdb|lmdb-map]`

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcore::btree::{Options, Read, Table, Tree};
use etcore::env::real::{self, RealDisk};
use heed::types::Bytes;
use heed::{EnvFlags, EnvOpenOptions};

// What the server runs with.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BATCH: u64 = 100;
const DIRTY_BYTES_MAX: usize = 256 << 20;

struct Arguments {
    entries: u64,
    dir: PathBuf,
    only: Option<String>,
}

fn arguments() -> Arguments {
    let mut arguments = Arguments { entries: 1_000_000, dir: std::env::temp_dir(), only: None };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let mut value = || given.next().unwrap_or_else(|| panic!("{name} takes a value"));
        match name.as_str() {
            "--entries" => arguments.entries = value().parse().expect("--entries takes a number"),
            "--dir" => arguments.dir = value().into(),
            "--only" => arguments.only = Some(value()),
            // cargo adds it.
            "--bench" => {}
            _ => panic!("unknown argument {name}"),
        }
    }
    arguments
}

/// Number n of a fixed sequence of keys.
fn key(number: u64) -> [u8; 40] {
    let mut key = [0; 40];
    let mut state = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for part in key.chunks_exact_mut(8) {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        part.copy_from_slice(&(mixed ^ (mixed >> 31)).to_be_bytes());
    }
    key
}

fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills the struct that it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU and wall clock of something.
fn measured(work: impl FnOnce()) -> (Duration, Duration) {
    let (cpu_before, before) = (cpu(), Instant::now());
    work();
    (cpu() - cpu_before, before.elapsed())
}

fn tree(dir: &Path, entries: u64) {
    let disk = Arc::new(RealDisk::new(real::Options::default()));
    let mut tree = Tree::open(disk, &dir.join("tree"), Options::default()).expect("an empty directory");
    let checkpoint = |tree: &mut Tree| {
        let mut job = tree.checkpoint().expect("something to write");
        while !job.step().expect("a sound disk") {}
        tree.checkpoint_finished(job);
    };
    for batch in 0..entries / BATCH {
        for number in batch * BATCH..(batch + 1) * BATCH {
            let key = key(number);
            tree.insert(Table::Kv, &key, &[number as u8; 300]);
            tree.insert(Table::Old, &key, &[number as u8; 300]);
        }
        if tree.dirty_bytes() > DIRTY_BYTES_MAX {
            checkpoint(&mut tree);
        }
    }
    checkpoint(&mut tree);
    assert_eq!(tree.len(Table::Old), entries / BATCH * BATCH);
}

fn lmdb(dir: &Path, entries: u64, flags: EnvFlags) {
    let mut options = EnvOpenOptions::new();
    options.map_size(1 << 36).max_dbs(2);
    // SAFETY: nobody else opens this file.
    let env = unsafe { options.flags(flags | EnvFlags::NO_SYNC).open(dir) }.expect("an empty directory");
    let mut transaction = env.write_txn().expect("the only writer");
    let mut table = |name| env.create_database::<Bytes, Bytes>(&mut transaction, Some(name)).expect("room");
    let (kv, old) = (table("kv"), table("old"));
    transaction.commit().expect("room");
    for batch in 0..entries / BATCH {
        let mut transaction = env.write_txn().expect("the only writer");
        for number in batch * BATCH..(batch + 1) * BATCH {
            let key = key(number);
            kv.put(&mut transaction, &key, &[number as u8; 300]).expect("room");
            old.put(&mut transaction, &key, &[number as u8; 300]).expect("room");
        }
        transaction.commit().expect("room");
    }
    env.force_sync().expect("a sound disk");
}

fn main() {
    let arguments = arguments();
    let entries = arguments.entries;
    println!("{entries} entries into each of two tables");
    println!("{:10} {:>14} {:>14} {:>8}", "", "CPU ns/insert", "wall ns/insert", "MiB");
    let mut tree_cpu = None;
    for name in ["tree", "lmdb", "lmdb-map"] {
        if arguments.only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let dir = arguments.dir.join(format!("etcore-bench-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a writable directory");
        let (cpu, wall) = measured(|| match name {
            "tree" => tree(&dir, entries),
            "lmdb" => lmdb(&dir, entries, EnvFlags::empty()),
            _ => lmdb(&dir, entries, EnvFlags::WRITE_MAP),
        });
        let per = |time: Duration| time.as_nanos() as f64 / (2 * entries) as f64;
        let files = std::fs::read_dir(&dir).expect("there");
        let bytes: u64 = files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len())).sum();
        print!("{name:10} {:14.0} {:14.0} {:8}", per(cpu), per(wall), bytes >> 20);
        match tree_cpu {
            None => tree_cpu = Some(per(cpu)),
            Some(tree) => print!("   tree / {name}: {:.2} of its CPU", tree / per(cpu)),
        }
        println!();
        std::fs::remove_dir_all(&dir).expect("ours");
    }
}
