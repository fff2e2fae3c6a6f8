//! Walks a whole log, changes nothing, and reports every record and every damage. Serves `etcore check` and
//! tests. Unlike [`Log::open`](super::Log::open) it goes on behind a damage and searches everything for later
//! flushes.

use super::replay::{Damage, Next, Reader};
use super::segment::{self, Segment};
use super::{Recovered, Torn};
use crate::env::{Disk, Open};
use crate::model::Fault;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub enum Finding {
    /// A sound record and the number of its flush.
    Record { record: Recovered, flush: u64 },
    /// The log ends with an unfinished flush; nothing acknowledged is in it.
    Torn(Torn),
    /// What was acknowledged is not there. `place` is an offset, or says that the segment is missing.
    Damage { path: PathBuf, place: String, what: String },
}

impl Finding {
    fn damage(damage: Damage) -> Self {
        Finding::Damage { path: damage.path, place: damage.place, what: damage.what }
    }
}

/// All findings, in the order of the log. Ends after the first `Err`: the disk refused.
pub struct Check {
    reader: Option<Reader>,
    found: VecDeque<Finding>,
}

impl Check {
    pub fn new(disk: &dyn Disk, dir: &Path) -> Result<Check, Fault> {
        let numbers = segment::numbers(disk, dir)?;
        let mut found = VecDeque::new();
        for pair in numbers.windows(2) {
            found.extend(
                (pair[0] + 1..pair[1])
                    .take(1)
                    .map(|missing| Finding::damage(Damage::missing(segment::path(dir, missing)))),
            );
        }
        let segments: Result<Vec<Segment>, Fault> =
            numbers.into_iter().map(|number| Segment::open(disk, dir, number, Open::Read)).collect();
        let reader = Some(segments?).filter(|segments| !segments.is_empty());
        Ok(Check { reader: reader.map(|segments| Reader::new(segments, u64::MAX)), found })
    }
}

impl Iterator for Check {
    type Item = Result<Finding, Fault>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(finding) = self.found.pop_front() {
                return Some(Ok(finding));
            }
            let reader = self.reader.as_mut()?;
            let end = match reader.next() {
                Ok(Next::Flush(flush)) => {
                    let records = flush.records.into_iter();
                    self.found.extend(records.map(|record| Finding::Record { record, flush: flush.number }));
                    continue;
                }
                Ok(Next::End(end)) => end,
                Err(fault) => {
                    self.reader = None;
                    return Some(Err(fault));
                }
            };
            let more = match end.damage {
                Some(damage) => {
                    self.found.push_back(Finding::damage(damage));
                    reader.skip_damage()
                }
                None => {
                    self.found.extend(end.torn.map(Finding::Torn));
                    Ok(false)
                }
            };
            match more {
                Ok(true) => {}
                Ok(false) => self.reader = None,
                Err(fault) => {
                    self.reader = None;
                    return Some(Err(fault));
                }
            }
        }
    }
}
