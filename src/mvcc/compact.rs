//! Compaction: removes what nobody can read any more once revision C is the oldest readable one.
//!
//! What stays is etcd's (semantics 6.2, trap A3): of each key the newest version at or below C, unless that is a
//! tombstone below C, and everything above C. So the state after compaction to C depends on the history and on C
//! alone, not on the compactions before it.
//!
//! Whatever became removable since the previous point F was superseded, or is a tombstone, in [F, C]; F itself
//! included, for the tombstone that stood exactly there goes now. Removal therefore walks `rev` over [F, C]: each
//! row there makes all older versions of its key removable, which `old` lists right behind it. The row's key knows
//! at most two of them, since older rows of the walk have removed what was behind themselves. One key's rows in
//! `rev` and `old` go together. The place of the walk is part of the applied state; doing a row again does nothing.
//!
//! The expansion of a range record need not be waited for: it writes above C.

use super::applied::Removing;
use super::reader::rev_of;
use super::store::{Progress, Store};
use super::tables::{self, RevRow};
use crate::btree::{Read, Table};
use crate::model::{Fault, Rev};

impl Store {
    /// Makes `revision` the point that removal goes to; smaller ones than wanted before change nothing.
    pub fn compact(&mut self, revision: i64) {
        let compaction = &mut self.applied.compaction;
        compaction.wanted = compaction.wanted.max(revision);
    }

    /// Goes on with the removal, over at most `rows_max` rows of `rev`. `through`: everything of this shard up to
    /// that revision is applied. `Done` means that nothing can be removed before `through` or the wanted point
    /// rises; a point is finished when `applied().compaction.finished` says so.
    pub fn compact_slice(&mut self, through: i64, rows_max: usize) -> Result<Progress, Fault> {
        let compaction = &self.applied.compaction;
        let Removing { target, mut next } = match compaction.removing {
            Some(removing) => removing,
            None if compaction.wanted > compaction.finished && through >= compaction.wanted => {
                Removing { target: compaction.wanted, next: Rev::new(compaction.finished.max(0), 0) }
            }
            None => return Ok(Progress::Done),
        };
        for _ in 0..rows_max.max(1) {
            let row = {
                let mut cursor = self.tree.cursor(Table::Rev);
                cursor.seek(&next.to_bytes());
                cursor.entry().filter(|(key, _)| rev_of(key).main <= target).map(|(key, row)| {
                    let rev = rev_of(key);
                    let row = RevRow::decode(rev.main, row, &self.tree);
                    tables::old_key(&mut self.key, row.key, rev);
                    (rev, row.put.is_none() && rev.main < target)
                })
            };
            let Some((rev, goes_itself)) = row else {
                let compaction = &mut self.applied.compaction;
                compaction.finished = target;
                compaction.removing = None;
                return Ok(if compaction.wanted > target && through >= compaction.wanted {
                    Progress::More
                } else {
                    Progress::Done
                });
            };
            self.remove_versions(rev, goes_itself)?;
            next = Rev::new(rev.main, rev.sub + 1);
        }
        self.applied.compaction.removing = Some(Removing { target, next });
        Ok(Progress::More)
    }

    /// Removes the versions behind the one whose `old` key stands in `self.key`, and that one too if asked.
    fn remove_versions(&mut self, rev: Rev, itself: bool) -> Result<(), Fault> {
        loop {
            let found = {
                let mut cursor = self.tree.cursor(Table::Old);
                cursor.seek(&self.key);
                let version = |old: &[u8]| {
                    let (prefix, found) = tables::old_parse(old);
                    self.key.starts_with(prefix).then_some(found)
                };
                let first = cursor.key().and_then(version);
                if first == Some(rev) && !itself {
                    cursor.next();
                    cursor.key().and_then(version)
                } else {
                    first
                }
            };
            let Some(found) = found else { return Ok(()) };
            let place = found.to_bytes();
            let Some(row) = self.tree.get(Table::Rev, &place) else {
                return Err(Fault::Broken(format!(
                    "old names revision {}.{}, which is not in rev",
                    found.main, found.sub
                )));
            };
            if let Some(run) = tables::owned_run(Table::Rev, row) {
                self.tree.free_overflow(run);
            }
            self.tree.remove(Table::Rev, &place);
            let mut old = std::mem::take(&mut self.key);
            tables::old_key_set_rev(&mut old, found);
            self.tree.remove(Table::Old, &old);
            tables::old_key_set_rev(&mut old, rev);
            self.key = old;
        }
    }
}
