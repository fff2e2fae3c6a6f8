//! The node: the machines of cores and control on real threads.
//!
//! ```text
//!   executor c        pump: mailbox, requests ─▶ Core ─▶ answers, outboxes, jobs     ticker
//!   control           loop: mailbox ─▶ Control ─▶ messages, jobs
//!   log-s, helper     run jobs to their end, send them back as Message::Done
//! ```
//!
//! Promises: a fault anywhere ends the process with one line that says what and where (`Watch::fault`); nothing is
//! answered after it. Does not know the protocol, nor who asks: requests come in through [`ask`].

use super::control::Control;
use super::core::Core;
use super::executor::{Main, Signal, sleep, spawn};
use super::job::{Job, Lane};
use super::mailbox::{Outbox, Received, Receiver, Sender, ThreadReceiver, block_on, mailbox, thread_mailbox};
use super::message::{Effect, Message};
use super::worker::{Crew, Desk, Turns};
use crate::metrics::Metrics;
use crate::model::{Answer, CoreId, Fault, Rejection, Request, ShardId};
use futures::channel::oneshot;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Messages that wait for one core or for control.
const MAILBOX_MESSAGES: usize = 1 << 15;
/// Jobs that wait for a crew; the machines bound what they ask for far below.
const CREW_JOBS: usize = 4096;
const HELPERS: usize = 2;
/// How often the machines look at what is due by time.
const TICK: Duration = Duration::from_millis(2);

/// Who is told when the node cannot go on.
pub trait Watch: Send + Sync {
    /// A fault: report it and end the process. Never returns to the work that failed.
    fn fault(&self, fault: Fault) -> !;
}

/// Where jobs run, by lane.
#[derive(Clone)]
struct Lanes {
    logs: BTreeMap<ShardId, Desk>,
    helpers: Desk,
    watch: Arc<dyn Watch>,
    metrics: Arc<Metrics>,
}

impl Lanes {
    /// Runs the job to its end elsewhere and sends it back to its owner.
    fn run(&self, mut job: Job, owner: Sender<Message>) {
        let desk = match job.lane() {
            Lane::Log(shard) => &self.logs[&shard],
            Lane::Helper => &self.helpers,
        };
        let (watch, metrics) = (self.watch.clone(), self.metrics.clone());
        let work = move || {
            let began = Instant::now();
            loop {
                match job.step() {
                    Ok(false) => {}
                    Ok(true) => break,
                    Err(fault) => watch.fault(fault),
                }
            }
            match &job {
                Job::Flush { .. } => metrics.flushed(began.elapsed()),
                Job::Checkpoint { .. } => metrics.checkpointed(began.elapsed()),
                Job::Segment { .. } | Job::Read(_) | Job::Hash(_) | Job::Discard(_) => {}
            }
            deliver(&owner, Message::Done(job));
        };
        if desk.submit(Box::new(work)).is_err() {
            self.watch.fault(Fault::Broken("a queue of jobs overflowed".into()));
        }
    }
}

/// Sends from a thread that may wait; a receiver that is gone needs nothing any more.
fn deliver(to: &Sender<Message>, mut message: Message) {
    while let Err(refused) = to.send(message) {
        if to.is_closed() {
            return;
        }
        message = refused;
        block_on(poll_fn(|context| to.poll_room(context)));
    }
}

/// The threads of a node besides its executors, and the ends of all mailboxes.
pub struct Parts {
    lanes: Lanes,
    /// Kept so that its threads live as long as the node.
    crews: Vec<Crew>,
    cores: Vec<Sender<Message>>,
    control: Sender<Message>,
    began: Instant,
}

/// The receiving ends of all mailboxes.
pub struct Mail {
    pub cores: Vec<Receiver<Message>>,
    pub control: ThreadReceiver<Message>,
}

impl Parts {
    /// Starts the crews.
    pub fn start(cores: usize, shards: usize, watch: Arc<dyn Watch>) -> Result<(Parts, Mail), Fault> {
        let mut crews = Vec::new();
        let mut logs = BTreeMap::new();
        let crew = |name: &str, threads: usize, turns: Turns| {
            let watch = watch.clone();
            Crew::start(name, threads, turns, CREW_JOBS, move |fault| watch.fault(fault))
        };
        for shard in 0..=shards as ShardId {
            let crew = crew(&format!("log-{shard}"), 1, Turns::LOG)?;
            logs.insert(shard, crew.desk());
            crews.push(crew);
        }
        let helpers = crew("helper", HELPERS, Turns::HELPER)?;
        let metrics = Arc::new(Metrics::new(cores));
        let lanes = Lanes { logs, helpers: helpers.desk(), watch, metrics };
        crews.push(helpers);
        let (senders, cores) = (0..cores).map(|_| mailbox(MAILBOX_MESSAGES)).unzip();
        let (control_sender, control) = thread_mailbox(MAILBOX_MESSAGES);
        let parts = Parts { lanes, crews, cores: senders, control: control_sender, began: Instant::now() };
        Ok((parts, Mail { cores, control }))
    }

    /// What the node counts of itself.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.lanes.metrics
    }

    fn address(&self, to: CoreId) -> &Sender<Message> {
        self.cores.get(to as usize).unwrap_or(&self.control)
    }

    /// The main future of one core: `serve` is started beside the machine and ends the executor when it ends.
    pub fn core_main<F>(self: &Arc<Self>, core: Core, mail: Receiver<Message>, serve: F) -> Main
    where
        F: FnOnce() -> futures::future::LocalBoxFuture<'static, ()> + Send + 'static,
    {
        let parts = self.clone();
        Box::new(move || {
            Box::pin(async move {
                let shell = Rc::new(Shell::new(parts, core));
                HERE.set(Some(shell.clone()));
                spawn(shell.clone().pump(mail));
                spawn(shell.clone().tick());
                serve().await;
                HERE.set(None);
            })
        })
    }

    /// Runs control on a thread of its own until it has stopped. `serving` is called once the node serves,
    /// `stop` is asked now and then whether to begin stopping.
    pub fn run_control(
        self: &Arc<Self>,
        mut control: Control,
        mut mail: ThreadReceiver<Message>,
        serving: impl FnOnce(),
        stop: impl Fn() -> bool,
    ) {
        let mut serving = Some(serving);
        let mut batch = Vec::new();
        let mut effects = Vec::new();
        let mut tick_at = Instant::now();
        let step = |result: Result<(), Fault>| {
            if let Err(fault) = result {
                self.lanes.watch.fault(fault);
            }
        };
        loop {
            control.take_effects(&mut effects);
            for effect in effects.drain(..) {
                match effect {
                    Effect::Send(to, message) => deliver(self.address(to), message),
                    Effect::Run(job) => self.lanes.run(job, self.control.clone()),
                    Effect::Answer(..) => {}
                }
            }
            if control.serves()
                && let Some(serving) = serving.take()
            {
                serving();
            }
            if control.is_stopped() || mail.recv_batch(&mut batch, Some(tick_at)) == Received::Closed {
                return;
            }
            for message in batch.drain(..) {
                step(control.message(message));
            }
            let now = Instant::now();
            if now >= tick_at {
                // Control has little to do by time; a fifth of the cores' rate is enough.
                tick_at = now + TICK * 5;
                step(control.tick(self.began.elapsed()));
                if stop() {
                    control.stop();
                }
            }
            step(control.turn(self.began.elapsed()));
        }
    }

    /// Ends the crews: what was given to them is finished first.
    pub fn join(self: Arc<Self>) {
        if let Some(parts) = Arc::into_inner(self) {
            drop(parts.crews);
        }
    }
}

thread_local! {
    /// The core that runs on this thread.
    static HERE: RefCell<Option<Rc<Shell>>> = const { RefCell::new(None) };
}

/// Asks the core of the calling thread. A call whose future is dropped may still take effect.
pub fn ask(request: Request) -> impl Future<Output = Answer> + Send {
    let answer = HERE.with_borrow(|here| here.as_ref().map(|shell| shell.ask(request)));
    async move {
        match answer {
            Some(answer) => answer.await.unwrap_or(Err(Rejection::Stopped)),
            None => Err(Rejection::Stopped),
        }
    }
}

/// One core's machine on its executor.
struct Shell {
    parts: Arc<Parts>,
    me: CoreId,
    core: RefCell<Core>,
    /// Requests came in, or an effect waits.
    signal: Signal,
    waiting: RefCell<Waiting>,
    outboxes: RefCell<Vec<Outbox<Message>>>,
    effects: RefCell<Vec<Effect>>,
}

/// Who waits for an answer, by token.
#[derive(Default)]
struct Waiting {
    last: u64,
    askers: BTreeMap<u64, Asker>,
}

struct Asker {
    /// As `Metrics::asked` said.
    change: bool,
    sender: oneshot::Sender<Answer>,
}

impl Shell {
    fn new(parts: Arc<Parts>, core: Core) -> Self {
        let outboxes = parts.cores.iter().chain([&parts.control]).map(|to| Outbox::new(to.clone()));
        Shell {
            me: core.id(),
            outboxes: RefCell::new(outboxes.collect()),
            core: RefCell::new(core),
            signal: Signal::default(),
            waiting: RefCell::default(),
            effects: RefCell::default(),
            parts,
        }
    }

    /// The answer comes from the pump, or at once where the core alone can give it.
    fn ask(&self, request: Request) -> oneshot::Receiver<Answer> {
        let (sender, receiver) = oneshot::channel();
        let change = self.parts.metrics().asked(self.me, &request);
        let token = {
            let mut waiting = self.waiting.borrow_mut();
            waiting.last += 1;
            let token = waiting.last;
            waiting.askers.insert(token, Asker { change, sender });
            token
        };
        self.step(|core| core.request(token, request));
        self.take_effects();
        self.signal.raise();
        receiver
    }

    fn step(&self, step: impl FnOnce(&mut Core) -> Result<(), Fault>) {
        if let Err(fault) = step(&mut self.core.borrow_mut()) {
            self.parts.lanes.watch.fault(fault);
        }
    }

    /// Handles messages and requests as they come, all that are there in one turn.
    async fn pump(self: Rc<Self>, mut mail: Receiver<Message>) {
        let mut batch = Vec::new();
        loop {
            let more = poll_fn(|context| self.poll_events(context, &mut mail, &mut batch)).await;
            if !more {
                return;
            }
            for message in batch.drain(..) {
                self.step(|core| core.message(message));
            }
            self.step(|core| core.turn(self.parts.began.elapsed()));
            self.take_effects();
        }
    }

    /// Ready when there is something to do; false once nobody can send any more.
    fn poll_events(
        &self,
        context: &mut Context,
        mail: &mut Receiver<Message>,
        batch: &mut Vec<Message>,
    ) -> Poll<bool> {
        for outbox in self.outboxes.borrow_mut().iter_mut() {
            // Pending: woken when there is room. An error: the receiver ended, as it does when the node stops.
            let _ = outbox.poll_flush(context);
        }
        let mail = mail.poll_batch(context, batch);
        let signal = self.signal.poll(context);
        match (mail, signal) {
            (Poll::Ready(0), _) => Poll::Ready(false),
            (Poll::Ready(_), _) | (_, Poll::Ready(())) => Poll::Ready(true),
            (Poll::Pending, Poll::Pending) => Poll::Pending,
        }
    }

    async fn tick(self: Rc<Self>) {
        loop {
            sleep(TICK).await;
            self.step(|core| core.tick(self.parts.began.elapsed()));
            if self.take_effects() {
                self.signal.raise();
            }
        }
    }

    /// Carries out what the machine wants; true if there was anything.
    fn take_effects(&self) -> bool {
        let mut effects = std::mem::take(&mut *self.effects.borrow_mut());
        self.core.borrow_mut().take_effects(&mut effects);
        let any = !effects.is_empty();
        for effect in effects.drain(..) {
            match effect {
                Effect::Answer(token, answer) => {
                    if let Some(asker) = self.waiting.borrow_mut().askers.remove(&token) {
                        self.parts.metrics().answered(self.me, asker.change, &answer);
                        // Nobody waits any more for a request that was cancelled.
                        let _ = asker.sender.send(answer);
                    }
                }
                Effect::Send(to, message) => self.outboxes.borrow_mut()[to as usize].push(message),
                Effect::Run(job) => self.parts.lanes.run(job, self.parts.cores[self.me as usize].clone()),
            }
        }
        *self.effects.borrow_mut() = effects;
        any
    }
}
