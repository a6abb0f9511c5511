// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Links of the documents: every page, heading and source that one names is there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// ARCHITECTURE.md is a map: further needs of a topic have a page in docs/design.
const MOST_LINES_OF_THE_MAP: usize = 200;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository is there")
}

/// The pages under version control, each with its text outside of code blocks.
fn pages() -> Vec<(String, String)> {
    let output = Command::new("git").args(["ls-files", "*.md"]).current_dir(root()).output().expect("git runs");
    assert!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("file names are UTF-8");
    let text = |name: &str| {
        let text = std::fs::read_to_string(root().join(name)).ok()?;
        let outside = text.split("\n```").enumerate().filter(|(index, _)| index % 2 == 0);
        Some((name.to_owned(), outside.map(|(_, part)| part).collect::<Vec<_>>().join("\n")))
    };
    let pages: Vec<_> = names.lines().filter_map(text).collect();
    assert!(pages.len() > 40, "only {} pages found", pages.len());
    pages
}

/// The anchors that a forge makes of a page's headings.
fn anchors(page: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(page).unwrap_or_default();
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let anchor =
        |line: &str| line.trim_start_matches('#').trim().to_lowercase().chars().filter(kept).collect::<String>();
    text.lines().filter(|line| line.starts_with('#')).map(|line| anchor(line).replace(' ', "-")).collect()
}

/// The targets of a page's links, those to other sites apart.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
    targets.filter(|target| !target.contains(':'))
}

fn assert_none(found: Vec<String>, rule: &str) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

#[test]
fn links_of_the_documents_lead_somewhere() {
    let mut broken = Vec::new();
    let mut seen = 0;
    for (name, text) in pages() {
        let page = root().join(&name);
        for link in links(&text) {
            seen += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { page.clone() } else { page.with_file_name("").join(path) };
            let is_there = target.exists() && (anchor.is_empty() || anchors(&target).contains(anchor));
            if !is_there {
                broken.push(format!("{name}: {link}"));
            }
        }
    }
    assert!(seen > 100, "the test sees only {seen} links");
    assert_none(broken, "links that lead nowhere");
}

#[test]
fn sources_that_the_documents_name_exist() {
    let is_path = |word: &&str| {
        let parts = word.split('/').count() > 1 && [".rs", ".md", ".toml", ".py"].iter().any(|end| word.ends_with(end));
        parts && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "/_-.".contains(c))
    };
    let mut missing = Vec::new();
    let mut seen = 0;
    // The journals describe the tree of their day.
    for (name, text) in pages().into_iter().filter(|(name, _)| !name.starts_with("docs/measurements/")) {
        let folder = root().join(&name).with_file_name("");
        let bases = [root(), root().join("crates"), folder.clone(), folder.join("src")];
        for path in text.split('`').skip(1).step_by(2).filter(is_path) {
            seen += 1;
            // Pages of the NBD project.
            let is_elsewhere = matches!(path, "doc/proto.md" | "doc/uri.md");
            if !is_elsewhere && !bases.iter().any(|base| base.join(path).exists()) {
                missing.push(format!("{name}: {path}"));
            }
        }
    }
    assert!(seen > 200, "the test sees only {seen} paths");
    assert_none(missing, "sources that no longer exist");
}

#[test]
fn the_index_names_every_page() {
    let folder = root().join("docs");
    let text = std::fs::read_to_string(folder.join("README.md")).expect("an index");
    let linked: BTreeSet<&str> = links(&text).map(|link| link.split('#').next().unwrap_or(link)).collect();
    let is_linked = |name: &str| {
        let mut parents = Path::new(name).ancestors().skip(1).map(|parent| format!("{}/", parent.display()));
        linked.contains(name) || parents.any(|parent| linked.contains(parent.as_str()))
    };
    let names = pages().into_iter().filter_map(|(name, _)| Some(name.strip_prefix("docs/")?.to_owned()));
    let found = names.filter(|name| name != "README.md" && !is_linked(name)).collect();
    assert_none(found, "pages that docs/README.md doesn't name");
}

#[test]
fn the_map_of_the_code_stays_short() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the map");
    let lines = text.lines().count();
    assert!(lines <= MOST_LINES_OF_THE_MAP, "ARCHITECTURE.md has {lines} lines: move a topic to docs/design");
}
