//! (coordinator)
