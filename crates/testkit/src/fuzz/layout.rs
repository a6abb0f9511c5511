// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry points of the parsers in `cowshed-layout`: they take any bytes and panic only on a bug. The fuzz targets call
//! them, and so do the tests that replay the corpus on a stable compiler.

use super::replay::Entry;
use cowshed_codec::{unpack_adc, unpack_bzip2, unpack_lzfse, unpack_xz};
use cowshed_layout::bochs::BochsHeader;
use cowshed_layout::bytes::{array_at, be32_at, be64_at, be64_entries, le32_at, le64_at};
use cowshed_layout::cloop::CloopHeader;
use cowshed_layout::crc32c::crc32;
use cowshed_layout::dmg::{DmgPacking, DmgTrailer};
use cowshed_layout::luks::LuksHeader;
use cowshed_layout::probe::{FormatName, probe};
use cowshed_layout::qcow2::{
    BitmapTableEntry, BitmapsExtension, Cluster, CompressedDescriptor, Header, L1Entry, L2Entry, L2Format, Parsed,
    RefcountTableEntry, SubclusterBitmap, bitmap, peek_cluster_bits, refcount, snapshot,
};

use cowshed_layout::parallels::ParallelsHeader;
use cowshed_layout::parents;
use cowshed_layout::partitions::{ScanStep, Search};
use cowshed_layout::qcow::{QcowCluster, QcowHeader};
use cowshed_layout::qed::QedHeader;
use cowshed_layout::vdi::{VdiBlock, VdiHeader};
use cowshed_layout::vhdx::{
    self, MetadataItem, MetadataTable, VhdxBlock, VhdxDisk, VhdxHeader, VhdxParent, VhdxRegions,
};
use cowshed_layout::vmdk::{
    CompressedGrain, Descriptor, Grain, SeSparseHeader, SparseHeader, limits, sectors_to_bytes,
};
use cowshed_layout::vpc::{MAX_LOCATOR_BYTES, VpcDynamicHeader, VpcFooter, VpcKind, VpcParent};

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[
    ("header", header),
    ("image_walk", image_walk),
    ("snapshot_table", snapshot_table),
    ("bitmap_directory", bitmap_directory),
    ("table_entries", table_entries),
    ("probe", probe_format),
    ("vmdk", vmdk_file),
    ("luks", luks_header),
    ("block_formats", block_formats),
    ("partitions", partitions),
];

/// The first bytes of a file as a header: an accepted one can be written again, with the same meaning.
pub fn header(data: &[u8]) {
    if let Ok(need) = Header::bytes_needed(data) {
        assert!(need <= 2 << 20);
    }
    let Ok(header) = Header::parse(data) else { return };
    assert_eq!(peek_cluster_bits(data).unwrap(), header.cluster_bits);
    header.validate().unwrap();
    let _ = header.check_tables_within(data.len() as u64);
    // Writing may need a few bytes more than the file had (the end mark), so it may not fit.
    let Ok(encoded) = header.encode() else { return };
    let again = Header::parse(&encoded).unwrap();
    assert_eq!(again, Header { backing_file_offset: again.backing_file_offset, ..header });
    assert_eq!(Header::bytes_needed(&encoded).unwrap(), encoded.len());
}

/// A disk with a partition table, behind the number of a partition: found and read ranges are inside of the disk. The
/// checksum of a GPT header is made right first.
pub fn partitions(data: &[u8]) {
    const HEADER: usize = 512;
    /// No search needs as many steps.
    const MOST_STEPS: usize = 1000;
    let Some((number, disk)) = data.split_first() else { return };
    let mut disk = disk.to_vec();
    if disk.get(HEADER..HEADER + 8).is_some_and(|mark| mark == b"EFI PART") {
        let len = le32_at(&disk, HEADER + 12).map_or(0, |len| len as usize);
        if let Some(header) = disk.get_mut(HEADER..HEADER.saturating_add(len)).filter(|header| header.len() >= 20) {
            header[16..20].fill(0);
            let sum = crc32(&[header]);
            header[16..20].copy_from_slice(&sum.to_le_bytes());
        }
    }
    let len = disk.len() as u64;
    let Ok(mut search) = Search::new((*number).into(), len) else { return };
    for _ in 0..MOST_STEPS {
        match search.step() {
            ScanStep::Found(range) => return assert!(range.start < range.end && range.end <= len),
            ScanStep::Read(range) => {
                assert!(range.end <= len);
                if search.take(&disk[range.start as usize..range.end as usize]).is_err() {
                    return;
                }
            }
        }
    }
    panic!("the search doesn't end");
}

/// The header of a LUKS volume: an accepted one can be written again, with the same meaning.
pub fn luks_header(data: &[u8]) {
    let Ok(header) = LuksHeader::parse(data) else { return };
    let _ = (header.mode_parts(), header.cipher_with_width());
    let encoded = header.encode();
    let again = LuksHeader::parse(&encoded).unwrap();
    // Texts that fill their field lose the byte of the NUL, and bytes that are no UTF-8 grow.
    assert_eq!(again.slots, header.slots);
    assert_eq!((again.key_bytes, again.payload_offset), (header.key_bytes, header.payload_offset));
    assert_eq!(LuksHeader::parse(&again.encode()).unwrap().slots, again.slots);
}

/// A whole image: every table that the header leads to, as a check or an open would read them.
pub fn image_walk(data: &[u8]) {
    let Ok(header) = Header::parse(data) else { return };
    let Ok(format) = L2Format::of(&header) else { return };
    if header.check_tables_within(data.len() as u64).is_err() {
        return;
    }
    let cluster_size = header.cluster_size() as usize;
    let region = |start: u64, len: usize| {
        let rest = data.get(usize::try_from(start).ok()?..)?;
        Some(&rest[..rest.len().min(len)])
    };
    for raw in be64_entries(region(header.l1_table_offset, header.l1_size as usize * 8).unwrap_or_default()) {
        let Ok(Some(table)) = L1Entry(raw).table(format.geometry) else { continue };
        l2_table(region(table.0, cluster_size).unwrap_or_default(), format);
    }
    let table_len = header.refcount_table_clusters as usize * cluster_size;
    let mut sum = 0u64;
    for raw in be64_entries(region(header.refcount_table_offset, table_len).unwrap_or_default()) {
        let Ok(Some(block)) = RefcountTableEntry(raw).block(format.geometry) else { continue };
        let block = region(block.0, cluster_size).unwrap_or_default();
        for index in 0..refcount::entries(block.len(), header.refcount_order) {
            sum = sum.wrapping_add(refcount::get(block, header.refcount_order, index));
        }
    }
    std::hint::black_box(sum);
    let snapshots = region(header.snapshots_offset, data.len()).unwrap_or_default();
    if let Ok(Parsed::Complete { value, .. }) = snapshot::parse_table(snapshots, header.nb_snapshots) {
        for snapshot in value {
            let _ = snapshot.validate(header.version, header.cluster_bits);
        }
    }
    if let Some(extension) = header.bitmaps() {
        let directory = region(extension.directory_offset, data.len()).unwrap_or_default();
        for entry in bitmap::parse_directory(directory, extension).unwrap_or_default() {
            let _ = entry.validate(header.size, header.cluster_bits);
        }
    }
}

fn l2_table(table: &[u8], format: L2Format) {
    let words: Vec<u64> = be64_entries(table).collect();
    for entry in words.chunks_exact(format.geometry.l2_entry_size() as usize / 8) {
        match L2Entry(entry[0]).cluster(format) {
            Ok(Cluster::Compressed(descriptor)) => {
                assert!(descriptor.len_max() >= 1 && descriptor.len_max() <= 2 * format.geometry.cluster_size());
                assert!(descriptor.end().is_some());
            }
            Ok(Cluster::Data { host }) => assert!(host.is_aligned(format.geometry.cluster_bits())),
            Ok(_) | Err(_) => {}
        }
        if let [_, bitmap] = entry {
            let mut index = 0;
            while index < 32 {
                index += SubclusterBitmap(*bitmap).run(index).1;
            }
            assert_eq!(index, 32);
        }
    }
}

/// 4 bytes of count, then a snapshot table.
pub fn snapshot_table(data: &[u8]) {
    let Some(count) = be32_at(data, 0) else { return };
    let table = &data[4..];
    match snapshot::parse_table(table, count) {
        Ok(Parsed::Complete { value, len }) => {
            assert_eq!(value.len(), count as usize);
            let encoded: Vec<u8> = value.iter().flat_map(|snapshot| snapshot.encode().unwrap()).collect();
            assert_eq!(encoded.len(), len);
            assert_eq!(snapshot::parse_table(&encoded, count).unwrap(), Parsed::Complete { value, len });
        }
        Ok(Parsed::Incomplete { need }) => assert!(need > table.len()),
        Err(_) => {}
    }
}

/// 4 bytes of count, 8 of size, then a bitmap directory.
pub fn bitmap_directory(data: &[u8]) {
    let (Some(nb_bitmaps), Some(directory_size)) = (be32_at(data, 0), be64_at(data, 4)) else { return };
    let extension = BitmapsExtension { nb_bitmaps, reserved: 0, directory_size, directory_offset: 0x10000 };
    let Ok(entries) = bitmap::parse_directory(&data[12..], &extension) else { return };
    let mut encoded = Vec::new();
    for entry in &entries {
        let _ = (entry.validate(1 << 30, 16), entry.validate(u64::MAX, 9));
        encoded.extend(entry.encode().unwrap());
    }
    assert_eq!(encoded.len() as u64, directory_size);
    assert_eq!(bitmap::parse_directory(&encoded, &extension).unwrap(), entries);
}

/// 2 bytes of settings, then entries of any table.
pub fn table_entries(data: &[u8]) {
    let [bits, flags, table @ ..] = data else { return };
    let cluster_bits = 9 + u32::from(bits % 13);
    for raw in be64_entries(table) {
        let _ = BitmapTableEntry(raw).cluster(cluster_bits);
        if let Some(descriptor) = L2Entry(raw).compressed_descriptor(cluster_bits) {
            assert!(descriptor.sectors <= CompressedDescriptor::max_sectors(cluster_bits));
            if let Some(entry) = L2Entry::compressed(descriptor, cluster_bits) {
                assert_eq!(entry, L2Entry(raw).with_copied(false));
            }
        }
        for (extended, data_file) in [(false, false), (true, false), (false, true), (true, true)] {
            let Ok(geometry) = cowshed_layout::qcow2::Geometry::new(cluster_bits, 4, extended) else { continue };
            let format = L2Format { geometry, version: 2 + u32::from(flags & 1), data_file };
            let _ = (L2Entry(raw).cluster(format), L1Entry(raw).table(geometry));
            let _ = RefcountTableEntry(raw).block(geometry);
        }
    }
}

/// A VMDK file: a descriptor, or an extent whose tables are walked as the driver does.
pub fn vmdk_file(data: &[u8]) {
    if let Ok(descriptor) = Descriptor::parse(data) {
        assert!(descriptor.extents.len() <= limits::EXTENTS && !descriptor.create_type.is_empty());
        if let Ok(sectors) = descriptor.total_sectors() {
            assert!(sectors_to_bytes(sectors).is_some());
        }
        for extent in &descriptor.extents {
            assert!(extent.name.len() <= limits::NAME_BYTES);
            assert!(
                extent.offset_sectors.checked_add(extent.sectors).is_some_and(|end| sectors_to_bytes(end).is_some())
            );
        }
    }
    if let Ok(header) = SeSparseHeader::parse(data) {
        se_sparse_extent(data, &header);
    }
    let Ok(header) = SparseHeader::parse(data) else { return };
    assert!(header.directory_bytes() <= 64 << 20 && header.grain_bytes() <= 32 << 20);
    if let Some((start, sectors)) = header.descriptor {
        let from = usize::try_from(start * 512).unwrap_or(usize::MAX);
        let to = from.saturating_add(usize::try_from(sectors.saturating_mul(512)).unwrap_or(usize::MAX));
        let _ = data.get(from..to.min(data.len())).map(Descriptor::parse);
    }
    let directory = header.directory_sector.and_then(sectors_to_bytes).unwrap_or(u64::MAX);
    for index in 0..header.directory_entries().min(64) {
        let entry = usize::try_from(directory.saturating_add(index * 4)).ok().and_then(|at| le32_at(data, at));
        let Some(sector) = entry else { break };
        for slot in 0..header.table_entries as usize {
            let at = sector as usize * 512 + slot * 4;
            let Some(Grain::At(sector)) = le32_at(data, at).map(|entry| header.grain(entry)) else { continue };
            let _ = data.get(sector as usize * 512..).and_then(CompressedGrain::parse);
        }
    }
}

/// The tables of a seSparse extent: places fit in 64 bits whatever the entries are.
fn se_sparse_extent(data: &[u8], header: &SeSparseHeader) {
    let sector = |sector: u64| usize::try_from(sectors_to_bytes(sector)?).ok();
    let volatile = sector(header.volatile_sector).and_then(|at| data.get(at..at.saturating_add(512).min(data.len())));
    let _ = volatile.map(SeSparseHeader::check_volatile);
    if header.check_places().is_err() {
        return;
    }
    assert!(header.directory_bytes() <= 256 << 20);
    let directory = sector(header.directory_sector).and_then(|at| data.get(at..)).unwrap_or_default();
    for index in 0..(header.directory_bytes() / 8).min(64) as usize {
        let Some(entry) = le64_at(directory, index * 8) else { break };
        let Ok(Some(table)) = header.table(entry) else { continue };
        assert!(i64::try_from(table).is_ok());
        let table = usize::try_from(table).ok().and_then(|at| data.get(at..)).unwrap_or_default();
        for slot in 0..header.table_entries() as usize {
            let Some(grain) = header.grain_at(table, slot) else { break };
            if let Ok(Grain::At(sector)) = grain {
                assert!(sectors_to_bytes(sector).is_some());
            }
        }
    }
}

/// Headers of the formats that keep a disk in blocks: whatever is accepted has places that fit in 64 bits. Checksums, which
/// no fuzzer guesses, are left aside.
pub fn block_formats(data: &[u8]) {
    const LARGEST: u64 = i64::MAX as u64;
    let words = data.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    if let Ok(vdi) = VdiHeader::parse(data) {
        assert!(vdi.size <= LARGEST && u64::from(vdi.blocks) * vdi.block_bytes >= vdi.size);
        for entry in words.clone() {
            let VdiBlock::At(number) = VdiBlock::of(entry as u32) else { continue };
            assert!(vdi.data_offset + u64::from(number) * vdi.block_bytes >= vdi.map_offset + vdi.map_bytes());
        }
    }
    if let Ok(vpc) = VpcFooter::parse_unverified(data) {
        assert!(vpc.size <= LARGEST);
        let header = match vpc.kind {
            VpcKind::Dynamic(at) | VpcKind::Differencing(at) => {
                usize::try_from(at).ok().and_then(|at| data.get(at..)).unwrap_or_default()
            }
            VpcKind::Fixed => data,
        };
        if let Ok(dynamic) = VpcDynamicHeader::parse_unverified(header, vpc.size) {
            assert!(dynamic.table_offset.checked_add(dynamic.table_bytes()).is_some());
            assert!(words.clone().all(|entry| dynamic.block(entry as u32).is_none_or(|host| host <= LARGEST)));
        }
        if let Ok(parent) = VpcParent::parse(header) {
            assert!(parent.relative.is_none_or(|(_, len)| len <= MAX_LOCATOR_BYTES));
            let text = parent.relative.and_then(|(at, len)| {
                let at = usize::try_from(at).ok()?;
                data.get(at..at.checked_add(usize::try_from(len).ok()?)?)
            });
            let name = text.and_then(|text| parents::beside(Some(&parents::utf16(text, false)), &[]));
            assert!(name.is_none_or(|name| !name.starts_with('/') && !name.contains(['\\', ':', '\0'])));
        }
        let _ = VpcFooter::parse(data);
    }
    if let Ok(qcow) = QcowHeader::parse(data) {
        assert!(qcow.l1_offset.checked_add(qcow.l1_bytes()).is_some() && qcow.l2_bytes() <= 64 << 10);
        for entry in words.clone() {
            let QcowCluster::Compressed { host, len } = qcow.cluster(entry) else { continue };
            assert!(len < qcow.cluster_bytes() && host.checked_add(len).is_some());
        }
    }
    if let Ok(qed) = QedHeader::parse(data) {
        assert!(qed.size <= LARGEST && qed.table_bytes <= 1 << 30 && qed.table_entries() >= 512);
        assert!(qed.size.div_ceil(qed.l2_span_bytes()) <= qed.table_entries());
    }
    if let Ok(parallels) = ParallelsHeader::parse(data) {
        assert!(parallels.size <= LARGEST && parallels.data_offset >= 64 + parallels.table_bytes());
        assert!(words.clone().all(|entry| parallels.cluster(entry as u32).is_none_or(|host| host <= LARGEST)));
    }
    vhdx_pieces(data);
    vhdx_log(data);
    packed_formats(data);
}

/// Entries of a log from the first byte on. Their checksums are made right.
fn vhdx_log(data: &[u8]) {
    let sectors = data.len() / vhdx::LOG_SECTOR_BYTES;
    let mut log = data[..sectors * vhdx::LOG_SECTOR_BYTES].to_vec();
    let Some(guid) = array_at::<16>(&log, 32).filter(|_| log.starts_with(b"loge")) else { return };
    for at in (0..log.len()).step_by(vhdx::LOG_SECTOR_BYTES) {
        let len = le32_at(&log, at + 8).map_or(0, |len| len as usize);
        let entry = log.get_mut(at..at.saturating_add(len)).filter(|entry| entry.starts_with(b"loge") && len >= 8);
        if let Some(entry) = entry {
            let sum = vhdx::checksum(entry);
            entry[4..8].copy_from_slice(&sum.to_le_bytes());
        }
    }
    if let Ok(Some(replay)) = vhdx::replay_of(&log, vhdx::Guid::of(guid), 1 << 20) {
        assert!(replay.writes.iter().all(|write| write.range().end <= i64::MAX as u64));
    }
}

/// Formats that are only read.
fn packed_formats(data: &[u8]) {
    const LARGEST: u64 = i64::MAX as u64;
    if let Ok(bochs) = BochsHeader::parse(data) {
        assert!(bochs.size <= u64::from(bochs.catalog_entries) * bochs.extent_bytes);
        assert!(bochs.bitmap_bytes * 8 * 512 >= bochs.extent_bytes);
        let words = data.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        assert!(words.into_iter().all(|entry| bochs.extent(entry).is_none_or(|host| host <= LARGEST)));
    }
    if let Ok(cloop) = CloopHeader::parse(data) {
        assert!(cloop.size() <= LARGEST && cloop.table_bytes() <= 8 << 32);
    }
    let Ok(dmg) = DmgTrailer::parse(data) else { return };
    let (offset, len) = dmg.list;
    let list = usize::try_from(offset).ok().and_then(|offset| data.get(offset..offset.checked_add(len as usize)?));
    let chunks = dmg.chunks(list.unwrap_or(data)).unwrap_or_default();
    let mut end = 0;
    for chunk in &chunks {
        assert!(chunk.start >= end && chunk.len != 0 && chunk.start + chunk.len <= dmg.size);
        assert!(chunk.host.checked_add(chunk.host_len).is_some_and(|end| end <= LARGEST));
        end = chunk.start + chunk.len;
        let packed = usize::try_from(chunk.host).ok().and_then(|at| data.get(at..)).unwrap_or_default();
        let mut out = vec![0; chunk.len.min(1 << 16) as usize];
        match chunk.packing {
            DmgPacking::Bzip2 => drop(unpack_bzip2(packed, &mut out)),
            DmgPacking::Adc => drop(unpack_adc(packed, &mut out)),
            DmgPacking::Lzfse => drop(unpack_lzfse(packed, &mut out)),
            DmgPacking::Xz => drop(unpack_xz(packed, &mut out)),
            _ => {}
        }
    }
}

/// The structures of VHDX, which are far apart in a file: each is tried at the start of the bytes.
fn vhdx_pieces(data: &[u8]) {
    let (first, second) = (VhdxHeader::parse(data, 0), VhdxHeader::parse_unverified(data, 0));
    if let Ok(header) = VhdxHeader::newer(first, Some(second)) {
        assert!(header.log_offset.checked_add(header.log_bytes).is_some());
        let _ = vhdx::is_log_entry(data, header.log_guid);
        // The same bytes as a log.
        let sectors = data.len() / vhdx::LOG_SECTOR_BYTES * vhdx::LOG_SECTOR_BYTES;
        if let Ok(Some(replay)) = vhdx::replay_of(&data[..sectors], header.log_guid, header.log_offset) {
            assert!(replay.writes.iter().all(|write| write.range().end <= i64::MAX as u64));
        }
    }
    if let Ok(regions) = VhdxRegions::parse_unverified(data, 0) {
        for (offset, len) in [regions.bat, regions.metadata] {
            assert!(offset >= vhdx::UNIT_BYTES && len >= vhdx::UNIT_BYTES && offset.checked_add(len).is_some());
        }
    }
    if let Ok(table) = MetadataTable::parse(data, 0, 1 << 20) {
        for item in [MetadataItem::FileParameters, MetadataItem::VirtualDiskSize, MetadataItem::LogicalSectorSize] {
            assert!((vhdx::METADATA_TABLE_BYTES as u64..1 << 20).contains(&table.offset(item)));
        }
    }
    if let Ok(parent) = VhdxParent::parse(data) {
        assert!(parent.name.is_none_or(|name| !name.starts_with('/') && !name.contains(['\\', ':'])));
    }
    let word = |at: usize| data.get(at..at + 8).and_then(|word| word.try_into().ok()).unwrap_or([0; 8]);
    if let Ok(disk) = VhdxDisk::parse(word(0), word(8), word(16)) {
        assert!(disk.entries() <= (64 << 20) + (1 << 14) && disk.chunk_ratio >= 16);
        if let VhdxBlock::At(host) = VhdxBlock::of(disk.size) {
            assert!(host.is_multiple_of(vhdx::UNIT_BYTES));
        }
    }
}

/// The first bytes of any file: nothing that opens as qcow2 is taken for something else.
pub fn probe_format(data: &[u8]) {
    let format = probe(data);
    if Header::parse(data).is_ok() {
        assert_eq!(format, FormatName::Qcow2);
    }
}
