//! One node of a tree: a slotted page of cells in key order. Pure functions over its bytes; it does not know
//! where pages stand, and asks a `Tails` for what long keys keep elsewhere.
//!
//! ```text
//!  0  header  10        see page.rs; kind is leaf or inner
//! 10  count   u16       cells
//! 12  heap    u16       offset of the lowest cell
//! 14  dead    u16       bytes between `heap` and the prefix that no slot points to
//! 16  prefix  u16       length of what all keys here begin with; it is the page's last bytes
//! 18  -       6
//! 24  slots   8 each    head u32: the first four bytes of the key after the prefix, as a big-endian number
//!                       offset u16: of the cell
//!                       len u16: bytes of the key in the cell; the top bit says that a tail follows
//!     ...               free
//!     cells             leaf:  value length u16, key, [tail], value
//!                       inner: child u32, entries below the child u64, key, [tail]
//!     prefix
//! ```
//!
//! A key in a cell lacks the page's prefix. A key over `KEY_INLINE_MAX` bytes keeps its first `KEY_HEAD` in the
//! page and the rest in a run (tail: page u32, len u32) that belongs to this cell alone. The key of an inner cell
//! is the shortest that divides what is below it from what is below the cell before; the first cell of an inner
//! node has no key and stands for everything less than the second.

use std::cmp::Ordering;

use super::page::{self, INNER, LEAF, Page, u16_at, u32_at, u64_at};
use crate::model::limits::{PAGE_BYTES, VALUE_INLINE_BYTES_MAX};

/// The longest key that stands whole in a page.
pub const KEY_INLINE_MAX: usize = PAGE_BYTES / 8;
/// What stands in the page of a longer one.
pub const KEY_HEAD: usize = PAGE_BYTES / 16;
/// The longest value of an entry: what is stored with a user's value comes on top of it.
pub const VALUE_MAX: usize = VALUE_INLINE_BYTES_MAX + 64;

const SLOTS: usize = 24;
const SLOT: usize = 8;
const LEAF_FRONT: usize = 2;
const INNER_FRONT: usize = 12;
const TAIL: usize = 8;
const LONG: u16 = 1 << 15;
/// A prefix leaves at least four bytes of a long key's head in its cell: the slot's head needs them.
const PREFIX_MAX: usize = KEY_HEAD - 4;
/// Room for slots, cells and prefix.
pub const ROOM: usize = PAGE_BYTES - SLOTS;

// Whatever a full page and one cell more hold can be divided into two pages that fit: all but the largest cell
// go left, which leaves at most this for the right.
const CELL_MAX: usize = SLOT + LEAF_FRONT + KEY_INLINE_MAX + VALUE_MAX;
const _: () = assert!(2 * CELL_MAX + PREFIX_MAX <= ROOM);
const _: () = assert!(KEY_HEAD + TAIL <= KEY_INLINE_MAX);

/// The run that holds the rest of a long key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    pub page: u32,
    pub len: u32,
}

/// Where the rest of long keys is read.
pub trait Tails {
    fn tail(&self, tail: Tail) -> &[u8];
}

/// A cell taken apart; what is built into a page. Its key begins with `lead`, then `rest`.
#[derive(Clone, Copy)]
pub struct Cell<'a> {
    pub front: &'a [u8],
    pub lead: &'a [u8],
    pub rest: &'a [u8],
    pub tail: Option<Tail>,
    pub value: &'a [u8],
}

impl<'a> Cell<'a> {
    /// Bytes of the key that stand in a page, prefix included.
    fn key_len(&self) -> usize {
        self.lead.len() + self.rest.len()
    }

    /// Bytes of slot and cell, with this much of its key cut.
    fn size(&self, cut: usize) -> usize {
        let tail = if self.tail.is_some() { TAIL } else { 0 };
        SLOT + self.front.len() + self.key_len() - cut + tail + self.value.len()
    }

    /// The key without its first bytes, in two pieces.
    fn key_after(&self, cut: usize) -> (&'a [u8], &'a [u8]) {
        match cut.checked_sub(self.lead.len()) {
            Some(cut) => (&[], &self.rest[cut..]),
            None => (&self.lead[cut..], self.rest),
        }
    }

    fn key_byte(&self, at: usize) -> u8 {
        if at < self.lead.len() { self.lead[at] } else { self.rest[at - self.lead.len()] }
    }

    /// How many bytes both keys begin with, as far as they stand in pages.
    fn common(&self, other: &Cell<'_>) -> usize {
        if std::ptr::eq(self.lead, other.lead) {
            return self.lead.len() + common(self.rest, other.rest);
        }
        let len = self.key_len().min(other.key_len());
        (0..len).position(|at| self.key_byte(at) != other.key_byte(at)).unwrap_or(len)
    }

    /// Puts the whole key in place of what the buffer held.
    pub fn key_into(&self, tails: &dyn Tails, key: &mut Vec<u8>) {
        key.clear();
        self.key_inline_into(key);
        if let Some(tail) = self.tail {
            key.extend_from_slice(tails.tail(tail));
        }
    }

    /// Appends what of the key stands in a page.
    pub fn key_inline_into(&self, key: &mut Vec<u8>) {
        key.extend_from_slice(self.lead);
        key.extend_from_slice(self.rest);
    }
}

/// The bytes with which both begin.
pub fn common(a: &[u8], b: &[u8]) -> usize {
    let len = a.len().min(b.len());
    let mut at = 0;
    while at + 8 <= len {
        let differ = u64_at(a, at) ^ u64_at(b, at);
        if differ != 0 {
            return at + (differ.trailing_zeros() / 8) as usize;
        }
        at += 8;
    }
    while at < len && a[at] == b[at] {
        at += 1;
    }
    at
}

/// First four bytes as a number that orders as they do.
#[inline(always)]
fn head(key: &[u8]) -> u32 {
    match key.first_chunk::<4>() {
        Some(first) => u32::from_be_bytes(*first),
        None => {
            let mut first = [0; 4];
            first[..key.len()].copy_from_slice(key);
            u32::from_be_bytes(first)
        }
    }
}

/// The front of an inner cell.
pub fn front_inner(child: u32, entries: u64) -> [u8; INNER_FRONT] {
    let mut front = [0; INNER_FRONT];
    front[..4].copy_from_slice(&child.to_le_bytes());
    front[4..].copy_from_slice(&entries.to_le_bytes());
    front
}

/// The front of a leaf cell.
pub fn front_leaf(value: &[u8]) -> [u8; LEAF_FRONT] {
    (value.len() as u16).to_le_bytes()
}

#[derive(Clone, Copy)]
struct Slot {
    head: u32,
    offset: usize,
    len: usize,
    long: bool,
}

/// A node to read.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    page: &'a Page,
}

impl<'a> Node<'a> {
    #[inline(always)]
    pub fn new(page: &'a Page) -> Self {
        Node { page }
    }

    #[inline(always)]
    pub fn is_leaf(self) -> bool {
        self.page[8] == LEAF
    }

    #[inline(always)]
    pub fn count(self) -> usize {
        u16_at(self.page, 10) as usize
    }

    fn heap(self) -> usize {
        u16_at(self.page, 12) as usize
    }

    fn dead(self) -> usize {
        u16_at(self.page, 14) as usize
    }

    #[inline(always)]
    fn prefix_len(self) -> usize {
        u16_at(self.page, 16) as usize
    }

    #[inline(always)]
    pub fn prefix(self) -> &'a [u8] {
        &self.page[PAGE_BYTES - self.prefix_len()..]
    }

    fn front_len(self) -> usize {
        if self.is_leaf() { LEAF_FRONT } else { INNER_FRONT }
    }

    /// Free bytes in one piece.
    fn gap(self) -> usize {
        self.heap() - SLOTS - SLOT * self.count()
    }

    /// Bytes of slots, cells and prefix.
    pub fn used(self) -> usize {
        ROOM - self.gap() - self.dead()
    }

    #[inline(always)]
    fn slot(self, index: usize) -> Slot {
        let raw = u64_at(self.page, SLOTS + SLOT * index);
        let len = (raw >> 48) as u16;
        Slot {
            head: raw as u32,
            offset: (raw >> 32) as u16 as usize,
            len: (len & !LONG) as usize,
            long: len & LONG != 0,
        }
    }

    /// The key in the cell, without prefix and tail.
    #[inline(always)]
    pub fn suffix(self, index: usize) -> &'a [u8] {
        let slot = self.slot(index);
        let at = slot.offset + self.front_len();
        &self.page[at..at + slot.len]
    }

    fn tail_at(self, slot: Slot) -> Option<Tail> {
        let at = slot.offset + self.front_len() + slot.len;
        slot.long.then(|| Tail { page: u32_at(self.page, at), len: u32_at(self.page, at + 4) })
    }

    pub fn tail(self, index: usize) -> Option<Tail> {
        self.tail_at(self.slot(index))
    }

    /// The value of a leaf's cell.
    #[inline(always)]
    pub fn value(self, index: usize) -> &'a [u8] {
        let slot = self.slot(index);
        let at = slot.offset + LEAF_FRONT + slot.len + if slot.long { TAIL } else { 0 };
        &self.page[at..at + u16_at(self.page, slot.offset) as usize]
    }

    #[inline(always)]
    pub fn child(self, index: usize) -> u32 {
        u32_at(self.page, self.slot(index).offset)
    }

    /// Entries below a child.
    #[inline(always)]
    pub fn entries(self, index: usize) -> u64 {
        u64_at(self.page, self.slot(index).offset + 4)
    }

    /// Entries below this node.
    pub fn entries_all(self) -> u64 {
        if self.is_leaf() {
            self.count() as u64
        } else {
            (0..self.count()).map(|index| self.entries(index)).sum()
        }
    }

    pub fn cell(self, index: usize) -> Cell<'a> {
        let slot = self.slot(index);
        let front = self.front_len();
        let keyless = !self.is_leaf() && index == 0;
        Cell {
            front: &self.page[slot.offset..slot.offset + front],
            lead: if keyless { &[] } else { self.prefix() },
            rest: self.suffix(index),
            tail: self.tail_at(slot),
            value: if self.is_leaf() { self.value(index) } else { &[] },
        }
    }

    /// Bytes of a cell as it stands here.
    fn cell_bytes(self, index: usize) -> usize {
        let slot = self.slot(index);
        let tail = if slot.long { TAIL } else { 0 };
        let value = if self.is_leaf() { u16_at(self.page, slot.offset) as usize } else { 0 };
        self.front_len() + slot.len + tail + value
    }

    /// The key searched without the prefix of this page, or on which side of all keys here it is.
    #[inline(always)]
    fn strip(self, key: &[u8]) -> Result<&[u8], Ordering> {
        let prefix = self.prefix();
        match key.strip_prefix(prefix) {
            Some(rest) => Ok(rest),
            None => Err(key.cmp(prefix)),
        }
    }

    /// How a searched key, without prefix, compares to one that stands here and has the same head.
    #[inline]
    fn compare<T: Tails + ?Sized>(self, key: &[u8], slot: Slot, tails: &T) -> Ordering {
        let at = slot.offset + self.front_len();
        let here = &self.page[at..at + slot.len];
        match self.tail_at(slot) {
            None => key.cmp(here),
            Some(_) if key.len() <= here.len() => key.cmp(&here[..key.len()]).then(Ordering::Less),
            Some(tail) => {
                let (first, rest) = key.split_at(here.len());
                first.cmp(here).then_with(|| rest.cmp(tails.tail(tail)))
            }
        }
    }

    /// The place of a key in a leaf: where it is, or before which cell it belongs.
    #[inline]
    pub fn search<T: Tails + ?Sized>(self, key: &[u8], tails: &T) -> Result<usize, usize> {
        let key = match self.strip(key) {
            Ok(key) => key,
            Err(Ordering::Less) => return Err(0),
            Err(_) => return Err(self.count()),
        };
        let key_head = head(key);
        let (mut low, mut high) = (0, self.count());
        while low < high {
            let middle = (low + high) / 2;
            let slot = self.slot(middle);
            let order = key_head.cmp(&slot.head).then_with(|| self.compare(key, slot, tails));
            match order {
                Ordering::Less => high = middle,
                Ordering::Greater => low = middle + 1,
                Ordering::Equal => return Ok(middle),
            }
        }
        Err(low)
    }

    /// The child of an inner node below which a key belongs.
    #[inline]
    pub fn search_child<T: Tails + ?Sized>(self, key: &[u8], tails: &T) -> usize {
        if self.count() == 1 {
            return 0;
        }
        let key = match self.strip(key) {
            Ok(key) => key,
            Err(Ordering::Less) => return 0,
            Err(_) => return self.count() - 1,
        };
        let key_head = head(key);
        // The last cell from 1 on whose key is not greater.
        let (mut low, mut high) = (1, self.count());
        while low < high {
            let middle = (low + high) / 2;
            let slot = self.slot(middle);
            let order = key_head.cmp(&slot.head).then_with(|| self.compare(key, slot, tails));
            if order == Ordering::Less {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low - 1
    }

    /// Whether everything in this page points into this page: what the functions above rely on.
    pub fn shape(self) -> Result<(), String> {
        let kind = page::kind(self.page);
        if kind != LEAF && kind != INNER {
            return Err(format!("kind {kind} where a node should be"));
        }
        let (count, heap, prefix) = (self.count(), self.heap(), self.prefix_len());
        if count == 0 {
            return Err("a node without cells".into());
        }
        if prefix > PREFIX_MAX || heap > PAGE_BYTES - prefix || SLOTS + SLOT * count > heap {
            return Err(format!("{count} cells, heap {heap} and prefix {prefix} do not fit a page"));
        }
        let end = PAGE_BYTES - prefix;
        let mut bytes = 0;
        for index in 0..count {
            let slot = self.slot(index);
            let front_end = slot.offset + self.front_len();
            if slot.offset < heap || front_end > end || front_end + slot.len > end {
                return Err(format!("cell {index} is out of bounds"));
            }
            let len = self.cell_bytes(index);
            if slot.offset + len > end {
                return Err(format!("cell {index} is out of bounds"));
            }
            if head(self.suffix(index)) != slot.head {
                return Err(format!("cell {index} and its slot differ"));
            }
            if slot.long && slot.len + prefix != KEY_HEAD {
                return Err(format!("cell {index} has a tail that does not begin where it should"));
            }
            bytes += len;
        }
        if kind == INNER && (self.slot(0).len != 0 || self.slot(0).long) {
            return Err("the first cell of an inner node has a key".into());
        }
        if bytes + self.dead() + heap != end {
            return Err("cells and dead bytes do not add up".into());
        }
        Ok(())
    }
}

fn set_u16(page: &mut Page, at: usize, value: usize) {
    page[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
}

fn set_slot(page: &mut Page, index: usize, slot: Slot) {
    let len = slot.len as u16 | if slot.long { LONG } else { 0 };
    let raw = u64::from(slot.head) | (slot.offset as u64) << 32 | u64::from(len) << 48;
    let at = SLOTS + SLOT * index;
    page[at..at + SLOT].copy_from_slice(&raw.to_le_bytes());
}

/// Makes an empty node of a page that holds anything; between slots and cells it still does.
pub fn clear(page: &mut Page, kind: u8) {
    page[8] = kind;
    page[9..SLOTS].fill(0);
    set_u16(page, 12, PAGE_BYTES);
}

/// Puts a cell, `cut` bytes of its key left out, into the gap; the caller knows that it fits.
fn place(page: &mut Page, index: usize, cell: &Cell<'_>, cut: usize) {
    let node = Node::new(page);
    let count = node.count();
    let bytes = cell.size(cut) - SLOT;
    let offset = node.heap() - bytes;
    let (lead, rest) = cell.key_after(cut);
    let mut at = offset;
    let mut put = |piece: &[u8]| {
        page[at..at + piece.len()].copy_from_slice(piece);
        at += piece.len();
    };
    put(cell.front);
    put(lead);
    put(rest);
    if let Some(tail) = cell.tail {
        put(&tail.page.to_le_bytes());
        put(&tail.len.to_le_bytes());
    }
    put(cell.value);
    let key_at = offset + cell.front.len();
    let len = lead.len() + rest.len();
    let head = head(&page[key_at..key_at + len]);
    let from = SLOTS + SLOT * index;
    page.copy_within(from..SLOTS + SLOT * count, from + SLOT);
    set_slot(page, index, Slot { head, offset, len, long: cell.tail.is_some() });
    set_u16(page, 10, count + 1);
    set_u16(page, 12, offset);
}

/// Fills a page with these cells, cutting `cut` bytes that the keys of all of them begin with. In an inner node
/// the first loses its key.
fn build<'c>(page: &mut Page, kind: u8, cut: usize, cells: impl Iterator<Item = Cell<'c>>) {
    clear(page, kind);
    let mut cut_yet = 0;
    for (index, mut cell) in cells.enumerate() {
        if kind == INNER && index == 0 {
            (cell.lead, cell.rest, cell.tail) = (&[], &[], None);
            place(page, 0, &cell, 0);
            // Cells stand above the prefix's place only after it is known; the first one moves down for it.
            continue;
        }
        if cut > cut_yet {
            set_prefix(page, &cell, cut);
            cut_yet = cut;
        }
        place(page, index, &cell, cut);
    }
    // What was deleted shall not stay in the file for ever.
    let node = Node::new(page);
    let (from, to) = (SLOTS + SLOT * node.count(), node.heap());
    page[from..to].fill(0);
}

/// Puts the prefix at the page's end; at most the first cell of an inner node is there yet.
fn set_prefix(page: &mut Page, cell: &Cell<'_>, cut: usize) {
    let from = Node::new(page).heap();
    page.copy_within(from..PAGE_BYTES, from - cut);
    if Node::new(page).count() == 1 {
        let mut slot = Node::new(page).slot(0);
        slot.offset -= cut;
        set_slot(page, 0, slot);
    }
    for at in 0..cut {
        page[PAGE_BYTES - cut + at] = cell.key_byte(at);
    }
    set_u16(page, 12, from - cut);
    set_u16(page, 16, cut);
}

/// The cells of a node with one more at `index`, as one row.
#[derive(Clone, Copy)]
struct Row<'a> {
    node: Node<'a>,
    index: usize,
    cell: Cell<'a>,
}

impl<'a> Row<'a> {
    fn len(&self) -> usize {
        self.node.count() + 1
    }

    fn at(&self, index: usize) -> Cell<'a> {
        match index.cmp(&self.index) {
            Ordering::Less => self.node.cell(index),
            Ordering::Equal => self.cell,
            Ordering::Greater => self.node.cell(index - 1),
        }
    }

    /// What a page of cells from..to can cut from their keys.
    fn cut(&self, from: usize, to: usize) -> usize {
        let first = if self.node.is_leaf() { from } else { from + 1 };
        if first + 1 >= to {
            return 0;
        }
        self.at(first).common(&self.at(to - 1)).min(PREFIX_MAX)
    }

    /// Bytes of slot and cell, nothing of the key cut.
    fn size(&self, index: usize) -> usize {
        let old = match index.cmp(&self.index) {
            Ordering::Less => index,
            Ordering::Equal => return self.cell.size(0),
            Ordering::Greater => index - 1,
        };
        let keyless = !self.node.is_leaf() && old == 0;
        SLOT + self.node.cell_bytes(old) + if keyless { 0 } else { self.node.prefix_len() }
    }

    fn fits(&self, from: usize, to: usize) -> bool {
        let first = if self.node.is_leaf() { from } else { from + 1 };
        let cut = self.cut(from, to);
        let keyed: usize = (first..to).map(|index| self.size(index)).sum();
        keyed - cut * (to - first) + cut + (first - from) * (SLOT + INNER_FRONT) <= ROOM
    }

    fn build(&self, page: &mut Page, from: usize, to: usize) {
        let kind = if self.node.is_leaf() { LEAF } else { INNER };
        build(page, kind, self.cut(from, to), (from..to).map(|index| self.at(index)));
    }

    /// Where to divide: near the middle of the bytes.
    fn middle(&self) -> usize {
        let all: usize = (0..self.len()).map(|index| self.size(index)).sum();
        let mut left = 0;
        let middle = (1..self.len())
            .find(|&index| {
                left += self.size(index - 1);
                2 * left >= all
            })
            .unwrap_or(self.len() - 1);
        let fits = |at: usize| self.fits(0, at) && self.fits(at, self.len());
        if fits(middle) {
            return middle;
        }
        (1..self.len()).filter(|&at| fits(at)).min_by_key(|&at| at.abs_diff(middle)).expect(
            "a page and one more cell fit two pages: a key that lacks the prefix stands at an end of the row",
        )
    }
}

/// Adds a cell before the one at `index` if the page can hold it. `spare` is overwritten.
pub fn insert(page: &mut Page, index: usize, cell: &Cell<'_>, spare: &mut Page) -> bool {
    let node = Node::new(page);
    let prefix = node.prefix();
    let cut = if prefix.is_empty() {
        0
    } else {
        let (lead, rest) = cell.key_after(0);
        debug_assert!(lead.is_empty(), "a new cell's key is in one piece");
        common(prefix, rest)
    };
    if cut == prefix.len() && cell.size(cut) <= node.gap() {
        place(page, index, cell, cut);
        return true;
    }
    // With its dead bytes gone, or with a shorter or longer prefix, the page may still hold it.
    let row = Row { node, index, cell: *cell };
    if !row.fits(0, row.len()) {
        return false;
    }
    spare.copy_from_slice(page);
    let row = Row { node: Node::new(spare), index, cell: *cell };
    row.build(page, 0, row.len());
    true
}

/// Divides a page and one more cell between this page and an empty one to its right. `at_edge`: the cell is the
/// last of its whole table; then this page stays as it is, full. `separator` becomes the key that divides them,
/// whole for leaves; for inner nodes what stood in the page, its tail returned.
pub fn split(
    (page, right, spare): (&mut Page, &mut Page, &mut Page),
    index: usize,
    cell: &Cell<'_>,
    at_edge: bool,
    tails: &dyn Tails,
    separator: &mut Vec<u8>,
) -> Option<Tail> {
    spare.copy_from_slice(page);
    let row = Row { node: Node::new(spare), index, cell: *cell };
    let middle = if at_edge && index + 1 == row.len() { index } else { row.middle() };
    row.build(right, middle, row.len());
    if middle != index || index + 1 != row.len() {
        row.build(page, 0, middle);
    }
    let first = row.at(middle);
    separator.clear();
    if !row.node.is_leaf() {
        first.key_inline_into(separator);
        return first.tail;
    }
    let mut last = Vec::new();
    let before = row.at(middle - 1);
    if before.tail.is_none() && first.tail.is_none() {
        let same = before.common(&first);
        first.key_inline_into(separator);
        separator.truncate(same + 1);
    } else {
        before.key_into(tails, &mut last);
        first.key_into(tails, separator);
        separator.truncate(common(&last, separator) + 1);
    }
    None
}

/// Takes a cell out. A tail is the caller's to free.
pub fn remove(page: &mut Page, index: usize) {
    let node = Node::new(page);
    let count = node.count();
    let kind = page::kind(page);
    if count == 1 {
        clear(page, kind);
        return;
    }
    let dead = node.dead() + node.cell_bytes(index);
    let from = SLOTS + SLOT * (index + 1);
    page.copy_within(from..SLOTS + SLOT * count, from - SLOT);
    set_u16(page, 10, count - 1);
    set_u16(page, 14, dead);
    if kind == INNER && index == 0 {
        // What is first now stands for everything less and has no key.
        let mut slot = Node::new(page).slot(0);
        let dead = dead + slot.len + if slot.long { TAIL } else { 0 };
        (slot.head, slot.len, slot.long) = (0, 0, false);
        set_slot(page, 0, slot);
        set_u16(page, 14, dead);
    }
}

/// Puts another value in the place of one that is at least as long. False if it is not.
pub fn replace(page: &mut Page, index: usize, value: &[u8]) -> bool {
    let node = Node::new(page);
    let slot = node.slot(index);
    let spare = match node.value(index).len().checked_sub(value.len()) {
        Some(spare) => spare,
        None => return false,
    };
    let dead = node.dead() + spare;
    let at = slot.offset + LEAF_FRONT + slot.len + if slot.long { TAIL } else { 0 };
    page[at..at + value.len()].copy_from_slice(value);
    set_u16(page, slot.offset, value.len());
    set_u16(page, 14, dead);
    true
}

pub fn set_child(page: &mut Page, index: usize, child: u32) {
    let at = Node::new(page).slot(index).offset;
    page[at..at + 4].copy_from_slice(&child.to_le_bytes());
}

pub fn set_entries(page: &mut Page, index: usize, entries: u64) {
    let at = Node::new(page).slot(index).offset + 4;
    page[at..at + 8].copy_from_slice(&entries.to_le_bytes());
}

/// Builds into `page` the cells of two neighbours, if they fill at most seven eighths of it. `between`: the cell
/// of the right one in their parent, whose key the first cell of an inner node gets back.
pub fn merge(page: &mut Page, left: Node<'_>, right: Node<'_>, between: &Cell<'_>) -> bool {
    let leaf = left.is_leaf();
    let (lefts, all) = (left.count(), left.count() + right.count());
    let at = |index: usize| {
        if index < lefts {
            return left.cell(index);
        }
        let mut cell = right.cell(index - lefts);
        if !leaf && index == lefts {
            (cell.lead, cell.rest, cell.tail) = (between.lead, between.rest, between.tail);
        }
        cell
    };
    let first = usize::from(!leaf);
    let cut = if first + 1 >= all { 0 } else { at(first).common(&at(all - 1)).min(PREFIX_MAX) };
    let bytes: usize = (first..all).map(|index| at(index).size(cut)).sum();
    if bytes + cut + first * (SLOT + INNER_FRONT) > ROOM / 8 * 7 {
        return false;
    }
    build(page, if leaf { LEAF } else { INNER }, cut, (0..all).map(at));
    true
}
