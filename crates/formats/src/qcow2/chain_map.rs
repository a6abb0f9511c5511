// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A memory of long backing chains: the layer that has a range, and its place in that layer's file. A read goes straight there
//! instead of through every layer above and its mapping.
//!
//! The map covers layers without writers, from the backing file down to the first that is no read-only qcow2 node. It
//! covers the image above them too, if that has no writers either: then a read doesn't ask its mapping at all. The map
//! is thrown away when an edge of any graph moves or a node becomes writable. An answer may be short of the truth: a
//! layer above the right one, which then asks its own backing file. It is never past the truth. A place is good only
//! for a reader that holds a pin of that layer. The reader must have seen after taking it that nothing has changed
//! ([`Place`]).

use super::Qcow2Driver;
use crate::DriverOf;
use cowshed_graph::buffers::join;
use cowshed_graph::node::{Mapped, Node, Place, graph_changes};
use cowshed_qcow2::ExtentList;
use cowshed_storage::IoBuf;
use cowshed_storage::fault::Event;
use cowshed_types::{Error, GuestOffset, HostOffset, Mapping, Result, slip, without};
use futures_util::future::join_all;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// A shorter chain is read layer by layer.
const LAYERS_MIN: usize = 2;
/// Layers that a byte can number, beside the three values that mean something else.
const LAYERS_MAX: usize = 253;
/// The map is as fine as the finest layer, but not finer than this; a finer layer is read alone.
const GRANULE_BITS_MIN: u32 = 12;
/// Granules in a chunk, and those that are looked up together.
const CHUNK: u64 = 4096;
const WINDOW: u64 = 64;
/// Chunks of one image at most, 16 KiB each: with 64 KiB clusters they cover 256 GiB. One more begins a new map.
const CHUNKS_MAX: usize = 1024;
/// Places for chunks: the range behind, 4 TiB with 64 KiB clusters, is read layer by layer.
const SLOTS_MAX: u64 = 1 << 14;

/// Not looked up yet.
const UNKNOWN: u8 = 0;
/// The image itself has it, or isn't passed over: only where the map covers it.
const ITSELF: u8 = u8::MAX - 1;
/// No layer has it.
const NOWHERE: u8 = u8::MAX;

/// One number a granule: the owner in the lowest byte, and above it the place in the owner's file in granules. 0 stands for a
/// place that isn't known: where a file begins there is its header.
type Chunk = Box<[AtomicU32]>;
const PLACE_SHIFT: u32 = u8::BITS;

/// The known owner of a range.
#[derive(Clone, Copy, PartialEq, Eq)]
struct KnownOwner {
    owner: u8,
    /// An offset in the owner's file.
    host: Option<u64>,
}

/// The content of a range in a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holding {
    Nothing,
    /// Plain data, from this offset of its file on.
    Data(u64),
    /// Anything else.
    Other,
}

/// The layer to ask for a range, as far as a map has it.
enum Asked {
    /// No layer holds the range: it reads as zeroes.
    Nowhere,
    /// This layer holds the range or knows the layer that does. The place is that in the layer's file, if it is known.
    Layer(Arc<Node>, Option<Place>),
    /// The image itself holds the range, at this place.
    Itself(Place),
    /// The map has no entry yet. The image's own mapping need not be asked.
    Unseen,
    /// The range must be looked up, or several layers hold parts of it.
    Unknown,
}

/// See the module's text.
pub(crate) struct ChainMap {
    /// [`graph_changes`] when it was made.
    changes: u64,
    /// The backing file, its backing file, and so on. Empty when the chain is too short or not fit.
    layers: Vec<Weak<Node>>,
    /// The image above them is read-only, and the map has its ranges too.
    covers_itself: bool,
    granule_bits: u32,
    chunks: Vec<OnceLock<Chunk>>,
    used: AtomicUsize,
    /// It has all the chunks that it may have, and one more was needed.
    is_spent: AtomicBool,
}

impl ChainMap {
    /// For `image` above `backing`.
    fn new(image: &Qcow2Driver, backing: &Arc<Node>) -> ChainMap {
        // Before the look: a change meanwhile is noticed at the next one.
        let changes = graph_changes();
        let (mut layers, mut granule_bits) = (Vec::new(), u32::MAX);
        let covers_itself = image.is_frozen() && !without!("image_passed_over");
        if covers_itself {
            granule_bits = image.engine.geometry().subcluster_bits();
        }
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
        let is_fit = layers.len() + usize::from(covers_itself) >= LAYERS_MIN
            && granule_bits >= GRANULE_BITS_MIN
            && !without!("owners_of_granules");
        let chunks = if is_fit { ((image.size() >> granule_bits) / CHUNK + 1).min(SLOTS_MAX) } else { 0 };
        if !is_fit {
            layers.clear();
        }
        ChainMap {
            changes,
            layers,
            covers_itself: covers_itself && is_fit,
            granule_bits,
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
            used: AtomicUsize::new(0),
            is_spent: AtomicBool::new(false),
        }
    }

    /// It is to be used: nothing has changed, and it has room.
    fn is_good(&self) -> bool {
        self.changes == graph_changes() && !self.is_spent.load(Ordering::Relaxed)
    }

    fn entry(&self, granule: u64) -> u32 {
        let chunk = self.chunks.get((granule / CHUNK) as usize).and_then(OnceLock::get);
        chunk.map_or(0, |chunk| chunk[(granule % CHUNK) as usize].load(Ordering::Relaxed))
    }

    /// Whom to ask for a granule that the image itself doesn't have.
    fn owner_below(&self, granule: u64) -> u8 {
        match self.entry(granule) as u8 {
            // In parts, or without memory for the map: layer by layer.
            UNKNOWN | ITSELF => 1,
            owner => owner,
        }
    }

    /// The layer that has all of a range, and where, if it is in one piece; the owner 0 where that isn't known.
    fn known(&self, offset: u64, len: u64) -> KnownOwner {
        let first = offset >> self.granule_bits;
        let last = (offset + len).saturating_sub(1) >> self.granule_bits;
        let entry = self.entry(first);
        let (owner, place) = (entry as u8, entry >> PLACE_SHIFT);
        let mut is_one_piece = place != 0;
        for granule in first + 1..=last {
            let next = self.entry(granule);
            if next as u8 != owner {
                return KnownOwner { owner: UNKNOWN, host: None };
            }
            is_one_piece &= u64::from(next >> PLACE_SHIFT) == u64::from(place) + (granule - first);
        }
        let within = offset - (first << self.granule_bits);
        KnownOwner { owner, host: is_one_piece.then(|| (u64::from(place) << self.granule_bits) + within) }
    }

    /// The layer to ask for a range, by the known facts.
    fn whom_to_ask(&self, offset: u64, len: u64) -> Asked {
        let known = self.known(offset, len);
        let place = known
            .host
            .filter(|_| !without!("places_of_granules"))
            .map(|host| Place { host: HostOffset(host), changes: self.changes });
        match (known.owner, place) {
            (UNKNOWN, _) if self.covers_itself && self.is_unseen(offset) => Asked::Unseen,
            (ITSELF, Some(place)) => Asked::Itself(place),
            (UNKNOWN | ITSELF, _) => Asked::Unknown,
            (NOWHERE, _) => Asked::Nowhere,
            (owner, place) => {
                self.layers[usize::from(owner) - 1].upgrade().map_or(Asked::Unknown, |layer| Asked::Layer(layer, place))
            }
        }
    }

    /// The window around an offset wasn't looked up, and can be.
    fn is_unseen(&self, offset: u64) -> bool {
        let granule = offset >> self.granule_bits;
        self.entry(granule) as u8 == UNKNOWN && granule / CHUNK < self.chunks.len() as u64
    }

    /// The entry of a granule. A place that doesn't fit isn't remembered.
    fn remembered(&self, owner: u8, host: Option<u64>) -> u32 {
        let place =
            host.filter(|host| host.trailing_zeros() >= self.granule_bits).map(|host| host >> self.granule_bits);
        let place =
            place.and_then(|place| u32::try_from(place).ok()).filter(|place| place >> (u32::BITS - PLACE_SHIFT) == 0);
        u32::from(owner) | place.unwrap_or(0) << PLACE_SHIFT
    }

    /// The chunk of a granule, made if there is room.
    fn chunk(&self, granule: u64) -> Option<&Chunk> {
        let slot = self.chunks.get((granule / CHUNK) as usize)?;
        if slot.get().is_none() && self.used.load(Ordering::Relaxed) >= CHUNKS_MAX {
            self.is_spent.store(true, Ordering::Relaxed);
            return None;
        }
        Some(slot.get_or_init(|| {
            self.used.fetch_add(1, Ordering::Relaxed);
            (0..CHUNK).map(|_| AtomicU32::new(0)).collect()
        }))
    }

    /// Looks up the window around a granule, layer by layer; `image` is the one above them.
    async fn look_up(&self, image: &Qcow2Driver, granule: u64) -> Result<()> {
        let Some(mut window) = Window::around(self, granule) else { return Ok(()) };
        let mut open = vec![window.bytes()];
        if self.covers_itself {
            open = image.note_holdings(window.bytes_of(image), ITSELF, &mut window).await?;
        }
        for (index, layer) in self.layers.iter().enumerate() {
            if open.is_empty() {
                break;
            }
            let Some(node) = layer.upgrade() else { return Ok(()) };
            let owner = index as u8 + 1;
            let mut below = Vec::new();
            for range in open {
                // A range past the end of a layer reads as zeroes, whatever is below.
                let inside = range.start..range.end.min(node.size()).max(range.start);
                window.note(&(inside.end..range.end), NOWHERE, None);
                match node.qcow2() {
                    Some(qcow2) if index + 1 < self.layers.len() || qcow2.is_last() => {
                        below.extend(qcow2.note_holdings(inside, owner, &mut window).await?);
                    }
                    // The last layer of the map: it has the rest, or asks the layers below it.
                    _ => window.note(&inside, owner, None),
                }
            }
            open = below;
        }
        for range in open {
            window.note(&range, NOWHERE, None);
        }
        window.remember();
        Ok(())
    }

    /// Looks up the own ranges of `image` in the window around a granule. No other layer is asked: its own data is read
    /// also while its backing file doesn't answer.
    async fn look_up_itself(&self, image: &Qcow2Driver, granule: u64) -> Result<()> {
        let Some(mut window) = Window::around(self, granule) else { return Ok(()) };
        for run in image.note_holdings(window.bytes_of(image), ITSELF, &mut window).await? {
            window.note(&run, UNKNOWN, None);
        }
        window.remember();
        Ok(())
    }

    /// The length from `at` on, before `end`, for which one layer is to be asked, and that layer.
    async fn next_part(&self, image: &Qcow2Driver, at: u64, end: u64) -> (u64, u8) {
        let granule = at >> self.granule_bits;
        if self.entry(granule) as u8 == UNKNOWN {
            // An error may lie beside the range. A read of the layers meets it if it matters. In a box: the future of
            // each read would hold the room for a look-up, and be moved with it.
            let _ = Box::pin(self.look_up(image, granule)).await;
        }
        let owner = self.owner_below(granule);
        let mut next = granule + 1;
        while next << self.granule_bits < end && self.entry(next) as u8 == owner {
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

    /// Fills `buf` from the chain below `image`.
    async fn read(&self, image: &Qcow2Driver, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let end = offset + buf.len() as u64;
        let (mut at, mut parts) = (offset, Vec::new());
        while at < end {
            let (next, owner) = self.next_part(image, at, end).await;
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

/// Granules that are being looked up together.
struct Window<'a> {
    map: &'a ChainMap,
    chunk: &'a Chunk,
    first: u64,
    /// Not within: futures with a window in them are moved with every read of parts.
    found: Vec<u32>,
}

impl<'a> Window<'a> {
    /// If there is room in the map.
    fn around(map: &'a ChainMap, granule: u64) -> Option<Window<'a>> {
        let first = granule - granule % WINDOW;
        // A range that isn't noted is left to the first layer that is asked.
        let first_asked = if map.covers_itself && !slip!("passed_over_in_parts") { ITSELF } else { 1 };
        Some(Window { map, chunk: map.chunk(first)?, first, found: vec![u32::from(first_asked); WINDOW as usize] })
    }

    fn bytes(&self) -> Range<u64> {
        self.first << self.map.granule_bits..(self.first + WINDOW) << self.map.granule_bits
    }

    /// As far as the image reaches.
    fn bytes_of(&self, image: &Qcow2Driver) -> Range<u64> {
        let bytes = self.bytes();
        bytes.start..bytes.end.min(image.size()).max(bytes.start)
    }

    /// Only granules that one layer has as a whole; the others are asked layer by layer.
    fn note(&mut self, range: &Range<u64>, owner: u8, host: Option<u64>) {
        let bits = self.map.granule_bits;
        for granule in range.start.div_ceil(1 << bits)..range.end >> bits {
            let host = host.map(|host| host + ((granule << bits) - range.start));
            self.found[(granule - self.first) as usize] = self.map.remembered(owner, host);
        }
    }

    fn remember(self) {
        let places = &self.chunk[(self.first % CHUNK) as usize..];
        for (place, entry) in places.iter().zip(self.found) {
            if entry as u8 != UNKNOWN {
                place.store(entry, Ordering::Relaxed);
            }
        }
    }
}

impl Qcow2Driver {
    /// The way of a read of a range of which nothing is here. It uses known facts alone: no future and no memory.
    pub(super) fn below(&self, offset: u64, len: u64) -> Mapped<'_> {
        // Faults need to know of each operation.
        if self.file.faults().is_some() {
            return Mapped::Special;
        }
        let known = self.chain_map.load();
        let known = known.as_ref().filter(|map| slip!("places_outlive_changes") || map.changes == graph_changes());
        let Some(map) = known.filter(|map| !map.layers.is_empty()) else {
            return match &*self.backing.load() {
                None if self.no_backing => Mapped::Special,
                None => Mapped::Zeroes,
                // A chain that is too short for a map.
                Some(backing) if known.is_some() => Mapped::Layer(Arc::clone(backing), None),
                Some(_) => Mapped::Special,
            };
        };
        match map.whom_to_ask(offset, len) {
            Asked::Layer(layer, place) => Mapped::Layer(layer, place),
            Asked::Nowhere => Mapped::Zeroes,
            // The image has it in parts, or no read has looked it up.
            Asked::Itself(_) | Asked::Unseen | Asked::Unknown => Mapped::Special,
        }
    }

    /// The chain map was made to cover this image too.
    #[inline]
    pub(super) fn is_covered(&self) -> bool {
        self.is_covered.load(Ordering::Relaxed)
    }

    /// As [`Self::below`] for a range of which nothing is known yet, not even whether it is here. `None`: the mapping is to be
    /// asked.
    pub(super) fn anywhere(&self, offset: u64, len: u64) -> Option<Mapped<'_>> {
        let known = self.chain_map.load();
        let asked = match known
            .as_ref()
            .filter(|map| map.covers_itself && (slip!("passed_over_after_changes") || map.changes == graph_changes()))
        {
            Some(map) if self.file.faults().is_none() => map.whom_to_ask(offset, len),
            _ => return None,
        };
        match asked {
            Asked::Layer(layer, place) => Some(Mapped::Layer(layer, place)),
            Asked::Itself(place) => {
                Some(self.placed_at(place, len)).filter(|mapped| !matches!(mapped, Mapped::Special))
            }
            Asked::Nowhere => Some(Mapped::Zeroes),
            Asked::Unseen => Some(self.looking_around(offset)),
            Asked::Unknown => None,
        }
    }

    /// Looks up the ranges of [`Asked::Unseen`].
    pub(super) async fn look_around(&self, offset: u64) {
        let Some(map) = self.chain_map.load_full() else { return };
        // As in `next_part`.
        let _ = map.look_up_itself(self, offset >> map.granule_bits).await;
        if map.is_spent.load(Ordering::Relaxed) {
            // Until a read below begins a new one.
            self.is_covered.store(false, Ordering::Relaxed);
        }
    }

    /// The node of this image is read-only.
    fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    /// Notes the parts of a range that this layer has, and returns the rest.
    async fn note_holdings(&self, range: Range<u64>, owner: u8, window: &mut Window<'_>) -> Result<Vec<Range<u64>>> {
        let mut rest = Vec::new();
        for (run, holding) in self.holdings(range).await? {
            match holding {
                Holding::Nothing => rest.push(run),
                Holding::Data(host) => window.note(&run, owner, Some(host)),
                Holding::Other => window.note(&run, owner, None),
            }
        }
        Ok(rest)
    }

    /// Fills `buf` from the backing file, for a range that this layer doesn't have.
    pub(super) async fn read_backing(&self, backing: &Arc<Node>, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.meet(Event::ReadBackingAio).await;
        let known = self.chain_map.load();
        let map = match &*known {
            Some(map) if map.is_good() => Arc::clone(map),
            _ => {
                let map = Arc::new(ChainMap::new(self, backing));
                self.is_covered.store(map.covers_itself, Ordering::Relaxed);
                self.chain_map.store(Some(Arc::clone(&map)));
                map
            }
        };
        drop(known);
        match map.layers.is_empty() {
            true => backing.read_padded(offset, buf).await,
            false => map.read(self, offset, buf).await,
        }
    }

    /// True when ranges that this layer doesn't have read as zeroes.
    fn is_last(&self) -> bool {
        self.backing.load().is_none() && !self.no_backing
    }

    /// The contents of a range in this layer, in runs.
    async fn holdings(&self, range: Range<u64>) -> Result<Vec<(Range<u64>, Holding)>> {
        let mut runs: Vec<(Range<u64>, Holding)> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let mut extents = ExtentList::default();
            let mapped = self.plan(|engine| engine.map(GuestOffset(at), range.end - at, &mut extents)).await?;
            for extent in extents.iter() {
                let holding = match extent.mapping {
                    Mapping::Unallocated => Holding::Nothing,
                    // Either no data of an image is in the data file, or all.
                    Mapping::Data { host, encrypted: false, .. } => Holding::Data(host.0),
                    _ => Holding::Other,
                };
                let end = extent.guest.0 + extent.len;
                let continues = |(run, before): &(Range<u64>, Holding)| match (*before, holding) {
                    (Holding::Data(start), Holding::Data(host)) => start + (run.end - run.start) == host,
                    (before, holding) => before == holding,
                };
                match runs.last_mut().filter(|last| continues(last)) {
                    Some((run, _)) => run.end = end,
                    None => runs.push((extent.guest.0..end, holding)),
                }
            }
            at += mapped;
        }
        Ok(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(granule_bits: u32, slots: usize) -> ChainMap {
        ChainMap {
            changes: 1,
            layers: Vec::new(),
            covers_itself: false,
            granule_bits,
            chunks: (0..slots).map(|_| OnceLock::new()).collect(),
            used: AtomicUsize::new(0),
            is_spent: AtomicBool::new(false),
        }
    }

    fn put(map: &ChainMap, granule: u64, owner: u8, host: Option<u64>) {
        map.chunk(granule).unwrap()[(granule % CHUNK) as usize].store(map.remembered(owner, host), Ordering::Relaxed);
    }

    #[test]
    fn contiguous_granules_have_one_place() {
        let map = map(12, 4);
        let known = |offset, len| {
            let known = map.known(offset, len);
            (known.owner, known.host)
        };
        assert_eq!(known(0, 4096), (UNKNOWN, None));
        put(&map, CHUNK - 1, 3, Some(0x50000));
        put(&map, CHUNK, 3, Some(0x51000));
        put(&map, CHUNK + 1, 3, Some(0x80000));
        put(&map, CHUNK + 2, 4, Some(0x81000));
        put(&map, CHUNK + 3, 4, None);
        put(&map, CHUNK + 4, NOWHERE, None);
        let at = |granule: u64| (CHUNK - 1 + granule) << 12;
        assert_eq!(known(at(0), 4096), (3, Some(0x50000)));
        assert_eq!(known(at(0) + 512, 512), (3, Some(0x50200)));
        // Over the border of two chunks.
        assert_eq!(known(at(0) + 512, 4096), (3, Some(0x50200)));
        assert_eq!(known(at(0), 8192), (3, Some(0x50000)));
        // One owner, two pieces.
        assert_eq!(known(at(1), 8192), (3, None));
        // Two owners, though one goes on where the other ends.
        assert_eq!(known(at(2), 8192), (UNKNOWN, None));
        assert_eq!(known(at(3), 8192), (4, None));
        assert_eq!(known(at(4), 4096), (4, None));
        assert_eq!(known(at(5), 4096), (NOWHERE, None));
        assert_eq!(known(at(6), 4096), (UNKNOWN, None));
        assert_eq!(known(at(100_000), 4096), (UNKNOWN, None));
    }

    #[test]
    fn an_image_is_passed_over_where_the_map_covers_it() {
        let ask = |map: &ChainMap, granule: u64, len| map.whom_to_ask(granule << 12, len);
        let mut map = map(12, 1);
        for covers_itself in [false, true] {
            map.covers_itself = covers_itself;
            assert_eq!(matches!(ask(&map, 0, 4096), Asked::Unseen), covers_itself);
            // There is no memory for the chunk behind.
            assert!(matches!(ask(&map, CHUNK, 4096), Asked::Unknown));
        }
        put(&map, 1, ITSELF, Some(0x50000));
        put(&map, 2, ITSELF, Some(0x51000));
        put(&map, 3, ITSELF, None);
        put(&map, 4, NOWHERE, None);
        assert!(matches!(ask(&map, 1, 8192), Asked::Itself(Place { host: HostOffset(0x50000), changes: 1 })));
        assert!(matches!(ask(&map, 2, 8192), Asked::Unknown), "in parts");
        assert!(matches!(ask(&map, 3, 4096), Asked::Unknown));
        assert!(matches!(ask(&map, 3, 8192), Asked::Unknown), "two owners");
        assert!(matches!(ask(&map, 4, 4096), Asked::Nowhere));
        // A reader that knows that the image hasn't got it asks the first layer.
        assert_eq!([1, 3, 4, 5].map(|granule| map.owner_below(granule)), [1, 1, NOWHERE, 1]);
    }

    #[test]
    fn a_place_that_does_not_fit_is_not_remembered() {
        let map = map(16, 1);
        let host_of = |host| {
            put(&map, 7, 1, Some(host));
            let known = map.known(7 << 16, 65536);
            assert_eq!(known.owner, 1);
            known.host
        };
        assert_eq!(host_of(0x50000), Some(0x50000));
        assert_eq!(host_of(0x51000), None, "not on a granule's border");
        assert_eq!(host_of((1 << 40) - 65536), Some((1 << 40) - 65536));
        assert_eq!(host_of(1 << 40), None);
        assert_eq!(host_of((1 << 48) + 0x50000), None);
        assert_eq!(host_of(0), None);
    }

    #[test]
    fn chain_map_ends_at_its_memory_limit() {
        let map = map(12, CHUNKS_MAX + 1);
        let is_spent = || map.is_spent.load(Ordering::Relaxed);
        for chunk in 0..CHUNKS_MAX as u64 {
            put(&map, chunk * CHUNK, 1, None);
        }
        assert!(map.chunk(0).is_some() && !is_spent());
        assert!(map.chunk(CHUNKS_MAX as u64 * CHUNK).is_none() && is_spent());
        // An offset behind all slots has nothing to do with it.
        let small = super::tests::map(12, 1);
        assert!(small.chunk(CHUNK).is_none() && !small.is_spent.load(Ordering::Relaxed));
    }
}
