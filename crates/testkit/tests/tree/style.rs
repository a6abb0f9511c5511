// SPDX-License-Identifier: Apache-2.0 OR MIT
//! House rules that a machine can check; see STYLE.md.

use std::path::{Path, PathBuf};
use std::process::Command;

const LICENCE_LINE: &str = "// SPDX-License-Identifier: Apache-2.0 OR MIT";
/// STYLE.md has about 600; beyond this a file must be split.
const LONGEST_FILE_LINES: usize = 700;
/// STYLE.md has about eight.
const LONGEST_TEST_NAME_WORDS: usize = 11;
/// Words in whose place a comment names the thing that acts.
const PERSONS: [&str; 8] = ["who", "whoever", "somebody", "someone", "nobody", "anybody", "anyone", "everybody"];
/// The user of this name.
const USER_NOBODY: &str = "`nobody`";
/// Modules are named after their contents.
const VAGUE_NAMES: &[&str] = &["common", "helper", "helpers", "misc", "util", "utils"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository is there")
}

/// Paths of the files under version control (and new ones not ignored), with their text where they are text.
fn files() -> Vec<(String, String)> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git runs");
    assert!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("file names are UTF-8");
    let texts =
        names.lines().filter_map(|name| Some((name.to_owned(), std::fs::read_to_string(root().join(name)).ok()?)));
    texts.collect()
}

fn sources() -> Vec<(String, String)> {
    let sources: Vec<_> = files().into_iter().filter(|(name, _)| name.ends_with(".rs")).collect();
    assert!(sources.len() > 20, "only {} sources found", sources.len());
    sources
}

fn assert_none(found: Vec<String>, rule: &str) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

#[test]
fn every_source_starts_with_its_licence() {
    let found =
        sources().into_iter().filter(|(_, text)| text.lines().next() != Some(LICENCE_LINE)).map(|(name, _)| name);
    assert_none(found.collect(), "the first line must be the SPDX line");
}

#[test]
fn no_source_is_too_long() {
    let long = sources().into_iter().map(|(name, text)| (name, text.lines().count()));
    let found =
        long.filter(|(_, lines)| *lines > LONGEST_FILE_LINES).map(|(name, lines)| format!("{name}: {lines} lines"));
    assert_none(found.collect(), "files must be split");
}

#[test]
fn names_of_tests_are_short() {
    let found = sources().into_iter().flat_map(|(name, text)| {
        let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
        let tests = lines.iter().enumerate().filter(|(_, line)| **line == "#[test]");
        let functions = tests.filter_map(|(index, _)| {
            lines[index..].iter().find_map(|line| line.strip_prefix("fn ")?.split('(').next())
        });
        let long = functions.filter(|test| test.split('_').count() > LONGEST_TEST_NAME_WORDS);
        long.map(|test| format!("{name}: {test}")).collect::<Vec<_>>()
    });
    assert_none(found.collect(), "a test's name is about eight words");
}

/// The lines of a source that belong to tests, with their index.
fn lines_of_tests<'a>(name: &str, lines: &[&'a str]) -> Vec<(usize, &'a str)> {
    let is_whole = name.contains("/tests/") || name.ends_with("/tests.rs") || name.starts_with("crates/test");
    let is_module = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{');
    let start = if is_whole { 0 } else { lines.windows(2).position(is_module).unwrap_or(lines.len()) };
    lines.iter().copied().enumerate().skip(start).collect()
}

#[test]
fn a_sleep_of_a_test_has_its_reason() {
    let is_comment = |line: &&str| line.trim_start().starts_with("//") || line.contains(" // ");
    let sleeps = |line: &str| {
        // Of `rt`, of `std::thread`, or imported.
        let calls = ["sleep(", "sleep_until("].iter().flat_map(|call| line.match_indices(call));
        let mut before = calls.map(|(at, _)| &line[..at]);
        !is_comment(&line)
            && before.any(|text| !text.ends_with("fn ") && !text.ends_with(|c: char| c.is_alphanumeric() || c == '_'))
    };
    let found = sources().into_iter().flat_map(|(name, text)| {
        let lines: Vec<&str> = text.lines().collect();
        let of_tests = lines_of_tests(&name, &lines);
        let silent = of_tests
            .into_iter()
            .filter(|(index, line)| sleeps(line) && !lines[index.saturating_sub(3)..*index].iter().any(is_comment));
        silent.map(|(index, _)| format!("{name}:{}", index + 1)).collect::<Vec<_>>()
    });
    assert_none(found.collect(), "a comment above says why a test sleeps; `await_that` waits for a state");
}

#[test]
fn unsafe_code_is_in_storage_only() {
    let word = concat!("un", "safe");
    let is_code = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        [" {", " fn ", " impl ", " trait ", "("].iter().any(|next| code.contains(&format!("{word}{next}")))
    };
    let elsewhere = sources().into_iter().filter(|(name, _)| !name.starts_with("crates/storage/"));
    let found = elsewhere.flat_map(|(name, text)| {
        let lines = text.lines().enumerate().filter(|(_, line)| is_code(line)).map(|(index, _)| index + 1);
        lines.map(|line| format!("{name}:{line}")).collect::<Vec<_>>()
    });
    assert_none(found.collect(), "this word belongs in crates/storage");
}

#[test]
fn a_thing_is_the_subject_of_comments() {
    let has_person = |line: &str| {
        // An address of a program isn't a comment.
        let Some((_, comment)) = line.split_once("//").filter(|(before, _)| !before.ends_with(':')) else {
            return false;
        };
        if comment.trim_start_matches(['/', '!', ' ']).starts_with("What is ") || comment.contains(". What is ") {
            return true;
        }
        let mut words = comment.split_whitespace().filter(|word| !word.contains(USER_NOBODY));
        words.any(|word| {
            let mut parts = word.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-');
            parts.any(|part| PERSONS.iter().any(|person| part.eq_ignore_ascii_case(person)))
        })
    };
    let found = sources().into_iter().flat_map(|(name, text)| {
        let lines = text.lines().enumerate().filter(|(_, line)| has_person(line)).map(|(index, _)| index + 1);
        lines.map(|line| format!("{name}:{line}")).collect::<Vec<_>>()
    });
    assert_none(found.collect(), "name the thing that acts: a client, a reader, another process");
}

#[test]
fn modules_are_named_after_nouns() {
    let vague = |name: &str| {
        let path = Path::new(name);
        let parts = path.with_extension("");
        parts.iter().any(|part| part.to_str().is_some_and(|part| VAGUE_NAMES.contains(&part)))
    };
    let found = sources().into_iter().filter(|(name, _)| vague(name)).map(|(name, _)| name);
    assert_none(found.collect(), "say what is in it");
}

#[test]
fn no_file_names_a_home_folder() {
    let homes = ["/home/", "/root/", "/Users/"].map(|home| home.to_owned());
    let found = files().into_iter().flat_map(|(name, text)| {
        let itself = name.ends_with("tests/tree/style.rs");
        let lines =
            text.lines().enumerate().filter(|(_, line)| !itself && homes.iter().any(|home| line.contains(home)));
        lines.map(|(index, _)| format!("{name}:{}", index + 1)).collect::<Vec<_>>()
    });
    assert_none(found.collect(), "absolute paths of one machine don't belong in the repository");
}

#[test]
fn every_crate_says_what_it_is() {
    let crates = std::fs::read_dir(root().join("crates")).expect("crates is a folder");
    let folders = crates.map(|entry| entry.expect("a folder entry is readable").path());
    let found = folders.filter(|folder| folder.join("Cargo.toml").exists() && !folder.join("README.md").exists());
    assert_none(found.map(|folder| folder.display().to_string()).collect(), "crates without README.md");
}

/// The Rust of these pages, and the files where the same lines are compiled.
const COMPILED: [(&str, &[&str]); 2] = [
    ("docs/library.md", &["crates/cowshed/src/lib.rs"]),
    (
        "docs/testing.md",
        &[
            "crates/image/tests/image/chain.rs",
            "crates/testkit/tests/simulated/crash_findings.rs",
            "crates/testkit/tests/simulated/crash_create.rs",
            "crates/cowshed/tests/cli/check.rs",
        ],
    ),
];

#[test]
fn rust_blocks_of_the_docs_are_compiled_elsewhere() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    // The lines of a documentation test that a reader sees.
    let shown = |line: &str| match line.strip_prefix("//!") {
        Some(rest) => (!rest.starts_with(" #")).then(|| rest.strip_prefix(' ').unwrap_or(rest).to_owned()),
        None => Some(line.to_owned()),
    };
    let (mut blocks, mut missing) = (0, Vec::new());
    for (page, files) in COMPILED {
        let code: Vec<String> =
            files.iter().map(|file| read(file).lines().filter_map(shown).collect::<Vec<_>>().join("\n")).collect();
        let text = read(page);
        for block in text.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            blocks += 1;
            if !code.iter().any(|code| code.contains(block.trim_end())) {
                missing.push(format!("{page}: {}", block.lines().find(|line| line.contains("fn ")).unwrap_or(block)));
            }
        }
    }
    assert!(blocks >= 7, "{blocks} blocks");
    assert!(missing.is_empty(), "{missing:#?}");
}
