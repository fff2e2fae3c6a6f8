//! Random histories: every operation, every field, good values and bad ones.
//!
//! A history is a list of finished requests, made from its seed alone. The generator runs a model beside it, so
//! that revisions fall where it matters: at the newest, the compacted one, and one to either side of them.

use std::collections::VecDeque;

use bytes::Bytes;
use etcore::proto::etcdserverpb as pb;
use pb::compare::TargetUnion;
use pb::request_op::Request as Op;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::model::{MESSAGE_BYTES_MAX, Model, REQUEST_BYTES_MAX, Request};

#[derive(Clone, Debug)]
pub enum Step {
    /// One of several connections asks.
    Call { client: usize, request: Request },
    /// The server ends, killed or asked, and starts again.
    Restart { by_force: bool },
}

pub const CLIENTS: usize = 3;
/// A server restarts after so many steps on average.
const STEPS_PER_RESTART: u32 = 150;
/// Boundaries of five shards, each inside ranges that the generator touches; in the flag's notation.
pub const SPLITS: [&str; 4] = ["/registry/pods/default/p2", r"a/\xff", "k20", r"m\x00"];

/// So many keys are remembered as written lately.
const WRITTEN_KEPT: usize = 6;

/// Where etcd 3.7.1 itself is wrong; it is not asked (known-traps A14, B9).
pub fn etcd_is_wrong(request: &Request) -> bool {
    match request {
        Request::RangeStream(range) => range.sort_order == 0 && range.sort_target != 0,
        Request::Txn(txn) => deletes_open_end_and_ignores(txn),
        _ => false,
    }
}

fn deletes_open_end_and_ignores(txn: &pb::TxnRequest) -> bool {
    fn some(txn: &pb::TxnRequest, is: &dyn Fn(&Op) -> bool) -> bool {
        txn.success.iter().chain(&txn.failure).filter_map(|op| op.request.as_ref()).any(|op| match op {
            Op::RequestTxn(nested) => some(nested, is),
            op => is(op),
        })
    }
    some(txn, &|op| matches!(op, Op::RequestDeleteRange(delete) if delete.range_end.as_ref() == [0]))
        && some(txn, &|op| matches!(op, Op::RequestPut(put) if put.ignore_value || put.ignore_lease))
}

pub fn history(seed: u64, steps: usize) -> Vec<Step> {
    let mut generator =
        Generator { random: StdRng::seed_from_u64(seed), model: Model::new(), written: VecDeque::new() };
    (0..steps).map(|_| generator.step()).collect()
}

/// The same step with one compare or operation less, at any depth.
pub fn smaller(step: &Step) -> Vec<Step> {
    match step {
        Step::Call { client, request: Request::Txn(txn) } => smaller_txns(txn)
            .into_iter()
            .map(|txn| Step::Call { client: *client, request: Request::Txn(txn) })
            .collect(),
        _ => Vec::new(),
    }
}

fn smaller_txns(txn: &pb::TxnRequest) -> Vec<pb::TxnRequest> {
    let mut out = Vec::new();
    for index in 0..txn.compare.len() {
        let mut shorter = txn.clone();
        shorter.compare.remove(index);
        out.push(shorter);
    }
    let branches: [fn(&mut pb::TxnRequest) -> &mut Vec<pb::RequestOp>; 2] =
        [|txn| &mut txn.success, |txn| &mut txn.failure];
    for branch in branches {
        let mut whole = txn.clone();
        for (index, op) in branch(&mut whole).iter().enumerate() {
            let mut shorter = txn.clone();
            branch(&mut shorter).remove(index);
            out.push(shorter);
            if let Some(Op::RequestTxn(nested)) = &op.request {
                for nested in smaller_txns(nested) {
                    let mut shorter = txn.clone();
                    branch(&mut shorter)[index].request = Some(Op::RequestTxn(nested));
                    out.push(shorter);
                }
            }
        }
    }
    out
}

struct Generator {
    random: StdRng,
    model: Model,
    /// Keys of the last puts, those of the transaction that is being made included.
    written: VecDeque<Bytes>,
}

impl Generator {
    fn step(&mut self) -> Step {
        // A compaction to 0 is forgotten by etcd when it restarts; what is right then is nobody's concern.
        if self.model.compacted() != 0 && self.random.random_ratio(1, STEPS_PER_RESTART) {
            return Step::Restart { by_force: self.random.random() };
        }
        let request = self.request();
        self.model.call(&request);
        Step::Call { client: self.random.random_range(0..CLIENTS), request }
    }

    fn one_in(&mut self, of: u32) -> bool {
        self.random.random_ratio(1, of)
    }

    fn request(&mut self) -> Request {
        match self.random.random_range(0..1000) {
            0..300 => Request::Put(self.put(true)),
            300..400 => Request::DeleteRange(self.delete()),
            400..560 => Request::Range(self.range()),
            560..640 => Request::RangeStream(self.range()),
            640..880 => Request::Txn(self.txn(0)),
            // Every compare looks at the state before the transaction, also behind a write of its key.
            880..890 => {
                let key = self.key();
                let compare = pb::Compare { key: key.clone(), ..self.compare() };
                let nested = pb::TxnRequest { compare: vec![compare], ..Default::default() };
                let put = pb::PutRequest { key, value: self.value(), ..Default::default() };
                let ops = [Op::RequestPut(put), Op::RequestTxn(nested)];
                let success = ops.map(|op| pb::RequestOp { request: Some(op) }).to_vec();
                Request::Txn(pb::TxnRequest { success, ..Default::default() })
            }
            890..930 => Request::Compact(pb::CompactionRequest {
                revision: self.compact_revision(),
                physical: self.random.random_ratio(2, 3),
            }),
            930..980 => {
                let kept = self.one_in(3).then_some(self.model.compacted());
                Request::HashKv(pb::HashKvRequest { revision: kept.unwrap_or_else(|| self.revision()) })
            }
            980..984 => Request::Status,
            984..986 => Request::Defragment,
            986..989 => {
                let (key, range_end) = everything();
                Request::DeleteRange(pb::DeleteRangeRequest { key, range_end, prev_kv: self.random.random() })
            }
            _ => self.fill(),
        }
    }

    /// Many keys at once, so that long ranges and several chunks of a stream exist.
    fn fill(&mut self) -> Request {
        let from = self.random.random_range(0..60);
        let success = (from..from + 40)
            .map(|number| {
                let put = pb::PutRequest { key: numbered(number), value: self.value(), ..Default::default() };
                pb::RequestOp { request: Some(Op::RequestPut(put)) }
            })
            .collect();
        Request::Txn(pb::TxnRequest { success, ..Default::default() })
    }

    // ---- keys and values ----

    fn key(&mut self) -> Bytes {
        const HOT: [&[u8]; 30] = [
            b"\0",
            b"\0\0",
            b"\0a",
            b"/registry/",
            b"/registry/leases/kube-system/x",
            b"/registry/pods/default/p1",
            b"/registry/pods/default/p2",
            b"/registry/pods/default/p2\0",
            b"/registry/pods/default/p3",
            b"/registry/pods/kube-system/p1",
            b"/registry0",
            b"a",
            b"a\0",
            b"a/",
            b"a/\xff\xff",
            b"a0",
            b"a0\0",
            b"a1",
            b"aa",
            b"a\xff",
            b"b",
            b"b\0",
            b"c",
            b"l\xff",
            b"m",
            b"m\0",
            b"z",
            b"\xff",
            b"\xff\0",
            b"\xff\xff",
        ];
        match self.random.random_range(0..100) {
            0 => Bytes::new(),
            1 => Bytes::from(vec![b'l'; 3000]),
            2 => Bytes::from(vec![b'l'; 3001]),
            3..20 => numbered(self.random.random_range(0..100)),
            _ => Bytes::from_static(HOT.choose(&mut self.random).expect("not empty")),
        }
    }

    /// A key that was written lately, as often as not.
    fn written_key(&mut self) -> Bytes {
        match self.random.random_range(0..self.written.len() * 2 + 1) {
            index if index < self.written.len() => self.written[index].clone(),
            _ => self.key(),
        }
    }

    fn range_end(&mut self, key: &Bytes) -> Bytes {
        match self.random.random_range(0..20) {
            0..5 => Bytes::new(),
            5..8 => Bytes::from_static(b"\0"),
            8..11 => prefix_end(key),
            11..13 => prefix_end(&key[..key.len().min(1)]),
            13 => Bytes::from_static(b"\0\0"),
            14 => key.clone(),
            // In either direction; half of them are inverted.
            _ => self.key(),
        }
    }

    fn key_and_end(&mut self) -> (Bytes, Bytes) {
        let key = if self.one_in(12) { Bytes::from_static(b"\0") } else { self.key() };
        let end = self.range_end(&key);
        (key, end)
    }

    fn value(&mut self) -> Bytes {
        let length = match self.random.random_range(0..200) {
            0..20 => 0,
            20..40 => 1,
            40..60 => 2040 + self.random.random_range(0..16),
            60..62 => 8192,
            62 => 100 << 10,
            _ => self.random.random_range(2..20),
        };
        // Few different bytes, so that values are equal now and then.
        let byte = *b"xyz".choose(&mut self.random).expect("not empty");
        Bytes::from(vec![byte; length])
    }

    fn revision(&mut self) -> i64 {
        let (now, compacted) = (self.model.revision(), self.model.compacted());
        match self.random.random_range(0..30) {
            0..12 => 0,
            12..14 => now,
            14..16 => now - 1,
            16 => now + 1,
            17 => now + 2,
            18..20 => compacted,
            20 => compacted - 1,
            21..23 => compacted + 1,
            23 => -1,
            24 => *[-2, i64::MIN, i64::MAX].choose(&mut self.random).expect("not empty"),
            _ => self.random.random_range(compacted.max(1)..=now),
        }
    }

    fn compact_revision(&mut self) -> i64 {
        let (now, compacted) = (self.model.revision(), self.model.compacted());
        match self.random.random_range(0..12) {
            // Mostly a little at a time, so that there is a past to look at.
            0..5 => (compacted.max(0) + self.random.random_range(1..20)).min(now),
            5..7 => (now - self.random.random_range(0..10)).max(compacted),
            7 => now,
            _ => self.revision(),
        }
    }

    // ---- messages ----

    fn range(&mut self) -> pb::RangeRequest {
        let (key, range_end) = match self.random.random_range(0..6) {
            0 => everything(),
            1 => (self.written_key(), Bytes::new()),
            _ => self.key_and_end(),
        };
        let mut range = pb::RangeRequest { key, range_end, revision: self.revision(), ..Default::default() };
        range.serializable = self.random.random();
        range.count_only = self.one_in(8);
        range.keys_only = self.one_in(5);
        let is_filtered = self.one_in(5);
        if self.random.random_ratio(if is_filtered { 2 } else { 1 }, 3) {
            range.limit = *[1, 2, 3, 5, 9, 10, 11, 40, 1000, -1, i64::MAX, i64::MIN]
                .choose(&mut self.random)
                .expect("not empty");
        }
        if self.one_in(3) {
            range.sort_order = self.random.random_range(0..3);
            range.sort_target = self.random.random_range(0..5);
        }
        if self.one_in(40) {
            range.sort_order = *[-1, 3, i32::MAX].choose(&mut self.random).expect("not empty");
        }
        if self.one_in(40) {
            range.sort_target = *[-1, 5, i32::MIN].choose(&mut self.random).expect("not empty");
        }
        if is_filtered {
            for bound in [
                &mut range.min_mod_revision,
                &mut range.max_mod_revision,
                &mut range.min_create_revision,
                &mut range.max_create_revision,
            ] {
                if self.random.random_ratio(2, 5) {
                    *bound = match self.random.random_range(0..8) {
                        0 => -1,
                        1 => i64::MAX,
                        _ => self.random.random_range(1..=self.model.revision() + 1),
                    };
                }
            }
        }
        range
    }

    /// Far too long values are for single puts: inside transactions they would only be slow.
    fn put(&mut self, alone: bool) -> pb::PutRequest {
        let mut put = pb::PutRequest { key: self.key(), value: self.value(), ..Default::default() };
        self.written.push_back(put.key.clone());
        if self.written.len() > WRITTEN_KEPT {
            self.written.pop_front();
        }
        put.prev_kv = self.one_in(3);
        if self.one_in(8) {
            put.ignore_value = true;
            if !self.one_in(6) {
                put.value = Bytes::new();
            }
        }
        put.ignore_lease = self.one_in(10);
        if self.one_in(25) {
            put.lease = *[1, -1, 7587848390, i64::MIN, i64::MAX].choose(&mut self.random).expect("not empty");
        }
        if alone && self.one_in(150) {
            let length = *[REQUEST_BYTES_MAX - 1024, REQUEST_BYTES_MAX + 1, MESSAGE_BYTES_MAX + 1]
                .choose(&mut self.random)
                .expect("not empty");
            put.value = Bytes::from(vec![b'w'; length]);
        }
        put
    }

    fn delete(&mut self) -> pb::DeleteRangeRequest {
        let (key, mut range_end) = self.key_and_end();
        // Rarely everything: most of a history should have something to work on.
        if !range_end.is_empty() && self.random.random() {
            range_end = Bytes::new();
        }
        pb::DeleteRangeRequest { key, range_end, prev_kv: self.random.random() }
    }

    fn compare(&mut self) -> pb::Compare {
        let (key, range_end) = self.key_and_end();
        let (key, range_end) = match self.random.random_range(0..4) {
            0 => (key, range_end),
            1 => (key, Bytes::new()),
            _ => (self.written_key(), Bytes::new()),
        };
        let number = match self.random.random_range(0..6) {
            0 => -1,
            1 => self.model.revision(),
            2 => 1,
            3 => self.random.random_range(1..=self.model.revision()),
            _ => 0,
        };
        let target = if self.one_in(50) { 9 } else { self.random.random_range(0..5) };
        let union = if self.one_in(15) { self.random.random_range(0..6) } else { target };
        pb::Compare {
            result: if self.one_in(50) { 7 } else { self.random.random_range(0..4) },
            target,
            key,
            range_end,
            target_union: match union {
                0 => Some(TargetUnion::Version(number)),
                1 => Some(TargetUnion::CreateRevision(number)),
                2 => Some(TargetUnion::ModRevision(number)),
                3 => Some(TargetUnion::Value(self.value())),
                4 => Some(TargetUnion::Lease(number)),
                _ => None,
            },
        }
    }

    fn txn(&mut self, depth: u32) -> pb::TxnRequest {
        let compares = self.random.random_range(0..3);
        let mut txn =
            pb::TxnRequest { compare: (0..compares).map(|_| self.compare()).collect(), ..Default::default() };
        txn.success = self.branch(depth);
        txn.failure = self.branch(depth);
        if self.one_in(60) {
            // Around the bound on operations; nested they share their parent's (5.1).
            let length = self.random.random_range(120..132);
            let op = Op::RequestRange(pb::RangeRequest { key: self.key(), ..Default::default() });
            let ops = vec![pb::RequestOp { request: Some(op) }; length];
            match self.random.random_range(0..3) {
                0 => txn.compare = (0..length).map(|_| self.compare()).collect(),
                1 => txn.success.extend(ops),
                _ => txn.failure.extend(ops),
            }
        }
        txn
    }

    fn branch(&mut self, depth: u32) -> Vec<pb::RequestOp> {
        (0..self.random.random_range(0..5))
            .map(|_| {
                let request = match self.random.random_range(0..100) {
                    0 => None,
                    1..20 if depth < 3 => Some(Op::RequestTxn(self.txn(depth + 1))),
                    1..40 => Some(Op::RequestRange(self.range())),
                    40..80 => Some(Op::RequestPut(self.put(false))),
                    _ => Some(Op::RequestDeleteRange(self.delete())),
                };
                pb::RequestOp { request }
            })
            .collect()
    }
}

fn everything() -> (Bytes, Bytes) {
    (Bytes::from_static(b"\0"), Bytes::from_static(b"\0"))
}

fn numbered(number: u32) -> Bytes {
    Bytes::from(format!("k{number:02}"))
}

/// The end of all keys that begin with `prefix` (etcd: semantics 2.3).
fn prefix_end(prefix: &[u8]) -> Bytes {
    match prefix.iter().rposition(|byte| *byte < 0xff) {
        Some(last) => {
            let mut end = prefix[..=last].to_vec();
            end[last] += 1;
            Bytes::from(end)
        }
        None => Bytes::from_static(b"\0"),
    }
}
