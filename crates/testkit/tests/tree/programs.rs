// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test programs are few, and documents name files that exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Each program is linked statically with the whole stack, so a new test is a module of one that exists.
const MOST_PROGRAMS: usize = 20;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a folder entry is readable").path()).collect();
    paths.sort();
    paths
}

#[test]
fn test_programs_are_few() {
    let crates = entries(&root().join("crates"));
    let places = crates.iter().flat_map(|krate| entries(&krate.join("tests")));
    let is_program = |path: &PathBuf| path.join("main.rs").is_file() || path.extension().is_some_and(|end| end == "rs");
    let programs: Vec<String> = places.filter(is_program).map(|path| path.display().to_string()).collect();
    assert!(programs.len() > 10, "only {programs:?}");
    assert!(programs.len() <= MOST_PROGRAMS, "make a new file a module of a program:\n{}", programs.join("\n"));
}

/// Paths of sources in a text: `crates/…/name.rs`.
fn sources_named(text: &str) -> BTreeSet<&str> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "/_-.".contains(letter);
    let words = text.split(|letter| !is_part(letter)).map(|word| word.trim_end_matches('.'));
    words.filter(|word| word.starts_with("crates/") && word.ends_with(".rs")).collect()
}

#[test]
fn sources_that_documents_name_exist() {
    let mut folders = vec![root(), root().join("docs"), root().join("docs/formats"), root().join("docs/decisions")];
    folders.extend(entries(&root().join("crates")));
    let mut named = 0;
    let mut wrong = Vec::new();
    for page in folders.iter().flat_map(|folder| entries(folder)) {
        // The changelog describes trees as they were.
        if page.extension().is_none_or(|end| end != "md") || page.ends_with("CHANGELOG.md") {
            continue;
        }
        let text = std::fs::read_to_string(&page).expect("a document is readable");
        for source in sources_named(&text) {
            named += 1;
            if !root().join(source).is_file() {
                wrong.push(format!("{}: {source}", page.display()));
            }
        }
    }
    assert!(named > 50, "only {named} sources are named");
    assert!(wrong.is_empty(), "documents name sources that are not there:\n{}", wrong.join("\n"));
}
