//! What stands in the rows of the five tables: encoding and decoding, nothing else. Format version 1.
//!
//! Integers are LEB128 varints unless a width is given. `BE` orders, `LE` does not need to.
//!
//! ```text
//! kv     key    the user key
//!        value  flags u8 | main | sub | main - create revision | version | [lease u64 LE] | value
//!
//! rev    key    main u64 BE | sub u32 BE
//!        value  flags u8 | [number of participants | shard id ...] | key length | key
//!               and, unless TOMBSTONE:  | main - create revision | version | [lease u64 LE] | value
//!           or  SPILLED u8 | run        the run holds a value as above, for rows that would be too long
//!
//! old    key    user key with 0x00 written as 0x00 0xff | 0x00 0x00 | !main u64 BE | !sub u32 BE
//!        value  kind u8: 0 put, 1 tombstone
//!
//! lease  key    lease id u64 BE | user key
//!        value  empty
//!
//! meta   key    "applied"
//!        value  0 u8 | applied state      or      1 u8 | run that holds it      (see `applied.rs`)
//!
//! flags: 1 LEASE    a lease follows (absent: lease 0)
//!        2 RUN      in place of the value, to the row's end, stands a run; in `kv` the value's length may follow,
//!                   and then the value is that many last bytes of the run, else all of it
//!        4 TOMBSTONE, 8 PARTS (a list of participants follows; absent: this shard alone), 16 SPILLED: `rev` only
//! run:   page u64 LE | length u32 LE
//! ```
//!
//! A value of up to `VALUE_INLINE_BYTES_MAX` bytes stands in `kv` and in `rev`; a longer one stands once, in a run
//! of overflow pages that belongs to the `rev` row and to which both rows point. Rows are at most [`ROW_BYTES_MAX`]
//! long: the head of a `kv` row takes at most 43 bytes, a `rev` row that a long key or many participants would make
//! longer is spilled whole, its value with it. So a `rev` row owns one run at the most, and a `kv` row none.
//!
//! `rev` holds every version that is not compacted; `kv` the newest version of every live key; `old` every version
//! in `rev` that is *not* in `kv`: the superseded puts and all tombstones. So the version of a key at a revision is
//! its `kv` row if that is old enough, else the first row of `old` at or after (key, revision): none or a tombstone
//! means that the key did not live. In `old` the escape makes the end of the user key sort before every longer key,
//! so the versions of one key stand together, newest first, in the order of the keys.

use crate::btree::{OverflowRef, Read, Table};
use crate::model::limits::VALUE_INLINE_BYTES_MAX;
use crate::model::record::Parts;
use crate::model::{Fault, KeyValue, KvRef, Rev, ShardId};

/// What the tree takes as the value of a row.
pub const ROW_BYTES_MAX: usize = VALUE_INLINE_BYTES_MAX + 64;

const _: () = assert!(ROW_BYTES_MAX <= crate::btree::VALUE_MAX);

pub const APPLIED_KEY: &[u8] = b"applied";
pub const PLACE_INLINE: u8 = 0;
pub const PLACE_RUN: u8 = 1;

const LEASE: u8 = 1;
const RUN: u8 = 2;
const TOMBSTONE: u8 = 4;
const PARTS: u8 = 8;
const SPILLED: u8 = 16;

const OLD_TAIL_BYTES: usize = 14;

/// A value in a row: itself, or where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Inline(&'a [u8]),
    /// The last `length` bytes of a run.
    Run {
        run: OverflowRef,
        length: u32,
    },
}

impl<'a> Value<'a> {
    pub fn whole(run: OverflowRef) -> Self {
        Value::Run { run, length: run.len }
    }

    pub fn bytes<R: Read + ?Sized>(self, read: &'a R) -> &'a [u8] {
        match self {
            Value::Inline(bytes) => bytes,
            Value::Run { run, length } => {
                let bytes = read.overflow(run);
                &bytes[bytes.len().saturating_sub(length as usize)..]
            }
        }
    }
}

/// A row of `kv`.
#[derive(Clone, Copy, Debug)]
pub struct KvRow<'a> {
    pub rev: Rev,
    pub create_revision: i64,
    pub version: i64,
    pub lease: i64,
    pub value: Value<'a>,
}

impl<'a> KvRow<'a> {
    pub fn decode(row: &'a [u8]) -> KvRow<'a> {
        Self::parse(row).unwrap_or_else(|| unreadable(Table::Kv, row))
    }

    fn parse(mut row: &'a [u8]) -> Option<KvRow<'a>> {
        let flags = take(&mut row)?;
        let rev = Rev::new(varint(&mut row)? as i64, varint(&mut row)? as u32);
        let (create_revision, version, lease, value) = content(flags, rev.main, row)?;
        Some(KvRow { rev, create_revision, version, lease, value })
    }

    pub fn with_key<'r, R: Read + ?Sized>(&self, key: &'r [u8], read: &'r R) -> KvRef<'r>
    where
        'a: 'r,
    {
        KvRef {
            key,
            value: self.value.bytes(read),
            create_revision: self.create_revision,
            mod_revision: self.rev.main,
            version: self.version,
            lease: self.lease,
        }
    }
}

pub fn encode_kv(row: &mut Vec<u8>, rev: Rev, kv: &KeyValue, value: Value<'_>) {
    row.clear();
    row.push(if matches!(value, Value::Run { .. }) { RUN } else { 0 });
    put_varint(row, rev.main as u64);
    put_varint(row, rev.sub.into());
    put_content(row, rev.main, kv);
    match value {
        Value::Inline(bytes) => row.extend_from_slice(bytes),
        Value::Run { run, length } => {
            row.extend_from_slice(&run.to_bytes());
            if length != run.len {
                put_varint(row, length.into());
            }
        }
    }
}

/// A row of `rev`.
#[derive(Clone, Copy, Debug)]
pub struct RevRow<'a> {
    parts: Option<&'a [u8]>,
    pub key: &'a [u8],
    /// None: a tombstone.
    pub put: Option<Put<'a>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    pub create_revision: i64,
    pub version: i64,
    pub lease: i64,
    pub value: Value<'a>,
}

impl<'a> RevRow<'a> {
    pub fn decode<R: Read + ?Sized>(main: i64, row: &'a [u8], read: &'a R) -> RevRow<'a> {
        Self::parse(main, row, read).unwrap_or_else(|| unreadable(Table::Rev, row))
    }

    fn parse<R: Read + ?Sized>(main: i64, row: &'a [u8], read: &'a R) -> Option<RevRow<'a>> {
        let mut rest = row;
        let mut flags = take(&mut rest)?;
        if flags & SPILLED != 0 {
            rest = read.overflow(OverflowRef::from_bytes(rest)?);
            flags = take(&mut rest)?;
        }
        let mut parts = None;
        if flags & PARTS != 0 {
            let number = varint(&mut rest)?;
            let all = rest;
            for _ in 0..number {
                varint(&mut rest)?;
            }
            parts = Some(&all[..all.len() - rest.len()]);
        }
        let length = usize::try_from(varint(&mut rest)?).ok()?;
        let (key, rest) = rest.split_at_checked(length)?;
        let put = if flags & TOMBSTONE != 0 {
            None
        } else {
            let (create_revision, version, lease, value) = content(flags, main, rest)?;
            Some(Put { create_revision, version, lease, value })
        };
        Some(RevRow { parts, key, put })
    }

    /// The participants that this row names; only the first row of a part over several shards names any.
    pub fn parts(&self) -> Parts {
        let mut rest = self.parts.unwrap_or_default();
        let mut parts = Parts::new();
        while let Some(shard) = varint(&mut rest) {
            parts.push(shard as ShardId);
        }
        parts
    }
}

/// All of a row but its value; `None` is a tombstone.
pub fn encode_rev_head(row: &mut Vec<u8>, main: i64, key: &[u8], put: Option<&KeyValue>, parts: &[ShardId]) {
    row.clear();
    row.push(if put.is_some() { 0 } else { TOMBSTONE });
    if !parts.is_empty() {
        row[0] |= PARTS;
        put_varint(row, parts.len() as u64);
        for &shard in parts {
            put_varint(row, shard.into());
        }
    }
    put_varint(row, key.len() as u64);
    row.extend_from_slice(key);
    if let Some(kv) = put {
        put_content(row, main, kv);
    }
}

/// Completes a head by the run that holds the value.
pub fn push_rev_run(row: &mut Vec<u8>, run: OverflowRef) {
    row[0] |= RUN;
    row.extend_from_slice(&run.to_bytes());
}

/// The row in place of one that is too long.
pub fn encode_spilled(row: &mut Vec<u8>, run: OverflowRef) {
    row.clear();
    row.push(SPILLED);
    row.extend_from_slice(&run.to_bytes());
}

/// The run that a row of any table owns.
pub fn owned_run(table: Table, row: &[u8]) -> Option<OverflowRef> {
    let owns = match table {
        Table::Rev => row.first()? & (RUN | SPILLED) != 0,
        Table::Meta => *row.first()? == PLACE_RUN,
        Table::Kv | Table::Old | Table::Lease => false,
    };
    let place = row.len().checked_sub(OverflowRef::BYTES).filter(|_| owns)?;
    OverflowRef::from_bytes(&row[place..])
}

/// The applied state in its row of `meta`.
pub fn applied_value(row: &[u8]) -> Result<Value<'_>, Fault> {
    match row.split_first() {
        Some((&PLACE_INLINE, bytes)) => Some(Value::Inline(bytes)),
        Some((&PLACE_RUN, bytes)) => OverflowRef::from_bytes(bytes).map(Value::whole),
        _ => None,
    }
    .ok_or_else(|| Fault::Broken("the row of the applied state cannot be read".into()))
}

/// The part of an `old` key that all versions of `key` begin with, and no version of another key.
pub fn old_prefix(old: &mut Vec<u8>, key: &[u8]) {
    old.clear();
    let mut rest = key;
    while let Some(zero) = rest.iter().position(|&byte| byte == 0) {
        old.extend_from_slice(&rest[..=zero]);
        old.push(0xff);
        rest = &rest[zero + 1..];
    }
    old.extend_from_slice(rest);
    old.extend_from_slice(&[0, 0]);
}

pub fn old_key(old: &mut Vec<u8>, key: &[u8], rev: Rev) {
    old_prefix(old, key);
    push_descending(old, rev);
}

/// Replaces the revision in the `old` key of some version of a key by that of another version.
pub fn old_key_set_rev(old: &mut Vec<u8>, rev: Rev) {
    old.truncate(old.len() - (OLD_TAIL_BYTES - 2));
    push_descending(old, rev);
}

/// From the `old` key of some version of a key to what sorts right behind all its versions.
pub fn old_key_end(old: &mut Vec<u8>) {
    old.truncate(old.len() - (OLD_TAIL_BYTES - 1));
    old.push(1);
}

fn push_descending(old: &mut Vec<u8>, rev: Rev) {
    old.extend(rev.to_bytes().map(|byte| !byte));
}

/// The prefix as of [`old_prefix`] and the revision.
pub fn old_parse(old: &[u8]) -> (&[u8], Rev) {
    let parse = || {
        let (prefix, tail) = old.split_at_checked(old.len().checked_sub(OLD_TAIL_BYTES - 2)?)?;
        let mut bytes: [u8; 12] = tail.try_into().ok()?;
        bytes.iter_mut().for_each(|byte| *byte = !*byte);
        Some((prefix, Rev::from_bytes(&bytes)?))
    };
    parse().unwrap_or_else(|| unreadable(Table::Old, old))
}

/// The user key in a prefix as of [`old_prefix`].
pub fn old_unescape(key: &mut Vec<u8>, prefix: &[u8]) {
    key.clear();
    let mut rest = prefix.strip_suffix(&[0, 0]).unwrap_or_else(|| unreadable(Table::Old, prefix));
    while let Some(zero) = rest.iter().position(|&byte| byte == 0) {
        key.extend_from_slice(&rest[..=zero]);
        rest = rest.get(zero + 2..).unwrap_or_else(|| unreadable(Table::Old, prefix));
    }
    key.extend_from_slice(rest);
}

/// What a row of `old` says about its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Put = 0,
    Tombstone = 1,
}

impl Kind {
    pub fn row(self) -> [u8; 1] {
        [self as u8]
    }

    pub fn decode(row: &[u8]) -> Kind {
        match row {
            [0] => Kind::Put,
            [1] => Kind::Tombstone,
            _ => unreadable(Table::Old, row),
        }
    }
}

pub fn lease_key(buffer: &mut Vec<u8>, lease: i64, key: &[u8]) {
    buffer.clear();
    buffer.extend_from_slice(&(lease as u64).to_be_bytes());
    buffer.extend_from_slice(key);
}

/// The user key in a row of `lease` if the row is of this lease.
pub fn lease_user_key(row: &[u8], lease: i64) -> Option<&[u8]> {
    row.strip_prefix(&(lease as u64).to_be_bytes())
}

/// What stands between head and value of a put; the flags are the row's first byte.
fn put_content(row: &mut Vec<u8>, main: i64, kv: &KeyValue) {
    put_varint(row, main.wrapping_sub(kv.create_revision) as u64);
    put_varint(row, kv.version as u64);
    if kv.lease != 0 {
        row[0] |= LEASE;
        row.extend_from_slice(&kv.lease.to_le_bytes());
    }
}

fn content(flags: u8, main: i64, mut row: &[u8]) -> Option<(i64, i64, i64, Value<'_>)> {
    let create_revision = main.wrapping_sub(varint(&mut row)? as i64);
    let version = varint(&mut row)? as i64;
    let mut lease = 0;
    if flags & LEASE != 0 {
        let (bytes, rest) = row.split_first_chunk()?;
        lease = i64::from_le_bytes(*bytes);
        row = rest;
    }
    let value = if flags & RUN == 0 {
        Value::Inline(row)
    } else {
        let (run, mut rest) = row.split_at_checked(OverflowRef::BYTES)?;
        let run = OverflowRef::from_bytes(run)?;
        let length = if rest.is_empty() { run.len } else { varint(&mut rest)? as u32 };
        Value::Run { run, length }
    };
    Some((create_revision, version, lease, value))
}

fn take(row: &mut &[u8]) -> Option<u8> {
    let (first, rest) = row.split_first()?;
    *row = rest;
    Some(*first)
}

pub fn put_varint(row: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        row.push(number as u8 | 0x80);
        number >>= 7;
    }
    row.push(number as u8);
}

pub fn varint(row: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(row)?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

/// The page's checksum was right, so this is no damage of the disk: the row was written wrong.
fn unreadable(table: Table, row: &[u8]) -> ! {
    let head = &row[..row.len().min(64)];
    Fault::Broken(format!("a row of table {table:?} cannot be read: {head:02x?}")).raise()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old(key: &[u8], rev: Rev) -> Vec<u8> {
        let mut bytes = Vec::new();
        old_key(&mut bytes, key, rev);
        bytes
    }

    #[test]
    fn old_keys_sort_by_user_key_then_newest_first() {
        let mut keys: Vec<&[u8]> = vec![
            b"",
            b"\0",
            b"\0\0",
            b"\0\x01",
            b"\0\xff",
            b"\x01",
            b"a",
            b"a\0",
            b"a\0\0",
            b"a\0\xff",
            b"a\0b",
            b"a\x01",
            b"ab",
            b"a\xff",
            b"\xff",
            b"\xff\xff",
        ];
        keys.sort();
        let revs =
            [Rev::new(i64::MAX, u32::MAX), Rev::new(9, 1), Rev::new(9, 0), Rev::new(8, 7), Rev::new(0, 0)];
        let rows: Vec<_> = keys.iter().flat_map(|key| revs.map(|rev| (*key, rev))).collect();
        assert!(rows.is_sorted_by(|a, b| old(a.0, a.1) < old(b.0, b.1)));
        for (key, rev) in rows {
            let bytes = old(key, rev);
            let (prefix, parsed) = old_parse(&bytes);
            let mut user = vec![7];
            old_unescape(&mut user, prefix);
            assert_eq!((user.as_slice(), parsed), (key, rev));
            let mut end = bytes.clone();
            old_key_end(&mut end);
            assert!(bytes < end && old(key, Rev::new(0, 0)) < end);
            assert!(keys.iter().filter(|next| **next > key).all(|next| old(next, revs[0]) > end));
        }
    }

    #[test]
    fn the_longest_head_of_a_kv_row_leaves_room_for_an_inline_value() {
        let kv = KeyValue {
            key: "k".into(),
            create_revision: i64::MIN,
            mod_revision: i64::MAX,
            version: -1,
            value: vec![7; VALUE_INLINE_BYTES_MAX].into(),
            lease: -1,
        };
        let rev = Rev::new(-1, u32::MAX);
        let mut row = Vec::new();
        encode_kv(&mut row, rev, &kv, Value::Inline(&kv.value));
        assert!(row.len() <= ROW_BYTES_MAX);
        let read = KvRow::decode(&row);
        assert_eq!(
            (read.rev, read.create_revision, read.version, read.lease, read.value),
            (rev, i64::MIN, -1, -1, Value::Inline(&kv.value))
        );
    }

    #[test]
    fn varints_keep_every_width_and_end_with_their_input() {
        for number in (0..64).flat_map(|bit| [1_u64 << bit, (1 << bit) - 1, u64::MAX >> bit]) {
            let mut row = Vec::new();
            put_varint(&mut row, number);
            let mut rest = row.as_slice();
            assert_eq!((varint(&mut rest), rest), (Some(number), &[][..]));
            assert_eq!(varint(&mut &row[..row.len() - 1]), None);
        }
        assert_eq!(varint(&mut &[0xff; 11][..]), None);
    }
}
