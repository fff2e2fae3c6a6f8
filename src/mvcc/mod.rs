//! The versions of one shard's keys: applies records to a tree, answers reads at any revision that is not
//! compacted, forgets compacted versions, hashes what is stored.
//!
//! Promises: a store is a function of the records it was given, in their order, whatever slices, checkpoints and
//! restarts lay between them; position and data become durable in one flip; reads of the newest versions cost
//! the same however many older ones are kept. It does not know why a record was released, which shards there are
//! besides the participants that a record names, what is still on its way to it, or what time it is.

mod applied;
mod check;
mod compact;
mod hash;
mod range;
mod reader;
mod store;
mod tables;

pub use applied::{Applied, Compaction, Cursor, Position};
pub use check::{applied, check, owned_run};
pub use hash::{Basis, HashCache, HashWalk, KvHash};
pub use range::{Budget, Piece, Source, assemble, piece};
pub use reader::{Reader, Revision, Revisions};
pub use store::{Progress, Store};

#[cfg(test)]
mod tests;
