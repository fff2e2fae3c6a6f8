//! What a gRPC server says of methods it does not have, in the words of Go's library (etcd: errors.md 2).

use tonic::Status;

/// A method that the service's definition has, or does not have, but this server does not offer.
pub fn method(service: &str, method: &str) -> Status {
    Status::unimplemented(format!("unknown method {method} for service {service}"))
}

/// A path that belongs to no service of this server.
pub fn path(path: &str) -> Status {
    match path.strip_prefix('/').and_then(|path| path.rsplit_once('/')) {
        Some((service, _)) => Status::unimplemented(format!("unknown service {service}")),
        None => Status::unimplemented(format!("malformed method name: {path:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_go() {
        assert_eq!(
            method("etcdserverpb.KV", "Foo").message(),
            "unknown method Foo for service etcdserverpb.KV"
        );
        assert_eq!(path("/etcdserverpb.Watch/Watch").message(), "unknown service etcdserverpb.Watch");
        assert_eq!(path("/x").message(), "malformed method name: \"/x\"");
    }
}
