//! The disk of a Linux machine.
//!
//! Direct files bypass the page cache: O_DIRECT where the file system can, otherwise (tmpfs) the same calls
//! through the cache. Their writes go through a small io_uring per thread and are waited for; where io_uring is
//! refused (seccomp, `io_uring_disabled`, old kernels) `pwrite` takes its place. Alignment of direct I/O is the
//! caller's duty and checked always, so that a mistake shows on every file system and not only on the strict ones.
//!
//! How direct files are flushed is chosen once per device by [`probe`], since neither way is always faster:
//! write and `fdatasync`, or writes that are durable when they return (O_DSYNC), where `sync` then has nothing
//! left to do. With `Options::fsync` off (`--unsafe-no-fsync`) nothing is flushed at all.
//!
//! Knows nothing of what the files mean, and nothing of executors: every call blocks its thread.

use super::disk::require_alignment;
use super::{Backing, Disk, File, Open};
use crate::model::Fault;
use crate::model::limits::LOG_BLOCK_BYTES;
use io_uring::{IoUring, opcode, types};
use std::cell::RefCell;
use std::fmt;
use std::fs;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How what was written to a direct file becomes durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlushMethod {
    /// Write, then `fdatasync`.
    #[default]
    DataSync,
    /// The file is opened with O_DSYNC: a write returns when it is durable.
    WriteThrough,
}

impl fmt::Display for FlushMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FlushMethod::DataSync => "fdatasync",
            FlushMethod::WriteThrough => "dsync",
        })
    }
}

impl FromStr for FlushMethod {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fdatasync" => Ok(FlushMethod::DataSync),
            "dsync" => Ok(FlushMethod::WriteThrough),
            _ => Err(format!("{text:?} is no flush method; there are fdatasync and dsync")),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// False: nothing is ever flushed, and a power cut loses what it likes (`--unsafe-no-fsync`).
    pub fsync: bool,
    /// Of direct files; all others are flushed by `fdatasync`.
    pub flush: FlushMethod,
    /// False: `pwrite` even where io_uring is allowed.
    pub io_uring: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { fsync: true, flush: FlushMethod::default(), io_uring: true }
    }
}

#[derive(Debug)]
pub struct RealDisk {
    options: Options,
}

impl RealDisk {
    pub fn new(options: Options) -> Self {
        RealDisk { options }
    }
}

impl Disk for RealDisk {
    fn open(&self, path: &Path, how: Open, direct: bool) -> io::Result<Arc<dyn File>> {
        let write_through = direct && self.options.fsync && self.options.flush == FlushMethod::WriteThrough;
        let dsync = if write_through { libc::O_DSYNC } else { 0 };
        let mut open = fs::OpenOptions::new();
        open.read(true).write(how != Open::Read).create_new(how == Open::Create).mode(0o600);
        let (file, direct_now) = match direct {
            false => (open.open(path)?, false),
            true => match open.clone().custom_flags(libc::O_DIRECT | dsync).open(path) {
                Ok(file) => (file, true),
                // A file system without O_DIRECT says so after it made the file.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    let existed = how != Open::Create;
                    (open.create_new(false).create(!existed).custom_flags(dsync).open(path)?, false)
                }
                Err(error) => return Err(error),
            },
        };
        Ok(Arc::new(RealFile {
            file,
            path: path.to_path_buf(),
            direct,
            uncached: AtomicBool::new(direct_now),
            ring: direct && self.options.io_uring,
            fsync: self.options.fsync,
            write_through,
            // An earlier process may have left something.
            unflushed: AtomicBool::new(true),
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(dir)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        if dir.as_os_str().is_empty() || dir.is_dir() {
            return Ok(());
        }
        let parent = dir.parent().unwrap_or(Path::new(""));
        self.create_dir(parent)?;
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            // Another process may make it at the same moment.
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists || !dir.is_dir() => Err(error),
            _ => self.sync_dir(parent),
        }
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        if !self.options.fsync {
            return Ok(());
        }
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        fs::File::open(dir)?.sync_all()
    }
}

struct RealFile {
    file: fs::File,
    path: PathBuf,
    /// Opened for direct I/O: the alignment rules hold.
    direct: bool,
    /// O_DIRECT is set on the descriptor.
    uncached: AtomicBool,
    ring: bool,
    fsync: bool,
    write_through: bool,
    /// With `write_through`: something may have changed by other means than a write through this handle.
    unflushed: AtomicBool,
}

impl RealFile {
    fn aligned(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.direct { require_alignment(offset, bytes) } else { Ok(()) }
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.ring && ring::write(self.file.as_raw_fd(), offset, bytes)? {
            return Ok(());
        }
        self.file.write_all_at(bytes, offset)
    }

    /// True if the error may come from O_DIRECT, which is now off for this file; the call is to be repeated.
    fn turned_to_cache(&self, error: &io::Error) -> io::Result<bool> {
        if error.raw_os_error() != Some(libc::EINVAL) || !self.uncached.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let fd = self.file.as_raw_fd();
        // SAFETY: reads and sets the flags of our own descriptor.
        let changed = unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFL);
            flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_DIRECT) >= 0
        };
        if !changed {
            return Err(io::Error::last_os_error());
        }
        self.uncached.store(false, Ordering::Relaxed);
        Ok(true)
    }
}

impl fmt::Debug for RealFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RealFile({})", self.path.display())
    }
}

impl File for RealFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.aligned(offset, buffer)?;
        match self.file.read_exact_at(buffer, offset) {
            Err(error) if self.turned_to_cache(&error)? => self.file.read_exact_at(buffer, offset),
            result => result,
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.aligned(offset, bytes)?;
        match self.write(offset, bytes) {
            Err(error) if self.turned_to_cache(&error)? => self.write(offset, bytes),
            result => result,
        }
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let now = self.len()?;
        if len <= now {
            return Ok(());
        }
        self.unflushed.store(true, Ordering::Relaxed);
        loop {
            // SAFETY: a call on our own descriptor; no memory is passed.
            let done = unsafe { libc::fallocate(self.file.as_raw_fd(), 0, now as i64, (len - now) as i64) };
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                _ if done == 0 => return Ok(()),
                Some(libc::EINTR) => {}
                // The blocks are then allocated by the writes.
                Some(libc::EOPNOTSUPP) => return self.file.set_len(len),
                _ => return Err(error),
            }
        }
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.unflushed.store(true, Ordering::Relaxed);
        self.file.set_len(len)
    }

    fn write_back(&self, offset: u64, len: u64) -> io::Result<()> {
        // SAFETY: a call on our own descriptor; no memory is passed.
        let done = unsafe {
            libc::sync_file_range(
                self.file.as_raw_fd(),
                offset as i64,
                len as i64,
                libc::SYNC_FILE_RANGE_WRITE,
            )
        };
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            _ if done == 0 => Ok(()),
            // Only advice: a file system that does not take it writes at the flush.
            Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE) => Ok(()),
            _ => Err(error),
        }
    }

    fn sync(&self) -> io::Result<()> {
        if !self.fsync || (self.write_through && !self.unflushed.swap(false, Ordering::Relaxed)) {
            return Ok(());
        }
        self.file.sync_data()
    }

    fn backing(&self) -> Backing {
        Backing::Fd(self.file.as_raw_fd())
    }
}

/// One small ring per thread, made at the thread's first write.
mod ring {
    use super::*;

    thread_local! {
        static RING: RefCell<Option<IoUring>> = const { RefCell::new(None) };
    }

    /// Set when the kernel refused a ring: asked once, then `pwrite` for good.
    static REFUSED: AtomicBool = AtomicBool::new(false);

    pub fn refused() -> bool {
        REFUSED.load(Ordering::Relaxed)
    }

    /// Writes all of `bytes`. False if there is no ring to be had; nothing was written by it then that a second
    /// write of the same bytes would not repeat.
    pub fn write(fd: RawFd, mut offset: u64, mut bytes: &[u8]) -> io::Result<bool> {
        if refused() {
            return Ok(false);
        }
        RING.with_borrow_mut(|slot| {
            while !bytes.is_empty() {
                let ring = match slot {
                    Some(ring) => ring,
                    None => match IoUring::new(4) {
                        Ok(ring) => slot.insert(ring),
                        Err(_) => {
                            REFUSED.store(true, Ordering::Relaxed);
                            return Ok(false);
                        }
                    },
                };
                // One write of Linux ends at 2 GiB.
                let len = bytes.len().min(1 << 30) as u32;
                let write = opcode::Write::new(types::Fd(fd), bytes.as_ptr(), len).offset(offset).build();
                // SAFETY: `bytes` outlives the operation: `complete` returns only when the kernel is done with
                // it or has never seen it.
                unsafe { ring.submission().push(&write) }.expect("the ring holds one operation at a time");
                let Some(result) = complete(ring) else {
                    *slot = None;
                    REFUSED.store(true, Ordering::Relaxed);
                    return Ok(false);
                };
                match result {
                    0 => return Err(io::ErrorKind::WriteZero.into()),
                    written if written > 0 => {
                        offset += written as u64;
                        bytes = &bytes[written as usize..];
                    }
                    error if -error == libc::EINTR || -error == libc::EAGAIN => {}
                    error => return Err(io::Error::from_raw_os_error(-error)),
                }
            }
            Ok(true)
        })
    }

    /// Submits and waits. `None` if the kernel refuses to take the operation; it is then not under way.
    fn complete(ring: &mut IoUring) -> Option<i32> {
        loop {
            if let Some(entry) = ring.completion().next() {
                return Some(entry.result());
            }
            if let Err(error) = ring.submit_and_wait(1) {
                let passing = matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY));
                // Once taken, the operation uses the caller's buffer until its completion shows: wait for that.
                let taken = ring.submission().is_empty();
                if !passing && !taken {
                    return None;
                }
                std::thread::yield_now();
            }
        }
    }
}

/// True once a ring was asked for and refused; direct writes use `pwrite` since.
pub fn io_uring_refused() -> bool {
    ring::refused()
}

/// The right to a data directory, for one process; ends with the value.
#[derive(Debug)]
pub struct DirLock {
    _file: fs::File,
}

/// Takes the data directory for this process, by an advisory lock on `LOCK` in it. The file remains; the lock
/// goes with the process, however it ends.
pub fn lock_dir(dir: &Path) -> Result<DirLock, Fault> {
    let path = dir.join("LOCK");
    let mut open = fs::OpenOptions::new();
    let mut file = open
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(|error| Fault::io(&path, "open", error))?;
    // SAFETY: a call on our own descriptor; no memory is passed.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(Fault::io(&path, "lock", error));
        }
        let mut owner = String::new();
        // Only to help: an unreadable owner leaves the sentence shorter.
        let _ = (&file).take(20).read_to_string(&mut owner);
        let owner = owner.trim().parse::<u32>().map(|pid| format!(" (pid {pid})")).unwrap_or_default();
        return Err(Fault::Refused(format!(
            "the data directory {} is in use by another process{owner}; stop it, or choose another --data-dir",
            dir.display()
        )));
    }
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(|error| Fault::io(&path, "write", error))?;
    Ok(DirLock { _file: file })
}

/// What [`probe`] found.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// `st_dev` of the directory: another device needs another probe.
    pub device: u64,
    /// The faster one.
    pub method: FlushMethod,
    /// Median of one block written and flushed by each method.
    pub data_sync_p50: Duration,
    pub write_through_p50: Duration,
}

/// The device on which a path lies, as the key under which a probe's result is kept.
pub fn device(path: &Path) -> Result<u64, Fault> {
    Ok(fs::metadata(path).map_err(|error| Fault::io(path, "stat", error))?.dev())
}

/// Measures both flush methods in turns, as the log uses them: one block, direct, into a file that is allocated
/// and zero-filled. Takes about 20 ms on NVMe and ends after a second on any device.
pub fn probe(dir: &Path) -> Result<Probe, Fault> {
    const ROUNDS: usize = 65;
    const BUDGET: Duration = Duration::from_secs(1);
    /// Closer than this, measured in hundredths, the two are the same and fdatasync stays.
    const GAIN_PERCENT: u32 = 95;
    let path = dir.join("probe.tmp");
    let fault = |action| {
        let path = path.clone();
        move |error| Fault::io(path, action, error)
    };
    let block = LOG_BLOCK_BYTES;
    let len = (ROUNDS * block) as u64;
    // A crash may have left one.
    let _ = fs::remove_file(&path);
    let disk = |flush| RealDisk::new(Options { flush, ..Options::default() });
    let buffer = vec![0; len as usize + block];
    let aligned = &buffer[buffer.as_ptr().align_offset(block)..][..len as usize];
    let data_sync = disk(FlushMethod::DataSync).open(&path, Open::Create, true).map_err(fault("create"))?;
    let measured = (|| {
        data_sync.allocate(len)?;
        data_sync.write_at(0, aligned)?;
        data_sync.sync()?;
        let write_through = disk(FlushMethod::WriteThrough).open(&path, Open::Write, true)?;
        let files = [data_sync, write_through];
        let mut times = [Vec::new(), Vec::new()];
        let start = Instant::now();
        for round in 0..ROUNDS {
            for (file, times) in files.iter().zip(&mut times) {
                let begin = Instant::now();
                file.write_at((round * block) as u64, &aligned[..block])?;
                file.sync()?;
                times.push(begin.elapsed());
            }
            if start.elapsed() > BUDGET {
                break;
            }
        }
        Ok(times.map(|mut times| {
            times.sort();
            times[times.len() / 2]
        }))
    })();
    let removed = fs::remove_file(&path);
    let [data_sync_p50, write_through_p50] = measured.map_err(fault("probe"))?;
    removed.map_err(fault("remove"))?;
    let method = if write_through_p50 < data_sync_p50 * GAIN_PERCENT / 100 {
        FlushMethod::WriteThrough
    } else {
        FlushMethod::DataSync
    };
    Ok(Probe { device: device(dir)?, method, data_sync_p50, write_through_p50 })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory with the alignment that direct I/O asks for.
    #[repr(align(4096))]
    struct Blocks([u8; 2 * LOG_BLOCK_BYTES]);

    fn every_option() -> impl Iterator<Item = Options> {
        let flushes = [FlushMethod::DataSync, FlushMethod::WriteThrough];
        flushes.into_iter().flat_map(|flush| {
            [(true, true), (true, false), (false, true)].map(|(fsync, io_uring)| Options {
                fsync,
                flush,
                io_uring,
            })
        })
    }

    /// On the disk of the sources and, if there is one, on tmpfs, which has little to offer.
    fn every_place() -> Vec<tempfile::TempDir> {
        let shm = Path::new("/dev/shm");
        let mut places = vec![tempfile::tempdir().unwrap()];
        places.extend(tempfile::tempdir_in(shm).ok());
        places
    }

    #[test]
    fn direct_files_hold_what_was_written_under_every_option() {
        for place in every_place() {
            for (number, options) in every_option().enumerate() {
                let path = place.path().join(number.to_string());
                let disk = RealDisk::new(options);
                let file = disk.open(&path, Open::Create, true).unwrap();
                file.allocate(8 * LOG_BLOCK_BYTES as u64).unwrap();
                let written = Box::new(Blocks([number as u8 + 1; 2 * LOG_BLOCK_BYTES]));
                file.write_at(LOG_BLOCK_BYTES as u64, &written.0).unwrap();
                file.sync().unwrap();
                let file = disk.open(&path, Open::Read, true).unwrap();
                let mut read = Box::new(Blocks([0xFF; 2 * LOG_BLOCK_BYTES]));
                file.read_at(LOG_BLOCK_BYTES as u64, &mut read.0).unwrap();
                assert_eq!(read.0, written.0);
                file.read_at(6 * LOG_BLOCK_BYTES as u64, &mut read.0).unwrap();
                assert_eq!(read.0, [0; 2 * LOG_BLOCK_BYTES], "allocated blocks read as zero");
                let beyond = file.read_at(7 * LOG_BLOCK_BYTES as u64, &mut read.0).unwrap_err();
                assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
                assert_eq!(file.len().unwrap(), 8 * LOG_BLOCK_BYTES as u64);
            }
        }
    }

    #[test]
    fn cached_files_take_any_offset() {
        let place = tempfile::tempdir().unwrap();
        let disk = RealDisk::new(Options::default());
        let path = place.path().join("file");
        let file = disk.open(&path, Open::Create, false).unwrap();
        file.write_at(5, b"hello").unwrap();
        file.write_back(0, 10).unwrap();
        file.sync().unwrap();
        file.truncate(8).unwrap();
        let mut read = [1; 8];
        file.read_at(0, &mut read).unwrap();
        assert_eq!(&read, b"\0\0\0\0\0hel");
        assert!(matches!(file.backing(), Backing::Fd(_)));
        assert!(disk.open(&path, Open::Create, false).is_err(), "Create replaces nothing");
    }

    #[test]
    fn misaligned_direct_io_is_refused_on_every_file_system() {
        for place in every_place() {
            let disk = RealDisk::new(Options::default());
            let file = disk.open(&place.path().join("file"), Open::Create, true).unwrap();
            let blocks = Box::new(Blocks([0; 2 * LOG_BLOCK_BYTES]));
            for (offset, bytes) in
                [(512, &blocks.0[..4096]), (0, &blocks.0[..512]), (0, &blocks.0[512..512 + 4096])]
            {
                let error = file.write_at(offset, bytes).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            }
        }
    }

    #[test]
    fn names_are_listed_renamed_and_removed() {
        let place = tempfile::tempdir().unwrap();
        let disk = RealDisk::new(Options::default());
        let dir = place.path().join("a/b");
        disk.create_dir(&dir).unwrap();
        disk.create_dir(&dir).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        for name in ["2", "1", "3"] {
            disk.open(&dir.join(name), Open::Create, false).unwrap();
        }
        disk.rename(&dir.join("2"), &dir.join("4")).unwrap();
        disk.remove(&dir.join("3")).unwrap();
        disk.sync_dir(&dir).unwrap();
        assert_eq!(disk.list(&dir).unwrap(), ["1", "4"]);
        assert_eq!(disk.list(&dir.join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(
            disk.open(&dir.join("2"), Open::Write, false).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn a_directory_belongs_to_one_process() {
        let place = tempfile::tempdir().unwrap();
        let lock = lock_dir(place.path()).unwrap();
        let refused = lock_dir(place.path()).unwrap_err().to_string();
        assert!(refused.contains("in use by another process"), "{refused}");
        assert!(refused.contains(&std::process::id().to_string()), "{refused}");
        drop(lock);
        lock_dir(place.path()).unwrap();
    }

    #[test]
    fn the_probe_measures_both_methods_and_leaves_nothing() {
        for place in every_place() {
            let probe = probe(place.path()).unwrap();
            assert_eq!(probe.device, device(place.path()).unwrap());
            assert!(probe.data_sync_p50 > Duration::ZERO && probe.write_through_p50 > Duration::ZERO);
            assert_eq!(probe.method.to_string().parse(), Ok(probe.method));
            assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        }
    }
}
