//! The one crossing between threads: bounded mailboxes, many senders, one receiver.
//!
//! A core receives on its executor ([`Receiver`]), control and other plain threads block ([`ThreadReceiver`]);
//! senders need not know which. What it promises: messages of one sender arrive in the order sent; none is lost
//! or doubled; a mailbox never grows beyond its capacity: a send to a full one gives the message back and the
//! sender decides ([`Outbox`] keeps it and tells when there is room). A sender never blocks.
//!
//! ```text
//!   sender                                   receiver
//!   push, wake the receiver's waker          pop a batch; empty: register, look once more, sleep
//!   full: register for room, look once more  after a batch: somebody waits for room? wake them all
//! ```
//!
//! What it does not know: what the messages mean, and which executor polls it.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use futures::task::AtomicWaker;

/// Messages that one batch takes at most, so that a receiver under load still turns to its other duties.
pub const BATCH_MESSAGES_MAX: usize = 1024;

struct Shared<M> {
    queue: ArrayQueue<M>,
    receiver: AtomicWaker,
    /// Senders that wait for room; `crowded` says without the lock that there are some.
    waiting: Mutex<Vec<Waker>>,
    crowded: AtomicBool,
    senders: AtomicUsize,
    closed: AtomicBool,
    sent: AtomicU64,
    refused: AtomicU64,
    batches: AtomicU64,
}

/// What went through a mailbox, for the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages accepted.
    pub sent: u64,
    /// Messages given back because the mailbox was full.
    pub refused: u64,
    /// Batches in which the accepted ones were received.
    pub batches: u64,
}

/// A mailbox whose receiver is polled by a task.
pub fn mailbox<M: Send>(capacity: usize) -> (Sender<M>, Receiver<M>) {
    let shared = Arc::new(Shared {
        queue: ArrayQueue::new(capacity),
        receiver: AtomicWaker::new(),
        waiting: Mutex::new(Vec::new()),
        crowded: AtomicBool::new(false),
        senders: AtomicUsize::new(1),
        closed: AtomicBool::new(false),
        sent: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        batches: AtomicU64::new(0),
    });
    (Sender { shared: Arc::clone(&shared) }, Receiver { shared })
}

/// A mailbox whose receiver blocks a plain thread.
pub fn thread_mailbox<M: Send>(capacity: usize) -> (Sender<M>, ThreadReceiver<M>) {
    let (sender, receiver) = mailbox(capacity);
    (sender, ThreadReceiver { receiver })
}

/// The sending end; cheap to clone.
pub struct Sender<M> {
    shared: Arc<Shared<M>>,
}

impl<M: Send> Sender<M> {
    /// Gives the message back when the mailbox is full or its receiver is gone ([`Sender::is_closed`]).
    pub fn send(&self, message: M) -> Result<(), M> {
        self.push(message)?;
        self.shared.receiver.wake();
        Ok(())
    }

    /// Moves as many messages as fit, from the front, and wakes the receiver once. Returns how many; what did
    /// not fit stays.
    pub fn send_batch(&self, messages: &mut VecDeque<M>) -> usize {
        let mut moved = 0;
        while let Some(message) = messages.pop_front() {
            if let Err(message) = self.push(message) {
                messages.push_front(message);
                break;
            }
            moved += 1;
        }
        if moved > 0 {
            self.shared.receiver.wake();
        }
        moved
    }

    /// Ready when there is room, or nobody will ever make some. Otherwise the task is woken when there is, as
    /// are all others that wait: having been woken is no reservation.
    pub fn poll_room(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.has_room() {
            return Poll::Ready(());
        }
        {
            let mut waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
        }
        self.shared.crowded.store(true, Ordering::Relaxed);
        // Pairs with the fence in `Receiver::take`: either it sees `crowded`, or we see the room it made.
        fence(Ordering::SeqCst);
        if self.has_room() { Poll::Ready(()) } else { Poll::Pending }
    }

    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    pub fn counters(&self) -> Counters {
        Counters {
            sent: self.shared.sent.load(Ordering::Relaxed),
            refused: self.shared.refused.load(Ordering::Relaxed),
            batches: self.shared.batches.load(Ordering::Relaxed),
        }
    }

    fn has_room(&self) -> bool {
        !self.shared.queue.is_full() || self.is_closed()
    }

    fn push(&self, message: M) -> Result<(), M> {
        if self.is_closed() {
            return Err(message);
        }
        let pushed = self.shared.queue.push(message);
        let counter = if pushed.is_ok() { &self.shared.sent } else { &self.shared.refused };
        counter.fetch_add(1, Ordering::Relaxed);
        pushed
    }
}

impl<M> Clone for Sender<M> {
    fn clone(&self) -> Self {
        self.shared.senders.fetch_add(1, Ordering::Relaxed);
        Sender { shared: Arc::clone(&self.shared) }
    }
}

impl<M> Drop for Sender<M> {
    fn drop(&mut self) {
        if self.shared.senders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.receiver.wake();
        }
    }
}

/// The receiving end of a task.
pub struct Receiver<M> {
    shared: Arc<Shared<M>>,
}

impl<M: Send> Receiver<M> {
    /// Appends the messages that are there, at most [`BATCH_MESSAGES_MAX`], and returns how many; 0 when all
    /// senders are gone and everything was received.
    pub async fn recv_batch(&mut self, batch: &mut Vec<M>) -> usize {
        std::future::poll_fn(|context| self.poll_batch(context, batch)).await
    }

    /// [`Receiver::recv_batch`] for a loop that waits for several things.
    pub fn poll_batch(&mut self, context: &mut Context<'_>, batch: &mut Vec<M>) -> Poll<usize> {
        let taken = self.take(batch);
        if taken > 0 {
            return Poll::Ready(taken);
        }
        self.shared.receiver.register(context.waker());
        // A message or the last sender's end may have come before the registration.
        let gone = self.shared.senders.load(Ordering::Acquire) == 0;
        let taken = self.take(batch);
        if taken > 0 || gone { Poll::Ready(taken) } else { Poll::Pending }
    }

    /// What is there now, without waiting.
    pub fn try_batch(&mut self, batch: &mut Vec<M>) -> usize {
        self.take(batch)
    }

    fn take(&mut self, batch: &mut Vec<M>) -> usize {
        let before = batch.len();
        while batch.len() - before < BATCH_MESSAGES_MAX
            && let Some(message) = self.shared.queue.pop()
        {
            batch.push(message);
        }
        let taken = batch.len() - before;
        if taken > 0 {
            self.shared.batches.fetch_add(1, Ordering::Relaxed);
            self.make_room();
        }
        taken
    }

    fn make_room(&self) {
        fence(Ordering::SeqCst);
        if self.shared.crowded.load(Ordering::Relaxed) {
            self.shared.crowded.store(false, Ordering::Relaxed);
            let waiting =
                std::mem::take(&mut *self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

impl<M> Drop for Receiver<M> {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        // The waker belongs to the receiver's executor; left to the senders it might outlive that.
        drop(self.shared.receiver.take());
        while self.shared.queue.pop().is_some() {}
        let waiting =
            std::mem::take(&mut *self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// The receiving end of a plain thread.
pub struct ThreadReceiver<M> {
    receiver: Receiver<M>,
}

/// What a wait on a plain thread ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    Messages(usize),
    /// The time was up.
    Nothing,
    /// All senders are gone and everything was received.
    Closed,
}

impl<M: Send> ThreadReceiver<M> {
    /// Appends the messages that are there, at most [`BATCH_MESSAGES_MAX`]; waits for the first, at most until
    /// `deadline` where there is one.
    pub fn recv_batch(&mut self, batch: &mut Vec<M>, deadline: Option<Instant>) -> Received {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            match self.receiver.poll_batch(&mut context, batch) {
                Poll::Ready(0) => return Received::Closed,
                Poll::Ready(messages) => return Received::Messages(messages),
                Poll::Pending => {}
            }
            match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => std::thread::park(),
                Some(Duration::ZERO) => return Received::Nothing,
                Some(left) => std::thread::park_timeout(left),
            }
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future to its end on the calling plain thread. For tests and for the few calls that control makes
/// before its loop runs; never on an executor.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        std::thread::park();
    }
}

/// Messages of one core to one receiver, collected during a turn and sent together at its end. What a full
/// mailbox does not take stays, in order. Its owner bounds it by taking no new work while it is long.
pub struct Outbox<M> {
    sender: Sender<M>,
    messages: VecDeque<M>,
}

impl<M: Send> Outbox<M> {
    pub fn new(sender: Sender<M>) -> Self {
        Outbox { sender, messages: VecDeque::new() }
    }

    pub fn push(&mut self, message: M) {
        self.messages.push_back(message);
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Sends what fits. Pending while something is left: the task is woken when there is room. Ready with an
    /// error when the receiver is gone; the messages are gone with it.
    pub fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Closed>> {
        loop {
            if self.messages.is_empty() {
                return Poll::Ready(Ok(()));
            }
            if self.sender.is_closed() {
                self.messages.clear();
                return Poll::Ready(Err(Closed));
            }
            self.sender.send_batch(&mut self.messages);
            if !self.messages.is_empty() && self.sender.poll_room(context).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

/// The receiver is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the receiver of the mailbox has ended")]
pub struct Closed;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_mailbox_gives_the_message_back_and_tells_when_there_is_room() {
        let (sender, mut receiver) = mailbox(2);
        assert_eq!((sender.send(1), sender.send(2), sender.send(3)), (Ok(()), Ok(()), Err(3)));
        let woken = Arc::new(Flag::default());
        let waker = Waker::from(Arc::clone(&woken));
        assert!(sender.poll_room(&mut Context::from_waker(&waker)).is_pending());
        let mut batch = Vec::new();
        assert_eq!(receiver.try_batch(&mut batch), 2);
        assert_eq!(batch, [1, 2]);
        assert!(woken.0.load(Ordering::Relaxed), "room was made but nobody told");
        assert_eq!(sender.send(3), Ok(()));
        assert_eq!(sender.counters(), Counters { sent: 3, refused: 1, batches: 1 });
    }

    #[test]
    fn an_outbox_keeps_order_over_a_full_mailbox() {
        let (sender, mut receiver) = mailbox(3);
        let mut outbox = Outbox::new(sender);
        (0..8).for_each(|message| outbox.push(message));
        let mut context = Context::from_waker(Waker::noop());
        let mut batch = Vec::new();
        assert!(outbox.poll_flush(&mut context).is_pending());
        outbox.push(8);
        while !outbox.is_empty() {
            receiver.try_batch(&mut batch);
            let _ = outbox.poll_flush(&mut context);
        }
        receiver.try_batch(&mut batch);
        assert_eq!(batch, (0..9).collect::<Vec<_>>());
        drop(receiver);
        outbox.push(9);
        assert_eq!(outbox.poll_flush(&mut context), Poll::Ready(Err(Closed)));
    }

    #[test]
    fn a_thread_hears_messages_the_deadline_and_the_end() {
        let (sender, mut receiver) = thread_mailbox(4);
        let mut batch: Vec<u8> = Vec::new();
        assert_eq!(receiver.recv_batch(&mut batch, Some(Instant::now())), Received::Nothing);
        let other = std::thread::spawn(move || sender.send(7));
        assert_eq!(receiver.recv_batch(&mut batch, None), Received::Messages(1));
        other.join().unwrap().unwrap();
        assert_eq!(receiver.recv_batch(&mut batch, None), Received::Closed);
        assert_eq!(batch, [7]);
    }

    #[test]
    fn a_receiver_that_ends_frees_what_was_not_received_and_refuses_more() {
        let (sender, receiver) = mailbox(4);
        let value = Arc::new(());
        sender.send(Arc::clone(&value)).unwrap();
        drop(receiver);
        assert_eq!(Arc::strong_count(&value), 1);
        assert!(sender.send(Arc::clone(&value)).is_err());
        assert!(sender.is_closed());
    }

    /// Many senders through a narrow mailbox: nothing lost, nothing doubled, each sender's order kept, nobody
    /// left sleeping.
    #[test]
    fn many_senders_through_a_narrow_mailbox() {
        const SENDERS: u64 = 4;
        const MESSAGES: u64 = 5_000;
        let (sender, mut receiver) = thread_mailbox(8);
        let threads: Vec<_> = (0..SENDERS)
            .map(|id| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    let mut outbox = Outbox::new(sender);
                    for number in 0..MESSAGES {
                        outbox.push((id, number));
                        block_on(std::future::poll_fn(|context| outbox.poll_flush(context))).unwrap();
                    }
                })
            })
            .collect();
        drop(sender);
        let mut next = [0; SENDERS as usize];
        let mut batch = Vec::new();
        while receiver.recv_batch(&mut batch, None) != Received::Closed {
            for (id, number) in batch.drain(..) {
                assert_eq!(next[id as usize], number, "out of order");
                next[id as usize] += 1;
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(next, [MESSAGES; SENDERS as usize]);
    }

    #[derive(Default)]
    struct Flag(AtomicBool);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}
