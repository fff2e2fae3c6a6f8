//! One cell of the comparison: a load on a running server, with the server's counters at both ends.

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{self, Edge, Load, Shape, Span, Tally};
use crate::server::{Counters, Server};

/// What one run of one cell showed.
#[derive(Debug, Clone)]
pub struct Sample {
    pub operations: u64,
    pub failed: u64,
    pub failure: Option<String>,
    pub rate: f64,
    pub p50: Duration,
    pub p99: Duration,
    pub p999: Duration,
    /// CPU-seconds per million operations.
    pub server_cpu: f64,
    pub client_cpu: f64,
    pub anonymous_bytes: u64,
    /// Bytes written to the device's file system per operation.
    pub written: f64,
    pub flushes: Option<f64>,
    pub received: f64,
}

/// Runs `load`; the server's counters are read at the beginning and at the end of what is counted.
pub fn sample(server: &Server, shape: Shape, span: Span, load: &mut dyn Load) -> Result<Sample, String> {
    let mut counters = Vec::with_capacity(2);
    let tally = client::run(server.address, shape, span, load, &mut |edge| {
        // The server's own page of metrics costs it time, which is kept out of the measured span.
        let before = (edge == Edge::Begin).then(|| server.flushes()).flatten();
        counters.push(server.counters().map(|counters| Counters {
            flushes: before.or_else(|| (edge == Edge::End).then(|| server.flushes()).flatten()),
            ..counters
        }));
    })
    .map_err(|error| error.to_string())?;
    let mut counters = counters.into_iter();
    match (counters.next(), counters.next()) {
        (Some(begin), Some(end)) => Ok(evaluate(&tally, begin?, end?)),
        _ => Err("the load ended before it was counted".into()),
    }
}

fn evaluate(tally: &Tally, begin: Counters, end: Counters) -> Sample {
    let operations = tally.operations.max(1) as f64;
    let per_million = |cpu: Duration| cpu.as_secs_f64() * 1e6 / operations;
    Sample {
        operations: tally.operations,
        failed: tally.failed(),
        failure: tally.failure_first.clone(),
        rate: tally.operations as f64 / tally.elapsed.as_secs_f64(),
        p50: tally.percentile(0.5),
        p99: tally.percentile(0.99),
        p999: tally.percentile(0.999),
        server_cpu: per_million(end.cpu.saturating_sub(begin.cpu)),
        client_cpu: per_million(tally.client_cpu),
        anonymous_bytes: end.anonymous_bytes,
        written: (end.written_bytes - begin.written_bytes) as f64 / operations,
        flushes: end.flushes.zip(begin.flushes).map(|(end, begin)| (end - begin) as f64 / operations),
        received: tally.received_bytes as f64 / operations,
    }
}

/// Each figure's median over the runs.
pub fn median(runs: &[Sample]) -> Sample {
    fn middle<T: Copy + PartialOrd>(runs: &[Sample], figure: impl Fn(&Sample) -> T) -> T {
        let mut figures: Vec<T> = runs.iter().map(figure).collect();
        figures.sort_by(|a, b| a.partial_cmp(b).expect("no figure is NaN"));
        figures[figures.len() / 2]
    }
    let flushes: Option<Vec<f64>> = runs.iter().map(|run| run.flushes).collect();
    Sample {
        operations: middle(runs, |run| run.operations),
        failed: runs.iter().map(|run| run.failed).sum(),
        failure: runs.iter().find_map(|run| run.failure.clone()),
        rate: middle(runs, |run| run.rate),
        p50: middle(runs, |run| run.p50),
        p99: middle(runs, |run| run.p99),
        p999: middle(runs, |run| run.p999),
        server_cpu: middle(runs, |run| run.server_cpu),
        client_cpu: middle(runs, |run| run.client_cpu),
        anonymous_bytes: middle(runs, |run| run.anonymous_bytes),
        written: middle(runs, |run| run.written),
        flushes: flushes.map(|_| middle(runs, |run| run.flushes.unwrap_or(0.0))),
        received: middle(runs, |run| run.received),
    }
}

impl Sample {
    pub fn json(&self) -> Value {
        json!({
            "operations": self.operations,
            "failed": self.failed,
            "failure": self.failure,
            "operations_per_second": self.rate,
            "p50_us": self.p50.as_secs_f64() * 1e6,
            "p99_us": self.p99.as_secs_f64() * 1e6,
            "p999_us": self.p999.as_secs_f64() * 1e6,
            "server_cpu_seconds_per_million": self.server_cpu,
            "client_cpu_seconds_per_million": self.client_cpu,
            "server_anonymous_bytes": self.anonymous_bytes,
            "written_bytes_per_operation": self.written,
            "flushes_per_operation": self.flushes,
            "received_bytes_per_operation": self.received,
        })
    }
}
