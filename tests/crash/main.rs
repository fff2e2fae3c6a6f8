//! `kill -9` under load, again and again: nothing that was acknowledged is lost, nothing is half there.
//!
//! Three shards whose boundaries lie among the keys. Several connections put, delete ranges, run transactions over
//! all shards, and read; each remembers what it was answered. At a random moment the process is killed: under
//! load, while it starts, or while it ends after SIGTERM. After each restart the answers are put in the order of
//! their revisions and asked of the plain model of the history test, which must answer the same to the last
//! field. A revision that nobody was told about must be the effect of exactly one request that was under way. Then
//! state, HashKV and revision must be the model's: no revision is missing, none went backwards, a transaction is
//! there as a whole or not at all.
//!
//! Knows nothing of flushes: a killed process leaves its page cache behind. Lost writes are the simulator's part.
//!
//! `CRASH_ROUNDS=200 cargo test --test crash` runs longer; `CRASH_SEED` draws other requests and moments.

#[path = "../history/client.rs"]
mod client;
#[allow(dead_code, reason = "shared with the history test, which asks for all of it")]
#[path = "../history/model.rs"]
mod model;
#[allow(dead_code, reason = "shared with the process tests, which ask for all of it")]
#[path = "../process/server.rs"]
mod server;
mod workload;

use client::Client;
use etcore::proto::etcdserverpb as pb;
use model::{Model, Reply, Request, Response};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use server::{Recipe, Server};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use workload::{SPLITS, Writer};

const CONNECTIONS: usize = 6;
const ROUNDS: u64 = 15;
/// A round's load lasts up to so long before the process is killed.
const LOAD_TIME_MAX: Duration = Duration::from_millis(500);
/// Longer than a start, and than an orderly end, of a store of this size.
const START_TIME_MAX: Duration = Duration::from_millis(100);
const END_TIME_MAX: Duration = Duration::from_millis(100);
/// So often the store is compacted; the removal of old revisions is then under way when the load begins.
const ROUNDS_PER_COMPACTION: u64 = 5;
/// Small enough that checkpoints fall into the load.
const DIRTY_BYTES: u64 = 128 << 10;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => default,
    }
}

/// What one connection has to tell after a round.
#[derive(Default)]
struct Told {
    answered: Vec<(Request, Response)>,
    /// Asked, and the connection ended before the answer.
    open: Option<Request>,
    fault: Option<String>,
}

/// Asks until the server is gone.
fn load(port: u16, writer: &mut Writer, killed: &AtomicBool, started: mpsc::Sender<()>) -> Told {
    let mut told = Told::default();
    let mut client = match Client::connect(port) {
        Ok(client) => client,
        Err(error) => {
            told.fault = (!killed.load(Ordering::SeqCst)).then_some(error);
            return told;
        }
    };
    loop {
        let request = writer.request();
        match client.call(&request) {
            Ok(Ok(response)) => told.answered.push((request, response)),
            // A server that is asked to end may still say so.
            Ok(Err(refusal)) if killed.load(Ordering::SeqCst) && refusal.code == 14 => {
                told.open = Some(request);
                return told;
            }
            Ok(Err(refusal)) => {
                told.fault = Some(format!("{request:?} was refused: {refusal:?}"));
                return told;
            }
            Err(_) if killed.load(Ordering::SeqCst) => {
                told.open = Some(request);
                return told;
            }
            Err(error) => {
                told.fault = Some(format!("{error}, though the server was not killed; asked {request:?}"));
                told.open = Some(request);
                return told;
            }
        }
        // The first answer is enough; nobody waits for the others.
        let _ = started.send(());
    }
}

fn revision(response: &Response) -> i64 {
    let header = match response {
        Response::Range(response) => &response.header,
        Response::Put(response) => &response.header,
        Response::DeleteRange(response) => &response.header,
        Response::Txn(response) => &response.header,
        Response::Compact(response) => &response.header,
        Response::HashKv(response) => &response.header,
        Response::Status { revision, .. } => return *revision,
        Response::Defragment => return 0,
    };
    header.as_ref().map_or(0, |header| header.revision)
}

/// Whether the answer says that a revision was made.
fn changed(response: &Response) -> bool {
    match response {
        Response::Put(_) | Response::Txn(_) => true,
        Response::DeleteRange(response) => response.deleted > 0,
        _ => false,
    }
}

fn everything(revision: i64) -> Request {
    let range = pb::RangeRequest {
        key: b"\0".as_slice().into(),
        range_end: b"\0".as_slice().into(),
        revision,
        ..pb::RangeRequest::default()
    };
    Request::Range(range)
}

fn asked(client: &mut Client, request: &Request) -> Response {
    match client.call(request) {
        Ok(Ok(response)) => response,
        other => panic!("{request:?} after the restart: {other:?}"),
    }
}

fn state(response: Response) -> Vec<etcore::proto::mvccpb::KeyValue> {
    match response {
        Response::Range(response) => response.kvs,
        other => panic!("a range is answered with {other:?}"),
    }
}

fn modelled(model: &mut Model, request: &Request) -> Reply {
    model.call(request).reply
}

/// Puts what was told in order, asks the model, and compares it with the server that was started again.
/// Returns how many of the requests under way have taken effect.
fn check(client: &mut Client, model: &mut Model, told: Vec<Told>) -> usize {
    let now = revision(&asked(client, &everything(0)));
    let mut writes = BTreeMap::new();
    let mut reads: BTreeMap<i64, Vec<(Request, Response)>> = BTreeMap::new();
    let mut open = Vec::new();
    for told in told {
        open.extend(told.open);
        for (request, response) in told.answered {
            let revision = revision(&response);
            assert!(revision <= now, "revision {now} after the restart, but before it {response:?}");
            if !changed(&response) {
                reads.entry(revision).or_default().push((request, response));
            } else if let Some(other) = writes.insert(revision, (request, response)) {
                panic!(
                    "two changes were acknowledged with revision {revision}: {other:?}, {:?}",
                    writes[&revision]
                );
            }
        }
    }
    let unknown = open.len();
    let before = model.revision();
    assert!(before <= now, "revision {now} after the restart, {before} before");
    for revision in before..=now {
        if revision > before {
            match writes.remove(&revision) {
                Some((request, response)) => {
                    let expected = modelled(model, &request);
                    assert_eq!(
                        Ok(response),
                        expected,
                        "answer and model differ on {request:?} at {revision}"
                    );
                }
                None => {
                    let found = state(asked(client, &everything(revision)));
                    let mut made =
                        open.iter().position(|request| Writer::left_trace(request, revision, &found));
                    made = made.or_else(|| {
                        open.iter().position(|request| matches!(request, Request::DeleteRange(_)))
                    });
                    let Some(made) = made else {
                        panic!("nobody asked for what revision {revision} is: {found:?}");
                    };
                    let request = open.swap_remove(made);
                    modelled(model, &request).expect("requests of the load are valid");
                    assert_eq!(
                        found,
                        state(modelled(model, &everything(0)).expect("a valid range")),
                        "revision {revision}, {request:?}"
                    );
                }
            }
            assert_eq!(model.revision(), revision, "the model makes another revision");
        }
        for (request, response) in reads.remove(&revision).unwrap_or_default() {
            assert_eq!(Ok(response), modelled(model, &request), "read at {revision}: {request:?}");
        }
    }
    assert!(
        writes.is_empty() && reads.is_empty(),
        "answers of revisions that were there before: {writes:?} {reads:?}"
    );
    same(client, model);
    unknown - open.len()
}

/// State, counts and hash, by the three ways they are kept.
fn same(client: &mut Client, model: &mut Model) {
    for request in [everything(0), Request::HashKv(pb::HashKvRequest { revision: 0 })] {
        let actual = asked(client, &request);
        let expected = model.call(&request);
        let fits = expected.reply.as_ref() == Ok(&actual) || expected.or.contains(&Ok(actual.clone()));
        assert!(fits, "{actual:?} differs from the model's {:?}", expected.reply);
    }
}

/// A moment to kill at: uniform in the logarithm, so that short loads are as likely as long ones.
fn moment(random: &mut StdRng, longest: Duration) -> Duration {
    longest.mul_f64(0.01_f64.powf(random.random()))
}

fn wait_until(at: Instant) {
    // The moment is the subject of the test: nothing is expected to have happened by then.
    std::thread::sleep(at.saturating_duration_since(Instant::now()));
}

/// How often the process was killed, and when.
#[derive(Default)]
struct Kills {
    serving: u32,
    ending: u32,
    starting: u32,
}

/// Ends the server by force, and starts it again until it serves.
fn restart(server: Server, recipe: &Recipe, random: &mut StdRng, kills: &mut Kills) -> Server {
    if random.random_bool(0.2) {
        server.signal(libc::SIGTERM);
        wait_until(Instant::now() + moment(random, END_TIME_MAX));
        kills.ending += 1;
    } else {
        kills.serving += 1;
    }
    server.kill();
    while random.random_bool(0.2) {
        let server = recipe.spawn();
        wait_until(Instant::now() + moment(random, START_TIME_MAX));
        server.kill();
        kills.starting += 1;
    }
    recipe.start()
}

#[test]
fn nothing_acknowledged_is_lost_when_the_process_is_killed() {
    let rounds = number("CRASH_ROUNDS", ROUNDS);
    let seed = number("CRASH_SEED", 1);
    let mut random = StdRng::seed_from_u64(seed);
    let directory = tempfile::tempdir().unwrap();
    let splits = format!("--shard-splits={}", SPLITS.join(","));
    let dirty = format!("--dirty-bytes={DIRTY_BYTES}");
    let recipe = Recipe::new(&directory.path().join("data"), &["--shards=3", &splits, &dirty]);
    let mut writers: Vec<Writer> = (0..CONNECTIONS).map(|number| Writer::new(seed, number)).collect();
    let mut model = Model::new();
    let mut server = recipe.start();
    let mut kills = Kills::default();
    let (mut answers, mut unknown, mut done, begun) = (0, 0, 0, Instant::now());
    for round in 1..=rounds {
        let compacted = model.compacted().max(0);
        if round % ROUNDS_PER_COMPACTION == 0 && compacted < model.revision() {
            let revision = random.random_range(compacted + 1..=model.revision());
            let compact = Request::Compact(pb::CompactionRequest { revision, physical: random.random() });
            let mut client = Client::connect(server.port).unwrap();
            let expected = modelled(&mut model, &compact);
            assert_eq!(Ok(asked(&mut client, &compact)), expected, "round {round}");
        }
        let killed = Arc::new(AtomicBool::new(false));
        let (started, first_answer) = mpsc::channel();
        let port = server.port;
        let (told, restarted) = std::thread::scope(|scope| {
            let threads: Vec<_> = writers
                .iter_mut()
                .map(|writer| {
                    let (killed, started) = (killed.clone(), started.clone());
                    scope.spawn(move || load(port, writer, &killed, started))
                })
                .collect();
            drop(started);
            // An error means that every connection failed; it is told below.
            let _ = first_answer.recv();
            wait_until(Instant::now() + moment(&mut random, LOAD_TIME_MAX));
            killed.store(true, Ordering::SeqCst);
            let server = restart(server, &recipe, &mut random, &mut kills);
            let told = threads.into_iter().map(|thread| thread.join().expect("a connection does not panic"));
            (told.collect::<Vec<Told>>(), server)
        });
        server = restarted;
        for told in &told {
            if let Some(fault) = &told.fault {
                panic!("round {round}, CRASH_SEED={seed}: {fault}");
            }
            answers += told.answered.len();
            unknown += usize::from(told.open.is_some());
        }
        let mut client = Client::connect(server.port).unwrap();
        done += check(&mut client, &mut model, told);
    }
    let Kills { serving, ending, starting } = kills;
    eprintln!(
        "{rounds} rounds in {:.1} s: killed {serving} times under load, {ending} while ending, {starting} more \
         while starting; {answers} answers, {done} of {unknown} requests under way took effect; revision {}",
        begun.elapsed().as_secs_f64(),
        model.revision()
    );
}
