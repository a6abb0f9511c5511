// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while format options are amended. The image is as before or as after. Every byte of the disk and of each
//! snapshot is the same, and nothing is wrong with it but leaked clusters. A second cut hits the amendment that is made
//! again after the first.

use cowshed_image::formats::DriverOf;
use cowshed_image::{OpenRequest, open};
use cowshed_jobs::amend::{self, AmendOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_layout::qcow2::{Header, SnapshotName};
use cowshed_offline::check::{CheckOptions, CheckReport, check};
use cowshed_offline::snapshots;
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::Result;
use std::path::Path;

const NAME: &str = "image";
const BASE: &str = "base";
const SIZE: u64 = 1 << 20;

struct Case {
    create: &'static str,
    backing: bool,
    steps: &'static [&'static str],
    amend: &'static str,
}

impl Case {
    fn fail<T>(&self, error: &cowshed_types::Error) -> T {
        panic!("{} on {}: {error}", self.amend, self.create)
    }
}

/// With snapshots, zero clusters that keep a host cluster and others that don't, and compressed ones.
const STEPS: &[&str] = &[
    "write -P 1 0 96k",
    "write -z 16k 16k",
    "snapshot a",
    "write -P 2 8k 16k",
    "write -c -P 7 128k 64k",
    "write -z 64k 8k",
    "write -z 300k 64k",
    "snapshot b",
    "write -P 3 200k 40k",
    "write -z -u 0 4k",
];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |create, backing, steps, amend| cases.push(Case { create, backing, steps, amend });
    for create in ["cluster_size=512", "cluster_size=4k", "cluster_size=4k,lazy_refcounts=on"] {
        add(create, false, STEPS, "compat=0.10");
        add(create, true, STEPS, "compat=0.10");
        add(create, true, STEPS, "refcount_bits=64");
        add(create, false, STEPS, "refcount_bits=8,lazy_refcounts=off");
    }
    add("cluster_size=4k,compat=0.10", false, &STEPS[..1], "compat=1.1,refcount_bits=1");
    add("cluster_size=4k,compat=0.10", true, &STEPS[..1], "compat=1.1,lazy_refcounts=on");
    add("cluster_size=16k,extended_l2=on", true, STEPS, "refcount_bits=32");
    add("cluster_size=4k,refcount_bits=64", true, STEPS, "refcount_bits=16,compat=0.10,backing_file=");
    add("cluster_size=4k,refcount_bits=1", false, &STEPS[..2], "refcount_bits=16,compat=0.10");
    add("cluster_size=4k,compression_type=zstd", true, &STEPS[..4], "compat=0.10");
    add("cluster_size=4k", true, STEPS, "backing_file=a/very/long/way/to/base,backing_fmt=raw");
    cases
}

fn prepare(qemu: &Qemu, folder: &Path, case: &Case) -> Snapshot {
    let (path, base) = (folder.join(NAME), folder.join(BASE));
    qemu.create(&base, "raw", "", SIZE);
    qemu.io_commands(&base, "raw", &["write -P 9 0 1M".into()]).expect_ok();
    let backing = format!(",backing_file={},backing_fmt=raw", base.display());
    let options = format!("{}{}", case.create, if case.backing { &backing } else { "" });
    qemu.create(&path, "qcow2", &options, SIZE);
    let text = path.to_str().expect("text path");
    for step in case.steps {
        match step.strip_prefix("snapshot ") {
            Some(name) => drop(qemu.img(["snapshot", "-c", name, text]).expect_ok()),
            None => drop(qemu.io_commands(&path, "qcow2", &[(*step).to_owned()]).expect_ok()),
        }
    }
    if case.backing {
        // In the simulated folder the name is relative.
        qemu.img(["rebase", "-u", "-F", "raw", "-b", BASE, text]).expect_ok();
    }
    let read = |path: &Path| PageMap::from_bytes(&std::fs::read(path).expect("a file just made"));
    Snapshot::from([(NAME.to_owned(), read(&path)), (BASE.to_owned(), read(&base))])
}

async fn act(options: &str) -> Result<()> {
    let image = ImageSpec::file(NAME).format("qcow2");
    let options = AmendOptions { image, options: vec![options.to_owned()], ..AmendOptions::default() };
    amend::run(&options, &JobHandle::new()).await
}

/// The disk and each snapshot as bytes. `base`: whether the backing file is to be read.
async fn contents(base: bool) -> Result<Vec<Vec<u8>>> {
    let mut all = vec![read(None, base).await?];
    let node = open(OpenRequest::file(NAME).format("qcow2").no_backing()).await?;
    let driver = node.qcow2().expect("a qcow2 image");
    let listed = snapshots::list(driver.image_file(), &driver.header()).await?;
    node.close().await?;
    for snapshot in listed {
        let name = String::from_utf8_lossy(&snapshot.id).into_owned();
        all.push(read(Some(SnapshotName::of_id(name)), base).await?);
    }
    Ok(all)
}

async fn read(snapshot: Option<SnapshotName>, base: bool) -> Result<Vec<u8>> {
    let request = OpenRequest::file(NAME).format("qcow2").snapshot(snapshot);
    let node = open(if base { request } else { request.no_backing() }).await?;
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < SIZE {
        for run in node.block_status_chain(at, SIZE - at, 64).await? {
            assert_eq!(run.start, at);
            at += run.len;
            // Without the backing file only the image's own data can be read.
            match run.present || base {
                true => {
                    let (result, buf) = node.read(run.start, IoBuf::zeroed(run.len as usize)).await;
                    result?;
                    bytes.extend_from_slice(&buf);
                }
                false => bytes.resize(bytes.len() + run.len as usize, 0xbb),
            }
        }
    }
    node.close().await?;
    Ok(bytes)
}

async fn run_check() -> Result<(CheckReport, Header)> {
    let file = File::open(Path::new(NAME), &OpenOptions::default())?;
    let report = check(&file, &CheckOptions::default(), &|_, _| true).await?;
    let (result, bytes) = file.read_at(IoBuf::zeroed(4096.min(file.len() as usize)), 0).await;
    result?;
    Ok((report, Header::parse(&bytes)?))
}

/// The expectations of every disk that a power cut leaves.
struct Expected<'a> {
    qemu: &'a Qemu,
    folder: &'a Path,
    config: Config,
    case: &'a Case,
    /// Contents with the header that stands for them.
    before: (Header, Vec<Vec<u8>>),
    after: (Header, Vec<Vec<u8>>),
}

/// The header without its tables, which may lie anywhere.
fn features(header: &Header) -> Header {
    Header {
        l1_table_offset: 0,
        l1_size: 0,
        refcount_table_offset: 0,
        refcount_table_clusters: 0,
        snapshots_offset: 0,
        backing_file_offset: 0,
        nb_snapshots: 0,
        size: 0,
        ..header.clone()
    }
}

impl Expected<'_> {
    fn verify(&self, case: &CrashCase<'_>, second: bool) -> std::result::Result<(), String> {
        let world = World::with_files(Config { in_order: true, ..self.config.clone() }, &case.state.files);
        self.judge(&world)?;
        if case.number.is_multiple_of(50) {
            let path = self.folder.join("state.qcow2");
            std::fs::write(&path, world.contents(NAME).ok_or("the image is gone")?.to_vec())
                .map_err(|error| error.to_string())?;
            let verdict = self.qemu.check(&path, "qcow2");
            if verdict.corruptions != 0 || !matches!(verdict.code, 0 | 3) {
                return Err(format!("qemu-img: {} {}", verdict.json, verdict.stderr));
            }
        }
        if second && case.number.is_multiple_of(25) {
            self.again(&case.state.files)?;
        }
        Ok(())
    }

    fn judge(&self, world: &World) -> std::result::Result<(), String> {
        let told = |what: &'static str| move |error: cowshed_types::Error| format!("{what}: {error}");
        let (report, header) = world.run(run_check()).map_err(told("check"))?;
        if report.counters.corruptions != 0 || report.counters.check_errors != 0 {
            return Err(format!("{:#?}", report.findings));
        }
        let (wanted, is_after) = match features(&header) {
            found if found == features(&self.before.0) => (&self.before.1, false),
            found if found == features(&self.after.0) => (&self.after.1, true),
            found => return Err(format!("a header between old and new: {found:?}")),
        };
        let found = world.run(contents(self.reads_base(is_after))).map_err(told("read after the cut"))?;
        if found == *wanted { Ok(()) } else { Err(format!("reads otherwise (after: {is_after})")) }
    }

    /// A renamed backing file is not there.
    fn reads_base(&self, is_after: bool) -> bool {
        !(is_after && self.case.amend.contains("long/way"))
    }

    /// The amendment is made once more after the first cut, and cut again.
    fn again(&self, files: &Snapshot) -> std::result::Result<(), String> {
        let world = World::with_files(self.config.clone(), files);
        world.run(act(self.case.amend)).map_err(|error| format!("amended again: {error}"))?;
        let plan = CrashPlan { max_distinct: 12, ..CrashPlan::new(7) };
        explore(&world.trace(), &plan, |case| self.verify(case, false)).map(drop).map_err(|error| error.to_string())
    }
}

#[test]
fn amendments_survive_power_cuts() {
    amend_and_cut(false, 120);
}

#[test]
fn amendments_on_a_device_survive_power_cuts() {
    amend_and_cut(true, 40);
}

fn amend_and_cut(on_a_device: bool, max_distinct: usize) {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    for (number, case) in cases().iter().enumerate() {
        for sector_bytes in [512, 4096] {
            let direct = sector_bytes == 4096;
            let config = Config { sector_bytes, direct, fixed_length: on_a_device, ..Config::new(number as u64) };
            let mut files = prepare(&qemu, folder.path(), case);
            if let Some(image) = files.get_mut(NAME).filter(|_| on_a_device) {
                // It isn't zero.
                let len = image.len();
                image.write(len, &vec![0xee; ((1 << 20) + len.next_multiple_of(4096) - len) as usize]);
            }
            let world = World::with_files(config.clone(), &files);
            let header = world.run(run_check()).unwrap_or_else(|error| case.fail(&error)).1;
            let before = (header, world.run(contents(true)).unwrap_or_else(|error| case.fail(&error)));
            let world = World::with_files(config.clone(), &files);
            world.run(act(case.amend)).unwrap_or_else(|error| case.fail(&error));
            let trace = world.trace();
            let (report, header) = world.run(run_check()).unwrap_or_else(|error| case.fail(&error));
            assert!(report.is_clean(), "{} on {}: {:#?}", case.amend, case.create, report.findings);
            let reads_base = !case.amend.contains("long/way");
            let after = (header, world.run(contents(reads_base)).unwrap_or_else(|error| case.fail(&error)));
            // The guest's data stays, unless the disk has lost its backing file.
            if reads_base && !case.amend.contains("backing_file=") {
                assert!(before.1 == after.1, "{} on {}: reads otherwise", case.amend, case.create);
            }
            let (qemu, folder) = (&qemu, folder.path());
            let expected = Expected { qemu, folder, config, case, before, after };
            let plan = CrashPlan { max_distinct, ..CrashPlan::new(number as u64) };
            match explore(&trace, &plan, |state| expected.verify(state, true)) {
                Ok(report) => total.add(&report),
                Err(failure) => panic!("{} on {}: {failure}", case.amend, case.create),
            }
        }
    }
    println!("amend: {total}");
    assert!(total.distinct() > 500, "{total}");
}

#[test]
fn an_amendment_on_a_full_disk_changes_nothing() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let (mut refused, mut done) = (0, 0);
    for case in cases().iter().filter(|case| case.backing && case.create == "cluster_size=4k") {
        let files = prepare(&qemu, folder.path(), case);
        let used: u64 =
            [NAME, BASE].iter().map(|name| folder.path().join(name).metadata().expect("a file").len()).sum();
        for room in [0, 4096, 8192, 16384, 65536, 1 << 20] {
            let config = Config { capacity_bytes: Some(used + room), ..Config::new(room) };
            let world = World::with_files(config, &files);
            let before = world.run(contents(true)).unwrap_or_else(|error| case.fail(&error));
            let outcome = world.run(act(case.amend));
            let (report, _) = world.run(run_check()).unwrap_or_else(|error| case.fail(&error));
            assert_eq!(report.counters.corruptions, 0, "{}: {:#?}", case.amend, report.findings);
            match outcome {
                Err(error) => {
                    assert_eq!(error.kind(), cowshed_types::ErrorKind::NoSpace, "{}: {error}", case.amend);
                    assert!(report.is_clean(), "{}: {:#?}", case.amend, report.findings);
                    refused += 1;
                }
                Ok(()) => done += 1,
            }
            if !case.amend.contains("backing_file=") {
                assert!(world.run(contents(true)).expect("readable") == before, "{}: reads otherwise", case.amend);
            }
        }
    }
    assert!(refused > 0 && done > 0, "{refused} refused, {done} done");
}
