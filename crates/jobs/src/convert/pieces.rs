// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cuts a disk into the pieces that are copied one by one: aligned to the target's unit of allocation, large where
//! possible, without the holes.

use super::source::{RunKind, SourceRun, Sources};
use cowshed_types::Result;
use std::collections::VecDeque;

/// A piece of the disk: `Data` pieces have at most the chunk size, others any.
pub type Piece = SourceRun;

/// The rules of cutting pieces.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Borders of data pieces are multiples of it, bytes, at least 1.
    pub unit: u64,
    /// Largest data piece, bytes; a multiple of `unit`.
    pub chunk: u64,
    /// Take everything for data.
    pub all_data: bool,
}

/// The pieces of `Sources`, in order, asked for as they are needed.
pub struct Pieces<'a> {
    sources: &'a Sources,
    cut: Cut,
    at: u64,
    runs: VecDeque<SourceRun>,
}

impl<'a> Pieces<'a> {
    /// All pieces.
    pub fn new(sources: &'a Sources, cut: Cut) -> Self {
        Pieces { sources, cut, at: 0, runs: VecDeque::new() }
    }

    /// Sets the longest data piece from now on to `chunk` bytes, a multiple of the unit.
    pub fn set_chunk(&mut self, chunk: u64) {
        self.cut.chunk = chunk;
    }

    /// The next piece, `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Piece>> {
        let size = self.sources.size();
        if self.at >= size {
            return Ok(None);
        }
        if self.cut.all_data {
            return Ok(Some(self.emit(self.chunk_end(size), RunKind::Data)));
        }
        let run = self.run_at(self.at).await?;
        if run.kind == RunKind::Data {
            return self.data_piece(run.end, size).await.map(Some);
        }
        // Up to the last whole unit; the rest of the run shares its unit with data.
        let end = if run.end >= size { size } else { run.end / self.cut.unit * self.cut.unit };
        if end > self.at {
            return Ok(Some(self.emit(end, run.kind)));
        }
        self.data_piece(run.end, size).await.map(Some)
    }

    /// A data piece that covers at least up to `end`, as far as a chunk goes, and more data behind it.
    async fn data_piece(&mut self, mut end: u64, size: u64) -> Result<Piece> {
        let limit = self.chunk_end(size);
        loop {
            end = end.div_ceil(self.cut.unit).saturating_mul(self.cut.unit).min(limit);
            if end >= limit {
                break;
            }
            let run = self.run_at(end).await?;
            let short = run.end - end < self.cut.unit;
            if run.kind != RunKind::Data && !short {
                break;
            }
            end = run.end;
        }
        Ok(self.emit(end, RunKind::Data))
    }

    fn chunk_end(&self, size: u64) -> u64 {
        (self.at / self.cut.chunk + 1).saturating_mul(self.cut.chunk).min(size)
    }

    fn emit(&mut self, end: u64, kind: RunKind) -> Piece {
        let piece = Piece { start: self.at, end, kind };
        self.at = end;
        piece
    }

    /// The run that holds byte `offset`, which isn't before the current one.
    async fn run_at(&mut self, offset: u64) -> Result<SourceRun> {
        while self.runs.front().is_some_and(|run| run.end <= self.at) {
            self.runs.pop_front();
        }
        loop {
            if let Some(run) = self.runs.iter().find(|run| run.end > offset) {
                return Ok(*run);
            }
            let from = self.runs.back().map_or(offset, |run| run.end);
            for run in self.sources.runs(from).await? {
                // Windows and images end anywhere; a run goes on behind.
                match self.runs.back_mut() {
                    Some(last) if last.kind == run.kind && last.end == run.start => last.end = run.end,
                    _ => self.runs.push_back(run),
                }
            }
            if self.runs.back().is_none_or(|run| run.end <= from) {
                return Err(cowshed_types::Error::internal("an image says nothing of a range").offset(from));
            }
        }
    }
}
