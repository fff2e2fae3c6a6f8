//! The simulator: the real shard, coordinator, meta, log and tree code of a node, in one thread, in virtual time,
//! on a simulated disk, under a seed.
//!
//! `cargo test --test sim` runs a few hundred seeds and all that ever failed. A long run:
//! `SIM_SEEDS=100000 cargo test --release --test sim many_seeds`; one seed again, step by step:
//! `SIM_SEED=17 SIM_TRACE=1 cargo test --test sim one_seed -- --nocapture`.

mod history;
#[cfg(feature = "mutations")]
mod mutations;
mod workload;
mod world;

use world::{Outcome, World};

/// Seeds that once found a fault, with what it was.
const REGRESSIONS: &[(u64, &str)] = &[
    (3, "a Range in a transaction named the shard's point instead of the revision before the change"),
    (1736, "replay of an entry of which two records were in the tree applied the second again (case S16)"),
];

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn run(seed: u64) -> Outcome {
    World::new(seed).run()
}

fn assert_holds(seed: u64) {
    if let Outcome::Violation(what) = run(seed) {
        panic!(
            "seed {seed}: {what}\nrerun: SIM_SEED={seed} SIM_TRACE=1 cargo test --test sim one_seed -- --nocapture"
        );
    }
}

#[test]
fn many_seeds() {
    let count = number("SIM_SEEDS").unwrap_or(300);
    let first = number("SIM_FIRST").unwrap_or(0);
    for seed in first..first + count {
        assert_holds(seed);
    }
}

#[test]
fn seeds_that_once_failed() {
    for (seed, _) in REGRESSIONS {
        assert_holds(*seed);
    }
}

#[test]
fn one_seed() {
    assert_holds(number("SIM_SEED").unwrap_or(0));
}

#[test]
fn a_seed_reruns_exactly() {
    let digests: Vec<_> = (0..2)
        .map(|_| {
            let mut world = World::new(42);
            let outcome = world.run();
            (format!("{outcome:?}"), world.digest())
        })
        .collect();
    assert_eq!(digests[0], digests[1]);
}
