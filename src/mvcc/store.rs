//! The store of one shard: takes records in the order of their positions and keeps `kv`, `rev`, `old` and `lease`
//! in step; one key's rows change together, in memory only. See `tables.rs` for what stands where.
//!
//! Whether a record is to be applied at all is the caller's decision, and so is its position: the store applies
//! what it is given and never looks whether it has seen that revision before (case S16).

use super::applied::{Applied, Cursor};
use super::check;
use super::reader::Reader;
use super::tables::{self, Kind, KvRow, ROW_BYTES_MAX, Value};
use crate::btree::{self, Checkpoint, Discarded, OverflowRef, Read, Snapshot, Table, Tree};
use crate::env::Disk;
use crate::model::limits::VALUE_INLINE_BYTES_MAX;
use crate::model::{Change, Fault, KeyRange, KeyValue, Record, Rev, ShardId};
use std::path::Path;
use std::sync::Arc;

/// Keys of a range record that [`Store::apply`] expands between two looks at the tree.
const EXPANSION_KEYS: usize = 1024;

/// How a bounded piece of work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing is left to do for now.
    Done,
    More,
}

pub struct Store {
    pub(super) tree: Tree,
    pub(super) applied: Applied,
    /// Buffers for rows and keys, kept so that a put allocates nothing here.
    row: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// Rows about to be deleted, collected while the tree is read: their keys in one buffer.
#[derive(Default)]
struct Doomed {
    bytes: Vec<u8>,
    keys: Vec<(usize, Rev, i64)>,
}

impl Store {
    /// Opens or makes the file. Reads the applied state and no data.
    pub fn open(disk: Arc<dyn Disk>, path: &Path, options: btree::Options) -> Result<Store, Fault> {
        let tree = Tree::open(disk, path, options)?;
        let applied = check::applied(&tree)?;
        #[cfg(feature = "mutations")]
        let applied = {
            let mut applied = applied;
            if crate::model::mutation::on(crate::model::mutation::Mutation::RangeRestarted) {
                applied.position.cursor = None;
            }
            applied
        };
        Ok(Store { tree, applied, row: Vec::new(), key: Vec::new() })
    }

    pub fn applied(&self) -> &Applied {
        &self.applied
    }

    /// The position's cursor and the compaction belong to the store; everything else is the caller's to set.
    pub fn applied_mut(&mut self) -> &mut Applied {
        &mut self.applied
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Reads of the state as it is now.
    pub fn reader(&self) -> Reader<'_, Tree> {
        Reader::new(&self.tree)
    }

    /// The state as it is now, for reads on other threads: `Reader::new(&snapshot)`.
    pub fn snapshot(&mut self) -> Snapshot {
        self.tree.snapshot()
    }

    /// Freezes applied state and data together. None while a checkpoint is under way, or when nothing changed
    /// since the last.
    pub fn checkpoint(&mut self) -> Option<Checkpoint> {
        self.row.clear();
        self.row.push(tables::PLACE_INLINE);
        self.applied.encode(&mut self.row);
        let before = self.tree.get(Table::Meta, tables::APPLIED_KEY);
        let run = before.and_then(|row| tables::owned_run(Table::Meta, row));
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::PositionBehind) && before.is_some() {
            return self.tree.checkpoint();
        }
        let unchanged = match run {
            None => before == Some(self.row.as_slice()),
            Some(run) => self.tree.overflow(run) == &self.row[1..],
        };
        if !unchanged {
            if self.row.len() > ROW_BYTES_MAX {
                let run = self.tree.write_overflow(&self.row[1..]);
                self.row.clear();
                self.row.push(tables::PLACE_RUN);
                self.row.extend_from_slice(&run.to_bytes());
            }
            self.tree.insert(Table::Meta, tables::APPLIED_KEY, &self.row);
            if let Some(run) = run {
                self.tree.free_overflow(run);
            }
        }
        self.tree.checkpoint()
    }

    /// Takes back a checkpoint whose `step` answered true; what is returned is memory to be dropped elsewhere.
    pub fn checkpoint_finished(&mut self, job: Checkpoint) -> Discarded {
        self.tree.checkpoint_finished(job)
    }

    /// Applies a record to its end.
    pub fn apply(&mut self, record: &Record) -> Result<(), Fault> {
        while self.apply_slice(record, EXPANSION_KEYS)? == Progress::More {}
        Ok(())
    }

    /// Applies a record from the cursor in the applied position on, and pauses inside the expansion of a range
    /// when `keys_max` keys were deleted there; the cursor then says where, and the same record is to be given
    /// again. All other changes are made without a pause. The applied revision moves with the last change.
    pub fn apply_slice(&mut self, record: &Record, keys_max: usize) -> Result<Progress, Fault> {
        let Some(first) = record.changes.iter().find(|change| change.width() > 0).map(Change::first_sub)
        else {
            return Err(Fault::Broken(format!("the record of revision {} changes nothing", record.rev)));
        };
        let cursor = self.applied.position.cursor;
        let mut budget = keys_max.max(1);
        for (index, change) in record.changes.iter().enumerate() {
            let index = index as u32;
            if cursor.is_some_and(|cursor| index < cursor.change) {
                continue;
            }
            let parts = |sub: u32| if sub == first { record.parts.as_slice() } else { &[] };
            match change {
                Change::Put { sub, kv } => self.put(Rev::new(record.rev, *sub), kv, parts(*sub))?,
                Change::Delete { sub, key } => self.delete(Rev::new(record.rev, *sub), key, parts(*sub))?,
                Change::DeleteRange { first_sub, count, range, lease } => {
                    let mut next_sub = cursor
                        .filter(|cursor| cursor.change == index)
                        .map_or(*first_sub, |cursor| cursor.next_sub);
                    let doomed = self.living(range, *lease, budget);
                    let left = u64::from(*first_sub) + u64::from(*count) - u64::from(next_sub);
                    let ends = doomed.keys.len() < budget;
                    let found = doomed.keys.len() as u64;
                    if found > left || (ends && found < left) {
                        return Err(Fault::Broken(format!(
                            "the range record of revision {} deletes {count} keys, and there are {} besides the \
                             {} deleted so far",
                            record.rev,
                            if ends { found.to_string() } else { format!("at least {found}") },
                            next_sub - first_sub,
                        )));
                    }
                    let mut start = 0;
                    for &(end, before, lease) in &doomed.keys {
                        let key = &doomed.bytes[start..end];
                        let rev = Rev::new(record.rev, next_sub);
                        self.bury(rev, key, before, lease, parts(next_sub))?;
                        next_sub += 1;
                        start = end;
                    }
                    if !ends {
                        self.applied.position.cursor = Some(Cursor { change: index, next_sub });
                        return Ok(Progress::More);
                    }
                    budget -= doomed.keys.len();
                }
            }
        }
        self.applied.position.cursor = None;
        self.applied.revision = self.applied.revision.max(record.rev);
        Ok(Progress::Done)
    }

    /// The first `keys_max` live keys of a range, or of those attached to a lease.
    fn living(&mut self, range: &KeyRange, lease: i64, keys_max: usize) -> Doomed {
        let mut doomed = Doomed::default();
        let inside = |key: &[u8]| range.end.as_ref().is_none_or(|end| key < end.as_ref());
        let mut add = |key: &[u8], row: &KvRow| {
            doomed.bytes.extend_from_slice(key);
            doomed.keys.push((doomed.bytes.len(), row.rev, row.lease));
            doomed.keys.len() < keys_max
        };
        if lease == 0 {
            let mut cursor = self.tree.cursor(Table::Kv);
            cursor.seek(&range.start);
            while let Some((key, row)) = cursor.entry()
                && inside(key)
                && add(key, &KvRow::decode(row))
            {
                cursor.next();
            }
        } else {
            tables::lease_key(&mut self.key, lease, &range.start);
            let mut cursor = self.tree.cursor(Table::Lease);
            cursor.seek(&self.key);
            while let Some(key) = cursor.key().and_then(|row| tables::lease_user_key(row, lease))
                && inside(key)
            {
                let Some(row) = self.tree.get(Table::Kv, key) else {
                    Fault::Broken(format!("lease {lease:x} holds a key that does not live: {key:02x?}"))
                        .raise()
                };
                if !add(key, &KvRow::decode(row)) {
                    break;
                }
                cursor.next();
            }
        }
        doomed
    }

    fn put(&mut self, rev: Rev, kv: &KeyValue, parts: &[ShardId]) -> Result<(), Fault> {
        // A first version has no predecessor, which spares the look.
        let before = if kv.version == 1 { None } else { self.tree.get(Table::Kv, &kv.key) };
        let before = before.map(|row| {
            let row = KvRow::decode(row);
            (row.rev, row.lease)
        });
        let value = self.log(rev, &kv.key, Some(kv), parts)?;
        tables::encode_kv(&mut self.row, rev, kv, value);
        if self.tree.insert(Table::Kv, &kv.key, &self.row) != before.is_some() {
            return Err(Fault::Broken(format!(
                "revision {} puts version {} of a key that {}: {:02x?}",
                rev.main,
                kv.version,
                if before.is_some() { "does not live" } else { "lives" },
                kv.key
            )));
        }
        let mut lease_before = 0;
        if let Some((before, lease)) = before {
            lease_before = lease;
            tables::old_key(&mut self.key, &kv.key, before);
            self.tree.insert(Table::Old, &self.key, &Kind::Put.row());
        }
        if lease_before != kv.lease {
            self.detach(lease_before, &kv.key);
            if kv.lease != 0 {
                tables::lease_key(&mut self.key, kv.lease, &kv.key);
                self.tree.insert(Table::Lease, &self.key, &[]);
            }
        }
        Ok(())
    }

    fn delete(&mut self, rev: Rev, key: &[u8], parts: &[ShardId]) -> Result<(), Fault> {
        let Some(row) = self.tree.get(Table::Kv, key).map(KvRow::decode) else {
            return Err(Fault::Broken(format!(
                "revision {} deletes a key that does not live: {key:02x?}",
                rev.main
            )));
        };
        let (before, lease) = (row.rev, row.lease);
        self.bury(rev, key, before, lease, parts)
    }

    /// Deletes a key whose live version and lease are known.
    fn bury(
        &mut self,
        rev: Rev,
        key: &[u8],
        before: Rev,
        lease: i64,
        parts: &[ShardId],
    ) -> Result<(), Fault> {
        self.log(rev, key, None, parts)?;
        self.tree.remove(Table::Kv, key);
        tables::old_key(&mut self.key, key, before);
        self.tree.insert(Table::Old, &self.key, &Kind::Put.row());
        tables::old_key_set_rev(&mut self.key, rev);
        self.tree.insert(Table::Old, &self.key, &Kind::Tombstone.row());
        self.detach(lease, key);
        Ok(())
    }

    fn detach(&mut self, lease: i64, key: &[u8]) {
        if lease != 0 {
            tables::lease_key(&mut self.key, lease, key);
            self.tree.remove(Table::Lease, &self.key);
        }
    }

    /// Writes the row of `rev`; `None` is a tombstone. Returns the value as `kv` is to hold it.
    fn log<'v>(
        &mut self,
        rev: Rev,
        key: &[u8],
        put: Option<&'v KeyValue>,
        parts: &[ShardId],
    ) -> Result<Value<'v>, Fault> {
        let bytes: &[u8] = put.map_or(&[], |kv| &kv.value);
        let long = bytes.len() > VALUE_INLINE_BYTES_MAX;
        let mut value = Value::Inline(bytes);
        tables::encode_rev_head(&mut self.row, rev.main, key, put, parts);
        let tail = if long { OverflowRef::BYTES } else { bytes.len() };
        if self.row.len() + tail > ROW_BYTES_MAX {
            self.row.extend_from_slice(bytes);
            let run = self.tree.write_overflow(&self.row);
            if long {
                value = Value::Run { run, length: bytes.len() as u32 };
            }
            // The buffer is kept, but not at the size of the longest value.
            self.row = Vec::new();
            tables::encode_spilled(&mut self.row, run);
        } else if long {
            let run = self.tree.write_overflow(bytes);
            value = Value::whole(run);
            tables::push_rev_run(&mut self.row, run);
        } else {
            self.row.extend_from_slice(bytes);
        }
        if self.tree.insert(Table::Rev, &rev.to_bytes(), &self.row) {
            return Err(Fault::Broken(format!("revision {}.{} is there already", rev.main, rev.sub)));
        }
        Ok(value)
    }
}
