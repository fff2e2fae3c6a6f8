//! Walks a whole tree and says what is wrong with it: for `etcore check`, for tests, for whoever doubts a disk.
//! It reads the file itself, trusts nothing that it has not looked at, and raises nothing.
//!
//! What it holds true of the newest state: every page has its checksum and its number; all cells lie in their
//! page; keys rise, within and between pages, and stand below the child whose key says so; inner nodes count
//! right what is below them; all leaves are equally deep; every page is referred to once; the bitmap has exactly
//! the pages that are referred to.

use std::borrow::Cow;
use std::path::Path;

use super::meta::{Meta, Root, Unusable};
use super::node::Node;
use super::page::{self, Page, RUN, RUN_HEADER};
use super::space::each_bit;
use super::{OverflowRef, Table, Tree};
use crate::env::{Disk, File, Open};
use crate::model::Fault;
use crate::model::limits::PAGE_BYTES;

/// One thing that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The page it is about.
    pub page: u32,
    pub what: String,
}

/// What a walk found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// The number of the state that was walked.
    pub generation: u64,
    /// Entries of each table, in the order of `Table::ALL`.
    pub entries: [u64; 5],
    /// Pages in use.
    pub pages: u64,
}

/// Which overflow run an entry owns: told by who writes them, since the tree does not know what values mean. Of
/// several entries that name a run, one owns it.
pub type Owner<'a> = &'a dyn Fn(Table, &[u8], &[u8]) -> Option<OverflowRef>;

/// Walks the newest state of a file.
pub fn check(disk: &dyn Disk, path: &Path, owner: Owner<'_>) -> Result<Report, Fault> {
    let file = disk.open(path, Open::Read, false).map_err(|error| Fault::io(path, "open", error))?;
    let len = file.len().map_err(|error| Fault::io(path, "length", error))?;
    let source =
        FileSource { file: file.as_ref(), pages: (len / PAGE_BYTES as u64).min(u32::MAX.into()) as u32 };
    let mut walk = Walk::new(&source, owner);
    let mut newest: Option<Meta> = None;
    for number in 0..2 {
        let meta = source.read(number, 1).and_then(|bytes| {
            let page: &Page = bytes[..].try_into().expect("one page");
            Meta::decode(page, number).map_err(|unusable| match unusable {
                Unusable::Damaged(what) | Unusable::Foreign(what) => what,
            })
        });
        match meta {
            Ok(meta) if newest.is_none_or(|newest| newest.generation < meta.generation) => {
                newest = Some(meta)
            }
            Ok(_) => {}
            Err(what) => walk.finding(number, format!("meta page: {what}")),
        }
    }
    let Some(meta) = newest else {
        return Ok(walk.report);
    };
    walk.report.generation = meta.generation;
    if meta.pages > source.pages {
        walk.finding(meta.pages, format!("the file was cut off, it has {} pages", source.pages));
    }
    let bitmap = match meta.bitmap_page {
        // No checkpoint yet: the meta pages are all there is.
        0 => Ok(Cow::Borrowed(&[0b11, 0, 0, 0, 0, 0, 0, 0][..])),
        number => walk.run(number, meta.bitmap_len),
    };
    walk.roots(&meta.roots);
    match bitmap {
        Ok(bitmap) => walk.compare(&bitmap),
        Err(what) => walk.finding(meta.bitmap_page, format!("bitmap: {what}")),
    }
    Ok(walk.report)
}

impl Tree {
    /// The same walk over the state in memory: what does not hold, nothing if all is well.
    pub fn invariants(&self, owner: Owner<'_>) -> Vec<Finding> {
        let (_, roots, space, bitmap) = self.state();
        let mut walk = Walk::new(self, owner);
        if bitmap.page != 0 {
            walk.mark(bitmap.page, page::run_pages(bitmap.len as usize));
        }
        walk.roots(roots);
        walk.compare(&space.bitmap());
        walk.report.findings
    }
}

/// Where a walk reads.
trait Source {
    /// A node of sound shape.
    fn node(&self, number: u32) -> Result<Cow<'_, Page>, String>;
    /// The bytes of a run.
    fn run(&self, number: u32, len: u32) -> Result<Cow<'_, [u8]>, String>;
}

struct FileSource<'a> {
    file: &'a dyn File,
    pages: u32,
}

impl FileSource<'_> {
    fn read(&self, number: u32, pages: u32) -> Result<Vec<u8>, String> {
        if number.checked_add(pages).is_none_or(|end| end > self.pages) {
            return Err("it is beyond the file's end".into());
        }
        let mut bytes = vec![0; pages as usize * PAGE_BYTES];
        let read = self.file.read_at(u64::from(number) * PAGE_BYTES as u64, &mut bytes);
        read.map_err(|error| format!("cannot be read: {error}"))?;
        Ok(bytes)
    }
}

impl Source for FileSource<'_> {
    fn node(&self, number: u32) -> Result<Cow<'_, Page>, String> {
        let bytes = self.read(number, 1)?;
        if page::kind(&bytes) == RUN {
            return Err("it begins a run where a node should be".into());
        }
        page::verify(&bytes, number)?;
        let page: &Page = bytes[..].try_into().expect("one page");
        Node::new(page).shape()?;
        Ok(Cow::Owned(*page))
    }

    fn run(&self, number: u32, len: u32) -> Result<Cow<'_, [u8]>, String> {
        let mut bytes = self.read(number, page::run_pages(len as usize))?;
        if page::kind(&bytes) != RUN || page::u32_at(&bytes, 12) != len {
            return Err(format!("it does not begin a run of {len} bytes"));
        }
        page::verify(&bytes, number)?;
        bytes.truncate(RUN_HEADER + len as usize);
        bytes.drain(..RUN_HEADER);
        Ok(Cow::Owned(bytes))
    }
}

impl Source for Tree {
    fn node(&self, number: u32) -> Result<Cow<'_, Page>, String> {
        let page = self.state().0.page(number);
        Node::new(page).shape()?;
        Ok(Cow::Borrowed(page))
    }

    fn run(&self, number: u32, len: u32) -> Result<Cow<'_, [u8]>, String> {
        Ok(Cow::Borrowed(self.state().0.run(number, len)))
    }
}

struct Walk<'a> {
    source: &'a dyn Source,
    owner: Owner<'a>,
    /// Pages that something refers to, as a bitmap.
    seen: Vec<u64>,
    report: Report,
}

/// What is known of a page before it is read.
#[derive(Clone, Copy)]
struct Expected<'a> {
    table: Table,
    /// Levels down to the leaves, this one included.
    depth: u32,
    /// All keys are at least this.
    from: &'a [u8],
    /// All keys are less than this.
    to: Option<&'a [u8]>,
}

impl<'a> Walk<'a> {
    fn new(source: &'a dyn Source, owner: Owner<'a>) -> Self {
        let mut walk = Walk { source, owner, seen: Vec::new(), report: Report::default() };
        walk.mark(0, 2);
        walk
    }

    fn finding(&mut self, page: u32, what: String) {
        self.report.findings.push(Finding { page, what });
    }

    /// False if one of the pages was referred to before.
    fn mark(&mut self, number: u32, pages: u32) -> bool {
        let mut fresh = true;
        for page in number..number.saturating_add(pages) {
            let at = page as usize / 64;
            if at >= self.seen.len() {
                self.seen.resize(at + 1, 0);
            }
            fresh &= self.seen[at] >> (page % 64) & 1 == 0;
            self.seen[at] |= 1 << (page % 64);
        }
        if !fresh {
            self.finding(number, "it is referred to twice".into());
        }
        self.report.pages += u64::from(pages);
        fresh
    }

    fn roots(&mut self, roots: &[Root; 5]) {
        for table in Table::ALL {
            let root = roots[table as usize];
            let expected = Expected { table, depth: root.depth, from: &[], to: None };
            let entries = if root.page == 0 { Some(0) } else { self.node(root.page, expected) };
            if entries.is_some_and(|entries| entries != root.entries) {
                let found = entries.unwrap_or_default();
                self.finding(
                    root.page,
                    format!("{table:?} should have {} entries, has {found}", root.entries),
                );
            }
            self.report.entries[table as usize] = root.entries;
        }
    }

    /// The bytes of a run, marked as in use.
    fn run(&mut self, number: u32, len: u32) -> Result<Cow<'a, [u8]>, String> {
        let bytes = self.source.run(number, len)?;
        self.mark(number, page::run_pages(len as usize));
        Ok(bytes)
    }

    /// The entries below a page; None if that cannot be told.
    fn node(&mut self, number: u32, expected: Expected<'_>) -> Option<u64> {
        if !self.mark(number, 1) {
            return None;
        }
        let page = match self.source.node(number) {
            Ok(page) => page,
            Err(what) => {
                self.finding(number, what);
                return None;
            }
        };
        let node = Node::new(&page);
        if node.is_leaf() != (expected.depth == 1) || expected.depth == 0 {
            self.finding(number, format!("a leaf at the wrong depth: {} levels to go", expected.depth));
            return None;
        }
        let keys = self.keys(number, node, expected)?;
        if node.is_leaf() {
            for (index, key) in keys.iter().enumerate() {
                if let Some(place) = (self.owner)(expected.table, key, node.value(index)) {
                    let run = u32::try_from(place.page).map_err(|_| "no such page".to_string());
                    if let Err(what) = run.and_then(|run| self.run(run, place.len)) {
                        self.finding(number, format!("overflow run {} of cell {index}: {what}", place.page));
                    }
                }
            }
            return Some(keys.len() as u64);
        }
        let mut entries = Some(0);
        for index in 0..node.count() {
            let below = Expected {
                depth: expected.depth - 1,
                from: if index == 0 { expected.from } else { &keys[index] },
                to: keys.get(index + 1).map(|key| &key[..]).or(expected.to),
                ..expected
            };
            let found = self.node(node.child(index), below);
            if found.is_some_and(|found| found != node.entries(index)) {
                let found = found.unwrap_or_default();
                let stored = node.entries(index);
                self.finding(number, format!("cell {index} counts {stored} entries, below it are {found}"));
            }
            entries = entries.zip(found).map(|(entries, found)| entries + found);
        }
        entries
    }

    /// The whole keys of a node, if they can be read.
    fn keys(&mut self, number: u32, node: Node<'_>, expected: Expected<'_>) -> Option<Vec<Vec<u8>>> {
        let mut keys: Vec<Vec<u8>> = Vec::with_capacity(node.count());
        for index in 0..node.count() {
            let cell = node.cell(index);
            let mut key = Vec::new();
            cell.key_inline_into(&mut key);
            if let Some(tail) = cell.tail {
                match self.run(tail.page, tail.len) {
                    Ok(bytes) => key.extend_from_slice(&bytes),
                    Err(what) => {
                        self.finding(number, format!("rest of the key of cell {index}: {what}"));
                        return None;
                    }
                }
            }
            let keyless = !node.is_leaf() && index == 0;
            let follows = match keys.last() {
                // The first key of an inner node is none.
                Some(before) => *before < key || !node.is_leaf() && index == 1,
                None => true,
            };
            if !follows {
                self.finding(number, format!("the key of cell {index} does not follow the one before"));
            }
            let inside = key[..] >= *expected.from && expected.to.is_none_or(|to| key[..] < *to);
            if !keyless && !inside {
                self.finding(number, format!("the key of cell {index} belongs elsewhere"));
            }
            keys.push(key);
        }
        Some(keys)
    }

    /// Holds the pages that were reached against those that the bitmap has.
    fn compare(&mut self, bitmap: &[u8]) {
        let mut marked = vec![0u64; self.seen.len().max(bitmap.len() / 8)];
        self.seen.resize(marked.len(), 0);
        each_bit(bitmap, |page| marked[page as usize / 64] |= 1 << (page % 64));
        for (at, marked) in marked.into_iter().enumerate() {
            for bit in 0..64 {
                let page = (at * 64 + bit) as u32;
                match (self.seen[at] >> bit & 1, marked >> bit & 1) {
                    (1, 0) => self.finding(page, "it is in use but marked as free".into()),
                    (0, 1) => self.finding(page, "it is marked as in use but nothing refers to it".into()),
                    _ => {}
                }
            }
        }
    }
}
