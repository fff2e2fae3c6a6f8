//! The files of a log: their names, and the jobs that make, recycle and remove them. Knows nothing of what is in
//! them.
//!
//! A new segment is zero-filled, because the first write to a block that was only allocated changes the file
//! system's own records too, which doubles the time of a flush. It is made under another name and gets its own
//! when it is complete. Every change of names is made durable before the job is done (case D9).

use super::blocks::Blocks;
use super::replay;
use crate::env::{Disk, File, Open};
use crate::model::Fault;
use crate::model::limits::LOG_BLOCK_BYTES;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What one step zero-fills.
const SLICE_BYTES: usize = 1 << 20;

#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub number: u64,
    pub path: PathBuf,
    pub file: Arc<dyn File>,
    pub len: u64,
    /// The largest index of an entry in it.
    pub index_last: u64,
}

impl Segment {
    pub fn open(disk: &dyn Disk, dir: &Path, number: u64, how: Open) -> Result<Segment, Fault> {
        let path = path(dir, number);
        let file = disk.open(&path, how, true).map_err(|error| Fault::io(&path, "open", error))?;
        let len = file.len().map_err(|error| Fault::io(&path, "stat", error))?;
        let len = (len - len % LOG_BLOCK_BYTES as u64).min(u64::from(u32::MAX));
        Ok(Segment { number, path, file, len, index_last: 0 })
    }

    /// Writes what stands at `start..end` once more and flushes it. See the head of `wal/mod.rs`.
    pub fn settle(&self, start: u64, end: u64) -> Result<(), Fault> {
        let mut blocks = Blocks::zeroed((end - start) as usize);
        let fault = |action| move |error| Fault::io(&self.path, action, error);
        self.file.read_at(start, blocks.bytes_mut()).map_err(fault("read"))?;
        self.file.write_at(start, blocks.bytes()).map_err(fault("write"))?;
        self.file.sync().map_err(fault("flush"))
    }
}

/// The file of a segment.
pub fn path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{number:016x}.log"))
}

fn number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".log").filter(|digits| digits.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}

/// The numbers of the segments in `dir`, ascending; none if there is no such directory.
pub(super) fn numbers(disk: &dyn Disk, dir: &Path) -> Result<Vec<u64>, Fault> {
    match disk.list(dir) {
        Ok(names) => {
            let mut numbers: Vec<u64> = names.iter().filter_map(|name| number(name)).collect();
            numbers.sort_unstable();
            Ok(numbers)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Fault::io(dir, "list", error)),
    }
}

/// Opens all segments of a log for writing, after it made the directory, removed what was half made and made the
/// names durable.
pub(super) fn list(disk: &dyn Disk, dir: &Path) -> Result<VecDeque<Segment>, Fault> {
    disk.create_dir(dir).map_err(|error| Fault::io(dir, "create", error))?;
    for name in disk.list(dir).map_err(|error| Fault::io(dir, "list", error))? {
        if name.ends_with(".new") {
            let path = dir.join(name);
            disk.remove(&path).map_err(|error| Fault::io(&path, "remove", error))?;
        }
    }
    sync_dir(disk, dir)?;
    let numbers = numbers(disk, dir)?;
    for pair in numbers.windows(2) {
        if pair[0] + 1 != pair[1] {
            return Err(replay::Damage::missing(path(dir, pair[0] + 1)).fault());
        }
    }
    numbers.into_iter().map(|number| Segment::open(disk, dir, number, Open::Write)).collect()
}

fn sync_dir(disk: &dyn Disk, dir: &Path) -> Result<(), Fault> {
    #[cfg(feature = "mutations")]
    if crate::model::mutation::on(crate::model::mutation::Mutation::SegmentNamesUnsynced) {
        return Ok(());
    }
    disk.sync_dir(dir).map_err(|error| Fault::io(dir, "flush", error))
}

#[derive(Debug)]
enum Stage {
    Create {
        number: u64,
        len: u64,
    },
    Fill {
        segment: Segment,
        filled: u64,
        zeros: Blocks,
    },
    Flush(Segment),
    Rename {
        segment: Segment,
        number: u64,
    },
    Remove(Segment),
    SyncDir(Option<Segment>),
    Done(Option<Segment>),
    /// In the middle of a step; stays so if the step failed.
    Failed,
}

/// Makes, recycles or removes one segment, step by step.
#[derive(Debug)]
pub struct SegmentJob {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    stage: Stage,
}

impl SegmentJob {
    pub(super) fn make(disk: Arc<dyn Disk>, dir: &Path, number: u64, len: u64) -> Self {
        SegmentJob { disk, dir: dir.to_path_buf(), stage: Stage::Create { number, len } }
    }

    pub(super) fn recycle(disk: Arc<dyn Disk>, dir: &Path, segment: Segment, number: u64) -> Self {
        SegmentJob { disk, dir: dir.to_path_buf(), stage: Stage::Rename { segment, number } }
    }

    pub(super) fn remove(disk: Arc<dyn Disk>, dir: &Path, segment: Segment) -> Self {
        SegmentJob { disk, dir: dir.to_path_buf(), stage: Stage::Remove(segment) }
    }

    /// One write, flush or change of a name; true when the job is done. After an error it stays failed.
    pub fn step(&mut self) -> Result<bool, Fault> {
        self.stage = match std::mem::replace(&mut self.stage, Stage::Failed) {
            Stage::Create { number, len } => {
                let path = path(&self.dir, number).with_extension("new");
                let fault = |action| {
                    let path = path.clone();
                    move |error| Fault::io(path, action, error)
                };
                let file = self.disk.open(&path, Open::Create, true).map_err(fault("create"))?;
                file.allocate(len).map_err(fault("allocate"))?;
                let zeros = Blocks::zeroed(SLICE_BYTES.min(len as usize));
                Stage::Fill { segment: Segment { number, path, file, len, index_last: 0 }, filled: 0, zeros }
            }
            Stage::Fill { segment, filled, zeros } => {
                let slice = zeros.bytes();
                let slice = &slice[..slice.len().min((segment.len - filled) as usize)];
                segment
                    .file
                    .write_at(filled, slice)
                    .map_err(|error| Fault::io(&segment.path, "write", error))?;
                let filled = filled + slice.len() as u64;
                if filled < segment.len {
                    Stage::Fill { segment, filled, zeros }
                } else {
                    Stage::Flush(segment)
                }
            }
            Stage::Flush(segment) => {
                segment.file.sync().map_err(|error| Fault::io(&segment.path, "flush", error))?;
                Stage::Rename { number: segment.number, segment }
            }
            Stage::Rename { segment, number } => {
                let to = path(&self.dir, number);
                self.disk
                    .rename(&segment.path, &to)
                    .map_err(|error| Fault::io(&segment.path, "rename", error))?;
                Stage::SyncDir(Some(Segment { number, path: to, index_last: 0, ..segment }))
            }
            Stage::Remove(segment) => {
                self.disk.remove(&segment.path).map_err(|error| Fault::io(&segment.path, "remove", error))?;
                Stage::SyncDir(None)
            }
            Stage::SyncDir(segment) => {
                sync_dir(&*self.disk, &self.dir)?;
                Stage::Done(segment)
            }
            Stage::Done(segment) => Stage::Done(segment),
            Stage::Failed => {
                let dir = self.dir.display();
                return Err(Fault::Refused(format!("{dir}: a failed step is not repeated")));
            }
        };
        Ok(self.is_done())
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done(_))
    }

    /// The segment that is ready now.
    pub(super) fn into_segment(self) -> Option<Segment> {
        match self.stage {
            Stage::Done(segment) => segment,
            _ => None,
        }
    }
}
