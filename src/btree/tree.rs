use super::{Options, OverflowRef, Read, Table, TableStats};
use crate::env::Disk;
use crate::model::Fault;
use std::path::Path;
use std::sync::Arc;

pub struct Tree {}
#[derive(Clone)]
pub struct Snapshot {}
pub struct Checkpoint {}
/// Walks one table in key order, either way. It stands on an entry or on none; moving past the first or the last
/// entry leaves it on none, where `next` and `prev` keep it.
pub struct Cursor<'a> {
    _tree: std::marker::PhantomData<&'a [u8]>,
}

impl Tree {
    /// Opens the file, or makes it, durably, if there is none. Reads the meta pages and the free bitmap only.
    pub fn open(_disk: Arc<dyn Disk>, _path: &Path, _options: Options) -> Result<Tree, Fault> {
        unimplemented!()
    }
    /// True if the key was there and its value was replaced.
    pub fn insert(&mut self, _table: Table, _key: &[u8], _value: &[u8]) -> bool {
        unimplemented!()
    }
    /// True if the key was there. Does not free an overflow run that the value points to.
    pub fn remove(&mut self, _table: Table, _key: &[u8]) -> bool {
        unimplemented!()
    }
    pub fn write_overflow(&mut self, _bytes: &[u8]) -> OverflowRef {
        unimplemented!()
    }
    pub fn free_overflow(&mut self, _place: OverflowRef) {
        unimplemented!()
    }
    /// The state as it is now, readable from any thread until the last clone is dropped.
    pub fn snapshot(&mut self) -> Snapshot {
        unimplemented!()
    }
    /// Freezes the state as it is now and returns the job that makes it durable. None while one is under way or
    /// when nothing changed since the last.
    pub fn checkpoint(&mut self) -> Option<Checkpoint> {
        unimplemented!()
    }
    /// Takes back a job whose `step` answered true.
    pub fn checkpoint_finished(&mut self, _job: Checkpoint) {
        unimplemented!()
    }
    /// Memory in pages that are not yet known durable.
    pub fn dirty_bytes(&self) -> usize {
        unimplemented!()
    }
    pub fn file_bytes(&self) -> u64 {
        unimplemented!()
    }
    /// Bytes of pages that the current state uses.
    pub fn used_bytes(&self) -> u64 {
        unimplemented!()
    }
    pub fn stats(&self) -> [TableStats; 5] {
        unimplemented!()
    }
}

impl Checkpoint {
    /// One write slice or one sync. True: the checkpoint is durable.
    pub fn step(&mut self) -> Result<bool, Fault> {
        unimplemented!()
    }
}

impl<'a> Cursor<'a> {
    /// To the first entry with a key >= this one. These all return whether the cursor stands on an entry.
    pub fn seek(&mut self, _key: &[u8]) -> bool {
        unimplemented!()
    }
    /// To the last entry.
    pub fn seek_last(&mut self) -> bool {
        unimplemented!()
    }
    /// To the last entry with a key < this one.
    pub fn seek_before(&mut self, _key: &[u8]) -> bool {
        unimplemented!()
    }
    // `next` is what every cursor calls it; it is no iterator because keys are lent from its own buffer.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> bool {
        unimplemented!()
    }
    pub fn prev(&mut self) -> bool {
        unimplemented!()
    }
    /// The whole key of the current entry.
    pub fn key(&self) -> Option<&[u8]> {
        unimplemented!()
    }
    /// The value of the current entry; lent from the tree, it outlives the cursor.
    pub fn value(&self) -> Option<&'a [u8]> {
        unimplemented!()
    }
    /// Key and value of the current entry.
    pub fn entry(&self) -> Option<(&[u8], &'a [u8])> {
        unimplemented!()
    }
}

impl Read for Tree {
    fn get(&self, _table: Table, _key: &[u8]) -> Option<&[u8]> {
        unimplemented!()
    }
    fn cursor(&self, _table: Table) -> Cursor<'_> {
        unimplemented!()
    }
    fn count(&self, _table: Table, _start: &[u8], _end: Option<&[u8]>) -> u64 {
        unimplemented!()
    }
    fn len(&self, _table: Table) -> u64 {
        unimplemented!()
    }
    fn overflow(&self, _place: OverflowRef) -> &[u8] {
        unimplemented!()
    }
}
impl Read for Snapshot {
    fn get(&self, _table: Table, _key: &[u8]) -> Option<&[u8]> {
        unimplemented!()
    }
    fn cursor(&self, _table: Table) -> Cursor<'_> {
        unimplemented!()
    }
    fn count(&self, _table: Table, _start: &[u8], _end: Option<&[u8]>) -> u64 {
        unimplemented!()
    }
    fn len(&self, _table: Table) -> u64 {
        unimplemented!()
    }
    fn overflow(&self, _place: OverflowRef) -> &[u8] {
        unimplemented!()
    }
}
