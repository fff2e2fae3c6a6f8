//! What the client port answers to HTTP that is not gRPC: the versions and the metrics (etcd: flags.md 5). Bodies
//! of requests are not looked at.
//!
//! Sizes, indexes and revisions on the page of metrics come from the store itself, asked as a client would ask for
//! the status; everything else was counted. Does not know what counts it or how the answer reaches the socket.

use super::Node;
use crate::config::version;
use crate::metrics::{Metrics, Page};
use crate::model::{Request, Response as Answered};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};

/// The answer to a request's head.
pub async fn answer<N: Node>(node: &N, metrics: &Metrics, method: &Method, path: &str) -> Response<Bytes> {
    let mut response = match path {
        // Asked by browsers before the request itself; the headers below are the answer.
        _ if method == Method::OPTIONS => Response::new(Bytes::new()),
        "/version" | "/metrics" if method != Method::GET => {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n");
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
            response
        }
        "/version" => body("application/json", versions()),
        "/metrics" => body(Page::CONTENT_TYPE, page(node, metrics).await),
        _ => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    };
    // Every origin may ask (etcd: api.md 4.9, --cors at its default).
    set(
        response.headers_mut(),
        &[
            ("access-control-allow-methods", "POST, GET, OPTIONS, PUT, DELETE"),
            ("access-control-allow-origin", "*"),
            ("access-control-allow-headers", "accept, content-type, authorization"),
        ],
    );
    response
}

/// What is running and what it speaks: clients and tools decide by it what the server can do.
fn versions() -> String {
    format!(
        r#"{{"etcdserver":"{}","etcdcluster":"{}","storage":"{}"}}"#,
        version::SERVER,
        version::CLUSTER,
        version::STORAGE
    )
}

async fn page<N: Node>(node: &N, metrics: &Metrics) -> String {
    let mut page = Page::default();
    let status = match node.call(Request::Status).await {
        Ok(Answered::Status(status)) => Some(status),
        // It does not serve, or no longer.
        _ => None,
    };
    let leader = status.as_ref().map_or(0, |status| status.leader);
    let me = status.as_ref().and_then(|status| Some(status.header.as_ref()?.member_id));
    page.gauge("etcd_server_has_leader", "1 if there is a leader.", u8::from(leader != 0));
    page.gauge("etcd_server_is_leader", "1 if this node leads.", u8::from(leader != 0 && me == Some(leader)));
    page.fact("etcd_server_version", "The version that is spoken.", "server_version", version::SERVER);
    if let Some(status) = status {
        page.gauge("etcd_server_quota_backend_bytes", "The quota of the data.", status.db_size_quota);
        page.gauge("etcd_mvcc_db_total_size_in_bytes", "Size of all trees' files.", status.db_size);
        page.gauge(
            "etcd_mvcc_db_total_size_in_use_in_bytes",
            "Size of the pages in use.",
            status.db_size_in_use,
        );
        page.gauge(
            "etcd_server_proposals_committed_total",
            "Log entries that are committed, summed over the groups.",
            status.raft_index,
        );
        page.gauge(
            "etcd_server_proposals_applied_total",
            "Log entries that were delivered to their shards, summed over the groups.",
            status.raft_applied_index,
        );
        if let Some(header) = status.header {
            page.gauge("etcore_visible_revision", "The highest revision that is shown.", header.revision);
        }
    }
    metrics.write(&mut page);
    page.into_text()
}

fn body(content_type: &'static str, body: String) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(body));
    set(response.headers_mut(), &[("content-type", content_type)]);
    response
}

fn text(status: StatusCode, body: &'static str) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from_static(body.as_bytes()));
    *response.status_mut() = status;
    set(
        response.headers_mut(),
        &[("content-type", "text/plain; charset=utf-8"), ("x-content-type-options", "nosniff")],
    );
    response
}

fn set(headers: &mut HeaderMap, pairs: &[(&'static str, &'static str)]) {
    for (name, value) in pairs {
        headers.insert(*name, HeaderValue::from_static(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Answer, Rejection};
    use crate::proto::etcdserverpb as pb;
    use futures::executor::block_on;

    /// A store that knows its status, or one that does not serve.
    #[derive(Clone)]
    struct Double {
        status: Option<pb::StatusResponse>,
    }

    impl Node for Double {
        async fn call(&self, request: Request) -> Answer {
            assert_eq!(request, Request::Status);
            self.status.clone().map(Answered::Status).ok_or(Rejection::NoLeader)
        }
    }

    fn ask(node: &Double, method: Method, path: &str) -> Response<Bytes> {
        block_on(answer(node, &Metrics::new(1), &method, path))
    }

    fn silent() -> Double {
        Double { status: None }
    }

    #[test]
    fn versions_as_clients_parse_them() {
        let response = ask(&silent(), Method::GET, "/version");
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(response.body(), r#"{"etcdserver":"3.7.1","etcdcluster":"3.7.0","storage":"3.7.0"}"#);
    }

    #[test]
    fn other_methods_and_paths() {
        for path in ["/version", "/metrics"] {
            let response = ask(&silent(), Method::POST, path);
            assert_eq!(
                (response.status().as_u16(), &response.headers()["allow"]),
                (405, &"GET".parse().unwrap())
            );
        }
        let response = ask(&silent(), Method::GET, "/v3/kv/range");
        assert_eq!(
            (response.status().as_u16(), response.body().as_ref()),
            (404, &b"404 page not found\n"[..])
        );
        let response = ask(&silent(), Method::OPTIONS, "/version");
        assert_eq!((response.status().as_u16(), response.body().len()), (200, 0));
        assert_eq!(response.headers()["access-control-allow-origin"], "*");
    }

    #[test]
    fn metrics_of_a_node_that_leads() {
        let header = pb::ResponseHeader { member_id: 7, revision: 42, ..Default::default() };
        let status = pb::StatusResponse {
            header: Some(header),
            leader: 7,
            db_size: 8192,
            raft_index: 5,
            ..Default::default()
        };
        let response = ask(&Double { status: Some(status) }, Method::GET, "/metrics");
        assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
        let text = std::str::from_utf8(response.body()).unwrap();
        for line in [
            "etcd_server_has_leader 1",
            "etcd_server_is_leader 1",
            "etcd_mvcc_db_total_size_in_bytes 8192",
            "etcd_server_proposals_committed_total 5",
            "etcore_visible_revision 42",
            "etcd_disk_wal_fsync_duration_seconds_count 0",
            r#"etcd_server_version{server_version="3.7.1"} 1"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in {text}");
        }
    }

    #[test]
    fn a_node_that_does_not_serve_still_tells_what_it_counted() {
        let response = ask(&silent(), Method::GET, "/metrics");
        let text = std::str::from_utf8(response.body()).unwrap();
        assert!(text.contains("\netcd_server_has_leader 0\n") && text.contains("etcd_mvcc_put_total 0"));
    }
}
