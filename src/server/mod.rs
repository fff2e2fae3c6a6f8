//! Boot and shutdown: from a configuration to a node that serves, and from a signal to a clean end.
//!
//! Order of the start: what the system allows, the data directory (nothing in it is touched before it is known to
//! be ours), the meta group, the shards, the executors, the takeover, and only then the port. Order of the end:
//! no new connections, requests under way, checkpoints, the signal.

mod data_dir;
mod ids;
pub mod logging;
pub mod signals;

use crate::api::transport::deal::{Acceptor, Arrivals, Dealer, bind};
use crate::api::transport::{Handler, Inbound, Server, Settings};
use crate::api::{self, Limits, Services, http};
use crate::config::{self, Config, LogFormat};
use crate::env::real::{self, RealDisk};
use crate::metrics::Metrics;
use crate::model::limits::LOG_SEGMENT_BYTES;
use crate::model::{Answer, Fault, Request, ShardId};
use crate::raft::Birth;
use crate::router::RangeMap;
use crate::runtime::node::{self, Parts, Watch};
use crate::runtime::worker::{self, Turns};
use crate::runtime::{Control, Core, Home, Identity, Pace, executor};
use crate::{btree, wal};
use futures::channel::oneshot;
use futures::future::LocalBoxFuture;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long requests under way may take to end when the node stops.
const DRAIN_TIME: Duration = Duration::from_secs(3);

/// Runs the server until a signal ends it; returns that signal.
pub fn run(config: &Config) -> Result<i32, Fault> {
    let signals = signals::Signals::block();
    executor::log_panics();
    if let Err(error) = executor::raise_open_files() {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    executor::require_io_uring()?;
    let cpus = cpus(config)?;
    let dir = data_dir::claim(config)?;
    let home = home(config, &dir, cpus.len())?;
    let mut control = home.open_control(cpus.len())?;
    home.run_alone(&mut control, Control::is_ready_to_reign)?;
    let (birth, map) = birth(config, &control, cpus.len())?;
    let units = open_shards(&home, &map, control.birth().is_some(), cpus.len())?;
    control.reign_or_be_born(|| birth.clone())?;
    home.run_alone(&mut control, Control::is_elected)?;
    control.take_over()?;
    // Bound before anything is served, so that a port in use is known at once; listened to afterwards.
    let listeners =
        config.listen_client.iter().map(|listen| bind(listen.address)).collect::<Result<Vec<_>, _>>()?;

    let identity = Arc::new(identity(config, &birth));
    let watch: Arc<dyn Watch> = Arc::new(EndProcess { format: config.log_format });
    let (parts, mail) = Parts::start(cpus.len(), map.shards(), watch.clone())?;
    let parts = Arc::new(parts);
    let (dealer, arrivals) = Dealer::new(cpus.len());
    let stop = Arc::new(AtomicBool::new(false));
    let (drained, all_drained) = std::sync::mpsc::channel::<()>();
    let mut releases = Vec::new();
    let mut mains = Vec::new();
    for (((me, units), mail), arrivals) in (0..).zip(units).zip(mail.cores).zip(arrivals) {
        let core = Core::new(me, cpus.len(), identity.clone(), home.pace, units);
        let (release, released) = oneshot::channel::<()>();
        releases.push(release);
        let (config, drained, member_id) = (config.clone(), drained.clone(), identity.member_id);
        let metrics = parts.metrics().clone();
        let serve = move || -> LocalBoxFuture<'static, ()> {
            Box::pin(async move {
                serve(&config, member_id, metrics, arrivals).await;
                drop(drained);
                // The machine goes on until its data is where it belongs.
                let _ = released.await;
            })
        };
        mains.push(parts.core_main(core, mail, serve));
    }
    drop(drained);
    let report = watch.clone();
    let cores = executor::Cores::start(&cpus, &executor::Options::default(), mains, move |_, ended| {
        if let Err(fault) = ended {
            report.fault(Fault::Broken(fault.to_string()));
        }
    })?;

    parts.metrics().set_pokes(cores.pokes());
    let (serving, served) = std::sync::mpsc::channel();
    let control_thread = {
        let (parts, stop) = (parts.clone(), stop.clone());
        std::thread::Builder::new()
            .name("control".into())
            .spawn(move || {
                worker::take_turns(Turns::CORE);
                let serving = || {
                    // The starter waits for this and for nothing else.
                    let _ = serving.send(());
                };
                parts.run_control(control, mail.control, serving, || stop.load(Ordering::Relaxed));
            })
            .map_err(|source| Fault::io("thread control", "start", source))?
    };
    served.recv().map_err(|_| Fault::Broken("control ended before the node served".into()))?;
    let acceptors: Vec<Acceptor> =
        listeners.into_iter().map(|listener| dealer.listen(listener)).collect::<Result<_, _>>()?;
    for listen in &config.listen_client {
        tracing::info!(traffic = "grpc+http", address = listen.url, "serving client traffic insecurely");
    }
    tracing::info!(shards = map.shards(), executors = cpus.len(), "ready to serve client requests");

    let signal = signals.wait();
    tracing::info!(signal, "received signal; shutting down");
    drop(acceptors);
    drop(dealer);
    // Ends when every core has dropped its end.
    let _ = all_drained.recv();
    stop.store(true, Ordering::Relaxed);
    let _ = control_thread.join();
    drop(releases);
    cores.join()?;
    parts.join();
    tracing::info!("stopped");
    Ok(signal)
}

/// The CPUs to use, one per executor.
fn cpus(config: &Config) -> Result<Vec<usize>, Fault> {
    let mut cpus = executor::cpus_allowed()?;
    if let Some(executors) = config.executors {
        if executors as usize > cpus.len() {
            return Err(Fault::Refused(format!(
                "--executors={executors}, but the process may run on {} CPUs: lower it or widen the affinity mask",
                cpus.len()
            )));
        }
        cpus.truncate(executors as usize);
    }
    Ok(cpus)
}

fn home(config: &Config, dir: &data_dir::DataDir, cores: usize) -> Result<Home, Fault> {
    let options = real::Options {
        fsync: !config.unsafe_no_fsync,
        flush: data_dir::flush_method(config, dir)?,
        ..real::Options::default()
    };
    let dirty_bytes = match config.dirty_bytes {
        Some(bytes) => bytes as usize,
        None => memory_bytes() / 8,
    };
    // A segment must be able to hold the largest record: a batch of the largest requests.
    let segment_bytes = LOG_SEGMENT_BYTES.max((config.max_request_bytes as u64 * 4).next_power_of_two());
    Ok(Home {
        disk: Arc::new(RealDisk::new(options)),
        dir: config.data_dir.clone(),
        tree: btree::Options::default(),
        log: wal::Options { segment_bytes },
        pace: Pace { dirty_bytes: dirty_bytes / 2 / cores.max(1), ..Pace::default() },
    })
}

/// The machine's memory, or what the control group leaves of it.
fn memory_bytes() -> usize {
    // SAFETY: sysconf has no preconditions.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGE_SIZE)) };
    let machine = (pages.max(0) as usize).saturating_mul(page.max(0) as usize);
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    group.and_then(|text| text.trim().parse().ok()).unwrap_or(machine).min(machine)
}

/// What the store is born with or was; flags that differ from it are refused (the data directory decides).
fn birth(config: &Config, control: &Control, cores: usize) -> Result<(Birth, RangeMap), Fault> {
    if let Some(birth) = control.birth() {
        let map = RangeMap::from_bytes(birth.range_map.clone())
            .ok_or_else(|| Fault::Broken("the store's range map cannot be read".into()))?;
        if let Some(shards) = config.shards.filter(|shards| *shards as usize != map.shards()) {
            return Err(Fault::Refused(format!(
                "--shards={shards}, but {} was made with {} shards; the number is fixed when the data directory is \
                 made: leave the flag away or give {}",
                config.data_dir.display(),
                map.shards(),
                map.shards()
            )));
        }
        if let Some(splits) = &config.shard_splits
            && RangeMap::from_splits(splits).map_err(Fault::Refused)?.to_bytes() != birth.range_map
        {
            return Err(Fault::Refused(format!(
                "--shard-splits differs from the range map of {}, which decides: leave the flag away",
                config.data_dir.display()
            )));
        }
        return Ok((birth.clone(), map));
    }
    config.check_bootstrap().map_err(Fault::Refused)?;
    let map = match &config.shard_splits {
        Some(splits) => RangeMap::from_splits(splits).map_err(Fault::Refused)?,
        None => RangeMap::default_for(config.shards.map_or(cores, usize::from)),
    };
    let member_id = ids::member(&config.initial_advertise_peer_urls, &config.initial_cluster_token);
    let birth = Birth {
        cluster_id: ids::cluster(&[member_id]),
        member_id,
        name: config.name.clone(),
        peer_urls: config.initial_advertise_peer_urls.clone(),
        client_urls: config.advertise_client_urls.clone(),
        range_map: map.to_bytes(),
    };
    Ok((birth, map))
}

/// What this node says of itself; name and client URLs are those it was started with.
fn identity(config: &Config, birth: &Birth) -> Identity {
    Identity {
        cluster_id: birth.cluster_id,
        member_id: birth.member_id,
        name: config.name.clone(),
        peer_urls: birth.peer_urls.clone(),
        client_urls: config.advertise_client_urls.clone(),
        quota_bytes: config.quota_backend_bytes,
        version: config::version::SERVER,
    }
}

type Units = Vec<(crate::shard::Shard, crate::group::Group)>;

/// Opens all shards, each on a thread of its own: each replays its log. Returns them by core.
fn open_shards(home: &Home, map: &RangeMap, born: bool, cores: usize) -> Result<Vec<Units>, Fault> {
    let shards = 1..=map.shards() as ShardId;
    let opened = std::thread::scope(|scope| {
        let threads: Vec<_> =
            shards.clone().map(|shard| scope.spawn(move || home.open_shard(shard, born))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| Err(executor::fault_of("a shard", panic))))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let mut units: Vec<Units> = (0..cores).map(|_| Vec::new()).collect();
    for (shard, unit) in shards.zip(opened) {
        let (revision, entries_to_replay) = (unit.0.store().applied().revision, unit.1.undelivered());
        tracing::info!(shard, revision, entries_to_replay, "opened a shard");
        units[Core::home_of(shard, cores) as usize].push(unit);
    }
    Ok(units)
}

/// The store as the services see it: the core of the calling thread.
#[derive(Clone, Copy, Debug)]
struct Here;

impl api::Node for Here {
    fn call(&self, request: Request) -> impl Future<Output = Answer> + Send {
        node::ask(request)
    }
}

/// Serves the connections of one core until no more come and those that were have ended.
async fn serve(config: &Config, member_id: u64, metrics: Arc<Metrics>, arrivals: Arrivals) {
    let limits =
        Limits { max_request_bytes: config.max_request_bytes, max_txn_ops: config.max_txn_ops, member_id };
    let settings = Settings { streams_max: config.max_concurrent_streams, ..Settings::default() };
    let services = Services::new(Here, limits);
    let grpc: Handler = Rc::new(move |request: ::http::Request<Inbound>| {
        let mut services = services.clone();
        Box::pin(async move { services.call(request).await })
    });
    let plain: Handler = Rc::new(move |request: ::http::Request<Inbound>| {
        let metrics = metrics.clone();
        Box::pin(async move {
            let answer = http::answer(&Here, &metrics, request.method(), request.uri().path()).await;
            answer.map(|body| tonic::body::Body::new(http_body_util::Full::new(body)))
        })
    });
    let server = Server::new(settings, grpc, plain);
    server.clone().run(arrivals).await;
    server.drain(DRAIN_TIME).await;
}

/// A fault ends the process at once: whatever was acknowledged is in the logs.
struct EndProcess {
    format: LogFormat,
}

impl Watch for EndProcess {
    fn fault(&self, fault: Fault) -> ! {
        logging::fatal(self.format, "the node cannot go on", &[("error", fault.to_string())]);
        std::process::exit(1)
    }
}
