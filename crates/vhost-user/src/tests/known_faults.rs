// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults that other back ends had: lost kicks, threads that a busy ring keeps, memory and files that go in the midst of a request.

use super::served::{DISK_BYTES, Served, qcow2_image};
use crate::proto::message::request;
use cowshed_storage::fault::{Event, Faults};
use cowshed_storage::{SharedMemory, rt};
use cowshed_testkit::vhost::{DATA, FRONT_END, FrontEnd, GUEST, MEMORY_BYTES, RING_SIZE};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

const READ: u32 = 0;
const WRITE: u32 = 1;
const WRITE_ZEROES: u32 = 13;
/// The file of the second region is cut to this many bytes.
const CUT_BYTES: u64 = 1 << 20;
/// Places in the second region: two that stay, and one that goes.
const THERE: u64 = 0x1_0000;
const SEGMENT: u64 = 0x2_0000;
const GONE: u64 = 0x20_0000;
const GET_ID: u32 = 8;
const ID_BYTES: u32 = 20;
const BLKDEBUG: &str = "driver=raw,node-name=d,file.driver=blkdebug,file.image.driver=file,file.image.filename=";

/// Holds the next read of the disk until the break is removed.
fn hold_read(served: &Served) -> Arc<Faults> {
    let faults = served.node.faults().unwrap();
    faults.set_break(Event::parse("read_aio").unwrap(), "held");
    faults
}

fn wait_until_held(faults: &Faults) {
    while faults.held().is_empty() {
        std::thread::yield_now();
    }
}

/// A front end without event indexes, with a read in flight that is held.
fn with_held_read(served: &Served) -> (FrontEnd, Arc<Faults>) {
    let mut driver = served.connect();
    driver.negotiate(!crate::proto::features::EVENT_IDX);
    driver.share_memory();
    driver.start_ring(0, 0);
    let faults = hold_read(served);
    driver.prepare(0, 0, READ, 0, &[], 512);
    driver.offer(0, 0);
    driver.kick(0);
    wait_until_held(&faults);
    (driver, faults)
}

/// The device writes the wish for a kick and looks at the ring again. Without a barrier between the two a chain waits for ever.
#[test]
fn no_chain_is_lost_between_a_kick_and_its_wish() {
    const REQUESTS: u32 = 20_000;
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let wish = FrontEnd::place(0) + 0x8000 + 4 + 8 * usize::from(RING_SIZE);
    let mut kicks = 0;
    for _ in 0..REQUESTS {
        driver.prepare(0, 0, GET_ID, 0, &[], ID_BYTES);
        let before = driver.guest.next[0];
        driver.offer(0, 0);
        fence(Ordering::SeqCst);
        if driver.guest.memory.load(wish) == before {
            driver.kick(0);
            kicks += 1;
        }
        driver.wait_used(0);
    }
    assert!(kicks > 0 && driver.status(0) == 0);
}

/// Makes each chain available again that the device gives back, until it is told to end.
fn flood(memory: &SharedMemory, mut next: u16, kick: &cowshed_storage::EventCounter, ends: &AtomicBool) {
    let at = FrontEnd::place(0);
    let mut seen = 0;
    while !ends.load(Ordering::Relaxed) {
        let used = memory.load(at + 0x8000 + 2);
        while seen != used {
            let head = memory.load(at + 0x8000 + 4 + 8 * usize::from(seen % RING_SIZE));
            memory.store(at + 0x4000 + 4 + 2 * usize::from(next % RING_SIZE), head);
            next = next.wrapping_add(1);
            memory.store(at + 0x4000 + 2, next);
            seen = seen.wrapping_add(1);
        }
        kick.signal();
    }
}

#[test]
fn a_ring_that_never_empties_keeps_no_thread() {
    let served = Served::new(|config| config.threads = 1);
    let mut driver = served.driver();
    driver.start_ring(1, 0);
    for head in (0..48).step_by(3) {
        driver.prepare(0, head, GET_ID, 0, &[], ID_BYTES);
        driver.offer(0, head);
    }
    let ends = AtomicBool::new(false);
    let (memory, kick, next) = (driver.guest.memory.clone(), driver.kick[0].clone(), driver.guest.next[0]);
    std::thread::scope(|scope| {
        scope.spawn(|| flood(&memory, next, &kick, &ends));
        while driver.used(0) < 1000 {
            std::thread::yield_now();
        }
        // The other ring of the thread has its turns.
        driver.prepare(1, 51, READ, 0, &[], 512);
        driver.offer(1, 51);
        driver.kick(1);
        assert_eq!((driver.wait_used(1).0, driver.status(51)), (51, 0));
        driver.stop_ring(0);
        let stopped = driver.used(0);
        // Time in which a ring that still runs would go on.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(driver.used(0), stopped);
        ends.store(true, Ordering::Relaxed);
    });
}

#[test]
fn stopping_a_ring_waits_for_its_requests() {
    let served = Served::on(BLKDEBUG, |_| ());
    let mut driver = served.driver();
    let faults = hold_read(&served);
    driver.prepare(0, 0, READ, 0, &[], 512);
    driver.offer(0, 0);
    driver.kick(0);
    wait_until_held(&faults);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Time for an answer that comes too early.
            std::thread::sleep(Duration::from_millis(100));
            faults.remove_all_breaks();
        });
        assert_eq!(driver.stop_ring(0), 1);
        assert_eq!((driver.used(0), driver.status(0)), (1, 0), "given back before the ring has stopped");
    });
}

#[test]
fn a_full_counter_that_blocks_keeps_no_drain_waiting() {
    let served = Served::on(BLKDEBUG, |_| ());
    let (mut driver, faults) = with_held_read(&served);
    // The end of another request blocks the thread, which has this one in flight.
    let call = driver.call[0].clone();
    rt::block_on(call.wait()).unwrap();
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    driver.prepare(0, 3, GET_ID, 0, &[], ID_BYTES);
    driver.offer(0, 3);
    driver.kick(0);
    driver.wait_used(0);
    faults.remove_all_breaks();
    let drained = rt::block_on(rt::within(Duration::from_secs(20), served.attachment.drain()));
    assert!(drained.is_some(), "the drain waits for the front end");
    drop(drained);
    driver.wait_used(0);
    driver.offer(0, 3);
    driver.kick(0);
    assert_eq!((driver.stop_ring(0), driver.used(0)), (2, 2), "the ring takes no more");
    drop(driver);
    assert_eq!(served.driver().request(READ, 0, &[], 512).0, 0);
}

/// The thread waits by a counter that the front end has replaced. A new one is signalled by that thread alone.
#[test]
fn replaced_counter_that_blocks_keeps_no_drain_waiting() {
    let served = Served::on(BLKDEBUG, |_| ());
    let (mut driver, faults) = with_held_read(&served);
    let full = |counter: &cowshed_storage::EventCounter| {
        rustix::fs::fcntl_setfl(counter, rustix::fs::OFlags::NONBLOCK).unwrap();
        counter.take();
        rustix::fs::fcntl_setfl(counter, rustix::fs::OFlags::empty()).unwrap();
        rustix::io::write(counter, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    };
    let call = driver.call[0].clone();
    full(&call);
    driver.prepare(0, 3, GET_ID, 0, &[], ID_BYTES);
    driver.offer(0, 3);
    driver.kick(0);
    driver.wait_used(0);
    for _ in 0..3 {
        let other = cowshed_storage::EventCounter::new().unwrap();
        full(&other);
        driver.call[0] = other;
        assert!(driver.set_call(0), "the session goes on");
    }
    faults.remove_all_breaks();
    let drained = rt::block_on(rt::within(Duration::from_secs(20), served.attachment.drain()));
    assert!(drained.is_some(), "the drain waits for the front end");
    drop(drained);
    drop(driver);
    assert_eq!(served.driver().request(READ, 0, &[], 512).0, 0);
}

#[test]
fn memory_that_goes_before_a_transfer_lasts_until_its_end() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    // The request has begun, and waits for the disk.
    let drained = rt::block_on(served.attachment.drain());
    driver.prepare(0, 0, READ, 0, &[], 4096);
    driver.guest.memory.write(FrontEnd::data(0) as usize, &[0xee; 4096]);
    driver.offer(0, 0);
    driver.kick(0);
    let wish = FrontEnd::place(0) + 0x8000 + 4 + 8 * usize::from(RING_SIZE);
    while driver.guest.memory.load(wish) == 0 {
        std::thread::yield_now();
    }
    assert!(driver.take_memory_away(), "the removal waits for nothing");
    drop(drained);
    driver.wait_used(0);
    assert_eq!((driver.status(0), driver.bytes(FrontEnd::data(0), 4096)), (0, vec![0; 4096]));
    // The next chain is nowhere.
    driver.offer(0, 0);
    driver.kick(0);
    rt::block_on(driver.error.wait()).unwrap();
    driver.stop_ring(0);
    drop(driver);
    assert_eq!(served.driver().request(READ, 0, &[], 512).0, 0);
}

/// A second region behind the guest's memory, in a file that the test can shorten.
struct More {
    file: std::os::fd::OwnedFd,
    memory: SharedMemory,
}

impl More {
    fn of(driver: &FrontEnd, file: std::os::fd::OwnedFd) -> More {
        rustix::fs::ftruncate(&file, MEMORY_BYTES).unwrap();
        let region = crate::proto::Region {
            guest_address: GUEST + MEMORY_BYTES,
            front_end_address: FRONT_END + MEMORY_BYTES,
            ..driver.region()
        };
        assert!(driver.send_acked(request::ADD_MEM_REG, &[&[0; 8][..], &region.encode()].concat(), Some(&file)));
        let memory = SharedMemory::map(&file, 0, MEMORY_BYTES).unwrap();
        More { file, memory }
    }

    fn in_memory(driver: &FrontEnd) -> More {
        Self::of(driver, rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    }

    fn cut(&self) {
        rustix::fs::ftruncate(&self.file, CUT_BYTES).unwrap();
    }

    /// One request whose data lies in the region: its status.
    fn run(&self, driver: &mut FrontEnd, kind: u32, sector: u64, (at, len): (u64, u32)) -> u8 {
        driver.prepare(0, 0, kind, sector, &[], 0);
        let flags = if kind == READ { 1 | 2 } else { 1 };
        driver.describe(FrontEnd::place(0), 0, (FrontEnd::data(0) - 0x100, 16, 1, 1));
        driver.describe(FrontEnd::place(0), 1, (MEMORY_BYTES + at, len, flags, 2));
        driver.offer(0, 0);
        driver.kick(0);
        driver.wait_used(0);
        driver.status(0)
    }
}

#[test]
fn memory_that_is_cut_off_fails_its_requests_alone() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let more = More::in_memory(&driver);
    let run = |driver: &mut FrontEnd, kind: u32| more.run(driver, kind, 8, (GONE, 8192));
    assert_eq!((run(&mut driver, WRITE), run(&mut driver, READ)), (0, 0));
    more.cut();
    assert_eq!((run(&mut driver, WRITE), run(&mut driver, READ)), (1, 1));
    assert_eq!(driver.request(READ, 8, &[], 512), (0, vec![0; 512]), "the ring goes on");
}

/// The region of a lost page counts as lost. A request must not take what the daemon has put there for the guest's bytes.
fn lost_memory_changes_nothing(what: &str, served: &Served, first: u32, file: Option<std::os::fd::OwnedFd>) {
    let mut driver = served.driver();
    let more = match file {
        Some(file) => More::of(&driver, file),
        None => More::in_memory(&driver),
    };
    let zeroes = [&0u64.to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
    for (at, value) in [(THERE, 5), (GONE, 6)] {
        more.memory.write(at as usize, &[value; 4096]);
    }
    assert_eq!(more.run(&mut driver, WRITE, 0, (THERE, 4096)), 0, "{what}");
    more.memory.write(THERE as usize, &[7; 4096]);
    more.memory.write(SEGMENT as usize, &zeroes);
    more.cut();
    // The range has no data yet, so the bytes have a copy in the daemon.
    assert_eq!(more.run(&mut driver, first, 8192, (GONE, 4096)), 1, "{what}: the page is gone");
    let then = [WRITE, READ].map(|kind| more.run(&mut driver, kind, 0, (THERE, 4096)));
    assert_eq!(then, [1, 1], "{what}: the region has lost a page");
    assert_eq!(more.run(&mut driver, WRITE, 16384, (THERE, 4096)), 1, "{what}: a copy of the region");
    assert_eq!(more.run(&mut driver, WRITE_ZEROES, 0, (SEGMENT, 16)), 1, "{what}: a range in the region");
    assert!(served.disk(0, 4096) == [5; 4096], "{what}: the disk has changed");
    assert!(served.disk(8192 * 512, 4096) == [0; 4096] && served.disk(16384 * 512, 4096) == [0; 4096], "{what}");
    assert_eq!(driver.request(READ, 0, &[], 512), (0, vec![5; 512]), "{what}: the ring goes on");
    let kinds = served.attachment.statistics().kinds;
    assert!(kinds.iter().all(|kind| kind.failed == 0), "{what}: counted as a fault of the disk");
}

#[test]
fn a_lost_page_fails_all_requests_of_its_region() {
    let qcow2 = || Served::made("driver=qcow2,node-name=d,file.driver=file,file.filename=", qcow2_image, |_| ());
    for first in [WRITE, READ] {
        lost_memory_changes_nothing(&format!("qcow2, {first} first"), &qcow2(), first, None);
        lost_memory_changes_nothing(&format!("raw, {first} first"), &Served::new(|_| ()), first, None);
        lost_memory_changes_nothing(&format!("blkdebug, {first} first"), &Served::on(BLKDEBUG, |_| ()), first, None);
        let direct = "driver=raw,node-name=d,cache.direct=on,file.driver=file,file.cache.direct=on,file.filename=";
        lost_memory_changes_nothing(&format!("direct, {first} first"), &Served::on(direct, |_| ()), first, None);
        let served = qcow2();
        let path = served.folder.path().join("memory");
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
        lost_memory_changes_nothing(&format!("copies, {first} first"), &served, first, Some(file.into()));
    }
}

#[test]
fn config_is_read_when_the_image_has_gone() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let image = served.folder.path().join("disk.raw");
    std::fs::File::options().write(true).open(&image).unwrap().set_len(0).unwrap();
    std::fs::remove_file(&image).unwrap();
    assert_eq!(driver.config(0, 8), (DISK_BYTES / 512).to_le_bytes());
    assert_eq!(driver.config(0, 60).len(), 60);
    assert_eq!(driver.request(READ, 0, &[], 512).1, [0; 512]);
}

#[test]
fn servers_stop_while_their_front_ends_leave() {
    let mut served = Served::new(|_| ());
    for round in 0..30u64 {
        let mut driver = served.driver();
        for head in (0..48).step_by(3) {
            driver.prepare(0, head, 1, u64::from(head), &[1; 512], 0);
            driver.offer(0, head);
        }
        driver.kick(0);
        let waiting = served.connect();
        let leaves = std::thread::spawn(move || {
            // Each round leaves at another moment of the stop.
            std::thread::sleep(Duration::from_micros(round * 20));
            drop((driver, waiting));
        });
        served.stop();
        leaves.join().unwrap();
        served.start();
    }
    assert_eq!(served.driver().request(READ, 0, &[], 512).0, 0);
}

/// Writes a chain of data in pieces of odd lengths, which begin at odd addresses; returns the pieces' places.
fn describe_pieces(driver: &FrontEnd, kind: u32, lengths: &[u32]) -> Vec<(u64, u32)> {
    let (table, header, flags) = (FrontEnd::place(0), DATA, if kind == READ { 1 | 2 } else { 1 });
    driver.guest.memory.write(header as usize, &[&kind.to_le_bytes()[..], &[0; 4], &8u64.to_le_bytes()].concat());
    // The header has two pieces.
    driver.describe(table, 0, (header, 7, 1, 1));
    driver.describe(table, 1, (header + 7, 9, 1, 2));
    let mut pieces = Vec::new();
    for (number, &len) in lengths.iter().enumerate() {
        let place = DATA + 0x1001 + number as u64 * 0x1_1003;
        let index = number as u16 + 2;
        driver.describe(table, index, (place, len, flags, index + 1));
        pieces.push((place, len));
    }
    driver.describe(table, lengths.len() as u16 + 2, (header + 100, 1, 2, 0));
    pieces
}

#[test]
fn data_of_odd_pieces_goes_both_ways() {
    let lengths = [1, 510, 4096, 3000, 585, 4096, 8192, 0x3001, 511, 4096];
    let total: u32 = lengths.iter().sum();
    let lengths = [&lengths[..], &[total.next_multiple_of(512) - total]].concat();
    let total = total.next_multiple_of(512) as usize;
    let bytes: Vec<u8> = (0..total).map(|number| (number % 251) as u8 + 1).collect();
    for direct in ["", "cache.direct=on,"] {
        let options = format!(
            "driver=raw,node-name=d,{direct}file.driver=file,{}file.filename=",
            direct.replace("cache", "file.cache")
        );
        let served = Served::on(&options, |_| ());
        let mut driver = served.driver();
        let end = |driver: &mut FrontEnd| {
            driver.offer(0, 0);
            driver.kick(0);
            driver.wait_used(0);
            assert_eq!(driver.bytes(DATA + 100, 1), [0]);
        };
        let mut at = 0;
        for (place, len) in describe_pieces(&driver, 1, &lengths) {
            driver.guest.memory.write(place as usize, &bytes[at..at + len as usize]);
            at += len as usize;
        }
        end(&mut driver);
        assert!(served.disk(8 * 512, total) == bytes && served.disk(7 * 512, 512) == [0; 512]);
        let pieces = describe_pieces(&driver, READ, &lengths);
        for &(place, len) in &pieces {
            driver.guest.memory.write(place as usize - 1, &vec![0xee; len as usize + 2]);
        }
        end(&mut driver);
        let mut read = Vec::new();
        for (place, len) in pieces {
            let around = driver.bytes(place - 1, len as usize + 2);
            assert!(around[0] == 0xee && around[len as usize + 1] == 0xee, "written beside a piece");
            read.extend_from_slice(&around[1..=len as usize]);
        }
        assert!(read == bytes);
    }
}

/// Each descriptor lies across the border of two regions: there are more pieces than one system call takes.
#[test]
fn more_pieces_than_one_system_call_takes_go_both_ways() {
    const COUNT: u16 = 900;
    const HALF: u64 = 256;
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let more = More::in_memory(&driver);
    let memory = driver.guest.memory.clone();
    let (table, header, status) = (DATA + 0x1_0000, DATA, DATA + 0x100);
    let len = usize::from(COUNT) * 2 * HALF as usize;
    let mut run = |kind: u32, flags: u16| {
        memory.write(header as usize, &[&kind.to_le_bytes()[..], &[0; 4], &8u64.to_le_bytes()].concat());
        driver.describe(table as usize, 0, (header, 16, 1, 1));
        for index in 1..=COUNT {
            let piece = (MEMORY_BYTES - HALF, 2 * HALF as u32, 1 | flags, index + 1);
            driver.describe(table as usize, index, piece);
        }
        driver.describe(table as usize, COUNT + 1, (status, 1, 2, 0));
        driver.describe(FrontEnd::place(0), 0, (table, (u32::from(COUNT) + 2) * 16, 4, 0));
        driver.offer(0, 0);
        driver.kick(0);
        driver.wait_used(0);
        assert_eq!(driver.bytes(status, 1), [0]);
    };
    let bytes: Vec<u8> = (0..2 * HALF).map(|at| at as u8 ^ (at >> 8) as u8 | 1).collect();
    let halves = |fill: &[u8]| {
        memory.write((MEMORY_BYTES - HALF) as usize, &fill[..HALF as usize]);
        more.memory.write(0, &fill[HALF as usize..]);
    };
    halves(&bytes);
    run(WRITE, 0);
    assert!(served.disk(8 * 512, len) == bytes.repeat(COUNT.into()));
    halves(&[0xee; 2 * HALF as usize]);
    run(READ, 2);
    let mut read = vec![0; 2 * HALF as usize];
    let (left, right) = read.split_at_mut(HALF as usize);
    memory.read((MEMORY_BYTES - HALF) as usize, left);
    more.memory.read(0, right);
    assert!(read == bytes);
}
