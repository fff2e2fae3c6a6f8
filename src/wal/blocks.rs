//! Byte buffers that direct I/O accepts: whole blocks, aligned to blocks. Does not know what is in them.

use crate::model::limits::LOG_BLOCK_BYTES;
use std::fmt;

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Block([u8; LOG_BLOCK_BYTES]);

const ZERO: Block = Block([0; LOG_BLOCK_BYTES]);
const _: () = assert!(size_of::<Block>() == LOG_BLOCK_BYTES && align_of::<Block>() == LOG_BLOCK_BYTES);

/// A growing buffer of whole blocks; what was not written is zero.
#[derive(Default)]
pub(super) struct Blocks(Vec<Block>);

impl Blocks {
    pub fn zeroed(bytes: usize) -> Self {
        let mut blocks = Blocks::default();
        blocks.grow(bytes);
        blocks
    }

    /// Makes the buffer at least so long.
    pub fn grow(&mut self, bytes: usize) {
        let count = bytes.div_ceil(LOG_BLOCK_BYTES);
        if count > self.0.len() {
            self.0.resize(count, ZERO);
        }
    }

    /// Copies bytes to a place, growing as needed.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.grow(at + bytes.len());
        self.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: blocks are arrays of bytes without padding (asserted above), contiguous in the vector.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * LOG_BLOCK_BYTES) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * LOG_BLOCK_BYTES) }
    }
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks", self.0.len())
    }
}

/// Buffers that were used and will be again. While one is written, one is filled: more than a few are never
/// idle, and an unusually large one is not worth keeping.
#[derive(Debug, Default)]
pub(super) struct Pool(Vec<Blocks>);

impl Pool {
    const COUNT_MAX: usize = 3;
    const BUFFER_BYTES_MAX: usize = 1 << 20;

    pub fn take(&mut self) -> Blocks {
        self.0.pop().unwrap_or_default()
    }

    pub fn give(&mut self, mut blocks: Blocks) {
        if self.0.len() < Self::COUNT_MAX && blocks.bytes().len() <= Self::BUFFER_BYTES_MAX {
            blocks.0.clear();
            self.0.push(blocks);
        }
    }
}
