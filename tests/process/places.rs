//! Ports and data directories that are not the server's to use: refused with a sentence, and left as they are.

use crate::server::{Ended, Recipe, Server};
use crate::{THREE_SHARDS, assert_filled, files, fill};
use std::fs;
use std::os::unix::process::CommandExt;

fn assert_refused(ended: &Ended, sentence: &str) {
    assert_eq!(ended.status.code(), Some(1), "{}", ended.log);
    let last = ended.log.lines().last().unwrap_or_default();
    assert!(
        last.contains(r#""level":"fatal""#) && last.contains(sentence),
        "{sentence:?} is not in {}",
        ended.log
    );
}

#[test]
fn a_port_in_use() {
    let place = tempfile::tempdir().unwrap();
    let first = Recipe::new(&place.path().join("first"), &[]);
    let server = first.start();
    let second = Recipe { data_dir: place.path().join("second"), ..first };
    assert_refused(&second.refused(), "address already in use");
    fill(server.port);
}

#[test]
fn a_directory_in_use() {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    fill(server.port);
    let second = Recipe { port: Recipe::new(place.path(), &[]).port, ..recipe.clone() };
    assert_refused(&second.refused(), &format!("in use by another process (pid {})", server.id()));
    assert_filled(server.port);
    // The lock goes with the process, however it ends.
    server.kill();
    assert_filled(recipe.start().port);
}

#[test]
fn directories_of_others() {
    for (name, content, sentence) in [
        ("member/snap/db", "bolt", "is a data directory of etcd"),
        ("FORMAT", "etcore 2\n", "has format"),
        ("photo.jpg", "picture", "holds something else (photo.jpg)"),
    ] {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, content).unwrap();
        let before = files(place.path());
        assert_refused(&Recipe::new(place.path(), &[]).refused(), sentence);
        assert_eq!(files(place.path()), before, "{name}");
    }
}

#[test]
fn other_shards_than_the_directory_has() {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    fill(server.port);
    server.terminate();
    let shards = || {
        let mut files = files(&recipe.data_dir);
        // The meta group is asked what the store is, and it is led for that.
        files.retain(|name, _| name.starts_with("shard-"));
        files
    };
    let before = shards();
    for (arguments, sentence) in [
        (["--shards=2", "--shard-splits=k"], "was made with 3 shards"),
        (["--shards=3", "--shard-splits=k,n"], "differs from the range map"),
    ] {
        let other = Recipe { arguments: arguments.map(str::to_owned).to_vec(), ..recipe.clone() };
        assert_refused(&other.refused(), sentence);
        assert!(shards() == before, "{arguments:?} changed a shard");
    }
    // Another number of CPUs is no reason, nor are flags that are not there.
    let other = Recipe { arguments: vec!["--executors=1".to_owned()], ..recipe };
    assert_filled(other.start().port);
}

#[test]
fn a_shard_that_is_missing() {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    fill(server.port);
    server.kill();
    let (shard, aside) = (recipe.data_dir.join("shard-0002"), place.path().join("aside"));
    fs::rename(&shard, &aside).unwrap();
    assert_refused(&recipe.refused(), "has lost a shard");
    assert!(!shard.exists(), "nothing takes its place");
    fs::rename(&aside, &shard).unwrap();
    assert_filled(recipe.start().port);
}

/// A directory on a file system without direct I/O, if there is one.
#[test]
fn a_directory_in_memory() {
    let Ok(place) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: no directory can be made in /dev/shm");
        return;
    };
    let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    fill(server.port);
    server.kill();
    assert_filled(recipe.start().port);
}

/// The executors are built on io_uring: without it there is a sentence that says what to change.
#[test]
fn a_kernel_that_refuses_io_uring() {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    let mut command = recipe.command();
    // SAFETY: only system calls, safe between fork and exec; the filter lives until it is installed.
    unsafe { command.pre_exec(refuse_io_uring) };
    let ended = Server::spawn(command, recipe.port).wait();
    assert_refused(&ended, "io_uring");
    assert!(!recipe.data_dir.exists(), "nothing was begun");
    assert!(ended.log.contains("seccomp") && ended.log.contains("kernel.io_uring_disabled"), "{}", ended.log);
}

/// What a container's seccomp profile does: `io_uring_setup` fails with EPERM.
fn refuse_io_uring() -> std::io::Result<()> {
    let statement = |code: u32, jump: (u8, u8), k: u32| libc::sock_filter {
        code: code as u16,
        jt: jump.0,
        jf: jump.1,
        k,
    };
    let mut filter = [
        // The number of the system call is the first field of what the filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, (0, 0), 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, (0, 1), libc::SYS_io_uring_setup as u32),
        statement(libc::BPF_RET | libc::BPF_K, (0, 0), libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(libc::BPF_RET | libc::BPF_K, (0, 0), libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter live during the calls, which copy them.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn as_many_open_files_as_are_allowed() {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &[]);
    let mut command = recipe.command();
    // SAFETY: a plain system call, safe between fork and exec, that reads a value made here.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 256, rlim_max: 2048 };
            if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
    let mut server = Server::spawn(command, recipe.port);
    server.wait_ready();
    let limits = fs::read_to_string(format!("/proc/{}/limits", server.id())).unwrap();
    let files: Vec<&str> =
        limits.lines().find(|line| line.starts_with("Max open files")).unwrap().split_whitespace().collect();
    assert_eq!(files[3..5], ["2048", "2048"]);
}
