//! The gRPC code and text of everything that is answered with an error. Clients match on the text and, some of
//! them, on the code, so both are etcd's (etcd: errors.md), also where etcd sends `Unknown`.
//!
//! Knows nothing of where a rejection came from.

use crate::model::Rejection;
use tonic::{Code, Status};

/// The status a client sees for a rejection.
pub fn of(rejection: Rejection) -> Status {
    let (code, text) = code_and_text(&rejection);
    Status::new(code, text)
}

fn code_and_text(rejection: &Rejection) -> (Code, &'static str) {
    use Code::*;
    match rejection {
        Rejection::EmptyKey => (InvalidArgument, "etcdserver: key is not provided"),
        Rejection::KeyNotFound => (InvalidArgument, "etcdserver: key not found"),
        Rejection::ValueProvided => (InvalidArgument, "etcdserver: value is provided"),
        Rejection::LeaseProvided => (InvalidArgument, "etcdserver: lease is provided"),
        Rejection::TooManyOps => (InvalidArgument, "etcdserver: too many operations in txn request"),
        Rejection::DuplicateKey => (InvalidArgument, "etcdserver: duplicate key given in txn request"),
        Rejection::InvalidSortOption => (InvalidArgument, "etcdserver: invalid sort option"),
        Rejection::Compacted => (OutOfRange, "etcdserver: mvcc: required revision has been compacted"),
        Rejection::FutureRev => (OutOfRange, "etcdserver: mvcc: required revision is a future revision"),
        Rejection::LeaseNotFound => (NotFound, "etcdserver: requested lease not found"),
        Rejection::RequestTooLarge => (InvalidArgument, "etcdserver: request is too large"),
        // etcd answers with its client's error type, which its gRPC library takes for an unknown one.
        Rejection::TooManyRequests => (Unknown, "etcdserver: too many requests"),
        Rejection::NoSpace => (ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
        Rejection::Timeout => (Unavailable, "etcdserver: request timed out"),
        Rejection::TimeoutDueToLeaderFail => {
            (Unavailable, "etcdserver: request timed out, possibly due to previous leader failure")
        }
        Rejection::LeaderChanged => (Unavailable, "etcdserver: leader changed"),
        Rejection::NoLeader => (Unavailable, "etcdserver: no leader"),
        Rejection::Stopped => (Unavailable, "etcdserver: server stopped"),
        Rejection::StreamSortUnsupported => {
            (Unimplemented, "RangeStream does not support custom sort orders")
        }
        Rejection::StreamFilterUnsupported => {
            (Unimplemented, "RangeStream does not support revision filters")
        }
        Rejection::InvalidClientApiVersion => (InvalidArgument, "etcdserver: invalid client api version"),
    }
}

/// Go's gRPC library words some refusals of the transport in its own way, and Go clients show them to people;
/// tonic's are turned into those (etcd: trap G4, errors.md 2). Everything else passes.
pub fn from_transport(status: Status) -> Status {
    if status.code() == Code::OutOfRange
        && let Some((found, limit)) = message_too_long(status.message())
    {
        return Status::resource_exhausted(format!(
            "grpc: received message larger than max ({found} vs. {limit})"
        ));
    }
    if status.code() == Code::Internal && status.message().starts_with("failed to decode Protobuf message") {
        return Status::internal(
            "grpc: error unmarshalling request: proto: cannot parse invalid wire-format data",
        );
    }
    status
}

/// The two numbers of tonic's text about a message that is too long. A test sends one through tonic, so that a
/// new wording is noticed.
fn message_too_long(text: &str) -> Option<(u64, u64)> {
    let rest = text.strip_prefix("Error, decoded message length too large: found ")?;
    let (found, rest) = rest.split_once(" bytes, the limit is: ")?;
    Some((found.parse().ok()?, rest.strip_suffix(" bytes")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of errors.md once more, in numbers: a slip in either is a difference.
    #[test]
    fn every_rejection_has_the_code_and_text_of_etcd() {
        use Rejection::*;
        let table = [
            (EmptyKey, 3, "etcdserver: key is not provided"),
            (KeyNotFound, 3, "etcdserver: key not found"),
            (ValueProvided, 3, "etcdserver: value is provided"),
            (LeaseProvided, 3, "etcdserver: lease is provided"),
            (TooManyOps, 3, "etcdserver: too many operations in txn request"),
            (DuplicateKey, 3, "etcdserver: duplicate key given in txn request"),
            (InvalidSortOption, 3, "etcdserver: invalid sort option"),
            (Compacted, 11, "etcdserver: mvcc: required revision has been compacted"),
            (FutureRev, 11, "etcdserver: mvcc: required revision is a future revision"),
            (LeaseNotFound, 5, "etcdserver: requested lease not found"),
            (RequestTooLarge, 3, "etcdserver: request is too large"),
            (TooManyRequests, 2, "etcdserver: too many requests"),
            (NoSpace, 8, "etcdserver: mvcc: database space exceeded"),
            (Timeout, 14, "etcdserver: request timed out"),
            (
                TimeoutDueToLeaderFail,
                14,
                "etcdserver: request timed out, possibly due to previous leader failure",
            ),
            (LeaderChanged, 14, "etcdserver: leader changed"),
            (NoLeader, 14, "etcdserver: no leader"),
            (Stopped, 14, "etcdserver: server stopped"),
            (StreamSortUnsupported, 12, "RangeStream does not support custom sort orders"),
            (StreamFilterUnsupported, 12, "RangeStream does not support revision filters"),
            (InvalidClientApiVersion, 3, "etcdserver: invalid client api version"),
        ];
        for (rejection, code, text) in table {
            let status = of(rejection.clone());
            assert_eq!((status.code() as i32, status.message()), (code, text), "{rejection:?}");
        }
    }

    #[test]
    fn other_statuses_of_the_transport_pass_unchanged() {
        for status in [
            Status::out_of_range("etcdserver: mvcc: required revision has been compacted"),
            Status::internal("Missing request message."),
        ] {
            let passed = from_transport(status.clone());
            assert_eq!((passed.code(), passed.message()), (status.code(), status.message()));
        }
    }
}
