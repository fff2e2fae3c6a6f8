//! The end by a signal: what is logged is finished, the trees are durable, the parent sees the signal.

use crate::client::Client;
use crate::server::{Recipe, Server};
use crate::{THREE_SHARDS, assert_filled, fill};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

#[test]
fn signals_end_the_process_and_leave_nothing_to_replay() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let place = tempfile::tempdir().unwrap();
        let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
        let server = recipe.start();
        fill(server.port);
        // A connection that stays open does not hold it up.
        let _idle = Client::connect(server.port).unwrap();
        server.signal(signal);
        let ended = server.wait();
        assert_eq!(ended.status.signal(), Some(signal), "{}", ended.log);
        let server = recipe.start();
        assert_filled(server.port);
        let ended = server.terminate();
        let opened: Vec<&str> = ended.log.lines().filter(|line| line.contains("opened a shard")).collect();
        assert_eq!(opened.len(), 3, "{}", ended.log);
        assert!(opened.iter().all(|line| line.contains(r#""entries_to_replay":0"#)), "{}", ended.log);
    }
}

#[test]
fn killed_it_replays() {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    fill(server.port);
    server.kill();
    let server = recipe.start();
    assert_filled(server.port);
    let ended = server.terminate();
    let replays = |line: &&str| line.contains("opened a shard") && !line.contains(r#""entries_to_replay":0"#);
    assert_eq!(ended.log.lines().filter(replays).count(), 3, "{}", ended.log);
}

/// Process 1 of a container has no default action for signals.
#[test]
fn process_1_exits_with_0() {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &[]);
    let mut outer = Command::new("unshare");
    outer
        .args(["--pid", "--fork", "--kill-child"])
        .arg(recipe.command().get_program())
        .args(recipe.command().get_args());
    if !Command::new("unshare").args(["--pid", "--fork", "true"]).status().is_ok_and(|s| s.success()) {
        eprintln!("skipped: this user may not make a namespace of processes");
        return;
    }
    let mut server = Server::spawn(outer, recipe.port);
    server.wait_ready();
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", server.id())).unwrap();
    let inner: libc::pid_t = children.trim().parse().unwrap();
    // SAFETY: a signal to the only child of our child, which waits for it.
    unsafe { libc::kill(inner, libc::SIGTERM) };
    let ended = server.wait();
    assert_eq!(ended.status.code(), Some(0), "{}", ended.log);
}
