// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots of an image that is open for writing.
//!
//! The image is made complete on disk, and the snapshot is taken or deleted there as in a closed image. Then the
//! mapping begins anew, and nothing that was cached before is believed (`renewal.rs`). A power cut meets either a
//! complete image or a state that [`cowshed_offline::snapshots`] allows. The graph ensures that no request runs.

use super::Qcow2Driver;
use crate::Qcow2RuntimeOptions;
use cowshed_layout::qcow2::{Snapshot, SnapshotName};
use cowshed_offline::check::recover_dirty;
use cowshed_offline::snapshots::{self, SnapshotOptions};
use cowshed_storage::fault::as_metadata;
use cowshed_types::{Result, slip};
use std::sync::atomic::Ordering;

impl Qcow2Driver {
    /// The internal snapshots, in the order of the image's table.
    pub async fn internal_snapshots(&self) -> Result<Vec<Snapshot>> {
        self.be_current().await?;
        as_metadata(snapshots::list(&self.file, &self.header())).await
    }

    /// Takes a snapshot called `name`; its ID.
    pub(crate) async fn take_internal_snapshot(&self, name: &str, options: &Qcow2RuntimeOptions) -> Result<String> {
        let snapshot_options = snapshot_options(options);
        let work = snapshots::create(&self.file, name.as_bytes(), &snapshot_options, &|_, _| true);
        self.at_rest(options, work).await
    }

    /// Deletes a snapshot, and returns its description.
    pub(crate) async fn delete_internal_snapshot(
        &self,
        wanted: &SnapshotName,
        options: &Qcow2RuntimeOptions,
    ) -> Result<Snapshot> {
        let snapshot_options = snapshot_options(options);
        let work = snapshots::delete_one(&self.file, wanted, &snapshot_options, &|_, _| true);
        self.at_rest(options, work).await
    }

    /// Does something to the bare file, and goes on with the image that it leaves, also after an error.
    async fn at_rest<T>(&self, options: &Qcow2RuntimeOptions, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.be_writable().await?;
        // Reading ahead goes by the mapping, and is not a request that the graph waits for.
        self.ahead.end().await;
        let settled = as_metadata(self.settle_all()).await;
        if settled.is_err() {
            self.ahead.go_on();
        }
        settled?;
        self.writable.store(slip!("changes_by_tables_of_before"), Ordering::Release);
        let (done, renewed) = self.change_file(options, true, work).await;
        let done = done?;
        renewed.map(|()| done)
    }

    /// Repairs an image that was not closed cleanly, which was only read so far. Goes on by the mapping that the repair
    /// leaves, also after an error. Its file takes writes by now, and no request runs.
    pub(super) async fn recover(&self, options: &Qcow2RuntimeOptions) -> Result<()> {
        self.membership.make_exclusive().map_err(|error| self.error(error))?;
        self.ahead.end().await;
        let (recovered, renewed) = self.change_file(options, false, recover_dirty(&self.file)).await;
        if renewed.is_ok() {
            // Facts that an attempt before has left unknown are known by now.
            self.abandoned.store(false, Ordering::Relaxed);
        }
        recovered.and(renewed)
    }
}

fn snapshot_options(options: &Qcow2RuntimeOptions) -> SnapshotOptions {
    SnapshotOptions {
        discard: options.pass_discard_snapshot,
        icount: u64::MAX,
        notes_clock: true,
        ..SnapshotOptions::default()
    }
}
