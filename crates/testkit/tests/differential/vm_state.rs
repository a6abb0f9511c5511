// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of a virtual machine behind the disk, written and read by QEMU and by us. Everything else that is done
//! with the image keeps it. It is written under power cuts, too.

use cowshed_image::formats::DriverOf;
use cowshed_image::{OpenRequest, open};
use cowshed_jobs::amend::{self, AmendOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_offline::check::{CheckOptions, check};
use cowshed_offline::snapshots::{self, SnapshotOptions};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions, rt};
use cowshed_testkit::crash::{CrashPlan, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::Result;
use std::path::Path;

const SIZE: u64 = 1 << 20;
const STATE_BYTES: usize = 300 << 10;

fn filled(byte: u8) -> IoBuf {
    let mut buf = IoBuf::zeroed(STATE_BYTES);
    buf.fill(byte);
    buf
}

async fn write_state(name: &str, byte: u8) -> Result<()> {
    let node = open(OpenRequest::file(name).format("qcow2").writable(true)).await?;
    node.write_vm_state(0, filled(byte)).await.0?;
    node.flush().await?;
    node.close().await
}

async fn read_state(name: &str) -> Result<Vec<u8>> {
    let node = open(OpenRequest::file(name).format("qcow2")).await?;
    let (result, buf) = node.qcow2().expect("a qcow2 image").read_vm_state(0, IoBuf::zeroed(STATE_BYTES)).await;
    result?;
    node.close().await?;
    Ok(buf.to_vec())
}

#[test]
fn qemu_and_we_read_each_others_state_and_keep_it() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for options in ["cluster_size=512", "cluster_size=4k,compat=0.10", "cluster_size=64k", "extended_l2=on"] {
        let path = folder.path().join("image.qcow2");
        let name = path.to_str().expect("text path");
        let io = |command: &str| qemu.io_commands(&path, "qcow2", &[command.to_owned()]);
        let theirs = |byte: u8| io(&format!("read -b -P {byte} 0 {STATE_BYTES}")).expect_ok();
        qemu.create(&path, "qcow2", options, SIZE);
        io("write -P 1 0 512k");
        io(&format!("write -b -P 7 0 {STATE_BYTES}"));
        assert!(rt::block_on(read_state(name)).unwrap().iter().all(|byte| *byte == 7), "{options}");
        rt::block_on(write_state(name, 8)).unwrap();
        theirs(8);
        qemu.expect_clean(&path);
        // Other changes of the image keep it.
        let snapshot = async |what: &str| {
            let file = File::open(&path, &OpenOptions { write: true, ..OpenOptions::default() }).unwrap();
            let defaults = SnapshotOptions::default();
            match what {
                "create" => snapshots::create(&file, b"s", &defaults, &|_, _| true).await.map(drop),
                "apply" => snapshots::apply(&file, b"s", &defaults, &|_, _| true).await,
                _ => snapshots::delete(&file, b"s", &defaults, &|_, _| true).await,
            }
        };
        rt::block_on(snapshot("create")).unwrap();
        theirs(8);
        rt::block_on(write_state(name, 9)).unwrap();
        theirs(9);
        qemu.expect_clean(&path);
        // The snapshot has the state of its time.
        rt::block_on(snapshot("apply")).unwrap();
        theirs(8);
        rt::block_on(snapshot("delete")).unwrap();
        theirs(8);
        if !options.contains("0.10") {
            let image = ImageSpec::file(name).format("qcow2");
            let options = AmendOptions { image, options: vec!["refcount_bits=64".into()], ..AmendOptions::default() };
            rt::block_on(amend::run(&options, &JobHandle::new())).unwrap();
            theirs(8);
        }
        qemu.expect_clean(&path);
        assert!(qemu.content(&path, "qcow2")[..512 << 10].iter().all(|byte| *byte == 1), "{options}");
    }
}

/// By QEMU 7.2 it does.
#[test]
fn a_disk_grown_by_us_does_not_show_the_state() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = folder.path().join("image.qcow2");
    let name = path.to_str().expect("text path");
    qemu.create(&path, "qcow2", "cluster_size=512", SIZE);
    rt::block_on(async {
        write_state(name, 8).await.unwrap();
        let node = open(OpenRequest::file(name).format("qcow2").writable(true)).await.unwrap();
        node.resize(SIZE * 2, cowshed_image::Preallocation::Off).await.unwrap();
        node.close().await.unwrap();
    });
    assert!(qemu.content(&path, "qcow2").iter().all(|byte| *byte == 0));
    qemu.expect_clean(&path);
}

#[test]
fn the_state_is_written_under_power_cuts() {
    const NAME: &str = "image";
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for (number, options) in ["cluster_size=512", "cluster_size=4k,compat=0.10"].iter().enumerate() {
        let path = folder.path().join(NAME);
        qemu.create(&path, "qcow2", options, SIZE);
        qemu.io_commands(&path, "qcow2", &["write -P 1 0 64k".to_owned()]);
        qemu.img(["snapshot", "-c", "s", path.to_str().expect("text path")]).expect_ok();
        let files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&std::fs::read(&path).unwrap()))]);
        let config = Config::new(number as u64);
        let world = World::with_files(config.clone(), &files);
        world.run(write_state(NAME, 8)).unwrap();
        assert!(world.run(read_state(NAME)).unwrap().iter().all(|byte| *byte == 8));
        let verify = |case: &cowshed_testkit::crash::CrashCase<'_>| {
            let world = World::with_files(Config { in_order: true, ..config.clone() }, &case.state.files);
            let checked = world.run(async {
                let file = File::open(Path::new(NAME), &OpenOptions::default())?;
                check(&file, &CheckOptions::default(), &|_, _| true).await
            });
            let report = checked.map_err(|error| error.to_string())?;
            if report.counters.corruptions != 0 || report.counters.check_errors != 0 {
                return Err(format!("{:#?}", report.findings));
            }
            // Each byte is old or new.
            let state = world.run(read_state(NAME)).map_err(|error| error.to_string())?;
            let is_well = state.iter().all(|byte| [0, 8].contains(byte));
            if is_well { Ok(()) } else { Err("a byte of the state that nobody wrote".to_owned()) }
        };
        let plan = CrashPlan { max_distinct: 150, ..CrashPlan::new(number as u64) };
        let report = explore(&world.trace(), &plan, verify).unwrap_or_else(|failure| panic!("{options}: {failure}"));
        assert!(report.distinct() > 8, "{options}: {report}");
    }
}
