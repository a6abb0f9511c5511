// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mutants: small slips in the ordering of writes, the freeing of clusters and the rights to write, and slips of NBD
//! servers and clients. The code has each of them behind a switch, `cowshed_types::slip!("NAME")`. Here are the tests
//! that must fail with them, in four lists. `scripts/mutants` tries them; `tests/tree/switches.rs` keeps the lists
//! true.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

mod files;
mod nbd;
mod order;
mod ownership;

/// One slip.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// Its name.
    pub name: &'static str,
    /// The broken rule.
    pub about: &'static str,
    /// The test that fails: its module below `tests/`, and the name of the function. The folder of its crate comes
    /// before the module, unless that is this one: `nbd/outages`. Unit tests are in `CRATE/src/FOLDER/MODULE`.
    pub test: (&'static str, &'static str),
}

/// The place of a module of tests.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TestModule {
    /// The folder of its crate in `crates/`.
    pub krate: &'static str,
    /// The test program that holds it: `tests/PROGRAM/MODULE.rs`, or `tests/PROGRAM.rs`. For unit tests the name of the library.
    pub program: String,
    /// They are unit tests of the library.
    pub is_unit: bool,
    /// The prefix of its functions' names: `MODULE::`, or nothing where the program is one file.
    pub prefix: String,
    /// Its file.
    pub file: PathBuf,
}

/// Looks for the module that the first part of [`Mutant::test`] names, in the sources at `root`. `CRATE/src/FOLDER/MODULE` names
/// unit tests.
pub fn place_of(root: &Path, test: &'static str) -> Option<TestModule> {
    let (krate, module) = test.split_once('/').unwrap_or(("testkit", test));
    if let Some(unit) = module.strip_prefix("src/") {
        let file = root.join("crates").join(krate).join(format!("{module}.rs"));
        let (program, prefix) =
            (format!("cowshed_{}", krate.replace('-', "_")), format!("{}::", unit.replace('/', "::")));
        return file.is_file().then_some(TestModule { krate, program, is_unit: true, prefix, file });
    }
    let tests = root.join("crates").join(krate).join("tests");
    let file = tests.join(format!("{module}.rs"));
    if file.is_file() {
        return Some(TestModule { krate, program: module.to_owned(), is_unit: false, prefix: String::new(), file });
    }
    let mut programs: Vec<PathBuf> = std::fs::read_dir(&tests).ok()?.flatten().map(|entry| entry.path()).collect();
    programs.sort();
    programs.into_iter().find_map(|folder| {
        let file = folder.join(format!("{module}.rs"));
        let program = folder.file_name()?.to_str()?.to_owned();
        file.is_file().then(|| TestModule { krate, program, is_unit: false, prefix: format!("{module}::"), file })
    })
}

/// The environment variable that holds the name of the mutant that is switched on (`crates/types/src/switches.rs`).
pub const VARIABLE: &str = "COWSHED_SLIP";

/// The list.
pub static MUTANTS: LazyLock<Vec<Mutant>> =
    LazyLock::new(|| [order::MUTANTS, ownership::MUTANTS, nbd::MUTANTS, files::MUTANTS].concat());
