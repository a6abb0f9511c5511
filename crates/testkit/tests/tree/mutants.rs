// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The list of mutants fits the code: each edit finds its place, once, and each test that must fail is there.

use cowshed_testkit::mutants::{MUTANTS, SLIPS, edits, place_of};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn every_mutant_finds_its_place_and_its_test() {
    let names: BTreeSet<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
    assert_eq!(names.len(), MUTANTS.len(), "two mutants have one name");
    let mut wrong = SLIPS.faults(&root(), &edits());
    for mutant in MUTANTS.iter() {
        let (file, function) = mutant.test;
        let text = place_of(&root(), file).and_then(|place| std::fs::read_to_string(place.file).ok());
        if !text.is_some_and(|text| text.contains(&format!("fn {function}()"))) {
            wrong.push(format!("{}: no test {function} in {file}", mutant.name));
        }
    }
    assert!(wrong.is_empty(), "the code has moved on; change src/mutants with it:\n{}", wrong.join("\n"));
}
