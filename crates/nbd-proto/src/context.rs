// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Metadata contexts and the queries that choose among them.

/// The context of the protocol itself.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// QEMU's: which layer of the chain a range comes from.
pub const QEMU_ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
/// In front of the name of a dirty bitmap.
pub const QEMU_DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// The option behind a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// `NBD_OPT_LIST_META_CONTEXT`: wildcards work.
    List,
    /// `NBD_OPT_SET_META_CONTEXT`: only whole names count.
    Set,
}

/// Whether one of the queries means the context `name`. A list without queries means all; queries of an unknown
/// namespace are ignored.
pub fn is_wanted(name: &str, queries: &[&str], purpose: Purpose) -> bool {
    if queries.is_empty() {
        return purpose == Purpose::List;
    }
    queries.iter().any(|query| *query == name || (purpose == Purpose::List && is_wildcard_for(query, name)))
}

/// `base:`, `qemu:` and `qemu:dirty-bitmap:` mean all that starts like this.
fn is_wildcard_for(query: &str, name: &str) -> bool {
    matches!(query, "base:" | "qemu:" | QEMU_DIRTY_BITMAP) && name.starts_with(query)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_list_and_do_not_select() {
        let names = [BASE_ALLOCATION, QEMU_ALLOCATION_DEPTH, "qemu:dirty-bitmap:b0", "qemu:dirty-bitmap:b1"];
        let chosen = |queries: &[&str], purpose| -> Vec<usize> {
            (0..names.len()).filter(|&i| is_wanted(names[i], queries, purpose)).collect()
        };
        assert_eq!(chosen(&[], Purpose::List), [0, 1, 2, 3]);
        assert_eq!(chosen(&[], Purpose::Set), [] as [usize; 0]);
        assert_eq!(chosen(&["base:"], Purpose::List), [0]);
        assert_eq!(chosen(&["base:", "qemu:", "x-y:z"], Purpose::Set), [] as [usize; 0]);
        assert_eq!(chosen(&["qemu:"], Purpose::List), [1, 2, 3]);
        assert_eq!(chosen(&["qemu:dirty-bitmap:"], Purpose::List), [2, 3]);
        assert_eq!(chosen(&["qemu:dirty-bitmap:b1", "base:allocation"], Purpose::Set), [0, 3]);
        assert_eq!(chosen(&["base", "qemu:alloc"], Purpose::List), [] as [usize; 0]);
    }
}
