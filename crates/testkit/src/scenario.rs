// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The real engine on the simulated disk. Several streams write to images of every kind, and the power is cut
//! everywhere. Each disk that is left is audited, opened and read, and some are handed to the real `qemu-img`.

use crate::audit::{Audit, audit, metadata_ranges, snapshot_digest};
use crate::crash::{CrashCase, CrashFailure, CrashPlan, CrashReport, explore};
use crate::images::{Chain, Qcow2Spec, QemuIo};
use crate::model::Model;
use crate::operations::{Op, OpGen, Step, print_steps, shrink};
use crate::qemu::{Qemu, temp_dir};
use crate::reflink::SharingDisk;
use crate::runner::{GuestDisk, Outcome, check_disk_after_cut, run_steps, run_steps_on_queues};
use cowshed_create::{CreateRequest, prepare};
use cowshed_image::formats::DriverOf;
use cowshed_image::node::{Node, Preallocation, ZeroFlags};
use cowshed_image::secret::Secret;
use cowshed_image::{OpenRequest, open};
use cowshed_jobs::amend::{self, AmendOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_offline::check::{CheckOptions, check};
use cowshed_simulator::{Config, Effect, Fault, PageMap, Replay, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions, SharedBufs, SharedMemory, rt};
use cowshed_types::{Error, ErrorKind, Repair, Result};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// A panic of the engine is a complaint like any other.
fn told<T>(work: impl FnOnce() -> std::result::Result<T, String>) -> std::result::Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("without a message")))
    })
}

/// For [`ImageDisk::open_with`]: a filter that lets everything pass is between the image and its file.
pub const BEHIND_A_FILTER: &str = "file.driver=fault";

/// Id and passphrase of the secret that every disk is opened with.
const SECRET_ID: &str = "s";
const PASSPHRASE: &str = "geheim";
/// Options that open an encrypted image.
const KEY: &str = "encrypt.key-secret=s";

/// An image as a guest's disk.
pub struct ImageDisk(
    /// Its node.
    pub Arc<Node>,
);

impl ImageDisk {
    /// Opens an image; inside of [`World::run`] one of the machine's.
    ///
    /// # Errors
    /// Errors of [`open()`].
    pub async fn open(name: &str, writable: bool, direct: bool) -> Result<Self> {
        Self::open_with(name, writable, direct, "").await
    }

    /// As [`ImageDisk::open`], with further options of the driver: `l2-cache-size=1k,discard-no-unref=on`.
    ///
    /// # Errors
    /// Errors of [`open()`], and of the options.
    pub async fn open_with(name: &str, writable: bool, direct: bool, options: &str) -> Result<Self> {
        let cache = if direct { "none" } else { "writeback" };
        let request = match options {
            "" => OpenRequest::file(name).format("qcow2"),
            BEHIND_A_FILTER => {
                OpenRequest::image_opts(&format!("driver=qcow2,{BEHIND_A_FILTER},file.file.filename={name}"))?
            }
            options => OpenRequest::image_opts(&format!("driver=qcow2,file.filename={name},{options}"))?,
        };
        let secret = (SECRET_ID.to_owned(), Secret::new(PASSPHRASE.into()));
        open(request.writable(writable).cache(cache)?.secrets([secret])).await.map(ImageDisk)
    }

    /// Opens the node that `options` describe, as `--image-opts` takes them.
    ///
    /// # Errors
    /// Errors of [`open()`], and of the options.
    pub async fn open_options(options: &str, writable: bool) -> Result<Self> {
        open(OpenRequest::image_opts(options)?.writable(writable)).await.map(ImageDisk)
    }
}

/// Memory that a guest shares, for some of the requests: each request goes the same way in each run. It has two pieces where it can.
fn guest_memory(offset: u64, len: usize) -> Option<SharedBufs> {
    const ONE_OF: u64 = 3;
    const MAX_BYTES: usize = 256 << 10;
    if (offset >> 9) % ONE_OF != 1 || len == 0 || len > MAX_BYTES {
        return None;
    }
    let (memory, _) = SharedMemory::create("guest", len as u64).expect("memory");
    let mut bufs = SharedBufs::default();
    bufs.push(memory.part(0, len / 2));
    bufs.push(memory.part(len / 2, len - len / 2));
    Some(bufs)
}

impl GuestDisk for ImageDisk {
    async fn read(&self, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        let Some(bufs) = guest_memory(offset, buf.len()) else { return self.0.read(offset, buf).await };
        let (result, bufs) = self.0.read_shared(offset, bufs).await;
        match result {
            Ok(()) => bufs.read(0, &mut buf),
            Err(_) => buf.fill(0),
        }
        (result, buf)
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let Some(bufs) = guest_memory(offset, buf.len()) else { return self.0.write(offset, buf).await };
        bufs.write(0, &buf);
        (self.0.write_shared(offset, bufs).await.0, buf)
    }

    async fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Result<()> {
        self.0.write_zeroes(offset, len, ZeroFlags { may_unmap, no_fallback: false }).await
    }

    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.0.discard(offset, len).await
    }

    async fn write_compressed(&self, offset: u64, buf: IoBuf) -> Result<()> {
        self.0.write_compressed(vec![(offset, buf)]).await
    }

    async fn resize(&self, bytes: u64) -> Result<()> {
        self.0.resize(bytes, Preallocation::Off).await
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    async fn flush(&self) -> Result<()> {
        self.0.flush().await
    }
}

/// The work on an image.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The machine.
    pub config: Config,
    /// The faults of the machine. With faults, requests may fail; without, none may.
    pub faults: Vec<Fault>,
    /// Options of the driver, as `--image-opts` takes them.
    pub options: &'static str,
    /// The guest's requests.
    pub steps: Vec<Step>,
    /// Queues that the guest's streams are spread over; 1: all on one executor.
    pub queues: usize,
    /// The plan of the power cuts.
    pub plan: CrashPlan,
    /// The distance of distinct states of which one is handed to the real `qemu-img`; 0: none.
    pub sample_qemu: usize,
    /// The options that are amended behind the guest's requests, "" for none.
    pub amend: &'static str,
    /// Writes take over blocks of another file; counts their bytes.
    pub shared: Option<Arc<AtomicU64>>,
}

impl Trial {
    /// True where requests may fail.
    pub(crate) fn may_fail(&self) -> bool {
        let harms = |fault: &Fault| !matches!(fault.effect, Effect::Delay(_));
        self.faults.iter().any(harms) || self.config.capacity_bytes.is_some()
    }
}

/// Lets the guest of a trial loose on a disk.
fn guest_at<D: GuestDisk + Send + Sync>(disk: D, world: &World, model: Model, trial: &Trial) -> (Outcome, D) {
    match trial.queues {
        0 | 1 => world.run(run_steps(disk, world, model, &trial.steps)),
        queues => run_steps_on_queues(disk, world, model, &trial.steps, queues, trial.config.seed),
    }
}

/// An image to start from, its files made by the real QEMU.
pub struct Prepared {
    /// The folder of the files; also of states that are handed to `qemu-img`.
    folder: tempfile::TempDir,
    /// Name of the top image: its path in the folder.
    pub top: String,
    /// All files, by their paths.
    pub files: Snapshot,
    /// The contents of the guest's disk.
    pub content: Vec<u8>,
    spec: Qcow2Spec,
    leaks_at_start: u64,
    snapshots_at_start: u64,
    /// Names of the enabled dirty bitmaps of the top image.
    bitmaps: Vec<String>,
    qemu: Qemu,
    is_encrypted: bool,
}

impl Prepared {
    /// Builds `chain`, whose top is qcow2.
    pub fn new(chain: &Chain) -> Self {
        Self::with(chain, false, &[])
    }

    /// As [`Prepared::new`], if wanted with two internal snapshots in the top image and writes between them. It has
    /// enabled dirty bitmaps of these granularities in bytes.
    pub fn with(chain: &Chain, has_snapshots: bool, granularities: &[u64]) -> Self {
        let (qemu, folder) = (Qemu::system(), temp_dir());
        let built = chain.build(&qemu, folder.path(), &mut QemuIo(&qemu));
        if has_snapshots {
            let take = |name: &str| qemu.img(["snapshot", "-c", name, &built.path.to_string_lossy()]).expect_ok();
            take("one");
            qemu.io_commands(&built.path, "qcow2", &["write -q -P 99 0 512".to_owned()]);
            take("two");
        }
        let mut bitmaps = Vec::new();
        for (number, granularity) in granularities.iter().enumerate() {
            let name = format!("bitmap{number}");
            let (granularity, path) = (granularity.to_string(), built.path.to_string_lossy().into_owned());
            qemu.img(["bitmap", "--add", "-g", &granularity, &path, &name]).expect_ok();
            bitmaps.push(name);
        }
        let content = qemu.content(&built.path, "qcow2");
        let mut files = Snapshot::new();
        for entry in std::fs::read_dir(folder.path()).expect("the folder is there") {
            let path = entry.expect("the folder can be listed").path();
            let bytes = std::fs::read(&path).expect("the files just made can be read");
            files.insert(path.to_string_lossy().into_owned(), PageMap::from_bytes(&bytes));
        }
        let spec = match chain.layers.last().map(|layer| &layer.format) {
            Some(crate::images::Format::Qcow2(spec)) => spec.clone(),
            other => panic!("the top of the chain must be qcow2, not {other:?}"),
        };
        let top = built.path.to_string_lossy().into_owned();
        let leaks_at_start = files.get(&top).and_then(|file| audit(file).ok()).map_or(0, |audit| audit.leaks);
        let snapshots_at_start = files.get(&top).map_or(Ok(0), snapshot_digest);
        let snapshots_at_start = snapshots_at_start.unwrap_or_else(|wrong| panic!("the image just made: {wrong}"));
        Prepared {
            folder,
            top,
            files,
            content,
            spec,
            leaks_at_start,
            snapshots_at_start,
            bitmaps,
            qemu,
            is_encrypted: false,
        }
    }

    /// An encrypted image of our own making with `options` (`encrypt.…`, as `-o` takes them). The real QEMU has written
    /// `writes`, each an offset and a length in bytes, to it. It has snapshots and bitmaps as [`Prepared::with`].
    pub fn encrypted(
        spec: &Qcow2Spec,
        options: &str,
        size: u64,
        writes: &[(u64, u64)],
        has_snapshots: bool,
        granularities: &[u64],
    ) -> Self {
        let (qemu, folder) = (Qemu::system(), temp_dir());
        let path = folder.path().join("encrypted.qcow2");
        let top = path.to_string_lossy().into_owned();
        let request = CreateRequest {
            filename: top.clone(),
            format: "qcow2".to_owned(),
            size: Some(size),
            options: vec![spec.options(&path, None), KEY.to_owned(), options.to_owned()],
            secrets: vec![(SECRET_ID.to_owned(), Secret::new(PASSPHRASE.into()))],
            ..CreateRequest::default()
        };
        let created = rt::block_on(async { prepare(&request).await?.run().await });
        created.unwrap_or_else(|error| panic!("{options}: {error}"));
        let mut prepared = Prepared {
            folder,
            top,
            files: Snapshot::new(),
            content: Vec::new(),
            spec: spec.clone(),
            leaks_at_start: 0,
            snapshots_at_start: 0,
            bitmaps: Vec::new(),
            qemu,
            is_encrypted: true,
        };
        for (index, (offset, len)) in writes.iter().enumerate() {
            let command = format!("write -q -P {} {offset} {len}", index + 1);
            prepared.qemu.io(prepared.key_arguments(&["-c", &command])).expect_ok();
        }
        let snapshots: &[&str] = if has_snapshots { &["one", "two"] } else { &[] };
        for name in snapshots {
            prepared.qemu.img(prepared.key_arguments(&["snapshot", "-c", name])).expect_ok();
            prepared.qemu.io(prepared.key_arguments(&["-c", "write -q -P 99 0 512"])).expect_ok();
        }
        for (number, granularity) in granularities.iter().enumerate() {
            let name = format!("bitmap{number}");
            let mut arguments = prepared.key_arguments(&["bitmap", "--add", "-g", &granularity.to_string()]);
            arguments.push(name.clone());
            prepared.qemu.img(arguments).expect_ok();
            prepared.bitmaps.push(name);
        }
        prepared.content = prepared.content_by_qemu();
        for entry in std::fs::read_dir(prepared.folder.path()).expect("the folder is there") {
            let path = entry.expect("the folder can be listed").path();
            let bytes = std::fs::read(&path).expect("the files just made can be read");
            prepared.files.insert(path.to_string_lossy().into_owned(), PageMap::from_bytes(&bytes));
        }
        let digest = prepared.files.get(&prepared.top).map_or(Ok(0), snapshot_digest);
        prepared.snapshots_at_start = digest.unwrap_or_else(|wrong| panic!("the image just made: {wrong}"));
        prepared.patch(|_| {});
        prepared
    }

    /// Arguments of QEMU's tools that name the encrypted image and its secret, behind `more`.
    fn key_arguments(&self, more: &[&str]) -> Vec<String> {
        let object = format!("secret,id={SECRET_ID},data={PASSPHRASE}");
        let image = format!("driver=qcow2,{KEY},file.filename={}", self.top);
        let named = ["--object".to_owned(), object, "--image-opts".to_owned(), image];
        more.iter().map(|&text| text.to_owned()).chain(named).collect()
    }

    /// The disk's data as the real QEMU reads it.
    fn content_by_qemu(&self) -> Vec<u8> {
        if !self.is_encrypted {
            return self.qemu.content(Path::new(&self.top), "qcow2");
        }
        let raw = format!("{}.content", self.top);
        let mut arguments = self.key_arguments(&["convert", "-O", "raw"]);
        arguments.push(raw.clone());
        self.qemu.img(arguments).expect_ok();
        let bytes = std::fs::read(&raw).expect("the raw file just written is readable");
        std::fs::remove_file(&raw).expect("the raw file just written can be removed");
        bytes
    }

    /// Exit code of the real check, and its output.
    fn check_by_qemu(&self, repairs: bool) -> (i32, String) {
        if self.is_encrypted {
            let verb: &[&str] = if repairs { &["check", "-r", "all"] } else { &["check"] };
            let output = self.qemu.img(self.key_arguments(verb));
            return (output.code, output.stdout + &output.stderr);
        }
        let path = Path::new(&self.top);
        let verdict = match repairs {
            true => self.qemu.check_with(path, "qcow2", &["-r", "all"]),
            false => self.qemu.check(path, "qcow2"),
        };
        (verdict.code, format!("{}\n{}", verdict.json, verdict.stderr))
    }

    /// Opens the image as it is opened again after a cut.
    async fn open_again(&self, direct: bool) -> std::result::Result<ImageDisk, String> {
        let options = if self.is_encrypted { KEY } else { "" };
        let disk = ImageDisk::open_with(&self.top, true, direct, options).await;
        disk.map_err(|error| format!("opened again: {error}"))
    }

    /// Changes the top image's file before anything is done to it; the guest's data must stay the same.
    pub fn patch(&mut self, change: impl FnOnce(&mut PageMap)) {
        let Some(file) = self.files.get_mut(&self.top) else { unreachable!("the top image is among the files") };
        change(file);
        self.leaks_at_start = audit(file).map_or(0, |audit| audit.leaks);
    }

    /// Space that the files take, in bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.files.values().map(PageMap::allocated_bytes).sum()
    }

    /// Random requests that suit the image.
    pub fn requests(&self) -> OpGen {
        let requests = OpGen::new(self.content.len() as u64, self.spec.cluster_size);
        match self.spec.extended_l2 {
            true => OpGen { subcluster_bytes: self.spec.cluster_size / 32, ..requests },
            false => requests,
        }
    }

    /// Runs the trial and cuts its power everywhere.
    ///
    /// # Errors
    /// The failure, with the data that the cut lost.
    pub fn crash(&self, trial: &Trial) -> std::result::Result<CrashReport, String> {
        let world = self.world(trial);
        let outcome = told(|| self.run(&world, trial))?;
        self.judge(&world, &outcome, trial)
    }

    /// The machine of a trial, with the image on its disk.
    pub fn world(&self, trial: &Trial) -> World {
        let world = World::with_files(trial.config.clone(), &self.files);
        trial.faults.iter().for_each(|fault| world.add_fault(fault.clone()));
        world
    }

    /// Cuts the power of a run everywhere.
    ///
    /// # Errors
    /// The complaint about a disk that is left, with the changes that the cut lost.
    pub fn judge(&self, world: &World, outcome: &Outcome, trial: &Trial) -> std::result::Result<CrashReport, String> {
        let report = explore(&world.trace(), &trial.plan, |case| {
            told(|| self.verify(outcome, case, trial))?;
            match trial.sample_qemu > 0 && case.number % trial.sample_qemu == trial.sample_qemu - 1 {
                true => self.verify_by_qemu(&outcome.model, case),
                false => Ok(()),
            }
        });
        report.map_err(|failure: Box<CrashFailure>| failure.to_string())
    }

    /// Runs the trial on its machine, without a cut.
    ///
    /// # Errors
    /// The failure: a failed request where none may fail, a read of data that were never written, metadata written
    /// twice at once, leaks after closing.
    pub fn run(&self, world: &World, trial: &Trial) -> std::result::Result<Outcome, String> {
        let model = Model::new(self.content.clone());
        let failed = |error: Error| format!("the run itself: {error}");
        let options = match (self.is_encrypted, trial.options) {
            (true, "") => KEY.to_owned(),
            (true, options) => format!("{options},{KEY}"),
            (false, options) => options.to_owned(),
        };
        let disk = world.run(ImageDisk::open_with(&self.top, true, trial.config.direct, &options));
        let disk = match disk {
            // Nothing happened, nothing was promised.
            Err(_) if trial.may_fail() => return Ok(Outcome::untouched(model)),
            disk => disk.map_err(failed)?,
        };
        let (mut outcome, disk) = match &trial.shared {
            None => guest_at(disk, world, model, trial),
            Some(shared) => {
                let disk = world.run(async { SharingDisk::new(disk, self.spec.cluster_size, Arc::clone(shared)) });
                let (outcome, disk) = guest_at(disk.map_err(failed)?, world, model, trial);
                (outcome, disk.into_image())
            }
        };
        let closed = world.run(disk.0.close());
        outcome.closed_at = world.position();
        let ended = match trial.amend {
            "" => closed,
            options => closed.and_then(|()| self.amend(world, options)),
        };
        match ended {
            Err(error) if !trial.may_fail() => return Err(failed(error)),
            _ => {}
        }
        match outcome.errors.first() {
            Some((step, error)) if !trial.may_fail() => return Err(format!("the run itself: {step}: {error}")),
            Some((step, error)) if error.kind() == ErrorKind::Internal => {
                return Err(format!("the run itself: {step}: {error}"));
            }
            _ => {}
        }
        if let Some(complaint) = outcome.wrong_reads.first() {
            return Err(format!("the run itself: {complaint}"));
        }
        self.check_overlaps(world)?;
        if !trial.may_fail() {
            self.check_leaks_at_end(world)?;
        }
        Ok(outcome)
    }

    /// Amends the image, which is closed.
    fn amend(&self, world: &World, options: &str) -> Result<()> {
        let name = match self.is_encrypted {
            true => format!("driver=qcow2,file.filename={},{KEY}", self.top),
            false => format!("driver=qcow2,file.filename={}", self.top),
        };
        let secrets = vec![(SECRET_ID.to_owned(), Secret::new(PASSPHRASE.into()))];
        let image = ImageSpec { name, image_opts: true, secrets, ..ImageSpec::default() };
        let options = AmendOptions { image, options: vec![options.to_owned()], ..AmendOptions::default() };
        world.run(amend::run(&options, &JobHandle::new())).map_err(|error| error.context("amend"))
    }

    /// A run without faults and cuts leaks nothing.
    fn check_leaks_at_end(&self, world: &World) -> std::result::Result<(), String> {
        let contents = world.contents(&self.top).ok_or("the image is gone")?;
        let end = audit(&contents).map_err(|complaint| format!("audit of the closed image: {complaint}"))?;
        match end.leaks > self.leaks_at_start {
            true => Err(format!("the run itself: {} leaked clusters after closing", end.leaks)),
            false => Ok(()),
        }
    }

    /// Checks the leaks against the design's bound for a cut. It counts the clusters that requests since the last flush
    /// but one have allocated or freed. For each of them an L2 table may be added, and the tables that were just moved.
    fn check_leak_bound(&self, model: &Model, case: &CrashCase<'_>, found: &Audit) -> std::result::Result<(), String> {
        let units = model.unsettled_units(case.position, self.spec.cluster_size);
        let tables = found.moving_table_clusters;
        // A directory, a table and data that are being replaced, for each bitmap.
        let bitmaps = 4 * self.bitmaps.len() as u64;
        let bound = self.leaks_at_start + 3 * units + 3 * tables + bitmaps;
        match found.leaks > bound {
            true => Err(format!(
                "{} clusters are leaked, more than the {bound} that the design allows: {:x?}",
                found.leaks, found.leaked
            )),
            false => Ok(()),
        }
    }

    /// The product's own check must find no error either; with the dirty bit set, none after its repair.
    fn verify_by_check(&self, case: &CrashCase<'_>, dirty: bool) -> std::result::Result<(), String> {
        let world = World::with_files(Config::new(0), &case.state.files);
        let told = |error: Error| format!("our own check: {error}");
        let repair = if dirty { Repair::All } else { Repair::None };
        let report = world.run(async {
            let options = OpenOptions { write: dirty, ..OpenOptions::default() };
            let file = File::open(Path::new(&self.top), &options).map_err(told)?;
            check(&file, &CheckOptions { repair, ..CheckOptions::default() }, &|_, _| true).await.map_err(told)
        })?;
        match report.counters.corruptions == 0 && report.counters.check_errors == 0 {
            true => Ok(()),
            false => Err(format!("our own check: {:?} {:?}", report.counters, report.findings)),
        }
    }

    /// No metadata may be written twice at once: the order of the two is unknown.
    fn check_overlaps(&self, world: &World) -> std::result::Result<(), String> {
        let trace = world.trace();
        let mut replay = Replay::new(&trace);
        for overlap in world.overlaps().iter().filter(|overlap| overlap.file == self.top) {
            while replay.position() < overlap.position && replay.advance().is_some() {}
            let metadata = replay.contents(&self.top).and_then(|contents| metadata_ranges(contents).ok());
            let hits = |range: &Range<u64>| range.start < overlap.range.end && overlap.range.start < range.end;
            if metadata.is_some_and(|ranges| ranges.iter().any(hits)) {
                return Err(format!("the run itself: metadata written twice at once: {}", overlap.changes));
            }
        }
        Ok(())
    }

    /// Our own look at a state: audit, open for writing (recovers a dirty image), read everything, now and then write
    /// on, close, audit.
    fn verify(&self, outcome: &Outcome, case: &CrashCase<'_>, trial: &Trial) -> std::result::Result<(), String> {
        let model = &outcome.model;
        let contents = case.state.files.get(&self.top).ok_or("the image is gone")?;
        let before = audit(contents).map_err(|complaint| format!("audit: {complaint}"))?;
        if snapshot_digest(contents)? != self.snapshots_at_start {
            return Err("what an internal snapshot holds has changed".to_owned());
        }
        // An amendment writes tables of every kind beside the old ones.
        if !trial.may_fail() && case.position <= outcome.closed_at {
            self.check_leak_bound(model, case, &before)?;
        }
        if case.number % 16 == 3 {
            self.verify_by_check(case, before.dirty)?;
        }
        let config = Config { in_order: true, capacity_bytes: None, ..trial.config.clone() };
        let world = World::with_files(config.clone(), &case.state.files);
        let writes_on = case.number % 8 == 1;
        world.run(async {
            let disk = self.open_again(config.direct).await?;
            check_disk_after_cut(&disk, model, case.position)
                .await
                .map_err(|error| format!("opened again: {error}"))?;
            self.check_bitmaps(&disk, model, case.position, trial).await?;
            if writes_on {
                let cluster = self.spec.cluster_size.min(disk.size());
                let at = case.number as u64 % (disk.size() / cluster) * cluster;
                let written = disk.write(at, IoBuf::zeroed(cluster as usize)).await.0;
                // A full device stays full.
                let is_full = |error: &Error| trial.config.fixed_length && error.kind() == ErrorKind::NoSpace;
                let may_be_full = trial.may_fail() && written.as_ref().is_err_and(is_full);
                written
                    .or_else(|error| if may_be_full { Ok(()) } else { Err(error) })
                    .map_err(|error| format!("written on: {error}"))?;
            }
            disk.0.close().await.map_err(|error| format!("closed again: {error}"))
        })?;
        let contents = world.contents(&self.top).ok_or("the image is gone")?;
        let after = audit(&contents).map_err(|complaint| format!("audit after opening again: {complaint}"))?;
        if after.dirty {
            return Err("the dirty bit is still set after a clean close".to_owned());
        }
        if after.bitmaps.1 > 0 && !self.may_lack_journal() {
            return Err("a bitmap is still in use after a clean close".to_owned());
        }
        // A recovery that changes much is cut more often.
        let often = if before.dirty { 6 } else { 32 };
        if !writes_on && case.number.is_multiple_of(often) {
            self.verify_twice(model, case, &world, trial)
        } else {
            Ok(())
        }
    }

    /// A cluster of 512 bytes may have no room for the journal. Beside snapshots there is none.
    fn may_lack_journal(&self) -> bool {
        self.spec.cluster_size == 512 || self.snapshots_at_start != 0
    }

    /// Checks that the changes of flushed writes are dirty in every enabled bitmap.
    async fn check_bitmaps(
        &self,
        disk: &ImageDisk,
        model: &Model,
        position: usize,
        trial: &Trial,
    ) -> std::result::Result<(), String> {
        const SECTOR: usize = 512;
        let resizes = trial.steps.iter().any(|step| matches!(step.op, Op::Resize { .. }));
        let Some(image) = disk.0.qcow2().filter(|_| !resizes) else { return Ok(()) };
        for name in &self.bitmaps {
            let bits = match image.bitmap_bits(name).await {
                Ok(bits) => bits,
                Err(error) if self.may_lack_journal() && error.message().contains("inconsistent") => continue,
                Err(error) => return Err(format!("bitmap '{name}': {error}")),
            };
            for (number, sector) in self.content.chunks(SECTOR).enumerate() {
                let at = (number * SECTOR) as u64;
                if !bits.covers(at, 1) && model.check_after_cut(position, at, sector).is_err() {
                    return Err(format!("bitmap '{name}' has lost the flushed write at {at:#x}"));
                }
            }
        }
        Ok(())
    }

    /// Cuts the power a second time, while the image is opened and recovered.
    fn verify_twice(
        &self,
        model: &Model,
        case: &CrashCase<'_>,
        world: &World,
        trial: &Trial,
    ) -> std::result::Result<(), String> {
        let trace = world.trace();
        let plan = CrashPlan { per_barrier: 8, per_change: 1, max_distinct: 24, ..CrashPlan::new(case.number as u64) };
        let second = explore(&trace, &plan, |again| {
            let contents = again.state.files.get(&self.top).ok_or("the image is gone")?;
            audit(contents).map_err(|complaint| format!("audit: {complaint}"))?;
            let world = World::with_files(world.config(), &again.state.files);
            world.run(async {
                let disk = self.open_again(world.config().direct).await?;
                check_disk_after_cut(&disk, model, case.position).await?;
                self.check_bitmaps(&disk, model, case.position, trial).await
            })
        });
        second.map(drop).map_err(|failure| format!("a second cut while it was opened again: {failure}"))
    }

    fn verify_by_qemu(&self, model: &Model, case: &CrashCase<'_>) -> std::result::Result<(), String> {
        for (name, contents) in &case.state.files {
            std::fs::write(name, contents.to_vec()).map_err(|error| format!("could not write {name}: {error}"))?;
        }
        let dirty = case.state.files.get(&self.top).is_some_and(|file| audit(file).is_ok_and(|audit| audit.dirty));
        let (code, said) = self.check_by_qemu(dirty);
        if code != 0 && code != 3 {
            return Err(format!("qemu-img check: exit code {code}, {said}"));
        }
        let bytes = self.content_by_qemu();
        model.check_size_after_cut(case.position, bytes.len() as u64)?;
        model.check_after_cut(case.position, 0, &bytes).map_err(|complaint| format!("read by qemu-img: {complaint}"))
    }

    /// As [`Prepared::crash`]; a failure comes with the fewest requests that still show one.
    ///
    /// # Errors
    /// The failure, and the way to see it again.
    pub fn crash_or_shrink(&self, trial: &Trial) -> std::result::Result<CrashReport, String> {
        // 0 where only the failure itself counts.
        let most_tries = std::env::var("COWSHED_SHRINK_TRIES").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
        self.crash(trial).map_err(|first| {
            let mut last = first.clone();
            let mut tries = 0;
            let small = shrink(&trial.steps, |steps| {
                tries += 1;
                if tries > most_tries {
                    return false;
                }
                let smaller = Trial { steps: steps.to_vec(), sample_qemu: 0, ..trial.clone() };
                self.crash(&smaller).map_err(|complaint| last = complaint).is_err()
            });
            format!("{first}\n\nthe same with {} requests: {}\n{last}", small.len(), print_steps(&small))
        })
    }

    /// The folder of the files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}
