//! Control as a state machine: the meta group, the takeover that begins a reign, the compaction point.
//!
//! ```text
//!  campaign ─▶ Reign ─▶ (every shard) lead ─▶ barrier ─▶ cut ─▶ serve
//! ```
//!
//! Promises: nothing is served before all Cuts of the reign are committed and applied; a store in which a revision
//! below the known V is missing is refused, with the revision and the shard, rather than started with a hole
//! (design 5.5, case D8). Does not know keys, clients or connections.

use super::core::{Now, Pace};
use super::job::Job;
use super::message::{Effect, Load, Message};
use crate::coordinator::Reign;
use crate::group::{Delivered, Group};
use crate::meta::Meta;
use crate::model::record::Parts;
use crate::model::{Answer, CoreId, Epoch, Fault, Rejection, Response, ShardId};
use crate::proto::etcdserverpb as pb;
use crate::raft::{Birth, Body, Payload};
use crate::router::RangeMap;
use crate::shard::{Origin, Recovery};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The number of this node in Raft; one node for now.
const NODE: u64 = 1;

#[derive(Debug)]
enum Stage {
    /// The meta group is not led yet.
    Opened,
    /// The `Reign` entry is on its way, proposed in this term.
    Reigning {
        index: u64,
        term: u64,
    },
    /// The reign is committed; waits for `take_over`.
    Elected {
        epoch: Epoch,
    },
    /// Waits for every shard to be led.
    Leading {
        epoch: Epoch,
        terms: BTreeMap<ShardId, u64>,
    },
    /// Waits for every shard's barrier.
    Barring {
        epoch: Epoch,
        recoveries: BTreeMap<ShardId, Recovery>,
    },
    /// Waits for the revisions that stand in the trees above the lowest checkpoint.
    Finding {
        epoch: Epoch,
        recoveries: BTreeMap<ShardId, Recovery>,
        found: BTreeMap<ShardId, Vec<(i64, Parts)>>,
    },
    /// Waits for every shard's Cut.
    Cutting {
        epoch: Epoch,
        r_star: i64,
        shards: BTreeSet<ShardId>,
    },
    /// The reign exists; the cores are told.
    Starting {
        reign: Arc<Reign>,
        cores: usize,
    },
    Serving {
        reign: Arc<Reign>,
    },
}

/// A compaction on its way.
#[derive(Debug)]
struct Compaction {
    origin: Origin,
    revision: i64,
    physical: bool,
    /// The answer when all is done; a physical one waits also when it is a rejection (semantics 6.3).
    answer: Answer,
    /// Cores that have the point.
    told: usize,
}

#[derive(Debug)]
pub struct Control {
    cores: usize,
    group: Group,
    meta: Meta,
    map: Option<Arc<RangeMap>>,
    stage: Stage,
    compactions: Vec<Compaction>,
    removed: BTreeMap<ShardId, i64>,
    effects: Vec<Effect>,
    pace: Pace,
    checkpointing: bool,
    preparing: bool,
    quiet_since: Now,
    /// V at the last tick, and since when it stands there.
    v_seen: (i64, Now),
    checkpoint_entry: u64,
    stopped: usize,
    stopping: bool,
}

impl Control {
    pub fn new(cores: usize, meta: Meta, group: Group, pace: Pace) -> Self {
        Control {
            cores,
            checkpoint_entry: meta.state().entry,
            group,
            meta,
            map: None,
            stage: Stage::Opened,
            compactions: Vec::new(),
            removed: BTreeMap::new(),
            effects: Vec::new(),
            pace,
            checkpointing: false,
            preparing: false,
            quiet_since: Now::ZERO,
            v_seen: (0, Now::ZERO),
            stopped: 0,
            stopping: false,
        }
    }

    pub fn take_effects(&mut self, into: &mut Vec<Effect>) {
        into.append(&mut self.effects);
    }

    /// What the store was born with, as soon as meta's log said so.
    pub fn birth(&self) -> Option<&Birth> {
        self.meta.state().birth.as_ref()
    }

    pub fn is_elected(&self) -> bool {
        matches!(self.stage, Stage::Elected { .. })
    }

    pub fn serves(&self) -> bool {
        matches!(self.stage, Stage::Serving { .. })
    }

    pub fn reign(&self) -> Option<&Arc<Reign>> {
        match &self.stage {
            Stage::Starting { reign, .. } | Stage::Serving { reign } => Some(reign),
            _ => None,
        }
    }

    /// Every core finished what was logged and made it durable in its trees, and so did meta.
    pub fn is_stopped(&self) -> bool {
        self.stopping && self.stopped >= self.cores && !self.checkpointing && self.group.is_quiet()
    }

    fn send(&mut self, core: CoreId, message: Message) {
        self.effects.push(Effect::Send(core, message));
    }

    fn send_to_cores(&mut self, message: impl Fn() -> Message) {
        for core in 0..self.cores as CoreId {
            self.send(core, message());
        }
    }

    fn propose(&mut self, body: Body) -> Result<u64, Fault> {
        let v = self.reign().map_or(0, |reign| reign.watermark.visible());
        let epoch = self.reign().map_or(0, |reign| reign.epoch);
        self.group.propose(Payload { epoch, v, body })
    }

    // ---- the takeover (design 5) --------------------------------------------------------------------------

    /// Begins: campaigns for the meta group.
    pub fn start(&mut self) -> Result<(), Fault> {
        self.group.campaign()
    }

    /// Once meta is led and its log is applied: begins one attempt to lead. A store that has no birth yet is
    /// born with this one first.
    pub fn reign_or_be_born(&mut self, birth: impl FnOnce() -> Birth) -> Result<(), Fault> {
        if self.birth().is_none() {
            self.propose(Body::Init(birth()))?;
        }
        let index = self.propose(Body::Reign { node: NODE })?;
        self.stage = Stage::Reigning { index, term: self.group.term() };
        Ok(())
    }

    /// Meta is led and everything in its log is applied.
    pub fn is_ready_to_reign(&self) -> bool {
        matches!(self.stage, Stage::Opened) && self.group.leads() && self.group.is_settled()
    }

    /// The cores hold the shards: leads them all.
    pub fn take_over(&mut self) -> Result<(), Fault> {
        let Stage::Elected { epoch } = self.stage else {
            return Err(Fault::Broken("takeover before the reign is committed".into()));
        };
        let birth =
            self.birth().ok_or_else(|| Fault::Broken("a reign over a store without a birth".into()))?;
        let map = RangeMap::from_bytes(birth.range_map.clone())
            .ok_or_else(|| Fault::Broken("the store's range map cannot be read".into()))?;
        self.map = Some(Arc::new(map));
        self.stage = Stage::Leading { epoch, terms: BTreeMap::new() };
        self.send_to_cores(|| Message::Campaign { epoch });
        Ok(())
    }

    fn shards(&self) -> usize {
        self.map.as_ref().map_or(0, |map| map.shards())
    }

    pub fn message(&mut self, message: Message) -> Result<(), Fault> {
        let all = self.shards();
        match (message, &mut self.stage) {
            (Message::Leads { epoch: e, shard, term }, Stage::Leading { epoch, terms }) if e == *epoch => {
                terms.insert(shard, term);
                if terms.len() == all {
                    let epoch = *epoch;
                    self.stage = Stage::Barring { epoch, recoveries: BTreeMap::new() };
                    self.send_to_cores(|| Message::Bar { epoch });
                }
                Ok(())
            }
            (Message::Barred { epoch: e, recovery }, Stage::Barring { epoch, recoveries }) if e == *epoch => {
                if recovery.fence > *epoch {
                    return Err(Fault::Broken(format!(
                        "shard {} carries a later reign ({}) than this one ({epoch})",
                        recovery.shard, recovery.fence
                    )));
                }
                recoveries.insert(recovery.shard, recovery);
                if recoveries.len() == all {
                    let (epoch, recoveries) = (*epoch, std::mem::take(recoveries));
                    let after = recoveries.values().map(|r| r.applied).min().unwrap_or(1);
                    self.stage = Stage::Finding { epoch, recoveries, found: BTreeMap::new() };
                    self.send_to_cores(|| Message::Find { epoch, after });
                }
                Ok(())
            }
            (Message::Found { epoch: e, shard, revisions }, Stage::Finding { epoch, recoveries, found })
                if e == *epoch =>
            {
                found.insert(shard, revisions);
                if found.len() == all {
                    let epoch = *epoch;
                    let r_star = cut(recoveries, found, self.meta.state().compacted, self.group.sealed_v())?;
                    self.stage = Stage::Cutting { epoch, r_star, shards: BTreeSet::new() };
                    self.send_to_cores(|| Message::Cut { epoch, r_star });
                }
                Ok(())
            }
            (Message::CutApplied { epoch: e, shard }, Stage::Cutting { epoch, r_star, shards })
                if e == *epoch =>
            {
                shards.insert(shard);
                if shards.len() == all {
                    let (epoch, r_star) = (*epoch, *r_star);
                    self.serve(epoch, r_star)?;
                }
                Ok(())
            }
            (Message::Serving { epoch }, Stage::Starting { reign, cores }) if epoch == reign.epoch => {
                *cores += 1;
                if *cores == self.cores {
                    let reign = reign.clone();
                    self.stage = Stage::Serving { reign };
                }
                Ok(())
            }
            (Message::CompactRequest { origin, request }, _) => self.compact(origin, &request),
            (Message::Compacting { revision }, _) => {
                for compaction in &mut self.compactions {
                    if compaction.revision == revision && compaction.answer.is_ok() {
                        compaction.told += 1;
                    }
                }
                self.answer_compactions();
                Ok(())
            }
            (Message::Removed { shard, revision }, _) => {
                self.removed.insert(shard, revision);
                self.answer_compactions();
                Ok(())
            }
            (Message::Measure { origin }, _) => {
                let tree = self.meta.tree();
                let load = Load {
                    file_bytes: tree.file_bytes().max(tree.used_bytes()),
                    used_bytes: tree.used_bytes(),
                    committed: self.group.committed(),
                    applied: self.group.delivered(),
                };
                self.send(origin.core, Message::Measured { token: origin.token, load });
                Ok(())
            }
            (Message::Stopped, _) => {
                self.stopped += 1;
                Ok(())
            }
            (Message::Done(job), _) => self.done(job),
            // A wake is a hint, and control waits for no revision.
            (Message::Visible, _) => Ok(()),
            (message, stage) => Err(Fault::Broken(format!("control got {message:?} while it was {stage:?}"))),
        }
    }

    /// All Cuts are applied: everything of the reign is made fresh (Z2).
    fn serve(&mut self, epoch: Epoch, r_star: i64) -> Result<(), Fault> {
        let map = self.map.clone().ok_or_else(|| Fault::Broken("a reign without a range map".into()))?;
        // A slot for each core and one for control.
        let reign = Arc::new(Reign::new(epoch, r_star, self.cores + 1, map));
        self.stage = Stage::Starting { reign: reign.clone(), cores: 0 };
        let (compacted, term) = (self.meta.state().compacted, self.group.term());
        self.send_to_cores(|| Message::Serve { reign: reign.clone(), compacted, term });
        Ok(())
    }

    // ---- compaction (etcd: semantics 6) -------------------------------------------------------------------

    fn compact(&mut self, origin: Origin, request: &pb::CompactionRequest) -> Result<(), Fault> {
        let v = match &self.stage {
            Stage::Serving { reign } => reign.watermark.visible(),
            _ => {
                let answer = Err(Rejection::NoLeader);
                self.send(origin.core, Message::Answers(vec![(origin.token, answer)]));
                return Ok(());
            }
        };
        let (revision, physical) = (request.revision, request.physical);
        let point = self.compactions.iter().map(|c| c.revision).max().unwrap_or(-1);
        let point = point.max(self.meta.state().compacted);
        let answer = if revision <= point {
            Err(Rejection::Compacted)
        } else if revision > v {
            Err(Rejection::FutureRev)
        } else {
            self.propose(Body::Compact { revision })?;
            // The header is completed when the answer leaves.
            Ok(Response::Compact(pb::CompactionResponse { header: Some(Default::default()) }))
        };
        let revision = if answer.is_ok() { revision } else { point };
        self.compactions.push(Compaction { origin, revision, physical, answer, told: 0 });
        self.answer_compactions();
        Ok(())
    }

    fn answer_compactions(&mut self) {
        let removed = if self.removed.len() == self.shards() {
            self.removed.values().copied().min().unwrap_or(-1)
        } else {
            -1
        };
        let v = self.reign().map_or(0, |reign| reign.watermark.visible());
        let cores = self.cores;
        let (done, left) = std::mem::take(&mut self.compactions).into_iter().partition(|compaction| {
            let told = compaction.answer.is_err() || compaction.told >= cores;
            let future = compaction.answer == Err(Rejection::FutureRev);
            told && (!compaction.physical || future || removed >= compaction.revision)
        });
        self.compactions = left;
        for Compaction { origin, mut answer, .. } in Vec::<Compaction>::from_iter(done) {
            if let Ok(Response::Compact(pb::CompactionResponse { header: Some(header) })) = &mut answer {
                header.revision = v;
            }
            self.send(origin.core, Message::Answers(vec![(origin.token, answer)]));
        }
    }

    // ---- a turn -------------------------------------------------------------------------------------------

    /// Does all that can be done now. Called after every batch of events.
    pub fn turn(&mut self, now: Now) -> Result<(), Fault> {
        let mut delivered = Vec::new();
        if let Some(flush) = self.group.poll(&mut delivered)? {
            self.quiet_since = now;
            self.effects.push(Effect::Run(Job::Flush { shard: 0, flush }));
        }
        // In each turn: a start that finds no room in the last segment waits for the next one and has no ticks.
        if !self.preparing
            && let Some(job) = self.group.log_mut().housekeeping()
        {
            self.preparing = true;
            self.effects.push(Effect::Run(Job::Segment { shard: 0, job }));
        }
        for Delivered { index, term, payload } in delivered {
            self.meta.apply(index, term, payload.as_ref())?;
            match payload.map(|payload| payload.body) {
                Some(Body::Reign { .. }) => self.elected(index, term)?,
                Some(Body::Compact { revision }) if self.reign().is_some() => {
                    self.send_to_cores(|| Message::Compact { revision });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// A `Reign` came back. It begins this attempt only if it is the one proposed, in the term it was proposed in.
    fn elected(&mut self, at: u64, of: u64) -> Result<(), Fault> {
        if let Stage::Reigning { index, term } = self.stage
            && index == at
        {
            if term != of || !self.group.leads() || self.group.term() != term {
                return Err(Fault::Broken("the reign came back under another term".into()));
            }
            self.stage = Stage::Elected { epoch: index };
        }
        Ok(())
    }

    fn done(&mut self, job: Job) -> Result<(), Fault> {
        match job {
            Job::Flush { flush, .. } => self.group.flushed(flush)?,
            Job::Segment { job, .. } => {
                self.preparing = false;
                self.group.log_mut().housekept(job)?;
            }
            Job::Checkpoint { job, entry, .. } => {
                self.checkpointing = false;
                self.checkpoint_entry = entry;
                // A page or two: not worth a helper.
                drop(self.meta.checkpoint_finished(job));
                self.group.log_mut().release(entry);
            }
            Job::Read(_) | Job::Hash(_) | Job::Discard(_) => {
                return Err(Fault::Broken("control was given a core's job".into()));
            }
        }
        Ok(())
    }

    /// Every few milliseconds: seal and checkpoint, as a core does for its shards.
    pub fn tick(&mut self, now: Now) -> Result<(), Fault> {
        let quiet = now.saturating_sub(self.quiet_since);
        let v = self.reign().map_or(0, |reign| reign.watermark.visible());
        if v != self.v_seen.0 {
            self.v_seen = (v, now);
        }
        let still = now.saturating_sub(self.v_seen.1) >= self.pace.seal_after;
        if quiet >= self.pace.seal_after
            && let Some(flush) = self.group.seal(v, still)
        {
            self.effects.push(Effect::Run(Job::Flush { shard: 0, flush }));
        }
        let behind = self.meta.state().entry > self.checkpoint_entry;
        let due = quiet >= self.pace.checkpoint_after
            || self.group.log().bytes_since(self.checkpoint_entry) >= self.pace.tail_bytes
            || self.stopping;
        if behind && due && !self.checkpointing {
            let entry = self.meta.state().entry;
            if let Some(job) = self.meta.checkpoint() {
                self.checkpointing = true;
                self.effects.push(Effect::Run(Job::Checkpoint { shard: 0, job, entry }));
            }
        }
        Ok(())
    }

    /// Finish what is logged and make it durable in the trees; `is_stopped` says when that is done.
    pub fn stop(&mut self) {
        if !self.stopping {
            self.stopping = true;
            self.send_to_cores(|| Message::Stop);
        }
    }
}

/// Computes R* (design 5.5): from the highest known V (`sealed_v`: what the seals of meta's log know), the longest
/// run of revisions of which every part is there.
/// Refuses if anything between the lowest checkpoint and the known V is missing: that was acknowledged.
pub fn cut(
    recoveries: &BTreeMap<ShardId, Recovery>,
    found: &BTreeMap<ShardId, Vec<(i64, Parts)>>,
    compacted: i64,
    sealed_v: i64,
) -> Result<i64, Fault> {
    let base = recoveries.values().map(|r| r.known_v).fold(sealed_v.max(1), i64::max);
    #[cfg(feature = "mutations")]
    let base = if crate::model::mutation::on(crate::model::mutation::Mutation::CutFromLowest) {
        recoveries.values().map(|r| r.known_v).min().unwrap_or(1)
    } else {
        base
    };
    let lowest = recoveries.values().map(|r| r.applied).min().unwrap_or(1);
    let compacted = recoveries.values().map(|r| r.compacted).fold(compacted, i64::max);

    // For every revision the shards in which it stands, and those that it names.
    let mut present: BTreeMap<i64, (BTreeSet<ShardId>, Parts)> = BTreeMap::new();
    let logs = recoveries.iter().map(|(shard, r)| (shard, &r.records));
    for (shard, revisions) in logs.chain(found) {
        for (rev, parts) in revisions {
            let entry = present.entry(*rev).or_default();
            entry.0.insert(*shard);
            if !parts.is_empty() {
                entry.1 = parts.clone();
            }
        }
    }
    let missing = |rev: i64| -> Option<Option<ShardId>> {
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::CutTakesHalves) {
            return (!present.contains_key(&rev)).then_some(None);
        }
        match present.get(&rev) {
            None => Some(None),
            Some((shards, parts)) => parts.iter().find(|part| !shards.contains(part)).map(|part| Some(*part)),
        }
    };
    for rev in lowest.max(compacted) + 1..=base {
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::HoleAccepted) {
            break;
        }
        if let Some(shard) = missing(rev) {
            let place = match shard {
                Some(shard) => format!("in shard {shard}"),
                None => "in any shard".to_owned(),
            };
            return Err(Fault::Refused(format!(
                "revision {rev} was acknowledged but is not to be found {place} (known V is {base}, the lowest \
                 checkpoint holds {lowest}): the end of a log was lost. Nothing was changed; restore the log or the \
                 data directory from a backup"
            )));
        }
    }
    let mut r_star = base;
    while missing(r_star + 1).is_none() {
        r_star += 1;
    }
    #[cfg(feature = "mutations")]
    if crate::model::mutation::on(crate::model::mutation::Mutation::CutOneFar) {
        r_star += 1;
    }
    Ok(r_star)
}

#[cfg(test)]
mod tests {
    use super::*;
    use smallvec::smallvec;

    fn recovery(
        shard: ShardId,
        known_v: i64,
        applied: i64,
        records: &[(i64, &[ShardId])],
    ) -> (ShardId, Recovery) {
        let records = records.iter().map(|(rev, parts)| (*rev, Parts::from_slice(parts))).collect();
        (shard, Recovery { shard, known_v, applied, records, fence: 0, compacted: -1 })
    }

    #[test]
    fn the_cut_ends_before_the_first_revision_that_is_not_whole() {
        let recoveries = BTreeMap::from([
            recovery(1, 3, 1, &[(2, &[]), (3, &[]), (5, &[1, 2]), (7, &[])]),
            recovery(2, 1, 1, &[(4, &[]), (5, &[1, 2]), (6, &[1, 2])]),
        ]);
        assert_eq!(cut(&recoveries, &BTreeMap::new(), -1, 0).unwrap(), 5, "6 lacks its part in shard 1");
    }

    #[test]
    fn a_hole_below_the_known_v_is_refused_with_revision_and_shard() {
        let recoveries =
            BTreeMap::from([recovery(1, 4, 1, &[(2, &[]), (3, &[1, 2]), (4, &[])]), recovery(2, 1, 1, &[])]);
        let refusal = cut(&recoveries, &BTreeMap::new(), -1, 0).unwrap_err().to_string();
        assert!(refusal.contains("revision 3") && refusal.contains("shard 2"), "{refusal}");
        let found = BTreeMap::from([(2, vec![(3, smallvec![1, 2])])]);
        assert_eq!(cut(&recoveries, &found, -1, 0).unwrap(), 4, "it may stand in a tree");
    }

    #[test]
    fn what_is_compacted_need_not_be_found() {
        let recoveries = BTreeMap::from([recovery(1, 9, 1, &[(8, &[]), (9, &[]), (10, &[])])]);
        assert_eq!(cut(&recoveries, &BTreeMap::new(), 7, 0).unwrap(), 10);
        assert!(cut(&recoveries, &BTreeMap::new(), 6, 0).is_err());
    }
}
