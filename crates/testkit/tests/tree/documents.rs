// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Links of the documents: every page, heading, source and function that one names is there.

use super::crate_graph::rust_files;
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
        parts && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "/_-.*".contains(c))
    };
    // `*` in the name of a file stands for any text: one such file has to be there.
    let is_there = |path: PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let Some((start, end)) = name.split_once('*') else { return path.exists() };
        let names = std::fs::read_dir(path.with_file_name("")).into_iter().flatten().flatten();
        names.filter_map(|entry| entry.file_name().into_string().ok()).any(|n| n.starts_with(start) && n.ends_with(end))
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
            if !is_elsewhere && !bases.iter().any(|base| is_there(base.join(path))) {
                missing.push(format!("{name}: {path}"));
            }
        }
    }
    assert!(seen > 200, "the test sees only {seen} paths");
    assert_none(missing, "sources that no longer exist");
}

/// The first word of a text, if it begins with one.
fn word_of(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// Keywords with a name behind them.
const ITEMS: [&str; 6] = ["fn ", "struct ", "enum ", "trait ", "const ", "type "];

/// The names of items, and the words with which lines begin: fields and variants stand there.
fn names_of_the_sources() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let sources = rust_files(&root().join("crates"));
    for path in sources {
        let text = std::fs::read_to_string(path).expect("a source file is readable");
        for line in text.lines().map(str::trim_start).filter(|line| !line.starts_with("//")) {
            let item = ["pub(crate) ", "pub(super) ", "pub "].iter().find_map(|start| line.strip_prefix(*start));
            names.insert(word_of(item.unwrap_or(line)).to_owned());
            for keyword in ITEMS {
                names.extend(line.split(keyword).skip(1).map(|rest| word_of(rest).to_owned()));
            }
        }
    }
    names
}

/// Pages about the code, figures included. `Type::name` in them is an item, a field or a variant.
const ABOUT_THE_CODE: [&str; 4] = ["ARCHITECTURE.md", "docs/where.md", "docs/glossary.md", "docs/design/"];

#[test]
fn functions_that_documents_of_the_code_name_exist() {
    let names = names_of_the_sources();
    let is_about_code = |name: &str| ABOUT_THE_CODE.iter().any(|start| name.starts_with(*start));
    let (mut missing, mut seen) = (Vec::new(), 0);
    for (page, _) in pages().into_iter().filter(|(name, _)| is_about_code(name)) {
        let text = std::fs::read_to_string(root().join(&page)).expect("a page is readable");
        for named in text.split("::").skip(1).map(word_of).filter(|word| !word.is_empty()) {
            seen += 1;
            // A function of the standard library.
            if named != "to_string" && !names.contains(named) {
                missing.push(format!("{page}: {named}"));
            }
        }
    }
    assert!(seen > 60, "the test sees only {seen} names");
    assert_none(missing, "names that no longer exist");
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
