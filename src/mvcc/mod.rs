//! (mvcc)
