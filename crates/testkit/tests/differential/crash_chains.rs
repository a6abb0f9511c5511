// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while an image is rebased or committed. It reads the same before, after and at every moment between, and
//! its chain has nothing wrong but leaked clusters.

use cowshed_image::{OpenRequest, open};
use cowshed_jobs::commit::{self, CommitOptions};
use cowshed_jobs::rebase::{self, RebaseOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_offline::check::{CheckOptions, CheckReport, check};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::Result;
use std::path::Path;

const SIZE: u64 = 512 << 10;
const FILES: &[&str] = &["base", "top", "other"];

#[derive(Clone, Copy, Debug)]
enum Action {
    Commit,
    Rebase(Option<&'static str>),
}

fn prepare(qemu: &Qemu, folder: &Path, options: &str) -> Snapshot {
    let path = |name: &str| folder.join(name);
    qemu.create(&path("base"), "qcow2", options, SIZE);
    qemu.io_commands(&path("base"), "qcow2", &["write -P 1 0 64k".into(), "write -P 2 200k 24k".into()]).expect_ok();
    qemu.create(&path("other"), "qcow2", options, SIZE);
    qemu.io_commands(&path("other"), "qcow2", &["write -P 1 0 32k".into(), "write -P 3 100k 40k".into()]).expect_ok();
    let top = format!("{options},backing_file={},backing_fmt=qcow2", path("base").display());
    qemu.create(&path("top"), "qcow2", &top, SIZE);
    qemu.io_commands(&path("top"), "qcow2", &["write -P 4 8k 24k".into(), "write -z 40k 16k".into()]).expect_ok();
    // In the simulated folder the names are relative.
    let top = path("top");
    qemu.img(["rebase", "-u", "-F", "qcow2", "-b", "base", top.to_str().expect("text path")]).expect_ok();
    let read = |name: &&str| ((*name).to_owned(), PageMap::from_bytes(&std::fs::read(path(name)).expect("an image")));
    FILES.iter().map(read).collect()
}

async fn act(action: Action) -> Result<()> {
    let image = ImageSpec::file("top").format("qcow2");
    match action {
        Action::Commit => commit::run(&CommitOptions { image, ..CommitOptions::default() }, &JobHandle::new()).await,
        Action::Rebase(base) => {
            let options = RebaseOptions {
                image,
                base: base.map(str::to_owned),
                base_format: base.map(|_| "qcow2".to_owned()),
                ..RebaseOptions::default()
            };
            rebase::run(&options, &JobHandle::new()).await
        }
    }
}

async fn content() -> Result<Vec<u8>> {
    let node = open(OpenRequest::file("top").format("qcow2")).await?;
    let (result, buf) = node.read(0, IoBuf::zeroed(SIZE as usize)).await;
    result?;
    node.close().await?;
    Ok(buf.to_vec())
}

async fn run_check(name: &str) -> Result<CheckReport> {
    check(&File::open(Path::new(name), &OpenOptions::default())?, &CheckOptions::default(), &|_, _| true).await
}

fn verify(config: &Config, expected: &[u8], case: &CrashCase<'_>) -> std::result::Result<(), String> {
    let world = World::with_files(Config { in_order: true, ..config.clone() }, &case.state.files);
    for name in FILES {
        let report = world.run(run_check(name)).map_err(|error| format!("check of {name}: {error}"))?;
        if report.counters.corruptions != 0 || report.counters.check_errors != 0 {
            return Err(format!("{name}: {:#?}", report.findings));
        }
    }
    let found = world.run(content()).map_err(|error| format!("read after the cut: {error}"))?;
    if found == expected { Ok(()) } else { Err("the image reads otherwise".to_owned()) }
}

#[test]
fn chains_survive_power_cuts() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    let actions = [Action::Commit, Action::Rebase(None), Action::Rebase(Some("other"))];
    let options =
        ["cluster_size=4k", "cluster_size=512", "cluster_size=8k,compat=0.10", "cluster_size=16k,extended_l2=on"];
    for (number, (action, options)) in actions.iter().flat_map(|a| options.iter().map(move |o| (*a, *o))).enumerate() {
        let files = prepare(&qemu, folder.path(), options);
        let config = Config { sector_bytes: if number % 2 == 0 { 512 } else { 4096 }, ..Config::new(number as u64) };
        let expected = World::with_files(config.clone(), &files).run(content()).expect("a readable chain");
        let world = World::with_files(config.clone(), &files);
        world.run(act(action)).unwrap_or_else(|error| panic!("{action:?} on {options}: {error}"));
        let trace = world.trace();
        assert!(world.run(content()).expect("a readable chain") == expected, "{action:?} on {options}");
        let plan = CrashPlan { max_distinct: 400, ..CrashPlan::new(number as u64) };
        match explore(&trace, &plan, |case| verify(&config, &expected, case)) {
            Ok(report) => total.add(&report),
            Err(failure) => panic!("{action:?} on {options}: {failure}"),
        }
    }
    println!("chains: {total}");
    assert!(total.distinct() > 250, "{total}");
}
