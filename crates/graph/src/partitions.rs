// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Partitions of a disk.

use crate::node::Node;
use cowshed_layout::partitions::{ScanStep, Search};
use cowshed_storage::IoBuf;
use cowshed_types::Result;
use std::ops::Range;

/// Where partition `number` is on a disk, in bytes: 1 to 4 of an MBR, from 5 on its logical ones, or those of a GPT.
///
/// # Errors
/// Where the disk has no such partition, its tables break the rules, or can't be read.
pub async fn find(node: &Node, number: u32) -> Result<Range<u64>> {
    let mut search = Search::new(number, node.size())?;
    loop {
        let range = match search.step() {
            ScanStep::Found(range) => return Ok(range),
            ScanStep::Read(range) => range,
        };
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let (result, bytes) = node.read(range.start, IoBuf::try_scratch(len)?).await;
        result?;
        search.take(&bytes)?;
    }
}
