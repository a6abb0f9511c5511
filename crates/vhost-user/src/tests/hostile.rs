// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Front ends and guests that break the rules. None of them ends the server, reaches past its memory or keeps the next one out.

use super::served::Served;
use crate::proto::MessageHeader;
use crate::proto::message::request;
use cowshed_storage::rt;
use cowshed_testkit::vhost::{DATA, FRONT_END, FrontEnd, GUEST, MEMORY_BYTES, RING_SIZE};

/// A sound front end is served.
fn assert_serves(served: &Served) {
    assert_eq!(served.driver().request(0, 0, &[], 512), (0, vec![0; 512]));
}

#[test]
fn impossible_requests_fail_and_the_ring_goes_on() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let table = FrontEnd::place(0);
    let data = FrontEnd::data(0);
    let wrong = [
        ("data outside of memory", (MEMORY_BYTES, 512, 1 | 2, 2)),
        ("data past the end of memory", (MEMORY_BYTES - 511, 512, 1 | 2, 2)),
        ("data at the last address", (u64::MAX - GUEST - 100, 512, 1 | 2, 2)),
        ("half a sector", (data, 100, 1 | 2, 2)),
        ("the wrong direction", (data, 512, 1, 2)),
    ];
    for (what, descriptor) in wrong {
        driver.prepare(0, 0, 0, 0, &[], 512);
        driver.describe(table, 1, descriptor);
        driver.offer(0, 0);
        driver.kick(0);
        driver.wait_used(0);
        let expected = u8::from(what != "the wrong direction");
        assert_eq!(driver.status(0), expected, "{what}");
    }
    assert_eq!(driver.request(0, 0, &[], 512), (0, vec![0; 512]));
}

#[test]
fn drivers_that_break_the_ring_hear_of_it_and_only_they() {
    type Break = fn(&mut FrontEnd);
    let breaks: [(&str, Break); 6] = [
        ("a loop without a status", |driver| {
            driver.describe(FrontEnd::place(0), 0, (FrontEnd::data(0), 16, 1, 0));
            driver.offer(0, 0);
        }),
        ("no status at all", |driver| {
            driver.describe(FrontEnd::place(0), 0, (FrontEnd::data(0), 16, 0, 0));
            driver.offer(0, 0);
        }),
        ("a head outside of the table", |driver| driver.offer(0, RING_SIZE)),
        ("more chains than places", |driver| {
            driver.guest.memory.store(FrontEnd::place(0) + 0x4000 + 2, RING_SIZE + 5);
        }),
        ("an indirect table in a table", |driver| {
            let at = FrontEnd::data(0);
            driver.describe(FrontEnd::place(0), 0, (at, 32, 4, 0));
            driver.describe(at as usize, 0, (at, 32, 4, 0));
            driver.offer(0, 0);
        }),
        ("an indirect table outside of memory", |driver| {
            driver.describe(FrontEnd::place(0), 0, (MEMORY_BYTES - 16, 32, 4, 0));
            driver.offer(0, 0);
        }),
    ];
    let served = Served::new(|_| ());
    for (what, break_it) in breaks {
        let mut driver = served.driver();
        driver.start_ring(1, 0);
        assert_eq!(driver.request(0, 0, &[], 512).0, 0);
        break_it(&mut driver);
        driver.kick(0);
        rt::block_on(driver.error.wait()).unwrap();
        // The other ring goes on, and this one can be stopped.
        driver.prepare(1, 3, 0, 0, &[], 512);
        driver.offer(1, 3);
        driver.kick(1);
        assert_eq!((driver.wait_used(1).0, driver.status(3)), (3, 0), "{what}");
        driver.stop_ring(0);
        drop(driver);
        assert_serves(&served);
    }
}

#[test]
fn messages_that_break_the_rules_are_refused() {
    let served = Served::new(|_| ());
    let driver = served.driver();
    assert!(!driver.tell_ring(request::SET_VRING_NUM, 2, 16), "there is no such ring");
    assert!(!driver.send_acked(request::SET_VRING_KICK, &0u64.to_le_bytes(), None), "no descriptor");
    assert!(!driver.send_acked(request::SET_VRING_KICK, &0u64.to_le_bytes(), Some(&driver.guest.file)), "no eventfd");
    assert!(!driver.send_acked(request::SET_FEATURES, &(1u64 << 34).to_le_bytes(), None), "not offered");
    assert!(!driver.send_acked(6, &[0; 16], Some(&driver.guest.file)), "SET_LOG_BASE was not agreed on");
    let mut region = vec![0; 8];
    region.extend(driver.region().encode());
    assert!(!driver.send_acked(request::ADD_MEM_REG, &region, Some(&driver.guest.file)), "it is there already");
    assert!(!driver.send_acked(request::ADD_MEM_REG, &region, None), "no descriptor");
    assert!(driver.send_acked(request::REM_MEM_REG, &region, Some(&driver.guest.file)), "a descriptor too many");
    assert!(!driver.send_acked(request::REM_MEM_REG, &region, None), "it is gone");
    assert!(driver.send_acked(request::ADD_MEM_REG, &region, Some(&driver.guest.file)));
    let long = crate::proto::Region { len: MEMORY_BYTES + 1, guest_address: 0, ..driver.region() };
    let mut region = vec![0; 8];
    region.extend(long.encode());
    assert!(!driver.send_acked(request::ADD_MEM_REG, &region, Some(&driver.guest.file)), "longer than its file");
    drop(driver);
    assert_serves(&served);
}

#[test]
fn what_is_no_message_ends_the_connection_and_nothing_else() {
    let served = Served::new(|_| ());
    let table = MessageHeader::message(request::SET_MEM_TABLE, false, &[200, 0, 0, 0, 0, 0, 0, 0]);
    for bytes in [&[0xff; 12][..], &[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1][..], &table] {
        let front_end = served.connect();
        front_end.send_raw(bytes, None);
        assert!(front_end.is_closed());
    }
    let half = served.connect();
    half.send_raw(&[1, 0, 0], None);
    drop(half);
    assert_serves(&served);
}

#[test]
fn memory_whose_file_is_shortened_ends_nothing() {
    let served = Served::new(|_| ());
    // Without a seal, as front ends with a file of their own have it.
    let path = served.folder.path().join("memory");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(MEMORY_BYTES).unwrap();
    let mut front_end = served.connect();
    front_end.guest.memory = cowshed_storage::SharedMemory::map(&file, 0, MEMORY_BYTES).unwrap();
    front_end.guest.file = std::sync::Arc::new(file.try_clone().unwrap().into());
    front_end.negotiate(u64::MAX);
    front_end.share_memory();
    front_end.start_ring(0, 0);
    assert_eq!(front_end.request(0, 0, &[], 512).0, 0);
    file.set_len(4096).unwrap();
    for _ in 0..3 {
        front_end.kick(0);
    }
    front_end.stop_ring(0);
    drop(front_end);
    assert_serves(&served);
}

#[test]
fn a_second_front_end_is_sent_away() {
    let served = Served::new(|_| ());
    let mut first = served.driver();
    assert!(served.connect().is_closed());
    assert_eq!(first.request(0, 0, &[], 512).0, 0);
}

#[test]
fn requests_of_an_earlier_life_keep_to_ring_memory() {
    const BLKDEBUG: &str = "driver=raw,node-name=d,file.driver=blkdebug,file.image.driver=file,file.image.filename=";
    const READ_BYTES: u32 = 4 << 20;
    let served = Served::on(BLKDEBUG, |_| ());
    let mut driver = served.connect();
    driver.negotiate(u64::MAX);
    driver.share_memory();
    let notes = driver.notes();
    let region = cowshed_storage::SharedMemory::map(&notes.1, 0, notes.0.len).unwrap();
    driver.give_notes(&notes);
    // All chains are one list of descriptors, whose data is as long as the memory allows.
    let (header, list) = (FrontEnd::data(0), FrontEnd::data(3));
    driver.guest.memory.write(header as usize, &[0; 16]);
    driver.describe(list as usize, 0, (header, 16, 1, 1));
    driver.describe(list as usize, 1, (0x30_0000, READ_BYTES, 1 | 2, 2));
    driver.describe(list as usize, 2, (header + 16, 1, 2, 0));
    let faults = served.node.faults().unwrap();
    for head in 0..RING_SIZE {
        driver.describe(FrontEnd::place(0), head, (list, 48, 4, 0));
        driver.offer(0, head);
        let at = 16 + 16 * usize::from(head);
        region.write(at + 8, &u64::from(head + 1).to_le_bytes());
        region.write(at, &[1]);
        faults.set_break(cowshed_storage::fault::Event::parse("read_aio").unwrap(), "held");
    }
    driver.start_ring(0, 0);
    while faults.held().is_empty() {
        std::thread::yield_now();
    }
    // No further request begins, however long this takes.
    std::thread::sleep(std::time::Duration::from_millis(200));
    let begun = faults.held().len();
    assert!((2..=32).contains(&begun), "{begun} requests of 1 MiB each have begun");
    faults.remove_all_breaks();
    for _ in 0..RING_SIZE {
        driver.wait_used(0);
    }
    assert_eq!(driver.bytes(header + 16, 1), [0]);
    drop(driver);
    assert_serves(&served);
}

#[test]
fn each_request_costs_the_memory_of_its_lists() {
    let (memory, _file) = cowshed_storage::SharedMemory::create("guest", 4096).unwrap();
    let mut guest = crate::memory::GuestMemory::default();
    for address in 0..100 {
        let region =
            crate::proto::Region { guest_address: address, len: 1, front_end_address: address, file_offset: 0 };
        guest.regions.add(region, memory.part(0, 1)).unwrap();
    }
    assert_eq!(guest.regions.bytes(), 100);
    let table = crate::memory::MemoryPiece(memory.part(0, 16));
    table.0.write(8, &100u32.to_le_bytes());
    let (result, chain) = crate::proto::DescriptorChain::walk(&guest, &table, 0, false);
    assert!(result.is_ok() && chain.readable.count() == 100);
    let cost = crate::requests::cost(&crate::proto::request::Request::Flush, &chain);
    assert!(cost > 100 * size_of::<crate::memory::MemoryPiece>() as u64);
    let write = crate::proto::request::Request::Write { offset: 0, len: 512 };
    let lists = crate::requests::cost(&write, &chain) - 512 - cost;
    assert!(lists >= 100 * (size_of::<cowshed_storage::SharedMemory>() + 16) as u64, "{lists}");
}

#[test]
fn counters_that_block_keep_no_guest_out() {
    let served = Served::new(|_| ());
    // The kick: a read of it must not wait.
    let mut driver = served.driver();
    assert_eq!(driver.request(0, 0, &[], 512).0, 0);
    rustix::fs::fcntl_setfl(&driver.kick[0], rustix::fs::OFlags::empty()).unwrap();
    driver.kick(0);
    driver.stop_ring(0);
    drop(driver);
    assert_serves(&served);
    // The call: a full one holds the thread that signals, and not for long.
    let mut driver = served.driver();
    let call = driver.call[0].clone();
    rt::block_on(call.wait()).unwrap();
    rustix::io::write(&call, &(u64::MAX - 2).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    for head in 0..3 {
        driver.prepare(0, 3 * head, 0, 0, &[], 512);
        driver.offer(0, 3 * head);
        driver.kick(0);
        // Each request is answered by itself, with a call of its own.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(driver);
    assert_serves(&served);
}

#[test]
fn a_ring_that_blocks_its_thread_keeps_no_guest_out() {
    let served = Served::new(|config| config.threads = 1);
    let mut driver = served.driver();
    driver.start_ring(1, 0);
    let call = driver.call[1].clone();
    rt::block_on(call.wait()).unwrap();
    rustix::io::write(&call, &(u64::MAX - 2).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    for head in 0..3 {
        driver.prepare(1, 3 * head, 0, 0, &[], 512);
        driver.offer(1, 3 * head);
        driver.kick(1);
        // Time for one signal each.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // The first ring waits for the thread, and stops all the same.
    driver.stop_ring(0);
    drop(driver);
    assert_serves(&served);
}

#[test]
fn a_front_end_has_no_more_memory_than_a_guest_may() {
    let served = Served::new(|_| ());
    let driver = served.driver();
    let folder = served.folder.path();
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(folder.join("memory")).unwrap();
    // Longer files than this the file system may not have.
    let (file_bytes, regions) = (1u64 << 40, 9u64);
    file.set_len(file_bytes).unwrap();
    let file = file.into();
    let add = |number: u64| {
        let guest_address = (1 << 45) + number * file_bytes;
        let region =
            crate::proto::Region { guest_address, len: file_bytes, front_end_address: guest_address, file_offset: 0 };
        driver.send_acked(request::ADD_MEM_REG, &[&[0; 8][..], &region.encode()].concat(), Some(&file))
    };
    let taken = (0..regions).filter(|&number| add(number)).count();
    assert_eq!(taken, 7, "8 TiB with the memory that is there already");
    drop(driver);
    assert_serves(&served);
}

/// Requests in flight keep the memory mapped that is removed meanwhile.
#[test]
fn mappings_of_a_front_end_are_bounded() {
    const REGIONS: u64 = 500;
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let file = rustix::fs::memfd_create("regions", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, REGIONS * 4096).unwrap();
    let place = |number: u64| MEMORY_BYTES + number * 8192;
    let tell = |driver: &FrontEnd, message, number: u64, file| {
        let region = crate::proto::Region {
            guest_address: GUEST + place(number),
            len: 4096,
            front_end_address: FRONT_END + place(number),
            file_offset: number * 4096,
        };
        driver.send_acked(message, &[&[0; 8][..], &region.encode()].concat(), file)
    };
    let add_all = |driver: &FrontEnd| {
        (0..REGIONS).take_while(|&number| tell(driver, request::ADD_MEM_REG, number, Some(&file))).count() as u64
    };
    let remove = |driver: &FrontEnd, count: u64| {
        assert!((0..count).all(|number| tell(driver, request::REM_MEM_REG, number, None)));
    };
    let drained = rt::block_on(served.attachment.drain());
    for round in 0..2_u16 {
        assert_eq!(add_all(&driver), REGIONS);
        // A read with a segment in each of them.
        let table = DATA + 0x10_0000 + 0x1_0000 * u64::from(round);
        let last = REGIONS as u16 + 1;
        driver.guest.memory.write(table as usize - 0x100, &[0; 16]);
        driver.describe(table as usize, 0, (table - 0x100, 16, 1, 1));
        for number in 0..REGIONS {
            let index = number as u16 + 1;
            driver.describe(table as usize, index, (place(number), 512, 1 | 2, index + 1));
        }
        driver.describe(table as usize, last, (table - 1, 1, 2, 0));
        driver.describe(FrontEnd::place(0), round, (table, 16 * (u32::from(last) + 1), 4, 0));
        driver.offer(0, round);
        driver.kick(0);
        let wish = FrontEnd::place(0) + 0x8000 + 4 + 8 * usize::from(RING_SIZE);
        while driver.guest.memory.load(wish) <= round {
            std::thread::yield_now();
        }
        remove(&driver, REGIONS);
    }
    // The guest's own memory is one of them.
    let added = add_all(&driver);
    assert_eq!(added, 1024 - 1 - 2 * REGIONS);
    remove(&driver, added);
    drop(drained);
    driver.wait_used(0);
    driver.wait_used(0);
    // The ring's thread lets go of a request once its end is told.
    cowshed_testkit::waiting::await_that("all memory is free again", || {
        let added = add_all(&driver);
        remove(&driver, added);
        added == REGIONS
    });
    drop(driver);
    assert_serves(&served);
}
