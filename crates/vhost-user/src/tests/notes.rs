// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The note that outlives a back end: unflushed changes, and the guest's write cache.

use super::served::{Served, qcow2_image};
use crate::proto::inflight::region_bytes;
use crate::proto::message::{InflightPlace, config_reply, request};
use cowshed_image::stats::IoKind;
use cowshed_storage::SharedMemory;
use cowshed_storage::fault::{Event, Faults};
use cowshed_testkit::programs::tool;
use cowshed_testkit::vhost::{FrontEnd, RING_SIZE};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

const WRITE: u32 = 1;
const FLUSH: u32 = 4;
/// A sector in a cluster without data.
const NEW: u64 = 2048;
const UNFLUSHED: u16 = 1;
const SLOW: &str = "driver=qcow2,node-name=d,file.driver=blkdebug,file.image.driver=file,file.image.filename=";

type Notes = (InflightPlace, OwnedFd);

fn qcow2() -> Served {
    Served::made("driver=qcow2,node-name=d,file.driver=file,file.filename=", qcow2_image, |_| ())
}

/// Our note in a region.
fn note(notes: &Notes) -> SharedMemory {
    let at = region_bytes(notes.0.queues, RING_SIZE);
    SharedMemory::map(&notes.1, 0, notes.0.len).unwrap().part(at, 64)
}

fn flags(notes: &Notes) -> u16 {
    note(notes).load(2)
}

fn flush(driver: &mut FrontEnd) -> u8 {
    driver.request(FLUSH, 0, &[], 0).0
}

fn flushes(served: &Served) -> u64 {
    served.node.statistics().kind(IoKind::Flush).operations
}

fn switch(driver: &FrontEnd, on: u8) {
    assert!(driver.send_acked(request::SET_CONFIG, &config_reply(32, 0, &[on]), None));
}

/// Passes a new region, as front ends do after a reset of their guest.
fn reset(driver: &mut FrontEnd) -> Notes {
    driver.stop_ring(0);
    driver.guest.memory.write(FrontEnd::place(0), &[0; 0x1_0000]);
    (driver.guest.next[0], driver.guest.seen[0]) = (0, 0);
    let notes = driver.notes();
    driver.give_notes(&notes);
    driver.start_ring(0, 0);
    notes
}

fn wait_until_held(faults: &Faults, tag: &str) {
    let end = Instant::now() + Duration::from_secs(20);
    while !faults.held().iter().any(|held| held == tag) {
        assert!(Instant::now() < end, "nothing meets '{tag}'");
        std::thread::yield_now();
    }
}

#[test]
fn a_pause_or_reset_of_the_guest_loses_no_changes() {
    for resets in [false, true] {
        let served = qcow2();
        let mut notes = None;
        let mut driver = FrontEnd::resume(&served.path(), None, &mut notes);
        let mut notes = notes.unwrap();
        assert_eq!(driver.request(WRITE, NEW, &[1; 4096], 0).0, 0);
        if resets {
            notes = reset(&mut driver);
        } else {
            let base = driver.stop_ring(0);
            driver.give_notes(&notes);
            driver.start_ring(0, base);
        }
        assert_eq!(flags(&notes), UNFLUSHED, "they would die with the back end");
        assert_eq!((flush(&mut driver), flags(&notes)), (0, 0), "resets {resets}");
    }
}

#[test]
fn each_flush_fails_until_a_guest_that_knows_resets() {
    for way in ["nothing", "the region again", "a reset", "a reconnection"] {
        let served = qcow2();
        let mut notes = None;
        let mut driver = FrontEnd::resume(&served.path(), None, &mut notes);
        assert_eq!(driver.request(WRITE, NEW, &[1; 4096], 0).0, 0);
        let base = driver.stop_ring(0);
        // Another life has noted that.
        let mut region = notes.take().unwrap();
        note(&region).write(8, &[0x55; 8]);
        driver.give_notes(&region);
        driver.start_ring(0, base);
        match way {
            "the region again" => driver.give_notes(&region),
            "a reset" => region = reset(&mut driver),
            "a reconnection" => {
                let guest = driver.guest.clone();
                drop(driver);
                notes = Some(region);
                driver = FrontEnd::resume(&served.path(), Some(guest), &mut notes);
                region = notes.unwrap();
            }
            _ => {}
        }
        // Each of its users may have lost changes.
        let ends = [flush(&mut driver), flush(&mut driver), flush(&mut driver)];
        assert_eq!((ends, flags(&region) == 0), ([1, 1, 1], false), "{way}");
        let region = reset(&mut driver);
        assert_eq!((flush(&mut driver), flags(&region)), (0, 0), "{way}");
    }
}

/// The front end may come to its region late.
#[test]
fn changes_before_the_region_are_noted_in_it() {
    let served = qcow2();
    let mut driver = served.driver();
    assert_eq!(driver.request(WRITE, NEW, &[1; 4096], 0).0, 0);
    let notes = driver.notes();
    driver.give_notes(&notes);
    assert_eq!((flags(&notes), flush(&mut driver), flags(&notes)), (UNFLUSHED, 0, 0));
}

#[test]
fn a_write_that_ends_during_write_back_is_noted() {
    const HEAD: u64 = 0x30_0000;
    // The second part is written in place, so that nothing is left to write once the cycle has begun.
    let half_full = |image: &Path| {
        qcow2_image(image);
        tool("qemu-io", &["-f", "qcow2", "-c", "write -q 2M 1M", image.to_str().unwrap()]);
    };
    let served = Served::made(SLOW, half_full, |_| ());
    let faults = served.node.faults().unwrap();
    let event = |name: &str| Event::parse(name).unwrap();
    let mut notes = None;
    let mut driver = FrontEnd::resume(&served.path(), None, &mut notes);
    let notes = notes.unwrap();
    driver.start_ring(1, 0);
    // Two parts of 1 MiB, the first one in new clusters.
    faults.set_break(event("write_aio"), "first");
    driver.prepare(0, 0, WRITE, NEW, &[], 0);
    driver.describe(FrontEnd::place(0), 0, (FrontEnd::data(0) - 0x100, 16, 1, 1));
    driver.describe(FrontEnd::place(0), 1, (HEAD, 2 << 20, 1, 2));
    driver.offer(0, 0);
    driver.kick(0);
    wait_until_held(&faults, "first");
    faults.set_break(event("write_aio"), "second");
    faults.resume("first");
    wait_until_held(&faults, "second");
    assert!(served.node.holds_changes(), "the first part is mapped");
    // The other ring's flush writes the mapping, and is held before the entries.
    faults.set_break(event("refblock_update"), "cycle");
    driver.prepare(1, 30, FLUSH, 0, &[], 0);
    driver.offer(1, 30);
    driver.kick(1);
    wait_until_held(&faults, "cycle");
    faults.resume("second");
    driver.wait_used(0);
    let during = (driver.status(0), flags(&notes));
    faults.remove_all_breaks();
    assert_eq!(during, (0, UNFLUSHED), "the file has no entry of it");
    driver.wait_used(1);
    assert_eq!((driver.status(30), flush(&mut driver), flags(&notes)), (0, 0, 0));
}

#[test]
fn a_switched_write_cache_outlives_connection_and_back_end() {
    let mut served = qcow2();
    let mut notes = None;
    let mut driver = FrontEnd::resume(&served.path(), None, &mut notes);
    switch(&driver, 0);
    let life = |served: &mut Served, driver: FrontEnd, notes: &mut Option<Notes>| {
        let guest = driver.guest.clone();
        drop(driver);
        served.stop();
        served.start();
        let mut other = served.connect();
        other.negotiate(u64::MAX);
        assert_eq!(other.config(32, 1), [1], "another guest has its own");
        drop(other);
        FrontEnd::resume(&served.path(), Some(guest), notes)
    };
    drop(driver);
    // Front ends send it where it changes, and not to each connection.
    driver = FrontEnd::resume(&served.path(), None, &mut None);
    assert_eq!(driver.config(32, 1), [0], "the same back end");
    drop(driver);
    driver = FrontEnd::resume(&served.path(), None, &mut notes);
    driver = life(&mut served, driver, &mut notes);
    assert_eq!(driver.config(32, 1), [0], "the next back end");
    let before = flushes(&served);
    assert_eq!(driver.request(WRITE, NEW, &[1; 4096], 0).0, 0);
    assert_eq!((flushes(&served), flags(notes.as_ref().unwrap())), (before + 1, 0), "the write is durable");
    switch(&driver, 1);
    driver = life(&mut served, driver, &mut notes);
    assert_eq!(driver.config(32, 1), [1]);
    switch(&driver, 0);
    note(notes.as_ref().unwrap()).store(4, 2);
    driver.give_notes(notes.as_ref().unwrap());
    assert_eq!(driver.config(32, 1), [0], "what the front end has sent comes before what is noted");
}

#[test]
fn switching_the_cache_off_makes_earlier_writes_durable() {
    let served = Served::made(SLOW, qcow2_image, |_| ());
    let mut notes = None;
    let mut driver = FrontEnd::resume(&served.path(), None, &mut notes);
    let notes = notes.unwrap();
    assert_eq!((driver.request(WRITE, NEW, &[1; 4096], 0).0, flags(&notes)), (0, UNFLUSHED));
    let before = flushes(&served);
    switch(&driver, 0);
    assert_eq!((flushes(&served), flags(&notes)), (before + 1, 0));
    // A write in flight: it has begun with the cache, and ends without.
    switch(&driver, 1);
    let faults = served.node.faults().unwrap();
    faults.set_break(Event::parse("write_aio").unwrap(), "write");
    driver.prepare(0, 0, WRITE, 2 * NEW, &[2; 4096], 0);
    driver.offer(0, 0);
    driver.kick(0);
    wait_until_held(&faults, "write");
    switch(&driver, 0);
    let before = flushes(&served);
    faults.remove_all_breaks();
    driver.wait_used(0);
    assert_eq!((driver.status(0), flushes(&served), flags(&notes)), (0, before + 1, 0));
}
