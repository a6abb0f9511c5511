// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tables without zero clusters, which version 2 doesn't have.
//!
//! Without a backing file a zero cluster becomes an unallocated one. With one it refers to a host cluster full of
//! zeroes, which as many share as its count can hold. A write copies it as it does any shared cluster. A host cluster
//! that a zero cluster kept allocated loses a reference.

use super::rewrite::Rewrite;
use crate::snapshots::{tree, write_all};
use cowshed_layout::qcow2::{L1Entry, L2Entry, refcount};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, ErrorKind, HostOffset, Result};
use std::collections::{BTreeMap, BTreeSet};

/// L2 tables in memory at once.
const TABLES_AT_ONCE: usize = 64;

/// An L2 table and its references.
#[derive(Clone, Copy, Debug)]
struct Table {
    host: u64,
    /// Entries of L1 tables, the snapshots' too.
    users: u64,
    /// One of them is the active table's.
    is_active: bool,
}

/// Host clusters full of zeroes, and how many entries refer to each.
#[derive(Default)]
struct ZeroClusters {
    max: u64,
    references: Vec<u64>,
}

impl ZeroClusters {
    /// Index of the one that takes `users` references more.
    fn add(&mut self, users: u64) -> Result<usize> {
        if users > self.max {
            let message = "an L2 table has more users than a refcount can count";
            return Err(Error::new(ErrorKind::Limit, message).value(users));
        }
        match self.references.last_mut() {
            Some(last) if *last + users <= self.max => *last += users,
            _ => self.references.push(users),
        }
        Ok(self.references.len() - 1)
    }
}

/// The result of a first look at the tables.
#[derive(Default)]
struct Survey {
    /// Tables to be replaced, in the order of the walk.
    replaced: Vec<Table>,
    zeroes: ZeroClusters,
    /// Kept under a zero cluster and used by others besides.
    shared: BTreeSet<u64>,
}

impl Rewrite<'_> {
    /// Refuses another method of compression where something is compressed, in a snapshot also. Changes nothing.
    pub(super) async fn check_method(&self) -> Result<()> {
        if self.image.header.compression() == self.new.compression() {
            return Ok(());
        }
        for some in self.tables_of(&self.trees().await?)?.chunks(TABLES_AT_ONCE) {
            for bytes in self.read_tables(some).await? {
                if tree::entries(&bytes, self.image.geometry).any(|(_, entry)| entry.is_compressed()) {
                    let message =
                        "Cannot downgrade an image with zstd compression type and existing compressed clusters";
                    return Err(Error::unsupported(message).field("compat"));
                }
            }
        }
        Ok(())
    }

    /// The L1 tables: the disk's, then the snapshots'.
    async fn trees(&self) -> Result<Vec<Vec<u64>>> {
        let mut trees = vec![self.image.l1.clone()];
        for snapshot in &self.image.snapshots {
            let header = &self.image.header;
            trees.push(tree::read_l1(&self.image.file, snapshot, header.version, header.cluster_bits).await?);
        }
        Ok(trees)
    }

    /// Replaces the L2 tables with zero clusters, and the L1 tables that refer to them.
    pub(super) async fn expand_zeroes(&mut self) -> Result<()> {
        let trees = self.trees().await?;
        let tables = self.tables_of(&trees)?;
        let mut survey = Survey::default();
        survey.zeroes.max = refcount::max_value(self.new.refcount_order);
        self.expect(tables.len() as u64);
        for some in tables.chunks(TABLES_AT_ONCE) {
            self.look(some, &mut survey).await?;
            self.advance(some.len() as u64)?;
        }
        let alone = self.left_alone(&survey).await?;
        self.add_tables_with(&tables, &alone, &mut survey).await?;
        if survey.replaced.is_empty() {
            return Ok(());
        }
        self.expect(survey.replaced.len() as u64);
        let places = self.write_zero_clusters(&survey).await?;
        let moved = self.write_tables(&survey, &places, &alone).await?;
        self.replace_l1_tables(&trees, &moved, &tables).await
    }

    fn tables_of(&self, trees: &[Vec<u64>]) -> Result<Vec<Table>> {
        let mut index = BTreeMap::new();
        let mut tables: Vec<Table> = Vec::new();
        for (number, l1) in trees.iter().enumerate() {
            for (_, host) in tree::tables(l1, self.image.geometry, self.image.file.len())? {
                let at = *index.entry(host).or_insert(tables.len());
                match tables.get_mut(at) {
                    Some(table) => table.users += 1,
                    None => tables.push(Table { host, users: 1, is_active: number == 0 }),
                }
            }
        }
        Ok(tables)
    }

    async fn read_tables(&self, some: &[Table]) -> Result<Vec<IoBuf>> {
        let named: Vec<(usize, u64)> = some.iter().enumerate().map(|(number, table)| (number, table.host)).collect();
        let mut read = Vec::with_capacity(some.len());
        tree::for_tables(&self.image.file, self.image.geometry, &named, |_, _, bytes| {
            read.push(IoBuf::copy_from(bytes));
            Ok(())
        })
        .await?;
        Ok(read)
    }

    /// Notes the zero clusters of some tables, and gives back the clusters that they kept allocated.
    async fn look(&mut self, some: &[Table], survey: &mut Survey) -> Result<()> {
        let has_backing = self.new.backing_file.is_some();
        for (table, bytes) in some.iter().zip(self.read_tables(some).await?) {
            let mut has_zeroes = false;
            for (_, entry) in tree::entries(&bytes, self.image.geometry).filter(|(_, entry)| entry.is_zero()) {
                has_zeroes = true;
                if has_backing {
                    survey.zeroes.add(table.users)?;
                }
                if entry.offset().0 != 0 {
                    self.give_up(entry.offset(), table, survey).await?;
                }
            }
            if has_zeroes {
                survey.replaced.push(*table);
            }
        }
        if has_backing && !survey.zeroes.references.is_empty() && self.new.crypt_method != 0 {
            let message = "zero clusters of an encrypted image with a backing file can't be expanded: they would have to be \
                           encrypted";
            return Err(Error::unsupported(message).field("compat"));
        }
        Ok(())
    }

    async fn give_up(&mut self, host: HostOffset, table: &Table, survey: &mut Survey) -> Result<()> {
        if !host.is_aligned(self.image.geometry.cluster_bits()) || host.0 >= self.image.file.len() {
            let message = "a zero cluster keeps a host cluster that can't be one: check and repair the image first";
            return Err(Error::invalid_image("l2_entry", host, message).offset(table.host));
        }
        let cluster = self.image.geometry.host_cluster(host);
        if self.stored.get(cluster).await? == table.users && !self.dropped.contains(cluster) {
            self.dropped.insert(cluster);
        } else {
            survey.shared.insert(cluster);
            self.adjust(cluster, -(table.users as i64));
        }
        Ok(())
    }

    /// The shared clusters with one entry left: where that is the active table's, it becomes COPIED.
    async fn left_alone(&mut self, survey: &Survey) -> Result<BTreeSet<u64>> {
        let mut alone = BTreeSet::new();
        for cluster in &survey.shared {
            if self.new_count(*cluster).await? == 1 {
                alone.insert(*cluster);
            }
        }
        Ok(alone)
    }

    fn becomes_copied(&self, entry: L2Entry, alone: &BTreeSet<u64>) -> bool {
        !entry.is_compressed()
            && !entry.is_zero()
            && entry.offset().0 != 0
            && alone.contains(&self.image.geometry.host_cluster(entry.offset()))
    }

    async fn add_tables_with(&self, tables: &[Table], alone: &BTreeSet<u64>, survey: &mut Survey) -> Result<()> {
        if alone.is_empty() {
            return Ok(());
        }
        let known: BTreeSet<u64> = survey.replaced.iter().map(|table| table.host).collect();
        let others: Vec<Table> =
            tables.iter().filter(|table| table.is_active && !known.contains(&table.host)).copied().collect();
        for some in others.chunks(TABLES_AT_ONCE) {
            for (table, bytes) in some.iter().zip(self.read_tables(some).await?) {
                let geometry = self.image.geometry;
                if tree::entries(&bytes, geometry).any(|(_, entry)| self.becomes_copied(entry, alone)) {
                    survey.replaced.push(*table);
                }
            }
        }
        Ok(())
    }

    /// Their host offsets.
    async fn write_zero_clusters(&mut self, survey: &Survey) -> Result<Vec<u64>> {
        let mut places = Vec::new();
        let cluster_bytes = self.image.geometry.cluster_size() as usize;
        for references in &survey.zeroes.references {
            let host = self.take(1).await?;
            self.adjust(host >> self.image.geometry.cluster_bits(), *references as i64 - 1);
            write_all(&self.image.file, vec![(host, IoBuf::zeroed(cluster_bytes))]).await?;
            places.push(host);
        }
        Ok(places)
    }

    /// Writes the new tables: old place to new one.
    async fn write_tables(
        &mut self,
        survey: &Survey,
        places: &[u64],
        alone: &BTreeSet<u64>,
    ) -> Result<BTreeMap<u64, u64>> {
        let geometry = self.image.geometry;
        // Takes the same turns as the first look did.
        let mut zeroes = ZeroClusters { max: survey.zeroes.max, references: Vec::new() };
        let mut moved = BTreeMap::new();
        for some in survey.replaced.chunks(TABLES_AT_ONCE) {
            let mut writes = Vec::with_capacity(some.len());
            for (table, mut bytes) in some.iter().zip(self.read_tables(some).await?) {
                for word in bytes.as_chunks_mut::<8>().0 {
                    let entry = L2Entry(u64::from_be_bytes(*word));
                    let new = match entry.is_zero() {
                        true if places.is_empty() => L2Entry::UNALLOCATED,
                        true => {
                            let index = zeroes.add(table.users)?;
                            let single = survey.zeroes.references[index] == 1 && table.is_active;
                            L2Entry::data(HostOffset(places[index]), single)
                        }
                        false if table.is_active && self.becomes_copied(entry, alone) => entry.with_copied(true),
                        false => continue,
                    };
                    *word = new.0.to_be_bytes();
                }
                let host = self.take(1).await?;
                self.adjust(host >> geometry.cluster_bits(), table.users as i64 - 1);
                self.adjust(table.host >> geometry.cluster_bits(), -(table.users as i64));
                moved.insert(table.host, host);
                writes.push((host, bytes));
            }
            write_all(&self.image.file, writes).await?;
            self.advance(some.len() as u64)?;
        }
        Ok(moved)
    }

    async fn replace_l1_tables(
        &mut self,
        trees: &[Vec<u64>],
        moved: &BTreeMap<u64, u64>,
        tables: &[Table],
    ) -> Result<()> {
        let single: BTreeSet<u64> = tables.iter().filter(|table| table.users == 1).map(|table| table.host).collect();
        for (number, l1) in trees.iter().enumerate() {
            let host = |raw: &u64| L1Entry(*raw).offset().0;
            if !l1.iter().any(|raw| *raw != 0 && moved.contains_key(&host(raw))) {
                continue;
            }
            let entries = l1.iter().flat_map(|raw| {
                let entry = match moved.get(&host(raw)) {
                    Some(new) => L1Entry::new(HostOffset(*new), number == 0 && single.contains(&host(raw))),
                    None => L1Entry(*raw),
                };
                entry.0.to_be_bytes()
            });
            let bytes: Vec<u8> = entries.collect();
            let old = match number {
                0 => self.new.l1_table_offset,
                _ => self.image.snapshots[number - 1].l1_table_offset,
            };
            self.adjust_range(old, bytes.len() as u64, -1);
            let place = self.place(bytes).await?;
            match number {
                0 => self.new.l1_table_offset = place,
                _ => {
                    self.image.snapshots[number - 1].l1_table_offset = place;
                    self.moves_snapshots = true;
                }
            }
        }
        Ok(())
    }
}
