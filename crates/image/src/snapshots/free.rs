// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Looking for free host clusters, from the start of the file on.

use cowshed_block::{Error, ErrorKind, Result};
use cowshed_layout::qcow2::{Geometry, RefcountTableEntry, refcount};
use cowshed_storage::{File, IoBuf};
use std::collections::HashSet;

/// Hands out clusters whose count is zero, each once.
pub(super) struct FreeClusters {
    file: File,
    geometry: Geometry,
    table: Vec<u64>,
    /// The next cluster to look at.
    at: u64,
    /// The block that counts `at`, once read; `None` inside: there is no block, all is free.
    block: Option<(u64, Option<IoBuf>)>,
    /// Clusters that hold metadata, whatever their count says.
    metadata: HashSet<u64>,
}

impl FreeClusters {
    pub fn new(file: File, geometry: Geometry, table: Vec<u64>, metadata: HashSet<u64>) -> Self {
        FreeClusters { file, geometry, table, at: 1, block: None, metadata }
    }

    /// The first of `count` neighbouring free clusters.
    pub async fn take(&mut self, count: u64) -> Result<u64> {
        let mut found = 0;
        loop {
            if self.at >= 1 << (56 - self.geometry.cluster_bits()) {
                return Err(Error::new(ErrorKind::Limit, "the image file can't grow past 2^56 bytes"));
            }
            let is_free = self.is_free(self.at).await?;
            self.at += 1;
            found = if is_free { found + 1 } else { 0 };
            if found == count {
                return Ok(self.at - count);
            }
        }
    }

    async fn is_free(&mut self, cluster: u64) -> Result<bool> {
        let index = self.geometry.refcount_table_index(cluster);
        if self.block.as_ref().is_none_or(|(loaded, _)| *loaded != index) {
            self.block = Some((index, read_block(&self.file, self.geometry, &self.table, index).await?));
        }
        let order = self.geometry.refcount_order();
        let entry = self.geometry.refcount_block_index(cluster) as usize;
        let is_free = match &self.block {
            Some((_, Some(block))) => refcount::get(block, order, entry) == 0,
            _ => true,
        };
        if is_free && self.metadata.contains(&cluster) {
            let message = "a cluster of metadata has no refcount: check and repair the image first";
            return Err(Error::invalid_image("refcount", 0, message).offset(cluster << self.geometry.cluster_bits()));
        }
        Ok(is_free)
    }
}

/// A refcount block; `None` when the table has none there.
pub(super) async fn read_block(file: &File, geometry: Geometry, table: &[u64], index: u64) -> Result<Option<IoBuf>> {
    let raw = usize::try_from(index).ok().and_then(|index| table.get(index)).copied().unwrap_or(0);
    let Some(host) = RefcountTableEntry(raw).block(geometry)? else { return Ok(None) };
    if host.0 >= file.len() {
        let message = format!("refcount block {index} lies past the end of the file");
        return Err(Error::invalid_image("refcount_table_entry", host, message));
    }
    let (result, bytes) = file.read_at(IoBuf::zeroed(geometry.cluster_size() as usize), host.0).await;
    result.map_err(|error| error.offset(host.0))?;
    Ok(Some(bytes))
}
