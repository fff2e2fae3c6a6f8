//! What runs the machines: executors pinned one to a core, the mailboxes between threads, the threads for work
//! that blocks. It knows time and threads, which no floor below does; it does not know what clients ask for.

pub mod executor;
pub mod mailbox;
mod watchdog;
pub mod worker;
