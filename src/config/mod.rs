//! The configuration: flags and environment in, one checked [`Config`] out.
//!
//! Pure: arguments and variables are given to it, and what should be printed, logged or refused is returned; it
//! prints nothing, opens nothing and ends nothing. It does not know what the settings are used for.

pub mod flags;
pub mod help;
pub mod splits;
pub mod syntax;
pub mod url;
pub mod version;

use bytes::Bytes;
use flags::{Effect, FLAGS, Kind};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use syntax::{Misuse, Source, Values};
use url::{Scheme, Url};

/// Everything the server is told from outside, with defaults filled in and rules checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub name: String,
    pub data_dir: PathBuf,
    pub listen_client: Vec<Listen>,
    /// Not opened while there are no other members.
    pub listen_peer: Vec<Listen>,
    /// Sorted; as members list them.
    pub advertise_client_urls: Vec<String>,
    /// Sorted; with the token they make the ids of member and cluster.
    pub initial_advertise_peer_urls: Vec<String>,
    pub initial_cluster: Vec<Peer>,
    pub initial_cluster_token: String,
    /// As the status shows it: negative for no quota.
    pub quota_backend_bytes: i64,
    pub max_request_bytes: usize,
    pub max_txn_ops: usize,
    pub max_concurrent_streams: u32,
    pub snapshot_count: u64,
    pub heartbeat_interval: Duration,
    pub election_timeout: Duration,
    pub unsafe_no_fsync: bool,
    pub log_level: LogLevel,
    pub log_format: LogFormat,
    /// Shards of a new data directory; `None`: as many as executors.
    pub shards: Option<u16>,
    /// First keys of the shards but the first; `None`: the built-in table. One less than `shards`, if given.
    pub shard_splits: Option<Vec<Bytes>>,
    /// `None`: all CPUs of the affinity mask.
    pub executors: Option<u16>,
    /// `None`: an eighth of memory.
    pub dirty_bytes: Option<u64>,
    pub log_flush_method: FlushMethod,
}

/// An address to listen on, and the URL that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    pub url: String,
    pub address: SocketAddr,
}

/// A member as `--initial-cluster` names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub name: String,
    /// Sorted.
    pub urls: Vec<String>,
}

/// Least grave level that is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    Debug,
    Info,
    Warn,
    Error,
    /// etcd's panic and fatal: only the line that says why the process ends.
    Fatal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Json,
    Console,
}

/// How the log's writes become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushMethod {
    /// The best of the others that the file system can do.
    Auto,
    /// O_DIRECT, then fdatasync.
    Direct,
    /// O_DIRECT and O_DSYNC.
    Dsync,
    /// Through the page cache, then fdatasync.
    Buffered,
}

/// What the command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Serve; the notices are logged once logging works.
    Serve(Box<Config>, Vec<Notice>),
    /// To stdout, exit code 0.
    Print(String),
}

/// A line for the log about the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub warn: bool,
    pub message: &'static str,
    pub fields: Vec<(&'static str, String)>,
}

/// Why the server does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Both to stderr, the mistake first; exit code 2.
    Usage { mistake: String, usage: &'static str },
    /// One log line of level fatal, exit code 1.
    Fatal { message: &'static str, fields: Vec<(&'static str, String)> },
}

impl Failure {
    fn refused(error: impl Into<String>) -> Self {
        Failure::Fatal { message: "failed to verify flags", fields: vec![("error", error.into())] }
    }
}

/// etcd's limit of `--election-timeout`, milliseconds.
const ELECTION_MS_MAX: u64 = 50_000;
/// What `--quota-backend-bytes=0` means.
const QUOTA_BYTES_DEFAULT: i64 = 2 << 30;
/// More than so much is asked for at one's own risk.
const QUOTA_BYTES_ADVISED_MAX: i64 = 8 << 30;
const REQUEST_BYTES_ADVISED_MAX: usize = 10 << 20;

/// `arguments`: without the program's name. `environment`: all variables; those that are not `ETCD_*` are
/// not looked at.
pub fn load(
    arguments: impl IntoIterator<Item = String>,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Action, Failure> {
    let (mut values, rest) = match syntax::read(arguments) {
        Ok(read) => read,
        Err(Misuse::Help) => return Ok(Action::Print(help::help())),
        Err(Misuse::Flag(mistake)) => return Err(Failure::Usage { mistake, usage: help::USAGE }),
    };
    if let Some(argument) = rest.first() {
        return Err(Failure::refused(format!("{argument:?} is not a valid flag")));
    }
    if values.bool("version") {
        return Ok(Action::Print(version::etcd_lines()));
    }
    let mut notices = Vec::new();
    take_environment(&mut values, environment, &mut notices)?;
    take_effects(&values, &mut notices)?;
    let config = Config::from_values(&values).map_err(Failure::refused)?;
    advise(&config, &values, &mut notices);
    Ok(Action::Serve(Box::new(config), notices))
}

/// Variables set flags that the command line does not (etcd: flags.md 1, trap G6).
fn take_environment(
    values: &mut Values,
    environment: impl IntoIterator<Item = (String, String)>,
    notices: &mut Vec<Notice>,
) -> Result<(), Failure> {
    let mut variables: Vec<_> = environment
        .into_iter()
        .filter(|(name, value)| name.starts_with("ETCD_") && !value.is_empty())
        .collect();
    variables.sort();
    for (variable, value) in variables {
        let Some(flag) = FLAGS.iter().find(|flag| flag.env() == variable && flag.name != "version") else {
            notices.push(Notice {
                warn: true,
                message: "unrecognized environment variable",
                fields: vec![("environment-variable", variable)],
            });
            continue;
        };
        if values.given(flag.name).is_some() {
            return Err(Failure::Fatal {
                message: "conflicting environment variable is shadowed by corresponding command-line flag \
                          (either unset environment variable or disable flag)",
                fields: vec![("environment-variable", variable)],
            });
        }
        values
            .set(flag.name, value.clone(), Source::Environment)
            .map_err(|why| Failure::refused(format!("invalid value {value:?} for {variable}: {why}")))?;
        notices.push(Notice {
            warn: false,
            message: "recognized and used environment variable",
            fields: vec![("variable-name", variable), ("variable-value", value)],
        });
    }
    Ok(())
}

/// Ends the start for flags that must not be without effect, and says of the others that they are.
fn take_effects(values: &Values, notices: &mut Vec<Notice>) -> Result<(), Failure> {
    for (flag, given) in values.all_given() {
        let message = match flag.effect {
            Effect::Works => continue,
            Effect::Refused(sentence) if !values.is_default(flag) => {
                return Err(Failure::refused(format!("--{}: {sentence}", flag.name)));
            }
            Effect::Refused(_) => continue,
            Effect::NoEffectYet => "flag has no effect yet",
            Effect::Ignored if flag.kind == Kind::Leftover => "flag no longer supported, ignored",
            Effect::Ignored => "flag is ignored",
        };
        notices.push(Notice {
            warn: true,
            message,
            fields: vec![("flag", flag.name.to_owned()), ("value", given.text.clone())],
        });
    }
    Ok(())
}

fn advise(config: &Config, values: &Values, notices: &mut Vec<Notice>) {
    let mut warn = |message: &'static str, field: &'static str, value: String| {
        notices.push(Notice { warn: true, message, fields: vec![(field, value)] });
    };
    if values.given("name").is_none() {
        warn("the member has the default name", "name", config.name.clone());
    }
    if config.quota_backend_bytes > QUOTA_BYTES_ADVISED_MAX {
        warn(
            "quota is above the advised maximum",
            "quota-size-bytes",
            config.quota_backend_bytes.to_string(),
        );
    }
    if config.max_request_bytes > REQUEST_BYTES_ADVISED_MAX {
        warn(
            "request limit is above the advised maximum",
            "max-request-bytes",
            config.max_request_bytes.to_string(),
        );
    }
    if config.unsafe_no_fsync {
        warn(
            "nothing is flushed to the disk; a crash loses or damages data",
            "flag",
            "unsafe-no-fsync".into(),
        );
    }
}

impl Config {
    /// Applies the rules between flags; the error says which does not hold (etcd: errors.md 5).
    fn from_values(values: &Values) -> Result<Config, String> {
        check_bystanders(values)?;

        let name = values.text("name").to_owned();
        let data_dir = match values.text("data-dir") {
            "" => format!("{name}.etcore"),
            given => given.to_owned(),
        };

        let (heartbeat, election) = (values.uint("heartbeat-interval"), values.uint("election-timeout"));
        if heartbeat == 0 {
            return Err("--heartbeat-interval must be >0 (set to 0ms)".into());
        }
        if election == 0 {
            return Err("--election-timeout must be >0 (set to 0ms)".into());
        }
        if heartbeat.saturating_mul(5) > election {
            return Err(format!(
                "--election-timeout[{election}ms] should be at least as 5 times as --heartbeat-interval[{heartbeat}ms]"
            ));
        }
        if election > ELECTION_MS_MAX {
            return Err(format!(
                "--election-timeout[{election}ms] is too long, and should be set less than {ELECTION_MS_MAX}ms"
            ));
        }

        let listen_client = listen(values, "listen-client-urls")?;
        let listen_peer = listen(values, "listen-peer-urls")?;
        if values.given("listen-client-urls").is_some() && values.given("advertise-client-urls").is_none() {
            return Err(
                "--advertise-client-urls is required when --listen-client-urls is set explicitly".into()
            );
        }
        let advertise_peer = urls(values, "initial-advertise-peer-urls")?;
        let initial_cluster = initial_cluster(values, &name, &advertise_peer)?;

        let shard_splits = match values.text("shard-splits") {
            "" => None,
            text => Some(splits::parse(text).map_err(|why| format!("--shard-splits: {why}"))?),
        };
        let shards = match (values.uint("shards") as u16, &shard_splits) {
            (0, None) => None,
            (given, None) => Some(given),
            (given, Some(splits)) => {
                let needed = u16::try_from(splits.len() + 1)
                    .map_err(|_| "--shard-splits: too many keys".to_owned())?;
                if given != 0 && given != needed {
                    return Err(format!(
                        "--shards={given} needs {} keys in --shard-splits, not {}; leave one of the two out",
                        given - 1,
                        splits.len()
                    ));
                }
                Some(needed)
            }
        };

        Ok(Config {
            data_dir: data_dir.into(),
            listen_client,
            listen_peer,
            advertise_client_urls: texts(&urls(values, "advertise-client-urls")?),
            initial_advertise_peer_urls: texts(&advertise_peer),
            initial_cluster,
            initial_cluster_token: values.text("initial-cluster-token").to_owned(),
            quota_backend_bytes: match values.int("quota-backend-bytes") {
                0 => QUOTA_BYTES_DEFAULT,
                given => given,
            },
            max_request_bytes: values.uint("max-request-bytes") as usize,
            max_txn_ops: usize::try_from(values.uint("max-txn-ops")).unwrap_or(usize::MAX),
            max_concurrent_streams: values.uint("max-concurrent-streams") as u32,
            snapshot_count: match values.uint("snapshot-count") {
                0 => 10_000,
                given => given,
            },
            heartbeat_interval: Duration::from_millis(heartbeat),
            election_timeout: Duration::from_millis(election),
            unsafe_no_fsync: values.bool("unsafe-no-fsync"),
            log_level: match values.text("log-level") {
                "debug" => LogLevel::Debug,
                "warn" => LogLevel::Warn,
                "error" => LogLevel::Error,
                "panic" | "fatal" => LogLevel::Fatal,
                _ => LogLevel::Info,
            },
            log_format: match values.text("log-format") {
                "console" => LogFormat::Console,
                _ => LogFormat::Json,
            },
            shards,
            shard_splits,
            executors: Some(values.uint("executors") as u16).filter(|given| *given != 0),
            dirty_bytes: Some(values.uint("dirty-bytes")).filter(|given| *given != 0),
            log_flush_method: match values.text("log-flush-method") {
                "direct" => FlushMethod::Direct,
                "dsync" => FlushMethod::Dsync,
                "buffered" => FlushMethod::Buffered,
                _ => FlushMethod::Auto,
            },
            name,
        })
    }

    /// What must hold when a data directory is made and is not asked again afterwards: the one member of the
    /// initial cluster is this one, under the addresses it advertises.
    pub fn check_bootstrap(&self) -> Result<(), String> {
        let Some(own) = self.initial_cluster.iter().find(|peer| peer.name == self.name) else {
            return Err(format!(
                "couldn't find local name {:?} in the initial cluster configuration",
                self.name
            ));
        };
        if own.urls != self.initial_advertise_peer_urls {
            return Err(format!(
                "--initial-cluster names {} for {}, but --initial-advertise-peer-urls is {}",
                own.urls.join(","),
                self.name,
                self.initial_advertise_peer_urls.join(",")
            ));
        }
        Ok(())
    }
}

/// Rules of flags that have no effect yet; a wrong value is as wrong as it will be.
fn check_bystanders(values: &Values) -> Result<(), String> {
    let mode = values.text("auto-compaction-mode");
    if !["periodic", "revision"].contains(&mode) {
        return Err(format!("unknown auto-compaction-mode {mode:?}"));
    }
    if values.duration("compact-hash-check-time").is_zero() {
        let set = values.text("compact-hash-check-time");
        return Err(format!("--compact-hash-check-time must be >0 (set to {set})"));
    }
    check_gates(values.text("feature-gates")).map_err(|why| format!("--feature-gates: {why}"))
}

/// The gates of etcd 3.7 (etcd: flags.md 4).
const GATES: [&str; 11] = [
    "AllAlpha",
    "AllBeta",
    "StopGRPCServiceOnDefrag",
    "InitialCorruptCheck",
    "CompactHashCheck",
    "TxnModeWriteWithSharedBuffer",
    "LeaseCheckpoint",
    "LeaseCheckpointPersist",
    "SetMemberLocalAddr",
    "FastLeaseKeepAlive",
    "PriorityRequest",
];

fn check_gates(text: &str) -> Result<(), String> {
    let mut on = Vec::new();
    for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let (gate, value) = item.split_once('=').ok_or_else(|| format!("missing bool value for {item}"))?;
        let (gate, value) = (gate.trim(), value.trim());
        if !GATES.contains(&gate) {
            return Err(format!("unrecognized feature gate: {gate}"));
        }
        if syntax::bool(value).map_err(|_| format!("invalid value of {gate}={value}, must be a bool"))? {
            on.push(gate);
        }
    }
    let has = |gate: &str| on.contains(&gate);
    if has("LeaseCheckpointPersist") && !has("LeaseCheckpoint") && !has("AllAlpha") {
        return Err(
            "enabling feature gate LeaseCheckpointPersist requires enabling feature gate LeaseCheckpoint"
                .into(),
        );
    }
    Ok(())
}

fn urls(values: &Values, name: &str) -> Result<Vec<Url>, String> {
    url::parse_list(values.text(name)).map_err(|why| format!("--{name}: {why}"))
}

fn texts(urls: &[Url]) -> Vec<String> {
    urls.iter().map(|url| url.text.clone()).collect()
}

fn listen(values: &Values, name: &str) -> Result<Vec<Listen>, String> {
    urls(values, name)?
        .into_iter()
        .map(|url| match url.scheme {
            Scheme::Http => Ok(Listen { address: url.address()?, url: url.text }),
            Scheme::Https => Err(format!(
                "--{name}: TLS does not work in etcore yet, so it cannot listen on {}; use http, or put a TLS \
                 proxy in front",
                url.text
            )),
            Scheme::Unix | Scheme::Unixs => Err(format!(
                "--{name}: etcore does not listen on unix sockets yet, so not on {}; use http",
                url.text
            )),
        })
        .collect()
}

fn initial_cluster(values: &Values, name: &str, advertise_peer: &[Url]) -> Result<Vec<Peer>, String> {
    // With a name of its own and no list, a member is its own cluster (etcd: flags.md 2).
    if values.given("initial-cluster").is_none() && name != "default" {
        return Ok(vec![Peer { name: name.to_owned(), urls: texts(advertise_peer) }]);
    }
    let text = values.text("initial-cluster");
    let mut peers: Vec<Peer> = Vec::new();
    for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let (name, address) = item
            .split_once('=')
            .filter(|(name, address)| !name.is_empty() && !address.is_empty())
            .ok_or_else(|| format!("--initial-cluster: {item:?} is not of the form name=url"))?;
        let address = url::parse_list(address).map_err(|why| format!("--initial-cluster: {why}"))?.remove(0);
        if peers.iter().any(|peer| peer.urls.contains(&address.text)) {
            return Err(format!("initial cluster {text} has duplicate url"));
        }
        match peers.iter_mut().find(|peer| peer.name == name) {
            Some(peer) => peer.urls.push(address.text),
            None => peers.push(Peer { name: name.to_owned(), urls: vec![address.text] }),
        }
    }
    if peers.len() > 1 {
        return Err(format!(
            "--initial-cluster names {} members, but clusters of several members do not work in etcore yet; name \
             this one only",
            peers.len()
        ));
    }
    for peer in &mut peers {
        peer.urls.sort();
    }
    Ok(peers)
}

#[cfg(test)]
mod tests;
