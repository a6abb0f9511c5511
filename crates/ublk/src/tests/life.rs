// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The life of devices: making, ending, and taking over.

use super::fake::{ALL, Fake, answer, is_answered};
use super::served::{DISK_BYTES, RAW, Served};
use crate::proto::Operation;
use crate::proto::control::features;
use crate::{Config, Recover};
use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::{Node, Preallocation};
use cowshed_storage::{UblkCall, UblkDriver, UblkTarget, rt};
use cowshed_types::ErrorKind;
use rustix::io::Errno as Number;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Starting fails by an error with these words, and nothing is left behind.
fn refused(fake: &Fake, change: impl FnOnce(&mut Config), words: &str) -> ErrorKind {
    let before = fake.devices();
    let mut served = Served::unserved(RAW, fake.clone(), change);
    let error = served.start().unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!((fake.devices(), served.notes(), served.ends.load(Ordering::SeqCst)), (before, 0, 0), "{error}");
    error.kind()
}

#[test]
fn what_the_driver_refuses_leaves_nothing_behind() {
    let fake = Fake::new(ALL);
    for (call, number, words) in [
        (UblkCall::AddDevice, Number::NOSPC, "could not make a ublk device"),
        (UblkCall::AddDevice, Number::PERM, "'unprivileged=on', and a rule of udev"),
        (UblkCall::SetParams, Number::INVAL, "refuses the parameters"),
        (UblkCall::StartDevice, Number::NOMEM, "could not start the ublk device"),
        (UblkCall::GetFeatures, Number::OPNOTSUPP, "Linux 6.5 or newer"),
        (UblkCall::GetFeatures, Number::ACCESS, "no permission for ublk devices"),
    ] {
        fake.refuse(call, number);
        refused(&fake, |_| (), words);
        fake.refuse_nothing();
    }
    let old = Fake::new(ALL & !features::USER_COPY);
    assert_eq!(refused(&old, |_| (), "lack 0x80"), ErrorKind::Unsupported);
    refused(&Fake::new(ALL & !features::UNPRIVILEGED_DEV), |config| config.unprivileged = true, "lack 0x20");
}

#[test]
fn numbers_out_of_range_are_refused_before_the_driver_is_asked() {
    let fake = Fake::new(ALL);
    refused(&fake, |config| config.block_bytes = 8192, "between 512 and 4096");
    refused(&fake, |config| config.block_bytes = 1000, "between 512 and 4096");
    refused(&fake, |config| config.queues = 0, "num-queues is 0");
    refused(&fake, |config| config.queues = 65, "num-queues is 65");
    refused(&fake, |config| config.depth = 4097, "queue-size is 4097");
    refused(&fake, |config| config.device = Some(u32::MAX), "device-id");
    refused(&fake, |config| config.recover = Recover::On, "'device-id'");
    assert_eq!(fake.calls(), []);
}

#[test]
fn taken_and_missing_device_numbers_are_named() {
    let fake = Fake::new(ALL);
    let served = Served::on(RAW, fake.clone(), |_| ());
    assert_eq!(refused(&fake, |config| config.device = Some(0), "a ublk device 0 already"), ErrorKind::Busy);
    let take = |number| {
        move |config: &mut Config| {
            config.device = Some(number);
            config.recover = Recover::On;
        }
    };
    assert_eq!(refused(&fake, take(5), "no ublk device 5 to take over"), ErrorKind::NotFound);
    assert_eq!(refused(&fake, take(0), "is served by process"), ErrorKind::Busy);
    assert_eq!(served.write(0, vec![1; 512]), 512, "it goes on");
}

#[test]
fn a_stop_lets_requests_in_flight_end() {
    let mut served = Served::new(|_| ());
    let drained = rt::block_on(served.attachment.drain());
    let write = served.send(Operation::Write { is_durable: false }, 0, 4096, vec![5; 4096]);
    served.fake.wait_running(0, 0, 1);
    let server = served.server.take().unwrap();
    let stopping = std::thread::spawn(move || rt::block_on(server.stop()));
    assert!(!is_answered(&write));
    drop(drained);
    stopping.join().unwrap();
    assert_eq!((answer(&write).0, served.disk(0, 4096)), (4096, vec![5; 4096]));
    assert_eq!((served.fake.devices(), served.ends.load(Ordering::SeqCst)), (vec![], 0));
}

#[test]
fn a_device_that_others_take_away_ends_its_export() {
    let mut served = Served::new(|_| ());
    let target = UblkTarget { device: 0, value: 0, path_bytes: 0 };
    served.fake.call(UblkCall::StopDevice, target, &mut []).unwrap();
    served.fake.wait_closed(0);
    served.fake.call(UblkCall::DeleteDevice, target, &mut []).unwrap();
    while served.ends.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let server = served.server.take().unwrap();
    rt::block_on(server.stop());
    assert_eq!((served.fake.devices(), served.ends.load(Ordering::SeqCst)), (vec![], 1));
}

/// Changes the size of a disk, as `block_resize` and other exports do.
fn resize(graph: &Arc<Graph>, node: &Arc<Node>, size: u64) {
    rt::block_on(async {
        let grower = graph.attach(node, AttachRequest::export("grower", true).resizing()).await.unwrap();
        node.resize(size, Preallocation::Off).await.unwrap();
        grower.detach().await.unwrap();
    });
}

/// The kernel was told of the size before.
#[test]
fn size_that_changes_while_a_device_starts_is_told() {
    for size in [DISK_BYTES / 2, DISK_BYTES * 2] {
        let mut served = Served::unserved(RAW, Fake::new(ALL), |_| ());
        let (graph, node) = (Arc::clone(&served.graph), Arc::clone(&served.node));
        served.fake.before(UblkCall::StartDevice, move || resize(&graph, &node, size));
        served.start().unwrap();
        assert_eq!(served.fake.params(0).sectors, size / 512);
        assert_eq!((served.read(size - 512, 512).0, served.read(size, 512).0), (512, -5));
    }
}

/// They wait for the change of the size, and the kernel knows the old one.
#[test]
fn requests_behind_the_end_of_a_shorter_disk_fail() {
    let served = Served::new(|_| ());
    let drained = rt::block_on(served.attachment.drain());
    let write = Operation::Write { is_durable: false };
    let zeroes = Operation::WriteZeroes { is_durable: false, may_unmap: true };
    let send = |operation, offset, data| served.send(operation, offset, 4096, data);
    let within = [send(Operation::Read, 0, Vec::new()), send(write, 0, vec![3; 4096])];
    let behind = [
        send(Operation::Read, 4096, Vec::new()),
        send(write, DISK_BYTES - 4096, vec![3; 4096]),
        send(zeroes, 8192, Vec::new()),
        send(Operation::Discard, 4096, Vec::new()),
    ];
    served.fake.wait_running(0, 0, 6);
    resize(&served.graph, &served.node, 4096);
    assert!(!within.iter().chain(&behind).any(is_answered));
    drop(drained);
    assert!(within.iter().all(|ticket| answer(ticket).0 == 4096));
    assert!(behind.iter().all(|ticket| answer(ticket).0 == -5));
    assert_eq!((served.flush(), served.disk(0, 4096)), (0, vec![3; 4096]));
}

#[test]
fn a_new_size_reaches_the_kernel() {
    for features in [ALL, ALL & !features::UPDATE_SIZE] {
        let served = Served::on(RAW, Fake::new(features), |_| ());
        let server = served.server.as_ref().unwrap();
        let resize = |size| {
            resize(&served.graph, &served.node, size);
            server.look_at_size();
        };
        let end = DISK_BYTES + 4096;
        resize(end);
        // A size that the kernel has not heard of is there all the same.
        if features == ALL {
            while served.fake.params(0).sectors != end / 512 {
                std::thread::yield_now();
            }
        }
        assert_eq!((served.write(DISK_BYTES, vec![1; 4096]), served.disk(DISK_BYTES, 4096)), (4096, vec![1; 4096]));
        resize(4096);
        assert_eq!(served.read(4096, 512).0, -5, "the disk ends there");
        server.look_at_size();
        drop(served);
    }
}

#[test]
fn a_machine_without_the_driver_says_how_to_get_it() {
    if std::path::Path::new(cowshed_storage::UBLK_CONTROL).exists() {
        return;
    }
    let error = crate::open_driver().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("'modprobe ublk_drv'"), "{error}");
}
