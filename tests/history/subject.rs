//! A server under test: its process, its directory, its port.
//!
//! It is ready when it says so in its log. Nothing here waits for a time.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Mutex};

/// How to start one kind of server.
#[derive(Clone)]
pub struct Recipe {
    pub name: &'static str,
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// etcd itself: what is known to be wrong in it is not asked, and its unstable sort is forgiven.
    pub is_etcd: bool,
}

pub struct Subject {
    recipe: Recipe,
    port: u16,
    peer_port: u16,
    directory: tempfile::TempDir,
    process: Child,
    log: Arc<Mutex<VecDeque<String>>>,
}

const READY: &str = "ready to serve client requests";
/// So many of its last log lines are shown when it fails.
const LOG_LINES_KEPT: usize = 12;

impl Subject {
    pub fn start(recipe: &Recipe) -> Result<Subject, String> {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let (port, peer_port) = free_ports().map_err(|error| error.to_string())?;
        let (process, log) = launch(recipe, &directory, port, peer_port)?;
        Ok(Subject { recipe: recipe.clone(), port, peer_port, directory, process, log })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Ends it, by force or by asking, and starts it again on the same directory.
    pub fn restart(&mut self, by_force: bool) -> Result<(), String> {
        let signal = if by_force { libc::SIGKILL } else { libc::SIGTERM };
        // SAFETY: a signal to our own child, which has not been waited for.
        unsafe { libc::kill(self.process.id() as libc::pid_t, signal) };
        self.process.wait().map_err(|error| error.to_string())?;
        let (process, log) = launch(&self.recipe, &self.directory, self.port, self.peer_port)?;
        self.process = process;
        self.log = log;
        Ok(())
    }

    pub fn last_log_lines(&self) -> String {
        let lines = self.log.lock().expect("the log's reader does not panic");
        lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        // Already gone is as good.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Both are held until both are known, so they differ.
fn free_ports() -> std::io::Result<(u16, u16)> {
    let (one, other) = (TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
    Ok((one.local_addr()?.port(), other.local_addr()?.port()))
}

type Log = Arc<Mutex<VecDeque<String>>>;

fn launch(
    recipe: &Recipe,
    directory: &tempfile::TempDir,
    port: u16,
    peer_port: u16,
) -> Result<(Child, Log), String> {
    let client_url = format!("http://127.0.0.1:{port}");
    let peer_url = format!("http://127.0.0.1:{peer_port}");
    let mut command = Command::new(&recipe.program);
    command
        .arg(format!("--data-dir={}", directory.path().join("data").display()))
        .arg(format!("--listen-client-urls={client_url}"))
        .arg(format!("--advertise-client-urls={client_url}"))
        .arg(format!("--listen-peer-urls={peer_url}"))
        .arg(format!("--initial-advertise-peer-urls={peer_url}"))
        .arg(format!("--initial-cluster=default={peer_url}"))
        // The page cache survives every signal that this test sends.
        .arg("--unsafe-no-fsync")
        .args(&recipe.arguments)
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    // SAFETY: prctl is a plain system call and safe between fork and exec. The server must not outlive us.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    let mut process = command.spawn().map_err(|error| format!("{}: {error}", recipe.program.display()))?;
    let log = Log::default();
    let stderr = process.stderr.take().expect("piped above");
    match ready(BufReader::new(stderr), &log) {
        Some(stderr) => {
            let kept = Arc::clone(&log);
            std::thread::spawn(move || {
                for line in stderr.lines().map_while(Result::ok) {
                    keep(&kept, line);
                }
            });
            Ok((process, log))
        }
        None => {
            drop(process.kill());
            let status = process.wait().map_err(|error| error.to_string())?;
            let lines: Vec<String> = log.lock().expect("not shared yet").drain(..).collect();
            Err(format!("{} ended ({status}) before it was ready:\n{}", recipe.name, lines.join("\n")))
        }
    }
}

/// Reads the log up to the line that says the server can answer; `None` if it ends before.
fn ready(mut stderr: BufReader<ChildStderr>, log: &Log) -> Option<BufReader<ChildStderr>> {
    loop {
        let mut line = String::new();
        if stderr.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let is_ready = line.contains(READY);
        keep(log, line.trim_end().to_owned());
        if is_ready {
            return Some(stderr);
        }
    }
}

fn keep(log: &Log, line: String) {
    let mut log = log.lock().expect("nobody panics with the log");
    if log.len() == LOG_LINES_KEPT {
        log.pop_front();
    }
    log.push_back(line);
}
