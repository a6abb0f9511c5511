// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which layer of a long backing chain has a range, remembered, so that a read goes straight to it instead of through
//! every layer above it.
//!
//! The map covers layers that nobody may write to, from the backing file down to the first that is something else than a
//! read-only qcow2 node. It is thrown away when an edge of any graph moves or a node becomes writable. What it says may be
//! short of the truth (a layer above the right one, which then asks its own backing file), never past it.

use super::Qcow2Driver;
use super::span::join;
use crate::node::{Node, graph_changes};
use arc_swap::ArcSwapOption;
use cowshed_block::{Error, GuestOffset, Mapping, Result};
use cowshed_qcow2::ExtentList;
use cowshed_storage::IoBuf;
use cowshed_storage::fault::Event;
use futures_util::future::join_all;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// A shorter chain is read layer by layer.
const LAYERS_MIN: usize = 2;
/// Layers that a byte can number, beside the two values that mean something else.
const LAYERS_MAX: usize = 254;
/// The map is as fine as the finest layer, but not finer than this; what is finer is read layer by layer.
const GRANULE_BITS_MIN: u32 = 12;
/// Granules in a chunk, and those that are looked up together.
const CHUNK: u64 = 1024;
const WINDOW: u64 = 64;
/// Chunks of one image at most, 1 KiB each: with 64 KiB clusters they cover 512 GiB.
const CHUNKS_MAX: usize = 8192;
/// Places for chunks: what lies behind, 4 TiB with 64 KiB clusters, is read layer by layer.
const SLOTS_MAX: u64 = 1 << 16;

/// Not looked up yet.
const UNKNOWN: u8 = 0;
/// No layer has it.
const NOWHERE: u8 = u8::MAX;

type Chunk = Box<[AtomicU8]>;

/// What stands below a range that an image doesn't have, as far as that can be said at once.
pub(super) enum Below {
    /// Nothing: zeroes.
    Zeroes,
    /// This layer has it, or knows who has.
    Layer(Arc<Node>),
    /// It must be looked up, or is in several layers.
    Unknown,
}

/// See the module's text.
pub(crate) struct ChainMap {
    /// [`graph_changes`] when it was made.
    changes: u64,
    /// The backing file, its backing file, and so on. Empty when the chain is too short or not fit.
    layers: Vec<Weak<Node>>,
    granule_bits: u32,
    chunks: Vec<ArcSwapOption<Chunk>>,
    used: AtomicUsize,
}

impl ChainMap {
    /// For an image of `size` bytes above `backing`.
    fn new(backing: &Arc<Node>, size: u64) -> ChainMap {
        // Before the look: what changes meanwhile is noticed at the next one.
        let changes = graph_changes();
        let (mut layers, mut granule_bits) = (Vec::new(), u32::MAX);
        let mut next = Some(Arc::clone(backing));
        while let Some(node) = next.take() {
            if layers.len() == LAYERS_MAX || !node.is_read_only() {
                break;
            }
            layers.push(Arc::downgrade(&node));
            let Some(qcow2) = node.qcow2() else { break };
            let geometry = qcow2.engine.geometry();
            granule_bits = granule_bits.min(geometry.subcluster_bits());
            next = node.backing();
        }
        let is_fit = layers.len() >= LAYERS_MIN && granule_bits >= GRANULE_BITS_MIN;
        let chunks = if is_fit { ((size >> granule_bits) / CHUNK + 1).min(SLOTS_MAX) } else { 0 };
        if !is_fit {
            layers.clear();
        }
        ChainMap {
            changes,
            layers,
            granule_bits,
            chunks: (0..chunks).map(|_| ArcSwapOption::empty()).collect(),
            used: AtomicUsize::new(0),
        }
    }

    fn owner(&self, granule: u64) -> u8 {
        let Some(slot) = self.chunks.get((granule / CHUNK) as usize) else { return UNKNOWN };
        slot.load().as_deref().map_or(UNKNOWN, |chunk| chunk[(granule % CHUNK) as usize].load(Ordering::Relaxed))
    }

    /// Who has all of a range, if one layer has it; 0 where that isn't known.
    fn owner_of(&self, offset: u64, len: u64) -> u8 {
        let (first, last) = (offset >> self.granule_bits, (offset + len).saturating_sub(1) >> self.granule_bits);
        let owner = self.owner(first);
        match (first + 1..=last).all(|granule| self.owner(granule) == owner) {
            true => owner,
            false => UNKNOWN,
        }
    }

    /// The chunk of a granule, made if need be.
    fn chunk(&self, granule: u64) -> Option<Arc<Chunk>> {
        let slot = self.chunks.get((granule / CHUNK) as usize)?;
        if let Some(chunk) = slot.load_full() {
            return Some(chunk);
        }
        if self.used.fetch_add(1, Ordering::Relaxed) >= CHUNKS_MAX {
            self.used.store(0, Ordering::Relaxed);
            self.chunks.iter().for_each(|slot| slot.store(None));
        }
        let chunk: Arc<Chunk> = Arc::new((0..CHUNK).map(|_| AtomicU8::new(UNKNOWN)).collect());
        slot.store(Some(Arc::clone(&chunk)));
        Some(chunk)
    }

    /// Looks up the window around a granule, layer by layer.
    async fn look_up(&self, granule: u64) -> Result<()> {
        let first = granule - granule % WINDOW;
        let Some(chunk) = self.chunk(first) else { return Ok(()) };
        let bytes = first << self.granule_bits..(first + WINDOW) << self.granule_bits;
        let mut open = vec![bytes.clone()];
        let mut found = vec![UNKNOWN; WINDOW as usize];
        let mut note = |range: &Range<u64>, owner: u8| {
            // Only granules that one layer has as a whole; the others are asked layer by layer.
            let from = range.start.div_ceil(1 << self.granule_bits);
            for granule in from..range.end >> self.granule_bits {
                found[(granule - first) as usize] = owner;
            }
        };
        for (index, layer) in self.layers.iter().enumerate() {
            let Some(node) = layer.upgrade() else { return Ok(()) };
            let owner = index as u8 + 1;
            let mut below = Vec::new();
            for range in open {
                // What lies past the end of a layer reads as zeroes, whatever is below.
                let inside = range.start..range.end.min(node.size()).max(range.start);
                note(&(inside.end..range.end), NOWHERE);
                match node.qcow2() {
                    Some(qcow2) if index + 1 < self.layers.len() || qcow2.is_last() => {
                        for (run, is_here) in qcow2.presence(inside).await? {
                            if is_here { note(&run, owner) } else { below.push(run) }
                        }
                    }
                    // The last one that counts: it has the rest, or knows who has.
                    _ => note(&inside, owner),
                }
            }
            open = below;
        }
        for range in open {
            note(&range, NOWHERE);
        }
        // What still isn't known is left to the first layer.
        for (index, owner) in found.into_iter().enumerate() {
            let owner = if owner == UNKNOWN { 1 } else { owner };
            chunk[(first % CHUNK) as usize + index].store(owner, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How far from `at` on, before `end`, one layer is to be asked, and which.
    async fn next_part(&self, at: u64, end: u64) -> (u64, u8) {
        let granule = at >> self.granule_bits;
        if self.owner(granule) == UNKNOWN {
            // An error may lie beside what is asked for: whoever reads the layers meets it if it matters.
            let _ = self.look_up(granule).await;
        }
        // Without memory for it, or thrown away by another request: layer by layer.
        let owner = self.owner(granule).max(1);
        let mut next = granule + 1;
        while next << self.granule_bits < end && self.owner(next) == owner {
            next += 1;
        }
        ((next << self.granule_bits).min(end), owner)
    }

    async fn read_part(&self, owner: u8, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        if owner == NOWHERE {
            buf.fill(0);
            return (Ok(()), buf);
        }
        match self.layers[usize::from(owner) - 1].upgrade() {
            Some(layer) => layer.read_padded(offset, buf).await,
            None => (Err(Error::internal("a layer of the backing chain is gone")), buf),
        }
    }

    /// Fills `buf` from the chain.
    async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let end = offset + buf.len() as u64;
        let (mut at, mut parts) = (offset, Vec::new());
        while at < end {
            let (next, owner) = self.next_part(at, end).await;
            // Mostly all of it is in one layer.
            if at == offset && next == end {
                return self.read_part(owner, offset, buf).await;
            }
            parts.push((at..next, owner));
            at = next;
        }
        let mut rest = buf;
        let mut reads = Vec::with_capacity(parts.len());
        for (range, owner) in parts {
            let part = rest.split_to((range.end - range.start) as usize);
            reads.push(self.read_part(owner, range.start, part));
        }
        let (mut result, mut whole) = (Ok(()), None);
        for (outcome, part) in join_all(reads).await {
            result = result.and(outcome);
            whole = Some(join(whole, part));
        }
        (result, whole.unwrap_or(rest))
    }
}

impl Qcow2Driver {
    /// Whom to ask for a range of which nothing is here. Only what is known already: no future and no memory.
    pub(super) fn below(&self, offset: u64, len: u64) -> Below {
        // Faults are told what comes next.
        if self.file.faults().is_some() {
            return Below::Unknown;
        }
        let backing = self.backing.load();
        let Some(backing) = &*backing else {
            return if self.no_backing { Below::Unknown } else { Below::Zeroes };
        };
        let known = self.chain_map.load();
        let Some(map) = known.as_ref().filter(|map| map.changes == graph_changes()) else { return Below::Unknown };
        if map.layers.is_empty() {
            return Below::Layer(Arc::clone(backing));
        }
        match map.owner_of(offset, len) {
            UNKNOWN => Below::Unknown,
            NOWHERE => Below::Zeroes,
            owner => map.layers[usize::from(owner) - 1].upgrade().map_or(Below::Unknown, Below::Layer),
        }
    }

    /// Fills `buf` from the backing file: what this layer doesn't have.
    pub(super) async fn read_backing(&self, backing: &Arc<Node>, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.meet(Event::ReadBackingAio).await;
        let known = self.chain_map.load();
        let map = match &*known {
            Some(map) if map.changes == graph_changes() => Arc::clone(map),
            _ => {
                let map = Arc::new(ChainMap::new(backing, self.size()));
                self.chain_map.store(Some(Arc::clone(&map)));
                map
            }
        };
        drop(known);
        match map.layers.is_empty() {
            true => backing.read_padded(offset, buf).await,
            false => map.read(offset, buf).await,
        }
    }

    /// True when what this layer doesn't have reads as zeroes.
    fn is_last(&self) -> bool {
        self.backing.load().is_none() && !self.no_backing
    }

    /// Whether this layer has a range, in runs.
    async fn presence(&self, range: Range<u64>) -> Result<Vec<(Range<u64>, bool)>> {
        let mut runs: Vec<(Range<u64>, bool)> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let mut extents = ExtentList::default();
            let mapped = self.plan(|engine| engine.map(GuestOffset(at), range.end - at, &mut extents)).await?;
            for extent in extents.iter() {
                let is_here = extent.mapping != Mapping::Unallocated;
                let end = extent.guest.0 + extent.len;
                match runs.last_mut() {
                    Some((run, was_here)) if *was_here == is_here => run.end = end,
                    _ => runs.push((extent.guest.0..end, is_here)),
                }
            }
            at += mapped;
        }
        Ok(runs)
    }
}
