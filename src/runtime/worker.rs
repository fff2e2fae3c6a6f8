//! Threads that run jobs which may block: a log thread for each shard, and a few helpers for everything else.
//!
//! What it promises: jobs of one crew start in the order given; a crew of one thread also ends them in that order;
//! a full queue gives the job back; a job that panics is reported and ends its thread, never silently. Dropping a
//! crew runs what was given and waits for it.
//!
//! What it does not know: files, shards, and where the outcome of a job goes: the job itself sends it, usually
//! through a mailbox.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::executor::{cpus_allowed, fault_of};
use crate::model::Fault;

/// A piece of work that may block.
pub type Job = Box<dyn FnOnce() + Send>;

/// How a thread stands with the scheduler.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turns {
    /// The slice it asks for. A thread that asks for less gets its turn sooner, and gives it up sooner: right for
    /// one that issues a flush and sleeps (Linux 6.12; older kernels ignore or refuse it, which is no fault).
    pub slice: Option<Duration>,
    /// Its nice value; above zero it yields to the cores.
    pub nice: i32,
}

impl Turns {
    /// A log thread: without the short slice a flush waits for a scheduler's whole slice on a busy CPU.
    pub const LOG: Turns = Turns { slice: Some(Duration::from_micros(100)), nice: 0 };
    /// A core, and control: what they answer waits for their turn as a flush does.
    pub const CORE: Turns = Turns { slice: Some(Duration::from_micros(100)), nice: 0 };
    /// A helper: checkpoints and big reads take what the cores leave.
    pub const HELPER: Turns = Turns { slice: None, nice: 5 };
}

/// Threads with one queue of jobs.
pub struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    capacity: usize,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Crew {
    /// Starts `threads` threads called `name`-0, ... (at most 15 bytes are shown by the system) that share a
    /// queue of at most `capacity` jobs. `on_fault` hears of a job that panicked.
    pub fn start(
        name: &str,
        threads: usize,
        turns: Turns,
        capacity: usize,
        on_fault: impl Fn(Fault) + Send + Sync + 'static,
    ) -> Result<Crew, Fault> {
        assert!(threads > 0 && capacity > 0, "a crew needs a thread and room for a job");
        let cpus = cpus_allowed()?;
        let shared = Arc::new(Shared { queue: Mutex::default(), work: Condvar::new(), capacity });
        let on_fault = Arc::new(on_fault);
        let mut crew = Crew { shared, threads: Vec::with_capacity(threads) };
        for number in 0..threads {
            let name = format!("{name}-{number}");
            let (shared, on_fault, cpus) = (Arc::clone(&crew.shared), Arc::clone(&on_fault), cpus.clone());
            let who = name.clone();
            let thread = std::thread::Builder::new()
                .name(name.clone())
                .spawn(move || {
                    spread(&cpus);
                    take_turns(turns);
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&shared))) {
                        let fault = fault_of(&who, panic);
                        tracing::error!(thread = who, error = %fault, "job failed");
                        on_fault(fault);
                    }
                })
                .map_err(|source| Fault::io(format!("thread {name}"), "start", source))?;
            crew.threads.push(thread);
        }
        Ok(crew)
    }

    /// A handle that other threads may submit through.
    pub fn desk(&self) -> Desk {
        Desk { shared: Arc::clone(&self.shared) }
    }

    /// Jobs that wait for a thread.
    pub fn waiting(&self) -> usize {
        self.shared.queue().jobs.len()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Where jobs are handed in.
#[derive(Clone)]
pub struct Desk {
    shared: Arc<Shared>,
}

impl Desk {
    /// Gives the job back when the queue is full or the crew has ended.
    pub fn submit(&self, job: Job) -> Result<(), Job> {
        let mut queue = self.shared.queue();
        if queue.closed || queue.jobs.len() >= self.shared.capacity {
            return Err(job);
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.work.notify_one();
        Ok(())
    }
}

fn work(shared: &Shared) {
    let mut queue = shared.queue();
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            drop(queue);
            job();
            queue = shared.queue();
        } else if queue.closed {
            return;
        } else {
            queue = shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Lets the calling thread run on all the CPUs of the process: one started by a pinned thread would share its one.
pub fn spread(cpus: &[usize]) {
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus {
        // SAFETY: the CPUs come from such a set, so they are below its capacity.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is valid for reads of the given size; thread 0 is the caller. A refusal leaves the thread
    // where it is, which is slower but not wrong.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
}

/// Asks the scheduler for these turns, for the calling thread. Refusals are ignored: they cost latency only.
pub fn take_turns(turns: Turns) {
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: 0,
        sched_nice: turns.nice,
        sched_priority: 0,
        sched_runtime: turns.slice.map_or(0, |slice| slice.as_nanos() as u64),
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: `attributes` is valid for reads and says its own size; thread 0 is the caller.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_crew_of_one_runs_jobs_in_order_and_finishes_them_before_it_ends() {
        let (done, outcomes) = mpsc::channel();
        let crew = Crew::start("log", 1, Turns::LOG, 64, |_| {}).unwrap();
        let desk = crew.desk();
        for number in 0..50 {
            let done = done.clone();
            assert!(desk.submit(Box::new(move || done.send(number).unwrap())).is_ok());
        }
        drop(crew);
        assert_eq!(outcomes.try_iter().collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
        assert!(desk.submit(Box::new(|| {})).is_err(), "a crew that has ended takes no job");
    }

    #[test]
    fn a_full_queue_gives_the_job_back() {
        let crew = Crew::start("helper", 1, Turns::HELPER, 1, |_| {}).unwrap();
        let desk = crew.desk();
        let (release, held) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        assert!(
            desk.submit(Box::new(move || {
                begun.send(()).unwrap();
                let _ = held.recv();
            }))
            .is_ok()
        );
        begins.recv().unwrap();
        assert!(desk.submit(Box::new(|| {})).is_ok());
        assert!(desk.submit(Box::new(|| {})).is_err());
        assert_eq!(crew.waiting(), 1);
        drop(release);
    }

    #[test]
    fn a_fault_raised_by_a_job_is_reported_as_itself() {
        let (report, reports) = mpsc::channel();
        let crew = Crew::start("helper", 1, Turns::HELPER, 4, move |fault| {
            report.send(fault.to_string()).unwrap();
        })
        .unwrap();
        let job: Job = Box::new(|| {
            Fault::io("/data/wal", "write", std::io::Error::from_raw_os_error(libc::ENOSPC)).raise()
        });
        assert!(crew.desk().submit(job).is_ok());
        drop(crew);
        assert_eq!(reports.recv().unwrap(), "/data/wal: write: No space left on device (os error 28)");
    }

    #[test]
    fn a_crew_started_by_a_pinned_thread_may_run_on_every_cpu() {
        let cpus = cpus_allowed().unwrap();
        let expected = cpus.clone();
        let mask = std::thread::spawn(move || {
            spread(&cpus[..1]);
            let crew = Crew::start("helper", 1, Turns::HELPER, 4, |_| {}).unwrap();
            let (tell, told) = mpsc::channel();
            let job: Job = Box::new(move || {
                // SAFETY: an all-zero set is empty and valid for writes of its size; 0 is the caller.
                let set = unsafe {
                    let mut set: libc::cpu_set_t = std::mem::zeroed();
                    libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
                    set
                };
                // SAFETY: indices below the capacity of the set.
                tell.send((0..1024).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect::<Vec<_>>())
                    .unwrap();
            });
            assert!(crew.desk().submit(job).is_ok());
            told.recv().unwrap()
        });
        assert_eq!(mask.join().unwrap(), expected);
    }
}
