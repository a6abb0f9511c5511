// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A driver of virtio-blk in one process with the clock: a thread for each queue keeps its requests of 4 KiB in flight. It sleeps
//! until the device calls, as a guest's driver does, and asks for calls and kicks by the event index.

use cowshed_storage::{EventCounter, SharedMemory, rt};
use cowshed_testkit::random::Random;
use cowshed_testkit::vhost::{DATA, FrontEnd, GUEST, RING_SIZE};
use cowshed_vhost_user_proto::features;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// Requests in flight of a queue: each takes two descriptors.
pub const DEPTH: u16 = RING_SIZE / 2;
const REQUEST_BYTES: u64 = 4096;
const SECTOR_BYTES: u64 = 512;
/// The offsets of the available and the used ring of a queue.
const AVAILABLE: usize = 0x4000;
const USED: usize = 0x8000;
/// The memory of a request: its header ends where its data begins, and its status comes behind the data.
const REQUEST_ROOM: usize = 0x1_0000;
const DATA_AT: usize = 0x1000;
const HEADER_AT: usize = DATA_AT - 16;
const STATUS_AT: usize = DATA_AT + REQUEST_BYTES as usize;

/// Requests on blocks in random order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Of blocks chosen at random.
    Read,
    /// Each block of the disk once at most, which ends the run.
    Write,
}

/// Loads the device at `socket` with `queues` (one or two) full queues for a time: requests, and requests a second.
pub fn drive(socket: &Path, disk_bytes: u64, kind: Kind, queues: usize, time: Duration) -> Result<(f64, f64), String> {
    let mut front_end = FrontEnd::connect(socket);
    // Without the features of flushing the device has no write cache, and each write goes to the disk.
    let cache = features::BLK_FLUSH | features::BLK_CONFIG_WCE;
    front_end
        .negotiate(features::VERSION_1 | features::PROTOCOL_FEATURES | features::EVENT_IDX | features::BLK_MQ | cache);
    if front_end.features & features::EVENT_IDX == 0 {
        return Err("the device has no event index".to_owned());
    }
    front_end.share_memory();
    for ring in 0..queues {
        front_end.start_ring(ring, 0);
    }
    let barrier = Barrier::new(queues);
    let (mut count, mut rate) = (0.0, 0.0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..queues)
            .map(|ring| {
                let mut queue = Queue::new(&front_end, ring, queues, disk_bytes, kind);
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let started = Instant::now();
                    queue.run(started + time).map(|count| (count as f64, started.elapsed().as_secs_f64()))
                })
            })
            .collect();
        for thread in threads {
            let (requests, seconds) = thread.join().map_err(|_| "a queue panicked".to_owned())??;
            count += requests;
            rate += requests / seconds;
        }
        Ok::<_, String>(())
    })?;
    for ring in 0..queues {
        front_end.stop_ring(ring);
    }
    Ok((count, rate))
}

/// One queue of the driver.
struct Queue {
    memory: SharedMemory,
    kick: EventCounter,
    call: EventCounter,
    ring: usize,
    /// The index of the available ring, and up to which one the device was kicked.
    next: u16,
    kicked: u16,
    /// The index of the used ring up to which the driver has looked.
    seen: u16,
    random: Random,
    kind: Kind,
    blocks: u64,
    /// Writes so far, with those of the other queues in between.
    turn: u64,
    queues: u64,
}

impl Queue {
    fn new(front_end: &FrontEnd, ring: usize, queues: usize, disk_bytes: u64, kind: Kind) -> Queue {
        let queue = Queue {
            memory: front_end.guest.memory.clone(),
            kick: front_end.kick[ring].clone(),
            call: front_end.call[ring].clone(),
            ring,
            next: 0,
            kicked: 0,
            seen: 0,
            random: Random::new(ring as u64),
            kind,
            blocks: disk_bytes / REQUEST_BYTES,
            turn: ring as u64,
            queues: queues as u64,
        };
        for slot in 0..DEPTH {
            queue.describe(slot);
        }
        queue
    }

    /// The offset of the memory of a request.
    fn room(&self, slot: u16) -> usize {
        DATA as usize + (self.ring * usize::from(DEPTH) + usize::from(slot)) * REQUEST_ROOM
    }

    /// The two descriptors of a request, which stay: one for the bytes that the device reads, one for those that it
    /// writes.
    fn describe(&self, slot: u16) {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        let room = self.room(slot);
        let data_bytes = REQUEST_BYTES as u32;
        let parts = match self.kind {
            Kind::Read => [(HEADER_AT, 16), (DATA_AT, data_bytes + 1)],
            Kind::Write => [(HEADER_AT, 16 + data_bytes), (STATUS_AT, 1)],
        };
        let flags = [NEXT, WRITE];
        for (part, (at, len)) in parts.into_iter().enumerate() {
            let index = 2 * slot + part as u16;
            let entry = FrontEnd::place(self.ring) + 16 * usize::from(index);
            self.memory.write(entry, &(GUEST + (room + at) as u64).to_le_bytes());
            self.memory.write(entry + 8, &len.to_le_bytes());
            self.memory.store(entry + 12, flags[part]);
            self.memory.store(entry + 14, if part == 0 { index + 1 } else { 0 });
        }
        if self.kind == Kind::Write {
            self.memory.write(room + DATA_AT, &[0x5a; REQUEST_BYTES as usize]);
        }
    }

    /// Makes a request of the next block available.
    fn offer(&mut self, slot: u16) {
        let block = match self.kind {
            Kind::Read => self.random.below(self.blocks),
            Kind::Write => {
                // An odd step reaches each of 2^n blocks.
                let block = self.turn.wrapping_mul(40_503) % self.blocks;
                self.turn += self.queues;
                block
            }
        };
        let header = self.room(slot) + HEADER_AT;
        self.memory.write(header, &u32::from(self.kind == Kind::Write).to_le_bytes());
        self.memory.write(header + 8, &(block * (REQUEST_BYTES / SECTOR_BYTES)).to_le_bytes());
        let place = FrontEnd::place(self.ring) + AVAILABLE;
        self.memory.store(place + 4 + 2 * usize::from(self.next % RING_SIZE), 2 * slot);
        self.next = self.next.wrapping_add(1);
    }

    /// Shows the device the available requests, and kicks it where it asks for that.
    fn publish(&mut self) {
        let place = FrontEnd::place(self.ring);
        self.memory.store(place + AVAILABLE + 2, self.next);
        fence(Ordering::SeqCst);
        let wanted = self.memory.load(place + USED + 4 + 8 * usize::from(RING_SIZE));
        if self.next.wrapping_sub(wanted).wrapping_sub(1) < self.next.wrapping_sub(self.kicked) {
            self.kick.signal();
        }
        self.kicked = self.next;
    }

    fn used(&self) -> u16 {
        self.memory.load(FrontEnd::place(self.ring) + USED + 2)
    }

    /// The slot of the next request that has ended.
    fn take(&mut self) -> Result<Option<u16>, String> {
        if self.used() == self.seen {
            return Ok(None);
        }
        let at = FrontEnd::place(self.ring) + USED + 4 + 8 * usize::from(self.seen % RING_SIZE);
        let mut head = [0; 2];
        self.memory.read(at, &mut head);
        self.seen = self.seen.wrapping_add(1);
        let slot = u16::from_le_bytes(head) / 2;
        let mut status = [0xff];
        self.memory.read(self.room(slot) + STATUS_AT, &mut status);
        if status[0] == 0 { Ok(Some(slot)) } else { Err(format!("a request ended with status {}", status[0])) }
    }

    /// Sleeps until a request has ended.
    fn sleep(&self) -> Result<(), String> {
        self.memory.store(FrontEnd::place(self.ring) + AVAILABLE + 4 + 2 * usize::from(RING_SIZE), self.seen);
        fence(Ordering::SeqCst);
        if self.used() == self.seen {
            rt::block_on(self.call.wait()).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Keeps the queue full until `end` or the last block to write, and then waits for the requests in flight. Returns the number of
    /// requests.
    fn run(&mut self, end: Instant) -> Result<u64, String> {
        (0..DEPTH).for_each(|slot| self.offer(slot));
        self.publish();
        let (mut count, mut in_flight) = (0, DEPTH);
        while in_flight > 0 {
            let goes_on = Instant::now() < end && (self.kind == Kind::Read || self.turn < self.blocks);
            let before = count;
            while let Some(slot) = self.take()? {
                count += 1;
                if goes_on {
                    self.offer(slot);
                } else {
                    in_flight -= 1;
                }
            }
            if count == before {
                self.sleep()?;
            } else if goes_on {
                self.publish();
            }
        }
        Ok(count)
    }
}
