//! Faults: something is wrong with this machine or with what it stored, not with a request. A fault is latched,
//! reported with file and place, and ends the process; it is never answered to a client as a rejection.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The system refused an operation on a file.
    #[error("{path}: {action}: {source}", path = path.display())]
    Io {
        path: PathBuf,
        action: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// What stands in a file cannot be what was written. `place` says where (offset, page, record), `remedy`
    /// what to do.
    #[error("{path}: {place}: {what}; {remedy}", path = path.display())]
    Damage { path: PathBuf, place: String, what: String, remedy: String },
    /// Something that the operator decides: a newer format, other shards, a directory in use.
    #[error("{0}")]
    Refused(String),
    /// An invariant of the protocol does not hold.
    #[error("internal: {0}")]
    Broken(String),
}

impl Fault {
    pub fn io(path: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> Self {
        Fault::Io { path: path.into(), action, source }
    }

    /// Ends the current thread of work with this fault: a panic that carries it. The top of each thread turns
    /// it into one log line and a non-zero exit. For reads that meet a damaged page in the middle of an
    /// evaluation, where no caller could do anything better.
    pub fn raise(self) -> ! {
        std::panic::panic_any(self)
    }
}
