//! What the process counts of itself, and how that reads as Prometheus' text.
//!
//! Promises: counting never waits. Every core has counters of its own on cache lines of its own, and what several
//! threads count are single atomics; they are summed when somebody looks. Names and buckets are etcd's (etcd:
//! flags.md 6), so that its dashboards and alerts work; what only this server has begins with `etcore_`. Does not
//! know who serves the page, and what can be asked of the store (sizes, indexes, revisions) is asked then, not
//! counted here.

mod process;
mod text;

pub use text::Page;

use crate::model::{Answer, CoreId, Rejection, Request, Response, txn};
use crate::proto::etcdserverpb::{ResponseOp, response_op};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

#[derive(Debug)]
pub struct Metrics {
    cores: Box<[Core]>,
    flushes: Histogram,
    checkpoints: Histogram,
    /// Counted by whoever watches the executors, once they run.
    pokes: OnceLock<Arc<AtomicU64>>,
}

/// The counters that one core alone writes.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Core {
    puts: AtomicU64,
    deletes: AtomicU64,
    txns: AtomicU64,
    ranges: AtomicU64,
    changes_asked: AtomicU64,
    changes_answered: AtomicU64,
    changes_failed: AtomicU64,
}

impl Metrics {
    pub fn new(cores: usize) -> Self {
        Metrics {
            cores: (0..cores).map(|_| Core::default()).collect(),
            flushes: Histogram::default(),
            checkpoints: Histogram::default(),
            pokes: OnceLock::new(),
        }
    }

    /// From now on the page tells how often executors were woken because they seemed to sleep.
    pub fn set_pokes(&self, pokes: Arc<AtomicU64>) {
        // Set once; a second source would be the same.
        let _ = self.pokes.set(pokes);
    }

    /// A flush of a log, from its write to the device's word that it is durable.
    pub fn flushed(&self, took: Duration) {
        self.flushes.observe(took);
    }

    pub fn checkpointed(&self, took: Duration) {
        self.checkpoints.observe(took);
    }

    /// A request came in at this core. True if it is one of those that etcd would propose; `answered` wants that
    /// back.
    pub fn asked(&self, core: CoreId, request: &Request) -> bool {
        let change = match request {
            Request::Put(_) | Request::DeleteRange(_) | Request::Compact(_) => true,
            Request::Txn(request) => !txn::read_only(request),
            _ => false,
        };
        if change {
            self.cores[core as usize].changes_asked.fetch_add(1, Relaxed);
        }
        change
    }

    /// Its answer leaves.
    pub fn answered(&self, core: CoreId, change: bool, answer: &Answer) {
        let core = &self.cores[core as usize];
        if change {
            core.changes_answered.fetch_add(1, Relaxed);
        }
        match answer {
            Ok(Response::Range(_) | Response::RangeEncoded(_)) => core.count(&core.ranges),
            Ok(Response::Put(_)) => core.count(&core.puts),
            Ok(Response::DeleteRange(_)) => core.count(&core.deletes),
            Ok(Response::Txn(txn)) => {
                core.count(&core.txns);
                core.operations(&txn.responses);
            }
            Ok(_) => {}
            Err(rejection) if change && is_failure(rejection) => core.count(&core.changes_failed),
            Err(_) => {}
        }
    }

    /// Everything that was counted, and what the system says of the process.
    pub fn write(&self, page: &mut Page) {
        let sum = |counter: fn(&Core) -> &AtomicU64| -> u64 {
            self.cores.iter().map(|core| counter(core).load(Relaxed)).sum()
        };
        page.histogram(
            "etcd_disk_wal_fsync_duration_seconds",
            "Time of a flush of a log, over all logs.",
            &self.flushes,
        );
        page.histogram(
            "etcd_disk_backend_commit_duration_seconds",
            "Time of a checkpoint of a tree.",
            &self.checkpoints,
        );
        page.counter("etcd_mvcc_put_total", "Puts answered, those in transactions too.", sum(|c| &c.puts));
        page.counter(
            "etcd_mvcc_delete_total",
            "Deletes answered, those in transactions too.",
            sum(|c| &c.deletes),
        );
        page.counter("etcd_mvcc_txn_total", "Transactions answered.", sum(|c| &c.txns));
        page.counter(
            "etcd_mvcc_range_total",
            "Ranges answered, those in transactions too.",
            sum(|c| &c.ranges),
        );
        // Answers first: a change that is answered in between is then counted as pending, not the other way round.
        let answered = sum(|c| &c.changes_answered);
        let pending = sum(|c| &c.changes_asked).saturating_sub(answered);
        page.gauge("etcd_server_proposals_pending", "Changes that wait for their answer.", pending);
        page.counter(
            "etcd_server_proposals_failed_total",
            "Changes that the server could not take.",
            sum(|c| &c.changes_failed),
        );
        let pokes = self.pokes.get().map_or(0, |pokes| pokes.load(Relaxed));
        page.counter(
            "etcore_executor_pokes_total",
            "How often an executor was woken because it seemed to sleep with work to do.",
            pokes,
        );
        process::write(page);
    }
}

impl Core {
    fn count(&self, counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    fn operations(&self, responses: &[ResponseOp]) {
        for response in responses {
            match &response.response {
                Some(response_op::Response::ResponseRange(_)) => self.count(&self.ranges),
                Some(response_op::Response::ResponsePut(_)) => self.count(&self.puts),
                Some(response_op::Response::ResponseDeleteRange(_)) => self.count(&self.deletes),
                Some(response_op::Response::ResponseTxn(txn)) => self.operations(&txn.responses),
                None => {}
            }
        }
    }
}

/// The server's state is to blame, not the request.
fn is_failure(rejection: &Rejection) -> bool {
    matches!(
        rejection,
        Rejection::TooManyRequests
            | Rejection::NoSpace
            | Rejection::Timeout
            | Rejection::TimeoutDueToLeaderFail
            | Rejection::LeaderChanged
            | Rejection::NoLeader
            | Rejection::Stopped
    )
}

/// Bounds of the buckets: 1 ms, and each twice the one before, fourteen of them; then everything.
const BUCKETS: usize = 14;
const BUCKET_FIRST: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub struct Histogram {
    /// Not cumulative; the last holds what is above all bounds.
    counts: [AtomicU64; BUCKETS + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, took: Duration) {
        let bucket = (0..BUCKETS).find(|at| took <= Self::bound(*at)).unwrap_or(BUCKETS);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(took.as_nanos() as u64, Relaxed);
    }

    fn bound(bucket: usize) -> Duration {
        BUCKET_FIRST * (1 << bucket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::etcdserverpb as pb;

    fn value(text: &str, name: &str) -> f64 {
        let line = text.lines().find(|line| line.split(' ').next() == Some(name));
        line.unwrap_or_else(|| panic!("{name} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    fn page(metrics: &Metrics) -> String {
        let mut page = Page::default();
        metrics.write(&mut page);
        page.into_text()
    }

    #[test]
    fn what_cores_count_is_summed_and_transactions_are_looked_into() {
        let metrics = Metrics::new(2);
        let put = Request::Put(pb::PutRequest::default());
        let get = Request::Range { request: pb::RangeRequest::default(), count: true };
        assert!(metrics.asked(0, &put) && metrics.asked(1, &put) && !metrics.asked(1, &get));
        metrics.answered(0, true, &Ok(Response::Put(pb::PutResponse::default())));
        metrics.answered(1, false, &Ok(Response::Range(pb::RangeResponse::default())));
        let text = page(&metrics);
        assert_eq!(value(&text, "etcd_mvcc_put_total"), 1.0);
        assert_eq!(value(&text, "etcd_mvcc_range_total"), 1.0);
        assert_eq!(value(&text, "etcd_server_proposals_pending"), 1.0);
        metrics.answered(1, true, &Err(Rejection::TooManyRequests));
        let op = |response| ResponseOp { response: Some(response) };
        let inner = pb::TxnResponse {
            responses: vec![op(response_op::Response::ResponsePut(pb::PutResponse::default()))],
            ..Default::default()
        };
        let outer = pb::TxnResponse {
            responses: vec![op(response_op::Response::ResponseTxn(inner))],
            ..Default::default()
        };
        metrics.answered(1, false, &Ok(Response::Txn(outer)));
        let text = page(&metrics);
        assert_eq!(value(&text, "etcd_server_proposals_pending"), 0.0);
        assert_eq!(value(&text, "etcd_server_proposals_failed_total"), 1.0);
        assert_eq!(value(&text, "etcd_mvcc_put_total"), 2.0);
        assert_eq!(value(&text, "etcd_mvcc_txn_total"), 1.0);
    }

    #[test]
    fn a_rejected_request_is_no_failure_of_the_server() {
        let metrics = Metrics::new(1);
        metrics.answered(0, true, &Err(Rejection::EmptyKey));
        assert_eq!(value(&page(&metrics), "etcd_server_proposals_failed_total"), 0.0);
    }

    #[test]
    fn buckets_are_cumulative_and_bounds_belong_to_them() {
        let metrics = Metrics::new(1);
        for took_us in [100, 1_000, 1_001, 8_192_000, 8_192_001] {
            metrics.flushed(Duration::from_micros(took_us));
        }
        let text = page(&metrics);
        let bucket = |bound: &str| {
            value(&text, &format!("etcd_disk_wal_fsync_duration_seconds_bucket{{le=\"{bound}\"}}"))
        };
        assert_eq!(["0.001", "0.002", "4.096", "8.192", "+Inf"].map(bucket), [2.0, 3.0, 3.0, 4.0, 5.0]);
        assert_eq!(value(&text, "etcd_disk_wal_fsync_duration_seconds_count"), 5.0);
        let sum = value(&text, "etcd_disk_wal_fsync_duration_seconds_sum");
        assert!((sum - 16.386_102).abs() < 1e-9, "{sum}");
    }

    #[test]
    fn every_series_is_announced_with_its_type_before_its_values() {
        let text = page(&Metrics::new(1));
        let mut announced = String::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                announced = rest.split(' ').next().unwrap().to_owned();
            } else if !line.starts_with('#') {
                assert!(line.starts_with(&announced), "{line} under {announced}");
            }
        }
        assert!(value(&text, "process_resident_memory_bytes") > 0.0);
        assert!(value(&text, "process_start_time_seconds") > 1e9);
        assert!(value(&text, "process_open_fds") > 2.0);
    }
}
