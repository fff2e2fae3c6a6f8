//! (group)
