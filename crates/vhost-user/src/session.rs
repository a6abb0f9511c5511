// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One front end: the agreed features, its memory, its rings.

use crate::ledger::SessionLedger;
use crate::line::{Line, SignalWatch};
use crate::memory::{GuestMemory, MemoryPiece};
use crate::queue::{MemoryNow, RingRules, Start};
use crate::server::BackendState;
use cowshed_image::node::Node;
use cowshed_storage::rt::{self, within};
use cowshed_storage::signal::lock;
use cowshed_storage::{EventCounter, SharedMemory, Socket};
use cowshed_types::{Error, ErrorKind, Result};
use cowshed_vhost_user_proto::config::{DeviceConfig, WRITEBACK_AT};
use cowshed_vhost_user_proto::features::{self, protocol};
use cowshed_vhost_user_proto::inflight::UnflushedNote;
use cowshed_vhost_user_proto::message::{HEADER_BYTES, InflightPlace, RingAddresses, config_reply, request};
use cowshed_vhost_user_proto::regions::MAX_REGIONS;
use cowshed_vhost_user_proto::request::RequestLimits;
use cowshed_vhost_user_proto::ring::RingPlace;
use cowshed_vhost_user_proto::{Malformed, Message, MessageHeader, Region, inflight};
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Segments of a request: a ring of the usual 128 places without those of the header and the status.
const MAX_SEGMENTS: u32 = 126;
/// Segments of a discard or a write of zeroes.
const MAX_RANGES: u32 = 32;
/// Sectors of such a segment: 1 GiB.
const MAX_RANGE_SECTORS: u32 = 1 << 21;

/// A ring that takes so long to stop has a line in the log.
const STOP_NOTICE: Duration = Duration::from_secs(3);

/// The most memory of a front end, in bytes: 8 TiB of the 128 that a process can map.
const MAX_GUEST_BYTES: u64 = 8 << 40;

/// A ring as the front end sets it up.
#[derive(Debug, Default)]
struct RingSetup {
    size: u16,
    addresses: Option<RingAddresses>,
    base: u16,
    /// A kick was set: with a descriptor, or with none.
    kick: Option<Option<EventCounter>>,
    /// The front end's setting; none: by the features.
    enabled: Option<bool>,
    line: Arc<Line>,
    is_running: bool,
}

struct Session<'a> {
    shared: &'a BackendState,
    features: u64,
    protocol: u64,
    regions: GuestMemory,
    memory: MemoryNow,
    rings: Vec<RingSetup>,
    notes: Option<(SharedMemory, InflightPlace)>,
    /// This front end has sent the switch of the write cache.
    has_switched: bool,
    ledger: Arc<SessionLedger>,
    channel: Rc<RefCell<Option<Socket>>>,
    /// The front end has gone.
    has_left: bool,
}

/// A reply, with a descriptor.
#[derive(Default)]
struct Reply {
    body: Option<Vec<u8>>,
    descriptor: Option<OwnedFd>,
}

impl From<Vec<u8>> for Reply {
    fn from(body: Vec<u8>) -> Reply {
        Reply { body: Some(body), descriptor: None }
    }
}

fn number(value: u64) -> Reply {
    value.to_le_bytes().to_vec().into()
}

fn refused(error: Malformed) -> Error {
    Error::invalid_argument(error.to_string())
}

/// Serves a front end until it goes. All its rings have stopped then.
pub(crate) async fn run(shared: &Arc<BackendState>, socket: Socket) -> Result<()> {
    let channel: Rc<RefCell<Option<Socket>>> = Rc::default();
    // The announced sizes begin here, not where the task runs first: the disk may have another size by then.
    let (known, looks) = (shared.attachment.size(), shared.looks.look(|looks| *looks));
    let announcer = rt::spawn(announce_sizes(Arc::clone(shared), Rc::clone(&channel), known, looks));
    let watch: Arc<SignalWatch> = Arc::default();
    let ring = |_| RingSetup { line: Arc::new(Line::watched(&watch)), ..RingSetup::default() };
    let rings: Vec<RingSetup> = (0..shared.config.queues).map(ring).collect();
    let lines: Vec<Arc<Line>> = rings.iter().map(|ring| Arc::clone(&ring.line)).collect();
    let looks = rt::spawn(async move { watch.look_after(&lines).await });
    let mut session = Session {
        shared,
        features: 0,
        protocol: 0,
        regions: GuestMemory::default(),
        memory: MemoryNow::default(),
        rings,
        notes: None,
        has_switched: false,
        ledger: Arc::default(),
        channel,
        has_left: false,
    };
    let result = session.read_all(&socket).await;
    socket.shutdown();
    announcer.cancel().await;
    session.has_left = true;
    for ring in 0..session.rings.len() {
        session.stop(ring).await;
    }
    looks.cancel().await;
    session.flush().await;
    result
}

/// Tells the front end of each new size of the disk.
async fn announce_sizes(
    shared: Arc<BackendState>,
    channel: Rc<RefCell<Option<Socket>>>,
    mut known: u64,
    mut looks: u64,
) {
    loop {
        looks = shared.looks.wait(|now| (*now != looks).then_some(*now)).await;
        let size = shared.attachment.size();
        if size == known {
            continue;
        }
        known = size;
        let message = MessageHeader::message(request::BACKEND_CONFIG_CHANGE, false, &[]);
        let told = channel.borrow().as_ref().is_some_and(|channel| channel.send_now(&message));
        tracing::info!(export = shared.config.id, size, told, "the disk has a new size");
    }
}

impl Session<'_> {
    async fn read_all(&mut self, socket: &Socket) -> Result<()> {
        loop {
            let (mut head, mut descriptors) = ([0; HEADER_BYTES], Vec::new());
            let passed = &self.shared.passed;
            match socket.receive_with_descriptors(&mut head, &mut descriptors, passed).await? {
                0 => return Ok(()),
                HEADER_BYTES => {}
                count => return Err(Error::invalid_argument("a message ends in its header").value(count)),
            }
            let header = MessageHeader::parse(&head).map_err(refused)?;
            let mut body = vec![0; header.body_bytes as usize];
            if socket.receive_with_descriptors(&mut body, &mut descriptors, passed).await? < body.len() {
                return Err(Error::invalid_argument("a message ends in its body").value(header.request));
            }
            let message = Message::parse(&header, &body).map_err(refused)?;
            let wants_ack = header.needs_reply && self.protocol & protocol::REPLY_ACK != 0 && !message.has_reply();
            tracing::debug!(export = self.shared.config.id, ?message, descriptors = descriptors.len(), "message");
            let outcome = self.take(&header, message, descriptors).await;
            let reply = match outcome {
                Ok(Reply { body: None, .. }) if wants_ack => number(0),
                Ok(reply) => reply,
                Err(error) if wants_ack => {
                    tracing::warn!(export = self.shared.config.id, %error, "a message is refused");
                    number(1)
                }
                Err(error) => return Err(error),
            };
            if let Some(body) = &reply.body {
                socket.send_with_descriptor(&header.reply(body), reply.descriptor.as_ref()).await?;
            }
        }
    }

    async fn take(&mut self, header: &MessageHeader, message: Message, mut descriptors: Vec<OwnedFd>) -> Result<Reply> {
        match message {
            Message::GetFeatures => return Ok(number(self.offered())),
            Message::SetFeatures(features) => {
                let unknown = features & !self.offered();
                if unknown != 0 {
                    return Err(Error::invalid_argument("features that were not offered").value(unknown));
                }
                self.features = features;
            }
            Message::GetProtocolFeatures => return Ok(number(protocol::OFFERED)),
            Message::SetProtocolFeatures(features) => self.protocol = features & protocol::OFFERED,
            Message::GetQueueNum => return Ok(number(self.shared.config.queues.into())),
            Message::GetMaxMemSlots => return Ok(number(MAX_REGIONS as u64)),
            Message::GetConfig { offset, len, flags } => {
                return Ok(config_reply(offset, flags, &self.space().read(offset, len)).into());
            }
            Message::SetConfig { offset, bytes, .. } => self.set_config(offset, &bytes).await?,
            Message::SetMemTable(regions) => self.set_table(&regions, descriptors)?,
            Message::AddMemReg(region) => {
                self.add_region(region, descriptors.pop())?;
                self.publish();
            }
            Message::RemMemReg(region) => {
                self.regions.regions.remove(&region).map_err(refused)?;
                self.publish();
            }
            Message::SetBackendReqFd => {
                *self.channel.borrow_mut() = descriptors.pop().map(Socket::from_descriptor);
            }
            Message::GetInflightFd(place) => return self.make_notes(header, place),
            Message::SetInflightFd(place) => self.take_notes(place, descriptors.pop())?,
            Message::SetOwner | Message::ResetOwner => {}
            Message::ResetDevice => {
                self.ledger.reset();
                for ring in 0..self.rings.len() {
                    self.stop(ring).await;
                    self.rings[ring].enabled = Some(false);
                    self.rings[ring].base = 0;
                }
            }
            Message::Other(request) => {
                return Err(Error::unsupported(format!("message {request} was not agreed on")));
            }
            of_ring => return self.take_of_ring(of_ring, descriptors.pop()).await,
        }
        Ok(Reply::default())
    }

    async fn take_of_ring(&mut self, message: Message, descriptor: Option<OwnedFd>) -> Result<Reply> {
        let counter = |has_descriptor: bool| match (has_descriptor, descriptor) {
            (false, _) => Ok(None),
            (true, Some(descriptor)) => EventCounter::from_descriptor(descriptor).map(Some),
            (true, None) => Err(Error::invalid_argument("a message came without its descriptor")),
        };
        match message {
            Message::SetVringNum { ring, size } => {
                self.ring(ring)?.size = u16::try_from(size)
                    .map_err(|_| Error::invalid_argument("the size of a ring is out of range").value(size))?;
            }
            Message::SetVringAddr { ring, addresses } => self.ring(ring)?.addresses = Some(addresses),
            Message::SetVringBase { ring, base } => {
                self.ring(ring)?.base = u16::try_from(base)
                    .map_err(|_| Error::invalid_argument("the base of a ring is out of range").value(base))?;
            }
            Message::GetVringBase { ring } => {
                self.ring(ring)?;
                let number = ring as usize;
                self.stop(number).await;
                // It starts again with its next kick.
                self.rings[number].kick = None;
                let mut body = ring.to_le_bytes().to_vec();
                body.extend(u32::from(self.rings[number].base).to_le_bytes());
                return Ok(body.into());
            }
            Message::SetVringKick { ring, has_descriptor } => {
                let kick = counter(has_descriptor)?;
                self.ring(ring)?;
                // A ring that runs goes on with the new one.
                self.stop(ring as usize).await;
                self.rings[ring as usize].kick = Some(kick);
                self.start_if_ready(ring as usize).await?;
            }
            Message::SetVringCall { ring, has_descriptor } => {
                let call = counter(has_descriptor)?;
                let setup = self.ring(ring)?;
                // The new descriptor gets the news of requests that ended before.
                if setup.line.set_call(call) && setup.is_running {
                    self.shared.queues[ring as usize].call();
                }
            }
            Message::SetVringErr { ring, has_descriptor } => {
                *lock(&self.ring(ring)?.line.error) = counter(has_descriptor)?;
            }
            Message::SetVringEnable { ring, enable } => {
                self.ring(ring)?.enabled = Some(enable);
                match enable {
                    true => self.start_if_ready(ring as usize).await?,
                    false => self.stop(ring as usize).await,
                }
            }
            _ => return Err(Error::internal("a message of no ring")),
        }
        Ok(Reply::default())
    }

    fn ring(&mut self, ring: u32) -> Result<&mut RingSetup> {
        let found = self.rings.get_mut(ring as usize);
        found.ok_or_else(|| Error::invalid_argument("there is no such ring").value(ring))
    }

    fn offered(&self) -> u64 {
        match self.shared.config.writable {
            true => features::OFFERED,
            false => features::OFFERED_READ_ONLY,
        }
    }

    async fn start_if_ready(&mut self, number: usize) -> Result<()> {
        let has_protocol = self.features & features::PROTOCOL_FEATURES != 0;
        let ring = &self.rings[number];
        let (Some(kick), Some(addresses)) = (&ring.kick, ring.addresses) else { return Ok(()) };
        if ring.is_running || !ring.enabled.unwrap_or(!has_protocol) {
            return Ok(());
        }
        let translate = |address| self.regions.regions.guest_address(address).map_err(refused);
        let place = RingPlace {
            size: ring.size,
            descriptors: translate(addresses.descriptors)?,
            available: translate(addresses.available)?,
            used: translate(addresses.used)?,
            event_index: self.features & features::EVENT_IDX != 0,
            indirect: self.features & features::INDIRECT_DESC != 0,
        };
        let start = Start {
            place,
            base: ring.base,
            memory: Arc::clone(&self.memory),
            kick: kick.clone(),
            line: Arc::clone(&ring.line),
            notes: self.notes_of(number),
            ways: self.ways(),
        };
        self.shared.queues[number].start(start).await.map_err(refused)?;
        self.rings[number].is_running = true;
        Ok(())
    }

    /// Stops a ring, where it runs; its requests have ended when this returns. There is no limit: a front end that goes on before may
    /// give memory to another use which the disk still fills. The owner can send it away.
    async fn stop(&mut self, number: usize) {
        if !std::mem::take(&mut self.rings[number].is_running) {
            return;
        }
        let mut stopping = pin!(self.shared.queues[number].stop(self.has_left));
        let base = match within(STOP_NOTICE, &mut stopping).await {
            Some(base) => base,
            None => {
                let (export, requests) = (&self.shared.config.id, self.shared.attachment.statistics().in_flight);
                tracing::warn!(export, ring = number, requests, "a ring can't stop before its requests end");
                stopping.await
            }
        };
        self.rings[number].base = base;
    }

    /// Nothing acknowledged to this front end is lost from here on.
    async fn flush(&self) {
        if !self.ledger.is_unflushed() {
            return;
        }
        let began = self.ledger.begin_flush();
        match self.shared.attachment.queue().flush().await {
            Ok(()) => self.ledger.end_flush(began),
            Err(error) => {
                tracing::warn!(export = self.shared.config.id, %error, "could not flush for a front end");
            }
        }
    }

    fn ways(&self) -> RingRules {
        let config = &self.shared.config;
        let limits = RequestLimits {
            disk_bytes: 0,
            block_bytes: config.block_bytes,
            read_only: !config.writable,
            max_segments: MAX_RANGES,
            max_segment_sectors: MAX_RANGE_SECTORS,
        };
        RingRules {
            id: config.id.as_str().into(),
            limits,
            // A driver without flushes can't make anything durable by itself.
            writethrough: config.writethrough || self.features & features::BLK_FLUSH == 0,
            writeback: Arc::clone(&self.shared.writeback),
            ledger: Arc::clone(&self.ledger),
            memory_of: Some(|piece| &piece.0),
        }
    }

    /// The config space that the guest reads.
    fn space(&self) -> DeviceConfig {
        let config = &self.shared.config;
        let node = self.shared.attachment.node();
        let grain = grain_bytes(&node).unwrap_or(config.block_bytes).max(config.block_bytes);
        DeviceConfig {
            disk_bytes: self.shared.attachment.size(),
            max_segments: MAX_SEGMENTS,
            block_bytes: config.block_bytes,
            physical_exponent: (grain / config.block_bytes).ilog2() as u8,
            min_io_bytes: config.block_bytes,
            optimal_io_bytes: grain,
            writeback: self.shared.writeback.load(Ordering::Acquire),
            queues: config.queues,
            max_discard_sectors: if config.writable { MAX_RANGE_SECTORS } else { 0 },
            max_discard_segments: if config.writable { MAX_RANGES } else { 0 },
            discard_alignment_sectors: if config.writable { grain / 512 } else { 0 },
            max_zeroes_sectors: if config.writable { MAX_RANGE_SECTORS } else { 0 },
            max_zeroes_segments: if config.writable { MAX_RANGES } else { 0 },
        }
    }

    async fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        match (offset, bytes) {
            (WRITEBACK_AT, [on]) => {
                let is_on = *on != 0;
                self.has_switched = true;
                self.shared.writeback.store(is_on, Ordering::SeqCst);
                self.ledger.note_write_cache(is_on);
                // The guest sends no flush from here on, also for its earlier writes.
                if !is_on {
                    self.flush().await;
                }
                Ok(())
            }
            _ => Err(Error::invalid_argument("only the switch of the write cache can be written").value(offset)),
        }
    }

    fn set_table(&mut self, regions: &[Region], descriptors: Vec<OwnedFd>) -> Result<()> {
        if descriptors.len() != regions.len() {
            let message = "a table of memory needs a descriptor for each region";
            return Err(Error::invalid_argument(message).value(descriptors.len()));
        }
        self.regions = GuestMemory::default();
        for (region, descriptor) in regions.iter().zip(descriptors) {
            self.add_region(*region, Some(descriptor))?;
        }
        self.publish();
        Ok(())
    }

    fn add_region(&mut self, region: Region, descriptor: Option<OwnedFd>) -> Result<()> {
        let missing = || Error::invalid_argument("a region of memory came without its descriptor");
        let known = self.regions.regions.bytes();
        if known.checked_add(region.len).is_none_or(|bytes| bytes > MAX_GUEST_BYTES) {
            let message = format!("memory of more than {} TiB", MAX_GUEST_BYTES >> 40);
            return Err(Error::new(ErrorKind::Limit, message).value(region.len));
        }
        let descriptor = descriptor.ok_or_else(missing)?;
        let memory = self.shared.mappings.map(descriptor, region.file_offset, region.len)?;
        self.regions.regions.add(region, memory).map_err(refused)
    }

    /// All rings see the memory as it is now.
    fn publish(&self) {
        *lock(&self.memory) = Arc::new(self.regions.clone());
    }

    fn make_notes(&mut self, header: &MessageHeader, place: InflightPlace) -> Result<Reply> {
        let queues = place.queues.min(self.shared.config.queues);
        let len = (inflight::region_bytes(queues, place.ring_size) + inflight::NOTE_BYTES) as u64;
        let place = InflightPlace { len, offset: 0, queues, ..place };
        let (memory, file) = SharedMemory::create("cowshed-inflight", len.max(1))?;
        self.notes = Some((memory, place));
        // Front ends ask for a new region when their guest has reset the device.
        self.ledger.reset();
        self.take_up_note()?;
        Ok(Reply { body: Some(place.encode(header.body_bytes)), descriptor: Some(file) })
    }

    fn take_notes(&mut self, place: InflightPlace, descriptor: Option<OwnedFd>) -> Result<()> {
        let missing = || Error::invalid_argument("the inflight region came without its descriptor");
        if place.len < inflight::region_bytes(place.queues, place.ring_size) as u64 {
            return Err(Error::invalid_argument("the inflight region is too short").value(place.len));
        }
        let memory = self.shared.mappings.map(descriptor.ok_or_else(missing)?, place.offset, place.len)?;
        self.notes = Some((memory, place));
        self.take_up_note()
    }

    /// Takes up our own note behind those of the rings, where the region has one.
    fn take_up_note(&self) -> Result<()> {
        let Some((memory, place)) = &self.notes else { return Ok(()) };
        let at = inflight::region_bytes(place.queues, place.ring_size);
        // A region of another back end ends before.
        if place.len < (at + inflight::NOTE_BYTES) as u64 {
            self.ledger.lay_down();
            return Ok(());
        }
        let part = MemoryPiece(memory.part(at, inflight::NOTE_BYTES));
        let (note, found) = UnflushedNote::open(part, self.shared.life).map_err(refused)?;
        // The guest believes in it still, and its front end sends it only where it changes.
        if let Some(is_on) = found.write_cache
            && !self.has_switched
        {
            self.shared.writeback.store(is_on, Ordering::SeqCst);
        }
        if found.is_lost {
            let export = &self.shared.config.id;
            tracing::warn!(export, "the process before was killed: changes that the guest has not flushed are lost");
        }
        self.ledger.take_up(note, found, self.shared.writeback.load(Ordering::SeqCst));
        Ok(())
    }

    /// The notes of one ring.
    fn notes_of(&self, number: usize) -> Option<MemoryPiece> {
        let (memory, place) = self.notes.as_ref()?;
        let bytes = inflight::part_bytes(place.ring_size);
        (number < usize::from(place.queues)).then(|| MemoryPiece(memory.part(number * bytes, bytes)))
    }
}

/// The grain of the disk's allocation, where it is a power of two that a request can have.
fn grain_bytes(node: &Node) -> Option<u32> {
    let grain = node.subcluster_bytes().or_else(|| node.cluster_bytes())?;
    u32::try_from(grain).ok().filter(|grain| grain.is_power_of_two() && *grain <= 1 << 21)
}
