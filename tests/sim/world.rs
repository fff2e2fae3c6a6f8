//! One node under a seed: who acts next, how long messages and jobs take, when the power goes.
//!
//! Every actor (core, control, job, client) acts in steps; between any two steps any other may act. A core that
//! scans the watermark does so load by load. Messages from one actor to another keep their order and nothing else.
//! Some actors are slow for a while: a shard whose disk stalls, a control thread that does not run.

use crate::history::{History, Stored};
use crate::workload;
use bytes::Bytes;
use etcore::btree;
use etcore::env::Disk;
use etcore::env::sim::{Call, Crash, Dice, Failure, SimDisk};
use etcore::model::{CoreId, Fault, KeyRange, KeyValue, Request, Rev, ShardId};
use etcore::proto::etcdserverpb as pb;
use etcore::raft::Birth;
use etcore::router::RangeMap;
use etcore::runtime::{Control, Core, Effect, Home, Identity, Job, Message, Pace, boot};
use etcore::wal;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Holds,
    Violation(String),
}

/// Why a step did not end well.
enum Stop {
    /// Something that must never be.
    Violation(String),
    /// The machine reported a fault.
    Fault(Fault),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Stop::Fault(fault)
    }
}

impl From<String> for Stop {
    fn from(violation: String) -> Self {
        Stop::Violation(violation)
    }
}

/// A job on its way: whose, and what.
struct Running {
    owner: CoreId,
    job: Job,
}

struct Node {
    control: Control,
    cores: Vec<Core>,
    /// Cores in the middle of a scan.
    scanning: BTreeSet<CoreId>,
    /// Messages by sender and receiver; each pair keeps its order.
    mail: BTreeMap<(CoreId, CoreId), VecDeque<Message>>,
    jobs: Vec<Running>,
    /// Where each shard's tree was looked through to.
    seen: BTreeMap<ShardId, Rev>,
}

pub struct World {
    seed: u64,
    dice: Dice,
    disk: SimDisk,
    home: Home,
    cores: usize,
    splits: Vec<Bytes>,
    history: History,
    now: Duration,
    requests: u64,
    steps: u64,
    slow: BTreeSet<CoreId>,
    /// Senders and receivers between which nothing goes for a while.
    stuck: BTreeSet<(CoreId, CoreId)>,
    /// Cores are often stopped inside a scan.
    long_scans: bool,
    trace: bool,
    digest: DefaultHasher,
}

/// Steps in one life of the node, and lives in one run.
const STEPS_PER_LIFE: u64 = 400;
const LIVES: u64 = 4;
/// In what units a log is written.
const BLOCK: usize = 4096;

impl World {
    pub fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let shards = 1 + dice.below(4) as usize;
        let cores = 1 + dice.below(5) as usize;
        let mut splits: BTreeSet<Bytes> = BTreeSet::new();
        while splits.len() + 1 < shards {
            splits.insert(workload::key(&mut dice));
        }
        let disk = SimDisk::with_file_bytes_max(seed, 64 << 20);
        let shared: Arc<dyn Disk> = Arc::new(disk.clone());
        let pace = Pace {
            seal_after: Duration::from_millis(5),
            checkpoint_after: Duration::from_millis(40),
            tail_bytes: 20_000 + dice.below(100_000),
            dirty_bytes: 1 << 20,
            compact_rows: 1 + dice.below(20) as usize,
        };
        let home = Home {
            disk: shared,
            dir: PathBuf::from("/data"),
            tree: btree::Options { reserve_bytes: 64 << 20 },
            log: wal::Options { segment_bytes: 64 << 10 },
            pace,
        };
        World {
            seed,
            dice,
            disk,
            home,
            cores,
            splits: splits.into_iter().collect(),
            history: History::new(),
            now: Duration::ZERO,
            requests: 0,
            steps: 0,
            slow: BTreeSet::new(),
            stuck: BTreeSet::new(),
            long_scans: seed % 2 == 1,
            trace: std::env::var_os("SIM_TRACE").is_some(),
            digest: DefaultHasher::new(),
        }
    }

    /// What happened, as one number: equal runs have equal digests.
    pub fn digest(&self) -> u64 {
        self.digest.clone().finish()
    }

    fn note(&mut self, what: std::fmt::Arguments) {
        let text = what.to_string();
        if self.trace {
            eprintln!("{:>6} {text}", self.steps);
        }
        text.hash(&mut self.digest);
    }

    pub fn run(&mut self) -> Outcome {
        match self.lives() {
            Ok(()) => Outcome::Holds,
            Err(Stop::Violation(what)) => Outcome::Violation(what),
            Err(Stop::Fault(fault)) => Outcome::Violation(format!("unexpected fault: {fault}")),
        }
    }

    fn lives(&mut self) -> Result<(), Stop> {
        for life in 0..LIVES {
            let last = life + 1 == LIVES;
            self.disk_dir()?;
            if !last {
                self.plan_trouble();
            }
            match self.live(last) {
                Ok(()) => {}
                // A call failed, by the power or by itself. The machine says so and is not asked again.
                Err(Stop::Fault(Fault::Io { .. })) if !last => {}
                Err(stop) => return Err(stop),
            }
            let crash = Crash { seed: self.dice.draw(), tear: self.dice.coin() };
            self.note(format_args!("life {life} ends: {crash:?}"));
            self.disk.crash(crash);
            self.history.forget_asked();
        }
        self.history.settle()?;
        if self.dice.one_in(3) { self.damage() } else { Ok(()) }
    }

    /// A disk that will fail in this life: the power goes between two calls, often inside a takeover; or one call
    /// fails once and would succeed if it were repeated (case D3).
    fn plan_trouble(&mut self) {
        match self.dice.below(12) {
            0..=2 => {
                let most = [20, 60, 200][self.dice.below(3) as usize];
                let calls = self.dice.below(most);
                self.disk.cut_power_after(calls);
                self.note(format_args!("the power will go after {calls} calls"));
            }
            3..=4 => {
                let call = [Call::Sync, Call::Sync, Call::Write, Call::SyncDir][self.dice.below(4) as usize];
                let after = self.dice.below(60);
                self.note(format_args!("a {call:?} will fail after {after} more"));
                self.disk.fail(Failure { call, path: "/".into(), after, times: 1, errno: libc::EIO });
            }
            _ => {}
        }
    }

    /// What was acknowledged in one shard's log rots: one record behind which another flush stands (case D2), or
    /// everything from there on while the other shards' seals prove a higher V (case D8). The next start refuses,
    /// or finds everything that was shown in spite of it.
    fn damage(&mut self) -> Result<(), Stop> {
        let mut node = self.boot()?;
        self.quiesce(&mut node)?;
        let before = self.log_blocks()?;
        let shards = node.cores.iter().flat_map(|core| core.shards()).count();
        for shard in 0..shards {
            let key = shard.checked_sub(1).map_or(Bytes::from_static(b"A"), |at| self.splits[at].clone());
            for _ in 0..1 + self.dice.below(3) {
                self.requests += 1;
                let value = Bytes::from(self.requests.to_string());
                let put = pb::PutRequest { key: key.clone(), value, ..Default::default() };
                self.ask_core(&mut node, 0, Request::Put(put))?;
            }
        }
        self.settle(&mut node, 20_000)?;
        // Quiet, and every log is sealed with the V of now.
        // What a log carries over from an old segment may come before the seal.
        for _ in 0..3 {
            self.now += Duration::from_millis(6);
            for core in 0..self.cores as CoreId {
                node.cores[core as usize].tick(self.now)?;
                self.core_turn(&mut node, core)?;
            }
            node.control.tick(self.now)?;
            self.control_turn(&mut node)?;
            self.settle(&mut node, 20_000)?;
        }
        drop(node);
        let after = self.log_blocks()?;
        let shard = 1 + self.dice.below(shards as u64) as ShardId;
        let dir = boot::shard_dir(&self.home.dir, shard);
        let mut written: Vec<_> = after
            .iter()
            .filter(|(place, block)| place.0.starts_with(&dir) && before.get(*place) != Some(*block))
            .map(|(place, _)| place.clone())
            .collect();
        // One block, or the whole tail: then another log's seal has the higher V.
        if self.dice.coin() {
            written.truncate(1);
        }
        for (path, block) in &written {
            self.disk.corrupt(path, block * BLOCK as u64 + self.dice.below(60), 0x41);
        }
        self.note(format_args!("damage to shard {shard}: {written:?}"));
        self.history.forget_asked();
        self.disk.crash(Crash { seed: self.dice.draw(), tear: false });
        match self.boot() {
            Ok(_) | Err(Stop::Fault(Fault::Damage { .. } | Fault::Refused(_))) => Ok(()),
            Err(stop) => Err(stop),
        }
    }

    /// All blocks of the shards' logs that hold something.
    fn log_blocks(&self) -> Result<BTreeMap<(PathBuf, u64), Vec<u8>>, Stop> {
        let io = |error: std::io::Error| Stop::Violation(error.to_string());
        let mut blocks = BTreeMap::new();
        for shard in 1..=self.splits.len() as ShardId + 1 {
            let dir = boot::shard_dir(&self.home.dir, shard).join("log");
            for name in self.home.disk.list(&dir).map_err(io)? {
                let path = dir.join(name);
                for (number, block) in (0..).zip(self.disk.contents(&path).map_err(io)?.chunks(BLOCK)) {
                    if block.iter().any(|byte| *byte != 0) {
                        blocks.insert((path.clone(), number), block.to_vec());
                    }
                }
            }
        }
        Ok(blocks)
    }

    fn disk_dir(&self) -> Result<(), Stop> {
        self.home.disk.create_dir(&self.home.dir).map_err(|e| Stop::Violation(e.to_string()))
    }

    fn live(&mut self, last: bool) -> Result<(), Stop> {
        let mut node = self.boot()?;
        let steps = 1 + self.dice.below(STEPS_PER_LIFE);
        for _ in 0..steps {
            self.step(&mut node, true)?;
        }
        if last || self.dice.one_in(3) {
            self.quiesce(&mut node)?;
        }
        Ok(())
    }

    // ---- start ----------------------------------------------------------------------------------------------

    fn boot(&mut self) -> Result<Node, Stop> {
        let mut control = self.home.open_control(self.cores)?;
        self.home.run_alone(&mut control, Control::is_ready_to_reign)?;
        let born = control.birth().cloned();
        let map = match &born {
            Some(birth) => RangeMap::from_bytes(birth.range_map.clone())
                .ok_or_else(|| Stop::Violation("the range map is lost".into()))?,
            None => RangeMap::from_splits(&self.splits)?,
        };
        let mut units: Vec<Vec<_>> = (0..self.cores).map(|_| Vec::new()).collect();
        for shard in 1..=map.shards() as ShardId {
            let opened = self.home.open_shard(shard, born.is_some())?;
            units[Core::home_of(shard, self.cores) as usize].push(opened);
        }
        control.reign_or_be_born(|| Birth { range_map: map.to_bytes(), ..Birth::default() })?;
        self.home.run_alone(&mut control, Control::is_elected)?;
        control.take_over()?;
        let identity = Arc::new(Identity::default());
        let cores = (0..)
            .zip(units)
            .map(|(me, units)| Core::new(me, self.cores, identity.clone(), self.home.pace, units));
        let mut node = Node {
            cores: cores.collect(),
            control,
            scanning: BTreeSet::new(),
            mail: BTreeMap::new(),
            jobs: Vec::new(),
            seen: BTreeMap::new(),
        };
        self.take_control_effects(&mut node);
        let mut patience = 20_000;
        while !node.control.serves() {
            self.step(&mut node, false)?;
            patience -= 1;
            if patience == 0 {
                return Err(Stop::Violation("the takeover does not end".into()));
            }
        }
        self.note(format_args!("serves, shown {}", self.history.shown()));
        let visible = node.control.reign().map_or(0, |reign| reign.watermark.visible());
        if visible < self.history.shown() {
            return Err(Stop::Violation(format!(
                "after the restart V is {visible}, but {} was shown",
                self.history.shown()
            )));
        }
        self.look(&mut node)?;
        self.compare_with_history(&node)?;
        Ok(node)
    }

    // ---- one step -------------------------------------------------------------------------------------------

    fn step(&mut self, node: &mut Node, clients: bool) -> Result<(), Stop> {
        self.steps += 1;
        if self.dice.one_in(40) {
            let actor = self.dice.below(self.cores as u64 + 1) as CoreId;
            if !self.slow.remove(&actor) {
                self.slow.insert(actor);
            }
        }
        if self.dice.one_in(30) {
            let actors = self.cores as u64 + 1;
            let pair = (self.dice.below(actors) as CoreId, self.dice.below(actors) as CoreId);
            if !self.stuck.remove(&pair) {
                self.stuck.insert(pair);
            }
        }
        match self.dice.below(10) {
            0 => self.tick(node),
            1..=2 if clients && self.history.in_flight() < 12 => self.ask(node),
            3..=5 => self.job_step(node),
            _ => self.deliver(node),
        }
    }

    /// Whether the actor misses its chance.
    fn dawdles(&mut self, actor: CoreId) -> bool {
        self.slow.contains(&actor) && !self.dice.one_in(30)
    }

    fn tick(&mut self, node: &mut Node) -> Result<(), Stop> {
        self.now += Duration::from_millis(self.dice.below(8));
        let actor = self.dice.below(self.cores as u64 + 1) as CoreId;
        if self.dawdles(actor) || node.scanning.contains(&actor) {
            return Ok(());
        }
        if actor as usize == self.cores {
            node.control.tick(self.now)?;
            return self.control_turn(node);
        }
        self.look(node)?;
        node.cores[actor as usize].tick(self.now)?;
        self.core_turn(node, actor)
    }

    fn ask(&mut self, node: &mut Node) -> Result<(), Stop> {
        let core = self.dice.below(self.cores as u64) as CoreId;
        if node.scanning.contains(&core) || !node.cores[core as usize].serves() {
            return Ok(());
        }
        let request = workload::request(&mut self.dice, self.requests + 1, self.history.shown());
        self.ask_core(node, core, request)
    }

    fn ask_core(&mut self, node: &mut Node, core: CoreId, request: Request) -> Result<(), Stop> {
        self.requests += 1;
        let token = self.requests;
        self.note(format_args!("client asks core {core}: {token} {request:?}"));
        self.history.asked(token, request.clone());
        node.cores[core as usize].request(token, request)?;
        if self.dice.coin() { self.core_turn(node, core) } else { self.take_core_effects(node, core) }
    }

    fn job_step(&mut self, node: &mut Node) -> Result<(), Stop> {
        if node.jobs.is_empty() {
            return self.deliver(node);
        }
        let index = self.dice.below(node.jobs.len() as u64) as usize;
        let owner = node.jobs[index].owner;
        if self.dawdles(owner) {
            return Ok(());
        }
        if node.jobs[index].job.step()? {
            let Running { owner, job } = node.jobs.swap_remove(index);
            // The completion waits in the owner's mailbox; nobody in particular sent it.
            node.mail.entry((owner, owner)).or_default().push_back(Message::Done(job));
        }
        Ok(())
    }

    fn deliver(&mut self, node: &mut Node) -> Result<(), Stop> {
        let pairs: Vec<_> = node
            .mail
            .iter()
            .filter(|((_, to), queue)| !queue.is_empty() && !node.scanning.contains(to))
            .map(|(pair, _)| *pair)
            .collect();
        let choices = pairs.len() + node.scanning.len();
        if choices == 0 {
            return Ok(());
        }
        let choice = self.dice.below(choices as u64) as usize;
        let Some(&(from, to)) = pairs.get(choice) else {
            let core = node.scanning.iter().copied().nth(choice - pairs.len()).unwrap_or(0);
            // A core may be stopped between two loads for as long as any other.
            let stops = self.dawdles(core) || self.long_scans && !self.dice.one_in(6);
            return if stops { Ok(()) } else { self.scan_step(node, core) };
        };
        if self.dawdles(to) || self.stuck.contains(&(from, to)) && !self.dice.one_in(100) {
            return Ok(());
        }
        for _ in 0..1 + self.dice.below(3) {
            let Some(message) = node.mail.get_mut(&(from, to)).and_then(VecDeque::pop_front) else { break };
            if to as usize == self.cores {
                node.control.message(message)?;
            } else {
                node.cores[to as usize].message(message)?;
            }
        }
        if to as usize == self.cores { self.control_turn(node) } else { self.core_turn(node, to) }
    }

    fn control_turn(&mut self, node: &mut Node) -> Result<(), Stop> {
        node.control.turn(self.now)?;
        self.take_control_effects(node);
        Ok(())
    }

    /// The first part of a core's turn; if it has to scan, the rest follows in steps.
    fn core_turn(&mut self, node: &mut Node, core: CoreId) -> Result<(), Stop> {
        node.cores[core as usize].turn_begin(self.now)?;
        node.scanning.insert(core);
        self.take_core_effects(node, core)?;
        self.scan_step(node, core)
    }

    fn scan_step(&mut self, node: &mut Node, core: CoreId) -> Result<(), Stop> {
        let machine = &mut node.cores[core as usize];
        if machine.turn_scan() {
            return Ok(());
        }
        machine.turn_end()?;
        node.cores.iter().try_for_each(Core::invariants)?;
        node.scanning.remove(&core);
        self.look(node)?;
        self.take_core_effects(node, core)
    }

    fn take_core_effects(&mut self, node: &mut Node, core: CoreId) -> Result<(), Stop> {
        let mut effects = Vec::new();
        node.cores[core as usize].take_effects(&mut effects);
        for effect in effects {
            match effect {
                Effect::Answer(token, answer) => {
                    self.note(format_args!("core {core} answers {token}: {answer:?}"));
                    self.history.answered(token, answer)?;
                }
                other => Self::route(node, core, other),
            }
        }
        Ok(())
    }

    fn take_control_effects(&mut self, node: &mut Node) {
        let mut effects = Vec::new();
        node.control.take_effects(&mut effects);
        for effect in effects {
            Self::route(node, self.cores as CoreId, effect);
        }
    }

    fn route(node: &mut Node, from: CoreId, effect: Effect) {
        match effect {
            Effect::Send(to, message) => node.mail.entry((from, to)).or_default().push_back(message),
            Effect::Run(job) => node.jobs.push(Running { owner: from, job }),
            Effect::Answer(..) => {}
        }
    }

    // ---- checks ---------------------------------------------------------------------------------------------

    /// Reads what the trees hold that was not seen yet. Done before anything may be compacted away.
    fn look(&mut self, node: &mut Node) -> Result<(), Stop> {
        for machine in &node.cores {
            for shard in machine.shards() {
                let reader = shard.store().reader();
                let seen = node.seen.entry(shard.id()).or_default();
                let mut revisions = reader.revisions(*seen);
                while let Some(found) = revisions.current() {
                    let rev = found.rev;
                    let parts = reader.rev_record(rev.main).unwrap_or_default();
                    let stored = Stored { tombstone: found.tombstone, kv: found.kv.to_owned() };
                    self.history.stored(shard.id(), rev.main, rev.sub, stored, &parts)?;
                    *seen = Rev::new(rev.main, rev.sub + 1);
                    revisions.advance();
                }
            }
        }
        let applied = node.cores.iter().flat_map(|core| core.shards());
        let applied = applied.map(|shard| shard.store().applied().revision).min().unwrap_or(1);
        self.history.complete(applied)?;
        Ok(())
    }

    /// After a restart and after quiet: the trees hold exactly what the history says, at its newest revision.
    fn compare_with_history(&mut self, node: &Node) -> Result<(), Stop> {
        let mut found = BTreeMap::new();
        for shard in node.cores.iter().flat_map(|core| core.shards()) {
            let _ = shard.store().reader().scan(&KeyRange::everything(), None, &mut |kv| {
                found.insert(Bytes::copy_from_slice(kv.key), kv.to_owned());
                ControlFlow::Continue(())
            });
        }
        let (revision, want) = self.history.newest();
        if found != *want {
            let (extra, missing): (Vec<_>, Vec<_>) = (
                found
                    .iter()
                    .filter(|(key, kv)| want.get(*key) != Some(kv))
                    .map(|(_, kv)| brief(kv))
                    .collect(),
                want.iter()
                    .filter(|(key, kv)| found.get(*key) != Some(kv))
                    .map(|(_, kv)| brief(kv))
                    .collect(),
            );
            return Err(Stop::Violation(format!(
                "at revision {revision} the trees hold {extra:?}\n  where the history has {missing:?}"
            )));
        }
        Ok(())
    }

    /// Lets everything come to rest: then V = next − 1, and nobody waits.
    fn quiesce(&mut self, node: &mut Node) -> Result<(), Stop> {
        self.settle(node, 20_000)?;
        if self.history.in_flight() > 0 {
            return Err(Stop::Violation(format!("{} requests are never answered", self.history.in_flight())));
        }
        let reign = node.control.reign().cloned();
        let watermark = &reign.as_ref().ok_or_else(|| Stop::Violation("no reign".into()))?.watermark;
        if watermark.visible() != watermark.next() - 1 {
            return Err(Stop::Violation(format!(
                "all is quiet, but V is {} and next is {}",
                watermark.visible(),
                watermark.next()
            )));
        }
        for core in 0..self.cores as CoreId {
            self.core_turn(node, core)?;
            while node.scanning.contains(&core) {
                self.scan_step(node, core)?;
            }
        }
        for machine in &node.cores {
            machine.at_rest().map_err(Stop::Violation)?;
        }
        self.look(node)?;
        self.compare_with_history(node)
    }

    /// Until nobody has anything to do and everything is answered.
    fn settle(&mut self, node: &mut Node, steps: u64) -> Result<(), Stop> {
        self.slow.clear();
        self.stuck.clear();
        for _ in 0..steps {
            let busy = !node.jobs.is_empty()
                || !node.scanning.is_empty()
                || node.mail.values().any(|queue| !queue.is_empty());
            let expanding =
                node.cores.iter().flat_map(|core| core.shards()).any(|shard| shard.is_expanding());
            if !busy && !expanding && self.history.in_flight() == 0 {
                break;
            }
            if busy {
                match self.dice.below(3) {
                    0 => self.job_step(node)?,
                    _ => self.deliver(node)?,
                }
            } else {
                // A physical compaction and a long deletion need ticks to get on.
                self.tick(node)?;
            }
        }
        Ok(())
    }
}

fn brief(kv: &KeyValue) -> String {
    let value = String::from_utf8_lossy(&kv.value[..kv.value.len().min(12)]).into_owned();
    format!("{:?}={value} mod {} version {}", kv.key, kv.mod_revision, kv.version)
}

impl std::fmt::Display for World {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "seed {}, {} answers", self.seed, self.history.answers)
    }
}
