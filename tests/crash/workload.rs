//! What one connection asks for. Every value begins with a tag that no other request has, so that what a request
//! did can be told from the store alone; only the first connection deletes without writing something too.

use bytes::Bytes;
use etcore::proto::etcdserverpb as pb;
use etcore::proto::mvccpb::KeyValue;
use pb::compare::TargetUnion;
use pb::request_op::Request as Op;
use rand::rngs::StdRng;
use rand::seq::index;
use rand::{Rng, SeedableRng};

use crate::model::Request;

/// Three shards of as many keys.
pub const SPLITS: [&str; 2] = ["k20", "k40"];
const KEYS: usize = 60;
const TAG_END: u8 = b';';
const VALUE_BYTES_MAX: usize = 300;
/// Beyond what a tree's page holds.
const VALUE_BYTES_LARGE: usize = 20_000;

pub struct Writer {
    number: usize,
    requests: u64,
    random: StdRng,
}

fn key(number: usize) -> Bytes {
    format!("k{number:02}").into()
}

impl Writer {
    pub fn new(seed: u64, number: usize) -> Writer {
        let random = StdRng::seed_from_u64(seed.wrapping_mul(1000).wrapping_add(number as u64));
        Writer { number, requests: 0, random }
    }

    pub fn request(&mut self) -> Request {
        self.requests += 1;
        match self.random.random_range(0..100) {
            0..15 if self.number == 0 => Request::DeleteRange(self.delete(0, KEYS)),
            0..50 => {
                let key = self.random.random_range(0..KEYS);
                Request::Put(self.put(key))
            }
            50..90 => Request::Txn(self.txn()),
            _ => {
                let (start, end) = self.range(0, KEYS);
                let limit = if self.random.random() { 0 } else { 5 };
                Request::Range(pb::RangeRequest {
                    key: key(start),
                    range_end: key(end),
                    limit,
                    ..pb::RangeRequest::default()
                })
            }
        }
    }

    /// Whether the store at `revision`, as `found`, holds what this request would have written then.
    pub fn left_trace(request: &Request, revision: i64, found: &[KeyValue]) -> bool {
        let puts: Vec<&pb::PutRequest> = match request {
            Request::Put(put) => vec![put],
            Request::Txn(txn) => {
                let ops = txn.success.iter().chain(&txn.failure);
                ops.filter_map(|op| match &op.request {
                    Some(Op::RequestPut(put)) => Some(put),
                    _ => None,
                })
                .collect()
            }
            _ => Vec::new(),
        };
        let is_tag = |value: &Bytes, put: &&pb::PutRequest| {
            let tag = put.value.iter().position(|byte| *byte == TAG_END).map_or(0, |end| end + 1);
            value.starts_with(&put.value[..tag])
        };
        found
            .iter()
            .filter(|kv| kv.mod_revision == revision)
            .any(|kv| puts.iter().any(|put| is_tag(&kv.value, put)))
    }

    fn put(&mut self, number: usize) -> pb::PutRequest {
        let length = match self.random.random_range(0..50) {
            0 => VALUE_BYTES_LARGE,
            _ => self.random.random_range(0..VALUE_BYTES_MAX),
        };
        let mut value = format!("{}-{}", self.number, self.requests).into_bytes();
        value.push(TAG_END);
        value.resize(value.len() + length, b'v');
        pb::PutRequest {
            key: key(number),
            value: value.into(),
            prev_kv: self.random.random_bool(0.2),
            ..pb::PutRequest::default()
        }
    }

    /// A piece of the keys from `first` up to `end`.
    fn range(&mut self, first: usize, end: usize) -> (usize, usize) {
        let start = self.random.random_range(first..end);
        (start, self.random.random_range(start + 1..=end))
    }

    fn delete(&mut self, first: usize, end: usize) -> pb::DeleteRangeRequest {
        let (start, end) = self.range(first, end);
        pb::DeleteRangeRequest { key: key(start), range_end: key(end), prev_kv: self.random.random_bool(0.3) }
    }

    /// Puts in several shards, sometimes behind a guard, sometimes with a deletion over the boundaries.
    fn txn(&mut self) -> pb::TxnRequest {
        let op = |op| pb::RequestOp { request: Some(op) };
        let branch = |writer: &mut Writer| {
            // Keys that are put may not be deleted in the same transaction.
            let put_from = if writer.random.random_bool(0.3) { KEYS / 2 } else { 0 };
            let count = writer.random.random_range(2..6);
            let mut ops: Vec<pb::RequestOp> = index::sample(&mut writer.random, KEYS - put_from, count)
                .into_iter()
                .map(|number| op(Op::RequestPut(writer.put(put_from + number))))
                .collect();
            if put_from > 0 {
                let delete = writer.delete(0, put_from);
                ops.insert(0, op(Op::RequestDeleteRange(delete)));
            }
            if writer.random.random_bool(0.2) {
                let (start, end) = writer.range(0, KEYS);
                ops.push(op(Op::RequestRange(pb::RangeRequest {
                    key: key(start),
                    range_end: key(end),
                    ..pb::RangeRequest::default()
                })));
            }
            ops
        };
        let (success, failure) = (branch(self), branch(self));
        let compare = if self.random.random() {
            Vec::new()
        } else {
            vec![pb::Compare {
                key: key(self.random.random_range(0..KEYS)),
                result: pb::compare::CompareResult::Greater as i32,
                target: pb::compare::CompareTarget::Version as i32,
                target_union: Some(TargetUnion::Version(self.random.random_range(0..6))),
                ..pb::Compare::default()
            }]
        };
        pb::TxnRequest { compare, success, failure }
    }
}
