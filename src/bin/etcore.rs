//! Flags -> configuration -> server.

use etcore::config::{self, Action, Failure, LogFormat};
use etcore::server::{self, logging, signals};
use etcore::{ctl, model::Fault};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(code) = ctl::run(&arguments) {
        return code;
    }
    match config::load(arguments, std::env::vars()) {
        Ok(Action::Print(text)) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Ok(Action::Serve(config, notices)) => {
            logging::start(config.log_level, config.log_format);
            for notice in &notices {
                logging::notice(config.log_level, config.log_format, notice);
            }
            match server::run(&config) {
                Ok(signal) => signals::end_by(signal),
                Err(fault) => failed(config.log_format, &fault),
            }
        }
        Err(Failure::Usage { mistake, usage }) => {
            eprintln!("{mistake}\n{usage}");
            ExitCode::from(2)
        }
        Err(Failure::Fatal { message, fields }) => {
            logging::fatal(LogFormat::Json, message, &fields);
            ExitCode::FAILURE
        }
    }
}

fn failed(format: LogFormat, fault: &Fault) -> ExitCode {
    logging::fatal(format, "the server does not start", &[("error", fault.to_string())]);
    ExitCode::FAILURE
}
