// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The least possible vhost-user-blk server: one ring, one thread, and reads of a raw file that the kernel puts into guest memory. It
//! has no format, no statistics, no limits, no notes of requests in flight. It believes the driver, and knows its layout alone: one
//! descriptor for the header, one for data and status. So it shows the rate that a server in a process of its own can have.

use cowshed_storage::{
    CacheMode, EventCounter, File, Listener, OpenOptions, PassedFiles, SharedBufs, SharedMemory, Socket, SocketAddress,
    rt,
};
use cowshed_types::{Error, Result};
use cowshed_vhost_user_proto::message::{HEADER_BYTES, RingAddresses};
use cowshed_vhost_user_proto::{Malformed, Message, MessageHeader, Region, SECTOR_BYTES, features};
use futures_util::future::{Either, select};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::pin;
use std::process::Command;
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};
use std::task::{Context, Poll, Waker};

/// The option by which this program starts itself as that server; socket and file follow.
pub const SERVE: &str = "--serve-bare-vhost";
/// Behind socket and file: past the page cache.
const DIRECT: &str = "direct";
const DESCRIPTOR_BYTES: usize = 16;
const USED_ENTRY_BYTES: usize = 8;

/// The command line that starts it; with `direct` it goes past the page cache.
pub fn command(socket: &Path, file: &Path, direct: bool) -> std::result::Result<Command, String> {
    let own = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(own);
    command.arg(SERVE).arg(socket).arg(file).args(direct.then_some(DIRECT));
    Ok(command)
}

/// Serves a file until the process is ended: one front end after the other.
pub fn serve(socket: &str, file: &str, direct: bool) -> std::result::Result<(), String> {
    let serve = async {
        let cache = CacheMode { direct, no_flush: false };
        let file = File::open(Path::new(file), &OpenOptions { cache, ..OpenOptions::default() })?;
        let listeners = Listener::bind(&SocketAddress::Unix(socket.to_owned()))?;
        let listener = listeners.first().ok_or_else(|| Error::internal("no listener"))?;
        loop {
            let socket = listener.accept().await?;
            if let Err(error) = talk(&socket, &file).await {
                eprintln!("bare server: {error}");
            }
        }
    };
    let end: Result<()> = rt::block_on(serve);
    end.map_err(|error| error.to_string())
}

fn malformed(error: Malformed) -> Error {
    Error::invalid_argument(error.to_string())
}

fn missing() -> Error {
    Error::invalid_argument("a message is out of order, or without its descriptor")
}

/// The setup of the ring, message by message.
#[derive(Default)]
struct Setup {
    memory: Option<(Region, SharedMemory)>,
    size: u16,
    base: u16,
    addresses: Option<RingAddresses>,
    kick: Option<EventCounter>,
    call: Option<EventCounter>,
}

/// The ring's tasks.
struct Running {
    ring: Rc<Ring>,
    tasks: Vec<rt::JoinHandle<()>>,
}

async fn talk(socket: &Socket, file: &File) -> Result<()> {
    let (mut setup, mut running, passed) = (Setup::default(), None, PassedFiles::default());
    loop {
        let (mut head, mut descriptors) = ([0; HEADER_BYTES], Vec::new());
        if socket.receive_with_descriptors(&mut head, &mut descriptors, &passed).await? < HEADER_BYTES {
            return Ok(());
        }
        let header = MessageHeader::parse(&head).map_err(malformed)?;
        let mut body = vec![0; header.body_bytes as usize];
        socket.receive_with_descriptors(&mut body, &mut descriptors, &passed).await?;
        let message = Message::parse(&header, &body).map_err(malformed)?;
        let mut reply = take(&mut setup, &message, descriptors.pop())?;
        match message {
            Message::SetVringEnable { enable: true, .. } => running = Some(setup.start(file)?),
            Message::GetVringBase { ring } => {
                // The driver has no request in flight when it asks.
                let Some(Running { ring: served, tasks }) = running.take() else { return Err(missing()) };
                for task in tasks {
                    task.cancel().await;
                }
                reply = Some(u64::from(ring) | u64::from(served.next.get()) << 32);
            }
            _ => {}
        }
        let reply = reply.or_else(|| header.needs_reply.then_some(0));
        if let Some(reply) = reply {
            socket.send_with_descriptor(&header.reply(&reply.to_le_bytes()), None).await?;
        }
    }
}

/// Takes a message in; its own reply, where it has one.
fn take(setup: &mut Setup, message: &Message, descriptor: Option<OwnedFd>) -> Result<Option<u64>> {
    let counter = |descriptor: Option<OwnedFd>| descriptor.map(EventCounter::from_descriptor).transpose();
    match message {
        Message::GetFeatures => {
            return Ok(Some(features::VERSION_1 | features::PROTOCOL_FEATURES | features::EVENT_IDX));
        }
        Message::GetProtocolFeatures => return Ok(Some(features::protocol::REPLY_ACK)),
        Message::SetMemTable(regions) => {
            let (Some(region), Some(descriptor)) = (regions.first(), descriptor) else { return Err(missing()) };
            let memory = SharedMemory::map(descriptor, region.file_offset, region.len)?;
            setup.memory = Some((*region, memory));
        }
        Message::SetVringNum { size, .. } => setup.size = *size as u16,
        Message::SetVringBase { base, .. } => setup.base = *base as u16,
        Message::SetVringAddr { addresses, .. } => setup.addresses = Some(*addresses),
        Message::SetVringKick { .. } => setup.kick = counter(descriptor)?,
        Message::SetVringCall { .. } => setup.call = counter(descriptor)?,
        _ => {}
    }
    Ok(None)
}

impl Setup {
    fn start(&self, file: &File) -> Result<Running> {
        let (Some((region, memory)), Some(at)) = (self.memory.clone(), self.addresses) else { return Err(missing()) };
        let (Some(kick), Some(call)) = (self.kick.clone(), self.call.clone()) else { return Err(missing()) };
        let place = |address: u64| address.wrapping_sub(region.front_end_address) as usize;
        let ring = Rc::new(Ring {
            descriptors: place(at.descriptors),
            available: place(at.available),
            used: place(at.used),
            size: self.size,
            guest_address: region.guest_address,
            used_index: Cell::new(memory.load(place(at.used) + 2)),
            told: Cell::new(memory.load(place(at.used) + 2)),
            memory,
            next: Cell::new(self.base),
            idle: RefCell::default(),
            server: RefCell::new(None),
            file: file.clone(),
            kick,
            call,
        });
        let mut tasks = vec![rt::spawn(Rc::clone(&ring).serve())];
        tasks.extend((0..self.size / 2).map(|_| rt::spawn(Rc::clone(&ring).work())));
        Ok(Running { ring, tasks })
    }
}

/// The ring, for one task that looks after it and one for each request that may be in flight.
struct Ring {
    memory: SharedMemory,
    guest_address: u64,
    /// Offsets in the memory.
    descriptors: usize,
    available: usize,
    used: usize,
    size: u16,
    /// The index of the next chain to take.
    next: Cell<u16>,
    used_index: Cell<u16>,
    /// The used index when the driver was called last, or needed no call.
    told: Cell<u16>,
    /// Tasks without a request.
    idle: RefCell<Vec<Waker>>,
    /// The task that looks after the ring, while it waits.
    server: RefCell<Option<Waker>>,
    file: File,
    kick: EventCounter,
    call: EventCounter,
}

impl Ring {
    fn waiting(&self) -> u16 {
        self.memory.load(self.available + 2).wrapping_sub(self.next.get())
    }

    fn entries_end(&self) -> usize {
        4 + 2 * usize::from(self.size)
    }

    async fn serve(self: Rc<Self>) {
        let mut kicked = pin!(self.kick.wait());
        loop {
            self.call_if_due();
            let waiting = usize::from(self.waiting());
            let woken: Vec<Waker> = {
                let mut idle = self.idle.borrow_mut();
                let kept = idle.len().saturating_sub(waiting);
                idle.split_off(kept)
            };
            if !woken.is_empty() {
                woken.into_iter().for_each(Waker::wake);
                rt::yield_now().await;
                continue;
            }
            self.memory.store(self.used + 4 + USED_ENTRY_BYTES * usize::from(self.size), self.next.get());
            // The wish for a kick is seen before the index is read: else both sides could wait for each other.
            fence(Ordering::SeqCst);
            if self.waiting() > 0 && !self.idle.borrow().is_empty() {
                continue;
            }
            let told = self.told.get();
            let ended = poll_fn(|context| {
                *self.server.borrow_mut() = Some(context.waker().clone());
                if self.used_index.get() == told { Poll::Pending } else { Poll::Ready(()) }
            });
            if let Either::Left((result, _)) = select(&mut kicked, pin!(ended)).await {
                if let Err(error) = result {
                    eprintln!("bare server: {error}");
                    return;
                }
                kicked.set(self.kick.wait());
            }
        }
    }

    fn call_if_due(&self) {
        let (before, now) = (self.told.replace(self.used_index.get()), self.used_index.get());
        if before == now {
            return;
        }
        // The used index is seen before the driver's wish is read.
        fence(Ordering::SeqCst);
        let wanted = self.memory.load(self.available + self.entries_end());
        if now.wrapping_sub(wanted).wrapping_sub(1) < now.wrapping_sub(before) {
            self.call.signal();
        }
    }

    async fn work(self: Rc<Self>) {
        loop {
            let head = poll_fn(|context| self.take(context)).await;
            let descriptor = |index: u16| {
                let mut bytes = [0; DESCRIPTOR_BYTES];
                self.memory.read(self.descriptors + DESCRIPTOR_BYTES * usize::from(index), &mut bytes);
                let (address, rest) = bytes.split_first_chunk().unwrap_or((&[0; 8], &[]));
                let len = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
                let place = u64::from_le_bytes(*address).wrapping_sub(self.guest_address) as usize;
                (place, len, u16::from_le_bytes([rest[6], rest[7]]))
            };
            let (header, _, next) = descriptor(head);
            let (data, len, _) = descriptor(next);
            let mut sector = [0; 8];
            self.memory.read(header + 8, &mut sector);
            let mut bufs = SharedBufs::default();
            bufs.push(self.memory.part(data, len - 1));
            let (result, _) = self.file.read_shared_at(bufs, u64::from_le_bytes(sector) * SECTOR_BYTES).await;
            self.memory.write(data + len - 1, &[u8::from(result.is_err())]);
            self.give_back(head, len as u32);
        }
    }

    /// The head of the next chain.
    fn take(&self, context: &mut Context<'_>) -> Poll<u16> {
        if self.waiting() == 0 {
            self.idle.borrow_mut().push(context.waker().clone());
            return Poll::Pending;
        }
        let next = self.next.get();
        self.next.set(next.wrapping_add(1));
        Poll::Ready(self.memory.load(self.available + 4 + 2 * usize::from(next % self.size)))
    }

    fn give_back(&self, head: u16, written: u32) {
        let index = self.used_index.get();
        let at = self.used + 4 + USED_ENTRY_BYTES * usize::from(index % self.size);
        self.memory.write(at, &u32::from(head).to_le_bytes());
        self.memory.write(at + 4, &written.to_le_bytes());
        self.used_index.set(index.wrapping_add(1));
        self.memory.store(self.used + 2, index.wrapping_add(1));
        // One call for all that end in this round.
        let server = self.server.borrow_mut().take();
        server.into_iter().for_each(Waker::wake);
    }
}
