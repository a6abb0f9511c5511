// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while a disk in use is copied, and while its past is read (snapshot-access). The copy is a backup
//! (copy-before-write), a mirror, or a mirror whose writes go to both ends. At every moment both images have nothing
//! wrong but leaked clusters, and the disk has the data that its clients were promised. Once the job is over, its copy
//! is there, whole. `COWSHED_SEED=N` runs one case, `COWSHED_SEEDS=A..B` a range.

use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, Preallocation, ZeroFlags};
use cowshed_jobs::JobHandle;
use cowshed_jobs::backup::{Backup, BackupRequest};
use cowshed_jobs::faults::Strict;
use cowshed_jobs::mirror::{Mirror, MirrorOptions, Sync};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::audit::audit;
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::model::Model;
use cowshed_testkit::operations::{OpGen, Step};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::seeds;
use cowshed_testkit::runner::{GuestDisk, Outcome, check_disk_after_cut, run_steps};
use cowshed_testkit::scenario::{ImageDisk, Prepared};
use cowshed_types::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

const SIZE: u64 = 192 << 10;
const TARGET: &str = "target.qcow2";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    Backup,
    Mirror,
    WriteBlocking,
    Fleecing,
}

/// A client's disk.
struct Disk(Arc<Attachment>);

impl GuestDisk for Disk {
    async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.0.queue().read(offset, buf).await
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.0.queue().write(offset, buf).await
    }

    async fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Result<()> {
        self.0.queue().write_zeroes(offset, len, ZeroFlags { may_unmap, no_fallback: false }).await
    }

    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.0.queue().discard(offset, len).await
    }

    async fn write_compressed(&self, _: u64, _: IoBuf) -> Result<()> {
        Err(Error::unsupported("clients of a graph write nothing compressed"))
    }

    async fn resize(&self, bytes: u64) -> Result<()> {
        self.0.queue().resize(bytes, Preallocation::Off).await
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    async fn flush(&self) -> Result<()> {
        self.0.queue().flush().await
    }
}

/// The result of a run.
struct Run {
    outcome: Outcome,
    /// The job was over at this position of the log.
    finished: usize,
    /// The copy's expected contents then.
    expected: Vec<u8>,
}

async fn add(graph: &Arc<Graph>, name: &str, file: &str) -> Result<Arc<Node>> {
    let options = format!("driver=qcow2,node-name={name},discard=unmap,file.filename={file}");
    graph.add(BlockdevOptions::from_keyval(&options)?).await
}

async fn content(node: &Node) -> Result<Vec<u8>> {
    let (result, buf) = node.read(0, IoBuf::zeroed(SIZE as usize)).await;
    result.map(|()| buf.to_vec())
}

/// Reads the disk as it was, and gives it up part by part, until `over` is set.
async fn read_past(past: Arc<Attachment>, before: Vec<u8>, over: Rc<Cell<bool>>) -> Result<()> {
    let queue = past.queue();
    while !over.get() {
        for start in (0..SIZE).step_by(12 << 10) {
            let len = (20 << 10).min(SIZE - start) as usize;
            let (result, buf) = queue.read(start, IoBuf::zeroed(len)).await;
            result?;
            if *buf != before[start as usize..start as usize + len] {
                return Err(Error::internal(format!("the past has changed at {start}")));
            }
        }
    }
    Ok(())
}

/// Guests write above a copy-before-write filter while its past is read, and in the end given up.
async fn fleece(world: &World, prepared: &Prepared, steps: &[Step]) -> Result<Run> {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    drop((add(&graph, "source", &prepared.top).await?, add(&graph, "target", TARGET).await?));
    let keyval = "driver=copy-before-write,node-name=filter,file=source,target=target";
    let filter = graph.add(BlockdevOptions::from_keyval(keyval)?).await?;
    let user = graph.attach(&filter, AttachRequest::export("guest", true)).await?;
    let keyval = "driver=snapshot-access,node-name=past,file=filter,discard=unmap";
    let past = graph.add(BlockdevOptions::from_keyval(keyval)?).await?;
    let past = graph.attach(&past, AttachRequest::export("reader", true)).await?;
    let over = Rc::new(Cell::new(false));
    let reading = rt::spawn(read_past(Arc::clone(&past), prepared.content.clone(), Rc::clone(&over)));
    let model = Model::new(prepared.content.clone());
    let (outcome, _) = run_steps(Disk(Arc::clone(&user)), world, model, steps).await;
    over.set(true);
    reading.await?;
    past.queue().discard(0, SIZE).await?;
    past.detach().await?;
    user.detach().await?;
    drop(filter);
    graph.close_all().await?;
    // No copy was promised.
    Ok(Run { outcome, finished: usize::MAX, expected: Vec::new() })
}

async fn run(job: Job, world: &World, prepared: &Prepared, steps: &[Step]) -> Result<Run> {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let (source, target) = (add(&graph, "source", &prepared.top).await?, add(&graph, "target", TARGET).await?);
    let user = graph.attach(&source, AttachRequest::export("guest", true)).await?;
    let handle = JobHandle::new();
    let model = Model::new(prepared.content.clone());
    let (outcome, expected) = if job == Job::Backup {
        let request = BackupRequest {
            source: Arc::clone(&source),
            target: Arc::clone(&target),
            sync: Sync::Full,
            bitmap: None,
            compress: false,
            discard_source: false,
            breaks_writes: true,
            filter_name: "filter".to_owned(),
        };
        let backup = Backup::start(&graph, "job", request).await?;
        let copying = rt::spawn(async move { (backup.copy(&handle, &Strict).await, backup) });
        let (outcome, _) = run_steps(Disk(Arc::clone(&user)), world, model, steps).await;
        let (copied, backup) = copying.await;
        copied?;
        backup.finish().await?;
        (outcome, prepared.content.clone())
    } else {
        let write_blocking = (job == Job::WriteBlocking).then(|| "filter".to_owned());
        let options = MirrorOptions { granularity_bytes: 4096, write_blocking, ..MirrorOptions::default() };
        let mirror = Mirror::start(&graph, "job", (&source, &target), options).await?;
        let copying = rt::spawn(async move { (mirror.catch_up(&handle, &Strict).await, mirror, handle) });
        let (outcome, _) = run_steps(Disk(Arc::clone(&user)), world, model, steps).await;
        let (copied, mirror, handle) = copying.await;
        copied?;
        mirror.catch_up(&handle, &Strict).await?;
        Rc::new(mirror).finish(false, &JobHandle::new()).await?;
        (outcome, content(&source).await?)
    };
    let finished = world.position();
    if content(&target).await? != expected {
        return Err(Error::internal("the copy is not what the disk was"));
    }
    user.detach().await?;
    drop((source, target));
    graph.close_all().await?;
    Ok(Run { outcome, finished, expected })
}

fn verify(prepared: &Prepared, run: &Run, case: &CrashCase<'_>) -> std::result::Result<(), String> {
    for name in [prepared.top.as_str(), TARGET] {
        let file = case.state.files.get(name).ok_or_else(|| format!("{name} is gone"))?;
        audit(file).map_err(|complaint| format!("audit of {name}: {complaint}"))?;
    }
    let world = World::with_files(Config { in_order: true, ..Config::new(0) }, &case.state.files);
    world.run(async {
        let disk = ImageDisk::open(&prepared.top, true, false).await;
        let disk = disk.map_err(|error| format!("the disk opened again: {error}"))?;
        check_disk_after_cut(&disk, &run.outcome.model, case.position).await?;
        disk.0.close().await.map_err(|error| format!("the disk closed again: {error}"))?;
        let copy = ImageDisk::open(TARGET, true, false).await;
        let copy = copy.map_err(|error| format!("the copy opened again: {error}"))?;
        let found = content(&copy.0).await.map_err(|error| format!("the copy read again: {error}"))?;
        if case.position >= run.finished && found != run.expected {
            return Err("the job was over, and its copy is not there".to_owned());
        }
        copy.0.close().await.map_err(|error| format!("the copy closed again: {error}"))
    })
}

fn spec(cluster_size: u64, extended_l2: bool) -> Qcow2Spec {
    Qcow2Spec { cluster_size, extended_l2, ..Qcow2Spec::default() }
}

fn case(job: Job, seed: u64) -> CrashReport {
    let specs = [spec(4096, false), spec(512, false), spec(16384, true), spec(65536, false)];
    let written = [(0, 40 << 10), (64 << 10, 20 << 10), (150 << 10, 30 << 10)];
    let sessions = written.map(|(offset, len)| Op::Write { offset, len, texture: Texture::Random(seed + offset) });
    let layer =
        Layer { format: Format::Qcow2(specs[seed as usize % 4].clone()), size: SIZE, sessions: vec![sessions.into()] };
    let prepared = Prepared::new(&Chain { layers: vec![layer] });
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = folder.path().join(TARGET);
    let options = ["cluster_size=4k", "cluster_size=64k", "cluster_size=512", "cluster_size=16k,extended_l2=on"];
    qemu.create(&path, "qcow2", options[seed as usize / 4 % 4], SIZE);
    let mut files: Snapshot = prepared.files.clone();
    files.insert(TARGET.to_owned(), PageMap::from_bytes(&std::fs::read(&path).expect("the target")));
    let sector_bytes = if seed % 3 == 2 { 4096 } else { 512 };
    let world = World::with_files(Config { sector_bytes, ..Config::new(seed) }, &files);
    let steps = OpGen { compressed: false, resizes: false, ..prepared.requests() }.steps(seed, 25);
    let run = match job {
        Job::Fleecing => world.run(fleece(&world, &prepared, &steps)),
        _ => world.run(run(job, &world, &prepared, &steps)),
    };
    let run = run.unwrap_or_else(|error| panic!("{job:?}, seed {seed}: {error}"));
    assert!(run.outcome.errors.is_empty(), "{job:?}, seed {seed}: {:?}", run.outcome.errors);
    assert!(run.outcome.wrong_reads.is_empty(), "{job:?}, seed {seed}: {:?}", run.outcome.wrong_reads);
    let plan = CrashPlan { max_distinct: 150, ..CrashPlan::new(seed) };
    explore(&world.trace(), &plan, |case| verify(&prepared, &run, case))
        .unwrap_or_else(|failure| panic!("{job:?}, seed {seed}: {failure}"))
}

fn all(job: Job) {
    let mut total = CrashReport::default();
    let seeds = seeds(8);
    let count = seeds.end - seeds.start;
    for seed in seeds {
        total.add(&case(job, seed));
    }
    println!("{job:?}: {total}");
    assert!(total.distinct() > 40 * count, "too few states to mean anything: {total}");
}

#[test]
fn power_cut_during_a_backup_harms_nothing() {
    all(Job::Backup);
}

#[test]
fn power_cut_during_a_mirror_harms_nothing() {
    all(Job::Mirror);
}

#[test]
fn power_cut_under_a_write_blocking_mirror_harms_nothing() {
    all(Job::WriteBlocking);
}

#[test]
fn no_power_cut_while_the_past_is_read_harms_the_disk() {
    all(Job::Fleecing);
}
