//! Every kind of damage, done to a store that the real machines wrote, is found and said with its place.

use super::*;
use crate::btree::Options as TreeOptions;
use crate::env::sim::SimDisk;
use crate::model::limits::PAGE_BYTES;
use crate::model::{CoreId, KeyRange, Request};
use crate::proto::etcdserverpb as pb;
use crate::raft::Birth;
use crate::runtime::{Control, Core, Effect, Home, Identity, Message, Pace};
use crate::wal;
use std::path::PathBuf;
use std::time::Duration;

const DIR: &str = "/data";

/// A node of one core whose jobs and messages are done at once.
struct Node {
    core: Core,
    control: Control,
    now: Duration,
    asked: u64,
    answered: u64,
}

impl Node {
    fn start(disk: &SimDisk) -> Node {
        Node::with_segments(disk, 1 << 20)
    }

    /// Three shards, split at "h" and "p".
    fn with_segments(disk: &SimDisk, segment_bytes: u64) -> Node {
        let disk: Arc<dyn Disk> = Arc::new(disk.clone());
        disk.create_dir(Path::new(DIR)).unwrap();
        let pace = Pace { checkpoint_after: Duration::from_secs(1), ..Pace::default() };
        let home = Home {
            disk,
            dir: DIR.into(),
            tree: TreeOptions { reserve_bytes: 8 << 20 },
            log: wal::Options { segment_bytes },
            pace,
        };
        let mut control = home.open_control(1).unwrap();
        home.run_alone(&mut control, Control::is_ready_to_reign).unwrap();
        let map = RangeMap::from_splits(&["h".into(), "p".into()]).unwrap();
        let born = control.birth().is_some();
        let units = (1..=3).map(|shard| home.open_shard(shard, born).unwrap()).collect();
        control.reign_or_be_born(|| Birth { range_map: map.to_bytes(), ..Birth::default() }).unwrap();
        home.run_alone(&mut control, Control::is_elected).unwrap();
        control.take_over().unwrap();
        let core = Core::new(0, 1, Arc::new(Identity::default()), home.pace, units);
        let mut node = Node { core, control, now: Duration::ZERO, asked: 0, answered: 0 };
        node.settle();
        assert!(node.control.serves());
        node
    }

    fn settle(&mut self) {
        loop {
            self.core.turn(self.now).unwrap();
            self.control.turn(self.now).unwrap();
            let (mut core, mut control) = (Vec::new(), Vec::new());
            self.core.take_effects(&mut core);
            self.control.take_effects(&mut control);
            if core.is_empty() && control.is_empty() {
                return;
            }
            for (owner, effect) in core
                .into_iter()
                .map(|effect| (0, effect))
                .chain(control.into_iter().map(|effect| (1, effect)))
            {
                match effect {
                    Effect::Send(to, message) => self.tell(to, message),
                    Effect::Run(mut job) => {
                        while !job.step().unwrap() {}
                        self.tell(owner, Message::Done(job));
                    }
                    Effect::Answer(_, answer) => {
                        answer.unwrap();
                        self.answered += 1;
                    }
                }
            }
        }
    }

    fn tell(&mut self, to: CoreId, message: Message) {
        match to {
            0 => self.core.message(message).unwrap(),
            _ => self.control.message(message).unwrap(),
        }
    }

    fn ask(&mut self, request: Request) {
        self.asked += 1;
        self.core.request(self.asked, request).unwrap();
        self.settle();
        assert_eq!(self.answered, self.asked);
    }

    fn put(&mut self, key: &str, bytes: usize) {
        let value = vec![7; bytes].into();
        self.ask(Request::Put(pb::PutRequest { key: key.to_owned().into(), value, ..Default::default() }));
    }

    /// Deletes everything: one revision with a part in every shard.
    fn delete_all(&mut self) {
        let (key, range_end) = ("\0".into(), "\0".into());
        self.ask(Request::DeleteRange(pb::DeleteRangeRequest { key, range_end, prev_kv: false }));
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.core.tick(self.now).unwrap();
        self.control.tick(self.now).unwrap();
        self.settle();
    }
}

/// What a store looks like that ran, was checkpointed, and went on for a while.
fn store() -> SimDisk {
    let disk = SimDisk::with_file_bytes_max(1, 8 << 20);
    let mut node = Node::start(&disk);
    for n in 0..40 {
        node.put(&format!("a{n}"), 50);
        node.put(&format!("k{n}"), if n == 7 { 5000 } else { 50 });
        node.put(&format!("z{n}"), 50);
    }
    node.delete_all();
    node.put("a", 2500);
    node.put("k", 10_000);
    node.pass(Duration::from_millis(10));
    node.pass(Duration::from_secs(2));
    for n in 0..10 {
        node.put(&format!("b{n}"), 10);
    }
    node.put("k", 10);
    node.delete_all();
    node.put("z", 10);
    node.pass(Duration::from_millis(10));
    disk
}

fn checked(disk: &SimDisk) -> (u64, String) {
    let mut out = Vec::new();
    let findings = check(Arc::new(disk.clone()), Path::new(DIR), true, &mut out).unwrap();
    (findings, String::from_utf8(out).unwrap())
}

/// The findings, one of which must hold all of the words.
#[track_caller]
fn assert_found(disk: &SimDisk, words: &[&str]) {
    let (findings, text) = checked(disk);
    let said = |line: &&str| line.starts_with("FINDING") && words.iter().all(|word| line.contains(word));
    let told: Vec<_> = text.lines().filter(|line| line.starts_with("FINDING")).collect();
    assert!(findings > 0 && text.lines().any(|line| said(&line)), "{words:?} in {told:#?}");
}

fn path(name: &str) -> PathBuf {
    Path::new(DIR).join(name)
}

/// Offsets of the records in the log of shard 1, as the check itself tells them.
fn offsets(text: &str, what: &str) -> Vec<u64> {
    let of = |line: &str| {
        line.strip_prefix("shard-0001/log/0000000000000001.log @")?.split(' ').next()?.parse().ok()
    };
    text.lines().filter(|line| line.contains(what)).filter_map(of).collect()
}

#[test]
fn a_sound_store_has_no_findings_and_every_record_is_shown() {
    let disk = store();
    let (findings, text) = checked(&disk);
    assert_eq!(findings, 0);
    assert!(text.ends_with("all is well\n"));
    for shown in
        ["birth of cluster", "reign of node 1", "cut, R* 1", "barrier", "hard state, term 1", "seal, V"]
    {
        assert!(text.contains(shown), "{shown}");
    }
    assert!(text.contains(": term 1 index 4: epoch"));
    assert!(text.contains("one part of those in shards [1, 2, 3]"));
    assert!(text.contains("revisions: whole up to 137"));
}

#[test]
fn it_is_a_check_and_not_a_repair() {
    let disk = store();
    let before = disk.contents(&path("shard-0001/log/0000000000000001.log")).unwrap();
    let counted = disk.counters();
    checked(&disk);
    let after = disk.counters();
    assert_eq!(
        (counted.writes, counted.syncs, counted.dir_syncs),
        (after.writes, after.syncs, after.dir_syncs)
    );
    assert!(before == disk.contents(&path("shard-0001/log/0000000000000001.log")).unwrap());
}

#[test]
fn a_flipped_bit_in_every_page_in_use_of_every_tree() {
    let disk = store();
    for tree in ["meta/tree", "shard-0001/tree", "shard-0002/tree", "shard-0003/tree"] {
        let (_, text) = checked(&disk);
        let line = text.lines().find(|line| line.starts_with(tree)).unwrap();
        let (before, _) = line.split_once(" pages").unwrap();
        let pages: u64 = before.rsplit(' ').next().unwrap().parse().unwrap();
        let file = disk.contents(&path(tree)).unwrap().len() / PAGE_BYTES;
        let mut found = 0;
        for page in 0..file as u64 {
            let at = page * PAGE_BYTES as u64 + 20;
            assert!(disk.corrupt(&path(tree), at, 4));
            let (findings, text) = checked(&disk);
            if findings > 0 {
                found += 1;
                assert!(text.contains(&format!("FINDING {tree}: page ")), "{text}");
            }
            assert!(disk.corrupt(&path(tree), at, 4));
        }
        assert!(found >= pages, "{tree}: {found} of {pages}");
    }
}

#[test]
fn a_flipped_bit_in_a_header_and_in_a_body_of_the_log() {
    let disk = store();
    let (_, text) = checked(&disk);
    let batches = offsets(&text, "record of revision");
    assert!(batches.len() > 20, "{}", batches.len());
    let log = path("shard-0001/log/0000000000000001.log");
    for offset in [batches[0], batches[15]] {
        for byte in [20, 64 + 12] {
            assert!(disk.corrupt(&log, offset + byte, 1));
            assert_found(
                &disk,
                &["shard-0001/log/0000000000000001.log", &format!("offset {offset}"), "flush"],
            );
            assert!(disk.corrupt(&log, offset + byte, 1));
        }
    }
    assert_eq!(checked(&disk).0, 0);
}

#[test]
fn a_file_that_was_cut() {
    let cut = |name: &str, len: u64| {
        let disk = store();
        disk.open(&path(name), Open::Write, false).unwrap().truncate(len).unwrap();
        disk
    };
    assert_found(&cut("shard-0002/tree", 3 * PAGE_BYTES as u64), &["shard-0002/tree", "cut off"]);
    assert_found(&cut("shard-0002/tree", 0), &["shard-0002/tree", "page 0"]);
    // The log of shard 1 loses what V, as the others know it, covers.
    assert_found(&cut("shard-0001/log/0000000000000001.log", 16 << 10), &["revision", "acknowledged"]);
    assert_found(&cut("shard-0001/log/0000000000000001.log", 0), &["shard-0001/log", "empty"]);
}

#[test]
fn a_segment_that_is_missing() {
    let disk = SimDisk::with_file_bytes_max(1, 8 << 20);
    let mut node = Node::with_segments(&disk, 64 << 10);
    for n in 0..60 {
        node.put(&format!("a{}", n % 5), 3000);
    }
    let names = disk.list(&path("shard-0001/log")).unwrap();
    assert!(names.len() >= 4, "{names:?}");
    drop(node);
    assert_eq!(checked(&disk).0, 0);
    disk.remove(&path("shard-0001/log").join(&names[1])).unwrap();
    assert_found(&disk, &[&format!("shard-0001/log/{}", names[1]), "missing"]);
}

#[test]
fn a_log_that_does_not_reach_back_to_its_tree() {
    let disk = store();
    // An older tree in place of the one to which the log belongs.
    let fresh = SimDisk::with_file_bytes_max(2, 8 << 20);
    let mut node = Node::with_segments(&fresh, 64 << 10);
    for n in 0..400 {
        node.put(&format!("a{}", n % 5), 3000);
        node.pass(Duration::from_secs(2));
    }
    drop(node);
    let names = fresh.list(&path("shard-0001/log")).unwrap();
    assert_ne!(names[0], "0000000000000001.log", "the oldest segment was recycled");
    assert_eq!(checked(&fresh).0, 0);
    replace(&fresh, &path("shard-0001/tree"), &disk.contents(&path("shard-0001/tree")).unwrap());
    assert_found(&fresh, &["shard-0001/log", "should be"]);
}

fn replace(disk: &SimDisk, path: &Path, bytes: &[u8]) {
    let file = disk.open(path, Open::Write, false).unwrap();
    file.truncate(0).unwrap();
    file.write_at(0, bytes).unwrap();
    file.sync().unwrap();
}

#[test]
fn a_shard_that_was_lost() {
    let disk = store();
    disk.remove(&path("shard-0003/tree")).unwrap();
    assert_found(&disk, &["shard-0003/tree", "missing"]);
}

#[test]
fn a_shard_too_many() {
    let disk = store();
    disk.create_dir(&path("shard-0004")).unwrap();
    assert_found(&disk, &["shard-0004", "only 3 shards"]);
}

#[test]
fn a_log_that_belongs_to_another_store() {
    let disk = store();
    let other = SimDisk::with_file_bytes_max(3, 8 << 20);
    drop(Node::start(&other));
    // A whole log, but of a store that did nothing yet: shard 2 lacks its parts of what the others have.
    for file in ["shard-0002/tree", "shard-0002/log/0000000000000001.log"] {
        replace(&disk, &path(file), &other.contents(&path(file)).unwrap());
    }
    assert_found(&disk, &["revision 3", "acknowledged"]);
}

#[test]
fn tables_that_contradict_each_other() {
    let disk = store();
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let tree = path("shard-0003/tree");
    let mut writer = crate::btree::Tree::open(shared, &tree, TreeOptions { reserve_bytes: 8 << 20 }).unwrap();
    let everything = KeyRange::everything();
    assert_eq!(mvcc::Reader::new(&writer).count(&everything, None), 0);
    assert!(writer.remove(Table::Old, &{
        let mut cursor = crate::btree::Read::cursor(&writer, Table::Old);
        cursor.seek(&[]);
        cursor.key().unwrap().to_vec()
    }));
    let mut job = writer.checkpoint().unwrap();
    while !job.step().unwrap() {}
    writer.checkpoint_finished(job);
    assert_found(&disk, &["shard-0003/tree", "tables", "stands in old as None"]);
}

#[test]
fn a_meta_group_that_forgot_a_reign() {
    let disk = store();
    let before = SimDisk::with_file_bytes_max(4, 8 << 20);
    // Two starts: the second reign's Cut stands in the shards' logs.
    drop(Node::start(&before));
    for file in ["meta/tree", "meta/log/0000000000000001.log"] {
        let old = before.contents(&path(file)).unwrap();
        if file == "meta/tree" {
            drop(Node::start(&disk));
        }
        replace(&disk, &path(file), &old);
    }
    assert_found(&disk, &["meta/log", "of which it knows nothing"]);
}

#[test]
fn what_the_arguments_are() {
    for wrong in [&[][..], &["a", "b"], &["-x", "a"], &["-v"]] {
        let wrong: Vec<String> = wrong.iter().map(|argument| (*argument).to_owned()).collect();
        assert_eq!(run(&wrong), ExitCode::from(2));
    }
    let nothing = tempfile::tempdir().unwrap();
    assert!(check_dir(nothing.path(), false, io::sink()).is_err(), "no data directory of ours");
}
