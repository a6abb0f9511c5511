// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading the trees of an image: an L1 table, the L2 tables behind it, and the targets of their entries.

use cowshed_layout::qcow2::{Geometry, L1Entry, L2Entry, Snapshot};
use cowshed_storage::{File, IoBuf};
use cowshed_types::memory::try_collect;
use cowshed_types::{Error, Result};
use futures_util::stream::{self, StreamExt};

/// L2 tables read at once.
const READS_AT_ONCE: usize = 32;

/// The L1 table of a snapshot, after a check of its place in the entry.
pub async fn read_l1(file: &File, snapshot: &Snapshot, version: u32, cluster_bits: u32) -> Result<Vec<u64>> {
    // The further fields of version 3 are not needed here.
    snapshot.validate(version.min(2), cluster_bits)?;
    let end = snapshot.l1_table_offset.saturating_add(u64::from(snapshot.l1_size) * 8);
    if end > file.len() {
        let value = format!("{:#x}", snapshot.l1_table_offset);
        let message = "the L1 table of the snapshot ends past the end of the file";
        return Err(Error::invalid_image("snapshot_l1_table_offset", value, message));
    }
    read_numbers(file, snapshot.l1_table_offset, u64::from(snapshot.l1_size)).await
}

/// A table of `count` numbers of 8 bytes; the caller has checked its place.
pub(crate) async fn read_numbers(file: &File, offset: u64, count: u64) -> Result<Vec<u64>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let (result, bytes) = file.read_at(IoBuf::try_zeroed(count as usize * 8)?, offset).await;
    result.map_err(|error| error.offset(offset))?;
    try_collect(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)))
}

/// The L2 tables behind an L1 table: index and host offset. An entry that can't be right is an error.
pub(crate) fn tables(l1: &[u64], geometry: Geometry, file_len: u64) -> Result<Vec<(usize, u64)>> {
    let mut tables = Vec::new();
    for (index, raw) in l1.iter().enumerate() {
        let Some(host) = L1Entry(*raw).table(geometry)? else { continue };
        if host.0 >= file_len {
            let message = format!("the L2 table of L1 entry {index} lies past the end of the file");
            return Err(Error::invalid_image("l1_entry", host, message));
        }
        tables.push((index, host.0));
    }
    Ok(tables)
}

/// Reads L2 tables, several at a time, and hands them over in order.
pub(crate) async fn for_tables(
    file: &File,
    geometry: Geometry,
    tables: &[(usize, u64)],
    mut each: impl FnMut(usize, u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let cluster_size = geometry.cluster_size() as usize;
    let mut reads = stream::iter(tables)
        .map(|(index, host)| async move {
            let (result, bytes) = file.read_at(IoBuf::zeroed(cluster_size), *host).await;
            (*index, *host, result.map(|()| bytes))
        })
        .buffered(READS_AT_ONCE);
    while let Some((index, host, read)) = reads.next().await {
        each(index, host, &read.map_err(|error| error.offset(host))?)?;
    }
    Ok(())
}

/// The entries of an L2 table: index and first word.
pub(crate) fn entries(bytes: &[u8], geometry: Geometry) -> impl Iterator<Item = (usize, L2Entry)> + '_ {
    let words = (geometry.l2_entry_size() / 8) as usize;
    bytes.as_chunks::<8>().0.iter().step_by(words).map(|word| L2Entry(u64::from_be_bytes(*word))).enumerate()
}

/// First host cluster that an entry refers to, and how many.
pub(crate) fn references(entry: L2Entry, geometry: Geometry) -> Option<(u64, u64)> {
    let bits = geometry.cluster_bits();
    if let Some(descriptor) = entry.compressed_descriptor(bits) {
        let end = descriptor.host_offset.0.saturating_add(descriptor.len_max());
        let first = descriptor.host_offset.0 >> bits;
        return Some((first, end.div_ceil(1 << bits) - first));
    }
    match entry.offset().0 {
        0 => None,
        host => Some((host >> bits, 1)),
    }
}
