//! The comparison: every load, on both servers in turn, as a table of figures and ratios.
//!
//! A group of cells (one load over one set of keys) has a server of its own with fresh data, so that no
//! cell inherits what other loads left behind; etcd and etcore take turns group by group, so that a
//! machine that changes its speed changes it for both.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::client::{self, Shape, Span};
use crate::measure::{self, Sample};
use crate::probe::{self, Flush};
use crate::report;
use crate::server::{Bench, Product, Scratch, Server};
use crate::workload::{Fill, Keys, Kind, Work};

#[derive(Debug, Clone)]
pub struct Plan {
    pub products: Vec<Product>,
    /// Substrings of cell names; empty for all.
    pub only: Vec<String>,
    pub seconds: f64,
    pub runs: usize,
    pub quick: bool,
    pub keys: u64,
    pub value_bytes: usize,
}

/// One line of the table.
#[derive(Debug, Clone)]
pub struct Cell {
    pub load: &'static str,
    kind: Kind,
    /// Keys over all shards, or in the first one only.
    spread: bool,
    inflight: usize,
    connections: usize,
    /// The runs on each product of the plan, in the plan's order.
    pub runs: Vec<Vec<Sample>>,
}

impl Cell {
    pub fn name(&self) -> String {
        let keys = if self.spread { "spread" } else { "one-shard" };
        format!("{}/{keys}/{}/{}c", self.load, self.inflight, self.connections)
    }

    /// What etcore is to reach here against etcd.
    pub fn aim(&self) -> Aim {
        let crowd = self.inflight >= 64;
        let (rate, p99, cpu) = match self.kind {
            Kind::Put | Kind::ReadLinearizable | Kind::ReadSerializable | Kind::Mixed | Kind::Guarded
                if crowd && self.connections == 1 =>
            {
                (Some(2.0), None, None)
            }
            Kind::Put if crowd && self.spread => {
                (Some(if self.inflight == 512 { 4.0 } else { 3.0 }), Some(0.25), Some(0.25))
            }
            Kind::Put if crowd => (Some(2.5), None, None),
            Kind::ReadLinearizable | Kind::ReadSerializable if crowd => (Some(4.0), None, Some(0.25)),
            Kind::Mixed | Kind::Guarded if crowd => (Some(3.0), None, None),
            Kind::Range { keys: 10_000, .. } => (Some(3.0), None, None),
            _ => (None, None, None),
        };
        let alone = self.inflight == 1 && !matches!(self.kind, Kind::Range { .. });
        Aim { rate_min: rate, p50_max: alone.then_some(1.0), p99_max: p99, cpu_max: cpu }
    }

    /// The median on the product at this place, if every run of it went through.
    pub fn median(&self, product: usize) -> Option<Sample> {
        (!self.runs[product].is_empty()).then(|| measure::median(&self.runs[product]))
    }
}

/// Bounds of the ratios.
pub struct Aim {
    pub rate_min: Option<f64>,
    pub p50_max: Option<f64>,
    pub p99_max: Option<f64>,
    pub cpu_max: Option<f64>,
}

/// What a whole comparison found.
pub struct Outcome {
    pub products: Vec<Product>,
    pub cells: Vec<Cell>,
    pub flush: Flush,
    /// Sentences about what did not go as it should.
    pub complaints: Vec<String>,
}

fn cells(plan: &Plan) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (load, kind) in Kind::ALL {
        for spread in [true, false] {
            let inflights: &[usize] = match kind {
                // 512 answers of 3 MB at once would measure the memory of the client.
                Kind::Range { keys, .. } if keys >= 10_000 => &[1, 8],
                _ => &[1, 64, 512],
            };
            for &inflight in inflights {
                // One call uses one connection, whatever it has.
                let connections: &[usize] = if inflight == 1 { &[1] } else { &[1, 8] };
                for &connections in connections {
                    if plan.quick && (!spread || connections == 1 && inflight > 1) {
                        continue;
                    }
                    let runs = vec![Vec::new(); plan.products.len()];
                    let cell = Cell { load, kind, spread, inflight, connections, runs };
                    let name = cell.name();
                    if plan.only.is_empty() || plan.only.iter().any(|part| name.contains(part.as_str())) {
                        cells.push(cell);
                    }
                }
            }
        }
    }
    cells
}

pub fn run(bench: &Bench, plan: &Plan) -> Result<Outcome, String> {
    let mut cells = cells(plan);
    if cells.is_empty() {
        return Err("no cell has such a name; without --only the table shows them all".into());
    }
    let device =
        || probe::flush(&bench.dir, 500).map_err(|error| format!("{}: {error}", bench.dir.display()));
    let mut flush = device()?;
    let mut complaints = Vec::new();
    let begun = Instant::now();
    let total = cells.len() * plan.products.len() * plan.runs;
    let mut done = 0;
    for run in 0..plan.runs {
        let mut from = 0;
        while from < cells.len() {
            let (load, spread) = (cells[from].load, cells[from].spread);
            let to = from
                + cells[from..].iter().take_while(|cell| (cell.load, cell.spread) == (load, spread)).count();
            for (place, &product) in plan.products.iter().enumerate() {
                if cells[from].kind == Kind::Put {
                    // The device at its best, near the puts that are compared with it.
                    let again = device()?;
                    flush = if again.p50 < flush.p50 { again } else { flush };
                }
                let seed = (run * cells.len() + from) as u64 + 1;
                let outcome = group(bench, plan, product, &cells[from..to], seed, &mut |cell, sample| {
                    done += 1;
                    let name = &cells[from + cell].name();
                    report::progress(done, total, begun.elapsed(), product, name, sample);
                });
                match outcome {
                    Ok(samples) => {
                        for (cell, sample) in cells[from..to].iter_mut().zip(samples) {
                            cell.runs[place].push(sample);
                        }
                    }
                    Err(error) => {
                        done = run * (total / plan.runs)
                            + (from * plan.products.len())
                            + (to - from) * (place + 1);
                        complaints.push(format!("{} {}: {error}", product.name(), cells[from].name()));
                        eprintln!("{}", complaints[complaints.len() - 1]);
                    }
                }
            }
            from = to;
        }
    }
    judge(plan, &cells, &flush, &mut complaints);
    Ok(Outcome { products: plan.products.clone(), cells, flush, complaints })
}

/// One server, its data, and every cell of the group in turn.
fn group(
    bench: &Bench,
    plan: &Plan,
    product: Product,
    cells: &[Cell],
    seed: u64,
    progress: &mut dyn FnMut(usize, &Sample),
) -> Result<Vec<Sample>, String> {
    let letters = if cells[0].spread { bench.shards } else { 1 };
    let keys =
        Keys { letters, each: plan.keys / bench.shards / 10_000 * 10_000, value_bytes: plan.value_bytes };
    let scratch = Scratch::new(&bench.dir).map_err(|error| error.to_string())?;
    let server = Server::start(bench, product, &scratch.path().join("data"))?;
    fill(server.address, keys, 1)?;
    let mut samples = Vec::new();
    for (at, cell) in cells.iter().enumerate() {
        let mut work = Work::new(cell.kind, keys, cell.inflight, seed + at as u64);
        let shape = Shape { connections: cell.connections, inflight: cell.inflight, pace: None };
        if cell.kind == Kind::Guarded {
            // Kubernetes has read an object before it updates it.
            let shape = Shape { connections: 4, inflight: cell.inflight.min(64), pace: None };
            let tally = client::run(server.address, shape, Span::All, &mut work.learning(), &mut |_| {});
            tally.map_err(|error| format!("while reading revisions: {error}"))?;
        }
        let count = Duration::from_secs_f64(plan.seconds);
        let warm = Duration::from_secs_f64((plan.seconds / 4.0).clamp(0.3, 2.0));
        let sample = measure::sample(&server, shape, Span::Time { warm, count }, &mut work)?;
        if sample.operations == 0 {
            return Err(format!("{}: no answer within {:.1} s", cell.name(), plan.seconds));
        }
        progress(at, &sample);
        samples.push(sample);
    }
    Ok(samples)
}

/// Puts every key of the population so many times.
pub fn fill(address: SocketAddr, keys: Keys, rounds: u64) -> Result<(), String> {
    let shape = Shape { connections: 4, inflight: 16, pace: None };
    let tally = client::run(address, shape, Span::All, &mut Fill::new(keys, rounds), &mut |_| {})
        .map_err(|error| format!("while loading: {error}"))?;
    match tally.failure_first {
        Some(failure) => Err(format!("while loading: {failure}")),
        None => Ok(()),
    }
}

/// What must hold whatever the speeds are. A server that answers puts faster than the device flushes, or
/// flushes less often than it answers one client's puts, is not fast but unsafe.
fn judge(plan: &Plan, cells: &[Cell], flush: &Flush, complaints: &mut Vec<String>) {
    for (place, product) in plan.products.iter().enumerate() {
        for cell in cells {
            let Some(sample) = cell.median(place) else { continue };
            let name = format!("{} {}", product.name(), cell.name());
            if sample.failed > 0 {
                let failure = sample.failure.as_deref().unwrap_or_default();
                complaints.push(format!("{name}: {} calls failed, the first with: {failure}", sample.failed));
            }
            if cell.kind != Kind::Put || cell.inflight != 1 || *product != Product::Etcore {
                continue;
            }
            if sample.p50 < flush.p50 {
                let (put, device) = (report::time(sample.p50), report::time(flush.p50));
                complaints.push(format!("{name}: p50 {put} is below the device's flush of {device}"));
            }
            // A put at either edge of the span may have its flush on the other side.
            let edges = 2.0 / sample.operations as f64;
            match sample.flushes {
                Some(flushes) if (1.0 - edges..=1.05 + edges).contains(&flushes) => {}
                Some(flushes) => {
                    complaints.push(format!("{name}: {flushes:.3} flushes per put, not 1.00 to 1.05"));
                }
                None => complaints.push(format!("{name}: the server does not count its flushes")),
            }
        }
    }
}
