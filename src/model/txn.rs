//! What kind a transaction request is, as far as its shape alone tells.

use crate::proto::etcdserverpb::{RangeRequest, RequestOp, TxnRequest, request_op};

/// Only Ranges in both branches, none nested: it takes no revision and needs no log (etcd: semantics 5.15).
pub fn read_only(txn: &TxnRequest) -> bool {
    ranges(txn).all(|range| range.is_some())
}

/// Read-only, and every Range in both branches is serializable; so is a transaction without operations
/// (etcd: semantics 5.15).
pub fn serializable(txn: &TxnRequest) -> bool {
    ranges(txn).all(|range| range.is_some_and(|range| range.serializable))
}

/// The operations of both branches: the Range, or `None` for every other kind.
fn ranges(txn: &TxnRequest) -> impl Iterator<Item = Option<&RangeRequest>> {
    txn.success.iter().chain(&txn.failure).map(|op: &RequestOp| match &op.request {
        Some(request_op::Request::RequestRange(range)) => Some(range),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use request_op::Request;

    /// etcd: semantics 5.15.
    #[test]
    fn shapes() {
        let range = |serializable| RequestOp {
            request: Some(Request::RequestRange(RangeRequest { serializable, ..Default::default() })),
        };
        let nested = || RequestOp { request: Some(Request::RequestTxn(TxnRequest::default())) };
        let put = || RequestOp { request: Some(Request::RequestPut(Default::default())) };
        for (success, failure, is_read_only, is_serializable) in [
            (vec![], vec![], true, true),
            (vec![range(true)], vec![range(true)], true, true),
            (vec![range(true)], vec![range(false)], true, false),
            (vec![range(true)], vec![put()], false, false),
            (vec![nested()], vec![], false, false),
        ] {
            let txn = TxnRequest { compare: vec![], success, failure };
            assert_eq!(read_only(&txn), is_read_only, "{txn:?}");
            assert_eq!(serializable(&txn), is_serializable, "{txn:?}");
        }
    }
}
