//! The watermark: which revisions are visible.
//!
//! ```text
//!   next          the revision that the next change takes             (one atomic)
//!   slot[c]       lower bound of what core c took for shards that have not yet registered it
//!   low[s]        lower bound of what shard s took and its group has not yet delivered
//!   visible (V)   min(next, slots, lows) - 1, only ever raised
//! ```
//!
//! Safety rests on two orders. Whoever takes a revision publishes a lower bound (`next` as it was) *before* the
//! `fetch_add`; whoever scans reads `next` *before* the bounds. So a revision below the `next` that was read
//! has a bound that the scan sees, unless it has been delivered. And a slot is cleared only after the
//! participants set their `low`, while a scan reads slots *before* lows, so that a revision that changes its
//! keeper is seen with one of them (protocol case S3).
//!
//! Every operation is sequentially consistent: the argument above is about one order of all of them. The type
//! is generic over its atomics so that `loom` can explore the very same code.

use crate::model::{CoreId, ShardId};
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

/// What stands in a slot or low that bounds nothing.
pub const NONE: i64 = i64::MAX;

/// The few operations that the watermark needs of a shared integer, all sequentially consistent.
pub trait Shared {
    fn new(value: i64) -> Self;
    fn load(&self) -> i64;
    fn store(&self, value: i64);
    fn fetch_add(&self, value: i64) -> i64;
    fn fetch_max(&self, value: i64) -> i64;
    fn swap(&self, value: i64) -> i64;
}

impl Shared for AtomicI64 {
    fn new(value: i64) -> Self {
        AtomicI64::new(value)
    }
    fn load(&self) -> i64 {
        self.load(SeqCst)
    }
    fn store(&self, value: i64) {
        self.store(value, SeqCst)
    }
    fn fetch_add(&self, value: i64) -> i64 {
        self.fetch_add(value, SeqCst)
    }
    fn fetch_max(&self, value: i64) -> i64 {
        self.fetch_max(value, SeqCst)
    }
    fn swap(&self, value: i64) -> i64 {
        self.swap(value, SeqCst)
    }
}

/// Keeps neighbours in an array from sharing a cache line.
#[repr(align(64))]
#[derive(Debug)]
struct Line<A>(A);

#[derive(Debug)]
pub struct Watermark<A = AtomicI64> {
    next: Line<A>,
    visible: Line<A>,
    slots: Box<[Line<A>]>,
    lows: Box<[Line<A>]>,
}

impl<A: Shared> Watermark<A> {
    /// A watermark at which everything up to `visible` is visible and `visible + 1` is taken next, for slots
    /// 0..`slots` (one per core and one for control) and shards 1..=`shards`.
    pub fn new(visible: i64, slots: usize, shards: usize) -> Self {
        let bounds = |n| (0..n).map(|_| Line(A::new(NONE))).collect();
        Watermark {
            next: Line(A::new(visible + 1)),
            visible: Line(A::new(visible)),
            slots: bounds(slots),
            lows: bounds(shards),
        }
    }

    /// V: everything up to here is committed and may be shown. Always the shared value, never a copy (case S13).
    pub fn visible(&self) -> i64 {
        self.visible.0.load()
    }

    /// The revision that would be taken next.
    pub fn next(&self) -> i64 {
        self.next.0.load()
    }

    /// Revisions taken and not yet visible.
    pub fn in_flight(&self) -> i64 {
        self.next() - 1 - self.visible()
    }

    fn low(&self, shard: ShardId) -> &A {
        &self.lows[shard as usize - 1].0
    }

    fn slot(&self, core: CoreId) -> &A {
        &self.slots[core as usize].0
    }

    /// Takes a revision for one shard. Only the owner of the shard calls this; `idle` says that the shard has
    /// no other revision under way, so that its `low` is to be set first.
    pub fn take(&self, shard: ShardId, idle: bool) -> i64 {
        Self::take_under(self.low(shard), idle, &self.next.0)
    }

    /// Takes a revision for a change over several shards, kept in the slot of the coordinating core until the
    /// participants have called [`Watermark::register`]. `idle`: the core has no other such revision.
    pub fn take_in_slot(&self, core: CoreId, idle: bool) -> i64 {
        Self::take_under(self.slot(core), idle, &self.next.0)
    }

    fn take_under(bound: &A, idle: bool, next: &A) -> i64 {
        if idle {
            bound.store(next.load());
        }
        let revision = next.fetch_add(1);
        if idle {
            bound.store(revision);
        }
        revision
    }

    /// A participant takes over a revision that its coordinator holds in a slot. `idle` as in `take`.
    pub fn register(&self, shard: ShardId, revision: i64, idle: bool) {
        if idle {
            self.low(shard).store(revision);
        }
    }

    /// The shard's group delivered everything below `low`; `None`: everything the shard took. Delivery, and
    /// nothing earlier, is what counts as committed (case S14).
    pub fn delivered(&self, shard: ShardId, low: Option<i64>) {
        self.low(shard).store(low.unwrap_or(NONE));
    }

    /// All participants of the core's changes below `slot` have registered.
    pub fn registered(&self, core: CoreId, slot: Option<i64>) {
        self.slot(core).store(slot.unwrap_or(NONE));
    }

    /// Raises V as far as the bounds allow. Called after every raise or clear of a bound. True if this call
    /// moved V: then the caller wakes who waits.
    pub fn advance(&self) -> bool {
        let mut moved = false;
        let mut scan = Scan::new();
        loop {
            match scan.step(self) {
                None => {}
                Some(true) => moved = true,
                Some(false) => return moved,
            }
        }
    }
}

/// One scan of the watermark as steps of one load each, so that the simulator can put other cores' steps
/// between them. After a publication that moved V it starts again by itself: between its loads others may have
/// raised bounds and seen the old V, and then nobody else would scan (case L8).
#[derive(Debug)]
pub struct Scan {
    at: usize,
    min: i64,
}

impl Default for Scan {
    fn default() -> Self {
        Self::new()
    }
}

impl Scan {
    pub fn new() -> Self {
        Scan { at: 0, min: NONE }
    }

    /// One step: a load, or the publication. `Some(true)`: published a higher V, scanning goes on. `Some(false)`:
    /// nothing moved, the scan is over.
    pub fn step<A: Shared>(&mut self, watermark: &Watermark<A>) -> Option<bool> {
        let slots = watermark.slots.len();
        let lows = watermark.lows.len();
        let loaded = match self.at {
            0 => watermark.next.0.load(),
            n if n <= slots + lows => self.bound(watermark, n - 1),
            _ => {
                let v = self.min - 1;
                let moved = watermark.visible.0.fetch_max(v) < v;
                *self = Scan::new();
                #[cfg(feature = "mutations")]
                if crate::model::mutation::on(crate::model::mutation::Mutation::ScanOnce) {
                    return Some(false);
                }
                return Some(moved);
            }
        };
        self.min = self.min.min(loaded);
        self.at += 1;
        None
    }

    fn bound<A: Shared>(&self, watermark: &Watermark<A>, n: usize) -> i64 {
        let slots = watermark.slots.len();
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::LowsBeforeSlots) {
            let lows = watermark.lows.len();
            return if n < lows { watermark.lows[n].0.load() } else { watermark.slots[n - lows].0.load() };
        }
        if n < slots { watermark.slots[n].0.load() } else { watermark.lows[n - slots].0.load() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_store_shows_revision_1_and_takes_2() {
        let w: Watermark = Watermark::new(1, 1, 2);
        assert_eq!(w.visible(), 1);
        assert_eq!(w.take(1, true), 2);
        assert!(!w.advance(), "an undelivered revision keeps V");
        w.delivered(1, None);
        assert!(w.advance());
        assert_eq!(w.visible(), 2);
    }

    #[test]
    fn v_waits_for_the_slowest_shard_and_then_jumps() {
        let w: Watermark = Watermark::new(1, 1, 2);
        assert_eq!((w.take(1, true), w.take(2, true), w.take(2, false)), (2, 3, 4));
        w.delivered(2, None);
        assert!(!w.advance());
        w.delivered(1, None);
        assert!(w.advance());
        assert_eq!((w.visible(), w.in_flight()), (4, 0));
    }

    #[test]
    fn a_slot_holds_v_until_the_participants_have_registered() {
        let w: Watermark = Watermark::new(1, 1, 2);
        let revision = w.take_in_slot(0, true);
        assert!(!w.advance());
        w.register(1, revision, true);
        w.register(2, revision, true);
        w.registered(0, None);
        assert!(!w.advance());
        w.delivered(1, None);
        assert!(!w.advance(), "half of a change is never visible");
        w.delivered(2, None);
        assert!(w.advance());
        assert_eq!(w.visible(), revision);
    }

    mod interleavings {
        use super::super::*;
        use loom::sync::Arc;
        use loom::sync::atomic::{AtomicI64, Ordering::SeqCst};
        use loom::thread;

        impl Shared for AtomicI64 {
            fn new(value: i64) -> Self {
                AtomicI64::new(value)
            }
            fn load(&self) -> i64 {
                self.load(SeqCst)
            }
            fn store(&self, value: i64) {
                self.store(value, SeqCst)
            }
            fn fetch_add(&self, value: i64) -> i64 {
                self.fetch_add(value, SeqCst)
            }
            fn fetch_max(&self, value: i64) -> i64 {
                self.fetch_max(value, SeqCst)
            }
            fn swap(&self, value: i64) -> i64 {
                self.swap(value, SeqCst)
            }
        }

        /// Checked wherever a thread looks: a revision that it has not yet delivered is not visible.
        fn assert_hidden(w: &Watermark<AtomicI64>, revision: i64) {
            assert!(w.visible() < revision, "V covers a revision that is not committed");
        }

        #[test]
        fn two_shards_each_take_and_deliver() {
            loom::model(|| {
                let w = Arc::new(Watermark::<AtomicI64>::new(1, 0, 2));
                let other = {
                    let w = w.clone();
                    thread::spawn(move || {
                        let revision = w.take(2, true);
                        assert_hidden(&w, revision);
                        w.delivered(2, None);
                        w.advance();
                    })
                };
                let revision = w.take(1, true);
                assert_hidden(&w, revision);
                w.delivered(1, None);
                w.advance();
                other.join().unwrap();
                assert_eq!(w.visible(), w.next() - 1, "when all is quiet, V = next - 1 (case L8)");
            });
        }

        #[test]
        fn a_change_over_two_shards_beside_a_scanner() {
            loom::model(|| {
                let w = Arc::new(Watermark::<AtomicI64>::new(1, 1, 1));
                let scanner = {
                    let w = w.clone();
                    thread::spawn(move || {
                        w.advance();
                    })
                };
                let revision = w.take_in_slot(0, true);
                w.register(1, revision, true);
                w.registered(0, None);
                assert_hidden(&w, revision);
                w.delivered(1, None);
                w.advance();
                scanner.join().unwrap();
                assert_eq!(w.visible(), revision);
            });
        }
    }
}
