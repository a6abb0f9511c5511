// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rules for dependencies: permissive licences, one registry, nothing that STYLE.md bans. `deny.toml` has the same
//! for cargo-deny; this test needs no tool and no network.

use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

const ALLOWED_LICENCES: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "bzip2-1.0.6",
];
/// Deadlocks by design, unmaintained, or a second runtime.
const BANNED: &[&str] = &["async-std", "dashmap", "glommio", "monoio", "tokio", "tokio-uring"];

fn packages() -> Vec<Value> {
    let output = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()))
        .args(["metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array().expect("packages").clone();
    assert!(packages.len() > 30, "only {} packages seen", packages.len());
    packages
}

/// True when the licence expression can be met with allowed licences alone: OR binds weaker than AND, as in SPDX;
/// parentheses group; `/` is the old spelling of OR.
fn is_permissive(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    let expression = expression.trim();
    let parts = |separator: &str| split_outside_parentheses(expression, separator);
    let alternatives = parts(" OR ");
    if alternatives.len() > 1 {
        return alternatives.iter().any(|part| is_permissive(part));
    }
    let demands = parts(" AND ");
    if demands.len() > 1 {
        return demands.iter().all(|part| is_permissive(part));
    }
    match expression.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => is_permissive(inner),
        None => ALLOWED_LICENCES.contains(&expression),
    }
}

fn split_outside_parentheses<'a>(text: &'a str, separator: &str) -> Vec<&'a str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (index, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ' ' if depth == 0 && index >= start && text[index..].starts_with(separator) => {
                parts.push(&text[start..index]);
                start = index + separator.len();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

#[test]
fn expressions_are_read_as_spdx_means_them() {
    for good in ["MIT", "MIT/Apache-2.0", "(MIT OR GPL-2.0-only) AND Unicode-3.0", "LGPL-2.1-or-later OR MIT"] {
        assert!(is_permissive(good), "{good}");
    }
    for bad in ["GPL-2.0-only", "MIT AND GPL-3.0-only", "", "(MIT AND LGPL-2.1-only)", "MIT OR-ELSE"] {
        assert!(!is_permissive(bad), "{bad}");
    }
}

#[test]
fn licences_are_permissive() {
    let found =
        packages().into_iter().filter(|package| !is_permissive(package["license"].as_str().unwrap_or_default()));
    let found: Vec<String> = found.map(|package| format!("{}: {}", package["name"], package["license"])).collect();
    assert!(found.is_empty(), "not permissive: {found:?}");
}

/// The lines of an array of tables in deny.toml, and the lines of a section of it.
fn deny_lines(after: &str, until: &str) -> Vec<String> {
    let text = include_str!("../../../../deny.toml");
    let start = text.find(after).unwrap_or_else(|| panic!("{after} in deny.toml")) + after.len();
    let end = text[start..].find(until).unwrap_or(text.len() - start);
    text[start..start + end].lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
}

/// A crate in two versions is built twice, and a mended one may still be there unmended. Each has a line in deny.toml
/// with the reason, and none has a line without need.
#[test]
fn crates_in_several_versions_are_those_of_the_list() {
    let mut versions: std::collections::BTreeMap<String, BTreeSet<String>> = Default::default();
    for package in packages() {
        let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        versions.entry(text("name")).or_default().insert(text("version"));
    }
    let skipped: BTreeSet<String> = deny_lines("\nskip = [", "\n]")
        .iter()
        .map(|line| {
            let name = line.strip_prefix("{ crate = \"").and_then(|line| line.split_once('"'));
            let (name, reason) = name.unwrap_or_else(|| panic!("no crate in {line}"));
            assert!(reason.contains("reason = \""), "{line} gives no reason");
            name.to_owned()
        })
        .collect();
    let mut needed = BTreeSet::new();
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        let known = versions.iter().filter(|version| skipped.contains(&format!("{name}@{version}")));
        let known: Vec<&String> = known.collect();
        assert_eq!(known.len(), versions.len() - 1, "{name} comes in {versions:?}; deny.toml skips {known:?}");
        needed.extend(known.iter().map(|version| format!("{name}@{version}")));
    }
    assert_eq!(needed, skipped, "deny.toml skips what isn't there twice");
}

/// The settings of cargo-deny, where it runs: nothing is waved through.
#[test]
fn advisories_and_sources_are_denied() {
    let advisories = deny_lines("[advisories]", "\n[");
    for line in ["yanked = \"deny\"", "unmaintained = \"all\"", "unsound = \"all\"", "ignore = []"] {
        assert!(advisories.contains(&line.to_owned()), "{line} in {advisories:?}");
    }
    assert!(deny_lines("[bans]", "\n[").contains(&"multiple-versions = \"deny\"".to_owned()));
    let sources = deny_lines("[sources]", "\n[");
    for line in ["unknown-registry = \"deny\"", "unknown-git = \"deny\"", "allow-git = []"] {
        assert!(sources.contains(&line.to_owned()), "{line} in {sources:?}");
    }
}

#[test]
fn packages_come_from_one_registry_and_none_is_banned() {
    let packages = packages();
    // Our own packages have no source.
    let sources: BTreeSet<&str> = packages.iter().filter_map(|package| package["source"].as_str()).collect();
    assert!(sources.len() == 1 && sources.iter().all(|source| source.starts_with("registry+")), "{sources:?}");
    for package in &packages {
        assert!(!BANNED.contains(&package["name"].as_str().unwrap_or_default()), "{} is banned", package["name"]);
    }
}

#[test]
fn published_crates_name_versions_of_each_other() {
    let packages = packages();
    let is_ours = |package: &&Value| package["source"].is_null();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    // `publish = false` is an empty list of registries.
    let is_published = |package: &Value| package["publish"].is_null();
    let ours: Vec<&Value> = packages.iter().filter(is_ours).collect();
    let mut wrong = Vec::new();
    for package in ours.iter().filter(|package| is_published(package)) {
        for field in ["description", "license", "readme"] {
            if package[field].is_null() {
                wrong.push(format!("{}: no {field}", package["name"]));
            }
        }
        let dependencies = package["dependencies"].as_array().expect("a list");
        for needed in dependencies.iter().filter(|needed| needed["kind"] != "dev") {
            let Some(target) = ours.iter().find(|known| known["name"] == needed["name"]) else { continue };
            if !is_published(target) || text(&needed["req"]) != format!("^{}", text(&target["version"])) {
                wrong.push(format!("{}: {} {}", package["name"], needed["name"], needed["req"]));
            }
        }
    }
    assert!(ours.iter().filter(|package| !is_published(package)).count() >= 3, "the test sees no crates of ours");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
