//! One order of revisions over all shards of a node: the sequencer, the watermark V, and what belongs to one
//! reign.
//!
//! Promises: V never covers a revision that is not committed in all its shards; when all is quiet, V = next − 1;
//! nothing of a reign outlives it (Z2: every reign has its own [`Reign`], none is ever reset). Does not know
//! what a record contains, nor threads: callers bring their own core and shard numbers.

pub mod reign;
pub mod watermark;

pub use reign::Reign;
pub use watermark::{Scan, Watermark};
