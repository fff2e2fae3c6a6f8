//! What a shard knows about its own state: how far it applied its log and under which rules, as of exactly that
//! position. One row of `meta`, written when a checkpoint is taken, so that it becomes durable in the same flip as
//! the data it speaks of (design 7; cases D4, D10, M8).
//!
//! ```text
//! version u8 = 1
//! entry u64 | record u32 | in a range record u8 (0, 1) [ change u32 | next sub u32 ]
//! term u64 | applied revision i64 | known V i64 | fence u64 | R* i64
//! compaction wanted i64 | finished i64 | removing u8 (0, 1) [ target i64 | next main i64 | next sub u32 ]
//! configuration index u64 | length u32 | configuration | length u32 | range set         all little-endian
//! ```

use crate::model::{Epoch, Fault, Rev};
use bytes::Bytes;

const VERSION: u8 = 1;

/// How far the log is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Index of the last Raft entry that is applied whole.
    pub entry: u64,
    /// How many records of the entry behind it are done with, applied or void.
    pub record: u32,
    /// Set while the next record is applied in part.
    pub cursor: Option<Cursor>,
}

/// How far the expansion of a range record has come. The next key needs no place here: it is the first one of the
/// range that still lives, since what was expanded is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Index of the change inside the record.
    pub change: u32,
    pub next_sub: u32,
}

/// Compaction points; -1: none yet, as in etcd (semantics 11.7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compaction {
    pub wanted: i64,
    pub finished: i64,
    pub(super) removing: Option<Removing>,
}

/// A removal under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Removing {
    pub target: i64,
    /// The row of `rev` to go on with.
    pub next: Rev,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    pub position: Position,
    /// Raft term of the position's entry.
    pub term: u64,
    /// The largest revision applied; 1 is the empty store's.
    pub revision: i64,
    pub known_v: i64,
    pub fence: Epoch,
    pub r_star: i64,
    pub compaction: Compaction,
    /// Index of the entry that made the configuration, and the configuration in its owner's encoding.
    pub configuration_index: u64,
    pub configuration: Bytes,
    /// The ranges that this shard owns, in their owner's encoding.
    pub range_set: Bytes,
}

impl Default for Applied {
    /// The state of an empty store.
    fn default() -> Self {
        Applied {
            position: Position::default(),
            term: 0,
            revision: 1,
            known_v: 1,
            fence: 0,
            r_star: 0,
            compaction: Compaction { wanted: -1, finished: -1, removing: None },
            configuration_index: 0,
            configuration: Bytes::new(),
            range_set: Bytes::new(),
        }
    }
}

impl Applied {
    pub fn encode(&self, row: &mut Vec<u8>) {
        row.push(VERSION);
        row.extend_from_slice(&self.position.entry.to_le_bytes());
        row.extend_from_slice(&self.position.record.to_le_bytes());
        row.push(self.position.cursor.is_some().into());
        if let Some(cursor) = self.position.cursor {
            row.extend_from_slice(&cursor.change.to_le_bytes());
            row.extend_from_slice(&cursor.next_sub.to_le_bytes());
        }
        row.extend_from_slice(&self.term.to_le_bytes());
        row.extend_from_slice(&self.revision.to_le_bytes());
        row.extend_from_slice(&self.known_v.to_le_bytes());
        row.extend_from_slice(&self.fence.to_le_bytes());
        row.extend_from_slice(&self.r_star.to_le_bytes());
        row.extend_from_slice(&self.compaction.wanted.to_le_bytes());
        row.extend_from_slice(&self.compaction.finished.to_le_bytes());
        row.push(self.compaction.removing.is_some().into());
        if let Some(removing) = self.compaction.removing {
            row.extend_from_slice(&removing.target.to_le_bytes());
            row.extend_from_slice(&removing.next.main.to_le_bytes());
            row.extend_from_slice(&removing.next.sub.to_le_bytes());
        }
        row.extend_from_slice(&self.configuration_index.to_le_bytes());
        for bytes in [&self.configuration, &self.range_set] {
            row.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            row.extend_from_slice(bytes);
        }
    }

    pub fn decode(row: &[u8]) -> Result<Applied, Fault> {
        match row.first() {
            Some(&VERSION) => {}
            Some(version) => {
                return Err(Fault::Refused(format!(
                    "the data directory has format {version} and this program knows formats up to {VERSION}; \
                     start it with the program that wrote it, or a newer one"
                )));
            }
            None => return Err(Fault::Broken("the applied state is empty".into())),
        }
        Self::parse(&mut &row[1..]).ok_or_else(|| Fault::Broken("the applied state cannot be read".into()))
    }

    fn parse(row: &mut &[u8]) -> Option<Applied> {
        let (entry, record) = (u64::from_le_bytes(take(row)?), u32::from_le_bytes(take(row)?));
        let cursor = match take(row)? {
            [0] => None,
            [1] => Some(Cursor {
                change: u32::from_le_bytes(take(row)?),
                next_sub: u32::from_le_bytes(take(row)?),
            }),
            _ => return None,
        };
        let applied = Applied {
            position: Position { entry, record, cursor },
            term: u64::from_le_bytes(take(row)?),
            revision: i64::from_le_bytes(take(row)?),
            known_v: i64::from_le_bytes(take(row)?),
            fence: u64::from_le_bytes(take(row)?),
            r_star: i64::from_le_bytes(take(row)?),
            compaction: Compaction {
                wanted: i64::from_le_bytes(take(row)?),
                finished: i64::from_le_bytes(take(row)?),
                removing: match take(row)? {
                    [0] => None,
                    [1] => Some(Removing {
                        target: i64::from_le_bytes(take(row)?),
                        next: Rev::new(i64::from_le_bytes(take(row)?), u32::from_le_bytes(take(row)?)),
                    }),
                    _ => return None,
                },
            },
            configuration_index: u64::from_le_bytes(take(row)?),
            configuration: take_bytes(row)?,
            range_set: take_bytes(row)?,
        };
        row.is_empty().then_some(applied)
    }
}

fn take<const N: usize>(row: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, rest) = row.split_first_chunk()?;
    *row = rest;
    Some(*bytes)
}

fn take_bytes(row: &mut &[u8]) -> Option<Bytes> {
    let length = u32::from_le_bytes(take(row)?) as usize;
    let (bytes, rest) = row.split_at_checked(length)?;
    *row = rest;
    Some(Bytes::copy_from_slice(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Applied {
        Applied {
            position: Position { entry: 7, record: 3, cursor: Some(Cursor { change: 2, next_sub: 41 }) },
            term: 5,
            revision: 99,
            known_v: 120,
            fence: 17,
            r_star: 90,
            compaction: Compaction {
                wanted: 80,
                finished: 20,
                removing: Some(Removing { target: 60, next: Rev::new(33, 2) }),
            },
            configuration_index: 4,
            configuration: Bytes::from_static(b"voters"),
            range_set: Bytes::from_static(b"a..b\0"),
        }
    }

    #[test]
    fn every_field_comes_back() {
        for applied in [Applied::default(), full()] {
            let mut row = Vec::new();
            applied.encode(&mut row);
            assert_eq!(Applied::decode(&row).expect("just written"), applied);
        }
    }

    #[test]
    fn a_newer_format_is_refused_and_a_cut_row_is_a_fault() {
        let mut row = Vec::new();
        full().encode(&mut row);
        for length in 0..row.len() {
            assert!(matches!(Applied::decode(&row[..length]), Err(Fault::Broken(_))), "{length}");
        }
        row[0] = 2;
        assert!(matches!(Applied::decode(&row), Err(Fault::Refused(_))));
    }
}
