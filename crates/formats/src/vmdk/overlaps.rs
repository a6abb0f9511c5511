// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The search of a check for grains that lie on each other or on metadata. Its memory doesn't grow with the number of grains, as
//! far as these lie close together in the file.

use super::check::{Findings, Owner, Part, Repeated};
use super::claims::Claims;
use super::extent::{Extent, Storage};
use super::tables::TableBytes;
use crate::holes::Holes;
use cowshed_graph::node::Node;
use cowshed_layout::vmdk::{Grain, SECTOR_BYTES};
use cowshed_types::Result;
use std::ops::ControlFlow;
use std::sync::Arc;

/// A walk over the grains of an extent, in the order of the disk.
pub(super) struct GrainWalk<'a> {
    pub extent: &'a Extent,
    pub files: &'a [Arc<Node>],
    pub repeated: &'a Repeated,
}

/// Grains on each other and on metadata.
#[derive(Default)]
struct Overlaps {
    count: u64,
    on_metadata: Vec<String>,
    shared: Vec<SharedGrain>,
}

/// Bytes of the file that two entries name.
struct SharedGrain {
    offset: u64,
    later: Owner,
    /// The one that comes first on the disk, as soon as it is known.
    earlier: Option<Owner>,
}

impl GrainWalk<'_> {
    /// Reports parts of the file with two owners.
    pub(super) async fn check_apart(
        &self,
        mut metadata: Vec<Part>,
        number: usize,
        findings: &mut Findings,
    ) -> Result<()> {
        report_overlaps(&mut metadata, self.table_bytes(), number, findings);
        let unit_bytes = self.unit_bytes();
        let mut found = self.overlaps(None, &metadata, findings.max).await?;
        if found.is_none() {
            found = self.overlaps(Some(Claims::of_sectors()), &metadata, findings.max).await?;
        }
        let mut found = found.unwrap_or_default();
        if !found.shared.is_empty() {
            found.shared.sort_by_key(|shared| shared.offset);
            self.each_run(&mut |run| {
                let from = found.shared.partition_point(|shared| shared.offset < run.from);
                for shared in found.shared.iter_mut().skip(from).take_while(|shared| shared.offset < run.to) {
                    shared.earlier.get_or_insert(run.owner_at(shared.offset, unit_bytes));
                }
                Ok(ControlFlow::Continue(()))
            })
            .await?;
        }
        findings.check.counters.corruptions += found.count;
        for text in found.on_metadata {
            findings.note(format!("ERROR: extent {number}: {text}"));
        }
        for SharedGrain { offset, later, earlier } in found.shared {
            let other = earlier.unwrap_or(later);
            findings.note(format!("ERROR: extent {number}: {later} lies on {other} (offset {offset:#x})"));
        }
        Ok(())
    }

    fn table_bytes(&self) -> u64 {
        match &self.extent.storage {
            Storage::Sparse(sparse) => sparse.header.table_bytes() as u64,
            Storage::SeSparse(sparse) => sparse.header.table_bytes() as u64,
            Storage::Flat { .. } | Storage::Zero => SECTOR_BYTES,
        }
    }

    fn grain_bytes(&self) -> u64 {
        match &self.extent.storage {
            Storage::Sparse(sparse) => sparse.header.grain_bytes(),
            Storage::SeSparse(sparse) => sparse.header.grain_bytes(),
            Storage::Flat { .. } | Storage::Zero => SECTOR_BYTES,
        }
    }

    /// Bytes of the file that a grain has for itself: of a compressed one the first sector alone.
    fn unit_bytes(&self) -> u64 {
        match &self.extent.storage {
            Storage::Sparse(sparse) if sparse.header.compressed => SECTOR_BYTES,
            _ => self.grain_bytes(),
        }
    }

    /// Overlaps, of which `max` are described. Without `claims` each grain is one bit, and `None` is the result where grains
    /// don't begin at one distance from each other.
    async fn overlaps(&self, claims: Option<Claims>, metadata: &[Part], max: usize) -> Result<Option<Overlaps>> {
        let (unit_bytes, mut claims) = (self.unit_bytes(), claims);
        let (mut found, mut is_on_grid) = (Overlaps::default(), true);
        self.each_run(&mut |run| {
            let claims = claims.get_or_insert_with(|| Claims::new(unit_bytes, run.from));
            if !claims.has_unit_at(run.from) {
                is_on_grid = false;
                return Ok(ControlFlow::Break(()));
            }
            let behind = metadata.partition_point(|part| part.to <= run.from);
            if let Some(part) = metadata.get(behind).filter(|part| part.from < run.to) {
                let at = run.from.max(part.from);
                found.count += 1;
                if found.on_metadata.len() < max {
                    let (grain, other) = (run.owner_at(at, unit_bytes), part.owner_at(at, self.table_bytes()));
                    found.on_metadata.push(format!("{grain} lies on {other} (offset {at:#x})"));
                }
            }
            if let Some(offset) = claims.claim(run.from, run.to)? {
                found.count += 1;
                if found.shared.len() < max {
                    let later = run.owner_at(offset, unit_bytes);
                    found.shared.push(SharedGrain { offset, later, earlier: None });
                }
            }
            Ok(ControlFlow::Continue(()))
        })
        .await?;
        Ok(is_on_grid.then_some(found))
    }

    /// Visits the grains, those that follow each other on the disk and in the file together.
    async fn each_run(&self, visit: &mut impl FnMut(Part) -> Result<ControlFlow<()>>) -> Result<()> {
        let (mut run, holes) = (None::<Part>, Holes::default());
        let (tables, entries) = match &self.extent.storage {
            Storage::Sparse(sparse) => (sparse.directory.len(), u64::from(sparse.header.table_entries)),
            Storage::SeSparse(sparse) => (sparse.directory().len(), sparse.header.table_entries()),
            Storage::Flat { .. } | Storage::Zero => return Ok(()),
        };
        let (grain_bytes, bytes) = (self.grain_bytes(), self.unit_bytes());
        let grains = self.extent.len.div_ceil(grain_bytes);
        for index in (0..tables as u64).filter(|index| !self.repeated.contains(*index)) {
            let first = index.saturating_mul(entries).min(grains);
            let Some(table) = self.table(index, &holes).await? else { continue };
            for entry in 0..entries.min(grains - first) {
                let Some(sector) = self.grain_at(&table, entry as usize) else { continue };
                let from = sector * SECTOR_BYTES;
                // A hosted grain has a sector of the file for itself, so 32 bits count them.
                let owner = match &self.extent.storage {
                    Storage::SeSparse(_) => Owner::GrainOf(index as u32),
                    _ => Owner::Grain((first + entry) as u32),
                };
                match &mut run {
                    Some(last) if last.to == from && last.owner_at(from, bytes) == owner => last.to += bytes,
                    _ => {
                        let next = Part { from, to: from + bytes, owner };
                        if let Some(whole) = run.replace(next)
                            && visit(whole)?.is_break()
                        {
                            return Ok(());
                        }
                    }
                }
            }
        }
        run.map_or(Ok(()), |last| visit(last).map(drop))
    }

    /// A table that is in the file and was written.
    async fn table(&self, index: u64, holes: &Holes) -> Result<Option<TableBytes>> {
        let place = match &self.extent.storage {
            Storage::Sparse(sparse) => sparse.table_offset(self.files, index),
            Storage::SeSparse(sparse) => sparse.table_offset(self.files, index),
            Storage::Flat { .. } | Storage::Zero => Ok(None),
        };
        // A wrong entry is reported by the walk over the disk.
        let Ok(Some(offset)) = place else { return Ok(None) };
        match &self.extent.storage {
            Storage::Sparse(sparse) => sparse.written_table(self.files, offset, holes).await,
            Storage::SeSparse(sparse) => sparse.written_table(self.files, offset, holes).await,
            Storage::Flat { .. } | Storage::Zero => Ok(None),
        }
    }

    /// The sector of a grain that is in the file.
    fn grain_at(&self, table: &TableBytes, index: usize) -> Option<u64> {
        let grain = match &self.extent.storage {
            Storage::Sparse(sparse) => sparse.header.grain_at(table, index),
            Storage::SeSparse(sparse) => sparse.header.grain_at(table, index).and_then(Result::ok),
            Storage::Flat { .. } | Storage::Zero => None,
        };
        match grain {
            Some(Grain::At(sector)) => Some(sector),
            _ => None,
        }
    }
}

/// Reports the parts with two owners, and leaves parts in order and apart.
fn report_overlaps(parts: &mut Vec<Part>, table_bytes: u64, number: usize, findings: &mut Findings) {
    parts.sort_unstable_by_key(|part| (part.from, part.to));
    let mut last: Option<Part> = None;
    parts.retain_mut(|part| {
        match last {
            Some(before) if part.from < before.to => {
                let (at, owner) = (part.from, part.owner);
                let other = before.owner_at(at, table_bytes);
                findings.corruption(format!("extent {number}: {owner} lies on {other} (offset {at:#x})"));
                part.from = before.to;
            }
            _ => {}
        }
        let is_left = part.from < part.to;
        if is_left {
            last = Some(*part);
        }
        is_left
    });
}
