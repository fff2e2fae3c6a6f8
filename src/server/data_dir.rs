//! The data directory: ours or not, and used by one process at a time.

use crate::config::{Config, FlushMethod};
use crate::env::real::{self, DirLock};
use crate::model::Fault;
use crate::runtime::boot::FORMAT;
use std::fs;
use std::io::ErrorKind::NotFound;
use std::path::{Path, PathBuf};

/// The flush method that a probe chose, with the device it was measured on.
const PROBE: &str = "FLUSH-METHOD";

pub struct DataDir {
    path: PathBuf,
    /// Held while the process lives.
    _lock: DirLock,
}

/// Takes the directory for this process; makes it if there is none. A directory of etcd, of a newer format, or
/// with other things in it is refused and left as it is.
pub fn claim(config: &Config) -> Result<DataDir, Fault> {
    let path = config.data_dir.clone();
    let shown = path.display();
    let entries = match fs::read_dir(&path) {
        Ok(entries) => entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect(),
        Err(error) if error.kind() == NotFound => Vec::new(),
        Err(error) => return Err(Fault::io(&path, "read the directory", error)),
    };
    if entries.iter().any(|name| name == "member") {
        return Err(Fault::Refused(format!(
            "{shown} is a data directory of etcd: start etcore with another --data-dir and copy the keys over with \
             `etcdctl make-mirror`"
        )));
    }
    match fs::read_to_string(path.join("FORMAT")) {
        Ok(format) if format == FORMAT => {}
        Ok(format) => {
            return Err(Fault::Refused(format!(
                "{shown} has format {:?} and this program knows {:?}: start it with the program that wrote it, or a \
                 newer one",
                format.trim(),
                FORMAT.trim()
            )));
        }
        Err(error) if error.kind() == NotFound => {
            let known = ["LOCK", "lost+found", "FORMAT.new"];
            if let Some(name) = entries.iter().find(|name| !known.contains(&name.as_str())) {
                return Err(Fault::Refused(format!(
                    "{shown} holds something else ({name}) and is no data directory of etcore: choose an empty one \
                     with --data-dir"
                )));
            }
            make(&path)?;
        }
        Err(error) => return Err(Fault::io(path.join("FORMAT"), "read", error)),
    }
    let lock = real::lock_dir(&path)?;
    Ok(DataDir { path, _lock: lock })
}

/// Makes the directory and says durably whose it is.
fn make(path: &Path) -> Result<(), Fault> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| Fault::io(path, "make the directory", error))?;
    write_durably(path, "FORMAT", FORMAT)
}

/// Writes a small file whole: a new one beside it, flushed, then renamed.
fn write_durably(dir: &Path, name: &str, content: &str) -> Result<(), Fault> {
    let (new, path) = (dir.join(format!("{name}.new")), dir.join(name));
    fs::write(&new, content)
        .and_then(|()| fs::File::open(&new)?.sync_all())
        .and_then(|()| fs::rename(&new, &path))
        .and_then(|()| fs::File::open(dir)?.sync_all())
        .map_err(|error| Fault::io(&path, "write", error))
}

/// How the logs' flushes are made: as the flag says, or by a short probe at the first start on this device.
pub fn flush_method(config: &Config, dir: &DataDir) -> Result<real::FlushMethod, Fault> {
    match config.log_flush_method {
        FlushMethod::Direct | FlushMethod::Buffered => return Ok(real::FlushMethod::DataSync),
        FlushMethod::Dsync => return Ok(real::FlushMethod::WriteThrough),
        FlushMethod::Auto => {}
    }
    if config.unsafe_no_fsync {
        return Ok(real::FlushMethod::DataSync);
    }
    let device = real::device(&dir.path)?;
    let kept = fs::read_to_string(dir.path.join(PROBE)).unwrap_or_default();
    if let Some((at, method)) = kept.trim().split_once(' ')
        && at.parse() == Ok(device)
        && let Ok(method) = method.parse()
    {
        return Ok(method);
    }
    let probe = real::probe(&dir.path)?;
    tracing::info!(
        method = %probe.method,
        fdatasync_p50_us = probe.data_sync_p50.as_micros() as u64,
        dsync_p50_us = probe.write_through_p50.as_micros() as u64,
        "measured how the logs are best flushed on this device"
    );
    write_durably(&dir.path, PROBE, &format!("{device} {}\n", probe.method))?;
    Ok(probe.method)
}
