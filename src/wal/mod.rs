//! The log of one group: what a shard (or meta) decided, in order, durable before anyone is told.
//!
//! [`Log`] is a value. It collects records (`append`), hands out at most one [`Flush`] at a time, which somebody
//! executes and brings back (`flushed`), and asks for new segments by [`SegmentJob`]s. It promises:
//!
//! - What a flush brought back as done is found again by every later [`Log::open`], in order, or `open` fails.
//! - A flush is all or nothing: after a crash either all its records are found or none.
//! - Corruption is never taken for the torn end of an unfinished write if a later flush proves it (below).
//! - A flush that failed is never repeated; the log then refuses everything (case D3).
//!
//! It does not know what the records say, nor of Raft beyond an entry's index; it has no clock and no thread.
//!
//! # Format (version 1)
//!
//! A log is a directory of segments. Their numbers are contiguous and never used twice: a recycled file gets a
//! new number by being renamed, so the number is also the file's *life*, and records left from an earlier life
//! name another number than their file does. All integers are little endian.
//!
//! ```text
//!   0000000000000007.log   0000000000000008.log   0000000000000009.log    000000000000000a.new
//!   (16 hex digits)                               ready: no flush yet     being made, removed at open
//!
//!   segment:  | flush | flush | flush | ...  zeros, or records of an earlier life ... |
//!
//!   flush:    | record | record | ... | record (last) | padding |    starts and ends at a multiple of
//!                                                                     LOG_BLOCK_BYTES; never in two segments
//!   record:   | header 64 bytes | body | padding to 8 |
//!
//!   header:    0  magic "etl"     3
//!              3  version = 1     1
//!              4  kind            1   1 entry, 2 hard state, 3 mark, 4 seal
//!              5  flags           1   1 = the last record of its flush
//!              6  zero            2
//!              8  segment         8   the life in which it was written
//!             16  flush           8   number of its flush, from 1
//!             24  after           8   number of the flush before; 0: none
//!             32  index           8   Raft index of an entry; given by the caller for the others
//!             40  offset          4   of this header in the segment
//!             44  length          4   of the body
//!             48  chain before    4   the previous record's chain; 0 for the first of a log
//!             52  chain           4   CRC-32C of the body, continued from the chain before
//!             56  ordinal         4   of the record in its flush, from 0
//!             60  check           4   CRC-32C of bytes 0..60
//! ```
//!
//! A segment that has flushes has one at offset 0. A flush that does not fit behind the last one starts the next
//! segment; the rest of the old one stays as it is.
//!
//! # Replay
//!
//! Reading begins at the first segment and goes from flush to flush: each must follow the last good one, L (its
//! `after` and `chain before` say so), right behind it or at the start of the next segment. Where none does, there
//! the log ends, or it is damaged. Flush k+1 is written only after flush k is durable, so a power cut can spoil
//! only one flush, the last, which nobody was told of. Hence: every valid header further on, in its right file
//! and at its right place, with a number above L's, is looked at.
//!
//! - `after` = L: it belongs to the one flush that was under way, whose beginning was lost (case D1). Torn.
//! - `after` > L: the flush that followed L was completed and is not there now. That is corruption: `open` refuses.
//! - A number up to L's, or another life: left from before. Nothing.
//!
//! A torn flush is dropped whole; the next is written over its beginning. What remains of it further on cannot
//! look valid later: the next flush takes a number above every number seen, and then only numbers above that
//! count. So numbers may skip, which is why `after` is written down and not computed.
//!
//! A damaged *last* flush cannot be told from a torn one, unless something follows it. So after some quiet the
//! owner calls [`Log::seal`], which logs one block with the next number (case D2). How far replay looks
//! is bounded ([`SCAN_BYTES`]), as it costs start-up time; [`check`] looks everywhere.
//!
//! What `open` returns was perhaps written but never flushed, or flushed with an error, by a process that was
//! killed. Others will rely on it from now on, so `open` writes the last flush once more, as it is, and flushes
//! it and the directory. Before that flush there is none that was not flushed.

mod blocks;
pub mod check;
mod flush;
mod record;
mod replay;
mod segment;
#[cfg(test)]
mod tests;

pub use flush::Flush;
pub use record::{Kind, Place, Recovered};
pub use replay::Torn;
pub use segment::{SegmentJob, path as segment_path};

use crate::env::Disk;
use crate::model::Fault;
use crate::model::limits::{LOG_BLOCK_BYTES, LOG_SEGMENT_BYTES};
use blocks::Pool;
use bytes::Bytes;
use flush::Group;
use record::HEADER_BYTES;
use segment::Segment;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How much replay reads behind the log's end in search of a later flush. A hole that large is not the work of
/// a few bad sectors.
pub const SCAN_BYTES: u64 = 32 << 20;
/// Records that are appended while a flush is under way go into the next one up to this length, then into one
/// more. A longer record has a flush of its own.
const GROUP_BYTES_MAX: usize = 4 << 20;
/// The first segment of a new log is only this long, since it is zero-filled while the node starts.
const FIRST_SEGMENT_BYTES: u64 = 8 << 20;
/// Segments kept for later use. More are removed: the log was long once.
const READY_MAX: usize = 2;

#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Of segments made from now on; existing ones keep theirs. A multiple of LOG_BLOCK_BYTES. Bounds the length
    /// of a record, so it must exceed the longest request.
    pub segment_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { segment_bytes: LOG_SEGMENT_BYTES }
    }
}

/// The newest record of a kind of which only the newest counts. It is logged again before the segment that
/// holds it goes.
#[derive(Debug, Default)]
struct Newest {
    index: u64,
    body: Option<Bytes>,
    /// Counts the records of the kind; those up to `durable` are on the disk.
    appended: u64,
    durable: u64,
    /// The segment of the last durable one.
    segment: Option<u64>,
}

impl Newest {
    fn recovered(&mut self, record: &Recovered) {
        self.index = record.index;
        self.body = Some(record.body.clone());
        self.appended += 1;
        self.durable = self.appended;
        self.segment = Some(record.place.segment);
    }

    /// A flush is durable up to which there were `appended` records of this kind.
    fn flushed(&mut self, appended: u64, segment: u64) {
        if appended > self.durable {
            self.durable = appended;
            self.segment = Some(segment);
        }
    }
}

#[derive(Debug)]
pub struct Log {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    options: Options,
    /// Oldest first; never empty. Flushes go into the last.
    segments: VecDeque<Segment>,
    /// Prepared, without a flush yet; their numbers go on from the last segment's.
    ready: VecDeque<Segment>,
    /// Where in the last segment the next flush goes.
    offset: u64,
    /// The last durable flush and the segment it is in; 0: none.
    flush_last: u64,
    flush_last_segment: u64,
    flush_next: u64,
    /// Of the last record appended.
    chain: u32,
    pending: VecDeque<Group>,
    pool: Pool,
    flush_under_way: bool,
    job_under_way: bool,
    failed: bool,
    /// The last flush is a seal, and nothing was appended since; also before the first flush.
    sealed: bool,
    hard_state: Newest,
    mark: Newest,
    /// Entries up to here are not needed.
    released: u64,
    /// Bytes of all flushes handed out or replayed.
    length: u64,
    /// For each of them: the largest entry index up to there, and `length` behind it. Ascending in both.
    lengths: VecDeque<(u64, u64)>,
    torn: Option<Torn>,
}

impl Log {
    /// Opens the log in `dir`, or makes one. Returns all its records in order (of entries with the same index
    /// the last one counts). Fails if what was acknowledged is provably not there.
    pub fn open(disk: Arc<dyn Disk>, dir: &Path, options: Options) -> Result<(Log, Vec<Recovered>), Fault> {
        assert!(
            options.segment_bytes.is_multiple_of(LOG_BLOCK_BYTES as u64)
                && (1..=u64::from(u32::MAX)).contains(&options.segment_bytes),
            "segments are whole blocks, and offsets in them have 32 bits"
        );
        let mut segments = segment::list(&*disk, dir)?;
        if segments.is_empty() {
            let len = options.segment_bytes.min(FIRST_SEGMENT_BYTES);
            let mut job = SegmentJob::make(disk.clone(), dir, 1, len);
            while !job.step()? {}
            segments.extend(job.into_segment());
        }
        let mut log = Log {
            disk,
            dir: dir.to_path_buf(),
            options,
            segments: VecDeque::new(),
            ready: VecDeque::new(),
            offset: 0,
            flush_last: 0,
            flush_last_segment: 0,
            flush_next: 1,
            chain: 0,
            pending: VecDeque::new(),
            pool: Pool::default(),
            flush_under_way: false,
            job_under_way: false,
            failed: false,
            sealed: true,
            hard_state: Newest::default(),
            mark: Newest::default(),
            released: 0,
            length: 0,
            lengths: VecDeque::new(),
            torn: None,
        };
        let records = log.replay(segments)?;
        Ok((log, records))
    }

    fn replay(&mut self, mut segments: VecDeque<Segment>) -> Result<Vec<Recovered>, Fault> {
        let mut reader = replay::Reader::new(segments.iter().cloned().collect(), SCAN_BYTES);
        let mut records = Vec::new();
        let mut last = None;
        let end = loop {
            let flush = match reader.next()? {
                replay::Next::Flush(flush) => flush,
                replay::Next::End(end) => break end,
            };
            self.sealed = flush.records.iter().all(|record| record.kind == Kind::Seal);
            let segment = &mut segments[flush.segment_at];
            let mut index_last = 0;
            for record in &flush.records {
                match record.kind {
                    Kind::Entry => index_last = index_last.max(record.index),
                    Kind::HardState => self.hard_state.recovered(record),
                    Kind::Mark => self.mark.recovered(record),
                    Kind::Seal => {}
                }
            }
            segment.index_last = segment.index_last.max(index_last);
            self.flush_last = flush.number;
            self.flush_last_segment = segment.number;
            self.chain = flush.chain;
            self.count(index_last, flush.end - flush.start);
            last = Some((flush.segment_at, flush.start, flush.end));
            records.extend(flush.records);
        };
        if let Some(damage) = end.damage {
            return Err(damage.fault());
        }
        self.torn = end.torn;
        self.flush_next = self.flush_last.max(end.flush_seen) + 1;
        let mut tail = 0;
        if let Some((segment_at, start, end)) = last {
            (tail, self.offset) = (segment_at, end);
            segments[segment_at].settle(start, end)?;
        }
        self.ready = segments.split_off(tail + 1);
        self.segments = segments;
        self.trim_ready()?;
        Ok(records)
    }

    /// Removes ready segments that could not take the longest record, as they were made when segments were
    /// shorter; and those behind, so that the numbers stay contiguous.
    fn trim_ready(&mut self) -> Result<(), Fault> {
        let long = self.ready.iter().take_while(|segment| segment.len >= self.options.segment_bytes).count();
        while self.ready.len() > long {
            let last = self.ready.pop_back().expect("more than none");
            let mut job = SegmentJob::remove(self.disk.clone(), &self.dir, last);
            while !job.step()? {}
        }
        Ok(())
    }

    /// The torn flush that `open` dropped, if it met one that had begun to look like one.
    pub fn torn(&self) -> Option<&Torn> {
        self.torn.as_ref()
    }

    /// The longest body that `append` takes.
    pub fn body_bytes_max(&self) -> usize {
        self.options.segment_bytes as usize - HEADER_BYTES
    }

    /// Adds a record to the next flush. `index` is an entry's Raft index; for the other kinds it is carried along.
    /// A hard state or a mark supersedes all earlier ones of its kind. Does nothing after a failure.
    pub fn append(&mut self, kind: Kind, index: u64, body: &[u8]) {
        assert!(body.len() <= self.body_bytes_max(), "a record fits into a segment");
        if self.failed {
            return;
        }
        let newest = match kind {
            Kind::HardState => Some(&mut self.hard_state),
            Kind::Mark => Some(&mut self.mark),
            Kind::Entry | Kind::Seal => None,
        };
        if let Some(newest) = newest {
            newest.index = index;
            newest.body = Some(Bytes::copy_from_slice(body));
            newest.appended += 1;
        }
        self.write(kind, index, body);
    }

    fn write(&mut self, kind: Kind, index: u64, body: &[u8]) {
        let bytes_max = GROUP_BYTES_MAX.min(self.options.segment_bytes as usize);
        if self.pending.back().is_none_or(|group| !group.takes(body.len(), bytes_max)) {
            self.pending.push_back(Group::new(self.pool.take()));
        }
        let group = self.pending.back_mut().expect("just made if there was none");
        self.chain = group.append(kind, index, body, self.chain);
        group.hard_states = self.hard_state.appended;
        group.marks = self.mark.appended;
        self.sealed = kind == Kind::Seal;
    }

    /// Whether records wait for a flush.
    pub fn pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The records that wait, as one write; at most 4 MiB of them or one long one. `None` if nothing waits, a
    /// flush is under way, or the next segment is not there yet (see `housekeeping`).
    pub fn flush(&mut self) -> Option<Flush> {
        if self.flush_under_way || self.failed {
            return None;
        }
        let len = self.pending.front()?.flush_bytes();
        let mut tail = self.segments.back().expect("a log has a segment");
        if self.offset + len > tail.len {
            let next = self.ready.pop_front()?;
            assert!(len <= next.len, "a segment that is ready takes every flush");
            self.segments.push_back(next);
            self.offset = 0;
            tail = self.segments.back().expect("just put there");
        }
        let group = self.pending.pop_front()?;
        let flush = group.flush(tail, self.offset, self.flush_next, self.flush_last);
        self.flush_next += 1;
        self.offset += len;
        self.flush_under_way = true;
        self.count(flush.index_last, len);
        Some(flush)
    }

    /// Takes a flush back. Its records are durable if the answer is `Ok`. One that failed or was not finished
    /// ends the log.
    pub fn flushed(&mut self, flush: Flush) -> Result<(), Fault> {
        assert!(self.flush_under_way, "a flush comes back once");
        self.flush_under_way = false;
        if self.failed || !flush.is_done() {
            self.fail();
            return Err(Fault::Refused(format!("{}: the log ended with a failed flush", self.dir.display())));
        }
        self.flush_last = flush.number();
        self.flush_last_segment = flush.segment;
        self.hard_state.flushed(flush.hard_states, flush.segment);
        self.mark.flushed(flush.marks, flush.segment);
        let segment = self.segments.iter_mut().rfind(|segment| segment.number == flush.segment);
        let segment = segment.expect("a segment stays while a flush into it is under way");
        segment.index_last = segment.index_last.max(flush.index_last);
        self.pool.give(flush.into_buffer());
        Ok(())
    }

    /// Appends a seal with this body, unless there is nothing to protect: the last flush is a seal, or records
    /// wait or are on their way. To be called after some quiet.
    pub fn seal(&mut self, body: &[u8]) -> bool {
        let now = !self.sealed && !self.pending() && !self.flush_under_way && !self.failed;
        if now {
            self.append(Kind::Seal, 0, body);
        }
        now
    }

    /// Entries up to `index` are not needed any more, nor are hard states and marks but the newest of each,
    /// which is logged again if its segment is to go. `housekeeping` then has segments to recycle.
    pub fn release(&mut self, index: u64) {
        self.released = self.released.max(index);
        while self.lengths.len() > 1 && self.lengths[1].0 <= self.released {
            self.lengths.pop_front();
        }
        let Some(last) = self.segments.iter().rev().find(|segment| self.is_spent(segment)) else { return };
        let last = last.number;
        for kind in [Kind::HardState, Kind::Mark] {
            let newest = if kind == Kind::Mark { &self.mark } else { &self.hard_state };
            #[cfg(feature = "mutations")]
            if crate::model::mutation::on(crate::model::mutation::Mutation::HardStateForgotten) {
                return;
            }
            let carried = newest.segment.is_some_and(|segment| segment <= last);
            if carried && newest.appended == newest.durable {
                let body = newest.body.clone().expect("what is durable was appended");
                self.append(kind, newest.index, &body);
            }
        }
    }

    /// No entry in the segment is needed, and the log goes on, durably, in a later one.
    fn is_spent(&self, segment: &Segment) -> bool {
        segment.number < self.flush_last_segment && segment.index_last <= self.released
    }

    /// Whether the oldest segment may go.
    fn is_releasable(&self) -> bool {
        let oldest = &self.segments[0];
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::HardStateForgotten) {
            return self.is_spent(oldest);
        }
        let held = |newest: &Newest| newest.segment.is_some_and(|segment| segment <= oldest.number);
        self.is_spent(oldest) && !held(&self.hard_state) && !held(&self.mark)
    }

    /// Work on the segments, if there is any: the next one is made or recycled before it is needed, released ones
    /// go. To be asked for after `flushed`, `release` and `housekept`, and when `flush` has nothing though
    /// records wait.
    pub fn housekeeping(&mut self) -> Option<SegmentJob> {
        if self.job_under_way || self.failed {
            return None;
        }
        let number_next = self.ready.back().or(self.segments.back()).expect("a log has a segment").number + 1;
        // One at a time, oldest first, each durable before the next begins: the numbers stay contiguous
        // whatever a power cut takes back.
        let job = if self.is_releasable() {
            let oldest = self.segments.pop_front().expect("a log has a segment");
            let fits = oldest.len == self.options.segment_bytes;
            if fits && self.ready.len() < READY_MAX {
                SegmentJob::recycle(self.disk.clone(), &self.dir, oldest, number_next)
            } else {
                SegmentJob::remove(self.disk.clone(), &self.dir, oldest)
            }
        } else {
            let tail = self.segments.back().expect("a log has a segment");
            let waiting = self.pending.front().map_or(0, Group::flush_bytes);
            let needed = self.offset + waiting > tail.len / 2;
            if !needed || !self.ready.is_empty() {
                return None;
            }
            SegmentJob::make(self.disk.clone(), &self.dir, number_next, self.options.segment_bytes)
        };
        self.job_under_way = true;
        Some(job)
    }

    /// Takes a job back. One that failed or was not finished ends the log.
    pub fn housekept(&mut self, job: SegmentJob) -> Result<(), Fault> {
        assert!(self.job_under_way, "a job comes back once");
        self.job_under_way = false;
        if self.failed || !job.is_done() {
            self.fail();
            return Err(Fault::Refused(format!("{}: no segment could be prepared", self.dir.display())));
        }
        self.ready.extend(job.into_segment());
        Ok(())
    }

    fn fail(&mut self) {
        self.failed = true;
        self.pending.clear();
    }

    /// After a failure the log takes and gives nothing; only opening it anew helps.
    pub fn failed(&self) -> bool {
        self.failed
    }

    fn count(&mut self, index_last: u64, bytes: u64) {
        self.length += bytes;
        let index_last = self.lengths.back().map_or(0, |last| last.0).max(index_last);
        self.lengths.push_back((index_last, self.length));
    }

    /// How long the log is behind entry `index`, in bytes: what a replay from there would read. Counts whole
    /// flushes.
    pub fn bytes_since(&self, index: u64) -> u64 {
        let at = self.lengths.partition_point(|(index_last, _)| *index_last <= index);
        let before = at.checked_sub(1).map_or(0, |at| self.lengths[at].1);
        self.length - before
    }

    /// What must hold between any two calls; for tests and the simulator.
    pub fn invariants(&self) {
        let numbers: Vec<u64> = self.segments.iter().chain(&self.ready).map(|s| s.number).collect();
        assert!(numbers.windows(2).all(|w| w[0] + 1 == w[1]), "segments are contiguous: {numbers:?}");
        assert!(self.flush_last < self.flush_next, "flush numbers go up");
        let tail = self.segments.back().expect("a log has a segment");
        assert!(self.offset <= tail.len, "the log ends inside its last segment");
        assert!(self.ready.len() <= READY_MAX, "no more segments are kept than may be needed");
        assert!(self.flush_last_segment <= tail.number, "the last segment is the newest with a flush");
    }
}
