//! The disk, as narrow as the log and the tree allow. All calls block; they are made at start-up and on helper
//! threads, never on a core while it serves. A simulated disk executes them at once and forgets, at a crash,
//! whatever was not flushed.

use crate::model::limits::LOG_BLOCK_BYTES;
use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// Must exist; only read.
    Read,
    /// Must exist; read and written.
    Write,
    /// Must not exist; made empty, read and written. Its directory entry is durable only after `sync_dir`.
    Create,
}

pub trait Disk: Debug + Send + Sync + 'static {
    /// `direct`: bypass the page cache (O_DIRECT) where the file system can; offsets, lengths and the buffers'
    /// addresses are then multiples of `LOG_BLOCK_BYTES`.
    fn open(&self, path: &Path, how: Open, direct: bool) -> io::Result<Arc<dyn File>>;
    /// Atomic replacement of `to`; durable only after `sync_dir` of the directory.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// The names in a directory, sorted; an error of kind `NotFound` if there is none.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// Makes a directory and its parents (mode 0700), durably; no error if it exists.
    fn create_dir(&self, dir: &Path) -> io::Result<()>;
    /// Makes the entries of `dir` durable: files made, renamed and removed in it.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
}

pub trait File: Debug + Send + Sync {
    fn len(&self) -> io::Result<u64>;
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Fills the buffer or fails with `UnexpectedEof`.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Writes all of it. Not durable before `sync`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Grows the file to at least `len`, its blocks allocated, reading as zero.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Cuts the file.
    fn truncate(&self, len: u64) -> io::Result<()>;
    /// Starts writing back what was written to the page cache in this range, without waiting.
    fn write_back(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Data and length are durable when this returns (fdatasync). After an error nothing written since the
    /// last success may be trusted, and the call is never repeated (protocol case D3).
    fn sync(&self) -> io::Result<()>;
    /// What the tree maps. See `btree/map.rs`.
    fn backing(&self) -> Backing;
}

/// What stands behind a mapping of a file.
#[derive(Clone, Copy, Debug)]
pub enum Backing {
    /// A file of the kernel, to be mapped.
    Fd(std::os::fd::RawFd),
    /// Memory that holds the file's current content (the page cache of a simulated disk). It stays at this
    /// address and this capacity, zero beyond the file's end, while the `File` lives.
    Memory { base: *const u8, capacity: usize },
}

/// Refuses direct I/O that is not aligned. Every disk asks it, also where the device would not mind, so that a
/// mistake shows everywhere.
pub(super) fn require_alignment(offset: u64, bytes: &[u8]) -> io::Result<()> {
    let unit = LOG_BLOCK_BYTES as u64;
    if [offset, bytes.len() as u64, bytes.as_ptr() as u64].iter().all(|n| n.is_multiple_of(unit)) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "direct I/O that is not aligned"))
}
