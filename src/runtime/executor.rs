//! Executors: one per CPU of the process's affinity mask, pinned to it, each a thread of its own with an io_uring.
//!
//! What it promises: [`Cores::start`] returns when every executor runs or says why one cannot; a panic on an
//! executor is caught at the top of its thread, logged once and reported, so that the process can end with a
//! failure; a task never runs inside the poll of the one that spawned it ([`spawn`]); an executor whose pulse
//! stands still is woken ([`super::watchdog`]).
//!
//! What it does not know: shards, messages, connections. Together with the transport glue of the API it is the
//! only place that knows which executor this is.

use std::cell::Cell;
use std::future::Future;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;
use std::{any::Any, io};

use futures::future::LocalBoxFuture;
use glommio::{LocalExecutor, LocalExecutorBuilder, Placement, PoolPlacement};

use super::watchdog::{Pulse, Watchdog};
use super::worker::{Turns, take_turns};
use crate::model::Fault;

/// Memory that an executor registers with its ring for direct I/O. Files are not read or written through this
/// ring, so it only has to exist; the library's default of 10 MiB per core would be locked for nothing.
const IO_MEMORY_BYTES: usize = 64 << 10;
/// Operations that fit the submission ring before it is handed to the kernel.
const RING_ENTRIES: usize = 512;

/// How executors behave; the default is what the server uses.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How long an executor without work looks for some before it sleeps. Cuts the round trip between idle cores
    /// from about 60 µs to 13 and costs a busy CPU for that long.
    pub spin: Option<Duration>,
}

/// The main future of one core: made on the core's own thread, so that it need not be `Send`. The executor ends
/// when it is done; tasks still there are dropped.
pub type Main = Box<dyn FnOnce() -> LocalBoxFuture<'static, ()> + Send>;

/// All executors of the process.
pub struct Cores {
    threads: Vec<JoinHandle<Result<(), Fault>>>,
    watchdog: Watchdog,
}

impl Cores {
    /// Starts `mains[i]` on an executor pinned to `cpus[i]` and returns when all of them run. `on_end(i, result)`
    /// is called on the executor's thread when core i ends, be it in order or by a fault, so that whoever
    /// watches over the process hears of it at once. A fault of the start itself ends what had been started.
    pub fn start(
        cpus: &[usize],
        options: &Options,
        mains: Vec<Main>,
        on_end: impl Fn(usize, &Result<(), Fault>) + Send + Sync + 'static,
    ) -> Result<Cores, Fault> {
        assert!(mains.len() <= cpus.len(), "a core needs a CPU of its own");
        let on_end = Arc::new(on_end);
        let mut threads = Vec::with_capacity(mains.len());
        let mut pulses = Vec::with_capacity(mains.len());
        let mut gates = Vec::with_capacity(mains.len());
        let (ready, readiness) = mpsc::channel();
        for (core, main) in mains.into_iter().enumerate() {
            let pulse = Arc::new(Pulse::default());
            pulses.push(Arc::clone(&pulse));
            // The main future starts only when all executors stand: a gate that is dropped ends the thread.
            let (gate, gated) = mpsc::channel::<()>();
            gates.push(gate);
            let (ready, on_end, options, cpu) =
                (ready.clone(), Arc::clone(&on_end), options.clone(), cpus[core]);
            let thread = std::thread::Builder::new()
                .name(format!("core-{core}"))
                .spawn(move || {
                    let executor = match build(cpu, &options) {
                        Ok(executor) => executor,
                        Err(fault) => {
                            let _ = ready.send(Err(fault));
                            return Ok(());
                        }
                    };
                    let _ = ready.send(Ok(()));
                    drop(ready);
                    if gated.recv().is_err() {
                        return Ok(());
                    }
                    run(executor, core, main, &pulse, &*on_end)
                })
                .map_err(|source| Fault::io(format!("thread core-{core}"), "start", source))?;
            threads.push(thread);
        }
        drop(ready);
        for _ in 0..threads.len() {
            match readiness.recv() {
                Ok(Ok(())) => {}
                Ok(Err(fault)) => return Err(fault),
                Err(_) => return Err(Fault::Broken("an executor ended while it was set up".into())),
            }
        }
        for gate in gates {
            let _ = gate.send(());
        }
        Ok(Cores { threads, watchdog: Watchdog::start(pulses)? })
    }

    /// How often an executor had to be woken because its pulse stood still; for the metrics.
    pub fn pokes(&self) -> Arc<std::sync::atomic::AtomicU64> {
        self.watchdog.pokes()
    }

    /// Waits until every core has ended; the first fault among them.
    pub fn join(self) -> Result<(), Fault> {
        let mut result = Ok(());
        for thread in self.threads {
            let ended = thread.join().unwrap_or_else(|panic| Err(fault_of("a core", panic)));
            if result.is_ok() {
                result = ended;
            }
        }
        result
    }
}

fn build(cpu: usize, options: &Options) -> Result<LocalExecutor, Fault> {
    let mut builder = LocalExecutorBuilder::new(Placement::Fixed(cpu))
        .io_memory(IO_MEMORY_BYTES)
        .ring_depth(RING_ENTRIES)
        // Nothing blocking is run through the executor; the library insists on one thread for it.
        .blocking_thread_pool_placement(PoolPlacement::Unbound(1));
    if let Some(spin) = options.spin {
        builder = builder.spin_before_park(spin);
    }
    builder.make().map_err(|error| ring_refused(&error))
}

/// Asks the kernel for a ring as executors use it. To be called first: where there is none, the library panics
/// somewhere in its middle instead of saying so.
pub fn require_io_uring() -> Result<(), Fault> {
    io_uring::IoUring::new(RING_ENTRIES as u32).map(drop).map_err(|error| ring_refused(&error))
}

fn ring_refused(error: &dyn std::error::Error) -> Fault {
    Fault::Refused(format!(
        "cannot set up io_uring: {error}; it must be allowed (sysctl kernel.io_uring_disabled=0, and a seccomp \
         profile that lets io_uring_setup, io_uring_enter and io_uring_register through), Linux must be 5.8 or \
         newer, and RLIMIT_MEMLOCK at least 512 KiB"
    ))
}

fn run(
    executor: LocalExecutor,
    core: usize,
    main: Main,
    pulse: &Arc<Pulse>,
    on_end: &dyn Fn(usize, &Result<(), Fault>),
) -> Result<(), Fault> {
    take_turns(Turns::CORE);
    let ended = catch_unwind(AssertUnwindSafe(|| {
        executor.run(async {
            pulse.beat();
            main().await;
            pulse.end();
        });
    }));
    let result = ended.map_err(|panic| {
        pulse.end();
        fault_of(&format!("core {core}"), panic)
    });
    if let Err(fault) = &result {
        tracing::error!(core, error = %fault, "core failed");
        // Its tasks stopped at an arbitrary point: their destructors may meet what the panic left half done
        // and panic again, which would abort the process before anybody could report the fault.
        std::mem::forget(executor);
    }
    on_end(core, &result);
    result
}

/// The fault that a panic carries ([`Fault::raise`]), or one made of its message.
pub fn fault_of(who: &str, panic: Box<dyn Any + Send>) -> Fault {
    let panic = match panic.downcast::<Fault>() {
        Ok(fault) => return *fault,
        Err(panic) => panic,
    };
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into());
    Fault::Broken(format!("{who} panicked: {message}"))
}

/// Makes every panic one log line with place and message; a [`Fault`] that was raised is said in its own words.
/// In a build whose panics abort, this is all that a fault on a core leaves behind.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let message = if let Some(fault) = payload.downcast_ref::<Fault>() {
            fault.to_string()
        } else if let Some(text) = info.payload_as_str() {
            text.to_owned()
        } else {
            "a panic without a message".into()
        };
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        let thread = std::thread::current();
        tracing::error!(thread = thread.name().unwrap_or("?"), place, error = message, "panic");
    }));
}

/// Runs a future on the calling executor, detached. It is polled for the first time after the caller's turn:
/// polled inside it, each answer of a connection would leave in a system call of its own.
pub fn spawn(future: impl Future<Output = ()> + 'static) {
    // The executor refuses only queues that do not exist; the current one does.
    glommio::spawn_local_into(future, glommio::executor().current_task_queue())
        .unwrap_or_else(|_| unreachable!("the current task queue exists"))
        .detach();
}

/// Lets the other tasks of this executor have a turn. Does not look at sockets: see [`breathe`].
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(move |context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Lets everything else have a turn, sockets and messages from other cores included. For work in slices: an
/// executor that always has a runnable task would look at its ring only ten times a second.
pub async fn breathe() {
    sleep(Duration::from_micros(20)).await;
}

/// Waits on the calling executor's timer.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep(OnCore::new(glommio::timer::Timer::new(duration)))
}

/// A timer of the executor that made it.
pub struct Sleep(OnCore<glommio::timer::Timer>);

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut *self.0).poll(context).map(|_| ())
    }
}

/// A value that stays on the thread where it was made but may be named where `Send` is asked for: tonic's
/// services and hyper's timers want that of futures which never leave their core. Touching or dropping it on
/// another thread panics.
pub struct OnCore<T> {
    thread: ThreadId,
    value: ManuallyDrop<T>,
}

// SAFETY: the value is reached (deref, poll, drop, into_inner) only after `assert_here` has found that the
// calling thread is the one that made it; thread ids are never used twice in a process. Moving the wrapper moves
// bytes only.
unsafe impl<T> Send for OnCore<T> {}
// SAFETY: as above; a shared reference on another thread gives no access to the value.
unsafe impl<T> Sync for OnCore<T> {}

impl<T> OnCore<T> {
    pub fn new(value: T) -> Self {
        OnCore { thread: std::thread::current().id(), value: ManuallyDrop::new(value) }
    }

    pub fn into_inner(self) -> T {
        self.assert_here();
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the value is taken exactly once.
        unsafe { ManuallyDrop::take(&mut this.value) }
    }

    fn assert_here(&self) {
        assert!(
            self.thread == std::thread::current().id(),
            "a value of one core was touched on another thread"
        );
    }
}

impl<T> Deref for OnCore<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.assert_here();
        &self.value
    }
}

impl<T> DerefMut for OnCore<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.assert_here();
        &mut self.value
    }
}

impl<T> Drop for OnCore<T> {
    fn drop(&mut self) {
        self.assert_here();
        // SAFETY: dropped here only, once; the wrapper is not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.value) }
    }
}

impl<F: Future> Future for OnCore<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.assert_here();
        // SAFETY: the value is pinned as part of the wrapper: it is never moved out of a pinned one (`into_inner`
        // takes the wrapper by value), and it is dropped in place.
        unsafe { self.map_unchecked_mut(|this| &mut *this.value) }.poll(context)
    }
}

/// One task of a core waits, others on the same core tell it that something happened. Tellings before the wait
/// are kept, several count as one.
#[derive(Clone, Default)]
pub struct Signal {
    inner: Rc<SignalInner>,
    /// Never leaves its core.
    local: PhantomData<*const ()>,
}

#[derive(Default)]
struct SignalInner {
    raised: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

impl Signal {
    pub fn raise(&self) {
        self.inner.raised.set(true);
        if let Some(waker) = self.inner.waker.take() {
            waker.wake();
        }
    }

    /// Ready once per raising; keeps the waker of the last task that asked.
    pub fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.inner.raised.replace(false) {
            return Poll::Ready(());
        }
        let waker = match self.inner.waker.take() {
            Some(waker) if waker.will_wake(context.waker()) => waker,
            _ => context.waker().clone(),
        };
        self.inner.waker.set(Some(waker));
        Poll::Pending
    }

    pub async fn wait(&self) {
        std::future::poll_fn(|context| self.poll(context)).await;
    }
}

/// The CPUs that this process may run on, ascending. The main thread's mask is asked, not the caller's: a core's
/// thread has a mask of one.
pub fn cpus_allowed() -> Result<Vec<usize>, Fault> {
    // SAFETY: getpid has no preconditions.
    let process = unsafe { libc::getpid() };
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid for writes of the given size.
    let status = unsafe { libc::sched_getaffinity(process, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if status != 0 {
        return Err(Fault::io("/proc/self/status", "read the CPU affinity", io::Error::last_os_error()));
    }
    // SAFETY: every index is below CPU_SETSIZE, the capacity of the set.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

/// Raises the limit of open files to the hard limit and returns it: every connection is a file. Etcd does the
/// same (the Go runtime does it for every program).
pub fn raise_open_files() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for writes.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is valid for reads.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Mutex;

    use super::*;

    fn main(body: impl AsyncFnOnce() + Send + 'static) -> Main {
        Box::new(move || Box::pin(async move { body().await }))
    }

    /// Runs one body on one executor.
    fn on_core(body: impl AsyncFnOnce() + Send + 'static) {
        let cpus = cpus_allowed().unwrap();
        Cores::start(&cpus[..1], &Options::default(), vec![main(body)], |_, _| {}).unwrap().join().unwrap();
    }

    #[test]
    fn each_executor_is_pinned_to_one_cpu_of_the_process() {
        let cpus = cpus_allowed().unwrap();
        let masks = Arc::new(Mutex::new(Vec::new()));
        let mains = cpus.iter().map(|_| {
            let masks = Arc::clone(&masks);
            main(async move || {
                // SAFETY: gettid has no preconditions.
                let thread = unsafe { libc::gettid() };
                let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
                let name = status.lines().next().unwrap().trim_start_matches("Name:").trim().to_owned();
                let mask = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
                masks.lock().unwrap().push((name, mask.trim().to_owned()));
            })
        });
        Cores::start(&cpus, &Options::default(), mains.collect(), |_, _| {}).unwrap().join().unwrap();
        let mut seen = masks.lock().unwrap().clone();
        seen.sort();
        let mut expected: Vec<_> =
            cpus.iter().enumerate().map(|(core, cpu)| (format!("core-{core}"), cpu.to_string())).collect();
        expected.sort();
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_raised_fault_reaches_the_starter_and_the_watcher() {
        let cpus = cpus_allowed().unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let ears = Arc::clone(&heard);
        let raise = main(async || {
            spawn(async {
                Fault::Damage {
                    path: "/data/tree".into(),
                    place: "page 7".into(),
                    what: "wrong checksum".into(),
                    remedy: "restore".into(),
                }
                .raise()
            });
            std::future::pending::<()>().await;
        });
        let cores = Cores::start(&cpus[..1], &Options::default(), vec![raise], move |core, result| {
            ears.lock().unwrap().push((core, result.as_ref().map_err(ToString::to_string).err()));
        })
        .unwrap();
        let fault = cores.join().unwrap_err();
        assert_eq!(fault.to_string(), "/data/tree: page 7: wrong checksum; restore");
        assert_eq!(*heard.lock().unwrap(), [(0, Some(fault.to_string()))]);
    }

    #[test]
    fn a_spawned_task_runs_after_the_turn_that_spawned_it() {
        on_core(async || {
            let order = Rc::new(RefCell::new(Vec::new()));
            let seen = Rc::clone(&order);
            spawn(async move { seen.borrow_mut().push("task") });
            order.borrow_mut().push("spawner");
            yield_now().await;
            assert_eq!(*order.borrow(), ["spawner", "task"]);
        });
    }

    #[test]
    fn a_signal_raised_before_the_wait_is_kept_and_several_count_as_one() {
        on_core(async || {
            let signal = Signal::default();
            signal.raise();
            signal.raise();
            signal.wait().await;
            let mut context = Context::from_waker(Waker::noop());
            assert!(signal.poll(&mut context).is_pending());
            let other = signal.clone();
            spawn(async move { other.raise() });
            signal.wait().await;
        });
    }

    #[test]
    fn a_value_of_one_core_refuses_other_threads() {
        let value = Arc::new(OnCore::new(Cell::new(1)));
        let there = Arc::clone(&value);
        let outcome = std::thread::spawn(move || {
            let seen = catch_unwind(AssertUnwindSafe(|| there.get())).is_err();
            // The count falls back to the owner, which drops the value.
            drop(there);
            seen
        });
        assert!(outcome.join().unwrap());
        assert_eq!(value.get(), 1);
    }

    #[test]
    fn the_open_file_limit_is_raised_to_the_hard_limit() {
        let raised = raise_open_files().unwrap();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        assert_eq!(line.split_whitespace().nth(3), Some(raised.to_string().as_str()));
    }
}
