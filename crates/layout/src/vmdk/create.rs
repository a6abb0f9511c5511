// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New disks, laid out as QEMU lays them out.

use super::{NO_PARENT, SECTOR_BYTES};
use crate::fresh::{FilePiece, FreshFile};
use cowshed_types::{Error, Result, name_of_text};
use std::fmt::Write as _;

const GRAIN_SECTORS: u64 = 128;
const TABLE_ENTRIES: u64 = 512;
/// A grain table in sectors.
const TABLE_SECTORS: u64 = TABLE_ENTRIES * 4 / SECTOR_BYTES;
/// The line ends are tested, and there is a second directory.
const SPARSE_FLAGS: u32 = 1 | 1 << 1;
const FLAG_ZEROED_GRAINS: u32 = 1 << 2;
/// Grains are compressed, and follow markers.
const STREAM_FLAGS: u32 = 1 << 16 | 1 << 17;
const DESCRIPTOR_SECTOR: u64 = 1;
const DESCRIPTOR_SECTORS: u64 = 20;
/// A part of a split disk: 2 GiB.
const PART_SECTORS: u64 = 4 << 20;
/// A disk's UUID begins with 6, VMware's OUI 00:0c:29, as a name of NAA does.
const VMWARE_OUI: [u8; 4] = [0x60, 0x00, 0xc2, 0x90];
/// Entries of a grain table are 32 bits wide, and a place in the file is a sector.
const MAX_SPARSE_SECTORS: u64 = u32::MAX as u64 * GRAIN_SECTORS;

/// The storage of a new disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmdkKind {
    /// `createType`.
    pub name: &'static str,
    /// The bytes as they are, in files beside the descriptor.
    pub is_flat: bool,
    /// In files of 2 GiB beside the descriptor.
    pub is_split: bool,
    /// In compressed grains that are written once.
    pub is_stream: bool,
}

/// The kinds that are created.
pub const NEW_KINDS: &[VmdkKind] = &[
    VmdkKind { name: "monolithicSparse", is_flat: false, is_split: false, is_stream: false },
    VmdkKind { name: "monolithicFlat", is_flat: true, is_split: false, is_stream: false },
    VmdkKind { name: "twoGbMaxExtentSparse", is_flat: false, is_split: true, is_stream: false },
    VmdkKind { name: "twoGbMaxExtentFlat", is_flat: true, is_split: true, is_stream: false },
    VmdkKind { name: "streamOptimized", is_flat: false, is_split: false, is_stream: true },
];

/// A new disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVmdk<'a> {
    /// Size of the disk in bytes, whole sectors.
    pub size: u64,
    /// Its storage.
    pub kind: VmdkKind,
    /// `ddb.adapterType`.
    pub adapter: &'a str,
    /// `ddb.virtualHWVersion`.
    pub hardware: &'a str,
    /// `ddb.toolsVersion`.
    pub tools: &'a str,
    /// Entry 1 of a grain table means zeroes.
    pub zeroed_grains: bool,
    /// The content id.
    pub cid: u32,
    /// The content id of the parent, and its name.
    pub parent: Option<(u32, &'a str)>,
    /// The name of the image's file, without a folder.
    pub name: &'a str,
    /// The names of the files beside it; `None`: made of its own.
    pub part_names: Option<&'a [String]>,
    /// The identifiers of VMware's programs.
    pub ids: Option<VmwareIds>,
}

/// The identifiers by which VMware's programs know a disk. QEMU's disks have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmwareIds {
    /// The first three words of `ddb.longContentID`; the content id is the fourth.
    pub content: [u8; 12],
    /// Random bytes for `ddb.uuid`.
    pub disk: [u8; 16],
}

impl VmwareIds {
    /// The lines at the end of the descriptor.
    fn lines(&self, cid: u32) -> String {
        let mut long = String::new();
        for byte in self.content {
            // Writing to a String can't fail.
            let _ = write!(long, "{byte:02x}");
        }
        // VMware's own number for makers of disks is in front.
        let mut disk = self.disk;
        disk[..3].copy_from_slice(&VMWARE_OUI[..3]);
        disk[3] = VMWARE_OUI[3] | disk[3] & 0x0f;
        let bytes = disk.map(|byte| format!("{byte:02x}"));
        let (first, second) = bytes.split_at(8);
        format!(
            "ddb.encoding = \"UTF-8\"\nddb.longContentID = \"{long}{cid:08x}\"\nddb.uuid = \"{}-{}\"\n",
            first.join(" "),
            second.join(" ")
        )
    }
}

/// The files of a new disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmdkFiles {
    /// The files beside the image's own: name, and bytes.
    pub parts: Vec<(String, FreshFile)>,
    /// The image's own file.
    pub image: FreshFile,
}

impl NewVmdk<'_> {
    /// The files.
    pub fn lay_out(&self) -> Result<VmdkFiles> {
        let sectors = self.size / SECTOR_BYTES;
        let is_one_file = !self.kind.is_flat && !self.kind.is_split;
        if is_one_file && sectors > MAX_SPARSE_SECTORS {
            let message = "The image size is too large for file format 'vmdk'";
            return Err(Error::invalid_argument(message).field("size").value(self.size));
        }
        if is_one_file {
            let text = self.descriptor(&format!("RW {sectors} SPARSE \"{}\"\n", self.name));
            let text = name_of_text(&text).into_owned();
            let mut image = self.sparse(sectors);
            if text.len() as u64 > DESCRIPTOR_SECTORS * SECTOR_BYTES {
                return Err(Error::invalid_argument("the descriptor would be too long for the image"));
            }
            image.pieces.push((DESCRIPTOR_SECTOR * SECTOR_BYTES, FilePiece::Bytes(text)));
            self.check_parts(0)?;
            return Ok(VmdkFiles { parts: Vec::new(), image });
        }
        let (mut parts, mut lines) = (Vec::new(), String::new());
        let mut left = sectors;
        while left > 0 {
            let len = if self.kind.is_split { left.min(PART_SECTORS) } else { left };
            let name = self.part_name(parts.len())?;
            let (file, word, offset) = match self.kind.is_flat {
                // As a raw file, whose first block shows the alignment of direct I/O.
                true => {
                    let first = (0, FilePiece::Fill(0, (len * SECTOR_BYTES).min(4096)));
                    (FreshFile { len: len * SECTOR_BYTES, pieces: vec![first], mark: None }, "FLAT", " 0")
                }
                false => (self.sparse(len), "SPARSE", ""),
            };
            // Writing to a String can't fail.
            let _ = writeln!(lines, "RW {len} {word} \"{name}\"{offset}");
            parts.push((name, file));
            left -= len;
        }
        self.check_parts(parts.len())?;
        let text = name_of_text(&self.descriptor(&lines)).into_owned();
        // The first line is the mark; it goes with its sector.
        let rest = text.get(SECTOR_BYTES as usize..).unwrap_or_default().to_vec();
        let image = FreshFile {
            len: text.len() as u64,
            pieces: vec![(SECTOR_BYTES, FilePiece::Bytes(rest))],
            mark: Some((0, text[..text.len().min(SECTOR_BYTES as usize)].to_vec())),
        };
        Ok(VmdkFiles { parts, image })
    }

    /// Refuses names of files that the disk doesn't need.
    fn check_parts(&self, needed: usize) -> Result<()> {
        match self.part_names.is_some_and(|names| names.len() > needed) {
            true => Err(Error::invalid_argument("List of extents contains unused extents")),
            false => Ok(()),
        }
    }

    fn part_name(&self, index: usize) -> Result<String> {
        if let Some(names) = self.part_names {
            let missing = || Error::invalid_argument(format!("Extent [{index}] not specified"));
            return names.get(index).cloned().ok_or_else(missing);
        }
        let number = index + 1;
        let (stem, ending) = match self.name.rfind('.') {
            Some(dot) => self.name.split_at(dot),
            None => (self.name, ""),
        };
        Ok(match (self.kind.is_flat, self.kind.is_split) {
            (true, false) => format!("{stem}-flat{ending}"),
            (true, true) => format!("{stem}-f{number:03}{ending}"),
            _ => format!("{stem}-s{number:03}{ending}"),
        })
    }

    fn descriptor(&self, extents: &str) -> String {
        let (parent_cid, hint) = match self.parent {
            Some((cid, name)) => (cid, format!("parentFileNameHint=\"{name}\"\n")),
            None => (NO_PARENT, "\n".to_owned()),
        };
        let heads = if self.adapter == "ide" { 16 } else { 255 };
        let cylinders = self.size / SECTOR_BYTES / 63 / heads;
        let native = if self.ids.is_some() { "isNativeSnapshot=\"no\"\n" } else { "" };
        let ids = self.ids.map(|ids| ids.lines(self.cid)).unwrap_or_default();
        format!(
            "# Disk DescriptorFile\nversion=1\nCID={:x}\nparentCID={parent_cid:x}\n{native}createType=\"{}\"\n{hint}\
             # Extent description\n{extents}\n# The Disk Data Base\n#DDB\n\n\
             ddb.virtualHWVersion = \"{}\"\nddb.geometry.cylinders = \"{cylinders}\"\n\
             ddb.geometry.heads = \"{heads}\"\nddb.geometry.sectors = \"63\"\nddb.adapterType = \"{}\"\n\
             ddb.toolsVersion = \"{}\"\n{ids}",
            self.cid, self.kind.name, self.hardware, self.adapter, self.tools
        )
    }

    /// A sparse extent: header, room for a descriptor, the second directory and its tables, the first ones. A stream
    /// without grains has the same parts.
    fn sparse(&self, sectors: u64) -> FreshFile {
        let tables = sectors.div_ceil(GRAIN_SECTORS * TABLE_ENTRIES);
        let directory_sectors = (tables * 4).div_ceil(SECTOR_BYTES);
        let second = DESCRIPTOR_SECTOR + DESCRIPTOR_SECTORS;
        let first = second + directory_sectors + tables * TABLE_SECTORS;
        let end = (first + directory_sectors + tables * TABLE_SECTORS).next_multiple_of(GRAIN_SECTORS);
        let directory = |at: u64| {
            let start = at + directory_sectors;
            // Fewer than 2^23 tables, each of 4 sectors.
            let entries = (0..tables).map(|index| (start + index * TABLE_SECTORS) as u32);
            FilePiece::Bytes(entries.flat_map(u32::to_le_bytes).collect())
        };
        let mut header = vec![0; SECTOR_BYTES as usize];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"KDMV");
        let version: u32 = match (self.kind.is_stream, self.zeroed_grains) {
            (true, _) => 3,
            (false, true) => 2,
            (false, false) => 1,
        };
        let zeroed = if self.zeroed_grains { FLAG_ZEROED_GRAINS } else { 0 };
        let flags = SPARSE_FLAGS | zeroed | if self.kind.is_stream { STREAM_FLAGS } else { 0 };
        put(4, &version.to_le_bytes());
        put(8, &flags.to_le_bytes());
        put(12, &sectors.to_le_bytes());
        put(20, &GRAIN_SECTORS.to_le_bytes());
        put(28, &DESCRIPTOR_SECTOR.to_le_bytes());
        put(36, &DESCRIPTOR_SECTORS.to_le_bytes());
        put(44, &(TABLE_ENTRIES as u32).to_le_bytes());
        put(48, &second.to_le_bytes());
        put(56, &first.to_le_bytes());
        put(64, &end.to_le_bytes());
        put(73, b"\n \r\n");
        put(77, &u16::from(self.kind.is_stream).to_le_bytes());
        FreshFile {
            len: end * SECTOR_BYTES,
            pieces: vec![(second * SECTOR_BYTES, directory(second)), (first * SECTOR_BYTES, directory(first))],
            mark: Some((0, header)),
        }
    }
}

/// Digits of a content id.
const ID_DIGITS: usize = 8;

/// The text of a descriptor with another content id, at any place in it, and the id; `None` where it has none. The text
/// is no shorter than the old one. The change is within one sector, so that no power cut leaves a part of it. Where a longer
/// id would move text behind that sector, or bytes behind the text limit its length, the id has fewer digits.
pub fn with_cid(bytes: &[u8], cid: u32) -> Option<(Vec<u8>, u32)> {
    let (mut text, cid) = with_id(bytes, b"CID", cid)?;
    put_long_id(&mut text, cid);
    Some((text, cid))
}

/// Has the longer id of VMware's programs end with the content id, in its old width. A power cut may leave one of the two: the
/// content id is the one that children compare.
fn put_long_id(text: &mut [u8], cid: u32) {
    let mut at = 0;
    let mut place = None;
    for line in lines(text) {
        if let Some((from, to)) = value_of(line, b"ddb.longContentID") {
            let value = line[from..to].trim_ascii();
            let digits = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
            if digits.is_some_and(|id| id.len() >= ID_DIGITS && id.iter().all(u8::is_ascii_hexdigit)) {
                place = Some(at + to - 1 - ID_DIGITS);
            }
        }
        at += line.len();
    }
    if let Some(part) = place.and_then(|place| text.get_mut(place..place + ID_DIGITS)) {
        part.copy_from_slice(format!("{cid:08x}").as_bytes());
    }
}

/// The same for the content id of the parent. `None` also where it has too few digits for this one:
/// [`parent_cid_bits`].
pub fn with_parent_cid(bytes: &[u8], cid: u32) -> Option<Vec<u8>> {
    with_id(bytes, b"parentCID", cid).filter(|(_, noted)| *noted == cid).map(|(text, _)| text)
}

/// The bits of a parent's content id that [`with_parent_cid`] takes; `None` where the descriptor has none.
pub fn parent_cid_bits(bytes: &[u8]) -> Option<u32> {
    let (_, widest) = with_id(bytes, b"parentCID", u32::MAX)?;
    Some(u32::BITS - widest.leading_zeros())
}

/// The place of a line's value, where the line has this key.
fn value_of(line: &[u8], key: &[u8]) -> Option<(usize, usize)> {
    let equals = line.iter().position(|byte| *byte == b'=')?;
    let is_key = line[..equals].trim_ascii().eq_ignore_ascii_case(key);
    is_key.then(|| (equals + 1, equals + 1 + line[equals + 1..].trim_ascii_end().len()))
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split_inclusive(|byte| *byte == b'\n')
}

fn with_id(bytes: &[u8], key: &[u8], cid: u32) -> Option<(Vec<u8>, u32)> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (text, behind) = bytes.split_at_checked(end)?;
    let digits = lines(text).filter_map(|line| value_of(line, key)).map(|(from, to)| to - from).min()?;
    let wide = rewritten(text, key, cid, ID_DIGITS);
    if wide.len() == text.len() {
        return Some((wide, cid));
    }
    if behind.iter().all(|byte| *byte == 0) && is_one_sector(text, &wide) {
        return Some((wide, cid));
    }
    let cid = cid & ((1 << (4 * digits)) - 1);
    Some((rewritten(text, key, cid, 0), cid))
}

/// The text with another id, in the width of the old one or in `least` digits.
fn rewritten(text: &[u8], key: &[u8], cid: u32, least: usize) -> Vec<u8> {
    let mut changed = Vec::with_capacity(text.len() + ID_DIGITS);
    for line in lines(text) {
        match value_of(line, key) {
            Some((from, to)) => {
                let digits = (to - from).max(least);
                changed.extend_from_slice(&line[..from]);
                changed.extend_from_slice(format!("{cid:0digits$x}").as_bytes());
                changed.extend_from_slice(&line[to..]);
            }
            None => changed.extend_from_slice(line),
        }
    }
    changed
}

/// True where the texts differ within one sector of the file. They begin with a sector.
fn is_one_sector(old: &[u8], new: &[u8]) -> bool {
    let byte = |text: &[u8], at: usize| text.get(at).copied().unwrap_or(0);
    let mut changed = (0..old.len().max(new.len())).filter(|at| byte(old, *at) != byte(new, *at));
    let first = changed.next();
    let last = changed.next_back().or(first);
    first.map(|at| at as u64 / SECTOR_BYTES) == last.map(|at| at as u64 / SECTOR_BYTES)
}

#[cfg(test)]
mod tests {
    use super::super::{Descriptor, SparseHeader, stream_end};
    use super::*;

    fn disk(size: u64, kind: &str) -> NewVmdk<'static> {
        NewVmdk {
            size,
            kind: *NEW_KINDS.iter().find(|known| known.name == kind).unwrap(),
            adapter: "ide",
            hardware: "4",
            tools: "2147483647",
            zeroed_grains: false,
            cid: 0x1234,
            parent: None,
            name: "disk.vmdk",
            part_names: None,
            ids: None,
        }
    }

    #[test]
    fn one_sparse_file_is_read_as_it_was_meant() {
        let new = NewVmdk { parent: Some((7, "base.vmdk")), zeroed_grains: true, ..disk(5 << 30, "monolithicSparse") };
        let files = new.lay_out().unwrap();
        let header = SparseHeader::parse(&files.image.mark.as_ref().unwrap().1).unwrap();
        assert_eq!((header.directory_sector, header.redundant_directory_sector), (Some(0x297), Some(0x15)));
        assert!(header.zeroed_grains && header.directory_bytes() == 640 && files.image.len == 0x580 * 512);
        let (at, FilePiece::Bytes(text)) = &files.image.pieces[2] else { panic!("no descriptor") };
        let descriptor = Descriptor::parse(text).unwrap();
        assert_eq!((*at, descriptor.cid, descriptor.parent_cid), (512, 0x1234, 7));
        assert_eq!(descriptor.parent_hint.as_deref(), Some("base.vmdk"));
    }

    #[test]
    fn a_new_stream_becomes_one_with_a_footer() {
        let files = disk(5 << 30, "streamOptimized").lay_out().unwrap();
        let header = files.image.mark.unwrap().1;
        let parsed = SparseHeader::parse(&header).unwrap();
        assert_eq!((parsed.version, parsed.compressed, parsed.directory_sector), (3, true, Some(0x297)));
        assert_eq!((parsed.first_grain_sector, files.image.len), (0x580, 0x580 * 512));
        let stream = SparseHeader::parse(&stream_end::header(&header)).unwrap();
        let (directory_sector, redundant_directory_sector) = (None, None);
        assert_eq!(stream, SparseHeader { directory_sector, redundant_directory_sector, ..parsed });
    }

    #[test]
    fn a_split_disk_has_its_parts() {
        for (kind, names) in [
            ("monolithicFlat", &["disk-flat.vmdk"][..]),
            ("twoGbMaxExtentFlat", &["disk-f001.vmdk", "disk-f002.vmdk", "disk-f003.vmdk"]),
            ("twoGbMaxExtentSparse", &["disk-s001.vmdk", "disk-s002.vmdk", "disk-s003.vmdk"]),
        ] {
            let files = disk(5 << 30, kind).lay_out().unwrap();
            let found: Vec<&str> = files.parts.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(found, names);
            let descriptor = Descriptor::parse(&files.image.mark.unwrap().1).unwrap();
            assert_eq!(descriptor.total_sectors().unwrap(), (5 << 30) / 512);
            assert_eq!(descriptor.extents.len(), names.len());
        }
    }

    #[test]
    fn the_content_id_of_a_descriptor_is_changed_in_place() {
        let text = b"# x\nversion=1\nparentCID=ffffffff\nCID=a1\ncreateType=\"custom\"\n\0\0\0";
        let (changed, cid) = with_cid(text, 0xbeef).unwrap();
        assert_eq!(cid, 0xbeef);
        assert_eq!(changed, b"# x\nversion=1\nparentCID=ffffffff\nCID=0000beef\ncreateType=\"custom\"\n");
        assert_eq!(with_cid(b"parentCID=1\n", 1), None);
        assert_eq!(with_parent_cid(b"CID=1\nparentCID=2\n", 0xbeef).unwrap(), b"CID=1\nparentCID=0000beef\n");
        assert_eq!(with_parent_cid(b"parentCID=2\n\0x", 0xbeef), None);
        assert_eq!(with_parent_cid(b"CID=1\n", 1), None);
    }

    #[test]
    fn identifiers_of_vmware_follow_the_content_id() {
        let ids = VmwareIds { content: [0xab; 12], disk: [0xcd; 16] };
        let files = NewVmdk { ids: Some(ids), ..disk(1 << 20, "streamOptimized") }.lay_out().unwrap();
        let text = files.image.pieces.iter().find_map(|(at, piece)| match piece {
            FilePiece::Bytes(bytes) if *at == 512 => Some(bytes.clone()),
            _ => None,
        });
        let text = String::from_utf8(text.unwrap()).unwrap();
        let long = "ddb.longContentID = \"abababababababababababab";
        for part in [
            &format!("{long}00001234\"\n"),
            "ddb.uuid = \"60 00 c2 9d cd cd cd cd-cd cd cd cd cd cd cd cd\"\n",
            "ddb.encoding = \"UTF-8\"\n",
            "\nisNativeSnapshot=\"no\"\ncreateType=",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let (changed, _) = with_cid(text.as_bytes(), 0xdead_beef).unwrap();
        let changed = String::from_utf8(changed).unwrap();
        assert!(changed.contains(&format!("{long}deadbeef\"")) && changed.contains("\nCID=deadbeef\n"), "{changed}");
        // One that is no such number stays.
        for value in ["\"1234\"", "12345678", "\"g2345678\""] {
            let text = format!("CID=00000001\nddb.longContentID={value}\n");
            let (changed, _) = with_cid(text.as_bytes(), 2).unwrap();
            assert_eq!(String::from_utf8(changed).unwrap(), text.replace("01\n", "02\n"));
        }
    }

    /// A power cut may leave one of two sectors, so nothing moves from one to the other.
    #[test]
    fn a_longer_content_id_moves_nothing_behind_its_sector() {
        let start = "# Disk DescriptorFile\nversion=1\nCID=a1\nparentCID=b2\n";
        let extents = format!("RW 1 FLAT \"{}\" 0\n", "x".repeat(600));
        // The id keeps its width there, and comments stay whole: libvmdk finds the sections by them.
        let described = format!("{start}# Extent description\n{extents}");
        let hint = "h".repeat(600);
        for text in
            [described, format!("{start}{extents}"), format!("{start}parentFileNameHint=\"{hint}\"\n# Extents of it\n")]
        {
            let (changed, cid) = with_cid(text.as_bytes(), 0xdead_beef).unwrap();
            assert_eq!((cid, changed.len()), (0xef, text.len()));
            assert_eq!(parent_cid_bits(text.as_bytes()), Some(8));
            assert_eq!(with_parent_cid(text.as_bytes(), 0x1ef), None);
            assert_eq!(with_parent_cid(text.as_bytes(), 0xef).unwrap().len(), text.len());
        }
    }
}
