//! Key ranges in etcd's convention.

use bytes::Bytes;

/// A range of user keys, bytewise order. `end == None` means "to the end of the key space".
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyRange {
    pub start: Bytes,
    pub end: Option<Bytes>,
}

impl KeyRange {
    /// From a request's `key` and `range_end` (etcd: semantics 2.2): empty end = the single key, one zero
    /// byte = open end, otherwise `[key, range_end)`, which is empty when `range_end <= key`.
    pub fn from_request(key: &Bytes, range_end: &Bytes) -> Self {
        let end = match range_end.as_ref() {
            [] => Some(successor(key)),
            [0] => None,
            _ => Some(range_end.clone()),
        };
        KeyRange { start: key.clone(), end }
    }

    pub fn point(key: &Bytes) -> Self {
        KeyRange { start: key.clone(), end: Some(successor(key)) }
    }

    pub fn everything() -> Self {
        KeyRange { start: Bytes::new(), end: None }
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        key >= self.start.as_ref() && self.end.as_ref().is_none_or(|end| key < end.as_ref())
    }

    pub fn is_empty(&self) -> bool {
        self.end.as_ref().is_some_and(|end| end <= &self.start)
    }

    /// True if the range can hold one key at the most: it ends right behind its start.
    pub fn is_point(&self) -> bool {
        self.end.as_ref().is_some_and(|end| {
            end.len() == self.start.len() + 1 && end.starts_with(&self.start) && end[self.start.len()] == 0
        })
    }

    /// The common part; may be empty.
    pub fn intersect(&self, other: &KeyRange) -> KeyRange {
        let start = self.start.clone().max(other.start.clone());
        let end = match (&self.end, &other.end) {
            (Some(a), Some(b)) => Some(a.clone().min(b.clone())),
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        KeyRange { start, end }
    }
}

/// The smallest key greater than `key`.
pub fn successor(key: &[u8]) -> Bytes {
    let mut next = Vec::with_capacity(key.len() + 1);
    next.extend_from_slice(key);
    next.push(0);
    next.into()
}
