//! The signals that end the server: SIGINT and SIGTERM, taken by the thread that waits for them.

use std::io;

pub struct Signals {
    set: libc::sigset_t,
}

impl Signals {
    /// Blocks the signals on this thread and on all that it starts afterwards, so that `wait` alone gets them.
    pub fn block() -> Self {
        // SAFETY: an all-zero set is valid to be emptied; the calls write only to it.
        let set = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGINT);
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            set
        };
        Signals { set }
    }

    /// Waits for one of them.
    pub fn wait(&self) -> i32 {
        loop {
            let mut signal = 0;
            // SAFETY: both pointers are valid; the set was initialised by `block`.
            if unsafe { libc::sigwait(&raw const self.set, &raw mut signal) } == 0 {
                return signal;
            }
        }
    }
}

/// Ends the process by the signal that ended the server, as etcd does, so that its parent sees why. Process 1 has
/// no default action for signals: it exits with 0.
pub fn end_by(signal: i32) -> ! {
    if std::process::id() != 1 {
        // SAFETY: restores the default action and unblocks a signal, then raises it; no memory is passed but a
        // set made here.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
            libc::raise(signal);
        }
        tracing::warn!(error = %io::Error::last_os_error(), "the signal did not end the process");
    }
    std::process::exit(0)
}
