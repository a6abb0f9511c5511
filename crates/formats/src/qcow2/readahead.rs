// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Claims on compressed clusters, so that only one request decompresses each, and reading ahead. A reader that takes
//! cluster after cluster finds the next ones decompressed.
//!
//! Nothing is read ahead for requests of several clusters and while several requests decompress: all cores have work then.

use super::Qcow2Driver;
use super::cluster_cache::{self, ClusterCache};
use super::decode_memory::DecodeMemory;
use cowshed_codec::Codec;
use cowshed_graph::events::Events;
use cowshed_qcow2::{Engine, ExtentList, Stall};
use cowshed_storage::{File, IoBuf, rt};
use cowshed_types::{Extent, GuestOffset, Mapping, without};
use futures_util::future::join_all;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most sequential readers that are distinguished.
const STREAMS: usize = 4;
/// Clusters read in a row before a reader counts as sequential.
const STREAK: u64 = 2;
/// Bits of a stream's word that count its streak.
const STREAK_BITS: u32 = 2;
/// The size of reading ahead: this many bytes, in this many clusters at most, one at least.
const AHEAD_BYTES: u64 = 512 << 10;
const AHEAD_CLUSTERS: u64 = 8;

/// Where compressed data is: offset in the image file and length in bytes.
type CompressedRange = (u64, u64);

/// See the module's text. One for each open image.
pub(super) struct Ahead {
    streams: [Stream; STREAMS],
    /// The stream that a new one takes the place of.
    oldest: AtomicUsize,
    /// Places that are being decompressed.
    places: Mutex<HashSet<CompressedRange>>,
    /// The number of busy ones.
    busy: AtomicUsize,
    /// Requests that decompress.
    requests: AtomicUsize,
    /// Tasks that read ahead.
    tasks: AtomicUsize,
    is_off: AtomicBool,
    ended: Events,
    pub(super) memory: Arc<DecodeMemory>,
}

/// A reader that goes from cluster to cluster.
struct Stream {
    /// The cluster that comes next, and below it how many came in a row.
    next: AtomicU64,
    /// The cluster up to which was read ahead.
    reached: AtomicU64,
}

/// A place that is being decompressed, until dropped.
struct Decompression {
    ahead: Arc<Ahead>,
    place: CompressedRange,
}

impl Drop for Decompression {
    fn drop(&mut self) {
        self.ahead.places().remove(&self.place);
        self.ahead.busy.fetch_sub(1, Ordering::SeqCst);
        self.ahead.ended.notify();
    }
}

/// Guard for a decompression in progress; other readers of the cluster wait until it is dropped.
pub(super) struct DecodeGuard {
    ahead: Arc<Ahead>,
    _decompression: Option<Decompression>,
}

impl Drop for DecodeGuard {
    fn drop(&mut self) {
        self.ahead.requests.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The next step of a reader of a compressed cluster.
pub(super) enum ReadaheadStep {
    /// It is here.
    Copy(Arc<Vec<u8>>),
    /// No reader has it.
    Decompress(DecodeGuard),
}

/// A task that reads ahead, until dropped.
struct Running(Arc<Ahead>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.tasks.fetch_sub(1, Ordering::SeqCst);
        self.0.ended.notify();
    }
}

impl Ahead {
    pub(super) fn new() -> Arc<Ahead> {
        Arc::new(Ahead {
            streams: std::array::from_fn(|_| Stream { next: AtomicU64::new(u64::MAX), reached: AtomicU64::new(0) }),
            oldest: AtomicUsize::new(0),
            places: Mutex::default(),
            busy: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            is_off: AtomicBool::new(false),
            ended: Events::default(),
            memory: DecodeMemory::new(),
        })
    }

    fn places(&self) -> MutexGuard<'_, HashSet<CompressedRange>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place, if it is free.
    fn take(self: &Arc<Self>, place: CompressedRange) -> Option<Decompression> {
        if !self.places().insert(place) {
            return None;
        }
        self.busy.fetch_add(1, Ordering::SeqCst);
        Some(Decompression { ahead: Arc::clone(self), place })
    }

    /// Looks for a cluster, and waits for a decompression in progress. `whole`: the read is for all of it, so it isn't
    /// kept for others. The wait is for one read and one decompression, which the caller would have to do otherwise. A
    /// decompression itself waits only for the memory of others.
    pub(super) async fn next(
        self: &Arc<Self>,
        cluster_cache: &ClusterCache,
        place: CompressedRange,
        whole: bool,
    ) -> ReadaheadStep {
        loop {
            if let Some(cluster) = cluster_cache.get(place.0, place.1, whole) {
                return ReadaheadStep::Copy(cluster);
            }
            let seen = self.ended.now();
            let turn = match self.busy.load(Ordering::SeqCst) {
                // A reader of all of it decompresses into memory of its own, which is no use to others.
                0 if whole => Some(None),
                _ => self.take(place).map(Some),
            };
            // Again, after the look at the decompression in progress: it puts the cluster in before it ends.
            if let Some(cluster) = cluster_cache.get(place.0, place.1, whole) {
                return ReadaheadStep::Copy(cluster);
            }
            match turn {
                Some(decompression) => {
                    self.requests.fetch_add(1, Ordering::SeqCst);
                    return ReadaheadStep::Decompress(DecodeGuard {
                        ahead: Arc::clone(self),
                        _decompression: decompression,
                    });
                }
                None => self.ended.wait(seen).await,
            }
        }
    }

    /// Notes that a cluster is read. Gives the stream if that has become sequential.
    fn note(&self, cluster: u64) -> Option<&Stream> {
        for stream in &self.streams {
            let word = stream.next.load(Ordering::Relaxed);
            let (next, streak) = (word >> STREAK_BITS, word & ((1 << STREAK_BITS) - 1));
            if next == cluster + 1 {
                return (streak >= STREAK).then_some(stream);
            }
            if next == cluster {
                let streak = (streak + 1).min(STREAK);
                stream.next.store((cluster + 1) << STREAK_BITS | streak, Ordering::Relaxed);
                return (streak >= STREAK).then_some(stream);
            }
        }
        let oldest = self.oldest.fetch_add(1, Ordering::Relaxed) % STREAMS;
        self.streams[oldest].next.store((cluster + 1) << STREAK_BITS, Ordering::Relaxed);
        None
    }

    /// Waits until nothing is read ahead, and nothing will be.
    pub(super) async fn end(&self) {
        self.is_off.store(true, Ordering::SeqCst);
        self.settled().await;
    }

    /// Waits until nothing is read ahead. Where no request runs nothing will be.
    async fn settled(&self) {
        loop {
            let seen = self.ended.now();
            if self.tasks.load(Ordering::SeqCst) == 0 {
                return;
            }
            self.ended.wait(seen).await;
        }
    }
}

impl Ahead {
    /// Reads ahead again, after [`Ahead::end`].
    pub(super) fn go_on(&self) {
        self.is_off.store(false, Ordering::SeqCst);
    }
}

impl Stream {
    /// The clusters to read ahead now that the reader is at `cluster`, of `clusters` in all; none while enough of them are
    /// under way.
    fn range(&self, cluster: u64, clusters: u64, cluster_bytes: u64) -> Option<Range<u64>> {
        let count = (AHEAD_BYTES / cluster_bytes).clamp(1, AHEAD_CLUSTERS);
        let end = (cluster + 1 + count).min(clusters);
        let reached = self.reached.load(Ordering::Relaxed);
        let start = match (cluster + 1..=end).contains(&reached) {
            true => reached,
            false => cluster + 1,
        };
        // Half of it at a time: fewer, larger reads.
        if start >= end || (end - start < count.div_ceil(2) && end < clusters) {
            return None;
        }
        let is_mine = self.reached.compare_exchange(reached, end, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        is_mine.then_some(start..end)
    }
}

/// The state that a task needs to read ahead; its own, since it outlives the request that started it.
struct Reader {
    ahead: Arc<Ahead>,
    engine: Arc<Engine>,
    events: Arc<Events>,
    cluster_cache: Arc<ClusterCache>,
    file: File,
    codec: Codec,
}

impl Qcow2Driver {
    /// Waits until nothing is read ahead. No request runs.
    pub(crate) async fn read_ahead_ended(&self) {
        self.ahead.settled().await;
    }

    /// Notes a read of the compressed cluster at `guest`, by a request for no more than one, and reads ahead for a
    /// sequential reader.
    pub(super) fn read_ahead(&self, guest: GuestOffset) {
        let cluster_bytes = self.cluster_size();
        let cluster = guest.0 / cluster_bytes;
        let Some(stream) = self.ahead.note(cluster) else { return };
        let is_busy = without!("read_ahead")
            || self.ahead.requests.load(Ordering::SeqCst) > 1
            || self.ahead.is_off.load(Ordering::SeqCst);
        // A limit counts the reader's own requests only.
        if is_busy || self.max_decompressed_bytes != u64::MAX {
            return;
        }
        let clusters = self.size().div_ceil(cluster_bytes);
        let Some(range) = stream.range(cluster, clusters, cluster_bytes) else { return };
        self.ahead.tasks.fetch_add(1, Ordering::SeqCst);
        let running = Running(Arc::clone(&self.ahead));
        let reader = Reader {
            ahead: Arc::clone(&self.ahead),
            engine: Arc::clone(&self.engine),
            events: Arc::clone(&self.events),
            cluster_cache: Arc::clone(&self.cluster_cache),
            file: self.file.clone(),
            codec: self.codec(),
        };
        // Other readers wait for its clusters, so it runs to its end even when this request is dropped. Without an
        // executor nothing is read ahead.
        let _ = rt::spawn_critical(async move {
            let _running = running;
            let reader = reader;
            reader.run(GuestOffset(range.start * cluster_bytes), (range.end - range.start) * cluster_bytes).await;
        });
    }
}

impl Reader {
    async fn run(&self, guest: GuestOffset, len: u64) {
        // Held until everything is in the store: the store must agree with the mapping.
        let pin = self.engine.pin();
        let mut extents = ExtentList::default();
        match self.engine.map(guest, len, &mut extents) {
            Ok(_) => {}
            Err(Stall::Load(load)) => {
                // The next request that needs the table loads it.
                self.engine.load_failed(&load);
                self.events.notify();
                return;
            }
            Err(_) => return,
        }
        let runs = self.runs(&extents);
        join_all(runs.into_iter().map(|run| self.decompress(run))).await;
        drop(pin);
    }

    /// The clusters that are neither kept nor decompressed now, in runs that are read by one operation each.
    fn runs(&self, extents: &[Extent]) -> Vec<Vec<Decompression>> {
        let mut runs: Vec<Vec<Decompression>> = Vec::new();
        for extent in extents {
            let Mapping::Compressed { host, len, .. } = extent.mapping else { continue };
            if host.0 + len > self.file.len().next_multiple_of(512) || self.cluster_cache.has(host.0, len) {
                continue;
            }
            let Some(decompression) = self.ahead.take((host.0, len)) else { continue };
            match runs.last_mut() {
                // The next one begins in the sector where the last one ends.
                Some(run) if run.last().is_some_and(|last| host.0.wrapping_sub(last.place.0) <= last.place.1) => {
                    run.push(decompression);
                }
                _ => runs.push(vec![decompression]),
            }
        }
        runs
    }

    async fn decompress(&self, run: Vec<Decompression>) {
        let Some(start) = run.first().map(|first| first.place.0) else { return };
        let end = run.iter().map(|decompression| decompression.place.0 + decompression.place.1).max().unwrap_or(start);
        let cluster_bytes = self.engine.geometry().cluster_size() as usize;
        let _share = self.ahead.memory.share(end - start + (run.len() * cluster_bytes) as u64).await;
        let (result, bytes) = self.file.read_at(IoBuf::scratch((end - start) as usize), start).await;
        // A read of these clusters meets the error again.
        if result.is_err() {
            return;
        }
        let bytes = Arc::new(bytes);
        let work = run.into_iter().map(|decompression| {
            let (bytes, cluster_cache, codec) = (Arc::clone(&bytes), Arc::clone(&self.cluster_cache), self.codec);
            rt::run_on_cpu_pool(move || {
                let (host, len) = decompression.place;
                let from = (host - start) as usize;
                let mut cluster = cluster_cache::memory(cluster_bytes);
                if codec.decompress(&bytes[from..from + len as usize], &mut cluster).is_ok() {
                    cluster_cache.put_ahead(host, len, Arc::new(cluster));
                }
                drop(decompression);
            })
        });
        join_all(work).await;
    }
}
