// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Huge images that are fully allocated and hold nothing but metadata: the file is sparse, so a terabyte takes some
//! hundred megabytes on the disk.

use cowshed_layout::qcow2::{Geometry, Header, refcount};
use std::fs::File;
use std::io::{BufWriter, Result, Seek, SeekFrom, Write};
use std::path::Path;

/// The places of the guest's clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Clusters in guest order.
    Contiguous,
    /// Each far from its neighbours.
    Scattered,
}

/// Makes an image of `size` bytes at `path`, every guest cluster mapped to a host cluster of its own, which reads as
/// zeroes. Header, refcount table, refcount blocks, L1 table and L2 tables come first, then the data.
pub fn build(path: &Path, size: u64, cluster_bits: u32, placement: Placement) -> Result<()> {
    let plan = Plan::new(size, cluster_bits);
    let file = File::create(path)?;
    file.set_len(plan.end << cluster_bits)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&plan.header(size))?;
    plan.write_numbers(&mut out, plan.table, plan.blocks, |index| (plan.first_block + index) << cluster_bits)?;
    plan.write_blocks(&mut out)?;
    let copied = 1 << 63;
    let l2 = plan.first_l2;
    plan.write_numbers(&mut out, plan.l1, plan.l2_tables, |index| copied | (l2 + index) << cluster_bits)?;
    plan.write_numbers(&mut out, l2, plan.data, |index| copied | (plan.place(index, placement) << cluster_bits))?;
    out.flush()
}

/// The layout, in clusters.
struct Plan {
    geometry: Geometry,
    table: u64,
    table_clusters: u64,
    first_block: u64,
    blocks: u64,
    l1: u64,
    first_l2: u64,
    l2_tables: u64,
    first_data: u64,
    data: u64,
    end: u64,
}

impl Plan {
    fn new(size: u64, cluster_bits: u32) -> Plan {
        let geometry = Geometry::new(cluster_bits, 4, false).expect("valid cluster size");
        let data = geometry.clusters(size);
        let l2_tables = geometry.l1_entries_needed(size);
        let l1_clusters = geometry.clusters(l2_tables * 8);
        let mut blocks = 1;
        loop {
            let table_clusters = geometry.clusters(blocks * 8);
            let table = 1;
            let first_block = table + table_clusters;
            let l1 = first_block + blocks;
            let first_l2 = l1 + l1_clusters;
            let first_data = first_l2 + l2_tables;
            let end = first_data + data;
            let needed = end.div_ceil(geometry.refcount_block_entries());
            if needed == blocks {
                return Plan {
                    geometry,
                    table,
                    table_clusters,
                    first_block,
                    blocks,
                    l1,
                    first_l2,
                    l2_tables,
                    first_data,
                    data,
                    end,
                };
            }
            blocks = needed;
        }
    }

    fn header(&self, size: u64) -> Vec<u8> {
        let bits = self.geometry.cluster_bits();
        let mut header = Header::new(3, bits);
        header.size = size;
        header.l1_size = u32::try_from(self.l2_tables).expect("L1 table within the format");
        header.l1_table_offset = self.l1 << bits;
        header.refcount_table_offset = self.table << bits;
        header.refcount_table_clusters = u32::try_from(self.table_clusters).expect("table within the format");
        header.encode().expect("valid header")
    }

    /// Host cluster of a guest cluster. Scattered: a step that shares no factor with the number of clusters reaches
    /// each of them once.
    fn place(&self, index: u64, placement: Placement) -> u64 {
        let mut step = (self.data as f64 * 0.618) as u64 | 1;
        while gcd(step, self.data) != 1 {
            step += 2;
        }
        match placement {
            Placement::Contiguous => self.first_data + index,
            Placement::Scattered => {
                self.first_data + (u128::from(index) * u128::from(step) % u128::from(self.data)) as u64
            }
        }
    }

    fn write_numbers(
        &self,
        out: &mut BufWriter<File>,
        cluster: u64,
        count: u64,
        number: impl Fn(u64) -> u64,
    ) -> Result<()> {
        out.seek(SeekFrom::Start(cluster << self.geometry.cluster_bits()))?;
        (0..count).try_for_each(|index| out.write_all(&number(index).to_be_bytes()))
    }

    fn write_blocks(&self, out: &mut BufWriter<File>) -> Result<()> {
        let entries = self.geometry.refcount_block_entries();
        out.seek(SeekFrom::Start(self.first_block << self.geometry.cluster_bits()))?;
        for index in 0..self.blocks {
            let mut block = vec![0; self.geometry.cluster_size() as usize];
            for entry in 0..entries.min(self.end - index * entries) {
                refcount::set(&mut block, 4, entry as usize, 1);
            }
            out.write_all(&block)?;
        }
        Ok(())
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
