// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lists of mutants and of optimisations fit the code. Each has its switch there, each switch has its line, and
//! each test that must fail is there.

use cowshed_testkit::means::{self, MEANS};
use cowshed_testkit::mutants::{self, MUTANTS, place_of};
use cowshed_testkit::switches::differences;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn every_mutant_has_its_switch_and_its_test() {
    let names: Vec<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
    let mut wrong = differences(&root(), "slip", &names);
    for mutant in MUTANTS.iter() {
        let (file, function) = mutant.test;
        let text = place_of(&root(), file).and_then(|place| std::fs::read_to_string(place.file).ok());
        if !text.is_some_and(|text| text.contains(&format!("fn {function}()"))) {
            wrong.push(format!("{}: no test {function} in {file}", mutant.name));
        }
    }
    assert!(wrong.is_empty(), "the code has moved on; change src/mutants with it:\n{}", wrong.join("\n"));
}

#[test]
fn the_page_about_safety_names_every_mutant() {
    let page = std::fs::read_to_string(root().join("docs/safety.md")).expect("the page is readable");
    let table = page.split("<!-- mutants: begin -->").nth(1).expect("the page has the table");
    let table = table.split("<!-- mutants: end -->").next().expect("a split has a first part");
    let row = |name: &str| format!("\n| {} | ", name.replace('_', " "));
    let names = MUTANTS.iter().map(|mutant| mutant.name);
    let missing: Vec<&str> = names.filter(|name| !table.contains(&row(name))).collect();
    assert!(missing.is_empty(), "rows that docs/safety.md lacks: {}", missing.join(", "));
}

#[test]
fn every_optimisation_of_the_list_has_its_switch() {
    let names: Vec<&str> = MEANS.iter().map(|means| means.name).collect();
    assert!(names.iter().all(|name| !name.contains(',')), "a comma separates names");
    let wrong = differences(&root(), "without", &names);
    assert!(wrong.is_empty(), "the code has moved on; change src/means.rs with it:\n{}", wrong.join("\n"));
}

#[test]
fn the_switches_read_the_variables_of_the_lists() {
    let text = std::fs::read_to_string(root().join("crates/types/src/switches.rs")).expect("the source is readable");
    for variable in [mutants::VARIABLE, means::VARIABLE] {
        assert!(text.contains(&format!("std::env::var(\"{variable}\")")), "nothing reads {variable}");
    }
}
