//! etcore, seen from above. See `ARCHITECTURE.md` for the life of a Put and the floors.

pub mod api;
pub mod btree;
pub mod config;
pub mod coordinator;
pub mod ctl;
pub mod env;
pub mod group;
pub mod meta;
pub mod metrics;
pub mod model;
pub mod mvcc;
pub mod proto;
pub mod raft;
pub mod router;
pub mod runtime;
pub mod server;
pub mod shard;
pub mod wal;
