//! (btree)
