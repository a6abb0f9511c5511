// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds `cowshed` with the switches of `cowshed_testkit::means`: `COWSHED_WITHOUT=NAME,NAME` in its environment switches means of
//! speed off. For `cowshed-bench means`.
//!
//! `scripts/without [CARGO-OPTION]...`, `--release` without any. The build is in `target/ablation-build`.

use cowshed_testkit::means::{MEANS, VARIABLE};
use cowshed_testkit::switches::cargo;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut options: Vec<String> = std::env::args().skip(1).collect();
    if options.is_empty() {
        options.push("--release".to_owned());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace");
    let mut command = cargo(&root, "ablation", &["build", "--locked", "-p", "cowshed"]);
    let status = command.args(&options).status().expect("cargo runs");
    if !status.success() {
        return ExitCode::FAILURE;
    }
    println!("target/ablation-build: `cowshed` with {} switches, {VARIABLE}=NAME,NAME:", MEANS.len());
    MEANS.iter().for_each(|means| println!("  {:24} {}", means.name, means.about));
    ExitCode::SUCCESS
}
