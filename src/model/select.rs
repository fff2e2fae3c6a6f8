//! What a Range makes of the live keys of its range: filter, sort, limit, `keys_only`, `more` (etcd: semantics
//! 2.4 to 2.15). One rule for reads of the applied state, reads inside a transaction and reads over several
//! shards. Pure; knows nothing of where the keys stand: they are fed in key order.

use super::{KeyValue, KvRef, Rejection};
use crate::proto::etcdserverpb::{
    RangeRequest, RangeResponse,
    range_request::{SortOrder, SortTarget},
};
use bytes::Bytes;
use std::cmp::Ordering;
use std::ops::ControlFlow;

/// The revision that a plain Range reads: 0 and below is the newest (etcd: semantics 2.4). `compacted` is -1
/// when nothing was ever compacted.
pub fn readable(revision: i64, current: i64, compacted: i64) -> Result<i64, Rejection> {
    match revision {
        r if r > current => Err(Rejection::FutureRev),
        r if r <= 0 => Ok(current),
        r if r < compacted => Err(Rejection::Compacted),
        r => Ok(r),
    }
}

/// Whether a Range inside a transaction may read `revision`. Unlike a plain one, a negative revision is held
/// against the compaction point as it is (etcd: semantics 5.14).
pub fn readable_in_txn(revision: i64, current: i64, compacted: i64) -> Result<(), Rejection> {
    match revision {
        0 => Ok(()),
        r if r > current => Err(Rejection::FutureRev),
        r if r < compacted => Err(Rejection::Compacted),
        _ => Ok(()),
    }
}

/// True if any of the four revision filters is set (etcd: semantics 2.10).
pub fn filters(request: &RangeRequest) -> bool {
    request.min_mod_revision != 0
        || request.max_mod_revision != 0
        || request.min_create_revision != 0
        || request.max_create_revision != 0
}

/// True if etcd takes the keys in the order in which it finds them: ascending, or no order at all.
pub fn default_order(request: &RangeRequest) -> bool {
    request.sort_order == SortOrder::None as i32
        || (request.sort_order == SortOrder::Ascend as i32 && request.sort_target == SortTarget::Key as i32)
}

/// True if the answer, or the way to it, needs the values.
pub fn values(request: &RangeRequest) -> bool {
    !request.count_only && (!request.keys_only || request.sort_target == SortTarget::Value as i32)
}

/// How many keys, in key order, decide the answer (apart from its count): the rest need not be looked at.
/// With order NONE and another target than KEY these are `limit + 1` *before* sorting: a quirk of etcd that
/// clients can see (etcd: semantics 2.13).
pub fn deciding(request: &RangeRequest) -> u64 {
    match request.limit {
        _ if request.count_only => 0,
        limit if limit > 0 && default_order(request) && !filters(request) => limit as u64 + 1,
        _ => u64::MAX,
    }
}

/// The whole answer without its header, from a scan in key order and a count of the range; each is called
/// once at the most, the count only when the scan did not see every key.
pub fn answer(
    request: &RangeRequest,
    scan: impl FnOnce(&mut dyn FnMut(KvRef<'_>) -> ControlFlow<()>),
    count: impl FnOnce() -> u64,
) -> RangeResponse {
    let mut selector = Selector::new(request);
    if request.count_only {
        return selector.finish(count());
    }
    let mut seen = 0;
    let mut cut = false;
    scan(&mut |kv| {
        seen += 1;
        let flow = selector.take(kv);
        cut = flow.is_break();
        flow
    });
    selector.finish(if cut { count() } else { seen })
}

/// Takes keys in key order and keeps those of the answer. Where pieces of a range come from several shards,
/// each piece goes through a selector of its own, and the candidates of all, in key order of the pieces,
/// through one more.
pub struct Selector<'r> {
    request: &'r RangeRequest,
    /// Passed the filters; in key order until [`Selector::shrink`] sorts.
    kvs: Vec<KeyValue>,
    /// The answer's length at most; `None`: unlimited.
    limit: Option<usize>,
    /// Enough once that many are kept, whatever follows.
    enough: usize,
    /// Sort and cut when that many are kept, so that a short answer from a long range stays short.
    shrink_at: usize,
    /// The keys are asked for without values, and no value is needed to sort them.
    bare: bool,
}

impl<'r> Selector<'r> {
    pub fn new(request: &'r RangeRequest) -> Self {
        let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0);
        let plain = default_order(request) && request.sort_target == SortTarget::Key as i32;
        let enough = match limit {
            Some(limit) if plain || deciding(request) != u64::MAX => limit.saturating_add(1),
            _ => usize::MAX,
        };
        let shrink_at = match limit {
            Some(limit) if enough == usize::MAX => limit.saturating_add(1).saturating_mul(2).max(1024),
            _ => usize::MAX,
        };
        let bare = request.keys_only && !values(request);
        Selector { request, kvs: Vec::new(), limit, enough, shrink_at, bare }
    }

    /// Break: no later key changes the answer (its count aside); it would be ignored.
    pub fn take(&mut self, kv: KvRef<'_>) -> ControlFlow<()> {
        if self.passes(kv.mod_revision, kv.create_revision) {
            let kept = match self.bare {
                // etcd answers these from its index, which knows no leases (etcd: semantics 2.9).
                true => KeyValue { lease: 0, ..kv.without_value() },
                false => kv.to_owned(),
            };
            self.keep(kept)
        } else {
            ControlFlow::Continue(())
        }
    }

    /// As [`Selector::take`], without a copy.
    pub fn take_owned(&mut self, kv: KeyValue) -> ControlFlow<()> {
        if self.passes(kv.mod_revision, kv.create_revision) {
            let kept = match self.bare {
                true => KeyValue { lease: 0, value: Bytes::new(), ..kv },
                false => kv,
            };
            self.keep(kept)
        } else {
            ControlFlow::Continue(())
        }
    }

    /// What of this piece can be in the answer; input of another selector of the same request.
    pub fn into_candidates(self) -> Vec<KeyValue> {
        self.kvs
    }

    /// The answer without its header.
    pub fn finish(mut self, count: u64) -> RangeResponse {
        self.sort();
        let more = self.limit.is_some_and(|limit| self.kvs.len() > limit);
        if let Some(limit) = self.limit {
            self.kvs.truncate(limit);
        }
        if self.request.keys_only && !self.bare {
            self.kvs.iter_mut().for_each(|kv| kv.value = Bytes::new());
        }
        RangeResponse { header: None, kvs: self.kvs, more, count: count as i64 }
    }

    fn passes(&self, mod_revision: i64, create_revision: i64) -> bool {
        let r = self.request;
        let within = |revision, min, max| (min == 0 || revision >= min) && (max == 0 || revision <= max);
        within(mod_revision, r.min_mod_revision, r.max_mod_revision)
            && within(create_revision, r.min_create_revision, r.max_create_revision)
    }

    fn keep(&mut self, kv: KeyValue) -> ControlFlow<()> {
        if self.kvs.len() >= self.enough {
            return ControlFlow::Break(());
        }
        self.kvs.push(kv);
        if self.kvs.len() >= self.shrink_at {
            self.shrink();
        }
        if self.kvs.len() >= self.enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Keeps the first `limit + 1` in the asked order. Sorting is stable and keys arrive in order, so what is
    /// dropped here could never come before what is kept.
    fn shrink(&mut self) {
        self.sort();
        let limit = self.limit.expect("only a limited answer shrinks");
        self.kvs.truncate(limit.saturating_add(1));
    }

    /// Ties stay in key order (etcd: semantics 2.12).
    fn sort(&mut self) {
        let descend = self.request.sort_order == SortOrder::Descend as i32;
        let target = SortTarget::try_from(self.request.sort_target).unwrap_or(SortTarget::Key);
        if target == SortTarget::Key && !descend {
            return;
        }
        let order = |a: &KeyValue, b: &KeyValue| -> Ordering {
            match target {
                SortTarget::Key => a.key.cmp(&b.key),
                SortTarget::Version => a.version.cmp(&b.version),
                SortTarget::Create => a.create_revision.cmp(&b.create_revision),
                SortTarget::Mod => a.mod_revision.cmp(&b.mod_revision),
                SortTarget::Value => a.value.cmp(&b.value),
            }
        };
        match descend {
            true => self.kvs.sort_by(|a, b| order(b, a)),
            false => self.kvs.sort_by(order),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

    fn kv(key: &str, create: i64, modified: i64, version: i64, value: &str) -> KeyValue {
        KeyValue {
            key: key.to_owned().into(),
            create_revision: create,
            mod_revision: modified,
            version,
            value: value.to_owned().into(),
            lease: 7,
        }
    }

    fn five() -> Vec<KeyValue> {
        vec![
            kv("a", 2, 9, 4, "v3"),
            kv("b", 3, 3, 1, "v5"),
            kv("c", 4, 8, 2, "v1"),
            kv("d", 5, 5, 1, "v4"),
            kv("e", 6, 7, 2, "v2"),
        ]
    }

    fn run(request: &RangeRequest, kvs: &[KeyValue]) -> RangeResponse {
        answer(
            request,
            |visit| {
                let _ = kvs.iter().try_for_each(|kv| visit(kv.into()));
            },
            || kvs.len() as u64,
        )
    }

    fn keys(response: &RangeResponse) -> String {
        response.kvs.iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned()).collect()
    }

    const KEY: i32 = SortTarget::Key as i32;
    const VERSION: i32 = SortTarget::Version as i32;
    const MOD: i32 = SortTarget::Mod as i32;
    const VALUE: i32 = SortTarget::Value as i32;
    const NONE: i32 = SortOrder::None as i32;
    const ASCEND: i32 = SortOrder::Ascend as i32;
    const DESCEND: i32 = SortOrder::Descend as i32;

    /// etcd: semantics 2.4, and 5.14 for the right column.
    #[test]
    fn readable_revisions() {
        use Rejection::{Compacted, FutureRev};
        for (revision, current, compacted, plain, in_txn) in [
            (0, 9, -1, Ok(9), Ok(())),
            (9, 9, -1, Ok(9), Ok(())),
            (10, 9, -1, Err(FutureRev), Err(FutureRev)),
            (3, 9, 4, Err(Compacted), Err(Compacted)),
            (4, 9, 4, Ok(4), Ok(())),
            (-1, 9, -1, Ok(9), Ok(())),
            (-2, 9, -1, Ok(9), Err(Compacted)),
            (-1, 9, 4, Ok(9), Err(Compacted)),
        ] {
            assert_eq!(readable(revision, current, compacted), plain, "{revision} {current} {compacted}");
            assert_eq!(readable_in_txn(revision, current, compacted), in_txn, "{revision} in a txn");
        }
    }

    /// etcd: semantics 2.6 to 2.8, 2.10, 2.11; trap A10.
    #[test]
    fn count_looks_at_the_range_and_more_at_what_passed_the_filters() {
        let limited = RangeRequest { limit: 2, ..Default::default() };
        let response = run(&limited, &five());
        assert_eq!((keys(&response).as_str(), response.more, response.count), ("ab", true, 5));

        let filtered = RangeRequest { min_mod_revision: 9, ..limited };
        let response = run(&filtered, &five());
        assert_eq!((keys(&response).as_str(), response.more, response.count), ("a", false, 5));

        let exact = RangeRequest { limit: 5, ..Default::default() };
        assert!(!run(&exact, &five()).more);
        let negative = RangeRequest { limit: -1, ..Default::default() };
        assert_eq!(keys(&run(&negative, &five())), "abcde");

        let count = RangeRequest { count_only: true, limit: 1, min_mod_revision: 9, ..Default::default() };
        let response = run(&count, &five());
        assert_eq!((response.kvs.len(), response.more, response.count), (0, false, 5));
    }

    /// etcd: semantics 2.10: bounds are inclusive and combine.
    #[test]
    fn filters_are_inclusive_and_combine() {
        for (request, expected) in [
            (RangeRequest { min_mod_revision: 7, ..Default::default() }, "ace"),
            (RangeRequest { max_mod_revision: 7, ..Default::default() }, "bde"),
            (RangeRequest { min_create_revision: 4, ..Default::default() }, "cde"),
            (RangeRequest { max_create_revision: 4, ..Default::default() }, "abc"),
            (RangeRequest { min_mod_revision: 7, max_create_revision: 4, ..Default::default() }, "ac"),
            (
                RangeRequest {
                    max_mod_revision: 8,
                    min_mod_revision: 7,
                    sort_order: DESCEND,
                    ..Default::default()
                },
                "ec",
            ),
        ] {
            assert_eq!(keys(&run(&request, &five())), expected, "{request:?}");
        }
    }

    /// etcd: semantics 2.12 to 2.14.
    #[test]
    fn sorting() {
        for (order, target, limit, expected, more) in [
            (NONE, KEY, 0, "abcde", false),
            (DESCEND, KEY, 0, "edcba", false),
            (DESCEND, KEY, 2, "ed", true),
            (NONE, MOD, 0, "bdeca", false),
            (ASCEND, MOD, 0, "bdeca", false),
            (DESCEND, MOD, 3, "ace", true),
            (ASCEND, VALUE, 2, "ce", true),
            // Ties in key order, whatever the direction.
            (ASCEND, VERSION, 0, "bdcea", false),
            (DESCEND, VERSION, 0, "acebd", false),
            // 2.13: a, b and c are taken before sorting; the smallest two of them are b and c.
            (NONE, MOD, 2, "bc", true),
            (ASCEND, MOD, 2, "bd", true),
        ] {
            let request =
                RangeRequest { sort_order: order, sort_target: target, limit, ..Default::default() };
            let response = run(&request, &five());
            assert_eq!((keys(&response).as_str(), response.more), (expected, more), "{request:?}");
            assert_eq!(response.count, 5);
        }
        // The quirk of 2.13 ends where filters make etcd fetch everything.
        let request =
            RangeRequest { sort_target: MOD, limit: 2, min_create_revision: 1, ..Default::default() };
        assert_eq!(keys(&run(&request, &five())), "bd");
    }

    /// etcd: semantics 2.9 and 2.14; trap A12.
    #[test]
    fn keys_only_hides_values_and_mostly_leases() {
        let request = RangeRequest { keys_only: true, ..Default::default() };
        let response = run(&request, &five());
        assert!(response.kvs.iter().all(|kv| kv.value.is_empty() && kv.lease == 0 && kv.version > 0));

        let request = RangeRequest { sort_target: VALUE, sort_order: ASCEND, ..request };
        let response = run(&request, &five());
        assert_eq!(keys(&response), "ceadb");
        assert!(response.kvs.iter().all(|kv| kv.value.is_empty() && kv.lease == 7));
    }

    /// Any request gives the same from one selector that saw every key, from one per piece, and from the
    /// textbook: filter all, sort all, cut.
    #[test]
    fn pieces_and_shrinking_change_nothing() {
        let mut rng = SmallRng::seed_from_u64(11);
        for _ in 0..300 {
            let n = *[0, 3, 40, 3000].choose(&mut rng).unwrap();
            let kvs: Vec<KeyValue> = (0..n)
                .map(|i| {
                    let small = rng.random_range(1..6);
                    kv(&format!("{i:05}"), small, rng.random_range(6..12), small, &small.to_string())
                })
                .collect();
            let request = RangeRequest {
                limit: *[0, 1, 2, 39, 40, 1000].choose(&mut rng).unwrap(),
                sort_order: rng.random_range(0..3),
                sort_target: rng.random_range(0..5),
                keys_only: rng.random(),
                count_only: rng.random_ratio(1, 10),
                min_mod_revision: *[0, 0, 8].choose(&mut rng).unwrap(),
                max_create_revision: *[0, 0, 3].choose(&mut rng).unwrap(),
                ..Default::default()
            };
            let whole = run(&request, &kvs);

            let mut merged = Selector::new(&request);
            let cut = rng.random_range(0..=kvs.len());
            for piece in [&kvs[..cut], &kvs[cut..]] {
                let mut selector = Selector::new(&request);
                if !request.count_only {
                    let _ = piece.iter().try_for_each(|kv| selector.take(kv.into()));
                }
                let _ = selector.into_candidates().into_iter().try_for_each(|kv| merged.take_owned(kv));
            }
            assert_eq!(merged.finish(kvs.len() as u64), whole, "{request:?}");
            assert_eq!(textbook(&request, &kvs), whole, "{request:?}");
        }
    }

    fn textbook(request: &RangeRequest, all: &[KeyValue]) -> RangeResponse {
        let count = all.len() as i64;
        if request.count_only {
            return RangeResponse { count, ..Default::default() };
        }
        let limit = if request.limit > 0 { request.limit as usize } else { usize::MAX };
        let mut kvs = all.to_vec();
        if default_order(request) && !filters(request) {
            kvs.truncate(limit.saturating_add(1));
        }
        kvs.retain(|kv| {
            (request.min_mod_revision == 0 || kv.mod_revision >= request.min_mod_revision)
                && (request.max_create_revision == 0 || kv.create_revision <= request.max_create_revision)
        });
        let rank = |kv: &KeyValue| match request.sort_target {
            KEY => kv.key.to_vec(),
            VERSION => kv.version.to_be_bytes().to_vec(),
            MOD => kv.mod_revision.to_be_bytes().to_vec(),
            VALUE => kv.value.to_vec(),
            _ => kv.create_revision.to_be_bytes().to_vec(),
        };
        match request.sort_order {
            DESCEND => kvs.sort_by_key(|kv| std::cmp::Reverse(rank(kv))),
            _ => kvs.sort_by_key(rank),
        }
        let more = kvs.len() > limit;
        kvs.truncate(limit);
        if request.keys_only {
            for kv in &mut kvs {
                kv.value = Bytes::new();
                kv.lease = if request.sort_target == VALUE { kv.lease } else { 0 };
            }
        }
        RangeResponse { header: None, kvs, more, count }
    }
}
