//! The file as memory: the one place that knows of mmap. Promises that a page it lends was whole when it was
//! first read after the open, that what it lends never moves, and that growing disturbs nobody. It does not know
//! which pages are in use, and it never writes.
//!
//! A read here may be a page fault, and that is disk I/O which no one sees coming: it stops the thread that reads.
//!
//! An address range is reserved once, without memory behind it, and the file is mapped into it from its start,
//! further as it grows. What is mapped beyond the file's end is never touched, because every read is checked
//! against the length that the file is known to have.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::bus::{self, Watched};
use super::node::Node;
use super::page::{self, Page, RUN, RUN_HEADER};
use crate::env::{Backing, File};
use crate::model::Fault;
use crate::model::limits::PAGE_BYTES;

/// The file is mapped in pieces of this size, a multiple of every page size of the kernel.
const GRAIN: usize = 16 << 20;
/// The least address range worth trying.
const RESERVE_MIN: usize = 1 << 30;
/// Pages whose verification one chunk of the table below remembers.
const CHUNK: usize = 1 << 15;

#[derive(Debug)]
pub struct Map {
    file: Arc<dyn File>,
    path: PathBuf,
    base: *const u8,
    reserved: usize,
    /// Bytes from `base` that are mapped; meaningless for a simulated file.
    mapped: AtomicUsize,
    kernel: bool,
    /// Pages that the file is known to have.
    readable: AtomicU32,
    /// One bit per page: its checksum was found right, or we wrote it.
    verified: Box<[OnceLock<Box<[AtomicU64]>>]>,
    /// A read that the disk cannot serve ends the process with the place.
    _watched: Option<Watched>,
}

// SAFETY: `base` is the start of a range that lives as long as the map (the kernel's, or the file's own memory)
// and is only read through it; everything that changes is atomic.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    pub fn new(file: Arc<dyn File>, path: &Path, reserve_bytes: u64) -> Result<Map, Fault> {
        let (base, reserved, kernel) = match file.backing() {
            Backing::Fd(_) => {
                let (base, reserved) = reserve(reserve_bytes as usize, path)?;
                (base, reserved, true)
            }
            Backing::Memory { base, capacity } => (base, capacity, false),
        };
        let pages = (reserved / PAGE_BYTES).min(u32::MAX as usize);
        let map = Map {
            file,
            path: path.to_owned(),
            base,
            reserved: pages * PAGE_BYTES,
            mapped: AtomicUsize::new(0),
            kernel,
            readable: AtomicU32::new(0),
            verified: (0..pages.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect(),
            _watched: kernel.then(|| bus::watch(base, reserved, path)),
        };
        map.grown()?;
        Ok(map)
    }

    pub fn file(&self) -> &Arc<dyn File> {
        &self.file
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The pages that fit the reserved range.
    pub fn pages_max(&self) -> u32 {
        (self.reserved / PAGE_BYTES) as u32
    }

    /// The pages that the file is known to have.
    pub fn pages(&self) -> u32 {
        self.readable.load(Ordering::Acquire)
    }

    /// Looks at the file's length again and maps what is new.
    pub fn grown(&self) -> Result<(), Fault> {
        let len = self.file.len().map_err(|error| Fault::io(&self.path, "length", error))? as usize;
        let len = len.min(self.reserved);
        if self.kernel {
            self.map_to(len)?;
        }
        self.readable.fetch_max((len / PAGE_BYTES) as u32, Ordering::AcqRel);
        Ok(())
    }

    fn map_to(&self, len: usize) -> Result<(), Fault> {
        let mapped = self.mapped.load(Ordering::Acquire);
        let wanted = len.next_multiple_of(GRAIN).min(self.reserved);
        let Backing::Fd(fd) = self.file.backing() else { return Ok(()) };
        if wanted <= mapped {
            return Ok(());
        }
        // SAFETY: [mapped, wanted) lies in the range reserved by `new`, where nothing was lent yet since nothing
        // there was readable; so replacing that part of the reservation moves nothing under a reader.
        let at = unsafe {
            libc::mmap(
                self.base.add(mapped) as *mut libc::c_void,
                wanted - mapped,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd,
                mapped as libc::off_t,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(Fault::io(&self.path, "map", std::io::Error::last_os_error()));
        }
        self.mapped.store(wanted, Ordering::Release);
        Ok(())
    }

    /// A node. Raises `Fault::Damage` if it is not what was written.
    #[inline]
    pub fn node(&self, number: u32) -> &Page {
        if self.is_verified(number) {
            return self.page(number);
        }
        self.first_read(number, None);
        self.page(number)
    }

    /// The bytes of a run. Raises `Fault::Damage` likewise.
    pub fn run(&self, number: u32, len: u32) -> &[u8] {
        if !self.is_verified(number) {
            self.first_read(number, Some(len));
        }
        match self.run_checked(number, len, false) {
            Ok(bytes) => bytes,
            Err(what) => self.damage(number, what).raise(),
        }
    }

    /// The bytes of a run, for those who can do without.
    pub fn run_checked(&self, number: u32, len: u32, verify: bool) -> Result<&[u8], String> {
        let pages = page::run_pages(len as usize);
        if u64::from(number) + u64::from(pages) > u64::from(self.pages()) {
            return Err(format!("a run of {len} bytes goes beyond the file's end"));
        }
        // SAFETY: within the part of the range that is mapped, and within the file by the check above; pages in
        // use are never written, so the bytes do not change while they are lent.
        let run = unsafe { std::slice::from_raw_parts(self.at(number), pages as usize * PAGE_BYTES) };
        if page::kind(run) != RUN || page::u32_at(run, 12) != len {
            return Err(format!("it does not begin a run of {len} bytes"));
        }
        if verify {
            page::verify(run, number)?;
        }
        Ok(&run[RUN_HEADER..RUN_HEADER + len as usize])
    }

    #[cold]
    fn first_read(&self, number: u32, run_len: Option<u32>) {
        let checked = match run_len {
            _ if number >= self.pages() => Err("it is beyond the file's end".to_string()),
            Some(len) => self.run_checked(number, len, true).map(|_| ()),
            None => {
                let page = self.page(number);
                // The kind first: what says that it is a run is not covered by a page's checksum.
                match page::kind(page) {
                    RUN => Err("it begins a run where a node should be".to_string()),
                    _ => page::verify(page, number).and_then(|()| Node::new(page).shape()),
                }
            }
        };
        match checked {
            Ok(()) => self.set_verified(number),
            Err(what) => self.damage(number, what).raise(),
        }
    }

    pub fn damage(&self, number: u32, what: String) -> Fault {
        Fault::Damage {
            path: self.path.clone(),
            place: format!("page {number} (offset {})", u64::from(number) * PAGE_BYTES as u64),
            what,
            remedy: "the file was changed or the disk returns wrong data: run `etcore check` on the data \
                     directory, then restore it from a backup, or remove it and let the member join anew"
                .into(),
        }
    }

    #[inline(always)]
    fn at(&self, number: u32) -> *const u8 {
        // SAFETY: callers ask for pages below `pages()`, all of them within the reserved range.
        unsafe { self.base.add(number as usize * PAGE_BYTES) }
    }

    #[inline(always)]
    fn page(&self, number: u32) -> &Page {
        assert!(number < self.readable.load(Ordering::Relaxed), "page within the file");
        // SAFETY: mapped and within the file by the check above. A page that the current state or a snapshot uses
        // is never written, so it does not change while it is lent.
        unsafe { &*self.at(number).cast::<Page>() }
    }

    #[inline]
    fn is_verified(&self, number: u32) -> bool {
        let at = number as usize;
        match self.verified.get(at / CHUNK).and_then(OnceLock::get) {
            Some(chunk) => chunk[at % CHUNK / 64].load(Ordering::Relaxed) >> (at % 64) & 1 != 0,
            None => false,
        }
    }

    /// Remembers that a page need not be verified. It is right whoever reads it next.
    pub fn set_verified(&self, number: u32) {
        let at = number as usize;
        let chunk =
            self.verified[at / CHUNK].get_or_init(|| (0..CHUNK / 64).map(|_| AtomicU64::new(0)).collect());
        chunk[at % CHUNK / 64].fetch_or(1 << (at % 64), Ordering::Relaxed);
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.kernel {
            // SAFETY: the whole range is ours since `new`, and nothing lent from it outlives the map.
            unsafe { libc::munmap(self.base as *mut libc::c_void, self.reserved) };
        }
    }
}

/// An address range with nothing behind it, as large as the system grants.
fn reserve(bytes: usize, path: &Path) -> Result<(*const u8, usize), Fault> {
    let mut bytes = bytes.next_multiple_of(GRAIN);
    loop {
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at != libc::MAP_FAILED {
            return Ok((at as *const u8, bytes));
        }
        if bytes / 2 < RESERVE_MIN {
            return Err(Fault::io(path, "reserve addresses", std::io::Error::last_os_error()));
        }
        bytes = (bytes / 2).next_multiple_of(GRAIN);
    }
}
