// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds of the sources with the switches of mutants or of optimisations (`crates/types/src/switches.rs`), and the places where
//! the sources have them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Crates that are no part of the product.
const FOR_DEVELOPMENT: &[&str] = &["bench", "testkit"];

/// A cargo command for the workspace at `root`, in which `--cfg NAME` is set for our own crates. Programs go to
/// `target/NAME-build`. Packages of others are those that other commands have built. Panics where the wrapper of the
/// compiler can't be written.
pub fn cargo(root: &Path, cfg: &str, arguments: &[&str]) -> Command {
    // Flags of the environment, or of `--config`, would count for all packages and have them built again.
    let wrapper = root.join(format!("target/rustc-{cfg}"));
    let text = format!("#!/bin/sh\nexec \"$@\" --cfg {cfg}\n");
    if !std::fs::read_to_string(&wrapper).is_ok_and(|there| there == text) {
        std::fs::write(&wrapper, text).unwrap_or_else(|error| panic!("{}: {error}", wrapper.display()));
        std::fs::set_permissions(&wrapper, Permissions::from_mode(0o755)).expect("a file of ours");
    }
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    command.args(arguments).current_dir(root).env("RUSTC_WORKSPACE_WRAPPER", wrapper);
    command.env("CARGO_BUILD_BUILD_DIR", root.join("target"));
    command.env("CARGO_TARGET_DIR", root.join(format!("target/{cfg}-build")));
    // Variables that `cargo run` sets for this program would make build scripts run again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"].iter().any(|start| text.starts_with(start)) {
            command.env_remove(&name);
        }
    }
    command
}

/// The names that the product's sources at `root` pass to a macro, each with the number of its places. Panics where they can't be read.
pub fn named_in_sources(root: &Path, call: &str) -> BTreeMap<String, usize> {
    let mut names = BTreeMap::new();
    for krate in std::fs::read_dir(root.join("crates")).expect("the folder of crates") {
        let krate = krate.expect("a folder of a crate");
        if !FOR_DEVELOPMENT.iter().any(|name| krate.file_name() == *name) {
            add_names(&krate.path().join("src"), call, &mut names);
        }
    }
    names
}

fn add_names(folder: &Path, call: &str, names: &mut BTreeMap<String, usize>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry of a folder").path();
        if path.is_dir() {
            add_names(&path, call, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source file");
            for after in text.split(&format!("{call}!(\"")).skip(1) {
                let name = after.split('"').next().unwrap_or_default();
                *names.entry(name.to_owned()).or_default() += 1;
            }
        }
    }
}

/// Differences between the names of a list and those in the sources, as sentences.
pub fn differences(root: &Path, call: &str, list: &[&str]) -> Vec<String> {
    let found = named_in_sources(root, call);
    let listed: BTreeSet<&str> = list.iter().copied().collect();
    let mut wrong = Vec::new();
    if listed.len() != list.len() {
        wrong.push(format!("two lines of the list of `{call}!` have one name"));
    }
    wrong
        .extend(listed.iter().filter(|name| !found.contains_key(**name)).map(|name| format!("{name}: no code has it")));
    wrong.extend(
        found.keys().filter(|name| !listed.contains(name.as_str())).map(|name| format!("{name}: not in the list")),
    );
    wrong
}
