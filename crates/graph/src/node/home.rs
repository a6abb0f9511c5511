// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The graph as a node sees it: reports to it, and questions.

use cowshed_types::{Errno, Error};
use std::any::Any;

/// The graph of a node, as the node sees it.
pub(crate) trait Home: Any + Send + Sync {
    /// True while users move from node to node: no file gives locks back meanwhile.
    fn keeps_locks(&self) -> bool;

    /// True where the node with this name shows the bytes of its file ([`super::Node::is_raw`]).
    fn is_raw(&self, name: &str) -> bool;

    /// The name of a node is free again.
    fn remove(&self, name: &str);

    /// A write crossed the threshold of a node.
    fn report_threshold(&self, crossed: &ThresholdCrossed);

    /// An image was found to be corrupt.
    fn report_corruption(&self, corruption: &Corruption);

    /// The same graph, for those that it may outlive.
    fn reporter(&self) -> Box<dyn Reporter>;
}

/// A graph that may be gone by now.
pub(crate) trait Reporter: Send + Sync {
    /// As [`Home::report_corruption`].
    fn report_corruption(&self, corruption: &Corruption);

    /// A quorum met something in a range of bytes.
    fn report_quorum(&self, report: &QuorumReport, offset: u64, len: u64);
}

/// An image that was found to be corrupt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// `node-name` of the image's node.
    pub node_name: String,
    /// The reason, for a user.
    pub message: String,
    /// QEMU's sentence about this damage, where it has one.
    pub report: Option<String>,
    /// Host offset in bytes of the metadata that would have been hit, where one is known.
    pub offset: Option<u64>,
    /// Length of the metadata that would have been hit, in bytes, where that is known.
    pub size_bytes: Option<u64>,
    /// Nothing more is written to the image, and it is marked as corrupt where its version has a bit for that.
    pub fatal: bool,
}

impl Corruption {
    pub(crate) fn new(node_name: &str, error: &Error, fatal: bool) -> Self {
        Corruption {
            node_name: node_name.to_owned(),
            message: error.to_string(),
            report: error.report().map(str::to_owned),
            offset: None,
            size_bytes: None,
            fatal,
        }
    }

    /// The event's `msg`: QEMU's sentence, or ours where it has none.
    pub fn words(&self) -> &str {
        self.report.as_deref().unwrap_or(&self.message)
    }

    /// QEMU's line for its standard error. `None`: no harm is done, and QEMU is silent about such damage.
    pub fn line(&self) -> Option<String> {
        match (self.fatal, &self.report) {
            (true, _) => Some(format!(
                "qcow2: Marking image as corrupt: {}; further corruption events will be suppressed",
                self.words()
            )),
            (false, Some(report)) => Some(format!(
                "qcow2: Image is corrupt: {report}; further non-fatal corruption events will be suppressed"
            )),
            (false, None) => None,
        }
    }
}

/// A write that ended behind the threshold of its node, which is off now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThresholdCrossed {
    /// `node-name` of the node.
    pub node_name: String,
    /// The threshold: an offset in bytes.
    pub threshold_bytes: u64,
    /// The distance from it to the end of the write, in bytes.
    pub exceeded_bytes: u64,
}

/// Work of a quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuorumWork {
    /// A read.
    Read,
    /// A write, also of zeroes.
    Write,
    /// A flush.
    Flush,
}

/// Something that a quorum met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QuorumReport {
    /// One copy failed, or was outvoted.
    Bad {
        /// `node-name` of the copy.
        node_name: String,
        /// The work it was asked for.
        work: QuorumWork,
        /// Its error; `None`: it was outvoted.
        error: Option<Errno>,
    },
    /// Too few copies have done it or agree.
    Failure {
        /// `node-name` of the quorum.
        node_name: String,
    },
}
