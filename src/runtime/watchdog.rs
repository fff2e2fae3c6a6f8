//! Wakes executors that sleep although they have work.
//!
//! The executor library, in its version 0.9.0, can park with runnable tasks when a completion stands in its
//! latency ring as it looks for work; nothing wakes it then. So every executor has a pulse, a task that counts up
//! each millisecond, and one thread looks at all pulses every two. Where one stands still it wakes one of
//! several small tasks of that executor, another one each time: the task that is woken may itself be among those
//! that the executor overlooks, and waking a task that is already due does nothing.
//!
//! A pulse also stands still when the system gives the executor no CPU; the wake is harmless then.
//! All of this goes when the library is newer than 0.9.0.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use futures::task::AtomicWaker;

use super::executor::{sleep, spawn};
use crate::model::Fault;

const PULSE: Duration = Duration::from_millis(1);
const LOOK: Duration = Duration::from_millis(2);
/// Tasks per executor that can be woken. Two would do, were it not that both may be due at once.
const BELLS: usize = 8;

/// What an executor shows of itself.
#[derive(Default)]
pub(super) struct Pulse {
    ticks: AtomicU64,
    bells: [AtomicWaker; BELLS],
    /// True when the executor has ended. Held while a bell is rung: no waker may be used after the end.
    ended: Mutex<bool>,
}

impl Pulse {
    /// Starts the pulse and the bells on the calling executor.
    pub(super) fn beat(self: &Arc<Self>) {
        let pulse = Arc::clone(self);
        spawn(async move {
            loop {
                sleep(PULSE).await;
                pulse.ticks.fetch_add(1, Ordering::Relaxed);
            }
        });
        for bell in 0..BELLS {
            let pulse = Arc::clone(self);
            // Only ever woken: that the executor turns once is the whole effect.
            spawn(std::future::poll_fn(move |context| {
                pulse.bells[bell].register(context.waker());
                std::task::Poll::Pending
            }));
        }
    }

    /// Called on the executor's thread when it ends.
    pub(super) fn end(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        for bell in &self.bells {
            drop(bell.take());
        }
    }

    /// Whether the executor was still there to be woken.
    fn ring(&self, bell: usize) -> bool {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if !*ended {
            self.bells[bell].wake();
        }
        !*ended
    }
}

/// The thread that looks; ends when dropped.
pub(super) struct Watchdog {
    pokes: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(super) fn start(pulses: Vec<Arc<Pulse>>) -> Result<Watchdog, Fault> {
        let pokes = Arc::new(AtomicU64::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let (counter, stopped) = (Arc::clone(&pokes), Arc::clone(&stop));
        let handle = std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || watch(&pulses, &counter, &stopped))
            .map_err(|source| Fault::io("thread watchdog", "start", source))?;
        Ok(Watchdog { pokes, stop, thread: handle.thread().clone(), handle: Some(handle) })
    }

    pub(super) fn pokes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.pokes)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.unpark();
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

fn watch(pulses: &[Arc<Pulse>], pokes: &AtomicU64, stop: &AtomicBool) {
    let mut seen = vec![u64::MAX; pulses.len()];
    let mut turn = 0;
    while !stop.load(Ordering::Acquire) {
        std::thread::park_timeout(LOOK);
        for (pulse, seen) in pulses.iter().zip(&mut seen) {
            let ticks = pulse.ticks.load(Ordering::Relaxed);
            if std::mem::replace(seen, ticks) == ticks && pulse.ring(turn) {
                pokes.fetch_add(1, Ordering::Relaxed);
                turn = (turn + 1) % BELLS;
            }
        }
    }
}
