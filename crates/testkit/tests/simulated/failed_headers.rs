// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes and syncs that fail while the header of an image changes. The header in the file may be the old one or the new one. The
//! image goes on with the one that is there, or takes no more changes.

use cowshed_image::Preallocation;
use cowshed_image::formats::DriverOf;
use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::scenario::{ImageDisk, Prepared};
use cowshed_types::{Errno, Result};
use std::path::Path;

const CLUSTER: u64 = 4096;
/// Two L2 tables have their entries in the L1 table of this disk, and a longer one moves it.
const SIZE: u64 = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Grow,
    /// The L1 table moves.
    GrowFar,
    Shrink,
    BackingFile,
    Bitmap,
    /// The header has the bitmaps, too.
    GrowWithBitmap,
}

const CHANGES: [Change; 6] =
    [Change::Grow, Change::GrowFar, Change::Shrink, Change::BackingFile, Change::Bitmap, Change::GrowWithBitmap];

async fn carry_out(change: Change, disk: &ImageDisk) -> Result<()> {
    match change {
        Change::Grow | Change::GrowWithBitmap => disk.0.resize(SIZE + 8 * CLUSTER, Preallocation::Off).await,
        Change::GrowFar => disk.0.resize(1 << 31, Preallocation::Off).await,
        Change::Shrink => disk.0.resize(SIZE / 2, Preallocation::Off).await,
        Change::BackingFile => disk.0.change_backing_file(Some("another.raw"), Some("raw")).await,
        Change::Bitmap => {
            let add = BitmapChange::Add { name: "late".to_owned(), granularity_bytes: None, enabled: true };
            disk.0.qcow2().expect("qcow2").change_bitmaps(&[add]).await
        }
    }
}

/// Writes at the start, in the middle and at the end of the disk as it is, and flushes. `None`: the image refuses.
async fn use_disk(disk: &ImageDisk, written: &mut Vec<u64>) -> Option<()> {
    let size = disk.0.size();
    for at in [0, SIZE / 2 - CLUSTER, SIZE / 2, size / CLUSTER / 2 * CLUSTER, size - CLUSTER] {
        if at + CLUSTER <= size {
            disk.0.write(at, IoBuf::copy_from(&[9; CLUSTER as usize])).await.0.ok()?;
            written.push(at);
        }
    }
    disk.0.flush().await.ok()
}

/// The image by its node.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    size: u64,
    backing_file: Option<Vec<u8>>,
    bitmaps: Vec<String>,
}

async fn told(disk: &ImageDisk) -> Told {
    let driver = disk.0.qcow2().expect("qcow2");
    let bitmaps = driver.bitmaps().await.expect("the bitmaps").into_iter().map(|bitmap| bitmap.name).collect();
    Told { size: disk.0.size(), backing_file: driver.header().backing_file, bitmaps }
}

/// Carries out a change while an operation fails. Returns whether any did.
fn one_case(prepared: &Prepared, change: Change, fault: Fault, seed: u64) -> bool {
    let name = format!("{change:?}, {fault:?}, seed {seed}");
    let world = World::with_files(Config::new(seed), &prepared.files);
    let beside = Path::new(&prepared.top).with_file_name("another.raw");
    world.add_file(&beside.to_string_lossy(), PageMap::with_len(SIZE));
    let (hits, expected) = world.run(async {
        let disk = ImageDisk::open(&prepared.top, true, false).await.expect("the image");
        disk.0.write(CLUSTER, IoBuf::copy_from(&[1; 512])).await.0.expect("a write");
        disk.0.flush().await.expect("a flush");
        world.add_fault(fault);
        let done = carry_out(change, &disk).await;
        let hits = world.fault_hits();
        world.clear_faults();
        let mut written = Vec::new();
        let goes_on = use_disk(&disk, &mut written).await.is_some();
        assert!(done.is_err() || goes_on, "{name}: a change is done, and the image refuses the next one");
        let expected = if goes_on { Some((told(&disk).await, written)) } else { None };
        let _ = disk.0.close().await;
        (hits, expected)
    });
    if let Some((expected, written)) = &expected {
        world.run(async {
            let disk =
                ImageDisk::open(&prepared.top, false, false).await.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(told(&disk).await, *expected, "{name}");
            for &at in written {
                let (result, buf) = disk.0.read(at, IoBuf::zeroed(CLUSTER as usize)).await;
                result.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert!(buf.iter().all(|byte| *byte == 9), "{name}: a write at {at:#x} is lost");
            }
            disk.0.close().await.expect("closed");
        });
    }
    judge_image(&name, &world.contents(&prepared.top).expect("the image"));
    hits > 0
}

fn judge_image(name: &str, image: &PageMap) {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = folder.path().join("image");
    std::fs::write(&path, image.to_vec()).unwrap_or_else(|error| panic!("{name}: {error}"));
    std::fs::write(folder.path().join("another.raw"), []).expect("a backing file");
    qemu.expect_no_corruption(&path);
}

#[test]
fn an_image_goes_on_with_the_header_of_its_file() {
    let spec = Qcow2Spec { cluster_size: CLUSTER, ..Qcow2Spec::default() };
    let write = |offset| Op::Write { offset, len: 16 * CLUSTER, texture: Texture::Random(offset + 1) };
    let session = vec![write(0), write(SIZE / 2), write(SIZE - 16 * CLUSTER)];
    let chain = Chain { layers: vec![Layer { format: Format::Qcow2(spec), size: SIZE, sessions: vec![session] }] };
    let effects = [
        (OpKind::Write, Effect::Fail(Errno::EIO), 1),
        // Of a torn write other sectors arrive with each seed.
        (OpKind::Write, Effect::Torn(Errno::EIO), 4),
        (OpKind::Sync, Effect::Fail(Errno::EIO), 1),
    ];
    for change in CHANGES {
        let bitmaps: &[u64] = if change == Change::GrowWithBitmap { &[CLUSTER] } else { &[] };
        let prepared = Prepared::with(&chain, false, bitmaps);
        for (kind, effect, seeds) in effects {
            let fault = |skip| Fault::new(effect).kind(kind).skip(skip);
            let is_hit =
                |skip: &u64| (0..seeds).fold(false, |hit, seed| one_case(&prepared, change, fault(*skip), seed) | hit);
            let hit = (0..).take_while(is_hit).count();
            println!("{change:?}: {hit} of {kind:?} failed");
            assert!(hit > 0, "{change:?}: no {kind:?} failed");
        }
    }
}
