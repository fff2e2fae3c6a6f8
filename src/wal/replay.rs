//! Reads a log from the disk, flush by flush, and judges where it ends: torn or damaged. The rules stand at the
//! head of `wal/mod.rs`. Changes nothing.

use super::blocks::Blocks;
use super::record::{HEADER_BYTES, Header, NoHeader, Place, Recovered, record_bytes};
use super::segment::Segment;
use crate::model::Fault;
use crate::model::limits::LOG_BLOCK_BYTES;
use bytes::Bytes;
use std::path::PathBuf;

const BLOCK: u64 = LOG_BLOCK_BYTES as u64;
/// What one read takes from the disk.
const CHUNK_BYTES: usize = 4 << 20;
/// Of each segment behind the one in which the log ends, so much is searched for a later flush: its first flush
/// is at its start.
const SCAN_NEXT_BYTES: u64 = 4 << 20;

/// The flush that was under way when the power went, or the process died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Torn {
    pub place: Place,
    /// How many complete records it had, before the first that was not. All are dropped: none was acknowledged.
    pub records: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Damage {
    pub path: PathBuf,
    pub place: String,
    pub what: String,
}

impl Damage {
    pub fn missing(path: PathBuf) -> Self {
        Damage { path, place: "segment".into(), what: "missing, though later segments are there".into() }
    }

    pub fn fault(self) -> Fault {
        let remedy = "acknowledged changes are lost or unreadable: restore the data directory from a backup, or \
                      replace this member if others have the data; `etcore check` lists what can be read";
        Fault::Damage { path: self.path, place: self.place, what: self.what, remedy: remedy.into() }
    }
}

pub(super) struct FoundFlush {
    pub number: u64,
    pub records: Vec<Recovered>,
    /// Of the last record.
    pub chain: u32,
    /// Position in the list of segments.
    pub segment_at: usize,
    pub start: u64,
    pub end: u64,
}

/// Where and why the flushes end.
pub(super) struct End {
    /// If set, they must not end here.
    pub damage: Option<Damage>,
    pub torn: Option<Torn>,
    /// The largest flush number seen behind the end; 0: none.
    pub flush_seen: u64,
}

pub(super) enum Next {
    Flush(FoundFlush),
    End(End),
}

/// What the next flush must follow.
#[derive(Clone, Copy, Debug)]
struct Tip {
    flush: u64,
    /// `None`: not known, since what came before is not there.
    chain: Option<u32>,
}

/// Why there is no flush at a place.
struct NoFlush {
    /// Of the record that is not good.
    offset: u64,
    records: usize,
    /// The first record's header, if that was good.
    first: Option<Header>,
    what: &'static str,
}

pub(super) struct Reader {
    segments: Vec<Segment>,
    segment_at: usize,
    offset: u64,
    /// `None` until the first header of a log whose beginning was recycled.
    tip: Option<Tip>,
    /// How far behind the end a later flush is looked for.
    scan_bytes: u64,
    window: Window,
}

impl Reader {
    /// The segments must be in order, and at least one.
    pub fn new(segments: Vec<Segment>, scan_bytes: u64) -> Self {
        let tip = (segments[0].number == 1).then_some(Tip { flush: 0, chain: Some(0) });
        Reader { segments, segment_at: 0, offset: 0, tip, scan_bytes, window: Window::default() }
    }

    /// The next flush, or the end. Asked again after the end it says the same.
    pub fn next(&mut self) -> Result<Next, Fault> {
        if self.tip.is_none() {
            // The oldest segment that is left begins with a durable flush; it is believed what it follows.
            let Some(first) = self.header(0, 0)? else {
                let damage =
                    Some(self.damage(0, 0, "the oldest segment does not begin with a record".into()));
                return Ok(Next::End(End { damage, torn: None, flush_seen: 0 }));
            };
            self.tip = Some(Tip { flush: first.after, chain: None });
        }
        let tip = self.tip.expect("set above");
        let here = match self.flush(self.segment_at, self.offset, tip)? {
            Ok(found) => return Ok(self.advance(found)),
            Err(none) => none,
        };
        if self.segment_at + 1 < self.segments.len()
            && let Ok(found) = self.flush(self.segment_at + 1, 0, tip)?
        {
            return Ok(self.advance(found));
        }
        self.end(tip, here).map(Next::End)
    }

    fn advance(&mut self, found: FoundFlush) -> Next {
        (self.segment_at, self.offset) = (found.segment_at, found.end);
        self.tip = Some(Tip { flush: found.number, chain: Some(found.chain) });
        Next::Flush(found)
    }

    /// Goes on at the next flush that begins behind the end and is newer, believing what it says about the one
    /// before. False if there is none.
    pub fn skip_damage(&mut self) -> Result<bool, Fault> {
        let newest = self.tip.map_or(0, |tip| tip.flush);
        let (segment_at, offset) = (self.segment_at, self.offset);
        let found = self.scan(segment_at, offset, |header, place| {
            let begins = header.ordinal == 0 && header.flush > newest && place != (segment_at, offset);
            begins.then_some((place, header.after))
        })?;
        let Some(((segment_at, offset), after)) = found else { return Ok(false) };
        (self.segment_at, self.offset) = (segment_at, offset);
        self.tip = Some(Tip { flush: after, chain: None });
        Ok(true)
    }

    /// The header of a record that was written to this place in this life.
    fn header(&mut self, segment_at: usize, offset: u64) -> Result<Option<Header>, Fault> {
        let segment = &self.segments[segment_at];
        let Some(bytes) = self.window.get(segment_at, segment, offset, HEADER_BYTES)? else {
            return Ok(None);
        };
        match Header::parse(bytes) {
            Ok(header) if header.segment == segment.number && u64::from(header.offset) == offset => {
                Ok(Some(header))
            }
            Ok(_) | Err(NoHeader::Invalid) => Ok(None),
            Err(NoHeader::Newer(version)) => Err(Fault::Refused(format!(
                "{}: written by a newer version of etcore (log format {version}); start that version",
                segment.path.display()
            ))),
        }
    }

    /// The flush at a place, if it is whole and follows `tip`.
    fn flush(
        &mut self,
        segment_at: usize,
        start: u64,
        tip: Tip,
    ) -> Result<Result<FoundFlush, NoFlush>, Fault> {
        let mut records: Vec<Recovered> = Vec::new();
        let mut first: Option<Header> = None;
        let mut chain = tip.chain;
        let mut offset = start;
        let what = loop {
            let Some(header) = self.header(segment_at, offset)? else { break "no record" };
            let in_order = match &first {
                None => header.after == tip.flush && header.flush > tip.flush && header.ordinal == 0,
                Some(first) => {
                    (header.flush, header.after) == (first.flush, first.after)
                        && header.ordinal as usize == records.len()
                }
            };
            if !in_order || chain.is_some_and(|chain| chain != header.chain_before) {
                break "a record out of order";
            }
            let body_at = offset + HEADER_BYTES as u64;
            let body_bytes = header.length as usize;
            let segment = &self.segments[segment_at];
            let Some(body) = self.window.get(segment_at, segment, body_at, body_bytes)? else {
                break "a record longer than its segment";
            };
            if crc32c::crc32c_append(header.chain_before, body) != header.chain {
                first = first.or(Some(header));
                break "a record whose body has another checksum";
            }
            records.push(Recovered {
                kind: header.kind,
                index: header.index,
                body: Bytes::copy_from_slice(body),
                place: Place { segment: segment.number, offset },
            });
            chain = Some(header.chain);
            offset += record_bytes(body_bytes) as u64;
            if header.last {
                return Ok(Ok(FoundFlush {
                    number: header.flush,
                    records,
                    chain: header.chain,
                    segment_at,
                    start,
                    end: offset.next_multiple_of(BLOCK),
                }));
            }
            first = first.or(Some(header));
        };
        Ok(Err(NoFlush { offset, records: records.len(), first, what }))
    }

    /// Judges the end: see the head of `wal/mod.rs`.
    fn end(&mut self, tip: Tip, here: NoFlush) -> Result<End, Fault> {
        let (segment_at, start) = (self.segment_at, self.offset);
        let mut flush_seen = 0;
        let mut torn = None;
        let later = self.scan(segment_at, start, |header, place| {
            if header.flush <= tip.flush {
                return None;
            }
            flush_seen = flush_seen.max(header.flush);
            if header.after == tip.flush && torn.is_none() {
                torn = Some(place);
            }
            (header.after > tip.flush).then(|| (place, header.clone()))
        })?;
        #[cfg(feature = "mutations")]
        let later = later
            .filter(|_| !crate::model::mutation::on(crate::model::mutation::Mutation::DamageTakenForTorn));
        let recycled_start = (segment_at, start) == (0, 0) && self.segments[0].number != 1;
        let damage = if let Some(((later_at, later_offset), header)) = later {
            let later_file = self.segments[later_at].path.display();
            Some(format!(
                "{} where flush {} should be, yet flush {} stands at offset {later_offset} of {later_file}",
                here.what, header.after, header.flush
            ))
        } else {
            // Every segment but the first of a new log is entered by a flush that is durable before an older
            // segment goes.
            recycled_start.then(|| format!("{} at the beginning of the oldest segment", here.what))
        };
        let damage = damage.map(|what| self.damage(segment_at, here.offset, what));
        let torn = torn.map(|(at, offset)| Torn {
            place: Place { segment: self.segments[at].number, offset },
            records: if here.first.is_some() { here.records } else { 0 },
        });
        Ok(End { damage, torn, flush_seen })
    }

    fn damage(&self, segment_at: usize, offset: u64, what: String) -> Damage {
        Damage { path: self.segments[segment_at].path.clone(), place: format!("offset {offset}"), what }
    }

    /// Shows every header at the start of a block from a place on, in its right place, until `visit` returns
    /// something.
    fn scan<T>(
        &mut self,
        segment_at: usize,
        offset: u64,
        mut visit: impl FnMut(&Header, (usize, u64)) -> Option<T>,
    ) -> Result<Option<T>, Fault> {
        for at in segment_at..self.segments.len() {
            let (start, bytes) = match at == segment_at {
                true => (offset, self.scan_bytes),
                false if self.scan_bytes == u64::MAX => (0, u64::MAX),
                false => (0, SCAN_NEXT_BYTES),
            };
            let end = start.saturating_add(bytes).min(self.segments[at].len);
            for offset in (start..end).step_by(LOG_BLOCK_BYTES) {
                if let Some(header) = self.header(at, offset)?
                    && let Some(found) = visit(&header, (at, offset))
                {
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    }
}

/// The part of a segment that is in memory.
#[derive(Default)]
struct Window {
    segment_at: usize,
    start: u64,
    end: u64,
    blocks: Blocks,
}

impl Window {
    /// `len` bytes at `offset`; `None` if the segment ends before.
    fn get(
        &mut self,
        segment_at: usize,
        segment: &Segment,
        offset: u64,
        len: usize,
    ) -> Result<Option<&[u8]>, Fault> {
        let end = offset + len as u64;
        if end > segment.len {
            return Ok(None);
        }
        if segment_at != self.segment_at || offset < self.start || end > self.end {
            let start = offset - offset % BLOCK;
            let wanted = ((end - start) as usize).next_multiple_of(LOG_BLOCK_BYTES).max(CHUNK_BYTES) as u64;
            let bytes = wanted.min(segment.len - start) as usize;
            self.blocks.grow(bytes);
            // Nothing is there should the read fail.
            (self.segment_at, self.start, self.end) = (segment_at, start, start);
            segment
                .file
                .read_at(start, &mut self.blocks.bytes_mut()[..bytes])
                .map_err(|error| Fault::io(&segment.path, "read", error))?;
            self.end = start + bytes as u64;
        }
        let at = (offset - self.start) as usize;
        Ok(Some(&self.blocks.bytes()[at..at + len]))
    }
}
