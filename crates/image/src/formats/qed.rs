// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QED, for reading: docs/formats/block-formats.md.

use super::blocks::{BACKING_KEY, BlockFormat, FILE_KEY, ImageFile, Survey, Table, finish};
use super::mapped::{Description, MappedCheck, Place};
use crate::open::{Draft, DriverLine, NamedBacking, Opened, Opener};
use crate::options::{DriverKind, DriverSchema};
use cowshed_block::memory::try_push;
use cowshed_block::{Error, Result};
use cowshed_layout::qed::{HEADER_BYTES, QedCluster, QedHeader};
use std::rc::Rc;

const SCHEMA: DriverSchema = DriverSchema {
    name: "qed",
    kind: DriverKind::Format,
    about: "QEMU's enhanced disk format, for reading",
    keys: &[FILE_KEY, BACKING_KEY],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Qed {
    header: QedHeader,
    l1: Table,
    backing_name: Option<String>,
}

/// Opens a QED image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft, "QED").await?;
    let qed = load(&file).await.map_err(|error| file.named(error))?;
    let format = qed.backing_format().map(str::to_owned);
    let backing = NamedBacking { name: qed.backing_name.clone(), format };
    finish(opener, draft, file, qed, backing).await
}

async fn load(file: &ImageFile) -> Result<Qed> {
    let header = QedHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    let l1 = Table { field: "l1_table_offset", offset: header.l1_offset, bytes: header.table_bytes };
    file.check_table(&l1)?;
    let backing_name = match header.backing_name {
        Some(place) => Some(file.name("backing_filename_offset", place).await?).filter(|name| !name.is_empty()),
        None => None,
    };
    Ok(Qed { header, l1, backing_name })
}

impl Qed {
    fn backing_format(&self) -> Option<&'static str> {
        self.header.backing_is_raw.then_some("raw")
    }

    /// A place in the file that an entry of a table names.
    fn aligned(&self, field: &'static str, offset: u64) -> Result<u64> {
        if offset.is_multiple_of(self.header.cluster_bytes) && offset >= self.header.cluster_bytes {
            return Ok(offset);
        }
        let message = "an offset is no multiple of the cluster size";
        Err(Error::invalid_image(field, format!("{offset:#x}"), message))
    }

    /// The L2 table for byte `at` of the disk.
    async fn l2(&self, file: &ImageFile, at: u64) -> Result<Option<Table>> {
        let entry = u64::from_le_bytes(file.entry(self.l1, at / self.header.l2_span_bytes()).await?);
        if entry == 0 {
            return Ok(None);
        }
        let offset = self.aligned("L1 table entry", entry)?;
        Ok(Some(Table { field: "L1 table entry", offset, bytes: self.header.table_bytes }))
    }
}

impl BlockFormat for Qed {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.header.size
    }

    fn describe(&self) -> Description {
        Description {
            cluster_bytes: Some(self.header.cluster_bytes),
            backing_name: self.backing_name.clone(),
            backing_format: self.backing_format(),
            ..Description::default()
        }
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(Place, u64)> {
        let (cluster_bytes, span) = (self.header.cluster_bytes, self.header.l2_span_bytes());
        let Some(l2) = self.l2(file, at).await? else {
            return Ok((Place::Unallocated, len.min(span - at % span)));
        };
        let skip = at % cluster_bytes;
        let index = at % span / cluster_bytes;
        let entry = u64::from_le_bytes(file.entry(l2, index).await?);
        match QedCluster::of(entry) {
            empty @ (QedCluster::Unallocated | QedCluster::Zero) => {
                let place = if empty == QedCluster::Zero { Place::Zero } else { Place::Unallocated };
                Ok((place, file.same::<8>(l2, index, (at, len, cluster_bytes)).await?))
            }
            QedCluster::At(offset) => {
                let len = len.min(cluster_bytes - skip);
                let start = self.aligned("L2 table entry", offset)?;
                file.check_data("L2 table entry", start, skip + len, at)?;
                Ok((Place::Data { file: 0, host: start + skip }, len))
            }
        }
    }

    async fn check(&self, file: &ImageFile, max: usize) -> Result<Option<MappedCheck>> {
        let cluster_bytes = self.header.cluster_bytes;
        let mut survey = Survey::of(self, file, cluster_bytes, max).await?;
        survey.check.counters.total_clusters = self.header.size.div_ceil(cluster_bytes);
        survey.check.counters.image_end_offset = 0;
        if !survey.check.findings.is_empty() {
            return Ok(Some(survey.check));
        }
        let tables = self.header.size.div_ceil(self.header.l2_span_bytes());
        let table_clusters = self.header.table_bytes / cluster_bytes;
        let starts = std::iter::once(self.l1.offset);
        let mut starts: Vec<u64> = starts.collect();
        for index in 0..tables {
            if let Some(table) = self.l2(file, index * self.header.l2_span_bytes()).await? {
                try_push(&mut starts, table.offset)?;
            }
        }
        for start in starts {
            for cluster in 0..table_clusters {
                let offset = start + cluster * cluster_bytes;
                survey.claim(offset, cluster_bytes, || format!("table at offset {start:#x}"))?;
            }
        }
        // What the header is said to take is before the L1 table, and no table or data are there.
        let first = self.header.header_clusters;
        let there = file.len() / cluster_bytes;
        survey.check.counters.leaks = there.saturating_sub(first).saturating_sub(survey.used());
        Ok(Some(survey.check))
    }
}
