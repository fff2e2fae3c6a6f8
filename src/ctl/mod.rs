//! etcore's own subcommands, one file each. A subcommand says what it did by its exit code; it never touches a data
//! directory that a process uses.

mod check;

use crate::config::version;
use std::process::ExitCode;

/// Runs the subcommand that the arguments name; None: they are flags of the server.
pub fn run(arguments: &[String]) -> Option<ExitCode> {
    let (name, rest) = arguments.split_first()?;
    match name.as_str() {
        "version" => {
            println!("etcore {}", version::OWN);
            Some(ExitCode::SUCCESS)
        }
        "check" => Some(check::run(rest)),
        _ => None,
    }
}
