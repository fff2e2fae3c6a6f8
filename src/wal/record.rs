//! Records and their headers. The format is drawn in `wal/mod.rs`.

use bytes::Bytes;

pub(super) const HEADER_BYTES: usize = 64;
/// Records start at multiples of this.
const ALIGN: usize = 8;
const MAGIC: &[u8; 3] = b"etl";
const VERSION: u8 = 1;
const FLAG_LAST: u8 = 1;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Entry = 1,
    /// Raft's term, vote and commit; the newest counts.
    HardState = 2,
    /// Says that a snapshot was installed; the newest counts.
    Mark = 3,
    /// Protects the flush before it (case D2).
    Seal = 4,
}

/// Where a record stands: the segment's number and the offset of the header in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub segment: u64,
    pub offset: u64,
}

/// A record as replay finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    pub kind: Kind,
    pub index: u64,
    pub body: Bytes,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub last: bool,
    pub segment: u64,
    pub flush: u64,
    pub after: u64,
    pub index: u64,
    pub offset: u32,
    pub length: u32,
    pub chain_before: u32,
    pub chain: u32,
    pub ordinal: u32,
}

/// Why sixty-four bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoHeader {
    /// Anything: zeros, other data, a damaged header.
    Invalid,
    /// A sound header of a format that this version does not know.
    Newer(u8),
}

impl Header {
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..3].copy_from_slice(MAGIC);
        bytes[3] = VERSION;
        bytes[4] = self.kind as u8;
        bytes[5] = if self.last { FLAG_LAST } else { 0 };
        bytes[8..16].copy_from_slice(&self.segment.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.flush.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.after.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.index.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.offset.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.length.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.chain_before.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.chain.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.ordinal.to_le_bytes());
        let check = crc32c::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// From the first sixty-four of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Header, NoHeader> {
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(NoHeader::Invalid)?;
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if &bytes[..3] != MAGIC || crc32c::crc32c(&bytes[..60]) != u32_at(60) {
            return Err(NoHeader::Invalid);
        }
        if bytes[3] > VERSION {
            return Err(NoHeader::Newer(bytes[3]));
        }
        let kind = match bytes[4] {
            1 => Kind::Entry,
            2 => Kind::HardState,
            3 => Kind::Mark,
            4 => Kind::Seal,
            _ => return Err(NoHeader::Invalid),
        };
        Ok(Header {
            kind,
            last: bytes[5] & FLAG_LAST != 0,
            segment: u64_at(8),
            flush: u64_at(16),
            after: u64_at(24),
            index: u64_at(32),
            offset: u32_at(40),
            length: u32_at(44),
            chain_before: u32_at(48),
            chain: u32_at(52),
            ordinal: u32_at(56),
        })
    }
}

/// What a record with a body of this length takes.
pub(super) fn record_bytes(body: usize) -> usize {
    (HEADER_BYTES + body).next_multiple_of(ALIGN)
}
