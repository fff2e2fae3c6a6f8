//! Revisions.

/// A revision and the number of one change inside it (etcd: semantics 1.3). `main` counts from 1 (the empty
/// store), `sub` from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rev {
    pub main: i64,
    pub sub: u32,
}

impl Rev {
    pub const fn new(main: i64, sub: u32) -> Self {
        Rev { main, sub }
    }

    /// Eight bytes of `main` and four of `sub`, big endian: bytewise order is revision order.
    pub fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&(self.main as u64).to_be_bytes());
        bytes[8..].copy_from_slice(&self.sub.to_be_bytes());
        bytes
    }

    /// The inverse of [`Rev::to_bytes`]; `None` unless there are exactly twelve bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let main = u64::from_be_bytes(bytes.get(..8)?.try_into().ok()?) as i64;
        let sub = u32::from_be_bytes(bytes.get(8..)?.try_into().ok()?);
        Some(Rev { main, sub })
    }
}
