// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads that fail after an internal snapshot was taken or deleted under a guest: the tables in memory are then those of
//! before. Whatever the guest does next, no byte of the snapshot changes, and no acknowledged write is lost.

use cowshed_image::ZeroFlags;
use cowshed_image::formats::DriverOf;
use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_layout::qcow2::SnapshotName;
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::audit::audit;
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::scenario::{ImageDisk, Prepared};
use cowshed_types::{Errno, Result};
use std::sync::Arc;

const CLUSTER: u64 = 4096;
/// Below another L2 table than the start of the disk.
const FAR: u64 = 2 << 20;

/// A change of the image under the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Take,
    Delete,
}

fn prepared(spec: Qcow2Spec, bitmaps: &[u64]) -> Prepared {
    let write = |offset, seed| Op::Write { offset, len: 16 * CLUSTER, texture: Texture::Random(seed) };
    let session = vec![write(0, 1), write(FAR, 2)];
    let layer = Layer { format: Format::Qcow2(spec), size: 2 * FAR, sessions: vec![session] };
    Prepared::with(&Chain { layers: vec![layer] }, false, bitmaps)
}

/// A guest, and the bytes that its disk must have.
struct Guest {
    disk: Arc<Attachment>,
    bytes: Vec<u8>,
    /// Ranges of requests that failed: either content is right.
    unsure: Vec<(u64, Vec<u8>)>,
    errors: Vec<String>,
}

impl Guest {
    fn note(&mut self, done: Result<()>, offset: u64, new: &[u8]) {
        match done {
            Ok(()) => self.bytes[offset as usize..][..new.len()].copy_from_slice(new),
            Err(error) => {
                self.errors.push(error.to_string());
                self.unsure.push((offset, new.to_vec()));
            }
        }
    }

    async fn write(&mut self, offset: u64, len: u64, byte: u8) {
        let new = vec![byte; len as usize];
        let (done, _) = self.disk.queue().write(offset, IoBuf::copy_from(&new)).await;
        self.note(done, offset, &new);
    }

    async fn zero(&mut self, offset: u64, len: u64) {
        let flags = ZeroFlags { may_unmap: true, no_fallback: false };
        let done = self.disk.queue().write_zeroes(offset, len, flags).await;
        self.note(done, offset, &vec![0; len as usize]);
    }

    /// In place, to new clusters, over zeroes, and by edits alone; at both L2 tables, and below a new one.
    async fn change_all(&mut self, byte: u8) {
        for table in [0, FAR] {
            self.write(table + CLUSTER, CLUSTER, byte).await;
            self.write(table + 2 * CLUSTER + 512, 512, byte).await;
            self.write(table + 64 * CLUSTER, 3 * CLUSTER, byte).await;
            self.zero(table + 8 * CLUSTER, 2 * CLUSTER).await;
            self.write(table + 9 * CLUSTER, 512, byte).await;
        }
        if let Err(error) = self.disk.queue().flush().await {
            self.errors.push(error.to_string());
        }
    }

    /// Each read has the right bytes, or fails.
    async fn read_all(&self, may_fail: bool) {
        for cluster in (0..80).chain(512..592) {
            let at = cluster * CLUSTER;
            let (result, buf) = self.disk.queue().read(at, IoBuf::zeroed(CLUSTER as usize)).await;
            match result {
                Ok(()) => self.judge(at, &buf),
                Err(error) => assert!(may_fail, "cluster {cluster}: {error}"),
            }
        }
    }

    fn judge(&self, at: u64, found: &[u8]) {
        for (sector, bytes) in found.chunks(512).enumerate() {
            let at = at + sector as u64 * 512;
            let is_of = |(start, new): &(u64, Vec<u8>)| {
                at.checked_sub(*start)
                    .is_some_and(|skip| new.get(skip as usize..).is_some_and(|new| new.starts_with(bytes)))
            };
            let is_right = self.bytes[at as usize..].starts_with(bytes) || self.unsure.iter().any(is_of);
            assert!(is_right, "the disk has lost its data at {at:#x}");
        }
    }
}

/// Changes the image while the read number `skip` from then on fails, and `times - 1` after it. Returns whether any failed.
fn one_case(prepared: &Prepared, change: Change, skip: u64, times: u64, with_bitmap: bool) -> bool {
    let name = format!("{change:?}, {skip} reads pass, {times} fail");
    let world = World::with_files(Config::new(skip), &prepared.files);
    let (snapshot, guest, hits) = world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let options = format!("driver=qcow2,node-name=n0,file.filename={},discard=unmap", prepared.top);
        let node = graph.add(BlockdevOptions::from_keyval(&options).expect("options")).await.expect("the image");
        let disk = graph.attach(&node, AttachRequest::export("guest", true)).await.expect("a guest");
        let mut guest = Guest { disk, bytes: prepared.content.clone(), unsure: Vec::new(), errors: Vec::new() };
        guest.write(0, CLUSTER, 1).await;
        guest.write(40 * CLUSTER, CLUSTER, 2).await;
        let mut snapshot = guest.bytes.clone();
        if change == Change::Delete {
            for name in ["kept", "gone"] {
                graph.take_internal_snapshot(&node, name).await.expect("a snapshot");
                guest.write(3 * CLUSTER, CLUSTER, 3).await;
            }
        }
        assert!(guest.errors.is_empty(), "{:?}", guest.errors);
        world.add_fault(Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Read).skip(skip).times(times));
        let _ = match change {
            Change::Take => {
                snapshot = guest.bytes.clone();
                graph.take_internal_snapshot(&node, "kept").await.map(drop)
            }
            Change::Delete => graph.delete_internal_snapshot(&node, &SnapshotName::of_name("gone")).await.map(drop),
        };
        let hits = world.fault_hits();
        guest.read_all(true).await;
        guest.change_all(7).await;
        guest.read_all(true).await;
        world.clear_faults();
        // Everything can be read by now.
        guest.errors.clear();
        guest.change_all(9).await;
        assert!(guest.errors.is_empty(), "{name}: {:?}", guest.errors);
        guest.read_all(false).await;
        if with_bitmap {
            let bits = node.qcow2().expect("qcow2").bitmap_bits("bitmap0").await.expect("a bitmap");
            for at in [CLUSTER, 64 * CLUSTER, FAR + CLUSTER, FAR + 64 * CLUSTER] {
                assert!(bits.covers(at, CLUSTER), "{name}: the write at {at:#x} is not recorded");
            }
        }
        guest.disk.detach().await.expect("detached");
        drop(node);
        graph.close_all().await.unwrap_or_else(|error| panic!("{name}: {error}"));
        (snapshot, guest, hits)
    });
    let image = world.contents(&prepared.top).expect("the image");
    judge_image(&name, &image, &snapshot, &guest);
    hits > 0
}

/// QEMU finds no fault, the bytes of the snapshot, if it was taken, and the guest's.
fn judge_image(name: &str, image: &PageMap, snapshot: &[u8], guest: &Guest) {
    audit(image).unwrap_or_else(|complaint| panic!("{name}: {complaint}"));
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let (path, raw) = (folder.path().join("image"), folder.path().join("raw"));
    std::fs::write(&path, image.to_vec()).expect("a file");
    qemu.expect_no_corruption(&path);
    guest.judge(0, &qemu.content(&path, "qcow2"));
    if qemu.img(["snapshot", "-l", &path.to_string_lossy()]).expect_ok().stdout.contains("kept") {
        qemu.convert((&path, "qcow2"), (&raw, "raw"), &["-l", "snapshot.name=kept"]);
        let kept = std::fs::read(&raw).expect("the snapshot");
        assert!(kept == snapshot, "{name}: the snapshot has changed");
    }
}

fn every_read(spec: Qcow2Spec, bitmaps: &[u64]) {
    let prepared = prepared(spec, bitmaps);
    for change in [Change::Take, Change::Delete] {
        for times in [1, 2, u64::MAX] {
            let harmed =
                (0..).take_while(|skip| one_case(&prepared, change, *skip, times, !bitmaps.is_empty())).count();
            println!("{change:?}: {harmed} reads failed, {times} at a time");
            assert!(harmed > 5, "only {harmed} reads");
        }
    }
}

#[test]
fn a_failed_read_behind_a_snapshot_leaves_both_disks_whole() {
    every_read(Qcow2Spec { cluster_size: CLUSTER, ..Qcow2Spec::default() }, &[]);
}

#[test]
fn a_failed_read_behind_a_snapshot_loses_no_dirty_bit() {
    every_read(Qcow2Spec { cluster_size: CLUSTER, ..Qcow2Spec::default() }, &[CLUSTER]);
}

/// Adds a bitmap while an operation on the file fails, and writes to the disk. Returns whether any failed.
fn one_bitmap(prepared: &Prepared, fault: Fault) -> bool {
    let name = format!("{fault:?}");
    let world = World::with_files(Config::new(1), &prepared.files);
    let (hits, written) = world.run(async {
        let disk = ImageDisk::open(&prepared.top, true, false).await.expect("the image");
        let driver = disk.0.qcow2().expect("qcow2");
        world.add_fault(fault);
        let granularity_bytes = Some(CLUSTER);
        let add = BitmapChange::Add { name: "late".to_owned(), granularity_bytes, enabled: true };
        let added = driver.change_bitmaps(&[add]).await;
        let hits = world.fault_hits();
        world.clear_faults();
        let (written, _) = disk.0.write(CLUSTER, IoBuf::copy_from(&[1; 512])).await;
        assert!(added.is_err() || written.is_ok(), "{name}: {written:?}");
        let _ = disk.0.flush().await;
        let _ = disk.0.close().await;
        (hits, written.is_ok())
    });
    world.run(async {
        let disk = ImageDisk::open(&prepared.top, false, false).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        let driver = disk.0.qcow2().expect("qcow2");
        let found = driver.bitmaps().await.expect("the bitmaps").into_iter().find(|bitmap| bitmap.name == "late");
        if let Some(bitmap) = found.filter(|bitmap| written && !bitmap.inconsistent) {
            let bits = driver.bitmap_bits(&bitmap.name).await.expect("its bits");
            assert!(bits.covers(CLUSTER, 512), "{name}: a write is not recorded");
        }
        disk.0.close().await.expect("closed");
    });
    hits > 0
}

#[test]
fn a_bitmap_whose_addition_fails_misses_no_write() {
    let prepared = prepared(Qcow2Spec { cluster_size: CLUSTER, ..Qcow2Spec::default() }, &[]);
    let effects = [
        (OpKind::Read, Effect::Fail(Errno::EIO)),
        (OpKind::Write, Effect::Fail(Errno::EIO)),
        (OpKind::Write, Effect::Torn(Errno::EIO)),
        (OpKind::Sync, Effect::Fail(Errno::EIO)),
    ];
    for (kind, effect) in effects {
        let hit = (0..).take_while(|skip| one_bitmap(&prepared, Fault::new(effect).kind(kind).skip(*skip))).count();
        println!("{kind:?}: {hit} failed");
        assert!(hit > 0, "no {kind:?} failed");
    }
}
