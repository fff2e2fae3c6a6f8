//! What can be refused by looking at a request alone, in etcd's order and with etcd's errors (etcd: semantics
//! 0.2, 2.1, 2.15, 2.16, 3.1, 4.1, 5.1 to 5.4; api, section 6). What passes here is what evaluation relies on.
//! Knows nothing of the store's state.

use super::node::Limits;
use crate::model::{KeyRange, RangeSet, Rejection, select, txn};
use crate::proto::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    range_request::{SortOrder, SortTarget},
    request_op,
};
use bytes::Bytes;
use prost::Message;
use std::collections::HashSet;

type Verdict = Result<(), Rejection>;

/// A Range. It is not proposed, and so of any size.
pub fn range(request: &RangeRequest) -> Verdict {
    key(&request.key)?;
    let known =
        SortOrder::try_from(request.sort_order).is_ok() && SortTarget::try_from(request.sort_target).is_ok();
    if known { Ok(()) } else { Err(Rejection::InvalidSortOption) }
}

/// As for a Range, and what RangeStream leaves out (etcd: semantics 2.16). Order NONE is taken with any target:
/// etcd's own stream then repeats and loses keys, here it sorts like the unary call (trap A14).
pub fn range_stream(request: &RangeRequest) -> Verdict {
    range(request)?;
    if !select::default_order(request) {
        return Err(Rejection::StreamSortUnsupported);
    }
    if select::filters(request) {
        return Err(Rejection::StreamFilterUnsupported);
    }
    Ok(())
}

pub fn put(request: &PutRequest, limits: &Limits) -> Verdict {
    put_fields(request)?;
    size(request, limits)
}

pub fn delete_range(request: &DeleteRangeRequest, limits: &Limits) -> Verdict {
    key(&request.key)?;
    size(request, limits)
}

pub fn txn(request: &TxnRequest, limits: &Limits) -> Verdict {
    txn_fields(request, limits.max_txn_ops)?;
    no_duplicates(&request.success)?;
    no_duplicates(&request.failure)?;
    // What only reads is not proposed (etcd: semantics 5.15).
    if txn::read_only(request) { Ok(()) } else { size(request, limits) }
}

pub fn compact(request: &CompactionRequest, limits: &Limits) -> Verdict {
    size(request, limits)
}

fn put_fields(request: &PutRequest) -> Verdict {
    key(&request.key)?;
    if request.ignore_value && !request.value.is_empty() {
        return Err(Rejection::ValueProvided);
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(Rejection::LeaseProvided);
    }
    Ok(())
}

fn key(key: &Bytes) -> Verdict {
    if key.is_empty() { Err(Rejection::EmptyKey) } else { Ok(()) }
}

/// A nested transaction has what its parent's longest list leaves of the operations (etcd: semantics 5.1).
fn txn_fields(request: &TxnRequest, ops_max: usize) -> Verdict {
    let ops = request.compare.len().max(request.success.len()).max(request.failure.len());
    let left = ops_max.checked_sub(ops).ok_or(Rejection::TooManyOps)?;
    request.compare.iter().try_for_each(|compare| key(&compare.key))?;
    request.success.iter().chain(&request.failure).try_for_each(|op| match &op.request {
        Some(request_op::Request::RequestRange(request)) => range(request),
        Some(request_op::Request::RequestPut(request)) => put_fields(request),
        Some(request_op::Request::RequestDeleteRange(request)) => key(&request.key),
        Some(request_op::Request::RequestTxn(request)) => txn_fields(request, left),
        None => Err(Rejection::KeyNotFound),
    })
}

/// As [`duplicates`], at once for the usual short branch.
fn no_duplicates(ops: &[RequestOp]) -> Verdict {
    let nested = |op: &RequestOp| matches!(op.request, Some(request_op::Request::RequestTxn(_)));
    match ops {
        [] => Ok(()),
        [op] if !nested(op) => Ok(()),
        _ => duplicates(ops).map(drop),
    }
}

/// What a branch writes, as far as the rule on duplicates looks at it.
#[derive(Default)]
struct Writes {
    puts: HashSet<Bytes>,
    deletes: RangeSet,
}

impl Writes {
    fn put(&mut self, key: &Bytes) -> Verdict {
        self.check(key)?;
        self.puts.insert(key.clone());
        Ok(())
    }

    fn check(&self, key: &Bytes) -> Verdict {
        match self.puts.contains(key) || self.deletes.contains(key) {
            true => Err(Rejection::DuplicateKey),
            false => Ok(()),
        }
    }

    fn unite(&mut self, mut other: Writes) {
        if other.puts.len() > self.puts.len() {
            std::mem::swap(&mut self.puts, &mut other.puts);
        }
        self.puts.extend(other.puts);
        if other.deletes.len() > self.deletes.len() {
            std::mem::swap(&mut self.deletes, &mut other.deletes);
        }
        other.deletes.iter().for_each(|range| self.deletes.insert(range));
    }
}

/// No key is put twice in one branch, or put and deleted, in whatever order (etcd: semantics 5.3). In detail,
/// since clients can see it: a nested transaction's puts are held against the deletes of this level and of
/// nested ones *before* it; its two branches exclude each other, and so do not collide.
fn duplicates(ops: &[RequestOp]) -> Result<Writes, Rejection> {
    use request_op::Request::{RequestDeleteRange, RequestPut, RequestTxn};
    let members = || ops.iter().filter_map(|op| op.request.as_ref());
    let mut writes = Writes::default();
    for member in members() {
        if let RequestDeleteRange(delete) = member {
            writes.deletes.insert(literal_range(delete));
        }
    }
    for member in members() {
        if let RequestTxn(nested) = member {
            let success = duplicates(&nested.success)?;
            let failure = duplicates(&nested.failure)?;
            success.puts.iter().chain(&failure.puts).try_for_each(|key| writes.check(key))?;
            writes.unite(success);
            writes.unite(failure);
        }
    }
    for member in members() {
        if let RequestPut(put) = member {
            writes.put(&put.key)?;
        }
    }
    Ok(writes)
}

/// The range as etcd's check understands it: a `range_end` of one zero byte is an end like any other, and so
/// the range is empty (etcd: semantics 5.4).
fn literal_range(delete: &DeleteRangeRequest) -> KeyRange {
    match delete.range_end.is_empty() {
        true => KeyRange::point(&delete.key),
        false => KeyRange { start: delete.key.clone(), end: Some(delete.range_end.clone()) },
    }
}

fn size(request: &impl Message, limits: &Limits) -> Verdict {
    if limits.proposal_fits(request.encoded_len()) { Ok(()) } else { Err(Rejection::RequestTooLarge) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::etcdserverpb::Compare;
    use Rejection::*;

    const LIMITS: Limits =
        Limits { max_request_bytes: 1_572_864, max_txn_ops: 128, member_id: 0x8e9e_05c5_2164_694d };

    fn bytes(text: &str) -> Bytes {
        text.to_owned().into()
    }

    fn op(request: request_op::Request) -> RequestOp {
        RequestOp { request: Some(request) }
    }

    fn puts(key: &str) -> RequestOp {
        op(request_op::Request::RequestPut(PutRequest { key: bytes(key), ..Default::default() }))
    }

    fn deletes(key: &str, range_end: &str) -> RequestOp {
        op(request_op::Request::RequestDeleteRange(DeleteRangeRequest {
            key: bytes(key),
            range_end: bytes(range_end),
            prev_kv: false,
        }))
    }

    fn ranges(key: &str) -> RequestOp {
        op(request_op::Request::RequestRange(RangeRequest { key: bytes(key), ..Default::default() }))
    }

    fn txn_of(success: Vec<RequestOp>, failure: Vec<RequestOp>) -> TxnRequest {
        TxnRequest { compare: vec![], success, failure }
    }

    fn nested(success: Vec<RequestOp>, failure: Vec<RequestOp>) -> RequestOp {
        op(request_op::Request::RequestTxn(txn_of(success, failure)))
    }

    fn verdict(request: TxnRequest) -> Verdict {
        txn(&request, &LIMITS)
    }

    /// etcd: semantics 2.1, 2.15.
    #[test]
    fn ranges_need_a_key_and_a_known_order() {
        let good = RangeRequest { key: bytes("k"), ..Default::default() };
        assert_eq!(range(&good), Ok(()));
        assert_eq!(range(&RangeRequest { sort_order: 3, ..Default::default() }), Err(EmptyKey));
        for (sort_order, sort_target, expected) in [
            (2, 4, Ok(())),
            (3, 0, Err(InvalidSortOption)),
            (-1, 0, Err(InvalidSortOption)),
            (0, 5, Err(InvalidSortOption)),
        ] {
            assert_eq!(range(&RangeRequest { sort_order, sort_target, ..good.clone() }), expected);
        }
    }

    /// etcd: semantics 2.16; trap A14.
    #[test]
    fn streams_know_neither_sorting_nor_filters() {
        let good = RangeRequest { key: bytes("k"), ..Default::default() };
        for (sort_order, sort_target, expected) in [
            (0, 0, Ok(())),
            (0, 2, Ok(())),
            (1, 0, Ok(())),
            (1, 2, Err(StreamSortUnsupported)),
            (2, 0, Err(StreamSortUnsupported)),
            (9, 0, Err(InvalidSortOption)),
        ] {
            assert_eq!(range_stream(&RangeRequest { sort_order, sort_target, ..good.clone() }), expected);
        }
        let filtered = RangeRequest { max_create_revision: 1, ..good.clone() };
        assert_eq!(range_stream(&filtered), Err(StreamFilterUnsupported));
        let both = RangeRequest { sort_order: 2, ..filtered };
        assert_eq!(range_stream(&both), Err(StreamSortUnsupported));
        assert_eq!(range_stream(&RangeRequest::default()), Err(EmptyKey));
    }

    /// etcd: semantics 3.1 and 4.1, in this order.
    #[test]
    fn puts_and_deletes() {
        let good = PutRequest { key: bytes("k"), value: bytes("v"), lease: 1, ..Default::default() };
        assert_eq!(put(&good, &LIMITS), Ok(()));
        let both = PutRequest { ignore_value: true, ignore_lease: true, ..good.clone() };
        assert_eq!(put(&PutRequest { key: Bytes::new(), ..both.clone() }, &LIMITS), Err(EmptyKey));
        assert_eq!(put(&both, &LIMITS), Err(ValueProvided));
        assert_eq!(put(&PutRequest { value: Bytes::new(), ..both.clone() }, &LIMITS), Err(LeaseProvided));
        assert_eq!(put(&PutRequest { value: Bytes::new(), lease: 0, ..both }, &LIMITS), Ok(()));
        assert_eq!(delete_range(&DeleteRangeRequest::default(), &LIMITS), Err(EmptyKey));
    }

    /// etcd: semantics 5.1; trap B6.
    #[test]
    fn operations_are_counted_by_the_longest_list_and_down_the_levels() {
        let many = |n: usize| (0..n).map(|i| puts(&format!("{i}"))).collect::<Vec<_>>();
        assert_eq!(verdict(txn_of(many(128), many(128))), Ok(()));
        assert_eq!(verdict(txn_of(many(129), vec![])), Err(TooManyOps));
        assert_eq!(verdict(txn_of(vec![], many(129))), Err(TooManyOps));
        let compare = vec![Compare { key: bytes("k"), ..Default::default() }; 129];
        assert_eq!(verdict(TxnRequest { compare, ..Default::default() }), Err(TooManyOps));

        let ranges_and = |n: usize, op| (0..n - 1).map(|_| ranges("k")).chain([op]).collect::<Vec<_>>();
        assert_eq!(verdict(txn_of(ranges_and(100, nested(many(28), vec![])), vec![])), Ok(()));
        assert_eq!(verdict(txn_of(ranges_and(100, nested(many(29), vec![])), vec![])), Err(TooManyOps));
        // The longest list of the parent counts, not the one the child stands in.
        let lopsided = txn_of(vec![nested(many(29), vec![])], ranges_and(100, ranges("k")));
        assert_eq!(verdict(lopsided), Err(TooManyOps));
        assert_eq!(verdict(txn_of(ranges_and(128, nested(vec![], vec![])), vec![])), Ok(()));
    }

    /// etcd: semantics 5.2; trap B3. The branch that does not run is looked at as well, at any depth.
    #[test]
    fn both_branches_are_validated() {
        let bad = [
            (RequestOp { request: None }, KeyNotFound),
            (puts(""), EmptyKey),
            (ranges(""), EmptyKey),
            (deletes("", "x"), EmptyKey),
            (
                op(request_op::Request::RequestRange(RangeRequest {
                    key: bytes("k"),
                    sort_target: 7,
                    ..Default::default()
                })),
                InvalidSortOption,
            ),
            (
                op(request_op::Request::RequestTxn(TxnRequest {
                    compare: vec![Compare::default()],
                    ..Default::default()
                })),
                EmptyKey,
            ),
        ];
        for (bad, expected) in bad {
            let expected = Err(expected);
            assert_eq!(verdict(txn_of(vec![bad.clone()], vec![])), expected);
            assert_eq!(verdict(txn_of(vec![], vec![bad.clone()])), expected);
            assert_eq!(verdict(txn_of(vec![nested(vec![], vec![bad.clone()])], vec![])), expected);
        }
        // Fields before duplicates, compares before operations.
        assert_eq!(verdict(txn_of(vec![puts("a"), puts("a"), ranges("")], vec![])), Err(EmptyKey));
        let compare = vec![Compare::default()];
        let empty = RequestOp { request: None };
        assert_eq!(verdict(TxnRequest { compare, success: vec![empty], failure: vec![] }), Err(EmptyKey));
    }

    /// etcd: semantics 5.3 and 5.4; trap B4.
    #[test]
    fn duplicate_keys() {
        let cases = [
            ("two puts of one key", vec![puts("a"), puts("a")], false),
            ("put in a deleted range", vec![deletes("a", "c"), puts("b")], false),
            ("the order does not matter", vec![puts("b"), deletes("a", "c")], false),
            ("a deleted key is a range too", vec![puts("b"), deletes("b", "")], false),
            ("behind the range", vec![puts("c"), deletes("a", "c")], true),
            ("overlapping deletes", vec![deletes("a", "c"), deletes("b", "d")], true),
            ("ranges never collide", vec![ranges("a"), puts("a"), ranges("a")], true),
            ("5.4: an open end covers nothing", vec![deletes("a", "\0"), puts("b")], true),
            ("not even its own start", vec![deletes("a", "\0"), puts("a")], true),
            ("a range that ends before it starts", vec![deletes("c", "a"), puts("b")], true),
            ("then and else exclude each other", vec![nested(vec![puts("a")], vec![puts("a")])], true),
            ("delete in then, put in else", vec![nested(vec![deletes("a", "b")], vec![puts("a")])], true),
            ("siblings", vec![nested(vec![puts("a")], vec![]), nested(vec![], vec![puts("a")])], false),
            ("child and parent", vec![nested(vec![], vec![puts("a")]), puts("a")], false),
            ("child's put, parent's delete", vec![nested(vec![puts("a")], vec![]), deletes("a", "")], false),
            ("child's delete, parent's put", vec![puts("a"), nested(vec![], vec![deletes("a", "")])], false),
            (
                "a sibling's delete counts for those after it",
                vec![nested(vec![deletes("a", "")], vec![]), nested(vec![puts("a")], vec![])],
                false,
            ),
            (
                "and not for those before it",
                vec![nested(vec![puts("a")], vec![]), nested(vec![deletes("a", "")], vec![])],
                true,
            ),
            ("grandchildren", vec![nested(vec![nested(vec![puts("a")], vec![])], vec![]), puts("a")], false),
        ];
        for (what, ops, fine) in cases {
            let expected = if fine { Ok(()) } else { Err(DuplicateKey) };
            assert_eq!(verdict(txn_of(ops.clone(), vec![])), expected, "{what}");
            assert_eq!(verdict(txn_of(vec![], ops.clone())), expected, "{what}, in the other branch");
            assert_eq!(verdict(txn_of(vec![nested(ops, vec![])], vec![])), expected, "{what}, nested");
        }
    }

    /// etcd: api, section 6; trap G4. What etcd would propose: the request with its tag and length, and a header
    /// of 13 bytes with an id of nine.
    #[test]
    fn size_is_that_of_the_proposal() {
        let of = |n: usize| PutRequest { key: bytes("k"), value: vec![0; n].into(), ..Default::default() };
        // tag and length of the put, tag and length of the value, key
        let fits = LIMITS.max_request_bytes - 13 - 4 - 4 - 3;
        assert_eq!(put(&of(fits), &LIMITS), Ok(()));
        assert_eq!(put(&of(fits + 1), &LIMITS), Err(RequestTooLarge));
        assert_eq!(put(&PutRequest { key: Bytes::new(), ..of(fits + 1) }, &LIMITS), Err(EmptyKey));

        let long = |n: usize| bytes(&"k".repeat(n));
        let delete = DeleteRangeRequest { key: long(LIMITS.max_request_bytes), ..Default::default() };
        assert_eq!(delete_range(&delete, &LIMITS), Err(RequestTooLarge));
        let read = RangeRequest { key: long(LIMITS.max_request_bytes), ..Default::default() };
        assert_eq!(range(&read), Ok(()), "reads are not proposed");
        let read = || op(request_op::Request::RequestRange(read.clone()));
        assert_eq!(verdict(txn_of(vec![read()], vec![])), Ok(()));
        assert_eq!(verdict(txn_of(vec![read()], vec![puts("a")])), Err(RequestTooLarge));
        assert_eq!(verdict(txn_of(vec![nested(vec![read()], vec![])], vec![])), Err(RequestTooLarge));

        let request = CompactionRequest { revision: 5, physical: false };
        let up_to = |max_request_bytes| Limits { max_request_bytes, ..LIMITS };
        assert_eq!(compact(&request, &up_to(13 + 4)), Ok(()));
        assert_eq!(compact(&request, &up_to(13 + 3)), Err(RequestTooLarge));
        let short_id = Limits { member_id: 0x10000, ..up_to(13 + 4 - 8) };
        assert_eq!(compact(&request, &short_id), Ok(()), "a shorter id");
    }
}
