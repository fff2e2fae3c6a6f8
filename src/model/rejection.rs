//! Rejections: deterministic answers that belong to the request and go to the client. A fault of this machine
//! is never a rejection. The gRPC code and etcd's text of each stand in `api/status.rs`.

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    #[error("key is not provided")]
    EmptyKey,
    #[error("key not found")]
    KeyNotFound,
    #[error("value is provided")]
    ValueProvided,
    #[error("lease is provided")]
    LeaseProvided,
    #[error("too many operations in txn request")]
    TooManyOps,
    #[error("duplicate key given in txn request")]
    DuplicateKey,
    #[error("invalid sort option")]
    InvalidSortOption,
    #[error("required revision has been compacted")]
    Compacted,
    #[error("required revision is a future revision")]
    FutureRev,
    #[error("requested lease not found")]
    LeaseNotFound,
    #[error("request is too large")]
    RequestTooLarge,
    #[error("too many requests")]
    TooManyRequests,
    #[error("database space exceeded")]
    NoSpace,
    #[error("request timed out")]
    Timeout,
    #[error("request timed out, possibly due to previous leader failure")]
    TimeoutDueToLeaderFail,
    #[error("leader changed")]
    LeaderChanged,
    #[error("no leader")]
    NoLeader,
    #[error("server stopped")]
    Stopped,
    #[error("RangeStream does not support custom sort orders")]
    StreamSortUnsupported,
    #[error("RangeStream does not support revision filters")]
    StreamFilterUnsupported,
    #[error("invalid client api version")]
    InvalidClientApiVersion,
}
