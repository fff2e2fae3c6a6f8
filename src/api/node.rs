//! The crossing from the gRPC services to the store: one call per validated request.
//!
//! Promises nothing itself; it only names what the services need. It does not know cores, shards or Raft.

use crate::model::{Answer, Request};
use std::future::Future;

/// What the services talk to: the runtime's handle of this process's node, or a double in tests.
///
/// A call whose future is dropped may still take effect, as a request whose connection broke may.
pub trait Node: Clone + Send + Sync + 'static {
    fn call(&self, request: Request) -> impl Future<Output = Answer> + Send;
}

/// Limits that the services apply before the store sees a request.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// `--max-request-bytes`: bound of a proposal; a message may be [`MESSAGE_BYTES_OVERHEAD`] longer.
    pub max_request_bytes: usize,
    /// `--max-txn-ops`.
    pub max_txn_ops: usize,
    /// Decides how long etcd's encoding of a proposal's header is.
    pub member_id: u64,
}

/// What a message may have above `--max-request-bytes` before the gRPC layer refuses it (etcd: trap G4).
pub const MESSAGE_BYTES_OVERHEAD: usize = 512 << 10;

impl Limits {
    /// The longest message that is decoded.
    pub fn message_bytes_max(&self) -> usize {
        self.max_request_bytes.saturating_add(MESSAGE_BYTES_OVERHEAD)
    }

    /// True if etcd's encoding of this request as a proposal stays within `--max-request-bytes`.
    /// `request_bytes` is the length of the encoded client message (etcd: api.md 6).
    ///
    /// The proposal is the message as a field with a one-byte tag, and a header with a 64-bit id whose upper
    /// 16 bits are the lower 16 of the member id.
    pub fn proposal_fits(&self, request_bytes: usize) -> bool {
        let id = (self.member_id & 0xffff) << 48 | 1;
        let header = 1 + varint_bytes(id);
        let header_field = 2 + varint_bytes(header as u64) + header;
        let request_field = 1 + varint_bytes(request_bytes as u64) + request_bytes;
        header_field + request_field <= self.max_request_bytes
    }
}

fn varint_bytes(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varint_lengths() {
        for (value, bytes) in
            [(0, 1), (127, 1), (128, 2), (16383, 2), (16384, 3), (1 << 56, 9), (1 << 63, 10)]
        {
            assert_eq!(varint_bytes(value), bytes, "{value}");
        }
    }

    #[test]
    fn a_proposal_may_be_as_long_as_the_limit_and_no_longer() {
        let limits = Limits { max_request_bytes: 1572864, max_txn_ops: 128, member_id: 0x8e9e05c52164694d };
        // 13 bytes of header field, one of tag, three of length.
        assert!(limits.proposal_fits(1572864 - 17));
        assert!(!limits.proposal_fits(1572864 - 16));
    }
}
