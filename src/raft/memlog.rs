//! The log as raft-rs reads it: what is above the applied position, in memory.
//!
//! raft-rs reads its storage synchronously and treats a missing entry as fatal, so everything it may ask for is
//! here; what is below was delivered and needs no one any more. `term(first - 1)` always answers.

use ::raft::eraftpb::{ConfState, Entry, HardState, Snapshot};
use ::raft::{Error, GetEntriesContext, RaftState, Storage, StorageError};
use std::collections::VecDeque;

#[derive(Clone, Debug, Default)]
pub struct MemLog {
    pub hard_state: HardState,
    pub conf_state: ConfState,
    entries: VecDeque<Entry>,
    /// Index and term of the entry before the first.
    base: (u64, u64),
}

impl MemLog {
    pub fn new(base_index: u64, base_term: u64, conf_state: ConfState) -> Self {
        MemLog { conf_state, base: (base_index, base_term), ..Default::default() }
    }

    pub fn last(&self) -> u64 {
        self.base.0 + self.entries.len() as u64
    }

    pub fn last_term(&self) -> u64 {
        self.entries.back().map_or(self.base.1, |entry| entry.term)
    }

    /// Appends entries; those that were at their indexes and after are gone. Entries at or below the base are
    /// history and ignored. An error names a gap.
    pub fn append(&mut self, entries: impl IntoIterator<Item = Entry>) -> Result<(), String> {
        for entry in entries {
            if entry.index <= self.base.0 {
                continue;
            }
            if entry.index > self.last() + 1 {
                return Err(format!("entry {} follows entry {}", entry.index, self.last()));
            }
            self.entries.truncate((entry.index - self.base.0 - 1) as usize);
            self.entries.push_back(entry);
        }
        Ok(())
    }

    /// Forgets entries up to and including `index`.
    pub fn release(&mut self, index: u64) {
        while self.entries.front().is_some_and(|entry| entry.index <= index) {
            let entry = self.entries.pop_front().expect("just seen");
            self.base = (entry.index, entry.term);
        }
    }

    fn term_at(&self, index: u64) -> Option<u64> {
        if index == self.base.0 {
            return Some(self.base.1);
        }
        index.checked_sub(self.base.0 + 1).and_then(|i| self.entries.get(i as usize)).map(|entry| entry.term)
    }
}

impl Storage for MemLog {
    fn initial_state(&self) -> raft::Result<RaftState> {
        Ok(RaftState { hard_state: self.hard_state.clone(), conf_state: self.conf_state.clone() })
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _context: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low <= self.base.0 {
            return Err(Error::Store(StorageError::Compacted));
        }
        if high > self.last() + 1 {
            return Err(Error::Store(StorageError::Unavailable));
        }
        let at = |index: u64| (index - self.base.0 - 1) as usize;
        let max_size = max_size.into().unwrap_or(u64::MAX);
        let mut size = 0;
        let range = self.entries.range(at(low)..at(high));
        Ok(range
            .enumerate()
            .take_while(|(i, entry)| {
                size += entry.data.len() as u64 + 32;
                *i == 0 || size <= max_size
            })
            .map(|(_, entry)| entry.clone())
            .collect())
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        self.term_at(index).ok_or(Error::Store(if index < self.base.0 {
            StorageError::Compacted
        } else {
            StorageError::Unavailable
        }))
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.base.0 + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last())
    }

    fn snapshot(&self, _request_index: u64, _to: u64) -> raft::Result<Snapshot> {
        Err(Error::Store(StorageError::SnapshotTemporarilyUnavailable))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u64, term: u64) -> Entry {
        let mut entry = Entry::default();
        (entry.index, entry.term) = (index, term);
        entry
    }

    #[test]
    fn a_conflicting_append_replaces_the_tail_and_a_gap_is_an_error() {
        let mut log = MemLog::new(10, 1, ConfState::default());
        log.append([entry(11, 1), entry(12, 1), entry(13, 1)]).unwrap();
        log.append([entry(12, 2)]).unwrap();
        assert_eq!((log.last(), log.last_term()), (12, 2));
        assert!(log.append([entry(14, 2)]).is_err());
    }

    #[test]
    fn the_term_before_the_first_entry_is_always_known() {
        let mut log = MemLog::new(0, 0, ConfState::default());
        log.append([entry(1, 1), entry(2, 3)]).unwrap();
        log.release(2);
        assert_eq!(log.term(2).unwrap(), 3);
        assert_eq!(log.first_index().unwrap(), 3);
        assert!(log.term(1).is_err());
        log.append([entry(1, 1)]).unwrap();
        assert_eq!(log.last(), 2, "history is ignored");
    }
}
