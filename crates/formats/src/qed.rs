// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QED: docs/formats/block-formats.md.

mod check;

use super::blocks::{BACKING_KEY, BlockFormat, FILE_KEY, FileTable, ImageFile, MissingTable, finish};
use super::mapped::RunSource;
use super::units::{Units, check_metadata};
use cowshed_graph::node::{Description, MappedCheck};
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener};
use cowshed_graph::options::{DriverKind, DriverSchema};
use cowshed_layout::qed::{
    AUTOCLEAR_FEATURES_AT, ENTRY_BYTES, FEATURES_AT, FIRST_BYTES, HEADER_BYTES, QedCluster, QedHeader, SIZE_AT,
};
use cowshed_storage::{File, IoBuf};
use cowshed_types::memory::try_push;
use cowshed_types::{Error, Repair, Result, name_of_text, slip};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

const SCHEMA: DriverSchema = DriverSchema {
    name: "qed",
    kind: DriverKind::Format,
    about: "QEMU's enhanced disk format",
    keys: &[FILE_KEY, BACKING_KEY],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Qed {
    header: QedHeader,
    l1: FileTable,
    backing: Mutex<BackingFile>,
    /// Size of the disk in bytes.
    size: AtomicU64,
    /// The header's flag that the image needs a check.
    needs_check: AtomicBool,
}

/// The backing file as the header names it.
#[derive(Clone)]
struct BackingFile {
    name: Option<String>,
    is_raw: bool,
    /// Offset and length in the file.
    place: Option<(u64, u32)>,
}

/// Opens a QED image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft).await?;
    let qed = load(&file).await.map_err(|error| file.named(error))?;
    let named = qed.backing();
    let backing = BackingReference { format: named.format().map(str::to_owned), name: named.name };
    finish(opener, draft, file, qed, backing).await
}

async fn load(file: &ImageFile) -> Result<Qed> {
    let header = QedHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    let l1 = FileTable { field: "l1_table_offset", offset: header.l1_offset, bytes: header.table_bytes };
    file.check_table(&l1)?;
    let backing_name = match header.backing_name {
        Some(place) => Some(file.name("backing_filename_offset", place).await?).filter(|name| !name.is_empty()),
        None => None,
    };
    let (size, needs_check) = (AtomicU64::new(header.size), AtomicBool::new(header.needs_check));
    let backing = BackingFile { name: backing_name, is_raw: header.backing_is_raw, place: header.backing_name };
    Ok(Qed { header, l1, backing: Mutex::new(backing), size, needs_check })
}

impl BackingFile {
    fn format(&self) -> Option<&'static str> {
        self.is_raw.then_some("raw")
    }
}

impl Qed {
    /// Size of the disk in bytes.
    fn size_now(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    fn backing(&self) -> BackingFile {
        self.backing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The header as it is now. The backing file, the mark of a check and the size can change.
    fn header_now(&self) -> QedHeader {
        let backing = self.backing();
        QedHeader { backing_name: backing.place, backing_is_raw: backing.is_raw, ..self.header.clone() }
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
    async fn l2(&self, file: &ImageFile, at: u64) -> Result<Option<FileTable>> {
        let entry = u64::from_le_bytes(file.entry(self.l1, at / self.header.l2_span_bytes()).await?);
        if entry == 0 {
            return Ok(None);
        }
        let offset = self.aligned("L1 table entry", entry)?;
        Ok(Some(FileTable { field: "L1 table entry", offset, bytes: self.header.table_bytes }))
    }

    /// The next entry of the L1 table from `index` on that isn't 0, also behind the disk's end: its number and its value.
    async fn next_table(&self, image: &ImageFile, mut index: u64) -> Result<Option<(u64, u64)>> {
        let count = self.header.table_entries();
        while index < count {
            let entry = u64::from_le_bytes(image.entry(self.l1, index).await?);
            if entry != 0 {
                return Ok(Some((index, entry)));
            }
            index += image.same::<8>(self.l1, index, (0, count - index, 1)).await?;
        }
        Ok(None)
    }

    /// Writes to the header that no check is needed.
    async fn mark_clean(&self, file: &File) -> Result<()> {
        if self.needs_check.load(Ordering::Relaxed) {
            file.write_at(IoBuf::copy_from(&self.header_now().clean_features()), FEATURES_AT).await.0?;
            file.sync().await?;
            self.needs_check.store(false, Ordering::Relaxed);
        }
        Ok(())
    }
}

async fn read_header(file: &File) -> Result<IoBuf> {
    let (result, header) = file.read_at(IoBuf::zeroed(HEADER_BYTES), 0).await;
    result.map(|()| header)
}

impl BlockFormat for Qed {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.size_now()
    }

    fn described_bytes(&self) -> u64 {
        self.header.largest_size()
    }

    fn set_size(&self, size: u64) -> Result<()> {
        if !size.is_multiple_of(512) || size > self.header.largest_size() {
            return Err(Error::invalid_argument("Invalid image size specified").field("size").value(size));
        }
        self.size.store(size, Ordering::Relaxed);
        Ok(())
    }

    async fn write_size(&self, file: &File) -> Result<()> {
        file.write_at(IoBuf::copy_from(&self.size().to_le_bytes()), SIZE_AT).await.0?;
        file.sync().await
    }

    const LINKS_BACKING: bool = true;

    const RENAMES_BACKING: bool = true;

    async fn rename_backing(&self, file: &File, name: Option<&str>, format: Option<&str>) -> Result<()> {
        let bytes = name.map(name_of_text);
        let is_raw = bytes.is_some() && format == Some("raw");
        let (result, first) = file.read_at(IoBuf::zeroed(FIRST_BYTES), 0).await;
        result?;
        let stages = self.header_now().rename(&first, bytes.as_deref().map(|name| (name, is_raw)))?;
        for (index, stage) in stages.into_iter().enumerate() {
            if index > 0 && !slip!("qed_name_led_to_before_it_is_durable") {
                file.sync().await?;
            }
            for (offset, bytes) in stage {
                file.write_at(IoBuf::copy_from(&bytes), offset).await.0?;
            }
        }
        file.sync().await?;
        let place = QedHeader::parse(&read_header(file).await?)?.backing_name;
        *self.backing.lock().unwrap_or_else(PoisonError::into_inner) =
            BackingFile { name: name.map(str::to_owned), is_raw, place };
        Ok(())
    }

    fn describe(&self) -> Description {
        let backing = self.backing();
        Description {
            in_sectors: true,
            zeroes_in_clusters: true,
            bounds_zeroes: true,
            cluster_bytes: Some(self.header.cluster_bytes),
            backing_format: backing.format(),
            backing_name: backing.name,
            ..Description::default()
        }
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let (cluster_bytes, span) = (self.header.cluster_bytes, self.header.l2_span_bytes());
        let Some(l2) = self.l2(file, at).await? else {
            return Ok((RunSource::Unallocated, file.same::<8>(self.l1, at / span, (at, len, span)).await?));
        };
        let skip = at % cluster_bytes;
        let index = at % span / cluster_bytes;
        let entry = u64::from_le_bytes(file.entry(l2, index).await?);
        match QedCluster::of(entry) {
            empty @ (QedCluster::Unallocated | QedCluster::Zero) => {
                let place = if empty == QedCluster::Zero { RunSource::Zero } else { RunSource::Unallocated };
                if empty == QedCluster::Zero {
                    return Ok((place, file.same::<8>(l2, index, (at, len, cluster_bytes)).await?));
                }
                let to_table = |entry| Some(u64::from_le_bytes(entry)).filter(|at| at.is_multiple_of(cluster_bytes));
                let slots = ((self.l1, at / span), (l2, index));
                Ok((place, file.unallocated(slots.0, slots.1, (at, len, cluster_bytes), to_table).await?))
            }
            QedCluster::At(offset) => {
                let len = len.min(cluster_bytes - skip);
                let start = self.aligned("L2 table entry", offset)?;
                file.check_data("L2 table entry", start, skip + len, at)?;
                Ok((RunSource::Data { file: 0, host: start + skip }, len))
            }
        }
    }

    async fn run(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let (place, first) = self.place(file, at, len).await?;
        let cluster_bytes = self.header.cluster_bytes;
        match (place, self.l2(file, at).await?) {
            (RunSource::Data { host, .. }, Some(l2)) if at.is_multiple_of(cluster_bytes) => {
                let of = |entry| match QedCluster::of(u64::from_le_bytes(entry)) {
                    QedCluster::At(offset) => Some(offset),
                    _ => None,
                };
                let index = at % self.header.l2_span_bytes() / cluster_bytes;
                let range = (host, cluster_bytes, len.div_ceil(cluster_bytes));
                let blocks = file.blocks_in_a_row(l2, index, range, of).await?;
                Ok((place, (blocks * cluster_bytes).min(len)))
            }
            _ => Ok((place, first)),
        }
    }

    async fn check(&self, file: &ImageFile, max: usize) -> Result<Option<MappedCheck>> {
        self.survey(file, max).await.map(Some)
    }

    /// As QEMU's: entries that lead nowhere are cleared, leaks stay.
    async fn repair(&self, file: &ImageFile, _what: Repair, max: usize) -> Result<Option<MappedCheck>> {
        let cleared = self.clear_entries(file).await?;
        let check = self.check(file, max).await?;
        Ok(match check {
            Some(mut check) => {
                if check.counters.corruptions == 0 {
                    self.mark_clean(&file.storage()).await?;
                }
                check.counters.corruptions_fixed = cleared;
                Some(check)
            }
            None => None,
        })
    }

    /// An image that was not closed is repaired first, as in QEMU. Features that others may have left are void now.
    async fn before_writing(&self, file: &ImageFile) -> Result<()> {
        let storage = file.storage();
        if self.needs_check.load(Ordering::Relaxed) {
            self.clear_entries(file).await?;
            let check = self.check(file, 1).await?;
            if let Some(finding) = check.and_then(|check| check.findings.into_iter().next()) {
                let message = format!("the image needs a check, and can't be repaired: {finding}");
                return Err(Error::invalid_image("features", FEATURES_AT, message));
            }
            self.mark_clean(&storage).await?;
        }
        let (result, features) = storage.read_at(IoBuf::zeroed(8), AUTOCLEAR_FEATURES_AT).await;
        result?;
        if features.iter().any(|byte| *byte != 0) {
            storage.write_at(IoBuf::zeroed(8), AUTOCLEAR_FEATURES_AT).await.0?;
            storage.sync().await?;
        }
        Ok(())
    }

    fn units(&self) -> Option<Units> {
        let (block_bytes, head, tail) = (self.header.cluster_bytes, Vec::new(), Vec::new());
        Some(Units { file: 0, block_bytes, head, first: 0, grid: block_bytes, tail, is_at_end: true })
    }

    async fn occupied(&self, file: &ImageFile) -> Result<Vec<(u64, u64)>> {
        let mut parts = vec![(0, self.header.header_clusters * self.header.cluster_bytes)];
        try_push(&mut parts, (self.l1.offset, self.l1.offset + self.l1.bytes))?;
        let mut from = 0;
        while let Some((index, entry)) = self.next_table(file, from).await? {
            from = index + 1;
            let offset = self.aligned("L1 table entry", entry)?;
            file.check_table(&FileTable { field: "L1 table entry", offset, bytes: self.header.table_bytes })?;
            try_push(&mut parts, (offset, offset + self.header.table_bytes))?;
        }
        check_metadata(&mut parts, "L1 table entry")?;
        Ok(parts)
    }

    async fn slot(&self, file: &ImageFile, block: u64) -> Result<(FileTable, u64)> {
        let at = block * self.header.cluster_bytes;
        let table = self.l2(file, at).await?.ok_or_else(|| Error::internal("an L2 table is missing").offset(at))?;
        Ok((table, block % self.header.table_entries()))
    }

    async fn missing_table(&self, file: &ImageFile, block: u64) -> Result<Option<MissingTable>> {
        let at = block * self.header.cluster_bytes;
        if self.l2(file, at).await?.is_some() {
            return Ok(None);
        }
        let entry_offset = self.l1.offset + at / self.header.l2_span_bytes() * ENTRY_BYTES;
        let (bytes, blocks) = (self.header.table_bytes, self.header.table_entries());
        Ok(Some(MissingTable { entry_offset, field: "L1 table entry", bytes, blocks }))
    }

    fn entry_bytes(&self) -> u64 {
        ENTRY_BYTES
    }

    fn entry(&self, host: u64) -> Result<Vec<u8>> {
        Ok(host.to_le_bytes().to_vec())
    }

    fn table_entry(&self, host: u64) -> Result<Vec<u8>> {
        Ok(host.to_le_bytes().to_vec())
    }

    fn zero_entry(&self) -> Option<Vec<u8>> {
        Some(1u64.to_le_bytes().to_vec())
    }
}
