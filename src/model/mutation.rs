//! Switches that break one rule of the protocol each, for the simulator to show that it would notice. They
//! exist only with the feature `mutations`; a server is never built with it.

use std::cell::Cell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Scan the lows before the slots (case S3).
    LowsBeforeSlots,
    /// Seal a log without V (case D8).
    SealWithoutV,
    /// Leave a sealed log as it is when V rises (case D8).
    SealedOnce,
    /// Count a ready as persisted before its flush (case S14).
    AcknowledgeBeforePersist,
    /// Name V instead of p in an answer that changed nothing (case S12).
    PointIsV,
    /// Forget at replay how many records of an entry the tree holds already (case S16).
    RecordOfEntryForgotten,
    /// Let answers go before V covers them.
    AnswerBeforeVisible,
    /// Take what was handed to the log for delivered (case S14).
    LowClearedAtHandOut,
    /// Acknowledge a part of a change over several shards without registering its revision (case S3).
    PartUnregistered,
    /// Evaluate while a change over several shards has the shard frozen.
    FreezeIgnored,
    /// Do not name the participants in the parts of a change.
    PartsUnnamed,
    /// Let the cut look for a revision in any shard instead of all that it names.
    CutTakesHalves,
    /// Start the cut from the lowest V known to a shard (case M4).
    CutFromLowest,
    /// Cut one revision too far.
    CutOneFar,
    /// Apply what a Cut voids (Z1).
    CutVoidsNothing,
    /// Do not look for holes below the known V (case D8).
    HoleAccepted,
    /// Store no position for the data at all: the one that the checkpoint before stored stays (case D4).
    PositionBehind,
    /// Begin a range record anew after a restart instead of going on at its cursor (case D10).
    RangeRestarted,
    /// Write the meta page of a checkpoint before its pages are flushed.
    CheckpointPagesUnsynced,
    /// Hand out pages again that the last durable checkpoint refers to.
    PagesReusedAtOnce,
    /// Let go of the log up to what was delivered, not what a checkpoint holds.
    LogReleasedAhead,
    /// Read at the V that the core saw at the end of its last turn (case S13).
    VisibleCached,
    /// Do not look after compaction again when a piece of a range is read (case S18).
    CompactionUnchecked,
    /// Decide against the applied state alone.
    OverlayForgotten,
    /// After V was raised, do not scan again (case L8).
    ScanOnce,
    /// Wake nobody when V was raised (case L8).
    WakeForgotten,
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
