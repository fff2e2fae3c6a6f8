//! (ctl)
