//! SIGBUS: the kernel could not read a page of a mapped file. The process ends with one line that names the file
//! and the offset, instead of a core dump that names neither.
//!
//! The handler may do almost nothing: it looks into a table of fixed size, formats into its own stack and calls
//! `write` and `_exit`. A SIGBUS elsewhere gets the system's default action.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};

/// Mappings that can be named; further ones are only not named.
const PLACES: usize = 256;

struct Place {
    base: AtomicUsize,
    len: AtomicUsize,
    /// A C string that is never freed: the handler may read it at any time.
    path: AtomicPtr<libc::c_char>,
}

static TABLE: [Place; PLACES] = [const {
    Place { base: AtomicUsize::new(0), len: AtomicUsize::new(0), path: AtomicPtr::new(ptr::null_mut()) }
}; PLACES];

/// A mapping's entry in the table; leaves it when dropped.
#[derive(Debug)]
pub struct Watched(Option<usize>);

/// From now on a SIGBUS in this range is explained.
pub fn watch(base: *const u8, len: usize, path: &Path) -> Watched {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    let name = CString::new(path.as_os_str().as_bytes()).unwrap_or_default();
    for (number, place) in TABLE.iter().enumerate() {
        if place.base.compare_exchange(0, base as usize, SeqCst, SeqCst).is_ok() {
            // Leaked on purpose, a few bytes for each file that is opened.
            place.path.store(name.into_raw(), SeqCst);
            place.len.store(len, SeqCst);
            return Watched(Some(number));
        }
    }
    Watched(None)
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(number) = self.0 {
            TABLE[number].len.store(0, SeqCst);
            TABLE[number].base.store(0, SeqCst);
        }
    }
}

fn install() {
    // SAFETY: an all-zero sigaction is valid; the handler has the signature that SA_SIGINFO asks for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
    }
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let address = unsafe { (*info).si_addr() } as usize;
    for place in &TABLE {
        let (base, len) = (place.base.load(SeqCst), place.len.load(SeqCst));
        let path = place.path.load(SeqCst);
        if base != 0 && (base..base + len).contains(&address) && !path.is_null() {
            say(b"fatal: ");
            // SAFETY: a C string that is never freed.
            say(unsafe { std::ffi::CStr::from_ptr(path) }.to_bytes());
            say(b": offset ");
            let mut digits = [0; 20];
            say(decimal(address - base, &mut digits));
            say(b": the disk could not deliver a page of the file (SIGBUS); check the disk, then `etcore check`\n");
            // SAFETY: ends the process without running anything of it.
            unsafe { libc::_exit(1) }
        }
    }
    // SAFETY: not ours: with the default action in place the instruction is run again and ends the process.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
    }
}

fn say(bytes: &[u8]) {
    // SAFETY: `write` is allowed in a handler; the bytes are valid.
    let _ = unsafe { libc::write(2, bytes.as_ptr().cast(), bytes.len()) };
}

fn decimal(mut number: usize, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn decimals() {
        let mut digits = [0; 20];
        assert_eq!(decimal(0, &mut digits), b"0");
        assert_eq!(decimal(usize::MAX, &mut digits), usize::MAX.to_string().as_bytes());
    }

    /// In a child: touching a mapping behind the end of its file is what an unreadable page is.
    #[test]
    fn a_page_that_cannot_be_read_ends_the_process_with_its_place() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let errors = tempfile::tempfile().unwrap();
        // SAFETY: the child calls only what is allowed after a fork of a threaded process, and ends itself.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a fresh mapping of our own file, read where the file has no page.
            unsafe {
                libc::dup2(errors.as_raw_fd(), 2);
                let fd = file.as_file().as_raw_fd();
                let base =
                    libc::mmap(ptr::null_mut(), 8192, libc::PROT_READ, libc::MAP_SHARED, fd, 0) as *const u8;
                let watched = watch(base, 8192, file.path());
                std::ptr::read_volatile(base.add(5000));
                drop(watched);
                libc::_exit(7);
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1, "status {status:x}");
        let mut text = String::new();
        use std::io::{Read, Seek};
        let mut errors = errors;
        errors.rewind().unwrap();
        errors.read_to_string(&mut text).unwrap();
        let want = format!("{}: offset 5000", file.path().display());
        assert!(text.contains(&want), "{text}");
    }
}
