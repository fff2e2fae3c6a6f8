//! What one flush of the device costs: 4 KiB written past the page cache into a zeroed file, then
//! `fdatasync`. A put cannot honestly be answered faster.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::server::Scratch;

const BLOCK_BYTES: usize = 4096;
const FILE_BYTES: usize = 16 << 20;

#[derive(Debug, Clone, Copy)]
pub struct Flush {
    pub p50: Duration,
    pub p99: Duration,
    /// Whether the file system took O_DIRECT; if not, the writes went through the page cache.
    pub direct: bool,
}

#[repr(align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// The same while every processor has a busy thread, as a server under load has: what the scheduler adds.
pub fn flush_under_load(parent: &Path, count: usize) -> io::Result<Flush> {
    let busy = AtomicBool::new(true);
    let processors = std::thread::available_parallelism()?.get();
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let flush = flush(parent, count);
        busy.store(false, Ordering::Relaxed);
        flush
    })
}

pub fn flush(parent: &Path, count: usize) -> io::Result<Flush> {
    let scratch = Scratch::new(parent)?;
    let path = scratch.path().join("probe");
    let mut file = OpenOptions::new().write(true).create_new(true).open(&path)?;
    let zeroes = vec![0; 1 << 20];
    for _ in 0..FILE_BYTES / zeroes.len() {
        file.write_all(&zeroes)?;
    }
    file.sync_all()?;
    let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path);
    let (file, direct) = match direct {
        Ok(file) => (file, true),
        Err(_) => (file, false),
    };
    let block = Block([0x5a; BLOCK_BYTES]);
    let mut times = Vec::with_capacity(count);
    for at in 0..count {
        let offset = (at * BLOCK_BYTES % FILE_BYTES) as libc::off_t;
        let begun = Instant::now();
        // SAFETY: the block is as long as said and aligned as O_DIRECT asks.
        let written = unsafe { libc::pwrite(file.as_raw_fd(), block.0.as_ptr().cast(), BLOCK_BYTES, offset) };
        if written != BLOCK_BYTES as isize {
            return Err(io::Error::last_os_error());
        }
        file.sync_data()?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok(Flush { p50: times[count / 2], p99: times[count * 99 / 100], direct })
}
