//! The meta page: what makes a file of pages a tree. Two of them, pages 0 and 1, written in turn; generation g
//! stands in page g mod 2, so that the one before is untouched while g is written.
//!
//! ```text
//!  0  header      10
//! 10  -           6
//! 16  magic       "etcore tree\n" + four zero bytes
//! 32  version     u32   of the format
//! 36  page bytes  u32
//! 40  generation  u64
//! 48  pages       u32   one past the highest page in use
//! 52  bitmap      u32   first page of the run that holds the bitmap of pages in use; 0: none but the meta pages
//! 56  bitmap len  u32   bytes
//! 60  -           4
//! 64  roots       5 × (page u32, depth u32, entries u64): kv, rev, old, lease, meta; page 0 for an empty table
//!     zeros
//! ```
//!
//! A later version keeps header, magic and version where they are.

use super::page::{self, META, Page, u32_at, u64_at};
use crate::model::limits::PAGE_BYTES;

const MAGIC: [u8; 16] = *b"etcore tree\n\0\0\0\0";
/// The version that this program writes and the newest it reads.
pub const VERSION: u32 = 1;

/// Where a table begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Root {
    /// 0: the table is empty.
    pub page: u32,
    /// Pages from root to leaf.
    pub depth: u32,
    pub entries: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    pub generation: u64,
    pub pages: u32,
    pub bitmap_page: u32,
    pub bitmap_len: u32,
    pub roots: [Root; 5],
}

/// Why a meta page cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub enum Unusable {
    Damaged(String),
    /// Of a later program: its version, or its size of pages.
    Foreign(String),
}

impl Meta {
    /// The page of the two that this one belongs in.
    pub fn number(&self) -> u32 {
        (self.generation % 2) as u32
    }

    pub fn encode(&self) -> Box<Page> {
        let mut page: Box<Page> = Box::new([0; PAGE_BYTES]);
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(16, &MAGIC);
        put(32, &VERSION.to_le_bytes());
        put(36, &(PAGE_BYTES as u32).to_le_bytes());
        put(40, &self.generation.to_le_bytes());
        put(48, &self.pages.to_le_bytes());
        put(52, &self.bitmap_page.to_le_bytes());
        put(56, &self.bitmap_len.to_le_bytes());
        for (index, root) in self.roots.iter().enumerate() {
            let at = 64 + 16 * index;
            put(at, &root.page.to_le_bytes());
            put(at + 4, &root.depth.to_le_bytes());
            put(at + 8, &root.entries.to_le_bytes());
        }
        page::set_header(&mut page[..], self.number(), META);
        let crc = page::checksum(&page[..]);
        page[..4].copy_from_slice(&crc.to_le_bytes());
        page
    }

    pub fn decode(page: &Page, number: u32) -> Result<Meta, Unusable> {
        let damaged = |what: &str| Unusable::Damaged(what.into());
        if page[16..32] != MAGIC || page::kind(page) != META {
            return Err(damaged("it does not begin like a meta page"));
        }
        page::verify(page, number).map_err(Unusable::Damaged)?;
        let (version, page_bytes) = (u32_at(page, 32), u32_at(page, 36));
        if version != VERSION {
            return Err(Unusable::Foreign(format!(
                "has format version {version}, this program knows {VERSION}"
            )));
        }
        if page_bytes as usize != PAGE_BYTES {
            return Err(Unusable::Foreign(format!("has pages of {page_bytes} bytes, not {PAGE_BYTES}")));
        }
        let mut meta = Meta {
            generation: u64_at(page, 40),
            pages: u32_at(page, 48),
            bitmap_page: u32_at(page, 52),
            bitmap_len: u32_at(page, 56),
            roots: Default::default(),
        };
        for (index, root) in meta.roots.iter_mut().enumerate() {
            let at = 64 + 16 * index;
            *root =
                Root { page: u32_at(page, at), depth: u32_at(page, at + 4), entries: u64_at(page, at + 8) };
        }
        if meta.number() != number {
            return Err(damaged("its generation belongs in the other meta page"));
        }
        Ok(meta)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meta_page_says_what_was_written_and_any_changed_bit_shows() {
        let root = |page| Root { page, depth: 2, entries: 1 << 40 };
        let meta = Meta {
            generation: 7,
            pages: 99,
            bitmap_page: 98,
            bitmap_len: 16,
            roots: [root(3), root(4), root(5), root(6), Root::default()],
        };
        let page = meta.encode();
        assert_eq!(Meta::decode(&page, 1), Ok(meta));
        for at in 0..PAGE_BYTES {
            if (4..10).contains(&at) || at % 7 == 0 {
                let mut page = page.clone();
                page[at] ^= 4;
                assert!(matches!(Meta::decode(&page, 1), Err(Unusable::Damaged(_))), "byte {at}");
            }
        }
        assert!(matches!(Meta::decode(&page, 0), Err(Unusable::Damaged(_))), "in the other one's place");
    }
}
