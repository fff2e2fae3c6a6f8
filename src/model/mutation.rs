//! Switches that break one rule of the protocol each, for the simulator to show that it would notice. They
//! exist only with the feature `mutations`; a server is never built with it.

use std::cell::Cell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Scan the lows before the slots (case S3).
    LowsBeforeSlots,
    /// Count a ready as persisted before its flush (case S14).
    AcknowledgeBeforePersist,
    /// Name V instead of p in an answer that changed nothing (case S12).
    PointIsV,
    /// Decide by its revision whether a record was applied (case S16).
    ApplyByRevision,
    /// Believe that a flush of the log is durable once it is written.
    FlushUnsynced,
    /// Repeat a failed flush of the log (case D3).
    FlushRetried,
    /// Leave out the flush of the directory after a segment was made, renamed or removed (case D9).
    SegmentNamesUnsynced,
    /// Let the segment with the newest hard state go without logging it again.
    HardStateForgotten,
    /// Take every bad record for the torn end of the log (case D1).
    DamageTakenForTorn,
}

thread_local! {
    static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
}

/// Breaks this rule, or none, on this thread from now on.
pub fn set(mutation: Option<Mutation>) {
    ACTIVE.set(mutation);
}

pub fn on(mutation: Mutation) -> bool {
    ACTIVE.get() == Some(mutation)
}
