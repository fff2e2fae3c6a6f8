//! Loads that are not cells of the table: memory after a load, one huge request beside small ones, the
//! time of a start, bytes written over a fixed number of puts, many versions per key.
//!
//! Each prints one line of figures per server and ends by itself. `--keys` makes them smaller.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{self, Answer, Load, Request, Shape, Span, Tally};
use crate::compare::fill;
use crate::measure;
use crate::report::{mebibytes, time};
use crate::server::{Bench, Product, Scratch, Server};
use crate::wire::Method;
use crate::workload::{Keys, Kind, Puts, Whole, Work};

#[derive(Debug, Clone)]
pub struct Plan {
    pub products: Vec<Product>,
    /// Keys, where `--keys` was given; every scenario has a number of its own otherwise.
    pub keys: Option<u64>,
    pub seconds: f64,
    pub quiet: Duration,
    pub inflight: usize,
}

impl Plan {
    fn keys(&self, bench: &Bench, usual: u64, value_bytes: usize) -> Keys {
        let each = (self.keys.unwrap_or(usual) / bench.shards).max(1);
        Keys { letters: bench.shards, each, value_bytes }
    }
}

/// Named figures in the order in which they are shown.
type Figures = Vec<(String, Value)>;

macro_rules! figures {
    ($($name:literal: $value:expr),* $(,)?) => {
        vec![$(($name.to_string(), json!($value))),*]
    };
}

type Scenario = fn(&Bench, &Plan, Product) -> Result<Figures, String>;

/// Name, what it shows, and the scenario itself.
pub const ALL: [(&str, &str, Scenario); 8] = [
    ("memory", "RssAnon with 1 million keys of 1 KiB, after the load and --quiet seconds", memory),
    (
        "delete-million",
        "puts elsewhere while 1 million keys over 5 shards are deleted in one request",
        delete_million,
    ),
    (
        "big-reader",
        "puts while one reader takes 1 million keys in one unary Range, again and again",
        big_reader,
    ),
    ("slow-reader", "puts while that reader takes 32 MiB/s only", slow_reader),
    (
        "start",
        "from exec to the first linearizable read with 5 million keys, page cache warm and cold",
        start,
    ),
    ("written", "bytes written per put over 100,000 keys at 1, 64 and 512 in flight", written),
    ("steady", "puts for a while (30 s and more take in checkpoints): p99 of the worst half second", steady),
    ("versions", "a range of keys with 300 uncompacted versions each, against one with one", versions),
];

pub fn run(bench: &Bench, plan: &Plan, name: &str, scenario: Scenario) -> Result<Value, String> {
    let mut results = json!({});
    for &product in &plan.products {
        eprintln!("{name}: {}", product.name());
        let result =
            scenario(bench, plan, product).map_err(|error| format!("{}: {error}", product.name()))?;
        println!("{name} {:<6} {}", product.name(), words(&result));
        results[product.name()] = Value::Object(result.into_iter().collect());
    }
    Ok(results)
}

/// `name value, name value`.
fn words(figures: &Figures) -> String {
    let words: Vec<String> = figures
        .iter()
        .map(|(name, value)| match value {
            Value::String(text) => format!("{name} {text}"),
            value => format!("{name} {value}"),
        })
        .collect();
    words.join(", ")
}

fn loaded(bench: &Bench, product: Product, keys: Keys, data: &Path) -> Result<(Server, Duration), String> {
    let server = Server::start(bench, product, data)?;
    let begun = Instant::now();
    fill(server.address, keys, 1)?;
    let took = begun.elapsed();
    eprintln!("  loaded {} keys in {}", keys.count(), time(took));
    Ok((server, took))
}

fn scratch(bench: &Bench) -> Result<Scratch, String> {
    Scratch::new(&bench.dir).map_err(|error| format!("{}: {error}", bench.dir.display()))
}

fn memory(bench: &Bench, plan: &Plan, product: Product) -> Result<Figures, String> {
    let keys = plan.keys(bench, 1_000_000, 1024);
    let scratch = scratch(bench)?;
    let (server, took) = loaded(bench, product, keys, &scratch.path().join("data"))?;
    let loaded = server.counters()?;
    std::thread::sleep(plan.quiet);
    let quiet = server.counters()?;
    Ok(figures! {
        "keys": keys.count(),
        "load": time(took),
        "after load": mebibytes(loaded.anonymous_bytes),
        "after quiet": mebibytes(quiet.anonymous_bytes),
        "quiet s": plan.quiet.as_secs(),
    })
}

/// The load of `puts` for a while.
fn puts_for(server: &Server, plan: &Plan, keys: Keys) -> Result<Tally, String> {
    let mut work = Work::new(Kind::Put, keys, plan.inflight, 7);
    let shape = Shape { connections: 8, inflight: plan.inflight, pace: None };
    let span = Span::Time { warm: Duration::from_millis(500), count: Duration::from_secs_f64(plan.seconds) };
    client::run(server.address, shape, span, &mut work, &mut |_| {}).map_err(|error| error.to_string())
}

/// A load that goes on until a flag is down.
struct While<'a, L> {
    load: L,
    going: &'a AtomicBool,
}

impl<L: Load> Load for While<'_, L> {
    fn next(&mut self, slot: usize, message: &mut Vec<u8>) -> Option<Request> {
        self.going.load(Ordering::Relaxed).then(|| self.load.next(slot, message)).flatten()
    }
    fn done(&mut self, slot: usize, answer: &Answer<'_>) {
        self.load.done(slot, answer);
    }
}

fn failures(tally: &Tally, what: &str) -> Result<(), String> {
    match &tally.failure_first {
        Some(failure) => Err(format!("{what}: {} calls failed, the first with: {failure}", tally.failed())),
        None => Ok(()),
    }
}

fn delete_million(bench: &Bench, plan: &Plan, product: Product) -> Result<Figures, String> {
    let bench = Bench { shards: 5, ..bench.clone() };
    let keys = plan.keys(&bench, 1_000_000, 256);
    let scratch = scratch(&bench)?;
    let (server, _) = loaded(&bench, product, keys, &scratch.path().join("data"))?;
    let elsewhere = || Elsewhere::new();
    let shape = Shape { connections: 8, inflight: plan.inflight, pace: None };
    let span = Span::Time { warm: Duration::from_millis(500), count: Duration::from_secs_f64(plan.seconds) };
    let alone = client::run(server.address, shape, span, &mut elsewhere(), &mut |_| {})
        .map_err(|error| error.to_string())?;
    failures(&alone, "puts before")?;
    let before = server.counters()?.anonymous_bytes;
    let going = AtomicBool::new(true);
    let (beside, deletion, most) = std::thread::scope(|scope| {
        let puts = scope.spawn(|| {
            let mut load = While { load: elsewhere(), going: &going };
            client::run(server.address, shape, Span::All, &mut load, &mut |_| {})
        });
        let memory = scope.spawn(|| {
            let mut most = before;
            while going.load(Ordering::Relaxed) {
                most = most.max(server.counters().map_or(0, |counters| counters.anonymous_bytes));
                std::thread::sleep(Duration::from_millis(20));
            }
            most
        });
        let mut whole = Whole { keys, method: Method::DeleteRange, left: 1, deleted: 0 };
        let one = Shape { connections: 1, inflight: 1, pace: None };
        let deletion = client::run(server.address, one, Span::All, &mut whole, &mut |_| {});
        going.store(false, Ordering::Relaxed);
        let join = "the thread only returns";
        (puts.join().expect(join), deletion.map(|tally| (tally, whole.deleted)), memory.join().expect(join))
    });
    let (deletion, deleted) = deletion.map_err(|error| format!("delete: {error}"))?;
    failures(&deletion, "delete")?;
    let beside = beside.map_err(|error| format!("puts beside: {error}"))?;
    failures(&beside, "puts beside")?;
    if deleted != keys.count() {
        return Err(format!("{deleted} keys deleted of {}", keys.count()));
    }
    Ok(figures! {
        "deleted": deleted,
        "in": time(deletion.elapsed),
        "put p99 alone": time(alone.percentile(0.99)),
        "put p99 meanwhile": time(beside.percentile(0.99)),
        "put max meanwhile": time(beside.percentile(1.0)),
        "puts meanwhile": beside.operations,
        "RssAnon grew": mebibytes(most - before),
    })
}

/// Puts before and behind the keys that are deleted.
struct Elsewhere {
    count: u64,
    value: Vec<u8>,
}

impl Elsewhere {
    fn new() -> Self {
        Self { count: 0, value: vec![0x61; 256] }
    }
}

impl Load for Elsewhere {
    fn next(&mut self, _slot: usize, out: &mut Vec<u8>) -> Option<Request> {
        self.count += 1;
        let side = if self.count.is_multiple_of(2) { "before" } else { "zbehind" };
        let key = format!("/{side}/{:022}", self.count / 2 % 10_000);
        crate::wire::message(out, |out| crate::wire::put(out, key.as_bytes(), &self.value));
        Some(Request { method: Method::Put, keep: false, answer_bytes_min: 0 })
    }
    fn done(&mut self, _slot: usize, _answer: &Answer<'_>) {}
}

fn big_reader(bench: &Bench, plan: &Plan, product: Product) -> Result<Figures, String> {
    beside_reader(bench, plan, product, None)
}

fn slow_reader(bench: &Bench, plan: &Plan, product: Product) -> Result<Figures, String> {
    beside_reader(bench, plan, product, Some(32 << 20))
}

fn beside_reader(bench: &Bench, plan: &Plan, product: Product, pace: Option<u64>) -> Result<Figures, String> {
    let keys = plan.keys(bench, 1_000_000, 256);
    let scratch = scratch(bench)?;
    let (server, _) = loaded(bench, product, keys, &scratch.path().join("data"))?;
    let alone = puts_for(&server, plan, keys)?;
    failures(&alone, "puts before")?;
    let before = server.counters()?.anonymous_bytes;
    let going = AtomicBool::new(true);
    let (beside, read) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let whole = Whole { keys, method: Method::Range, left: u64::MAX, deleted: 0 };
            let mut load = While { load: whole, going: &going };
            let one = Shape { connections: 1, inflight: 1, pace };
            client::run(server.address, one, Span::All, &mut load, &mut |_| {})
        });
        let beside = puts_for(&server, plan, keys);
        going.store(false, Ordering::Relaxed);
        (beside, reader.join().expect("the thread only returns"))
    });
    let beside = beside?;
    failures(&beside, "puts beside")?;
    let read = read.map_err(|error| format!("reader: {error}"))?;
    failures(&read, "reader")?;
    let ratio = beside.percentile(0.99).as_secs_f64() / alone.percentile(0.99).as_secs_f64();
    Ok(figures! {
        "keys": keys.count(),
        "put p99 alone": time(alone.percentile(0.99)),
        "put p99 beside": time(beside.percentile(0.99)),
        "ratio": format!("{ratio:.2}"),
        "puts/s alone": (alone.operations as f64 / alone.elapsed.as_secs_f64()).round(),
        "puts/s beside": (beside.operations as f64 / beside.elapsed.as_secs_f64()).round(),
        "reads": read.operations,
        "MiB/s read": (read.received_bytes as f64 / read.elapsed.as_secs_f64() / f64::from(1 << 20)).round(),
        "RssAnon grew": mebibytes(server.counters()?.anonymous_bytes.saturating_sub(before)),
    })
}

fn start(bench: &Bench, plan: &Plan, product: Product) -> Result<Figures, String> {
    let keys = plan.keys(bench, 5_000_000, 256);
    let scratch = scratch(bench)?;
    let data = scratch.path().join("data");
    let (server, took) = loaded(bench, product, keys, &data)?;
    server.stop()?;
    let warm = Server::start(bench, product, &data)?;
    let warm_after = warm.ready_after;
    warm.stop()?;
    let mut dropped = 0;
    forget(&data, &mut dropped).map_err(|error| format!("dropping the page cache: {error}"))?;
    let cold = Server::start(bench, product, &data)?;
    Ok(figures! {
        "keys": keys.count(),
        "load": time(took),
        "warm": time(warm_after),
        "cold": time(cold.ready_after),
        "data": mebibytes(dropped),
    })
}

/// Takes every file below `directory` out of the page cache and adds up their sizes.
fn forget(directory: &Path, bytes: &mut u64) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            forget(&entry.path(), bytes)?;
            continue;
        }
        let file = File::open(entry.path())?;
        // Only clean pages can be dropped.
        file.sync_all()?;
        *bytes += file.metadata()?.len();
        // SAFETY: a plain system call on a descriptor that is open.
        let result = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
    }
    Ok(())
}

fn written(bench: &Bench, plan: &Plan, product: Product) -> Result<Figures, String> {
    let keys = plan.keys(bench, 100_000, 256);
    let scratch = scratch(bench)?;
    let (server, _) = loaded(bench, product, keys, &scratch.path().join("data"))?;
    // Two log segments of 64 MiB and more per shard, so that recycled ones are in use.
    let rounds = (bench.shards * (160 << 20)).div_ceil(keys.count() * 300);
    if plan.keys.is_none() {
        fill(server.address, keys, rounds)?;
    }
    let mut result = figures! { "keys": keys.count() };
    for (inflight, puts) in [(1, 20_000), (64, 200_000), (512, 200_000)] {
        let puts = if plan.keys.is_some() { keys.count().min(puts) } else { puts };
        // What the earlier load left to be written is not this one's.
        std::thread::sleep(Duration::from_secs(2));
        let mut load = Puts::new(keys, inflight, puts, 11);
        let shape = Shape { connections: 8, inflight, pace: None };
        let begin = server.counters()?;
        let tally = client::run(server.address, shape, Span::All, &mut load, &mut |_| {})
            .map_err(|error| error.to_string())?;
        failures(&tally, "puts")?;
        // And what this one leaves is.
        std::thread::sleep(Duration::from_secs(2));
        let end = server.counters()?;
        let bytes = (end.written_bytes - begin.written_bytes) as f64 / tally.operations as f64;
        result.push((format!("bytes/put at {inflight}"), json!(bytes.round())));
    }
    Ok(result)
}

/// Notes when each answer came and how long it took.
struct Timed {
    work: Work,
    origin: Instant,
    started: Vec<Instant>,
    answers: Vec<(Duration, Duration)>,
}

impl Load for Timed {
    fn next(&mut self, slot: usize, message: &mut Vec<u8>) -> Option<Request> {
        let request = self.work.next(slot, message);
        self.started[slot] = Instant::now();
        request
    }
    fn done(&mut self, slot: usize, answer: &Answer<'_>) {
        let now = Instant::now();
        self.answers.push((now - self.origin, now - self.started[slot]));
        self.work.done(slot, answer);
    }
}

fn steady(bench: &Bench, plan: &Plan, product: Product) -> Result<Figures, String> {
    const WINDOW: Duration = Duration::from_millis(500);
    let keys = plan.keys(bench, 100_000, 256);
    let scratch = scratch(bench)?;
    let (server, _) = loaded(bench, product, keys, &scratch.path().join("data"))?;
    let now = Instant::now();
    let work = Work::new(Kind::Put, keys, plan.inflight, 13);
    let mut load = Timed { work, origin: now, started: vec![now; plan.inflight], answers: Vec::new() };
    let shape = Shape { connections: 8, inflight: plan.inflight, pace: None };
    let span = Span::Time { warm: WINDOW, count: Duration::from_secs_f64(plan.seconds.max(2.0)) };
    let tally = client::run(server.address, shape, span, &mut load, &mut |_| {})
        .map_err(|error| error.to_string())?;
    failures(&tally, "puts")?;
    let mut windows: Vec<Vec<Duration>> = Vec::new();
    for (at, latency) in load.answers {
        let window = (at.as_nanos() / WINDOW.as_nanos()) as usize;
        windows.resize(windows.len().max(window + 1), Vec::new());
        windows[window].push(latency);
    }
    // The first window warms up and the last one is cut short.
    windows.pop();
    let mut p99s: Vec<Duration> = windows
        .into_iter()
        .skip(1)
        .map(|mut window| {
            window.sort_unstable();
            // A window without any answer is as slow as it is long.
            window.get(window.len() * 99 / 100).copied().unwrap_or(WINDOW)
        })
        .collect();
    p99s.sort_unstable();
    let (middle, worst) = (p99s[p99s.len() / 2], p99s[p99s.len() - 1]);
    Ok(figures! {
        "puts/s": (tally.operations as f64 / tally.elapsed.as_secs_f64()).round(),
        "p99": time(tally.percentile(0.99)),
        "median p99 of half seconds": time(middle),
        "worst": time(worst),
        "ratio": format!("{:.2}", worst.as_secs_f64() / middle.as_secs_f64()),
    })
}

fn versions(bench: &Bench, plan: &Plan, product: Product) -> Result<Figures, String> {
    let keys = plan.keys(bench, 10_000 * bench.shards, 256);
    let scratch = scratch(bench)?;
    let (server, _) = loaded(bench, product, keys, &scratch.path().join("data"))?;
    let kind = Kind::Range { keys: 100, streamed: false };
    let range = |what: &str| {
        let shape = Shape { connections: 8, inflight: plan.inflight.min(64), pace: None };
        let span =
            Span::Time { warm: Duration::from_millis(300), count: Duration::from_secs_f64(plan.seconds) };
        let mut work = Work::new(kind, keys, shape.inflight, 3);
        let sample = measure::sample(&server, shape, span, &mut work)?;
        match sample.failure {
            Some(failure) => Err(format!("{what}: {failure}")),
            None => Ok(sample),
        }
    };
    let one = range("one version")?;
    fill(server.address, keys, 299)?;
    let many = range("300 versions")?;
    Ok(figures! {
        "keys": keys.count(),
        "ranges/s with one": one.rate.round(),
        "with 300": many.rate.round(),
        "p50 with one": time(one.p50),
        "p50 with 300": time(many.p50),
        "time ratio": format!("{:.2}", one.rate / many.rate),
    })
}
