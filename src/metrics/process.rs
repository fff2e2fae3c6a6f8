//! What the kernel says of this process, under the names that Prometheus' clients use. Read when somebody looks;
//! what cannot be read is left out.

use super::Page;
use std::fs;

/// Fields of `/proc/self/stat` behind the command's name, counted from 0 (proc(5)).
mod field {
    pub const MAJOR_FAULTS: usize = 9;
    pub const USER_TICKS: usize = 11;
    pub const SYSTEM_TICKS: usize = 12;
    pub const START_TICKS: usize = 19;
    pub const VIRTUAL_BYTES: usize = 20;
    pub const RESIDENT_PAGES: usize = 21;
}

pub fn write(page: &mut Page) {
    if let Some(stat) = Stat::read() {
        let per_second = system(libc::_SC_CLK_TCK).max(1.0);
        let cpu = (stat.field(field::USER_TICKS) + stat.field(field::SYSTEM_TICKS)) / per_second;
        page.counter("process_cpu_seconds_total", "CPU time of user and system, seconds.", cpu);
        page.gauge(
            "process_resident_memory_bytes",
            "Memory that is resident.",
            stat.field(field::RESIDENT_PAGES) * system(libc::_SC_PAGESIZE),
        );
        page.gauge(
            "process_virtual_memory_bytes",
            "Address space, of which a tree reserves much and uses little.",
            stat.field(field::VIRTUAL_BYTES),
        );
        if let Some(booted) = booted() {
            page.gauge(
                "process_start_time_seconds",
                "Start of the process, in seconds since 1970.",
                booted + stat.field(field::START_TICKS) / per_second,
            );
        }
        page.counter(
            "etcore_major_faults_total",
            "Page faults that read from the disk: reads of trees that no cache held.",
            stat.field(field::MAJOR_FAULTS),
        );
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        page.gauge("process_open_fds", "File descriptors in use.", open.count());
    }
    if let Some(limit) = open_files_max() {
        page.gauge("process_max_fds", "File descriptors that the process may have.", limit);
    }
}

struct Stat {
    fields: Vec<f64>,
}

impl Stat {
    fn read() -> Option<Stat> {
        let text = fs::read_to_string("/proc/self/stat").ok()?;
        // The name in parentheses may hold anything; the state behind it is a letter.
        let (_, behind) = text.rsplit_once(')')?;
        Some(Stat { fields: behind.split_whitespace().map(|field| field.parse().unwrap_or(0.0)).collect() })
    }

    fn field(&self, at: usize) -> f64 {
        self.fields.get(at).copied().unwrap_or(0.0)
    }
}

/// When the machine started, in seconds since 1970.
fn booted() -> Option<f64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

fn system(name: libc::c_int) -> f64 {
    // SAFETY: sysconf has no preconditions.
    unsafe { libc::sysconf(name) as f64 }
}

fn open_files_max() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes to the struct given and nothing else.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    (result == 0).then_some(limit.rlim_cur)
}
