//! URLs of flags: `http://host:port`, and no more than that.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// One URL of a list. Ordered by its text, as etcd orders its lists.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Url {
    /// As it was written, without blanks.
    pub text: String,
    pub scheme: Scheme,
    /// Without brackets; for the unix schemes everything behind the slashes.
    pub host: String,
    pub port: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scheme {
    Http,
    Https,
    Unix,
    Unixs,
}

/// A comma-separated list: sorted, each once (etcd: flags.md 2).
pub fn parse_list(text: &str) -> Result<Vec<Url>, String> {
    let mut urls = text.split(',').map(parse).collect::<Result<Vec<_>, _>>()?;
    urls.sort();
    urls.dedup();
    Ok(urls)
}

fn parse(text: &str) -> Result<Url, String> {
    let text = text.trim();
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    let scheme = match scheme.to_ascii_lowercase().as_str() {
        "http" => Scheme::Http,
        "https" => Scheme::Https,
        "unix" => Scheme::Unix,
        "unixs" => Scheme::Unixs,
        _ => return Err(format!("URL scheme must be http, https, unix, or unixs: {text}")),
    };
    let url =
        |host: &str, port: &str| Url { text: text.into(), scheme, host: host.into(), port: port.into() };
    if matches!(scheme, Scheme::Unix | Scheme::Unixs) {
        return Ok(url(rest, ""));
    }
    let (authority, path) = match rest.find(['/', '?', '#']) {
        Some(at) => rest.split_at(at),
        None => (rest, ""),
    };
    let form = || format!("URL address does not have the form \"host:port\": {text}");
    let (host, port) = match authority.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once("]:").ok_or_else(form)?,
        None => authority.rsplit_once(':').filter(|(host, _)| !host.contains(':')).ok_or_else(form)?,
    };
    if !path.is_empty() {
        return Err(format!("URL must not contain a path: {text}"));
    }
    if port.parse::<u16>().is_err() {
        return Err(format!("URL has no port between 0 and 65535: {text}"));
    }
    Ok(url(host, port))
}

impl Url {
    /// The address to listen on. The host must be an IP address or `localhost`, so that no name service
    /// decides where the server listens.
    pub fn address(&self) -> Result<SocketAddr, String> {
        let host: IpAddr = match self.host.as_str() {
            "localhost" => Ipv4Addr::LOCALHOST.into(),
            host => host.parse().map_err(|_| format!("expected IP in URL for binding ({})", self.text))?,
        };
        Ok(SocketAddr::new(host, self.port.parse().expect("checked when parsed")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted_and_without_repetition() {
        let urls = parse_list("http://b:2, http://a:1,http://b:2").unwrap();
        assert_eq!(
            urls.iter().map(|url| url.text.as_str()).collect::<Vec<_>>(),
            ["http://a:1", "http://b:2"]
        );
    }

    #[test]
    fn refusals() {
        for (text, why) in [
            ("localhost:2379", "URL scheme must be http, https, unix, or unixs: localhost:2379"),
            ("http://localhost", "URL address does not have the form \"host:port\": http://localhost"),
            ("http://::1:2379", "URL address does not have the form \"host:port\": http://::1:2379"),
            ("http://localhost:2379/", "URL must not contain a path: http://localhost:2379/"),
            ("http://localhost:99999", "URL has no port between 0 and 65535: http://localhost:99999"),
        ] {
            assert_eq!(parse_list(text), Err(why.into()));
        }
    }

    #[test]
    fn addresses_to_listen_on() {
        let address = |text: &str| parse_list(text).unwrap()[0].address();
        assert_eq!(address("http://localhost:2379"), Ok("127.0.0.1:2379".parse().unwrap()));
        assert_eq!(address("http://[::1]:1"), Ok("[::1]:1".parse().unwrap()));
        assert_eq!(
            address("http://example.com:2379"),
            Err("expected IP in URL for binding (http://example.com:2379)".into())
        );
        assert!(address("http://:2379").is_err());
    }
}
