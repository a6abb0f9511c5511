// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The list of means of speed fits the code: each edit that takes one away finds its place, once.

use cowshed_testkit::means::{MEANS, VARIABLE, WITHOUT, edits};
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn every_means_finds_its_place() {
    let names: BTreeSet<&str> = MEANS.iter().map(|means| means.name).collect();
    assert_eq!(names.len(), MEANS.len(), "two means have one name");
    assert!(names.iter().all(|name| !name.contains(',')), "a comma separates names");
    assert!(WITHOUT.reader.contains(&format!("\"{VARIABLE}\"")), "the copy reads another variable");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let wrong = WITHOUT.faults(&root, &edits());
    assert!(wrong.is_empty(), "the code has moved on; change src/means.rs with it:\n{}", wrong.join("\n"));
}
