//! The range map: which shard owns which keys.
//!
//! The map is data with a version; it is kept in the meta group, and every core holds a copy of the one of its
//! reign. It covers the whole key space without gaps or overlaps. Does not know where a shard runs.

use crate::model::{KeyRange, ShardId};
use bytes::{Buf, BufMut, Bytes, BytesMut};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeMap {
    pub version: u64,
    /// Piece i owns the keys from `starts[i]` (the first is empty) to `starts[i + 1]`.
    starts: Vec<Bytes>,
    owners: Vec<ShardId>,
}

/// Where the default map may cut, in the order of key space, with the weight of what lies between a point and
/// the next. ASCII keys are spread by their first letter; the prefixes that a Kubernetes API server writes
/// under `/registry/` by what they carry in large clusters: events, leases, pods and secrets most.
const DEFAULT_POINTS: &[(&str, u32)] = &[
    ("", 2),
    ("/", 1),
    ("/registry/a", 2),
    ("/registry/configmaps/", 4),
    ("/registry/d", 3),
    ("/registry/events/", 4),
    ("/registry/events/k", 4),
    ("/registry/f", 2),
    ("/registry/leases/", 4),
    ("/registry/leases/kube-node-lease/m", 4),
    ("/registry/m", 4),
    ("/registry/pods/", 4),
    ("/registry/pods/g", 4),
    ("/registry/pods/n", 4),
    ("/registry/q", 3),
    ("/registry/secrets/", 4),
    ("/registry/services/", 4),
    ("/registry/t", 2),
    ("0", 4),
    ("5", 4),
    ("A", 4),
    ("N", 4),
    ("a", 4),
    ("d", 4),
    ("g", 4),
    ("k", 8),
    ("m", 6),
    ("p", 6),
    ("s", 6),
    ("v", 4),
];

impl RangeMap {
    /// The first map of a store: shard i + 1 owns the keys from split i on. `splits` ascending, none empty.
    pub fn from_splits(splits: &[Bytes]) -> Result<Self, String> {
        let mut starts = vec![Bytes::new()];
        for split in splits {
            if split <= &starts[starts.len() - 1] {
                return Err(format!(
                    "shard splits must be non-empty and ascending; {:?} is not above {:?}",
                    split,
                    starts[starts.len() - 1]
                ));
            }
            starts.push(split.clone());
        }
        let owners = (1..=starts.len() as ShardId).collect();
        Ok(RangeMap { version: 1, starts, owners })
    }

    /// The documented default for `shards` shards: cuts the table above into pieces of about equal weight;
    /// where there are more shards than points, the letters are divided further.
    pub fn default_for(shards: usize) -> Self {
        let total: u32 = DEFAULT_POINTS.iter().map(|(_, weight)| weight).sum();
        let mut splits: Vec<Bytes> = Vec::new();
        let mut before = 0;
        for (point, weight) in DEFAULT_POINTS {
            let due = (splits.len() as u64 + 1) * total as u64;
            if splits.len() + 1 < shards && !point.is_empty() && before as u64 * shards as u64 >= due {
                splits.push(Bytes::from_static(point.as_bytes()));
            }
            before += weight;
        }
        let mut letters = (b'b'..=b'z').flat_map(|a| (b'a'..=b'z').map(move |b| Bytes::from(vec![a, b])));
        while splits.len() + 1 < shards {
            let split = match letters.next() {
                Some(split) => split,
                None => Bytes::from(vec![0xff; splits.len()]),
            };
            if !splits.contains(&split) {
                splits.push(split);
            }
        }
        splits.sort();
        Self::from_splits(&splits).expect("the table ascends")
    }

    /// The number of shards: the highest owner.
    pub fn shards(&self) -> usize {
        self.owners.iter().copied().max().unwrap_or(0) as usize
    }

    fn piece_of(&self, key: &[u8]) -> usize {
        self.starts.partition_point(|start| start.as_ref() <= key) - 1
    }

    pub fn shard_of(&self, key: &[u8]) -> ShardId {
        self.owners[self.piece_of(key)]
    }

    /// The parts of a range with their owners, in the order of keys; together exactly the range. None for an
    /// empty range.
    pub fn pieces(&self, range: &KeyRange) -> impl Iterator<Item = (KeyRange, ShardId)> {
        let first = if range.is_empty() { self.starts.len() } else { self.piece_of(&range.start) };
        (first..self.starts.len())
            .map(|i| (self.piece(i).intersect(range), self.owners[i]))
            .take_while(|(piece, _)| !piece.is_empty())
    }

    fn piece(&self, i: usize) -> KeyRange {
        KeyRange { start: self.starts[i].clone(), end: self.starts.get(i + 1).cloned() }
    }

    /// What one shard owns.
    pub fn owned(&self, shard: ShardId) -> Vec<KeyRange> {
        (0..self.starts.len()).filter(|i| self.owners[*i] == shard).map(|i| self.piece(i)).collect()
    }

    /// ```text
    ///   version u64 | pieces u32 | { owner u16 | length u32 | start }   little endian
    /// ```
    pub fn to_bytes(&self) -> Bytes {
        let mut out = BytesMut::new();
        out.put_u64_le(self.version);
        out.put_u32_le(self.starts.len() as u32);
        for (start, owner) in self.starts.iter().zip(&self.owners) {
            out.put_u16_le(*owner);
            out.put_u32_le(start.len() as u32);
            out.put_slice(start);
        }
        out.freeze()
    }

    /// The inverse of [`RangeMap::to_bytes`]; `None` if the bytes are no map that covers the key space.
    pub fn from_bytes(mut bytes: Bytes) -> Option<Self> {
        let version = bytes.try_get_u64_le().ok()?;
        let count = bytes.try_get_u32_le().ok()?;
        let (mut starts, mut owners) = (Vec::<Bytes>::new(), Vec::new());
        for i in 0..count {
            owners.push(bytes.try_get_u16_le().ok().filter(|owner| *owner > 0)?);
            let length = bytes.try_get_u32_le().ok()? as usize;
            if length > bytes.remaining() || (i == 0) != (length == 0) {
                return None;
            }
            let start = bytes.split_to(length);
            if starts.last().is_some_and(|last| *last >= start) {
                return None;
            }
            starts.push(start);
        }
        (!starts.is_empty() && !bytes.has_remaining()).then_some(RangeMap { version, starts, owners })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(s: &str) -> Bytes {
        Bytes::copy_from_slice(s.as_bytes())
    }

    fn map() -> RangeMap {
        RangeMap::from_splits(&[key("b"), key("m")]).unwrap()
    }

    #[test]
    fn every_key_has_one_owner_and_a_split_belongs_to_its_right() {
        let map = map();
        let owner = |s: &str| map.shard_of(s.as_bytes());
        assert_eq!(
            [owner(""), owner("a"), owner("b"), owner("lzz"), owner("m"), owner("\u{7f}")],
            [1, 1, 2, 2, 3, 3]
        );
    }

    #[test]
    fn pieces_cover_a_range_exactly() {
        let range = KeyRange { start: key("a"), end: Some(key("n")) };
        let pieces: Vec<_> = map().pieces(&range).collect();
        let want = [("a", "b", 1), ("b", "m", 2), ("m", "n", 3)];
        assert_eq!(pieces.len(), 3);
        for ((piece, shard), (start, end, owner)) in pieces.iter().zip(want) {
            assert_eq!((piece.start.clone(), piece.end.clone(), *shard), (key(start), Some(key(end)), owner));
        }
        let up_to_a_split = KeyRange { start: key("a"), end: Some(key("b")) };
        assert_eq!(map().pieces(&up_to_a_split).count(), 1);
        assert_eq!(map().pieces(&KeyRange::everything()).last().unwrap().0.end, None);
        assert_eq!(map().pieces(&KeyRange { start: key("z"), end: Some(key("a")) }).count(), 0);
    }

    #[test]
    fn splits_that_do_not_ascend_are_refused() {
        assert!(RangeMap::from_splits(&[key("m"), key("b")]).is_err());
        assert!(RangeMap::from_splits(&[key("b"), key("b")]).is_err());
        assert!(RangeMap::from_splits(&[key("")]).is_err());
    }

    #[test]
    fn the_default_map_has_as_many_shards_as_asked_and_spreads() {
        for shards in 1..=64 {
            assert_eq!(RangeMap::default_for(shards).shards(), shards, "{shards}");
        }
        let two = RangeMap::default_for(2);
        assert_ne!(two.shard_of(b"/registry/pods/a"), two.shard_of(b"key1"));
        let four = RangeMap::default_for(4);
        let owners: std::collections::BTreeSet<_> =
            ["/registry/configmaps/a", "/registry/pods/z", "Key", "user"]
                .map(|k| four.shard_of(k.as_bytes()))
                .into();
        assert!(owners.len() >= 3, "{owners:?}");
    }

    #[test]
    fn bytes_round_trip_and_garbage_is_refused() {
        let map = RangeMap::default_for(7);
        let bytes = map.to_bytes();
        assert_eq!(RangeMap::from_bytes(bytes.clone()), Some(map));
        for cut in 0..bytes.len() {
            assert_eq!(RangeMap::from_bytes(bytes.slice(..cut)), None);
        }
    }
}
