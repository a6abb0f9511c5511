// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images with bitmaps and internal snapshots, after kills and power cuts. QEMU's `check -r` drops every snapshot beside an
//! autoclear bit that it doesn't know, or a bitmap that isn't in use. So no image has both the journal's bit and snapshots.

use super::crash_bitmaps::{Bitmaps, NAME, bitmaps, prepare, run_check};
use cowshed_image::formats::DriverOf;
use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{OpenRequest, open};
use cowshed_layout::qcow2::features::{AUTOCLEAR_BITMAP_JOURNAL, AUTOCLEAR_BITMAPS};
use cowshed_layout::qcow2::{Header, SnapshotName, offset};
use cowshed_offline::amend::{Amendment, amend};
use cowshed_offline::check::{CheckOptions, check};
use cowshed_offline::snapshots::{self, SnapshotOptions};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::{Repair, Result};
use std::path::Path;

const OPTIONS: &[&str] = &["cluster_size=4k", "cluster_size=16k,lazy_refcounts=on", "cluster_size=64k"];
/// Written by a session, and where.
const WRITTEN: u8 = 0x55;
const WRITES: [u64; 3] = [500 << 10, 700 << 10, 800 << 10];
/// The offset of the flags in an entry of the directory, its last byte.
const FLAGS_AT: usize = 15;

fn files_of(image: &[u8]) -> Snapshot {
    Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(image))])
}

fn header_of(image: &[u8]) -> Header {
    Header::parse(image).expect("a header")
}

fn has_journal(image: &[u8]) -> bool {
    header_of(image).autoclear_features & AUTOCLEAR_BITMAP_JOURNAL != 0
}

/// The image that a process leaves which is killed after `work` on it.
fn killed(image: &[u8], takes_snapshot: bool) -> Vec<u8> {
    let world = World::with_files(Config { in_order: true, ..Config::new(1) }, &files_of(image));
    world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let options = format!("driver=qcow2,node-name=disk,file.filename={NAME}");
        let node = graph.add(BlockdevOptions::from_keyval(&options).expect("options")).await.expect("a node");
        let user = graph.attach(&node, AttachRequest::export("guest", true)).await.expect("a user");
        user.queue().write(500 << 10, IoBuf::zeroed(4096)).await.0.expect("write");
        if takes_snapshot {
            graph.take_internal_snapshot(&node, "monday").await.expect("a snapshot");
            user.queue().write(700 << 10, IoBuf::zeroed(4096)).await.0.expect("write");
        }
        user.queue().flush().await.expect("flush");
        std::mem::forget((user, node, graph));
    });
    world.contents(NAME).expect("the image").to_vec()
}

/// Both QEMUs keep the snapshot when they repair the image of a killed process.
fn expect_snapshots_after_repair(folder: &Path, image: &[u8], case: &str) {
    let path = folder.join("left.qcow2");
    for qemu in Qemu::all() {
        for repair in ["leaks", "all"] {
            std::fs::write(&path, image).expect("written");
            qemu.img([Path::new("check"), Path::new("-r"), Path::new(repair), &path]);
            let listed = qemu.img([Path::new("snapshot"), Path::new("-l"), &path]).expect_ok();
            assert!(listed.stdout.contains("monday"), "{case}, -r {repair}, QEMU {:?}: gone", qemu.version());
        }
        qemu.expect_clean(&path);
    }
}

/// Whether the bitmap `fine` can't be trusted.
fn is_inconsistent(found: &Bitmaps) -> bool {
    found.1.iter().find(|(status, _)| status.name == "fine").expect("the bitmap").0.inconsistent
}

#[test]
fn snapshots_stay_through_qemus_repair_after_a_kill() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for options in OPTIONS {
        let image = prepare(&qemu, folder.path(), options);
        let left = killed(&image, true);
        assert_eq!(header_of(&left).nb_snapshots, 1);
        assert!(!has_journal(&left), "{options}");
        expect_snapshots_after_repair(folder.path(), &left, options);
        // As with other programs, the kill has cost the bitmap.
        let world = World::with_files(Config::new(2), &files_of(&left));
        assert_eq!(consistent_bits(&world), None, "{options}");
    }
}

/// The first dirty ranges of the bitmap `fine`, unless it is inconsistent.
fn consistent_bits(world: &World) -> Option<usize> {
    world.run(async {
        let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
        let bits = node.qcow2().expect("qcow2").bitmap_bits("fine").await;
        node.close().await.expect("close");
        bits.ok().map(|bits| bits.dirty_ranges().count())
    })
}

async fn take_offline() -> Result<()> {
    let file = File::open(Path::new(NAME), &OpenOptions { write: true, ..OpenOptions::default() })?;
    snapshots::create(&file, b"monday", &SnapshotOptions::default(), &|_, _| true).await.map(drop)
}

/// Writes before and after a snapshot, which goes in the end.
async fn session() -> Result<()> {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node =
        graph.add(BlockdevOptions::from_keyval(&format!("driver=qcow2,node-name=disk,file.filename={NAME}"))?).await?;
    let user = graph.attach(&node, AttachRequest::export("guest", true)).await?;
    user.queue().write(WRITES[0], IoBuf::copy_from(&[WRITTEN; 4096])).await.0?;
    graph.take_internal_snapshot(&node, "monday").await?;
    user.queue().write(WRITES[1], IoBuf::copy_from(&[WRITTEN; 4096])).await.0?;
    graph.delete_internal_snapshot(&node, &SnapshotName::of_name("monday".to_owned())).await?;
    user.queue().write(WRITES[2], IoBuf::copy_from(&[WRITTEN; 4096])).await.0?;
    user.detach().await?;
    drop(node);
    graph.close_all().await
}

/// A bitmap is in use, or has every write that is on the disk.
async fn expect_complete() -> std::result::Result<(), String> {
    let told = |error: cowshed_types::Error| error.to_string();
    let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.map_err(told)?;
    let driver = node.qcow2().expect("qcow2");
    for status in driver.bitmaps().await.map_err(told)?.into_iter().filter(|status| status.enabled) {
        if status.inconsistent {
            continue;
        }
        let bits = driver.bitmap_bits(&status.name).await.map_err(told)?;
        for at in WRITES {
            let (read, buf) = node.read(at, IoBuf::zeroed(4096)).await;
            read.map_err(told)?;
            if buf.contains(&WRITTEN) && !bits.covers(at, 512) {
                return Err(format!("'{}' lacks the write at {at}", status.name));
            }
        }
    }
    node.close().await.map_err(told)
}

/// Never both on the disk, and no error in the image.
fn verify(case: &CrashCase<'_>, config: &Config) -> std::result::Result<(), String> {
    let image = case.state.files.get(NAME).ok_or("the image is gone")?.to_vec();
    let header = Header::parse(&image).map_err(|error| error.to_string())?;
    if header.nb_snapshots > 0 && has_journal(&image) {
        return Err("a journal beside snapshots".to_owned());
    }
    let world = World::with_files(Config { in_order: true, ..config.clone() }, &case.state.files);
    let left = world.run(run_check()).map_err(|error| error.to_string())?;
    world.run(expect_complete())?;
    match !header.is_dirty() && left.counters.corruptions != 0 {
        true => Err(format!("{:#?}", left.findings)),
        false => Ok(()),
    }
}

fn cut(image: &[u8], seed: u64, work: impl Future<Output = Result<()>>) -> CrashReport {
    let config = Config::new(seed);
    let world = World::with_files(config.clone(), &files_of(image));
    world.run(work).expect("the work");
    let plan = CrashPlan { max_distinct: 100, ..CrashPlan::new(seed) };
    explore(&world.trace(), &plan, |case| verify(case, &config)).unwrap_or_else(|failure| panic!("{failure}"))
}

#[test]
fn no_power_cut_leaves_a_journal_beside_snapshots() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    for (seed, options) in OPTIONS.iter().enumerate() {
        let image = prepare(&qemu, folder.path(), options);
        total.add(&cut(&image, seed as u64, session()));
        total.add(&cut(&killed(&image, false), seed as u64, take_offline()));
    }
    println!("bitmaps beside snapshots: {total}");
    assert!(total.distinct() > 250, "{total}");
}

#[test]
fn a_snapshot_of_a_crashed_image_keeps_its_bitmaps() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for options in OPTIONS {
        let image = prepare(&qemu, folder.path(), options);
        let left = killed(&image, false);
        assert!(has_journal(&left));
        let before = World::with_files(Config::new(1), &files_of(&left)).run(bitmaps()).expect("bitmaps");
        assert!(!is_inconsistent(&before));
        let world = World::with_files(Config::new(1), &files_of(&left));
        world.run(take_offline()).expect("a snapshot");
        let taken = world.contents(NAME).expect("the image").to_vec();
        assert!(!has_journal(&taken));
        expect_snapshots_after_repair(folder.path(), &killed(&taken, false), options);
        assert_eq!(world.run(bitmaps()).expect("bitmaps"), before, "{options}");
    }
}

/// The image as a crash of version 0.2 left it: the journal's bit, marked bitmaps and a snapshot.
fn of_an_older_version(image: &[u8]) -> Vec<u8> {
    let left = killed(image, false);
    let world = World::with_files(Config::new(1), &files_of(&left));
    world.run(take_offline()).expect("a snapshot");
    let mut image = world.contents(NAME).expect("the image").to_vec();
    let bits = AUTOCLEAR_BITMAP_JOURNAL | AUTOCLEAR_BITMAPS;
    image[offset::AUTOCLEAR_FEATURES as usize..][..8].copy_from_slice(&bits.to_be_bytes());
    let header = header_of(&image);
    assert!(header.bitmap_journal().is_some(), "the journal counts");
    let directory = header.bitmaps().expect("bitmaps").directory_offset as usize;
    image[directory + FLAGS_AT] |= 1;
    image
}

#[test]
fn images_of_older_versions_lose_the_journal_first() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let image = of_an_older_version(&prepare(&qemu, folder.path(), "cluster_size=64k"));
    let wanted = Some(2 + 1);
    expect_snapshots_after_repair(folder.path(), &killed(&image, false), "written on");
    for door in ["open", "snapshot", "delete", "amend", "check", "check leaks"] {
        let world = World::with_files(Config { in_order: true, ..Config::new(1) }, &files_of(&image));
        world.run(async {
            let options = OpenOptions { write: true, ..OpenOptions::default() };
            let file = File::open(Path::new(NAME), &options).expect("the image");
            let watch = |_, _| true;
            let repair = if door == "check" { Repair::All } else { Repair::Leaks };
            match door {
                "open" => {
                    let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
                    node.close().await.expect("close");
                }
                "snapshot" => {
                    snapshots::create(&file, b"two", &SnapshotOptions::default(), &watch).await.map(drop).expect(door);
                }
                "delete" => {
                    snapshots::create(&file, b"two", &SnapshotOptions::default(), &watch).await.map(drop).expect(door);
                    snapshots::delete(&file, b"two", &SnapshotOptions::default(), &watch).await.expect(door);
                }
                "amend" => {
                    let amendment = Amendment { refcount_order: Some(5), ..Amendment::default() };
                    amend(&file, &amendment, false, &watch).await.expect(door);
                }
                _ => {
                    let options = CheckOptions { repair, ..CheckOptions::default() };
                    check(&file, &options, &watch).await.map(drop).expect(door);
                }
            }
        });
        let left = world.contents(NAME).expect("the image").to_vec();
        assert!(!has_journal(&left), "{door}");
        expect_snapshots_after_repair(folder.path(), &killed(&left, false), door);
        let world = World::with_files(Config::new(2), &files_of(&left));
        assert_eq!(consistent_bits(&world), wanted, "{door}");
    }
}

/// The flags of all bitmaps, as QEMU shows them.
fn flags_of(qemu: &Qemu, folder: &Path, world: &World) -> Vec<String> {
    let path = folder.join("shown.qcow2");
    std::fs::write(&path, world.contents(NAME).expect("the image").to_vec()).expect("written");
    let info = qemu.info(&path, "qcow2");
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().expect("bitmaps").clone();
    bitmaps.iter().map(|bitmap| bitmap["flags"].to_string()).collect()
}

#[test]
fn bitmaps_beside_snapshots_are_in_use_until_the_close() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for options in OPTIONS {
        let image = prepare(&qemu, folder.path(), options);
        let world = World::with_files(Config { in_order: true, ..Config::new(1) }, &files_of(&image));
        world.run(take_offline()).expect("a snapshot");
        let at_rest = [r#"["auto"]"#, r#"["auto"]"#, "[]"];
        let in_use = [r#"["in-use","auto"]"#, r#"["in-use","auto"]"#, r#"["in-use"]"#];
        let shown = || flags_of(&qemu, folder.path(), &world);
        assert_eq!(shown(), at_rest, "{options}");
        world.run(async {
            let node = open(OpenRequest::file(NAME).format("qcow2")).await.expect("open");
            assert_eq!(shown(), at_rest, "{options}: open for reading");
            node.close().await.expect("close");
            let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
            assert_eq!(shown(), in_use, "{options}: before the first write");
            let driver = node.qcow2().expect("qcow2");
            for change in [BitmapChange::Disable("fine".into()), BitmapChange::Enable("fine".into())] {
                driver.change_bitmaps(&[change]).await.expect("a change");
                assert_eq!(shown().iter().filter(|flags| flags.contains("in-use")).count(), 3, "{options}");
            }
            node.close().await.expect("close");
        });
        assert_eq!(shown(), at_rest, "{options}: closed");
        // All of them disabled: as QEMU's writers do it.
        let left = world.run(async {
            let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
            let driver = node.qcow2().expect("qcow2");
            for name in ["fine", "coarse"] {
                driver.change_bitmaps(&[BitmapChange::Disable(name.into())]).await.expect("a change");
            }
            node.close().await.expect("close");
            let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
            std::mem::forget(node);
            world.contents(NAME).expect("the image").to_vec()
        });
        expect_snapshots_after_repair(folder.path(), &left, options);
    }
}

/// A request that fails behind the opening of an image leaves its bitmaps as they were.
#[test]
fn a_refused_node_above_leaves_bitmaps_alone() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let image = prepare(&qemu, folder.path(), OPTIONS[0]);
    let world = World::with_files(Config { in_order: true, ..Config::new(1) }, &files_of(&image));
    world.run(take_offline()).expect("a snapshot");
    world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let options = format!(
            "driver=throttle,node-name=t,throttle-group=none,file.driver=qcow2,file.node-name=disk,file.file.filename={NAME}"
        );
        let options = BlockdevOptions::from_keyval(&options).expect("options");
        assert!(graph.add(options).await.is_err());
    });
    assert!(flags_of(&qemu, folder.path(), &world).iter().all(|flags| !flags.contains("in-use")));
}
