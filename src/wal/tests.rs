//! The log on a disk that loses, tears and rots.

use super::check::{Check, Finding};
use super::*;
use crate::env::Open;
use crate::env::real::RealDisk;
use crate::env::sim::{Call, Crash, Dice, Failure, SimDisk};

const DIR: &str = "/data/log";
const BLOCK: u64 = LOG_BLOCK_BYTES as u64;

fn options(blocks: u64) -> Options {
    Options { segment_bytes: blocks * BLOCK }
}

fn disk(seed: u64) -> SimDisk {
    SimDisk::with_file_bytes_max(seed, 16 << 20)
}

fn open(disk: &SimDisk, options: Options) -> Result<(Log, Vec<Recovered>), Fault> {
    Log::open(Arc::new(disk.clone()), Path::new(DIR), options)
}

fn path(segment: u64) -> PathBuf {
    segment::path(Path::new(DIR), segment)
}

/// Runs all jobs and flushes that there are.
fn settle(log: &mut Log) {
    loop {
        if let Some(mut job) = log.housekeeping() {
            while !job.step().unwrap() {}
            log.housekept(job).unwrap();
        } else if let Some(mut flush) = log.flush() {
            while !flush.step().unwrap() {}
            log.flushed(flush).unwrap();
        } else {
            break;
        }
        log.invariants();
    }
    assert!(!log.pending(), "the log is stuck");
}

/// One entry in a flush of its own.
fn put(log: &mut Log, index: u64, body: &[u8]) {
    log.append(Kind::Entry, index, body);
    settle(log);
}

fn indexes(records: &[Recovered], kind: Kind) -> Vec<u64> {
    records.iter().filter(|record| record.kind == kind).map(|record| record.index).collect()
}

fn damages(disk: &SimDisk) -> Vec<(PathBuf, String)> {
    Check::new(disk, Path::new(DIR))
        .unwrap()
        .filter_map(|finding| match finding.unwrap() {
            Finding::Damage { path, place, .. } => Some((path, place)),
            _ => None,
        })
        .collect()
}

#[test]
fn what_was_flushed_is_found_again_in_order() {
    let disk = disk(1);
    let (mut log, found) = open(&disk, options(16)).unwrap();
    assert!(found.is_empty());
    log.append(Kind::HardState, 0, b"term 1");
    log.append(Kind::Entry, 1, b"one");
    log.append(Kind::Entry, 2, b"");
    settle(&mut log);
    log.append(Kind::Mark, 2, b"mark");
    log.append(Kind::Entry, 3, &[7; 10_000]);
    settle(&mut log);
    assert!(log.seal(b"V"));
    settle(&mut log);
    disk.crash(Crash { seed: 1, tear: true });
    let (_, found) = open(&disk, options(16)).unwrap();
    let seen: Vec<(Kind, u64, &[u8])> = found.iter().map(|r| (r.kind, r.index, &r.body[..])).collect();
    assert_eq!(
        seen,
        [
            (Kind::HardState, 0, &b"term 1"[..]),
            (Kind::Entry, 1, b"one"),
            (Kind::Entry, 2, b""),
            (Kind::Mark, 2, b"mark"),
            (Kind::Entry, 3, &[7; 10_000]),
            (Kind::Seal, 0, b"V"),
        ]
    );
    assert_eq!(found[3].place, Place { segment: 1, offset: BLOCK });
}

#[test]
fn a_flush_is_one_write_and_one_sync_and_the_next_waits_for_it() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(16)).unwrap();
    let before = disk.counters();
    for index in 1..=10 {
        log.append(Kind::Entry, index, &[0; 300]);
    }
    let mut first = log.flush().unwrap();
    log.append(Kind::Entry, 11, b"waits");
    assert!(log.flush().is_none());
    assert!(!first.step().unwrap());
    assert!(log.flush().is_none());
    assert!(first.step().unwrap());
    let number = first.number();
    log.flushed(first).unwrap();
    let after = disk.counters();
    assert_eq!((after.writes - before.writes, after.syncs - before.syncs), (1, 1));
    assert_eq!(after.bytes_written - before.bytes_written, BLOCK);
    assert_eq!(log.flush().unwrap().number(), number + 1);
}

#[test]
fn a_record_longer_than_the_rest_of_its_segment_starts_the_next_one() {
    let disk = disk(1);
    // The first segment of a log is shorter than the others.
    let long = options(FIRST_SEGMENT_BYTES * 2 / BLOCK);
    let (mut log, _) = open(&disk, long).unwrap();
    let body = vec![1; log.body_bytes_max()];
    put(&mut log, 1, b"small");
    put(&mut log, 2, &body);
    // Longer than a group: several flushes, in order.
    for index in 3..=7 {
        log.append(Kind::Entry, index, &vec![index as u8; 3 << 20]);
    }
    settle(&mut log);
    put(&mut log, 8, &body);
    let (_, found) = open(&disk, long).unwrap();
    assert_eq!(indexes(&found, Kind::Entry), (1..=8).collect::<Vec<_>>());
    assert_eq!(found[1].body, body);
    assert!((3..=7).all(|index| found[index - 1].body == vec![index as u8; 3 << 20]));
}

#[test]
fn records_of_a_torn_flush_are_dropped_together() {
    // Case D1: the second of two records in a flush survives, the first does not.
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(16)).unwrap();
    put(&mut log, 1, b"kept");
    log.append(Kind::Entry, 2, &[2; LOG_BLOCK_BYTES - HEADER_BYTES]);
    log.append(Kind::Entry, 3, b"at the start of a block");
    settle(&mut log);
    disk.corrupt(&path(1), BLOCK + 20, 1);
    let (mut log, found) = open(&disk, options(16)).unwrap();
    assert_eq!(indexes(&found, Kind::Entry), [1]);
    assert_eq!(log.torn().unwrap().records, 0);
    assert!(damages(&disk).is_empty());
    // What remains of the torn flush is older than what comes now.
    put(&mut log, 2, b"again");
    let (log, found) = open(&disk, options(16)).unwrap();
    assert_eq!(found.last().unwrap().body, &b"again"[..]);
    assert_eq!(log.torn(), None);
}

#[test]
fn a_bad_record_before_a_later_flush_is_corruption() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(16)).unwrap();
    for index in 1..=5 {
        put(&mut log, index, &[index as u8; 100]);
    }
    let pristine = disk.contents(&path(1)).unwrap();
    // Any byte of the third flush but its padding, which nobody reads.
    for byte in 0..HEADER_BYTES as u64 + 100 {
        let offset = 2 * BLOCK + byte;
        disk.corrupt(&path(1), offset, 0x10);
        let text = open(&disk, options(16)).unwrap_err().to_string();
        assert!(text.contains("0000000000000001.log: offset 8192: "), "byte {byte}: {text}");
        assert!(text.contains("flush 4 stands at offset 12288"), "byte {byte}: {text}");
        let found: Vec<Finding> =
            Check::new(&disk, Path::new(DIR)).unwrap().collect::<Result<_, _>>().unwrap();
        let records = found.iter().filter_map(|finding| match finding {
            Finding::Record { record, flush } => Some((record.index, *flush)),
            _ => None,
        });
        assert_eq!(records.collect::<Vec<_>>(), [(1, 1), (2, 2), (4, 4), (5, 5)]);
        assert_eq!(damages(&disk), [(path(1), "offset 8192".to_string())]);
        disk.corrupt(&path(1), offset, 0x10);
    }
    assert_eq!(disk.contents(&path(1)).unwrap(), pristine);
    assert!(damages(&disk).is_empty());
}

#[test]
fn a_damaged_end_of_one_segment_is_proved_by_the_next() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(4)).unwrap();
    for index in 1..=5 {
        put(&mut log, index, b"one block each");
    }
    disk.corrupt(&path(1), 3 * BLOCK + 70, 1);
    let text = open(&disk, options(4)).unwrap_err().to_string();
    assert!(text.contains("0000000000000001.log: offset 12288: "), "{text}");
    assert!(text.contains("flush 5 stands at offset 0 of /data/log/0000000000000002.log"), "{text}");
}

#[test]
fn a_missing_segment_is_named() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(2)).unwrap();
    for index in 1..=6 {
        put(&mut log, index, b"");
    }
    disk.remove(&path(2)).unwrap();
    let text = open(&disk, options(2)).unwrap_err().to_string();
    assert!(text.contains("0000000000000002.log: segment: missing"), "{text}");
    assert_eq!(damages(&disk)[0], (path(2), "segment".to_string()));
}

#[test]
fn a_seal_makes_a_damaged_last_flush_show() {
    // Case D2.
    for sealed in [false, true] {
        let disk = disk(1);
        let (mut log, _) = open(&disk, options(16)).unwrap();
        assert!(!log.seal(b""), "there is nothing to protect");
        put(&mut log, 1, b"one");
        put(&mut log, 2, b"two");
        if sealed {
            assert!(log.seal(b""));
            assert!(!log.seal(b""), "it waits already");
            settle(&mut log);
            assert!(!log.seal(b""), "once is enough");
        }
        disk.corrupt(&path(1), BLOCK + HEADER_BYTES as u64, 1);
        match open(&disk, options(16)) {
            Ok((log, found)) => {
                assert!(!sealed);
                assert_eq!(indexes(&found, Kind::Entry), [1]);
                assert_eq!(log.torn().unwrap().place, Place { segment: 1, offset: BLOCK });
            }
            Err(fault) => assert!(sealed && matches!(fault, Fault::Damage { .. }), "{fault}"),
        }
    }
}

#[test]
fn a_seal_survives_opening() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(16)).unwrap();
    put(&mut log, 1, b"one");
    assert!(log.seal(b""));
    settle(&mut log);
    let (mut log, _) = open(&disk, options(16)).unwrap();
    assert!(!log.seal(b""));
    put(&mut log, 2, b"two");
    let (mut log, _) = open(&disk, options(16)).unwrap();
    assert!(log.seal(b""));
}

#[test]
fn a_failed_flush_ends_the_log() {
    // Case D3: the second attempt would succeed and the data be gone.
    for call in [Call::Write, Call::Sync] {
        let disk = disk(1);
        let (mut log, _) = open(&disk, options(16)).unwrap();
        put(&mut log, 1, b"acknowledged");
        disk.fail(Failure { call, path: String::new(), after: 0, times: 1, errno: libc::EIO });
        log.append(Kind::Entry, 2, b"fails");
        let mut flush = log.flush().unwrap();
        let fault = loop {
            match flush.step() {
                Ok(done) => assert!(!done),
                Err(fault) => break fault.to_string(),
            }
        };
        assert!(fault.contains("0000000000000001.log") && fault.contains("os error 5"), "{fault}");
        assert!(flush.step().is_err(), "a second attempt");
        assert!(log.flushed(flush).is_err());
        log.append(Kind::Entry, 3, b"refused");
        assert!(log.failed() && !log.pending() && log.flush().is_none() && log.housekeeping().is_none());
    }
}

#[test]
fn an_unfinished_flush_or_job_ends_the_log() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(2)).unwrap();
    log.append(Kind::Entry, 1, b"");
    let flush = log.flush().unwrap();
    assert!(log.flushed(flush).is_err());
    let (mut log, _) = open(&disk, options(2)).unwrap();
    log.append(Kind::Entry, 1, &[0; LOG_BLOCK_BYTES]);
    let job = log.housekeeping().unwrap();
    assert!(log.housekept(job).is_err());
    assert!(log.failed());
}

#[test]
fn what_a_killed_process_left_in_the_cache_is_durable_once_it_was_found() {
    for seed in 0..100 {
        let disk = disk(seed);
        let (mut log, _) = open(&disk, options(16)).unwrap();
        put(&mut log, 1, b"acknowledged");
        log.append(Kind::Entry, 2, &[2; 6000]);
        let mut flush = log.flush().unwrap();
        flush.step().unwrap();
        if seed % 2 == 0 {
            // The kernel now believes these blocks clean.
            disk.fail(Failure {
                call: Call::Sync,
                path: String::new(),
                after: 0,
                times: 1,
                errno: libc::EIO,
            });
            flush.step().unwrap_err();
        }
        let (_, found) = open(&disk, options(16)).unwrap();
        assert_eq!(indexes(&found, Kind::Entry), [1, 2]);
        disk.crash(Crash { seed, tear: true });
        let (_, found) = open(&disk, options(16)).unwrap();
        assert_eq!(indexes(&found, Kind::Entry), [1, 2]);
    }
}

#[test]
fn released_segments_are_recycled_and_the_newest_hard_state_and_mark_stay() {
    let disk = disk(1);
    let small = options(4);
    let (mut log, _) = open(&disk, small).unwrap();
    log.append(Kind::HardState, 0, b"old");
    log.append(Kind::HardState, 0, b"newest");
    log.append(Kind::Mark, 7, b"mark");
    for index in 1..=40 {
        put(&mut log, index, &[index as u8; 2000]);
        if index % 10 == 0 {
            log.release(index - 1);
            settle(&mut log);
        }
    }
    let names = disk.list(Path::new(DIR)).unwrap();
    assert!(names.len() <= 4, "{names:?}");
    let first = log.segments[0].number;
    assert!(first > 5, "segments were given back: {names:?}");
    disk.crash(Crash { seed: 1, tear: true });
    let (_, found) = open(&disk, small).unwrap();
    let last = |kind| found.iter().rfind(|record| record.kind == kind).unwrap();
    assert_eq!(last(Kind::HardState).body, &b"newest"[..]);
    assert_eq!((last(Kind::Mark).index, &last(Kind::Mark).body[..]), (7, &b"mark"[..]));
    let entries = indexes(&found, Kind::Entry);
    assert!(entries[0] <= 40 && *entries.last().unwrap() == 40);
    assert!(entries.windows(2).all(|w| w[0] + 1 == w[1]), "{entries:?}");
    assert!(damages(&disk).is_empty());
}

#[test]
fn surplus_segments_are_removed_when_a_long_log_gets_short() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(2)).unwrap();
    for index in 1..=40 {
        put(&mut log, index, b"");
    }
    assert!(disk.list(Path::new(DIR)).unwrap().len() > 15);
    log.release(40);
    settle(&mut log);
    assert!(disk.list(Path::new(DIR)).unwrap().len() <= 1 + READY_MAX);
    let (mut log, found) = open(&disk, options(2)).unwrap();
    assert_eq!(indexes(&found, Kind::Entry).last(), Some(&40));
    put(&mut log, 41, b"");
}

#[test]
fn the_tail_is_measured_from_an_index() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(64)).unwrap();
    assert_eq!(log.bytes_since(0), 0);
    for index in 1..=10 {
        put(&mut log, index, b"");
    }
    assert!(log.seal(b""));
    settle(&mut log);
    let measure = |log: &Log| [0, 1, 9, 10, 11].map(|index| log.bytes_since(index) / BLOCK);
    assert_eq!(measure(&log), [11, 10, 2, 0, 0]);
    log.release(9);
    assert_eq!(log.bytes_since(9) / BLOCK, 2);
    let (log, _) = open(&disk, options(64)).unwrap();
    assert_eq!(measure(&log), [11, 10, 2, 0, 0]);
}

#[test]
fn a_full_disk_ends_the_log_and_takes_nothing_that_was_acknowledged() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(2)).unwrap();
    put(&mut log, 1, b"one");
    disk.fail(Failure {
        call: Call::Allocate,
        path: String::new(),
        after: 0,
        times: u64::MAX,
        errno: libc::ENOSPC,
    });
    log.append(Kind::Entry, 2, &[0; LOG_BLOCK_BYTES]);
    assert!(log.flush().is_none(), "it needs a segment that is not there");
    let mut job = log.housekeeping().unwrap();
    let fault = job.step().unwrap_err().to_string();
    assert!(fault.contains("allocate") && fault.contains("os error 28"), "{fault}");
    assert!(job.step().is_err(), "a second attempt");
    assert!(log.housekept(job).is_err());
    assert!(log.failed());
    disk.heal();
    let (mut log, found) = open(&disk, options(2)).unwrap();
    assert_eq!(indexes(&found, Kind::Entry), [1]);
    assert_eq!(disk.list(Path::new(DIR)).unwrap().len(), 1, "half-made segments are removed");
    put(&mut log, 2, &[0; LOG_BLOCK_BYTES]);
}

#[test]
fn segments_of_another_length_are_read_and_replaced() {
    let disk = disk(1);
    let mut index = 0;
    for blocks in [4, 8, 2, 16] {
        let (mut log, found) = open(&disk, options(blocks)).unwrap();
        assert_eq!(indexes(&found, Kind::Entry), (1..=index).collect::<Vec<_>>());
        for _ in 0..7 {
            index += 1;
            let body = vec![1; log.body_bytes_max()];
            put(&mut log, index, &body);
        }
    }
}

#[test]
fn a_newer_format_is_refused_with_a_sentence() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(16)).unwrap();
    put(&mut log, 1, b"");
    let file = disk.open(&path(1), Open::Write, false).unwrap();
    let mut header = [0; HEADER_BYTES];
    file.read_at(0, &mut header).unwrap();
    header[3] = 2;
    let check = crc32c::crc32c(&header[..60]);
    header[60..].copy_from_slice(&check.to_le_bytes());
    file.write_at(0, &header).unwrap();
    let text = open(&disk, options(16)).unwrap_err().to_string();
    assert!(text.contains("newer version of etcore (log format 2)"), "{text}");
}

#[test]
fn the_format_is_what_the_drawing_says() {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(16)).unwrap();
    put(&mut log, 1, b"x");
    put(&mut log, 0x0102, b"body");
    let bytes = disk.contents(&path(1)).unwrap();
    let record = &bytes[LOG_BLOCK_BYTES..][..72];
    let mut expected = Vec::new();
    expected.extend(b"etl\x01\x01\x01\0\0");
    expected.extend(1u64.to_le_bytes());
    expected.extend(2u64.to_le_bytes());
    expected.extend(1u64.to_le_bytes());
    expected.extend(0x0102u64.to_le_bytes());
    expected.extend(4096u32.to_le_bytes());
    expected.extend(4u32.to_le_bytes());
    expected.extend(crc32c::crc32c(b"x").to_le_bytes());
    expected.extend(crc32c::crc32c(b"xbody").to_le_bytes());
    expected.extend(0u32.to_le_bytes());
    expected.extend(crc32c::crc32c(&expected).to_le_bytes());
    expected.extend(b"body\0\0\0\0");
    assert_eq!(record, expected);
    assert!(bytes[LOG_BLOCK_BYTES + 72..2 * LOG_BLOCK_BYTES].iter().all(|byte| *byte == 0));
}

#[test]
fn the_log_works_on_a_real_disk() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("log");
    let disk: Arc<dyn Disk> = Arc::new(RealDisk::new(Default::default()));
    let (mut log, _) = Log::open(disk.clone(), &dir, options(8)).unwrap();
    for index in 1..=50 {
        put(&mut log, index, &[index as u8; 3000]);
        if index == 40 {
            log.release(35);
        }
    }
    let (_, found) = Log::open(disk, &dir, options(8)).unwrap();
    let last = found.last().unwrap();
    assert_eq!((last.index, &last.body[..]), (50, &[50; 3000][..]));
    assert!(found[0].index > 1, "recycled");
}

/// What a log was told and what it promised, beside the log.
struct Witness {
    disk: SimDisk,
    dice: Dice,
    options: Options,
    log: Log,
    flush: Option<(Flush, usize, [u64; 2])>,
    job: Option<SegmentJob>,
    /// Everything appended, in order: index and body of entries.
    entries: Vec<(u64, Vec<u8>)>,
    entries_durable: usize,
    /// Hard states and marks appended, durable and oldest that may still be found. Their body is their number.
    stateful: [u64; 2],
    stateful_durable: [u64; 2],
    released: u64,
}

impl Witness {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let disk = disk(seed);
        let options = options(4 + dice.below(6));
        let (log, found) = open(&disk, options).unwrap();
        assert!(found.is_empty());
        Witness {
            disk,
            dice,
            options,
            log,
            flush: None,
            job: None,
            entries: Vec::new(),
            entries_durable: 0,
            stateful: [0; 2],
            stateful_durable: [0; 2],
            released: 0,
        }
    }

    fn act(&mut self) {
        match self.dice.below(16) {
            0..4 => {
                let last = self.entries.last().map_or(0, |(index, _)| *index);
                // Now and then entries replace a tail that no longer counts.
                let back = if self.dice.one_in(10) { self.dice.below(3) } else { 0 };
                let index = (last + 1).saturating_sub(back).max(self.released + 1);
                let len = match self.dice.below(8) {
                    0 => self.dice.below(self.log.body_bytes_max() as u64 + 1),
                    1 => self.dice.below(3) * BLOCK,
                    _ => self.dice.below(600),
                };
                let body: Vec<u8> = (0..len).map(|at| (self.entries.len() as u64 + at) as u8).collect();
                self.log.append(Kind::Entry, index, &body);
                self.entries.push((index, body));
            }
            4 => {
                let (at, kind) = if self.dice.coin() { (0, Kind::HardState) } else { (1, Kind::Mark) };
                self.stateful[at] += 1;
                self.log.append(kind, self.stateful[at], &self.stateful[at].to_le_bytes());
            }
            5..12 => self.write(),
            12..14 => self.keep_house(),
            14 => drop(self.log.seal(b"quiet")),
            _ => {
                let durable = &self.entries[..self.entries_durable];
                let last = durable.iter().map(|(index, _)| *index).max();
                self.released = self.released.max(self.dice.below(last.unwrap_or(0) + 1));
                self.log.release(self.released);
            }
        }
        self.log.invariants();
    }

    fn write(&mut self) {
        let Some((flush, entries, stateful)) = &mut self.flush else {
            let before = self.pending_records();
            self.flush = self.log.flush().map(|flush| {
                let [entries, stateful @ ..] = before;
                (flush, entries as usize, stateful)
            });
            return;
        };
        if self.dice.one_in(100) {
            self.disk.fail(Failure {
                call: Call::Sync,
                path: ".log".into(),
                after: 0,
                times: 1,
                errno: libc::EIO,
            });
        }
        match flush.step() {
            Ok(false) => {}
            Ok(true) => {
                self.entries_durable = *entries;
                self.stateful_durable = *stateful;
                let (flush, ..) = self.flush.take().unwrap();
                self.log.flushed(flush).unwrap();
            }
            // The process ends. What it did not acknowledge may be found or not.
            Err(_) => self.crash(),
        }
    }

    /// What will be durable with the next flush.
    fn pending_records(&self) -> [u64; 3] {
        let mut entries = self.entries_durable as u64;
        let mut stateful = self.stateful_durable;
        if let Some(group) = self.log.pending.front() {
            for header in group.headers() {
                match header.kind {
                    Kind::Entry => entries += 1,
                    Kind::HardState => stateful[0] = header.index,
                    Kind::Mark => stateful[1] = header.index,
                    Kind::Seal => {}
                }
            }
        }
        [entries, stateful[0], stateful[1]]
    }

    fn keep_house(&mut self) {
        match &mut self.job {
            None => self.job = self.log.housekeeping(),
            Some(job) => {
                if job.step().unwrap() {
                    let job = self.job.take().unwrap();
                    self.log.housekept(job).unwrap();
                }
            }
        }
    }

    fn crash(&mut self) {
        self.disk.heal();
        let seed = self.dice.draw();
        if !self.dice.one_in(4) {
            self.disk.crash(Crash { seed, tear: self.dice.coin() });
        }
        // Sometimes again while the log is being opened.
        let (log, found) = loop {
            let cut = self.dice.one_in(4);
            if cut {
                self.disk.cut_power_after(self.dice.below(4));
            }
            match open(&self.disk, self.options) {
                Ok(opened) => break opened,
                Err(fault) => assert!(cut && matches!(fault, Fault::Io { .. }), "{fault}"),
            }
            self.disk.crash(Crash { seed: self.dice.draw(), tear: self.dice.coin() });
        };
        // The power budget of the last round.
        self.disk.cut_power_after(u64::MAX);
        self.log = log;
        self.job = None;
        self.compare(&found);
        self.log.invariants();
        if self.dice.one_in(4) {
            self.rot();
        }
    }

    /// One byte of a record rots that is not in the last flush: nobody may open the log until it is mended.
    fn rot(&mut self) {
        let records: Vec<(Recovered, u64)> = Check::new(&self.disk, Path::new(DIR))
            .unwrap()
            .filter_map(|finding| match finding.unwrap() {
                Finding::Record { record, flush } => Some((record, flush)),
                _ => None,
            })
            .collect();
        let last = records.last().map_or(0, |(_, flush)| *flush);
        let older = records.partition_point(|(_, flush)| *flush < last);
        if older == 0 {
            return;
        }
        let record = &records[self.dice.below(older as u64) as usize].0;
        let offset = record.place.offset + self.dice.below((HEADER_BYTES + record.body.len()) as u64);
        let path = path(record.place.segment);
        self.disk.corrupt(&path, offset, 0x04);
        let opened = open(&self.disk, self.options);
        assert!(matches!(opened, Err(Fault::Damage { .. })), "rot at {offset} of {path:?} was not noticed");
        assert!(!damages(&self.disk).is_empty());
        self.disk.corrupt(&path, offset, 0x04);
    }

    fn compare(&mut self, found: &[Recovered]) {
        let entries: Vec<(u64, Vec<u8>)> = found
            .iter()
            .filter(|record| record.kind == Kind::Entry)
            .map(|record| (record.index, record.body.to_vec()))
            .collect();
        let stateful = [Kind::HardState, Kind::Mark].map(|kind| {
            let numbers = indexes(found, kind);
            assert!(numbers.is_sorted(), "{kind:?} out of order");
            for record in found.iter().filter(|record| record.kind == kind) {
                assert_eq!(record.body, record.index.to_le_bytes()[..]);
            }
            numbers.last().copied().unwrap_or(0)
        });
        let acknowledged = (self.entries_durable, self.stateful_durable);
        let handed_out = self.flush.take().map(|(_, entries, stateful)| (entries, stateful));
        let needed = self.entries.iter().position(|(index, _)| *index > self.released);
        let whole = [Some(acknowledged), handed_out].into_iter().flatten().find(|(end, states)| {
            let Some(start) = end.checked_sub(entries.len()) else { return false };
            *states == stateful
                && self.entries[start..*end] == entries
                && needed.is_none_or(|needed| start <= needed.min(*end))
        });
        let Some((end, states)) = whole else {
            panic!(
                "found entries {:?}.. ({}), states {stateful:?}; acknowledged {acknowledged:?}, under way \
                 {handed_out:?}, released {}",
                entries.first().map(|entry| entry.0),
                entries.len(),
                self.released
            );
        };
        self.entries.truncate(end);
        (self.entries_durable, self.stateful_durable, self.stateful) = (end, states, states);
    }
}

fn witness(seed: u64) {
    let mut witness = Witness::new(seed);
    for _ in 0..6 {
        for _ in 0..20 + witness.dice.below(60) {
            witness.act();
        }
        witness.crash();
    }
    assert!(damages(&witness.disk).is_empty());
}

#[test]
fn random_crashes_lose_nothing_acknowledged_and_invent_nothing() {
    for seed in 0..1500 {
        if let Err(panic) = std::panic::catch_unwind(|| witness(seed)) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[cfg(feature = "mutations")]
#[test]
fn every_broken_rule_is_noticed() {
    use crate::model::mutation::{self, Mutation};
    for broken in [
        Mutation::FlushUnsynced,
        Mutation::FlushRetried,
        Mutation::SegmentNamesUnsynced,
        Mutation::HardStateForgotten,
        Mutation::DamageTakenForTorn,
    ] {
        mutation::set(Some(broken));
        let seed = (0..300).find(|seed| std::panic::catch_unwind(|| witness(*seed)).is_err());
        mutation::set(None);
        eprintln!("{broken:?}: seed {seed:?}");
        assert!(seed.is_some(), "{broken:?} was not noticed");
    }
}

/// The segments of a small log with everything in it, over three files.
fn specimen() -> (SimDisk, Vec<Vec<u8>>) {
    let disk = disk(1);
    let (mut log, _) = open(&disk, options(4)).unwrap();
    for index in 1..=6 {
        log.append(Kind::HardState, 0, b"state");
        log.append(Kind::Entry, index, &[index as u8; 700]);
        put(&mut log, index, &[index as u8; 700]);
    }
    log.seal(b"");
    settle(&mut log);
    let files = (1..=3).map(|number| disk.contents(&path(number)).unwrap()).collect();
    (disk, files)
}

/// Puts a checksum under a header that was changed, so that the fields behind it are reached.
fn resign(file: &mut [u8], offset: usize) {
    let check = crc32c::crc32c(&file[offset..offset + 60]);
    file[offset + 60..offset + 64].copy_from_slice(&check.to_le_bytes());
}

fn digest(files: &[Vec<u8>]) -> Result<Vec<Recovered>, Fault> {
    let disk = disk(1);
    disk.create_dir(Path::new(DIR)).unwrap();
    for (at, bytes) in files.iter().enumerate() {
        let file = disk.open(&path(at as u64 + 1), Open::Create, false).unwrap();
        file.write_at(0, bytes).unwrap();
    }
    for _ in Check::new(&disk, Path::new(DIR))?.take(1000) {}
    let (mut log, found) = open(&disk, options(4))?;
    // It must also be possible to go on.
    put(&mut log, 100, b"more");
    Ok(found)
}

#[test]
fn mutated_segments_never_panic_and_yield_only_what_was_written() {
    let (_, files) = specimen();
    let sound = digest(&files).unwrap();
    for seed in 0..1000 {
        let mut dice = Dice::new(seed);
        let mut files = files.clone();
        let mut forged = false;
        for _ in 0..=dice.below(3) {
            let file = &mut files[dice.below(3) as usize];
            let at = dice.below(file.len() as u64) as usize;
            match dice.below(6) {
                0 => file[at] = dice.draw() as u8,
                1 => file.truncate(at),
                2 => {
                    let end = (at + dice.below(5000) as usize).min(file.len());
                    file[at..end].fill(0);
                }
                3 => {
                    let from = dice.below(file.len() as u64 / BLOCK) as usize * LOG_BLOCK_BYTES;
                    let to = dice.below(file.len() as u64 / BLOCK) as usize * LOG_BLOCK_BYTES;
                    let end = (from + LOG_BLOCK_BYTES).min(file.len());
                    let to = to.min(file.len() - (end - from));
                    file.copy_within(from..end, to);
                }
                _ => {
                    let header = at - at % LOG_BLOCK_BYTES;
                    if header + HEADER_BYTES <= file.len() {
                        let field = header + dice.below(60) as usize;
                        file[field] = dice.draw() as u8;
                        resign(file, header);
                        forged = true;
                    }
                }
            }
            if file.is_empty() {
                file.resize(LOG_BLOCK_BYTES, 0);
            }
        }
        if let Ok(found) = digest(&files) {
            // A forged header with a good checksum is believed; anything else is not.
            assert!(forged || sound.starts_with(&found), "seed {seed}");
        }
    }
}

#[test]
fn arbitrary_bytes_never_panic() {
    bolero::check!().with_type::<[Vec<u8>; 2]>().with_iterations(300).for_each(|files| {
        let _ = digest(&files[..]);
        for bytes in files {
            let _ = record::Header::parse(bytes);
        }
    });
}
