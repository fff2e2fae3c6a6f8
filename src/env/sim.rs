//! A disk in memory that behaves as badly as a real one may. Every call is executed at once; `crash` turns the
//! disk into what a power cut could have left of it, chosen by a seed:
//!
//! - Content that was not flushed by `File::sync` is kept, lost or torn, each sector or block on its own.
//! - A changed file length that was not flushed is kept or lost.
//! - Files made, renamed or removed are so after the cut only if the directory was flushed by `sync_dir`;
//!   otherwise each such change is kept or lost (case D9). Flushing a file does not flush its name.
//! - A failed `sync` drops what it should have written, yet the next one succeeds, as with Linux (case D3).
//! - Handles opened before the cut fail for ever after: a test cannot go on with the old machine.
//!
//! Promises: the same seeds and the same calls give the same bytes. Serves tests and the simulator; it does not
//! know what the files mean, and it has no notion of time. Directories are durable as soon as they are made, as
//! the trait says.

use super::disk::require_alignment;
use super::{Backing, Disk, File, Open};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// The unit in which old content is remembered, and the larger of the two units in which it is lost.
const BLOCK: usize = 4096;
/// The smaller unit in which content is lost; a tear is inside one.
const SECTOR: usize = 512;
/// What a file may grow to unless the test says otherwise. Address space only: pages are allotted when touched.
const FILE_BYTES_MAX: usize = 256 << 20;

/// A small generator (splitmix64): enough for tests, the same on every machine.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice(seed ^ 0x5DEE_CE66_D1CE_4E5B)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `0..bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// True once in `n` throws.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn coin(&mut self) -> bool {
        self.draw() & 1 == 1
    }
}

/// A kind of call, for injected failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Open,
    Read,
    Write,
    Allocate,
    Truncate,
    Sync,
    SyncDir,
    Rename,
    Remove,
}

/// "Fail calls of this kind on paths that contain `path`, after letting `after` of them pass, `times` times."
#[derive(Clone, Debug)]
pub struct Failure {
    pub call: Call,
    /// Part of the path; empty matches every file.
    pub path: String,
    pub after: u64,
    /// `u64::MAX`: until `heal`.
    pub times: u64,
    /// `libc::EIO`, `libc::ENOSPC`, ...
    pub errno: i32,
}

/// What was asked of the disk since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub reads: u64,
    pub bytes_read: u64,
    pub writes: u64,
    pub bytes_written: u64,
    pub syncs: u64,
    pub dir_syncs: u64,
}

/// How a power cut is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Crash {
    pub seed: u64,
    /// A sector may end up half old, half new. Disks promise not to; not all keep the promise.
    pub tear: bool,
}

#[derive(Clone)]
pub struct SimDisk {
    world: Arc<Mutex<World>>,
    file_bytes_max: usize,
}

struct World {
    dice: Dice,
    /// Counts the power cuts; a handle works only in the generation in which it was opened.
    generation: u64,
    /// Mutating calls until the power goes; `None`: it stays.
    power: Option<u64>,
    dirs: BTreeSet<PathBuf>,
    /// What a process sees.
    names: BTreeMap<PathBuf, Arc<Node>>,
    /// What the disk certainly holds.
    durable: BTreeMap<PathBuf, Arc<Node>>,
    /// Changes to names since, oldest first.
    pending: Vec<Pending>,
    nodes_made: u64,
    failures: Vec<Failure>,
    counters: Counters,
}

#[derive(Clone)]
enum NameChange {
    Create(PathBuf, Arc<Node>),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

struct Pending {
    change: NameChange,
    /// The directories whose flush it still waits for.
    dirs: BTreeSet<PathBuf>,
}

/// One file, whatever its names.
struct Node {
    number: u64,
    memory: Memory,
    state: Mutex<NodeState>,
}

/// The file's content as processes see it stands in `memory`; here is what the disk has instead.
#[derive(Default)]
struct NodeState {
    len: u64,
    len_durable: u64,
    /// The length changed and the next flush will write it.
    len_pending: bool,
    /// Durable content of blocks that were written since the last flush.
    dirty: BTreeMap<u64, Box<[u8]>>,
    /// Durable content of blocks whose flush failed: the kernel believes them clean, they are lost at a cut.
    dropped: BTreeMap<u64, Box<[u8]>>,
}

/// Reserved, zero-filled address space that never moves.
struct Memory {
    base: *mut u8,
    capacity: usize,
}

// SAFETY: the pointer is to a private mapping that lives as long as the value; all writes go through the mutex
// of the node's state, and who reads through `Backing::Memory` takes the same care as with a mapped file.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn reserve(capacity: usize) -> io::Result<Self> {
        // SAFETY: a fresh anonymous mapping; touches no memory of anyone.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                capacity,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Memory { base: base.cast(), capacity })
    }

    fn read(&self, offset: usize, buffer: &mut [u8]) {
        assert!(offset + buffer.len() <= self.capacity, "a read stays inside the reserved memory");
        // SAFETY: inside the mapping, checked above; the caller's buffer is not part of it.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(offset), buffer.as_mut_ptr(), buffer.len()) }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.capacity, "a write stays inside the reserved memory");
        // SAFETY: inside the mapping, checked above; writers hold the node's mutex.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.base.add(offset), bytes.len()) }
    }

    fn zero(&self, start: usize, end: usize) {
        assert!(start <= end && end <= self.capacity, "only the reserved memory is cleared");
        // SAFETY: inside the mapping, checked above; writers hold the node's mutex.
        unsafe { std::ptr::write_bytes(self.base.add(start), 0, end - start) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `reserve`, which nobody may use after the last handle is gone.
        unsafe { libc::munmap(self.base.cast(), self.capacity) };
    }
}

impl Node {
    fn state(&self) -> MutexGuard<'_, NodeState> {
        self.state.lock().expect("no test panics while it holds the simulated disk")
    }
}

impl NodeState {
    /// Remembers what the disk has in the blocks of `start..end` before they change.
    fn touch(&mut self, memory: &Memory, start: u64, end: u64) {
        if start == end {
            return;
        }
        for block in start / BLOCK as u64..end.div_ceil(BLOCK as u64) {
            if self.dirty.contains_key(&block) {
                continue;
            }
            let old = self.dropped.remove(&block).unwrap_or_else(|| {
                let mut old = vec![0; BLOCK].into_boxed_slice();
                let at = block as usize * BLOCK;
                memory.read(at, &mut old[..BLOCK.min(memory.capacity - at)]);
                old
            });
            self.dirty.insert(block, old);
        }
    }

    fn resize(&mut self, memory: &Memory, len: u64) {
        if len < self.len {
            self.touch(memory, len, self.len);
            memory.zero(len as usize, self.len as usize);
        }
        if len != self.len {
            self.len = len;
            self.len_pending = true;
        }
    }

    fn sync(&mut self) {
        self.dirty.clear();
        if std::mem::take(&mut self.len_pending) {
            self.len_durable = self.len;
        }
    }

    /// A flush that fails: some blocks reached the disk, the others are forgotten by the kernel.
    fn sync_failing(&mut self, dice: &mut Dice) {
        for (block, old) in std::mem::take(&mut self.dirty) {
            if !dice.one_in(4) {
                self.dropped.insert(block, old);
            }
        }
        self.len_pending = false;
    }

    /// The power cut, for one file.
    fn cut(&mut self, memory: &Memory, dice: &mut Dice, tear: bool) {
        let len_lost = self.len != self.len_durable && (!self.len_pending || dice.coin());
        let len = if len_lost { self.len_durable } else { self.len };
        let unit = if dice.coin() { SECTOR } else { BLOCK };
        // From everything lost to everything kept, so that the extremes are common too.
        let lost_in_8 = dice.below(9);
        for (block, old) in std::mem::take(&mut self.dirty) {
            let at = block as usize * BLOCK;
            for offset in (0..BLOCK.min(memory.capacity - at)).step_by(unit) {
                let end = offset + unit;
                let mut lost = offset..offset;
                if dice.below(8) < lost_in_8 {
                    let torn_at = if tear && dice.coin() { dice.below(unit as u64) as usize } else { 0 };
                    lost = offset + torn_at..end;
                }
                // A truncation that did not happen frees nothing: what stood behind it is all there.
                let cut_off = (self.len.saturating_sub(at as u64) as usize).clamp(offset, end)..end;
                for range in [lost, cut_off] {
                    memory.write(at + range.start, &old[range]);
                }
            }
        }
        for (block, old) in std::mem::take(&mut self.dropped) {
            let at = block as usize * BLOCK;
            memory.write(at, &old[..BLOCK.min(memory.capacity - at)]);
        }
        let end = self.len.max(self.len_durable).next_multiple_of(BLOCK as u64) as usize;
        memory.zero(len as usize, end.min(memory.capacity));
        *self = NodeState { len, len_durable: len, ..NodeState::default() };
    }
}

impl World {
    fn fails(&mut self, call: Call, path: &Path) -> io::Result<()> {
        let mut errno = None;
        for failure in &mut self.failures {
            if failure.call != call || !path.to_string_lossy().contains(&failure.path) {
                continue;
            }
            if failure.after > 0 {
                failure.after -= 1;
            } else if failure.times > 0 && errno.is_none() {
                if failure.times != u64::MAX {
                    failure.times -= 1;
                }
                errno = Some(failure.errno);
            }
        }
        errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }

    /// Takes one mutating call from the power budget.
    fn spend(&mut self) -> io::Result<()> {
        self.powered()?;
        if let Some(left) = &mut self.power {
            *left -= 1;
        }
        Ok(())
    }

    fn powered(&self) -> io::Result<()> {
        match self.power {
            Some(0) => Err(io::Error::other("the simulated power is off")),
            _ => Ok(()),
        }
    }

    fn change_names(&mut self, change: NameChange) {
        let parent = |path: &PathBuf| path.parent().map(Path::to_path_buf).unwrap_or_default();
        let dirs = match &change {
            NameChange::Create(path, _) | NameChange::Remove(path) => BTreeSet::from([parent(path)]),
            NameChange::Rename(from, to) => BTreeSet::from([parent(from), parent(to)]),
        };
        change.apply(&mut self.names);
        self.pending.push(Pending { change, dirs });
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<PathBuf, Arc<Node>>) {
        match self {
            NameChange::Create(path, node) => {
                names.insert(path.clone(), node.clone());
            }
            NameChange::Rename(from, to) => {
                // A lost creation takes its renaming with it.
                if let Some(node) = names.remove(from) {
                    names.insert(to.clone(), node);
                }
            }
            NameChange::Remove(path) => {
                names.remove(path);
            }
        }
    }
}

impl SimDisk {
    /// An empty disk with only the root directory. The seed decides what failing calls leave behind.
    pub fn new(seed: u64) -> Self {
        SimDisk::with_file_bytes_max(seed, FILE_BYTES_MAX)
    }

    /// With another bound for the size of a file (and the address space reserved for each).
    pub fn with_file_bytes_max(seed: u64, file_bytes_max: usize) -> Self {
        SimDisk {
            world: Arc::new(Mutex::new(World {
                dice: Dice::new(seed),
                generation: 0,
                power: None,
                dirs: BTreeSet::from([PathBuf::from("/"), PathBuf::new()]),
                names: BTreeMap::new(),
                durable: BTreeMap::new(),
                pending: Vec::new(),
                nodes_made: 0,
                failures: Vec::new(),
                counters: Counters::default(),
            })),
            file_bytes_max,
        }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("no test panics while it holds the simulated disk")
    }

    /// Cuts the power and restores it. Afterwards the disk holds what the seed left, all of it durable; old
    /// handles are dead, injected failures and the power budget are forgotten.
    pub fn crash(&self, crash: Crash) {
        let mut dice = Dice::new(crash.seed);
        let world = &mut *self.world();
        let mut nodes: BTreeMap<u64, Arc<Node>> = BTreeMap::new();
        nodes.extend(world.names.values().chain(world.durable.values()).map(|n| (n.number, n.clone())));
        // A file system with a journal keeps a prefix of the changes; one without keeps any of them.
        let ordered = dice.coin();
        let prefix = dice.below(world.pending.len() as u64 + 1) as usize;
        for (number, pending) in std::mem::take(&mut world.pending).into_iter().enumerate() {
            if let NameChange::Create(_, node) = &pending.change {
                nodes.insert(node.number, node.clone());
            }
            if if ordered { number < prefix } else { dice.coin() } {
                pending.change.apply(&mut world.durable);
            }
        }
        for node in nodes.values() {
            node.state().cut(&node.memory, &mut dice, crash.tear);
        }
        world.names = world.durable.clone();
        world.generation += 1;
        world.power = None;
        world.failures.clear();
    }

    /// After this many more calls that change something, every call fails until `crash`.
    pub fn cut_power_after(&self, calls: u64) {
        self.world().power = Some(calls);
    }

    pub fn fail(&self, failure: Failure) {
        self.world().failures.push(failure);
    }

    /// Forgets all injected failures.
    pub fn heal(&self) {
        self.world().failures.clear();
    }

    pub fn counters(&self) -> Counters {
        self.world().counters
    }

    /// Rots a byte at rest: on the disk and in the page cache. False if there is no such byte.
    pub fn corrupt(&self, path: &Path, offset: u64, xor: u8) -> bool {
        let world = self.world();
        let Some(node) = world.names.get(path) else { return false };
        let mut state = node.state();
        if offset >= state.len {
            return false;
        }
        let mut byte = [0];
        node.memory.read(offset as usize, &mut byte);
        node.memory.write(offset as usize, &[byte[0] ^ xor]);
        let block = offset / BLOCK as u64;
        let state = &mut *state;
        for old in [state.dirty.get_mut(&block), state.dropped.get_mut(&block)].into_iter().flatten() {
            old[offset as usize % BLOCK] ^= xor;
        }
        true
    }

    /// The whole file as processes see it.
    pub fn contents(&self, path: &Path) -> io::Result<Vec<u8>> {
        let world = self.world();
        let node = world.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        let mut bytes = vec![0; node.state().len as usize];
        node.memory.read(0, &mut bytes);
        Ok(bytes)
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimDisk")
    }
}

impl Disk for SimDisk {
    fn open(&self, path: &Path, how: Open, direct: bool) -> io::Result<Arc<dyn File>> {
        let world = &mut *self.world();
        world.powered()?;
        world.fails(Call::Open, path)?;
        let node = match (how, world.names.get(path)) {
            (Open::Create, Some(_)) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Open::Create, None) => {
                let parent = path.parent().unwrap_or(Path::new(""));
                if !world.dirs.contains(parent) {
                    return Err(io::ErrorKind::NotFound.into());
                }
                world.spend()?;
                let memory = Memory::reserve(self.file_bytes_max)?;
                world.nodes_made += 1;
                let node = Arc::new(Node { number: world.nodes_made, memory, state: Mutex::default() });
                world.change_names(NameChange::Create(path.to_path_buf(), node.clone()));
                node
            }
            (_, Some(node)) => node.clone(),
            (_, None) => return Err(io::ErrorKind::NotFound.into()),
        };
        Ok(Arc::new(SimFile {
            world: self.world.clone(),
            node,
            path: path.to_path_buf(),
            generation: world.generation,
            writable: how != Open::Read,
            direct,
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let world = &mut *self.world();
        world.spend()?;
        world.fails(Call::Rename, from)?;
        if !world.names.contains_key(from) {
            return Err(io::ErrorKind::NotFound.into());
        }
        world.change_names(NameChange::Rename(from.to_path_buf(), to.to_path_buf()));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let world = &mut *self.world();
        world.spend()?;
        world.fails(Call::Remove, path)?;
        if !world.names.contains_key(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        world.change_names(NameChange::Remove(path.to_path_buf()));
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let world = self.world();
        world.powered()?;
        if !world.dirs.contains(dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let inside = |path: &PathBuf| {
            let name = path.file_name().filter(|_| path.parent() == Some(dir))?;
            Some(name.to_string_lossy().into_owned())
        };
        let names: BTreeSet<String> =
            world.names.keys().filter_map(inside).chain(world.dirs.iter().filter_map(inside)).collect();
        Ok(names.into_iter().collect())
    }

    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        let world = &mut *self.world();
        world.spend()?;
        world.dirs.extend(dir.ancestors().map(Path::to_path_buf));
        Ok(())
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let world = &mut *self.world();
        world.spend()?;
        world.counters.dir_syncs += 1;
        world.fails(Call::SyncDir, dir)?;
        if !world.dirs.contains(dir) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let durable = &mut world.durable;
        world.pending.retain_mut(|pending| {
            pending.dirs.remove(dir);
            if pending.dirs.is_empty() {
                pending.change.apply(durable);
            }
            !pending.dirs.is_empty()
        });
        Ok(())
    }
}

struct SimFile {
    world: Arc<Mutex<World>>,
    node: Arc<Node>,
    path: PathBuf,
    generation: u64,
    writable: bool,
    direct: bool,
}

impl SimFile {
    /// The world, if this handle still belongs to it.
    fn enter(&self) -> io::Result<MutexGuard<'_, World>> {
        let world = self.world.lock().expect("no test panics while it holds the simulated disk");
        world.powered()?;
        if world.generation != self.generation {
            return Err(io::Error::other("this handle was opened before the power cut"));
        }
        Ok(world)
    }

    fn enter_to_change(&self, call: Call) -> io::Result<MutexGuard<'_, World>> {
        let mut world = self.enter()?;
        if !self.writable {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        world.spend()?;
        if call != Call::Write {
            world.fails(call, &self.path)?;
        }
        Ok(world)
    }

    fn aligned(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.direct { require_alignment(offset, bytes) } else { Ok(()) }
    }

    /// The end of `len` bytes at `offset`, if the file can be that long.
    fn end(&self, offset: u64, len: u64) -> io::Result<u64> {
        match offset.checked_add(len) {
            Some(end) if end <= self.node.memory.capacity as u64 => Ok(end),
            _ => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        }
    }
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimFile({})", self.path.display())
    }
}

impl File for SimFile {
    fn len(&self) -> io::Result<u64> {
        let _world = self.enter()?;
        Ok(self.node.state().len)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut world = self.enter()?;
        self.aligned(offset, buffer)?;
        world.fails(Call::Read, &self.path)?;
        world.counters.reads += 1;
        world.counters.bytes_read += buffer.len() as u64;
        let state = self.node.state();
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > state.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.node.memory.read(offset as usize, buffer);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let world = &mut *self.enter_to_change(Call::Write)?;
        self.aligned(offset, bytes)?;
        let failed = world.fails(Call::Write, &self.path);
        // A write that fails may have written the beginning.
        let written = match failed {
            Ok(()) => bytes,
            Err(_) => &bytes[..world.dice.below(bytes.len() as u64 / SECTOR as u64 + 1) as usize * SECTOR],
        };
        let end = self.end(offset, written.len() as u64)?;
        world.counters.writes += 1;
        world.counters.bytes_written += written.len() as u64;
        let mut state = self.node.state();
        state.touch(&self.node.memory, offset, end);
        self.node.memory.write(offset as usize, written);
        let len = state.len.max(end);
        state.resize(&self.node.memory, len);
        failed
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let _world = self.enter_to_change(Call::Allocate)?;
        self.end(len, 0)?;
        let mut state = self.node.state();
        let len = state.len.max(len);
        state.resize(&self.node.memory, len);
        Ok(())
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        let _world = self.enter_to_change(Call::Truncate)?;
        self.end(len, 0)?;
        self.node.state().resize(&self.node.memory, len);
        Ok(())
    }

    fn write_back(&self, _offset: u64, _len: u64) -> io::Result<()> {
        self.enter().map(drop)
    }

    fn sync(&self) -> io::Result<()> {
        let world = &mut *self.enter()?;
        world.spend()?;
        world.counters.syncs += 1;
        let mut state = self.node.state();
        match world.fails(Call::Sync, &self.path) {
            Ok(()) => {
                state.sync();
                Ok(())
            }
            Err(error) => {
                state.sync_failing(&mut world.dice);
                Err(error)
            }
        }
    }

    fn backing(&self) -> Backing {
        Backing::Memory { base: self.node.memory.base, capacity: self.node.memory.capacity }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "/data/file";

    fn disk(seed: u64) -> SimDisk {
        let disk = SimDisk::with_file_bytes_max(seed, 1 << 20);
        disk.create_dir(Path::new("/data")).unwrap();
        disk
    }

    fn made(disk: &SimDisk, path: &str, bytes: &[u8]) -> Arc<dyn File> {
        let file = disk.open(Path::new(path), Open::Create, false).unwrap();
        file.write_at(0, bytes).unwrap();
        file.sync().unwrap();
        disk.sync_dir(Path::new("/data")).unwrap();
        file
    }

    fn crash(disk: &SimDisk, seed: u64) {
        disk.crash(Crash { seed, tear: false });
    }

    #[test]
    fn flushed_content_survives_and_old_handles_do_not() {
        for seed in 0..50 {
            let disk = disk(seed);
            let file = made(&disk, PATH, b"durable");
            crash(&disk, seed);
            assert_eq!(disk.contents(Path::new(PATH)).unwrap(), b"durable");
            assert!(file.read_at(0, &mut [0; 1]).is_err(), "a handle from before the cut works");
            assert!(file.write_at(0, b"x").is_err());
            assert!(file.sync().is_err());
        }
    }

    #[test]
    fn unflushed_content_is_kept_lost_or_mixed_by_sector() {
        let (mut kept, mut lost, mut mixed) = (0, 0, 0);
        for seed in 0..200 {
            let disk = disk(seed);
            let file = made(&disk, PATH, &[1; 3 * BLOCK]);
            file.write_at(0, &[2; 3 * BLOCK]).unwrap();
            crash(&disk, seed);
            let bytes = disk.contents(Path::new(PATH)).unwrap();
            assert!(bytes.chunks(SECTOR).all(|sector| sector.iter().all(|b| *b == sector[0])), "torn");
            let new = bytes.iter().filter(|b| **b == 2).count();
            match new {
                0 => lost += 1,
                n if n == bytes.len() => kept += 1,
                _ => mixed += 1,
            }
        }
        assert!(kept > 5 && lost > 5 && mixed > 50, "{kept} kept, {lost} lost, {mixed} mixed");
    }

    #[test]
    fn a_tear_is_inside_a_sector() {
        let torn = (0..50).any(|seed| {
            let disk = disk(seed);
            made(&disk, PATH, &[1; BLOCK]).write_at(0, &[2; BLOCK]).unwrap();
            disk.crash(Crash { seed, tear: true });
            let bytes = disk.contents(Path::new(PATH)).unwrap();
            bytes.chunks(SECTOR).any(|sector| sector.iter().any(|b| *b != sector[0]))
        });
        assert!(torn);
    }

    #[test]
    fn an_unflushed_length_is_kept_or_lost() {
        let mut lengths = BTreeSet::new();
        for seed in 0..50 {
            let disk = disk(seed);
            let file = made(&disk, PATH, &[1; 100]);
            file.truncate(10).unwrap();
            file.write_at(5000, &[3; 100]).unwrap();
            crash(&disk, seed);
            let bytes = disk.contents(Path::new(PATH)).unwrap();
            lengths.insert(bytes.len());
        }
        assert_eq!(lengths, BTreeSet::from([100, 5100]));
        for seed in 0..50 {
            let disk = disk(seed);
            made(&disk, PATH, &[1; 9000]).truncate(10).unwrap();
            crash(&disk, seed);
            let bytes = disk.contents(Path::new(PATH)).unwrap();
            assert!(bytes.len() == 10 || bytes.len() == 9000);
            assert!(bytes.iter().all(|b| *b == 1), "a lost truncation lost content");
        }
    }

    #[test]
    fn names_are_lost_without_a_flush_of_the_directory() {
        let (mut vanished, mut reverted, mut back) = (false, false, false);
        for seed in 0..50 {
            let disk = disk(seed);
            made(&disk, "/data/old", b"old");
            made(&disk, "/data/gone", b"gone");
            let new = disk.open(Path::new("/data/new"), Open::Create, false).unwrap();
            new.write_at(0, b"new").unwrap();
            new.sync().unwrap();
            disk.rename(Path::new("/data/old"), Path::new("/data/renamed")).unwrap();
            disk.remove(Path::new("/data/gone")).unwrap();
            crash(&disk, seed);
            let names = disk.list(Path::new("/data")).unwrap();
            let has = |name: &str| names.iter().any(|n| n == name);
            vanished |= !has("new");
            reverted |= has("old");
            back |= has("gone");
            assert!(has("old") != has("renamed"), "a rename is atomic");
            if has("new") {
                assert_eq!(disk.contents(Path::new("/data/new")).unwrap(), b"new");
            }
        }
        assert!(vanished && reverted && back);
        for seed in 0..50 {
            let disk = disk(seed);
            made(&disk, "/data/old", b"old");
            disk.rename(Path::new("/data/old"), Path::new("/data/renamed")).unwrap();
            disk.sync_dir(Path::new("/data")).unwrap();
            crash(&disk, seed);
            assert_eq!(disk.list(Path::new("/data")).unwrap(), ["renamed"]);
        }
    }

    #[test]
    fn a_failed_flush_loses_its_data_and_the_next_one_succeeds() {
        let mut lost = false;
        for seed in 0..20 {
            let disk = disk(seed);
            let file = made(&disk, PATH, &[1; BLOCK]);
            disk.fail(Failure {
                call: Call::Sync,
                path: "file".into(),
                after: 0,
                times: 1,
                errno: libc::EIO,
            });
            file.write_at(0, &[2; BLOCK]).unwrap();
            assert_eq!(file.sync().unwrap_err().raw_os_error(), Some(libc::EIO));
            file.sync().unwrap();
            let mut seen = [0; BLOCK];
            file.read_at(0, &mut seen).unwrap();
            assert_eq!(seen, [2; BLOCK], "the page cache still shows it");
            crash(&disk, seed);
            lost |= disk.contents(Path::new(PATH)).unwrap() == [1; BLOCK];
        }
        assert!(lost);
    }

    #[test]
    fn failures_strike_the_chosen_call_only() {
        let disk = disk(1);
        let file = made(&disk, PATH, b"x");
        disk.fail(Failure {
            call: Call::Write,
            path: "file".into(),
            after: 1,
            times: 2,
            errno: libc::ENOSPC,
        });
        file.write_at(0, b"y").unwrap();
        for _ in 0..2 {
            assert_eq!(file.write_at(0, b"z").unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        }
        file.write_at(0, b"z").unwrap();
        assert_eq!(disk.counters().syncs, 1);
        assert_eq!(disk.counters().dir_syncs, 1);
    }

    #[test]
    fn the_power_goes_after_the_given_calls() {
        let disk = disk(1);
        let file = made(&disk, PATH, b"x");
        disk.cut_power_after(1);
        file.write_at(0, b"y").unwrap();
        assert!(file.write_at(0, b"z").is_err());
        assert!(file.sync().is_err());
        assert!(disk.open(Path::new(PATH), Open::Read, false).is_err());
        crash(&disk, 1);
        assert!(disk.open(Path::new(PATH), Open::Read, false).is_ok());
    }

    #[test]
    fn direct_files_refuse_what_is_not_aligned() {
        let disk = disk(1);
        let file = disk.open(Path::new(PATH), Open::Create, true).unwrap();
        assert!(file.write_at(0, b"x").is_err());
        assert!(file.write_at(1, &[0; BLOCK]).is_err());
    }

    #[test]
    fn rot_is_at_rest() {
        let disk = disk(1);
        let file = made(&disk, PATH, &[1; 10]);
        file.write_at(0, &[2; 4]).unwrap();
        assert!(disk.corrupt(Path::new(PATH), 3, 0x80));
        assert!(!disk.corrupt(Path::new(PATH), 10, 0x80));
        let bytes = disk.contents(Path::new(PATH)).unwrap();
        assert_eq!(bytes, [2, 2, 2, 0x82, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn the_same_seed_gives_the_same_disk() {
        let run = |seed| {
            let disk = disk(seed);
            let file = made(&disk, PATH, &[1; 20 * BLOCK]);
            file.write_at(0, &[2; 20 * BLOCK]).unwrap();
            crash(&disk, seed);
            disk.contents(Path::new(PATH)).unwrap()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }
}
