//! Every flag, once. Parsing, the environment, `--help` and the table in the README are made from this list, so
//! a flag is added, renamed or explained in one place.
//!
//! The names, defaults and kinds are etcd's (etcd: flags.md 2), so that a command line written for etcd is
//! understood as a whole; `effect` says what comes of it. Knows nothing of what the values are used for.

use Effect::{Ignored, NoEffectYet, Refused, Works};
use Kind::{Bool, Choice, Duration, Int, Leftover, Text, Uint, Urls};
use Section::*;

#[derive(Debug)]
pub struct Flag {
    /// Without dashes.
    pub name: &'static str,
    pub kind: Kind,
    /// As one would write it on the command line.
    pub default: &'static str,
    pub effect: Effect,
    pub section: Section,
    pub help: &'static str,
}

/// What a value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Never takes the next argument as its value.
    Bool,
    /// Whole number, 64 bits; Go's notation (`0x10`, `1_000`).
    Int,
    /// Whole number >= 0 of so many bits.
    Uint(u32),
    /// Go's notation: `1h30m`, `250ms`.
    Duration,
    Text,
    /// Comma-separated URLs of http, https, unix or unixs; an empty value where the default is empty.
    Urls,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A flag of etcd 2 and older: takes what it is given, needs no value.
    Leftover,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Works,
    /// Accepted; one log line says that nothing comes of it.
    NoEffectYet,
    /// A value other than the default ends the start with this sentence: running without would be less safe
    /// or another cluster than what was asked for.
    Refused(&'static str),
    /// etcd accepts and ignores it too.
    Ignored,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    Own,
    Member,
    Clustering,
    Security,
    Auth,
    Observation,
    Other,
    Leftovers,
}

impl Section {
    pub const ALL: [Section; 8] = [Own, Member, Clustering, Security, Auth, Observation, Other, Leftovers];

    pub fn title(self) -> &'static str {
        match self {
            Own => "etcore's own",
            Member => "Member",
            Clustering => "Clustering",
            Security => "Security",
            Auth => "Auth",
            Observation => "Monitoring, logging and tracing",
            Other => "Other",
            Leftovers => "Left over from etcd 2 and older",
        }
    }
}

impl Flag {
    /// The environment variable: `ETCD_` and the name in capitals, dashes as underscores.
    pub fn env(&self) -> String {
        format!("ETCD_{}", self.name.to_uppercase().replace('-', "_"))
    }

    pub fn takes_no_value(&self) -> bool {
        matches!(self.kind, Bool | Leftover)
    }
}

/// The flag of this name.
pub fn find(name: &str) -> Option<(usize, &'static Flag)> {
    FLAGS.iter().enumerate().find(|(_, flag)| flag.name == name)
}

const TLS: &str = "TLS does not work in etcore yet, and serving without it would be less safe than asked for; \
                   remove the flag, or put a TLS proxy in front";
const AUTH: &str = "authentication does not work in etcore yet, and serving without it would be less safe than \
                    asked for; remove the flag";
const ACCESS: &str = "etcore cannot restrict HTTP access yet, and serving without would be less safe than asked \
                      for; remove the flag";
const DISCOVERY: &str = "discovery of other members does not work in etcore yet; remove the flag to start a \
                         cluster of one member";
const MEMBERSHIP: &str = "changes of membership do not work in etcore yet; remove the flag to start a cluster of \
                          one member";
const CONFIG_FILE: &str = "configuration files are not read by etcore yet, and starting without what the file \
                           says about security could be less safe than asked for; give its settings as flags";

const fn flag(
    section: Section,
    name: &'static str,
    kind: Kind,
    default: &'static str,
    effect: Effect,
    help: &'static str,
) -> Flag {
    Flag { name, kind, default, effect, section, help }
}

const fn leftover(name: &'static str) -> Flag {
    flag(Leftovers, name, Leftover, "", Ignored, "Accepted and ignored.")
}

#[rustfmt::skip] // one flag on two lines reads as the table it is
pub const FLAGS: &[Flag] = &[
    flag(Own, "shards", Uint(16), "0", Works,
        "Number of shards of a new data directory. 0: as many as executors, or as --shard-splits says. An existing directory keeps its number and refuses another."),
    flag(Own, "shard-splits", Text, "", Works,
        "First key of each shard but the first, ascending, comma-separated, for a new data directory. A key is text with Go's escapes (\\x00, \\n, \\\\; \\, is a comma) or, after 0x, hexadecimal. Empty: boundaries that spread ASCII keys and Kubernetes' prefixes."),
    flag(Own, "executors", Uint(16), "0", Works,
        "Number of CPUs that serve, each with a pinned executor. 0: all of the process's affinity mask."),
    flag(Own, "dirty-bytes", Uint(64), "0", Works,
        "Ceiling of tree pages that are changed and not yet checkpointed, in bytes over all shards. 0: an eighth of memory."),
    flag(Own, "log-flush-method", Choice(&["auto", "direct", "dsync", "buffered"]), "auto", Works,
        "How the log reaches the disk: direct (O_DIRECT, then fdatasync), dsync (O_DIRECT and O_DSYNC), buffered (page cache, then fdatasync), or auto: the best of them that the file system can do."),

    flag(Member, "name", Text, "default", Works,
        "Name of this member."),
    flag(Member, "data-dir", Text, "", Works,
        "Directory of the data. Empty: the member's name followed by .etcore."),
    flag(Member, "wal-dir", Text, "", NoEffectYet,
        "A directory of its own for the log."),
    flag(Member, "snapshot-count", Uint(64), "10000", Works,
        "Applied entries after which etcd takes a snapshot; etcore checkpoints by bytes to replay and reads this as a hint."),
    flag(Member, "snapshot-catchup-entries", Uint(64), "5000", NoEffectYet,
        "Log entries kept for followers that are behind."),
    flag(Member, "heartbeat-interval", Uint(64), "100", Works,
        "Milliseconds between heartbeats of a leader."),
    flag(Member, "election-timeout", Uint(64), "1000", Works,
        "Milliseconds without a leader before an election; at least five heartbeats, below 50000."),
    flag(Member, "initial-election-tick-advance", Bool, "true", NoEffectYet,
        "Whether the first election may come early."),
    flag(Member, "listen-peer-urls", Urls, "http://localhost:2380", NoEffectYet,
        "Addresses to listen on for other members."),
    flag(Member, "listen-client-urls", Urls, "http://localhost:2379", Works,
        "Addresses to listen on for clients; the host is an IP address or localhost."),
    flag(Member, "listen-client-http-urls", Urls, "", NoEffectYet,
        "Addresses that serve clients HTTP only."),
    flag(Member, "max-snapshots", Uint(64), "5", NoEffectYet,
        "Snapshot files to keep."),
    flag(Member, "max-wals", Uint(64), "5", NoEffectYet,
        "Log files to keep."),
    flag(Member, "quota-backend-bytes", Int, "0", Works,
        "Size of the data from which writes are refused. 0: 2 GiB; negative: none. Shown in the status; the alarm comes later."),
    flag(Member, "backend-bbolt-freelist-type", Text, "map", NoEffectYet,
        "How etcd's storage engine tracks free pages (array or map)."),
    flag(Member, "backend-batch-interval", Duration, "0s", NoEffectYet,
        "Longest time between commits of etcd's storage engine."),
    flag(Member, "backend-batch-limit", Int, "0", NoEffectYet,
        "Most operations between commits of etcd's storage engine."),
    flag(Member, "max-txn-ops", Uint(64), "128", Works,
        "Most operations in a branch, and comparisons, of a transaction."),
    flag(Member, "max-request-bytes", Uint(32), "1572864", Works,
        "Longest request in bytes."),
    flag(Member, "max-concurrent-streams", Uint(32), "4294967295", Works,
        "Most calls under way on one connection."),
    flag(Member, "grpc-keepalive-min-time", Duration, "5s", NoEffectYet,
        "Shortest time between pings that a client may send."),
    flag(Member, "grpc-keepalive-interval", Duration, "2h", NoEffectYet,
        "Idle time after which the server pings a client; 0: never."),
    flag(Member, "grpc-keepalive-timeout", Duration, "20s", NoEffectYet,
        "Time a client has to answer a ping; 0: for ever."),
    flag(Member, "socket-reuse-port", Bool, "false", NoEffectYet,
        "Share the port with other processes (SO_REUSEPORT)."),
    flag(Member, "socket-reuse-address", Bool, "false", NoEffectYet,
        "Bind addresses that still wait after a close (SO_REUSEADDR)."),
    flag(Member, "enable-grpc-gateway", Bool, "true", NoEffectYet,
        "Serve the API as JSON over HTTP too."),
    flag(Member, "raft-read-timeout", Duration, "5s", NoEffectYet,
        "Time to wait for a member's data; at least 5s."),
    flag(Member, "raft-write-timeout", Duration, "5s", NoEffectYet,
        "Time to wait for a member to take data; at least 5s."),
    flag(Member, "memory-mlock", Bool, "false", NoEffectYet,
        "Keep the process's memory from being swapped."),
    flag(Member, "feature-gates", Text, "", NoEffectYet,
        "Features to turn on or off: A=true,B=false, AllAlpha, AllBeta."),

    flag(Clustering, "initial-advertise-peer-urls", Urls, "http://localhost:2380", Works,
        "Addresses of this member for others; member and cluster id are made from them in a new data directory."),
    flag(Clustering, "advertise-client-urls", Urls, "http://localhost:2379", Works,
        "Addresses of this member for clients; required when --listen-client-urls is given."),
    flag(Clustering, "initial-cluster", Text, "default=http://localhost:2380", Works,
        "The members of a new cluster: name=url, and so on. More than one member is refused for now."),
    flag(Clustering, "initial-cluster-state", Choice(&["new", "existing"]), "new", Refused(MEMBERSHIP),
        "new, or existing to join a cluster that runs."),
    flag(Clustering, "initial-cluster-token", Text, "etcd-cluster", Works,
        "Makes clusters with the same addresses different."),
    flag(Clustering, "strict-reconfig-check", Bool, "true", NoEffectYet,
        "Refuse changes of membership that could lose the quorum."),
    flag(Clustering, "pre-vote", Bool, "true", NoEffectYet,
        "Ask before an election whether it could be won."),
    flag(Clustering, "auto-compaction-mode", Text, "periodic", NoEffectYet,
        "How to read --auto-compaction-retention: periodic or revision."),
    flag(Clustering, "auto-compaction-retention", Text, "0", NoEffectYet,
        "History to keep when compacting by itself: hours or a duration, or revisions. 0: no compaction."),
    flag(Clustering, "discovery-token", Text, "", Refused(DISCOVERY),
        "Token of a discovery cluster."),
    flag(Clustering, "discovery-endpoints", Text, "", Refused(DISCOVERY),
        "Addresses of a discovery cluster."),
    flag(Clustering, "discovery-dial-timeout", Duration, "2s", Refused(DISCOVERY),
        "Time to reach the discovery cluster."),
    flag(Clustering, "discovery-request-timeout", Duration, "5s", Refused(DISCOVERY),
        "Time for an answer of the discovery cluster."),
    flag(Clustering, "discovery-keepalive-time", Duration, "2s", Refused(DISCOVERY),
        "Idle time before the discovery cluster is pinged."),
    flag(Clustering, "discovery-keepalive-timeout", Duration, "6s", Refused(DISCOVERY),
        "Time for the discovery cluster to answer a ping."),
    flag(Clustering, "discovery-insecure-transport", Bool, "true", Refused(DISCOVERY),
        "Reach the discovery cluster without TLS."),
    flag(Clustering, "discovery-insecure-skip-tls-verify", Bool, "false", Refused(DISCOVERY),
        "Trust any certificate of the discovery cluster."),
    flag(Clustering, "discovery-cert", Text, "", Refused(DISCOVERY),
        "Certificate file for the discovery cluster."),
    flag(Clustering, "discovery-key", Text, "", Refused(DISCOVERY),
        "Key file for the discovery cluster."),
    flag(Clustering, "discovery-cacert", Text, "", Refused(DISCOVERY),
        "File of authorities to trust for the discovery cluster."),
    flag(Clustering, "discovery-user", Text, "", Refused(DISCOVERY),
        "User at the discovery cluster."),
    flag(Clustering, "discovery-password", Text, "", Refused(DISCOVERY),
        "Password at the discovery cluster."),
    flag(Clustering, "discovery-srv", Text, "", Refused(DISCOVERY),
        "DNS domain whose SRV records name the members."),
    flag(Clustering, "discovery-srv-name", Text, "", Refused(DISCOVERY),
        "Suffix of the SRV service name."),
    flag(Clustering, "discovery-fallback", Choice(&["exit", "proxy"]), "exit", Refused(DISCOVERY),
        "What to do when discovery fails."),
    flag(Clustering, "v2-deprecation", Choice(&["write-only", "write-only-skip-check", "write-only-drop-data", "gone"]), "write-only", Ignored,
        "Accepted and ignored, as by etcd."),
    flag(Clustering, "force-new-cluster", Bool, "false", Refused(MEMBERSHIP),
        "Keep the data and forget all other members."),

    flag(Security, "cert-file", Text, "", Refused(TLS),
        "Certificate for clients."),
    flag(Security, "key-file", Text, "", Refused(TLS),
        "Key of that certificate."),
    flag(Security, "client-cert-auth", Bool, "false", Refused(TLS),
        "Ask clients for certificates, and take their common name as user."),
    flag(Security, "trusted-ca-file", Text, "", Refused(TLS),
        "Authorities that sign clients' certificates; clients must show one."),
    flag(Security, "auto-tls", Bool, "false", Refused(TLS),
        "Make a certificate for clients."),
    flag(Security, "client-cert-file", Text, "", Refused(TLS),
        "Certificate to show when the server is a client itself."),
    flag(Security, "client-key-file", Text, "", Refused(TLS),
        "Key of that certificate."),
    flag(Security, "client-crl-file", Text, "", Refused(TLS),
        "Revoked certificates of clients."),
    flag(Security, "client-cert-allowed-hostname", Text, "", Refused(TLS),
        "Host names that clients' certificates may have."),
    flag(Security, "peer-cert-file", Text, "", Refused(TLS),
        "Certificate for other members."),
    flag(Security, "peer-key-file", Text, "", Refused(TLS),
        "Key of that certificate."),
    flag(Security, "peer-client-cert-auth", Bool, "false", Refused(TLS),
        "Ask other members for certificates."),
    flag(Security, "peer-trusted-ca-file", Text, "", Refused(TLS),
        "Authorities that sign members' certificates."),
    flag(Security, "peer-auto-tls", Bool, "false", Refused(TLS),
        "Make a certificate for other members."),
    flag(Security, "peer-client-cert-file", Text, "", Refused(TLS),
        "Certificate to show to other members."),
    flag(Security, "peer-client-key-file", Text, "", Refused(TLS),
        "Key of that certificate."),
    flag(Security, "peer-crl-file", Text, "", Refused(TLS),
        "Revoked certificates of members."),
    flag(Security, "peer-cert-allowed-cn", Text, "", Refused(TLS),
        "Common names that members' certificates may have."),
    flag(Security, "peer-cert-allowed-hostname", Text, "", Refused(TLS),
        "Host names that members' certificates may have."),
    flag(Security, "peer-skip-client-san-verification", Bool, "false", Refused(TLS),
        "Do not check the addresses in members' certificates."),
    flag(Security, "self-signed-cert-validity", Uint(64), "1", Refused(TLS),
        "Years that certificates made here are good for."),
    flag(Security, "cipher-suites", Text, "", Refused(TLS),
        "TLS ciphers to allow, comma-separated."),
    flag(Security, "tls-min-version", Choice(&["TLS1.2", "TLS1.3"]), "TLS1.2", Refused(TLS),
        "Lowest version of TLS."),
    flag(Security, "tls-max-version", Choice(&["", "TLS1.2", "TLS1.3"]), "", Refused(TLS),
        "Highest version of TLS. Empty: the highest there is."),
    flag(Security, "cors", Text, "*", Refused(ACCESS),
        "Web origins that may use the HTTP API, comma-separated."),
    flag(Security, "host-whitelist", Text, "*", Refused(ACCESS),
        "Host names by which HTTP without TLS may be reached, comma-separated."),

    flag(Auth, "auth-token", Text, "simple", Refused(AUTH),
        "Kind of token: simple, or jwt with its options."),
    flag(Auth, "bcrypt-cost", Uint(64), "10", NoEffectYet,
        "Cost of hashing a password, 4 to 31."),
    flag(Auth, "auth-token-ttl", Uint(64), "300", NoEffectYet,
        "Seconds after which an unused simple token ends."),

    flag(Observation, "enable-pprof", Bool, "false", NoEffectYet,
        "Serve profiles of the running process."),
    flag(Observation, "metrics", Choice(&["basic", "extensive"]), "basic", NoEffectYet,
        "How much the metrics tell."),
    flag(Observation, "listen-metrics-urls", Urls, "", NoEffectYet,
        "Further addresses that serve metrics and health."),
    flag(Observation, "logger", Choice(&["zap"]), "zap", Ignored,
        "Names etcd's logging library; the shape of the lines is the same here."),
    flag(Observation, "log-outputs", Text, "default", NoEffectYet,
        "Where log lines go; for now always to stderr."),
    flag(Observation, "log-level", Choice(&["debug", "info", "warn", "error", "panic", "fatal"]), "info", Works,
        "Least grave level that is logged."),
    flag(Observation, "log-format", Choice(&["json", "console"]), "json", Works,
        "Shape of log lines."),
    flag(Observation, "enable-log-rotation", Bool, "false", NoEffectYet,
        "Rotate the log file."),
    flag(Observation, "log-rotation-config-json", Text, r#"{"maxsize": 100, "maxage": 0, "maxbackups": 0, "localtime": false, "compress": false}"#, NoEffectYet,
        "How to rotate the log file."),
    flag(Observation, "warning-unary-request-duration", Duration, "300ms", NoEffectYet,
        "Time after which a request is logged as slow."),
    flag(Observation, "warning-apply-duration", Duration, "100ms", NoEffectYet,
        "Time after which applying an entry is logged as slow."),
    flag(Observation, "enable-distributed-tracing", Bool, "false", NoEffectYet,
        "Send traces to a collector."),
    flag(Observation, "distributed-tracing-address", Text, "localhost:4317", NoEffectYet,
        "Address of the collector."),
    flag(Observation, "distributed-tracing-service-name", Text, "etcd", NoEffectYet,
        "Name of the service in traces."),
    flag(Observation, "distributed-tracing-instance-id", Text, "", NoEffectYet,
        "Name of this process in traces."),
    flag(Observation, "distributed-tracing-sampling-rate", Int, "0", NoEffectYet,
        "Requests in a million that are traced."),

    flag(Other, "corrupt-check-time", Duration, "0s", NoEffectYet,
        "Time between comparisons of the members' data; 0: none."),
    flag(Other, "compact-hash-check-time", Duration, "1m", NoEffectYet,
        "Time between comparisons of the members' hashes of compacted data."),
    flag(Other, "compaction-batch-limit", Int, "0", NoEffectYet,
        "Revisions that etcd removes in one step of a compaction; 0: 1000."),
    flag(Other, "compaction-sleep-interval", Duration, "0s", NoEffectYet,
        "Pause of etcd between these steps; 0: 10ms."),
    flag(Other, "watch-progress-notify-interval", Duration, "0s", NoEffectYet,
        "Time between notices of progress to watchers; 0: 10m."),
    flag(Other, "downgrade-check-time", Duration, "5s", NoEffectYet,
        "Time between looks at the state of a downgrade."),
    flag(Other, "bootstrap-defrag-threshold-megabytes", Uint(64), "0", NoEffectYet,
        "Free space from which the data is rewritten at the start; 0: never."),
    flag(Other, "max-learners", Int, "1", NoEffectYet,
        "Most members that do not vote."),
    flag(Other, "unsafe-no-fsync", Bool, "false", Works,
        "Do not flush to the disk. A crash of the machine loses or damages data; for tests."),
    flag(Other, "config-file", Text, "", Refused(CONFIG_FILE),
        "File to take all settings from, instead of flags and environment."),
    flag(Other, "version", Bool, "false", Works,
        "Print the version of etcd that is spoken, and exit."),

    leftover("cluster-active-size"),
    leftover("cluster-remove-delay"),
    leftover("cluster-sync-interval"),
    leftover("config"),
    leftover("force"),
    leftover("max-result-buffer"),
    leftover("max-retry-attempts"),
    leftover("peer-heartbeat-interval"),
    leftover("peer-election-timeout"),
    leftover("retry-interval"),
    leftover("snapshot"),
    leftover("v"),
    leftover("vv"),
    leftover("test.coverprofile"),
    leftover("test.outputdir"),
];
