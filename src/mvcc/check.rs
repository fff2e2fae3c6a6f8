//! Walks the tables of a shard and says where they contradict each other: for `etcore check` and for tests. Whether
//! the tree itself is whole is `btree::check`'s to find, and to be found first: here a damaged page raises.

use super::applied::Applied;
use super::reader::rev_of;
use super::tables::{self, Kind, KvRow, RevRow};
use crate::btree::{Read, Table};
use crate::model::{Fault, Rev};

/// Enough to see what kind of damage it is.
const FINDINGS_MAX: usize = 100;

/// The overflow run that a row owns, as `btree::check` wants to know it.
pub fn owned_run(table: Table, _key: &[u8], row: &[u8]) -> Option<crate::btree::OverflowRef> {
    tables::owned_run(table, row)
}

/// What is wrong with the tables; nothing if they agree with each other and with the applied state: the store's, or
/// that of the last checkpoint. Unreadable rows raise.
pub fn check<R: Read>(read: &R, applied: &Applied) -> Vec<String> {
    let mut findings = Vec::new();
    let mut find = |what: String| {
        if findings.len() < FINDINGS_MAX {
            findings.push(what);
        }
    };
    let mut key = Vec::new();
    let mut newest = Rev::default();
    let mut revs = read.cursor(Table::Rev);
    revs.seek(&[]);
    while let Some((place, row)) = revs.entry() {
        let rev = rev_of(place);
        newest = rev;
        let row = RevRow::decode(rev.main, row, read);
        let kind = if row.put.is_some() { Kind::Put } else { Kind::Tombstone };
        let live = read.get(Table::Kv, row.key).map(KvRow::decode);
        tables::old_key(&mut key, row.key, rev);
        let old = read.get(Table::Old, &key).map(Kind::decode);
        match (live.filter(|live| live.rev == rev), row.put) {
            (Some(live), Some(put)) => {
                let same = (live.create_revision, live.version, live.lease)
                    == (put.create_revision, put.version, put.lease)
                    && live.value.bytes(read) == put.value.bytes(read);
                if !same {
                    find(format!("{rev:?}: kv and rev hold different contents of {:02x?}", row.key));
                }
                if old.is_some() {
                    find(format!("{rev:?}: the newest version of {:02x?} stands in old too", row.key));
                }
            }
            (Some(_), None) => find(format!("{rev:?}: kv holds {:02x?}, which is deleted there", row.key)),
            (None, _) if old == Some(kind) => {}
            (None, _) => find(format!("{rev:?}: {kind:?} of {:02x?} stands in old as {old:?}", row.key)),
        }
        if live.is_some_and(|live| live.rev < rev) {
            find(format!("{rev:?}: kv does not hold the newest version of {:02x?}", row.key));
        }
        revs.next();
    }
    // Every row of `rev` was found in one of them, so if there are no more of these they are the same.
    let (rev, kv, old) = (read.len(Table::Rev), read.len(Table::Kv), read.len(Table::Old));
    if rev != kv + old {
        find(format!("{rev} revisions are stored, and kv and old name {kv} and {old}"));
    }
    let mut attached = 0;
    let mut live = read.cursor(Table::Kv);
    live.seek(&[]);
    while let Some((user, row)) = live.entry() {
        let lease = KvRow::decode(row).lease;
        if lease != 0 {
            attached += 1;
            tables::lease_key(&mut key, lease, user);
            if read.get(Table::Lease, &key).is_none() {
                find(format!("lease {lease:x} does not know its key {user:02x?}"));
            }
        }
        live.next();
    }
    let leases = read.len(Table::Lease);
    if leases != attached {
        find(format!("{attached} keys are attached to leases, and leases name {leases}"));
    }
    if applied.position.cursor.is_none() && applied.revision < newest.main {
        find(format!("revision {} is stored and {} applied", newest.main, applied.revision));
    }
    findings
}

/// The applied state as of the last checkpoint.
pub fn applied<R: Read>(read: &R) -> Result<Applied, Fault> {
    match read.get(Table::Meta, tables::APPLIED_KEY) {
        None => Ok(Applied::default()),
        Some(row) => Applied::decode(tables::applied_value(row)?.bytes(read)),
    }
}
