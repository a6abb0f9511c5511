// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The pipeline: several pieces at a time are read, searched for zeroes and written.

use super::ConvertOutcome;
use super::pieces::{Cut, Piece, Pieces};
use super::share::Sharing;
use super::source::{RunKind, SourcePlace, Sources};
use super::start_order::StartOrder;
use crate::in_flight::InFlight;
use crate::zeroes::{is_zero, segments};
use crate::{JobHandle, in_work};
use cowshed_image::Node;
use cowshed_image::node::ZeroFlags;
use cowshed_storage::{File, IoBuf, rt};
use cowshed_types::{Error, Result};
use futures_util::future::join_all;
use futures_util::lock::Mutex;
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::cell::{Cell, RefCell};

/// The settings of the pipeline.
#[derive(Clone, Copy, Debug)]
pub struct CopySettings {
    /// The cutting of the disk; into pieces of [`CopySettings::step`] where data go through our hands.
    pub cut: Cut,
    /// Read at once, bytes.
    pub step: u64,
    /// The same for the first [`FIRST_BYTES`], while no piece waits for anything; a multiple of `cut.unit`, at most `step`.
    pub first_step: u64,
    /// Zeroes are looked for in blocks of this many bytes.
    pub zero_unit: usize,
    /// Shorter runs of zeroes are written out, bytes; 0: don't look for zeroes.
    pub min_zero_bytes: usize,
    /// Ranges that aren't written read as zeroes.
    pub target_is_zero: bool,
    /// Compress, in clusters of `cut.unit` bytes.
    pub compressed: bool,
    /// The most pieces in flight.
    pub requests: usize,
    /// Writes may start in any order.
    pub out_of_order: bool,
    /// Unreadable parts become zeroes.
    pub salvage: bool,
    /// Copy inside the kernel where it can, unread.
    pub copy_range: bool,
    /// Let the file system share ranges that aren't zero, where it can.
    pub share: bool,
}

/// The first bytes of data.
const FIRST_BYTES: u64 = 32 << 20;
/// Unreadable places are distinguished down to this many bytes.
const SALVAGE_BYTES: usize = 4096;

/// One conversion in progress.
pub struct Copy<'a> {
    /// The images that are read.
    pub sources: &'a Sources,
    /// The image that is written.
    pub target: &'a Node,
    /// The settings of the copy.
    pub settings: CopySettings,
    /// Progress, cancelling, speed.
    pub job: &'a JobHandle,
    turn: StartOrder,
    in_flight: InFlight,
    /// Bytes of the data pieces that were begun.
    begun: Cell<u64>,
    /// Buffers to be used again: fresh ones cost a page fault each 4 KiB.
    pool: RefCell<Vec<IoBuf>>,
    outcome: RefCell<ConvertOutcome>,
    kernel_copies: Cell<bool>,
    sharing: Sharing<'a>,
}

/// The state that the copiers share.
struct Work<'a> {
    /// The pieces that no copier has taken, and the number of the next one with data.
    next: Mutex<(Pieces<'a>, u64)>,
    /// There may be pieces left to take.
    is_left: Cell<bool>,
    /// The number of copiers now.
    copiers: Cell<usize>,
}

impl<'a> Copy<'a> {
    /// A conversion that hasn't begun.
    pub async fn new(sources: &'a Sources, target: &'a Node, settings: CopySettings, job: &'a JobHandle) -> Self {
        let sharing = Sharing::new(sources, target, settings.share).await;
        let copy = Copy {
            sources,
            target,
            settings,
            job,
            turn: StartOrder::default(),
            in_flight: InFlight::up_to(settings.requests).begins_alone(),
            begun: Cell::new(0),
            pool: RefCell::default(),
            outcome: RefCell::default(),
            kernel_copies: Cell::new(false),
            sharing,
        };
        copy.kernel_copies.set(settings.copy_range && (copy.sharing.is_on() || copy.whole_files().is_some()));
        copy
    }

    /// Copies everything.
    pub async fn run(&self) -> Result<ConvertOutcome> {
        self.job.set_len(self.sources.size());
        let pieces = Pieces::new(self.sources, self.settings.cut);
        let work = Work { next: Mutex::new((pieces, 0)), is_left: Cell::new(true), copiers: Cell::new(0) };
        let mut copiers = FuturesUnordered::new();
        let mut result = Ok(());
        loop {
            while work.is_left.get() && copiers.len() < self.in_flight.now() {
                copiers.push(self.copy_pieces(&work));
                work.copiers.set(copiers.len());
            }
            // Begun copies are awaited: a dropped write goes on, and could reach the disk after the job's end.
            let Some(ended) = copiers.next().await else { break };
            work.copiers.set(copiers.len());
            result = result.and(ended);
        }
        drop(copiers);
        result.map(|()| self.outcome.take())
    }

    /// Copies piece after piece, until none is left or another copier is to begin. Not a future for each piece: it has tens of
    /// KiB, which would be moved to their place each time.
    async fn copy_pieces(&self, work: &Work<'_>) -> Result<()> {
        while work.is_left.get() && work.copiers.get() >= self.in_flight.now() {
            let copied = self.copy_next(work).await;
            if copied.is_err() {
                work.is_left.set(false);
                self.turn.open();
                return copied;
            }
        }
        Ok(())
    }

    async fn copy_next(&self, work: &Work<'_>) -> Result<()> {
        let mut next = work.next.lock().await;
        if !work.is_left.get() {
            return Ok(());
        }
        let (pieces, number) = &mut *next;
        let Some(piece) = self.next_piece(pieces).await? else {
            work.is_left.set(false);
            return Ok(());
        };
        let own_number = *number;
        *number += u64::from(piece.kind == RunKind::Data);
        drop(next);
        self.piece(piece, own_number).await
    }

    /// The next piece, when the job may go on.
    async fn next_piece(&self, pieces: &mut Pieces<'_>) -> Result<Option<Piece>> {
        self.job.pause_point().await?;
        pieces.set_chunk(if self.kernel_copies.get() { self.settings.cut.chunk } else { self.step() });
        let piece = pieces.next().await?;
        if let Some(piece) = piece.filter(|piece| piece.kind == RunKind::Data) {
            self.begun.set(self.begun.get() + (piece.end - piece.start));
            self.job.throttle(piece.end - piece.start).await?;
        }
        Ok(piece)
    }

    /// Read at once now, bytes.
    fn step(&self) -> u64 {
        let is_first = self.begun.get() <= FIRST_BYTES && self.in_flight.is_quick();
        if is_first { self.settings.first_step } else { self.settings.step }
    }

    async fn piece(&self, piece: Piece, number: u64) -> Result<()> {
        match piece.kind {
            RunKind::Data => {
                let start = rt::now();
                let result = self.data_piece(piece, number).await;
                self.in_flight.note(rt::now().saturating_sub(start));
                result
            }
            RunKind::Zero => self.zero_piece(piece).await,
            RunKind::Backing => {
                self.job.advance(piece.end - piece.start);
                Ok(())
            }
        }
    }

    async fn zero_piece(&self, piece: Piece) -> Result<()> {
        let mut at = piece.start;
        while at < piece.end {
            let len = (piece.end - at).min(ZERO_STEP_BYTES);
            self.write_zeroes(at, len).await?;
            self.job.advance(len);
            at += len;
        }
        Ok(())
    }

    async fn write_zeroes(&self, offset: u64, len: u64) -> Result<()> {
        self.outcome.borrow_mut().zero_bytes += len;
        if self.settings.target_is_zero {
            return Ok(());
        }
        self.job.pause_point().await?;
        let flags = ZeroFlags { may_unmap: true, no_fallback: false };
        self.target.write_zeroes(offset, len, flags).await.map_err(|error| write_error(error, offset))
    }

    async fn data_piece(&self, piece: Piece, number: u64) -> Result<()> {
        let mut turn = Some(number);
        let mut at = piece.start;
        if self.kernel_copies.get() {
            at = self.start(turn.take(), self.copy_in_kernel(piece)).await?;
            self.outcome.borrow_mut().data_bytes += at - piece.start;
            self.job.advance(at - piece.start);
        }
        while at < piece.end {
            let end = piece.end.min((at / self.step() + 1) * self.step());
            let places = self.sharing.places(at, end).await?;
            let buf = self.take_buf(usize::try_from(end - at).unwrap_or(usize::MAX));
            let buf = self.read(at, buf).await?;
            if self.settings.compressed {
                self.write_compressed(at, buf, turn.take()).await?;
            } else {
                self.write(at, buf, turn.take(), &places).await?;
            }
            self.job.advance(end - at);
            at = end;
        }
        Ok(())
    }

    fn take_buf(&self, len: usize) -> IoBuf {
        let mut pool = self.pool.borrow_mut();
        match pool.iter().position(|buf| buf.len() == len) {
            Some(at) => pool.swap_remove(at),
            None => {
                pool.retain(|buf| self.is_whole_step(buf));
                IoBuf::scratch(len)
            }
        }
    }

    /// Only whole steps are worth keeping: others have a length of their own.
    fn give_buf(&self, buf: IoBuf) {
        let mut pool = self.pool.borrow_mut();
        if self.is_whole_step(&buf) && pool.len() < self.settings.requests {
            pool.push(buf);
        }
    }

    fn is_whole_step(&self, buf: &IoBuf) -> bool {
        buf.len() as u64 == self.step()
    }

    async fn read(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let (result, buf) = self.sources.read(offset, buf).await;
        match result {
            Ok(()) => Ok(buf),
            Err(_) if self.settings.salvage => self.salvage(offset, buf).await,
            Err(error) => Err(error_at("reading", error, offset)),
        }
    }

    /// Reads in small steps; a part that can't be read becomes zero.
    async fn salvage(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        for (index, block) in buf.chunks_mut(SALVAGE_BYTES).enumerate() {
            self.job.pause_point().await?;
            let at = offset + (index * SALVAGE_BYTES) as u64;
            let (result, piece) = self.sources.read(at, IoBuf::zeroed(block.len())).await;
            match result {
                Ok(()) => block.copy_from_slice(&piece),
                Err(_) => {
                    block.fill(0);
                    self.outcome.borrow_mut().salvaged.push(at);
                }
            }
        }
        Ok(buf)
    }

    async fn write(&self, offset: u64, mut buf: IoBuf, turn: Option<u64>, places: &[SourcePlace]) -> Result<()> {
        let whole = buf.len();
        let found = if self.settings.min_zero_bytes == 0 {
            Vec::new()
        } else {
            segments(&buf, self.settings.zero_unit, self.settings.min_zero_bytes)
        };
        if found.is_empty() || (found.len() == 1 && found[0].data) {
            let buf = self.start(turn, self.write_data(offset, buf, places)).await?;
            self.give_buf(buf);
            return Ok(());
        }
        let mut writes = Vec::with_capacity(found.len());
        for segment in found {
            let at = offset + segment.range.start as u64;
            writes.push(self.write_segment(at, buf.split_to(segment.range.len()), segment.data, places));
        }
        let mut joined: Option<IoBuf> = None;
        for written in self.start(turn, join_all(writes)).await {
            let part = written?;
            joined = match joined {
                None => Some(part),
                Some(mut head) => head.unsplit(part).is_ok().then_some(head),
            };
        }
        if let Some(buf) = joined.filter(|buf| buf.len() == whole) {
            self.give_buf(buf);
        }
        Ok(())
    }

    async fn write_segment(&self, offset: u64, buf: IoBuf, data: bool, places: &[SourcePlace]) -> Result<IoBuf> {
        if data {
            return self.write_data(offset, buf, places).await;
        }
        self.write_zeroes(offset, buf.len() as u64).await?;
        Ok(buf)
    }

    /// Has the file system share as much of the front as it can, and writes the rest.
    async fn write_data(&self, offset: u64, mut buf: IoBuf, places: &[SourcePlace]) -> Result<IoBuf> {
        let shared = match places {
            [] => 0,
            _ => self.sharing.take_over(offset, offset + buf.len() as u64, places).await?,
        };
        self.outcome.borrow_mut().data_bytes += buf.len() as u64;
        if shared == buf.len() as u64 {
            return Ok(buf);
        }
        let mut head = buf.split_to(usize::try_from(shared).unwrap_or(usize::MAX));
        let at = offset + shared;
        let (result, rest) = self.target.write(at, buf).await;
        result.map_err(|error| write_error(error, at))?;
        if !self.in_flight.is_alone() {
            self.target.note_bulk_write(rest.len() as u64);
        }
        // Parts of one buffer: they join again.
        Ok(if head.unsplit(rest).is_ok() { head } else { IoBuf::zeroed(0) })
    }

    /// Compresses all clusters that aren't zero.
    async fn write_compressed(&self, offset: u64, mut buf: IoBuf, turn: Option<u64>) -> Result<()> {
        let cluster = usize::try_from(self.settings.cut.unit).unwrap_or(usize::MAX);
        let mut batch = Vec::with_capacity(buf.len() / cluster + 1);
        let mut zeroes = Vec::new();
        let mut at = offset;
        while !buf.is_empty() {
            let part = buf.split_to(cluster.min(buf.len()));
            let len = part.len() as u64;
            if self.settings.min_zero_bytes > 0 && is_zero(&part) {
                zeroes.push((at, len));
            } else {
                self.outcome.borrow_mut().data_bytes += len;
                batch.push((at, part));
            }
            at += len;
        }
        let write = async { if batch.is_empty() { Ok(()) } else { self.target.write_compressed(batch).await } };
        self.start(turn, write).await.map_err(|error| write_error(error, offset))?;
        for (at, len) in zeroes {
            self.write_zeroes(at, len).await?;
        }
        Ok(())
    }

    /// Starts something when it is its turn; without one, at once.
    async fn start<F: Future>(&self, turn: Option<u64>, future: F) -> F::Output {
        match turn {
            Some(number) if !self.settings.out_of_order => self.turn.start_in_order(number, future).await,
            _ => future.await,
        }
    }

    /// Has the file system share the front of a piece, or the kernel copy it; up to where it came.
    async fn copy_in_kernel(&self, piece: Piece) -> Result<u64> {
        let places = self.sharing.places(piece.start, piece.end).await?;
        let files = self.whole_files();
        let mut at = piece.start;
        while at < piece.end {
            let shared = self.sharing.take_over(at, piece.end, &places).await?;
            at += shared;
            if shared > 0 {
                continue;
            }
            let Some((from, to)) = files else { break };
            match to.copy_from(from, at, at, piece.end - at).await {
                Ok(0) => break,
                Ok(copied) => at += copied,
                // Not between these two; and an error of the disk shows again, with its side, in a plain copy.
                Err(_) => break,
            }
        }
        if at < piece.end && !self.sharing.is_on() {
            self.kernel_copies.set(false);
        }
        Ok(at)
    }

    /// Source and target, where both are files as they are. A target whose format was guessed checks the writes to it.
    fn whole_files(&self) -> Option<(&File, &File)> {
        if self.target.is_probed_raw() {
            return None;
        }
        Some((self.sources.single()?.file()?, self.target.file()?))
    }
}

/// Zeroes are written in steps, so that a long run can be paused.
const ZERO_STEP_BYTES: u64 = 256 << 20;

fn write_error(error: Error, offset: u64) -> Error {
    error_at("writing", error, offset)
}

/// QEMU's tools report the start of the request, which has this many bytes.
const QEMU_REQUEST_BYTES: u64 = 2 << 20;

fn error_at(work: &str, error: Error, offset: u64) -> Error {
    let begun = offset / QEMU_REQUEST_BYTES * QEMU_REQUEST_BYTES;
    let sentence = format!("error while {work} at byte {begun}");
    in_work(error.context(format!("error while {work} at byte {offset}")), sentence)
}
