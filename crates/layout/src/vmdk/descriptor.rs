// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The descriptor: a text of `key=value` lines, extent lines and comments ("The Descriptor File").

use super::sectors_to_bytes;
use cowshed_types::{Error, Result, text_of_name};

/// `parentCID` of a disk without parent.
pub const NO_PARENT: u32 = 0xffff_ffff;

/// Bounds of a text that is taken for a descriptor.
pub mod limits {
    /// Longest text in bytes.
    pub const DESCRIPTOR_BYTES: usize = 4 << 20;
    /// The most extents; each is a file that is held open.
    pub const EXTENTS: usize = 4096;
    /// Longest file name in bytes.
    pub const NAME_BYTES: usize = 1023;
}

/// The disk's properties in the descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Content id: changes with the first write after an open.
    pub cid: u32,
    /// Content id that the parent had; [`NO_PARENT`] without one.
    pub parent_cid: u32,
    /// `createType`: "monolithicSparse", …
    pub create_type: String,
    /// `parentFileNameHint`: where the parent is. Only with a parent.
    pub parent_hint: Option<String>,
    /// `changeTrackPath`: the file in which VMware tracks the changed blocks.
    pub change_track: Option<String>,
    /// The extents, in the order of the disk.
    pub extents: Vec<ExtentLine>,
    /// `ddb.geometry.cylinders` is 0: a disk without extents is meant so.
    pub has_no_cylinders: bool,
}

/// One line of the section "Extent description".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentLine {
    /// The access that the descriptor allows.
    pub access: Access,
    /// Length in sectors.
    pub sectors: u64,
    /// The storage of the bytes.
    pub kind: ExtentKind,
    /// Name of the file, as written; empty for [`ExtentKind::Zero`].
    pub name: String,
    /// First sector in the file (flat kinds).
    pub offset_sectors: u64,
}

/// The first word of an extent line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `RW`.
    ReadWrite,
    /// `RDONLY`.
    ReadOnly,
    /// `NOACCESS`.
    None,
}

/// The third word of an extent line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// `FLAT`: the bytes as they are.
    Flat,
    /// `VMFS`: the same, on an ESX host.
    Vmfs,
    /// `SPARSE`: grains behind a directory.
    Sparse,
    /// `VMFSSPARSE`: the same with the older header of ESX.
    VmfsSparse,
    /// `ZERO`: reads as zeroes, has no file.
    Zero,
    /// `SESPARSE`: in grains of 4 KiB, by ESX since version 6.
    SeSparse,
    /// `VMFSRDM`: a device behind a pointer.
    VmfsRdm,
    /// `VMFSRAW`: a device.
    VmfsRaw,
}

const KINDS: &[(&str, ExtentKind)] = &[
    ("FLAT", ExtentKind::Flat),
    ("VMFS", ExtentKind::Vmfs),
    ("SPARSE", ExtentKind::Sparse),
    ("VMFSSPARSE", ExtentKind::VmfsSparse),
    ("ZERO", ExtentKind::Zero),
    ("SESPARSE", ExtentKind::SeSparse),
    ("VMFSRDM", ExtentKind::VmfsRdm),
    ("VMFSRAW", ExtentKind::VmfsRaw),
];

impl ExtentKind {
    /// The word, as written in descriptors.
    pub fn as_str(self) -> &'static str {
        KINDS.iter().find(|(_, kind)| *kind == self).map_or("", |(word, _)| word)
    }

    fn parse(word: &str) -> Option<Self> {
        KINDS.iter().find(|(known, _)| *known == word).map(|(_, kind)| *kind)
    }
}

impl Descriptor {
    /// Parses a descriptor: a file of its own, or the part of a sparse extent that holds one. It ends at the first NUL.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let bytes = &bytes[..end];
        if bytes.len() > limits::DESCRIPTOR_BYTES {
            let message = format!("the VMDK descriptor is longer than {} bytes", limits::DESCRIPTOR_BYTES);
            return Err(Error::invalid_image("descriptor", bytes.len(), message));
        }
        // Whatever `encoding` says, a name stands for its bytes: files that came from Windows have them.
        let text = text_of_name(bytes);
        let mut keys = Keys::default();
        let mut extents = Vec::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match extent_line(line)? {
                Some(_) if extents.len() == limits::EXTENTS => {
                    let message = format!("the VMDK descriptor has more than {} extents", limits::EXTENTS);
                    return Err(Error::invalid_image("extents", extents.len() + 1, message));
                }
                Some(extent) => extents.push(extent),
                None => keys.take(line)?,
            }
        }
        keys.finish(extents)
    }

    /// True when the disk is a difference to a parent.
    pub fn has_parent(&self) -> bool {
        self.parent_cid != NO_PARENT
    }

    /// Length of all extents together, sectors.
    pub fn total_sectors(&self) -> Result<u64> {
        let total = self.extents.iter().try_fold(0u64, |sum, extent| sum.checked_add(extent.sectors));
        total.filter(|sectors| sectors_to_bytes(*sectors).is_some()).ok_or_else(|| {
            Error::invalid_image("extents", self.extents.len(), "the extents of the VMDK descriptor are too large")
        })
    }
}

/// The keys that count; all others belong to VMware's tools.
#[derive(Default)]
struct Keys {
    version: Option<String>,
    cid: Option<String>,
    parent_cid: Option<String>,
    create_type: Option<String>,
    parent_hint: Option<String>,
    change_track: Option<String>,
    cylinders: Option<String>,
}

impl Keys {
    fn take(&mut self, line: &str) -> Result<()> {
        // Lines without '=' are of other sections than those we know; VMware's readers skip them, too.
        let Some((key, value)) = line.split_once('=') else { return Ok(()) };
        let slot = match key.trim().to_ascii_lowercase().as_str() {
            "version" => &mut self.version,
            "cid" => &mut self.cid,
            "parentcid" => &mut self.parent_cid,
            "createtype" => &mut self.create_type,
            "parentfilenamehint" => &mut self.parent_hint,
            "changetrackpath" => &mut self.change_track,
            "ddb.geometry.cylinders" => &mut self.cylinders,
            _ => return Ok(()),
        };
        let value = value.trim();
        let value = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
        // Two answers to one question: neither can be trusted.
        if slot.as_deref().is_some_and(|known| known != value) {
            let message = format!("the VMDK descriptor gives '{}' twice", key.trim());
            return Err(Error::invalid_image("descriptor", value, message));
        }
        *slot = Some(value.to_owned());
        Ok(())
    }

    fn finish(self, extents: Vec<ExtentLine>) -> Result<Descriptor> {
        match self.version.as_deref() {
            None | Some("1" | "2" | "3") => {}
            Some(other) => {
                return Err(Error::unsupported("this version of VMDK descriptors is unknown")
                    .field("version")
                    .value(other));
            }
        }
        let create_type = self.create_type.filter(|name| !name.is_empty());
        let create_type = create_type.ok_or_else(|| {
            Error::invalid_image("createType", "missing", "there is no VMDK descriptor, or no whole one")
                .qemu("invalid VMDK image descriptor")
        })?;
        let parent_cid = number("parentCID", self.parent_cid.as_deref())?.unwrap_or(NO_PARENT);
        let parent_hint = self.parent_hint.filter(|name| !name.is_empty() && parent_cid != NO_PARENT);
        if parent_hint.as_ref().is_some_and(|name| name.len() > limits::NAME_BYTES) {
            let message = format!("the name of the parent is longer than {} bytes", limits::NAME_BYTES);
            return Err(Error::invalid_image("parentFileNameHint", "too long", message));
        }
        Ok(Descriptor {
            cid: number("CID", self.cid.as_deref())?.unwrap_or(0),
            parent_cid,
            create_type,
            parent_hint,
            change_track: self.change_track.filter(|path| !path.is_empty()),
            extents,
            has_no_cylinders: self.cylinders.as_deref() == Some("0"),
        })
    }
}

fn number(field: &'static str, text: Option<&str>) -> Result<Option<u32>> {
    let Some(text) = text else { return Ok(None) };
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match u32::from_str_radix(text, 16) {
        Ok(number) if is_number => Ok(Some(number)),
        _ => Err(Error::invalid_image(field, text, "a content id of the VMDK descriptor is no hexadecimal number")),
    }
}

/// `ACCESS SECTORS TYPE ["NAME" [OFFSET …]]`; `None` for lines that begin with none of the access words.
fn extent_line(line: &str) -> Result<Option<ExtentLine>> {
    let bad = |message: &str| Err(Error::invalid_image("extent", line.escape_default(), message));
    let (word, rest) = split_word(line);
    let access = match word {
        "RW" => Access::ReadWrite,
        "RDONLY" => Access::ReadOnly,
        "NOACCESS" => Access::None,
        _ => return Ok(None),
    };
    let (sectors, rest) = split_word(rest);
    let (kind, rest) = split_word(rest);
    let Some(sectors) = decimal(sectors).filter(|sectors| sectors_to_bytes(*sectors).is_some()) else {
        return bad("the length of a VMDK extent is no number of sectors");
    };
    let Some(kind) = ExtentKind::parse(kind) else {
        let unknown = bad("the type of a VMDK extent is unknown");
        return unknown.map_err(|error: Error| error.qemu(format!("Invalid extent line: {line}")));
    };
    if kind == ExtentKind::Zero {
        return Ok(Some(ExtentLine { access, sectors, kind, name: String::new(), offset_sectors: 0 }));
    }
    let name = rest.strip_prefix('"').and_then(|rest| rest.split_once('"'));
    let Some((name, rest)) = name.filter(|(name, _)| !name.is_empty() && name.len() <= limits::NAME_BYTES) else {
        return bad("a VMDK extent has no file name");
    };
    // Behind the offset ESX writes the ids of a device.
    let offset = split_word(rest.trim_start()).0;
    let offset_sectors = match offset {
        "" => Some(0),
        text => decimal(text)
            .filter(|offset| offset.checked_add(sectors).is_some_and(|end| sectors_to_bytes(end).is_some())),
    };
    match offset_sectors {
        Some(0) => Ok(Some(ExtentLine { access, sectors, kind, name: name.to_owned(), offset_sectors: 0 })),
        Some(_) if !matches!(kind, ExtentKind::Flat | ExtentKind::Vmfs) => bad("only flat VMDK extents have an offset"),
        Some(offset_sectors) => Ok(Some(ExtentLine { access, sectors, kind, name: name.to_owned(), offset_sectors })),
        None => bad("the offset of a VMDK extent is no number of sectors"),
    }
}

fn split_word(text: &str) -> (&str, &str) {
    match text.split_once([' ', '\t']) {
        Some((word, rest)) => (word, rest.trim_start()),
        None => (text, ""),
    }
}

fn decimal(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPLIT: &str = "# Disk DescriptorFile\r\nversion=1\r\nencoding=\"UTF-8\"\r\nCID = 32d1f3b5\r\nparentCID=ffffffff\r\n\
                         createType=\"twoGbMaxExtentSparse\"\r\n\r\n# Extent description\r\n\
                         RW 4192256 SPARSE \"disk one-s001.vmdk\"\r\nRDONLY 2048 ZERO\r\n\
                         RW 63 FLAT \"d-f.vmdk\" 128\r\n\r\n#DDB\r\nddb.adapterType = \"ide\"\r\n\0\0rubbish";

    fn parse(text: &str) -> Result<Descriptor> {
        Descriptor::parse(text.as_bytes())
    }

    #[test]
    fn a_descriptor_is_read() {
        let descriptor = parse(SPLIT).unwrap();
        assert_eq!((descriptor.cid, descriptor.has_parent()), (0x32d1_f3b5, false));
        assert_eq!(descriptor.create_type, "twoGbMaxExtentSparse");
        assert_eq!(descriptor.total_sectors().unwrap(), 4_192_256 + 2048 + 63);
        let names: Vec<_> = descriptor.extents.iter().map(|extent| (&*extent.name, extent.kind)).collect();
        let expected =
            [("disk one-s001.vmdk", ExtentKind::Sparse), ("", ExtentKind::Zero), ("d-f.vmdk", ExtentKind::Flat)];
        assert_eq!(names, expected);
        assert_eq!(descriptor.extents[2].offset_sectors, 128);
    }

    #[test]
    fn a_parent_is_read_and_needs_its_id() {
        let child = "CID=1\nparentCID=b21f0fa4\ncreateType=\"monolithicSparse\"\nparentFileNameHint=\"../base.vmdk\"";
        let descriptor = parse(child).unwrap();
        assert_eq!((descriptor.parent_cid, descriptor.parent_hint.as_deref()), (0xb21f_0fa4, Some("../base.vmdk")));
        let orphan = child.replace("b21f0fa4", "ffffffff");
        assert_eq!(parse(&orphan).unwrap().parent_hint, None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |line: &str| format!("createType=\"vmfs\"\n{line}\n");
        for (text, part) in [
            ("".to_owned(), "no VMDK descriptor"),
            ("CID=1\n".to_owned(), "createType"),
            (with("version=9"), "version"),
            (with("CID=xyz"), "hexadecimal"),
            (with("CID=+1"), "hexadecimal"),
            (with("CID=1\nCID=2"), "twice"),
            (with("createType=\"custom\""), "twice"),
            (with("RW x FLAT \"a\" 0"), "no number of sectors"),
            (with("RW 99999999999999999999 FLAT \"a\" 0"), "no number of sectors"),
            (with("RW 18014398509481984 FLAT \"a\" 0"), "no number of sectors"),
            (with("RW 1 FLAT \"a\" 18014398509481983"), "offset"),
            (with("RW 1 FLAT \"a\" -1"), "offset"),
            (with("RW 1 SPARSE \"a\" 1"), "only flat"),
            (with("RW 1 ROUND \"a\" 0"), "type"),
            (with("RW 1 FLAT"), "no file name"),
            (with("RW 1 FLAT \"\" 0"), "no file name"),
            (with("RW 1 FLAT \"a"), "no file name"),
            (with(&format!("RW 1 FLAT \"{}\" 0", "a".repeat(2000))), "no file name"),
            (with(&"RW 1 ZERO\n".repeat(limits::EXTENTS + 1)), "more than"),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let line = with("RW 1 FLAT \"~\" 0");
        let foreign: Vec<u8> = line.bytes().map(|byte| if byte == b'~' { 0xff } else { byte }).collect();
        let foreign = Descriptor::parse(&foreign).unwrap();
        assert_eq!(foreign.extents[0].name, text_of_name(b"\xff"));
        let many = parse(&with(&"RW 9007199254740991 ZERO\n".repeat(4))).unwrap();
        assert!(many.total_sectors().is_err());
    }
}
