// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The runs of a disk that a job is for, in pieces, and copying them from one node to another.

use crate::JobHandle;
use crate::in_flight::InFlight;
use crate::zeroes::is_zero;
use cowshed_block::{Error, Result};
use cowshed_image::{Node, StatusExtent, ZeroFlags};
use cowshed_storage::{IoBuf, rt};
use futures_util::stream::{self, StreamExt};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of a piece: its borders are multiples of it, so no two pieces touch one cluster.
pub const PIECE_BYTES: u64 = 2 << 20;
/// Pieces in flight at most.
const PIECES_AT_ONCE: usize = 8;
/// Runs that one question about the mapping answers at most.
const RUNS_AT_ONCE: usize = 1024;

/// A part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// The mapping says that it reads as zeroes.
    pub zero: bool,
}

/// The pieces of a disk whose runs pass a test, in order.
pub struct Runs<'a, F> {
    node: &'a Arc<Node>,
    wanted: F,
    at: u64,
    known: VecDeque<StatusExtent>,
    passed_where_zero: Vec<Zeroes<'a>>,
}

/// Where a node is known to read as zeroes, asked from front to back.
struct Zeroes<'a> {
    node: &'a Arc<Node>,
    known: VecDeque<StatusExtent>,
}

impl Zeroes<'_> {
    /// The end of the zeroes that begin at `at`, no lower than where it was asked before; `u64::MAX` where nothing but zeroes
    /// follow, which are behind the node's end, too.
    async fn until(&mut self, mut at: u64) -> Result<u64> {
        let size = self.node.size();
        while at < size {
            match self.known.front() {
                Some(run) if run.start + run.len <= at => drop(self.known.pop_front()),
                Some(run) if run.zero => at = run.start + run.len,
                Some(_) => return Ok(at),
                None => {
                    self.known = self.node.block_status_chain(at, size - at, RUNS_AT_ONCE).await?.into();
                    if self.known.is_empty() {
                        return Err(Error::internal("a map without progress").offset(at));
                    }
                }
            }
        }
        Ok(u64::MAX)
    }
}

impl<'a, F: Fn(&StatusExtent) -> bool> Runs<'a, F> {
    /// Over all of `node`.
    pub fn new(node: &'a Arc<Node>, wanted: F) -> Self {
        Runs { node, wanted, at: 0, known: VecDeque::new(), passed_where_zero: Vec::new() }
    }

    /// Whole stretches where all of `nodes` read as zeroes are passed over, too.
    pub fn passing_zeroes_of(mut self, nodes: impl Iterator<Item = &'a Arc<Node>>) -> Self {
        self.passed_where_zero = nodes.map(|node| Zeroes { node, known: VecDeque::new() }).collect();
        self
    }

    async fn pass_zeroes(&mut self) -> Result<()> {
        if self.passed_where_zero.is_empty() {
            return Ok(());
        }
        let mut zero_end = u64::MAX;
        for zeroes in &mut self.passed_where_zero {
            zero_end = zero_end.min(zeroes.until(self.at).await?);
        }
        let size = self.node.size();
        let stop = if zero_end >= size { size } else { zero_end / PIECE_BYTES * PIECE_BYTES };
        self.at = self.at.max(stop);
        while self.known.front().is_some_and(|run| run.start + run.len <= self.at) {
            self.known.pop_front();
        }
        Ok(())
    }

    /// The next pieces up to the end of one stretch of [`PIECE_BYTES`], and how much of the disk was passed over to
    /// get there; `None` at the end.
    pub async fn next(&mut self, job: &JobHandle) -> Result<Option<Vec<Piece>>> {
        if self.at >= self.node.size() {
            return Ok(None);
        }
        job.pause_point().await?;
        self.pass_zeroes().await?;
        let mut end = self.stretch_end();
        let mut pieces = Vec::new();
        while self.at < end {
            let Some(run) = self.known.front() else {
                let rest = self.node.size() - self.at;
                self.known = self.node.block_status_chain(self.at, rest, RUNS_AT_ONCE).await?.into();
                if self.known.is_empty() {
                    return Err(Error::internal("a map without progress").offset(self.at));
                }
                continue;
            };
            let run_end = run.start + run.len;
            let is_wanted = (self.wanted)(run);
            // Terabytes of nothing are passed over at once.
            let passes = !is_wanted && pieces.is_empty();
            let stop = if passes { run_end } else { run_end.min(end) };
            if is_wanted {
                pieces.push(Piece { start: self.at, len: stop - self.at, zero: run.zero });
            }
            self.at = stop;
            if run_end == stop {
                self.known.pop_front();
            }
            if passes {
                if self.at >= self.node.size() {
                    break;
                }
                end = self.stretch_end();
            }
        }
        Ok(Some(pieces))
    }

    fn stretch_end(&self) -> u64 {
        ((self.at / PIECE_BYTES + 1) * PIECE_BYTES).min(self.node.size())
    }

    /// How far it has come, in bytes.
    pub fn position(&self) -> u64 {
        self.at
    }
}

/// Hands stretch after stretch to `work`, several at a time; the first error ends it, after what has begun.
pub async fn for_each<F, W>(mut runs: Runs<'_, F>, job: &JobHandle, work: impl Fn(Vec<Piece>) -> W) -> Result<()>
where
    F: Fn(&StatusExtent) -> bool,
    W: Future<Output = Result<()>>,
{
    let in_flight = &InFlight::up_to(PIECES_AT_ONCE);
    let mut running = stream::FuturesUnordered::new();
    let mut result = Ok(());
    let mut more = true;
    while more || !running.is_empty() {
        if more && running.len() < in_flight.now() {
            let before = runs.position();
            match runs.next(job).await {
                Ok(Some(pieces)) => {
                    let passed = runs.position() - before;
                    if pieces.is_empty() {
                        job.advance(passed);
                        continue;
                    }
                    let work = work(pieces);
                    running.push(async move {
                        let start = rt::now();
                        let result = work.await;
                        in_flight.note(rt::now().saturating_sub(start));
                        result.map(|()| passed)
                    });
                    continue;
                }
                Ok(None) => more = false,
                Err(error) => {
                    result = result.and(Err(error));
                    more = false;
                }
            }
        }
        match running.next().await {
            Some(Ok(passed)) => job.advance(passed),
            Some(Err(error)) => {
                result = result.and(Err(error));
                more = false;
            }
            None => {}
        }
    }
    result
}

/// Copies the pieces of `runs` from one node to the same place of another.
pub async fn copy_runs<F>(runs: Runs<'_, F>, from: &Arc<Node>, to: &Arc<Node>, job: &JobHandle) -> Result<()>
where
    F: Fn(&StatusExtent) -> bool,
{
    for_each(runs, job, async |pieces| {
        for piece in pieces {
            copy_piece(piece, from, to, job).await?;
        }
        Ok(())
    })
    .await
}

async fn copy_piece(piece: Piece, from: &Arc<Node>, to: &Arc<Node>, job: &JobHandle) -> Result<()> {
    if piece.zero {
        return write_zeroes(to, piece.start, piece.len).await;
    }
    job.throttle(piece.len).await?;
    let (result, bytes) = from.read(piece.start, IoBuf::scratch(piece.len as usize)).await;
    result?;
    if is_zero(&bytes) {
        return write_zeroes(to, piece.start, piece.len).await;
    }
    to.write(piece.start, bytes).await.0?;
    to.note_bulk_write(piece.len);
    Ok(())
}

/// Makes a range read as zeroes, giving its space back where that can be.
pub async fn write_zeroes(node: &Node, start: u64, len: u64) -> Result<()> {
    node.write_zeroes(start, len, ZeroFlags { may_unmap: true, no_fallback: false }).await
}
