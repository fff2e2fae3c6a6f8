//! (wal)
