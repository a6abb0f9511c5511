// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole images under the fuzzer, on the simulated machine: opened and read, checked and repaired, written to. See
//! `layout.rs`.

use super::replay::Entry;
use cowshed_create::qcow2::Qcow2CreateOptions;
use cowshed_create::write_fresh_qcow2;
use cowshed_image::open::Policy;
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_offline::check::{CheckOptions, check};
use cowshed_simulator::{Config, PageMap, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_types::Repair;
use std::path::Path;
use std::sync::Arc;

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[("open_read", open_read), ("check_repair", check_repair), ("write_model", write_model)];

const IMAGE: &str = "image";
/// The most that is read of an image, in runs and in bytes of each.
const MOST_RUNS: usize = 48;
const MOST_RUN_BYTES: u64 = 16 << 10;
/// Disks of the write path.
const DISK_BYTES: usize = 96 << 10;

/// A machine with the image and the files that the seeds name.
fn machine(image: &[u8]) -> World {
    let world = World::new(Config::new(7));
    world.add_file(IMAGE, PageMap::from_bytes(image));
    for name in ["base", "d"] {
        world.add_file(name, PageMap::from_bytes(&[0x5a; 4096]));
    }
    world
}

/// Named files may be opened here; sizes are bounded.
fn policy() -> Policy {
    let allow = Policy { allow_backing: true, allow_data_file: true, allow_json: true, ..Policy::untrusted() };
    Policy { allow_backing_probe: true, max_decompressed_bytes: 4 << 20, ..allow }
}

async fn read(node: &Node, start: u64, len: u64) -> Option<Vec<u8>> {
    let (result, bytes) = node.read(start, IoBuf::zeroed(len as usize)).await;
    result.ok().map(|()| bytes.to_vec())
}

/// The whole way of an image that is opened and read, wherever its tables point. Its status holds, and two reads give
/// the same.
pub fn open_read(data: &[u8]) {
    machine(data).run(async {
        let request = OpenRequest::file(IMAGE).format("qcow2").policy(policy());
        let Ok(node) = open(request).await else { return };
        let mut at = 0;
        let mut seen = 0;
        while at < node.size() && seen < MOST_RUNS {
            let Ok(runs) = node.block_status_chain(at, node.size() - at, MOST_RUNS).await else { break };
            assert!(!runs.is_empty());
            for run in runs {
                assert_eq!(run.start, at, "no gaps");
                assert!(run.len > 0 && run.start + run.len <= node.size());
                at += run.len;
                seen += 1;
                let len = run.len.min(MOST_RUN_BYTES);
                let first = read(&node, run.start, len).await;
                assert_eq!(first, read(&node, run.start, len).await);
                if let (true, Some(bytes)) = (run.zero, &first) {
                    assert!(bytes.iter().all(|byte| *byte == 0), "said to be zero at {}", run.start);
                }
            }
        }
        let _ = node.close().await;
    });
}

/// Any image is checked, and repaired as far as that goes: a repair that reports success is one.
pub fn check_repair(data: &[u8]) {
    let world = machine(data);
    world.run(async {
        let options = OpenOptions { write: true, ..OpenOptions::default() };
        let file = File::open(Path::new(IMAGE), &options).expect("the file is there");
        let settings = |repair| CheckOptions { repair, memory_bytes: 4 << 20, ..CheckOptions::default() };
        let Ok(before) = check(&file, &settings(Repair::None), &|_, _| true).await else { return };
        assert!(!before.changed, "a check writes nothing");
        let Ok(repaired) = check(&file, &settings(Repair::All), &|_, _| true).await else { return };
        let after = check(&file, &settings(Repair::None), &|_, _| true).await.expect("it could be checked before");
        assert_eq!(
            (repaired.counters.corruptions, repaired.counters.leaks),
            (after.counters.corruptions, after.counters.leaks),
            "what the repair left is what is there"
        );
    });
}

/// 4 bytes of settings, then operations of 4 bytes on a fresh image, beside a disk that is bytes in memory.
pub fn write_model(data: &[u8]) {
    let [bits, order, flags, seed, operations @ ..] = data else { return };
    let extended = flags & 1 != 0;
    let options = Qcow2CreateOptions {
        size: DISK_BYTES as u64,
        cluster_bits: if extended { 14 } else { 9 + u32::from(bits % 8) },
        refcount_order: u32::from(order % 7),
        extended_l2: extended,
        lazy_refcounts: flags & 2 != 0,
        ..Qcow2CreateOptions::default()
    };
    let world = World::new(Config::new(u64::from(*seed)));
    world.run(async {
        let create = OpenOptions { write: true, create: true, ..OpenOptions::default() };
        write_fresh_qcow2(&File::open(Path::new(IMAGE), &create).expect("the file is there"), &options)
            .await
            .expect("an image");
        let mut pair = Pair { node: reopened().await, bytes: vec![0; DISK_BYTES] };
        for operation in operations.chunks_exact(4).take(64) {
            pair.carry_out(operation).await;
        }
        pair.compare(0, pair.bytes.len()).await;
        pair.node.close().await.expect("a close");
        let file = File::open(Path::new(IMAGE), &OpenOptions::default()).expect("the file is there");
        let settings = CheckOptions { ..CheckOptions::default() };
        let report = check(&file, &settings, &|_, _| true).await.expect("a check");
        assert!(report.is_clean(), "{:?}", report.findings);
    });
}

async fn reopened() -> Arc<Node> {
    open(OpenRequest::file(IMAGE).format("qcow2").writable(true)).await.expect("the image opens")
}

/// An image and its expected data.
struct Pair {
    node: Arc<Node>,
    bytes: Vec<u8>,
}

impl Pair {
    async fn carry_out(&mut self, operation: &[u8]) {
        let &[kind, place, length, fill] = operation else { return };
        // Sectors from the start, and an odd length now and then.
        let start = (usize::from(place) * 512).min(self.bytes.len());
        let len = (usize::from(length) * 96).min(self.bytes.len() - start);
        let end = start + len;
        match kind % 8 {
            0..=2 => {
                self.node.write(start as u64, IoBuf::copy_from(&vec![fill; len])).await.0.expect("a write");
                self.bytes[start..end].fill(fill);
            }
            3 => {
                let flags = ZeroFlags { may_unmap: fill & 1 != 0, ..ZeroFlags::default() };
                self.node.write_zeroes(start as u64, len as u64, flags).await.expect("zeroes");
                self.bytes[start..end].fill(0);
            }
            4 => {
                self.node.discard(start as u64, len as u64).await.expect("a discard");
                let (result, now) = self.node.read(start as u64, IoBuf::zeroed(len)).await;
                result.expect("a read");
                for (old, new) in self.bytes[start..end].iter_mut().zip(now.iter()) {
                    assert!(*new == 0 || *new == *old, "neither as before nor zero");
                    *old = *new;
                }
            }
            5 => self.compare(start, end).await,
            6 => {
                self.node.resize(start as u64, Preallocation::Off).await.expect("a new size");
                self.bytes.resize(start, 0);
            }
            _ if fill & 1 == 0 => self.node.flush().await.expect("a flush"),
            _ => {
                self.node.close().await.expect("a close");
                self.node = reopened().await;
            }
        }
    }

    async fn compare(&self, start: usize, end: usize) {
        let (result, bytes) = self.node.read(start as u64, IoBuf::zeroed(end - start)).await;
        result.expect("a read");
        let differs = bytes.iter().zip(&self.bytes[start..end]).position(|(one, other)| one != other);
        assert_eq!(differs, None, "behind {start}");
    }
}
