// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A front end of vhost-user-blk, and a driver, that follow a test: each message and each descriptor by itself.

use cowshed_storage::{EventCounter, PassedFiles, SharedMemory, Socket, SocketAddress, rt};
pub use cowshed_vhost_user_proto::message::request;
use cowshed_vhost_user_proto::message::{HEADER_BYTES, InflightPlace, config_reply};
use cowshed_vhost_user_proto::{MessageHeader, Region, features, inflight};
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The guest's memory, in bytes.
pub const MEMORY_BYTES: u64 = 8 << 20;
/// Places of each ring.
pub const RING_SIZE: u16 = 64;
/// The place of the rings in guest memory: 64 KiB each.
const RINGS: u64 = 0x10_0000;
/// Where data of requests lies: 64 KiB for each chain.
pub const DATA: u64 = 0x20_0000;
/// The guest's memory in the front end.
pub const FRONT_END: u64 = 0x7f00_0000_0000;
/// The guest's memory for the guest.
pub const GUEST: u64 = 0x4000_0000;
const PATIENCE: Duration = Duration::from_secs(20);

/// A guest: its memory outlives front ends.
#[derive(Clone)]
pub struct Guest {
    /// The memory as the front end has it.
    pub memory: SharedMemory,
    /// The file that back ends map.
    pub file: Arc<OwnedFd>,
    /// The index of the available ring, for each ring.
    pub next: [u16; 2],
    /// The index of the used ring up to which the driver has looked, for each ring.
    pub seen: [u16; 2],
}

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

impl Guest {
    /// Memory of zeroes.
    pub fn new() -> Guest {
        let (memory, file) = SharedMemory::create("guest", MEMORY_BYTES).unwrap();
        Guest { memory, file: Arc::new(file), next: [0; 2], seen: [0; 2] }
    }
}

/// A connection that ends at once with this. A close alone waits for programs that other tests start: they have a copy of
/// each descriptor up to their `exec`.
pub struct FrontEndSocket(Socket);

impl Deref for FrontEndSocket {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.0
    }
}

impl Drop for FrontEndSocket {
    fn drop(&mut self) {
        self.0.shutdown();
    }
}

/// One connection to a back end.
pub struct FrontEnd {
    /// The connection.
    pub socket: FrontEndSocket,
    /// The guest behind it.
    pub guest: Guest,
    /// For the back end, by the ring.
    pub kick: [EventCounter; 2],
    /// From the back end, by the ring.
    pub call: [EventCounter; 2],
    /// From the back end, for all rings.
    pub error: EventCounter,
    /// Agreed on.
    pub features: u64,
}

/// A descriptor: the address counts from the start of guest memory.
pub type Descriptor = (u64, u32, u16, u16);

impl FrontEnd {
    /// Connects with a guest that another back end has served, if there was one, and goes on with its first ring. `notes`: the region
    /// of its requests in flight, which is made where there is none.
    ///
    /// # Panics
    /// If the back end does not take it.
    pub fn resume(path: &Path, guest: Option<Guest>, notes: &mut Option<(InflightPlace, OwnedFd)>) -> FrontEnd {
        let mut driver = FrontEnd::connect(path);
        driver.guest = guest.unwrap_or_default();
        driver.negotiate(u64::MAX);
        driver.share_memory();
        let region = notes.get_or_insert_with(|| driver.notes());
        driver.give_notes(region);
        driver.start_ring(0, driver.used(0));
        driver
    }

    /// Connects with a new guest.
    ///
    /// # Panics
    /// As all of this does, where the back end isn't there or sends a wrong message.
    pub fn connect(path: &Path) -> FrontEnd {
        let address = SocketAddress::Unix(path.to_str().unwrap().to_owned());
        let counter = || EventCounter::new().unwrap();
        FrontEnd {
            socket: FrontEndSocket(rt::block_on(Socket::connect(&address, PATIENCE)).unwrap()),
            guest: Guest::new(),
            kick: [counter(), counter()],
            call: [counter(), counter()],
            error: counter(),
            features: 0,
        }
    }

    /// The number of rings that the back end offers.
    pub fn queue_count(&self) -> u64 {
        self.ask_number(request::GET_QUEUE_NUM, &[])
    }

    /// Sends bytes as they are, and a descriptor.
    pub fn send_raw(&self, bytes: &[u8], descriptor: Option<&OwnedFd>) {
        rt::block_on(self.socket.send_with_descriptor(bytes, descriptor)).unwrap();
    }

    /// Sends a message that asks for no reply, and a descriptor.
    pub fn send(&self, number: u32, body: &[u8], descriptor: Option<&OwnedFd>) {
        self.send_raw(&MessageHeader::message(number, false, body), descriptor);
    }

    /// The reply, as it is; `None`: the back end has closed.
    fn receive(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let (mut head, mut descriptors) = ([0; HEADER_BYTES], Vec::new());
        rt::block_on(async {
            let passed = PassedFiles::default();
            if self.socket.receive_with_descriptors(&mut head, &mut descriptors, &passed).await.unwrap() < HEADER_BYTES
            {
                return None;
            }
            let mut body = vec![0; u32::from_le_bytes(head[8..].try_into().unwrap()) as usize];
            let count = self.socket.receive_with_descriptors(&mut body, &mut descriptors, &passed).await.unwrap();
            assert_eq!(count, body.len());
            assert_eq!(head[4] & 7, 5, "version 1, and a reply");
            Some((body, descriptors))
        })
    }

    /// Asks for something that has a reply of its own.
    pub fn ask(&self, number: u32, body: &[u8]) -> Vec<u8> {
        self.send_raw(&MessageHeader::message(number, false, body), None);
        self.receive().expect("a reply").0
    }

    /// As [`FrontEnd::ask`], for a number.
    pub fn ask_number(&self, number: u32, body: &[u8]) -> u64 {
        u64::from_le_bytes(self.ask(number, body).try_into().unwrap())
    }

    /// Sends a message that needs no reply and asks for one: true when it was accepted.
    pub fn send_acked(&self, number: u32, body: &[u8], descriptor: Option<&OwnedFd>) -> bool {
        self.send_raw(&MessageHeader::message(number, true, body), descriptor);
        u64::from_le_bytes(self.receive().expect("an answer").0.try_into().unwrap()) == 0
    }

    /// True once the back end has closed the connection.
    pub fn is_closed(&self) -> bool {
        self.receive().is_none()
    }

    /// Agrees on those of `wanted` that are offered.
    pub fn negotiate(&mut self, wanted: u64) {
        self.features = self.ask_number(request::GET_FEATURES, &[]) & wanted;
        self.send_raw(&MessageHeader::message(request::SET_OWNER, false, &[]), None);
        if self.features & features::PROTOCOL_FEATURES != 0 {
            let protocol = self.ask_number(request::GET_PROTOCOL_FEATURES, &[]);
            self.send_raw(
                &MessageHeader::message(request::SET_PROTOCOL_FEATURES, false, &protocol.to_le_bytes()),
                None,
            );
        }
        self.send_raw(&MessageHeader::message(request::SET_FEATURES, false, &self.features.to_le_bytes()), None);
    }

    /// The guest's memory as a message has it.
    pub fn region(&self) -> Region {
        Region { guest_address: GUEST, len: MEMORY_BYTES, front_end_address: FRONT_END, file_offset: 0 }
    }

    /// Tells where the guest's memory is.
    pub fn share_memory(&self) {
        let mut body = vec![1, 0, 0, 0, 0, 0, 0, 0];
        body.extend(self.region().encode());
        self.send_raw(&MessageHeader::message(request::SET_MEM_TABLE, false, &body), Some(&self.guest.file));
    }

    /// Takes the guest's memory away; true when that was accepted.
    pub fn take_memory_away(&self) -> bool {
        self.send_acked(request::REM_MEM_REG, &[&[0; 8][..], &self.region().encode()].concat(), None)
    }

    fn pair(ring: u32, value: u32) -> Vec<u8> {
        [ring.to_le_bytes(), value.to_le_bytes()].concat()
    }

    /// Tells a number of a ring.
    pub fn tell_ring(&self, number: u32, ring: usize, value: u32) -> bool {
        self.send_acked(number, &Self::pair(ring as u32, value), None)
    }

    fn fd(counter: &EventCounter) -> OwnedFd {
        counter.as_fd().try_clone_to_owned().unwrap()
    }

    /// Passes the kick of a ring.
    pub fn set_kick(&self, ring: usize) -> bool {
        self.send_acked(request::SET_VRING_KICK, &(ring as u64).to_le_bytes(), Some(&Self::fd(&self.kick[ring])))
    }

    /// Passes the call of a ring.
    pub fn set_call(&self, ring: usize) -> bool {
        self.send_acked(request::SET_VRING_CALL, &(ring as u64).to_le_bytes(), Some(&Self::fd(&self.call[ring])))
    }

    /// Enables or disables a ring.
    pub fn enable(&self, ring: usize, on: bool) -> bool {
        self.tell_ring(request::SET_VRING_ENABLE, ring, u32::from(on))
    }

    /// Everything of a ring but kick and enable.
    pub fn set_up_ring(&self, ring: usize, base: u16) {
        let start = FRONT_END + RINGS + 0x1_0000 * ring as u64;
        let mut addresses = Self::pair(ring as u32, 0);
        for address in [start, start + 0x8000, start + 0x4000, 0] {
            addresses.extend(address.to_le_bytes());
        }
        assert!(self.tell_ring(request::SET_VRING_NUM, ring, RING_SIZE.into()));
        assert!(self.tell_ring(request::SET_VRING_BASE, ring, base.into()));
        assert!(self.send_acked(request::SET_VRING_ADDR, &addresses, None));
        assert!(self.send_acked(request::SET_VRING_ERR, &(ring as u64).to_le_bytes(), Some(&Self::fd(&self.error))));
        assert!(self.set_call(ring));
    }

    /// A ring that runs from `base` on.
    pub fn start_ring(&self, ring: usize, base: u16) {
        self.set_up_ring(ring, base);
        assert!(self.set_kick(ring));
        assert!(self.enable(ring, true));
    }

    /// Stops a ring; the index to go on from.
    pub fn stop_ring(&self, ring: usize) -> u16 {
        let reply = self.ask(request::GET_VRING_BASE, &Self::pair(ring as u32, 0));
        u16::from_le_bytes(reply[4..6].try_into().unwrap())
    }

    /// As [`FrontEnd::stop_ring`], without waiting for the answer.
    pub fn begin_to_stop_ring(&self, ring: usize) {
        self.send_raw(&MessageHeader::message(request::GET_VRING_BASE, false, &Self::pair(ring as u32, 0)), None);
    }

    /// The place of a ring in the guest's memory: its descriptors, 16 KiB further the available ring, 32 KiB further
    /// the used ring.
    pub fn place(ring: usize) -> usize {
        RINGS as usize + 0x1_0000 * ring
    }

    /// Writes a descriptor to a table.
    pub fn describe(&self, table: usize, index: u16, (address, len, flags, next): Descriptor) {
        let (memory, at) = (&self.guest.memory, table + 16 * usize::from(index));
        memory.write(at, &(GUEST + address).to_le_bytes());
        memory.write(at + 8, &len.to_le_bytes());
        memory.store(at + 12, flags);
        memory.store(at + 14, next);
    }

    /// Makes a chain available.
    pub fn offer(&mut self, ring: usize, head: u16) {
        let at = Self::place(ring) + 0x4000;
        let next = &mut self.guest.next[ring];
        self.guest.memory.store(at + 4 + 2 * usize::from(*next % RING_SIZE), head);
        *next = next.wrapping_add(1);
        self.guest.memory.store(at + 2, *next);
    }

    /// Kicks.
    pub fn kick(&self, ring: usize) {
        self.kick[ring].signal();
    }

    /// The index of the used ring.
    pub fn used(&self, ring: usize) -> u16 {
        self.guest.memory.load(Self::place(ring) + 0x8000 + 2)
    }

    /// Waits for the next chain that the device returns: its head and the number of written bytes.
    pub fn wait_used(&mut self, ring: usize) -> (u16, u32) {
        let end = Instant::now() + PATIENCE;
        while self.used(ring) == self.guest.seen[ring] {
            assert!(Instant::now() < end, "no request ends");
            std::thread::yield_now();
        }
        let at = Self::place(ring) + 0x8000 + 4 + 8 * usize::from(self.guest.seen[ring] % RING_SIZE);
        self.guest.seen[ring] = self.guest.seen[ring].wrapping_add(1);
        let mut entry = [0; 8];
        self.guest.memory.read(at, &mut entry);
        (u16::from_le_bytes([entry[0], entry[1]]), u32::from_le_bytes(entry[4..].try_into().unwrap()))
    }

    /// Where the data of the chain with this head lies, behind its header.
    pub fn data(head: u16) -> u64 {
        DATA + u64::from(head / 3) * 0x1_0000 + 0x100
    }

    /// Writes a request of three descriptors from `head` on: header, data, status.
    pub fn prepare(&self, ring: usize, head: u16, kind: u32, sector: u64, sent: &[u8], wanted: u32) {
        let at = Self::data(head);
        let memory = &self.guest.memory;
        memory.write(at as usize - 0x100, &kind.to_le_bytes());
        memory.write(at as usize - 0x100 + 8, &sector.to_le_bytes());
        memory.write(at as usize, sent);
        memory.write(at as usize - 1, &[0xff]);
        let table = Self::place(ring);
        let len = sent.len() as u32 + wanted;
        self.describe(table, head, (at - 0x100, 16, 1, if len > 0 { head + 1 } else { head + 2 }));
        self.describe(table, head + 1, (at, len, 1 | if wanted > 0 { 2 } else { 0 }, head + 2));
        self.describe(table, head + 2, (at - 1, 1, 2, 0));
    }

    /// The status of the request at a head.
    pub fn status(&self, head: u16) -> u8 {
        let mut status = [0];
        self.guest.memory.read(Self::data(head) as usize - 1, &mut status);
        status[0]
    }

    /// Bytes of the guest's memory.
    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.guest.memory.read(at as usize, &mut bytes);
        bytes
    }

    /// One request from its offer to its end: the status and the data.
    pub fn request(&mut self, kind: u32, sector: u64, sent: &[u8], wanted: u32) -> (u8, Vec<u8>) {
        self.prepare(0, 0, kind, sector, sent, wanted);
        self.offer(0, 0);
        self.kick(0);
        let (head, written) = self.wait_used(0);
        assert_eq!(head, 0);
        let status = self.status(0);
        assert_eq!(written, if status == 0 { wanted + 1 } else { 1 });
        (status, self.bytes(Self::data(0), wanted as usize))
    }

    /// A range of the config space.
    pub fn config(&self, offset: u32, len: u32) -> Vec<u8> {
        let reply = self.ask(request::GET_CONFIG, &config_reply(offset, 0, &vec![0; len as usize]));
        reply[12..].to_vec()
    }

    /// Asks for a region for requests in flight.
    pub fn notes(&self) -> (InflightPlace, OwnedFd) {
        let wish = InflightPlace { len: 0, offset: 0, queues: 2, ring_size: RING_SIZE };
        self.send_raw(&MessageHeader::message(request::GET_INFLIGHT_FD, false, &wish.encode(24)), None);
        let (body, mut descriptors) = self.receive().unwrap();
        let len = u64::from_le_bytes(body[..8].try_into().unwrap());
        let queues = u16::from_le_bytes([body[16], body[17]]);
        assert!(queues > 0 && len >= inflight::region_bytes(queues, RING_SIZE) as u64);
        (InflightPlace { len, queues, ..wish }, descriptors.pop().expect("a descriptor"))
    }

    /// Gives the back end a channel for messages of its own; returns the other end.
    pub fn back_end_channel(&self) -> Socket {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(self.send_acked(request::SET_BACKEND_REQ_FD, &[], Some(&theirs.into())));
        Socket::from_descriptor(ours.into())
    }

    /// The number of the next message on such a channel, which has no body and needs no reply.
    pub fn back_end_message(channel: &Socket) -> u32 {
        let mut message = [0xff; HEADER_BYTES];
        let (mut none, passed) = (Vec::new(), PassedFiles::default());
        rt::block_on(channel.receive_with_descriptors(&mut message, &mut none, &passed)).unwrap();
        assert_eq!(message[4..], [1, 0, 0, 0, 0, 0, 0, 0]);
        message[0].into()
    }

    /// Gives the region of an earlier back end.
    pub fn give_notes(&self, (place, file): &(InflightPlace, OwnedFd)) {
        assert!(self.send_acked(request::SET_INFLIGHT_FD, &place.encode(24), Some(file)));
    }
}
