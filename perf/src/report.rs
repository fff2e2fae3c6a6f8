//! How results are shown: a line per cell while it runs, the table, JSON, and an SVG chart.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::compare::{Cell, Outcome};
use crate::measure::Sample;
use crate::server::Product;

pub fn time(time: Duration) -> String {
    let micros = time.as_secs_f64() * 1e6;
    match micros {
        _ if micros < 1e3 => format!("{micros:.0} µs"),
        _ if micros < 1e4 => format!("{:.2} ms", micros / 1e3),
        _ if micros < 1e6 => format!("{:.1} ms", micros / 1e3),
        _ => format!("{:.2} s", micros / 1e6),
    }
}

pub fn mebibytes(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
}

pub fn progress(done: usize, total: usize, elapsed: Duration, product: Product, cell: &str, sample: &Sample) {
    let left = elapsed.as_secs_f64() / done as f64 * (total - done) as f64;
    eprintln!(
        "[{done}/{total}, {left:.0} s left] {:<6} {cell:<32} {:>9.0}/s  p50 {:>8}  p99 {:>8}{}",
        product.name(),
        sample.rate,
        time(sample.p50),
        time(sample.p99),
        if sample.failed > 0 { format!("  {} FAILED", sample.failed) } else { String::new() }
    );
}

const HEAD: &str = "cell                              server     ops/s      p50      p99    p99.9  CPU s/M  RssAnon  written/op  flush/op  client s/M  failed";

fn line(first: &str, server: &str, sample: &Sample) -> String {
    format!(
        "{first:<33} {server:<6} {:>9.0} {:>8} {:>8} {:>8} {:>8.1} {:>8} {:>11.0} {:>9} {:>11.1} {:>7}",
        sample.rate,
        time(sample.p50),
        time(sample.p99),
        time(sample.p999),
        sample.server_cpu,
        mebibytes(sample.anonymous_bytes),
        sample.written,
        sample.flushes.map_or("-".into(), |flushes| format!("{flushes:.3}")),
        sample.client_cpu,
        sample.failed,
    )
}

fn ratio(over: f64, under: f64) -> Option<f64> {
    (under > 0.0 && over > 0.0).then(|| over / under)
}

/// The second product's figures over the first one's.
struct Ratios {
    rate: Option<f64>,
    p50: Option<f64>,
    p99: Option<f64>,
    p999: Option<f64>,
    cpu: Option<f64>,
    anonymous: Option<f64>,
    written: Option<f64>,
}

fn ratios(cell: &Cell) -> Option<Ratios> {
    if cell.runs.len() != 2 {
        return None;
    }
    let (base, ours) = (cell.median(0)?, cell.median(1)?);
    let times = |ours: Duration, base: Duration| ratio(ours.as_secs_f64(), base.as_secs_f64());
    Some(Ratios {
        rate: ratio(ours.rate, base.rate),
        p50: times(ours.p50, base.p50),
        p99: times(ours.p99, base.p99),
        p999: times(ours.p999, base.p999),
        cpu: ratio(ours.server_cpu, base.server_cpu),
        anonymous: ratio(ours.anonymous_bytes as f64, base.anonymous_bytes as f64),
        written: ratio(ours.written, base.written),
    })
}

pub fn table(outcome: &Outcome) -> String {
    let mut text = String::from(HEAD);
    text.push('\n');
    for cell in &outcome.cells {
        let mut first = cell.name();
        for (place, product) in outcome.products.iter().enumerate() {
            match cell.median(place) {
                Some(sample) => text.push_str(&line(&first, product.name(), &sample)),
                None => write!(text, "{first:<33} {:<6} failed", product.name()).expect("a string takes all"),
            }
            text.push('\n');
            first.clear();
        }
        if let Some(ratios) = ratios(cell) {
            let show = |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{ratio:.2}×"));
            writeln!(
                text,
                "{:<33} {:<6} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>11}",
                "",
                "ratio",
                show(ratios.rate),
                show(ratios.p50),
                show(ratios.p99),
                show(ratios.p999),
                show(ratios.cpu),
                show(ratios.anonymous),
                show(ratios.written),
            )
            .expect("a string takes all");
        }
    }
    let flush = outcome.flush;
    writeln!(
        text,
        "{:<33} {:<6} {:>9} {:>8} {:>8}   4 KiB {}+ fdatasync, the same directory",
        "device flush",
        "",
        "",
        time(flush.p50),
        time(flush.p99),
        if flush.direct { "O_DIRECT " } else { "" },
    )
    .expect("a string takes all");
    text
}

/// The aims that were not reached, a sentence each.
pub fn aims_missed(outcome: &Outcome) -> Vec<String> {
    let mut missed = Vec::new();
    for cell in &outcome.cells {
        let Some(ratios) = ratios(cell) else { continue };
        let aim = cell.aim();
        let name = cell.name();
        if let (Some(rate), Some(least)) = (ratios.rate, aim.rate_min)
            && rate < least
        {
            missed.push(format!("{name}: {rate:.2}× etcd's rate, aim {least:.2}×"));
        }
        for (what, ratio, most) in [
            ("p50", ratios.p50, aim.p50_max),
            ("p99", ratios.p99, aim.p99_max),
            ("CPU per operation", ratios.cpu, aim.cpu_max),
        ] {
            if let (Some(ratio), Some(most)) = (ratio, most)
                && ratio > most
            {
                missed.push(format!("{name}: {ratio:.2}× etcd's {what}, aim {most:.2}×"));
            }
        }
    }
    missed
}

pub fn json(outcome: &Outcome) -> Value {
    let cells: Vec<Value> = outcome
        .cells
        .iter()
        .map(|cell| {
            let mut object = json!({ "name": cell.name() });
            for (place, product) in outcome.products.iter().enumerate() {
                let runs: Vec<Value> = cell.runs[place].iter().map(Sample::json).collect();
                object[product.name()] = json!({
                    "median": cell.median(place).map(|sample| sample.json()),
                    "runs": runs,
                });
            }
            if let Some(ratios) = ratios(cell) {
                object["ratio"] = json!({
                    "operations_per_second": ratios.rate,
                    "p50": ratios.p50,
                    "p99": ratios.p99,
                    "p999": ratios.p999,
                    "server_cpu": ratios.cpu,
                    "server_anonymous_bytes": ratios.anonymous,
                    "written_bytes": ratios.written,
                });
            }
            object
        })
        .collect();
    json!({
        "device_flush": {
            "p50_us": outcome.flush.p50.as_secs_f64() * 1e6,
            "p99_us": outcome.flush.p99.as_secs_f64() * 1e6,
            "direct": outcome.flush.direct,
        },
        "cells": cells,
        "aims_missed": aims_missed(outcome),
        "complaints": outcome.complaints,
    })
}

/// One column of bars in the chart.
struct Panel {
    title: &'static str,
    /// Shown beside the bar.
    unit: &'static str,
    values: Vec<Option<f64>>,
}

/// Bars of the ratios, "how many times better"; of the plain rates where only one server ran.
pub fn svg(outcome: &Outcome) -> String {
    let names: Vec<String> = outcome.cells.iter().map(Cell::name).collect();
    let both: Vec<Option<Ratios>> = outcome.cells.iter().map(ratios).collect();
    let pick = |figure: &dyn Fn(&Ratios) -> Option<f64>| -> Vec<Option<f64>> {
        both.iter().map(|ratios| ratios.as_ref().and_then(figure)).collect()
    };
    let inverse = |value: Option<f64>| value.map(|value| 1.0 / value);
    let panels = if outcome.products.len() == 2 {
        vec![
            Panel { title: "operations per second, times etcd's", unit: "×", values: pick(&|r| r.rate) },
            Panel { title: "p99: etcd's over ours", unit: "×", values: pick(&|r| inverse(r.p99)) },
            Panel {
                title: "CPU per operation: etcd's over ours",
                unit: "×",
                values: pick(&|r| inverse(r.cpu)),
            },
        ]
    } else {
        let samples: Vec<Option<Sample>> = outcome.cells.iter().map(|cell| cell.median(0)).collect();
        let pick = |figure: &dyn Fn(&Sample) -> f64| samples.iter().map(|s| s.as_ref().map(figure)).collect();
        vec![
            Panel { title: "operations per second", unit: "", values: pick(&|s| s.rate) },
            Panel { title: "p99 in ms", unit: "", values: pick(&|s| s.p99.as_secs_f64() * 1e3) },
            Panel { title: "CPU-seconds per million", unit: "", values: pick(&|s| s.server_cpu) },
        ]
    };
    chart(&names, &panels)
}

fn chart(names: &[String], panels: &[Panel]) -> String {
    const ROW: usize = 20;
    const TOP: usize = 48;
    const LABEL: usize = 250;
    const PANEL: usize = 300;
    const BAR: f64 = 220.0;
    let width = LABEL + panels.len() * PANEL + 10;
    let height = TOP + names.len() * ROW + 16;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    let mut push = |text: std::fmt::Arguments<'_>| {
        svg.write_fmt(text).expect("a string takes all");
        svg.push('\n');
    };
    for (row, name) in names.iter().enumerate() {
        let y = TOP + row * ROW;
        if row % 2 == 0 {
            push(format_args!(
                "<rect x=\"0\" y=\"{y}\" width=\"{width}\" height=\"{ROW}\" fill=\"#f3f5f8\"/>"
            ));
        }
        push(format_args!("<text x=\"8\" y=\"{}\">{name}</text>", y + 14));
    }
    for (column, panel) in panels.iter().enumerate() {
        let x = LABEL + column * PANEL;
        push(format_args!("<text x=\"{x}\" y=\"28\" font-weight=\"bold\">{}</text>", panel.title));
        let most = panel.values.iter().flatten().copied().fold(0.0, f64::max);
        if most <= 0.0 {
            continue;
        }
        if !panel.unit.is_empty() {
            let at = x as f64 + BAR / most;
            let bottom = TOP + names.len() * ROW;
            push(format_args!(
                "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"#222\" stroke-dasharray=\"3 3\"/>"
            ));
            push(format_args!("<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">1</text>", TOP - 5));
        }
        for (row, value) in panel.values.iter().enumerate() {
            let y = TOP + row * ROW;
            let Some(value) = value else {
                push(format_args!("<text x=\"{x}\" y=\"{}\" fill=\"#777\">none</text>", y + 14));
                continue;
            };
            let length = value / most * BAR;
            // Where a bar is a ratio, its colour says on which side of 1 it is.
            let colour = match panel.unit {
                "" => "#4a6fa5",
                _ if *value >= 1.0 => "#2f7d4f",
                _ => "#b5482e",
            };
            push(format_args!(
                "<rect x=\"{x}\" y=\"{}\" width=\"{length:.1}\" height=\"{}\" fill=\"{colour}\"/>",
                y + 3,
                ROW - 6
            ));
            push(format_args!(
                "<text x=\"{:.1}\" y=\"{}\" stroke=\"white\" stroke-width=\"3\" paint-order=\"stroke\">{}{}</text>",
                x as f64 + length + 5.0,
                y + 14,
                figure(*value),
                panel.unit
            ));
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn figure(value: f64) -> String {
    match value {
        _ if value >= 100.0 => format!("{value:.0}"),
        _ if value >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Writes `compare.json` and `compare.svg`.
pub fn write(outcome: &Outcome, directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let text = serde_json::to_string_pretty(&json(outcome)).expect("values without keys that are no strings");
    std::fs::write(directory.join("compare.json"), text + "\n")?;
    std::fs::write(directory.join("compare.svg"), svg(outcome))
}
