//! The nouns of the store: keys, ranges, revisions, records, rejections. No behaviour beyond their own
//! consistency; knows nothing of disks, threads, Raft or gRPC.

pub mod encoded;
pub mod fault;
pub mod kv;
pub mod limits;
#[cfg(feature = "mutations")]
pub mod mutation;
pub mod range;
pub mod range_set;
pub mod record;
pub mod rejection;
pub mod request;
pub mod revision;
pub mod select;
pub mod txn;

pub use crate::proto::mvccpb::KeyValue;
pub use fault::Fault;
pub use kv::KvRef;
pub use range::KeyRange;
pub use range_set::RangeSet;
pub use record::{Change, Record};
pub use rejection::Rejection;
pub use request::{Answer, Request, Response};
pub use revision::Rev;

/// Number of a shard, from 1; its Raft group has the same number. 0 is the meta group.
pub type ShardId = u16;
/// Number of an executor, from 0.
pub type CoreId = u16;
/// Index in the meta log of the `Reign` entry that began one attempt to lead. 0: none yet.
pub type Epoch = u64;
