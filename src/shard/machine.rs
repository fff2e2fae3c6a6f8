//! The shard as one state machine: evaluate, wait for delivery, apply what is released, answer.
//!
//! ```text
//!            evaluate                     deliver                 visible(V)
//!  request ───────────▶ batch ─▶ (group) ─────────▶ pending ─────────────────▶ tree
//!                │        └── overlay: what the log will say ──────────────────┘
//!                └──▶ waiters (revision, answer) ─────────────────────▶ answers, once V >= revision
//! ```
//!
//! Promises: what it decides, it decides against everything it has decided before (applied state and overlay);
//! nothing above V is applied, shown or answered (Z1, Z5); a record is applied once, by its position in the log
//! (case S16); what is void by a later Cut is never applied. Does not know where its log is, which core it lives
//! on, or that there are other shards, except as numbers.

use super::evaluate::{self, Changes, Outcome};
use super::gather::{self, GatheredPiece, Needs};
use super::overlay::{Latest, Overlay};
use super::view::View;
use crate::btree::{Snapshot, Tree};
use crate::coordinator::Reign;
use crate::model::limits::{BATCH_BYTES_MAX, DELETE_KEYS_SLICE, OVERLAY_BYTES_MAX, REVISIONS_IN_FLIGHT_MAX};
use crate::model::record::Parts;
use crate::model::{Answer, CoreId, Epoch, Fault, KeyRange, KvRef, Record, Rejection, Request, Rev, ShardId};
use crate::mvcc::{self, Budget, Piece, Progress, Reader, Source, Store};
use crate::proto::etcdserverpb as pb;
use crate::raft::{Body, Payload};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Where a request came in: the core, and its number there. The answer goes back to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    pub core: CoreId,
    pub token: u64,
}

/// A change over several shards: the coordinating core, and its number there.
pub type ChangeId = Origin;

/// What a frozen shard tells the coordinator of its latest state.
#[derive(Debug)]
pub struct Frozen {
    /// One for each piece of the range map that the shard owns.
    pub gathered: Vec<GatheredPiece>,
    /// The shard can take no more for now; the change is refused before it takes a revision (case L11).
    pub full: bool,
}

/// Work that waits while the shard is frozen, in the order in which it came.
#[derive(Debug)]
enum Held {
    Evaluate(Origin, Request),
    Freeze(ChangeId, Arc<Needs>),
}

/// A delivered piece of the log that waits for its release.
#[derive(Debug)]
struct Pending {
    index: u64,
    term: u64,
    epoch: Epoch,
    step: Step,
}

impl Pending {
    fn revision(&self) -> Option<i64> {
        match &self.step {
            Step::Record { record, .. } => Some(record.rev),
            Step::Cut { .. } | Step::Other => None,
        }
    }
}

#[derive(Debug)]
enum Step {
    Record {
        record: Record,
        /// The number of the record inside its entry, and whether it is the last.
        number: u32,
        last: bool,
        verdict: Option<Verdict>,
    },
    /// A Cut that was accepted: the fence as of here.
    Cut { r_star: i64 },
    /// Moves the position and nothing else.
    Other,
}

/// What a later Cut, or the fence, says of a record; None: V decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Stands,
    Void,
}

/// What a shard knows when its log is delivered up to the barrier: the input of the cut (design 5.5).
#[derive(Clone, Debug)]
pub struct Recovery {
    pub shard: ShardId,
    /// The highest V, R* or cut that this shard has any sign of.
    pub known_v: i64,
    /// Everything up to here that concerns the shard stands in its tree.
    pub applied: i64,
    /// Revisions of un-void records that are not applied yet, with their participants; ascending.
    pub records: Vec<(i64, Parts)>,
    /// The highest fence in the log: above the barrier's epoch, the reign is deposed (case M3).
    pub fence: Epoch,
    pub compacted: i64,
}

/// What came of a read.
#[derive(Debug)]
pub enum Read {
    Piece(Piece),
    /// Too much for a core: the pinned root and the revision to read in it (None: its newest state).
    Elsewhere(Snapshot, Option<i64>),
    /// Too much for a core while a long range is being deleted: ask again after `expand`.
    Later,
    Rejected(Rejection),
}

/// The tree and what is logged over it, as a source of ranges.
struct Behind<'a>(Latest<'a, Reader<'a, Tree>>);

impl Source for Behind<'_> {
    fn scan(
        &self,
        range: &KeyRange,
        at: Option<i64>,
        visit: &mut dyn FnMut(KvRef<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut flow = ControlFlow::Continue(());
        self.0.scan(range, at, &mut |kv| {
            flow = visit(kv);
            flow
        });
        flow
    }

    fn count_within(&self, range: &KeyRange, at: Option<i64>, _keys_max: u64) -> Option<u64> {
        Some(self.0.count(range, at))
    }
}

/// An answer on its way to who asked.
pub type Answered = (Origin, Answer);

pub struct Shard {
    id: ShardId,
    store: Store,
    overlay: Overlay,
    pending: VecDeque<Pending>,
    /// The epoch of the last accepted Cut in the log as delivered.
    fence: Epoch,
    /// The highest V or R* seen in the log.
    heard: i64,
    reign: Option<Arc<Reign>>,
    batch: Vec<Record>,
    /// Taken and not yet delivered, ascending.
    undelivered: VecDeque<i64>,
    last_taken: i64,
    /// The revision of the last record in the tree.
    last_applied: i64,
    compacted: i64,
    waiters: VecDeque<(i64, Answered)>,
    frozen: Option<ChangeId>,
    held: VecDeque<Held>,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "shard {} at {:?}", self.id, self.store.applied().position)
    }
}

impl Shard {
    pub fn new(id: ShardId, store: Store) -> Self {
        let applied = store.applied();
        Shard {
            id,
            overlay: Overlay::default(),
            pending: VecDeque::new(),
            fence: applied.fence,
            heard: applied.known_v.max(applied.r_star),
            reign: None,
            batch: Vec::new(),
            undelivered: VecDeque::new(),
            last_taken: 0,
            last_applied: applied.revision,
            compacted: applied.compaction.wanted,
            waiters: VecDeque::new(),
            frozen: None,
            held: VecDeque::new(),
            store,
        }
    }

    pub fn id(&self) -> ShardId {
        self.id
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    pub fn store_mut(&mut self) -> &mut Store {
        &mut self.store
    }

    pub fn overlay_bytes(&self) -> usize {
        self.overlay.bytes()
    }

    pub fn fence(&self) -> Epoch {
        self.fence
    }

    // ---- the log comes back -------------------------------------------------------------------------------

    /// The next entry of the group's log, committed and durable. In the order of the log a Cut of an epoch not
    /// above the fence is ignored, a record below the fence is void (Z1).
    pub fn deliver(&mut self, index: u64, term: u64, payload: Option<Payload>) -> Result<(), Fault> {
        let Some(Payload { epoch, v, body }) = payload else {
            self.pending.push_back(Pending { index, term, epoch: 0, step: Step::Other });
            return Ok(());
        };
        self.heard = self.heard.max(v);
        match body {
            Body::Batch(records) => {
                let verdict = (epoch < self.fence).then_some(Verdict::Void);
                let count = records.len() as u32;
                if count == 0 {
                    return Err(Fault::Broken(format!("shard {}: entry {index} is an empty batch", self.id)));
                }
                for (number, record) in (0..).zip(records) {
                    self.delivered_of_this_reign(epoch, record.rev)?;
                    let last = number + 1 == count;
                    let step = Step::Record { record, number, last, verdict };
                    self.pending.push_back(Pending { index, term, epoch, step });
                }
            }
            Body::Cut { r_star } if epoch > self.fence => {
                self.fence = epoch;
                self.heard = self.heard.max(r_star);
                #[cfg(not(feature = "mutations"))]
                let void_above = r_star;
                #[cfg(feature = "mutations")]
                let void_above =
                    match crate::model::mutation::on(crate::model::mutation::Mutation::CutVoidsNothing) {
                        true => i64::MAX,
                        false => r_star,
                    };
                for pending in &mut self.pending {
                    if let Step::Record { record, verdict, .. } = &mut pending.step
                        && verdict.is_none()
                    {
                        *verdict =
                            Some(if record.rev <= void_above { Verdict::Stands } else { Verdict::Void });
                    }
                }
                self.pending.push_back(Pending { index, term, epoch, step: Step::Cut { r_star } });
            }
            Body::Cut { .. } | Body::Barrier => {
                self.pending.push_back(Pending { index, term, epoch, step: Step::Other });
            }
            Body::Init(_) | Body::Reign { .. } | Body::Compact { .. } => {
                return Err(Fault::Broken(format!(
                    "shard {}: entry {index} belongs to the meta group",
                    self.id
                )));
            }
        }
        Ok(())
    }

    /// Raises the shard's low: delivery is what counts as committed (case S14).
    fn delivered_of_this_reign(&mut self, epoch: Epoch, revision: i64) -> Result<(), Fault> {
        let Some(reign) = self.reign.as_ref().filter(|reign| reign.epoch == epoch) else { return Ok(()) };
        if self.undelivered.pop_front() != Some(revision) {
            return Err(Fault::Broken(format!(
                "shard {}: revision {revision} was delivered out of order",
                self.id
            )));
        }
        reign.watermark.delivered(self.id, self.undelivered.front().copied());
        Ok(())
    }

    /// What the takeover needs to know, once the barrier is delivered.
    pub fn recovery(&self) -> Recovery {
        let records = self.pending.iter().filter_map(|pending| match &pending.step {
            Step::Record { record, verdict, .. } if *verdict != Some(Verdict::Void) => {
                Some((record.rev, record.parts.clone()))
            }
            _ => None,
        });
        Recovery {
            shard: self.id,
            known_v: self.heard,
            applied: self.store.applied().revision,
            records: records.collect(),
            fence: self.fence,
            compacted: self.compacted,
        }
    }

    /// The revisions in the tree above `after`, with their participants; ascending.
    pub fn revisions_above(&self, after: i64) -> Vec<(i64, Parts)> {
        let reader = self.store.reader();
        let mut revisions = reader.revisions(Rev::new(after + 1, 0));
        let mut found: Vec<(i64, Parts)> = Vec::new();
        while let Some(revision) = revisions.current() {
            let main = revision.rev.main;
            if found.last().is_none_or(|(last, _)| *last != main) {
                found.push((main, reader.rev_record(main).unwrap_or_default()));
            }
            revisions.advance();
        }
        found
    }

    /// A V that stands in the log outside of entries: one of the bases of recovery.
    pub fn hear(&mut self, v: i64) {
        self.heard = self.heard.max(v);
    }

    /// The reign begins: everything of it is fresh (Z2).
    pub fn serve(&mut self, reign: Arc<Reign>, compacted: i64) {
        self.overlay = Overlay::default();
        self.last_taken = reign.watermark.visible();
        self.reign = Some(reign);
        self.compact(compacted);
    }

    // ---- a write ------------------------------------------------------------------------------------------

    /// Decides a request whose keys all live here. The answer comes out of `visible` when V allows.
    pub fn evaluate(&mut self, origin: Origin, request: Request) -> Result<(), Fault> {
        let frozen = self.frozen.is_some();
        #[cfg(feature = "mutations")]
        let frozen = frozen && !crate::model::mutation::on(crate::model::mutation::Mutation::FreezeIgnored);
        if frozen {
            self.held.push_back(Held::Evaluate(origin, request));
            return Ok(());
        }
        let reign = self.reign()?.clone();
        let point = self.point(&reign);
        let base = self.store.reader();
        let view = self.latest(&base, point);
        let prepared = match evaluate::prepare(&view, &request) {
            Ok(prepared) => prepared,
            Err(rejection) => return self.wait(point, origin, Err(rejection)),
        };
        if !prepared.changes {
            let Outcome { response, .. } = evaluate::execute(&view, prepared, point);
            return self.wait(point, origin, Ok(response));
        }
        // Before a revision is taken, never after (cases L6, L11).
        if self.is_full() || reign.watermark.in_flight() >= REVISIONS_IN_FLIGHT_MAX {
            return self.wait(point, origin, Err(Rejection::TooManyRequests));
        }
        let rev = reign.watermark.take(self.id, self.undelivered.is_empty());
        let Outcome { response, changes } = evaluate::execute(&view, prepared, rev);
        self.record(Record { rev, parts: Parts::new(), changes });
        self.wait(rev, origin, Ok(response))
    }

    fn latest<'a>(&'a self, base: &'a Reader<'a, Tree>, point: i64) -> Latest<'a, Reader<'a, Tree>> {
        // There are no leases yet: their table in the meta group is empty.
        Latest { base, overlay: &self.overlay, point, compacted: self.compacted, lease_exists: &|_| false }
    }

    /// The point that an evaluation now has seen: everything this shard took, and V (design 3; case S12).
    fn point(&self, reign: &Reign) -> i64 {
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::PointIsV) {
            return reign.watermark.visible();
        }
        self.last_taken.max(reign.watermark.visible())
    }

    fn is_full(&self) -> bool {
        self.overlay.bytes() > OVERLAY_BYTES_MAX
    }

    fn record(&mut self, record: Record) {
        self.last_taken = record.rev;
        self.undelivered.push_back(record.rev);
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::OverlayForgotten) {
            return self.batch.push(record);
        }
        self.overlay.push(&record);
        self.batch.push(record);
    }

    fn wait(&mut self, revision: i64, origin: Origin, answer: Answer) -> Result<(), Fault> {
        debug_assert!(
            self.waiters.back().is_none_or(|(last, _)| *last <= revision),
            "waiters come in the order of their revisions"
        );
        self.waiters.push_back((revision, (origin, answer)));
        Ok(())
    }

    fn reign(&self) -> Result<&Arc<Reign>, Fault> {
        self.reign
            .as_ref()
            .ok_or_else(|| Fault::Broken(format!("shard {} was asked before it serves", self.id)))
    }

    /// What was evaluated and is not proposed yet, as one entry for the log: at most `BATCH_BYTES_MAX`, or one record
    /// that is longer.
    pub fn take_batch(&mut self) -> Option<Payload> {
        let reign = self.reign.as_ref()?;
        let mut bytes = 0;
        let fit = self.batch.iter().take_while(|record| {
            let first = bytes == 0;
            bytes += record.bytes();
            first || bytes <= BATCH_BYTES_MAX
        });
        let records: Vec<Record> = match fit.count() {
            0 => return None,
            all if all == self.batch.len() => std::mem::take(&mut self.batch),
            some => self.batch.drain(..some).collect(),
        };
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::LowClearedAtHandOut) {
            reign.watermark.delivered(self.id, None);
        }
        Some(Payload { epoch: reign.epoch, v: reign.watermark.visible(), body: Body::Batch(records) })
    }

    // ---- a change over several shards ---------------------------------------------------------------------

    /// Holds back evaluation for a change over several shards and tells what it needs to know. None: another
    /// change has the shard; the answer comes out of `thaw`.
    pub fn freeze(&mut self, change: ChangeId, needs: Arc<Needs>) -> Result<Option<Frozen>, Fault> {
        if self.frozen.is_some() {
            self.held.push_back(Held::Freeze(change, needs));
            return Ok(None);
        }
        let reign = self.reign()?.clone();
        let base = self.store.reader();
        let view = self.latest(&base, self.point(&reign));
        let owned = reign.map.owned(self.id);
        let gathered = owned.iter().map(|owned| gather::gather(&view, &needs, owned)).collect();
        let frozen = Frozen { gathered, full: self.is_full() };
        self.frozen = Some(change);
        Ok(Some(frozen))
    }

    /// The shard's part of the change that froze it. It enters the batch before the shard takes another
    /// revision.
    pub fn part(&mut self, change: ChangeId, rev: i64, parts: Parts, changes: Changes) -> Result<(), Fault> {
        if self.frozen != Some(change) {
            return Err(Fault::Broken(format!("shard {}: a part of {change:?} came unfrozen", self.id)));
        }
        let idle = self.undelivered.is_empty();
        #[cfg(feature = "mutations")]
        let idle = idle && !crate::model::mutation::on(crate::model::mutation::Mutation::PartUnregistered);
        self.reign()?.watermark.register(self.id, rev, idle);
        self.record(Record { rev, parts, changes });
        Ok(())
    }

    /// Ends the freeze: what was held back goes on in its order, up to the next freeze, whose answer is returned.
    pub fn thaw(&mut self, change: ChangeId) -> Result<Option<(ChangeId, Frozen)>, Fault> {
        if self.frozen != Some(change) {
            return Err(Fault::Broken(format!("shard {}: {change:?} thaws what it did not freeze", self.id)));
        }
        self.frozen = None;
        while let Some(held) = self.held.pop_front() {
            match held {
                Held::Evaluate(origin, request) => self.evaluate(origin, request)?,
                Held::Freeze(change, needs) => return Ok(self.freeze(change, needs)?.map(|f| (change, f))),
            }
        }
        Ok(None)
    }

    // ---- what is visible ----------------------------------------------------------------------------------

    /// The smallest revision above `v` whose visibility would let this shard do something.
    pub fn wants(&self, v: i64) -> Option<i64> {
        let answer = self.waiters.front().map(|(revision, _)| *revision);
        let apply = self.pending.iter().filter_map(Pending::revision).find(|revision| *revision > v);
        match (answer, apply) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// V stands at `v`: applies what that releases and hands out the answers that may go.
    pub fn visible(&mut self, v: i64, answers: &mut Vec<Answered>) -> Result<(), Fault> {
        self.release(Some(v))?;
        #[cfg(feature = "mutations")]
        let v = if crate::model::mutation::on(crate::model::mutation::Mutation::AnswerBeforeVisible) {
            i64::MAX
        } else {
            v
        };
        while self.waiters.front().is_some_and(|(revision, _)| *revision <= v) {
            answers.extend(self.waiters.pop_front().map(|(_, answered)| answered));
        }
        Ok(())
    }

    /// Applies pending records in the order of the log, as far as they are released: by a V of their own epoch,
    /// or by a later Cut (Z1). Without a V only a Cut releases. Stops behind the first slice of a record that
    /// deletes a long range; `expand` goes on with it, and until it is done what follows waits in the overlay.
    pub fn release(&mut self, v: Option<i64>) -> Result<(), Fault> {
        while !self.is_expanding() && self.release_one(v)? {}
        if let Some(v) = v {
            let applied = self.store.applied_mut();
            applied.known_v = applied.known_v.max(v);
            let next = self.pending.iter().find_map(Pending::revision);
            if next.is_none_or(|next| next > v) {
                applied.revision = applied.revision.max(v);
            }
        }
        Ok(())
    }

    /// Whether a record that deletes a long range is applied in part.
    pub fn is_expanding(&self) -> bool {
        self.store.applied().position.cursor.is_some()
    }

    /// One more slice of the record that is applied in part, and what waited behind it if that ends it.
    pub fn expand(&mut self, v: Option<i64>) -> Result<(), Fault> {
        if self.is_expanding() {
            self.release_one(v)?;
        }
        self.release(v)
    }

    /// Passes the first pending piece of the log, or a slice of it, if it is released.
    fn release_one(&mut self, v: Option<i64>) -> Result<bool, Fault> {
        let mine = self.reign.as_ref().map(|reign| reign.epoch);
        let Some(front) = self.pending.front() else { return Ok(false) };
        let stands = match &front.step {
            Step::Record { record, verdict, .. } => match verdict {
                Some(verdict) => *verdict == Verdict::Stands,
                None if Some(front.epoch) == mine && v.is_some_and(|v| record.rev <= v) => true,
                None => return Ok(false),
            },
            Step::Cut { .. } | Step::Other => false,
        };
        let Some(pending) = self.pending.pop_front() else { return Ok(false) };
        if let Some(unfinished) = self.pass(pending, stands, mine)? {
            self.pending.push_front(unfinished);
        }
        Ok(true)
    }

    /// Moves the position over one piece of the log, applying it if it stands. Returns it if only a slice of it
    /// was applied.
    fn pass(
        &mut self,
        pending: Pending,
        stands: bool,
        mine: Option<Epoch>,
    ) -> Result<Option<Pending>, Fault> {
        let Pending { index, term, epoch, step } = pending;
        let mut complete = true;
        match step {
            Step::Record { record, number, last, verdict } => {
                if stands && !self.was_applied(index, number) {
                    self.last_applied = record.rev;
                    if self.store.apply_slice(&record, DELETE_KEYS_SLICE)? == Progress::More {
                        self.applied_in_part(&record);
                        let step = Step::Record { record, number, last, verdict };
                        return Ok(Some(Pending { index, term, epoch, step }));
                    }
                }
                if Some(epoch) == mine {
                    self.overlay.applied_through(&record);
                }
                complete = last;
                if !last {
                    // At replay it says already how many of these records the tree holds.
                    let position = &mut self.store.applied_mut().position;
                    position.record = position.record.max(number + 1);
                }
            }
            Step::Cut { r_star } => {
                let applied = self.store.applied_mut();
                applied.fence = epoch;
                applied.r_star = r_star;
                applied.known_v = applied.known_v.max(r_star);
                applied.revision = applied.revision.max(r_star);
            }
            Step::Other => {}
        }
        if complete {
            let applied = self.store.applied_mut();
            applied.position.entry = index;
            applied.position.record = 0;
            applied.term = term;
        }
        Ok(None)
    }

    /// The overlay forgets what of the record stands in the tree already.
    fn applied_in_part(&mut self, record: &Record) {
        let cursor = self.store.applied().position.cursor;
        if let Some(change) = cursor.and_then(|cursor| record.changes.get(cursor.change as usize)) {
            self.overlay.applied(Rev::new(record.rev, change.first_sub()));
        }
    }

    /// Whether a checkpoint holds this record already, by its position: the first records of the entry after the
    /// last complete one may be in the tree (case S16).
    fn was_applied(&self, index: u64, number: u32) -> bool {
        let applied = self.store.applied();
        #[cfg(feature = "mutations")]
        if crate::model::mutation::on(crate::model::mutation::Mutation::RecordOfEntryForgotten) {
            return false;
        }
        index == applied.position.entry + 1 && number < applied.position.record
    }

    // ---- reads --------------------------------------------------------------------------------------------

    /// The shard's piece of a Range that reads at `v`, or at the older revision that the request names.
    pub fn read(
        &mut self,
        request: &pb::RangeRequest,
        range: &KeyRange,
        v: i64,
        count: bool,
    ) -> Result<Read, Fault> {
        self.release(Some(v))?;
        let at = if request.revision > 0 { request.revision } else { v };
        // Compaction may have passed the revision since the request took its V (case S18).
        let too_old = at < self.compacted;
        #[cfg(feature = "mutations")]
        let too_old =
            too_old && !crate::model::mutation::on(crate::model::mutation::Mutation::CompactionUnchecked);
        if too_old {
            return Ok(Read::Rejected(Rejection::Compacted));
        }
        if self.is_expanding() {
            // The tree is somewhere inside a revision; with the overlay it is everything up to `at`.
            let base = self.store.reader();
            let behind = Behind(self.latest(&base, v));
            let piece = mvcc::piece(behind, request, range, Some(at), count, Budget::ON_CORE);
            return Ok(piece.map_or(Read::Later, Read::Piece));
        }
        let at = (self.last_applied > at).then_some(at);
        Ok(match mvcc::piece(self.store.reader(), request, range, at, count, Budget::ON_CORE) {
            Some(piece) => Read::Piece(piece),
            None => Read::Elsewhere(self.store.snapshot(), at),
        })
    }

    /// The tree as it is, for readers on other threads; holds everything up to `v`. None: not yet, a long range
    /// is being deleted; ask again after `expand`.
    pub fn snapshot(&mut self, v: i64) -> Result<Option<Snapshot>, Fault> {
        self.release(Some(v))?;
        Ok((!self.is_expanding()).then(|| self.store.snapshot()))
    }

    // ---- compaction ---------------------------------------------------------------------------------------

    /// The compaction point moved; V has reached it (design 7).
    pub fn compact(&mut self, revision: i64) {
        if revision > self.compacted {
            self.compacted = revision;
            self.store.compact(revision);
        }
    }

    /// What must hold when all is quiet.
    pub fn at_rest(&self) -> Result<(), String> {
        let waits = self.frozen.is_some()
            || !(self.held.is_empty() && self.waiters.is_empty() && self.batch.is_empty())
            || !(self.undelivered.is_empty() && self.pending.is_empty());
        if waits {
            return Err(format!("all is quiet, and shard {} still has something to do", self.id));
        }
        Ok(())
    }

    /// What must hold between any two steps.
    pub fn invariants(&self) -> Result<(), String> {
        if !self.undelivered.iter().zip(self.undelivered.iter().skip(1)).all(|(a, b)| a < b) {
            return Err(format!("shard {}: revisions under way do not ascend", self.id));
        }
        if self.frozen.is_none() && !self.held.is_empty() {
            return Err(format!("shard {}: work is held back without a freeze", self.id));
        }
        if let Some(reign) = &self.reign
            && self.store.applied().revision > reign.watermark.visible()
        {
            return Err(format!("shard {}: something above V is applied", self.id));
        }
        if let (Some(reign), Some(first)) = (&self.reign, self.undelivered.front())
            && reign.watermark.visible() >= *first
        {
            return Err(format!("shard {}: V covers revision {first}, which is not delivered", self.id));
        }
        Ok(())
    }
}
