//! Work that is done elsewhere: on the thread of a log, or on a helper. The real node runs a job to its end; the
//! simulator runs it step by step and may cut the power between two steps.

use super::message::PieceRead;
use crate::btree::{Checkpoint, Discarded};
use crate::model::limits::{READ_ON_CORE_BYTES_MAX, READ_ON_CORE_KEYS_MAX};
use crate::model::{Fault, KeyRange, Response, ShardId, encoded};
use crate::mvcc::{self, Budget, HashWalk, KvHash, Piece, Reader};
use crate::proto::etcdserverpb as pb;
use crate::wal::{Flush, SegmentJob};
use std::sync::Arc;

/// Rows hashed in one step.
const HASH_ROWS_STEP: usize = 4096;

pub enum Job {
    Flush {
        shard: ShardId,
        flush: Flush,
    },
    Segment {
        shard: ShardId,
        job: SegmentJob,
    },
    /// `entry`: the last entry that the frozen tree holds completely.
    Checkpoint {
        shard: ShardId,
        job: Checkpoint,
        entry: u64,
    },
    Read(ReadJob),
    Hash(HashJob),
    /// Gives back the memory of pages that a checkpoint wrote; the allocator takes milliseconds for many.
    Discard(Option<Discarded>),
}

/// Where a job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The thread of this group's log: nothing else may delay it.
    Log(ShardId),
    Helper,
}

impl Job {
    pub fn lane(&self) -> Lane {
        match self {
            Job::Flush { shard, .. } => Lane::Log(*shard),
            _ => Lane::Helper,
        }
    }

    /// One step; true when the job is done.
    pub fn step(&mut self) -> Result<bool, Fault> {
        match self {
            Job::Flush { flush, .. } => flush.step(),
            Job::Segment { job, .. } => job.step(),
            Job::Checkpoint { job, .. } => job.step(),
            Job::Discard(pages) => {
                pages.take();
                Ok(true)
            }
            Job::Read(job) => {
                job.run();
                Ok(true)
            }
            Job::Hash(job) => {
                if let Some(walk) = &mut job.walk {
                    job.hash = walk.step(HASH_ROWS_STEP);
                    if job.hash.is_none() {
                        return Ok(false);
                    }
                    job.walk = None;
                }
                Ok(true)
            }
        }
    }
}

/// A Range too large for a core, from pinned roots.
#[derive(Debug)]
pub struct ReadJob {
    pub token: u64,
    pub request: Arc<pb::RangeRequest>,
    pub count: bool,
    pub pieces: Vec<(KeyRange, PieceRead)>,
    pub header: pb::ResponseHeader,
    pub response: Option<Response>,
}

impl ReadJob {
    pub fn run(&mut self) {
        let pieces = std::mem::take(&mut self.pieces).into_iter().map(|(range, read)| match read {
            PieceRead::Here(piece) => piece,
            PieceRead::Elsewhere(snapshot, at) => {
                let reader = Reader::new(&snapshot);
                mvcc::piece(reader, &self.request, &range, at, self.count, Budget::UNBOUNDED)
                    .unwrap_or_default()
            }
        });
        let pieces: Vec<Piece> = pieces.collect();
        let mut response = mvcc::assemble(pieces, &self.request);
        response.header = Some(self.header);
        // To encode it, and to give back its many small pieces of memory, would stop a core.
        let bytes: usize = response.kvs.iter().map(|kv| kv.key.len() + kv.value.len()).sum();
        let long = response.kvs.len() > READ_ON_CORE_KEYS_MAX || bytes > READ_ON_CORE_BYTES_MAX;
        self.response = Some(if long {
            Response::RangeEncoded(encoded::encode(response))
        } else {
            Response::Range(response)
        });
    }
}

/// A HashKV, from pinned roots.
pub struct HashJob {
    pub token: u64,
    /// V when the roots were pinned.
    pub v: i64,
    pub walk: Option<HashWalk>,
    pub hash: Option<KvHash>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Job::Flush { shard, .. } => write!(f, "flush of shard {shard}"),
            Job::Segment { shard, .. } => write!(f, "segment of shard {shard}"),
            Job::Checkpoint { shard, .. } => write!(f, "checkpoint of shard {shard}"),
            Job::Discard(_) => write!(f, "discarded pages"),
            Job::Read(read) => write!(f, "read {}", read.token),
            Job::Hash(hash) => write!(f, "hash {}", hash.token),
        }
    }
}
