//! HashKV, as etcd defines it (semantics 11.7): a CRC-32C over the revisions that are stored up to R, in their
//! order over all shards, each with the bytes that etcd's `key` bucket would hold for it:
//!
//! ```text
//! key    main u64 BE | '_' | sub u64 BE | 't' if a tombstone
//! value  protobuf mvccpb.KeyValue; of a tombstone the key field only
//! ```
//!
//! Left out is, with C the compaction point: a tombstone at or below C; a put at or below C that is not the version
//! of its key at R, unless no key at all lives at R, and then one that was superseded at or below C. Stated so, the
//! result does not depend on how far removal has got. "No key at all" speaks of the whole store.
//!
//! A walk reads snapshots, step by step, on any thread. It does not know what C and R are allowed to be.

use super::reader::Reader;
use crate::btree::{Read, Snapshot};
use crate::model::{KeyRange, KvRef, Rev};
use prost::encoding::{WireType, encode_key, encode_varint};
use std::collections::VecDeque;
use std::ops::ControlFlow;

/// How many hashes of finished compactions etcd keeps.
const CACHED_MAX: usize = 10;

/// For whom a hash is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// A HashKV request.
    Request,
    /// The cache: R is the new compaction point and C the one before. Here etcd asks whether compaction to R keeps
    /// anything, and that includes a tombstone at R. The snapshots must be from before removal to R began.
    Compaction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvHash {
    pub hash: u32,
    /// R.
    pub revision: i64,
    /// C; -1: never compacted.
    pub compact_revision: i64,
}

/// A HashKV under way over the snapshots of all shards, taken where each had applied everything up to R and was not
/// in the middle of a range record.
pub struct HashWalk<S: Read = Snapshot> {
    snapshots: Vec<S>,
    basis: Basis,
    result: KvHash,
    next: Rev,
    /// Whether rule "not the version at R" is on; found out by the first step.
    prune: Option<bool>,
    row: Vec<u8>,
}

impl<S: Read> HashWalk<S> {
    pub fn new(snapshots: Vec<S>, revision: i64, compact_revision: i64, basis: Basis) -> Self {
        let hash = crc32c::crc32c(b"key");
        let result = KvHash { hash, revision, compact_revision };
        HashWalk { snapshots, basis, result, next: Rev::default(), prune: None, row: Vec::new() }
    }

    /// Hashes up to `rows_max` revisions more; the result when there are no more.
    pub fn step(&mut self, rows_max: usize) -> Option<KvHash> {
        let prune = *self.prune.get_or_insert_with(|| {
            any_key_lives(&self.snapshots, self.result.revision)
                || self.basis == Basis::Compaction && any_tombstone_at(&self.snapshots, self.result.revision)
        });
        let KvHash { revision, compact_revision, .. } = self.result;
        let mut shards: Vec<_> = self
            .snapshots
            .iter()
            .map(|snapshot| {
                let reader = Reader::new(snapshot);
                (reader, reader.revisions(self.next))
            })
            .collect();
        let mut heads: Vec<_> = shards.iter().map(|(_, revisions)| revisions.current()).collect();
        for _ in 0..rows_max.max(1) {
            let first = (0..heads.len())
                .filter(|&shard| heads[shard].is_some())
                .min_by_key(|&shard| heads[shard].map(|head| head.rev));
            let Some((shard, head)) = first
                .and_then(|shard| Some((shard, heads[shard]?)))
                .filter(|(_, head)| head.rev.main <= revision)
            else {
                return Some(self.result);
            };
            let hashed = head.rev.main > compact_revision
                || !head.tombstone && {
                    let successor = shards[shard].0.successor(head.kv.key, head.rev);
                    successor.is_none_or(|next| next.main > if prune { revision } else { compact_revision })
                };
            if hashed {
                self.row.clear();
                raw_key(&mut self.row, head.rev, head.tombstone);
                raw_head(&mut self.row, &head.kv, head.tombstone);
                let hash = crc32c::crc32c_append(self.result.hash, &self.row);
                let hash = if head.tombstone { hash } else { crc32c::crc32c_append(hash, head.kv.value) };
                self.row.clear();
                raw_tail(&mut self.row, &head.kv);
                self.result.hash = crc32c::crc32c_append(hash, &self.row);
            }
            self.next = Rev::new(head.rev.main, head.rev.sub + 1);
            shards[shard].1.advance();
            heads[shard] = shards[shard].1.current();
        }
        None
    }

    /// All of it at once.
    pub fn run(mut self) -> KvHash {
        loop {
            if let Some(hash) = self.step(usize::MAX) {
                return hash;
            }
        }
    }
}

fn any_key_lives<S: Read>(snapshots: &[S], revision: i64) -> bool {
    snapshots.iter().any(|snapshot| {
        let everything = KeyRange::everything();
        Reader::new(snapshot).scan(&everything, Some(revision), &mut |_| ControlFlow::Break(())).is_break()
    })
}

fn any_tombstone_at<S: Read>(snapshots: &[S], revision: i64) -> bool {
    snapshots.iter().any(|snapshot| {
        let mut revisions = Reader::new(snapshot).revisions(Rev::new(revision, 0));
        while let Some(row) = revisions.current().filter(|row| row.rev.main == revision) {
            if row.tombstone {
                return true;
            }
            revisions.advance();
        }
        false
    })
}

fn raw_key(row: &mut Vec<u8>, rev: Rev, tombstone: bool) {
    row.extend_from_slice(&rev.main.to_be_bytes());
    row.push(b'_');
    row.extend_from_slice(&u64::from(rev.sub).to_be_bytes());
    if tombstone {
        row.push(b't');
    }
}

/// The fields of a KeyValue up to the value's length; [`raw_tail`] has those behind the value. The message is
/// written here because its parts are borrowed; zero and empty fields are absent, as proto3 has it.
fn raw_head(row: &mut Vec<u8>, kv: &KvRef<'_>, tombstone: bool) {
    raw_length(row, 1, kv.key);
    row.extend_from_slice(kv.key);
    if !tombstone {
        raw_int(row, 2, kv.create_revision);
        raw_int(row, 3, kv.mod_revision);
        raw_int(row, 4, kv.version);
        raw_length(row, 5, kv.value);
    }
}

fn raw_tail(row: &mut Vec<u8>, kv: &KvRef<'_>) {
    raw_int(row, 6, kv.lease);
}

fn raw_length(row: &mut Vec<u8>, tag: u32, bytes: &[u8]) {
    if !bytes.is_empty() {
        encode_key(tag, WireType::LengthDelimited, row);
        encode_varint(bytes.len() as u64, row);
    }
}

fn raw_int(row: &mut Vec<u8>, tag: u32, number: i64) {
    if number != 0 {
        encode_key(tag, WireType::Varint, row);
        encode_varint(number as u64, row);
    }
}

/// The hashes of the newest finished compactions (semantics 11.7a). In memory only.
#[derive(Clone, Debug, Default)]
pub struct HashCache {
    hashes: VecDeque<KvHash>,
}

impl HashCache {
    /// The hash of a compaction that has finished; compaction points rise.
    pub fn store(&mut self, hash: KvHash) {
        let newest = self.hashes.back().map_or(i64::MIN, |newest| newest.revision);
        assert!(hash.revision > newest, "compaction went from {newest} to {}", hash.revision);
        if self.hashes.len() == CACHED_MAX {
            self.hashes.pop_front();
        }
        self.hashes.push_back(hash);
    }

    /// What a HashKV at exactly this revision is answered with, even if it is compacted by now.
    pub fn get(&self, revision: i64) -> Option<KvHash> {
        self.hashes.iter().find(|hash| hash.revision == revision).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KeyValue;
    use prost::Message;

    #[test]
    fn stored_values_are_those_of_protobuf() {
        let full = KeyValue {
            key: "k\0".into(),
            create_revision: 3,
            mod_revision: 700,
            version: 2,
            value: vec![9; 300].into(),
            lease: -4,
        };
        let bare = KeyValue { value: "".into(), lease: 0, ..full.clone() };
        let tombstone = KeyValue { key: full.key.clone(), ..KeyValue::default() };
        for (kv, is_tombstone) in [(&full, false), (&bare, false), (&tombstone, true)] {
            let mut row = Vec::new();
            raw_head(&mut row, &kv.into(), is_tombstone);
            row.extend_from_slice(&kv.value);
            raw_tail(&mut row, &kv.into());
            assert_eq!(row, kv.encode_to_vec());
        }
    }

    #[test]
    fn the_cache_keeps_the_newest_ten() {
        let mut cache = HashCache::default();
        let hash = |revision| KvHash { hash: revision as u32, revision, compact_revision: revision - 1 };
        for revision in 1..=12 {
            cache.store(hash(revision));
        }
        assert_eq!(cache.get(2), None);
        assert_eq!(cache.get(3), Some(hash(3)));
        assert_eq!(cache.get(12), Some(hash(12)));
        assert_eq!(cache.get(13), None);
    }
}
