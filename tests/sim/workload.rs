//! Random requests: few keys, so that everything meets everything, on both sides of every boundary.

use bytes::Bytes;
use etcore::env::sim::Dice;
use etcore::model::Request;
use etcore::proto::etcdserverpb as pb;
use pb::compare::{CompareResult, CompareTarget, TargetUnion};

/// Keys are one letter and sometimes a second; the boundaries of the range map lie among them.
pub fn key(dice: &mut Dice) -> Bytes {
    let mut key = vec![b'a' + dice.below(12) as u8];
    if dice.one_in(4) {
        key.push(b'a' + dice.below(3) as u8);
    }
    key.into()
}

/// Never the same twice, so that a change can be recognised; now and then larger than a leaf holds.
fn value(dice: &mut Dice, number: u64) -> Bytes {
    let mut value = number.to_string().into_bytes();
    match dice.below(20) {
        0 => value.resize(9000, b'x'),
        1..=3 => value.resize(300, b'y'),
        _ => {}
    }
    value.into()
}

fn range_end(dice: &mut Dice, key: &Bytes) -> Bytes {
    match dice.below(5) {
        0 => Bytes::from_static(b"\0"),
        1 => Bytes::new(),
        _ => {
            let last = key[0].saturating_add(1 + dice.below(6) as u8);
            Bytes::from(vec![last])
        }
    }
}

fn put(dice: &mut Dice, number: u64) -> pb::PutRequest {
    let mut put = pb::PutRequest {
        key: key(dice),
        value: value(dice, number),
        prev_kv: dice.one_in(3),
        ..Default::default()
    };
    if dice.one_in(12) {
        (put.value, put.ignore_value) = (Bytes::new(), true);
    }
    if dice.one_in(20) {
        put.lease = 7;
    }
    put
}

fn range(dice: &mut Dice, shown: i64) -> pb::RangeRequest {
    let key = key(dice);
    let range_end = range_end(dice, &key);
    let revision = match dice.below(4) {
        0 => 1 + dice.below(shown as u64) as i64,
        1 if dice.one_in(8) => shown + 3,
        _ => 0,
    };
    let limit = if dice.coin() { dice.below(5) as i64 } else { 0 };
    let (count_only, keys_only) = (dice.one_in(8), dice.one_in(8));
    pb::RangeRequest { key, range_end, revision, limit, count_only, keys_only, ..Default::default() }
}

fn delete(dice: &mut Dice) -> pb::DeleteRangeRequest {
    let key = key(dice);
    let range_end = if dice.coin() { range_end(dice, &key) } else { Bytes::new() };
    pb::DeleteRangeRequest { key, range_end, prev_kv: dice.coin() }
}

fn compare(dice: &mut Dice, shown: i64) -> pb::Compare {
    let key = key(dice);
    let range_end = if dice.one_in(4) { range_end(dice, &key) } else { Bytes::new() };
    let (target, union) = match dice.below(3) {
        0 => (CompareTarget::Version, TargetUnion::Version(dice.below(3) as i64)),
        1 => (CompareTarget::Mod, TargetUnion::ModRevision(dice.below(shown as u64 + 2) as i64)),
        _ => (CompareTarget::Create, TargetUnion::CreateRevision(0)),
    };
    let result =
        [CompareResult::Equal, CompareResult::Greater, CompareResult::NotEqual][dice.below(3) as usize];
    pb::Compare { result: result.into(), target: target.into(), key, range_end, target_union: Some(union) }
}

fn ops(dice: &mut Dice, number: u64, shown: i64) -> Vec<pb::RequestOp> {
    use pb::request_op::Request as Op;
    let mut ops = Vec::new();
    let mut taken: Vec<Bytes> = Vec::new();
    for i in 0..dice.below(4) {
        let op = match dice.below(4) {
            0 => {
                let mut range = range(dice, shown);
                range.revision = range.revision.min(shown);
                Op::RequestRange(range)
            }
            1 if taken.is_empty() => Op::RequestDeleteRange(delete(dice)),
            _ => {
                let mut put = put(dice, number * 100 + i);
                (put.ignore_value, put.lease) = (false, 0);
                let deletes = ops
                    .iter()
                    .any(|op: &pb::RequestOp| matches!(op.request, Some(Op::RequestDeleteRange(_))));
                // Two puts of a key, or a put into a deleted range, are refused before they reach a shard.
                if deletes || taken.contains(&put.key) {
                    continue;
                }
                taken.push(put.key.clone());
                Op::RequestPut(put)
            }
        };
        ops.push(pb::RequestOp { request: Some(op) });
    }
    ops
}

pub fn request(dice: &mut Dice, number: u64, shown: i64) -> Request {
    match dice.below(20) {
        0..=7 => Request::Put(put(dice, number)),
        8..=9 => Request::DeleteRange(delete(dice)),
        10..=13 => Request::Txn(pb::TxnRequest {
            compare: (0..dice.below(3)).map(|_| compare(dice, shown)).collect(),
            success: ops(dice, number * 10, shown),
            failure: ops(dice, number * 10 + 1, shown),
        }),
        14 if dice.coin() => Request::Compact(pb::CompactionRequest {
            // Often so late that it passes reads under way.
            revision: (shown - [0, dice.below(12) as i64][dice.below(2) as usize]).max(1),
            physical: dice.coin(),
        }),
        15 if dice.coin() => Request::HashKv(pb::HashKvRequest::default()),
        16 if dice.one_in(4) => Request::Status,
        _ => Request::Range { request: range(dice, shown), count: true },
    }
}
