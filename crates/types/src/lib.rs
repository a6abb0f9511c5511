// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The vocabulary that every layer of Cowshed shares: offsets, extents, errors.
//!
//! Nothing here does I/O, and nothing here depends on another crate of the workspace.

mod cache_statistics;
mod check;
mod count_guard;
mod dirty_bits;
mod error;
mod extent;
pub mod keyval;
pub mod memory;
mod name;
mod offset;
mod sharded;
#[cfg(any(mutants, ablation))]
#[doc(hidden)]
pub mod switches;

pub use cache_statistics::CacheStatistics;
pub use check::{CheckCounters, Repair};
pub use count_guard::CountGuard;
pub use dirty_bits::{BitsPiece, DirtyBits};
pub use error::{Errno, Error, ErrorKind, Result};
pub use extent::{Compression, Extent, Mapping, StoredIn};
pub use name::{
    IDENTIFIERS, LINE_END, check_identifier, in_lines, is_identifier, name_of_text, shown_name, text_of_name,
    visible_name, with_line_ends,
};
pub use offset::{GuestOffset, HostOffset};
pub use sharded::Sharded;

/// True in a build with `--cfg mutants` while the environment has switched the mutant of this name on (`COWSHED_SLIP=NAME`): the code
/// then makes that mistake. Elsewhere it is the literal `false`. `scripts/mutants` has the list of names.
#[macro_export]
#[cfg(mutants)]
#[doc(hidden)]
macro_rules! slip {
    ($name:literal) => {
        $crate::switches::is_slip($name)
    };
}

/// False: no mutant is part of this build.
#[macro_export]
#[cfg(not(mutants))]
#[doc(hidden)]
macro_rules! slip {
    ($name:literal) => {
        false
    };
}

/// True in a build with `--cfg ablation` while the environment has switched the optimisation of this name off
/// (`COWSHED_WITHOUT=NAME,NAME`). Each place looks once, so a switch costs a request next to nothing.
#[macro_export]
#[cfg(ablation)]
#[doc(hidden)]
macro_rules! without {
    ($name:literal) => {{
        static IS_OFF: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| $crate::switches::is_without($name));
        *IS_OFF
    }};
}

/// False: every optimisation is on in this build.
#[macro_export]
#[cfg(not(ablation))]
#[doc(hidden)]
macro_rules! without {
    ($name:literal) => {
        false
    };
}
