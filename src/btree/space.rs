//! Which pages of the file are free. It prefers low numbers, so that the file stays short. It does not know what
//! the pages hold, nor how the bitmap reaches the disk.
//!
//! A page is *live* while the current state refers to it. When it no longer does, an older durable state or a
//! snapshot may: then it is *retired*, and handed out again only when both are gone. A page retired while
//! generation g was worked on is in no meta page from g on; since the last two are kept, it may be written again
//! for generation g + 2.

use std::collections::VecDeque;

use super::page::u64_at;

#[derive(Debug)]
struct Retired {
    page: u32,
    pages: u32,
    generation: u64,
    /// Snapshots with a smaller number may still read it.
    pin: u64,
}

/// One bit per page; what lies beyond the words is zero.
#[derive(Debug, Default, Clone)]
struct Bits {
    words: Vec<u64>,
}

impl Bits {
    fn get(&self, page: u32) -> bool {
        self.words.get(page as usize / 64).is_some_and(|word| word >> (page % 64) & 1 != 0)
    }

    fn set(&mut self, page: u32, value: bool) {
        let at = page as usize / 64;
        if at >= self.words.len() {
            self.words.resize(at + 1, 0);
        }
        let bit = 1 << (page % 64);
        if value {
            self.words[at] |= bit;
        } else {
            self.words[at] &= !bit;
        }
    }

    /// The first page from this one on whose bit is set; none: `end`.
    fn next_set(&self, page: u32, end: u32) -> u32 {
        let mut at = page as usize / 64;
        let mut mask = !0 << (page % 64);
        while at < self.words.len() && at * 64 < end as usize {
            let word = self.words[at] & mask;
            if word != 0 {
                return (at as u32 * 64 + word.trailing_zeros()).min(end);
            }
            (at, mask) = (at + 1, !0);
        }
        end
    }
}

#[derive(Debug)]
pub struct Space {
    live: Bits,
    /// Live or retired.
    taken: Bits,
    /// One bit per word of `taken` that has no zero left.
    full: Bits,
    /// No word of `taken` before this one has a zero.
    hint: usize,
    /// One past the highest page ever taken.
    pages: u32,
    pages_max: u32,
    live_pages: u64,
    retired: VecDeque<Retired>,
}

impl Space {
    /// Everything free but the two meta pages.
    pub fn new(pages_max: u32) -> Space {
        let mut space = Space {
            live: Bits::default(),
            taken: Bits::default(),
            full: Bits::default(),
            hint: 0,
            pages: 0,
            pages_max,
            live_pages: 0,
            retired: VecDeque::new(),
        };
        space.take(0, 2);
        space
    }

    /// The space of generation `generation`, newest of a file, as its bitmap says; pages that only the bitmap of
    /// the generation before has are retired.
    pub fn restore(bitmap: &[u8], before: Option<&[u8]>, generation: u64, pages_max: u32) -> Space {
        let mut space = Space::new(pages_max);
        each_bit(bitmap, |page| {
            if !space.live.get(page) {
                space.take(page, 1);
            }
        });
        each_bit(before.unwrap_or(&[]), |page| {
            if !space.live.get(page) {
                space.take(page, 1);
                space.retire(page, 1, generation, 0);
            }
        });
        space
    }

    /// One past the highest page ever taken.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    pub fn live_pages(&self) -> u64 {
        self.live_pages
    }

    pub fn is_live(&self, page: u32) -> bool {
        self.live.get(page)
    }

    /// The live pages as bits, page n in bit n % 8 of byte n / 8.
    pub fn bitmap(&self) -> Vec<u8> {
        let words = self.pages.div_ceil(64) as usize;
        self.live.words[..words].iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Bytes of `bitmap` once this many more pages are taken at the end.
    pub fn bitmap_len(&self, more: u32) -> usize {
        (self.pages + more).div_ceil(64) as usize * 8
    }

    /// The lowest pages in a row that are free; None if the file may not grow that far.
    pub fn alloc(&mut self, pages: u32) -> Option<u32> {
        let mut from = self.next_free(0);
        loop {
            let end = from.checked_add(pages).filter(|&end| end <= self.pages_max)?;
            let taken = self.taken.next_set(from, end);
            if taken == end {
                break;
            }
            from = self.next_free(taken);
        }
        self.take(from, pages);
        Some(from)
    }

    /// The first free page from this one on.
    fn next_free(&mut self, page: u32) -> u32 {
        let words = &self.taken.words;
        let first = (page as usize / 64).max(self.hint);
        let free_from = |at: usize, page: u32| {
            let skipped = if at == page as usize / 64 { (1u64 << (page % 64)) - 1 } else { 0 };
            let word = words[at] | skipped;
            (word != !0).then(|| at as u32 * 64 + word.trailing_ones())
        };
        let mut at = first;
        while at < words.len() {
            if at.is_multiple_of(64) && self.full.words.get(at / 64) == Some(&!0) {
                at += 64;
                continue;
            }
            if let Some(free) = free_from(at, page) {
                if (page as usize) <= self.hint * 64 {
                    self.hint = at;
                }
                return free;
            }
            at += 1;
        }
        if (page as usize) <= self.hint * 64 {
            self.hint = words.len();
        }
        (words.len() as u32 * 64).max(page)
    }

    fn take(&mut self, page: u32, pages: u32) {
        for page in page..page + pages {
            assert!(!self.taken.get(page), "a page is taken once");
            self.taken.set(page, true);
            self.live.set(page, true);
            let at = page / 64;
            if self.taken.words[at as usize] == !0 {
                self.full.set(at, true);
            }
        }
        self.pages = self.pages.max(page + pages);
        self.live_pages += u64::from(pages);
    }

    fn untake(&mut self, page: u32, pages: u32) {
        for page in page..page + pages {
            self.taken.set(page, false);
            self.full.set(page / 64, false);
        }
        self.hint = self.hint.min(page as usize / 64);
    }

    fn bury(&mut self, page: u32, pages: u32) {
        for page in page..page + pages {
            assert!(self.live.get(page), "only a live page is given up");
            self.live.set(page, false);
        }
        self.live_pages -= u64::from(pages);
    }

    /// Gives up pages that no durable state and no snapshot has ever seen.
    pub fn free(&mut self, page: u32, pages: u32) {
        self.bury(page, pages);
        self.untake(page, pages);
    }

    /// Gives up pages that an earlier state may refer to.
    pub fn retire(&mut self, page: u32, pages: u32, generation: u64, pin: u64) {
        self.bury(page, pages);
        self.retired.push_back(Retired { page, pages, generation, pin });
    }

    /// Frees what was retired before: `generation` is worked on now, `pin` is the oldest snapshot.
    pub fn release(&mut self, generation: u64, pin: Option<u64>) {
        #[cfg(feature = "mutations")]
        let generation = if crate::model::mutation::on(crate::model::mutation::Mutation::PagesReusedAtOnce) {
            generation + 2
        } else {
            generation
        };
        while let Some(first) = self.retired.front() {
            let pinned = pin.is_some_and(|pin| pin < first.pin);
            if first.generation + 2 > generation || pinned {
                return;
            }
            let Retired { page, pages, .. } = *first;
            self.retired.pop_front();
            self.untake(page, pages);
        }
    }
}

/// The pages that a bitmap has, rising.
pub fn each_bit(bitmap: &[u8], mut each: impl FnMut(u32)) {
    for at in 0..bitmap.len() / 8 {
        let mut word = u64_at(bitmap, at * 8);
        while word != 0 {
            each(at as u32 * 64 + word.trailing_zeros());
            word &= word - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_pages_first_and_runs_in_one_piece() {
        let mut space = Space::new(1000);
        let pages: Vec<u32> = (0..200).map(|_| space.alloc(1).expect("room")).collect();
        assert_eq!(pages, (2..202).collect::<Vec<_>>());
        space.free(10, 1);
        space.free(60, 9);
        assert_eq!(space.alloc(9), Some(60));
        assert_eq!(space.alloc(2), Some(202), "one free page holds no run of two");
        assert_eq!(space.alloc(1), Some(10));
        assert_eq!(space.alloc(900), None, "beyond the reserved range");
        assert_eq!(space.alloc(796), Some(204));
        assert_eq!(space.alloc(1), None);
        assert_eq!(space.live_pages(), 1000);
    }

    #[test]
    fn retired_pages_wait_for_two_checkpoints_and_for_snapshots() {
        let mut space = Space::new(1000);
        assert_eq!(space.alloc(3), Some(2));
        space.retire(2, 1, 5, 0);
        space.retire(3, 1, 5, 8);
        space.release(6, None);
        assert_eq!(space.alloc(1), Some(5));
        space.release(7, Some(7));
        assert_eq!((space.alloc(1), space.alloc(1)), (Some(2), Some(6)), "snapshot 7 may read page 3");
        space.release(7, Some(8));
        assert_eq!(space.alloc(1), Some(3));
    }

    #[test]
    fn a_restored_space_keeps_what_either_state_uses() {
        let mut space = Space::new(10_000);
        assert_eq!(space.alloc(200), Some(2));
        let before = space.bitmap();
        space.retire(100, 1, 3, 0);
        let newest = space.bitmap();
        let mut space = Space::restore(&newest, Some(&before), 3, 10_000);
        assert_eq!((space.live_pages(), space.alloc(1)), (201, Some(202)));
        space.release(5, None);
        assert_eq!(space.alloc(1), Some(100));
    }
}
