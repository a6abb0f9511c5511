// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads whose tables are in memory. The node carries them out, as it does those of images with an engine.

use super::{MappedDriver, RunSource};
use cowshed_graph::node::{Intent, Mapped};
use futures_util::FutureExt;

impl MappedDriver {
    /// Looks at the tables in memory, without waiting. A part of a table that isn't there is loaded. All else than a read of
    /// one plain run, or of zeroes, is the driver's own: a write may allocate, and must see its end.
    pub(super) fn look_at_once(&self, offset: u64, len: u64, intent: Intent) -> Mapped<'_> {
        if intent != Intent::Read {
            return Mapped::Special;
        }
        let mut mapping = self.format.map(offset, len, 1);
        let Some(runs) = mapping.as_mut().now_or_never() else {
            // An error comes back with the read itself.
            return Mapped::Load(Box::pin(mapping.map(|_| Ok(()))));
        };
        let first = runs.as_ref().ok().and_then(|runs| runs.first());
        match first.filter(|run| run.start == offset && run.len >= len).map(|run| run.place) {
            Some(RunSource::Data { file, host }) => match self.format.files().get(file).and_then(|node| node.file()) {
                Some(file) => Mapped::File { file, host, guard: None },
                None => Mapped::Special,
            },
            Some(RunSource::Zero) => Mapped::Zeroes,
            Some(RunSource::Unallocated) if !self.no_backing && self.backing.load().is_none() => Mapped::Zeroes,
            _ => Mapped::Special,
        }
    }
}
