use super::*;

fn start(line: &str, environment: &[(&str, &str)]) -> Result<Action, Failure> {
    let environment = environment.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    load(line.split_whitespace().map(str::to_owned), environment)
}

fn config(line: &str) -> Config {
    match start(line, &[]) {
        Ok(Action::Serve(config, _)) => *config,
        other => panic!("{line}: {other:?}"),
    }
}

fn notices(line: &str, environment: &[(&str, &str)]) -> Vec<(&'static str, String)> {
    match start(line, environment) {
        Ok(Action::Serve(_, notices)) => {
            notices.into_iter().map(|notice| (notice.message, notice.fields[0].1.clone())).collect()
        }
        other => panic!("{line}: {other:?}"),
    }
}

fn refusal(line: &str) -> String {
    match start(line, &[]) {
        Err(Failure::Fatal { mut fields, .. }) => fields.remove(0).1,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn no_flags_serve_the_usual_port() {
    let config = config("");
    assert_eq!(config.name, "default");
    assert_eq!(config.data_dir, PathBuf::from("default.etcore"));
    assert_eq!(config.listen_client[0].address, "127.0.0.1:2379".parse().unwrap());
    assert_eq!(config.advertise_client_urls, ["http://localhost:2379"]);
    assert_eq!(config.initial_advertise_peer_urls, ["http://localhost:2380"]);
    assert_eq!(config.max_request_bytes, 1_572_864);
    assert_eq!(config.max_txn_ops, 128);
    assert_eq!(config.max_concurrent_streams, u32::MAX);
    assert_eq!(config.quota_backend_bytes, 2_147_483_648);
    assert_eq!(config.election_timeout, Duration::from_secs(1));
    assert_eq!((config.shards, config.executors, config.dirty_bytes), (None, None, None));
    assert_eq!(config.check_bootstrap(), Ok(()));
}

#[test]
fn the_default_cluster_follows_the_name() {
    let own = config("--name=a --initial-advertise-peer-urls=http://10.0.0.1:2380,http://10.0.0.1:1");
    assert_eq!(own.data_dir, PathBuf::from("a.etcore"));
    let urls = vec!["http://10.0.0.1:1".to_owned(), "http://10.0.0.1:2380".to_owned()];
    assert_eq!(own.initial_cluster, [Peer { name: "a".into(), urls }]);
    assert_eq!(own.check_bootstrap(), Ok(()));
}

#[test]
fn bootstrap_needs_this_member_under_its_addresses() {
    assert_eq!(
        config("--name a --initial-cluster b=http://localhost:2380").check_bootstrap().unwrap_err(),
        "couldn't find local name \"a\" in the initial cluster configuration"
    );
    assert!(config("--initial-advertise-peer-urls http://localhost:1").check_bootstrap().is_err());
    let twice = "--initial-cluster a=http://localhost:1,a=http://localhost:1";
    assert_eq!(refusal(twice), "initial cluster a=http://localhost:1,a=http://localhost:1 has duplicate url");
}

#[test]
fn rules_between_flags() {
    for (line, text) in [
        (
            "--heartbeat-interval=300",
            "--election-timeout[1000ms] should be at least as 5 times as --heartbeat-interval[300ms]",
        ),
        (
            "--election-timeout=50001",
            "--election-timeout[50001ms] is too long, and should be set less than 50000ms",
        ),
        ("--heartbeat-interval=0", "--heartbeat-interval must be >0 (set to 0ms)"),
        (
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls is required when --listen-client-urls is set explicitly",
        ),
        (
            "--listen-client-urls=http://example.com:1 --advertise-client-urls=http://example.com:1",
            "expected IP in URL for binding (http://example.com:1)",
        ),
        ("--auto-compaction-mode=x", "unknown auto-compaction-mode \"x\""),
        ("--compact-hash-check-time=0s", "--compact-hash-check-time must be >0 (set to 0s)"),
        (
            "--feature-gates=LeaseCheckpointPersist=true",
            "--feature-gates: enabling feature gate LeaseCheckpointPersist requires enabling feature gate \
             LeaseCheckpoint",
        ),
        ("--feature-gates=Nope=true", "--feature-gates: unrecognized feature gate: Nope"),
        ("serve", "\"serve\" is not a valid flag"),
        ("--pre-vote true", "\"true\" is not a valid flag"),
    ] {
        assert_eq!(refusal(line), text, "{line}");
    }
    // At the limits.
    config("--heartbeat-interval=200");
    config("--election-timeout=50000");
}

#[test]
fn what_would_be_less_safe_or_another_cluster_ends_the_start() {
    for line in [
        "--cert-file=x",
        "--trusted-ca-file x",
        "--client-cert-auth",
        "--peer-auto-tls=true",
        "--auth-token=jwt,sign-method=RS256",
        "--discovery-srv=example.com",
        "--discovery-endpoints=http://x:1",
        "--initial-cluster=default=http://localhost:2380,b=http://localhost:3",
        "--initial-cluster-state=existing",
        "--listen-client-urls=https://127.0.0.1:2379 --advertise-client-urls=https://127.0.0.1:2379",
        "--listen-peer-urls=https://127.0.0.1:2380",
        "--force-new-cluster",
        "--host-whitelist=example.com",
        "--config-file=x.yaml",
    ] {
        let sentence = refusal(line);
        assert!(sentence.contains("yet"), "{line}: {sentence}");
    }
    // Said out loud, the defaults are no reason to refuse.
    let harmless =
        "--client-cert-auth=0 --auth-token=simple --initial-cluster-state=new --cert-file= --cors=*";
    assert!(notices(harmless, &[]).iter().all(|(message, _)| !message.contains("effect")));
}

/// Every flag is known, and each that is given has its one line unless it works.
#[test]
fn every_flag_parses_and_says_what_it_does() {
    for flag in FLAGS.iter().filter(|flag| flag.name != "version") {
        let line = format!("--{}={}", flag.name, flag.default);
        let arguments = if flag.name == "listen-client-urls" {
            vec![line.clone(), "--advertise-client-urls=http://localhost:2379".into()]
        } else {
            vec![line.clone()]
        };
        let Ok(Action::Serve(_, notices)) = load(arguments, []) else {
            panic!("{line}");
        };
        let lines =
            notices.iter().filter(|notice| notice.fields[0] == ("flag", flag.name.to_owned())).count();
        let expected = usize::from(matches!(flag.effect, Effect::NoEffectYet | Effect::Ignored));
        assert_eq!(lines, expected, "{line}");
    }
}

#[test]
fn environment() {
    let Ok(Action::Serve(config, _)) = start("--name=a", &[("ETCD_DATA_DIR", "/d"), ("ETCD_SHARDS", "3")])
    else {
        panic!("the environment sets flags");
    };
    assert_eq!((config.data_dir, config.shards), (PathBuf::from("/d"), Some(3)));

    assert_eq!(
        notices("--name=a", &[("ETCD_NAME", ""), ("ETCD_NOPE", "1"), ("ETCD_VERSION", "3.4"), ("HOME", "/")]),
        [
            ("unrecognized environment variable", "ETCD_NOPE".to_owned()),
            ("unrecognized environment variable", "ETCD_VERSION".to_owned()),
        ],
        "empty is unset, unknown is a warning, and ETCD_VERSION is ignored with one"
    );

    let Err(Failure::Fatal { message, fields }) = start("--name=a", &[("ETCD_NAME", "a")]) else {
        panic!("a variable and a flag are one too many");
    };
    assert!(
        message
            .starts_with("conflicting environment variable is shadowed by corresponding command-line flag")
    );
    assert_eq!(fields, [("environment-variable", "ETCD_NAME".to_owned())]);

    let Err(Failure::Fatal { fields, .. }) = start("", &[("ETCD_MAX_TXN_OPS", "x")]) else {
        panic!("a wrong value is refused");
    };
    assert_eq!(fields[0].1, "invalid value \"x\" for ETCD_MAX_TXN_OPS: parse error");

    assert!(matches!(start("", &[("ETCD_CERT_FILE", "x")]), Err(Failure::Fatal { .. })));
    // Explicit is explicit, wherever it was said.
    assert!(start("", &[("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1")]).is_err());
}

#[test]
fn shards_and_splits() {
    assert_eq!(config("--shards=5").shards, Some(5));
    let split = config(r"--shard-splits=b,m\x00");
    assert_eq!(split.shards, Some(3));
    assert_eq!(split.shard_splits.unwrap(), [&b"b"[..], b"m\0"]);
    config("--shards=3 --shard-splits=b,m");
    assert_eq!(
        refusal("--shards=4 --shard-splits=b,m"),
        "--shards=4 needs 3 keys in --shard-splits, not 2; leave one of the two out"
    );
    assert!(refusal("--shard-splits=m,b").starts_with("--shard-splits: "));
    assert!(matches!(start("--shards=65536", &[]), Err(Failure::Usage { .. })));
}

#[test]
fn asking_instead_of_serving() {
    let Ok(Action::Print(text)) = start("--version", &[("ETCD_NAME", "x")]) else {
        panic!("--version prints");
    };
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[0], "etcd Version: 3.7.1");
    for (line, start) in lines.iter().zip(["etcd Version: ", "Git SHA: ", "Go Version: ", "Go OS/Arch: "]) {
        assert!(line.starts_with(start), "{line}");
    }
    assert!(matches!(start("--name=a --help --nope", &[]), Ok(Action::Print(_))));
    let Err(Failure::Usage { mistake, .. }) = start("--nope", &[]) else {
        panic!("an unknown flag is a usage error");
    };
    assert_eq!(mistake, "flag provided but not defined: -nope");
}
