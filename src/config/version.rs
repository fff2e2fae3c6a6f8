//! The versions that clients see. They are etcd's, since clients decide by them; etcore's own is the package's.

/// Of the server: `Status.version`, `/version`, `--version`.
pub const SERVER: &str = "3.7.1";
/// Of the cluster: the lowest minor of its members.
pub const CLUSTER: &str = "3.7.0";
/// Of the stored data: `Status.storageVersion`.
pub const STORAGE: &str = "3.7.0";
/// etcore's own.
pub const OWN: &str = env!("CARGO_PKG_VERSION");

/// What `--version` prints: etcd's four lines, which tools parse (etcd: flags.md 1, trap G9). The compiler
/// and the commit are named as what they are; they are not Go's.
pub fn etcd_lines() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!(
        "etcd Version: {SERVER}\nGit SHA: etcore-{OWN}\nGo Version: none (Rust)\nGo OS/Arch: {}/{architecture}\n",
        std::env::consts::OS
    )
}
