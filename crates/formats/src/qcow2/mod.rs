// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The qcow2 driver: carries out the plans of the engine.
//!
//! All I/O of an image is here, all decisions are in `cowshed-qcow2`. A request plans, does its I/O, and plans again
//! whenever it had to wait for something. The futures of a driver are parts of a node's request. That request runs to its end
//! even when its caller drops it (`rt::to_completion`), for nothing takes back a write that the kernel has begun.

mod allocate;
mod bitmaps;
mod chain_map;
mod children;
mod cleaner;
pub mod cluster_cache;
mod compressed;
mod cut_short;
mod decode_memory;
mod driver;
mod encryption;
mod extent_io;
mod flush;
mod growth;
mod header;
mod holes;
mod internal;
mod line;
mod open;
mod options;
mod preallocate;
mod read;
mod readahead;
mod reflink;
mod renewal;
mod reopen;
mod reserve;
mod resize;
mod schema;
mod shared_metadata;
mod status;
mod vm_state;
mod write;
mod zero;

pub(crate) use line::DRIVER;

pub use cowshed_graph::encryption::Cipher;
pub use cowshed_graph::node::{BitmapChange, BitmapStatus, check_new_bitmap};

use super::OpenContext;
use arc_swap::ArcSwapOption;
use cowshed_codec::Codec;
use cowshed_graph::encryption::Writers;
use cowshed_graph::events::Events;
use cowshed_graph::node::{Link, OnCorruption};
use cowshed_layout::qcow2::Header;
use cowshed_layout::qcow2::features::INCOMPAT_CORRUPT;
use cowshed_qcow2::{Engine, Load, Planned, Stall, TableId};
use cowshed_storage::fault::{Event, as_metadata};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{CacheStatistics, Errno, Error, ErrorKind, Result, StoredIn, slip};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// An open qcow2 image.
pub struct Qcow2Driver {
    engine: Arc<Engine>,
    file: File,
    file_name: String,
    data_file: Option<File>,
    backing: Arc<Link>,
    chain_map: ArcSwapOption<chain_map::ChainMap>,
    /// The chain map was made to cover this image too.
    is_covered: AtomicBool,
    /// The node is read-only: nothing changes the guest's data, not even between two requests.
    frozen: AtomicBool,
    no_backing: bool,
    cipher: Option<Arc<dyn Cipher>>,
    /// The writers of an encrypted image, and their ranges.
    writers: Writers,
    codec: Mutex<Codec>,
    /// The bytes that compressed clusters gave so far, counted only under a limit; and the limit.
    decompressed_bytes: AtomicU64,
    max_decompressed_bytes: u64,
    cluster_cache: Arc<cluster_cache::ClusterCache>,
    ahead: Arc<readahead::Ahead>,
    membership: shared_metadata::MetadataShare,
    /// The header as it is on disk.
    header: Mutex<Header>,
    writable: AtomicBool,
    /// Freed clusters get holes punched.
    punch: AtomicBool,
    /// A shrink runs: its freed clusters get holes punched.
    shrinks: AtomicBool,
    /// Something about the mapping has changed: waiting requests plan again.
    events: Arc<Events>,
    /// Held by the one write-back cycle, refcount or L1 growth that may run.
    cycle_lock: futures_util::lock::Mutex<()>,
    /// Flushes asked for so far, and how many of them the last good cycle covered.
    flushes_asked: AtomicU64,
    flushes_covered: AtomicU64,
    /// The file can't reserve space.
    no_reserve: AtomicBool,
    growth: growth::Growth,
    /// Something was written to the metadata since the image was opened.
    wrote_metadata: AtomicBool,
    /// A cycle was dropped before its end: the part that reached the disk is unknown.
    abandoned: AtomicBool,
    /// A write would have hit metadata: the image is marked as corrupt and nothing more is written.
    corrupt: AtomicBool,
    /// Called when the image is marked as corrupt.
    on_corruption: OnceLock<OnCorruption>,
    closed: AtomicBool,
    renewal: renewal::Renewal,
    bitmaps: bitmaps::Bitmaps,
}

impl Qcow2Driver {
    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        self.engine.size()
    }

    /// A copy of the header as it is on disk.
    pub fn header(&self) -> Header {
        self.header.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Cluster size in bytes.
    pub fn cluster_size(&self) -> u64 {
        self.engine.geometry().cluster_size()
    }

    /// The image file.
    pub fn image_file(&self) -> &File {
        &self.file
    }

    /// The external data file.
    pub fn data_file(&self) -> Option<&File> {
        self.data_file.as_ref()
    }

    /// Counters of the metadata cache.
    pub fn statistics(&self) -> CacheStatistics {
        self.engine.statistics()
    }

    /// Chooses how clusters are compressed from now on. The method must be the image's.
    pub fn set_codec(&self, codec: Codec) -> Result<()> {
        if codec.compression() != self.header().compression() {
            return Err(self.error(Error::invalid_argument("the image uses another compression method")));
        }
        *self.codec.lock().unwrap_or_else(PoisonError::into_inner) = codec;
        Ok(())
    }

    fn codec(&self) -> Codec {
        *self.codec.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names the image in an error.
    fn error(&self, error: Error) -> Error {
        error.file(self.file_name.clone())
    }

    /// The file that holds the clusters of the disk.
    pub(crate) fn content_file(&self) -> &File {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    fn stored_in(&self, file: StoredIn) -> &File {
        match (file, &self.data_file) {
            (StoredIn::DataFile, Some(data_file)) => data_file,
            _ => &self.file,
        }
    }

    fn is_data_file_raw(&self) -> bool {
        self.data_file.is_some() && self.header.lock().unwrap_or_else(PoisonError::into_inner).is_data_file_raw()
    }

    /// True once a write would have hit metadata: nothing more is written to the image.
    pub fn is_corrupt(&self) -> bool {
        self.corrupt.load(Ordering::Relaxed)
    }

    /// The disk has the old state or the new: nothing more is written, in place neither.
    fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.writable.store(false, Ordering::Release);
    }

    /// True for an image that was opened for reading, or that waits to be read anew: there is nothing to be written back.
    fn is_only_read(&self) -> bool {
        !self.writable.load(Ordering::Relaxed) && !self.abandoned.load(Ordering::Relaxed)
    }

    fn check_writable(&self) -> Result<()> {
        if self.abandoned.load(Ordering::Relaxed) {
            let message = "a write of metadata was abandoned half-way: open the image again";
            return Err(self.error(Error::new(ErrorKind::Poisoned, message)));
        }
        if !self.writable.load(Ordering::Relaxed) && !self.renewal.is_preparing() {
            return Err(self.error(match self.renewal.is_due() {
                true => Error::new(ErrorKind::Poisoned, "the image was changed, and was not read anew since"),
                false => Error::new(ErrorKind::ReadOnly, "the image is open for reading only"),
            }));
        }
        if self.corrupt.load(Ordering::Relaxed) {
            let message = "the image is marked as corrupt: nothing more is written to it";
            return Err(self.error(Error::new(ErrorKind::InvalidImage, message).with_errno(Errno::ENOMEDIUM)));
        }
        match self.file.poison().or_else(|| self.data_file.as_ref().and_then(File::poison)) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Plans until there is a plan, doing the work that it waits for meanwhile. `Retry` comes out as `None`.
    async fn try_plan<T>(&self, mut attempt: impl FnMut(&Engine) -> Planned<T>) -> Result<Option<T>> {
        let mut tries = 0;
        loop {
            let seen = self.events.now();
            match attempt(&self.engine) {
                Ok(plan) => return Ok(Some(plan)),
                Err(Stall::Retry) => return Ok(None),
                Err(Stall::Full) => {
                    tries += 1;
                    self.find_room(tries).await?;
                }
                Err(Stall::GrowRefcounts) => match self.grow_refcounts().await {
                    // Behind the table's reach is no room for a larger one; clusters freed below it may be free by
                    // then.
                    Err(error) if error.kind() == ErrorKind::NoSpace && self.file.is_device() => {
                        tries += 1;
                        self.find_room(tries).await?;
                    }
                    Err(error) => self.unless_space_is_gained(error).await?,
                    Ok(()) => {}
                },
                Err(stall) => {
                    if let Err(error) = self.settle(stall, seen).await {
                        self.unless_space_is_gained(error).await?;
                    }
                }
            }
        }
    }

    /// As [`Self::plan`], for plans that give space back: they look for none.
    async fn plan_plainly<T>(&self, mut attempt: impl FnMut(&Engine) -> Planned<T>) -> Result<T> {
        loop {
            let seen = self.events.now();
            match attempt(&self.engine) {
                Ok(plan) => return Ok(plan),
                Err(stall) => self.settle(stall, seen).await?,
            }
        }
    }

    /// As [`Self::try_plan`], for plans that just try again.
    async fn plan<T>(&self, mut attempt: impl FnMut(&Engine) -> Planned<T>) -> Result<T> {
        loop {
            if let Some(plan) = self.try_plan(&mut attempt).await? {
                return Ok(plan);
            }
        }
    }

    /// Does the work that a plan waits for. `seen` is the event count from before the plan was tried.
    async fn settle(&self, stall: Stall, seen: u64) -> Result<()> {
        match stall {
            Stall::Load(load) => self.load(load).await,
            Stall::Reserve(reserve) => self.reserve(reserve).await,
            Stall::Wait => {
                self.events.wait(seen).await;
                Ok(())
            }
            Stall::Retry => Ok(()),
            Stall::WriteBack => Box::pin(self.write_back(false)).await,
            Stall::GrowRefcounts => self.grow_refcounts().await,
            Stall::Full => Err(self.no_room()),
            Stall::Corrupt(error, hit) => self.mark_corrupt(error, Some(hit)).await,
            Stall::Error(error) => self.meet_damage(error).await,
        }
    }

    /// A plan met damage of the image. The request fails with EIO, and the image is marked as corrupt where it is in
    /// use for writing. Damage that comes with EIO already isn't marked: it lies past the end of the file, which may
    /// only be short.
    async fn meet_damage(&self, error: Error) -> Result<()> {
        let error = self.error(error);
        if error.kind() != ErrorKind::InvalidImage || error.errno() == Errno::EIO {
            return Err(error);
        }
        let is_open = self.on_corruption.get().is_some();
        let error = error.with_errno(Errno::EIO);
        match is_open && self.writable.load(Ordering::Relaxed) {
            true => self.mark_corrupt(error, None).await,
            // An opening that meets damage is refused and leaves the image as it is.
            false => Err(error),
        }
    }

    /// Tells of damage that a zero write or a discard went over without harm.
    fn tell_tolerated(&self) {
        if let (Some(error), Some(tell)) = (self.engine.tolerated_damage(), self.on_corruption.get()) {
            tell(&self.error(error.clone()), None, false);
        }
    }

    /// Marks the image as corrupt on disk (version 2 has no bit for it) and refuses all further writes.
    async fn mark_corrupt(&self, error: Error, hit: Option<Range<u64>>) -> Result<()> {
        let error = self.error(error);
        if !self.corrupt.swap(true, Ordering::SeqCst) {
            if let Some(tell) = self.on_corruption.get() {
                tell(&error, hit.map(|hit| (hit.start, hit.end - hit.start)), true);
            }
            if self.header().version >= 3 {
                self.edit_header(|header| header.incompatible_features |= INCOMPAT_CORRUPT).await?;
                self.file.sync().await?;
            }
        }
        Err(error)
    }

    /// Tells the faults of the file, where it has some, the next event.
    async fn meet(&self, event: Event) {
        if let Some(faults) = self.file.faults() {
            Box::pin(faults.meet(event)).await;
        }
    }

    /// Reads what is no guest data.
    async fn read_metadata(&self, buf: IoBuf, host: u64) -> (Result<()>, IoBuf) {
        let read = self.file.read_at(buf, host);
        match self.file.faults() {
            Some(_) => as_metadata(read).await,
            None => read.await,
        }
    }

    /// Writes what is no guest data.
    async fn write_metadata(&self, buf: IoBuf, host: u64) -> Result<()> {
        let write = self.file.write_at(buf, host);
        match self.file.faults() {
            Some(_) => as_metadata(write).await.0,
            None => write.await.0,
        }
    }

    /// Reads a table for the engine.
    async fn load(&self, load: Load) -> Result<()> {
        struct Guard<'a>(&'a Qcow2Driver, Option<Load>);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                if let Some(load) = self.1.take().filter(|_| !std::thread::panicking()) {
                    self.0.engine.load_failed(&load);
                }
                self.0.events.notify();
            }
        }
        let event = match load.table {
            TableId::L2Slice(_) => Event::L2Load,
            TableId::RefcountTable => Event::ReftableLoad,
            TableId::RefcountBlock(_) => Event::RefblockLoad,
        };
        let mut guard = Guard(self, Some(load));
        if self.renewal.is_outdated() && !slip!("tables_read_from_before") {
            drop(guard);
            return self.renew().await;
        }
        let end = load.host.0 + load.len as u64;
        if end > self.file.len() && end > self.file.measure_len() {
            let message = format!("a table lies past the end of the file ({} bytes)", self.file.len());
            return Err(self.error(Error::invalid_image("table", load.host, message).with_errno(Errno::EIO)));
        }
        self.meet(event).await;
        let (result, buf) = self.read_metadata(IoBuf::try_zeroed(load.len)?, load.host.0).await;
        result?;
        guard.1 = None;
        match self.engine.loaded(&load, &buf) {
            Ok(()) => Ok(()),
            Err(error) => self.meet_damage(error).await,
        }
    }
}
