//! Speed, measured: etcd and etcore under the same loads in one run.
//!
//! `client` is the load generator, `workload` what it says, `server` starts and watches a server,
//! `measure` is one cell, `compare` the table, `scenarios` the loads that are no cells, `report` the
//! output. It knows nothing of etcore's insides: both servers are programs with etcd's flags.

mod client;
mod compare;
mod hpack;
mod measure;
mod probe;
mod report;
mod scenarios;
mod server;
mod wire;
mod workload;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use crate::client::{Shape, Span};
use crate::server::{Bench, Product};
use crate::workload::{Keys, Kind, Work};

const HELP: &str = "\
Runs the same load against etcd and etcore in turn and prints the ratios.

  cargo run --release -p perf -- [compare] [options]   the table; perf/out/compare.json and .svg
  cargo run --release -p perf -- SCENARIO [options]    one of the scenarios below
  cargo run --release -p perf -- probe [options]       the device's flush time
  cargo run --release -p perf -- load [options]        one load on a server that runs already

Programs
  --etcd PATH        etcd (default: from PATH); .ci/etcd-tools DIR builds it
  --etcore PATH      etcore (default: target/release/etcore)
  --servers LIST     etcd,etcore (default), or one of them
  --flag FLAG        a further flag for etcore; may be given again
  --shards N         etcore's shards (default: 2)
  --dir DIR          where data directories are made (default: target)
  --out DIR          where results are written (default: perf/out)

compare
  --only PART        only cells whose name contains PART; may be given again
  --seconds S        measured time of each cell (default: 3; with --quick 1)
  --runs N           runs of everything, the table shows medians (default: 1)
  --quick            8 connections and keys spread over the shards only
  --keys N           keys in all (default: 100000)
  --value BYTES      size of a value (default: 256)

scenarios
  --keys N           a smaller number of keys
  --seconds S        measured time of the puts (default: 10)
  --inflight N       puts in flight (default: 64)
  --quiet S          seconds of quiet before memory is read (default: 60)

load
  --endpoint ADDR    address and port (default: 127.0.0.1:2379)
  --workload NAME    a load of the table (default: put)
  --inflight N, --connections N (default: 64, 8), --seconds S, --keys N, --value BYTES
  --fill             puts every key first
";

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The words of the command line.
#[derive(Default)]
struct Options {
    command: Option<String>,
    etcd: Option<PathBuf>,
    etcore: Option<PathBuf>,
    servers: Option<String>,
    flags: Vec<String>,
    shards: Option<u64>,
    dir: Option<PathBuf>,
    out: Option<PathBuf>,
    only: Vec<String>,
    seconds: Option<f64>,
    runs: Option<usize>,
    quick: bool,
    keys: Option<u64>,
    value: Option<usize>,
    inflight: Option<usize>,
    connections: Option<usize>,
    quiet: Option<f64>,
    endpoint: Option<SocketAddr>,
    workload: Option<String>,
    fill: bool,
}

impl Options {
    /// `None` asks for the help.
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        fn number<T: std::str::FromStr>(flag: &str, value: Option<String>) -> Result<Option<T>, String> {
            let value = value.ok_or_else(|| format!("{flag} needs a value"))?;
            value.parse().map(Some).map_err(|_| format!("{flag}: {value:?} is not what it takes"))
        }
        let mut options = Self::default();
        while let Some(word) = words.next() {
            let mut value = None;
            let flag = match word.split_once('=') {
                Some((flag, text)) => {
                    value = Some(text.to_owned());
                    flag
                }
                None => word.as_str(),
            };
            let mut value = || value.take().or_else(|| words.next());
            match flag {
                "--help" | "-h" => return Ok(None),
                "--quick" => options.quick = true,
                "--fill" => options.fill = true,
                "--etcd" => options.etcd = number(flag, value())?,
                "--etcore" => options.etcore = number(flag, value())?,
                "--servers" => options.servers = number(flag, value())?,
                "--flag" => options.flags.extend(number(flag, value())?),
                "--shards" => options.shards = number(flag, value())?,
                "--dir" => options.dir = number(flag, value())?,
                "--out" => options.out = number(flag, value())?,
                "--only" => options.only.extend(number(flag, value())?),
                "--seconds" => options.seconds = number(flag, value())?,
                "--runs" => options.runs = number(flag, value())?,
                "--keys" => options.keys = number(flag, value())?,
                "--value" => options.value = number(flag, value())?,
                "--inflight" => options.inflight = number(flag, value())?,
                "--connections" => options.connections = number(flag, value())?,
                "--quiet" => options.quiet = number(flag, value())?,
                "--endpoint" => options.endpoint = number(flag, value())?,
                "--workload" => options.workload = number(flag, value())?,
                _ if !flag.starts_with('-') && options.command.is_none() => options.command = Some(word),
                _ => return Err(format!("{word}: unknown; --help lists what there is")),
            }
        }
        for (flag, bad) in [
            ("--shards", options.shards.is_some_and(|shards| !(1..=20).contains(&shards))),
            ("--runs", options.runs == Some(0)),
            ("--inflight", options.inflight == Some(0)),
            ("--connections", options.connections == Some(0)),
            ("--keys", options.keys == Some(0)),
            ("--seconds", options.seconds.is_some_and(|seconds| !(0.1..=3600.0).contains(&seconds))),
            ("--quiet", options.quiet.is_some_and(|quiet| !(0.0..=3600.0).contains(&quiet))),
        ] {
            if bad {
                return Err(format!("{flag}: out of its bounds"));
            }
        }
        Ok(Some(options))
    }

    fn products(&self) -> Result<Vec<Product>, String> {
        self.servers
            .as_deref()
            .unwrap_or("etcd,etcore")
            .split(',')
            .map(|name| match name {
                "etcd" => Ok(Product::Etcd),
                "etcore" => Ok(Product::Etcore),
                _ => Err(format!("--servers: {name:?} is neither etcd nor etcore")),
            })
            .collect()
    }

    fn bench(&self) -> Result<Bench, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("perf stands in the workspace");
        let bench = Bench {
            etcd: self.etcd.clone().unwrap_or_else(|| "etcd".into()),
            etcore: self.etcore.clone().unwrap_or_else(|| root.join("target/release/etcore")),
            dir: self.dir.clone().unwrap_or_else(|| root.join("target")),
            shards: self.shards.unwrap_or(2),
            flags: self.flags.clone(),
        };
        std::fs::create_dir_all(&bench.dir).map_err(|error| format!("{}: {error}", bench.dir.display()))?;
        Ok(bench)
    }

    fn out(&self) -> PathBuf {
        self.out.clone().unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("out"))
    }
}

/// True if nothing is to be complained of.
fn run() -> Result<bool, String> {
    let Some(options) = Options::parse(std::env::args().skip(1))? else {
        println!("{HELP}");
        println!("loads      {}", Kind::ALL.map(|(name, _)| name).join(" "));
        for (name, what, _) in scenarios::ALL {
            println!("{name:<15} {what}");
        }
        return Ok(true);
    };
    match options.command.as_deref().unwrap_or("compare") {
        "compare" => compare(&options),
        "probe" => probe(&options),
        "load" => load(&options),
        name => {
            let scenario = scenarios::ALL.into_iter().find(|(at, ..)| *at == name);
            let (name, _, scenario) =
                scenario.ok_or_else(|| format!("{name}: unknown; --help lists what there is"))?;
            let plan = scenarios::Plan {
                products: options.products()?,
                keys: options.keys,
                seconds: options.seconds.unwrap_or(10.0),
                quiet: Duration::from_secs_f64(options.quiet.unwrap_or(60.0)),
                inflight: options.inflight.unwrap_or(64),
            };
            let result = scenarios::run(&options.bench()?, &plan, name, scenario)?;
            let out = options.out();
            let path = out.join(format!("{name}.json"));
            std::fs::create_dir_all(&out)
                .and_then(|()| std::fs::write(&path, format!("{result:#}\n")))
                .map_err(|error| format!("{}: {error}", path.display()))?;
            Ok(true)
        }
    }
}

fn compare(options: &Options) -> Result<bool, String> {
    let plan = compare::Plan {
        products: options.products()?,
        only: options.only.clone(),
        seconds: options.seconds.unwrap_or(if options.quick { 1.0 } else { 3.0 }),
        runs: options.runs.unwrap_or(1),
        quick: options.quick,
        keys: options.keys.unwrap_or(100_000),
        value_bytes: options.value.unwrap_or(256),
    };
    let bench = options.bench()?;
    if plan.keys / bench.shards < 10_000 {
        return Err("--keys: ranges of 10,000 keys need as many in each shard".into());
    }
    let outcome = compare::run(&bench, &plan)?;
    print!("{}", report::table(&outcome));
    let out = options.out();
    report::write(&outcome, &out).map_err(|error| format!("{}: {error}", out.display()))?;
    println!("written: {}", out.join("compare.{json,svg}").display());
    for aim in report::aims_missed(&outcome) {
        println!("missed: {aim}");
    }
    for complaint in &outcome.complaints {
        println!("! {complaint}");
    }
    Ok(outcome.complaints.is_empty())
}

fn probe(options: &Options) -> Result<bool, String> {
    let bench = options.bench()?;
    let failed = |error| format!("{}: {error}", bench.dir.display());
    let quiet = probe::flush(&bench.dir, 5_000).map_err(failed)?;
    let loaded = probe::flush_under_load(&bench.dir, 1_000).map_err(failed)?;
    for (flush, what) in [(quiet, "alone"), (loaded, "with every processor busy")] {
        let direct = if flush.direct { "O_DIRECT" } else { "through the page cache (no O_DIRECT here)" };
        let (p50, p99) = (report::time(flush.p50), report::time(flush.p99));
        println!("4 KiB and fdatasync, {direct}, {what}: p50 {p50}, p99 {p99}");
    }
    Ok(true)
}

fn load(options: &Options) -> Result<bool, String> {
    let address = options.endpoint.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 2379)));
    let name = options.workload.as_deref().unwrap_or("put");
    let kind = Kind::named(name).ok_or_else(|| format!("--workload: no load is called {name:?}"))?;
    let shards = options.shards.unwrap_or(2);
    let keys = Keys {
        letters: shards,
        each: (options.keys.unwrap_or(100_000) / shards).max(1),
        value_bytes: options.value.unwrap_or(256),
    };
    if let Kind::Range { keys: size, .. } = kind
        && !keys.each.is_multiple_of(size)
    {
        return Err(format!("--keys: {name} needs a multiple of {size} in each shard"));
    }
    let inflight = options.inflight.unwrap_or(64);
    let shape = Shape { connections: options.connections.unwrap_or(8), inflight, pace: None };
    if options.fill {
        compare::fill(address, keys, 1)?;
    }
    let count = Duration::from_secs_f64(options.seconds.unwrap_or(10.0));
    let span = Span::Time { warm: Duration::from_millis(500), count };
    let mut work = Work::new(kind, keys, inflight, 1);
    let tally =
        client::run(address, shape, span, &mut work, &mut |_| {}).map_err(|error| error.to_string())?;
    println!(
        "{name}: {:.0}/s, p50 {}, p99 {}, p99.9 {}, client {:.1} CPU-seconds per million, {} failed{}",
        tally.operations as f64 / tally.elapsed.as_secs_f64(),
        report::time(tally.percentile(0.5)),
        report::time(tally.percentile(0.99)),
        report::time(tally.percentile(0.999)),
        tally.client_cpu.as_secs_f64() * 1e6 / tally.operations.max(1) as f64,
        tally.failed(),
        tally.failure_first.map_or_else(String::new, |failure| format!(", the first with: {failure}")),
    );
    Ok(tally.failures.is_empty())
}
