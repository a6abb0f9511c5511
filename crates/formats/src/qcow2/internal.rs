// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots of an image that is open for writing.
//!
//! The image is made complete on disk, and the snapshot is taken or deleted there as in a closed image. Then the
//! mapping begins anew, and nothing that was cached before is believed. A power cut meets either a complete image or a
//! state that [`cowshed_offline::snapshots`] allows. The graph ensures that no request runs.

use super::Qcow2Driver;
use super::open::{other_metadata, read_l1, snapshot_metadata};
use crate::Qcow2RuntimeOptions;
use cowshed_layout::qcow2::{Snapshot, SnapshotName};
use cowshed_offline::check::recover_dirty;
use cowshed_offline::read_header;
use cowshed_offline::snapshots::{self, SnapshotOptions};
use cowshed_qcow2::Restart;
use cowshed_storage::fault::as_metadata;
use cowshed_types::{Error, Result};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

impl Qcow2Driver {
    /// The internal snapshots, in the order of the image's table.
    pub async fn internal_snapshots(&self) -> Result<Vec<Snapshot>> {
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
        self.check_writable()?;
        // Reading ahead goes by the mapping, and is not a request that the graph waits for.
        self.ahead.end().await;
        let done = as_metadata(self.at_rest_alone(options, work)).await;
        self.ahead.go_on();
        done
    }

    async fn at_rest_alone<T>(
        &self,
        options: &Qcow2RuntimeOptions,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.settle_all().await?;
        self.writable.store(false, Ordering::Release);
        let result = work.await;
        let again = self.begin_anew(options).await;
        if again.is_err() {
            // The state of the image is unknown now. Reads go on by the old mapping, whose clusters are not reused.
            self.abandoned.store(true, Ordering::Relaxed);
            self.writable.store(true, Ordering::Release);
        }
        let done = result?;
        again.map(|()| done)
    }

    /// Repairs an image that was not closed cleanly, which was only read so far. Goes on by the mapping that the repair
    /// leaves, also after an error. Its file takes writes by now, and no request runs.
    pub(super) async fn recover(&self, options: &Qcow2RuntimeOptions) -> Result<()> {
        self.membership.make_exclusive().map_err(|error| self.error(error))?;
        self.ahead.end().await;
        let recovered = as_metadata(recover_dirty(&self.file)).await;
        let again = as_metadata(self.read_anew(options)).await;
        self.ahead.go_on();
        // Facts that an attempt before has left unknown are known by now.
        self.abandoned.store(again.is_err(), Ordering::Relaxed);
        recovered.and(again)
    }

    async fn begin_anew(&self, options: &Qcow2RuntimeOptions) -> Result<()> {
        self.read_anew(options).await?;
        if self.header().is_dirty() {
            return Err(self.error(Error::internal("an operation on the image at rest left its counts unfinished")));
        }
        self.writable.store(true, Ordering::Release);
        self.prepare_writing(options).await
    }

    /// Forgets the mapping, and reads its beginning anew.
    async fn read_anew(&self, options: &Qcow2RuntimeOptions) -> Result<()> {
        let header = read_header(&self.file).await?;
        if header.size != self.size() {
            return Err(self.error(Error::internal("the size of the disk has changed")));
        }
        let l1 = read_l1(&self.file, &header).await?;
        let mut metadata = other_metadata(&header);
        metadata.extend(snapshot_metadata(&self.file, &header, options.overlap_check.inactive_l2).await?);
        let facts = Restart {
            l1_offset: header.l1_table_offset,
            refcount_table_offset: header.refcount_table_offset,
            refcount_table_clusters: u64::from(header.refcount_table_clusters),
            file_len: self.file.len(),
            other_metadata: metadata,
        };
        self.engine.restart(facts, &l1).map_err(|error| self.error(error))?;
        self.cluster_cache.clear();
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = header;
        Ok(())
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
