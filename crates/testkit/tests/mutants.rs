// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The list of mutants fits the code: each edit finds its place, once, and each test that must fail is there.

use cowshed_testkit::mutants::{MUTANTS, SLIPS, edits, place_of};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn every_mutant_finds_its_place_and_its_test() {
    let names: BTreeSet<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
    assert_eq!(names.len(), MUTANTS.len(), "two mutants have one name");
    let mut wrong = SLIPS.faults(&root(), &edits());
    for mutant in MUTANTS.iter() {
        let (file, function) = mutant.test;
        let (krate, file) = place_of(file);
        if !read(&format!("crates/{krate}/tests/{file}.rs")).contains(&format!("fn {function}()")) {
            wrong.push(format!("{}: no test {function} in crates/{krate}/tests/{file}.rs", mutant.name));
        }
    }
    assert!(wrong.is_empty(), "the code has moved on; change src/mutants with it:\n{}", wrong.join("\n"));
}
