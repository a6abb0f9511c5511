// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Repairs on the simulated disk: the power is cut everywhere, and no disk that is left may be worse than the damaged
//! one was. A second repair must reach the same good end.

use cowshed_image::{OpenRequest, open};
use cowshed_offline::check::{
    CheckOptions, CheckReport, CheckedStructure, Finding, FindingKind, UndoReport, check, undo,
};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::damage::{COPIED, Victim};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::Repair;
use std::path::Path;

const SIZE: u64 = 1 << 20;
const NAME: &str = "image.qcow2";
const LOG: &str = "undo.log";

struct Case {
    name: &'static str,
    options: &'static str,
    steps: &'static [&'static str],
    damage: fn(&Victim),
    repair: Repair,
    lossy: bool,
}

const PLAIN: &str = "cluster_size=4k";
const FILLED: &[&str] = &["write -P 1 0 96k", "write -P 2 512k 40k"];

fn cases() -> Vec<Case> {
    let filled = |name, options, damage, repair| Case { name, options, steps: FILLED, damage, repair, lossy: false };
    vec![
        filled("leaks", PLAIN, |v| (0..9).for_each(|n| v.set_refcount(v.host_cluster(n), 2)), Repair::Leaks),
        filled(
            "leaks and shared flags",
            PLAIN,
            |v| {
                for n in 0..9 {
                    v.set_refcount(v.host_cluster(n), 2);
                    v.flip(v.l2_entry(n), COPIED);
                }
            },
            Repair::Leaks,
        ),
        filled("refcounts too low", PLAIN, |v| (0..9).for_each(|n| v.set_refcount(v.host_cluster(n), 0)), Repair::All),
        filled(
            "two users",
            PLAIN,
            |v| (0..5).for_each(|n| v.set_word(v.l2_entry(n), v.word(v.l2_entry(n + 9)))),
            Repair::All,
        ),
        filled("no refcount block", "cluster_size=512", |v| v.set_word(v.refcount_table_entry(0), 0), Repair::All),
        filled(
            "refcount block elsewhere",
            "cluster_size=512,refcount_bits=64",
            |v| v.flip(v.refcount_table_entry(1), 1),
            Repair::All,
        ),
        filled(
            "data on metadata",
            PLAIN,
            |v| {
                v.set_word(v.l2_entry(3), COPIED | v.header.l1_table_offset);
                v.set_word(v.l2_entry(4), COPIED | v.header.refcount_table_offset);
            },
            Repair::All,
        ),
        filled(
            "dirty",
            "cluster_size=4k,lazy_refcounts=on",
            |v| {
                (0..9).for_each(|n| v.set_refcount(v.host_cluster(n), n % 3));
                v.set_word(72, 1);
            },
            Repair::All,
        ),
        filled(
            "more users than a bit can count",
            "cluster_size=4k,refcount_bits=1",
            |v| (0..5).for_each(|n| v.set_word(v.l2_entry(n), v.word(v.l2_entry(n + 9)))),
            Repair::All,
        ),
        filled("flag without a table", "cluster_size=512", |v| v.set_word(v.l1_entry(20), COPIED), Repair::All),
        Case {
            lossy: true,
            ..filled(
                "data behind the end",
                PLAIN,
                |v| (0..9).for_each(|n| v.set_word(v.l2_entry(n * 2), COPIED | (n + 1) << 30)),
                Repair::All,
            )
        },
        filled("reserved bits", PLAIN, |v| (0..9).for_each(|n| v.flip(v.l2_entry(n), 0x10)), Repair::All),
        Case {
            name: "incomplete snapshot",
            options: "cluster_size=512",
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k"],
            damage: |v| v.shorten_snapshot(0),
            repair: Repair::All,
            lossy: false,
        },
        Case {
            name: "snapshot with too much extra data",
            options: "cluster_size=512",
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k"],
            damage: |v| v.lengthen_snapshot(2000),
            repair: Repair::All,
            lossy: false,
        },
        Case {
            name: "snapshot without an end",
            options: PLAIN,
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k"],
            damage: |v| v.add_endless_snapshot(),
            repair: Repair::All,
            lossy: true,
        },
        Case {
            name: "first of two snapshots behind the end",
            options: PLAIN,
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k", "snapshot b", "write -P 3 12k 16k"],
            damage: |v| v.set_word(v.header.snapshots_offset, 1 << 40),
            repair: Repair::All,
            lossy: true,
        },
        Case {
            name: "snapshot just behind the end",
            options: PLAIN,
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k", "snapshot b"],
            damage: |v| {
                let end = v.file.metadata().expect("a length").len().next_multiple_of(4096);
                v.set_word(v.header.snapshots_offset, end + 8192);
            },
            repair: Repair::All,
            lossy: true,
        },
        Case {
            name: "snapshot just behind the end, small clusters",
            options: "cluster_size=512",
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k", "snapshot b"],
            damage: |v| {
                let end = v.file.metadata().expect("a length").len().next_multiple_of(512);
                v.set_word(v.header.snapshots_offset, end);
            },
            repair: Repair::All,
            lossy: true,
        },
        Case {
            name: "snapshot just behind the end, in the table's last entry",
            options: "cluster_size=512",
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k", "snapshot b"],
            damage: |v| {
                let end = v.file.metadata().expect("a length").len().next_multiple_of(512);
                v.set_word(v.snapshot(1), end + 512);
            },
            repair: Repair::All,
            lossy: true,
        },
        Case {
            lossy: true,
            ..filled(
                "data just behind the end, small clusters",
                "cluster_size=512",
                |v| {
                    let end = v.file.metadata().expect("a length").len().next_multiple_of(512);
                    v.set_word(v.l2_entry(3), COPIED | end);
                    v.set_word(v.l2_entry(9), COPIED | (end + 512));
                },
                Repair::All,
            )
        },
        Case {
            name: "bitmap directory that lies",
            options: PLAIN,
            steps: &["write -P 1 0 96k", "bitmap", "write -P 2 8k 16k"],
            damage: |v| v.set_word(v.header.bitmaps().expect("bitmaps").directory_offset, u64::MAX),
            repair: Repair::All,
            lossy: true,
        },
        Case {
            name: "snapshots",
            options: PLAIN,
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k"],
            damage: |v| {
                v.set_refcount(v.host_cluster(0), 1);
                v.set_refcount(v.host_cluster(1), 3);
                v.flip(v.l2_entry(8), COPIED);
            },
            repair: Repair::All,
            lossy: false,
        },
    ]
}

fn damaged(qemu: &Qemu, folder: &Path, case: &Case) -> Vec<u8> {
    let path = folder.join(NAME);
    qemu.create(&path, "qcow2", case.options, SIZE);
    for step in case.steps {
        match *step {
            "bitmap" => drop(qemu.img(["bitmap", "--add", path.to_str().expect("text path"), "b"]).expect_ok()),
            "snapshot b" => drop(qemu.img(["snapshot", "-c", "b", path.to_str().expect("text path")]).expect_ok()),
            "snapshot" => drop(qemu.img(["snapshot", "-c", "a", path.to_str().expect("text path")]).expect_ok()),
            step => drop(qemu.io_commands(&path, "qcow2", &[step.to_owned()]).expect_ok()),
        }
    }
    (case.damage)(&Victim::open(&path));
    std::fs::read(&path).expect("the image just made")
}

async fn run_check(repair: Repair, lossy: bool) -> cowshed_types::Result<CheckReport> {
    let file = File::open(Path::new(NAME), &OpenOptions { write: repair != Repair::None, ..OpenOptions::default() })?;
    check(&file, &CheckOptions { repair, lossy, ..CheckOptions::default() }, &|_, _| true).await
}

/// The whole disk; with `lossy`, clusters that aren't in the file are the zeroes that a lossy repair makes of them.
async fn content(lossy: bool) -> cowshed_types::Result<Vec<u8>> {
    const PIECE_BYTES: usize = 512;
    let node = open(OpenRequest::file(NAME).format("qcow2")).await?;
    let mut content = Vec::new();
    for at in (0..SIZE as usize).step_by(PIECE_BYTES) {
        let (result, buf) = node.read(at as u64, IoBuf::zeroed(PIECE_BYTES.min(SIZE as usize - at))).await;
        match result {
            Ok(()) => content.extend_from_slice(&buf),
            Err(error) if lossy && error.to_string().contains("lies past the end of the file") => {
                content.resize(content.len() + buf.len(), 0);
            }
            Err(error) => return Err(error),
        }
    }
    node.close().await?;
    Ok(content)
}

/// The findings that could cost data: counts below the references, and wrong rights to write in place.
fn dangers(report: &CheckReport) -> Vec<(u8, u64)> {
    let dangerous = report.findings.iter().filter(|finding| match finding.kind {
        FindingKind::RefcountLow { .. } => true,
        FindingKind::CopiedL1 { entry, .. } | FindingKind::CopiedL2 { entry, .. } => entry & COPIED != 0,
        _ => false,
    });
    dangerous.map(|finding| finding.order()).collect()
}

struct Expected<'a> {
    qemu: &'a Qemu,
    folder: &'a Path,
    before: CheckReport,
    content: Vec<u8>,
    repair: Repair,
    lossy: bool,
    /// A snapshot can't be read, and stays: the clusters that it may own stay with it.
    partly: bool,
    /// The place of the damage to the snapshot, and its old bytes.
    mended: Option<(u64, u64)>,
    config: Config,
}

/// True for a finding that stays because a snapshot can't be read.
fn is_of_unread_snapshot(finding: &Finding) -> bool {
    matches!(
        finding.kind,
        FindingKind::Leak { .. }
            | FindingKind::Unreadable { structure: CheckedStructure::SnapshotL1, .. }
            | FindingKind::PastEnd { structure: CheckedStructure::SnapshotL1, .. }
    )
}

impl Expected<'_> {
    fn verify(&self, case: &CrashCase<'_>) -> Result<(), String> {
        let world = World::with_files(Config { in_order: true, ..self.config.clone() }, &case.state.files);
        let told = |what: &'static str| move |error: cowshed_types::Error| format!("{what}: {error}");
        let left = world.run(run_check(Repair::None, false)).map_err(told("check"))?;
        let before = dangers(&self.before);
        if let Some(new) = dangers(&left).iter().find(|danger| !before.contains(danger)) {
            return Err(format!("a new danger at {new:?}: {:#?}", left.findings));
        }
        if world.run(content(self.lossy)).map_err(told("read after the cut"))? != self.content {
            return Err("the data changed".to_owned());
        }
        let again = world.run(run_check(self.repair, self.lossy)).map_err(told("second repair"))?;
        let is_done = again.is_clean() || self.partly && again.findings.iter().all(is_of_unread_snapshot);
        if !is_done {
            return Err(format!("the second repair left {:?} {:?}", again.counters, again.findings));
        }
        if world.run(content(self.lossy)).map_err(told("read after the second repair"))? != self.content {
            return Err("the second repair changed the data".to_owned());
        }
        if self.partly {
            // Once the snapshot is back, nothing that it owns may be gone.
            let Some(mended) = &self.mended else { return Ok(()) };
            let checked = world.run(async { write_mended(mended).await.and(run_check(Repair::None, false).await) });
            let whole = checked.map_err(told("check of the mended image"))?;
            if whole.counters.corruptions != 0 {
                return Err(format!("it has lost what the snapshot owns: {:#?}", whole.findings));
            }
        } else if case.number.is_multiple_of(64) {
            let path = self.folder.join("state.qcow2");
            let bytes = world.contents(NAME).ok_or("the image is gone")?.to_vec();
            std::fs::write(&path, bytes).map_err(|error| error.to_string())?;
            let verdict = self.qemu.check(&path, "qcow2");
            if verdict.code != 0 {
                return Err(format!("qemu-img after the second repair: {} {}", verdict.json, verdict.stderr));
            }
        }
        Ok(())
    }
}

#[test]
fn repairs_survive_power_cuts() {
    repair_and_cut(false, 250);
}

#[test]
fn repairs_on_a_device_survive_power_cuts() {
    repair_and_cut(true, 80);
}

fn repair_and_cut(on_a_device: bool, max_distinct: usize) {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    // Nothing lies past the end of a device that holds more.
    for (number, case) in cases().iter().enumerate().filter(|(_, case)| !on_a_device || !case.lossy) {
        for sector_bytes in [512, 4096] {
            let direct = sector_bytes == 4096;
            let config = Config { sector_bytes, direct, fixed_length: on_a_device, ..Config::new(number as u64) };
            let mut image = damaged(&qemu, folder.path(), case);
            if on_a_device {
                image.resize((image.len() + (1 << 20)).next_multiple_of(4096), 0xee);
            }
            let files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]);
            let world = World::with_files(config.clone(), &files);
            let before = world.run(run_check(Repair::None, false)).expect("a check");
            assert!(!before.is_clean(), "{}: nothing is damaged", case.name);
            let content = world.run(content(case.lossy)).expect("a readable image");
            let world = World::with_files(config.clone(), &files);
            let report = world.run(run_check(case.repair, case.lossy)).expect("a repair");
            assert!(report.is_clean() && report.changed, "{}: {report:?}", case.name);
            let (qemu, folder) = (&qemu, folder.path());
            let (repair, lossy) = (case.repair, case.lossy);
            let expected =
                Expected { qemu, folder, before, content, repair, lossy, partly: false, mended: None, config };
            let plan = CrashPlan { max_distinct, ..CrashPlan::new(number as u64) };
            match explore(&world.trace(), &plan, |state| expected.verify(state)) {
                Ok(report) => total.add(&report),
                Err(failure) => panic!("{}: {failure}", case.name),
            }
        }
    }
    println!("repair: {total}");
    assert!(total.distinct() > 100, "{total}");
}

async fn write_mended((at, word): &(u64, u64)) -> cowshed_types::Result<()> {
    let file = open_for_writing(NAME)?;
    file.write_at(IoBuf::copy_from(&word.to_be_bytes()), *at).await.0
}

/// A snapshot that can't be read keeps its clusters while all the rest is repaired, wherever the power is cut.
#[test]
fn repairs_beside_a_snapshot_that_cannot_be_read_survive_power_cuts() {
    type Damage = fn(&Victim);
    let damages: [(&str, &str, Damage); 5] = [
        ("not aligned", PLAIN, |v| v.flip(v.header.snapshots_offset, 512)),
        ("behind the end", "cluster_size=512", |v| v.set_word(v.header.snapshots_offset, 1 << 40)),
        ("just behind the end", "cluster_size=512", |v| {
            let end = v.file.metadata().expect("a length").len().next_multiple_of(512);
            v.set_word(v.header.snapshots_offset, end);
        }),
        ("refcounts elsewhere", "cluster_size=512", |v| {
            v.set_word(v.header.snapshots_offset, 1 << 40);
            v.set_word(v.refcount_table_entry(0), 0);
        }),
        ("extra data missing", PLAIN, |v| {
            v.flip(v.header.snapshots_offset, 512);
            v.shorten_snapshot(8);
        }),
    ];
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    for (number, (name, options, damage)) in damages.into_iter().enumerate() {
        let case = Case {
            name,
            options,
            steps: &["write -P 1 0 96k", "snapshot", "write -P 2 8k 16k", "write -P 3 200k 16k"],
            damage: |v| {
                // Of clusters that the snapshot doesn't share.
                v.flip(v.l2_entry((8 << 10) / v.geometry.cluster_size()), COPIED);
                v.set_refcount(v.host_cluster((200 << 10) / v.geometry.cluster_size()), 0);
            },
            repair: Repair::All,
            lossy: false,
        };
        let path = folder.path().join(NAME);
        damaged(&qemu, folder.path(), &case);
        let victim = Victim::open(&path);
        let place = victim.header.snapshots_offset;
        let mended = Some((place, victim.word(place)));
        damage(&victim);
        let image = std::fs::read(&path).expect("the image");
        for sector_bytes in [512, 4096] {
            let config = Config { sector_bytes, direct: sector_bytes == 4096, ..Config::new(number as u64) };
            let files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]);
            let world = World::with_files(config.clone(), &files);
            let before = world.run(run_check(Repair::None, false)).expect("a check");
            let content = world.run(content(false)).expect("a readable image");
            let world = World::with_files(config.clone(), &files);
            let report = world.run(run_check(Repair::All, false)).expect("a repair");
            assert!(report.changed && report.findings.iter().all(is_of_unread_snapshot), "{name}: {report:#?}");
            let (qemu, folder) = (&qemu, folder.path());
            // The table of snapshots that lack something moves.
            let mended = mended.filter(|_| name != "extra data missing");
            let (repair, lossy, partly) = (Repair::All, false, true);
            let expected = Expected { qemu, folder, before, content, repair, lossy, partly, mended, config };
            let plan = CrashPlan { max_distinct: 250, ..CrashPlan::new(number as u64) };
            match explore(&world.trace(), &plan, |state| expected.verify(state)) {
                Ok(report) => total.add(&report),
                Err(failure) => panic!("{name}: {failure}"),
            }
        }
    }
    println!("repair beside a snapshot: {total}");
    assert!(total.distinct() > 25, "{total}");
}

fn open_for_writing(name: &str) -> cowshed_types::Result<File> {
    File::open(Path::new(name), &OpenOptions { write: true, ..OpenOptions::default() })
}

async fn run_logged_repair(repair: Repair, lossy: bool) -> cowshed_types::Result<CheckReport> {
    let file = open_for_writing(NAME)?;
    let options = CheckOptions { repair, lossy, undo_log: Some(open_for_writing(LOG)?), ..CheckOptions::default() };
    check(&file, &options, &|_, _| true).await
}

async fn run_undo() -> cowshed_types::Result<UndoReport> {
    undo(&open_for_writing(NAME)?, &open_for_writing(LOG)?).await
}

/// Undoes a repair or an undo that a power cut has interrupted; returns the world of that undo.
fn undo_after_cut(config: &Config, case: &CrashCase<'_>, original: &[u8]) -> Result<World, String> {
    let config = Config { in_order: case.number.is_multiple_of(2), ..config.clone() };
    let world = World::with_files(config, &case.state.files);
    let bytes = |world: &World| world.contents(NAME).map(|bytes| bytes.to_vec());
    let was_touched = bytes(&world).as_deref() != Some(original);
    match world.run(run_undo()) {
        Ok(_) => {}
        // The log itself had not been begun (its first sector may be there, without anything in it).
        Err(_) if !was_touched && case.state.files[LOG].to_vec().iter().all(|byte| *byte == 0) => {}
        Err(error) => return Err(format!("the undo failed: {error}")),
    }
    if bytes(&world).as_deref() != Some(original) {
        return Err("the undo did not restore the image".to_owned());
    }
    Ok(world)
}

/// Wherever the power is cut during a repair, or during an undo, an undo restores the image to the byte.
#[test]
fn undo_logs_survive_power_cuts() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    for (number, case) in cases().iter().enumerate() {
        let sector_bytes = if number % 2 == 0 { 512 } else { 4096 };
        let config = Config { sector_bytes, direct: sector_bytes == 4096, ..Config::new(number as u64) };
        let image = damaged(&qemu, folder.path(), case);
        let log = PageMap::from_bytes(&[]);
        let files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image)), (LOG.to_owned(), log)]);
        let world = World::with_files(config.clone(), &files);
        let report = world.run(run_logged_repair(case.repair, case.lossy)).expect("a repair");
        assert!(report.is_clean() && report.changed, "{}: {report:?}", case.name);
        let plan = CrashPlan { max_distinct: 200, ..CrashPlan::new(number as u64) };
        let mut again = CrashReport::default();
        let explored = explore(&world.trace(), &plan, |cut| {
            let undone = undo_after_cut(&config, cut, &image)?;
            if cut.number.is_multiple_of(20) {
                let plan = CrashPlan { max_distinct: 12, ..CrashPlan::new(cut.number as u64) };
                let second = explore(&undone.trace(), &plan, |cut| undo_after_cut(&config, cut, &image).map(drop));
                again.add(&second.map_err(|failure| format!("the second undo: {failure}"))?);
            }
            Ok(())
        });
        match explored {
            Ok(report) => total.add(&report),
            Err(failure) => panic!("{}: {failure}", case.name),
        }
        total.add(&again);
    }
    println!("undo: {total}");
    assert!(total.distinct() > 100, "{total}");
}
