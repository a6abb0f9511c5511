// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Header extensions: the area between the header and the backing file's name ("Header extensions").

use super::features::{FeatureKind, NAMES};
use crate::bytes::{be32_at, be64_at};
use cowshed_types::{Error, Result};

/// Numbers of the extension types.
#[allow(missing_docs)]
pub mod extension_type {
    pub const END: u32 = 0;
    pub const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub const FEATURE_NAMES: u32 = 0x6803_f857;
    pub const BITMAPS: u32 = 0x2385_2875;
    pub const ENCRYPTION_HEADER: u32 = 0x0537_be77;
    pub const DATA_FILE: u32 = 0x4441_5441;
    /// Ours ("CWBJ"): see `docs/formats/bitmap-journal.md`.
    pub const BITMAP_JOURNAL: u32 = 0x4357_424a;
    /// Ours ("CWPD"): its content means nothing; it keeps the bytes behind it in their place.
    pub const PADDING: u32 = 0x4357_5044;
}
use extension_type as types;

/// One header extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extension {
    /// Format name of the backing file, as bytes.
    BackingFormat(Vec<u8>),
    /// Names of feature bits.
    FeatureNames(FeatureNames),
    /// The place of the bitmap directory.
    Bitmaps(BitmapsExtension),
    /// The place of the LUKS header.
    EncryptionHeader(EncryptionHeader),
    /// Name of the external data file, as bytes.
    DataFile(Vec<u8>),
    /// The bitmaps in use that are up to date all the same.
    BitmapJournal(BitmapJournal),
    /// Any other type: kept byte for byte.
    Unknown {
        /// Its number.
        kind: u32,
        /// Its data, without padding.
        data: Vec<u8>,
    },
}

impl Extension {
    /// The extension's number.
    pub fn kind(&self) -> u32 {
        match self {
            Extension::BackingFormat(_) => types::BACKING_FORMAT,
            Extension::FeatureNames(_) => types::FEATURE_NAMES,
            Extension::Bitmaps(_) => types::BITMAPS,
            Extension::EncryptionHeader(_) => types::ENCRYPTION_HEADER,
            Extension::DataFile(_) => types::DATA_FILE,
            Extension::BitmapJournal(_) => types::BITMAP_JOURNAL,
            Extension::Unknown { kind, .. } => *kind,
        }
    }

    /// Parses the data of an extension of type `kind`, padding excluded.
    pub(super) fn parse(kind: u32, data: &[u8]) -> Result<Self> {
        Ok(match kind {
            types::BACKING_FORMAT => Extension::BackingFormat(string("backing file format", data)?),
            types::DATA_FILE => Extension::DataFile(string("external data file name", data)?),
            types::FEATURE_NAMES => Extension::FeatureNames(FeatureNames { data: data.to_vec() }),
            types::BITMAPS => Extension::Bitmaps(BitmapsExtension::parse(data)?),
            types::ENCRYPTION_HEADER => Extension::EncryptionHeader(EncryptionHeader::parse(data)?),
            // A journal of another form is another program's: it is kept, and nothing in it is believed.
            types::BITMAP_JOURNAL => match BitmapJournal::parse(data) {
                Some(journal) => Extension::BitmapJournal(journal),
                None => Extension::Unknown { kind, data: data.to_vec() },
            },
            _ => Extension::Unknown { kind, data: data.to_vec() },
        })
    }

    /// The extension's data, without padding.
    pub fn data(&self) -> Vec<u8> {
        match self {
            Extension::BackingFormat(data) | Extension::DataFile(data) | Extension::Unknown { data, .. } => {
                data.clone()
            }
            Extension::FeatureNames(names) => names.data.clone(),
            Extension::Bitmaps(bitmaps) => bitmaps.encode(),
            Extension::EncryptionHeader(header) => header.encode(),
            Extension::BitmapJournal(journal) => journal.encode(),
        }
    }

    /// The rank of this extension in a fresh header: QEMU's order, unknown ones last.
    pub(super) fn rank(&self) -> u32 {
        match self {
            Extension::BackingFormat(_) => 0,
            Extension::DataFile(_) => 1,
            Extension::EncryptionHeader(_) => 2,
            Extension::FeatureNames(_) => 3,
            Extension::Bitmaps(_) => 4,
            Extension::BitmapJournal(_) => 5,
            Extension::Unknown { .. } => 6,
        }
    }
}

fn string(what: &str, data: &[u8]) -> Result<Vec<u8>> {
    let text = String::from_utf8_lossy(data);
    if data.contains(&0) {
        let message = format!("{what} contains a NUL byte");
        return Err(Error::invalid_image("header_extension", format!("{text:?}"), message));
    }
    if data.len() > super::limits::NAME_BYTES {
        let message = format!("{what} is longer than {} bytes", super::limits::NAME_BYTES);
        return Err(Error::invalid_image("header_extension", data.len(), message));
    }
    Ok(data.to_vec())
}

/// The bitmaps extension ("Bitmaps extension"). Only to be believed while the autoclear bit is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Number of bitmaps, at least 1.
    pub nb_bitmaps: u32,
    /// Reserved, must be zero; kept as found.
    pub reserved: u32,
    /// Bytes of the bitmap directory.
    pub directory_size: u64,
    /// Where the bitmap directory starts, cluster-aligned.
    pub directory_offset: u64,
}

impl BitmapsExtension {
    fn parse(data: &[u8]) -> Result<Self> {
        match (be32_at(data, 0), be32_at(data, 4), be64_at(data, 8), be64_at(data, 16), data.len()) {
            (Some(nb_bitmaps), Some(reserved), Some(directory_size), Some(directory_offset), 24) => {
                Ok(BitmapsExtension { nb_bitmaps, reserved, directory_size, directory_offset })
            }
            _ => Err(wrong_length("bitmaps extension", data.len(), 24)),
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(24);
        data.extend_from_slice(&self.nb_bitmaps.to_be_bytes());
        data.extend_from_slice(&self.reserved.to_be_bytes());
        data.extend_from_slice(&self.directory_size.to_be_bytes());
        data.extend_from_slice(&self.directory_offset.to_be_bytes());
        data
    }
}

/// The bitmaps that are up to date although they are marked as in use. To be believed only while
/// `features::AUTOCLEAR_BITMAP_JOURNAL` is set and the directory is still at the place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapJournal {
    /// Host offset of the bitmap directory when the journal was written, in bytes.
    pub directory_offset: u64,
    /// Indices of the directory's entries.
    pub entries: Vec<u32>,
}

impl BitmapJournal {
    /// Version of the extension.
    const VERSION: u32 = 1;
    /// Bytes in front of the indices.
    const FIXED_BYTES: usize = 16;

    fn parse(data: &[u8]) -> Option<Self> {
        let (version, count) = (be32_at(data, 0)?, be32_at(data, 4)?);
        let entries = data.get(Self::FIXED_BYTES..)?;
        if version != Self::VERSION || entries.len() as u64 != u64::from(count) * 4 {
            return None;
        }
        let entries = entries.as_chunks::<4>().0.iter().map(|index| u32::from_be_bytes(*index)).collect();
        Some(BitmapJournal { directory_offset: be64_at(data, 8)?, entries })
    }

    fn encode(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(Self::FIXED_BYTES + self.entries.len() * 4);
        data.extend_from_slice(&Self::VERSION.to_be_bytes());
        data.extend_from_slice(&(self.entries.len() as u32).to_be_bytes());
        data.extend_from_slice(&self.directory_offset.to_be_bytes());
        data.extend(self.entries.iter().flat_map(|index| index.to_be_bytes()));
        data
    }
}

/// The place of the LUKS header ("Full disk encryption header pointer").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncryptionHeader {
    /// Where it starts, cluster-aligned.
    pub offset: u64,
    /// Bytes written there; the space is rounded up to clusters.
    pub length: u64,
}

impl EncryptionHeader {
    fn parse(data: &[u8]) -> Result<Self> {
        match (be64_at(data, 0), be64_at(data, 8), data.len()) {
            (Some(offset), Some(length), 16) => Ok(EncryptionHeader { offset, length }),
            _ => Err(wrong_length("encryption header extension", data.len(), 16)),
        }
    }

    fn encode(&self) -> Vec<u8> {
        [self.offset.to_be_bytes(), self.length.to_be_bytes()].concat()
    }
}

fn wrong_length(what: &str, len: usize, expected: usize) -> Error {
    Error::invalid_image("header_extension", len, format!("{what} must have {expected} bytes"))
}

/// The feature name table ("Feature name table"): 48 bytes an entry, kept byte for byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureNames {
    data: Vec<u8>,
}

/// An entry of the feature name table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// The mask: 0 incompatible, 1 compatible, 2 autoclear.
    pub kind: u8,
    /// Bit number, 0–63.
    pub bit: u8,
    /// The name; bytes that aren't UTF-8 are replaced.
    pub name: String,
}

const NAME_ENTRY_BYTES: usize = 48;

impl FeatureNames {
    /// The table that a fresh image of version 3 gets: all bits of the specification.
    pub fn standard() -> Self {
        let mut data = Vec::with_capacity(NAMES.len() * NAME_ENTRY_BYTES);
        for (kind, bit, name) in NAMES {
            let mut entry = [0u8; NAME_ENTRY_BYTES];
            entry[0] = kind as u8;
            entry[1] = bit;
            entry[2..2 + name.len()].copy_from_slice(name.as_bytes());
            data.extend_from_slice(&entry);
        }
        FeatureNames { data }
    }

    /// The entries, in file order; an incomplete last one is left out.
    pub fn entries(&self) -> impl Iterator<Item = FeatureName> + '_ {
        self.data.as_chunks::<NAME_ENTRY_BYTES>().0.iter().map(|entry| {
            let name = entry[2..].split(|byte| *byte == 0).next().unwrap_or_default();
            FeatureName { kind: entry[0], bit: entry[1], name: String::from_utf8_lossy(name).into_owned() }
        })
    }

    /// The name of a bit, where the table has one.
    pub fn name(&self, kind: FeatureKind, bit: u8) -> Option<String> {
        self.entries()
            .find(|entry| entry.kind == kind as u8 && entry.bit == bit && !entry.name.is_empty())
            .map(|entry| entry.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_bitmap_journal_is_kept() {
        let journal = BitmapJournal { directory_offset: 0x50000, entries: vec![0, 7] };
        let data = journal.encode();
        let parsed = Extension::parse(types::BITMAP_JOURNAL, &data).unwrap();
        assert_eq!(parsed, Extension::BitmapJournal(journal));
        assert_eq!(parsed.data(), data);
        let newer = [&2u32.to_be_bytes(), &data[4..]].concat();
        for strange in [&data[..15], &data[..22], &newer, &[]] {
            let parsed = Extension::parse(types::BITMAP_JOURNAL, strange).unwrap();
            assert_eq!(parsed, Extension::Unknown { kind: types::BITMAP_JOURNAL, data: strange.to_vec() });
        }
    }
}
