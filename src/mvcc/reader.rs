//! Reads of one shard's versions: of the live tree on its core, or of a snapshot on any thread. Borrows what it
//! hands out; knows nothing of records that are not yet applied, nor of what is compacted: a read below the
//! compaction point finds less than there was, and whoever asks has to refuse it.
//!
//! Newest versions come from `kv` alone. For an older revision there are two ways. Where few changes lie behind it
//! (a read at V while applying goes on), the keys changed since are looked up one by one and everything else is
//! read as if newest. Otherwise `kv` and `old` are merged.

use super::tables::{self, Kind, KvRow, RevRow};
use crate::btree::{self, Read, Table};
use crate::model::record::Parts;
use crate::model::{Fault, KeyRange, KeyValue, KvRef, Rev};
use std::collections::BTreeSet;
use std::ops::ControlFlow::{self, Break, Continue};

/// Looking up changed keys one by one ends here, whatever the size of the range: for a scan, which may want its
/// first keys only, and for a count, which would have to look at every key otherwise.
const CHANGES_SCAN_MAX: u64 = 1024;
const CHANGES_COUNT_MAX: u64 = 1 << 16;

/// A view of the versions in a tree or a snapshot.
#[derive(Debug)]
pub struct Reader<'a, R: Read + ?Sized> {
    read: &'a R,
}

impl<R: Read + ?Sized> Clone for Reader<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: Read + ?Sized> Copy for Reader<'_, R> {}

/// One stored revision. Of a tombstone `kv` has key and mod revision only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revision<'a> {
    pub rev: Rev,
    pub tombstone: bool,
    pub kv: KvRef<'a>,
}

/// Stored revisions in ascending order.
pub struct Revisions<'a, R: Read + ?Sized> {
    read: &'a R,
    cursor: btree::Cursor<'a>,
}

impl<'a, R: Read + ?Sized> Revisions<'a, R> {
    /// The one it stands on; None behind the last.
    pub fn current(&self) -> Option<Revision<'a>> {
        let (key, row) = self.cursor.entry()?;
        let rev = rev_of(key);
        let row = RevRow::decode(rev.main, row, self.read);
        Some(revision(rev, &row, self.read))
    }

    pub fn advance(&mut self) {
        self.cursor.next();
    }
}

impl<'a, R: Read + ?Sized> Reader<'a, R> {
    pub fn new(read: &'a R) -> Self {
        Reader { read }
    }

    /// The newest version of a live key.
    pub fn get(&self, key: &[u8]) -> Option<KeyValue> {
        self.find(key, None).map(|kv| kv.to_owned())
    }

    pub fn get_at(&self, key: &[u8], revision: i64) -> Option<KeyValue> {
        self.find(key, Some(revision)).map(|kv| kv.to_owned())
    }

    /// The version of a key at a revision, None: the newest.
    pub fn find<'k>(&self, key: &'k [u8], at: Option<i64>) -> Option<KvRef<'k>>
    where
        'a: 'k,
    {
        let row = self.read.get(Table::Kv, key).map(KvRow::decode);
        let at = at.unwrap_or(i64::MAX);
        match row {
            Some(row) if row.rev.main <= at => Some(row.with_key(key, self.read)),
            None if at == i64::MAX => None,
            _ => {
                let mut place = Vec::with_capacity(key.len() + 16);
                tables::old_key(&mut place, key, Rev::new(at, u32::MAX));
                let mut cursor = self.read.cursor(Table::Old);
                cursor.seek(&place);
                let (old, kind) = cursor.entry()?;
                let (prefix, rev) = tables::old_parse(old);
                (place.starts_with(prefix) && Kind::decode(kind) == Kind::Put)
                    .then(|| KvRef { key, ..self.stored(rev) })
            }
        }
    }

    /// Every key that lives in the range at a revision (None: now), ascending, until the visitor breaks.
    pub fn scan(
        &self,
        range: &KeyRange,
        at: Option<i64>,
        visit: &mut dyn FnMut(KvRef<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let Some(at) = self.older(at) else { return self.scan_newest(range, visit) };
        if range.is_point() {
            return self.find(&range.start, Some(at)).map_or(Continue(()), visit);
        }
        match self.changed_since(at, range, CHANGES_SCAN_MAX) {
            Some(changed) => self.scan_corrected(range, at, &changed, visit),
            None => self.scan_merged(range, at, visit),
        }
    }

    /// How many keys live in the range at a revision (None: now).
    pub fn count(&self, range: &KeyRange, at: Option<i64>) -> u64 {
        self.count_within(range, at, u64::MAX).expect("no bound was given")
    }

    /// As `count`, but None where more than `keys_max` keys would have to be looked at. The newest keys are counted
    /// without looking at them.
    pub fn count_within(&self, range: &KeyRange, at: Option<i64>, keys_max: u64) -> Option<u64> {
        if range.is_empty() {
            return Some(0);
        }
        let newest = || self.read.count(Table::Kv, &range.start, range.end.as_deref());
        let Some(at) = self.older(at) else { return Some(newest()) };
        if range.is_point() {
            return Some(self.find(&range.start, Some(at)).is_some().into());
        }
        if let Some(changed) = self.changed_since(at, range, CHANGES_COUNT_MAX.min(keys_max)) {
            let mut count = newest();
            for key in &changed {
                count -= u64::from(self.read.get(Table::Kv, key).is_some());
                count += u64::from(self.find(key, Some(at)).is_some());
            }
            return Some(count);
        }
        let mut count = 0;
        let whole = self.scan_merged(range, at, &mut |_| {
            count += 1;
            if count > keys_max { Break(()) } else { Continue(()) }
        });
        whole.is_continue().then_some(count)
    }

    /// Stored revisions from `from` on.
    pub fn revisions(&self, from: Rev) -> Revisions<'a, R> {
        let mut cursor = self.read.cursor(Table::Rev);
        cursor.seek(&from.to_bytes());
        Revisions { read: self.read, cursor }
    }

    /// The participants of a revision that is stored here; none listed if this shard was the only one.
    pub fn rev_record(&self, main: i64) -> Option<Parts> {
        let mut cursor = self.read.cursor(Table::Rev);
        cursor.seek(&Rev::new(main, 0).to_bytes());
        let (key, row) = cursor.entry()?;
        (rev_of(key).main == main).then(|| RevRow::decode(main, row, self.read).parts())
    }

    /// The version of this key that came right after `rev`.
    pub(super) fn successor(&self, key: &[u8], rev: Rev) -> Option<Rev> {
        let mut place = Vec::with_capacity(key.len() + 16);
        tables::old_key(&mut place, key, rev);
        let mut cursor = self.read.cursor(Table::Old);
        if cursor.seek_before(&place)
            && let Some(old) = cursor.key()
        {
            let (prefix, next) = tables::old_parse(old);
            if place.starts_with(prefix) {
                return Some(next);
            }
        }
        let newest = KvRow::decode(self.read.get(Table::Kv, key)?).rev;
        (newest > rev).then_some(newest)
    }

    /// None if the newest versions are those at this revision.
    fn older(&self, at: Option<i64>) -> Option<i64> {
        let at = at?;
        let mut cursor = self.read.cursor(Table::Rev);
        cursor.seek_last();
        cursor.key().is_some_and(|key| rev_of(key).main > at).then_some(at)
    }

    /// The keys of a range that changed after a revision; None if that were more than `changes_max` changes to look
    /// through, or if looking at the range itself is cheaper.
    fn changed_since(&self, at: i64, range: &KeyRange, changes_max: u64) -> Option<BTreeSet<Vec<u8>>> {
        let from = Rev::new(at + 1, 0);
        let changes = self.read.count(Table::Rev, &from.to_bytes(), None);
        // What the range holds now stands for what it held then.
        let keys = || self.read.count(Table::Kv, &range.start, range.end.as_deref());
        if changes > changes_max || (changes > 64 && changes > keys()) {
            return None;
        }
        let mut changed = BTreeSet::new();
        let mut revisions = self.revisions(from);
        while let Some((key, row)) = revisions.cursor.entry() {
            let row = RevRow::decode(rev_of(key).main, row, self.read);
            if range.contains(row.key) && !changed.contains(row.key) {
                changed.insert(row.key.to_vec());
            }
            revisions.advance();
        }
        Some(changed)
    }

    fn scan_newest(
        &self,
        range: &KeyRange,
        visit: &mut dyn FnMut(KvRef<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        if range.is_point() {
            return self.find(&range.start, None).map_or(Continue(()), visit);
        }
        let mut cursor = self.read.cursor(Table::Kv);
        cursor.seek(&range.start);
        while let Some((key, row)) = cursor.entry()
            && before_end(key, range)
        {
            visit(KvRow::decode(row).with_key(key, self.read))?;
            cursor.next();
        }
        Continue(())
    }

    fn scan_corrected(
        &self,
        range: &KeyRange,
        at: i64,
        changed: &BTreeSet<Vec<u8>>,
        visit: &mut dyn FnMut(KvRef<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut changed = changed.iter().peekable();
        let mut cursor = self.read.cursor(Table::Kv);
        cursor.seek(&range.start);
        while let Some((key, row)) = cursor.entry()
            && before_end(key, range)
        {
            while let Some(dead) = changed.next_if(|changed| changed.as_slice() < key) {
                self.find(dead, Some(at)).map_or(Continue(()), &mut *visit)?;
            }
            if changed.next_if(|changed| changed.as_slice() == key).is_some() {
                self.find(key, Some(at)).map_or(Continue(()), &mut *visit)?;
            } else {
                visit(KvRow::decode(row).with_key(key, self.read))?;
            }
            cursor.next();
        }
        for dead in changed {
            self.find(dead, Some(at)).map_or(Continue(()), &mut *visit)?;
        }
        Continue(())
    }

    fn scan_merged(
        &self,
        range: &KeyRange,
        at: i64,
        visit: &mut dyn FnMut(KvRef<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut kv = self.read.cursor(Table::Kv);
        kv.seek(&range.start);
        let mut old = self.read.cursor(Table::Old);
        let mut place = Vec::new();
        tables::old_prefix(&mut place, &range.start);
        old.seek(&place);
        // The user key that `old` stands on; valid while `old` stands on an entry.
        let mut old_user = Vec::new();
        if let Some(key) = old.key() {
            tables::old_unescape(&mut old_user, tables::old_parse(key).0);
        }
        loop {
            let live = kv.entry().filter(|(key, _)| before_end(key, range));
            let has_old = old.key().is_some() && before_end(&old_user, range);
            match live {
                None if !has_old => return Continue(()),
                Some((key, row)) if !has_old || key < old_user.as_slice() => {
                    let row = KvRow::decode(row);
                    if row.rev.main <= at {
                        visit(row.with_key(key, self.read))?;
                    }
                    kv.next();
                    continue;
                }
                _ => {}
            }
            // `old` has versions of the smallest key; the newest of all may stand in `kv`.
            let same = live.filter(|(key, _)| *key == old_user.as_slice());
            let newest = same.map(|(_, row)| KvRow::decode(row)).filter(|row| row.rev.main <= at);
            if let Some(row) = newest {
                visit(row.with_key(&old_user, self.read))?;
            } else if let Some(rev) = self.at_or_below(&mut old, &mut place, at) {
                visit(KvRef { key: &old_user, ..self.stored(rev) })?;
            }
            if same.is_some() {
                kv.next();
            }
            tables::old_key(&mut place, &old_user, Rev::default());
            tables::old_key_end(&mut place);
            old.seek(&place);
            if let Some(key) = old.key() {
                tables::old_unescape(&mut old_user, tables::old_parse(key).0);
            }
        }
    }

    /// From the newest of a key's rows in `old` to the put that was its version at a revision.
    fn at_or_below(&self, old: &mut btree::Cursor<'_>, place: &mut Vec<u8>, at: i64) -> Option<Rev> {
        place.clear();
        place.extend_from_slice(old.key()?);
        if tables::old_parse(place).1.main > at {
            tables::old_key_set_rev(place, Rev::new(at, u32::MAX));
            old.seek(place);
        }
        let (key, kind) = old.entry()?;
        let (prefix, rev) = tables::old_parse(key);
        (place.starts_with(prefix) && Kind::decode(kind) == Kind::Put).then_some(rev)
    }

    /// A put that `old` names; its key is the caller's.
    fn stored(&self, rev: Rev) -> KvRef<'a> {
        match self.read.get(Table::Rev, &rev.to_bytes()) {
            Some(row) => revision(rev, &RevRow::decode(rev.main, row, self.read), self.read).kv,
            None => {
                Fault::Broken(format!("old names revision {}.{}, which is not in rev", rev.main, rev.sub))
                    .raise()
            }
        }
    }
}

fn revision<'a, R: Read + ?Sized>(rev: Rev, row: &RevRow<'a>, read: &'a R) -> Revision<'a> {
    let kv = KvRef {
        key: row.key,
        value: row.put.map_or(&[], |put| put.value.bytes(read)),
        create_revision: row.put.map_or(0, |put| put.create_revision),
        mod_revision: rev.main,
        version: row.put.map_or(0, |put| put.version),
        lease: row.put.map_or(0, |put| put.lease),
    };
    Revision { rev, tombstone: row.put.is_none(), kv }
}

fn before_end(key: &[u8], range: &KeyRange) -> bool {
    range.end.as_ref().is_none_or(|end| key < end.as_ref())
}

pub(super) fn rev_of(key: &[u8]) -> Rev {
    Rev::from_bytes(key)
        .unwrap_or_else(|| Fault::Broken(format!("a key of table Rev cannot be read: {key:02x?}")).raise())
}
