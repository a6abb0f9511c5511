// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of options while the image stays open. The graph ensures that no request runs meanwhile.

use super::Qcow2Driver;
use super::cleaner::clean_each;
use super::open::{cache_sizes, check_may_write, check_version, overlap_set, slice_bytes, snapshots_to_keep};
use crate::Qcow2RuntimeOptions;
use cowshed_graph::node::{Link, Node};
use cowshed_qcow2::OverlapSet;
use cowshed_storage::{Permissions, rt};
use cowshed_types::Result;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Qcow2Driver {
    /// Plans from now on as if the backing file had `bytes` bytes, before the image is put on a longer one. Ranges that
    /// read as zeroes behind the end of the present one become zeroes of the image's own when they are zeroed or
    /// discarded. No request runs.
    pub fn plan_for_backing_bytes(&self, bytes: u64) {
        self.engine.set_backing_size(Some(bytes));
    }

    /// Plans from now on for the backing file as it is: it may have grown. No request runs.
    pub fn plan_for_backing(&self) {
        self.engine.set_backing_size(self.backing.get().as_deref().map(Node::size));
    }

    /// The edge to the backing file.
    pub(crate) fn backing_link(&self) -> &Arc<Link> {
        &self.backing
    }

    /// True when the image names a backing file that was left out at open.
    pub(crate) fn lacks_backing(&self) -> bool {
        self.no_backing
    }

    /// Another backing file, or none. The header isn't changed.
    pub(crate) fn set_backing(&self, backing: Option<Arc<Node>>) {
        self.engine.set_backing_size(backing.as_deref().map(Node::size));
        self.backing.set(backing);
    }

    /// Makes the image on disk complete, as a close would, and goes on.
    pub(crate) async fn complete(&self) -> Result<()> {
        self.be_current().await?;
        if self.is_only_read() {
            return Ok(());
        }
        self.settle_all().await
    }

    /// Refuses writes from now on. [`Qcow2Driver::complete`] has run before.
    pub(crate) fn stop_writing(&self) {
        self.writable.store(false, Ordering::Release);
        self.frozen.store(true, Ordering::Release);
    }

    /// Takes writes from now on; the file has become writable.
    pub(crate) async fn start_writing(&self, options: &Qcow2RuntimeOptions) -> Result<()> {
        self.be_current().await?;
        let header = self.header();
        check_may_write(&header, self.cipher.is_some()).map_err(|error| self.error(error))?;
        if !header.is_dirty() {
            snapshots_to_keep(&self.file, &header, false).await.map_err(|error| self.error(error))?;
        }
        // A plain file is its node's, and writable by now; a file that stands for another node is ours.
        for file in std::iter::once(&self.file).chain(&self.data_file).filter(|file| !file.is_writable()) {
            file.make_writable(Permissions::WRITE).map_err(|error| self.error(error))?;
        }
        if header.is_dirty() {
            self.recover(options).await?;
        }
        self.frozen.store(false, Ordering::Release);
        self.writable.store(true, Ordering::Release);
        let started = self.prepare_writing(options).await;
        if started.is_err() {
            self.stop_writing();
        }
        started
    }

    pub(super) async fn prepare_writing(&self, options: &Qcow2RuntimeOptions) -> Result<()> {
        self.membership.make_exclusive().map_err(|error| self.error(error))?;
        self.engine.set_overlap(overlap_set(options));
        self.set_lazy(options);
        self.plan(|engine| engine.require_refcount_table()).await?;
        self.refuse_lost_clusters().await?;
        self.forget_bitmaps();
        self.prepare_bitmaps().await?;
        self.clear_unknown_autoclear().await?;
        self.mark_beside_snapshots().await
    }

    /// Refuses run-time options that the image can't have.
    pub(crate) fn check_options(&self, options: &Qcow2RuntimeOptions) -> Result<()> {
        check_version(&self.header(), options).map_err(|error| self.error(error))?;
        self.cache_sizes(options).map(drop)
    }

    /// L2 and refcount cache in bytes, by these options.
    fn cache_sizes(&self, options: &Qcow2RuntimeOptions) -> Result<(u64, u64)> {
        cache_sizes(options, &self.engine.config().format, self.size()).map_err(|error| self.error(error))
    }

    /// Keeps tables in slices of the size in these options. [`Qcow2Driver::complete`] has run before. An error when
    /// that size can't be, or other images read by the same mapping; everything is as before then.
    pub(crate) async fn apply_slice_bytes(&self, options: &Qcow2RuntimeOptions) -> Result<()> {
        let bytes = slice_bytes(options, self.cluster_size()).map_err(|error| self.error(error))?;
        if bytes == self.engine.slice_bytes() {
            return Ok(());
        }
        self.be_current().await?;
        self.membership.make_exclusive().map_err(|error| self.error(error.field("l2-cache-entry-size")))?;
        // Reading ahead goes by the mapping, and is not a request that the graph waits for.
        self.ahead.end().await;
        let set = self.engine.set_slice_bytes(bytes);
        self.ahead.go_on();
        set.map_err(|error| self.error(error))
    }

    /// Applies the run-time options. [`Qcow2Driver::complete`] has run before.
    pub(crate) fn apply(&self, options: &Qcow2RuntimeOptions) {
        // Checked when the options were.
        if let Ok((l2, refcounts)) = self.cache_sizes(options) {
            self.engine.set_cache_limits(l2, refcounts);
        }
        if !rt::is_simulated() {
            clean_each(&self.engine, options.cache_clean_interval_s);
        }
        self.engine.set_discard_no_unref(options.discard_no_unref);
        self.punch.store(options.pass_discard_request, Ordering::Relaxed);
        if self.writable.load(Ordering::Relaxed) {
            self.engine.set_overlap(overlap_set(options));
            self.set_lazy(options);
        } else {
            self.engine.set_overlap(OverlapSet::NONE);
        }
    }

    fn set_lazy(&self, options: &Qcow2RuntimeOptions) {
        let header = self.header();
        let lazy = header.version >= 3 && options.lazy_refcounts.unwrap_or_else(|| header.has_lazy_refcounts());
        self.engine.set_lazy_refcounts(lazy);
    }
}
