//! Records: what one operation did to one shard at one revision. The record is the unit of the cut, of V and
//! of replay (design 1); what goes to the log is the effect, never the request (design 3.2).

use super::{KeyRange, KeyValue, ShardId};
use bytes::Bytes;
use smallvec::SmallVec;

/// The participants of a change over several shards, ascending; empty when this shard is the only one.
pub type Parts = SmallVec<[ShardId; 4]>;

#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The main revision of every change in here.
    pub rev: i64,
    pub parts: Parts,
    /// In ascending order of their sub-revisions; those of a part need not be contiguous.
    pub changes: SmallVec<[Change; 1]>,
}

impl Record {
    /// About how long the record is in the log, bytes.
    pub fn bytes(&self) -> usize {
        let changes = self.changes.iter().map(|change| match change {
            Change::Put { kv, .. } => kv.key.len() + kv.value.len(),
            Change::Delete { key, .. } => key.len(),
            Change::DeleteRange { range, .. } => {
                range.start.len() + range.end.as_ref().map_or(0, |end| end.len())
            }
        });
        64 + changes.map(|bytes| bytes + 80).sum::<usize>()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// `kv.mod_revision` equals the record's revision; `kv` is complete (create revision, version, lease).
    Put {
        sub: u32,
        kv: KeyValue,
    },
    Delete {
        sub: u32,
        key: Bytes,
    },
    /// Deletes the `count` keys that live in `range` just before this change, numbered from `first_sub` in key
    /// order. With a lease other than 0 only the keys attached to it.
    DeleteRange {
        first_sub: u32,
        count: u32,
        range: KeyRange,
        lease: i64,
    },
}

impl Change {
    pub fn first_sub(&self) -> u32 {
        match self {
            Change::Put { sub, .. } | Change::Delete { sub, .. } => *sub,
            Change::DeleteRange { first_sub, .. } => *first_sub,
        }
    }

    /// How many sub-revisions the change takes.
    pub fn width(&self) -> u32 {
        match self {
            Change::Put { .. } | Change::Delete { .. } => 1,
            Change::DeleteRange { count, .. } => *count,
        }
    }
}
