// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every verb that writes, on a disk that has no room for it: one clear error, and no image that was there has lost
//! anything. With room again the same command succeeds. (Writes of a guest, amendments and bitmaps: `crash_engine.rs`,
//! `crash_amend.rs`, `bitmaps_hostile.rs`.)

use cowshed_image::formats::DriverOf;
use cowshed_image::{OpenRequest, Preallocation, open};
use cowshed_jobs::bench::{Bench, BenchOptions};
use cowshed_jobs::bitmap::{self, BitmapAction, BitmapOptions};
use cowshed_jobs::check::{self as check_job, CheckOptions};
use cowshed_jobs::commit::{self, CommitOptions};
use cowshed_jobs::convert::{self, ConvertOptions};
use cowshed_jobs::create::{self, CreateRequest};
use cowshed_jobs::dd::{self, DdOptions};
use cowshed_jobs::rebase::{self, RebaseOptions};
use cowshed_jobs::rescue::{self, RescueOptions};
use cowshed_jobs::resize::{self, NewSize, ResizeOptions};
use cowshed_jobs::snapshot::{self, SnapshotAction};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_layout::qcow2::SnapshotName;
use cowshed_offline::check::{CheckOptions as ImageCheck, check};
use cowshed_offline::snapshots;
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::{Errno, ErrorKind, Repair, Result};
use std::path::Path;

const SIZE: u64 = 1 << 20;
const FILES: &[&str] = &["base", "top", "other", "leaky"];

/// The data of each image, its snapshots behind it.
type Contents = Vec<Vec<Vec<u8>>>;

fn prepare(qemu: &Qemu, folder: &Path, options: &str) -> Snapshot {
    let path = |name: &str| folder.join(name);
    let text = |name: &str| path(name).to_str().expect("text path").to_owned();
    let io = |name: &str, commands: &[&str]| {
        let commands: Vec<String> = commands.iter().map(|&command| command.to_owned()).collect();
        qemu.io_commands(&path(name), "qcow2", &commands).expect_ok();
    };
    qemu.create(&path("base"), "qcow2", options, SIZE);
    io("base", &["write -P 1 0 128k"]);
    qemu.create(&path("other"), "qcow2", options, SIZE);
    io("other", &["write -P 1 0 32k", "write -P 3 100k 40k"]);
    qemu.create(&path("top"), "qcow2", &format!("{options},backing_file={},backing_fmt=qcow2", text("base")), SIZE);
    io("top", &["write -P 4 64k 300k"]);
    qemu.img(["snapshot", "-c", "one", &text("top")]).expect_ok();
    io("top", &["write -P 5 500k 100k"]);
    qemu.img(["rebase", "-u", "-F", "qcow2", "-b", "base", &text("top")]).expect_ok();
    // A count that is too low: the repair raises it, and so needs nothing; a lost refcount block needs room.
    qemu.create(&path("leaky"), "qcow2", "cluster_size=4k", SIZE);
    io("leaky", &["write -P 6 0 200k"]);
    let mut bytes = std::fs::read(path("leaky")).expect("an image");
    let table = u64::from_be_bytes(bytes[48..56].try_into().expect("8 bytes")) as usize;
    bytes[table..table + 8].fill(0);
    std::fs::write(path("leaky"), bytes).expect("an image");
    let read = |name: &&str| ((*name).to_owned(), PageMap::from_bytes(&std::fs::read(path(name)).expect("an image")));
    FILES.iter().map(read).collect()
}

fn image(name: &str) -> ImageSpec {
    ImageSpec::file(name).format("qcow2")
}

const VERBS: &[&str] = &[
    "create",
    "create full",
    "convert",
    "convert -c",
    "convert raw",
    "dd",
    "resize falloc",
    "resize full",
    "resize metadata",
    "snapshot -c",
    "snapshot -a",
    "snapshot -d",
    "commit",
    "rebase",
    "rebase other",
    "bitmap",
    "bench",
    "check",
    "rescue",
];

async fn act(verb: &str) -> Result<()> {
    let job = JobHandle::new();
    let (first, rest) = verb.split_once(' ').unwrap_or((verb, ""));
    match first {
        "create" => {
            let options = match rest {
                "full" => vec!["preallocation=full".to_owned()],
                _ => vec!["cluster_size=4k,preallocation=metadata".to_owned()],
            };
            let filename = "new".to_owned();
            let format = "qcow2".to_owned();
            let request = CreateRequest { filename, format, size: Some(SIZE), options, ..CreateRequest::default() };
            create::run(&request, &job).await.map(drop)
        }
        "convert" => {
            let target = ImageSpec::file("new").format(if rest == "raw" { "raw" } else { "qcow2" });
            let compressed = rest == "-c";
            let options = ConvertOptions { compressed, ..ConvertOptions::new(vec![image("top")], target) };
            convert::run(&options, &job).await.map(drop)
        }
        "dd" => {
            let (source, target) = (image("top"), ImageSpec::file("new").format("qcow2"));
            let options = DdOptions { source, target, block_bytes: 4096, count: None, skip: 3, keeps_existing: false };
            dd::run(&options, &job).await.map(drop)
        }
        "resize" => {
            let preallocation = match rest {
                "falloc" => Preallocation::Falloc,
                "full" => Preallocation::Full,
                _ => Preallocation::Metadata,
            };
            let size = NewSize::Grow(SIZE);
            let options = ResizeOptions { image: image("other"), size, shrink: false, preallocation };
            resize::run(&options, &job).await.map(drop)
        }
        "snapshot" => {
            let name = if rest == "-c" { "two" } else { "one" }.to_owned();
            let action = match rest {
                "-c" => SnapshotAction::Create(name),
                "-a" => SnapshotAction::Apply(name),
                _ => SnapshotAction::Delete(name),
            };
            snapshot::run(&image("top"), &action, &job).await
        }
        "commit" => commit::run(&CommitOptions { image: image("top"), ..CommitOptions::default() }, &job).await,
        "rebase" => {
            let base = Some(rest).filter(|base| !base.is_empty()).map(str::to_owned);
            let base_format = base.as_ref().map(|_| "qcow2".to_owned());
            let options = RebaseOptions { image: image("top"), base, base_format, ..RebaseOptions::default() };
            rebase::run(&options, &job).await
        }
        "bitmap" => {
            let options = BitmapOptions {
                image: image("other"),
                name: "b".to_owned(),
                actions: vec![BitmapAction::Add],
                granularity_bytes: Some(512),
                source: None,
            };
            bitmap::run(&options, &job).await.map_err(|(_, error)| error)
        }
        "bench" => {
            let options = BenchOptions {
                image: image("other"),
                count: 30,
                depth: 4,
                offset: 0,
                buffer_bytes: 32 << 10,
                step_bytes: 0,
                pattern: Some(7),
                flush_interval: 4,
                keeps_flowing: false,
            };
            Bench::open(&options).await?.run(&job).await.map(drop)
        }
        "check" => {
            let options = CheckOptions { image: image("leaky"), repair: Repair::All, ..CheckOptions::default() };
            check_job::run(&options, &job).await.map(drop)
        }
        _ => {
            let options = RescueOptions {
                image: ImageSpec::file("top"),
                target: Some(ImageSpec::file("new").format("qcow2")),
                backing: Some(("base".to_owned(), Some("qcow2".to_owned()))),
                ..RescueOptions::default()
            };
            rescue::run(&options, &job).await.map(drop)
        }
    }
}

async fn content(name: &str, snapshot: Option<SnapshotName>) -> Result<Vec<u8>> {
    let node = open(OpenRequest::file(name).format("qcow2").snapshot(snapshot)).await?;
    let (result, buf) = node.read(0, IoBuf::zeroed(node.size() as usize)).await;
    result?;
    node.close().await?;
    Ok(buf.to_vec())
}

async fn contents() -> Result<Contents> {
    let mut all = Vec::new();
    for name in FILES {
        let mut image = vec![content(name, None).await?];
        let node = open(OpenRequest::file(*name).format("qcow2").no_backing()).await?;
        let driver = node.qcow2().expect("a qcow2 image");
        let listed = snapshots::list(driver.image_file(), &driver.header()).await?;
        node.close().await?;
        for snapshot in listed {
            let id = String::from_utf8_lossy(&snapshot.id).into_owned();
            image.push(content(name, Some(SnapshotName::of_id(id))).await?);
        }
        all.push(image);
    }
    Ok(all)
}

/// Errors that a check finds in an image; leaks don't count.
async fn errors_in(name: &str) -> Result<u64> {
    let file = File::open(Path::new(name), &OpenOptions::default())?;
    let report = check(&file, &ImageCheck::default(), &|_, _| true).await?;
    Ok(report.counters.corruptions + report.counters.check_errors)
}

/// A disk that was written to holds 7 from its start on; the rest has its old bytes.
fn is_partly_written(now: &[u8], before: &[u8]) -> bool {
    now.len() == before.len() && now.iter().zip(before).all(|(now, before)| now == before || *now == 7)
}

fn judge(world: &World, verb: &str, before: &Contents) {
    let found = world.run(contents()).unwrap_or_else(|error| panic!("{verb}: {error}"));
    for (index, name) in FILES.iter().enumerate() {
        let errors = world.run(errors_in(name)).unwrap_or_else(|error| panic!("{verb}: {name}: {error}"));
        // It was damaged before; the rest of its repair is still to be done.
        assert!(errors == 0 || *name == "leaky", "{verb}: {name} has {errors} errors");
        let (now, then) = (&found[index], &before[index]);
        let is_kept = match (verb, *name) {
            // A commit writes the top's data to the base; the top reads the same.
            ("commit", "base") => continue,
            // Its snapshot shows the base where it has nothing of its own, as before.
            ("commit", "top") => now[0] == then[0],
            ("bench", "other") => is_partly_written(&now[0], &then[0]),
            _ => now == then,
        };
        assert!(is_kept, "{verb}: {name} has changed");
    }
}

/// A file system that shares blocks has the unreadable ranges at hand; `--salvage` promised zeroes.
#[test]
fn what_is_salvaged_is_not_taken_over() {
    let bad = 256 << 10..260 << 10;
    for format in ["raw", "qcow2"] {
        let files = Snapshot::from([("a".to_owned(), PageMap::from_bytes(&vec![7; SIZE as usize]))]);
        let world = World::with_files(Config::new(0), &files);
        world.add_fault(
            Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Read).file("a").range(bad.clone()).times(u64::MAX),
        );
        let options = ConvertOptions {
            salvage: true,
            sparse_bytes: 64 << 10,
            ..ConvertOptions::new(vec![ImageSpec::file("a").format("raw")], ImageSpec::file("new").format(format))
        };
        let outcome = world.run(convert::run(&options, &JobHandle::new())).expect("salvaged");
        assert_eq!(outcome.salvaged, [bad.start], "{format}");
        let found = world.run(async {
            let node = open(OpenRequest::file("new").format(format)).await?;
            let (result, buf) = node.read(0, IoBuf::zeroed(SIZE as usize)).await;
            result?;
            node.close().await.map(|()| buf.to_vec())
        });
        let mut expected = vec![7; SIZE as usize];
        expected[bad.start as usize..bad.end as usize].fill(0);
        assert!(found.expect("a readable copy") == expected, "{format}");
    }
}

/// `fallocate` takes space part by part, and the file may be longer by a part when it fails.
#[test]
fn an_allocation_that_fails_half_way_is_taken_back() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut files = prepare(&qemu, folder.path(), "cluster_size=4k");
    files.insert("raw".to_owned(), PageMap::from_bytes(&vec![9; SIZE as usize]));
    let before = World::with_files(Config::new(0), &files).run(contents()).expect("readable images");
    for seed in 0..20 {
        let world = World::with_files(Config::new(seed), &files);
        world.add_fault(Fault::new(Effect::Torn(Errno::ENOSPC)).kind(OpKind::Allocate).times(2));
        let raw = ResizeOptions {
            image: ImageSpec::file("raw").format("raw"),
            size: NewSize::Grow(SIZE),
            shrink: false,
            preallocation: Preallocation::Falloc,
        };
        let error = world.run(resize::run(&raw, &JobHandle::new())).expect_err("no room");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "seed {seed}: {error}");
        assert_eq!(world.contents("raw").expect("a file").len(), SIZE, "seed {seed}: the disk has another length");
        let error = world.run(act("resize falloc")).expect_err("no room");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "seed {seed}: {error}");
        assert_eq!(world.fault_hits(), 2, "seed {seed}");
        judge(&world, "resize falloc", &before);
        world.run(act("resize falloc")).unwrap_or_else(|error| panic!("seed {seed}, with room again: {error}"));
    }
}

#[test]
fn no_verb_loses_anything_on_a_full_disk() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for options in ["cluster_size=4k", "cluster_size=64k,extended_l2=on", "cluster_size=512,compat=0.10"] {
        let files = prepare(&qemu, folder.path(), options);
        let used: u64 = files.values().map(PageMap::allocated_bytes).sum();
        let before = World::with_files(Config::new(0), &files).run(contents()).expect("readable images");
        for verb in VERBS.iter().filter(|verb| **verb != "bitmap" || !options.contains("0.10")) {
            let (mut refused, mut done) = (0, 0);
            for room in [0, 512, 4096, 16 << 10, 64 << 10, 256 << 10, 64 << 20] {
                let config = Config { capacity_bytes: Some(used + room), ..Config::new(room) };
                let world = World::with_files(config, &files);
                let Err(error) = world.run(act(verb)) else {
                    done += 1;
                    continue;
                };
                refused += 1;
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{verb} on {options}: {error}");
                assert!(error.file_name().is_some(), "{verb} on {options}: no file is named: {error}");
                judge(&world, verb, &before);
                world.set_capacity(None);
                let again = world.run(act(verb));
                again.unwrap_or_else(|error| panic!("{verb} on {options}, with room again: {error}"));
            }
            assert!(done > 0, "{verb} on {options} needs more than 64 MiB");
            // A verb that only frees, or changes in place, may need no room at all.
            let may_need_none = matches!(*verb, "snapshot -d" | "snapshot -a" | "resize metadata");
            assert!(refused > 0 || may_need_none, "{verb} on {options} was never refused");
        }
    }
}

/// The images on devices that are `room` bytes longer than their content, with bytes there that aren't zero.
fn on_devices(files: &Snapshot, room: u64) -> Snapshot {
    let longer = |(name, file): (&String, &PageMap)| {
        let mut file = file.clone();
        file.write(file.len(), &vec![0xee; room as usize]);
        (name.clone(), file)
    };
    let mut devices: Snapshot = files.iter().map(longer).collect();
    devices.insert("new".to_owned(), PageMap::from_bytes(&vec![0xee; room as usize]));
    devices
}

/// A device of any length, or an export. A verb that has room in it goes as in a file. Any other is refused by one
/// clear error, with nothing lost.
#[test]
fn every_verb_uses_the_room_of_a_device() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let plenty = 8 << 20;
    for options in ["cluster_size=4k", "cluster_size=64k,extended_l2=on", "cluster_size=512,compat=0.10"] {
        let files = prepare(&qemu, folder.path(), options);
        let before = World::with_files(Config::new(0), &files).run(contents()).expect("readable images");
        for verb in VERBS.iter().filter(|verb| **verb != "bitmap" || !options.contains("0.10")) {
            let makes_new = ["create", "convert", "dd", "rescue"].iter().any(|name| verb.starts_with(name));
            let in_files = World::with_files(Config::new(0), &files);
            in_files.run(act(verb)).unwrap_or_else(|error| panic!("{verb} on {options}: {error}"));
            let after = in_files.run(contents()).expect("readable images");
            for room in [0, 512, 1024, 4096, 12 << 10, 64 << 10, 256 << 10, plenty, plenty + 1000] {
                let case = format!("{verb} on {options} with {room} bytes of room");
                let config = Config { fixed_length: true, ..Config::new(room) };
                let world = World::with_files(config.clone(), &on_devices(&files, room));
                match world.run(act(verb)) {
                    // Space can't be reserved on a device, as in QEMU.
                    refused if matches!(*verb, "resize falloc" | "resize full") => {
                        let error = refused.expect_err("a device reserves no space");
                        assert_eq!(error.kind(), ErrorKind::Unsupported, "{case}: {error}");
                        assert!(error.file_name().is_some(), "{case}: no file is named: {error}");
                        judge(&world, verb, &before);
                    }
                    Ok(()) => {
                        assert!(world.run(contents()).expect("readable images") == after, "{case}: other contents");
                        for name in FILES.iter().filter(|name| **name != "leaky" || *verb == "check") {
                            let errors = world.run(errors_in(name)).expect("a check");
                            assert_eq!(errors, 0, "{case}: {name}");
                        }
                        let leaky = folder.path().join("device");
                        std::fs::write(&leaky, world.contents("leaky").expect("there").to_vec()).expect("written");
                        let verdict = if *verb == "check" { qemu.check(&leaky, "qcow2").code } else { 0 };
                        assert_eq!(verdict, 0, "{case}");
                    }
                    Err(error) if makes_new && room < plenty => drop(error),
                    Err(error) => {
                        assert!(room < plenty, "{case}: {error}");
                        assert_eq!(error.kind(), ErrorKind::NoSpace, "{case}: {error}");
                        assert!(error.file_name().is_some(), "{case}: no file is named: {error}");
                        judge(&world, verb, &before);
                        // Moved to a larger device, it goes on.
                        let moved = World::with_files(config, &on_devices(&world.snapshot(), plenty));
                        moved.run(act(verb)).unwrap_or_else(|error| panic!("{case}, moved: {error}"));
                    }
                }
            }
        }
    }
}

/// The container ends a few clusters behind the reach of the refcount table: no larger table fits there. Clusters that
/// the guest frees below are used all the same, also without a flush of the guest's.
#[test]
fn freed_clusters_are_used_where_no_larger_refcount_table_fits() {
    const PIECE: u64 = 8 << 10;
    // Blocks of 64 counts, a table of 64 blocks: 4096 clusters.
    const COUNTED: u64 = 4096 * 512;
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = folder.path().join("image");
    for behind in [0, 1, 2, 3, 8] {
        qemu.create(&path, "qcow2", "cluster_size=512,refcount_bits=64", 4 << 20);
        let mut bytes = std::fs::read(&path).expect("an image");
        bytes.resize((COUNTED + behind * 512) as usize, 0xee);
        let files = Snapshot::from([("base".to_owned(), PageMap::from_bytes(&bytes))]);
        let world = World::with_files(Config { fixed_length: true, ..Config::new(0) }, &files);
        let case = format!("{behind} clusters behind the table's reach");
        let fill = |byte: u8| IoBuf::copy_from(&[byte; PIECE as usize]);
        let written = world.run(async {
            let node = open(OpenRequest::file("base").format("qcow2").writable(true).discard(true)).await?;
            let mut at = 0;
            let full = loop {
                match node.write(at, fill(1)).await.0 {
                    Ok(()) => at += PIECE,
                    Err(error) => break error,
                }
            };
            assert_eq!(full.kind(), ErrorKind::NoSpace, "{case}: {full}");
            assert!(at > 1 << 20, "{case}: full after {at} bytes");
            for round in 0..4 {
                // Scattered pieces.
                for piece in (0..at / PIECE).step_by(5) {
                    node.discard(piece * PIECE, PIECE).await?;
                }
                for piece in (0..at / PIECE).step_by(5) {
                    node.write(piece * PIECE, fill(2 + round)).await.0?;
                }
            }
            node.close().await.map(|()| at)
        });
        let len = written.unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(world.run(errors_in("base")).expect("a check"), 0, "{case}");
        let now = world.run(content("base", None)).expect("readable");
        let is_right = |piece: u64| now[(piece * PIECE) as usize] == if piece.is_multiple_of(5) { 5 } else { 1 };
        assert!((0..len / PIECE).all(is_right), "{case}: other contents");
        std::fs::write(&path, world.contents("base").expect("there").to_vec()).expect("written");
        qemu.expect_no_corruption(&path);
    }
}
