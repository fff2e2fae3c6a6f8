//! What evaluation may look at: the *latest* state of the keys it touches, logged but not yet visible changes
//! included (design 3.2), and the states at the revisions before it.
//!
//! [`View`] is what `evaluate` reads; [`Base`] is what a store of applied changes must offer for it. `OwnWrites`
//! lays the writes of one transaction over a view. A view promises that nothing changes below it while it is
//! borrowed. It knows nothing of logs, shards or where pages are.

use crate::btree;
use crate::model::{KeyRange, KeyValue, KvRef, RangeSet};
use crate::mvcc::Reader;
use bytes::Bytes;
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::ops::{Bound, ControlFlow};

/// What a scan calls for each live key, in key order; Break ends the scan.
pub type Visit<'a> = dyn FnMut(KvRef<'_>) -> ControlFlow<()> + 'a;

/// What is known of a live key apart from its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyMeta {
    pub create_revision: i64,
    pub mod_revision: i64,
    pub version: i64,
    pub lease: i64,
}

impl KeyMeta {
    pub fn with(self, key: Bytes, value: Bytes) -> KeyValue {
        let KeyMeta { create_revision, mod_revision, version, lease } = self;
        KeyValue { key, create_revision, mod_revision, version, value, lease }
    }
}

impl From<&KeyValue> for KeyMeta {
    fn from(kv: &KeyValue) -> Self {
        KvRef::from(kv).into()
    }
}

impl From<KvRef<'_>> for KeyMeta {
    fn from(kv: KvRef<'_>) -> Self {
        KeyMeta {
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: kv.lease,
        }
    }
}

/// Reads of applied state. `at: None` is the newest; so is a revision above it.
pub trait Base {
    fn get(&self, key: &[u8]) -> Option<KeyValue>;
    /// As `get`, but need not touch the value, which may stand in pages of its own.
    fn meta(&self, key: &[u8]) -> Option<KeyMeta> {
        self.get(key).as_ref().map(KeyMeta::from)
    }
    fn get_at(&self, key: &[u8], rev: i64) -> Option<KeyValue>;
    fn scan(&self, range: &KeyRange, at: Option<i64>, visit: &mut Visit<'_>);
    /// Live keys in `range`.
    fn count(&self, range: &KeyRange, at: Option<i64>) -> u64;
}

impl<R: btree::Read + ?Sized> Base for Reader<'_, R> {
    fn get(&self, key: &[u8]) -> Option<KeyValue> {
        Reader::get(self, key)
    }

    fn meta(&self, key: &[u8]) -> Option<KeyMeta> {
        self.find(key, None).map(KeyMeta::from)
    }

    fn get_at(&self, key: &[u8], rev: i64) -> Option<KeyValue> {
        Reader::get_at(self, key, rev)
    }

    fn scan(&self, range: &KeyRange, at: Option<i64>, visit: &mut Visit<'_>) {
        // Whether it was ended is known to the visitor.
        let _ = Reader::scan(self, range, at, visit);
    }

    fn count(&self, range: &KeyRange, at: Option<i64>) -> u64 {
        Reader::count(self, range, at)
    }
}

/// The state that a request is evaluated against. `at: None` is the latest state.
pub trait View {
    fn get(&self, key: &[u8]) -> Option<KeyValue>;
    /// As `get`, without the value.
    fn meta(&self, key: &[u8]) -> Option<KeyMeta>;
    fn get_at(&self, key: &[u8], rev: i64) -> Option<KeyValue>;
    fn scan(&self, range: &KeyRange, at: Option<i64>, visit: &mut Visit<'_>);
    fn count(&self, range: &KeyRange, at: Option<i64>) -> u64;
    /// The point p that evaluation has seen: the larger of the last revision taken by the shards involved and
    /// V (design 3, "an answer that changed nothing").
    fn point(&self) -> i64;
    /// The compaction point; -1 if nothing was ever compacted, as etcd has it.
    fn compacted(&self) -> i64;
    fn lease_exists(&self, lease: i64) -> bool;
    /// `range` cut into the pieces of the range map that this view is made of, in key order.
    fn pieces(&self, range: &KeyRange) -> SmallVec<[KeyRange; 1]> {
        smallvec![range.clone()]
    }
}

/// Map bounds of `range`, which must not be empty.
pub(super) fn bounds(range: &KeyRange) -> (Bound<&[u8]>, Bound<&[u8]>) {
    assert!(!range.is_empty(), "an empty range has no bounds");
    let end = range.end.as_ref().map_or(Bound::Unbounded, |end| Bound::Excluded(end.as_ref()));
    (Bound::Included(range.start.as_ref()), end)
}

/// Scans a base with states laid over it, in key order. Of `covered` the base's keys are gone; `over` holds, in
/// key order, the keys of `range` whose state is known without the base (`None`: not alive); `base` scans the
/// range it is given.
pub(super) fn merged_scan<'o>(
    range: &KeyRange,
    covered: &RangeSet,
    over: impl Iterator<Item = (&'o [u8], Option<KvRef<'o>>)>,
    mut base: impl FnMut(&KeyRange, &mut Visit<'_>),
    visit: &mut Visit<'_>,
) {
    let mut over = over.peekable();
    if covered.is_empty() && over.peek().is_none() {
        return base(range, visit);
    }
    for (segment, gone) in covered.segments(range) {
        let mut flow = ControlFlow::Continue(());
        if !gone {
            base(&segment, &mut |kv| {
                flow = visit_merged(&mut over, kv, visit);
                flow
            });
        }
        while flow.is_continue()
            && let Some((_, state)) = over.next_if(|(key, _)| segment.contains(key))
        {
            flow = state.map_or(ControlFlow::Continue(()), &mut *visit);
        }
        if flow.is_break() {
            return;
        }
    }
}

/// Visits what lies over the base before `kv`, then `kv` or what lies over it.
fn visit_merged<'o>(
    over: &mut Peekable<impl Iterator<Item = (&'o [u8], Option<KvRef<'o>>)>>,
    kv: KvRef<'_>,
    visit: &mut Visit<'_>,
) -> ControlFlow<()> {
    while let Some((key, state)) = over.next_if(|(key, _)| *key <= kv.key) {
        if let Some(state) = state {
            visit(state)?;
        }
        if key == kv.key {
            return ControlFlow::Continue(());
        }
    }
    visit(kv)
}

/// A view with the writes of the transaction under way: what a Range after a Put in the same transaction sees
/// (etcd: semantics 5.10). Reads at a revision are reads of the past and see none of them.
pub(super) struct OwnWrites<'v, V> {
    view: &'v V,
    keys: BTreeMap<Bytes, Own>,
    /// Of these, nothing of the view is left; what `keys` holds came later.
    gone: RangeSet,
}

struct Own {
    /// `None`: deleted.
    state: Option<KeyValue>,
    /// The view has the key. Meaningless in `gone`.
    existed: bool,
}

impl<'v, V: View> OwnWrites<'v, V> {
    pub fn new(view: &'v V) -> Self {
        OwnWrites { view, keys: BTreeMap::new(), gone: RangeSet::default() }
    }

    /// `existed`: the key was alive just before.
    pub fn put(&mut self, kv: KeyValue, existed: bool) {
        self.set(kv.key.clone(), Some(kv), existed);
    }

    /// Deletes a key that was alive just before.
    pub fn delete(&mut self, key: Bytes) {
        self.set(key, None, true);
    }

    pub fn delete_range(&mut self, range: &KeyRange) {
        let keys: Vec<Bytes> =
            self.keys.range::<[u8], _>(bounds(range)).map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.keys.remove(&key);
        }
        self.gone.insert(range.clone());
    }

    fn set(&mut self, key: Bytes, state: Option<KeyValue>, existed: bool) {
        match self.keys.get_mut(&key) {
            Some(own) => own.state = state,
            None => {
                self.keys.insert(key, Own { state, existed });
            }
        }
    }

    /// The state of a key that the view does not decide any more.
    fn own(&self, key: &[u8]) -> Option<Option<&KeyValue>> {
        match self.keys.get(key) {
            Some(own) => Some(own.state.as_ref()),
            None => self.gone.contains(key).then_some(None),
        }
    }
}

impl<V: View> View for OwnWrites<'_, V> {
    fn get(&self, key: &[u8]) -> Option<KeyValue> {
        match self.own(key) {
            Some(state) => state.cloned(),
            None => self.view.get(key),
        }
    }

    fn meta(&self, key: &[u8]) -> Option<KeyMeta> {
        match self.own(key) {
            Some(state) => state.map(KeyMeta::from),
            None => self.view.meta(key),
        }
    }

    fn get_at(&self, key: &[u8], rev: i64) -> Option<KeyValue> {
        self.view.get_at(key, rev)
    }

    fn scan(&self, range: &KeyRange, at: Option<i64>, visit: &mut Visit<'_>) {
        if at.is_some() {
            return self.view.scan(range, at, visit);
        }
        if range.is_empty() {
            return;
        }
        let over = self
            .keys
            .range::<[u8], _>(bounds(range))
            .map(|(key, own)| (key.as_ref(), own.state.as_ref().map(KvRef::from)));
        merged_scan(range, &self.gone, over, |range, visit| self.view.scan(range, None, visit), visit);
    }

    fn count(&self, range: &KeyRange, at: Option<i64>) -> u64 {
        if at.is_some() {
            return self.view.count(range, at);
        }
        let mut count = 0;
        for (segment, gone) in self.gone.segments(range) {
            let own = self.keys.range::<[u8], _>(bounds(&segment)).map(|(_, own)| own);
            let live = own.clone().filter(|own| own.state.is_some()).count() as u64;
            count += match gone {
                true => live,
                false => {
                    let replaced = own.filter(|own| own.existed).count() as u64;
                    self.view.count(&segment, None) + live - replaced
                }
            };
        }
        count
    }

    fn point(&self) -> i64 {
        self.view.point()
    }

    fn compacted(&self) -> i64 {
        self.view.compacted()
    }

    fn lease_exists(&self, lease: i64) -> bool {
        self.view.lease_exists(lease)
    }

    fn pieces(&self, range: &KeyRange) -> SmallVec<[KeyRange; 1]> {
        self.view.pieces(range)
    }
}
