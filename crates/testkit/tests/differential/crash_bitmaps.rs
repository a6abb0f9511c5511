// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while dirty bitmaps are changed, and while the disk below them is resized. The bitmaps are as before or
//! as after, and nothing is wrong with the image but leaked clusters. The same holds after a killed process: its writes
//! are dirty, flushed or not.

use cowshed_image::formats::DriverOf;
use cowshed_image::formats::qcow2::{BitmapChange, BitmapStatus};
use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_layout::qcow2::Header;
use cowshed_layout::qcow2::bitmap::parse_directory;
use cowshed_offline::check::{CheckOptions, CheckReport, check};
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::{Errno, Result};
use std::ops::Range;
use std::path::Path;

pub(super) const NAME: &str = "image.qcow2";
const SIZE: u64 = 1 << 20;
/// The room of a device behind the image; its bytes aren't zero.
const DEVICE_ROOM_BYTES: usize = 1 << 20;

/// The operation under way when the power is cut.
#[derive(Clone, Copy, Debug)]
enum Action {
    Add,
    Remove,
    Clear,
    Disable,
    Merge,
    Grow,
    Shrink,
    /// A write, then a change while bitmaps are in use.
    WriteAndClear,
    /// The same with another size.
    WriteAndGrow,
}

const ACTIONS: &[Action] = &[
    Action::Add,
    Action::Remove,
    Action::Clear,
    Action::Disable,
    Action::Merge,
    Action::Grow,
    Action::Shrink,
    Action::WriteAndClear,
    Action::WriteAndGrow,
];

const OPTIONS: &[&str] = &[
    "cluster_size=512",
    "cluster_size=4k",
    "cluster_size=4k,lazy_refcounts=on,refcount_bits=1",
    "cluster_size=16k,extended_l2=on",
    "cluster_size=64k",
];

pub(super) fn prepare(qemu: &Qemu, folder: &Path, options: &str) -> Vec<u8> {
    let path = folder.join(NAME);
    let name = path.to_str().expect("text path");
    qemu.create(&path, "qcow2", options, SIZE);
    qemu.img(["bitmap", "--add", "-g", "512", name, "fine"]).expect_ok();
    qemu.img(["bitmap", "--add", "-g", "65536", name, "coarse"]).expect_ok();
    qemu.io_commands(&path, "qcow2", &["write -P 1 0 96k".into(), "write -P 2 300k 8k".into()]).expect_ok();
    qemu.img(["bitmap", "--add", "--disable", "-g", "4096", name, "still"]).expect_ok();
    std::fs::read(&path).expect("the image just made")
}

async fn act(action: Action) -> Result<()> {
    let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await?;
    let driver = node.qcow2().expect("a qcow2 image");
    let name = "fine".to_owned();
    let change = match action {
        Action::Add => BitmapChange::Add { name: "new".to_owned(), granularity_bytes: Some(1024), enabled: true },
        Action::Remove => BitmapChange::Remove(name),
        Action::Clear | Action::WriteAndClear => BitmapChange::Clear(name),
        Action::Disable => BitmapChange::Disable(name),
        Action::Merge => {
            let source = driver.bitmap_bits("fine").await?;
            BitmapChange::Merge { target: "still".to_owned(), source }
        }
        Action::Grow | Action::Shrink | Action::WriteAndGrow => {
            if matches!(action, Action::WriteAndGrow) {
                node.write(0, IoBuf::zeroed(512)).await.0?;
            }
            let size = if matches!(action, Action::Shrink) { SIZE / 4 } else { SIZE * 9 };
            node.resize(size, Preallocation::Off).await?;
            return node.close().await;
        }
    };
    if matches!(action, Action::WriteAndClear) {
        node.write(0, IoBuf::zeroed(512)).await.0?;
    }
    driver.change_bitmaps(&[change]).await?;
    node.close().await
}

/// Size, bitmaps, and their bits.
pub(super) type Bitmaps = (u64, Vec<(BitmapStatus, Vec<Range<u64>>)>);

pub(super) async fn bitmaps() -> Result<Bitmaps> {
    // For writing: the journal that a cut has left is taken up.
    let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await?;
    let driver = node.qcow2().expect("a qcow2 image");
    let mut all = Vec::new();
    for status in driver.bitmaps().await? {
        let bits = driver.bitmap_bits(&status.name).await?;
        all.push((status, bits.dirty_ranges().collect()));
    }
    let size = node.size();
    node.close().await?;
    Ok((size, all))
}

pub(super) async fn run_check() -> Result<CheckReport> {
    let file = File::open(Path::new(NAME), &OpenOptions::default())?;
    check(&file, &CheckOptions::default(), &|_, _| true).await
}

/// The expectations of every disk that a power cut leaves.
struct Expected<'a> {
    qemu: &'a Qemu,
    folder: &'a Path,
    config: Config,
    before: Bitmaps,
    after: Bitmaps,
}

impl Expected<'_> {
    fn verify(&self, case: &CrashCase<'_>) -> std::result::Result<(), String> {
        let world = World::with_files(Config { in_order: true, ..self.config.clone() }, &case.state.files);
        let told = |what: &'static str| move |error: cowshed_types::Error| format!("{what}: {error}");
        let dirty = case.state.files.get(NAME).is_some_and(|file| {
            let mut byte = [0];
            file.read(79, &mut byte);
            byte[0] & 1 != 0
        });
        let left = world.run(run_check()).map_err(told("check"))?;
        if !dirty && (left.counters.corruptions != 0 || left.counters.check_errors != 0) {
            return Err(format!("{:#?}", left.findings));
        }
        let found = world.run(bitmaps()).map_err(told("opened after the cut"))?;
        if found != self.before && found != self.after {
            return Err(format!("neither as before nor as after: {found:?}"));
        }
        if case.number.is_multiple_of(40) {
            let path = self.folder.join("state.qcow2");
            let bytes = world.contents(NAME).ok_or("the image is gone")?.to_vec();
            std::fs::write(&path, bytes).map_err(|error| error.to_string())?;
            let verdict = self.qemu.check(&path, "qcow2");
            if verdict.corruptions != 0 || !matches!(verdict.code, 0 | 3) {
                return Err(format!("qemu-img: {} {}", verdict.json, verdict.stderr));
            }
        }
        Ok(())
    }
}

#[test]
fn changes_of_bitmaps_survive_power_cuts() {
    change_and_cut(false, 100);
}

#[test]
fn changes_of_bitmaps_on_a_device_survive_power_cuts() {
    change_and_cut(true, 30);
}

fn change_and_cut(on_a_device: bool, max_distinct: usize) {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    for (number, options) in OPTIONS.iter().enumerate() {
        let mut image = prepare(&qemu, folder.path(), options);
        if on_a_device {
            image.resize((image.len() + DEVICE_ROOM_BYTES).next_multiple_of(4096), 0xee);
        }
        let files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]);
        for action in ACTIONS {
            let sector_bytes = if number % 2 == 0 { 512 } else { 4096 };
            let direct = sector_bytes == 4096;
            let config = Config { sector_bytes, direct, fixed_length: on_a_device, ..Config::new(number as u64) };
            let before = World::with_files(config.clone(), &files).run(bitmaps()).expect("readable bitmaps");
            let world = World::with_files(config.clone(), &files);
            world.run(act(*action)).unwrap_or_else(|error| panic!("{action:?} on {options}: {error}"));
            let trace = world.trace();
            let after = world.run(bitmaps()).expect("readable bitmaps");
            assert!(before != after, "{action:?}: nothing happened");
            let (qemu, folder) = (&qemu, folder.path());
            let expected = Expected { qemu, folder, config, before, after };
            let plan = CrashPlan { max_distinct, ..CrashPlan::new(number as u64) };
            match explore(&trace, &plan, |state| expected.verify(state)) {
                Ok(report) => total.add(&report),
                Err(failure) => panic!("{action:?} on {options}: {failure}"),
            }
        }
    }
    println!("bitmaps: {total}");
    assert!(total.distinct() > 500, "{total}");
}

/// The image reads as `BASE` where it has nothing.
const BASE: &str = "base.raw";

/// Reads all of the disk through a filter that copies the read data into the image.
async fn copy_on_read() -> Result<()> {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let options = format!("driver=copy-on-read,node-name=disk,file.driver=qcow2,file.file.filename={NAME}");
    let node = graph.add(BlockdevOptions::from_keyval(&options)?).await?;
    let user = graph.attach(&node, AttachRequest::export("guest", true)).await?;
    for at in (0..SIZE).step_by(256 << 10) {
        user.queue().read(at, IoBuf::zeroed(256 << 10)).await.0?;
        user.queue().flush().await?;
    }
    user.detach().await?;
    drop(node);
    graph.close_all().await
}

async fn content() -> Result<Vec<u8>> {
    let node = open(OpenRequest::file(NAME).format("qcow2")).await?;
    let (read, buf) = node.read(0, IoBuf::zeroed(SIZE as usize)).await;
    read?;
    node.close().await?;
    Ok(buf.to_vec())
}

/// Copies into the image change neither the disk nor a bitmap, wherever the power goes.
#[test]
fn copies_of_reads_leave_bitmaps_through_power_cuts() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let base: Vec<u8> = (0..SIZE as usize).map(|at| (at / 4096 % 251) as u8).collect();
    std::fs::write(folder.path().join(BASE), &base).expect("a base");
    let mut total = CrashReport::default();
    for (number, options) in OPTIONS.iter().enumerate() {
        let image = prepare(&qemu, folder.path(), &format!("{options},backing_file={BASE},backing_fmt=raw"));
        let files = Snapshot::from([
            (NAME.to_owned(), PageMap::from_bytes(&image)),
            (BASE.to_owned(), PageMap::from_bytes(&base)),
        ]);
        let config = Config::new(number as u64);
        let at_rest = World::with_files(config.clone(), &files);
        let (before, disk) = at_rest.run(async { (bitmaps().await, content().await) });
        let (before, disk) = (before.expect("readable bitmaps"), disk.expect("a readable disk"));
        let world = World::with_files(config.clone(), &files);
        world.run(copy_on_read()).unwrap_or_else(|error| panic!("{options}: {error}"));
        assert_ne!(world.contents(NAME).expect("the image").to_vec(), image, "nothing was copied");
        let (qemu, folder) = (&qemu, folder.path());
        let after = before.clone();
        let expected = Expected { qemu, folder, config: config.clone(), before, after };
        let plan = CrashPlan { max_distinct: 100, ..CrashPlan::new(number as u64) };
        let verify = |case: &CrashCase<'_>| {
            expected.verify(case)?;
            let world = World::with_files(Config { in_order: true, ..config.clone() }, &case.state.files);
            match world.run(content()) {
                Ok(found) if found == disk => Ok(()),
                Ok(_) => Err("the disk reads differently".to_owned()),
                Err(error) => Err(format!("read after the cut: {error}")),
            }
        };
        match explore(&world.trace(), &plan, verify) {
            Ok(report) => total.add(&report),
            Err(failure) => panic!("{options}: {failure}"),
        }
    }
    println!("copies of reads: {total}");
    assert!(total.distinct() > 100, "{total}");
}

/// The process ends without a close or a flush; the machine goes on, so all that it wrote is in the file.
#[test]
fn a_killed_process_loses_no_bit() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for options in ["cluster_size=4k", "cluster_size=64k", "cluster_size=16k,extended_l2=on"] {
        let image = prepare(&qemu, folder.path(), options);
        let world = World::with_files(
            Config { in_order: true, ..Config::new(1) },
            &Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]),
        );
        world.run(async {
            let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
            node.write(700 << 10, IoBuf::zeroed(1024)).await.0.expect("write");
            node.write_zeroes(500 << 10, 4096, ZeroFlags::default()).await.expect("zeroes");
            std::mem::forget(node);
        });
        let left = Snapshot::from([(NAME.to_owned(), world.contents(NAME).expect("the image"))]);
        // To others the bitmaps are in use.
        let path = folder.path().join("left.qcow2");
        std::fs::write(&path, left[NAME].to_vec()).expect("written");
        let info = qemu.info(&path, "qcow2");
        let flags = &info["format-specific"]["data"]["bitmaps"][0]["flags"];
        assert_eq!(*flags, serde_json::json!(["in-use", "auto"]), "{info}");
        let again = World::with_files(Config::new(2), &left);
        let (_, found) = again.run(bitmaps()).expect("readable bitmaps");
        let fine = &found[0].1;
        assert_eq!(*fine, [0..96 << 10, 300 << 10..308 << 10, 500 << 10..504 << 10, 700 << 10..701 << 10]);
        // Once taken up and closed, they are whole for every program.
        std::fs::write(&path, again.contents(NAME).expect("the image").to_vec()).expect("written");
        let info = qemu.info(&path, "qcow2");
        assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["flags"], serde_json::json!(["auto"]), "{info}");
        qemu.expect_clean(&path);
    }
}

/// A program that doesn't know the journal clears its bit before it writes: its writes are in no bitmap of ours.
#[test]
fn another_writer_ends_the_journal() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let image = prepare(&qemu, folder.path(), "cluster_size=64k");
    let world = World::with_files(
        Config { in_order: true, ..Config::new(1) },
        &Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]),
    );
    world.run(async {
        let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
        node.write(700 << 10, IoBuf::zeroed(1024)).await.0.expect("write");
        node.flush().await.expect("flush");
        std::mem::forget(node);
    });
    let path = folder.path().join("left.qcow2");
    std::fs::write(&path, world.contents(NAME).expect("the image").to_vec()).expect("written");
    qemu.io_commands(&path, "qcow2", &["write -P 5 800k 4k".into()]).expect_ok();
    let left = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&std::fs::read(&path).expect("the image")))]);
    let again = World::with_files(Config::new(2), &left);
    again.run(async {
        let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
        let driver = node.qcow2().expect("qcow2");
        let found = driver.bitmaps().await.expect("bitmaps");
        let inconsistent: Vec<bool> = found.iter().map(|bitmap| bitmap.inconsistent).collect();
        // The disabled one was never in use.
        assert_eq!(inconsistent, [true, true, false]);
        let error = driver.change_bitmaps(&[BitmapChange::Clear("fine".to_owned())]).await.unwrap_err();
        assert!(error.to_string().contains("inconsistent"), "{error}");
        driver.change_bitmaps(&[BitmapChange::Remove("fine".to_owned())]).await.expect("removed");
        node.close().await.expect("close");
    });
    std::fs::write(&path, again.contents(NAME).expect("the image").to_vec()).expect("written");
    qemu.expect_clean(&path);
}

/// The place of a piece of a bitmap without a cluster is free again where its entry can't be written.
#[test]
fn a_failed_entry_of_a_bitmap_table_leaks_nothing() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let image = prepare(&qemu, folder.path(), "cluster_size=64k");
    let world = World::with_files(
        Config { in_order: true, ..Config::new(1) },
        &Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]),
    );
    let opened = async || open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open");
    world.run(async {
        let node = opened().await;
        let clear = BitmapChange::Clear("fine".to_owned());
        node.qcow2().expect("qcow2").change_bitmaps(&[clear]).await.expect("cleared");
        node.close().await.expect("close");
    });
    let image = world.contents(NAME).expect("the image").to_vec();
    let header = Header::parse(&image).expect("a header");
    let extension = header.bitmaps().expect("bitmaps");
    let directory = &image[extension.directory_offset as usize..][..extension.directory_size as usize];
    let entries = parse_directory(directory, extension).expect("a directory");
    let table = entries.iter().find(|entry| entry.name == b"fine").expect("the bitmap").table_offset;
    let fault = Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Write).range(table..table + 8).times(1);
    world.add_fault(fault);
    world.run(async {
        let node = opened().await;
        assert!(node.write(900 << 10, IoBuf::zeroed(512)).await.0.is_err());
        assert_eq!(world.fault_hits(), 1);
        node.close().await.expect("close");
    });
    let left = world.run(run_check()).expect("a check");
    assert_eq!((left.counters.corruptions, left.counters.leaks), (0, 0), "{:#?}", left.findings);
    world.run(async {
        let node = opened().await;
        node.write(900 << 10, IoBuf::zeroed(512)).await.0.expect("the second try");
        node.close().await.expect("close");
    });
    let (_, found) = world.run(bitmaps()).expect("bitmaps");
    assert_eq!(found[0].1, [Range { start: 900 << 10, end: (900 << 10) + 512 }]);
}
