// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Filters: nodes with one child that see the requests pass. A graph without filters doesn't pay for them.

mod fault;

pub use fault::{Fault, FaultOp, FaultRule};

/// A filter: one line of [`FILTERS`].
#[derive(Clone, Copy, Debug)]
pub struct FilterInfo {
    /// The driver name.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
}

/// The filters there are.
pub const FILTERS: &[FilterInfo] = &[FilterInfo { name: "fault", about: "fails chosen requests with a chosen errno" }];
