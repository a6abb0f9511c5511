// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Block status.

use crate::commands::answered;
use crate::disk::{DirtyRun, DiskRun};
use crate::negotiation::Context;
use crate::outbox::ReplyPart;
use crate::session::Session;
use crate::{Disk, DiskQueue};
use cowshed_nbd_proto::flags::{CommandFlags, ReplyFlags, STATE_DIRTY, STATE_HOLE, STATE_ZERO};
use cowshed_nbd_proto::reply::{StatusRun, append_status};
use cowshed_nbd_proto::{ReplyStyle, Request};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, Result};

/// Runs of one reply; a client that needs more asks on from their end.
const MAX_RUNS: usize = 1024;
/// Runs that are looked at when the client asks for only one.
const RUNS_FOR_ONE: usize = 16;

/// The longest block status of this many contexts, in bytes.
pub(crate) fn status_bytes(request: &Request, contexts: usize) -> u64 {
    let runs = if request.flags.contains(CommandFlags::REQ_ONE) { RUNS_FOR_ONE } else { MAX_RUNS };
    // Lengths and flags of 64 bits each, and a header.
    (contexts as u64).saturating_mul(runs as u64 * 16 + 64)
}

impl<D: Disk> Session<D> {
    /// Answers for the contexts with these numbers.
    pub(crate) async fn status(&self, request: &Request, contexts: &[u32]) {
        match self.collect_status(request, contexts).await {
            Ok(bytes) => self.outbox.push([ReplyPart::Data(IoBuf::copy_from(&bytes))]),
            Err(error) => self.fail(request, error, "asking for the block status failed"),
        }
    }

    async fn collect_status(&self, request: &Request, contexts: &[u32]) -> Result<Vec<u8>> {
        let Request { offset, length, .. } = *request;
        let disk = &self.disk;
        let one = request.flags.contains(CommandFlags::REQ_ONE);
        let max_runs = if one { RUNS_FOR_ONE } else { MAX_RUNS };
        let mut bytes = Vec::new();
        let unit = u64::from(self.terms.block_sizes.minimum);
        // A range that isn't made of whole blocks gets the runs as they are.
        let unit = if offset.is_multiple_of(unit) && length.is_multiple_of(unit) { unit } else { 1 };
        let mut layout: Option<Vec<DiskRun>> = None;
        for (index, &number) in contexts.iter().enumerate() {
            let context = self.terms.contexts.get(number as usize);
            let context = context.ok_or_else(|| Error::internal("a context that the client did not choose"))?;
            let runs = if let Context::Bitmap(bitmap) = context {
                disk.dirty_status(bitmap, offset, length, max_runs).await?.iter().map(dirty).collect()
            } else {
                if layout.is_none() {
                    layout = Some(disk.block_status(offset, length, max_runs).await?);
                }
                let describe = if *context == Context::Allocation { allocation } else { depth };
                layout.iter().flatten().map(describe).collect()
            };
            let combine = if *context == Context::Allocation { both } else { either };
            let mut runs = merge(align(runs, unit, combine));
            if one {
                runs.truncate(1);
            }
            if runs.is_empty() {
                return Err(Error::internal("a block status without a run").offset(offset));
            }
            let flags = if index + 1 == contexts.len() { ReplyFlags::DONE } else { ReplyFlags::default() };
            let extended = self.terms.replies == ReplyStyle::Extended;
            append_status(extended, answered(request), flags, number, &runs, &mut bytes);
        }
        Ok(bytes)
    }
}

fn allocation(run: &DiskRun) -> StatusRun {
    let flags = if run.data { 0 } else { STATE_HOLE } | if run.zero { STATE_ZERO } else { 0 };
    StatusRun { len: run.len, flags }
}

fn depth(run: &DiskRun) -> StatusRun {
    StatusRun { len: run.len, flags: run.depth }
}

fn dirty(run: &DirtyRun) -> StatusRun {
    StatusRun { len: run.len, flags: if run.dirty { STATE_DIRTY } else { 0 } }
}

/// The flags of a block of which one part is a hole, or zero, and another isn't: neither.
fn both(a: u32, b: u32) -> u32 {
    a & b
}

/// The deepest layer counts, and a block that is dirty in part is dirty.
fn either(a: u32, b: u32) -> u32 {
    a.max(b)
}

/// Runs whose lengths are multiples of `block_bytes`, as clients that know the size expect them. A tail that is shorter
/// is counted into the next block if there is one, and left out otherwise (never the whole of the answer).
fn align(runs: Vec<StatusRun>, block_bytes: u64, combine: fn(u32, u32) -> u32) -> Vec<StatusRun> {
    if block_bytes <= 1 || runs.iter().all(|run| run.len.is_multiple_of(block_bytes)) {
        return runs;
    }
    let mut aligned = Vec::with_capacity(runs.len());
    // A block that several runs share: its part so far, and the flags of that.
    let mut partial: Option<StatusRun> = None;
    for run in runs {
        let mut rest = run.len;
        if let Some(shared) = &mut partial {
            let taken = rest.min(block_bytes - shared.len);
            shared.len += taken;
            shared.flags = combine(shared.flags, run.flags);
            rest -= taken;
            if shared.len < block_bytes {
                continue;
            }
            aligned.extend(partial.take());
        }
        let whole = rest - rest % block_bytes;
        if whole > 0 {
            aligned.push(StatusRun { len: whole, flags: run.flags });
        }
        if rest > whole {
            partial = Some(StatusRun { len: rest - whole, flags: run.flags });
        }
    }
    if aligned.is_empty() {
        // The rest of the block wasn't looked at: nothing is claimed of it.
        aligned.push(StatusRun { len: block_bytes, flags: 0 });
    }
    aligned
}

/// Joins neighbours with the same flags.
fn merge(runs: Vec<StatusRun>) -> Vec<StatusRun> {
    let mut merged: Vec<StatusRun> = Vec::with_capacity(runs.len());
    for run in runs {
        match merged.last_mut() {
            Some(last) if last.flags == run.flags => last.len += run.len,
            _ => merged.push(run),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(len: u64, flags: u32) -> StatusRun {
        StatusRun { len, flags }
    }

    #[test]
    fn runs_are_rounded_to_blocks_without_claiming_too_much() {
        let runs = vec![run(1024, 3), run(512, 3), run(512, 0), run(100, 3), run(924, 3)];
        assert_eq!(align(runs, 1024, both), [run(1024, 3), run(1024, 0), run(1024, 3)]);
        assert_eq!(align(vec![run(512, 3)], 1024, both), [run(1024, 0)]);
        assert_eq!(align(vec![run(1024, 1), run(5, 1)], 1024, either), [run(1024, 1)]);
        assert_eq!(align(vec![run(3, 1), run(1021, 0)], 1024, either), [run(1024, 1)]);
        assert_eq!(align(vec![run(3, 1)], 1, both), [run(3, 1)]);
    }

    #[test]
    fn equal_neighbours_are_one_run() {
        assert_eq!(merge(vec![run(1, 0), run(2, 0), run(3, 1), run(4, 0)]), [run(3, 0), run(3, 1), run(4, 0)]);
    }
}
