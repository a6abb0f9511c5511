// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server dies, and another one takes its device over.

use super::fake::{ALL, Fake, Ticket, answer, is_answered};
use super::served::{DISK_BYTES, RAW, Served};
use crate::proto::control::features;
use crate::proto::{Operation, UblkState};
use crate::{Config, Recover};
use cowshed_storage::{UblkCall, rt};

const WRITE: Operation = Operation::Write { is_durable: false };

#[test]
fn requests_of_a_dead_server_are_answered_once() {
    let mut served = Served::new(|_| ());
    assert_eq!(served.write(0, vec![1; 4096]), 4096);
    let drained = rt::block_on(served.attachment.drain());
    let send = |number: u64| served.send(WRITE, number * 4096, 4096, vec![number as u8; 4096]);
    let tickets: Vec<Ticket> = (1..30).map(send).collect();
    served.fake.wait_running(0, 0, 8);
    served.fake.kill(0);
    drop(drained);
    served.die();
    assert!(!tickets.iter().any(is_answered));
    assert_eq!(served.fake.info(0).state, UblkState::Quiesced);
    // Queues and depth are those of the device, whatever the next server would have made.
    served.config.queues = 1;
    served.config.depth = 3;
    served.start().unwrap();
    assert!(tickets.iter().all(|ticket| answer(ticket).0 == 4096));
    assert_eq!((served.read(0, 4096), served.flush()), ((4096, vec![1; 4096]), 0));
    assert!((1..30).all(|number| served.disk(number * 4096, 4096) == vec![number as u8; 4096]));
    served.stop();
    assert_eq!((served.fake.devices(), served.notes()), (vec![], 0));
}

#[test]
fn a_users_device_ends_with_its_server_and_is_made_anew() {
    let mut served = Served::new(|config| config.unprivileged = true);
    assert_eq!(served.write(0, vec![1; 4096]), 4096);
    let drained = rt::block_on(served.attachment.drain());
    let ticket = served.send(WRITE, 4096, 4096, vec![2; 4096]);
    served.fake.wait_running(0, 0, 1);
    served.fake.kill(0);
    drop(drained);
    served.die();
    assert_eq!((answer(&ticket).0, served.fake.info(0).state), (-5, UblkState::Dead), "the kernel stops it");
    let error = served.start().unwrap_err();
    assert!(
        error.to_string().contains("ends a user's device with its server; 'recover=auto' makes it anew"),
        "{error}"
    );
    served.config.recover = Recover::Auto;
    served.config.id = "another".to_owned();
    let error = served.start().unwrap_err();
    assert!(error.to_string().contains("no export with the id 'another' has made it"), "{error}");
    served.config.id = "the-disk".to_owned();
    served.start().unwrap();
    assert_eq!((served.read(0, 4096), served.flush()), ((4096, vec![1; 4096]), 0));
    served.stop();
    assert_eq!((served.fake.devices(), served.notes()), (vec![], 0));
}

#[test]
fn flushes_fail_where_changes_died_with_a_server() {
    let qcow2 = RAW.replace("raw", "qcow2");
    for (written, flushed, fails) in [(true, false, true), (true, true, false), (false, false, false)] {
        let mut served = Served::on(&qcow2, Fake::new(ALL), |_| ());
        if written {
            // A new cluster, whose mapping is in memory.
            assert_eq!(served.write(65536, vec![1; 4096]), 4096);
        }
        if flushed {
            assert_eq!(served.flush(), 0);
        }
        served.die();
        served.start().unwrap();
        assert_eq!(served.read(65536, 512).0, 512);
        let durable = Operation::Write { is_durable: true };
        let first = answer(&served.send(durable, 0, 4096, vec![1; 4096])).0;
        assert_eq!(first, if fails { -5 } else { 4096 }, "written {written}, flushed {flushed}");
        // Each user of the device may have lost changes.
        let rest = if fails { -5 } else { 0 };
        assert_eq!((served.flush(), served.flush()), (rest, rest));
    }
    // The page cache outlives a process.
    let mut raw = Served::new(|_| ());
    assert_eq!(raw.write(65536, vec![1; 4096]), 4096);
    raw.die();
    raw.start().unwrap();
    assert_eq!(raw.flush(), 0);
    // A missing note means that no change was lost.
    raw.die();
    std::fs::remove_file(raw.folder.path().join("notes/cowshed-ublk-0")).unwrap();
    raw.start().unwrap();
    assert_eq!((raw.flush(), raw.flush()), (-5, -5));
}

#[test]
fn a_kill_before_a_failed_flush_arrives_forgets_no_loss() {
    let mut served = Served::on(&RAW.replace("raw", "qcow2"), Fake::new(ALL), |_| ());
    assert_eq!(served.write(65536, vec![1; 4096]), 4096);
    served.die();
    served.start().unwrap();
    served.fake.kill_at_error(0);
    let flush = served.send(Operation::Flush, 0, 0, Vec::new());
    served.fake.wait_closed(0);
    served.die();
    served.start().unwrap();
    assert_eq!((answer(&flush).0, served.flush()), (-5, -5));
    // A device that is made anew has lost nothing.
    served.stop();
    served.config.recover = Recover::Auto;
    served.start().unwrap();
    assert_eq!(served.flush(), 0);
}

#[test]
fn a_write_with_fua_leaves_no_note_of_unflushed_changes() {
    let mut served = Served::on(&RAW.replace("raw", "qcow2"), Fake::new(ALL), |_| ());
    assert_eq!(served.write(65536, vec![1; 4096]), 4096);
    let durable = Operation::Write { is_durable: true };
    assert_eq!(answer(&served.send(durable, 0, 4096, vec![1; 4096])).0, 4096);
    served.die();
    served.start().unwrap();
    assert_eq!(served.flush(), 0, "the write was a flush");
}

#[test]
fn a_device_is_taken_over_by_its_own_export_alone() {
    let refused = |served: &mut Served, change: &dyn Fn(&mut Config), words: &str| {
        let before = served.config.clone();
        change(&mut served.config);
        let error = served.start().unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(served.fake.info(0).state, UblkState::Quiesced, "it goes on to wait");
        served.config = before;
    };
    let mut served = Served::on(RAW, Fake::new(ALL & !features::UPDATE_SIZE), |_| ());
    served.die();
    refused(&mut served, &|config| config.id = "another".to_owned(), "no export with the id 'another' has made it");
    refused(&mut served, &|config| config.writable = false, "it is writable");
    served.start().unwrap();
    assert_eq!(served.write(0, vec![1; 512]), 512);
    served.fake.change_info(0, |info| info.note = 7);
    served.die();
    refused(&mut served, &|_| (), "no export with the id 'the-disk' has made it");
    served.fake.kill(0);
}

#[test]
fn shorter_disk_is_refused_without_resize_in_the_kernel() {
    for features in [ALL, ALL & !features::UPDATE_SIZE] {
        let mut served = Served::on(RAW, Fake::new(features), |_| ());
        served.die();
        rt::block_on(async {
            let request = cowshed_image::graph::AttachRequest::export("shortener", true).resizing();
            let other = served.graph.attach(&served.node, request).await.unwrap();
            served.node.resize(DISK_BYTES / 2, cowshed_image::Preallocation::Off).await.unwrap();
            other.detach().await.unwrap();
        });
        match served.start() {
            Ok(()) => assert_eq!(served.fake.params(0).sectors, DISK_BYTES / 1024),
            Err(error) => {
                assert!(error.to_string().contains("it has 32768 sectors, and the disk has 16384"), "{error}")
            }
        }
        assert_eq!(served.server.is_some(), features == ALL);
    }
}

#[test]
fn auto_makes_or_takes_over_a_device() {
    let mut served = Served::new(|config| {
        config.device = Some(0);
        config.recover = Recover::Auto;
    });
    let count = |served: &Served, call| served.fake.calls().iter().filter(|(made, _)| *made == call).count();
    assert_eq!(served.write(0, vec![1; 512]), 512);
    served.die();
    served.config.recover = Recover::Auto;
    served.start().unwrap();
    assert_eq!((count(&served, UblkCall::AddDevice), count(&served, UblkCall::EndRecovery)), (1, 1));
    assert_eq!(served.read(0, 512), (512, vec![1; 512]));
}

/// Between the two commands the driver has no more of it than of a device that was stopped.
#[test]
fn a_device_that_is_being_started_is_left_alone() {
    for unprivileged in [false, true] {
        let fake = Fake::new(ALL);
        let mut served = Served::unserved(RAW, fake.clone(), |config| config.unprivileged = unprivileged);
        served.start().unwrap();
        let live = fake.info(0);
        fake.change_info(0, |info| info.state = UblkState::Dead);
        let mut second = Served::unserved(RAW, fake.clone(), |config| {
            (config.unprivileged, config.device, config.recover) = (unprivileged, Some(0), Recover::Auto);
        });
        for recover in [Recover::Auto, Recover::On] {
            second.config.recover = recover;
            let error = second.start().unwrap_err();
            let words = format!("the ublk device 0 is served by process {}", std::process::id());
            assert!(error.to_string().contains(&words), "{error}");
        }
        fake.change_info(0, |info| *info = live);
        assert_eq!(served.write(0, vec![1; 512]), 512, "it goes on");
    }
}

/// Its server died before it had started it, or a tool has stopped it.
#[test]
fn auto_makes_a_device_anew_that_never_started() {
    for process in [-1, i32::MAX] {
        let fake = Fake::new(ALL);
        let mut served = Served::unserved(RAW, fake.clone(), |config| {
            (config.device, config.recover) = (Some(0), Recover::Auto);
        });
        served.start().unwrap();
        served.die();
        fake.change_info(0, |info| (info.state, info.process) = (UblkState::Dead, process));
        let error = served.start().unwrap_err();
        assert!(error.to_string().contains("it was stopped"), "{error}");
        served.config.recover = Recover::Auto;
        served.start().unwrap();
        assert_eq!(served.write(0, vec![1; 512]), 512);
    }
}

/// The driver would wait for it without end.
#[test]
fn an_ended_device_that_is_open_is_not_waited_for() {
    let mut served = Served::new(|config| config.unprivileged = true);
    served.die();
    served.config.recover = Recover::Auto;
    let held = served.fake.hold(0);
    let error = served.start().unwrap_err();
    assert!(error.to_string().contains("has ended, and another process has it open"), "{error}");
    drop(held);
    served.start().unwrap();
    assert_eq!(served.write(0, vec![1; 512]), 512);
}
