//! Opens what a data directory holds: the meta group first, then, once it is known how many there are, the shards.
//!
//! ```text
//!   <data-dir>/FORMAT           who made it, and the version of this layout
//!   <data-dir>/LOCK             locked by the process that uses it
//!   <data-dir>/meta/tree        the meta group's state
//!   <data-dir>/meta/log/        its log
//!   <data-dir>/shard-0001/tree  shard 1, and so on
//!   <data-dir>/shard-0001/log/
//! ```
//!
//! The shards of a new store are made durably before the store is born in meta's log: a store that is born and
//! lacks a shard has lost it, and is refused.

use super::control::Control;
use super::core::{Now, Pace};
use super::message::{Effect, Message};
use crate::env::Disk;
use crate::group::{Group, Start};
use crate::meta::Meta;
use crate::model::{Fault, ShardId};
use crate::mvcc::Store;
use crate::shard::Shard;
use crate::wal::Log;
use crate::{btree, wal};
use std::io::ErrorKind::NotFound;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where and how a node keeps its data.
#[derive(Clone, Debug)]
pub struct Home {
    pub disk: Arc<dyn Disk>,
    pub dir: PathBuf,
    pub tree: btree::Options,
    pub log: wal::Options,
    pub pace: Pace,
}

/// What the file `FORMAT` of a data directory says: whose it is, and the version of the layout above.
pub const FORMAT: &str = "etcore 1\n";

pub fn meta_dir(data_dir: &Path) -> PathBuf {
    data_dir.join("meta")
}

pub fn shard_dir(data_dir: &Path, shard: ShardId) -> PathBuf {
    data_dir.join(format!("shard-{shard:04}"))
}

impl Home {
    /// Opens the meta group, or makes it, and begins to campaign for it.
    pub fn open_control(&self, cores: usize) -> Result<Control, Fault> {
        let dir = meta_dir(&self.dir);
        make_dir(&*self.disk, &dir)?;
        let meta = Meta::open(self.disk.clone(), &dir.join("tree"), self.tree.clone())?;
        let start = Start { applied: (meta.state().entry, meta.state().term), ..Start::birth() };
        let group = self.open_group(0, &dir, start)?;
        let mut control = Control::new(cores, meta, group, self.pace);
        control.start()?;
        Ok(control)
    }

    /// Opens one shard. `born`: the store exists, so the shard must.
    pub fn open_shard(&self, shard: ShardId, born: bool) -> Result<(Shard, Group), Fault> {
        let dir = shard_dir(&self.dir, shard);
        let tree = dir.join("tree");
        if born {
            self.disk.open(&tree, crate::env::Open::Read, false).map_err(|e| match e.kind() {
                NotFound => Fault::Refused(format!(
                    "{} is missing: the data directory has lost a shard; restore it from a backup",
                    tree.display()
                )),
                _ => Fault::io(&tree, "open", e),
            })?;
        }
        make_dir(&*self.disk, &dir)?;
        let store = Store::open(self.disk.clone(), &tree, self.tree.clone())?;
        let applied = store.applied();
        let start = Start { applied: (applied.position.entry, applied.term), ..Start::birth() };
        let group = self.open_group(shard, &dir, start)?;
        let mut shard = Shard::new(shard, store);
        shard.hear(group.sealed_v());
        Ok((shard, group))
    }

    /// Runs control by itself, as is done before it is known which shards there are, until `until` holds.
    pub fn run_alone(&self, control: &mut Control, until: impl Fn(&Control) -> bool) -> Result<(), Fault> {
        let mut effects = Vec::new();
        loop {
            control.turn(Now::ZERO)?;
            if until(control) {
                return Ok(());
            }
            control.take_effects(&mut effects);
            let mut idle = true;
            for effect in effects.drain(..) {
                if let Effect::Run(mut job) = effect {
                    while !job.step()? {}
                    control.message(Message::Done(job))?;
                    idle = false;
                }
            }
            if idle {
                return Err(Fault::Broken("the meta group waits for something that nobody does".into()));
            }
        }
    }

    fn open_group(&self, id: ShardId, dir: &Path, start: Start) -> Result<Group, Fault> {
        let log_dir = dir.join("log");
        make_dir(&*self.disk, &log_dir)?;
        let (log, recovered) = Log::open(self.disk.clone(), &log_dir, self.log)?;
        Group::open(id, log, recovered, start)
    }
}

/// Makes a directory and its entry durable.
fn make_dir(disk: &dyn Disk, dir: &Path) -> Result<(), Fault> {
    match disk.list(dir) {
        Ok(_) => return Ok(()),
        Err(e) if e.kind() == NotFound => {}
        Err(e) => return Err(Fault::io(dir, "list", e)),
    }
    disk.create_dir(dir).map_err(|e| Fault::io(dir, "make the directory", e))?;
    let parent = dir.parent().unwrap_or(Path::new("."));
    disk.sync_dir(parent).map_err(|e| Fault::io(parent, "sync the directory", e))
}
