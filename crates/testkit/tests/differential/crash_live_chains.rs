// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while the layers of a chain in use are committed or streamed. The disk reads the same before, after and
//! at every moment between, and its chain has nothing wrong but leaked clusters.

use cowshed_image::graph::{Graph, below_filters};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_jobs::JobHandle;
use cowshed_jobs::commit::merge::{Merge, MergeRequest};
use cowshed_jobs::faults::Strict;
use cowshed_jobs::mirror::{Mirror, MirrorOptions};
use cowshed_jobs::stream::{StreamJob, StreamRequest};
use cowshed_offline::check::{CheckOptions, CheckReport, check};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::Result;
use serde_json::json;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

const SIZE: u64 = 512 << 10;
/// The chain, base first. The second one is shorter: the base's data behind its end must not show.
const FILES: &[&str] = &["base", "low", "mid", "top"];

#[derive(Clone, Copy, Debug)]
enum Action {
    /// Two layers in the middle go.
    Merge,
    /// The top goes; the base takes its place.
    Commit,
    /// The top takes over everything, or the data above the base.
    StreamJob(Option<&'static str>),
}

fn prepare(qemu: &Qemu, folder: &Path, options: &str) -> Snapshot {
    let path = |name: &str| folder.join(name);
    let text = |name: &str| path(name).to_str().expect("text path").to_owned();
    let writes: [&[&str]; 4] = [
        &["write -P 1 0 64k", "write -P 2 200k 24k", "write -P 8 400k 100k"],
        &["write -P 3 100k 40k", "write -z 0 8k"],
        &["write -P 4 8k 24k", "write -z 40k 16k"],
        &["write -P 5 300k 10k"],
    ];
    let mut below: Option<&str> = None;
    for (name, writes) in FILES.iter().zip(writes) {
        let size = if *name == "low" { 384 << 10 } else { SIZE };
        let backing = below.map(|below| format!(",backing_file={},backing_fmt=qcow2", path(below).display()));
        qemu.create(&path(name), "qcow2", &format!("{options}{}", backing.unwrap_or_default()), size);
        let writes: Vec<String> = writes.iter().map(|write| (*write).to_owned()).collect();
        qemu.io_commands(&path(name), "qcow2", &writes).expect_ok();
        if let Some(below) = below {
            // In the simulated folder the names are relative.
            qemu.img(["rebase", "-u", "-F", "qcow2", "-b", below, &text(name)]).expect_ok();
        }
        // The next one is created over the real file.
        below = Some(name);
    }
    let read = |name: &&str| ((*name).to_owned(), PageMap::from_bytes(&std::fs::read(path(name)).expect("an image")));
    FILES.iter().map(read).collect()
}

async fn add(graph: &Arc<Graph>, name: &str, below: Option<&str>) -> Result<Arc<Node>> {
    let options = json!({"driver": "qcow2", "node-name": name, "read-only": name != "top", "backing": below,
                         "file": {"driver": "file", "filename": name}});
    graph.add(BlockdevOptions::from_map(options.as_object().expect("an object").clone())?).await
}

async fn act(action: Action) -> Result<()> {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let mut nodes: Vec<Arc<Node>> = Vec::new();
    for name in FILES {
        let below = nodes.last().map(|node| node.name().to_owned());
        nodes.push(add(&graph, name, below.as_deref()).await?);
    }
    let node = |name: &str| Arc::clone(&nodes[FILES.iter().position(|known| *known == name).expect("a layer")]);
    let (job, top) = (JobHandle::new(), node("top"));
    match action {
        Action::Merge => {
            let (overlay, backing_file) = (top, Some("base".to_owned()));
            let request =
                MergeRequest { overlay, top: node("mid"), base: node("base"), backing_file, mask_protocol: false };
            let merge = Merge::start(&graph, "job", request).await?;
            merge.copy(&job, &Strict).await?;
            merge.finish().await?;
        }
        Action::Commit => {
            let base = node("base");
            let mirror = Mirror::commit(&graph, "job", (&top, &base), MirrorOptions::default()).await?;
            mirror.catch_up(&job, &Strict).await?;
            Rc::new(mirror).finish(true, &JobHandle::new()).await?;
        }
        Action::StreamJob(base) => {
            let base_node = base.map(node);
            let request = StreamRequest {
                node: below_filters(&top),
                base: base_node,
                backing_file: base.map(str::to_owned),
                mask_protocol: false,
                filter_name: "filter".to_owned(),
            };
            let stream = StreamJob::start(&graph, "job", request).await?;
            stream.copy(&job, &Strict).await?;
            stream.finish().await?;
        }
    }
    graph.close_all().await
}

async fn content(name: &str) -> Result<Vec<u8>> {
    let node = open(OpenRequest::file(name).format("qcow2")).await?;
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
    let found = world.run(content("top")).map_err(|error| format!("read after the cut: {error}"))?;
    if found == expected { Ok(()) } else { Err("the disk reads otherwise".to_owned()) }
}

#[test]
fn chains_in_use_survive_power_cuts() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let mut total = CrashReport::default();
    let actions = [Action::Merge, Action::Commit, Action::StreamJob(None), Action::StreamJob(Some("base"))];
    let options =
        ["cluster_size=4k", "cluster_size=512", "cluster_size=8k,compat=0.10", "cluster_size=16k,extended_l2=on"];
    for (number, (action, options)) in actions.iter().flat_map(|a| options.iter().map(move |o| (*a, *o))).enumerate() {
        let files = prepare(&qemu, folder.path(), options);
        let config = Config { sector_bytes: if number % 2 == 0 { 512 } else { 4096 }, ..Config::new(number as u64) };
        let expected = World::with_files(config.clone(), &files).run(content("top")).expect("a readable chain");
        let world = World::with_files(config.clone(), &files);
        world.run(act(action)).unwrap_or_else(|error| panic!("{action:?} on {options}: {error}"));
        let trace = world.trace();
        // After a commit of the top both it and the base are the disk.
        let holders: &[&str] = if matches!(action, Action::Commit) { &["top", "base"] } else { &["top"] };
        for name in holders {
            let found = world.run(content(name)).expect("a readable chain");
            assert!(found == expected, "{action:?} on {options}: {name} reads otherwise");
        }
        let plan = CrashPlan { max_distinct: 300, ..CrashPlan::new(number as u64) };
        match explore(&trace, &plan, |case| verify(&config, &expected, case)) {
            Ok(report) => total.add(&report),
            Err(failure) => panic!("{action:?} on {options}: {failure}"),
        }
    }
    println!("chains in use: {total}");
    assert!(total.distinct() > 250, "{total}");
}
