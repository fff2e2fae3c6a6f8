//! Disks that are full, broken or damaged: the process says what and where, ends, and has kept what it acknowledged.
//!
//! The file systems are small ones of their own, in a file; making them takes the right to mount, and without it
//! these tests say that they are skipped.

use crate::client::Client;
use crate::server::{Ended, Recipe, Server};
use crate::{KEYS, THREE_SHARDS, assert_filled, fill, get, put};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An ext4 file system in a file.
struct Disk {
    place: tempfile::TempDir,
}

impl Disk {
    fn new(mebibytes: u64) -> Option<Disk> {
        let disk = Disk { place: tempfile::tempdir().unwrap() };
        File::create(disk.image()).and_then(|image| image.set_len(mebibytes << 20)).unwrap();
        fs::create_dir(disk.path()).unwrap();
        let made = run("mkfs.ext4", &["-q", "-F", &disk.image().display().to_string()])
            .and_then(|()| disk.mount(&[]));
        match made {
            Ok(()) => Some(disk),
            Err(error) => {
                eprintln!("skipped: no file system can be made and mounted here: {error}");
                None
            }
        }
    }

    fn image(&self) -> PathBuf {
        self.place.path().join("image")
    }

    fn path(&self) -> PathBuf {
        self.place.path().join("mount")
    }

    fn mount(&self, options: &[&str]) -> Result<(), String> {
        let (image, path) = (self.image().display().to_string(), self.path().display().to_string());
        run("mount", &[&["-o", "loop"], options, &[&image, &path]].concat())
    }

    fn unmount(&self) -> Result<(), String> {
        run("umount", &[&self.path().display().to_string()])
    }

    /// From now on every operation fails with EIO, until it is mounted again.
    fn fail(&self) {
        /// `EXT4_IOC_SHUTDOWN`, and its kind that writes out the journal first.
        const SHUTDOWN: libc::Ioctl = 0x8004_587D_u32 as libc::Ioctl;
        let logflush: u32 = 1;
        let root = File::open(self.path()).unwrap();
        // SAFETY: the call reads one u32 that lives here.
        let done = unsafe { libc::ioctl(root.as_raw_fd(), SHUTDOWN, &raw const logflush) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // It may not be mounted.
        let _ = self.unmount();
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(arguments).env("PATH", path).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

/// Puts until the server is gone; what was acknowledged, and the end.
fn put_until_it_ends(server: Server, value_bytes: usize, puts_max: usize) -> (Vec<String>, Ended) {
    // It may have ended already, by a write of its own.
    let Ok(mut client) = Client::connect(server.port) else { return (Vec::new(), server.wait()) };
    let mut acknowledged = Vec::new();
    for number in 0..puts_max {
        let key = format!("{}{number}", KEYS[number % KEYS.len()]);
        match put(&mut client, &key, vec![b'v'; value_bytes]) {
            Ok(_) => acknowledged.push(key),
            Err(_) => return (acknowledged, server.wait()),
        }
    }
    panic!("{puts_max} puts were acknowledged");
}

fn assert_there(port: u16, keys: &[String], value_bytes: usize) {
    let mut client = Client::connect(port).unwrap();
    for key in keys {
        assert_eq!(get(&mut client, key).map(|value| value.len()), Some(value_bytes), "{key}");
    }
}

/// The last line says why: the place and the reason.
fn assert_died(ended: &Ended, place: &Path, reason: &str) {
    assert_eq!(ended.status.code(), Some(1), "{}", ended.log);
    let fatal = |line: &&str| line.contains(r#""level":"fatal""#);
    let line = ended.log.lines().find(fatal).unwrap_or_default();
    assert!(line.contains(&place.display().to_string()) && line.contains(reason), "{reason}: {}", ended.log);
}

#[test]
fn a_disk_that_fills() {
    const VALUE_BYTES: usize = 500_000;
    let Some(disk) = Disk::new(256) else { return };
    let ballast = disk.path().join("ballast");
    let recipe = Recipe::new(&disk.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    File::create(&ballast).unwrap();
    run("fallocate", &["-l", "100M", &ballast.display().to_string()]).unwrap();
    let (acknowledged, ended) = put_until_it_ends(server, VALUE_BYTES, 600);
    assert_died(&ended, &recipe.data_dir, "No space left on device (os error 28)");
    assert!(!acknowledged.is_empty());
    fs::remove_file(&ballast).unwrap();
    let server = recipe.start();
    assert_there(server.port, &acknowledged, VALUE_BYTES);
    fill(server.port);
}

#[test]
fn a_disk_that_fails() {
    let Some(disk) = Disk::new(256) else { return };
    let recipe = Recipe::new(&disk.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    fill(server.port);
    disk.fail();
    let (acknowledged, ended) = put_until_it_ends(server, 10, 100);
    assert_eq!(acknowledged, Vec::<String>::new(), "nothing can be durable any more");
    assert_died(&ended, &recipe.data_dir, "(os error 5)");
    disk.unmount().unwrap();
    disk.mount(&[]).unwrap();
    assert_filled(recipe.start().port);
}

#[test]
fn a_disk_that_is_read_only() {
    let Some(disk) = Disk::new(256) else { return };
    let recipe = Recipe::new(&disk.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    fill(server.port);
    server.terminate();
    disk.unmount().unwrap();
    disk.mount(&["-o", "ro"]).unwrap();
    assert_died(&recipe.refused(), &recipe.data_dir, "Read-only file system (os error 30)");
    disk.unmount().unwrap();
    disk.mount(&[]).unwrap();
    assert_filled(recipe.start().port);
}

fn flip(file: &Path, offset: u64) {
    let file = File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

#[test]
fn a_damaged_log() {
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    // Each put is a flush of its own: what follows proves that the first ones were there.
    for _ in 0..20 {
        fill(server.port);
    }
    server.kill();
    let log = recipe.data_dir.join("shard-0002/log");
    let segment = fs::read_dir(&log).unwrap().map(|entry| entry.unwrap().path()).min().unwrap();
    let whole = fs::read(&segment).unwrap();
    // In the body of a record of the fifth block.
    flip(&segment, 4 * 4096 + 70);
    let ended = recipe.refused();
    assert_died(&ended, &segment, "offset");
    // The damage stays where it was, for whoever mends it.
    fs::write(&segment, whole).unwrap();
    assert_filled(recipe.start().port);
}

#[test]
fn a_damaged_page_of_a_tree() {
    const PAGE_BYTES: u64 = 8192;
    let place = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(&place.path().join("data"), &THREE_SHARDS);
    let server = recipe.start();
    let mut client = Client::connect(server.port).unwrap();
    for number in 0..200 {
        put(&mut client, &format!("k{number}"), vec![b'v'; 200]).unwrap();
    }
    server.terminate();
    let tree = recipe.data_dir.join("shard-0002/tree");
    let pages = fs::metadata(&tree).unwrap().len() / PAGE_BYTES;
    // All but the two meta pages, so that whatever is read is damaged.
    for page in 2..pages {
        flip(&tree, page * PAGE_BYTES + 1000);
    }
    let mut server = recipe.spawn();
    if server.wait_line(crate::server::READY) {
        let mut client = Client::connect(server.port).unwrap();
        let range = etcore::proto::etcdserverpb::RangeRequest { key: "k100".into(), ..Default::default() };
        let answer = client.call(&crate::model::Request::Range(range));
        assert!(!matches!(answer, Ok(Ok(_))), "a damaged page was answered from: {answer:?}");
    }
    assert_died(&server.wait(), &tree, "page");
}
