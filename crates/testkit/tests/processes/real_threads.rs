// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Four real threads on one real image: overlapping requests against the byte model, then QEMU's verdict. On good disks
//! and, through `blkdebug`, on failing ones.

use cowshed_simulator::PageMap;
use cowshed_storage::rt;
use cowshed_testkit::audit::audit;
use cowshed_testkit::model::Model;
use cowshed_testkit::operations::OpGen;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::for_each_seed;
use cowshed_testkit::runner::run_steps_on_threads;
use cowshed_testkit::scenario::ImageDisk;
use std::path::Path;

struct Case {
    create: &'static str,
    backing: bool,
    cluster_bytes: u64,
    subcluster_bytes: u64,
    disk_bytes: u64,
    options: &'static str,
}

const CASES: &[Case] = &[
    Case {
        create: "cluster_size=64k",
        backing: false,
        cluster_bytes: 65536,
        subcluster_bytes: 65536,
        disk_bytes: 8 << 20,
        options: "",
    },
    Case {
        create: "cluster_size=512,refcount_bits=2",
        backing: true,
        cluster_bytes: 512,
        subcluster_bytes: 512,
        disk_bytes: 1 << 20,
        options: "l2-cache-size=1k,l2-cache-entry-size=512,refcount-cache-size=2k",
    },
    Case {
        create: "cluster_size=16k,extended_l2=on,lazy_refcounts=on",
        backing: true,
        cluster_bytes: 16384,
        subcluster_bytes: 512,
        disk_bytes: 2 << 20,
        options: "",
    },
    Case {
        create: "cluster_size=4k,refcount_bits=64",
        backing: false,
        cluster_bytes: 4096,
        subcluster_bytes: 4096,
        disk_bytes: 3 << 20,
        options: "discard-no-unref=on",
    },
];

fn image(qemu: &Qemu, folder: &Path, case: &Case) -> (String, Vec<u8>) {
    let path = folder.join("image.qcow2");
    let mut create = case.create.to_owned();
    if case.backing {
        let base = folder.join("base.qcow2");
        qemu.create(&base, "qcow2", "cluster_size=4k", case.disk_bytes / 2);
        qemu.io_commands(&base, "qcow2", &[format!("write -P 7 0 {}", case.disk_bytes / 3 / 512 * 512)]);
        create += &format!(",backing_file={},backing_fmt=qcow2", base.display());
    }
    qemu.create(&path, "qcow2", &create, case.disk_bytes);
    let content = qemu.content(&path, "qcow2");
    (path.to_string_lossy().into_owned(), content)
}

fn requests(case: &Case) -> OpGen {
    OpGen {
        subcluster_bytes: case.subcluster_bytes,
        streams: 16,
        compressed: true,
        flush_every: 40,
        ..OpGen::new(case.disk_bytes, case.cluster_bytes)
    }
}

#[test]
fn four_threads_leave_what_they_wrote() {
    let qemu = Qemu::system();
    for_each_seed(CASES.len() as u64, |seed| {
        let case = &CASES[seed as usize % CASES.len()];
        let folder = temp_dir();
        let (name, content) = image(&qemu, folder.path(), case);
        let disk = rt::block_on(ImageDisk::open_with(&name, true, false, case.options)).expect("it opens");
        let steps = requests(case).steps(seed, 1500);
        let (outcome, disk) = run_steps_on_threads(disk, Model::new(content), &steps, 4, None);
        assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
        assert!(outcome.wrong_reads.is_empty(), "{:?}", outcome.wrong_reads);
        rt::block_on(disk.0.close()).expect("a good close");
        qemu.expect_clean(Path::new(&name));
        let mut model = outcome.model;
        let now = model.begin_read();
        model.check_read(now, 0, &qemu.content(Path::new(&name), "qcow2")).unwrap_or_else(|wrong| panic!("{wrong}"));
    });
}

/// The faults, as options of `blkdebug` for the image's file.
const FAULTS: &[&str] = &[
    "file.inject-error.0.iotype=write,file.inject-error.0.errno=28,file.inject-error.0.skip=300",
    "file.inject-error.0.iotype=write,file.inject-error.0.errno=5,file.inject-error.0.probability-percent=3,\
     file.inject-error.0.action=torn,file.inject-error.0.skip=40",
    "file.inject-error.0.iotype=flush,file.inject-error.0.errno=5,file.inject-error.0.once=on,file.inject-error.0.skip=4",
    "file.inject-error.0.iotype=read,file.inject-error.0.errno=5,file.inject-error.0.probability-percent=10,\
     file.inject-error.0.skip=10",
];

#[test]
fn a_failing_disk_leaves_a_sound_image() {
    let qemu = Qemu::system();
    for_each_seed((CASES.len() * FAULTS.len()) as u64, |seed| {
        let case = &CASES[seed as usize % CASES.len()];
        let fault = FAULTS[seed as usize / CASES.len() % FAULTS.len()];
        let folder = temp_dir();
        let (name, content) = image(&qemu, folder.path(), case);
        let separator = if case.options.is_empty() { "" } else { "," };
        let options = format!(
            "driver=qcow2,file.driver=blkdebug,file.seed={seed},file.image.driver=file,file.image.filename={name},\
             {fault}{separator}{}",
            case.options
        );
        let disk = rt::block_on(ImageDisk::open_options(&options, true)).expect("it opens");
        let steps = requests(case).steps(seed, 600);
        let (outcome, disk) = run_steps_on_threads(disk, Model::new(content), &steps, 4, None);
        assert!(!outcome.errors.is_empty(), "{fault}: nothing has failed");
        assert!(outcome.wrong_reads.is_empty(), "{:?}", outcome.wrong_reads);
        // It may fail as well; the locks must go in any case.
        let _ = rt::block_on(disk.0.close());
        drop(disk);
        judge(&qemu, &name, &outcome.model);
    });
}

/// Checks the file after a kill, on a machine that stays up: no error, flushed data there, the rest old or new.
fn judge(qemu: &Qemu, name: &str, model: &Model) {
    let path = Path::new(name);
    let bytes = std::fs::read(path).expect("the image is there");
    let found = audit(&PageMap::from_bytes(&bytes)).unwrap_or_else(|wrong| panic!("audit: {wrong}"));
    let verdict = if found.dirty { qemu.check_with(path, "qcow2", &["-r", "all"]) } else { qemu.check(path, "qcow2") };
    assert!(matches!(verdict.code, 0 | 3), "qemu-img check: {} {}", verdict.json, verdict.stderr);
    let content = qemu.content(path, "qcow2");
    model.check_after_cut(1, 0, &content).unwrap_or_else(|wrong| panic!("{wrong}"));
}
