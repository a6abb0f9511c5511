// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header, its extensions and the backing file's name: everything in the first cluster ("Header").

use super::features::{
    AUTOCLEAR_BITMAP_JOURNAL, AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA, COMPAT_LAZY_REFCOUNTS, FeatureKind,
    INCOMPAT_CORRUPT, INCOMPAT_DATA_FILE, INCOMPAT_DIRTY, INCOMPAT_EXTL2,
};
use super::{
    BitmapJournal, BitmapsExtension, EncryptionHeader, Extension, FeatureNames, Geometry, extension_type, limits,
    validate,
};
use crate::bytes::{array_at, be32_at, be64_at};
use cowshed_types::{Compression, Error, Result, text_of_name};
use std::borrow::Cow;

/// The first four bytes of every qcow2 file, as a number.
pub const MAGIC: u32 = 0x5146_49fb;
/// Bytes of a version 2 header.
pub const V2_HEADER_LENGTH: u32 = 72;
/// Fewest bytes of a version 3 header.
pub const V3_HEADER_LENGTH_MIN: u32 = 104;
/// Bytes of the version 3 header that fresh images get: with the compression type and its padding.
pub const V3_HEADER_LENGTH: u32 = 112;

/// Byte offsets of the header's fields, for writes of single fields.
#[allow(missing_docs)]
pub mod offset {
    pub const MAGIC: u64 = 0;
    pub const VERSION: u64 = 4;
    pub const BACKING_FILE_OFFSET: u64 = 8;
    pub const BACKING_FILE_SIZE: u64 = 16;
    pub const CLUSTER_BITS: u64 = 20;
    pub const SIZE: u64 = 24;
    pub const CRYPT_METHOD: u64 = 32;
    pub const L1_SIZE: u64 = 36;
    pub const L1_TABLE_OFFSET: u64 = 40;
    pub const REFCOUNT_TABLE_OFFSET: u64 = 48;
    pub const REFCOUNT_TABLE_CLUSTERS: u64 = 56;
    pub const NB_SNAPSHOTS: u64 = 60;
    pub const SNAPSHOTS_OFFSET: u64 = 64;
    pub const INCOMPATIBLE_FEATURES: u64 = 72;
    pub const COMPATIBLE_FEATURES: u64 = 80;
    pub const AUTOCLEAR_FEATURES: u64 = 88;
    pub const REFCOUNT_ORDER: u64 = 96;
    pub const HEADER_LENGTH: u64 = 100;
    pub const COMPRESSION_TYPE: u64 = 104;
}

/// Fresh images with smaller clusters go without a feature name table.
const FEATURE_NAMES_CLUSTER_BITS_MIN: u32 = 13;

/// First byte after the fields that this crate knows.
const KNOWN_END: usize = 105;

/// The header of a qcow2 image with its extensions and the backing file's name.
///
/// [`Header::parse`] and [`Header::encode`] check all rules that can be checked without other parts of the file
/// ([`Header::validate`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Offset at which the backing file's name was found, in bytes; 0 without one. [`Header::encode`] puts the name
    /// behind the extensions.
    pub backing_file_offset: u64,
    /// log2 of the cluster size in bytes, 9–21.
    pub cluster_bits: u32,
    /// Virtual disk size in bytes.
    pub size: u64,
    /// 0 none, 1 AES, 2 LUKS.
    pub crypt_method: u32,
    /// Entries of the active L1 table.
    pub l1_size: u32,
    /// Host offset of the active L1 table, in bytes.
    pub l1_table_offset: u64,
    /// Host offset of the refcount table, in bytes.
    pub refcount_table_offset: u64,
    /// Clusters of the refcount table. 0 only in images that need a repair, see
    /// [`Header::require_refcount_table`].
    pub refcount_table_clusters: u32,
    /// Number of internal snapshots.
    pub nb_snapshots: u32,
    /// Host offset of the snapshot table, in bytes; without meaning when there are no snapshots.
    pub snapshots_offset: u64,
    /// Mask of `features::INCOMPAT_*`; 0 in version 2.
    pub incompatible_features: u64,
    /// Mask of `features::COMPAT_*` and of unknown bits; 0 in version 2.
    pub compatible_features: u64,
    /// Mask of `features::AUTOCLEAR_*` and of unknown bits; 0 in version 2.
    pub autoclear_features: u64,
    /// log2 of the refcount width in bits, 0–6; 4 in version 2.
    pub refcount_order: u32,
    /// Bytes of the header without extensions; 72 in version 2.
    pub header_length: u32,
    /// 0 deflate, 1 zstd; 0 where the header is too short for the field.
    pub compression_type: u8,
    /// Header bytes from 105 to `header_length`: padding, or fields that this crate doesn't know. Kept as found.
    pub extra: Vec<u8>,
    /// Extensions in file order.
    pub extensions: Vec<Extension>,
    /// The backing file's name, as bytes: at most 1023, none of them NUL.
    pub backing_file: Option<Vec<u8>>,
}

/// `cluster_bits` of a file that starts with `bytes` (at least 24), checked: magic, version and range.
pub fn peek_cluster_bits(bytes: &[u8]) -> Result<u32> {
    // Of an empty file QEMU reads zeroes.
    let magic = be32_at(bytes, 0).ok_or_else(|| match bytes {
        [] => too_short(0).qemu("Image is not in qcow2 format"),
        _ => too_short(bytes.len()),
    })?;
    if magic != MAGIC {
        return Err(Error::invalid_image("magic", format!("{magic:#010x}"), "Image is not in qcow2 format")
            .qemu("Image is not in qcow2 format"));
    }
    let version = be32_at(bytes, offset::VERSION as usize).ok_or_else(|| too_short(bytes.len()))?;
    if !(2..=3).contains(&version) {
        return Err(validate::unsupported_version(version));
    }
    let cluster_bits = be32_at(bytes, offset::CLUSTER_BITS as usize).ok_or_else(|| too_short(bytes.len()))?;
    validate::cluster_bits(cluster_bits)?;
    Ok(cluster_bits)
}

fn too_short(len: usize) -> Error {
    Error::invalid_image("file length", format!("{len} bytes"), "the file ends within its qcow2 header")
        .qemu("qcow2 header too short")
}

impl Header {
    /// A header of a fresh image, version 2 or 3, with the extensions that such an image starts with. Tables and size
    /// are 0 and to be filled in.
    pub fn new(version: u32, cluster_bits: u32) -> Self {
        let v3 = version >= 3;
        let header_length = if v3 { V3_HEADER_LENGTH } else { V2_HEADER_LENGTH };
        // As qemu-img: names are a courtesy, so small clusters keep their space for the backing file's name.
        let feature_names = v3 && cluster_bits >= FEATURE_NAMES_CLUSTER_BITS_MIN;
        Header {
            version,
            backing_file_offset: 0,
            cluster_bits,
            size: 0,
            crypt_method: 0,
            l1_size: 0,
            l1_table_offset: 0,
            refcount_table_offset: 0,
            refcount_table_clusters: 0,
            nb_snapshots: 0,
            snapshots_offset: 0,
            incompatible_features: 0,
            compatible_features: 0,
            autoclear_features: 0,
            refcount_order: 4,
            header_length,
            compression_type: 0,
            extra: vec![0; (header_length as usize).saturating_sub(KNOWN_END)],
            extensions: if feature_names {
                vec![Extension::FeatureNames(FeatureNames::standard())]
            } else {
                Vec::new()
            },
            backing_file: None,
        }
    }

    /// The number of the file's first bytes that [`Header::parse`] needs, judged by `prefix` (at least 24 bytes). Where
    /// `prefix` isn't enough to decide, the answer is a whole cluster. A file that is shorter is for `parse` to judge.
    pub fn bytes_needed(prefix: &[u8]) -> Result<usize> {
        let cluster_size = 1usize << peek_cluster_bits(prefix)?;
        if prefix.len() >= cluster_size {
            return Ok(cluster_size);
        }
        Ok(area_end(prefix, cluster_size).filter(|end| *end <= prefix.len()).unwrap_or(cluster_size))
    }

    /// Parses the header at the start of a file and checks it. `bytes` are the file's first bytes: at least
    /// [`Header::bytes_needed`] of them, or the whole file where that is shorter.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let header = Self::parse_unjudged(bytes)?;
        header.validate()?;
        Ok(header)
    }

    /// As [`Header::parse`], for a check: more internal snapshots than there may be are taken for as many as there may be,
    /// 65,536.
    pub fn parse_to_check(bytes: &[u8]) -> Result<Self> {
        let mut header = Self::parse_unjudged(bytes)?;
        header.nb_snapshots = header.nb_snapshots.min(limits::SNAPSHOTS);
        header.validate()?;
        Ok(header)
    }

    fn parse_unjudged(bytes: &[u8]) -> Result<Self> {
        let cluster_size = 1usize << peek_cluster_bits(bytes)?;
        let area = &bytes[..bytes.len().min(cluster_size)];
        let mut header = Self::parse_fields(area)?;
        header.check_feature_bits_known(area)?;
        header.backing_file = parse_backing_file(area, cluster_size, header.backing_file_offset, header.header_length)?;
        header.extensions = parse_extensions(area, &header)?;
        Ok(header)
    }

    fn parse_fields(area: &[u8]) -> Result<Self> {
        let short = || too_short(area.len());
        let be32 = |at: u64| be32_at(area, at as usize).ok_or_else(short);
        let be64 = |at: u64| be64_at(area, at as usize).ok_or_else(short);
        let version = be32(offset::VERSION)?;
        let mut header = Header {
            version,
            backing_file_offset: be64(offset::BACKING_FILE_OFFSET)?,
            cluster_bits: be32(offset::CLUSTER_BITS)?,
            size: be64(offset::SIZE)?,
            crypt_method: be32(offset::CRYPT_METHOD)?,
            l1_size: be32(offset::L1_SIZE)?,
            l1_table_offset: be64(offset::L1_TABLE_OFFSET)?,
            refcount_table_offset: be64(offset::REFCOUNT_TABLE_OFFSET)?,
            refcount_table_clusters: be32(offset::REFCOUNT_TABLE_CLUSTERS)?,
            nb_snapshots: be32(offset::NB_SNAPSHOTS)?,
            snapshots_offset: be64(offset::SNAPSHOTS_OFFSET)?,
            ..Header::new(2, 0)
        };
        if version >= 3 {
            header.incompatible_features = be64(offset::INCOMPATIBLE_FEATURES)?;
            header.compatible_features = be64(offset::COMPATIBLE_FEATURES)?;
            header.autoclear_features = be64(offset::AUTOCLEAR_FEATURES)?;
            header.refcount_order = be32(offset::REFCOUNT_ORDER)?;
            header.header_length = be32(offset::HEADER_LENGTH)?;
            validate::header_length(version, header.header_length, header.cluster_bits)?;
            let end = header.header_length as usize;
            if end > area.len() {
                return Err(short());
            }
            // "A field is considered not present when header_length is less than or equal to the field's offset."
            if header.header_length > offset::COMPRESSION_TYPE as u32 {
                header.compression_type = area[offset::COMPRESSION_TYPE as usize];
                header.extra = area[KNOWN_END..end].to_vec();
            }
        }
        Ok(header)
    }

    /// Refuses unknown incompatible bits before anything else is believed. The names in the feature name table are
    /// there for this message; where the table can't be found the bit number has to do.
    fn check_feature_bits_known(&self, area: &[u8]) -> Result<()> {
        if self.incompatible_features & !super::features::INCOMPAT_KNOWN == 0 {
            return Ok(());
        }
        let names = Extensions::new(area, self)
            .map_while(Result::ok)
            .find(|(kind, _)| *kind == extension_type::FEATURE_NAMES)
            .and_then(|(kind, data)| Extension::parse(kind, data).ok());
        let names = match &names {
            Some(Extension::FeatureNames(names)) => Some(names),
            _ => None,
        };
        validate::incompatible_features(self.incompatible_features, names)
    }

    /// All rules that need nothing but the header; see `docs/formats/qcow2.md`.
    pub fn validate(&self) -> Result<()> {
        validate::header(self)
    }

    /// An error for an image without a refcount table: only a repair may open it.
    pub fn require_refcount_table(&self) -> Result<()> {
        if self.refcount_table_clusters == 0 {
            return Err(Error::invalid_image("refcount_table_clusters", 0, "image has no refcount table")
                .offset(offset::REFCOUNT_TABLE_CLUSTERS));
        }
        Ok(())
    }

    /// Refuses tables that don't lie within a file of `file_len` bytes. These are the L1 and the refcount table, and a
    /// snapshot table with the smallest possible entries.
    pub fn check_tables_within(&self, file_len: u64) -> Result<()> {
        self.check_disk_tables_within(file_len)?;
        self.check_snapshot_table_within(file_len)
    }

    /// As [`Header::check_tables_within`], the L1 and the refcount table alone: the disk can be read with those.
    pub fn check_disk_tables_within(&self, file_len: u64) -> Result<()> {
        validate::disk_tables_within(self, file_len)
    }

    /// As [`Header::check_tables_within`], the snapshot table alone.
    pub fn check_snapshot_table_within(&self, file_len: u64) -> Result<()> {
        validate::snapshot_table_within(self, file_len)
    }

    /// The bytes from the start of the file: header, extensions, end mark, backing file name. Fails on a header that
    /// breaks a rule or doesn't fit the first cluster. Bytes of the cluster behind the result are to be zero.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.validate()?;
        let mut bytes = self.encode_fields();
        for extension in &self.extensions {
            let data = extension.data();
            let len = u32::try_from(data.len()).map_err(|_| self.does_not_fit(data.len()))?;
            bytes.extend_from_slice(&extension.kind().to_be_bytes());
            bytes.extend_from_slice(&len.to_be_bytes());
            bytes.extend_from_slice(&data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        // The end mark: type 0, length 0.
        bytes.extend_from_slice(&[0; 8]);
        if let Some(name) = &self.backing_file {
            let at = bytes.len() as u64;
            bytes[offset::BACKING_FILE_OFFSET as usize..][..8].copy_from_slice(&at.to_be_bytes());
            bytes[offset::BACKING_FILE_SIZE as usize..][..4].copy_from_slice(&(name.len() as u32).to_be_bytes());
            bytes.extend_from_slice(name);
        }
        if bytes.len() > 1 << self.cluster_bits {
            return Err(self.does_not_fit(bytes.len()));
        }
        Ok(bytes)
    }

    fn does_not_fit(&self, len: usize) -> Error {
        let message =
            format!("header, extensions and backing file name don't fit a cluster of {} bytes", self.cluster_size());
        Error::new(cowshed_types::ErrorKind::NoSpace, message).field("header").value(format!("{len} bytes"))
    }

    fn encode_fields(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(1024);
        bytes.extend_from_slice(&MAGIC.to_be_bytes());
        bytes.extend_from_slice(&self.version.to_be_bytes());
        // Offset and size of the backing file's name, known at the end.
        bytes.extend_from_slice(&[0; 12]);
        bytes.extend_from_slice(&self.cluster_bits.to_be_bytes());
        bytes.extend_from_slice(&self.size.to_be_bytes());
        bytes.extend_from_slice(&self.crypt_method.to_be_bytes());
        bytes.extend_from_slice(&self.l1_size.to_be_bytes());
        bytes.extend_from_slice(&self.l1_table_offset.to_be_bytes());
        bytes.extend_from_slice(&self.refcount_table_offset.to_be_bytes());
        bytes.extend_from_slice(&self.refcount_table_clusters.to_be_bytes());
        bytes.extend_from_slice(&self.nb_snapshots.to_be_bytes());
        bytes.extend_from_slice(&self.snapshots_offset.to_be_bytes());
        if self.version >= 3 {
            bytes.extend_from_slice(&self.incompatible_features.to_be_bytes());
            bytes.extend_from_slice(&self.compatible_features.to_be_bytes());
            bytes.extend_from_slice(&self.autoclear_features.to_be_bytes());
            bytes.extend_from_slice(&self.refcount_order.to_be_bytes());
            bytes.extend_from_slice(&self.header_length.to_be_bytes());
            if self.header_length > offset::COMPRESSION_TYPE as u32 {
                bytes.push(self.compression_type);
                bytes.extend_from_slice(&self.extra);
            }
        }
        bytes
    }

    /// The bytes of the fields that change in place, from [`offset::SIZE`] on. Bytes 24–71 hold sizes and tables, in
    /// version 3 bytes 72–95 the feature bits. All in the first sector, so that one write of them is atomic.
    pub fn encode_changing_fields(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(72);
        bytes.extend(self.size.to_be_bytes());
        bytes.extend(self.crypt_method.to_be_bytes());
        bytes.extend(self.l1_size.to_be_bytes());
        bytes.extend(self.l1_table_offset.to_be_bytes());
        bytes.extend(self.refcount_table_offset.to_be_bytes());
        bytes.extend(self.refcount_table_clusters.to_be_bytes());
        bytes.extend(self.nb_snapshots.to_be_bytes());
        bytes.extend(self.snapshots_offset.to_be_bytes());
        if self.version >= 3 {
            bytes.extend(self.incompatible_features.to_be_bytes());
            bytes.extend(self.compatible_features.to_be_bytes());
            bytes.extend(self.autoclear_features.to_be_bytes());
        }
        bytes
    }

    /// Cluster size in bytes.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Sizes and index arithmetic.
    pub fn geometry(&self) -> Result<Geometry> {
        Geometry::of(self)
    }

    /// The dirty bit: refcounts may be wrong.
    pub fn is_dirty(&self) -> bool {
        self.incompatible_features & INCOMPAT_DIRTY != 0
    }

    /// The corrupt bit: only a repair may write.
    pub fn is_corrupt(&self) -> bool {
        self.incompatible_features & INCOMPAT_CORRUPT != 0
    }

    /// Guest clusters are in an external data file.
    pub fn has_data_file(&self) -> bool {
        self.incompatible_features & INCOMPAT_DATA_FILE != 0
    }

    /// The external data file is a standalone raw image.
    pub fn is_data_file_raw(&self) -> bool {
        self.has_data_file() && self.autoclear_features & AUTOCLEAR_RAW_DATA != 0
    }

    /// L2 entries are 16 bytes with a subcluster bitmap.
    pub fn has_extended_l2(&self) -> bool {
        self.incompatible_features & INCOMPAT_EXTL2 != 0
    }

    /// Refcount updates may be postponed.
    pub fn has_lazy_refcounts(&self) -> bool {
        self.compatible_features & COMPAT_LAZY_REFCOUNTS != 0
    }

    /// The compression type of the image's compressed clusters.
    pub fn compression(&self) -> Compression {
        if self.compression_type == 1 { Compression::Zstd } else { Compression::Zlib }
    }

    /// The name of a bit in the feature name table.
    pub fn feature_name(&self, kind: FeatureKind, bit: u8) -> Option<String> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::FeatureNames(names) => names.name(kind, bit),
            _ => None,
        })
    }

    /// The backing file's name as text, see [`text_of_name`].
    pub fn backing_file_name(&self) -> Option<Cow<'_, str>> {
        self.backing_file.as_deref().map(text_of_name)
    }

    /// The backing file's format as text.
    pub fn backing_format(&self) -> Option<Cow<'_, str>> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::BackingFormat(name) => Some(String::from_utf8_lossy(name)),
            _ => None,
        })
    }

    /// The external data file's name as text, see [`text_of_name`].
    pub fn data_file_name(&self) -> Option<Cow<'_, str>> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::DataFile(name) => Some(text_of_name(name)),
            _ => None,
        })
    }

    /// The bitmaps extension. Only to be believed while `features::AUTOCLEAR_BITMAPS` is set.
    pub fn bitmaps(&self) -> Option<&BitmapsExtension> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::Bitmaps(bitmaps) => Some(bitmaps),
            _ => None,
        })
    }

    /// The journal of the bitmaps, where it counts: its bit and that of the bitmaps are set, and the directory hasn't moved.
    pub fn bitmap_journal(&self) -> Option<&BitmapJournal> {
        let both = AUTOCLEAR_BITMAPS | AUTOCLEAR_BITMAP_JOURNAL;
        let directory = self.bitmaps().filter(|_| self.autoclear_features & both == both)?.directory_offset;
        self.extensions.iter().find_map(|extension| match extension {
            Extension::BitmapJournal(journal) if journal.directory_offset == directory => Some(journal),
            _ => None,
        })
    }

    /// The place of the LUKS header.
    pub fn encryption_header(&self) -> Option<&EncryptionHeader> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::EncryptionHeader(header) => Some(header),
            _ => None,
        })
    }

    /// Puts an extension in: in the place of the one of its type, else where a fresh header has it.
    pub fn set_extension(&mut self, extension: Extension) {
        if let Some(present) = self.extensions.iter_mut().find(|present| present.kind() == extension.kind()) {
            *present = extension;
            return;
        }
        let rank = extension.rank();
        let at = self.extensions.iter().position(|present| present.rank() > rank).unwrap_or(self.extensions.len());
        self.extensions.insert(at, extension);
    }

    /// Takes out the extensions of a type (see `extension_type`).
    pub fn remove_extension(&mut self, kind: u32) {
        self.extensions.retain(|extension| extension.kind() != kind);
    }
}

/// First byte after extensions and backing file name, or `None` where `prefix` ends before that is known.
fn area_end(prefix: &[u8], cluster_size: usize) -> Option<usize> {
    let header = Header::parse_fields(prefix).ok()?;
    let backing_size = be32_at(prefix, offset::BACKING_FILE_SIZE as usize)? as usize;
    if header.backing_file_offset != 0 {
        let start = usize::try_from(header.backing_file_offset).ok()?;
        return start.checked_add(backing_size).filter(|end| *end <= cluster_size);
    }
    let mut at = header.header_length as usize;
    loop {
        let kind = be32_at(prefix, at)?;
        let len = be32_at(prefix, at + 4)? as usize;
        at = at.checked_add(8)?;
        if kind == extension_type::END {
            return Some(at);
        }
        at = at.checked_add(len)?.checked_next_multiple_of(8)?;
        if at >= cluster_size {
            return None;
        }
    }
}

fn parse_backing_file(area: &[u8], cluster_size: usize, start: u64, header_length: u32) -> Result<Option<Vec<u8>>> {
    if start == 0 {
        return Ok(None);
    }
    let error = |message| {
        Error::invalid_image("backing_file_offset", format!("{start:#x}"), message).offset(offset::BACKING_FILE_OFFSET)
    };
    if start > cluster_size as u64 {
        return Err(error("backing file name lies outside of the first cluster").qemu("Invalid backing file offset"));
    }
    let size = be32_at(area, offset::BACKING_FILE_SIZE as usize).ok_or_else(|| too_short(area.len()))?;
    if size as usize > limits::NAME_BYTES {
        let message = format!("backing file name is longer than {} bytes", limits::NAME_BYTES);
        return Err(Error::invalid_image("backing_file_size", size, message).offset(offset::BACKING_FILE_SIZE));
    }
    // A name of no bytes names no file.
    if size == 0 {
        return Ok(None);
    }
    if start < u64::from(header_length) {
        return Err(error("backing file name lies inside of the header"));
    }
    if start + u64::from(size) > cluster_size as u64 {
        return Err(error("backing file name lies outside of the first cluster"));
    }
    // In range of usize: not above the cluster size.
    match area.get(start as usize..start as usize + size as usize) {
        Some(name) => Ok(Some(name.to_vec())),
        None => Err(error("backing file name lies past the end of the file")),
    }
}

/// Walks the raw extensions: type and data.
struct Extensions<'a> {
    area: &'a [u8],
    at: usize,
    end: usize,
}

impl<'a> Extensions<'a> {
    fn new(area: &'a [u8], header: &Header) -> Self {
        // The extensions end where the name starts, or with the cluster (or with the file, if that is shorter).
        let name = usize::try_from(header.backing_file_offset).unwrap_or(usize::MAX);
        let end = if name == 0 { area.len() } else { name.min(area.len()) };
        Extensions { area, at: header.header_length as usize, end }
    }
}

impl<'a> Iterator for Extensions<'a> {
    type Item = Result<(u32, &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        let left = self.area.get(self.at..self.end)?;
        // Less than a type and a length can't be an extension: old version 2 images end here without an end mark.
        let kind = u32::from_be_bytes(array_at(left, 0)?);
        let len = be32_at(left, 4)?;
        let at = self.at;
        // The end mark's length has no meaning, but one out of bounds shows damage.
        let Some(data) = usize::try_from(len).ok().and_then(|len| left.get(8..len.checked_add(8)?)) else {
            self.at = self.end;
            let message = format!("header extension {kind:#010x} is longer than the space for extensions");
            return Some(Err(Error::invalid_image("header_extension", len, message).offset(at as u64)));
        };
        if kind == extension_type::END {
            self.at = self.end;
            return None;
        }
        // No overflow: the data lie within the slice.
        self.at = (self.at + 8 + data.len()).next_multiple_of(8);
        Some(Ok((kind, data)))
    }
}

fn parse_extensions(area: &[u8], header: &Header) -> Result<Vec<Extension>> {
    let mut extensions: Vec<Extension> = Vec::new();
    for raw in Extensions::new(area, header) {
        let (kind, data) = raw?;
        let extension = Extension::parse(kind, data)?;
        // If a known kind appears twice, the last one counts, as in QEMU. So an image with such a header can be
        // repaired.
        if !matches!(extension, Extension::Unknown { .. }) {
            extensions.retain(|earlier| earlier.kind() != kind || matches!(earlier, Extension::Unknown { .. }));
        }
        extensions.push(extension);
    }
    Ok(extensions)
}
