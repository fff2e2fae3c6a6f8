//! Starts etcd or etcore on free loopback ports with fresh data, and reads what the kernel counts for it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::client;
use crate::wire::{self, Method};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    Etcd,
    Etcore,
}

impl Product {
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Etcore => "etcore",
        }
    }
}

/// Where the programs are and where they may write.
#[derive(Debug, Clone)]
pub struct Bench {
    pub etcd: PathBuf,
    pub etcore: PathBuf,
    /// Data directories are made here, so all of them are on one file system.
    pub dir: PathBuf,
    pub shards: u64,
    /// Further flags of etcore.
    pub flags: Vec<String>,
}

/// A directory that is gone when its owner is.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(parent: &Path) -> io::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("perf-{}-{count}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is only litter.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running server; it is killed when this goes.
pub struct Server {
    child: Child,
    pub address: SocketAddr,
    /// From exec to the answer to a linearizable read.
    pub ready_after: Duration,
}

/// Counters of the kernel for the server's process, at one moment.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counters {
    pub cpu: Duration,
    pub written_bytes: u64,
    pub anonymous_bytes: u64,
    /// What the server itself counts, where it does.
    pub flushes: Option<u64>,
}

impl Server {
    /// Starts `product` on `data`, which may hold data of an earlier start, and waits until it answers.
    pub fn start(bench: &Bench, product: Product, data: &Path) -> Result<Self, String> {
        let program = match product {
            Product::Etcd => &bench.etcd,
            Product::Etcore => &bench.etcore,
        };
        let log_path = data.with_extension("log");
        let describe = |what: &str| {
            let mut log = fs::read_to_string(&log_path).unwrap_or_default();
            let tail = log.len().saturating_sub(2_000);
            let tail = log.split_off(log.ceil_char_boundary(tail));
            format!("{} {what}; the end of its log:\n{tail}", product.name())
        };
        let log = File::create(&log_path).map_err(|error| format!("{}: {error}", log_path.display()))?;
        let (address, peer) = (free_port()?, free_port()?);
        let mut command = Command::new(program);
        command
            .arg(format!("--data-dir={}", data.display()))
            .arg("--name=perf")
            .arg(format!("--listen-client-urls=http://{address}"))
            .arg(format!("--advertise-client-urls=http://{address}"))
            .arg(format!("--listen-peer-urls=http://{peer}"))
            .arg(format!("--initial-advertise-peer-urls=http://{peer}"))
            .arg(format!("--initial-cluster=perf=http://{peer}"))
            // The loads keep all history; neither server shall stop for that.
            .arg("--quota-backend-bytes=34359738368")
            .arg("--log-level=warn");
        if product == Product::Etcore {
            command.arg(format!("--shards={}", bench.shards));
            if bench.shards > 1 {
                let splits = (1..bench.shards as u8).map(|at| format!("/perf/{}", char::from(b'a' + at)));
                command.arg(format!("--shard-splits={}", splits.collect::<Vec<_>>().join(",")));
            }
            command.args(&bench.flags);
        }
        let begun = Instant::now();
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(|error| error.to_string())?)
            .stderr(log)
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let mut server = Self { child, address, ready_after: Duration::ZERO };
        let mut question = Vec::new();
        wire::range(&mut question, b"/perf/a/000000000000000000000000", &[], false);
        loop {
            let refusal = match client::call(address, Method::Range, &question) {
                Ok(_) => {
                    server.ready_after = begun.elapsed();
                    return Ok(server);
                }
                Err(refusal) => refusal,
            };
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(describe(&format!("ended at its start with {status}")));
            }
            if begun.elapsed() > Duration::from_secs(120) {
                return Err(describe(&format!("did not answer within 120 s ({refusal})")));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends the server as an operator would and waits for it.
    pub fn stop(mut self) -> Result<(), String> {
        // SAFETY: the process is our child and not yet waited for, so the id is still its own.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(60) {
            match self.child.try_wait() {
                Ok(Some(_)) => return Ok(()),
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("the server did not end within 60 s of SIGTERM".into())
    }

    pub fn counters(&self) -> Result<Counters, String> {
        counters(self.child.id()).map_err(|error| format!("/proc of the server: {error}"))
    }

    /// Flushes of the log so far, if the server's metrics tell.
    pub fn flushes(&self) -> Option<u64> {
        let text = metrics(self.address).ok()?;
        let line =
            text.lines().find(|line| line.starts_with("etcd_disk_wal_fsync_duration_seconds_count"))?;
        Some(line.rsplit(' ').next()?.parse::<f64>().ok()? as u64)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only where the process is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The port may be taken by another between this and the server's start; then the start fails and says so.
fn free_port() -> Result<SocketAddr, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| error.to_string())?;
    listener.local_addr().map_err(|error| error.to_string())
}

fn counters(process: u32) -> io::Result<Counters> {
    let malformed = || io::Error::other("not in the expected form");
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name in parentheses may hold spaces; utime and stime are the 12th and 13th after it.
    let (_, after) = stat.rsplit_once(')').ok_or_else(malformed)?;
    let ticks: u64 =
        after.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    // SAFETY: a plain question to the C library.
    let ticks_per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    let field = |file: &str, name: &str| -> io::Result<u64> {
        let text = fs::read_to_string(format!("/proc/{process}/{file}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)).ok_or_else(malformed)?;
        let number = line.split_whitespace().next().ok_or_else(malformed)?;
        number.parse().map_err(|_| malformed())
    };
    Ok(Counters {
        cpu: Duration::from_secs_f64(ticks as f64 / ticks_per_second),
        written_bytes: field("io", "write_bytes:")?,
        anonymous_bytes: field("status", "RssAnon:")? * 1024,
        flushes: None,
    })
}

fn metrics(address: SocketAddr) -> io::Result<String> {
    let mut socket = TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    socket.write_all(
        format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut text = String::new();
    socket.read_to_string(&mut text)?;
    Ok(text)
}
