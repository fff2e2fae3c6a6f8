//! Editing: insert, remove, freeze. A page is copied to memory of its own, under a new number, when it is first
//! changed after a freeze, and from then on edited in place.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

use super::checkpoint::Checkpoint;
use super::cursor::{self, Cursor};
use super::layer::{Buffer, Layer};
use super::map::Map;
use super::meta::{Meta, Root, Unusable};
use super::node::{self, Cell, KEY_HEAD, KEY_INLINE_MAX, Node, Tail, VALUE_MAX};
use super::page::{self, INNER, LEAF, Page, RUN_HEADER};
use super::pages::Pages;
use super::space::Space;
use super::{Options, OverflowRef, Read, Table, TableStats};
use crate::env::{Disk, Open};
use crate::model::Fault;
use crate::model::limits::PAGE_BYTES;

/// A node with less than this of its room used joins a neighbour if both fit one page; if they do not, the
/// neighbours are well filled and it stays.
const UNDERFULL: usize = PAGE_BYTES / 4;

/// One file of tables and its state in memory.
#[derive(Debug)]
pub struct Tree {
    pages: Pages,
    roots: [Root; 5],
    space: Space,
    /// The number that the next checkpoint gets.
    generation: u64,
    /// The run that holds the bitmap of the last checkpoint; page 0: none.
    bitmap: Tail,
    checkpointing: bool,
    /// Since the last checkpoint was begun.
    changed: bool,
    /// Since the last snapshot was taken.
    changed_since_snapshot: bool,
    /// Snapshots that may still be read, by number, oldest first.
    snapshots: VecDeque<(u64, Weak<State>)>,
    snapshot_next: u64,
    /// The way from the root to the leaf being edited.
    path: Vec<Step>,
    /// Scratch of a rebuild.
    spare: Box<Page>,
    /// Scratch: the key that divides two pages.
    separator: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    page: u32,
    index: usize,
    /// It is editable already.
    owned: bool,
}

/// A state that no longer changes.
#[derive(Debug)]
struct State {
    pages: Pages,
    roots: [Root; 5],
}

/// The tree as it was at one moment, for any thread, until the last clone is dropped. Until then the pages it
/// uses are not written again by this tree, and those that were in memory stay there. All snapshots are dropped
/// before the file is opened anew: the next tree does not know of them.
#[derive(Clone, Debug)]
pub struct Snapshot {
    state: Arc<State>,
}

/// The memory of a finished checkpoint, freed where this is dropped: a helper thread if there was much.
#[derive(Debug)]
pub struct Discarded {
    _job: Checkpoint,
}

impl Tree {
    /// Opens the file, or makes it, durably, if there is none. Reads meta pages and bitmaps only.
    pub fn open(disk: Arc<dyn Disk>, path: &Path, options: Options) -> Result<Tree, Fault> {
        let file = match disk.open(path, Open::Write, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create(disk.as_ref(), path)?;
                disk.open(path, Open::Write, false)
            }
            opened => opened,
        }
        .map_err(|error| Fault::io(path, "open", error))?;
        let map = Arc::new(Map::new(file, path, options.reserve_bytes)?);
        let (meta, before) = newest(&map)?;
        let bitmap = bitmap(&map, &meta).map_err(|what| map.damage(meta.bitmap_page, what))?;
        // Where the older state's bitmap is not to be had, that state is lost, and there is nothing to keep for it.
        let before = before.and_then(|before| bitmap_checked(&map, &before));
        let space = Space::restore(bitmap, before, meta.generation, map.pages_max());
        Ok(Tree {
            roots: meta.roots,
            space,
            generation: meta.generation + 1,
            bitmap: Tail { page: meta.bitmap_page, len: meta.bitmap_len },
            pages: Pages { dirty: Layer::default(), frozen: Vec::new(), writing: Vec::new(), map },
            checkpointing: false,
            changed: false,
            changed_since_snapshot: true,
            snapshots: VecDeque::new(),
            snapshot_next: 0,
            path: Vec::new(),
            spare: Box::new([0; PAGE_BYTES]),
            separator: Vec::new(),
        })
    }

    /// True if the key was there; then its value is replaced. The value is at most `VALUE_MAX` bytes long.
    pub fn insert(&mut self, table: Table, key: &[u8], value: &[u8]) -> bool {
        assert!(value.len() <= VALUE_MAX, "a value over the bound goes to write_overflow");
        self.note_change();
        if self.roots[table as usize].page == 0 {
            let number = self.new_node(LEAF);
            self.roots[table as usize] = Root { page: number, depth: 1, entries: 0 };
        }
        let found = self.descend(table, key);
        self.own_path(table);
        let step = *self.path.last().expect("a leaf");
        let (inline, rest) = key.split_at(if key.len() > KEY_INLINE_MAX { KEY_HEAD } else { key.len() });
        let (tail, more) = match found {
            true => {
                let page = self.edit(step.page);
                if node::replace(page, step.index, value) {
                    return true;
                }
                let tail = Node::new(page).tail(step.index);
                node::remove(page, step.index);
                (tail, 0)
            }
            false if rest.is_empty() => (None, 1),
            false => (Some(self.write_run(rest)), 1),
        };
        let front = node::front_leaf(value);
        self.put(table, Cell { front: &front, lead: &[], rest: inline, tail, value }, more);
        found
    }

    /// True if the key was there. An overflow run that its value names is the caller's to free.
    pub fn remove(&mut self, table: Table, key: &[u8]) -> bool {
        if self.roots[table as usize].page == 0 || !self.descend(table, key) {
            return false;
        }
        self.note_change();
        self.own_path(table);
        let step = *self.path.last().expect("a leaf");
        let page = self.edit(step.page);
        let tail = Node::new(page).tail(step.index);
        node::remove(page, step.index);
        self.free_tail(tail);
        for level in 0..self.path.len() - 1 {
            let Step { page, index, .. } = self.path[level];
            let page = self.edit(page);
            let entries = Node::new(page).entries(index);
            node::set_entries(page, index, entries - 1);
        }
        self.roots[table as usize].entries -= 1;
        self.close_up(table);
        true
    }

    /// Stores bytes in pages of their own.
    pub fn write_overflow(&mut self, bytes: &[u8]) -> OverflowRef {
        self.note_change();
        let run = self.write_run(bytes);
        OverflowRef { page: u64::from(run.page), len: run.len }
    }

    pub fn free_overflow(&mut self, place: OverflowRef) {
        self.note_change();
        let page = u32::try_from(place.page).expect("an overflow run that this tree wrote");
        self.free(page, page::run_pages(place.len as usize));
    }

    /// The state as it is now. Costs nothing to speak of, but that pages changed afterwards are copied first.
    pub fn snapshot(&mut self) -> Snapshot {
        if !self.changed_since_snapshot
            && let Some((_, last)) = self.snapshots.back()
            && let Some(state) = last.upgrade()
        {
            return Snapshot { state };
        }
        self.release();
        self.freeze();
        let pages = Pages {
            dirty: Layer::default(),
            frozen: self.pages.frozen.clone(),
            writing: self.pages.writing.clone(),
            map: self.pages.map.clone(),
        };
        let state = Arc::new(State { pages, roots: self.roots });
        self.snapshots.push_back((self.snapshot_next, Arc::downgrade(&state)));
        self.snapshot_next += 1;
        self.changed_since_snapshot = false;
        Snapshot { state }
    }

    /// Freezes the state as it is now; the job makes it durable, while editing and reading go on. None while one
    /// is under way, or if nothing changed since the last.
    pub fn checkpoint(&mut self) -> Option<Checkpoint> {
        if self.checkpointing || !self.changed {
            return None;
        }
        self.freeze();
        self.pages.writing = std::mem::take(&mut self.pages.frozen);
        if self.bitmap.page != 0 {
            let pages = page::run_pages(self.bitmap.len as usize);
            self.space.retire(self.bitmap.page, pages, self.generation, self.snapshot_next);
        }
        // The bitmap says of its own pages that they are in use; they may be new ones at the end.
        let mut pages = 1;
        while page::run_pages(self.space.bitmap_len(pages)) > pages {
            pages += 1;
        }
        let len = self.space.bitmap_len(pages);
        let pages = page::run_pages(len);
        let number = self.alloc(pages);
        let bits = self.space.bitmap();
        let mut run = Buffer::zeroed(pages);
        page::set_run_header(run.bytes_mut(), number, len);
        run.bytes_mut()[RUN_HEADER..RUN_HEADER + bits.len()].copy_from_slice(&bits);
        self.bitmap = Tail { page: number, len: len as u32 };
        let meta = Meta {
            generation: self.generation,
            pages: self.space.pages(),
            bitmap_page: number,
            bitmap_len: len as u32,
            roots: self.roots,
        };
        self.generation += 1;
        self.checkpointing = true;
        self.changed = false;
        self.release();
        Some(Checkpoint::new(self.pages.map.clone(), meta, self.pages.writing.clone(), run))
    }

    /// Takes back the job whose `step` has said true.
    pub fn checkpoint_finished(&mut self, job: Checkpoint) -> Discarded {
        assert!(self.checkpointing && job.is_done(), "the checkpoint under way is durable");
        assert!(job.generation() + 1 == self.generation, "it is the one that was begun last");
        self.pages.writing.clear();
        self.checkpointing = false;
        self.release();
        Discarded { _job: job }
    }

    /// Memory in pages that are not yet known to be durable.
    pub fn dirty_bytes(&self) -> usize {
        let frozen: usize =
            self.pages.frozen.iter().chain(&self.pages.writing).map(|layer| layer.pages()).sum();
        (self.pages.dirty.pages() + frozen) * PAGE_BYTES
    }

    /// Length of the file.
    pub fn file_bytes(&self) -> u64 {
        u64::from(self.pages.map.pages()) * PAGE_BYTES as u64
    }

    /// Bytes of the pages that the current state uses, meta pages and bitmap included.
    pub fn used_bytes(&self) -> u64 {
        self.space.live_pages() * PAGE_BYTES as u64
    }

    pub fn stats(&self) -> [TableStats; 5] {
        Table::ALL.map(|table| {
            let root = self.roots[table as usize];
            TableStats { table, entries: root.entries, depth: root.depth }
        })
    }

    pub(super) fn state(&self) -> (&Pages, &[Root; 5], &Space, Tail) {
        (&self.pages, &self.roots, &self.space, self.bitmap)
    }

    fn note_change(&mut self) {
        self.changed = true;
        self.changed_since_snapshot = true;
    }

    fn release(&mut self) {
        while self.snapshots.front().is_some_and(|(_, state)| state.strong_count() == 0) {
            self.snapshots.pop_front();
        }
        // What the last reader did happened before its pages are written again.
        fence(Ordering::Acquire);
        self.space.release(self.generation, self.snapshots.front().map(|(number, _)| *number));
    }

    fn freeze(&mut self) {
        let frozen = &mut self.pages.frozen;
        if !self.pages.dirty.is_empty() {
            frozen.push(Arc::new(std::mem::take(&mut self.pages.dirty)));
        }
        frozen.retain(|layer| !layer.is_empty());
        // Each at least twice as large as the next, so that there are few and a page is moved seldom.
        while let [.., older, newer] = &frozen[..]
            && newer.pages() * 2 > older.pages()
        {
            let newer = frozen.pop().expect("two");
            let older = frozen.pop().expect("two");
            let space = &self.space;
            frozen.push(Arc::new(Layer::merged(older, newer, |number| space.is_live(number))));
        }
    }

    fn alloc(&mut self, pages: u32) -> u32 {
        if let Some(number) = self.space.alloc(pages) {
            return number;
        }
        self.release();
        let number = self.space.alloc(pages);
        number.unwrap_or_else(|| {
            let (path, bytes) = (self.pages.map.path(), u64::from(self.pages.map.pages_max()) * PAGE_BYTES as u64);
            Fault::Refused(format!(
                "{}: the file fills the {bytes} bytes of addresses that were reserved for it; delete or compact \
                 data, or raise the address space limit (ulimit -v)",
                path.display()
            ))
            .raise()
        })
    }

    /// Gives up a page or a run.
    fn free(&mut self, number: u32, pages: u32) {
        if self.pages.dirty.remove(number).is_some() {
            self.space.free(number, pages);
            return;
        }
        for layer in &mut self.pages.frozen {
            if Layer::take(layer, number).is_some() {
                self.space.free(number, pages);
                return;
            }
        }
        self.space.retire(number, pages, self.generation, self.snapshot_next);
    }

    fn free_tail(&mut self, tail: Option<Tail>) {
        if let Some(tail) = tail {
            self.free(tail.page, page::run_pages(tail.len as usize));
        }
    }

    fn write_run(&mut self, bytes: &[u8]) -> Tail {
        let pages = page::run_pages(bytes.len());
        let number = self.alloc(pages);
        let mut run = Buffer::zeroed(pages);
        page::set_run_header(run.bytes_mut(), number, bytes.len());
        run.bytes_mut()[RUN_HEADER..RUN_HEADER + bytes.len()].copy_from_slice(bytes);
        self.pages.dirty.put(number, run);
        Tail { page: number, len: bytes.len() as u32 }
    }

    fn new_node(&mut self, kind: u8) -> u32 {
        let number = self.alloc(1);
        let mut buffer = Buffer::zeroed(1);
        page::set_header(buffer.page_mut(), number, kind);
        node::clear(buffer.page_mut(), kind);
        self.pages.dirty.put(number, buffer);
        number
    }

    /// A page that is being edited already.
    fn edit(&mut self, number: u32) -> &mut Page {
        self.pages.dirty.get_mut(number).expect("an owned page").page_mut()
    }

    /// Makes a page editable that is not; the number under which it then is.
    fn own(&mut self, number: u32) -> u32 {
        for layer in self.pages.frozen.iter_mut().rev() {
            if let Some(buffer) = Layer::take(layer, number) {
                self.pages.dirty.put(number, buffer);
                return number;
            }
        }
        let mut buffer = Buffer::copy_of(self.pages.page(number));
        self.space.retire(number, 1, self.generation, self.snapshot_next);
        let fresh = self.alloc(1);
        let kind = page::kind(buffer.page());
        page::set_header(buffer.page_mut(), fresh, kind);
        self.pages.dirty.put(fresh, buffer);
        fresh
    }

    /// Notes the way to a key. Whether it is there; if not, the last step says before which cell it belongs.
    fn descend(&mut self, table: Table, key: &[u8]) -> bool {
        self.path.clear();
        let mut page = self.roots[table as usize].page;
        loop {
            let dirty = self.pages.dirty.get(page);
            let node = Node::new(dirty.map_or_else(|| self.pages.page(page), Buffer::page));
            let owned = dirty.is_some();
            if node.is_leaf() {
                let found = node.search(key, &self.pages);
                self.path.push(Step { page, index: found.unwrap_or_else(|index| index), owned });
                return found.is_ok();
            }
            let index = node.search_child(key, &self.pages);
            self.path.push(Step { page, index, owned });
            page = node.child(index);
        }
    }

    /// Makes all pages of the path editable.
    fn own_path(&mut self, table: Table) {
        for level in 0..self.path.len() {
            if self.path[level].owned {
                continue;
            }
            let owned = self.own(self.path[level].page);
            self.path[level].page = owned;
            match level.checked_sub(1) {
                None => self.roots[table as usize].page = owned,
                Some(above) => {
                    let Step { page, index, .. } = self.path[above];
                    node::set_child(self.edit(page), index, owned);
                }
            }
        }
    }

    /// Puts a cell where the path ends, dividing pages as far up as it takes. `more`: entries that the table gains.
    fn put(&mut self, table: Table, cell: Cell<'_>, more: u64) {
        self.roots[table as usize].entries += more;
        let mut level = self.path.len() - 1;
        let Step { page, index, .. } = self.path[level];
        let buffer = self.pages.dirty.get_mut(page).expect("an owned page");
        if !node::insert(buffer.page_mut(), index, &cell, &mut self.spare) {
            let mut pair = self.divide(level, index, &cell);
            loop {
                let separator = std::mem::take(&mut self.separator);
                let front = node::front_inner(pair.right, pair.entries_right);
                let cell = Cell { front: &front, lead: &[], rest: &separator, tail: pair.tail, value: &[] };
                if level == 0 {
                    self.raise_root(table, &pair, &cell);
                    self.separator = separator;
                    return;
                }
                level -= 1;
                let Step { page, index, .. } = self.path[level];
                let page = self.pages.dirty.get_mut(page).expect("an owned page").page_mut();
                node::set_entries(page, index, pair.entries_left);
                if node::insert(page, index + 1, &cell, &mut self.spare) {
                    self.separator = separator;
                    break;
                }
                pair = self.divide(level, index + 1, &cell);
            }
        }
        if more == 0 {
            return;
        }
        for level in 0..level {
            let Step { page, index, .. } = self.path[level];
            let page = self.edit(page);
            let entries = Node::new(page).entries(index);
            node::set_entries(page, index, entries + more);
        }
    }

    /// Divides a page of the path, and a cell that it cannot hold, into two.
    fn divide(&mut self, level: usize, index: usize, cell: &Cell<'_>) -> Pair {
        let at_edge =
            self.path[..level].iter().all(|step| step.index + 1 == self.pages.node(step.page).count());
        let number = self.path[level].page;
        let right = self.alloc(1);
        let mut right_buffer = Buffer::zeroed(1);
        let mut buffer = self.pages.dirty.remove(number).expect("an owned page");
        let kind = page::kind(buffer.page());
        page::set_header(right_buffer.page_mut(), right, kind);
        let mut tail = node::split(
            (buffer.page_mut(), right_buffer.page_mut(), &mut self.spare),
            index,
            cell,
            at_edge,
            &self.pages,
            &mut self.separator,
        );
        let entries_left = Node::new(buffer.page()).entries_all();
        let entries_right = Node::new(right_buffer.page()).entries_all();
        self.pages.dirty.put(number, buffer);
        self.pages.dirty.put(right, right_buffer);
        if kind == LEAF && self.separator.len() > KEY_INLINE_MAX {
            let separator = std::mem::take(&mut self.separator);
            tail = Some(self.write_run(&separator[KEY_HEAD..]));
            self.separator = separator;
            self.separator.truncate(KEY_HEAD);
        }
        Pair { right, entries_left, entries_right, tail }
    }

    /// Puts a new root above the two halves of the old one.
    fn raise_root(&mut self, table: Table, pair: &Pair, right: &Cell<'_>) {
        let number = self.new_node(INNER);
        let root = &mut self.roots[table as usize];
        let front = node::front_inner(root.page, pair.entries_left);
        (root.page, root.depth) = (number, root.depth + 1);
        let left = Cell { front: &front, lead: &[], rest: &[], tail: None, value: &[] };
        let page = self.pages.dirty.get_mut(number).expect("a new page").page_mut();
        let fit =
            node::insert(page, 0, &left, &mut self.spare) && node::insert(page, 1, right, &mut self.spare);
        assert!(fit, "two cells fit a page");
    }

    /// After a removal: joins what has become too empty, from the leaf of the path upwards.
    fn close_up(&mut self, table: Table) {
        for level in (1..self.path.len()).rev() {
            let node = self.pages.node(self.path[level].page);
            let above = self.path[level - 1];
            if node.count() == 0 {
                self.drop_child(self.path[level].page, above);
                continue;
            }
            if node.used() >= UNDERFULL {
                return;
            }
            let neighbours = self.pages.node(above.page).count();
            let joined = above.index + 1 < neighbours && self.join(level, above.page, above.index)
                || above.index > 0 && self.join(level, above.page, above.index - 1);
            if !joined {
                return;
            }
        }
        loop {
            let Root { page, depth, entries } = self.roots[table as usize];
            let node = self.pages.node(page);
            if entries == 0 {
                assert!(node.count() == 0, "nothing is left below");
                self.roots[table as usize] = Root::default();
            } else if !node.is_leaf() && node.count() == 1 {
                self.roots[table as usize] = Root { page: node.child(0), depth: depth - 1, entries };
            } else {
                return;
            }
            self.free(page, 1);
            if entries == 0 {
                return;
            }
        }
    }

    /// Takes an empty page out of its parent.
    fn drop_child(&mut self, number: u32, above: Step) {
        self.free(number, 1);
        let parent = Node::new(self.edit(above.page));
        // The key that goes is the page's own or, since the first has none, that of the one after it.
        let keyed = above.index.max(1);
        let tail = if keyed < parent.count() { parent.tail(keyed) } else { None };
        node::remove(self.edit(above.page), above.index);
        self.free_tail(tail);
    }

    /// Joins the children `left` and `left + 1` of a parent, of which the path's page at this level is one, in
    /// that page. False if they do not fit.
    fn join(&mut self, level: usize, parent: u32, left: usize) -> bool {
        let node = self.pages.node(parent);
        let (a, b) = (node.child(left), node.child(left + 1));
        let between = node.cell(left + 1);
        let entries = node.entries(left) + node.entries(left + 1);
        let (a_node, b_node) = (self.pages.node(a), self.pages.node(b));
        if !node::merge(&mut self.spare, a_node, b_node, &between) {
            return false;
        }
        // Between leaves the key is no longer needed; between inner nodes it went down.
        let tail = if a_node.is_leaf() { between.tail } else { None };
        let stays = self.path[level].page;
        let goes = if stays == a { b } else { a };
        let buffer = self.pages.dirty.get_mut(stays).expect("an owned page");
        buffer.page_mut()[8..].copy_from_slice(&self.spare[8..]);
        let parent = self.edit(parent);
        node::set_child(parent, left, stays);
        node::set_entries(parent, left, entries);
        node::remove(parent, left + 1);
        self.free(goes, 1);
        self.free_tail(tail);
        true
    }
}

/// What dividing a page leaves for the page above; the key between is in `Tree::separator`.
struct Pair {
    right: u32,
    entries_left: u64,
    entries_right: u64,
    tail: Option<Tail>,
}

impl State {
    fn root(&self, table: Table) -> &Root {
        &self.roots[table as usize]
    }
}

impl Read for Tree {
    fn get(&self, table: Table, key: &[u8]) -> Option<&[u8]> {
        cursor::get(&self.pages, &self.roots[table as usize], key)
    }

    fn cursor(&self, table: Table) -> Cursor<'_> {
        Cursor::new(&self.pages, &self.roots[table as usize])
    }

    fn count(&self, table: Table, start: &[u8], end: Option<&[u8]>) -> u64 {
        cursor::count(&self.pages, &self.roots[table as usize], start, end)
    }

    fn len(&self, table: Table) -> u64 {
        self.roots[table as usize].entries
    }

    fn overflow(&self, place: OverflowRef) -> &[u8] {
        self.pages.overflow(place)
    }
}

impl Read for Snapshot {
    fn get(&self, table: Table, key: &[u8]) -> Option<&[u8]> {
        cursor::get(&self.state.pages, self.state.root(table), key)
    }

    fn cursor(&self, table: Table) -> Cursor<'_> {
        Cursor::new(&self.state.pages, self.state.root(table))
    }

    fn count(&self, table: Table, start: &[u8], end: Option<&[u8]>) -> u64 {
        cursor::count(&self.state.pages, self.state.root(table), start, end)
    }

    fn len(&self, table: Table) -> u64 {
        self.state.root(table).entries
    }

    fn overflow(&self, place: OverflowRef) -> &[u8] {
        self.state.pages.overflow(place)
    }
}

/// Makes an empty file under another name first, so that the real name never stands for half a file.
fn create(disk: &dyn Disk, path: &Path) -> Result<(), Fault> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    match disk.remove(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Fault::io(temporary, "remove", error));
        }
        _ => {}
    }
    let file =
        disk.open(&temporary, Open::Create, false).map_err(|error| Fault::io(&temporary, "make", error))?;
    for generation in 0..2 {
        let meta = Meta { generation, pages: 2, ..Meta::default() };
        let place = generation * PAGE_BYTES as u64;
        file.write_at(place, &meta.encode()[..]).map_err(|error| Fault::io(&temporary, "write", error))?;
    }
    file.sync().map_err(|error| Fault::io(&temporary, "flush", error))?;
    disk.rename(&temporary, path).map_err(|error| Fault::io(&temporary, "rename", error))?;
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    disk.sync_dir(dir).map_err(|error| Fault::io(dir, "flush", error))
}

/// The meta page to go by, and the one before it if that is whole too.
fn newest(map: &Map) -> Result<(Meta, Option<Meta>), Fault> {
    let mut metas = Vec::new();
    let mut damage = Vec::new();
    for number in 0..2 {
        let mut page: Box<Page> = Box::new([0; PAGE_BYTES]);
        if let Err(error) = map.file().read_at(u64::from(number) * PAGE_BYTES as u64, &mut page[..]) {
            if error.kind() != io::ErrorKind::UnexpectedEof {
                return Err(Fault::io(map.path(), "read", error));
            }
            damage.push(format!("page {number}: the file ends before it"));
            continue;
        }
        match Meta::decode(&page, number) {
            Ok(meta) if meta.pages > map.pages_max() => {
                return Err(Fault::Refused(format!(
                    "{}: the file has {} pages, but addresses for only {} could be reserved; raise the address \
                     space limit (ulimit -v)",
                    map.path().display(),
                    meta.pages,
                    map.pages_max()
                )));
            }
            Ok(meta) => metas.push(meta),
            Err(Unusable::Foreign(what)) => {
                return Err(Fault::Refused(format!(
                    "{}: the file {what}; use the version of etcore that wrote it, or a later one",
                    map.path().display()
                )));
            }
            Err(Unusable::Damaged(what)) => damage.push(format!("page {number}: {what}")),
        }
    }
    metas.sort_by_key(|meta| std::cmp::Reverse(meta.generation));
    let mut metas = metas.into_iter();
    let Some(meta) = metas.next() else {
        return Err(map.damage(0, format!("neither meta page can be used ({})", damage.join("; "))));
    };
    if meta.pages > map.pages() {
        return Err(map.damage(map.pages(), format!("the file was cut off: it had {} pages", meta.pages)));
    }
    Ok((meta, metas.next()))
}

/// The bitmap that a meta page names.
fn bitmap<'a>(map: &'a Map, meta: &Meta) -> Result<&'a [u8], String> {
    if meta.bitmap_page == 0 { Ok(&[]) } else { map.run_checked(meta.bitmap_page, meta.bitmap_len, true) }
}

fn bitmap_checked<'a>(map: &'a Map, meta: &Meta) -> Option<&'a [u8]> {
    bitmap(map, meta).ok()
}
