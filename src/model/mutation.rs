//! Switches that break one rule of the protocol each, for the simulator to show that it would notice. They
//! exist only with the feature `mutations`; a server is never built with it.

use std::cell::Cell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Scan the lows before the slots (case S3).
    LowsBeforeSlots,
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
