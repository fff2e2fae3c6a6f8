//! What the client port answers to HTTP/1: the versions, and nothing else yet (etcd: flags.md 5).
//!
//! A pure function from a request's head to a response, so that the transport can serve it as it likes.

use crate::config::version;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};

/// The answer to a request on the client port that is not gRPC. Bodies of requests are not looked at.
pub fn answer(method: &Method, path: &str) -> Response<Bytes> {
    let mut response = if method == Method::OPTIONS {
        // Asked by browsers before the request itself; the headers below are the answer.
        Response::new(Bytes::new())
    } else if path != "/version" {
        text(StatusCode::NOT_FOUND, "404 page not found\n")
    } else if method != Method::GET {
        let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n");
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
        response
    } else {
        let body = format!(
            r#"{{"etcdserver":"{}","etcdcluster":"{}","storage":"{}"}}"#,
            version::SERVER,
            version::CLUSTER,
            version::STORAGE
        );
        let mut response = Response::new(Bytes::from(body));
        set(response.headers_mut(), &[("content-type", "application/json")]);
        response
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

    #[test]
    fn versions_as_clients_parse_them() {
        let response = answer(&Method::GET, "/version");
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(response.body(), r#"{"etcdserver":"3.7.1","etcdcluster":"3.7.0","storage":"3.7.0"}"#);
    }

    #[test]
    fn other_methods_and_paths() {
        let response = answer(&Method::POST, "/version");
        assert_eq!(
            (response.status().as_u16(), &response.headers()["allow"]),
            (405, &"GET".parse().unwrap())
        );
        let response = answer(&Method::GET, "/v3/kv/range");
        assert_eq!(
            (response.status().as_u16(), response.body().as_ref()),
            (404, &b"404 page not found\n"[..])
        );
        let response = answer(&Method::OPTIONS, "/version");
        assert_eq!((response.status().as_u16(), response.body().len()), (200, 0));
        assert_eq!(response.headers()["access-control-allow-origin"], "*");
    }
}
