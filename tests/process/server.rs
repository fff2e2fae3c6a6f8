//! etcore as its users meet it: a process with a directory, a port, a log and an end.
//!
//! Everything waits for an event: a line of the log, the end of the process, the answer to a request. A server
//! does not outlive the test that started it.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

pub const READY: &str = "ready to serve client requests";
/// Longer than anything here takes on a busy machine; a server that is silent for so long has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a server is started.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub data_dir: PathBuf,
    pub port: u16,
    pub arguments: Vec<String>,
}

impl Recipe {
    /// On a port that was free a moment ago.
    pub fn new(data_dir: &Path, arguments: &[&str]) -> Recipe {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        Recipe {
            data_dir: data_dir.to_owned(),
            port: free.expect("a free port").port(),
            arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        }
    }

    pub fn command(&self) -> Command {
        let url = format!("http://127.0.0.1:{}", self.port);
        let mut command = Command::new(env!("CARGO_BIN_EXE_etcore"));
        command
            .arg(format!("--data-dir={}", self.data_dir.display()))
            .arg(format!("--listen-client-urls={url}"))
            .arg(format!("--advertise-client-urls={url}"))
            .args(&self.arguments);
        command
    }

    /// Starts it without waiting for anything.
    pub fn spawn(&self) -> Server {
        Server::spawn(self.command(), self.port)
    }

    /// Starts it and waits until it serves.
    pub fn start(&self) -> Server {
        let mut server = self.spawn();
        server.wait_ready();
        server
    }

    /// Starts it where it must not serve: waits for its end.
    pub fn refused(&self) -> Ended {
        let ended = self.spawn().wait();
        assert!(!ended.log.contains(READY), "served though it should not:\n{}", ended.log);
        ended
    }
}

/// A process that has ended, and its whole log.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub log: String,
}

pub struct Server {
    pub port: u16,
    process: Child,
    lines: Receiver<String>,
    log: String,
}

impl Server {
    pub fn spawn(mut command: Command, port: u16) -> Server {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: prctl is a plain system call and safe between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut process = command.spawn().expect("etcore can be started");
        let stderr = process.stderr.take().expect("piped above");
        let (sender, lines) = mpsc::channel();
        // Ends with the process's stderr.
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Server { port, process, lines, log: String::new() }
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Reads the log up to a line that holds `text`; false if the process ends before.
    pub fn wait_line(&mut self, text: &str) -> bool {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => {
                    self.log.push_str(&line);
                    self.log.push('\n');
                    if line.contains(text) {
                        return true;
                    }
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return false,
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("silent for {PATIENCE:?}:\n{}", self.log),
            }
        }
    }

    pub fn wait_ready(&mut self) {
        assert!(self.wait_line(READY), "ended before it served:\n{}", self.log);
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to our own child, which has not been waited for.
        unsafe { libc::kill(self.process.id() as libc::pid_t, signal) };
    }

    /// Waits for the end, whatever brings it.
    pub fn wait(mut self) -> Ended {
        while self.wait_line("\n") {}
        let status = self.process.wait().expect("our own child");
        Ended { status, log: std::mem::take(&mut self.log) }
    }

    pub fn kill(self) -> Ended {
        self.signal(libc::SIGKILL);
        self.wait()
    }

    pub fn terminate(self) -> Ended {
        self.signal(libc::SIGTERM);
        self.wait()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone is as good.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
