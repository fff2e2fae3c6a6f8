//! Go's command line: how arguments become values of flags, and what a value may look like.
//!
//! Pure, and exact where scripts depend on it (etcd: flags.md 1). It checks each value against its flag's kind
//! and keeps the text; what values mean together is decided in `config`.

use super::flags::{FLAGS, Flag, Kind, find};
use super::url;
use std::time::Duration;

/// The value of every flag, as text that is valid for its kind, and where it came from.
#[derive(Clone, Debug)]
pub struct Values {
    given: Vec<Option<Given>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    pub text: String,
    pub source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    CommandLine,
    Environment,
}

/// Why a command line could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// `-h` or `--help`: not a mistake, but the end of reading.
    Help,
    /// To stderr, with the usage, exit code 2.
    Flag(String),
}

impl Values {
    pub fn none() -> Self {
        Values { given: vec![None; FLAGS.len()] }
    }

    /// What was given for a flag, if anything.
    pub fn given(&self, name: &str) -> Option<&Given> {
        self.given[index(name)].as_ref()
    }

    /// What was given, or the default.
    pub fn text(&self, name: &str) -> &str {
        let index = index(name);
        self.given[index].as_ref().map_or(FLAGS[index].default, |given| &given.text)
    }

    pub fn all_given(&self) -> impl Iterator<Item = (&'static Flag, &Given)> {
        FLAGS.iter().zip(&self.given).filter_map(|(flag, given)| Some((flag, given.as_ref()?)))
    }

    /// True if the value means what the default means.
    pub fn is_default(&self, flag: &Flag) -> bool {
        let (value, default) = (self.text(flag.name), flag.default);
        match flag.kind {
            Kind::Bool => bool(value) == bool(default),
            Kind::Int => int(value) == int(default),
            Kind::Uint(_) => uint(value, 64) == uint(default, 64),
            Kind::Duration => duration(value) == duration(default),
            Kind::Text | Kind::Urls | Kind::Choice(_) | Kind::Leftover => value == default,
        }
    }

    /// Checks a value against its flag and keeps it; the error is the reason alone.
    pub fn set(&mut self, name: &str, text: String, source: Source) -> Result<(), String> {
        let index = index(name);
        check(FLAGS[index].kind, &text)?;
        self.given[index] = Some(Given { text, source });
        Ok(())
    }

    pub fn bool(&self, name: &str) -> bool {
        bool(self.text(name)).expect("checked when set")
    }

    pub fn int(&self, name: &str) -> i64 {
        int(self.text(name)).expect("checked when set")
    }

    pub fn uint(&self, name: &str) -> u64 {
        uint(self.text(name), 64).expect("checked when set")
    }

    pub fn duration(&self, name: &str) -> Duration {
        let nanos = duration(self.text(name)).expect("checked when set");
        Duration::from_nanos(nanos.max(0) as u64)
    }
}

fn index(name: &str) -> usize {
    find(name).unwrap_or_else(|| panic!("no flag is called {name}")).0
}

/// Reads the arguments after the program's name. Returns the values and the arguments that are not flags.
pub fn read(arguments: impl IntoIterator<Item = String>) -> Result<(Values, Vec<String>), Misuse> {
    let mut values = Values::none();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            return Ok((values, arguments.collect()));
        }
        // A lone dash is an argument like any other, and the first of those ends the flags.
        if argument == "-" || !argument.starts_with('-') {
            return Ok((values, [argument].into_iter().chain(arguments).collect()));
        }
        let name = argument.strip_prefix("--").or(argument.strip_prefix('-')).unwrap_or_default();
        if name.is_empty() || name.starts_with(['-', '=']) {
            return Err(Misuse::Flag(format!("bad flag syntax: {argument}")));
        }
        let (name, value) = match name.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (name, None),
        };
        let Some((_, flag)) = find(name) else {
            return Err(match name {
                "h" | "help" => Misuse::Help,
                _ => Misuse::Flag(format!("flag provided but not defined: -{name}")),
            });
        };
        let value = match value {
            Some(value) => value,
            None if flag.takes_no_value() => "true".into(),
            None => match arguments.next() {
                Some(value) => value,
                None => return Err(Misuse::Flag(format!("flag needs an argument: -{name}"))),
            },
        };
        values.set(name, value.clone(), Source::CommandLine).map_err(|why| {
            Misuse::Flag(match flag.kind {
                Kind::Bool => format!("invalid boolean value {value:?} for -{name}: {why}"),
                _ => format!("invalid value {value:?} for flag -{name}: {why}"),
            })
        })?;
    }
    Ok((values, Vec::new()))
}

fn check(kind: Kind, text: &str) -> Result<(), String> {
    match kind {
        Kind::Bool => bool(text).map(drop),
        Kind::Int => int(text).map(drop),
        Kind::Uint(bits) => uint(text, bits).map(drop),
        Kind::Duration => duration(text).map(drop),
        Kind::Urls if text.is_empty() => Ok(()),
        Kind::Urls => url::parse_list(text).map(drop),
        Kind::Choice(words) if words.contains(&text) => Ok(()),
        Kind::Choice(words) => Err(format!("must be one of {}", words.join(", "))),
        Kind::Text | Kind::Leftover => Ok(()),
    }
}

const PARSE: &str = "parse error";
const RANGE: &str = "value out of range";

/// Go's spellings of a truth value.
pub fn bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(PARSE.into()),
    }
}

pub fn int(text: &str) -> Result<i64, String> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let magnitude = i128::from(magnitude(digits)?);
    i64::try_from(if negative { -magnitude } else { magnitude }).map_err(|_| RANGE.into())
}

/// `bits`: the widest value that fits, 1 to 64.
pub fn uint(text: &str, bits: u32) -> Result<u64, String> {
    let value = magnitude(text)?;
    if value > u64::MAX >> (64 - bits) { Err(RANGE.into()) } else { Ok(value) }
}

/// A number in Go's notation: the base by prefix, and underscores between digits or behind the prefix.
fn magnitude(text: &str) -> Result<u64, String> {
    let lower = text.to_ascii_lowercase();
    let (base, digits, prefixed) = match lower.as_bytes() {
        [b'0', b'x', ..] => (16, &lower[2..], true),
        [b'0', b'o', ..] => (8, &lower[2..], true),
        [b'0', b'b', ..] => (2, &lower[2..], true),
        [b'0', _, ..] => (8, &lower[1..], true),
        _ => (10, &lower[..], false),
    };
    let misplaced = digits.ends_with('_') || digits.contains("__") || !prefixed && digits.starts_with('_');
    let digits = digits.replace('_', "");
    // Rust's parser takes a sign, which was cut off before.
    if misplaced || digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(base)) {
        return Err(PARSE.into());
    }
    u64::from_str_radix(&digits, base).map_err(|_| RANGE.into())
}

/// Nanoseconds of a duration in Go's notation: numbers with units, or a bare 0.
pub fn duration(text: &str) -> Result<i64, String> {
    let (negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Ok(0);
    }
    if rest.is_empty() {
        return Err(PARSE.into());
    }
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(end);
        let end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        rest = tail;
        let scale: u128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return Err(PARSE.into()),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
            return Err(PARSE.into());
        }
        let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| PARSE)? };
        nanos = whole.checked_mul(scale).and_then(|more| nanos.checked_add(more)).ok_or(PARSE)?;
        let mut place = scale;
        for digit in fraction.bytes() {
            place /= 10;
            nanos += u128::from(digit - b'0') * place;
        }
    }
    let nanos = i64::try_from(nanos).map_err(|_| PARSE)?;
    Ok(if negative { -nanos } else { nanos })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_words(line: &str) -> Result<(Values, Vec<String>), Misuse> {
        read(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn every_form_of_a_flag() {
        for line in ["--name=a", "-name=a", "--name a", "-name a", "--name=b --name=a"] {
            assert_eq!(read_words(line).unwrap().0.text("name"), "a", "{line}");
        }
        assert_eq!(read_words("--name=").unwrap().0.text("name"), "");
        assert_eq!(read_words("--name=a=b").unwrap().0.text("name"), "a=b");
        // The next argument is the value, whatever it looks like.
        assert_eq!(read_words("--name --data-dir").unwrap().0.text("name"), "--data-dir");
    }

    #[test]
    fn a_bool_never_takes_the_next_argument() {
        let (values, rest) = read_words("--unsafe-no-fsync false --name=a").unwrap();
        assert!(values.bool("unsafe-no-fsync"));
        assert_eq!(rest, ["false", "--name=a"], "the first word that is no flag ends the flags");
        assert!(!read_words("--unsafe-no-fsync=F").unwrap().0.bool("unsafe-no-fsync"));
        assert_eq!(read_words("--force x").unwrap().1, ["x"], "nor do the leftovers of etcd 2");
    }

    #[test]
    fn two_dashes_end_the_flags() {
        assert_eq!(read_words("--name=a -- --name=b").unwrap().1, ["--name=b"]);
        assert_eq!(read_words("- --name=b").unwrap().1, ["-", "--name=b"]);
    }

    #[test]
    fn mistakes_in_the_words_of_go() {
        for (line, text) in [
            ("--nope", "flag provided but not defined: -nope"),
            ("-nope=1", "flag provided but not defined: -nope"),
            (
                "--experimental-initial-corrupt-check",
                "flag provided but not defined: -experimental-initial-corrupt-check",
            ),
            ("---name=a", "bad flag syntax: ---name=a"),
            ("--=a", "bad flag syntax: --=a"),
            ("--name", "flag needs an argument: -name"),
            ("--pre-vote=maybe", "invalid boolean value \"maybe\" for -pre-vote: parse error"),
            ("--max-txn-ops=x", "invalid value \"x\" for flag -max-txn-ops: parse error"),
            ("--max-txn-ops=-1", "invalid value \"-1\" for flag -max-txn-ops: parse error"),
            (
                "--max-concurrent-streams=4294967296",
                "invalid value \"4294967296\" for flag -max-concurrent-streams: value out of range",
            ),
            (
                "--grpc-keepalive-interval=2",
                "invalid value \"2\" for flag -grpc-keepalive-interval: parse error",
            ),
            (
                "--listen-client-urls=ftp://1.2.3.4:1",
                "invalid value \"ftp://1.2.3.4:1\" for flag -listen-client-urls: URL scheme must be http, https, \
                 unix, or unixs: ftp://1.2.3.4:1",
            ),
        ] {
            assert_eq!(read_words(line).unwrap_err(), Misuse::Flag(text.into()), "{line}");
        }
        assert_eq!(read_words("--help").unwrap_err(), Misuse::Help);
        assert_eq!(read_words("--name=a -h --nope").unwrap_err(), Misuse::Help);
    }

    #[test]
    fn numbers_in_the_notation_of_go() {
        for (text, value) in [
            ("0", 0),
            ("10", 10),
            ("0x10", 16),
            ("0b11", 3),
            ("0o17", 15),
            ("017", 15),
            ("1_000", 1000),
            ("0x_f", 15),
        ] {
            assert_eq!(uint(text, 64), Ok(value), "{text}");
        }
        for text in ["", "_1", "1_", "1__0", "x", "1.5", "+1", "0x", "09", " 1"] {
            assert!(uint(text, 64).is_err(), "{text}");
        }
        assert_eq!(int("-9223372036854775808"), Ok(i64::MIN));
        assert_eq!(int("9223372036854775808"), Err(RANGE.into()));
        assert_eq!(uint("18446744073709551616", 64), Err(RANGE.into()));
        assert_eq!(uint("65536", 16), Err(RANGE.into()));
    }

    #[test]
    fn durations_in_the_notation_of_go() {
        for (text, nanos) in [
            ("0", 0),
            ("5s", 5_000_000_000),
            ("1h30m", 5_400_000_000_000),
            ("1.5ms", 1_500_000),
            (".5s", 500_000_000),
            ("-2us", -2_000),
            ("2h", 7_200_000_000_000),
        ] {
            assert_eq!(duration(text), Ok(nanos), "{text}");
        }
        for text in ["", "1", "s", "1x", "1.2.3s", ".s", "99999999999h"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_default_is_a_value_of_its_flag() {
        for flag in FLAGS {
            assert!(check(flag.kind, flag.default).is_ok(), "{}", flag.name);
            let twin = FLAGS.iter().filter(|other| other.name == flag.name).count();
            assert_eq!(twin, 1, "{}", flag.name);
        }
    }
}
