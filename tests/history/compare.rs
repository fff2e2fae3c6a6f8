//! Is what a server answered what the model expects? And if not, where do they differ?

use etcore::proto::etcdserverpb as pb;
use etcore::proto::mvccpb::KeyValue;
use pb::range_request::SortTarget;
use pb::request_op::Request as Op;
use pb::response_op::Response as OpResponse;

use crate::model::{Expected, Reply, Request, Response, by_target};

/// etcd sorts small answers with an insertion sort, which is stable.
const STABLE_KEYS_MAX: usize = 12;

/// With `ties_open` the order of keys that compare as equal is left open, as in etcd (semantics 2.12).
pub fn fits(request: &Request, expected: &Expected, actual: &Reply, ties_open: bool) -> bool {
    if ties_open {
        let mut actual = actual.clone();
        if let (Ok(expected), Ok(actual)) = (&expected.reply, &mut actual) {
            order_ties(request, expected, actual);
        }
        return actual == expected.reply || expected.or.contains(&actual);
    }
    *actual == expected.reply || expected.or.contains(actual)
}

/// Puts keys that compare as equal into the model's order.
fn order_ties(request: &Request, expected: &Response, actual: &mut Response) {
    match (request, expected, actual) {
        (
            Request::Range(request) | Request::RangeStream(request),
            Response::Range(expected),
            Response::Range(actual),
        ) => order_range_ties(request, expected, actual),
        (Request::Txn(request), Response::Txn(expected), Response::Txn(actual)) => {
            order_txn_ties(request, expected, actual);
        }
        _ => {}
    }
}

fn order_txn_ties(request: &pb::TxnRequest, expected: &pb::TxnResponse, actual: &mut pb::TxnResponse) {
    let ops = if expected.succeeded { &request.success } else { &request.failure };
    let expected_and_actual = expected.responses.iter().zip(&mut actual.responses);
    for (op, (expected, actual)) in ops.iter().zip(expected_and_actual) {
        match (&op.request, &expected.response, &mut actual.response) {
            (
                Some(Op::RequestRange(request)),
                Some(OpResponse::ResponseRange(expected)),
                Some(OpResponse::ResponseRange(actual)),
            ) => order_range_ties(request, expected, actual),
            (
                Some(Op::RequestTxn(request)),
                Some(OpResponse::ResponseTxn(expected)),
                Some(OpResponse::ResponseTxn(actual)),
            ) => order_txn_ties(request, expected, actual),
            _ => {}
        }
    }
}

fn order_range_ties(
    request: &pb::RangeRequest,
    expected: &pb::RangeResponse,
    actual: &mut pb::RangeResponse,
) {
    let target = request.sort_target();
    let is_small = expected.kvs.len() < STABLE_KEYS_MAX && !expected.more;
    if target == SortTarget::Key || is_small || expected.kvs.len() != actual.kvs.len() {
        return;
    }
    if target == SortTarget::Value && request.keys_only {
        // By what they were sorted cannot be seen any more; which keys they are can, unless some were cut off.
        if expected.more || sorted(&expected.kvs) == sorted(&actual.kvs) {
            actual.kvs.clone_from(&expected.kvs);
        }
        return;
    }
    let same = |a: &KeyValue, b: &KeyValue| by_target(target, a, b).is_eq();
    if !expected.kvs.iter().zip(&actual.kvs).all(|(expected, actual)| same(expected, actual)) {
        return;
    }
    let mut from = 0;
    for group in expected.kvs.chunk_by(same) {
        let to = from + group.len();
        // Which ones of the last equals are beyond the limit is as open as their order.
        let cut = to == expected.kvs.len() && expected.more;
        if cut || sorted(group) == sorted(&actual.kvs[from..to]) {
            actual.kvs[from..to].clone_from_slice(group);
        }
        from = to;
    }
}

fn sorted(kvs: &[KeyValue]) -> Vec<&KeyValue> {
    let mut kvs: Vec<&KeyValue> = kvs.iter().collect();
    kvs.sort_by(|a, b| a.key.cmp(&b.key));
    kvs
}

/// Both answers line by line; lines that differ are marked with `-` (expected) and `+` (answered).
pub fn difference(expected: &Expected, actual: &Reply) -> String {
    let lines = |reply: &Reply| -> Vec<String> { brief(reply).lines().map(str::to_owned).collect() };
    let (want, got) = (lines(&expected.reply), lines(actual));
    let common = want.iter().zip(&got).take_while(|(a, b)| a == b).count();
    let tail =
        want[common..].iter().rev().zip(got[common..].iter().rev()).take_while(|(a, b)| a == b).count();
    let mut out = String::new();
    for line in &want[common.saturating_sub(6)..common] {
        out += &format!("  {line}\n");
    }
    for line in &want[common..want.len() - tail] {
        out += &format!("- {line}\n");
    }
    for line in &got[common..got.len() - tail] {
        out += &format!("+ {line}\n");
    }
    for line in want[want.len() - tail..].iter().take(6) {
        out += &format!("  {line}\n");
    }
    if !expected.or.is_empty() {
        out += &format!("  ({} other answers would do)\n", expected.or.len());
    }
    out
}

/// For people: fields at their defaults are left out, long strings cut.
pub fn brief(message: &impl std::fmt::Debug) -> String {
    const TEXT_MAX: usize = 60;
    let text = format!("{message:#?}");
    let mut out = String::new();
    for line in text.lines() {
        let is_default = ["0,", "false,", "None,", "b\"\",", "[],"]
            .iter()
            .any(|default| line.ends_with(&format!(": {default}")));
        if is_default {
            continue;
        }
        match (line.find("b\""), line.len()) {
            (Some(start), length) if length > start + TEXT_MAX && line.is_ascii() => {
                out += &format!("{}.. ({} characters)\n", &line[..start + TEXT_MAX], length - start - 4);
            }
            _ => out += &format!("{line}\n"),
        }
    }
    out
}

/// The same on one line.
pub fn brief_line(message: &impl std::fmt::Debug) -> String {
    brief(message).lines().map(str::trim).collect::<Vec<_>>().join(" ") + "\n"
}
