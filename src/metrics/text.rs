//! Prometheus' text format, version 0.0.4: a help and a type line, then the values.

use super::{BUCKETS, Histogram};
use std::fmt::{Display, Write as _};
use std::sync::atomic::Ordering::Relaxed;

/// A page on its way. Writing to a string cannot fail.
#[derive(Debug, Default)]
pub struct Page {
    text: String,
}

impl Page {
    /// What `Content-Type` says of a page.
    pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

    pub fn into_text(self) -> String {
        self.text
    }

    /// A number that only grows while the process lives.
    pub fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.series(name, help, "counter");
        let _ = writeln!(self.text, "{name} {value}");
    }

    pub fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.series(name, help, "gauge");
        let _ = writeln!(self.text, "{name} {value}");
    }

    /// A gauge of value 1 that says something in its label. The label must need no escapes.
    pub fn fact(&mut self, name: &str, help: &str, label: &str, value: &str) {
        self.series(name, help, "gauge");
        let _ = writeln!(self.text, "{name}{{{label}=\"{value}\"}} 1");
    }

    pub fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.series(name, help, "histogram");
        let mut count = 0;
        for (bucket, observed) in histogram.counts.iter().enumerate() {
            count += observed.load(Relaxed);
            let _ = if bucket < BUCKETS {
                let bound = Histogram::bound(bucket).as_secs_f64();
                writeln!(self.text, "{name}_bucket{{le=\"{bound}\"}} {count}")
            } else {
                writeln!(self.text, "{name}_bucket{{le=\"+Inf\"}} {count}")
            };
        }
        let sum = histogram.sum_ns.load(Relaxed) as f64 / 1e9;
        let _ = writeln!(self.text, "{name}_sum {sum}\n{name}_count {count}");
    }

    fn series(&mut self, name: &str, help: &str, kind: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
}
