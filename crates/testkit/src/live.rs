// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest's disk as the daemon serves it: an attachment to a node of a graph, on which live snapshots are taken while
//! requests run. On the simulated machine, so that the power can be cut everywhere.

use crate::audit::audit;
use crate::crash::{CrashCase, CrashReport, explore};
use crate::matrix::{CrashScene, Effort};
use crate::model::Model;
use crate::operations::{Op, OpGen, Step, print_steps, shrink};
use crate::qemu::Qemu;
use crate::random::Random;
use crate::runner::{GuestDisk, Outcome, check_disk_after_cut, run_steps, run_steps_on_queues};
use crate::scenario::{ImageDisk, Prepared, Trial};
use cowshed_create::{CreateRequest, prepare_sized};
use cowshed_image::formats::DriverOf;
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, Preallocation, ZeroFlags};
use cowshed_layout::qcow2::SnapshotName;
use cowshed_simulator::{Fault, World};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A snapshot that was taken: the new top, and the positions in the log before and after.
#[derive(Clone, Debug)]
struct Taken {
    top: String,
    began: usize,
    ended: usize,
}

/// The images of a chain, as an observer of the guest would know them.
#[derive(Clone, Debug, Default)]
struct History {
    bottom: String,
    taken: Vec<Taken>,
}

impl History {
    /// The tops of the chain that a power cut at `position` may leave, the surest one first, and how many images lie
    /// below that one.
    fn tops(&self, position: usize) -> (Vec<&str>, usize) {
        let done = self.taken.iter().take_while(|taken| taken.ended <= position).count();
        let name = |index: usize| if index == 0 { self.bottom.as_str() } else { self.taken[index - 1].top.as_str() };
        let mut tops = vec![name(done)];
        if self.taken.get(done).is_some_and(|taken| taken.began < position) {
            tops.push(name(done + 1));
        }
        (tops, done)
    }

    fn names_up_to(&self, count: usize) -> Vec<&str> {
        std::iter::once(self.bottom.as_str())
            .chain(self.taken.iter().map(|taken| taken.top.as_str()))
            .take(count + 1)
            .collect()
    }
}

/// The disk.
struct LiveDisk {
    graph: Arc<Graph>,
    attachment: Arc<Attachment>,
    world: World,
    /// Of overlays; `None`: snapshots are internal ones.
    overlay_options: Option<String>,
    tried: AtomicUsize,
    history: Mutex<History>,
    /// Internal snapshots that were taken.
    internal: AtomicUsize,
}

fn has_narrow_counts(node: &Node) -> bool {
    node.qcow2().is_some_and(|qcow2| qcow2.header().refcount_order <= 1)
}

fn driver_options(name: &str, file: &str, direct: bool, more: &str) -> Result<BlockdevOptions> {
    let cache = if direct { ",cache.direct=on" } else { "" };
    BlockdevOptions::from_keyval(&format!(
        "driver=qcow2,node-name={name},file.filename={file},discard=unmap{cache}{more}"
    ))
}

impl LiveDisk {
    async fn open(world: &World, top: &str, trial: &Trial, overlay_options: Option<&str>) -> Result<LiveDisk> {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let node = graph.add(driver_options("n0", top, trial.config.direct, "")?).await?;
        let attachment = graph.attach(&node, AttachRequest::export("guest", true)).await?;
        let history = Mutex::new(History { bottom: top.to_owned(), taken: Vec::new() });
        let overlay_options = overlay_options.map(str::to_owned);
        let (world, tried, internal) = (world.clone(), AtomicUsize::new(0), AtomicUsize::new(0));
        Ok(LiveDisk { graph, attachment, world, overlay_options, tried, history, internal })
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn close(&self) -> Result<()> {
        let detached = self.attachment.detach().await;
        detached.and(self.graph.close_all().await)
    }

    /// Takes an internal snapshot; every third time it deletes the one before instead.
    async fn take_internal(&self) -> Result<()> {
        let number = self.tried.fetch_add(1, Ordering::Relaxed) + 1;
        let node = self.attachment.node();
        let changed = match number % 3 {
            0 => {
                let before = SnapshotName::of_name(format!("live{}", number - 1));
                self.graph.delete_internal_snapshot(&node, &before).await.map(drop)
            }
            _ => self.graph.take_internal_snapshot(&node, &format!("live{number}")).await.map(drop),
        };
        match changed {
            Ok(()) => {
                self.internal.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            // Images with a data file have none; and where none was taken there is none to delete.
            Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::NotFound) => Ok(()),
            // With counts of one or two bits a cluster can't belong to many.
            Err(error) if has_narrow_counts(&node) && error.to_string().contains("can't count more") => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn take(&self, overlay_options: &str) -> Result<()> {
        let began = self.world.position();
        let number = self.tried.fetch_add(1, Ordering::Relaxed) + 1;
        let node = self.attachment.node();
        let (below, direct) = (node.filename(), self.world.config().direct);
        let top = format!("{}.{number}", self.history().bottom);
        let request = CreateRequest {
            filename: top.clone(),
            format: "qcow2".to_owned(),
            options: vec![overlay_options.to_owned()],
            backing_file: Some(below),
            backing_format: Some("qcow2".to_owned()),
            backing_unchecked: true,
            ..CreateRequest::default()
        };
        prepare_sized(&request, node.size()).await?.run().await?;
        let name = format!("n{number}");
        let overlay = self.graph.add(driver_options(&name, &top, direct, ",backing=")?).await?;
        if let Err(error) = self.graph.take_snapshot(&node, &overlay).await {
            drop(overlay);
            self.graph.delete(&name).await?;
            return Err(error);
        }
        let ended = self.world.position();
        self.history().taken.push(Taken { top, began, ended });
        Ok(())
    }
}

impl GuestDisk for LiveDisk {
    async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.attachment.queue().read(offset, buf).await
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.attachment.queue().write(offset, buf).await
    }

    async fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Result<()> {
        let flags = ZeroFlags { may_unmap, no_fallback: false };
        self.attachment.queue().write_zeroes(offset, len, flags).await
    }

    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.attachment.queue().discard(offset, len).await
    }

    async fn write_compressed(&self, _: u64, _: IoBuf) -> Result<()> {
        Err(Error::unsupported("clients of a graph write nothing compressed"))
    }

    async fn resize(&self, bytes: u64) -> Result<()> {
        self.attachment.queue().resize(bytes, Preallocation::Off).await
    }

    fn size(&self) -> u64 {
        self.attachment.size()
    }

    async fn flush(&self) -> Result<()> {
        self.attachment.queue().flush().await
    }

    async fn snapshot(&self) -> Result<()> {
        match &self.overlay_options {
            Some(options) => self.take(options).await,
            None => self.take_internal().await,
        }
    }
}

/// A case: an image of the matrix, and guests on it while it gets overlays.
pub struct LiveScene {
    scene: CrashScene,
    prepared: Prepared,
    overlay_options: Option<String>,
}

impl LiveScene {
    /// The case of a seed, with internal snapshots instead of overlays.
    pub fn internal(seed: u64) -> Self {
        LiveScene { overlay_options: None, ..LiveScene::new(seed) }
    }

    /// The case of a seed.
    pub fn new(seed: u64) -> Self {
        let mut scene = CrashScene::new(seed);
        scene.bitmaps.clear();
        (scene.encryption, scene.amend) = ("", "");
        let mut random = Random::new(seed ^ 0x11fe);
        let overlay_options = random.pick(&[
            "cluster_size=512",
            "cluster_size=4k",
            "cluster_size=4k,lazy_refcounts=on",
            "cluster_size=16k,extended_l2=on",
            "cluster_size=64k",
            "cluster_size=4k,compat=0.10",
        ]);
        let prepared = Prepared::with(&scene.chain, scene.snapshots, &[]);
        LiveScene { scene, prepared, overlay_options: Some(overlay_options.to_owned()) }
    }

    /// The special features of the case, in words.
    pub fn features(&self) -> String {
        let snapshots = self
            .overlay_options
            .as_ref()
            .map_or("internal snapshots".to_owned(), |options| format!("overlays of {options}"));
        format!("{}, {snapshots}", self.scene.features().join(", "))
    }

    /// Requests of the guest with three snapshots among them.
    pub fn steps(&self, count: usize) -> Vec<Step> {
        let mut random = Random::new(self.scene.seed ^ 0x5a5);
        let requests = self.prepared.requests();
        let mut steps = OpGen { compressed: false, resizes: false, ..requests }.steps(self.scene.seed, count);
        for _ in 0..3 {
            let at = random.below(steps.len() as u64) as usize;
            // One after the other: each is taken on the top that the one before has left.
            steps.insert(at, Step { stream: 0, op: Op::Snapshot });
        }
        steps
    }

    /// Runs the case and cuts its power everywhere; returns the number of snapshots taken.
    ///
    /// # Errors
    /// The failure, and the fewest requests that show it.
    pub fn run(&self, effort: &Effort, faults: &[Fault]) -> std::result::Result<(CrashReport, usize), String> {
        let steps = self.steps(effort.requests);
        self.run_steps(effort, faults, &steps).map_err(|first| {
            let mut last = first.clone();
            let mut tries = 0;
            let small = shrink(&steps, |steps| {
                tries += 1;
                tries <= 150 && self.run_steps(effort, faults, steps).map_err(|found| last = found).is_err()
            });
            let (seed, features) = (self.scene.seed, self.features());
            format!(
                "seed {seed} ({features}), faults {faults:?}:\n{first}\n\nwith {} requests: {}\n{last}",
                small.len(),
                print_steps(&small)
            )
        })
    }

    fn run_steps(
        &self,
        effort: &Effort,
        faults: &[Fault],
        steps: &[Step],
    ) -> std::result::Result<(CrashReport, usize), String> {
        let mut trial = self.scene.trial(steps.to_vec(), effort, faults.to_vec());
        // On some file systems a new name is durable only when its folder was synced.
        trial.config.sync_covers_name = trial.config.seed.is_multiple_of(2);
        let world = self.prepared.world(&trial);
        let model = Model::new(self.prepared.content.clone());
        let failed = |error: Error| format!("the run itself: {error}");
        let disk = match world.run(LiveDisk::open(&world, &self.prepared.top, &trial, self.overlay_options.as_deref()))
        {
            Err(_) if trial.may_fail() => return Ok((CrashReport::default(), 0)),
            disk => disk.map_err(failed)?,
        };
        let (outcome, disk) = match trial.queues {
            0 | 1 => world.run(run_steps(disk, &world, model, &trial.steps)),
            queues => run_steps_on_queues(disk, &world, model, &trial.steps, queues, trial.config.seed),
        };
        match world.run(disk.close()) {
            Err(error) if !trial.may_fail() => return Err(failed(error)),
            _ => {}
        }
        match outcome.errors.first() {
            Some((step, error)) if !trial.may_fail() => return Err(format!("the run itself: {step}: {error}")),
            _ => {}
        }
        if let Some(complaint) = outcome.wrong_reads.first() {
            return Err(format!("the run itself: {complaint}"));
        }
        let history = disk.history().clone();
        let taken = history.taken.len() + disk.internal.load(Ordering::Relaxed);
        let report = explore(&world.trace(), &trial.plan, |case| {
            self.verify(&outcome, &history, case, &trial)?;
            match effort.sample_qemu > 0 && case.number % effort.sample_qemu == effort.sample_qemu - 1 {
                true => self.verify_by_qemu(&outcome, &history, case),
                false => Ok(()),
            }
        });
        report.map(|report| (report, taken)).map_err(|failure| failure.to_string())
    }

    /// Every image that is surely part of the chain is whole, and the disk has the data that the guest was promised.
    /// While a snapshot is being taken the old top must be. With several queues the new one may have got the guest's
    /// writes before its taking was over.
    fn verify(
        &self,
        outcome: &Outcome,
        history: &History,
        case: &CrashCase<'_>,
        trial: &Trial,
    ) -> std::result::Result<(), String> {
        let (tops, done) = history.tops(case.position);
        for name in history.names_up_to(done) {
            let contents = case.state.files.get(name).ok_or_else(|| format!("{name} is gone"))?;
            let found = audit(contents).map_err(|complaint| format!("audit of {name}: {complaint}"))?;
            if found.dirty && name != tops[0] {
                return Err(format!("{name} is dirty below its overlay"));
            }
        }
        let mut verdicts = Vec::new();
        for top in &tops {
            let verdict = self.read_back(top, outcome, case, trial);
            if verdict.is_ok() {
                return Ok(());
            }
            verdicts.push(format!("{top}: {}", verdict.err().unwrap_or_default()));
            if trial.queues <= 1 {
                break;
            }
        }
        Err(verdicts.join("; "))
    }

    fn read_back(
        &self,
        top: &str,
        outcome: &Outcome,
        case: &CrashCase<'_>,
        trial: &Trial,
    ) -> std::result::Result<(), String> {
        let world = World::with_files(
            cowshed_simulator::Config { in_order: true, capacity_bytes: None, ..trial.config.clone() },
            &case.state.files,
        );
        world.run(async {
            let disk = ImageDisk::open(top, true, trial.config.direct).await;
            let disk = disk.map_err(|error| format!("opened again: {error}"))?;
            check_disk_after_cut(&disk, &outcome.model, case.position)
                .await
                .map_err(|error| format!("opened again: {error}"))?;
            disk.0.close().await.map_err(|error| format!("closed again: {error}"))
        })
    }

    fn verify_by_qemu(
        &self,
        outcome: &Outcome,
        history: &History,
        case: &CrashCase<'_>,
    ) -> std::result::Result<(), String> {
        let (tops, done) = history.tops(case.position);
        if tops.len() > 1 {
            return Ok(());
        }
        let qemu = Qemu::system();
        for (name, contents) in &case.state.files {
            std::fs::write(name, contents.to_vec()).map_err(|error| format!("could not write {name}: {error}"))?;
        }
        for name in history.names_up_to(done) {
            let dirty = case.state.files.get(name).is_some_and(|file| audit(file).is_ok_and(|audit| audit.dirty));
            let options: &[&str] = if dirty { &["-r", "all"] } else { &[] };
            let verdict = qemu.check_with(Path::new(name), "qcow2", options);
            if verdict.code != 0 && verdict.code != 3 {
                return Err(format!("qemu-img check of {name}: {} {}", verdict.json, verdict.stderr));
            }
        }
        let bytes = qemu.content(Path::new(tops[0]), "qcow2");
        let checked = outcome.model.check_after_cut(case.position, 0, &bytes);
        checked.map_err(|complaint| format!("read by qemu-img: {complaint}"))
    }
}
