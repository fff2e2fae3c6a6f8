//! A Range over the shards it touches: what one shard contributes, and how the contributions, in the order of their
//! keys, become one answer. What a Range makes of its keys is `model::select`'s rule; here is how far a shard has
//! to look for it, and the count, which nothing but the range and the revision decides (etcd: semantics 2.6).
//!
//! Knows nothing of revisions that must be refused, nor of headers.

use super::reader::Reader;
use crate::btree::Read;
use crate::model::limits::{READ_ON_CORE_BYTES_MAX, READ_ON_CORE_KEYS_MAX};
use crate::model::select::{self, Selector};
use crate::model::{KeyRange, KeyValue, KvRef};
use crate::proto::etcdserverpb as pb;
use std::ops::ControlFlow::{self, Break};

/// How much a read may look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub keys: u64,
    /// Of keys and values together.
    pub bytes: u64,
}

impl Budget {
    pub const UNBOUNDED: Budget = Budget { keys: u64::MAX, bytes: u64::MAX };
    pub const ON_CORE: Budget =
        Budget { keys: READ_ON_CORE_KEYS_MAX as u64, bytes: READ_ON_CORE_BYTES_MAX as u64 };
}

/// What one shard contributes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// Keys of which the answer consists if no other shard has better ones; not the answer.
    pub candidates: Vec<KeyValue>,
    /// Live keys in the shard's part of the range.
    pub count: u64,
}

/// Where a range is read: a shard's tables, or those with what is not applied yet laid over them.
pub trait Source {
    /// Every key that lives in the range at a revision (None: now), ascending, until the visitor breaks.
    fn scan(
        &self,
        range: &KeyRange,
        at: Option<i64>,
        visit: &mut dyn FnMut(KvRef<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()>;

    /// How many there are; None if it would take a look at more than `keys_max` of them.
    fn count_within(&self, range: &KeyRange, at: Option<i64>, keys_max: u64) -> Option<u64>;
}

impl<R: Read + ?Sized> Source for Reader<'_, R> {
    fn scan(
        &self,
        range: &KeyRange,
        at: Option<i64>,
        visit: &mut dyn FnMut(KvRef<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        Reader::scan(self, range, at, visit)
    }

    fn count_within(&self, range: &KeyRange, at: Option<i64>, keys_max: u64) -> Option<u64> {
        Reader::count_within(self, range, at, keys_max)
    }
}

/// The contribution of a shard: `range` is the part of the requested range that lies in it, `at` the revision to
/// read (None: the newest versions). Without `count` the range is not counted. None: the budget does not suffice;
/// ask again with a larger one where that disturbs nobody.
pub fn piece(
    source: impl Source,
    request: &pb::RangeRequest,
    range: &KeyRange,
    at: Option<i64>,
    count: bool,
    budget: Budget,
) -> Option<Piece> {
    let mut selector = Selector::new(request);
    let mut left = budget;
    let mut seen = None;
    if !request.count_only {
        let values = select::values(request);
        let mut looked = 0;
        let mut exhausted = false;
        let whole = source.scan(range, at, &mut |kv| {
            let bytes = kv.key.len() + if values { kv.value.len() } else { 0 };
            match (left.keys.checked_sub(1), left.bytes.checked_sub(bytes as u64)) {
                (Some(keys), Some(bytes)) => left = Budget { keys, bytes },
                _ => {
                    exhausted = true;
                    return Break(());
                }
            }
            looked += 1;
            selector.take(kv)
        });
        if exhausted {
            return None;
        }
        seen = whole.is_continue().then_some(looked);
    }
    let count = match (count, seen) {
        (false, _) => 0,
        (true, Some(seen)) => seen,
        (true, None) => source.count_within(range, at, left.keys)?,
    };
    Some(Piece { candidates: selector.into_candidates(), count })
}

/// The answer made of the pieces of all shards that the range touches, in the order of the range map. Where
/// `select::deciding` keys were found already, a shard behind need only be asked for its count (`count_only`).
/// The header is the caller's.
pub fn assemble(pieces: impl IntoIterator<Item = Piece>, request: &pb::RangeRequest) -> pb::RangeResponse {
    let mut selector = Selector::new(request);
    let mut count = 0;
    for piece in pieces {
        count += piece.count;
        for kv in piece.candidates {
            if selector.take_owned(kv).is_break() {
                break;
            }
        }
    }
    selector.finish(count)
}
