//! etcore's own subcommands.

use crate::config::version;
use std::process::ExitCode;

/// Runs the subcommand that the arguments name; None: they are flags of the server.
pub fn run(arguments: &[String]) -> Option<ExitCode> {
    match arguments.first()?.as_str() {
        "version" => {
            println!("etcore {}", version::OWN);
            Some(ExitCode::SUCCESS)
        }
        _ => None,
    }
}
