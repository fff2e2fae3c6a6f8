//! Long random histories, asked of a plain model and of real servers: their answers must be equal.
//!
//! Several clients take turns with every operation of the KV service and HashKV, with every field of every
//! message, good and bad; now and then the server is killed or asked to end, and goes on. The servers are etcore
//! with one shard, etcore with five whose boundaries lie inside the ranges that are touched, and, if `ETCD` names
//! its program, etcd 3.7.1: without it, server and model could share a misreading.
//!
//! A history follows from its seed. A mismatch prints the seed, the shortest history found that still shows it,
//! the last request and the difference. `HISTORY_SEED=7 HISTORY_SEEDS=1` runs one again; `HISTORY_SEEDS` and
//! `HISTORY_STEPS` make a longer run.

mod client;
mod compare;
mod generator;
mod model;
mod subject;

use std::path::PathBuf;

use client::Client;
use generator::{CLIENTS, SPLITS, Step};
use model::Model;
use subject::{Recipe, Subject};

const SEED_FIRST: u64 = 1;
const SEEDS: u64 = 8;
const STEPS: u64 = 400;
/// So often a failing history is run again to make it shorter.
const SHRINK_RUNS_MAX: usize = 200;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => default,
    }
}

fn etcore(shards: &str, more: &[String]) -> Recipe {
    let mut arguments = vec![format!("--shards={shards}")];
    arguments.extend_from_slice(more);
    Recipe { name: "etcore", program: PathBuf::from(env!("CARGO_BIN_EXE_etcore")), arguments, is_etcd: false }
}

#[test]
fn one_shard_answers_like_the_model() {
    compare_with(&etcore("1", &[]));
}

#[test]
fn five_shards_answer_like_the_model() {
    compare_with(&etcore("5", &[format!("--shard-splits={}", SPLITS.join(","))]));
}

/// Needs etcd, so it runs only where `ETCD` names it.
#[test]
fn etcd_answers_like_the_model() {
    if let Some(program) = std::env::var_os("ETCD") {
        // It elects itself at every start; that need not take a second.
        let arguments = vec!["--heartbeat-interval=10".to_owned(), "--election-timeout=100".to_owned()];
        compare_with(&Recipe { name: "etcd", program: program.into(), arguments, is_etcd: true });
    }
}

fn compare_with(recipe: &Recipe) {
    let first = number("HISTORY_SEED", SEED_FIRST);
    let steps = number("HISTORY_STEPS", STEPS) as usize;
    for seed in first..first + number("HISTORY_SEEDS", SEEDS) {
        let mut history = generator::history(seed, steps);
        if recipe.is_etcd {
            history.retain(
                |step| !matches!(step, Step::Call { request, .. } if generator::etcd_is_wrong(request)),
            );
        }
        if let Err(mismatch) = run(recipe, &history) {
            history.truncate(mismatch.step + 1);
            let (history, mismatch) = shrink(recipe, history, mismatch);
            let mut text = String::new();
            for step in &history {
                text += &match step {
                    Step::Call { request, .. } => compare::brief_line(request),
                    Step::Restart { by_force: true } => "killed and started\n".to_owned(),
                    Step::Restart { by_force: false } => "stopped and started\n".to_owned(),
                };
            }
            panic!(
                "{} {:?}, HISTORY_SEED={seed} HISTORY_STEPS={steps}, {} steps left:\n{text}\n{}",
                recipe.name,
                recipe.arguments,
                history.len(),
                mismatch.text
            );
        }
        eprintln!("{} {:?}: seed {seed}, {} steps, equal", recipe.name, recipe.arguments, history.len());
    }
}

struct Mismatch {
    /// Index of the step that showed it.
    step: usize,
    text: String,
}

fn run(recipe: &Recipe, history: &[Step]) -> Result<(), Mismatch> {
    let at = |step: usize| move |text: String| Mismatch { step, text };
    let mut subject = Subject::start(recipe).map_err(at(0))?;
    let mut model = Model::new();
    let connect = |subject: &Subject| {
        (0..CLIENTS).map(|_| Client::connect(subject.port())).collect::<Result<Vec<_>, _>>()
    };
    let mut clients = connect(&subject).map_err(at(0))?;
    for (index, step) in history.iter().enumerate() {
        match step {
            Step::Restart { by_force } => {
                if recipe.is_etcd {
                    // It would wait five seconds for open connections; etcore must end in spite of them.
                    clients.clear();
                }
                subject.restart(*by_force).map_err(at(index))?;
                clients = connect(&subject).map_err(at(index))?;
            }
            Step::Call { client, request } => {
                let actual = clients[*client].call(request).map_err(|error| Mismatch {
                    step: index,
                    text: format!("{error}\nlog of the server:\n{}", subject.last_log_lines()),
                })?;
                let expected = model.call(request);
                if !compare::fits(request, &expected, &actual, recipe.is_etcd) {
                    return Err(at(index)(compare::difference(&expected, &actual)));
                }
            }
        }
    }
    Ok(())
}

/// Leaves out ever smaller pieces of the history, then pieces of its transactions, as long as a mismatch remains.
fn shrink(recipe: &Recipe, mut history: Vec<Step>, mut mismatch: Mismatch) -> (Vec<Step>, Mismatch) {
    let mut runs = 0;
    let mut fails = |mut shorter: Vec<Step>| {
        runs += 1;
        let smaller = if runs > SHRINK_RUNS_MAX { None } else { run(recipe, &shorter).err() }?;
        shorter.truncate(smaller.step + 1);
        Some((shorter, smaller))
    };
    let mut piece = history.len() / 2;
    while piece > 0 {
        let mut from = 0;
        while from < history.len().saturating_sub(1) {
            let mut shorter = history.clone();
            shorter.drain(from..(from + piece).min(history.len() - 1));
            match fails(shorter) {
                Some(found) => (history, mismatch) = found,
                None => from += piece,
            }
        }
        piece /= 2;
    }
    let mut at = history.len();
    while at > 0 {
        at -= 1;
        while let Some(found) = generator::smaller(&history[at]).into_iter().find_map(|step| {
            let mut shorter = history.clone();
            shorter[at] = step;
            fails(shorter)
        }) {
            (history, mismatch) = found;
            at = at.min(history.len() - 1);
        }
    }
    (history, mismatch)
}
