//! Reading one table: by key, by rank, in order. All of it borrows the pages it reads; a cursor copies only the
//! key it stands on, because pages hold keys without their common prefix.

use super::meta::Root;
use super::node::Node;
use super::pages::Pages;

/// The value of exactly this key.
pub fn get<'a>(pages: &'a Pages, root: &Root, key: &[u8]) -> Option<&'a [u8]> {
    if root.page == 0 {
        return None;
    }
    let mut node = pages.node(root.page);
    while !node.is_leaf() {
        node = pages.node(node.child(node.search_child(key, pages)));
    }
    node.search(key, pages).ok().map(|index| node.value(index))
}

/// How many entries are less than this key.
pub fn rank(pages: &Pages, root: &Root, key: &[u8]) -> u64 {
    if root.page == 0 {
        return 0;
    }
    let mut below = 0;
    let mut node = pages.node(root.page);
    while !node.is_leaf() {
        let index = node.search_child(key, pages);
        below += (0..index).map(|index| node.entries(index)).sum::<u64>();
        node = pages.node(node.child(index));
    }
    below + node.search(key, pages).unwrap_or_else(|index| index) as u64
}

/// Entries with start <= key < end.
pub fn count(pages: &Pages, root: &Root, start: &[u8], end: Option<&[u8]>) -> u64 {
    let below_end = end.map_or(root.entries, |end| rank(pages, root, end));
    let below_start = if start.is_empty() { 0 } else { rank(pages, root, start) };
    below_end.saturating_sub(below_start)
}

/// Walks one table in key order, either way. It stands on an entry or on none; moving past the first or the last
/// entry leaves it on none, where `next` and `prev` keep it.
pub struct Cursor<'a> {
    pages: &'a Pages,
    root: u32,
    /// From the root to the leaf, with the cell taken in each; empty when it stands on no entry.
    path: Vec<(Node<'a>, usize)>,
    /// The key of the current entry.
    key: Vec<u8>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(pages: &'a Pages, root: &Root) -> Self {
        Cursor { pages, root: root.page, path: Vec::with_capacity(root.depth as usize), key: Vec::new() }
    }

    /// To the first entry with a key >= this one. This and all that move say whether the cursor then stands on
    /// an entry.
    pub fn seek(&mut self, key: &[u8]) -> bool {
        let Some(index) = self.descend(|node, pages| node.search_child(key, pages)) else { return false };
        let leaf = self.path[index].0;
        let at = leaf.search(key, self.pages).unwrap_or_else(|at| at);
        self.path[index].1 = at;
        if at < leaf.count() { self.arrive(true) } else { self.next_leaf() }
    }

    /// To the last entry.
    pub fn seek_last(&mut self) -> bool {
        let Some(index) = self.descend(|node, _| node.count() - 1) else { return false };
        self.path[index].1 = self.path[index].0.count() - 1;
        self.arrive(true)
    }

    /// To the last entry with a key < this one.
    pub fn seek_before(&mut self, key: &[u8]) -> bool {
        let Some(index) = self.descend(|node, pages| node.search_child(key, pages)) else { return false };
        match self.path[index].0.search(key, self.pages).unwrap_or_else(|at| at) {
            0 => self.prev_leaf(),
            at => {
                self.path[index].1 = at - 1;
                self.arrive(true)
            }
        }
    }

    // What every cursor calls it; no iterator, because keys are lent from the cursor's own buffer.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> bool {
        let Some((leaf, index)) = self.path.last_mut() else { return false };
        if *index + 1 < leaf.count() {
            *index += 1;
            return self.arrive(false);
        }
        self.next_leaf()
    }

    pub fn prev(&mut self) -> bool {
        let Some((_, index)) = self.path.last_mut() else { return false };
        if *index > 0 {
            *index -= 1;
            return self.arrive(false);
        }
        self.prev_leaf()
    }

    /// The whole key of the current entry.
    pub fn key(&self) -> Option<&[u8]> {
        if self.path.is_empty() { None } else { Some(&self.key) }
    }

    /// The value of the current entry. It is lent from the tree and outlives the cursor.
    pub fn value(&self) -> Option<&'a [u8]> {
        self.path.last().map(|(leaf, index)| leaf.value(*index))
    }

    /// Key and value of the current entry.
    pub fn entry(&self) -> Option<(&[u8], &'a [u8])> {
        self.path.last().map(|(leaf, index)| (&self.key[..], leaf.value(*index)))
    }

    /// From the root to a leaf, by the child that `choose` names. The index of the leaf in the path.
    fn descend(&mut self, choose: impl Fn(Node<'a>, &'a Pages) -> usize) -> Option<usize> {
        self.path.clear();
        if self.root == 0 {
            return None;
        }
        self.below(self.root, choose);
        Some(self.path.len() - 1)
    }

    fn below(&mut self, page: u32, choose: impl Fn(Node<'a>, &'a Pages) -> usize) {
        let mut node = self.pages.node(page);
        while !node.is_leaf() {
            let index = choose(node, self.pages);
            self.path.push((node, index));
            node = self.pages.node(node.child(index));
        }
        self.path.push((node, 0));
    }

    fn next_leaf(&mut self) -> bool {
        self.path.pop();
        while let Some((node, index)) = self.path.last_mut() {
            if *index + 1 < node.count() {
                *index += 1;
                let child = node.child(*index);
                self.below(child, |_, _| 0);
                return self.arrive(true);
            }
            self.path.pop();
        }
        false
    }

    fn prev_leaf(&mut self) -> bool {
        self.path.pop();
        while let Some((node, index)) = self.path.last_mut() {
            if *index > 0 {
                *index -= 1;
                let child = node.child(*index);
                self.below(child, |node, _| node.count() - 1);
                let (leaf, index) = self.path.last_mut().expect("a leaf");
                *index = leaf.count() - 1;
                return self.arrive(true);
            }
            self.path.pop();
        }
        false
    }

    /// Rebuilds the key. `fresh`: the page is another one than before.
    fn arrive(&mut self, fresh: bool) -> bool {
        let (leaf, index) = *self.path.last().expect("a leaf");
        let prefix = leaf.prefix();
        if fresh {
            self.key.clear();
            self.key.extend_from_slice(prefix);
        } else {
            self.key.truncate(prefix.len());
        }
        self.key.extend_from_slice(leaf.suffix(index));
        if let Some(tail) = leaf.tail(index) {
            self.key.extend_from_slice(self.pages.run(tail.page, tail.len));
        }
        true
    }
}
