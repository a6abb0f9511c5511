// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while an internal snapshot is taken, applied or deleted. The image is as before or as after, every byte
//! of the disk and of the snapshots included. Nothing is wrong with it but leaked clusters.

use cowshed_image::formats::DriverOf;
use cowshed_image::{OpenRequest, open};
use cowshed_layout::qcow2::SnapshotName;
use cowshed_offline::check::{CheckOptions, CheckReport, check};
use cowshed_offline::snapshots::{self, SnapshotOptions};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::{ErrorKind, Repair, Result};
use std::path::Path;

const NAME: &str = "image.qcow2";
const SIZE: u64 = 1 << 20;
/// The room of a device behind the image; its bytes aren't zero.
const DEVICE_ROOM_BYTES: usize = 1 << 20;

/// The operation under way when the power is cut.
#[derive(Clone, Copy, Debug)]
enum Action {
    Create,
    Apply(&'static str),
    Delete(&'static str),
}

/// The disk and each snapshot by name, as bytes.
type Contents = Vec<(Option<String>, Vec<u8>)>;

struct Case {
    options: &'static str,
    steps: &'static [&'static str],
    action: Action,
}

const STEPS: &[&str] =
    &["write -P 1 0 96k", "snapshot a", "write -P 2 8k 16k", "write -z 64k 8k", "snapshot b", "write -P 3 200k 40k"];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for action in [Action::Create, Action::Apply("a"), Action::Delete("a"), Action::Delete("b")] {
        for options in [
            "cluster_size=512",
            "cluster_size=4k,compat=0.10",
            "cluster_size=4k,refcount_bits=64",
            "cluster_size=16k,extended_l2=on",
            "cluster_size=4k,lazy_refcounts=on,refcount_bits=4",
        ] {
            cases.push(Case { options, steps: STEPS, action });
        }
    }
    // The first snapshot ever, and the only one.
    cases.push(Case { options: "cluster_size=4k", steps: &STEPS[..1], action: Action::Create });
    cases.push(Case { options: "cluster_size=4k", steps: &STEPS[..3], action: Action::Delete("a") });
    cases
}

fn prepare(qemu: &Qemu, folder: &Path, case: &Case) -> Vec<u8> {
    let path = folder.join(NAME);
    qemu.create(&path, "qcow2", case.options, SIZE);
    for step in case.steps {
        match step.strip_prefix("snapshot ") {
            Some(name) => drop(qemu.img(["snapshot", "-c", name, path.to_str().expect("text path")]).expect_ok()),
            None => drop(qemu.io_commands(&path, "qcow2", &[(*step).to_owned()]).expect_ok()),
        }
    }
    std::fs::read(&path).expect("the image just made")
}

async fn act(action: Action) -> Result<()> {
    let file = File::open(Path::new(NAME), &OpenOptions { write: true, ..OpenOptions::default() })?;
    let options = SnapshotOptions::default();
    match action {
        Action::Create => snapshots::create(&file, b"new", &options, &|_, _| true).await.map(drop),
        Action::Apply(name) => snapshots::apply(&file, name.as_bytes(), &options, &|_, _| true).await,
        Action::Delete(name) => snapshots::delete(&file, name.as_bytes(), &options, &|_, _| true).await,
    }
}

async fn contents() -> Result<Contents> {
    let mut all = vec![(None, read(None).await?)];
    let node = open(OpenRequest::file(NAME).format("qcow2")).await?;
    let driver = node.qcow2().expect("a qcow2 image");
    let listed = snapshots::list(driver.image_file(), &driver.header()).await?;
    node.close().await?;
    for snapshot in listed {
        let name = String::from_utf8_lossy(&snapshot.name).into_owned();
        let bytes = read(Some(SnapshotName::of_name(name.clone()))).await?;
        all.push((Some(name), bytes));
    }
    Ok(all)
}

async fn read(snapshot: Option<SnapshotName>) -> Result<Vec<u8>> {
    let node = open(OpenRequest::file(NAME).format("qcow2").snapshot(snapshot)).await?;
    let (result, buf) = node.read(0, IoBuf::zeroed(SIZE as usize)).await;
    result?;
    node.close().await?;
    Ok(buf.to_vec())
}

async fn run_check(repair: Repair) -> Result<CheckReport> {
    let write = repair != Repair::None;
    let file = File::open(Path::new(NAME), &OpenOptions { write, ..OpenOptions::default() })?;
    check(&file, &CheckOptions { repair, ..CheckOptions::default() }, &|_, _| true).await
}

fn is_dirty(files: &Snapshot) -> bool {
    let mut header = [0; 80];
    files[NAME].read(0, &mut header);
    header[7] >= 3 && header[79] & 1 == 1
}

/// The expectations of every disk that a power cut leaves.
struct Expected<'a> {
    qemu: &'a Qemu,
    folder: &'a Path,
    config: Config,
    before: Contents,
    after: Contents,
}

impl Expected<'_> {
    fn verify(&self, case: &CrashCase<'_>) -> std::result::Result<(), String> {
        let world = World::with_files(Config { in_order: true, ..self.config.clone() }, &case.state.files);
        let told = |what: &'static str| move |error: cowshed_types::Error| format!("{what}: {error}");
        // Counts and flags that change in place do so below the dirty bit.
        let repair = if is_dirty(&case.state.files) { Repair::All } else { Repair::None };
        let left = world.run(run_check(repair)).map_err(told("check"))?;
        if left.counters.corruptions != 0 || left.counters.check_errors != 0 {
            return Err(format!("{:#?}", left.findings));
        }
        let found = world.run(contents()).map_err(told("read after the cut"))?;
        if found != self.before && found != self.after {
            return Err("neither as before nor as after".to_owned());
        }
        if case.number.is_multiple_of(50) {
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
fn snapshots_survive_power_cuts() {
    change_and_cut(false, 150);
}

#[test]
fn snapshots_on_a_device_survive_power_cuts() {
    change_and_cut(true, 50);
}

fn change_and_cut(on_a_device: bool, max_distinct: usize) {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    for (number, case) in cases().iter().enumerate() {
        for sector_bytes in [512, 4096] {
            let direct = sector_bytes == 4096;
            let config = Config { sector_bytes, direct, fixed_length: on_a_device, ..Config::new(number as u64) };
            let mut image = prepare(&qemu, folder.path(), case);
            if on_a_device {
                image.resize((image.len() + DEVICE_ROOM_BYTES).next_multiple_of(4096), 0xee);
            }
            let files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]);
            let before = World::with_files(config.clone(), &files).run(contents()).expect("a readable image");
            let world = World::with_files(config.clone(), &files);
            world.run(act(case.action)).expect("a snapshot operation");
            let trace = world.trace();
            let after = world.run(contents()).expect("a readable image");
            assert!(before != after, "nothing happened");
            let (qemu, folder) = (&qemu, folder.path());
            let expected = Expected { qemu, folder, config, before, after };
            let plan = CrashPlan { max_distinct, ..CrashPlan::new(number as u64) };
            match explore(&trace, &plan, |state| expected.verify(state)) {
                Ok(report) => total.add(&report),
                Err(failure) => panic!("{:?} on {}: {failure}", case.action, case.options),
            }
        }
    }
    println!("snapshots: {total}");
    assert!(total.distinct() > 1000, "{total}");
}

/// A full disk is the reason to delete a snapshot: metadata without room beside the old changes in place.
#[test]
fn snapshots_on_a_full_disk_survive_power_cuts() {
    let (qemu, folder) = (Qemu::newest(), temp_dir());
    let (mut total, mut refused) = (CrashReport::default(), 0);
    for (number, case) in cases().iter().enumerate() {
        for room in [0, 4096, 32 << 10] {
            let image = prepare(&qemu, folder.path(), case);
            let files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]);
            let used: u64 = files.values().map(PageMap::allocated_bytes).sum();
            let config = Config { capacity_bytes: Some(used + room), ..Config::new(number as u64) };
            let text = format!("{:?} on {} with {room} bytes of room", case.action, case.options);
            let before = World::with_files(config.clone(), &files).run(contents()).expect("a readable image");
            let world = World::with_files(config.clone(), &files);
            let outcome = world.run(act(case.action));
            let after = world.run(contents()).expect("a readable image");
            // The table of the other snapshots needs a page, that of none nothing.
            let needs = if before.len() > 2 { 4096 } else { 0 };
            let must_work = matches!(case.action, Action::Delete(_)) && room >= needs;
            assert!(outcome.is_ok() || !must_work, "{text}: {outcome:?}");
            if let Err(error) = outcome {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{text}: {error}");
                let left = world.contents(NAME).expect("an image").len();
                assert!(before == after && left == image.len() as u64, "{text}: the file has {left} bytes");
                refused += 1;
            }
            let trace = world.trace();
            let config = Config { capacity_bytes: None, ..config };
            let expected = Expected { qemu: &qemu, folder: folder.path(), config, before, after };
            let plan = CrashPlan { max_distinct: 40, ..CrashPlan::new(number as u64) };
            match explore(&trace, &plan, |state| expected.verify(state)) {
                Ok(report) => total.add(&report),
                Err(failure) => panic!("{text}: {failure}"),
            }
            // Without a dirty bit the rest of a deletion needs room of its own, and snapshot b owns no data that it frees.
            let left = world.run(run_check(Repair::None)).expect("a check").counters;
            let owns_little = matches!(case.action, Action::Delete("b"));
            let may_leak = must_work && case.options.contains("0.10") && owns_little;
            assert!(left.corruptions == 0 && (left.leaks == 0 || may_leak), "{text}: {left:?}");
        }
    }
    println!("snapshots on full disks: {total}");
    assert!(total.distinct() > 1000 && refused > 10, "{refused} refused, {total}");
}
