// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Puts all edits of `cowshed_testkit::means` into a copy of the sources, each behind a switch, and builds its `cowshed`:
//! `COWSHED_WITHOUT=NAME,NAME` in its environment switches means of speed off. For `cowshed-bench means`.
//!
//! `scripts/without [CARGO-OPTION]...`, `--release` without any. The copy is in `target/without`, and built in
//! `target/without-build`.

use cowshed_testkit::means::{MEANS, WITHOUT, edits};
use std::path::Path;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut options: Vec<String> = std::env::args().skip(1).collect();
    if options.is_empty() {
        options.push("--release".to_owned());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace");
    let (tree, target) = (root.join("target/without"), root.join("target/without-build"));
    WITHOUT.copy(&root, &tree, &edits());
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    command.args(["build", "--locked", "-p", "cowshed"]).args(&options);
    // A folder of its own: to cargo, two checkouts of one workspace are the same packages.
    // What `cargo run` says of this program would have build scripts run again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"].iter().any(|start| text.starts_with(start)) {
            command.env_remove(&name);
        }
    }
    let status = command.current_dir(&tree).env("CARGO_TARGET_DIR", &target).status().expect("cargo runs");
    if !status.success() {
        return ExitCode::FAILURE;
    }
    println!("{}: `cowshed` with {} switches, COWSHED_WITHOUT=NAME,NAME:", target.display(), MEANS.len());
    MEANS.iter().for_each(|means| println!("  {:24} {}", means.name, means.about));
    ExitCode::SUCCESS
}
