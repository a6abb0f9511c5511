// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Overlap checks: no write may land on metadata that it isn't meant for. The structure of a marked cluster is found
//! out only when a write hits it.

use crate::engine::{Engine, State};
use crate::stall::Stall;
use crate::structures::Structure;
use cowshed_layout::qcow2::L1Entry;
use cowshed_types::{Errno, Error, HostOffset};
use std::collections::HashSet;
use std::ops::Range;

impl Engine {
    /// Marks clusters of a structure, if it is checked. True when something else had them marked already.
    pub(crate) fn mark(&self, structure: Structure, clusters: Range<u64>) -> bool {
        self.overlap_set().contains(structure) && self.metadata.insert(clusters)
    }

    pub(crate) fn unmark(&self, structure: Structure, clusters: Range<u64>) {
        if self.overlap_set().contains(structure) {
            self.metadata.remove(clusters);
        }
    }

    /// Marks the metadata that is known without reading anything. Returns the L1 indices of L2 tables that overlap
    /// something.
    pub(crate) fn mark_known(&self, state: &State, l1: &[u64]) -> Vec<usize> {
        let bits = self.geometry.cluster_bits();
        let clusters = |offset: u64, bytes: u64| offset >> bits..(offset + bytes).div_ceil(1 << bits);
        self.mark(Structure::MainHeader, 0..1);
        self.mark(Structure::ActiveL1, clusters(state.tables.l1_offset(), l1.len() as u64 * 8));
        let table_bytes = state.refcounts.table_clusters() << bits;
        self.mark(Structure::RefcountTable, clusters(state.refcounts.table_offset(), table_bytes));
        // A snapshot's table that is the active one too, still unchanged, is marked as that.
        let active: HashSet<u64> = match self.overlap_set().contains(Structure::InactiveL2) {
            true => l1.iter().map(|entry| L1Entry(*entry).offset().0).collect(),
            false => HashSet::new(),
        };
        for (structure, offset, bytes) in &state.other_metadata {
            if *structure != Structure::InactiveL2 || !active.contains(offset) {
                self.mark(*structure, clusters(*offset, *bytes));
            }
        }
        let mut overlapping = Vec::new();
        if self.overlap_set().contains(Structure::ActiveL2) {
            // Tables past the end of the file are refused where they are used.
            let end = state.refcounts.high_water();
            let table_of = |entry: &u64| Some(L1Entry(*entry).offset().0).filter(|o| (1..end).contains(o));
            let ranges = l1.iter().map(|entry| table_of(entry).map_or(0..0, |host| host >> bits..(host >> bits) + 1));
            self.metadata.insert_all(ranges, |l1_index| overlapping.push(l1_index));
        }
        overlapping
    }

    /// The end of a write that would hit metadata.
    #[cold]
    pub(crate) fn overlap(&self, state: &State, cluster: u64) -> Stall {
        let host = HostOffset(cluster << self.geometry.cluster_bits());
        let structure = self.structure_at(state, cluster).map_or("metadata", Structure::name);
        let message = format!("preventing invalid write on metadata (overlaps with {structure})");
        let report = format!("Preventing invalid write on metadata (overlaps with {structure})");
        let error = Error::invalid_image("host_offset", host, message).with_errno(Errno::EIO).with_report(report);
        Stall::Corrupt(error, host.0..host.0 + self.geometry.cluster_size())
    }

    /// The structure that a marked cluster belongs to.
    fn structure_at(&self, state: &State, cluster: u64) -> Option<Structure> {
        let bits = self.geometry.cluster_bits();
        let within = |offset: u64, bytes: u64| {
            offset != 0 && (offset >> bits..(offset + bytes).div_ceil(1 << bits)).contains(&cluster)
        };
        if cluster == 0 {
            return Some(Structure::MainHeader);
        }
        if within(state.tables.l1_offset(), state.tables.l1_len() as u64 * 8) {
            return Some(Structure::ActiveL1);
        }
        if within(state.refcounts.table_offset(), state.refcounts.table_clusters() << bits) {
            return Some(Structure::RefcountTable);
        }
        if let Some((structure, ..)) = state.other_metadata.iter().find(|(_, offset, bytes)| within(*offset, *bytes)) {
            return Some(*structure);
        }
        let blocks = state.refcounts.table().unwrap_or_default();
        if blocks.iter().any(|block| *block != 0 && block >> bits == cluster) {
            return Some(Structure::RefcountBlock);
        }
        (0..state.tables.l1_len())
            .any(|index| L1Entry(self.directory.l1(index)).offset().0 >> bits == cluster)
            .then_some(Structure::ActiveL2)
    }
}
