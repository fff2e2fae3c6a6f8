//! (raft)
