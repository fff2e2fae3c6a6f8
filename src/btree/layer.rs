//! Pages in memory that no durable checkpoint holds yet: buffers, and maps from page number to buffer. A layer
//! that is frozen (shared by `Arc`) never changes; the newest one, still being edited, belongs to the tree alone.
//! It knows neither the file nor what is in the pages.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ptr::NonNull;
use std::sync::Arc;

use super::page::Page;
use crate::model::limits::PAGE_BYTES;

/// Memory of exactly some pages. Apart from its owners, so that a page costs a page, not the next size of the
/// allocator.
#[derive(Debug)]
struct Block {
    at: NonNull<u8>,
    pages: u32,
}

// SAFETY: a block is plain memory with one owner of the allocation.
unsafe impl Send for Block {}
// SAFETY: it is written only through `Buffer::bytes_mut`, whose caller owns it alone.
unsafe impl Sync for Block {}

impl Block {
    fn layout(pages: u32) -> Layout {
        // The alignment at which mimalloc gives exactly this size; for less, oddly, it takes the next size up.
        Layout::from_size_align(pages as usize * PAGE_BYTES, 4096)
            .expect("a size that fits the address space")
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated by `Buffer` with this layout.
        unsafe { dealloc(self.at.as_ptr(), Block::layout(self.pages)) }
    }
}

/// One page, or the pages of one run.
#[derive(Debug)]
pub struct Buffer {
    /// Same as the block's; saves the way through the `Arc` when reading.
    at: NonNull<u8>,
    block: Arc<Block>,
}

// SAFETY: see Block.
unsafe impl Send for Buffer {}
// SAFETY: see Block.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub fn zeroed(pages: u32) -> Buffer {
        let layout = Block::layout(pages);
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc_zeroed(layout) };
        let Some(at) = NonNull::new(at) else { handle_alloc_error(layout) };
        Buffer { at, block: Arc::new(Block { at, pages }) }
    }

    pub fn copy_of(page: &Page) -> Buffer {
        let layout = Block::layout(1);
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc(layout) };
        let Some(at) = NonNull::new(at) else { handle_alloc_error(layout) };
        // SAFETY: both are one page long, and the new one overlaps nothing.
        unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), at.as_ptr(), PAGE_BYTES) };
        Buffer { at, block: Arc::new(Block { at, pages: 1 }) }
    }

    pub fn pages(&self) -> u32 {
        self.block.pages
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block lives while `self` does and has this length; nobody writes to it while it is borrowed,
        // since writing takes `&mut` of its only owner.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.pages() as usize * PAGE_BYTES) }
    }

    /// The first page.
    #[inline(always)]
    pub fn page(&self) -> &Page {
        // SAFETY: as in `bytes`; a block has at least one page.
        unsafe { &*self.at.as_ptr().cast::<Page>() }
    }

    fn is_shared(&mut self) -> bool {
        Arc::get_mut(&mut self.block).is_none()
    }

    fn share(&self) -> Buffer {
        Buffer { at: self.at, block: self.block.clone() }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        debug_assert!(!self.is_shared(), "an edited page has one owner");
        // SAFETY: buffers are shared only by `Layer::merged`, between frozen layers, and none that is shared comes
        // back to a place where it is edited (`Layer::take`); so this is the only owner.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.pages() as usize * PAGE_BYTES) }
    }

    #[inline(always)]
    pub fn page_mut(&mut self) -> &mut Page {
        debug_assert!(!self.is_shared(), "an edited page has one owner");
        // SAFETY: as in `bytes_mut`.
        unsafe { &mut *self.at.as_ptr().cast::<Page>() }
    }
}

/// Spreads page numbers, which mostly follow one another, over all bits.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u32(u32::from(byte) ^ self.0 as u32);
        }
    }

    #[inline(always)]
    fn write_u32(&mut self, number: u32) {
        // The table takes its index from the low bits and its tag from the top seven.
        let spread = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ spread >> 32;
    }
}

/// Buffers by the number of their (first) page.
#[derive(Debug, Default)]
pub struct Layer {
    buffers: HashMap<u32, Buffer, BuildHasherDefault<NumberHasher>>,
    pages: usize,
}

impl Layer {
    #[inline(always)]
    pub fn get(&self, number: u32) -> Option<&Buffer> {
        self.buffers.get(&number)
    }

    #[inline(always)]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut Buffer> {
        self.buffers.get_mut(&number)
    }

    pub fn put(&mut self, number: u32, buffer: Buffer) {
        self.pages += buffer.pages() as usize;
        let before = self.buffers.insert(number, buffer);
        assert!(before.is_none(), "a page number is in use once");
    }

    pub fn remove(&mut self, number: u32) -> Option<Buffer> {
        let buffer = self.buffers.remove(&number)?;
        self.pages -= buffer.pages() as usize;
        Some(buffer)
    }

    /// Takes a buffer out of a frozen layer, if nobody else can see it.
    pub fn take(layer: &mut Arc<Layer>, number: u32) -> Option<Buffer> {
        let layer = Arc::get_mut(layer)?;
        if layer.get_mut(number)?.is_shared() {
            return None;
        }
        layer.remove(number)
    }

    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// Pages in all buffers.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The numbers of all buffers, in no order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.buffers.keys().copied()
    }

    /// One layer in place of two, without those buffers that `keep` does not want.
    pub fn merged(older: Arc<Layer>, newer: Arc<Layer>, keep: impl Fn(u32) -> bool) -> Layer {
        let (mut into, from) = match Arc::try_unwrap(older) {
            Ok(older) => (older, newer),
            Err(older) => match Arc::try_unwrap(newer) {
                Ok(newer) => (newer, older),
                Err(newer) => {
                    let mut both = Layer::default();
                    both.absorb(older, &keep);
                    (both, newer)
                }
            },
        };
        into.buffers.retain(|&number, _| keep(number));
        into.pages = into.buffers.values().map(|buffer| buffer.pages() as usize).sum();
        into.absorb(from, &keep);
        into
    }

    fn absorb(&mut self, from: Arc<Layer>, keep: &impl Fn(u32) -> bool) {
        match Arc::try_unwrap(from) {
            Ok(from) => {
                for (number, buffer) in from.buffers {
                    if keep(number) {
                        self.put(number, buffer);
                    }
                }
            }
            Err(from) => {
                for (&number, buffer) in &from.buffers {
                    if keep(number) {
                        self.put(number, buffer.share());
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(numbers: &[u32]) -> Layer {
        let mut layer = Layer::default();
        for &number in numbers {
            let mut buffer = Buffer::zeroed(1);
            buffer.page_mut()[100] = number as u8;
            layer.put(number, buffer);
        }
        layer
    }

    #[test]
    fn a_merged_layer_shares_what_a_snapshot_pins() {
        let (older, newer) = (Arc::new(layer(&[2, 3])), Arc::new(layer(&[4, 5])));
        let pins = (older.clone(), newer.clone());
        let mut merged = Arc::new(Layer::merged(older, newer, |number| number != 3));
        let mut numbers: Vec<_> = merged.numbers().collect();
        numbers.sort_unstable();
        assert_eq!((numbers, merged.pages()), (vec![2, 4, 5], 3));
        assert!(Layer::take(&mut merged, 4).is_none(), "a snapshot still reads page 4");
        drop(pins);
        assert_eq!(Layer::take(&mut merged, 4).expect("free to take").page()[100], 4);
        assert_eq!(merged.pages(), 2);
    }
}
