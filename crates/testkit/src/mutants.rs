// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mutants: small slips in the ordering of writes, the freeing of clusters and the rights to write, each with the test
//! that must fail with it, and slips of NBD servers and clients, in four lists. `scripts/mutants` tries them;
//! `tests/mutants.rs` keeps the list true.
//!
//! All slips go into one copy of the sources at once, each behind a switch, so that it is built only once.

use crate::switched::{Edit, Switches};
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
    /// What goes wrong.
    pub about: &'static str,
    /// The test that fails: the file in `tests/` without its ending, and the name of the function. In front of the file stands the
    /// folder of its crate, unless that is this one: `nbd/outages`.
    pub test: (&'static str, &'static str),
    /// The edits: `SLIP` is true when this mutant is switched on.
    pub edits: &'static [Edit],
}

/// The folder of the crate in `crates/`, and the file in its `tests/`, of the first part of [`Mutant::test`].
pub fn place_of(test: &'static str) -> (&'static str, &'static str) {
    test.split_once('/').unwrap_or(("testkit", test))
}

/// What switches a mutant on: `COWSHED_SLIP=NAME`.
pub const SLIPS: Switches = Switches {
    word: "SLIP",
    call: "cowshed_block::slip(\"NAME\")",
    reader: r#"
/// True when the mutant of this name is switched on.
#[doc(hidden)]
pub fn slip(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("COWSHED_SLIP").unwrap_or_default()) == name
}
"#,
};

/// The edits of each mutant.
pub fn edits() -> Vec<(&'static str, &'static [Edit])> {
    MUTANTS.iter().map(|mutant| (mutant.name, mutant.edits)).collect()
}

/// The list.
pub static MUTANTS: LazyLock<Vec<Mutant>> =
    LazyLock::new(|| [order::MUTANTS, ownership::MUTANTS, nbd::MUTANTS, files::MUTANTS].concat());
