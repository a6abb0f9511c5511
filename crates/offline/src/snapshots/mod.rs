// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots: taken, applied and deleted while the image is closed, or its open node is drained
//! (`formats/qcow2/internal.rs`).
//!
//! Each operation builds the image's new metadata beside the old: L2 tables whose COPIED flags change, L1 tables, the
//! snapshot table, refcount blocks and table, all in clusters that are free. After a barrier one write within the
//! header's first sector (bytes 24–95) switches to it. So a power cut leaves the image as it was before or as it is
//! afterwards, in version 2 too. Only then the old metadata, free by the new counts, is given back. Where there is no
//! room for all that, counts and flags change in place (`in_place.rs`).

pub(crate) mod free;
mod in_place;
mod plan;
mod publish;
pub(crate) mod tree;

use crate::bitmap_journal;
use crate::check;
use crate::{ProgressFn, read_header};
use cowshed_layout::qcow2::{
    Geometry, Header, Lookup, Parsed, RefcountTableEntry, Snapshot, SnapshotName, find_snapshot as find, limits,
    offset, snapshot,
};
use cowshed_storage::{File, IoBuf};
use cowshed_types::memory::expect_memory;
use cowshed_types::{Errno, Error, ErrorKind, Result};
use free::{FreeClusters, StoredCounts, give_back};
use plan::Change;
use publish::Publication;
pub(crate) use publish::write_all;
use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
pub use tree::read_l1;

/// Memory for counting references by default, in bytes: four for each host cluster. Larger images take several passes.
const MEMORY_BYTES: u64 = 256 << 20;

/// Copies of the L1 and the refcount table that are in memory at once, at most.
const COPIES_OF_TABLES: u64 = 12;

/// The settings of an operation.
#[derive(Clone, Debug)]
pub struct SnapshotOptions {
    /// Memory for reference counts, in bytes.
    pub memory_bytes: u64,
    /// Give the space of freed clusters back to the file system (`pass-discard-snapshot`).
    pub discard: bool,
    /// Instruction count that a new snapshot notes; `u64::MAX` means that none was kept. 0 unless set, as qemu-img does
    /// it.
    pub icount: u64,
    /// A new snapshot notes the time of the day as the clock of the guest, as QEMU's daemon does; else 0, as qemu-img.
    pub notes_clock: bool,
}

impl Default for SnapshotOptions {
    fn default() -> Self {
        SnapshotOptions { memory_bytes: MEMORY_BYTES, discard: true, icount: 0, notes_clock: false }
    }
}

/// Reads the snapshot table.
pub async fn list(file: &File, header: &Header) -> Result<Vec<Snapshot>> {
    if header.nb_snapshots == 0 {
        return Ok(Vec::new());
    }
    let start = header.snapshots_offset;
    let available = file.len().saturating_sub(start).min(limits::SNAPSHOT_TABLE_BYTES);
    let mut len = (u64::from(header.nb_snapshots) * 128).max(4096);
    loop {
        let have = len.min(available);
        let (result, bytes) = file.read_at(IoBuf::try_zeroed(have as usize)?, start).await;
        result?;
        match snapshot::parse_table(&bytes, header.nb_snapshots)? {
            Parsed::Complete { value, .. } => return Ok(value),
            Parsed::Incomplete { need } if have == available => {
                let message = format!("the snapshot table needs {need} bytes, the file has {available} from there on");
                return Err(Error::invalid_image("snapshots_offset", format!("{start:#x}"), message));
            }
            Parsed::Incomplete { need } => len = (need as u64).max(len * 2),
        }
    }
}

/// Takes a snapshot called `name` of the image in `file`, which the caller has locked for writing; its new ID.
pub async fn create(file: &File, name: &[u8], options: &SnapshotOptions, watch: ProgressFn<'_>) -> Result<String> {
    named(file, async {
        let mut image = Image::load(file).await?;
        if image.snapshots.len() >= limits::SNAPSHOTS as usize {
            let message = format!("an image can have {} snapshots at most", limits::SNAPSHOTS);
            return Err(Error::new(ErrorKind::Limit, message).with_errno(Errno::EFBIG));
        }
        bitmap_journal::end(file, &mut image.header).await?;
        let id = next_id(&image.snapshots);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        image.snapshots.push(Snapshot {
            l1_table_offset: 0,
            l1_size: image.header.l1_size,
            date_s: u32::try_from(now.as_secs()).unwrap_or(u32::MAX),
            date_ns: now.subsec_nanos(),
            vm_clock_ns: if options.notes_clock { u64::try_from(now.as_nanos()).unwrap_or(u64::MAX) } else { 0 },
            vm_state_size_32: 0,
            // VM state and disk size in 64 bits, and the instruction count.
            extra_data: [0u64.to_be_bytes(), image.header.size.to_be_bytes(), options.icount.to_be_bytes()].concat(),
            id: id.clone().into_bytes(),
            name: name.to_vec(),
        });
        let l1 = image.l1.clone();
        let change =
            Change { raised: Some(l1.clone()), lowered: None, active: l1.clone(), taken: Some(l1), is_begun: false };
        carry_out(image, change, options, watch).await?;
        Ok(id)
    })
    .await
}

fn not_found(wanted: &[u8]) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no snapshot '{}'", String::from_utf8_lossy(wanted)))
}

/// Gives the disk the data of the snapshot. Data written since, and in no snapshot, is lost.
pub async fn apply(file: &File, wanted: &[u8], options: &SnapshotOptions, watch: ProgressFn<'_>) -> Result<()> {
    named(file, async {
        let mut image = Image::load(file).await?;
        if image.header.bitmaps().is_some_and(|bitmaps| bitmaps.nb_bitmaps > 0) {
            let message = "the image has dirty bitmaps, which would not see the change: remove them first";
            return Err(Error::new(ErrorKind::Busy, message));
        }
        let Some(index) = find(&image.snapshots, wanted, Lookup::IdOrName) else {
            return Err(not_found(wanted));
        };
        let snapshot = &image.snapshots[index];
        let size = snapshot.disk_size_bytes().unwrap_or(image.header.size);
        let needed = image.geometry.l1_entries_needed(size);
        if needed * 8 > limits::L1_BYTES {
            return Err(Error::invalid_image("snapshot_disk_size", size, "the snapshot's disk is too large"));
        }
        let stored = read_l1(file, snapshot, image.header.version, image.header.cluster_bits).await?;
        let mut active = stored.clone();
        active.resize(active.len().max(needed as usize), 0);
        image.header.size = size;
        let change =
            Change { raised: Some(stored), lowered: Some(image.l1.clone()), active, taken: None, is_begun: false };
        carry_out(image, change, options, watch).await
    })
    .await
}

/// Deletes the first snapshot with this name; clusters that only it used are free afterwards.
pub async fn delete(file: &File, name: &[u8], options: &SnapshotOptions, watch: ProgressFn<'_>) -> Result<()> {
    let is_it = |snapshots: &[Snapshot]| find(snapshots, name, Lookup::Name);
    delete_where(file, name, is_it, options, watch).await.map(drop)
}

/// As [`delete`], of the snapshot that `wanted` stands for; returns its entry.
pub async fn delete_one(
    file: &File,
    wanted: &SnapshotName,
    options: &SnapshotOptions,
    watch: ProgressFn<'_>,
) -> Result<Snapshot> {
    delete_where(file, wanted.name.as_bytes(), |snapshots| wanted.find(snapshots), options, watch).await
}

async fn delete_where(
    file: &File,
    wanted: &[u8],
    is_it: impl Fn(&[Snapshot]) -> Option<usize>,
    options: &SnapshotOptions,
    watch: ProgressFn<'_>,
) -> Result<Snapshot> {
    named(file, async {
        let mut image = Image::load(file).await?;
        let Some(index) = is_it(&image.snapshots) else { return Err(not_found(wanted)) };
        let snapshot = image.snapshots.remove(index);
        let stored = read_l1(file, &snapshot, image.header.version, image.header.cluster_bits).await?;
        image.released = Some(snapshot.clone());
        let active = image.l1.clone();
        let change = Change { raised: None, lowered: Some(stored), active, taken: None, is_begun: false };
        carry_out(image, change, options, watch).await?;
        Ok(snapshot)
    })
    .await
}

/// Beside the old metadata, or in place where there is no room for that.
async fn carry_out(image: Image, change: Change, options: &SnapshotOptions, watch: ProgressFn<'_>) -> Result<()> {
    let again = image.clone();
    match Publication::new(image, options, watch).run(change.clone()).await {
        Err(error) if is_no_room(&error) && again.may_change_in_place(&change) => {
            let file = again.file.clone();
            let (left, freed) = Publication::new(again, options, watch).run_in_place(change.clone()).await?;
            if left == 0 {
                return Ok(());
            }
            finish_in_place(&file, change, (left, freed), options, watch).await
        }
        done => done,
    }
}

/// Lowers the counts that `change` has left too high, in the freed room. They are too high still where even that is too
/// little.
async fn finish_in_place(
    file: &File,
    change: Change,
    (left, freed): (u64, Vec<Range<u64>>),
    options: &SnapshotOptions,
    watch: ProgressFn<'_>,
) -> Result<()> {
    let image = Image::load(file).await?;
    let rest = Change { active: image.l1.clone(), is_begun: true, ..change };
    match Publication::new(image, options, watch).run(rest).await {
        Err(error) if is_no_room(&error) => {
            let name = file.name();
            tracing::warn!("{name}: {left} clusters leak for want of space, 'check -r leaks' brings them back");
        }
        done => done?,
    }
    let image = Image::load(file).await?;
    let table = image.refcount_table().await?;
    let mut counts = StoredCounts::new(file.clone(), image.geometry, table.clone());
    let mut free = Vec::new();
    for cluster in freed.into_iter().flatten() {
        if counts.get(cluster).await? == 0 {
            free.push(cluster..cluster + 1);
        }
    }
    give_back(file, image.geometry, &table, &free, options.discard).await
}

/// The file can't take more: a full disk, a quota, or a limit of file sizes.
fn is_no_room(error: &Error) -> bool {
    error.kind() == ErrorKind::NoSpace || error.errno() == Errno::EFBIG
}

async fn named<T>(file: &File, work: impl Future<Output = Result<T>>) -> Result<T> {
    work.await.map_err(|error| error.file(file.name()))
}

/// One more than the largest ID that is a number.
fn next_id(snapshots: &[Snapshot]) -> String {
    let number = |id: &[u8]| std::str::from_utf8(id).ok()?.parse::<u64>().ok();
    let largest = snapshots.iter().filter_map(|snapshot| number(&snapshot.id)).max().unwrap_or(0);
    largest.saturating_add(1).to_string()
}

/// An image at rest, as an operation finds it.
#[derive(Clone)]
pub(crate) struct Image {
    pub file: File,
    pub header: Header,
    pub geometry: Geometry,
    /// The active L1 table on disk.
    pub l1: Vec<u64>,
    /// The snapshots that the image has afterwards.
    pub snapshots: Vec<Snapshot>,
    /// The snapshot that is deleted.
    pub released: Option<Snapshot>,
    /// Bytes of the snapshot table on disk.
    pub old_table_bytes: u64,
}

impl Image {
    async fn load(file: &File) -> Result<Image> {
        let image = Image::load_any(file).await?;
        match image.header.has_data_file() {
            true => Err(Error::unsupported("images with an external data file can't have internal snapshots")),
            false => Ok(image),
        }
    }

    /// Also of an image with a data file. A dirty image is recovered first.
    pub async fn load_any(file: &File) -> Result<Image> {
        if !file.is_writable() {
            return Err(Error::new(ErrorKind::ReadOnly, "the image is open for reading only"));
        }
        let mut header = read_header(file).await?;
        if header.is_dirty() {
            check::recover_dirty(file).await?;
            header = read_header(file).await?;
        }
        if header.is_corrupt() {
            let message = "the image is marked as corrupt: repair it first";
            return Err(Error::invalid_image(
                "incompatible_features",
                format!("{:#x}", header.incompatible_features),
                message,
            )
            .qemu("qcow2: Image is corrupt; cannot be opened read/write"));
        }
        header.require_refcount_table()?;
        header.check_tables_within(file.len())?;
        if header.nb_snapshots > 0 {
            bitmap_journal::end(file, &mut header).await?;
        }
        let snapshots = list(file, &header).await?;
        // An operation keeps several copies of these tables, old and new.
        let table_bytes =
            u64::from(header.l1_size) * 8 + (u64::from(header.refcount_table_clusters) << header.cluster_bits);
        expect_memory(usize::try_from(table_bytes.saturating_mul(COPIES_OF_TABLES)).unwrap_or(usize::MAX))?;
        let old_table_bytes = snapshots.iter().map(|snapshot| snapshot.encoded_len() as u64).sum();
        let l1 = tree::read_numbers(file, header.l1_table_offset, u64::from(header.l1_size)).await?;
        let geometry = header.geometry()?;
        Ok(Image { file: file.clone(), geometry, l1, snapshots, released: None, old_table_bytes, header })
    }

    /// The refcount table on disk.
    pub async fn refcount_table(&self) -> Result<Vec<u64>> {
        let entries = (u64::from(self.header.refcount_table_clusters) << self.header.cluster_bits) / 8;
        tree::read_numbers(&self.file, self.header.refcount_table_offset, entries).await
    }

    /// The snapshot table of the snapshots that the image has afterwards.
    fn snapshot_table(&self) -> Result<Vec<u8>> {
        let mut table = Vec::new();
        for snapshot in &self.snapshots {
            table.extend(snapshot.encode()?);
        }
        if table.len() as u64 > limits::SNAPSHOT_TABLE_BYTES {
            return Err(Error::new(ErrorKind::Limit, "the snapshot table would become too large").value(table.len()));
        }
        Ok(table)
    }

    /// Writes the header's changing fields, durably: their tables are on disk.
    async fn write_header(&self) -> Result<()> {
        let (result, _) =
            self.file.write_at(IoBuf::copy_from(&self.header.encode_changing_fields()), offset::SIZE).await;
        result?;
        self.file.sync().await
    }

    /// After an error: gives back the range by which new metadata had made the file longer. Nothing refers to it.
    pub(crate) async fn cut_back(&self, length: u64) {
        if self.file.len() > length
            && !self.file.is_device()
            && let Err(error) = self.file.set_len(length).await
        {
            tracing::warn!("{error}");
        }
    }

    /// The places for new metadata; a cluster with metadata is not taken for free, whatever its count.
    pub fn free_clusters(&self, refcount_table: &[u64]) -> Result<FreeClusters> {
        let (header, geometry, bits) = (&self.header, self.geometry, self.geometry.cluster_bits());
        let mut metadata = HashSet::from([0]);
        let mut add = |start: u64, len: u64| metadata.extend(start >> bits..(start + len).div_ceil(1 << bits));
        add(header.l1_table_offset, u64::from(header.l1_size) * 8);
        add(header.refcount_table_offset, u64::from(header.refcount_table_clusters) << bits);
        add(header.snapshots_offset, self.old_table_bytes);
        for snapshot in self.snapshots.iter().chain(&self.released).filter(|snapshot| snapshot.l1_table_offset != 0) {
            add(snapshot.l1_table_offset, u64::from(snapshot.l1_size) * 8);
        }
        for raw in refcount_table {
            if let Some(host) = RefcountTableEntry(*raw).block(geometry)? {
                add(host.0, 1);
            }
        }
        for (_, host) in tree::tables(&self.l1, geometry, self.file.len())? {
            add(host, 1);
        }
        Ok(FreeClusters::new(self.file.clone(), geometry, refcount_table.to_vec(), metadata))
    }
}
