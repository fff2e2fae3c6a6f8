//! Everything that belongs to one reign: made fresh when the lead node has taken over, shared by all cores,
//! thrown away when the reign is lost (Z2, case S4).

use super::watermark::{NONE, Shared, Watermark};
use crate::model::{CoreId, Epoch};
use crate::router::RangeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

#[derive(Debug)]
pub struct Reign {
    pub epoch: Epoch,
    pub watermark: Watermark,
    pub map: Arc<RangeMap>,
    /// Per core the smallest revision it waits for, so that whoever moves V wakes only those concerned. A wake
    /// is a hint: the woken core loads V.
    wanted: Box<[AtomicI64]>,
}

impl Reign {
    /// `visible`: R* of the Cut that began the reign.
    pub fn new(epoch: Epoch, visible: i64, cores: usize, map: Arc<RangeMap>) -> Self {
        let watermark = Watermark::new(visible, cores, map.shards());
        Reign { epoch, watermark, map, wanted: (0..cores).map(|_| AtomicI64::new(NONE)).collect() }
    }

    pub fn cores(&self) -> usize {
        self.wanted.len()
    }

    /// The core waits for `revision` (or for nothing). True if V has reached it already: the mover may have
    /// looked before this call and will not wake.
    pub fn want(&self, core: CoreId, revision: Option<i64>) -> bool {
        let revision = revision.unwrap_or(NONE);
        Shared::store(&self.wanted[core as usize], revision);
        self.watermark.visible() >= revision
    }

    /// Raises V; calls `wake` once for each other core that waits for something now visible.
    pub fn advance(&self, me: CoreId, wake: impl FnMut(CoreId)) -> bool {
        let moved = self.watermark.advance();
        if moved {
            self.wake(me, wake);
        }
        moved
    }

    /// The second half of [`Reign::advance`], for the simulator, which scans step by step.
    pub fn wake(&self, me: CoreId, mut wake: impl FnMut(CoreId)) {
        let v = self.watermark.visible();
        for (core, wanted) in self.wanted.iter().enumerate() {
            let core = core as CoreId;
            if core != me && Shared::load(wanted) <= v && Shared::swap(wanted, NONE) <= v {
                wake(core);
            }
        }
    }
}
