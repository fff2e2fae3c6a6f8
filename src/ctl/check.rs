//! `etcore check [-v] DATA-DIR`: walks every page and every record of a data directory that nobody uses.
//!
//! ```text
//!   each tree     every page (btree::check), then the tables against each other (mvcc::check)
//!   each log      every record (wal::check), one line each; bodies are decoded, -v shows what they change
//!   all shards    what the takeover of a start would find (design 5.5): from the lowest checkpoint to the highest
//!                 V that anything knows of, every revision must be there with all its parts
//! ```
//!
//! Promises: nothing is written but the process id in `LOCK`; every damage that a start would refuse is found
//! without starting, and also what a start would not read. The rules of the log are not written down again here:
//! records go through the machine of the shard and through the function that computes the cut. Exit code 0: all is
//! well; 1: there are findings; 2: it could not be told.
//!
//! What cannot be found: the loss of the very last flush of a log that nothing else knows of. It looks like a flush
//! that never ended, whose changes nobody was told of; seals make the time short in which that can be (design 6).

use crate::btree::{self, Table};
use crate::env::real::{self, RealDisk};
use crate::env::{Disk, File, Open};
use crate::meta::Meta;
use crate::model::record::Parts;
use crate::model::{Change, Fault, Record, ShardId};
use crate::mvcc::{self, Store};
use crate::raft::{Body, Payload, codec};
use crate::router::RangeMap;
use crate::runtime::boot::{FORMAT, meta_dir, shard_dir};
use crate::runtime::control::cut;
use crate::runtime::executor::fault_of;
use crate::shard::{Recovery, Shard};
use crate::wal::check::{Check, Finding};
use crate::wal::{Kind, segment_path};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

const USAGE: &str = "usage: etcore check [-v] DATA-DIR";

pub fn run(arguments: &[String]) -> ExitCode {
    let (flags, dirs): (Vec<_>, Vec<_>) = arguments.iter().partition(|argument| argument.starts_with('-'));
    let ([dir], true) = (&dirs[..], flags.iter().all(|flag| *flag == "-v")) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    // Damage that a reader meets is raised as a panic and caught below; it is told as a finding.
    std::panic::set_hook(Box::new(|_| {}));
    let out = io::BufWriter::new(io::stdout().lock());
    match check_dir(Path::new(dir.as_str()), !flags.is_empty(), out) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(fault) => {
            eprintln!("cannot check: {fault}");
            ExitCode::from(2)
        }
    }
}

fn check_dir(dir: &Path, verbose: bool, mut out: impl Write) -> Result<u64, Fault> {
    let path = dir.join("FORMAT");
    let format = std::fs::read_to_string(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            Fault::Refused(format!("{} is no data directory of etcore", dir.display()))
        }
        _ => Fault::io(&path, "read", error),
    })?;
    if format != FORMAT {
        return Err(Fault::Refused(format!(
            "{} has format {:?} and this program knows {:?}",
            dir.display(),
            format.trim(),
            FORMAT.trim()
        )));
    }
    let _lock = real::lock_dir(dir)?;
    check(Arc::new(RealDisk::new(real::Options::default())), dir, verbose, &mut out)
}

/// The number of findings; all of them, and a line for each record, went to `out`.
fn check(disk: Arc<dyn Disk>, dir: &Path, verbose: bool, out: &mut dyn Write) -> Result<u64, Fault> {
    let mut walk = Walk { disk: Arc::new(ReadOnly(disk)), dir, verbose, out, findings: 0 };
    walk.store()?;
    let findings = walk.findings;
    match findings {
        0 => walk.line(format_args!("all is well"))?,
        1 => walk.line(format_args!("1 finding"))?,
        _ => walk.line(format_args!("{findings} findings"))?,
    }
    walk.out.flush().map_err(|error| Fault::io("standard output", "write", error))?;
    Ok(findings)
}

struct Walk<'a> {
    disk: Arc<dyn Disk>,
    dir: &'a Path,
    verbose: bool,
    out: &'a mut dyn Write,
    findings: u64,
}

/// What a log holds behind the position of its tree.
#[derive(Default)]
struct LogRead {
    entries: Vec<Entry>,
    /// The highest V in a seal.
    sealed_v: i64,
    /// Nothing of it is missing or unreadable.
    sound: bool,
}

struct Entry {
    index: u64,
    term: u64,
    payload: Option<Payload>,
}

/// What the meta group says of the others.
struct MetaRead {
    epoch: u64,
    compacted: i64,
    /// The highest V that its seals know.
    sealed_v: i64,
    map: Option<RangeMap>,
}

impl Walk<'_> {
    fn line(&mut self, line: std::fmt::Arguments<'_>) -> Result<(), Fault> {
        writeln!(self.out, "{line}").map_err(|error| Fault::io("standard output", "write", error))
    }

    fn finding(&mut self, path: &Path, place: &str, what: &str) -> Result<(), Fault> {
        self.findings += 1;
        let path = self.shown(path);
        self.line(format_args!("FINDING {path}: {place}: {what}"))
    }

    fn shown(&self, path: &Path) -> String {
        path.strip_prefix(self.dir).unwrap_or(path).display().to_string()
    }

    fn store(&mut self) -> Result<(), Fault> {
        let meta = self.meta()?;
        let there = self.shards_there()?;
        let shards = match meta.as_ref().and_then(|meta| meta.map.as_ref()) {
            Some(map) => map.shards() as ShardId,
            // Without a range map those that are there are looked at.
            None => there.last().copied().unwrap_or(0),
        };
        for &shard in there.iter().filter(|shard| **shard > shards) {
            let path = shard_dir(self.dir, shard);
            self.finding(&path, "directory", &format!("the range map has only {shards} shards"))?;
        }
        let mut whole = Vec::new();
        for shard in 1..=shards {
            whole.extend(self.shard(shard, meta.as_ref())?);
        }
        match meta {
            Some(meta) if whole.len() == shards as usize => self.revisions(&meta, &whole),
            _ => self.line(format_args!("revisions were not compared, since not all of them can be read")),
        }
    }

    /// The numbers of the shards that have a directory, ascending.
    fn shards_there(&self) -> Result<Vec<ShardId>, Fault> {
        let names = self.disk.list(self.dir).map_err(|error| Fault::io(self.dir, "list", error))?;
        let number = |name: &String| name.strip_prefix("shard-")?.parse().ok();
        let mut there: Vec<ShardId> = names.iter().filter_map(number).collect();
        there.sort_unstable();
        Ok(there)
    }

    /// None if it cannot be read.
    fn meta(&mut self) -> Result<Option<MetaRead>, Fault> {
        let dir = meta_dir(self.dir);
        let path = dir.join("tree");
        // Its rows own no runs: the state is one row.
        let tree = self.tree(&path, &|_, _, _| None)?;
        let mut meta = None;
        if tree {
            match caught(|| Meta::open(self.disk.clone(), &path, btree::Options::default())) {
                Ok(read) => meta = Some(read),
                Err(fault) => self.finding(&path, "state", &fault.to_string())?,
            }
        }
        let after = meta.as_ref().map_or(0, |meta| meta.state().entry);
        let log = self.log(&dir.join("log"), after)?;
        let Some(mut meta) = meta else { return Ok(None) };
        for Entry { index, term, payload } in log.entries {
            if let Err(fault) = meta.apply(index, term, payload.as_ref()) {
                self.finding(&dir.join("log"), &format!("entry {index}"), &fault.to_string())?;
            }
        }
        let state = meta.state().clone();
        self.line(format_args!(
            "meta: entry {} of term {}, epoch {}, compaction point {}",
            state.entry, state.term, state.epoch, state.compacted
        ))?;
        let map = match &state.birth {
            None => None,
            Some(birth) => {
                let map = RangeMap::from_bytes(birth.range_map.clone());
                if map.is_none() {
                    self.finding(&path, "range map", "it does not cover the key space")?;
                }
                map
            }
        };
        if state.birth.is_none() && log.sound {
            self.line(format_args!("the store was not yet born"))?;
        }
        let sealed_v = log.sealed_v;
        Ok(log.sound.then_some(MetaRead { epoch: state.epoch, compacted: state.compacted, sealed_v, map }))
    }

    /// The shard with what its log adds to its tree; None if something of it cannot be read.
    fn shard(&mut self, shard: ShardId, meta: Option<&MetaRead>) -> Result<Option<Shard>, Fault> {
        let dir = shard_dir(self.dir, shard);
        let path = dir.join("tree");
        let mut store = None;
        if self.tree(&path, &mvcc::owned_run)? {
            let found = caught(|| {
                let store = Store::open(self.disk.clone(), &path, btree::Options::default())?;
                let found = mvcc::check(store.tree(), store.applied());
                Ok((store, found))
            });
            match found {
                Ok((read, found)) => {
                    for what in found {
                        self.finding(&path, "tables", &what)?;
                    }
                    store = Some(read);
                }
                Err(fault) => self.finding(&path, "tables", &fault.to_string())?,
            }
        }
        let after = store.as_ref().map_or(0, |store| store.applied().position.entry);
        let log = self.log(&dir.join("log"), after)?;
        let Some(store) = store else { return Ok(None) };
        let applied = store.applied().clone();
        self.line(format_args!(
            "shard {shard}: applied entry {} of term {}, revision {}, known V {}, fence {}, R* {}, compaction {:?}",
            applied.position.entry,
            applied.term,
            applied.revision,
            applied.known_v,
            applied.fence,
            applied.r_star,
            applied.compaction
        ))?;
        let mut machine = Shard::new(shard, store);
        machine.hear(log.sealed_v);
        let mut sound = log.sound;
        for Entry { index, term, payload } in log.entries {
            if let Err(fault) = machine.deliver(index, term, payload) {
                self.finding(&dir.join("log"), &format!("entry {index}"), &fault.to_string())?;
                sound = false;
                break;
            }
        }
        if let Some(meta) = meta
            && machine.fence() > meta.epoch
        {
            let what = format!("shard {shard} carries reign {}, of which it knows nothing", machine.fence());
            self.finding(&meta_dir(self.dir).join("log"), "reigns", &what)?;
        }
        Ok(sound.then_some(machine))
    }

    /// Walks the pages; true if all is well with them.
    fn tree(&mut self, path: &Path, owner: btree::Owner<'_>) -> Result<bool, Fault> {
        let report = match btree::check(&*self.disk, path, owner) {
            Ok(report) => report,
            Err(Fault::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                self.finding(path, "file", "missing")?;
                return Ok(false);
            }
            Err(fault) => return Err(fault),
        };
        let mut entries = String::new();
        for (table, count) in Table::ALL.iter().zip(report.entries) {
            entries.push_str(&format!(", {table:?} {count}"));
        }
        let shown = self.shown(path);
        self.line(format_args!(
            "{shown}: generation {}, {} pages{entries}",
            report.generation, report.pages
        ))?;
        for finding in &report.findings {
            self.finding(path, &format!("page {}", finding.page), &finding.what)?;
        }
        Ok(report.findings.is_empty())
    }

    /// Shows every record of a log. `after`: the last entry that the tree holds; only what is behind it is kept.
    fn log(&mut self, dir: &Path, after: u64) -> Result<LogRead, Fault> {
        let mut read = LogRead { sound: true, ..LogRead::default() };
        // What the next entry may have as its index at most, and the least term it may have.
        let mut last: Option<(u64, u64)> = None;
        let mut records = 0;
        for finding in Check::new(&*self.disk, dir)? {
            let (record, flush) = match finding? {
                Finding::Record { record, flush } => (record, flush),
                Finding::Torn(torn) => {
                    let path = self.shown(&segment_path(dir, torn.place.segment));
                    let (at, whole) = (torn.place.offset, torn.records);
                    self.line(format_args!(
                        "{path} @{at}: a flush that never ended, with {whole} whole records; nobody was told of it"
                    ))?;
                    continue;
                }
                Finding::Damage { path, place, what } => {
                    self.finding(&path, &place, &what)?;
                    read.sound = false;
                    continue;
                }
            };
            records += 1;
            let path = segment_path(dir, record.place.segment);
            let place = format!("offset {}", record.place.offset);
            let at = format!("{} @{} flush {flush}", self.shown(&path), record.place.offset);
            match record.kind {
                Kind::Entry => match codec::decode_entry(&record.body) {
                    Err(error) => {
                        self.finding(&path, &place, &error.to_string())?;
                        read.sound = false;
                    }
                    Ok(entry) => {
                        let (index, term) = (entry.index, entry.term);
                        let payload = if entry.data.is_empty() {
                            Ok(None)
                        } else {
                            codec::decode_payload(&entry.data).map(Some)
                        };
                        match payload {
                            Err(error) => {
                                self.finding(&path, &place, &format!("entry {index}: {error}"))?;
                                read.sound = false;
                            }
                            Ok(payload) => {
                                self.entry(&at, index, term, payload.as_ref())?;
                                if index > after {
                                    // A later leader's entry replaces what stood there and all behind it.
                                    while read.entries.last().is_some_and(|last| last.index >= index) {
                                        read.entries.pop();
                                    }
                                    read.entries.push(Entry { index, term, payload });
                                }
                            }
                        }
                        let (expected, term_min) = match last {
                            Some((index, term)) => (index + 1, term),
                            None => (after + 1, 0),
                        };
                        if index > expected {
                            let what = format!("entry {index} stands where entry {expected} should be");
                            self.finding(&path, &place, &what)?;
                            read.sound = false;
                        }
                        if term < term_min {
                            let what =
                                format!("entry {index} has term {term}, below the {term_min} before it");
                            self.finding(&path, &place, &what)?;
                        }
                        if index != record.index {
                            let what = format!("the header says entry {}, the body {index}", record.index);
                            self.finding(&path, &place, &what)?;
                        }
                        last = Some((index, term));
                    }
                },
                Kind::HardState => match codec::decode_hard_state(&record.body) {
                    Ok(state) => self.line(format_args!(
                        "{at}: hard state, term {} vote {} commit {}",
                        state.term, state.vote, state.commit
                    ))?,
                    Err(error) => self.finding(&path, &place, &error.to_string())?,
                },
                Kind::Seal => match record.body.as_ref().try_into().map(i64::from_le_bytes) {
                    Ok(v) => {
                        read.sealed_v = read.sealed_v.max(v);
                        self.line(format_args!("{at}: seal, V {v}"))?;
                    }
                    Err(_) => self.finding(&path, &place, "a seal without a revision")?,
                },
                Kind::Mark => self.line(format_args!("{at}: mark"))?,
            }
        }
        if records == 0 && after > 0 {
            self.finding(
                dir,
                "log",
                &format!("empty, though the tree was made of its entries up to {after}"),
            )?;
            read.sound = false;
        }
        Ok(read)
    }

    fn entry(&mut self, at: &str, index: u64, term: u64, payload: Option<&Payload>) -> Result<(), Fault> {
        let Some(Payload { epoch, v, body }) = payload else {
            return self.line(format_args!("{at}: term {term} index {index}: a term begins"));
        };
        let what = match body {
            Body::Batch(records) => match &records[..] {
                [] => "no record".to_owned(),
                [record] => format!("record of revision {}", record.rev),
                [first, .., last] => {
                    format!("{} records, revisions {} to {}", records.len(), first.rev, last.rev)
                }
            },
            Body::Cut { r_star } => format!("cut, R* {r_star}"),
            Body::Barrier => "barrier".to_owned(),
            Body::Init(birth) => format!("birth of cluster {:x}", birth.cluster_id),
            Body::Reign { node } => format!("reign of node {node}"),
            Body::Compact { revision } => format!("compaction to {revision}"),
        };
        self.line(format_args!("{at}: term {term} index {index}: epoch {epoch}, V {v}, {what}"))?;
        if self.verbose
            && let Body::Batch(records) = body
        {
            for record in records {
                self.record(record)?;
            }
        }
        Ok(())
    }

    fn record(&mut self, record: &Record) -> Result<(), Fault> {
        let rev = record.rev;
        if !record.parts.is_empty() {
            self.line(format_args!("    revision {rev}: one part of those in shards {:?}", record.parts))?;
        }
        for change in &record.changes {
            match change {
                Change::Put { sub, kv } => self.line(format_args!(
                    "    revision {rev}.{sub}: put {:?}, {} bytes, version {}, created at {}, lease {:x}",
                    kv.key,
                    kv.value.len(),
                    kv.version,
                    kv.create_revision,
                    kv.lease
                ))?,
                Change::Delete { sub, key } => {
                    self.line(format_args!("    revision {rev}.{sub}: delete {key:?}"))?;
                }
                Change::DeleteRange { first_sub, count, range, lease } => self.line(format_args!(
                    "    revision {rev}.{first_sub}: delete {count} keys from {:?} to {:?}, lease {lease:x}",
                    range.start, range.end
                ))?,
            }
        }
        Ok(())
    }

    /// The cut that a start would make.
    fn revisions(&mut self, meta: &MetaRead, shards: &[Shard]) -> Result<(), Fault> {
        let recoveries: BTreeMap<ShardId, Recovery> =
            shards.iter().map(|shard| (shard.id(), shard.recovery())).collect();
        let lowest = recoveries.values().map(|recovery| recovery.applied).min().unwrap_or(1);
        let mut found: BTreeMap<ShardId, Vec<(i64, Parts)>> = BTreeMap::new();
        for shard in shards {
            match caught(|| Ok(shard.revisions_above(lowest))) {
                Ok(revisions) => drop(found.insert(shard.id(), revisions)),
                Err(fault) => {
                    let path = shard_dir(self.dir, shard.id()).join("tree");
                    return self.finding(&path, "revisions", &fault.to_string());
                }
            }
        }
        match cut(&recoveries, &found, meta.compacted, meta.sealed_v) {
            Ok(r_star) => self.line(format_args!("revisions: whole up to {r_star}, from {lowest} on")),
            Err(fault) => {
                let dir = self.dir.to_path_buf();
                self.finding(&dir, "revisions", &fault.to_string())
            }
        }
    }
}

/// What a reader of damaged data raises comes back as the fault it carries.
fn caught<T>(read: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| Err(fault_of("the check", panic)))
}

/// A disk that refuses to change anything; what asks to write a file gets it for reading.
#[derive(Debug)]
struct ReadOnly(Arc<dyn Disk>);

impl Disk for ReadOnly {
    fn open(&self, path: &Path, how: Open, direct: bool) -> io::Result<Arc<dyn File>> {
        match how {
            Open::Create => Err(refused()),
            Open::Read | Open::Write => self.0.open(path, Open::Read, direct),
        }
    }

    fn rename(&self, _: &Path, _: &Path) -> io::Result<()> {
        Err(refused())
    }

    fn remove(&self, _: &Path) -> io::Result<()> {
        Err(refused())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        self.0.list(dir)
    }

    fn create_dir(&self, _: &Path) -> io::Result<()> {
        Err(refused())
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Err(refused())
    }
}

fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "a check changes nothing")
}

#[cfg(test)]
mod tests;
