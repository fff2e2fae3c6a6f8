//! Ids of member and cluster (etcd: semantics 10.8): the same flags give the same ids as etcd.

use sha1::{Digest, Sha1};

fn first_eight(digest: Sha1) -> u64 {
    let bytes = digest.finalize();
    u64::from_be_bytes(std::array::from_fn(|i| bytes[i]))
}

/// From the peer URLs, sorted, and the cluster token.
pub fn member(peer_urls: &[String], token: &str) -> u64 {
    let mut sorted = peer_urls.to_vec();
    sorted.sort();
    let mut digest = Sha1::new();
    sorted.iter().for_each(|url| digest.update(url));
    digest.update(token);
    first_eight(digest)
}

/// From the ids of the first members.
pub fn cluster(members: &[u64]) -> u64 {
    let mut sorted = members.to_vec();
    sorted.sort_unstable();
    let mut digest = Sha1::new();
    sorted.iter().for_each(|id| digest.update(id.to_be_bytes()));
    first_eight(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// etcd: semantics 10.8, trap F8.
    #[test]
    fn the_default_flags_give_etcds_ids() {
        let id = member(&["http://localhost:2380".to_owned()], "etcd-cluster");
        assert_eq!(id, 0x8e9e05c52164694d);
        assert_eq!(cluster(&[id]), 0xcdf818194e3a8c32);
    }
}
