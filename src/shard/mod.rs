//! One shard of the key space as a single-threaded state machine.

pub mod evaluate;
pub mod gather;
pub mod machine;
pub mod overlay;
#[cfg(test)]
mod testing;
pub mod view;

pub use machine::{Answered, ChangeId, Frozen, Origin, Read, Recovery, Shard};
