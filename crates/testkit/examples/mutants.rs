// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds the tests with the switches of all mutants (`cowshed_testkit::mutants`), once, and runs for each mutant the test that
//! must fail then. First all these tests must pass with no mutant switched on.
//!
//! `scripts/mutants [--only NAME]... [--table FILE]`. Exits with 1 when a mutant lives.

use cowshed_testkit::mutants::{MUTANTS, Mutant, TestModule, VARIABLE, place_of};
use cowshed_testkit::switches::cargo;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// A test that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(900);

/// The outcome of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Fails,
    Hangs,
    Passes,
}

/// Builds the test programs; returns the file of each by its name.
fn build(root: &Path, places: &BTreeMap<&'static str, TestModule>) -> BTreeMap<String, PathBuf> {
    // The whole workspace, so that packages of others have the features of every other build.
    let mut command = cargo(root, "mutants", &["test", "--workspace", "--locked", "--no-run"]);
    let (unit, integration): (Vec<&TestModule>, Vec<_>) = places.values().partition(|place| place.is_unit);
    for program in integration.iter().map(|place| place.program.as_str()).collect::<BTreeSet<_>>() {
        command.args(["--test", program]);
    }
    if !unit.is_empty() {
        command.arg("--lib");
    }
    let output = command.stdin(Stdio::null()).output().expect("cargo runs");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "the mutants do not build:\n{text}");
    // `Executable tests/NAME.rs (PATH)` or `Executable tests/NAME/main.rs (PATH)`, and `Executable unittests src/lib.rs (PATH)` with
    // the library's name in the path.
    let program = |line: &str| {
        let (file, path) = line.trim().strip_prefix("Executable ")?.split_once(".rs (")?;
        let path = root.join(path.strip_suffix(')')?);
        let name = match file.strip_prefix("tests/") {
            Some(name) => name.strip_suffix("/main").unwrap_or(name),
            None => path.file_name()?.to_str()?.rsplit_once('-')?.0,
        };
        Some((name.to_owned(), path))
    };
    let mut built = BTreeMap::new();
    for (name, file) in text.lines().filter_map(program) {
        assert!(built.insert(name, file).is_none(), "two crates have test programs of one name:\n{text}");
    }
    built
}

fn run(folder: &Path, program: &Path, test: &str, slip: &str) -> Fate {
    let mut child = Command::new(program)
        .args(["--exact", test])
        .current_dir(folder)
        .env(VARIABLE, slip)
        .env("COWSHED_SHRINK_TRIES", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a test can be run");
    let started = Instant::now();
    loop {
        match child.try_wait().expect("a child can be waited for") {
            Some(status) if status.success() => return Fate::Passes,
            Some(_) => return Fate::Fails,
            None if started.elapsed() > PATIENCE => {
                drop((child.kill(), child.wait()));
                return Fate::Hangs;
            }
            // Between two looks. A test that hangs is an outcome.
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn main() -> ExitCode {
    let (mut only, mut table) = (Vec::new(), None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--only" => only.extend(words.next()),
            "--table" => table = words.next(),
            _ => {
                eprintln!("unknown option {word}; see the head of examples/mutants.rs");
                return ExitCode::from(2);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace");
    let chosen: Vec<&Mutant> =
        MUTANTS.iter().filter(|mutant| only.is_empty() || only.iter().any(|name| name == mutant.name)).collect();
    let place = |test| place_of(&root, test).unwrap_or_else(|| panic!("no tests in {test}"));
    let places = chosen.iter().map(|mutant| (mutant.test.0, place(mutant.test.0))).collect();
    let programs = build(&root, &places);
    let folder = |test| root.join("crates").join(places[test].krate);
    let tests: BTreeSet<(&str, &str)> = chosen.iter().map(|mutant| mutant.test).collect();
    for (file, function) in tests {
        let fate =
            run(&folder(file), &programs[&places[file].program], &format!("{}{function}", places[file].prefix), "");
        println!("{function:75} {fate:?} without a mutant");
        assert_eq!(fate, Fate::Passes, "a test that fails anyway proves nothing");
    }
    let mut text = String::from("| mutant | fault | killed by |\n|---|---|---|\n");
    let mut alive = 0;
    for mutant in &chosen {
        let started = Instant::now();
        let (file, function) = mutant.test;
        let fate = run(
            &folder(file),
            &programs[&places[file].program],
            &format!("{}{function}", places[file].prefix),
            mutant.name,
        );
        let (word, by) = match fate {
            Fate::Fails => ("killed", format!("`{file}::{function}`")),
            Fate::Hangs => ("killed: hangs", format!("`{file}::{function}` (hangs)")),
            Fate::Passes => ("LIVES", "nobody".to_owned()),
        };
        alive += usize::from(fate == Fate::Passes);
        println!("{:45} {word:15} {:4.0} s", mutant.name, started.elapsed().as_secs_f64());
        text += &format!("| {} | {} | {by} |\n", mutant.name.replace('_', " "), mutant.about);
    }
    if let Some(path) = table
        && let Err(error) = std::fs::write(&path, text)
    {
        eprintln!("could not write {path}: {error}");
    }
    println!("{} of {} mutants killed", chosen.len() - alive, chosen.len());
    if alive == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
