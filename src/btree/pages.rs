//! Where a page is read: among the pages being edited, in a frozen layer, or in the file. A page number means
//! one page in all of them, so the order of looking is only a matter of speed.

use std::sync::Arc;

use super::OverflowRef;
use super::layer::Layer;
use super::map::Map;
use super::node::{Node, Tail, Tails};
use super::page::{Page, RUN_HEADER, kind, u32_at};
use crate::model::Fault;

#[derive(Debug)]
pub struct Pages {
    /// Being edited, in place. Empty in a snapshot.
    pub dirty: Layer,
    /// Frozen for snapshots, oldest first.
    pub frozen: Vec<Arc<Layer>>,
    /// Frozen for the checkpoint under way.
    pub writing: Vec<Arc<Layer>>,
    pub map: Arc<Map>,
}

impl Pages {
    /// The page of a node.
    #[inline]
    pub fn page(&self, number: u32) -> &Page {
        if let Some(buffer) = self.dirty.get(number) {
            return buffer.page();
        }
        for layer in self.frozen.iter().rev().chain(&self.writing) {
            if let Some(buffer) = layer.get(number) {
                return buffer.page();
            }
        }
        self.map.node(number)
    }

    #[inline]
    pub fn node(&self, number: u32) -> Node<'_> {
        Node::new(self.page(number))
    }

    /// The bytes of a run.
    pub fn run(&self, number: u32, len: u32) -> &[u8] {
        let layers = self.frozen.iter().rev().chain(&self.writing);
        let buffer =
            self.dirty.get(number).or_else(|| layers.into_iter().find_map(|layer| layer.get(number)));
        let Some(buffer) = buffer else { return self.map.run(number, len) };
        let bytes = buffer.bytes();
        if kind(bytes) != super::page::RUN || u32_at(bytes, 12) != len {
            Fault::Broken(format!("page {number} of the tree begins no run of {len} bytes")).raise();
        }
        &bytes[RUN_HEADER..RUN_HEADER + len as usize]
    }

    pub fn overflow(&self, place: OverflowRef) -> &[u8] {
        match u32::try_from(place.page) {
            Ok(page) => self.run(page, place.len),
            Err(_) => Fault::Broken(format!("no tree has a page {}", place.page)).raise(),
        }
    }
}

impl Tails for Pages {
    fn tail(&self, tail: Tail) -> &[u8] {
        self.run(tail.page, tail.len)
    }
}
