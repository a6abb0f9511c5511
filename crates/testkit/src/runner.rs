// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets a guest loose on a disk: several streams of requests at once, with a model that knows the bytes that each may
//! read.

use crate::model::{Model, fill};
use crate::operations::{Op, Step};
use cowshed_simulator::{QueueStart, World, interleave};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A disk that a guest can use: an image, or a toy of a test.
pub trait GuestDisk: 'static {
    /// Fills `buf` from `offset`.
    fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)>;
    /// Writes `buf` at `offset`.
    fn write(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)>;
    /// Makes a range read as zeroes.
    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> impl Future<Output = Result<()>>;
    /// Gives a range back.
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = Result<()>>;
    /// Writes one cluster compressed.
    fn write_compressed(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<()>>;
    /// Changes the size in bytes.
    fn resize(&self, bytes: u64) -> impl Future<Output = Result<()>>;
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Makes everything that has ended durable.
    fn flush(&self) -> impl Future<Output = Result<()>>;
    /// Puts a new overlay on top of the image.
    fn snapshot(&self) -> impl Future<Output = Result<()>> {
        async { Err(Error::unsupported("this disk takes no snapshots")) }
    }
}

/// The result of a run.
pub struct Outcome {
    /// The model after it.
    pub model: Model,
    /// Requests that failed, with their errors.
    pub errors: Vec<(Step, Error)>,
    /// Reads with bytes that aren't allowed.
    pub wrong_reads: Vec<String>,
    /// Length of the machine's log when the disk was closed.
    pub closed_at: usize,
}

impl Outcome {
    /// Nothing was done.
    pub fn untouched(model: Model) -> Self {
        Outcome { model, errors: Vec::new(), wrong_reads: Vec::new(), closed_at: usize::MAX }
    }
}

struct Shared<D> {
    disk: D,
    /// `None`: a real machine, without power cuts.
    world: Option<World>,
    state: Mutex<Outcome>,
    /// Reads and writes of one sector at the same time may mix inside of the sector.
    tears_inside_of_sectors: bool,
    journal: Option<Journal>,
    requests: AtomicU64,
}

/// Gets the steps of a run, a line each: `begin NUMBER STEP` before a request, `end NUMBER` after it has succeeded,
/// `failed NUMBER ERROR`. [`crate::journal`] reads it.
pub type Journal = Arc<dyn Fn(&str) + Send + Sync>;

impl<D> Shared<D> {
    fn new(disk: D, world: Option<&World>, model: Model, journal: Option<Journal>) -> Arc<Self> {
        let state = Mutex::new(Outcome::untouched(model));
        let (world, tears_inside_of_sectors) = (world.cloned(), world.is_none());
        Arc::new(Shared { disk, world, state, tears_inside_of_sectors, journal, requests: AtomicU64::new(0) })
    }

    fn note(&self, line: impl FnOnce() -> String) {
        if let Some(journal) = &self.journal {
            journal(&line());
        }
    }

    fn end_run(self: Arc<Self>) -> (Outcome, D) {
        match Arc::try_unwrap(self) {
            Ok(shared) => (shared.state.into_inner().unwrap_or_else(PoisonError::into_inner), shared.disk),
            Err(_) => unreachable!("all tasks have ended"),
        }
    }
}

/// Runs `steps` on `disk`. Each promise that the disk makes to the guest is marked in the world's log. To be called
/// inside of [`World::run`].
pub async fn run_steps<D: GuestDisk>(disk: D, world: &World, model: Model, steps: &[Step]) -> (Outcome, D) {
    let shared = Shared::new(disk, Some(world), model, None);
    for phase in phases(steps, shared.disk.size()) {
        run_streams(&shared, phase).await;
    }
    shared.end_run()
}

/// As [`run_steps`], the streams spread over `queues` queues of the machine, whose turns are drawn from `seed`. To be
/// called outside of [`World::run`].
pub fn run_steps_on_queues<D: GuestDisk + Send + Sync>(
    disk: D,
    world: &World,
    model: Model,
    steps: &[Step],
    queues: usize,
    seed: u64,
) -> (Outcome, D) {
    let shared = Shared::new(disk, Some(world), model, None);
    for (number, phase) in phases(steps, shared.disk.size()).into_iter().enumerate() {
        let starts = spread(phase, queues).into_iter().map(|steps| {
            let shared = Arc::clone(&shared);
            let start: QueueStart<'_> = Box::new(move || {
                cowshed_qcow2::set_interleaving_hook(Some(interleave));
                Box::pin(async move { run_streams(&shared, &steps).await })
            });
            start
        });
        world.run_queues(seed.wrapping_add(number as u64), starts.collect());
    }
    shared.end_run()
}

/// Runs `steps` on a disk of the real machine, the streams spread over `threads` threads that run side by side.
pub fn run_steps_on_threads<D: GuestDisk + Send + Sync>(
    disk: D,
    model: Model,
    steps: &[Step],
    threads: usize,
    journal: Option<Journal>,
) -> (Outcome, D) {
    let shared = Shared::new(disk, None, model, journal);
    for phase in phases(steps, shared.disk.size()) {
        std::thread::scope(|scope| {
            for steps in spread(phase, threads) {
                let shared = &shared;
                scope.spawn(move || rt::block_on(run_streams(shared, &steps)));
            }
        });
    }
    shared.end_run()
}

/// The steps of each queue: whole streams, dealt out in turn.
fn spread(steps: &[Step], queues: usize) -> Vec<Vec<Step>> {
    let queues = queues.max(1);
    let mut dealt = vec![Vec::new(); queues];
    steps.iter().for_each(|step| dealt[usize::from(step.stream) % queues].push(*step));
    dealt.retain(|steps| !steps.is_empty());
    dealt
}

/// A shrink runs alone: its effect on requests under way behind the new end would be unknown. `bytes`: the size of the
/// disk at the start.
fn phases(steps: &[Step], mut bytes: u64) -> Vec<&[Step]> {
    let mut phases = Vec::new();
    let mut start = 0;
    for (index, step) in steps.iter().enumerate() {
        let Op::Resize { bytes: new } = step.op else { continue };
        if new < bytes {
            phases.extend([&steps[start..index], &steps[index..=index]]);
            start = index + 1;
        }
        bytes = new;
    }
    phases.push(&steps[start..]);
    phases.retain(|phase| !phase.is_empty());
    phases
}

async fn run_streams<D: GuestDisk>(shared: &Arc<Shared<D>>, steps: &[Step]) {
    let runs_alone = steps.len() == 1;
    let mut streams: BTreeMap<u8, Vec<Step>> = BTreeMap::new();
    steps.iter().for_each(|step| streams.entry(step.stream).or_default().push(*step));
    let tasks = streams.into_values().map(|steps| {
        let shared = Arc::clone(shared);
        // In a box: a disk that takes snapshots and commits has a large future, and spawning moves it through many frames.
        rt::spawn(Box::pin(async move {
            for step in steps {
                shared.run(step, runs_alone).await;
            }
        }))
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await;
    }
}

impl<D: GuestDisk> Shared<D> {
    fn position(&self) -> usize {
        self.world.as_ref().map_or(0, World::position)
    }

    fn state(&self) -> MutexGuard<'_, Outcome> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(&self, step: Step, runs_alone: bool) {
        let position = || self.position();
        let (offset, len) = step.op.range();
        let shrinks = matches!(step.op, Op::Resize { bytes } if bytes < self.disk.size());
        if offset + len > self.disk.size() || (shrinks && !runs_alone) {
            // A request made for a size that the disk doesn't have: a shorter list of requests, or an earlier failure.
            return;
        }
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        self.note(|| format!("begin {number} {step}"));
        let result = match step.op {
            Op::Write { offset, len, stamp } => {
                let mut buf = IoBuf::zeroed(len as usize);
                fill(stamp, offset, &mut buf);
                let request = self.state().model.begin_write(offset, len, stamp, position());
                let result = self.disk.write(offset, buf).await.0;
                self.end(number, result, |model| model.end(request, position()))
            }
            Op::Zero { offset, len, may_unmap } => {
                let request = self.state().model.begin_zero(offset, len, position());
                let result = self.disk.write_zeroes(offset, len, may_unmap).await;
                self.end(number, result, |model| model.end(request, position()))
            }
            Op::Discard { offset, len } => {
                let request = self.state().model.begin_discard(offset, len, position());
                let result = self.disk.discard(offset, len).await;
                self.end(number, result, |model| model.end(request, position()))
            }
            Op::Compressed { offset, len, stamp } => {
                let mut buf = IoBuf::zeroed(len as usize);
                fill(stamp, offset, &mut buf);
                let request = self.state().model.begin_write(offset, len, stamp, position());
                match self.disk.write_compressed(offset, buf).await {
                    // Over something allocated, for one.
                    Err(error) if error.kind() == ErrorKind::InvalidArgument => Ok(()),
                    result => self.end(number, result, |model| model.end(request, position())),
                }
            }
            Op::Resize { bytes } => {
                let request = self.state().model.begin_resize(bytes, position());
                let result = self.disk.resize(bytes).await;
                self.end(number, result, |model| model.end_resize(request, position()))
            }
            Op::Flush => {
                let flush = self.state().model.begin_flush(position());
                let result = self.disk.flush().await;
                self.end(number, result, |model| {
                    if let Some(world) = &self.world {
                        world.mark(0);
                    }
                    model.end_flush(flush, position());
                })
            }
            Op::Snapshot => self.disk.snapshot().await,
            Op::Read { offset, len } => self.read(step, offset, len).await,
        };
        if let Err(error) = result {
            self.note(|| format!("failed {number} {error}"));
            self.state().errors.push((step, error));
        }
    }

    fn end(&self, number: u64, result: Result<()>, settle: impl FnOnce(&mut Model)) -> Result<()> {
        if result.is_ok() {
            self.note(|| format!("end {number}"));
            settle(&mut self.state().model);
        }
        result
    }

    async fn read(&self, step: Step, offset: u64, len: u64) -> Result<()> {
        let began = self.state().model.begin_read();
        let (result, buf) = self.disk.read(offset, IoBuf::zeroed(len as usize)).await;
        result?;
        let mut state = self.state();
        let checked = match self.tears_inside_of_sectors {
            true => state.model.check_torn_read(began, offset, &buf),
            false => state.model.check_read(began, offset, &buf),
        };
        if let Err(complaint) = checked {
            state.wrong_reads.push(format!("{step}: {complaint}"));
        }
        Ok(())
    }
}

/// Reads the whole disk and compares it with the bytes that may be there after a power cut at `position`.
///
/// # Errors
/// The complaint, or the error of the read.
pub async fn check_disk_after_cut<D: GuestDisk>(disk: &D, model: &Model, position: usize) -> Result<(), String> {
    const CHUNK_BYTES: u64 = 1 << 20;
    model.check_size_after_cut(position, disk.size())?;
    let mut offset = 0;
    while offset < disk.size() {
        let len = CHUNK_BYTES.min(disk.size() - offset);
        let (result, buf) = disk.read(offset, IoBuf::zeroed(len as usize)).await;
        result.map_err(|error| format!("reading guest {offset:#x}+{len:#x}: {error}"))?;
        model.check_after_cut(position, offset, &buf)?;
        offset += len;
    }
    Ok(())
}
