// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rings that start, stop, and outlive their back end; sizes that change.

use super::served::{DISK_BYTES, Served};
use crate::proto::features;
use crate::proto::message::request;
use cowshed_storage::rt;
use cowshed_testkit::vhost::{self, FrontEnd};
use std::os::fd::AsFd;

#[test]
fn chains_that_were_available_before_the_ring_was_enabled_are_taken() {
    let served = Served::new(|_| ());
    let mut driver = served.connect();
    driver.negotiate(u64::MAX);
    driver.share_memory();
    driver.set_up_ring(0, 0);
    driver.prepare(0, 0, 0, 0, &[], 512);
    driver.offer(0, 0);
    driver.kick(0);
    assert!(driver.set_kick(0));
    assert_eq!(driver.used(0), 0, "a ring that isn't enabled takes nothing");
    assert!(driver.enable(0, true));
    driver.wait_used(0);
    assert_eq!(driver.status(0), 0);
}

#[test]
fn without_protocol_features_a_ring_starts_with_its_kick() {
    let served = Served::new(|_| ());
    let mut driver = served.connect();
    driver.negotiate(!features::PROTOCOL_FEATURES);
    // No replies were agreed on.
    let say = |number: u32, body: &[u8], fd: Option<&std::os::fd::OwnedFd>| {
        driver.send_raw(&crate::proto::MessageHeader::message(number, false, body), fd);
    };
    driver.share_memory();
    let place = vhost::FRONT_END + FrontEnd::place(0) as u64;
    let mut addresses = vec![0; 8];
    for address in [place, place + 0x8000, place + 0x4000, 0] {
        addresses.extend(address.to_le_bytes());
    }
    say(request::SET_VRING_NUM, &[0, 0, 0, 0, 64, 0, 0, 0], None);
    say(request::SET_VRING_ADDR, &addresses, None);
    say(request::SET_VRING_KICK, &[0; 8], Some(&driver.kick[0].as_fd().try_clone_to_owned().unwrap()));
    assert_eq!(driver.request(0, 0, &[], 512).0, 0);
}

#[test]
fn a_ring_stops_where_it_is_and_goes_on_from_there() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    for _ in 0..3 {
        assert_eq!(driver.request(0, 0, &[], 512).0, 0);
    }
    assert_eq!(driver.stop_ring(0), 3);
    assert_eq!(driver.stop_ring(0), 3, "it is not reset");
    driver.prepare(0, 0, 0, 0, &[], 512);
    driver.offer(0, 0);
    driver.kick(0);
    driver.start_ring(0, 3);
    driver.wait_used(0);
    assert_eq!(driver.stop_ring(0), 4);
    // As after a reboot of the guest: the rings are new, and the used index is read again.
    let at = FrontEnd::place(0);
    driver.guest.memory.write(at, &[0; 0x1_0000]);
    (driver.guest.next[0], driver.guest.seen[0]) = (0, 0);
    driver.start_ring(0, 0);
    assert_eq!(driver.request(0, 0, &[], 512).0, 0);
    assert_eq!(driver.used(0), 1);
}

#[test]
fn a_disabled_ring_takes_nothing_until_it_is_enabled_again() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    assert_eq!(driver.request(0, 0, &[], 512).0, 0);
    assert!(driver.enable(0, false));
    driver.prepare(0, 0, 0, 0, &[], 512);
    driver.offer(0, 0);
    driver.kick(0);
    assert!(driver.set_kick(0), "a new kick enables nothing");
    assert_eq!(driver.used(0), 1);
    assert!(driver.enable(0, true));
    driver.wait_used(0);
    assert!(driver.set_kick(0), "and a new kick disables nothing");
    assert_eq!(driver.request(0, 0, &[], 512).0, 0);
    assert!(driver.enable(0, false));
    assert_eq!(driver.stop_ring(0), 3);
    assert!(driver.send_acked(request::RESET_DEVICE, &[], None));
    assert_eq!(driver.stop_ring(0), 0);
}

#[test]
fn rings_need_no_descriptors_for_kicks_and_calls() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let none = 0x100u64.to_le_bytes();
    assert!(driver.send_acked(request::SET_VRING_CALL, &none, None));
    assert!(driver.send_acked(request::SET_VRING_KICK, &none, None));
    driver.prepare(0, 0, 0, 0, &[], 512);
    driver.offer(0, 0);
    driver.wait_used(0);
    assert_eq!(driver.status(0), 0);
    assert!(driver.set_call(0));
    rt::block_on(driver.call[0].wait()).unwrap();
}

#[test]
fn a_guest_is_called_for_what_has_ended() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    rt::block_on(driver.call[0].wait()).unwrap();
    assert_eq!(driver.request(0, 0, &[], 512).0, 0);
    rt::block_on(driver.call[0].wait()).unwrap();
}

#[test]
fn requests_in_flight_are_carried_out_by_the_next_back_end() {
    let mut served = Served::new(|_| ());
    let mut driver = served.connect();
    driver.negotiate(u64::MAX);
    driver.share_memory();
    let notes = driver.notes();
    driver.give_notes(&notes);
    driver.start_ring(0, 0);
    assert_eq!(driver.request(1, 0, &[1; 512], 0).0, 0);
    driver.stop_ring(0);
    served.stop();
    // The state that a killed back end leaves: chains taken, noted in flight, and not given back.
    let region = cowshed_storage::SharedMemory::map(&notes.1, 0, notes.0.len).unwrap();
    for (counter, head) in [(9u64, 3u16), (8, 6)] {
        driver.prepare(0, head, 1, u64::from(head), &[head as u8; 512], 0);
        driver.offer(0, head);
        let at = 16 + 16 * usize::from(head);
        region.write(at + 8, &counter.to_le_bytes());
        region.write(at, &[1]);
    }
    let guest = driver.guest.clone();
    served.start();
    let mut next = served.connect();
    next.guest = guest;
    next.negotiate(u64::MAX);
    next.share_memory();
    next.give_notes(&notes);
    next.start_ring(0, 1);
    let mut ended = [next.wait_used(0).0, next.wait_used(0).0];
    ended.sort_unstable();
    assert_eq!((ended, next.status(3), next.status(6)), ([3, 6], 0, 0));
    assert_eq!((served.disk(3 * 512, 512), served.disk(6 * 512, 512)), (vec![3; 512], vec![6; 512]));
    assert_eq!(next.request(0, 3, &[], 512), (0, vec![3; 512]));
    assert_eq!(next.stop_ring(0), 4);
}

#[test]
fn a_new_size_reaches_the_front_end() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let channel = driver.back_end_channel();
    rt::block_on(served.node.resize(DISK_BYTES + 4096, cowshed_image::Preallocation::Off)).unwrap();
    let server = served.server.as_ref().unwrap();
    server.look_at_size();
    assert_eq!(FrontEnd::back_end_message(&channel), request::BACKEND_CONFIG_CHANGE);
    assert_eq!(driver.config(0, 8), ((DISK_BYTES + 4096) / 512).to_le_bytes());
    assert_eq!(driver.request(1, DISK_BYTES / 512, &[5; 4096], 0).0, 0);
}

/// The guest knows the old size until it hears of the new one.
#[test]
fn requests_behind_the_end_of_a_shorter_disk_fail() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    assert_eq!(driver.request(1, DISK_BYTES / 512 - 1, &[5; 512], 0).0, 0);
    rt::block_on(served.node.resize(4096, cowshed_image::Preallocation::Off)).unwrap();
    // VIRTIO_BLK_S_IOERR, for reads and for writes, also across the end.
    assert_eq!(driver.request(0, DISK_BYTES / 512 - 1, &[], 512).0, 1);
    assert_eq!(driver.request(0, 7, &[], 1024).0, 1);
    assert_eq!(driver.request(1, 8, &[5; 512], 0).0, 1);
    assert_eq!(driver.request(0, 7, &[], 512), (0, vec![0; 512]));
}

#[test]
fn a_drained_disk_keeps_requests_and_loses_none() {
    let served = Served::new(|_| ());
    let mut driver = served.driver();
    let drained = rt::block_on(served.attachment.drain());
    driver.prepare(0, 0, 1, 0, &[9; 512], 0);
    driver.offer(0, 0);
    driver.kick(0);
    // The thread has taken the chain once it asks for a kick behind it.
    let event = FrontEnd::place(0) + 0x8000 + 4 + 8 * usize::from(vhost::RING_SIZE);
    while driver.guest.memory.load(event) == 0 {
        std::thread::yield_now();
    }
    assert_eq!((driver.used(0), served.disk(0, 512)), (0, vec![0; 512]));
    drop(drained);
    driver.wait_used(0);
    assert_eq!((driver.status(0), served.disk(0, 512)), (0, vec![9; 512]));
}

#[test]
fn the_server_stops_under_load_and_answers_what_it_took() {
    let mut served = Served::new(|_| ());
    let mut driver = served.driver();
    for head in (0..60).step_by(3) {
        driver.prepare(0, head, 1, u64::from(head), &[1; 512], 0);
        driver.offer(0, head);
    }
    driver.kick(0);
    driver.wait_used(0);
    served.stop();
    let ended = driver.used(0);
    let statuses = (0..60).step_by(3).filter(|&head| driver.status(head) == 0).count();
    assert_eq!(statuses, usize::from(ended));
    assert!(driver.is_closed());
}
