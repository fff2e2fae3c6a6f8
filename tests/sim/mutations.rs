//! Does the simulator bite? Each row breaks one rule of the protocol and says within how many seeds that must be
//! noticed: about five times what it took when the row was written, so that the table survives another schedule.
//!
//! `cargo test --features mutations --test sim mutations -- --nocapture` prints what it takes now. With
//! `SIM_SEEDS=n` every row may take n seeds, to measure a new one.

use super::{Outcome, World, number};
use etcore::model::mutation::{self, Mutation};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// The broken rule, the protocol case that it is, and the seeds that suffice.
const TABLE: &[(Mutation, &str, u64)] = &[
    (Mutation::LowsBeforeSlots, "S3", 8000),
    (Mutation::PartUnregistered, "S3", 20),
    (Mutation::AcknowledgeBeforePersist, "S14", 1500),
    (Mutation::LowClearedAtHandOut, "S14", 20),
    (Mutation::AnswerBeforeVisible, "design 3", 20),
    (Mutation::PointIsV, "S12", 20),
    (Mutation::VisibleCached, "S13", 250),
    (Mutation::CompactionUnchecked, "S18", 11000),
    (Mutation::OverlayForgotten, "design 3", 20),
    (Mutation::FreezeIgnored, "design 4", 20),
    (Mutation::PartsUnnamed, "design 5.5", 40),
    (Mutation::CutTakesHalves, "design 5.5", 210),
    (Mutation::CutFromLowest, "M4", 80),
    (Mutation::CutOneFar, "design 5.5", 20),
    (Mutation::CutVoidsNothing, "Z1", 20),
    (Mutation::HoleAccepted, "D8", 80),
    (Mutation::SealWithoutV, "D8", 70),
    (Mutation::SealedOnce, "D8", 140),
    (Mutation::RecordOfEntryForgotten, "S16", 500),
    (Mutation::PositionBehind, "D4", 20),
    (Mutation::RangeRestarted, "D10", 500),
    (Mutation::CheckpointPagesUnsynced, "design 7", 125),
    (Mutation::PagesReusedAtOnce, "design 7", 17000),
    (Mutation::LogReleasedAhead, "design 6", 150),
    (Mutation::FlushUnsynced, "design 6", 20),
    (Mutation::FlushRetried, "D3", 60),
    (Mutation::SegmentNamesUnsynced, "D9", 20),
    (Mutation::DamageTakenForTorn, "D1, D2", 20000),
    (Mutation::ScanOnce, "L8", 320),
    (Mutation::WakeForgotten, "L8", 450),
];

/// What the simulator says of a seed; a panic of the machine is something that it noticed.
fn notices(seed: u64) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(|| World::new(seed).run())) {
        Ok(Outcome::Holds) => None,
        Ok(Outcome::Violation(what)) => Some(what),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Some(format!("panic: {}", text.unwrap_or_default()))
        }
    }
}

#[test]
fn mutations() {
    std::panic::set_hook(Box::new(|_| {}));
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    let work = || {
        while let Some(&(broken, case, seeds)) = TABLE.get(next.fetch_add(1, SeqCst)) {
            mutation::set(Some(broken));
            let seeds = number("SIM_SEEDS").unwrap_or(seeds);
            let found = (0..seeds).find_map(|seed| Some((seed, notices(seed)?)));
            mutation::set(None);
            match found {
                Some((seed, what)) => {
                    let what: String = what.lines().next().unwrap_or_default().chars().take(100).collect();
                    println!("{:26} {case:10} {:>5} of {seeds:>5}  {what}", format!("{broken:?}"), seed + 1);
                }
                None => {
                    println!("{:26} {case:10} MISSED in {seeds}", format!("{broken:?}"));
                    missed.lock().unwrap().push(broken);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    let _ = std::panic::take_hook();
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "the simulator missed {missed:?}");
}
