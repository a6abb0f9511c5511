// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Beginning anew with an image whose bare file was changed while its driver is open.
//!
//! Until the image is read anew, the tables in memory are those of before. By them a write would hit clusters that a
//! snapshot owns by now. A table that isn't in memory would be read from a place that was given back. So nothing is
//! written, and no table is read, until the image was read anew. Where that fails, the next request tries again.

use super::Qcow2Driver;
use super::open::{other_metadata, read_l1, snapshot_metadata};
use crate::Qcow2RuntimeOptions;
use cowshed_graph::node::LocalFuture;
use cowshed_offline::read_header;
use cowshed_qcow2::Restart;
use cowshed_storage::fault::as_metadata;
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state between a change of the bare file and the moment from which the image takes requests as before.
#[derive(Default)]
pub(super) struct Renewal {
    /// Something is left to be done.
    is_due: AtomicBool,
    /// The tables in memory may be those of before.
    is_outdated: AtomicBool,
    /// Writing is being prepared: the image takes changes of the driver's own alone.
    is_preparing: AtomicBool,
    /// Held while the file is being changed, and while the image is read anew.
    due: futures_util::lock::Mutex<Option<Due>>,
}

/// The work that is left.
struct Due {
    options: Qcow2RuntimeOptions,
    /// The image takes writes afterwards.
    writes: bool,
}

/// Writing is being prepared, until dropped.
struct Preparing<'a>(&'a Renewal);

impl<'a> Preparing<'a> {
    fn begin(renewal: &'a Renewal) -> Preparing<'a> {
        renewal.is_preparing.store(true, Ordering::Release);
        Preparing(renewal)
    }
}

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        self.0.is_preparing.store(false, Ordering::Release);
    }
}

impl Renewal {
    /// True where the driver itself may change the image, which takes no requests for it yet.
    pub(super) fn is_preparing(&self) -> bool {
        self.is_preparing.load(Ordering::Acquire)
    }

    /// True where no table in memory may be believed for a change.
    pub(super) fn is_due(&self) -> bool {
        self.is_due.load(Ordering::Acquire)
    }

    /// True where no table may be read by those in memory.
    pub(super) fn is_outdated(&self) -> bool {
        self.is_outdated.load(Ordering::Acquire)
    }
}

impl Qcow2Driver {
    /// Changes the bare file, and goes on with the image that it is then, also after an error. No request runs, and nothing
    /// is read ahead. Those that come meanwhile wait. `writes`: the image takes writes afterwards.
    pub(super) async fn change_file<T>(
        &self,
        options: &Qcow2RuntimeOptions,
        writes: bool,
        work: impl Future<Output = Result<T>>,
    ) -> (Result<T>, Result<()>) {
        let mut due = self.renewal.due.lock().await;
        *due = Some(Due { options: options.clone(), writes });
        self.renewal.is_outdated.store(true, Ordering::Release);
        self.renewal.is_due.store(true, Ordering::Release);
        let done = as_metadata(work).await;
        (done, self.renew_what_is(&mut due).await)
    }

    /// Waits until the image is as it is on disk. An error where it can't be read: the next call tries again.
    pub(super) async fn be_current(&self) -> Result<()> {
        if self.renewal.is_due() { self.renew().await } else { Ok(()) }
    }

    /// As [`Self::check_writable`], for a request: it has the image read anew where that is due.
    pub(super) async fn be_writable(&self) -> Result<()> {
        self.be_current().await?;
        self.check_writable()
    }

    /// In a box: reading anew plans, and plans come here.
    #[cold]
    pub(super) fn renew(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.renew_what_is(&mut *self.renewal.due.lock().await).await })
    }

    async fn renew_what_is(&self, due: &mut Option<Due>) -> Result<()> {
        let Some(Due { options, writes }) = due else { return Ok(()) };
        let renewed = as_metadata(self.renew_now(options, *writes)).await;
        renewed.map_err(|error| error.context("the image was changed, and can't be read anew"))?;
        *due = None;
        self.renewal.is_due.store(false, Ordering::Release);
        self.ahead.go_on();
        Ok(())
    }

    async fn renew_now(&self, options: &Qcow2RuntimeOptions, writes: bool) -> Result<()> {
        if self.renewal.is_outdated() {
            self.read_anew(options).await?;
            self.renewal.is_outdated.store(false, Ordering::Release);
        }
        if !writes {
            return Ok(());
        }
        if self.header().is_dirty() {
            return Err(self.error(Error::internal("an operation on the image at rest left its counts unfinished")));
        }
        let preparing = Preparing::begin(&self.renewal);
        self.prepare_writing(options).await?;
        drop(preparing);
        self.writable.store(true, Ordering::Release);
        Ok(())
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
        loop {
            let seen = self.events.now();
            match self.engine.restart(&facts, &l1) {
                // A read that wants a table is about to wait for this.
                Err(error) if error.kind() == ErrorKind::Busy => self.events.wait(seen).await,
                done => break done.map_err(|error| self.error(error))?,
            }
        }
        self.cluster_cache.clear();
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = header;
        Ok(())
    }
}
