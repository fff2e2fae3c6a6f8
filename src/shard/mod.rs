//! (shard)
