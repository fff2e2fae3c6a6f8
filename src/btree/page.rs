//! The layout of a page, as bytes: header, checksum, runs. It does not know where pages stand or what they mean.
//!
//! All numbers are little-endian. Every page (and the first page of every run) begins:
//!
//! ```text
//!  0  crc     u32   CRC-32C of what follows: of the whole page, or of a run up to its last used byte
//!  4  number  u32   the page's own number; its place in the file is number * PAGE_BYTES
//!  8  kind    u8    1 meta, 2 leaf, 3 inner, 4 run
//!  9  -       u8
//! ```
//!
//! A run is a byte string over as many whole pages as it needs, one header for all of them:
//!
//! ```text
//! 10  -       u16
//! 12  len     u32
//! 16  bytes   len, then zeros to the end of the last page
//! ```
//!
//! The checksum is computed when a page is written; in memory its place holds anything.

use crate::model::limits::PAGE_BYTES;

pub type Page = [u8; PAGE_BYTES];

pub const META: u8 = 1;
pub const LEAF: u8 = 2;
pub const INNER: u8 = 3;
pub const RUN: u8 = 4;

/// Header of a run.
pub const RUN_HEADER: usize = 16;

#[inline(always)]
pub fn u16_at(page: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([page[at], page[at + 1]])
}

#[inline(always)]
pub fn u32_at(page: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"))
}

#[inline(always)]
pub fn u64_at(page: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"))
}

pub fn number(page: &[u8]) -> u32 {
    u32_at(page, 4)
}

pub fn kind(page: &[u8]) -> u8 {
    page[8]
}

pub fn set_header(page: &mut [u8], number: u32, kind: u8) {
    page[4..8].copy_from_slice(&number.to_le_bytes());
    page[8] = kind;
}

/// Pages of a run that holds this many bytes.
pub fn run_pages(len: usize) -> u32 {
    (RUN_HEADER + len).div_ceil(PAGE_BYTES) as u32
}

/// Puts the header of a run of `len` bytes in place.
pub fn set_run_header(run: &mut [u8], number: u32, len: usize) {
    set_header(run, number, RUN);
    run[12..16].copy_from_slice(&(len as u32).to_le_bytes());
}

/// Bytes that the checksum of this page or run covers, from 4 to this. None if it says more than there are.
fn covered(bytes: &[u8]) -> Option<usize> {
    let end = if kind(bytes) == RUN { RUN_HEADER + u32_at(bytes, 12) as usize } else { PAGE_BYTES };
    (end <= bytes.len()).then_some(end)
}

/// Writes the checksum of a page or run whose first byte this is.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(&bytes[4..covered(bytes).expect("a page as it was made")])
}

/// What is wrong with a page that should have this number, as far as header and checksum tell.
pub fn verify(bytes: &[u8], number_expected: u32) -> Result<(), String> {
    let end = covered(bytes).ok_or_else(|| "a run longer than its pages".to_string())?;
    let (stored, computed) = (u32_at(bytes, 0), crc32c::crc32c(&bytes[4..end]));
    if stored != computed {
        return Err(format!("checksum is {computed:08x}, stored is {stored:08x}"));
    }
    if number(bytes) != number_expected {
        return Err(format!("it is page {} in the place of another", number(bytes)));
    }
    Ok(())
}
