//! Log lines in etcd's shape, so that what reads etcd's logs reads these (etcd: flags.md 2): one JSON object a
//! line on stderr, `level`, `ts`, `caller` and `msg` first, then the fields of the event in their order.
//!
//! Promises that a line is one write and never fails the caller. It does not rotate or buffer.

use crate::config::{LogFormat, LogLevel, Notice};
use std::fmt::{Debug, Write as _};
use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

/// Sends all events of this process to stderr from now on. A second call has no effect.
pub fn start(level: LogLevel, format: LogFormat) {
    let subscriber = tracing_subscriber::registry().with(Lines { level, format, write: to_stderr });
    // An error means that a subscriber is set already, as in tests.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// A line about the configuration. The names of its fields are data, which the macros cannot take.
pub fn notice(level: LogLevel, format: LogFormat, notice: &Notice) {
    let at = if notice.warn { LogLevel::Warn } else { LogLevel::Info };
    if level <= at {
        let name = if notice.warn { "warn" } else { "info" };
        to_stderr(&line(name, notice.message, &notice.fields).render(format, SystemTime::now()));
    }
}

/// The line that says why the process ends; written whatever the level, and before logging was started too.
pub fn fatal(format: LogFormat, message: &str, fields: &[(&'static str, String)]) {
    to_stderr(&line("fatal", message, fields).render(format, SystemTime::now()));
}

/// A line of this module's own.
fn line(level: &'static str, message: &str, fields: &[(&'static str, String)]) -> Line {
    Line {
        level,
        caller: caller(Some(file!()), Some(line!())),
        message: message.into(),
        fields: fields.iter().map(|(name, value)| ((*name).to_owned(), quoted(value))).collect(),
    }
}

fn to_stderr(line: &str) {
    // There is nowhere to report it to if stderr is closed.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

struct Lines {
    level: LogLevel,
    format: LogFormat,
    write: fn(&str),
}

impl<S: Subscriber> Layer<S> for Lines {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        let grave_enough = match *metadata.level() {
            // Libraries talk of each frame below this; only the server's own words are wanted then.
            Level::TRACE | Level::DEBUG => {
                self.level <= LogLevel::Debug && metadata.target().starts_with(env!("CARGO_CRATE_NAME"))
            }
            Level::INFO => self.level <= LogLevel::Info,
            Level::WARN => self.level <= LogLevel::Warn,
            Level::ERROR => self.level <= LogLevel::Error,
        };
        metadata.is_event() && grave_enough
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut line = Line {
            level: match *metadata.level() {
                Level::TRACE | Level::DEBUG => "debug",
                Level::INFO => "info",
                Level::WARN => "warn",
                Level::ERROR => "error",
            },
            caller: caller(metadata.file(), metadata.line()),
            message: String::new(),
            fields: Vec::new(),
        };
        event.record(&mut line);
        (self.write)(&line.render(self.format, SystemTime::now()));
    }
}

/// One line before it is written; `fields` are names and JSON.
struct Line {
    level: &'static str,
    caller: String,
    message: String,
    fields: Vec<(String, String)>,
}

impl Line {
    fn render(&self, format: LogFormat, now: SystemTime) -> String {
        let time = timestamp(now);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = match format {
            LogFormat::Json => {
                write!(
                    text,
                    r#"{{"level":"{}","ts":"{time}","caller":{},"msg":{}"#,
                    self.level,
                    quoted(&self.caller),
                    quoted(&self.message)
                )
            }
            LogFormat::Console => {
                write!(text, "{time}\t{}\t{}\t{}", self.level, self.caller, self.message)
            }
        };
        let fields =
            self.fields.iter().enumerate().map(|(at, (name, value))| {
                format!("{}{}:{value}", if at == 0 { "" } else { "," }, quoted(name))
            });
        let fields: String = fields.collect();
        match format {
            LogFormat::Json if fields.is_empty() => text.push('}'),
            LogFormat::Json => text.extend([",", &fields, "}"]),
            LogFormat::Console if fields.is_empty() => {}
            LogFormat::Console => text.extend(["\t{", &fields, "}"]),
        }
        text.push('\n');
        text
    }

    fn field(&mut self, field: &Field, json: String) {
        self.fields.push((field.name().to_owned(), json));
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            _ => self.field(field, quoted(&format!("{value:?}"))),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.to_owned(),
            _ => self.field(field, quoted(value)),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.field(field, value.to_string());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.field(field, value.to_string());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.field(field, serde_json::Value::from(value).to_string());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.field(field, value.to_string());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.field(field, quoted(&value.to_string()));
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The last two parts of the path, as etcd shows its own.
fn caller(file: Option<&str>, line: Option<u32>) -> String {
    let file = file.unwrap_or("unknown");
    let start = file.rmatch_indices('/').nth(1).map_or(0, |(at, _)| at + 1);
    format!("{}:{}", &file[start..], line.unwrap_or(0))
}

/// UTC with microseconds: `2026-01-02T15:04:05.000000Z`.
fn timestamp(now: SystemTime) -> String {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:06}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        since.subsec_micros()
    )
}

/// Year, month and day of a day counted from 1970-01-01. Years are counted from March, so that the leap day is
/// the last of its year, in eras of 400 years, which all have the same days.
fn date(days: u64) -> (u64, u64, u64) {
    const DAYS_PER_ERA: u64 = 146_097;
    let days = days + 719_468;
    let (era, day) = (days / DAYS_PER_ERA, days % DAYS_PER_ERA);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + next, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::time::Duration;

    thread_local! {
        static WRITTEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    fn logged(level: LogLevel, format: LogFormat, events: impl FnOnce()) -> Vec<String> {
        let write = |line: &str| WRITTEN.with_borrow_mut(|lines| lines.push(line.to_owned()));
        let subscriber = tracing_subscriber::registry().with(Lines { level, format, write });
        tracing::subscriber::with_default(subscriber, events);
        WRITTEN.take()
    }

    #[test]
    fn a_line_of_json_in_the_order_of_etcd() {
        let lines = logged(LogLevel::Info, LogFormat::Json, || {
            tracing::info!(
                shards = 3_u64,
                took = -1.5,
                fast = true,
                path = "/a\"b\n",
                error = %"broken",
                "ready to serve client requests"
            );
        });
        let [line] = &lines[..] else { panic!("{lines:?}") };
        let (head, tail) = line.split_once("\"caller\"").unwrap();
        assert!(head.starts_with(r#"{"level":"info","ts":"20"#), "{line}");
        let (_, tail) = tail.split_once(r#"","#).unwrap();
        assert_eq!(
            tail,
            concat!(
                r#""msg":"ready to serve client requests","shards":3,"took":-1.5,"fast":true,"#,
                r#""path":"/a\"b\n","error":"broken"}"#,
                "\n"
            )
        );
        let parsed: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(parsed["caller"].as_str().unwrap().starts_with("server/logging.rs:"), "{line}");
    }

    #[test]
    fn fields_whose_names_are_data_are_fields_of_the_line() {
        let fields = [("flag", "--\"x\"".to_owned()), ("environment", "ETCD_X=1".to_owned())];
        let text = line("warn", "has no effect yet", &fields).render(LogFormat::Json, UNIX_EPOCH);
        let parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&parsed["level"], &parsed["flag"]), (&"warn".into(), &"--\"x\"".into()));
        assert!(text.ends_with("\"environment\":\"ETCD_X=1\"}\n"), "{text}");
    }

    #[test]
    fn levels() {
        let all = || {
            tracing::debug!("a");
            tracing::debug!(target: "hyper::proto", "library");
            tracing::info!("b");
            tracing::warn!("c");
            tracing::error!("d");
        };
        for (level, lines) in [
            (LogLevel::Debug, 4),
            (LogLevel::Info, 3),
            (LogLevel::Warn, 2),
            (LogLevel::Error, 1),
            (LogLevel::Fatal, 0),
        ] {
            assert_eq!(logged(level, LogFormat::Json, all).len(), lines, "{level:?}");
        }
    }

    #[test]
    fn a_line_for_people() {
        let lines = logged(LogLevel::Info, LogFormat::Console, || tracing::warn!(a = 1, b = "x", "words"));
        assert!(lines[0].ends_with("\twords\t{\"a\":1,\"b\":\"x\"}\n"), "{lines:?}");
    }

    #[test]
    fn times() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000007Z"),
            (951_782_400, "2000-02-29T00:00:00.000007Z"),
            (1_709_164_800, "2024-02-29T00:00:00.000007Z"),
            (1_767_225_599, "2025-12-31T23:59:59.000007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000007Z"),
        ] {
            let at = UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(7);
            assert_eq!(timestamp(at), text);
        }
    }
}
