//! A set of keys made of ranges: what a few range deletions cover. Ranges that meet are joined, so a lookup is
//! one search however many were inserted. Knows nothing of what the keys stand for.

use super::KeyRange;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Bound;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// Start to end, `None` being open; disjoint, not empty, no two of them touching.
    ranges: BTreeMap<Bytes, Option<Bytes>>,
}

impl RangeSet {
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    pub fn insert(&mut self, range: KeyRange) {
        if range.is_empty() {
            return;
        }
        let KeyRange { mut start, mut end } = range;
        if let Some((before, reach)) = self.ranges.range::<Bytes, _>(..=&start).next_back()
            && reach.as_ref().is_none_or(|reach| *reach >= start)
        {
            start = before.clone();
            end = furthest(end, reach.clone());
        }
        loop {
            let bound = match &end {
                Some(end) => Bound::Included(end),
                None => Bound::Unbounded,
            };
            let Some((met, reach)) = self.ranges.range::<Bytes, _>((Bound::Included(&start), bound)).next()
            else {
                break;
            };
            let met = met.clone();
            end = furthest(end, reach.clone());
            self.ranges.remove(&met);
        }
        self.ranges.insert(start, end);
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        self.ranges
            .range::<[u8], _>((Bound::Unbounded, Bound::Included(key)))
            .next_back()
            .is_some_and(|(_, end)| end.as_ref().is_none_or(|end| key < end.as_ref()))
    }

    pub fn iter(&self) -> impl Iterator<Item = KeyRange> + '_ {
        self.ranges.iter().map(|(start, end)| KeyRange { start: start.clone(), end: end.clone() })
    }

    /// Cuts `range` where the set begins and ends in it: pieces in key order, true if the set holds them.
    pub fn segments(&self, range: &KeyRange) -> Vec<(KeyRange, bool)> {
        if range.is_empty() {
            return Vec::new();
        }
        let mut segments = Vec::new();
        // From `at` on, `range` is not yet dealt with.
        let mut at = range.start.clone();
        let first = self.ranges.range::<Bytes, _>(..=&range.start).next_back();
        let later = self.ranges.range::<Bytes, _>((Bound::Excluded(&range.start), Bound::Unbounded));
        for (start, end) in first.into_iter().chain(later) {
            let held = KeyRange { start: start.clone(), end: end.clone() }.intersect(range);
            if held.is_empty() {
                continue;
            }
            if at < held.start {
                segments.push((KeyRange { start: at, end: Some(held.start.clone()) }, false));
            }
            let next = held.end.clone();
            segments.push((held, true));
            match next {
                Some(next) => at = next,
                None => return segments,
            }
        }
        let rest = KeyRange { start: at, end: range.end.clone() };
        if !rest.is_empty() {
            segments.push((rest, false));
        }
        segments
    }
}

fn furthest(a: Option<Bytes>, b: Option<Bytes>) -> Option<Bytes> {
    Some(a?.max(b?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::SmallRng};

    /// Against a plain set of one-byte keys.
    #[test]
    fn agrees_with_a_set_of_keys() {
        let mut rng = SmallRng::seed_from_u64(5);
        let random_range = |rng: &mut SmallRng| {
            let start = Bytes::from(vec![rng.random_range(0..20u8)]);
            let end = rng.random_ratio(9, 10).then(|| Bytes::from(vec![rng.random_range(0..22u8)]));
            KeyRange { start, end }
        };
        for _ in 0..500 {
            let mut set = RangeSet::default();
            let mut plain = [false; 22];
            for _ in 0..rng.random_range(0..5) {
                let range = random_range(&mut rng);
                for key in 0..22u8 {
                    plain[key as usize] |= range.contains(&[key]);
                }
                set.insert(range);
            }
            for key in 0..22u8 {
                assert_eq!(set.contains(&[key]), plain[key as usize], "{key} in {set:?}");
            }
            let asked = random_range(&mut rng);
            let mut at = (!asked.is_empty()).then(|| asked.start.clone());
            for (segment, held) in set.segments(&asked) {
                assert_eq!(Some(&segment.start), at.as_ref(), "segments follow each other");
                assert!(!segment.is_empty());
                for key in (0..22u8).filter(|key| segment.contains(&[*key])) {
                    assert_eq!(held, plain[key as usize]);
                }
                at = segment.end;
            }
            assert!(asked.is_empty() || at == asked.end, "segments end where the range does");
            let joined: Vec<_> = set.iter().collect();
            assert!(joined.windows(2).all(|pair| pair[0].end.as_ref().unwrap() < &pair[1].start));
        }
    }
}
