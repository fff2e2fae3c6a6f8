//! The tree: one file with five ordered tables, copy-on-write, read through the page cache.
//!
//! Promises: what a checkpoint made durable is found again, whole, whatever is lost after it; a snapshot never
//! changes; readers take no lock and copy nothing. It does not know what the keys and values mean, when a
//! checkpoint is due, or that there are revisions, logs and shards.

//!
//! ```text
//! tree        editing, freezing, opening        cursor      reading
//! checkpoint  the job that writes               check       walks a whole file
//! pages       where a page is read: dirty, frozen, file
//! layer       pages in memory                   map         the file as memory (mmap)
//! space       free pages                        meta        the two meta pages
//! node        cells in a page                   page        header, checksum, runs
//! ```

mod bus;
mod check;
mod checkpoint;
mod cursor;
mod layer;
mod map;
mod meta;
mod node;
mod page;
mod pages;
mod space;
mod tree;

pub use check::{Finding, Owner, Report, check};
pub use checkpoint::Checkpoint;
pub use cursor::Cursor;
pub use node::VALUE_MAX;
pub use tree::{Discarded, Snapshot, Tree};

/// The tables of one file, in the order in which the meta page lists their roots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Table {
    /// User key -> newest live version.
    Kv = 0,
    /// Revision, sub -> the record.
    Rev = 1,
    /// User key, revision descending, sub descending -> kind.
    Old = 2,
    /// Lease id, user key.
    Lease = 3,
    /// Name -> what the shard knows about itself.
    Meta = 4,
}

impl Table {
    pub const ALL: [Table; 5] = [Table::Kv, Table::Rev, Table::Old, Table::Lease, Table::Meta];
}

/// Where a long value stands: the first page of its run and its length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OverflowRef {
    pub page: u64,
    pub len: u32,
}

impl OverflowRef {
    pub const BYTES: usize = 12;

    /// page u64, len u32, little-endian.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.page.to_le_bytes());
        bytes[8..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// None unless there are exactly `BYTES` bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (page, len) = bytes.split_first_chunk::<8>()?;
        Some(OverflowRef { page: u64::from_le_bytes(*page), len: u32::from_le_bytes(len.try_into().ok()?) })
    }
}

/// How a tree is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address range reserved for the file's mapping, and so the bound of its size. If the system grants less,
    /// halves are tried.
    pub reserve_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { reserve_bytes: 1 << 40 }
    }
}

/// Size and shape of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableStats {
    pub table: Table,
    pub entries: u64,
    /// Pages from root to leaf; 0 for an empty table.
    pub depth: u32,
}

/// What the tree and its snapshots answer. Key order is that of bytes. A damaged page met by a read raises
/// `Fault::Damage`.
pub trait Read {
    /// The value of exactly this key.
    fn get(&self, table: Table, key: &[u8]) -> Option<&[u8]>;
    /// A cursor that stands on no entry yet.
    fn cursor(&self, table: Table) -> Cursor<'_>;
    /// Entries with start <= key < end (no end: to the last). Two descents, whatever the number.
    fn count(&self, table: Table, start: &[u8], end: Option<&[u8]>) -> u64;
    /// Entries of the table.
    fn len(&self, table: Table) -> u64;
    /// The bytes that `write_overflow` was given.
    fn overflow(&self, place: OverflowRef) -> &[u8];
}

#[cfg(test)]
mod tests;
