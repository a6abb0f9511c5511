// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rules of the header, each with an error that names field and value.

use super::features::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA, FeatureKind, INCOMPAT_COMPRESSION, INCOMPAT_DATA_FILE, INCOMPAT_EXTL2,
    INCOMPAT_KNOWN,
};
use super::{Extension, FeatureNames, Header, V2_HEADER_LENGTH, V3_HEADER_LENGTH_MIN, offset};
use cowshed_types::{Error, ErrorKind, Result};

/// Limits of this program where the format allows more. QEMU documents these values or was seen to enforce them, so
/// every image that it opens is opened here.
pub mod limits {
    /// Fewest address bits of a cluster.
    pub const CLUSTER_BITS_MIN: u32 = 9;
    /// Most address bits of a cluster: 2 MiB.
    pub const CLUSTER_BITS_MAX: u32 = 21;
    /// Fewest address bits of a cluster with extended L2 entries: 16 KiB.
    pub const CLUSTER_BITS_MIN_EXTL2: u32 = 14;
    /// Largest L1 table in bytes.
    pub const L1_BYTES: u64 = 32 << 20;
    /// Largest refcount table in bytes.
    pub const REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
    /// Longest file name in the header, in bytes.
    pub const NAME_BYTES: usize = 1023;
    /// The most internal snapshots.
    pub const SNAPSHOTS: u32 = 65536;
    /// Largest snapshot table in bytes.
    pub const SNAPSHOT_TABLE_BYTES: u64 = 64 << 20;
    /// Most bytes of extra data of a snapshot.
    pub const SNAPSHOT_EXTRA_BYTES: u32 = 1024;
    /// The most bitmaps.
    pub const BITMAPS: u32 = 65535;
    /// Largest bitmap directory in bytes.
    pub const BITMAP_DIRECTORY_BYTES: u64 = 64 << 20;
    /// Largest bitmap table in bytes.
    pub const BITMAP_TABLE_BYTES: u64 = 32 << 20;
    /// Largest encryption header in bytes.
    pub const ENCRYPTION_HEADER_BYTES: u64 = 64 << 20;
    /// First offset that no table and no cluster may reach: bits 9–55 hold an offset.
    pub const HOST_OFFSET_END: u64 = 1 << 56;
}

pub(super) fn cluster_bits(bits: u32) -> Result<()> {
    if (limits::CLUSTER_BITS_MIN..=limits::CLUSTER_BITS_MAX).contains(&bits) {
        return Ok(());
    }
    let message = "unsupported cluster size: must be a power of two between 512 bytes and 2 MiB";
    let error = Error::invalid_image("cluster_bits", bits, message).offset(offset::CLUSTER_BITS);
    Err(error.qemu(format!("Unsupported cluster size: 2^{bits}")))
}

pub(super) fn refcount_order(order: u32) -> Result<()> {
    if order <= 6 {
        return Ok(());
    }
    let message = "reference count entry width too large: may not exceed 64 bits";
    let error = Error::invalid_image("refcount_order", order, message).offset(offset::REFCOUNT_ORDER);
    Err(error.qemu("Reference count entry width too large; may not exceed 64 bits"))
}

pub(super) fn extended_l2(cluster_bits: u32) -> Result<()> {
    if cluster_bits >= limits::CLUSTER_BITS_MIN_EXTL2 {
        return Ok(());
    }
    let message = "extended L2 entries need clusters of at least 16 KiB";
    Err(Error::invalid_image("cluster_bits", cluster_bits, message).offset(offset::CLUSTER_BITS))
}

pub(super) fn header_length(version: u32, length: u32, cluster_bits: u32) -> Result<()> {
    let error = |message| Err(Error::invalid_image("header_length", length, message).offset(offset::HEADER_LENGTH));
    match version {
        2 if length != V2_HEADER_LENGTH => error("a version 2 header has 72 bytes"),
        2 => Ok(()),
        _ if length < V3_HEADER_LENGTH_MIN => {
            error("header is too short: at least 104 bytes").map_err(|error| error.qemu("qcow2 header too short"))
        }
        _ if !length.is_multiple_of(8) => error("header length is not a multiple of 8"),
        _ if u64::from(length) > 1 << cluster_bits => error("header does not fit the first cluster"),
        _ => Ok(()),
    }
}

pub(super) fn incompatible_features(features: u64, names: Option<&FeatureNames>) -> Result<()> {
    let unknown = features & !INCOMPAT_KNOWN;
    if unknown == 0 {
        return Ok(());
    }
    let list: Vec<String> = (0..64u8)
        .filter(|bit| unknown >> bit & 1 != 0)
        .map(|bit| match names.and_then(|names| names.name(FeatureKind::Incompatible, bit)) {
            Some(name) => format!("{name} (bit {bit})"),
            None => format!("bit {bit}"),
        })
        .collect();
    Err(Error::unsupported(format!("unsupported incompatible feature: {}", list.join(", ")))
        .qemu(format!("Unsupported qcow2 feature(s): {}", feature_sentence(unknown, names)))
        .field("incompatible_features")
        .offset(offset::INCOMPATIBLE_FEATURES)
        .value(format!("{features:#x}")))
}

/// Names of features, and a mask of those that have none.
fn feature_sentence(unknown: u64, names: Option<&FeatureNames>) -> String {
    let name = |bit: u8| names.and_then(|names| names.name(FeatureKind::Incompatible, bit));
    let bits = || (0..64u8).filter(|bit| unknown >> bit & 1 != 0);
    let mut list: Vec<String> = bits().filter_map(name).map(|name| name.to_string()).collect();
    let nameless = bits().filter(|bit| name(*bit).is_none()).fold(0u64, |mask, bit| mask | 1 << bit);
    if nameless != 0 {
        list.push(format!("Unknown incompatible feature: {nameless:x}"));
    }
    list.join(", ")
}

pub(super) fn unsupported_version(version: u32) -> Error {
    let error = Error::unsupported("unsupported qcow2 version").field("version").offset(offset::VERSION);
    error.qemu(format!("Unsupported qcow2 version {version}")).value(version)
}

/// All rules that need nothing but the header.
pub(super) fn header(header: &Header) -> Result<()> {
    if !(2..=3).contains(&header.version) {
        return Err(unsupported_version(header.version));
    }
    cluster_bits(header.cluster_bits)?;
    header_length(header.version, header.header_length, header.cluster_bits)?;
    extra_fields(header)?;
    incompatible_features(header.incompatible_features, None)?;
    refcount_order(header.refcount_order)?;
    if header.version == 2 {
        version_2(header)?;
    }
    if header.incompatible_features & INCOMPAT_EXTL2 != 0 {
        extended_l2(header.cluster_bits)?;
    }
    compression(header)?;
    backing_file(header)?;
    data_file(header)?;
    encryption(header)?;
    tables(header)?;
    bitmaps(header)?;
    extensions_unique(header)
}

fn extra_fields(header: &Header) -> Result<()> {
    let expected = (header.header_length as usize).saturating_sub(offset::COMPRESSION_TYPE as usize + 1);
    if header.extra.len() != expected {
        return Err(Error::internal(format!("{} extra header bytes where {expected} belong", header.extra.len())));
    }
    Ok(())
}

fn version_2(header: &Header) -> Result<()> {
    if header.refcount_order != 4 {
        let message = "version 2 images have 16-bit refcounts";
        return Err(Error::invalid_image("refcount_order", header.refcount_order, message));
    }
    for (field, mask) in [
        ("incompatible_features", header.incompatible_features),
        ("compatible_features", header.compatible_features),
        ("autoclear_features", header.autoclear_features),
    ] {
        if mask != 0 {
            return Err(Error::invalid_image(field, format!("{mask:#x}"), "version 2 images have no feature bits"));
        }
    }
    Ok(())
}

fn compression(header: &Header) -> Result<()> {
    let error = |kind, message| {
        Err(Error::new(kind, message)
            .field("compression_type")
            .offset(offset::COMPRESSION_TYPE)
            .value(header.compression_type))
    };
    let bit = header.incompatible_features & INCOMPAT_COMPRESSION != 0;
    match (bit, header.compression_type) {
        (false, 0) | (true, 1) => Ok(()),
        (true, 0) => error(ErrorKind::InvalidImage, "compression type bit set without a compression type"),
        (false, _) => error(ErrorKind::InvalidImage, "compression type given without its incompatible bit"),
        (true, _) => error(ErrorKind::Unsupported, "unknown compression type"),
    }
}

fn backing_file(header: &Header) -> Result<()> {
    let Some(name) = &header.backing_file else { return Ok(()) };
    if name.len() > limits::NAME_BYTES {
        let message = format!("backing file name is longer than {} bytes", limits::NAME_BYTES);
        return Err(Error::invalid_image("backing_file_size", name.len(), message).offset(offset::BACKING_FILE_SIZE));
    }
    if name.contains(&0) {
        let text = format!("{:?}", String::from_utf8_lossy(name));
        return Err(Error::invalid_image("backing_file", text, "backing file name contains a NUL byte"));
    }
    Ok(())
}

fn data_file(header: &Header) -> Result<()> {
    let has_data_file = header.incompatible_features & INCOMPAT_DATA_FILE != 0;
    if has_data_file && header.nb_snapshots != 0 {
        let message = "internal snapshots in an image with an external data file";
        return Err(Error::invalid_image("nb_snapshots", header.nb_snapshots, message).offset(offset::NB_SNAPSHOTS));
    }
    if header.autoclear_features & AUTOCLEAR_RAW_DATA == 0 {
        return Ok(());
    }
    let error = |message| {
        let value = format!("{:#x}", header.autoclear_features);
        Err(Error::invalid_image("autoclear_features", value, message).offset(offset::AUTOCLEAR_FEATURES))
    };
    if !has_data_file {
        return error("raw external data bit set without an external data file");
    }
    if header.backing_file.is_some() {
        return error("raw external data bit set in an image with a backing file");
    }
    Ok(())
}

fn encryption(header: &Header) -> Result<()> {
    let method = |message: &str| {
        Err(Error::invalid_image("crypt_method", header.crypt_method, message).offset(offset::CRYPT_METHOD))
    };
    match (header.crypt_method, header.encryption_header()) {
        (0 | 1, None) => Ok(()),
        (0 | 1, Some(_)) => method("encryption header extension without LUKS encryption"),
        (2, None) => method("LUKS encryption without the encryption header extension")
            .map_err(|error| error.qemu("Missing CRYPTO header for crypt method 2")),
        (2, Some(pointer)) => {
            aligned("encryption_header_offset", pointer.offset, header)?;
            region("encryption_header_offset", pointer.offset, pointer.length, limits::ENCRYPTION_HEADER_BYTES)
        }
        _ => Err(Error::unsupported("unknown encryption method")
            .qemu(format!("Unsupported encryption method {}", header.crypt_method))
            .field("crypt_method")
            .offset(offset::CRYPT_METHOD)
            .value(header.crypt_method)),
    }
}

fn tables(header: &Header) -> Result<()> {
    l1_table(header)?;
    let clusters = header.refcount_table_clusters;
    if clusters != 0 {
        let bytes = u64::from(clusters) << header.cluster_bits;
        if bytes > limits::REFCOUNT_TABLE_BYTES {
            let message = format!("refcount table is larger than {} MiB", limits::REFCOUNT_TABLE_BYTES >> 20);
            return Err(Error::invalid_image("refcount_table_clusters", clusters, message)
                .qemu("Reference count table too large")
                .offset(offset::REFCOUNT_TABLE_CLUSTERS));
        }
        aligned("refcount_table_offset", header.refcount_table_offset, header)?;
        region("refcount_table_offset", header.refcount_table_offset, bytes, limits::REFCOUNT_TABLE_BYTES)?;
    }
    if header.nb_snapshots != 0 {
        if header.nb_snapshots > limits::SNAPSHOTS {
            let message = format!("more than {} internal snapshots", limits::SNAPSHOTS);
            return Err(Error::invalid_image("nb_snapshots", header.nb_snapshots, message)
                .qemu("Snapshot table too large")
                .offset(offset::NB_SNAPSHOTS));
        }
        aligned("snapshots_offset", header.snapshots_offset, header)?;
        region("snapshots_offset", header.snapshots_offset, 40, limits::SNAPSHOT_TABLE_BYTES)?;
    }
    Ok(())
}

fn l1_table(header: &Header) -> Result<()> {
    if header.size > i64::MAX as u64 {
        let message = "virtual size is 2^63 bytes or more";
        return Err(Error::invalid_image("size", header.size, message).offset(offset::SIZE).qemu("Image is too big"));
    }
    let bytes = u64::from(header.l1_size) * 8;
    if bytes > limits::L1_BYTES {
        let message = format!("active L1 table is larger than {} MiB", limits::L1_BYTES >> 20);
        let error = Error::invalid_image("l1_size", header.l1_size, message).offset(offset::L1_SIZE);
        return Err(error.qemu("Active L1 table too large"));
    }
    let needed = header.geometry()?.l1_entries_needed(header.size);
    if needed > u64::from(header.l1_size) {
        let message = format!("L1 table is too small: {needed} entries for {} bytes of virtual disk", header.size);
        let error = Error::invalid_image("l1_size", header.l1_size, message).offset(offset::L1_SIZE);
        let is_too_big = needed > i32::MAX as u64;
        return Err(error.qemu(if is_too_big { "Image is too big" } else { "L1 table is too small" }));
    }
    if header.l1_size != 0 {
        aligned("l1_table_offset", header.l1_table_offset, header)?;
        region("l1_table_offset", header.l1_table_offset, bytes, limits::L1_BYTES)?;
    }
    Ok(())
}

fn bitmaps(header: &Header) -> Result<()> {
    // "Must be considered inconsistent" without the bit: nothing in it is looked at then.
    if header.autoclear_features & AUTOCLEAR_BITMAPS == 0 {
        return Ok(());
    }
    let Some(extension) = header.bitmaps() else {
        let value = format!("{:#x}", header.autoclear_features);
        let message = "bitmaps bit set without the bitmaps extension";
        return Err(Error::invalid_image("autoclear_features", value, message).offset(offset::AUTOCLEAR_FEATURES));
    };
    if extension.nb_bitmaps == 0 || extension.nb_bitmaps > limits::BITMAPS {
        let message = format!("the number of bitmaps must be between 1 and {}", limits::BITMAPS);
        let error = Error::invalid_image("nb_bitmaps", extension.nb_bitmaps, message);
        return Err(error.qemu(match extension.nb_bitmaps {
            0 => "found bitmaps extension with zero bitmaps".to_owned(),
            count => format!(
                "bitmaps_ext: Image has {count} bitmaps, exceeding the QEMU supported maximum of {}",
                limits::BITMAPS
            ),
        }));
    }
    if extension.reserved != 0 {
        let error = Error::invalid_image("bitmaps_reserved", extension.reserved, "reserved field is not zero");
        return Err(error.qemu("bitmaps_ext: Reserved field is not zero"));
    }
    aligned("bitmap_directory_offset", extension.directory_offset, header)?;
    let (start, bytes) = (extension.directory_offset, extension.directory_size);
    region("bitmap_directory_offset", start, bytes, limits::BITMAP_DIRECTORY_BYTES).map_err(|error| {
        match bytes > limits::BITMAP_DIRECTORY_BYTES {
            true => error.qemu(format!(
                "bitmaps_ext: bitmap directory size ({bytes}) exceeds the maximum supported size ({})",
                u64::from(limits::BITMAPS) << 10
            )),
            false => error,
        }
    })
}

fn aligned(field: &'static str, start: u64, header: &Header) -> Result<()> {
    if !start.is_multiple_of(header.cluster_size()) {
        let error = Error::invalid_image(field, format!("{start:#x}"), "offset is not cluster-aligned");
        return Err(error.qemu(invalid_place(field)));
    }
    Ok(())
}

/// QEMU's sentence for a table that can't be where its field says.
fn invalid_place(field: &str) -> String {
    let table = match field {
        "l1_table_offset" => "Active L1 table",
        "refcount_table_offset" => "Reference count table",
        "snapshots_offset" => "Snapshot table",
        "bitmap_directory_offset" => return "bitmaps_ext: invalid bitmap directory offset".to_owned(),
        other => return format!("{other} invalid"),
    };
    format!("{table} offset invalid")
}

/// A table of `bytes` bytes at `start`: behind the header, not too large, below 2^56.
fn region(field: &'static str, start: u64, bytes: u64, max_bytes: u64) -> Result<()> {
    let error =
        |message: String| Err(Error::invalid_image(field, format!("{start:#x}"), message).qemu(invalid_place(field)));
    if start == 0 {
        return error("table would overwrite the header".into());
    }
    if bytes > max_bytes {
        return error(format!("structure of {bytes} bytes is larger than {} MiB", max_bytes >> 20));
    }
    match start.checked_add(bytes) {
        Some(end) if end <= limits::HOST_OFFSET_END => Ok(()),
        _ => error("table reaches past the largest offset of the format".into()),
    }
}

pub(super) fn disk_tables_within(header: &Header, file_len: u64) -> Result<()> {
    let l1_bytes = u64::from(header.l1_size) * 8;
    let refcount_table_bytes = u64::from(header.refcount_table_clusters) << header.cluster_bits.min(32);
    within(("l1_table_offset", offset::L1_TABLE_OFFSET), header.l1_table_offset, l1_bytes, file_len)?;
    let refcount_table = ("refcount_table_offset", offset::REFCOUNT_TABLE_OFFSET);
    within(refcount_table, header.refcount_table_offset, refcount_table_bytes, file_len)
}

pub(super) fn snapshot_table_within(header: &Header, file_len: u64) -> Result<()> {
    // The smallest snapshot table entry has 40 bytes.
    let bytes = u64::from(header.nb_snapshots) * 40;
    within(("snapshots_offset", offset::SNAPSHOTS_OFFSET), header.snapshots_offset, bytes, file_len)
}

fn within((field, at): (&'static str, u64), start: u64, bytes: u64, file_len: u64) -> Result<()> {
    if bytes != 0 && start.checked_add(bytes).is_none_or(|end| end > file_len) {
        let message = format!("table of {bytes} bytes reaches past the end of the file ({file_len} bytes)");
        return Err(Error::invalid_image(field, format!("{start:#x}"), message).offset(at));
    }
    Ok(())
}

/// "Unless stated otherwise, each header extension type shall appear at most once."
fn extensions_unique(header: &Header) -> Result<()> {
    let known = |extension: &&Extension| !matches!(extension, Extension::Unknown { .. });
    for (index, extension) in header.extensions.iter().enumerate().filter(|(_, extension)| known(extension)) {
        if header.extensions[..index].iter().any(|earlier| earlier.kind() == extension.kind()) {
            let message = "header extension appears more than once";
            return Err(Error::invalid_image("header_extension", format!("{:#010x}", extension.kind()), message));
        }
    }
    Ok(())
}
