//! (config)
