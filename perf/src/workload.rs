//! The loads that are compared: what each request says, and over which keys.
//!
//! Keys are 32 bytes, `/perf/` + a letter for the shard + `/` + 24 digits; etcore is started with its
//! boundaries between the letters. A prefix of 22 digits names 100 keys, one of 20 digits 10,000.

use crate::client::{Answer, Load, Request};
use crate::wire::{self, Method};

pub const KEY_BYTES: usize = 32;
const DIGITS: usize = 24;
const LETTER_AT: usize = 6;

/// A fast generator of even spread; the same seed gives the same load to both servers.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// The population of keys that a load runs over.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    /// Letters in use, from `a` on: one per shard, or one.
    pub letters: u64,
    /// Keys of each letter.
    pub each: u64,
    pub value_bytes: usize,
}

impl Keys {
    pub fn count(&self) -> u64 {
        self.letters * self.each
    }

    /// The key of this ordinal; neighbours in a letter are neighbours in the key space.
    pub fn key(&self, ordinal: u64) -> [u8; KEY_BYTES] {
        let mut key = *b"/perf/a/000000000000000000000000";
        key[LETTER_AT] += (ordinal / self.each) as u8;
        let mut rest = ordinal % self.each;
        for digit in key.iter_mut().rev().take(DIGITS) {
            if rest == 0 {
                break;
            }
            *digit += (rest % 10) as u8;
            rest /= 10;
        }
        key
    }
}

/// The end of the range of all keys that begin with `prefix`, whose last byte is below 255.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    *end.last_mut().expect("a prefix is not empty") += 1;
    end
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Put,
    ReadLinearizable,
    ReadSerializable,
    Mixed,
    Guarded,
    Range { keys: u64, streamed: bool },
}

impl Kind {
    pub const ALL: [(&'static str, Self); 9] = [
        ("read-lin", Self::ReadLinearizable),
        ("read-ser", Self::ReadSerializable),
        ("range-100", Self::Range { keys: 100, streamed: false }),
        ("range-100-stream", Self::Range { keys: 100, streamed: true }),
        ("range-10k", Self::Range { keys: 10_000, streamed: false }),
        ("range-10k-stream", Self::Range { keys: 10_000, streamed: true }),
        ("mixed", Self::Mixed),
        ("guarded", Self::Guarded),
        ("put", Self::Put),
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(at, _)| *at == name).map(|(_, kind)| *kind)
    }
}

/// A load without end over a population that is there already.
pub struct Work {
    kind: Kind,
    keys: Keys,
    random: Random,
    value: Vec<u8>,
    /// What a guarded update believes of each key, by ordinal; zero where it does not know yet.
    revisions: Vec<i64>,
    /// The key that each slot is at.
    at: Vec<u64>,
    /// Guarded updates that found another revision.
    pub conflicts: u64,
}

impl Work {
    pub fn new(kind: Kind, keys: Keys, inflight: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let value = value(&mut random, keys.value_bytes);
        let revisions = if kind == Kind::Guarded { vec![0; keys.count() as usize] } else { Vec::new() };
        Self { kind, keys, random, value, revisions, at: vec![0; inflight], conflicts: 0 }
    }

    /// A load that reads every key once, so that guarded updates know what they guard.
    pub fn learning(&mut self) -> Learning<'_> {
        Learning { work: self, next: 0 }
    }

    fn fresh_value(&mut self) {
        let stamp = self.random.next().to_le_bytes();
        let size = self.value.len().min(8);
        self.value[..size].copy_from_slice(&stamp[..size]);
    }

    fn read(&mut self, serializable: bool, out: &mut Vec<u8>) -> Request {
        let key = self.keys.key(self.random.below(self.keys.count()));
        wire::message(out, |out| wire::range(out, &key, &[], serializable));
        Request { method: Method::Range, keep: false, answer_bytes_min: self.keys.value_bytes }
    }

    fn put(&mut self, out: &mut Vec<u8>) -> Request {
        let key = self.keys.key(self.random.below(self.keys.count()));
        self.fresh_value();
        wire::message(out, |out| wire::put(out, &key, &self.value));
        Request { method: Method::Put, keep: false, answer_bytes_min: 0 }
    }
}

impl Load for Work {
    fn next(&mut self, slot: usize, out: &mut Vec<u8>) -> Option<Request> {
        Some(match self.kind {
            Kind::Put => self.put(out),
            Kind::ReadLinearizable => self.read(false, out),
            Kind::ReadSerializable => self.read(true, out),
            Kind::Mixed if self.random.next() >> 63 == 0 => self.put(out),
            Kind::Mixed => self.read(false, out),
            Kind::Guarded => {
                let ordinal = self.random.below(self.keys.count());
                self.at[slot] = ordinal;
                let key = self.keys.key(ordinal);
                self.fresh_value();
                let known = self.revisions[ordinal as usize];
                wire::message(out, |out| wire::guarded_update(out, &key, known, &self.value));
                Request { method: Method::Txn, keep: true, answer_bytes_min: 0 }
            }
            Kind::Range { keys, streamed } => {
                let group = self.random.below(self.keys.count() / keys);
                let key = self.keys.key(group * keys);
                let prefix = &key[..KEY_BYTES - keys.ilog10() as usize];
                wire::message(out, |out| wire::range(out, prefix, &prefix_end(prefix), false));
                let method = if streamed { Method::RangeStream } else { Method::Range };
                let answer_bytes_min = keys as usize * (KEY_BYTES + self.keys.value_bytes);
                Request { method, keep: false, answer_bytes_min }
            }
        })
    }

    fn done(&mut self, slot: usize, answer: &Answer<'_>) {
        if self.kind == Kind::Guarded && answer.ok {
            let (revision, won) = wire::guarded_outcome(answer.message);
            let known = &mut self.revisions[self.at[slot] as usize];
            // The first touch of a key only learns its revision.
            self.conflicts += u64::from(!won && *known != 0);
            *known = revision;
        }
    }
}

pub struct Learning<'a> {
    work: &'a mut Work,
    next: u64,
}

impl Load for Learning<'_> {
    fn next(&mut self, slot: usize, out: &mut Vec<u8>) -> Option<Request> {
        if self.next == self.work.keys.count() {
            return None;
        }
        let key = self.work.keys.key(self.next);
        self.work.at[slot] = self.next;
        self.next += 1;
        wire::message(out, |out| wire::range(out, &key, &[], true));
        Some(Request { method: Method::Range, keep: true, answer_bytes_min: self.work.keys.value_bytes })
    }

    fn done(&mut self, slot: usize, answer: &Answer<'_>) {
        self.work.revisions[self.work.at[slot] as usize] = wire::range_mod_revision(answer.message);
    }
}

/// Puts every key of a population `rounds` times, many keys in one transaction.
pub struct Fill {
    keys: Keys,
    value: Vec<u8>,
    random: Random,
    next: u64,
    end: u64,
    batch: u64,
}

impl Fill {
    pub fn new(keys: Keys, rounds: u64) -> Self {
        let mut random = Random::new(0x5eed);
        let value = value(&mut random, keys.value_bytes);
        // A request stays below HTTP/2's first window and etcd's limit of operations.
        let batch = (48_000 / (keys.value_bytes as u64 + 64)).clamp(1, 100);
        Self { keys, value, random, next: 0, end: keys.count() * rounds, batch }
    }
}

impl Load for Fill {
    fn next(&mut self, _slot: usize, out: &mut Vec<u8>) -> Option<Request> {
        if self.next == self.end {
            return None;
        }
        // A batch stays within one letter: loading is no test of changes over several shards.
        let batch = self.batch.min(self.keys.each - self.next % self.keys.each);
        wire::message(out, |out| {
            for ordinal in self.next..self.next + batch {
                let stamp = self.random.next().to_le_bytes();
                let size = self.value.len().min(8);
                self.value[..size].copy_from_slice(&stamp[..size]);
                wire::txn_put(out, &self.keys.key(ordinal % self.keys.count()), &self.value);
            }
        });
        self.next += batch;
        Some(Request { method: Method::Txn, keep: false, answer_bytes_min: 0 })
    }

    fn done(&mut self, _slot: usize, _answer: &Answer<'_>) {}
}

/// So many puts one by one to random keys, and then no more.
pub struct Puts {
    work: Work,
    left: u64,
}

impl Puts {
    pub fn new(keys: Keys, inflight: usize, count: u64, seed: u64) -> Self {
        Self { work: Work::new(Kind::Put, keys, inflight, seed), left: count }
    }
}

impl Load for Puts {
    fn next(&mut self, slot: usize, out: &mut Vec<u8>) -> Option<Request> {
        self.left = self.left.checked_sub(1)?;
        self.work.next(slot, out)
    }

    fn done(&mut self, slot: usize, answer: &Answer<'_>) {
        self.work.done(slot, answer);
    }
}

/// Reads or deletes the whole population in one request, again and again or a number of times.
pub struct Whole {
    pub keys: Keys,
    pub method: Method,
    pub left: u64,
    /// The first field of the answer that is a number: what a DeleteRange deleted.
    pub deleted: u64,
}

impl Load for Whole {
    fn next(&mut self, _slot: usize, out: &mut Vec<u8>) -> Option<Request> {
        self.left = self.left.checked_sub(1)?;
        let start = b"/perf/";
        let deletes = self.method == Method::DeleteRange;
        wire::message(out, |out| {
            if deletes {
                wire::delete_range(out, start, &prefix_end(start));
            } else {
                wire::range(out, start, &prefix_end(start), false);
            }
        });
        let bytes = self.keys.count() as usize * (KEY_BYTES + self.keys.value_bytes);
        Some(Request {
            method: self.method,
            keep: deletes,
            answer_bytes_min: if deletes { 0 } else { bytes },
        })
    }

    fn done(&mut self, _slot: usize, answer: &Answer<'_>) {
        self.deleted = wire::number_in(answer.message, 2);
    }
}

fn value(random: &mut Random, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|_| random.next() as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: Keys = Keys { letters: 2, each: 50_000, value_bytes: 256 };

    #[test]
    fn keys_are_in_order_and_spread_over_the_letters() {
        assert_eq!(&KEYS.key(0), b"/perf/a/000000000000000000000000");
        assert_eq!(&KEYS.key(49_999), b"/perf/a/000000000000000000049999");
        assert_eq!(&KEYS.key(50_000), b"/perf/b/000000000000000000000000");
        assert!((0..KEYS.count()).map(|at| KEYS.key(at)).is_sorted());
    }

    #[test]
    fn a_fill_puts_every_key_once_per_round() {
        let keys = Keys { letters: 2, each: 1_234, value_bytes: 16 };
        let mut fill = Fill::new(keys, 3);
        let mut out = Vec::new();
        let mut puts = 0;
        while fill.next(0, &mut out).is_some() {
            let body = std::mem::take(&mut out);
            assert!(body.len() < 65_535);
            puts += wire::Fields(&body[5..]).count();
        }
        assert_eq!(puts, 3 * 2 * 1_234);
    }
}
