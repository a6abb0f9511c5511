// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header of a damaged image, field by field: believable values, the user's values instead, and losses.

use crate::Overrides;
use cowshed_layout::bytes::{be32_at, be64_at};
use cowshed_layout::qcow2::{Geometry, Header, features, limits, offset};
use cowshed_types::{Compression, Error, Result};

/// The fields of a header that a reader needs.
#[derive(Clone, Debug)]
pub(super) struct Fields {
    pub geometry: Geometry,
    pub version: u32,
    /// Size of the virtual disk in bytes.
    pub size: u64,
    /// Host offset of the L1 table, in bytes; `None` where that is lost.
    pub l1_offset: Option<u64>,
    /// Number of internal snapshots, and where their table starts; unchecked.
    pub snapshots: (u32, u64),
    pub data_file: bool,
    pub data_file_name: Option<String>,
    pub compression: Compression,
    /// 0: not encrypted, 1: the legacy AES method, 2: LUKS.
    pub crypt_method: u32,
    /// Name and format of the backing file.
    pub backing: Option<(String, Option<String>)>,
    /// There may be a backing file that a damaged header can't be believed about; why.
    pub backing_doubt: Option<String>,
    /// The header, where it is whole.
    pub header: Option<Header>,
    /// Its faults, in words.
    pub notes: Vec<String>,
}

/// `crypt_method` of LUKS.
pub(super) const CRYPT_LUKS: u32 = 2;
/// Number of bytes of the header's first field that isn't looked at alone.
const FIELDS_BYTES: usize = 112;

/// Reads the fields from an image's first bytes; `file_len` bounds the believable values.
pub(super) fn read(bytes: &[u8], file_len: u64, overrides: &Overrides) -> Result<Fields> {
    let mut notes = Vec::new();
    let header = match Header::parse(bytes) {
        Ok(header) => Some(header),
        Err(error) => {
            notes.push(format!("the header is damaged: {error}"));
            None
        }
    };
    let mut padded = bytes.get(..FIELDS_BYTES.min(bytes.len())).unwrap_or_default().to_vec();
    padded.resize(FIELDS_BYTES, 0);
    let mut reader = Reader { bytes: &padded, file_len, overrides, notes };
    let version = reader.version();
    let incompatible = reader.incompatible(version);
    let geometry = reader.geometry(incompatible)?;
    let size = reader.size(geometry)?;
    let l1_offset = reader.l1_offset(geometry);
    let crypt_method = reader.crypt_method();
    let compression = reader.compression(version, incompatible);
    let backing = header.as_ref().and_then(|header| {
        let name = header.backing_file_name().filter(|name| !name.is_empty())?;
        Some((name.into_owned(), header.backing_format().map(|format| format.into_owned())))
    });
    let backing_doubt = if header.is_none() { reader.backing_doubt(bytes) } else { None };
    reader.notes.extend(backing_doubt.clone());
    Ok(Fields {
        geometry,
        version,
        size,
        l1_offset,
        snapshots: (reader.be32(offset::NB_SNAPSHOTS), reader.be64(offset::SNAPSHOTS_OFFSET)),
        data_file: incompatible & features::INCOMPAT_DATA_FILE != 0,
        data_file_name: header.as_ref().and_then(|header| header.data_file_name().map(|name| name.into_owned())),
        compression,
        crypt_method,
        backing,
        backing_doubt,
        notes: reader.notes,
        header,
    })
}

struct Reader<'a> {
    bytes: &'a [u8],
    file_len: u64,
    overrides: &'a Overrides,
    notes: Vec<String>,
}

impl Reader<'_> {
    fn be32(&self, at: u64) -> u32 {
        be32_at(self.bytes, at as usize).unwrap_or_default()
    }

    fn be64(&self, at: u64) -> u64 {
        be64_at(self.bytes, at as usize).unwrap_or_default()
    }

    fn version(&mut self) -> u32 {
        match self.be32(offset::VERSION) {
            version @ 2..=3 => version,
            other => {
                self.notes.push(format!("version {other} is none: taken for 3"));
                3
            }
        }
    }

    fn incompatible(&mut self, version: u32) -> u64 {
        let mut found = if version < 3 { 0 } else { self.be64(offset::INCOMPATIBLE_FEATURES) };
        let unknown = found & !features::INCOMPAT_KNOWN;
        if unknown != 0 {
            self.notes.push(format!("unknown incompatible features {unknown:#x} are ignored"));
        }
        match self.overrides.extended_l2 {
            Some(true) => found |= features::INCOMPAT_EXTL2,
            Some(false) => found &= !features::INCOMPAT_EXTL2,
            None => {}
        }
        found
    }

    fn geometry(&mut self, incompatible: u64) -> Result<Geometry> {
        let extended = incompatible & features::INCOMPAT_EXTL2 != 0;
        let bits = match self.overrides.cluster_size_bytes {
            Some(bytes) if bytes.is_power_of_two() => bytes.trailing_zeros(),
            Some(bytes) => {
                return Err(Error::invalid_argument("a cluster size is a power of two").value(bytes));
            }
            None => self.be32(offset::CLUSTER_BITS),
        };
        // The refcounts aren't looked at.
        Geometry::new(bits, 4, extended).map_err(|error| match self.overrides.cluster_size_bytes {
            Some(_) => error,
            None => error.context("the header's cluster size is damaged, it must be given"),
        })
    }

    fn size(&mut self, geometry: Geometry) -> Result<u64> {
        let (found, given) = match self.overrides.size_bytes {
            Some(bytes) => (bytes, true),
            None => (self.be64(offset::SIZE), false),
        };
        let possible = found <= i64::MAX as u64 && geometry.l1_entries_needed(found) * 8 <= limits::L1_BYTES;
        if possible && (found != 0 || given) {
            return Ok(found);
        }
        let message = match given {
            true => "no image has a disk of this size",
            false => "the header's disk size is damaged, it must be given",
        };
        Err(Error::invalid_argument(message).field("size").value(found))
    }

    fn l1_offset(&mut self, geometry: Geometry) -> Option<u64> {
        let found = self.overrides.l1_offset_bytes.unwrap_or_else(|| self.be64(offset::L1_TABLE_OFFSET));
        if found != 0 && geometry.in_cluster(found) == 0 && found < self.file_len {
            return Some(found);
        }
        self.notes.push(format!("there can't be an L1 table at {found:#x}: everything that it led to is lost"));
        None
    }

    fn crypt_method(&mut self) -> u32 {
        let method = self.be32(offset::CRYPT_METHOD);
        if method > CRYPT_LUKS {
            self.notes.push(format!("encryption method {method} is none: taken for unencrypted"));
            return 0;
        }
        method
    }

    fn compression(&mut self, version: u32, incompatible: u64) -> Compression {
        let has_field = version >= 3 && self.be32(offset::HEADER_LENGTH) > offset::COMPRESSION_TYPE as u32;
        let kind = if has_field { self.bytes[offset::COMPRESSION_TYPE as usize] } else { 0 };
        let bit = incompatible & features::INCOMPAT_COMPRESSION != 0;
        if bit != (kind == 1) {
            self.notes.push("the compression type contradicts the features: zstd is taken".to_owned());
        }
        if bit || kind == 1 { Compression::Zstd } else { Compression::Zlib }
    }

    /// A backing file in a damaged header is not opened on its word: the user names it, or declares that there is none.
    fn backing_doubt(&self, bytes: &[u8]) -> Option<String> {
        let start = self.be64(offset::BACKING_FILE_OFFSET);
        if start == 0 || self.overrides.backing_is_given {
            return None;
        }
        let len = u64::from(self.be32(offset::BACKING_FILE_SIZE));
        let end = start.checked_add(len).filter(|_| (1..=limits::NAME_BYTES as u64).contains(&len));
        let name = end.and_then(|end| bytes.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?));
        let name = name.and_then(|name| std::str::from_utf8(name).ok()).filter(|name| !name.contains(char::is_control));
        Some(match name {
            Some(name) => format!("the damaged header names the backing file '{name}', which isn't opened on its word"),
            None => "the damaged header may have named a backing file".to_owned(),
        })
    }
}
