//! Holds the house in order by reading its sources: the floors, what may stand where, and what must stand nowhere.
//!
//! A module is a directory (or file) right below `src/`. It names modules of lower floors only; neighbours do not
//! know each other. Every exception stands in a table here, with its reason. Tests inside of modules (`mod tests` at
//! the end of a file, files named `tests.rs` and `testing.rs`) may look where they like.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The floors, lowest first.
const FLOORS: &[&[&str]] = &[
    &["model", "proto"],
    &["env", "config", "metrics"],
    &["wal", "btree"],
    &["mvcc", "raft"],
    &["shard", "router", "coordinator", "meta"],
    &["group"],
    &["runtime"],
    &["api"],
    &["server", "ctl"],
];

/// Floors on which everything is a value: no executor, no clock, no threads, no locks, no chance.
const VALUES: std::ops::RangeInclusive<usize> = 2..=5;

/// Neighbours that know each other: who, whom, why.
const NEIGHBOURS: &[(&str, &str, &str)] = &[
    ("model", "proto", "etcd's messages are the domain's types"),
    ("coordinator", "router", "a reign is made for one range map and holds it"),
    ("shard", "coordinator", "a shard takes its revisions from the reign that it serves"),
];

/// What a value may not do, as words of the source.
const NOT_IN_VALUES: &[&str] = &[
    "async",
    "await",
    "HashMap",
    "HashSet",
    "Instant",
    "SystemTime",
    "thread",
    "Mutex",
    "RwLock",
    "Condvar",
    "rand",
    "glommio",
    "tokio",
];

/// Where one of these words may stand after all: file, word, why.
const IN_VALUES: &[(&str, &str, &str)] = &[(
    "btree/layer.rs",
    "HashMap",
    "pages by their number; whoever goes through them puts them in order first",
)];

/// Words that may stand only in some places: the word, the places (prefixes of paths in `src/`), why.
const ONLY_IN: &[(&str, &[&str], &str)] = &[
    ("glommio", &["env/", "runtime/", "api/transport"], "the executor can be replaced"),
    (
        "mmap",
        &["btree/map.rs", "env/sim.rs"],
        "a page fault is hidden I/O; one file knows of it (and its double)",
    ),
    ("memmap2", &["btree/map.rs"], "as above"),
    ("tokio", &[], "there is no tokio runtime in the server"),
];

/// Nowhere.
const NEVER: &[&str] = &["todo", "unimplemented", "dbg"];

/// Rustfmt holds code to 110; comments, which it leaves alone, may be a little longer. Lines with text in quotes
/// are not measured.
const COLUMNS_MAX: usize = 120;

struct Source {
    /// Below the directory that was listed, with slashes.
    name: String,
    text: String,
    /// Without comments and quoted text.
    code: String,
}

impl Source {
    fn is_test(&self) -> bool {
        self.name.ends_with("/tests.rs") || self.name.ends_with("/testing.rs")
    }

    fn is_generated(&self) -> bool {
        self.name.ends_with("_generated.rs")
    }

    /// The directory or file right below `src/`.
    fn module(&self) -> &str {
        let first = self.name.split('/').next().unwrap_or_default();
        first.strip_suffix(".rs").unwrap_or(first)
    }

    /// The code up to the tests at the end.
    fn product(&self) -> &str {
        let end = self.code.find("#[cfg(test)]\nmod tests").unwrap_or(self.code.len());
        &self.code[..end]
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(dir: &str) -> Vec<Source> {
    let base = root().join(dir);
    let mut found = Vec::new();
    let mut dirs = vec![base.clone()];
    while let Some(dir) = dirs.pop() {
        let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    dirs.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let name = path.strip_prefix(&base).unwrap().to_str().unwrap().to_owned();
                let code = code_of(&text);
                found.push(Source { name, text, code });
            }
        }
    }
    assert!(!found.is_empty(), "{dir} has sources");
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// The text with comments and what stands in quotes taken out; lines stay lines.
fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    let mut before = ' ';
    while let Some(c) = rest.chars().next() {
        let in_word = before.is_alphanumeric() || before == '_';
        let skip = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |at| at + 2)
        } else if c == '"' {
            quoted(rest)
        } else if !in_word && (rest.starts_with("b\"") || rest.starts_with("c\"")) {
            1 + quoted(&rest[1..])
        } else if !in_word && (rest.starts_with("r\"") || rest.starts_with("r#") || rest.starts_with("br#")) {
            raw(rest)
        } else if c == '\'' {
            character(rest)
        } else {
            0
        };
        if skip == 0 {
            code.push(c);
            before = c;
            rest = &rest[c.len_utf8()..];
        } else {
            code.push(' ');
            code.extend(rest[..skip].chars().filter(|c| *c == '\n'));
            before = ' ';
            rest = &rest[skip..];
        }
    }
    code
}

/// The length of a string that begins here.
fn quoted(rest: &str) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// The length of a raw string that begins here; 0 for a raw identifier.
fn raw(rest: &str) -> usize {
    let open = rest.find(['#', '"']).unwrap_or(0);
    let hashes = rest[open..].chars().take_while(|c| *c == '#').count();
    if !rest[open + hashes..].starts_with('"') {
        return 0;
    }
    let close = format!("\"{}", "#".repeat(hashes));
    let body = open + hashes + 1;
    rest[body..].find(&close).map_or(rest.len(), |at| body + at + close.len())
}

/// The length of a character in quotes; 0 for a lifetime.
fn character(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((_, _))) => chars.find(|(_, c)| *c == '\'').map_or(0, |(at, _)| at + 1),
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether the word stands in the code, not as a part of another.
fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word)
        .any(|(at, _)| !code[..at].ends_with(is_word) && !code[at + word.len()..].starts_with(is_word))
}

/// The modules that code names by paths from the crate's root.
fn named(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, prefix) in code.match_indices("crate::") {
        if code[..at].ends_with(is_word) {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        match rest.strip_prefix('{') {
            None => drop(names.insert(rest.chars().take_while(|c| is_word(*c)).collect::<String>())),
            Some(group) => {
                let (mut depth, mut starts) = (0, true);
                for (at, c) in group.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => starts = true,
                        c if starts && is_word(c) => {
                            starts = false;
                            names.insert(group[at..].chars().take_while(|c| is_word(*c)).collect());
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    names.remove("self");
    names
}

fn floor_of(module: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&module))
}

#[track_caller]
fn assert_none(findings: Vec<String>) {
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

/// The product's sources with their floors; those of the crate's root and of `bin/` stand above all.
fn modules() -> impl Iterator<Item = (Source, usize)> {
    let top = ["lib", "bin"];
    sources("src").into_iter().filter(move |source| !top.contains(&source.module())).map(|source| {
        let floor = floor_of(source.module());
        let floor = floor.unwrap_or_else(|| panic!("{} stands on no floor", source.module()));
        (source, floor)
    })
}

#[test]
fn a_module_names_lower_floors_only() {
    let mut findings = Vec::new();
    let mut used = BTreeSet::new();
    for (source, floor) in modules().filter(|(source, _)| !source.is_test()) {
        let module = source.module();
        for name in named(source.product()) {
            if name == module {
                continue;
            }
            // What is no module stands in the crate's root, which holds nothing else.
            let Some(other) = floor_of(&name) else {
                findings.push(format!("{}: crate::{name} stands on no floor", source.name));
                continue;
            };
            if let Some(at) = NEIGHBOURS.iter().position(|(who, whom, _)| (*who, *whom) == (module, &name)) {
                used.insert(at);
            } else if other >= floor {
                findings
                    .push(format!("{}: {module} (floor {floor}) names {name} (floor {other})", source.name));
            }
        }
        // `super` may lead out of a file, not out of its module.
        let depth = source.name.split('/').count() - usize::from(source.name.ends_with("/mod.rs"));
        if source.product().contains(&"super::".repeat(depth)) && depth > 0 {
            findings.push(format!("{}: leaves its module by `super`", source.name));
        }
    }
    for (at, (who, whom, _)) in NEIGHBOURS.iter().enumerate() {
        if !used.contains(&at) {
            findings.push(format!("{who} no longer names {whom}: take the exception out"));
        }
    }
    assert_none(findings);
}

#[test]
fn the_middle_floors_are_values() {
    let mut findings = Vec::new();
    let mut used = BTreeSet::new();
    for (source, floor) in modules().filter(|(source, _)| !source.is_test() && !source.is_generated()) {
        if !VALUES.contains(&floor) {
            continue;
        }
        for word in NOT_IN_VALUES.iter().filter(|word| has_word(source.product(), word)) {
            match IN_VALUES.iter().position(|(file, w, _)| (*file, w) == (&source.name, word)) {
                Some(at) => drop(used.insert(at)),
                None => findings.push(format!("{}: `{word}` on floor {floor}", source.name)),
            }
        }
    }
    for (at, (file, word, _)) in IN_VALUES.iter().enumerate() {
        if !used.contains(&at) {
            findings.push(format!("{file} no longer needs {word}: take the exception out"));
        }
    }
    assert_none(findings);
}

#[test]
fn some_words_have_their_places() {
    let mut findings = Vec::new();
    for source in sources("src").iter().filter(|source| !source.is_test()) {
        for (word, places, why) in ONLY_IN {
            let allowed = places.iter().any(|place| source.name.starts_with(place));
            if !allowed && has_word(source.product(), word) {
                findings.push(format!("{}: `{word}` belongs elsewhere: {why}", source.name));
            }
        }
    }
    assert_none(findings);
}

#[test]
fn nothing_is_left_for_later() {
    let mut findings = Vec::new();
    for dir in ["src", "tests", "perf", "benches"] {
        for source in sources(dir) {
            for word in NEVER.iter().filter(|word| source.code.contains(&format!("{word}!"))) {
                findings.push(format!("{dir}/{}: {word}!", source.name));
            }
        }
    }
    assert_none(findings);
}

#[test]
fn every_file_says_what_it_is() {
    let mut findings = Vec::new();
    for dir in ["src", "tests", "perf", "benches"] {
        let sources = sources(dir);
        // A file of tests belongs to the file beside it, which says it.
        for source in sources.iter().filter(|source| !source.is_generated() && !source.is_test()) {
            if !source.text.starts_with("//!") {
                findings.push(format!("{dir}/{} does not begin with what it is", source.name));
            }
        }
    }
    assert_none(findings);
}

#[test]
fn lines_can_be_read() {
    let mut findings = Vec::new();
    for dir in ["src", "tests", "perf", "benches"] {
        for source in sources(dir).iter().filter(|source| !source.is_generated()) {
            for (number, line) in source.text.lines().enumerate() {
                let columns = line.chars().count();
                if columns > COLUMNS_MAX && !line.contains('"') {
                    findings.push(format!("{dir}/{}:{}: {columns} columns", source.name, number + 1));
                }
            }
        }
    }
    assert_none(findings);
}

#[test]
fn no_path_of_somebodys_machine() {
    let roots = ["home", "root", "work", "Users"].map(|root| format!("/{root}/"));
    let mut findings = Vec::new();
    for dir in ["src", "tests", "perf", "benches"] {
        for source in sources(dir) {
            for (number, line) in source.text.lines().enumerate() {
                // Such a path begins; it does not go on.
                let begins = |root: &String| {
                    line.match_indices(root.as_str())
                        .any(|(at, _)| !line[..at].ends_with(|c| is_word(c) || c == '.'))
                };
                if roots.iter().any(begins) {
                    findings.push(format!("{dir}/{}:{}: {line}", source.name, number + 1));
                }
            }
        }
    }
    for file in ["README.md", "ARCHITECTURE.md", "Cargo.toml", "deny.toml"] {
        let text = fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        for root in &roots {
            if text.contains(root.as_str()) {
                findings.push(format!("{file}: {root}"));
            }
        }
    }
    assert_none(findings);
}

#[test]
fn the_reader_of_sources_sees_code_and_only_code() {
    let code = code_of("a /* b */ \"c\\\"d\" 'e' '\\'' f<'g>(r#\"h\"#, b\"i\", r#type) // j\nk");
    let words: Vec<&str> = code.split(|c| !is_word(c)).filter(|word| !word.is_empty()).collect();
    assert_eq!(words, ["a", "f", "g", "r", "type", "k"]);
    let names = named("use crate::{a, b::{c, d}, e as f}; crate::g::h(); xcrate::i; pub(crate) fn j()");
    assert_eq!(names, ["a", "b", "e", "g"].map(str::to_owned).into());
}
