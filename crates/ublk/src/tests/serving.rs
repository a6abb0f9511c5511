// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of programs.

use super::fake::{ALL, Fake, Ticket, answer, is_answered};
use super::served::{DISK_BYTES, RAW, Served};
use crate::proto::control::features;
use crate::proto::{Operation, Request};
use cowshed_storage::rt;
use cowshed_testkit::random::{Random, for_each_seed};

const WRITE: Operation = Operation::Write { is_durable: false };

/// A request in flight.
struct Sent {
    request: Request,
    data: Vec<u8>,
    ticket: Ticket,
}

/// One request after the other, several at once, none of which touches bytes of another one.
fn run_model(served: &Served, random: &mut Random, rounds: u32) {
    let mut model = Model { bytes: vec![0; DISK_BYTES as usize], discarded: vec![false; DISK_BYTES as usize] };
    let mut sent: Vec<Sent> = Vec::new();
    for _ in 0..rounds {
        let most = if random.chance(10) { 2048 } else { 16 };
        let blocks = random.below(most) + 1;
        let offset = random.below(DISK_BYTES / 512 - blocks) * 512;
        let request = Request {
            operation: match random.below(12) {
                0..4 => Operation::Read,
                4..8 => Operation::Write { is_durable: random.chance(10) },
                8 => Operation::Flush,
                9 => Operation::Discard,
                _ => Operation::WriteZeroes { may_unmap: random.chance(50), is_durable: random.chance(10) },
            },
            offset,
            len: blocks * 512,
        };
        let meets = |other: &Sent| {
            let other = &other.request;
            other.offset < request.offset + request.len && request.offset < other.offset + other.len
        };
        while sent.len() > 20 || sent.iter().any(meets) {
            let first = sent.remove(0);
            model.check(&first);
        }
        let data = match request.operation {
            Operation::Write { .. } => {
                let first = random.next_u64() as u8;
                (0..request.len).map(|at| first.wrapping_add((at / 7) as u8)).collect()
            }
            _ => Vec::new(),
        };
        let queue = random.below(2) as usize;
        let ticket = served.fake.send(0, queue, &request, data.clone());
        sent.push(Sent { request, data, ticket });
    }
    sent.iter().for_each(|sent| model.check(sent));
    assert!(model.agrees(0, &served.disk(0, DISK_BYTES as usize)), "the disk is as the model");
}

/// The data that programs have written.
struct Model {
    bytes: Vec<u8>,
    /// Bytes that read as before or as zero.
    discarded: Vec<bool>,
}

impl Model {
    fn agrees(&self, offset: usize, data: &[u8]) -> bool {
        let known = self.bytes[offset..].iter().zip(&self.discarded[offset..]);
        data.iter().zip(known).all(|(byte, (known, discarded))| byte == known || (*discarded && *byte == 0))
    }

    fn check(&mut self, sent: &Sent) {
        let Request { operation, offset, len } = sent.request;
        let (result, data) = answer(&sent.ticket);
        let range = offset as usize..(offset + len) as usize;
        let has_data = matches!(operation, Operation::Read | Operation::Write { .. });
        assert_eq!(result, if has_data { len as i32 } else { 0 }, "{operation:?}");
        match operation {
            Operation::Read => assert!(self.agrees(range.start, &data), "{len} bytes at {offset}"),
            Operation::Flush => {}
            Operation::Discard => self.discarded[range].fill(true),
            Operation::Write { .. } => {
                self.bytes[range.clone()].copy_from_slice(&sent.data);
                self.discarded[range].fill(false);
            }
            Operation::WriteZeroes { .. } => {
                self.bytes[range.clone()].fill(0);
                self.discarded[range].fill(false);
            }
        }
    }
}

#[test]
fn two_queues_agree_with_a_byte_model() {
    for_each_seed(6, |seed| {
        let mut random = Random::new(seed);
        let features = if random.chance(50) { ALL } else { ALL & !features::UPDATE_SIZE };
        let unprivileged = random.chance(50);
        let qcow2 = RAW.replace("raw", "qcow2");
        let options = if random.chance(50) { RAW } else { &qcow2 };
        let mut served = Served::on(options, Fake::new(features), |config| {
            config.unprivileged = unprivileged;
            config.writethrough = unprivileged;
        });
        run_model(&served, &mut random, 400);
        served.stop();
        assert_eq!((served.fake.devices(), served.notes()), (vec![], 0), "nothing is left behind");
    });
}

#[test]
fn errors_of_the_disk_reach_the_request() {
    for (errno, told) in [(28, -28), (5, -5), (110, -110), (11, -5), (19, -5), (1, -5)] {
        let options = format!(
            "driver=raw,node-name=d,file.driver=blkdebug,file.inject-error.0.event=write_aio,\
             file.inject-error.0.errno={errno},file.inject-error.0.once=on,file.image.driver=file,file.image.filename="
        );
        let served = Served::on(&options, Fake::new(ALL), |_| ());
        assert_eq!(served.write(4096, vec![1; 4096]), told, "error {errno}");
        assert_eq!((served.write(4096, vec![2; 4096]), served.read(4096, 4096)), (4096, (4096, vec![2; 4096])));
    }
}

#[test]
fn each_queue_serves_one_request_per_tag() {
    let served = Served::new(|_| ());
    let drained = rt::block_on(served.attachment.drain());
    let send = |number: u64| {
        let request = Request { operation: WRITE, offset: number * 4096, len: 4096 };
        served.fake.send(0, (number % 2) as usize, &request, vec![number as u8 + 1; 4096])
    };
    let tickets: Vec<Ticket> = (0..60).map(send).collect();
    for queue in 0..2 {
        served.fake.wait_running(0, queue, 8);
    }
    assert!(!tickets.iter().any(is_answered));
    drop(drained);
    assert!(tickets.iter().all(|ticket| answer(ticket).0 == 4096));
    assert_eq!((served.fake.most_running(0, 0), served.fake.most_running(0, 1)), (8, 8));
    assert!((0..60).all(|number| served.disk(number * 4096, 4096) == vec![number as u8 + 1; 4096]));
}

#[test]
fn long_requests_wait_for_memory_and_get_it() {
    let served = Served::new(|config| {
        config.queues = 1;
        config.depth = 64;
    });
    let drained = rt::block_on(served.attachment.drain());
    let len = 1 << 20;
    let send = |number: u64| served.send(WRITE, number % 16 * len, len, vec![7; len as usize]);
    let tickets: Vec<Ticket> = (0..64).map(send).collect();
    served.fake.wait_running(0, 0, 64);
    let flush = served.send(Operation::Flush, 0, 0, Vec::new());
    drop(drained);
    assert!(tickets.iter().all(|ticket| answer(ticket).0 == len as i32));
    assert_eq!(answer(&flush).0, 0);
    assert!(served.disk(0, DISK_BYTES as usize) == vec![7; DISK_BYTES as usize]);
}

#[test]
fn a_durable_write_is_flushed_and_another_one_is_not() {
    let served = Served::new(|_| ());
    let flushes = || served.node.statistics().kind(cowshed_image::stats::IoKind::Flush).operations;
    let before = flushes();
    assert_eq!((served.write(0, vec![1; 512]), flushes()), (512, before));
    let durable = Operation::Write { is_durable: true };
    assert_eq!(answer(&served.send(durable, 0, 512, vec![2; 512])).0, 512);
    assert_eq!(flushes(), before + 1);
    let zeroes = Operation::WriteZeroes { may_unmap: true, is_durable: true };
    assert_eq!(answer(&served.send(zeroes, 0, 512, Vec::new())).0, 0);
    assert_eq!(flushes(), before + 2);
    let through = Served::new(|config| config.writethrough = true);
    assert!(!through.fake.params(0).has_cache, "the kernel has nothing to flush");
    let flushes = || through.node.statistics().kind(cowshed_image::stats::IoKind::Flush).operations;
    let before = flushes();
    assert_eq!((through.write(0, vec![1; 512]), flushes()), (512, before + 1));
    assert_eq!(answer(&through.send(Operation::Discard, 0, 512, Vec::new())).0, 0);
    assert_eq!(flushes(), before + 2);
}

#[test]
fn a_read_only_disk_says_so_and_takes_no_change() {
    let served = Served::new(|config| config.writable = false);
    let params = served.fake.params(0);
    assert!(params.read_only && !params.discards && !params.has_cache);
    assert_eq!(served.write(0, vec![1; 512]), -5);
    assert_eq!(answer(&served.send(Operation::Discard, 0, 512, Vec::new())).0, -5);
    assert_eq!((served.read(0, 512), served.flush()), ((512, vec![0; 512]), 0));
}

#[test]
fn what_is_no_request_of_the_device_fails_alone() {
    let served = Served::new(|config| config.block_bytes = 4096);
    assert_eq!((served.fake.params(0).block_bytes, served.fake.params(0).sectors), (4096, DISK_BYTES / 512));
    let mut unknown = Request { operation: Operation::Read, offset: 0, len: 4096 }.bytes();
    unknown[0] = 15;
    assert_eq!(answer(&served.fake.send_bytes(0, 1, unknown, Vec::new())).0, -5);
    for (operation, offset, len) in [
        (Operation::Read, 512, 4096),
        (Operation::Read, 0, 512),
        (Operation::Read, 0, 2 << 20),
        (WRITE, 0, 0),
        (Operation::Read, DISK_BYTES, 4096),
        (WRITE, DISK_BYTES - 4096, 8192),
        (Operation::Discard, DISK_BYTES, 4096),
    ] {
        let ticket = served.send(operation, offset, len, vec![1; len as usize]);
        assert_eq!(answer(&ticket).0, -5, "{operation:?} {offset} {len}");
    }
    assert_eq!((served.write(0, vec![3; 4096]), served.read(0, 4096)), (4096, (4096, vec![3; 4096])));
}

#[test]
fn kernel_learns_the_grain_and_the_first_free_number() {
    let mut served = Served::on(&RAW.replace("raw", "qcow2"), Fake::new(ALL), |_| ());
    assert_eq!((served.fake.params(0).grain_bytes, served.fake.info(0).queues), (65536, 2));
    assert_eq!(served.server.as_ref().unwrap().path(), "/dev/ublkb0");
    served.stop();
    served.config.device = Some(7);
    served.config.queues = 5;
    served.start().unwrap();
    assert_eq!((served.fake.devices(), served.fake.info(7).queues), (vec![7], 2), "as many as the driver gives");
}
