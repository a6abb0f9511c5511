// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The changes of a repair to L1 and L2 entries.

use super::{Counts, ScanContext};
use cowshed_layout::qcow2::{L1Entry, L2Entry};

/// One step of a repair. The order is that of correctness: a right to write in place is taken away before a count
/// rises and given after it fell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EditStep {
    /// Bit 63 goes where the cluster doesn't have exactly one reference.
    Revoke,
    /// Entries with the same meaning in a valid form: reserved bits go, zero clusters lose an impossible offset,
    /// compressed ones their bit 63.
    Normalise,
    /// Bit 63 comes where stored refcount and references are one, and goes where the stored refcount is another.
    Grant,
}

/// The edits of `step` in an L2 table of which all references are counted: (index of an 8-byte word, its new value).
/// Only entries whose cluster lies in the window of `counts` are touched, so every window has its turn.
pub fn edit_l2(
    context: &ScanContext,
    counts: &Counts,
    step: EditStep,
    active: bool,
    bytes: &[u8],
) -> Vec<(usize, u64)> {
    let stride = if context.geometry.extended_l2() { 2 } else { 1 };
    let words = bytes.as_chunks::<8>().0;
    let entries = words.iter().enumerate().step_by(stride).map(|(word, raw)| (word, u64::from_be_bytes(*raw)));
    let edited = entries.filter(|(_, raw)| *raw != 0).map(|(word, raw)| {
        let entry = L2Entry(raw);
        let new = match step {
            EditStep::Normalise => normalised(context, entry),
            EditStep::Revoke | EditStep::Grant if active => flagged(context, counts, step, entry),
            EditStep::Revoke | EditStep::Grant => entry,
        };
        (word, raw, new.0)
    });
    edited.filter(|(_, old, new)| old != new).map(|(word, _, new)| (word, new)).collect()
}

fn normalised(context: &ScanContext, entry: L2Entry) -> L2Entry {
    if entry.is_compressed() {
        return if context.data_file { entry } else { entry.with_copied(false) };
    }
    let reserved = entry.reserved_bits() | u64::from(context.version < 3);
    let entry = L2Entry(entry.0 & !reserved);
    let has_zero_flag = context.version >= 3 && !context.geometry.extended_l2();
    let aligned = context.geometry.in_cluster(entry.offset().0) == 0;
    if has_zero_flag && entry.is_zero() && !aligned { L2Entry::ZERO_PLAIN } else { entry }
}

fn flagged(context: &ScanContext, counts: &Counts, step: EditStep, entry: L2Entry) -> L2Entry {
    if entry.is_compressed() {
        return entry;
    }
    let offset = entry.offset().0;
    if context.data_file {
        // "This bit should be 1 for all allocated clusters."
        let allocated = offset != 0 || entry.is_copied();
        return if step == EditStep::Grant && allocated { entry.with_copied(true) } else { entry };
    }
    if offset == 0 || context.geometry.in_cluster(offset) != 0 {
        return entry;
    }
    let cluster = offset >> context.geometry.cluster_bits();
    entry.with_copied(wanted_flag(context, counts, step, cluster, entry.is_copied()))
}

fn wanted_flag(context: &ScanContext, counts: &Counts, step: EditStep, cluster: u64, copied: bool) -> bool {
    let cluster_size = context.geometry.cluster_size();
    let Some(index) = counts.index(cluster) else { return copied };
    if context.is_past_end(cluster << context.geometry.cluster_bits(), cluster_size) {
        return copied;
    }
    let single = counts.references_at(index) == 1;
    let stored_one = counts.peek(index).is_stored_one();
    match step {
        EditStep::Revoke => copied && single,
        EditStep::Grant => {
            if copied {
                stored_one
            } else {
                stored_one && single
            }
        }
        EditStep::Normalise => copied,
    }
}

/// An L1 entry with the same meaning in a valid form: without reserved bits, and without a flag where there is no
/// table.
pub fn normal_l1_entry(entry: L1Entry) -> L1Entry {
    if entry.is_allocated() { L1Entry(entry.0 & !entry.reserved_bits()) } else { L1Entry::UNALLOCATED }
}

/// The edits of `step` in the active L1 table: (index of the entry, its new value).
pub fn edit_l1(context: &ScanContext, counts: &Counts, step: EditStep, entries: &[u64]) -> Vec<(usize, u64)> {
    let edited = entries.iter().enumerate().filter(|(_, raw)| **raw != 0).map(|(index, raw)| {
        let entry = L1Entry(*raw);
        let offset = entry.offset().0;
        let cluster = offset >> context.geometry.cluster_bits();
        let new = match step {
            EditStep::Normalise => normal_l1_entry(entry),
            _ if offset == 0 || context.geometry.in_cluster(offset) != 0 => entry,
            _ => entry.with_copied(wanted_flag(context, counts, step, cluster, entry.is_copied())),
        };
        (index, *raw, new.0)
    });
    edited.filter(|(_, old, new)| old != new).map(|(index, _, new)| (index, new)).collect()
}
