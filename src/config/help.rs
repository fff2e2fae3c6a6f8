//! What people read about the flags: `--help`, and the table in the README.

use super::flags::{Effect, FLAGS, Flag, Kind, Section};
use std::fmt::Write;

/// To stderr when the command line is wrong.
pub const USAGE: &str = "\
Usage:

  etcore [flags]
    Start the server. Without flags it serves 127.0.0.1:2379 and keeps its data in ./default.etcore.

  etcore version
    Print etcore's own version.

  etcore --version
    Print the version of etcd that is spoken.

  etcore -h | --help
    Print all flags. Each can also be set in the environment: --data-dir as ETCD_DATA_DIR.
";

/// The whole of `--help`.
pub fn help() -> String {
    let mut text = USAGE.to_owned();
    for section in Section::ALL {
        write!(text, "\n{}:\n\n", section.title()).expect("writing to a string");
        for flag in in_section(section) {
            writeln!(text, "  {}\n    {}{}", head(flag), flag.help, remark(flag))
                .expect("writing to a string");
        }
    }
    text
}

/// The table in the README, between its markers.
pub fn markdown() -> String {
    let mut text = String::new();
    for section in Section::ALL {
        write!(text, "\n**{}**\n\n| flag | default | effect |\n|---|---|---|\n", section.title())
            .expect("writing to a string");
        for flag in in_section(section) {
            let default = match flag.default {
                "" => String::new(),
                default => format!("`{default}`"),
            };
            writeln!(text, "| `--{}` | {default} | {}{} |", flag.name, escape(flag.help), remark(flag))
                .expect("writing to a string");
        }
    }
    text.push('\n');
    text
}

fn in_section(section: Section) -> impl Iterator<Item = &'static Flag> {
    FLAGS.iter().filter(move |flag| flag.section == section)
}

fn head(flag: &Flag) -> String {
    let value = match flag.kind {
        Kind::Bool => "[=true|false]".into(),
        Kind::Leftover => String::new(),
        Kind::Choice(words) => format!(" {}", words.join("|")),
        _ => format!(" '{}'", flag.default),
    };
    let default = match flag.kind {
        Kind::Bool | Kind::Choice(_) if !flag.default.is_empty() => format!(" (default {})", flag.default),
        _ => String::new(),
    };
    format!("--{}{value}{default}", flag.name)
}

fn remark(flag: &Flag) -> &'static str {
    match flag.effect {
        Effect::Works | Effect::Ignored => "",
        Effect::NoEffectYet => " *No effect yet.*",
        Effect::Refused(_) => " *Other values are refused until this works.*",
    }
}

fn escape(text: &str) -> String {
    text.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To renew the table: `ETCORE_BLESS=1 cargo test --lib config::help`.
    #[test]
    fn the_table_in_the_readme_is_this_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
        let readme = std::fs::read_to_string(path).unwrap();
        let (before, rest) = readme.split_once("<!-- flags -->\n").expect("the README marks its table");
        let (table, after) = rest.split_once("<!-- /flags -->").expect("the README ends its table");
        if std::env::var_os("ETCORE_BLESS").is_some() {
            let readme = format!("{before}<!-- flags -->\n{}<!-- /flags -->{after}", markdown());
            std::fs::write(path, readme).unwrap();
        } else {
            assert_eq!(table, markdown(), "run ETCORE_BLESS=1 cargo test --lib config::help");
        }
    }

    #[test]
    fn help_names_every_flag() {
        let help = help();
        for flag in FLAGS {
            assert!(help.contains(&format!("\n  --{}", flag.name)), "{}", flag.name);
        }
    }
}
