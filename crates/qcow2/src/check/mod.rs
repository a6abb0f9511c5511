// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checking a qcow2 image: counting every reference and comparing with the stored refcounts. Pure: the caller reads the
//! tables and hands their bytes over.
//!
//! The order of a check: [`Counts::note_stored`] for every refcount block, [`Counts::mark_metadata`] for every
//! structure, [`scan_l2`] for every L2 table, [`compare_block`] for every refcount block again. All but the first
//! may run on many threads at once.

mod compare;
mod counts;
mod edit;
mod finding;
mod lossy;
mod rebuild;
mod remedy;
mod scan;
mod tables;

pub use compare::{Difference, compare_block, lower_block, raise_block};
pub use counts::{Counts, Mark};
pub use edit::{EditStep, edit_l1, edit_l2, normal_l1_entry};
pub use finding::{CheckedStructure, Finding, FindingKind, Ledger, Severity};
pub use lossy::{give_up_l1, give_up_l2};
pub use rebuild::{RefcountLayout, fill_block, plan_layout};
pub use remedy::{Outlook, Remedy};
pub use scan::{CopiedSuspect, ScanContext, ScanOutput, ScanStats, scan_l2};
pub use tables::{INACTIVE, TableRef, TableRefs};
