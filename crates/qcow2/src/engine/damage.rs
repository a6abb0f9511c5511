// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Damage of the tables that a plan meets: QEMU's sentence about it, and damage that does no harm.

use crate::engine::Engine;
use cowshed_layout::qcow2::{L1Entry, L2Entry};
use cowshed_types::{Error, GuestOffset};

/// The request behind a plan that meets a damaged entry. QEMU words the two differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Read,
    Write,
}

impl Engine {
    /// Adds QEMU's sentence to the error that the L2 entry of guest offset `at` gave.
    #[cold]
    pub(crate) fn entry_damage(&self, error: Error, at: GuestOffset, entry: L2Entry, purpose: Purpose) -> Error {
        let table = L1Entry(self.directory.l1(self.geometry.l1_index(at) as usize)).offset().0;
        let place = format!("(L2 offset: {}, L2 index: {})", hex(table), hex(self.geometry.l2_index(at)));
        if error.field_name() == Some("subcluster_bitmap") {
            let gap = if purpose == Purpose::Read { "  " } else { " " };
            return error.with_report(format!("Invalid cluster entry found{gap}{place}"));
        }
        match (self.unaligned_host(entry), purpose) {
            (Some(host), Purpose::Read) => {
                error.with_report(format!("Cluster allocation offset {} unaligned {place}", hex(host)))
            }
            (Some(host), Purpose::Write) => {
                let is_zero = entry.is_zero() && !self.geometry.extended_l2();
                let kind = if is_zero { "Preallocated zero" } else { "Data" };
                let guest = hex(at.0);
                error.with_report(format!("{kind} cluster offset {} unaligned (guest offset: {guest})", hex(host)))
            }
            (None, _) if entry.is_zero() && self.config.format.version < 3 => {
                error.with_report(format!("Zero cluster entry found in pre-v3 image {place}"))
            }
            (None, _) => error,
        }
    }

    /// The host offset of an entry that no cluster can start at.
    pub(crate) fn unaligned_host(&self, entry: L2Entry) -> Option<u64> {
        let host = entry.offset();
        (!entry.is_compressed() && !host.is_aligned(self.geometry.cluster_bits())).then_some(host.0)
    }

    /// Notes that an entry with such an offset gave way to zeroes. No cluster is freed for it.
    #[cold]
    pub(crate) fn tolerate(&self, error: Error, host: u64) {
        let _ = self.tolerated.set(error.with_report(format!("Cannot free unaligned cluster {}", hex(host))));
    }

    /// The first damage that a zero write or a discard went over: nothing was lost by it.
    pub fn tolerated_damage(&self) -> Option<&Error> {
        self.tolerated.get()
    }
}

/// A number as QEMU's sentences have it.
pub(crate) fn hex(number: u64) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}
