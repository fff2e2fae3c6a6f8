//! One thread per executor, each bound to a CPU of its own, and all of them busy.

use crate::client::Client;
use crate::put;
use crate::server::Recipe;
use std::collections::BTreeMap;
use std::fs;

/// Ticks of a hundredth of a second that an executor must have worked to count as busy.
const BUSY_TICKS: u64 = 5;

/// Threads that may run on one CPU only: the CPU, and the ticks that they have worked.
fn bound(process: u32) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{process}/task")).unwrap() {
        let task = task.unwrap().path();
        let status = fs::read_to_string(task.join("status")).unwrap();
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
        if cpus.parse::<u32>().is_err() {
            continue;
        }
        let stat = fs::read_to_string(task.join("stat")).unwrap();
        // Behind the name, which may hold spaces: utime and stime are the 12th and 13th field.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        assert!(found.insert(cpus.to_owned(), ticks).is_none(), "two threads are bound to CPU {cpus}");
    }
    found
}

#[test]
fn every_executor_has_a_cpu_and_works() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    if cpus < 2 {
        eprintln!("skipped: one CPU cannot show that several are used");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    // As many shards as executors, so that every executor has one.
    let server = Recipe::new(&place.path().join("data"), &["--unsafe-no-fsync"]).start();
    let before = bound(server.id());
    assert_eq!(before.len(), cpus, "executors by CPU: {before:?}");
    let mut clients: Vec<Client> = (0..2 * cpus).map(|_| Client::connect(server.port).unwrap()).collect();
    let mut rounds = 0;
    loop {
        for client in &mut clients {
            for first in 0x21..0x7F_u8 {
                put(client, &format!("{}key", first as char), "value").unwrap();
            }
        }
        let busy =
            bound(server.id()).iter().filter(|(cpu, ticks)| **ticks >= before[*cpu] + BUSY_TICKS).count();
        if busy == cpus {
            return;
        }
        rounds += 1;
        assert!(rounds < 200, "only {busy} of {cpus} executors work: {before:?}, {:?}", bound(server.id()));
    }
}
