//! Groups of records that wait, and the flush that writes one. A record's body is copied once, at `append`, to
//! where the disk takes it from; headers are filled in when the flush gets its number and its place.

use super::blocks::Blocks;
use super::record::{HEADER_BYTES, Header, Kind, record_bytes};
use super::segment::Segment;
use crate::env::File;
use crate::model::Fault;
use crate::model::limits::LOG_BLOCK_BYTES;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Group {
    buffer: Blocks,
    len: usize,
    /// Headers without what is not known yet; `offset` is relative to the flush.
    headers: Vec<Header>,
    /// How many records of these kinds the log had with this group.
    pub hard_states: u64,
    pub marks: u64,
}

impl Group {
    pub fn new(buffer: Blocks) -> Self {
        Group { buffer, len: 0, headers: Vec::new(), hard_states: 0, marks: 0 }
    }

    /// Whether a record with a body of this length may be added.
    pub fn takes(&self, body: usize, bytes_max: usize) -> bool {
        self.headers.is_empty() || self.len + record_bytes(body) <= bytes_max
    }

    /// Returns the chain's new value.
    pub fn append(&mut self, kind: Kind, index: u64, body: &[u8], chain_before: u32) -> u32 {
        let chain = crc32c::crc32c_append(chain_before, body);
        self.buffer.grow(self.len + record_bytes(body.len()));
        self.buffer.put(self.len + HEADER_BYTES, body);
        self.headers.push(Header {
            kind,
            last: false,
            segment: 0,
            flush: 0,
            after: 0,
            index,
            offset: self.len as u32,
            length: body.len() as u32,
            chain_before,
            chain,
            ordinal: self.headers.len() as u32,
        });
        self.len += record_bytes(body.len());
        chain
    }

    #[cfg(test)]
    pub fn headers(&self) -> &[Header] {
        &self.headers
    }

    /// What it takes on the disk.
    pub fn flush_bytes(&self) -> u64 {
        self.len.next_multiple_of(LOG_BLOCK_BYTES) as u64
    }

    pub fn flush(mut self, segment: &Segment, offset: u64, number: u64, after: u64) -> Flush {
        assert!(offset + self.flush_bytes() <= segment.len, "a flush is inside its segment");
        let last = self.headers.len() - 1;
        let mut index_last = 0;
        for (at, mut header) in self.headers.into_iter().enumerate() {
            let place = header.offset as usize;
            header.last = at == last;
            header.segment = segment.number;
            header.flush = number;
            header.after = after;
            header.offset += offset as u32;
            self.buffer.put(place, &header.to_bytes());
            if header.kind == Kind::Entry {
                index_last = index_last.max(header.index);
            }
        }
        Flush {
            number,
            segment: segment.number,
            index_last,
            hard_states: self.hard_states,
            marks: self.marks,
            file: segment.file.clone(),
            path: segment.path.clone(),
            offset,
            len: self.len.next_multiple_of(LOG_BLOCK_BYTES),
            buffer: self.buffer,
            stage: Stage::Write,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Write,
    Sync,
    Done,
    Failed,
}

/// One group of records on its way to the disk: a job of two steps, a write and a sync. The first that fails is
/// the last: nothing is ever tried again (case D3).
#[derive(Debug)]
pub struct Flush {
    number: u64,
    pub(super) segment: u64,
    pub(super) index_last: u64,
    pub(super) hard_states: u64,
    pub(super) marks: u64,
    file: Arc<dyn File>,
    path: PathBuf,
    offset: u64,
    len: usize,
    buffer: Blocks,
    stage: Stage,
}

impl Flush {
    /// Counts the flushes of a log; may skip numbers after a crash.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What it writes.
    pub fn bytes(&self) -> u64 {
        self.len as u64
    }

    /// True when all is durable.
    pub fn step(&mut self) -> Result<bool, Fault> {
        let (result, action, next) = match self.stage {
            Stage::Write => {
                (self.file.write_at(self.offset, &self.buffer.bytes()[..self.len]), "write", Stage::Sync)
            }
            Stage::Sync => (self.sync(), "flush", Stage::Done),
            Stage::Done => return Ok(true),
            Stage::Failed => {
                return Err(Fault::Refused(format!(
                    "{}: a failed flush is not repeated",
                    self.path.display()
                )));
            }
        };
        self.stage = if result.is_ok() { next } else { Stage::Failed };
        result.map_err(|error| Fault::io(&self.path, action, error))?;
        Ok(self.stage == Stage::Done)
    }

    fn sync(&self) -> io::Result<()> {
        #[cfg(feature = "mutations")]
        {
            use crate::model::mutation::{Mutation, on};
            if on(Mutation::FlushUnsynced) {
                return Ok(());
            }
            if on(Mutation::FlushRetried) {
                return self.file.sync().or_else(|_| self.file.sync());
            }
        }
        self.file.sync()
    }

    pub(super) fn is_done(&self) -> bool {
        self.stage == Stage::Done
    }

    pub(super) fn into_buffer(self) -> Blocks {
        self.buffer
    }
}
