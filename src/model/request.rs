//! What the API asks of the node and what it gets: the crossing between `api/` and everything below it.

use super::Rejection;
use crate::proto::etcdserverpb as pb;
use bytes::Bytes;

/// A request whose fields were validated (etcd: semantics 0.2, 2.1, 2.15, 3.1, 5.1-5.4); what depends on the
/// state of the store is decided where the state is.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// `count: false` skips the count of the range (chunks of a RangeStream after the first).
    Range {
        request: pb::RangeRequest,
        count: bool,
    },
    Put(pb::PutRequest),
    DeleteRange(pb::DeleteRangeRequest),
    Txn(pb::TxnRequest),
    Compact(pb::CompactionRequest),
    HashKv(pb::HashKvRequest),
    Status,
    Defragment,
    MemberList {
        linearizable: bool,
    },
}

/// Headers are complete (cluster id, member id, revision, term) where api.md section 3 says so.
#[derive(Clone, Debug, PartialEq)]
pub enum Response {
    Range(pb::RangeResponse),
    /// A long Range, encoded already; see `encoded`.
    RangeEncoded(Vec<Bytes>),
    Put(pb::PutResponse),
    DeleteRange(pb::DeleteRangeResponse),
    Txn(pb::TxnResponse),
    Compact(pb::CompactionResponse),
    HashKv(pb::HashKvResponse),
    Status(pb::StatusResponse),
    Defragment,
    MemberList(pb::MemberListResponse),
}

pub type Answer = Result<Response, Rejection>;
