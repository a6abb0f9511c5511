// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults that other back ends had: lost kicks, threads that a busy ring keeps, memory and files that go in the midst of a request.

use super::served::{DISK_BYTES, Served};
use crate::proto::message::request;
use cowshed_storage::fault::{Event, Faults};
use cowshed_storage::{SharedMemory, rt};
use cowshed_testkit::vhost::{DATA, FRONT_END, FrontEnd, GUEST, MEMORY_BYTES, RING_SIZE};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

const READ: u32 = 0;
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
fn memory_that_goes_during_a_request_lasts_until_its_end() {
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
    let region = [&[0; 8][..], &driver.region().encode()].concat();
    assert!(driver.tell(request::REM_MEM_REG, &region, None), "the removal waits for nothing");
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

#[test]
fn memory_that_is_cut_off_fails_its_requests_alone() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let file: std::os::fd::OwnedFd = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, MEMORY_BYTES).unwrap();
    let region = crate::proto::Region {
        guest_address: GUEST + MEMORY_BYTES,
        front_end_address: FRONT_END + MEMORY_BYTES,
        ..driver.region()
    };
    assert!(driver.tell(request::ADD_MEM_REG, &[&[0; 8][..], &region.encode()].concat(), Some(&file)));
    let run = |driver: &mut FrontEnd, kind: u32| {
        driver.prepare(0, 0, kind, 8, &[], 0);
        let flags = if kind == READ { 1 | 2 } else { 1 };
        driver.describe(FrontEnd::place(0), 0, (FrontEnd::data(0) - 0x100, 16, 1, 1));
        driver.describe(FrontEnd::place(0), 1, (MEMORY_BYTES + 0x1_0000, 8192, flags, 2));
        driver.offer(0, 0);
        driver.kick(0);
        driver.wait_used(0);
        driver.status(0)
    };
    assert_eq!((run(&mut driver, 1), run(&mut driver, READ)), (0, 0));
    rustix::fs::ftruncate(&file, 4096).unwrap();
    assert_eq!((run(&mut driver, 1), run(&mut driver, READ)), (1, 1));
    assert_eq!(driver.request(READ, 8, &[], 512), (0, vec![0; 512]), "the ring goes on");
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
