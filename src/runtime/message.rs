//! What cores, control and the outside say to each other. Every message that belongs to a reign carries its
//! epoch, or an object of that reign (Z1).

use super::job::Job;
use crate::btree::Snapshot;
use crate::coordinator::Reign;
use crate::model::record::Parts;
use crate::model::{Answer, CoreId, Epoch, KeyRange, Rejection, Request, ShardId};
use crate::mvcc::Piece;
use crate::proto::etcdserverpb as pb;
use crate::shard::evaluate::Changes;
use crate::shard::gather::Needs;
use crate::shard::{ChangeId, Frozen, Origin, Recovery};
use std::sync::Arc;

/// What a machine wants done.
#[derive(Debug)]
pub enum Effect {
    /// To a core, or to control (whose number follows the last core's).
    Send(CoreId, Message),
    /// Run it to the end elsewhere and bring it back as `Message::Done`.
    Run(Job),
    /// To who asked this core.
    Answer(u64, Answer),
}

#[derive(Debug)]
pub enum Message {
    // ---- between cores
    Evaluate {
        shard: ShardId,
        origin: Origin,
        request: Request,
    },
    Answers(Vec<(u64, Answer)>),
    Read {
        shard: ShardId,
        origin: Origin,
        /// Which piece of the range this is.
        index: usize,
        request: Arc<pb::RangeRequest>,
        range: KeyRange,
        v: i64,
        count: bool,
    },
    Piece {
        token: u64,
        index: usize,
        piece: Result<PieceRead, Rejection>,
    },
    Freeze {
        shard: ShardId,
        change: ChangeId,
        needs: Arc<Needs>,
    },
    Frozen {
        shard: ShardId,
        token: u64,
        frozen: Frozen,
    },
    /// What a participant changes; it goes on afterwards.
    Part {
        shard: ShardId,
        change: ChangeId,
        rev: i64,
        parts: Parts,
        changes: Changes,
    },
    Registered {
        token: u64,
    },
    Thaw {
        shard: ShardId,
        change: ChangeId,
    },
    /// V may have reached what you wait for.
    Visible,
    /// A pinned root that holds everything up to `v`.
    Pin {
        shard: ShardId,
        origin: Origin,
        v: i64,
    },
    Pinned {
        shard: ShardId,
        token: u64,
        snapshot: Snapshot,
    },
    Measure {
        origin: Origin,
    },
    Measured {
        token: u64,
        load: Load,
    },
    /// Make everything durable in the trees and the files small.
    Defragment {
        origin: Origin,
    },
    Defragmented {
        token: u64,
    },

    // ---- from control to cores: a takeover, step by step (design 5)
    Campaign {
        epoch: Epoch,
    },
    Bar {
        epoch: Epoch,
    },
    Find {
        epoch: Epoch,
        after: i64,
    },
    Cut {
        epoch: Epoch,
        r_star: i64,
    },
    Serve {
        reign: Arc<Reign>,
        compacted: i64,
        term: u64,
    },
    Compact {
        revision: i64,
    },
    /// Finish what is logged, make it durable in the tree, say so.
    Stop,

    // ---- from cores to control
    Leads {
        epoch: Epoch,
        shard: ShardId,
        term: u64,
    },
    Barred {
        epoch: Epoch,
        recovery: Recovery,
    },
    Found {
        epoch: Epoch,
        shard: ShardId,
        revisions: Vec<(i64, Parts)>,
    },
    CutApplied {
        epoch: Epoch,
        shard: ShardId,
    },
    Serving {
        epoch: Epoch,
    },
    /// The core has the compaction point.
    Compacting {
        revision: i64,
    },
    /// A shard removed everything that is compacted at this point.
    Removed {
        shard: ShardId,
        revision: i64,
    },
    CompactRequest {
        origin: Origin,
        request: pb::CompactionRequest,
    },
    Stopped,

    // ---- from helper threads
    Done(Job),
}

/// What came of one piece of a range.
#[derive(Debug)]
pub enum PieceRead {
    Here(Piece),
    /// Too much for a core: the pinned root and the revision to read in it (None: its newest state).
    Elsewhere(Snapshot, Option<i64>),
}

/// What one core or control adds to a Status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub file_bytes: u64,
    pub used_bytes: u64,
    pub committed: u64,
    pub applied: u64,
}

impl std::ops::AddAssign for Load {
    fn add_assign(&mut self, other: Load) {
        self.file_bytes += other.file_bytes;
        self.used_bytes += other.used_bytes;
        self.committed += other.committed;
        self.applied += other.applied;
    }
}
