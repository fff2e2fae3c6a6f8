//! (server)

pub mod logging;
