//! The state of the meta group: what the store was born with, who leads, the compaction point.
//!
//! Promises: a function of the meta log's entries in their order; durable in one flip with the position in that
//! log. Applied at delivery: meta's entries wait for no V. Does not know the shards' data or who asks.

use crate::btree::{self, Checkpoint, Discarded, Read, Table, Tree};
use crate::env::Disk;
use crate::model::{Epoch, Fault};
use crate::raft::{Birth, Body, Encoder, Payload, codec};
use bytes::{Buf, BufMut, Bytes};
use std::path::Path;
use std::sync::Arc;

/// The row of table `Meta` that holds the state:
/// ```text
///   version u8 = 1 | entry u64 | term u64 | epoch u64 | compacted i64 | birth: a payload of kind Init, or nothing
/// ```
const ROW: &[u8] = b"meta-state";
const VERSION: u8 = 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The last entry applied, and its term.
    pub entry: u64,
    pub term: u64,
    /// The newest `Reign`: the epoch of the newest attempt to lead.
    pub epoch: Epoch,
    /// The compaction point; -1: never (etcd: semantics 11.7).
    pub compacted: i64,
    pub birth: Option<Birth>,
}

pub struct Meta {
    tree: Tree,
    state: State,
}

impl std::fmt::Debug for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        self.state.fmt(f)
    }
}

impl Meta {
    pub fn open(disk: Arc<dyn Disk>, path: &Path, options: btree::Options) -> Result<Self, Fault> {
        let tree = Tree::open(disk, path, options)?;
        let state = match tree.get(Table::Meta, ROW) {
            None => State { entry: 0, term: 0, epoch: 0, compacted: -1, birth: None },
            Some(row) => decode(row).ok_or_else(|| Fault::Damage {
                path: path.to_owned(),
                place: "the meta group's state".into(),
                what: "cannot be read".into(),
                remedy: "start with the version that wrote it, or restore a backup".into(),
            })?,
        };
        Ok(Meta { tree, state })
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The next delivered entry of the meta log.
    pub fn apply(&mut self, index: u64, term: u64, payload: Option<&Payload>) -> Result<(), Fault> {
        match payload.map(|payload| &payload.body) {
            None => {}
            Some(Body::Init(birth)) => {
                if self.state.birth.is_some() {
                    return Err(Fault::Broken(format!("meta entry {index} gives birth a second time")));
                }
                self.state.birth = Some(birth.clone());
            }
            Some(Body::Reign { .. }) => self.state.epoch = index,
            Some(Body::Compact { revision }) => self.state.compacted = self.state.compacted.max(*revision),
            Some(Body::Batch(_) | Body::Cut { .. } | Body::Barrier) => {
                return Err(Fault::Broken(format!("meta entry {index} belongs to a data group")));
            }
        }
        (self.state.entry, self.state.term) = (index, term);
        Ok(())
    }

    pub fn checkpoint(&mut self) -> Option<Checkpoint> {
        let mut row = Vec::new();
        row.put_u8(VERSION);
        row.put_u64_le(self.state.entry);
        row.put_u64_le(self.state.term);
        row.put_u64_le(self.state.epoch);
        row.put_i64_le(self.state.compacted);
        if let Some(birth) = &self.state.birth {
            let payload = Payload { epoch: 0, v: 0, body: Body::Init(birth.clone()) };
            row.put_slice(&Encoder::default().payload(&payload));
        }
        self.tree.insert(Table::Meta, ROW, &row);
        self.tree.checkpoint()
    }

    pub fn checkpoint_finished(&mut self, job: Checkpoint) -> Discarded {
        self.tree.checkpoint_finished(job)
    }
}

fn decode(row: &[u8]) -> Option<State> {
    let mut row = Bytes::copy_from_slice(row);
    if row.try_get_u8().ok()? != VERSION {
        return None;
    }
    let entry = row.try_get_u64_le().ok()?;
    let term = row.try_get_u64_le().ok()?;
    let epoch = row.try_get_u64_le().ok()?;
    let compacted = row.try_get_i64_le().ok()?;
    let birth = if row.is_empty() {
        None
    } else {
        match codec::decode_payload(&row).ok()?.body {
            Body::Init(birth) => Some(birth),
            _ => return None,
        }
    };
    Some(State { entry, term, epoch, compacted, birth })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::sim::SimDisk;

    fn payload(body: Body) -> Payload {
        Payload { epoch: 0, v: 0, body }
    }

    #[test]
    fn the_state_comes_back_from_a_checkpoint_whole() {
        let disk: Arc<dyn Disk> = Arc::new(SimDisk::new(1));
        disk.create_dir(Path::new("meta")).unwrap();
        let path = Path::new("meta/tree");
        let mut meta = Meta::open(disk.clone(), path, btree::Options::default()).unwrap();
        let birth = Birth { cluster_id: 7, member_id: 9, name: "n".into(), ..Default::default() };
        meta.apply(1, 1, None).unwrap();
        meta.apply(2, 1, Some(&payload(Body::Init(birth.clone())))).unwrap();
        meta.apply(3, 1, Some(&payload(Body::Reign { node: 1 }))).unwrap();
        meta.apply(4, 2, Some(&payload(Body::Compact { revision: 0 }))).unwrap();
        assert!(meta.apply(5, 2, Some(&payload(Body::Init(birth.clone())))).is_err());
        assert!(meta.apply(5, 2, Some(&payload(Body::Barrier))).is_err());
        let mut job = meta.checkpoint().unwrap();
        while !job.step().unwrap() {}
        drop(meta.checkpoint_finished(job));
        let want = State { entry: 4, term: 2, epoch: 3, compacted: 0, birth: Some(birth) };
        assert_eq!(meta.state(), &want);
        drop(meta);
        assert_eq!(Meta::open(disk, path, btree::Options::default()).unwrap().state(), &want);
    }
}
