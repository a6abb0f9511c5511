// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares the data of two images.

use crate::zeroes::is_zero;
use crate::{ImageSpec, JobHandle};
use cowshed_image::{Node, StatusExtent};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Error, Result};
use futures_util::future::join;
use futures_util::stream::{self, StreamExt};
use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, OnceLock};

/// Differences are reported by the sector, as in qemu-img.
const SECTOR_BYTES: u64 = 512;

/// The images to compare, and the way to do it.
#[derive(Clone, Debug)]
pub struct CompareOptions {
    /// One image.
    pub first: ImageSpec,
    /// The other.
    pub second: ImageSpec,
    /// `-s`: other sizes or other allocation count as different.
    pub strict: bool,
}

/// The verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Same bytes (the tail of the longer one is zero).
    Identical,
    /// The first difference.
    Mismatch {
        /// Offset of the first sector (512 bytes) with a differing byte.
        offset: u64,
    },
    /// Strict mode: the sizes differ.
    SizeMismatch,
    /// Strict mode: allocated in one, not in the other.
    AllocationMismatch {
        /// Offset of the run.
        offset: u64,
    },
}

/// qemu-img's line where the common part of disks of two sizes is the same.
pub const SIZE_WARNING: &str = "Warning: Image size mismatch!";

/// Verdict and remarks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompareOutcome {
    /// The verdict.
    pub verdict: Verdict,
    /// The sizes differ, but the common part is the same: worth a warning (not in strict mode).
    pub size_warning: bool,
    /// There was nothing to read: both disks have 0 bytes.
    pub is_empty: bool,
}

impl CompareOutcome {
    /// qemu-img's text, line by line (without its "qemu-img: " before warnings).
    pub fn messages(&self) -> Vec<String> {
        let warning = self.size_warning.then(|| SIZE_WARNING.to_owned());
        warning.into_iter().chain([self.message()]).collect()
    }

    /// The verdict in qemu-img's words.
    pub fn message(&self) -> String {
        match self.verdict {
            Verdict::Identical => "Images are identical.".to_owned(),
            Verdict::Mismatch { offset } => format!("Content mismatch at offset {offset}!"),
            Verdict::SizeMismatch => "Strict mode: Image size mismatch!".to_owned(),
            Verdict::AllocationMismatch { offset } => {
                format!("Strict mode: Offset {offset} block status mismatch!")
            }
        }
    }

    /// qemu-img's exit code: 0 identical, 1 different. (2 and more are errors.)
    pub fn exit_code(&self) -> i32 {
        i32::from(self.verdict != Verdict::Identical)
    }
}

/// The step of a comparison that failed once both images were open: `qemu-img compare` has an exit code and a text for
/// each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// Asking for the allocation (exit code 3).
    Status {
        /// 0 for the first image, 1 for the second.
        image: usize,
    },
    /// Reading (exit code 4).
    Read {
        /// 0 for the first image, 1 for the second.
        image: usize,
        /// Byte of the virtual disk.
        offset: u64,
    },
}

/// Remembers the first [`Failed`] of a comparison.
#[derive(Debug, Default)]
pub struct FailedAt(OnceLock<Failed>);

impl FailedAt {
    /// The step that failed; `None` when the images could not be opened, or nothing failed.
    pub fn get(&self) -> Option<Failed> {
        self.0.get().copied()
    }

    fn note(&self, failed: Failed) {
        // The first one counts.
        let _ = self.0.set(failed);
    }
}

/// Compares: the first difference counts.
pub async fn run(options: &CompareOptions, job: &JobHandle) -> Result<CompareOutcome> {
    run_noting(options, job, &FailedAt::default(), &|| {}).await
}

/// As [`run`], noting where it failed. `at_rest` is called once the shorter disk has ended without a difference. The rest of
/// the longer one is read then.
pub async fn run_noting(
    options: &CompareOptions,
    job: &JobHandle,
    failed: &FailedAt,
    at_rest: &dyn Fn(),
) -> Result<CompareOutcome> {
    let first = options.first.open_for_reading().await?;
    let second = match options.second.open_for_reading().await {
        Ok(second) => second,
        Err(error) => {
            let _ = first.close().await;
            return Err(error);
        }
    };
    let result = compare([&first, &second], options.strict, job, failed, at_rest).await;
    let closed = first.close().await.and(second.close().await);
    result.and_then(|outcome| closed.map(|()| outcome))
}

/// Chunks in flight, on as many threads.
const REQUESTS: usize = 4;
/// The bytes that a thread gets at once: waking one takes as long as copying tens of KiB.
const CHUNK_BYTES: u64 = 2 << 20;
/// Less than this is compared where it was found, as in images whose data and zeroes take turns.
const MIN_HANDED_BYTES: u64 = 512 << 10;
/// Read at once of either image: pieces in flight stay in the cache of a core.
const PIECE_BYTES: u64 = 256 << 10;

async fn compare(
    nodes: [&Arc<Node>; 2],
    strict: bool,
    job: &JobHandle,
    failed: &FailedAt,
    at_rest: &dyn Fn(),
) -> Result<CompareOutcome> {
    let [first, second] = nodes;
    let (one, other) = (first.size(), second.size());
    let is_empty = one.max(other) == 0;
    // A disk without bytes stays at 0 %, too.
    job.set_len(one.max(other).max(1));
    if strict && one != other {
        return Ok(CompareOutcome { verdict: Verdict::SizeMismatch, size_warning: false, is_empty });
    }
    let walk = Walk { at: 0, size: one.max(other), strict, sides: [Side::new(first), Side::new(second)] };
    let is_over = Cell::new(false);
    let steps = stream::try_unfold(walk, |mut walk| {
        let is_over = &is_over;
        async move {
            if is_over.get() {
                return Ok(None);
            }
            let step = walk.next().await?;
            Ok(step.map(|step| (step, walk)))
        }
    });
    let mut verdicts = pin!(steps.map(|step| step_verdict(step, nodes, job)).buffered(REQUESTS));
    let (mut first_found, mut same_end) = (Ok(None), 0);
    while let Some(found) = verdicts.next().await {
        // Reads of other threads come to their end before the images are closed.
        if !matches!(first_found, Ok(None)) {
            continue;
        }
        if same_end == one.min(other) && one != other {
            at_rest();
        }
        let same_bytes = found.as_ref().map_or(0, |(verdict, bytes)| if verdict.is_none() { *bytes } else { 0 });
        first_found = found.map(|(verdict, _)| verdict);
        is_over.set(!matches!(first_found, Ok(None)));
        same_end += same_bytes;
        job.advance(same_bytes);
    }
    let first_found = first_found.map_err(|stop| {
        stop.failed.into_iter().for_each(|at| failed.note(at));
        stop.error
    });
    let Some(verdict) = first_found? else {
        return Ok(CompareOutcome { verdict: Verdict::Identical, size_warning: one != other, is_empty });
    };
    // As qemu-img: the sizes are only looked at behind the end of the shorter image.
    let size_warning = one != other && matches!(verdict, Verdict::Mismatch { offset } if offset >= one.min(other));
    Ok(CompareOutcome { verdict, size_warning, is_empty })
}

/// The reason for which a comparison can't go on. Several may be met at once: the first one on the disk is reported.
#[derive(Debug)]
struct Stop {
    failed: Option<Failed>,
    error: Error,
}

/// A verdict, and how many bytes it is about.
async fn step_verdict(
    step: Result<Step, Stop>,
    nodes: [&Arc<Node>; 2],
    job: &JobHandle,
) -> Result<(Option<Verdict>, u64), Stop> {
    let step = step?;
    job.pause_point().await.map_err(|error| Stop { failed: None, error })?;
    let verdict = match step {
        Step::Allocation { offset } => Some(Verdict::AllocationMismatch { offset }),
        Step::Same { .. } => None,
        Step::Compare { start, end, data } => {
            let nodes = nodes.map(Arc::clone);
            let work = move || async move { differs_at(&nodes, start..end, data).await };
            // Where both are in memory the copying takes the time.
            let found = if end - start < MIN_HANDED_BYTES { work().await } else { rt::beside(work).await };
            found?.map(|at| Verdict::Mismatch { offset: at / SECTOR_BYTES * SECTOR_BYTES })
        }
    };
    Ok((verdict, step.len()))
}

/// The first byte of `range` that differs; `data` is true for the sides that hold data.
async fn differs_at(nodes: &[Arc<Node>; 2], range: Range<u64>, data: [bool; 2]) -> Result<Option<u64>, Stop> {
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min((start / PIECE_BYTES + 1) * PIECE_BYTES);
        let len = usize::try_from(end - start).unwrap_or(usize::MAX);
        let read = async |image: usize| {
            if !data[image] {
                return Ok(None);
            }
            let (result, buf) = nodes[image].read(start, IoBuf::scratch(len)).await;
            result.map(|()| Some(buf)).map_err(|error| Stop {
                failed: Some(Failed::Read { image, offset: start }),
                error: error.context(format!("error while reading at byte {start}")),
            })
        };
        let (one, other) = join(read(0), read(1)).await;
        if let Some(at) = first_difference(one?.as_deref(), other?.as_deref()) {
            return Ok(Some(start + at as u64));
        }
        start = end;
    }
    Ok(None)
}

/// Index of the first differing byte; a missing side is all zero.
fn first_difference(one: Option<&[u8]>, other: Option<&[u8]>) -> Option<usize> {
    match (one, other) {
        (Some(one), Some(other)) if one == other => None,
        (Some(one), Some(other)) => one.iter().zip(other).position(|(one, other)| one != other),
        (Some(bytes), None) | (None, Some(bytes)) if is_zero(bytes) => None,
        (Some(bytes), None) | (None, Some(bytes)) => bytes.iter().position(|byte| *byte != 0),
        (None, None) => None,
    }
}

/// The work for a range.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Both read as zeroes.
    Same { start: u64, end: u64 },
    /// `data` is true for the sides that hold data; the others are zero.
    Compare { start: u64, end: u64, data: [bool; 2] },
    /// Allocated on one side only, in strict mode.
    Allocation { offset: u64 },
}

impl Step {
    fn len(self) -> u64 {
        match self {
            Step::Same { start, end } | Step::Compare { start, end, .. } => end - start,
            Step::Allocation { .. } => 0,
        }
    }
}

/// The state of a range that the strict mode compares.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    present: bool,
    zero: bool,
    data: bool,
}

/// One image and its known status from the current place on.
struct Side<'a> {
    node: &'a Node,
    runs: VecDeque<StatusExtent>,
}

impl<'a> Side<'a> {
    fn new(node: &'a Node) -> Self {
        Side { node, runs: VecDeque::new() }
    }

    /// The run at `offset`: where it ends, whether it must be read, and its kind for the strict mode. Zero behind the
    /// image's end.
    async fn at(&mut self, offset: u64, size: u64) -> Result<(u64, bool, Kind)> {
        const MAX_RUNS: usize = 1024;
        const WINDOW_BYTES: u64 = 4 << 30;
        if offset >= self.node.size() {
            return Ok((size, false, Kind { present: false, zero: true, data: false }));
        }
        while self.runs.front().is_some_and(|run| run.start + run.len <= offset) {
            self.runs.pop_front();
        }
        if self.runs.is_empty() {
            let len = (self.node.size() - offset).min(WINDOW_BYTES);
            self.runs = self.node.block_status_chain(offset, len, MAX_RUNS).await?.into();
        }
        let run = self.runs.front().ok_or_else(|| {
            Error::internal("an image says nothing of a range").offset(offset).file(self.node.filename())
        })?;
        let kind = Kind { present: run.present, zero: run.zero, data: run.data };
        Ok((run.start + run.len, !run.zero, kind))
    }
}

/// Goes through both images side by side.
struct Walk<'a> {
    at: u64,
    size: u64,
    strict: bool,
    sides: [Side<'a>; 2],
}

impl Walk<'_> {
    async fn next(&mut self) -> Result<Option<Step>, Stop> {
        if self.at >= self.size {
            return Ok(None);
        }
        let start = self.at;
        let [first, second] = &mut self.sides;
        let stop = |image| move |error| Stop { failed: Some(Failed::Status { image }), error };
        let (first_end, first_data, first_kind) = first.at(start, self.size).await.map_err(stop(0))?;
        let (second_end, second_data, second_kind) = second.at(start, self.size).await.map_err(stop(1))?;
        if self.strict && first_kind != second_kind {
            self.at = self.size;
            return Ok(Some(Step::Allocation { offset: start }));
        }
        let end = first_end.min(second_end);
        if !first_data && !second_data {
            self.at = end;
            return Ok(Some(Step::Same { start, end }));
        }
        let end = end.min((start / CHUNK_BYTES + 1) * CHUNK_BYTES);
        self.at = end;
        Ok(Some(Step::Compare { start, end, data: [first_data, second_data] }))
    }
}

#[cfg(test)]
mod tests {
    use super::first_difference;

    #[test]
    fn a_missing_side_is_zero() {
        assert_eq!(first_difference(Some(&[0, 0, 3]), None), Some(2));
        assert_eq!(first_difference(None, Some(&[0, 0])), None);
        assert_eq!(first_difference(Some(&[1, 2]), Some(&[1, 3])), Some(1));
        assert_eq!(first_difference(Some(&[1, 2]), Some(&[1, 2])), None);
        assert_eq!(first_difference(None, None), None);
    }
}
