// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The runs of a disk that a job is for, in pieces, and copying them from one node to another.

use crate::JobHandle;
use crate::in_flight::InFlight;
use crate::zeroes::is_zero;
use cowshed_image::{Node, StatusExtent, ZeroFlags};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Error, Result};
use futures_util::stream::{self, StreamExt};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of a piece. A piece should still be in the processor's cache when it is written. With 2 MiB, copying in the
/// page cache takes half as long again.
pub const PIECE_BYTES: u64 = 512 << 10;
/// Bytes of all pieces in flight at most.
const BYTES_AT_ONCE: u64 = 16 << 20;
/// Runs that one question about the mapping answers at most.
const RUNS_AT_ONCE: usize = 1024;

/// A part of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// The mapping has it as zeroes.
    pub zero: bool,
}

/// The pieces of a disk whose runs pass a test, in order.
pub struct Runs<'a, F> {
    node: &'a Arc<Node>,
    wanted: F,
    /// Borders of pieces are multiples of it.
    piece_bytes: u64,
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
    /// Over all of `node`, in pieces that may be written to `target`: no two touch one cluster of it.
    pub fn new(node: &'a Arc<Node>, wanted: F, target: &Node) -> Self {
        let piece_bytes = target.cluster_bytes().unwrap_or(0).max(PIECE_BYTES);
        Runs { node, wanted, piece_bytes, at: 0, known: VecDeque::new(), passed_where_zero: Vec::new() }
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
        let stop = if zero_end >= size { size } else { zero_end / self.piece_bytes * self.piece_bytes };
        self.at = self.at.max(stop);
        while self.known.front().is_some_and(|run| run.start + run.len <= self.at) {
            self.known.pop_front();
        }
        Ok(())
    }

    /// The next pieces up to the next border that is not passed over; `None` at the end.
    pub async fn next(&mut self, job: &JobHandle) -> Result<Option<Vec<Piece>>> {
        // Also at the end: a pause during the last piece holds the job there.
        job.pause_point().await?;
        if self.at >= self.node.size() {
            return Ok(None);
        }
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
        ((self.at / self.piece_bytes + 1) * self.piece_bytes).min(self.node.size())
    }

    /// The position so far, in bytes.
    pub fn position(&self) -> u64 {
        self.at
    }
}

/// Hands stretch after stretch to `work`, several at a time; the first error ends it, after the begun ones.
pub async fn for_each<F, W>(mut runs: Runs<'_, F>, job: &JobHandle, work: impl Fn(Vec<Piece>) -> W) -> Result<()>
where
    F: Fn(&StatusExtent) -> bool,
    W: Future<Output = Result<()>>,
{
    let in_flight = &InFlight::up_to((BYTES_AT_ONCE / runs.piece_bytes) as usize);
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

/// Copies the pieces of `runs` from one node to the same place of another. As in QEMU 11, zeroes are passed over where all of the
/// other node reads as zeroes before.
pub async fn copy_runs<F>(runs: Runs<'_, F>, from: &Arc<Node>, to: &Arc<Node>, job: &JobHandle) -> Result<()>
where
    F: Fn(&StatusExtent) -> bool,
{
    let is_blank = Zeroes { node: to, known: VecDeque::new() }.until(0).await? == u64::MAX;
    for_each(runs, job, async |pieces| {
        for piece in pieces.into_iter().filter(|piece| !(is_blank && piece.zero)) {
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

/// Makes a range in bytes read as zeroes, and gives its space back where possible.
pub async fn write_zeroes(node: &Node, start: u64, len: u64) -> Result<()> {
    node.write_zeroes(start, len, ZeroFlags { may_unmap: true, no_fallback: false }).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ImageSpec;
    use crate::create::{self, CreateRequest};

    /// Lengths of the pieces of a raw disk of 5 MiB and 512 bytes, all data, that is to be written to a fresh image.
    fn pieces_for(cluster_bytes: u64) -> Vec<u64> {
        let folder = tempfile::tempdir().expect("tempdir");
        let (source, target) = (folder.path().join("source.raw"), folder.path().join("target.qcow2"));
        let name = |path: &std::path::Path| path.to_str().expect("a name").to_owned();
        std::fs::write(&source, vec![1; (5 << 20) + 512]).expect("write");
        rt::block_on(async {
            let job = JobHandle::new();
            let request = CreateRequest {
                filename: name(&target),
                format: "qcow2".to_owned(),
                size: Some((5 << 20) + 512),
                options: vec![format!("cluster_size={cluster_bytes}")],
                ..CreateRequest::default()
            };
            create::run(&request, &job).await.expect("create");
            let from = ImageSpec::file(name(&source)).format("raw").open_for_reading().await.expect("source");
            let to = ImageSpec::file(name(&target)).format("qcow2").open_for_reading().await.expect("target");
            let mut runs = Runs::new(&from, |_| true, &to);
            let mut lens = Vec::new();
            while let Some(pieces) = runs.next(&job).await.expect("pieces") {
                lens.extend(pieces.iter().map(|piece| piece.len));
            }
            from.close().await.and(to.close().await).expect("close");
            lens
        })
    }

    #[test]
    fn no_two_pieces_touch_one_cluster_of_the_target() {
        let small = [vec![PIECE_BYTES; 10], vec![512]].concat();
        assert_eq!(pieces_for(65536), small);
        assert_eq!(pieces_for(512), small);
        assert_eq!(pieces_for(2 << 20), [2 << 20, 2 << 20, (1 << 20) + 512]);
    }
}
