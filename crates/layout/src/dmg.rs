// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Apple's disk images (UDIF): the trailer, the property list and the tables in it. docs/formats/block-formats.md.

use crate::bytes::{be32_at, be64_at};
use cowshed_types::{Error, ErrorKind, Result};

/// Bytes of the trailer.
pub const TRAILER_BYTES: usize = 512;
/// The longest property list that is read, in bytes: its tables stay in memory.
pub const MOST_LIST_BYTES: u64 = 32 << 20;
/// A packed piece is unpacked whole: at most this many bytes.
pub const MOST_PACKED_BYTES: u64 = 64 << 20;
/// A packed piece is longer than its unpacked bytes by no more than an eighth and this many bytes.
const MOST_GROWTH_BYTES: u64 = 64 << 10;
const SECTOR_BYTES: u64 = 512;
const TABLE_HEADER_BYTES: usize = 204;
const CHUNK_BYTES: usize = 40;

/// The trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmgTrailer {
    /// Offset of the data of all pieces, in bytes.
    pub data_offset: u64,
    /// Offset and length of the property list.
    pub list: (u64, u64),
    /// Size of the disk in bytes.
    pub size: u64,
}

/// The storage of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmgPacking {
    /// Not at all: zeroes.
    Zero,
    /// As it is.
    Raw,
    /// Apple Data Compression.
    Adc,
    /// Deflate with zlib's header.
    Zlib,
    /// bzip2.
    Bzip2,
    /// lzfse.
    Lzfse,
    /// LZMA in a stream of xz.
    Xz,
}

impl DmgPacking {
    /// True for a piece that is unpacked whole.
    pub fn is_packed(self) -> bool {
        !matches!(self, DmgPacking::Zero | DmgPacking::Raw)
    }
}

/// A piece of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmgChunk {
    /// First byte of the disk.
    pub start: u64,
    /// Bytes of the disk.
    pub len: u64,
    /// Its storage.
    pub packing: DmgPacking,
    /// First byte in the file.
    pub host: u64,
    /// Bytes in the file.
    pub host_len: u64,
}

impl DmgTrailer {
    /// Finds the trailer in the last bytes of a file.
    ///
    /// # Errors
    /// For a file without one, and for images that this doesn't read.
    pub fn parse(tail: &[u8]) -> Result<Self> {
        let is_one = |part: &[u8]| part.starts_with(b"koly") && be32_at(part, 8) == Some(TRAILER_BYTES as u32);
        let found = tail.windows(TRAILER_BYTES).rev().find(|part| is_one(part));
        let trailer = found.ok_or_else(|| {
            Error::invalid_image("trailer", "missing", "this is no disk image of Apple")
                .qemu("Could not locate UDIF trailer in dmg file")
        })?;
        let long = |at| be64_at(trailer, at).unwrap_or_default();
        if be32_at(trailer, 60).is_some_and(|segments| segments > 1) {
            return Err(Error::unsupported("disk images in several segments can't be read"));
        }
        let (list, sectors) = ((long(216), long(224)), long(492));
        if list.1 == 0 {
            return Err(Error::unsupported("disk images with a resource fork and no property list can't be read"));
        }
        if list.1 > MOST_LIST_BYTES {
            return Err(Error::new(ErrorKind::Limit, "the property list is too long").field("XMLLength").value(list.1));
        }
        let size = sectors.checked_mul(SECTOR_BYTES).filter(|&size| i64::try_from(size).is_ok());
        let size = size.ok_or_else(|| Error::invalid_image("SectorCount", sectors, "the disk is too large"))?;
        Ok(DmgTrailer { data_offset: long(24), list, size })
    }

    /// The pieces of the disk that the property list's tables have, in the order of the disk, none over another.
    ///
    /// # Errors
    /// For damaged lists and tables, and for pieces that can't be unpacked.
    pub fn chunks(&self, list: &[u8]) -> Result<Vec<DmgChunk>> {
        let text = std::str::from_utf8(list).map_err(|_| damaged("the property list is no UTF-8"))?;
        let tables = text.split_once("<key>blkx</key>").and_then(|(_, rest)| rest.trim_start().strip_prefix("<array>"));
        let tables = tables.ok_or_else(|| damaged("the property list has no tables (blkx)"))?;
        let tables = tables.split_once("</array>").map_or(tables, |(tables, _)| tables);
        let mut chunks = Vec::new();
        for part in tables.split("<data>").skip(1) {
            let (text, _) = part.split_once("</data>").ok_or_else(|| damaged("the property list is cut off"))?;
            self.table(&base64(text)?, &mut chunks)?;
        }
        chunks.sort_by_key(|chunk| chunk.start);
        for pair in chunks.windows(2) {
            if pair[0].start + pair[0].len > pair[1].start {
                return Err(damaged("two pieces of the disk lie on each other").offset(pair[1].start));
            }
        }
        match chunks.last().filter(|last| last.start + last.len > self.size) {
            Some(last) => Err(damaged("a piece lies behind the end of the disk").offset(last.start)),
            None => Ok(chunks),
        }
    }

    fn table(&self, table: &[u8], chunks: &mut Vec<DmgChunk>) -> Result<()> {
        let short = || damaged("a table of pieces is cut off");
        if !table.starts_with(b"mish") {
            return Err(damaged("a table of pieces has no mark"));
        }
        let first = be64_at(table, 8).ok_or_else(short)?;
        let sectors = be64_at(table, 16).ok_or_else(short)?;
        let known = chunks.len();
        let offset = be64_at(table, 24).ok_or_else(short)?;
        let count = be32_at(table, 200).ok_or_else(short)? as usize;
        let entries = table.get(TABLE_HEADER_BYTES..).unwrap_or_default();
        if entries.len() / CHUNK_BYTES < count {
            return Err(short());
        }
        for entry in entries.chunks_exact(CHUNK_BYTES).take(count) {
            let long = |at| be64_at(entry, at).unwrap_or_default();
            let packing = match be32_at(entry, 0).unwrap_or_default() {
                0 | 2 => DmgPacking::Zero,
                1 => DmgPacking::Raw,
                0x8000_0004 => DmgPacking::Adc,
                0x8000_0005 => DmgPacking::Zlib,
                0x8000_0006 => DmgPacking::Bzip2,
                0x8000_0007 => DmgPacking::Lzfse,
                0x8000_0008 => DmgPacking::Xz,
                // A comment, and the end, behind which QEMU reads on.
                0x7fff_fffe | 0xffff_ffff => continue,
                other => return Err(damaged("a kind of piece that isn't known").value(format!("{other:#x}"))),
            };
            let sum = |numbers: [u64; 3]| numbers.iter().try_fold(0u64, |sum, number| sum.checked_add(*number));
            let bytes =
                |sectors: Option<u64>| sectors?.checked_mul(SECTOR_BYTES).filter(|&at| i64::try_from(at).is_ok());
            let start = bytes(sum([first, long(8), 0]));
            let len = bytes(Some(long(16)));
            let host = sum([self.data_offset, offset, long(24)]);
            let host_len = long(32);
            let (Some(start), Some(len), Some(host)) = (start, len, host) else {
                return Err(damaged("a piece is out of range"));
            };
            let is_packed = packing.is_packed();
            // Data that doesn't get shorter grows a little.
            if is_packed && (len > MOST_PACKED_BYTES || host_len > len + len / 8 + MOST_GROWTH_BYTES) {
                return Err(Error::new(ErrorKind::Limit, "a packed piece is too long").offset(start));
            }
            if packing == DmgPacking::Raw && host_len < len {
                return Err(damaged("a piece has too few bytes in the file").offset(start));
            }
            if host.checked_add(host_len).is_none_or(|end| i64::try_from(end).is_err()) {
                return Err(damaged("a piece is out of range").offset(start));
            }
            if len != 0 {
                chunks.push(DmgChunk { start, len, packing, host, host_len });
            }
        }
        match covers(chunks.get_mut(known..).unwrap_or_default(), first, sectors) {
            true => Ok(()),
            false => {
                let message = "the pieces of a table leave out a part of its sectors";
                Err(damaged(message).offset(first.saturating_mul(SECTOR_BYTES)))
            }
        }
    }
}

/// Sorts the pieces of a table. False when a sector of the table is in none of them.
fn covers(pieces: &mut [DmgChunk], first: u64, sectors: u64) -> bool {
    let bytes = |sectors: u64| sectors.checked_mul(SECTOR_BYTES);
    let (Some(start), Some(end)) = (bytes(first), first.checked_add(sectors).and_then(bytes)) else { return false };
    pieces.sort_by_key(|piece| piece.start);
    let mut at = start;
    for piece in pieces {
        if piece.start > at {
            break;
        }
        at = at.max(piece.start + piece.len);
    }
    at >= end
}

/// Bytes of the text, which may have spaces and ends of lines in it.
fn base64(text: &str) -> Result<Vec<u8>> {
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(text.len() / 4 * 3), 0u32, 0);
    for character in text.bytes().filter(|byte| !byte.is_ascii_whitespace()) {
        let value = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' => break,
            _ => return Err(damaged("the data in the property list are no base64")),
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Ok(bytes)
}

fn damaged(message: &str) -> Error {
    Error::new(ErrorKind::InvalidImage, message)
}
