// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets a guest loose on a disk: several streams of requests at once, with a model that knows what each may read.

use crate::model::{Model, fill};
use crate::operations::{Op, Step};
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_storage::sim::World;
use cowshed_storage::{IoBuf, rt};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

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
}

/// What came of a run.
pub struct Outcome {
    /// The model after it.
    pub model: Model,
    /// Requests that failed, and how.
    pub errors: Vec<(Step, Error)>,
    /// Reads that gave what they may not.
    pub wrong_reads: Vec<String>,
}

impl Outcome {
    /// Nothing was done.
    pub fn untouched(model: Model) -> Self {
        Outcome { model, errors: Vec::new(), wrong_reads: Vec::new() }
    }
}

struct Shared<D> {
    disk: D,
    world: World,
    state: RefCell<Outcome>,
}

/// Runs `steps` on `disk`. Each promise that the disk makes to the guest is marked in the world's log. To be called
/// inside of [`World::run`].
pub async fn run_steps<D: GuestDisk>(disk: D, world: &World, model: Model, steps: &[Step]) -> (Outcome, D) {
    let state = RefCell::new(Outcome::untouched(model));
    let shared = Rc::new(Shared { disk, world: world.clone(), state });
    for phase in steps.chunk_by(|step, next| !is_resize(step) && !is_resize(next)) {
        let mut streams: BTreeMap<u8, Vec<Step>> = BTreeMap::new();
        phase.iter().for_each(|step| streams.entry(step.stream).or_default().push(*step));
        let tasks = streams.into_values().map(|steps| rt::spawn(run_stream(Rc::clone(&shared), steps)));
        for task in tasks.collect::<Vec<_>>() {
            task.await;
        }
    }
    match Rc::try_unwrap(shared) {
        Ok(shared) => (shared.state.into_inner(), shared.disk),
        Err(_) => unreachable!("all tasks have ended"),
    }
}

/// A resize runs alone: what it cuts off while something is under way there, nobody could say.
fn is_resize(step: &Step) -> bool {
    matches!(step.op, Op::Resize { .. })
}

async fn run_stream<D: GuestDisk>(shared: Rc<Shared<D>>, steps: Vec<Step>) {
    for step in steps {
        shared.run(step).await;
    }
}

impl<D: GuestDisk> Shared<D> {
    async fn run(&self, step: Step) {
        let position = || self.world.position();
        let (offset, len) = step.op.range();
        if offset + len > self.disk.size() {
            // A request made for a size that a shorter list of requests doesn't reach.
            return;
        }
        let result = match step.op {
            Op::Write { offset, len, stamp } => {
                let mut buf = IoBuf::zeroed(len as usize);
                fill(stamp, offset, &mut buf);
                let request = self.state.borrow_mut().model.begin_write(offset, len, stamp, position());
                let result = self.disk.write(offset, buf).await.0;
                self.end(result, |model| model.end(request, position()))
            }
            Op::Zero { offset, len, may_unmap } => {
                let request = self.state.borrow_mut().model.begin_zero(offset, len, position());
                let result = self.disk.write_zeroes(offset, len, may_unmap).await;
                self.end(result, |model| model.end(request, position()))
            }
            Op::Discard { offset, len } => {
                let request = self.state.borrow_mut().model.begin_discard(offset, len, position());
                let result = self.disk.discard(offset, len).await;
                self.end(result, |model| model.end(request, position()))
            }
            Op::Compressed { offset, len, stamp } => {
                let mut buf = IoBuf::zeroed(len as usize);
                fill(stamp, offset, &mut buf);
                let request = self.state.borrow_mut().model.begin_write(offset, len, stamp, position());
                match self.disk.write_compressed(offset, buf).await {
                    // Over something allocated, for one.
                    Err(error) if error.kind() == ErrorKind::InvalidArgument => Ok(()),
                    result => self.end(result, |model| model.end(request, position())),
                }
            }
            Op::Resize { bytes } => {
                let request = self.state.borrow_mut().model.begin_resize(bytes, position());
                let result = self.disk.resize(bytes).await;
                self.end(result, |model| model.end_resize(request, position()))
            }
            Op::Flush => {
                let flush = self.state.borrow_mut().model.begin_flush(position());
                let result = self.disk.flush().await;
                self.end(result, |model| {
                    self.world.mark(0);
                    model.end_flush(flush, position());
                })
            }
            Op::Read { offset, len } => self.read(step, offset, len).await,
        };
        if let Err(error) = result {
            self.state.borrow_mut().errors.push((step, error));
        }
    }

    fn end(&self, result: Result<()>, settle: impl FnOnce(&mut Model)) -> Result<()> {
        if result.is_ok() {
            settle(&mut self.state.borrow_mut().model);
        }
        result
    }

    async fn read(&self, step: Step, offset: u64, len: u64) -> Result<()> {
        let began = self.state.borrow_mut().model.begin_read();
        let (result, buf) = self.disk.read(offset, IoBuf::zeroed(len as usize)).await;
        result?;
        let state = &mut *self.state.borrow_mut();
        if let Err(complaint) = state.model.check_read(began, offset, &buf) {
            state.wrong_reads.push(format!("{step}: {complaint}"));
        }
        Ok(())
    }
}

/// Reads the whole disk and holds it against what may be there after a power cut at `position`.
///
/// # Errors
/// What is wrong, or the error of the read.
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
