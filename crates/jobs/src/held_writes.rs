// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes of a disk's users that a mirror's filter carries to the target: they count as work of the job.

use crate::{JobHandle, Progress};
use cowshed_image::Node;
use std::sync::Arc;

/// Counts requests of the source's users that have reached the target as work of the job.
pub(crate) fn follow_writes(job: &JobHandle, filter: &Arc<Node>) {
    let filter = Arc::downgrade(filter);
    job.measure_by(move |Progress { offset, len }| {
        let written = filter.upgrade()?.write_blocking()?.take_written();
        Some(Progress { offset: offset + written, len: len + written })
    });
}
