//! What a request's own fields decide (etcd: semantics 2.1, 2.15, 3.1, 4.1).

use crate::model::Rejection;
use crate::proto::etcdserverpb as pb;
use pb::range_request::{SortOrder, SortTarget};

pub fn range(request: &pb::RangeRequest) -> Result<(), Rejection> {
    key(&request.key)?;
    match (SortOrder::try_from(request.sort_order), SortTarget::try_from(request.sort_target)) {
        (Ok(_), Ok(_)) => Ok(()),
        _ => Err(Rejection::InvalidSortOption),
    }
}

pub fn put(request: &pb::PutRequest) -> Result<(), Rejection> {
    key(&request.key)?;
    if request.ignore_value && !request.value.is_empty() {
        return Err(Rejection::ValueProvided);
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(Rejection::LeaseProvided);
    }
    Ok(())
}

pub fn delete_range(request: &pb::DeleteRangeRequest) -> Result<(), Rejection> {
    key(&request.key)
}

pub fn txn(request: &pb::TxnRequest, ops_max: usize) -> Result<(), Rejection> {
    let ops = request.compare.len().max(request.success.len()).max(request.failure.len());
    if ops > ops_max { Err(Rejection::TooManyOps) } else { Ok(()) }
}

fn key(key: &[u8]) -> Result<(), Rejection> {
    if key.is_empty() { Err(Rejection::EmptyKey) } else { Ok(()) }
}
