//! One core as a state machine: the shards placed on it, the requests that came in here, and the changes over
//! several shards that it coordinates.
//!
//! Events come in through `request`, `message` and `tick`; `turn` does what can be done now; effects go out through
//! `take_effects`. The real node wraps this in an executor, the simulator steps many of them in one thread.
//!
//! Promises: an answer leaves only once V covers what it saw; a change over several shards is one revision or
//! nothing; shards are frozen in ascending order, and each freeze ends whatever becomes of the client. Does not
//! know sockets, threads, files or the time of day.

use super::job::{HashJob, Job, ReadJob};
use super::message::{Effect, Load, Message, PieceRead};
use crate::btree::Snapshot;
use crate::coordinator::{Reign, Scan};
use crate::group::{Delivered, Group};
use crate::model::limits::{self, LONG_JOBS_MAX, META_PAGE_REVISIONS_BEHIND_MAX};
use crate::model::record::Parts;
use crate::model::{Answer, CoreId, Epoch, Fault, KeyRange, Rejection, Request, Response, ShardId};
use crate::mvcc::{self, Basis, HashWalk, Piece, Progress};
use crate::proto::etcdserverpb as pb;
use crate::raft::{Body, Payload};
use crate::shard::evaluate;
use crate::shard::gather::{self, Gathered, GatheredPiece, Needs};
use crate::shard::view::View;
use crate::shard::{Frozen, Origin, Read, Shard};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Time since the process started, by the monotonic clock.
pub type Now = Duration;

/// What every header and MemberList says of this node.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    pub cluster_id: u64,
    pub member_id: u64,
    pub name: String,
    pub peer_urls: Vec<String>,
    pub client_urls: Vec<String>,
    /// Effective quota, bytes (etcd: semantics 11.2).
    pub quota_bytes: i64,
    pub version: &'static str,
}

/// When a core does what by itself.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Quiet after which the log is sealed (design 6).
    pub seal_after: Duration,
    /// Quiet after which the tree is made durable.
    pub checkpoint_after: Duration,
    /// Length of the log's tail at which a checkpoint starts, bytes: what replay may cost.
    pub tail_bytes: u64,
    /// Dirty pages of one shard at which a checkpoint starts, bytes; at twice as much evaluation waits.
    pub dirty_bytes: usize,
    /// Rows of compaction done in one tick.
    pub compact_rows: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            seal_after: Duration::from_millis(5),
            checkpoint_after: Duration::from_secs(10),
            tail_bytes: 128 << 20,
            dirty_bytes: 512 << 20,
            compact_rows: 200,
        }
    }
}

/// A shard with its group.
#[derive(Debug)]
struct Unit {
    shard: Shard,
    group: Group,
    /// The term in which this reign leads the group (Z3).
    term: Option<u64>,
    checkpointing: bool,
    /// Checkpoints begun and finished since the start.
    begun: u64,
    finished: u64,
    preparing: bool,
    /// The barrier or cut that control waits for.
    awaited: Option<Awaited>,
    /// Since when nothing was proposed or flushed.
    quiet_since: Now,
    /// A flush came back since the last turn.
    flushed_just_now: bool,
    /// V in the newest meta page, and the entry up to which the tree was durable then.
    checkpoint_v: i64,
    checkpoint_entry: u64,
    /// Requests that wait until the tree has room again.
    backlog: VecDeque<(Origin, Request)>,
    /// Reads that wait until a long deletion is applied.
    later: Vec<Message>,
    removed: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Lead(Epoch),
    Barrier(Epoch),
    Cut(Epoch),
}

/// A change over several shards on its way.
#[derive(Debug)]
struct Change {
    token: u64,
    request: Request,
    needs: Arc<Needs>,
    shards: Parts,
    gathered: Vec<(ShardId, GatheredPiece)>,
    full: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// That many shards are frozen.
    Freezing(usize),
    /// The revision is in the slot until so many participants have registered it.
    Registering { rev: i64, left: usize },
}

/// A Range over several shards on its way.
#[derive(Debug)]
struct RangeRead {
    token: u64,
    request: Arc<pb::RangeRequest>,
    count: bool,
    v: i64,
    pieces: Vec<(KeyRange, Option<PieceRead>)>,
    compacted: bool,
    left: usize,
}

/// Something that every core or shard adds to.
#[derive(Debug)]
enum Survey {
    Pins { token: u64, revision: i64, v: i64, snapshots: Vec<Option<Snapshot>>, left: usize },
    Loads { token: u64, sum: Load, left: usize },
    Defragment { token: u64, left: usize },
}

#[derive(Debug)]
pub struct Core {
    me: CoreId,
    /// Executors; control's number is this.
    cores: usize,
    identity: Arc<Identity>,
    pace: Pace,
    units: Vec<Unit>,
    reign: Option<Arc<Reign>>,
    term: u64,
    compacted: i64,
    next_token: u64,
    changes: BTreeMap<u64, Change>,
    /// Revisions of this core's changes that some participant has not registered.
    slot: BTreeSet<i64>,
    reads: BTreeMap<u64, RangeRead>,
    surveys: BTreeMap<u64, Survey>,
    /// Answers of coordinated changes, by the revision they wait for.
    waiting: BTreeMap<(i64, u64), Answer>,
    answered: Vec<(Origin, Answer)>,
    effects: Vec<Effect>,
    scan: Option<Scan>,
    rescan: bool,
    /// The V of the last turn, which nothing but a broken rule looks at.
    #[cfg(feature = "mutations")]
    v_seen: i64,
    /// Reads off the cores that run, and those that wait for one of them to end.
    long_running: usize,
    long_waiting: VecDeque<Job>,
    /// V at the last tick, and since when it stands there.
    v_still: (i64, Now),
    stopping: bool,
    stopped: bool,
    /// Who waits until each shard has finished that many checkpoints.
    defragmenting: Vec<(Origin, Vec<u64>)>,
}

impl Core {
    pub fn new(
        me: CoreId,
        cores: usize,
        identity: Arc<Identity>,
        pace: Pace,
        units: Vec<(Shard, Group)>,
    ) -> Self {
        let units = units
            .into_iter()
            .map(|(shard, group)| Unit {
                term: None,
                checkpointing: false,
                begun: 0,
                finished: 0,
                preparing: false,
                awaited: None,
                quiet_since: Now::ZERO,
                flushed_just_now: false,
                checkpoint_v: shard.store().applied().revision,
                checkpoint_entry: shard.store().applied().position.entry,
                backlog: VecDeque::new(),
                later: Vec::new(),
                removed: -1,
                shard,
                group,
            })
            .collect();
        Core {
            me,
            cores,
            identity,
            pace,
            units,
            reign: None,
            term: 0,
            compacted: -1,
            next_token: 0,
            changes: BTreeMap::new(),
            slot: BTreeSet::new(),
            reads: BTreeMap::new(),
            surveys: BTreeMap::new(),
            waiting: BTreeMap::new(),
            answered: Vec::new(),
            effects: Vec::new(),
            scan: None,
            rescan: false,
            #[cfg(feature = "mutations")]
            v_seen: 0,
            long_running: 0,
            long_waiting: VecDeque::new(),
            v_still: (0, Now::ZERO),
            stopping: false,
            stopped: false,
            defragmenting: Vec::new(),
        }
    }

    /// The core on which a shard lives.
    pub fn home_of(shard: ShardId, cores: usize) -> CoreId {
        ((shard as usize - 1) % cores) as CoreId
    }

    pub fn take_effects(&mut self, into: &mut Vec<Effect>) {
        into.append(&mut self.effects);
    }

    pub fn id(&self) -> CoreId {
        self.me
    }

    pub fn serves(&self) -> bool {
        self.reign.is_some()
    }

    pub fn shards(&self) -> impl Iterator<Item = &Shard> {
        self.units.iter().map(|unit| &unit.shard)
    }

    fn unit(&mut self, shard: ShardId) -> Result<&mut Unit, Fault> {
        let me = self.me;
        self.units
            .iter_mut()
            .find(|unit| unit.shard.id() == shard)
            .ok_or_else(|| Fault::Broken(format!("core {me} was asked for shard {shard}")))
    }

    fn send(&mut self, to: CoreId, message: Message) -> Result<(), Fault> {
        if to == self.me {
            return self.message(message);
        }
        self.effects.push(Effect::Send(to, message));
        Ok(())
    }

    fn send_to_shard(&mut self, shard: ShardId, message: Message) -> Result<(), Fault> {
        self.send(Self::home_of(shard, self.cores), message)
    }

    fn send_to_control(&mut self, message: Message) {
        self.effects.push(Effect::Send(self.cores as CoreId, message));
    }

    fn origin(&self, token: u64) -> Origin {
        Origin { core: self.me, token }
    }

    fn new_token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    // ---- requests -----------------------------------------------------------------------------------------

    /// A request that came in here; its answer leaves as an effect with this token.
    pub fn request(&mut self, token: u64, request: Request) -> Result<(), Fault> {
        let Some(reign) = self.reign.clone() else {
            self.answer(token, Err(Rejection::NoLeader));
            return Ok(());
        };
        if self.stopping {
            self.answer(token, Err(Rejection::Stopped));
            return Ok(());
        }
        match request {
            Request::Range { request, count } => self.range(&reign, token, Arc::new(request), count),
            Request::Put(_) | Request::DeleteRange(_) | Request::Txn(_) => {
                self.change(&reign, token, request)
            }
            Request::Compact(request) => {
                let origin = self.origin(token);
                self.send_to_control(Message::CompactRequest { origin, request });
                Ok(())
            }
            Request::HashKv(request) => self.hash(&reign, token, request),
            Request::Status => {
                self.survey(|token| Survey::Loads { token, sum: Load::default(), left: 0 }, token)
            }
            Request::Defragment => self.survey(|token| Survey::Defragment { token, left: 0 }, token),
            Request::MemberList { .. } => {
                let member = pb::Member {
                    id: self.identity.member_id,
                    name: self.identity.name.clone(),
                    peer_ur_ls: self.identity.peer_urls.clone(),
                    client_ur_ls: self.identity.client_urls.clone(),
                    is_learner: false,
                };
                let header = Some(self.header(0));
                self.answer(
                    token,
                    Ok(Response::MemberList(pb::MemberListResponse { header, members: vec![member] })),
                );
                Ok(())
            }
        }
    }

    /// A complete header.
    fn header(&self, revision: i64) -> pb::ResponseHeader {
        pb::ResponseHeader {
            cluster_id: self.identity.cluster_id,
            member_id: self.identity.member_id,
            revision,
            raft_term: self.term,
        }
    }

    /// Completes the header of an answer and sends it off.
    fn answer(&mut self, token: u64, mut answer: Answer) {
        if let Ok(response) = &mut answer {
            let header = match response {
                Response::Range(r) => &mut r.header,
                Response::Put(r) => &mut r.header,
                Response::DeleteRange(r) => &mut r.header,
                Response::Txn(r) => &mut r.header,
                Response::Compact(r) => &mut r.header,
                Response::HashKv(r) => &mut r.header,
                Response::Status(r) => &mut r.header,
                Response::MemberList(r) => &mut r.header,
                Response::RangeEncoded(_) | Response::Defragment => &mut None,
            };
            if let Some(header) = header {
                header.cluster_id = self.identity.cluster_id;
                header.member_id = self.identity.member_id;
                header.raft_term = self.term;
            }
        }
        self.effects.push(Effect::Answer(token, answer));
    }

    /// A Put, DeleteRange or Txn: to its shard, or coordinated from here.
    fn change(&mut self, reign: &Arc<Reign>, token: u64, request: Request) -> Result<(), Fault> {
        let shard = match &request {
            Request::Put(put) => Some(reign.map.shard_of(&put.key)),
            _ => None,
        };
        if let Some(shard) = shard {
            return self.send_evaluate(shard, token, request);
        }
        let needs = Arc::new(gather::touched(&request));
        let mut shards = Parts::new();
        for need in &needs.keys {
            shards.extend(reign.map.pieces(&need.range).map(|(_, shard)| shard));
        }
        shards.sort_unstable();
        shards.dedup();
        match shards.as_slice() {
            // Nothing is touched: any shard can say so; one here costs no hop.
            [] => {
                let here = self.units.first().map(|unit| unit.shard.id());
                self.send_evaluate(here.unwrap_or(1), token, request)
            }
            [shard] => self.send_evaluate(*shard, token, request),
            _ => self.coordinate(token, request, needs, shards),
        }
    }

    fn send_evaluate(&mut self, shard: ShardId, token: u64, request: Request) -> Result<(), Fault> {
        let origin = self.origin(token);
        self.send_to_shard(shard, Message::Evaluate { shard, origin, request })
    }

    // ---- reads --------------------------------------------------------------------------------------------

    /// A Range at one V (design 3). Leadership is confirmed by this core's reign: meta has one voter.
    fn range(
        &mut self,
        reign: &Arc<Reign>,
        token: u64,
        request: Arc<pb::RangeRequest>,
        count: bool,
    ) -> Result<(), Fault> {
        let v = reign.watermark.visible();
        #[cfg(feature = "mutations")]
        let v = if crate::model::mutation::on(crate::model::mutation::Mutation::VisibleCached) {
            self.v_seen.max(1)
        } else {
            v
        };
        if request.revision > v {
            self.answer(token, Err(Rejection::FutureRev));
            return Ok(());
        }
        if request.revision > 0 && request.revision < self.compacted {
            self.answer(token, Err(Rejection::Compacted));
            return Ok(());
        }
        let asked = KeyRange::from_request(&request.key, &request.range_end);
        let mut pieces = reign.map.pieces(&asked);
        if let (Some((range, shard)), None) = (pieces.next(), pieces.next())
            && Self::home_of(shard, self.cores) == self.me
            && let Read::Piece(piece) = self.unit(shard)?.shard.read(&request, &range, v, count)?
        {
            // The common case, at once: one shard, on this core.
            self.answer_range(token, v, mvcc::assemble([piece], &request));
            return Ok(());
        }
        let pieces: Vec<_> = reign.map.pieces(&asked).collect();
        let read = self.new_token();
        let left = pieces.len();
        let empty = pieces.iter().map(|(range, _)| (range.clone(), None)).collect();
        let entry =
            RangeRead { token, request: request.clone(), count, v, pieces: empty, compacted: false, left };
        self.reads.insert(read, entry);
        let origin = self.origin(read);
        for (index, (range, shard)) in pieces.into_iter().enumerate() {
            let request = request.clone();
            self.send_to_shard(shard, Message::Read { shard, origin, index, request, range, v, count })?;
        }
        if left == 0 { self.range_complete(read) } else { Ok(()) }
    }

    fn piece(&mut self, read: u64, index: usize, piece: Result<PieceRead, Rejection>) -> Result<(), Fault> {
        let Some(range_read) = self.reads.get_mut(&read) else {
            return Err(Fault::Broken(format!("a piece of read {read}, which is over")));
        };
        match piece {
            Ok(piece) => range_read.pieces[index].1 = Some(piece),
            Err(_) => range_read.compacted = true,
        }
        range_read.left -= 1;
        if range_read.left == 0 { self.range_complete(read) } else { Ok(()) }
    }

    fn range_complete(&mut self, read: u64) -> Result<(), Fault> {
        let Some(read) = self.reads.remove(&read) else { return Ok(()) };
        let RangeRead { token, request, count, v, pieces, compacted, .. } = read;
        if compacted {
            // Compaction passed V between the pieces (case S18). A read of the newest state starts again at the
            // V of now; one of an older revision is too late.
            if request.revision > 0 {
                self.answer(token, Err(Rejection::Compacted));
                return Ok(());
            }
            let Some(reign) = self.reign.clone() else { return Ok(()) };
            return self.range(&reign, token, request, count);
        }
        let pieces: Vec<_> = pieces.into_iter().filter_map(|(range, piece)| Some((range, piece?))).collect();
        if pieces.iter().any(|(_, piece)| matches!(piece, PieceRead::Elsewhere(..))) {
            let header = self.header(v);
            let job = ReadJob { token, request, count, pieces, header, response: None };
            self.run_long(Job::Read(job));
            return Ok(());
        }
        let pieces = pieces.into_iter().filter_map(|(_, piece)| match piece {
            PieceRead::Here(piece) => Some(piece),
            PieceRead::Elsewhere(..) => None,
        });
        let pieces: Vec<Piece> = pieces.collect();
        self.answer_range(token, v, mvcc::assemble(pieces, &request));
        Ok(())
    }

    /// Runs a read off the cores, or lets it wait for one that is: the helpers take a bounded number.
    fn run_long(&mut self, job: Job) {
        if self.long_running < LONG_JOBS_MAX {
            self.long_running += 1;
            self.effects.push(Effect::Run(job));
        } else {
            self.long_waiting.push_back(job);
        }
    }

    fn long_done(&mut self) {
        self.long_running -= 1;
        if let Some(job) = self.long_waiting.pop_front() {
            self.run_long(job);
        }
    }

    /// The header names the store's revision at the time of the read, not the one asked for (semantics 2.5).
    fn answer_range(&mut self, token: u64, v: i64, mut response: pb::RangeResponse) {
        response.header = Some(self.header(v));
        self.answer(token, Ok(Response::Range(response)));
    }

    fn hash(&mut self, reign: &Arc<Reign>, token: u64, request: pb::HashKvRequest) -> Result<(), Fault> {
        let v = reign.watermark.visible();
        let revision = if request.revision == 0 { v } else { request.revision };
        if revision > v {
            self.answer(token, Err(Rejection::FutureRev));
            return Ok(());
        }
        // A negative revision hashes nothing and is never too old, as in etcd.
        if (0..self.compacted).contains(&revision) {
            self.answer(token, Err(Rejection::Compacted));
            return Ok(());
        }
        let shards = reign.map.shards();
        let survey = self.new_token();
        let snapshots = (0..shards).map(|_| None).collect();
        self.surveys.insert(survey, Survey::Pins { token, revision, v, snapshots, left: shards });
        let origin = self.origin(survey);
        for shard in 1..=shards as ShardId {
            self.send_to_shard(shard, Message::Pin { shard, origin, v })?;
        }
        Ok(())
    }

    /// Asks every core, and control where it has something to add.
    fn survey(&mut self, make: impl FnOnce(u64) -> Survey, token: u64) -> Result<(), Fault> {
        let id = self.new_token();
        let mut survey = make(token);
        let with_control = matches!(survey, Survey::Loads { .. });
        let parties = self.cores + with_control as usize;
        match &mut survey {
            Survey::Pins { left, .. } | Survey::Loads { left, .. } | Survey::Defragment { left, .. } => {
                *left = parties;
            }
        }
        self.surveys.insert(id, survey);
        let origin = self.origin(id);
        for core in 0..parties as CoreId {
            let message =
                if with_control { Message::Measure { origin } } else { Message::Defragment { origin } };
            self.send(core, message)?;
        }
        Ok(())
    }

    fn load(&self) -> Load {
        let mut load = Load::default();
        for unit in &self.units {
            let tree = unit.shard.store().tree();
            load += Load {
                // Pages that are not in the file yet will be.
                file_bytes: tree.file_bytes().max(tree.used_bytes()),
                used_bytes: tree.used_bytes(),
                committed: unit.group.committed(),
                applied: unit.group.delivered(),
            };
        }
        load
    }

    fn survey_step(&mut self, id: u64, step: impl FnOnce(&mut Survey) -> bool) -> Result<(), Fault> {
        let Some(survey) = self.surveys.get_mut(&id) else {
            return Err(Fault::Broken(format!("an answer to survey {id}, which is over")));
        };
        if !step(survey) {
            return Ok(());
        }
        match self.surveys.remove(&id) {
            Some(Survey::Pins { token, revision, v, snapshots, .. }) => {
                let snapshots = snapshots.into_iter().flatten().collect();
                let walk = HashWalk::new(snapshots, revision, self.compacted, Basis::Request);
                self.run_long(Job::Hash(HashJob { token, v, walk: Some(walk), hash: None }));
            }
            Some(Survey::Loads { token, sum, .. }) => self.answer_status(token, sum),
            Some(Survey::Defragment { token, .. }) => self.answer(token, Ok(Response::Defragment)),
            None => {}
        }
        Ok(())
    }

    fn answer_status(&mut self, token: u64, sum: Load) {
        let revision = self.reign.as_ref().map_or(0, |reign| reign.watermark.visible());
        let response = pb::StatusResponse {
            header: Some(self.header(revision)),
            version: self.identity.version.to_owned(),
            db_size: sum.file_bytes as i64,
            leader: self.identity.member_id,
            raft_index: sum.committed,
            raft_term: self.term,
            raft_applied_index: sum.applied,
            errors: Vec::new(),
            db_size_in_use: sum.used_bytes as i64,
            is_learner: false,
            storage_version: "3.7.0".to_owned(),
            db_size_quota: self.identity.quota_bytes,
            downgrade_info: Some(pb::DowngradeInfo::default()),
        };
        self.answer(token, Ok(Response::Status(response)));
    }

    // ---- changes over several shards (design 4) -------------------------------------------------------------

    fn coordinate(
        &mut self,
        token: u64,
        request: Request,
        needs: Arc<Needs>,
        shards: Parts,
    ) -> Result<(), Fault> {
        let id = self.new_token();
        let first = shards[0];
        let change = Change {
            token,
            request,
            needs: needs.clone(),
            shards,
            gathered: Vec::new(),
            full: false,
            stage: Stage::Freezing(0),
        };
        self.changes.insert(id, change);
        let change = self.origin(id);
        self.send_to_shard(first, Message::Freeze { shard: first, change, needs })
    }

    fn change_mut(&mut self, id: u64) -> Result<&mut Change, Fault> {
        self.changes.get_mut(&id).ok_or_else(|| Fault::Broken(format!("change {id} is over")))
    }

    /// A shard of the change is frozen; the next one follows, in ascending order, or the change is decided.
    fn frozen(&mut self, id: u64, shard: ShardId, frozen: Frozen) -> Result<(), Fault> {
        let me = self.origin(id);
        let change = self.change_mut(id)?;
        change.gathered.extend(frozen.gathered.into_iter().map(|piece| (shard, piece)));
        change.full |= frozen.full;
        let Stage::Freezing(count) = &mut change.stage else {
            return Err(Fault::Broken(format!("change {id} froze a shard after it was decided")));
        };
        *count += 1;
        match change.shards.get(*count) {
            Some(&shard) => {
                let needs = change.needs.clone();
                self.send_to_shard(shard, Message::Freeze { shard, change: me, needs })
            }
            None => self.decide(id),
        }
    }

    /// All shards are frozen: evaluate, take one revision, give every participant its part and release the rest.
    fn decide(&mut self, id: u64) -> Result<(), Fault> {
        let Some(reign) = self.reign.clone() else { return Ok(()) };
        let (me, slot_idle) = (self.me, self.slot.is_empty());
        let change = self.change_mut(id)?;
        let token = change.token;
        let shards = change.shards.clone();
        let needs = change.needs.clone();
        let view = Gathered::new(&needs, std::mem::take(&mut change.gathered))
            .ok_or_else(|| Fault::Broken(format!("change {id}: the pieces do not cover what it touches")))?;
        let point = view.point();
        let (revision, answer, mut parts) = match evaluate::prepare(&view, &change.request) {
            Err(rejection) => (point, Err(rejection), None),
            Ok(prepared) if !prepared.changes => {
                (point, Ok(evaluate::execute(&view, prepared, point).response), None)
            }
            Ok(_) if change.full || reign.watermark.in_flight() >= limits::REVISIONS_IN_FLIGHT_MAX => {
                (point, Err(Rejection::TooManyRequests), None)
            }
            Ok(prepared) => {
                let rev = reign.watermark.take_in_slot(me, slot_idle);
                let outcome = evaluate::execute(&view, prepared, rev);
                (rev, Ok(outcome.response), Some(view.split(outcome.changes)))
            }
        };
        let participants: Parts = parts.iter().flatten().map(|(shard, _)| *shard).collect();
        match participants.len() {
            0 => {
                self.changes.remove(&id);
            }
            left => {
                self.slot.insert(revision);
                self.change_mut(id)?.stage = Stage::Registering { rev: revision, left };
            }
        }
        let me = self.origin(id);
        // A change that turned out to concern one shard needs no others to be whole.
        let named = if participants.len() > 1 { participants.clone() } else { Parts::new() };
        #[cfg(feature = "mutations")]
        let named = if crate::model::mutation::on(crate::model::mutation::Mutation::PartsUnnamed) {
            Parts::new()
        } else {
            named
        };
        for shard in shards {
            let part = parts.as_mut().and_then(|parts| {
                parts.iter_mut().find(|(s, _)| *s == shard).map(|(_, changes)| std::mem::take(changes))
            });
            let message = match part {
                Some(changes) => {
                    Message::Part { shard, change: me, rev: revision, parts: named.clone(), changes }
                }
                None => Message::Thaw { shard, change: me },
            };
            self.send_to_shard(shard, message)?;
        }
        self.waiting.insert((revision, token), answer);
        self.rescan = true;
        Ok(())
    }

    fn registered(&mut self, id: u64) -> Result<(), Fault> {
        let Stage::Registering { rev, left } = &mut self.change_mut(id)?.stage else {
            return Err(Fault::Broken(format!("change {id} was registered before it was decided")));
        };
        *left -= 1;
        if *left > 0 {
            return Ok(());
        }
        let rev = *rev;
        self.changes.remove(&id);
        self.slot.remove(&rev);
        if let Some(reign) = &self.reign {
            reign.watermark.registered(self.me, self.slot.first().copied());
        }
        self.rescan = true;
        Ok(())
    }

    /// Ends a freeze of a shard here; the next change that waits for it is told.
    fn thaw(&mut self, shard: ShardId, change: Origin) -> Result<(), Fault> {
        if let Some((next, frozen)) = self.unit(shard)?.shard.thaw(change)? {
            self.send(next.core, Message::Frozen { shard, token: next.token, frozen })?;
        }
        Ok(())
    }

    // ---- messages -----------------------------------------------------------------------------------------

    pub fn message(&mut self, message: Message) -> Result<(), Fault> {
        match message {
            Message::Evaluate { shard, origin, request } => {
                let dirty_max = self.pace.dirty_bytes.saturating_mul(2);
                let unit = self.unit(shard)?;
                if unit.shard.store().tree().dirty_bytes() > dirty_max {
                    unit.backlog.push_back((origin, request));
                    return Ok(());
                }
                unit.shard.evaluate(origin, request)
            }
            Message::Answers(answers) => {
                for (token, answer) in answers {
                    self.answer(token, answer);
                }
                Ok(())
            }
            Message::Read { shard, origin, index, request, range, v, count } => {
                let piece = match self.unit(shard)?.shard.read(&request, &range, v, count)? {
                    Read::Piece(piece) => Ok(PieceRead::Here(piece)),
                    Read::Elsewhere(snapshot, at) => Ok(PieceRead::Elsewhere(snapshot, at)),
                    Read::Rejected(rejection) => Err(rejection),
                    Read::Later => {
                        let again = Message::Read { shard, origin, index, request, range, v, count };
                        self.unit(shard)?.later.push(again);
                        return Ok(());
                    }
                };
                self.send(origin.core, Message::Piece { token: origin.token, index, piece })
            }
            Message::Piece { token, index, piece } => self.piece(token, index, piece),
            Message::Freeze { shard, change, needs } => {
                match self.unit(shard)?.shard.freeze(change, needs)? {
                    Some(frozen) => {
                        self.send(change.core, Message::Frozen { shard, token: change.token, frozen })
                    }
                    None => Ok(()),
                }
            }
            Message::Frozen { shard, token, frozen } => self.frozen(token, shard, frozen),
            Message::Part { shard, change, rev, parts, changes } => {
                self.unit(shard)?.shard.part(change, rev, parts, changes)?;
                self.send(change.core, Message::Registered { token: change.token })?;
                self.thaw(shard, change)
            }
            Message::Registered { token } => self.registered(token),
            Message::Thaw { shard, change } => self.thaw(shard, change),
            Message::Visible => Ok(()),
            Message::Pin { shard, origin, v } => {
                let unit = self.unit(shard)?;
                match unit.shard.snapshot(v)? {
                    Some(snapshot) => {
                        self.send(origin.core, Message::Pinned { shard, token: origin.token, snapshot })
                    }
                    None => {
                        unit.later.push(Message::Pin { shard, origin, v });
                        Ok(())
                    }
                }
            }
            Message::Pinned { shard, token, snapshot } => self.survey_step(token, |survey| match survey {
                Survey::Pins { snapshots, left, .. } => {
                    snapshots[shard as usize - 1] = Some(snapshot);
                    *left -= 1;
                    *left == 0
                }
                _ => false,
            }),
            Message::Measure { origin } => {
                let load = self.load();
                self.send(origin.core, Message::Measured { token: origin.token, load })
            }
            Message::Measured { token, load } => self.survey_step(token, |survey| match survey {
                Survey::Loads { sum, left, .. } => {
                    *sum += load;
                    *left -= 1;
                    *left == 0
                }
                _ => false,
            }),
            Message::Defragment { origin } => {
                // A checkpoint that begins after the request; none where nothing is to be written.
                let due = |unit: &Unit| match unit.shard.store().tree().dirty_bytes() {
                    0 => unit.finished,
                    _ => unit.begun + 1,
                };
                self.defragmenting.push((origin, self.units.iter().map(due).collect()));
                Ok(())
            }
            Message::Defragmented { token } => self.survey_step(token, |survey| match survey {
                Survey::Defragment { left, .. } => {
                    *left -= 1;
                    *left == 0
                }
                _ => false,
            }),
            Message::Campaign { epoch } => self.campaign(epoch),
            Message::Bar { epoch } => self.propose_awaited(Awaited::Barrier(epoch), epoch, Body::Barrier),
            Message::Cut { epoch, r_star } => {
                self.propose_awaited(Awaited::Cut(epoch), epoch, Body::Cut { r_star })
            }
            Message::Find { epoch, after } => {
                for index in 0..self.units.len() {
                    let shard = &self.units[index].shard;
                    let (shard, revisions) = (shard.id(), shard.revisions_above(after));
                    self.send_to_control(Message::Found { epoch, shard, revisions });
                }
                Ok(())
            }
            Message::Serve { reign, compacted, term } => {
                for unit in &mut self.units {
                    unit.shard.serve(reign.clone(), compacted);
                }
                let epoch = reign.epoch;
                self.compacted = compacted;
                self.term = term;
                self.reign = Some(reign);
                self.send_to_control(Message::Serving { epoch });
                Ok(())
            }
            Message::Compact { revision } => {
                self.compacted = self.compacted.max(revision);
                for unit in &mut self.units {
                    unit.shard.compact(revision);
                }
                self.send_to_control(Message::Compacting { revision });
                Ok(())
            }
            Message::Stop => {
                self.stopping = true;
                Ok(())
            }
            Message::Done(job) => self.done(job),
            Message::Leads { .. }
            | Message::Barred { .. }
            | Message::Found { .. }
            | Message::CutApplied { .. }
            | Message::Serving { .. }
            | Message::Compacting { .. }
            | Message::Removed { .. }
            | Message::CompactRequest { .. }
            | Message::Stopped => Err(Fault::Broken(format!("core {} got a message to control", self.me))),
        }
    }

    fn campaign(&mut self, epoch: Epoch) -> Result<(), Fault> {
        for unit in &mut self.units {
            unit.group.campaign()?;
            unit.awaited = Some(Awaited::Lead(epoch));
        }
        Ok(())
    }

    fn propose_awaited(&mut self, awaited: Awaited, epoch: Epoch, body: Body) -> Result<(), Fault> {
        for unit in &mut self.units {
            unit.awaited = Some(awaited);
            unit.check_term()?;
            unit.group.propose(Payload { epoch, v: 0, body: body.clone() })?;
        }
        Ok(())
    }

    fn done(&mut self, job: Job) -> Result<(), Fault> {
        match job {
            Job::Flush { shard, flush } => {
                let unit = self.unit(shard)?;
                unit.group.flushed(flush)?;
                // Quiet begins when the work ends: a slow disk is no quiet.
                unit.flushed_just_now = true;
            }
            Job::Segment { shard, job } => {
                let unit = self.unit(shard)?;
                unit.preparing = false;
                unit.group.log_mut().housekept(job)?;
            }
            Job::Checkpoint { shard, job, entry } => {
                let unit = self.unit(shard)?;
                unit.checkpointing = false;
                unit.finished += 1;
                unit.checkpoint_entry = entry;
                let discarded = unit.shard.store_mut().checkpoint_finished(job);
                #[cfg(feature = "mutations")]
                let entry = if crate::model::mutation::on(crate::model::mutation::Mutation::LogReleasedAhead)
                {
                    unit.group.delivered()
                } else {
                    entry
                };
                unit.group.log_mut().release(entry);
                while let Some((origin, request)) = unit.backlog.pop_front() {
                    unit.shard.evaluate(origin, request)?;
                }
                self.effects.push(Effect::Run(Job::Discard(Some(discarded))));
            }
            Job::Discard(_) => {}
            Job::Read(ReadJob { token, response, .. }) => {
                self.long_done();
                let response = response.ok_or_else(|| Fault::Broken("a read came back unread".into()))?;
                self.answer(token, Ok(response));
            }
            Job::Hash(HashJob { token, v, hash, .. }) => {
                self.long_done();
                let hash = hash.ok_or_else(|| Fault::Broken("a hash came back unhashed".into()))?;
                let response = pb::HashKvResponse {
                    header: Some(self.header(v)),
                    hash: hash.hash,
                    compact_revision: hash.compact_revision,
                    hash_revision: hash.revision,
                };
                self.answer(token, Ok(Response::HashKv(response)));
            }
        }
        Ok(())
    }

    // ---- a turn -------------------------------------------------------------------------------------------

    /// Does all that can be done now. Called after every batch of events.
    pub fn turn(&mut self, now: Now) -> Result<(), Fault> {
        self.turn_begin(now)?;
        while self.turn_scan() {}
        self.turn_end()
    }

    /// The first part of a turn: batches to the log, deliveries back, bounds raised.
    pub fn turn_begin(&mut self, now: Now) -> Result<(), Fault> {
        let mut delivered = Vec::new();
        for index in 0..self.units.len() {
            let unit = &mut self.units[index];
            let shard = unit.shard.id();
            if std::mem::take(&mut unit.flushed_just_now) {
                unit.quiet_since = now;
            }
            // While a flush is under way the next batch collects.
            while !unit.group.is_flushing()
                && let Some(batch) = unit.shard.take_batch()
            {
                unit.check_term()?;
                unit.group.propose(batch)?;
                unit.quiet_since = now;
            }
            if let Some(flush) = unit.group.poll(&mut delivered)? {
                self.effects.push(Effect::Run(Job::Flush { shard, flush }));
            }
            if !unit.preparing
                && let Some(job) = unit.group.log_mut().housekeeping()
            {
                unit.preparing = true;
                self.effects.push(Effect::Run(Job::Segment { shard, job }));
            }
            self.rescan |= !delivered.is_empty();
            for entry in delivered.drain(..) {
                self.deliver(index, entry)?;
            }
            self.report_lead(index);
        }
        if self.rescan && self.reign.is_some() {
            self.rescan = false;
            self.scan = Some(Scan::new());
        }
        Ok(())
    }

    /// One step of the scan that raises V; false when there is none to do.
    pub fn turn_scan(&mut self) -> bool {
        let (Some(scan), Some(reign)) = (&mut self.scan, &self.reign) else { return false };
        match scan.step(&reign.watermark) {
            None => true,
            #[cfg(feature = "mutations")]
            Some(true) if crate::model::mutation::on(crate::model::mutation::Mutation::WakeForgotten) => true,
            Some(true) => {
                let effects = &mut self.effects;
                reign.wake(self.me, |core| effects.push(Effect::Send(core, Message::Visible)));
                true
            }
            Some(false) => {
                self.scan = None;
                false
            }
        }
    }

    /// The last part of a turn: apply and answer what V covers.
    pub fn turn_end(&mut self) -> Result<(), Fault> {
        let Some(reign) = self.reign.clone() else { return Ok(()) };
        loop {
            let v = reign.watermark.visible();
            #[cfg(feature = "mutations")]
            {
                self.v_seen = v;
            }
            for unit in &mut self.units {
                unit.shard.visible(v, &mut self.answered)?;
            }
            while let Some(entry) = self.waiting.first_entry().filter(|entry| entry.key().0 <= v) {
                let ((_, token), answer) = entry.remove_entry();
                self.answer(token, answer);
            }
            self.send_answers();
            let wants = self.units.iter().filter_map(|unit| unit.shard.wants(v));
            let wants = wants.chain(self.waiting.keys().next().map(|(revision, _)| *revision)).min();
            if !reign.want(self.me, wants) {
                return Ok(());
            }
        }
    }

    /// Answers go back to the cores where the requests came in, one message each.
    fn send_answers(&mut self) {
        let mut elsewhere: BTreeMap<CoreId, Vec<(u64, Answer)>> = BTreeMap::new();
        for (origin, answer) in std::mem::take(&mut self.answered) {
            if origin.core == self.me {
                self.answer(origin.token, answer);
            } else {
                elsewhere.entry(origin.core).or_default().push((origin.token, answer));
            }
        }
        let sends =
            elsewhere.into_iter().map(|(core, answers)| Effect::Send(core, Message::Answers(answers)));
        self.effects.extend(sends);
    }

    fn deliver(&mut self, index: usize, entry: Delivered) -> Result<(), Fault> {
        let unit = &mut self.units[index];
        let Delivered { index, term, payload } = entry;
        let mark = payload.as_ref().map(|payload| (payload.epoch, matches!(payload.body, Body::Barrier)));
        let is_cut = matches!(payload.as_ref().map(|payload| &payload.body), Some(Body::Cut { .. }));
        unit.shard.deliver(index, term, payload)?;
        let shard = unit.shard.id();
        match mark {
            Some((epoch, true)) if unit.awaited == Some(Awaited::Barrier(epoch)) => {
                unit.awaited = None;
                let recovery = unit.shard.recovery();
                self.send_to_control(Message::Barred { epoch, recovery });
            }
            Some((epoch, false)) if is_cut && unit.awaited == Some(Awaited::Cut(epoch)) => {
                unit.awaited = None;
                unit.shard.release(None)?;
                while unit.shard.is_expanding() {
                    unit.shard.expand(None)?;
                }
                self.send_to_control(Message::CutApplied { epoch, shard });
            }
            _ => {}
        }
        Ok(())
    }

    fn report_lead(&mut self, index: usize) {
        let unit = &mut self.units[index];
        if let Some(Awaited::Lead(epoch)) = unit.awaited
            && unit.group.leads()
        {
            unit.awaited = None;
            unit.term = Some(unit.group.term());
            let (shard, term) = (unit.shard.id(), unit.group.term());
            self.send_to_control(Message::Leads { epoch, shard, term });
        }
    }

    // ---- what a core does by itself -----------------------------------------------------------------------

    /// Every few milliseconds: seals, checkpoints, segments, slices of compaction.
    pub fn tick(&mut self, now: Now) -> Result<(), Fault> {
        let Some(reign) = self.reign.clone() else { return Ok(()) };
        let v = reign.watermark.visible();
        if v != self.v_still.0 {
            self.v_still = (v, now);
        }
        for index in 0..self.units.len() {
            self.expand(index, v)?;
            self.compact_slice(index, v)?;
            self.tick_unit(index, now, v)?;
        }
        self.tick_defragment()?;
        self.tick_stop(v);
        Ok(())
    }

    /// A slice of a long deletion; when it is done, the reads that waited for it.
    fn expand(&mut self, index: usize, v: i64) -> Result<(), Fault> {
        let unit = &mut self.units[index];
        if unit.shard.is_expanding() {
            unit.shard.expand(Some(v))?;
        }
        if !unit.shard.is_expanding() {
            for message in std::mem::take(&mut unit.later) {
                self.message(message)?;
            }
        }
        Ok(())
    }

    fn compact_slice(&mut self, index: usize, v: i64) -> Result<(), Fault> {
        let rows = self.pace.compact_rows;
        let unit = &mut self.units[index];
        let through = unit.shard.store().applied().revision.min(v);
        let progress = unit.shard.store_mut().compact_slice(through, rows)?;
        let finished = unit.shard.store().applied().compaction.finished;
        if progress == Progress::Done && finished > unit.removed {
            unit.removed = finished;
            let shard = unit.shard.id();
            self.send_to_control(Message::Removed { shard, revision: finished });
        }
        Ok(())
    }

    fn tick_unit(&mut self, index: usize, now: Now, v: i64) -> Result<(), Fault> {
        let pace = self.pace;
        let asked = self.defragmenting.iter().map(|(_, due)| due[index]).max().unwrap_or(0);
        let stopping = self.stopping;
        let still = now.saturating_sub(self.v_still.1) >= pace.seal_after;
        let unit = &mut self.units[index];
        let wanted = stopping || asked > unit.begun;
        let shard = unit.shard.id();
        let quiet = now.saturating_sub(unit.quiet_since);
        if quiet >= pace.seal_after
            && let Some(flush) = unit.group.seal(v, still)
        {
            self.effects.push(Effect::Run(Job::Flush { shard, flush }));
        }
        if unit.checkpointing {
            return Ok(());
        }
        let store = unit.shard.store();
        let due = store.tree().dirty_bytes() >= pace.dirty_bytes
            || unit.group.log().bytes_since(unit.checkpoint_entry) >= pace.tail_bytes
            || v - unit.checkpoint_v >= META_PAGE_REVISIONS_BEHIND_MAX
            || (quiet >= pace.checkpoint_after || wanted) && store.tree().dirty_bytes() > 0;
        if due {
            unit.shard.release(Some(v))?;
            let entry = unit.shard.store().applied().position.entry;
            if let Some(job) = unit.shard.store_mut().checkpoint() {
                unit.checkpointing = true;
                unit.begun += 1;
                unit.checkpoint_v = v;
                self.effects.push(Effect::Run(Job::Checkpoint { shard, job, entry }));
            }
        }
        Ok(())
    }

    /// Tells those who asked for it that the trees are durable.
    fn tick_defragment(&mut self) -> Result<(), Fault> {
        let finished: Vec<u64> = self.units.iter().map(|unit| unit.finished).collect();
        let done = |due: &Vec<u64>| due.iter().zip(&finished).all(|(due, finished)| finished >= due);
        let (told, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.defragmenting).into_iter().partition(|(_, due)| done(due));
        self.defragmenting = left;
        for (origin, _) in told {
            self.send(origin.core, Message::Defragmented { token: origin.token })?;
        }
        Ok(())
    }

    /// Says so once everything that was logged is visible and stands durably in the trees.
    fn tick_stop(&mut self, v: i64) {
        if !self.stopping || self.stopped {
            return;
        }
        let settled = self.units.iter().all(|unit| {
            !unit.checkpointing
                && !unit.shard.is_expanding()
                && unit.shard.store().tree().dirty_bytes() == 0
                && unit.group.is_quiet()
        });
        if settled && self.reign.as_ref().is_none_or(|reign| reign.watermark.next() - 1 == v) {
            self.stopped = true;
            self.send_to_control(Message::Stopped);
        }
    }

    /// What must hold between any two turns.
    pub fn invariants(&self) -> Result<(), String> {
        if let (Some(reign), Some(first)) = (&self.reign, self.slot.first())
            && reign.watermark.visible() >= *first
        {
            return Err(format!("core {}: V covers revision {first}, which is not registered", self.me));
        }
        self.units.iter().try_for_each(|unit| unit.shard.invariants())
    }

    /// What must hold when all is quiet: nothing waits, nothing is frozen, no revision is in a slot.
    pub fn at_rest(&self) -> Result<(), String> {
        let waits = [
            ("changes", self.changes.len()),
            ("revisions in the slot", self.slot.len()),
            ("reads", self.reads.len() + self.long_waiting.len()),
            ("surveys", self.surveys.len() + self.defragmenting.len()),
            ("answers", self.waiting.len() + self.answered.len()),
            ("postponed messages", self.units.iter().map(|unit| unit.later.len() + unit.backlog.len()).sum()),
        ];
        if let Some((what, count)) = waits.iter().find(|(_, count)| *count > 0) {
            return Err(format!("all is quiet, and core {} still has {count} {what}", self.me));
        }
        self.units.iter().try_for_each(|unit| unit.shard.at_rest())
    }
}

impl Unit {
    /// The reign leads this group in the term it noted, or it is over (Z3).
    fn check_term(&self) -> Result<(), Fault> {
        let now = self.group.leads().then(|| self.group.term());
        if self.term.is_none() || self.term != now {
            return Err(Fault::Broken(format!(
                "shard {} lost its leadership (noted term {:?}, now {now:?})",
                self.shard.id(),
                self.term
            )));
        }
        Ok(())
    }
}
