// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Other programs that tests run: each must be there, and mostly it must succeed.

use std::path::Path;
use std::process::Command;

/// Runs a program in a folder: whether it succeeded, and everything that it said.
#[track_caller]
pub fn output(program: &str, folder: &Path, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(program).current_dir(folder).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program} must be installed (scripts/setup test): {error}"));
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// Runs a program that must succeed; everything that it said.
#[track_caller]
pub fn run(program: &str, folder: &Path, arguments: &[&str]) -> String {
    let (good, text) = output(program, folder, arguments);
    assert!(good, "{program} {arguments:?}: {text}");
    text
}
