//! The job that makes a frozen state durable: pages in the order of their place, flush, meta page, flush. It owns
//! all it needs and runs on any thread while the tree goes on.
//!
//! ```text
//! Plan --> Pages (slices) --> FlushPages --> Meta --> FlushMeta --> Done
//! ```
//!
//! Nothing that a durable state refers to is overwritten before `Meta`, and that replaces the older of two meta
//! pages only. So whatever is lost or torn at any point, the state before or the new one is found.

use std::sync::Arc;

use super::layer::{Buffer, Layer};
use super::map::Map;
use super::meta::Meta;
use super::page::{self, RUN_HEADER};
use crate::model::Fault;
use crate::model::limits::PAGE_BYTES;

/// Bytes that one step writes at most, but for one page.
const SLICE_BYTES: usize = 256 << 10;
/// The file grows by an eighth of its length, within these bounds, so that few flushes have to write its size.
const GROW_BYTES: std::ops::RangeInclusive<u64> = (256 << 10)..=(64 << 20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Plan,
    Pages,
    FlushPages,
    Meta,
    FlushMeta,
    Done,
    Failed,
}

#[derive(Debug)]
pub struct Checkpoint {
    map: Arc<Map>,
    meta: Meta,
    /// What to write; the last one holds the bitmap only.
    layers: Vec<Arc<Layer>>,
    /// Numbers of pages and runs with the layer that has each, rising.
    plan: Vec<(u32, u32)>,
    /// The place in the plan: item, and bytes of it that are written.
    at: (usize, usize),
    slice: Vec<u8>,
    stage: Stage,
    written: u64,
}

impl Checkpoint {
    /// `bitmap`: the run that says which pages of the layers are to be written, and all others in use.
    pub(super) fn new(map: Arc<Map>, meta: Meta, mut layers: Vec<Arc<Layer>>, bitmap: Buffer) -> Self {
        let mut last = Layer::default();
        last.put(meta.bitmap_page, bitmap);
        layers.push(Arc::new(last));
        Checkpoint {
            map,
            meta,
            layers,
            plan: Vec::new(),
            at: (0, 0),
            slice: Vec::new(),
            stage: Stage::Plan,
            written: 0,
        }
    }

    /// The number of the state that this makes durable; they rise by one.
    pub fn generation(&self) -> u64 {
        self.meta.generation
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn is_done(&self) -> bool {
        self.stage == Stage::Done
    }

    /// One slice of writes or one flush. True: the state is durable. After an error it is not to be called again:
    /// what the disk holds is not known, only that the state before is whole.
    pub fn step(&mut self) -> Result<bool, Fault> {
        let stage = std::mem::replace(&mut self.stage, Stage::Failed);
        self.stage = match stage {
            Stage::Plan => {
                self.make_plan();
                self.make_room()?;
                Stage::Pages
            }
            Stage::Pages => {
                if self.write_slice()? {
                    self.slice = Vec::new();
                    Stage::FlushPages
                } else {
                    Stage::Pages
                }
            }
            #[cfg(feature = "mutations")]
            Stage::FlushPages
                if crate::model::mutation::on(crate::model::mutation::Mutation::CheckpointPagesUnsynced) =>
            {
                Stage::Meta
            }
            Stage::FlushPages => {
                self.flush()?;
                Stage::Meta
            }
            Stage::Meta => {
                let page = self.meta.encode();
                self.write(u64::from(self.meta.number()) * PAGE_BYTES as u64, &page[..])?;
                Stage::FlushMeta
            }
            Stage::FlushMeta => {
                self.flush()?;
                Stage::Done
            }
            Stage::Done => Stage::Done,
            Stage::Failed => return Err(Fault::Broken("a checkpoint that failed is continued".into())),
        };
        Ok(self.stage == Stage::Done)
    }

    /// What was given up between two freezes stands in a layer still, but is not of this state.
    fn make_plan(&mut self) {
        let last = self.layers.last().expect("the bitmap's layer");
        let bits = &last.get(self.meta.bitmap_page).expect("the bitmap").bytes()[RUN_HEADER..];
        let live = |number: u32| bits[number as usize / 8] >> (number % 8) & 1 != 0;
        self.plan = (0u32..)
            .zip(&self.layers)
            .flat_map(|(index, layer)| layer.numbers().map(move |number| (number, index)))
            .filter(|&(number, _)| live(number))
            .collect();
        self.plan.sort_unstable();
    }

    fn make_room(&self) -> Result<(), Fault> {
        let io = |action| move |error| Fault::io(self.map.path(), action, error);
        let len = self.map.file().len().map_err(io("length"))?;
        let needed = u64::from(self.meta.pages) * PAGE_BYTES as u64;
        if len < needed {
            let more = (len / 8).clamp(*GROW_BYTES.start(), *GROW_BYTES.end());
            let most = u64::from(self.map.pages_max()) * PAGE_BYTES as u64;
            let len = (len + more).next_multiple_of(*GROW_BYTES.start()).min(most).max(needed);
            self.map.file().allocate(len).map_err(io("allocate"))?;
        }
        self.map.grown()
    }

    /// True when the plan is worked off.
    fn write_slice(&mut self) -> Result<bool, Fault> {
        let mut slice = std::mem::take(&mut self.slice);
        slice.reserve(SLICE_BYTES + PAGE_BYTES);
        let mut start = None;
        let (mut from, mut total) = (0, 0);
        while total < SLICE_BYTES
            && let Some(&(number, layer)) = self.plan.get(self.at.0)
        {
            let layer = self.layers[layer as usize].clone();
            let bytes = layer.get(number).expect("planned").bytes();
            let place = u64::from(number) * PAGE_BYTES as u64 + self.at.1 as u64;
            if from + slice.len() as u64 != place {
                self.write(from, &slice)?;
                slice.clear();
                from = place;
            }
            start.get_or_insert(place);
            let piece = &bytes[self.at.1..bytes.len().min(self.at.1 + SLICE_BYTES - total)];
            let in_slice = slice.len();
            slice.extend_from_slice(piece);
            if self.at.1 == 0 {
                slice[in_slice..in_slice + 4].copy_from_slice(&page::checksum(bytes).to_le_bytes());
            }
            total += piece.len();
            self.at.1 += piece.len();
            if self.at.1 == bytes.len() {
                self.map.set_verified(number);
                self.at = (self.at.0 + 1, 0);
            }
        }
        self.write(from, &slice)?;
        if let Some(start) = start {
            let len = from + slice.len() as u64 - start;
            let started = self.map.file().write_back(start, len);
            started.map_err(|error| Fault::io(self.map.path(), "start write-back", error))?;
        }
        slice.clear();
        self.slice = slice;
        Ok(self.at.0 == self.plan.len())
    }

    fn write(&mut self, place: u64, bytes: &[u8]) -> Result<(), Fault> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.written += bytes.len() as u64;
        self.map.file().write_at(place, bytes).map_err(|error| Fault::io(self.map.path(), "write", error))
    }

    fn flush(&self) -> Result<(), Fault> {
        self.map.file().sync().map_err(|error| Fault::io(self.map.path(), "flush", error))
    }
}
