// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The format of a file, judged by its first bytes and its last ones.
//!
//! A mark that is known never reads as raw, also where the format can't be opened: the container's bytes are no disk.
//!
//! A guess is made only for a file that the user names, never for one that another image names. A guest can write any
//! header into a raw disk.

use crate::bytes::be32_at;

/// Bytes from the start of a file that [`probe`] looks at.
pub const PROBE_BYTES: usize = 2048;

/// Bytes from the end of a file that [`probe_with_tail`] looks at: a trailer, and the padding up to whole sectors.
pub const PROBE_TAIL_BYTES: usize = 1024;

/// A format that is recognised (not necessarily one that can be opened).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FormatName {
    /// No other format's mark: the bytes are the disk.
    Raw,
    /// qcow2, versions 2 and 3.
    Qcow2,
    /// qcow, version 1.
    Qcow,
    /// VMware: sparse extent, ESX sparse extent (`COWD`, `seSparse`), or a text descriptor.
    Vmdk,
    /// VirtualBox.
    Vdi,
    /// Virtual PC (VHD): the footer at the end, and for dynamic and differencing disks a copy of it at the start.
    Vpc,
    /// Hyper-V.
    Vhdx,
    /// QEMU enhanced disk.
    Qed,
    /// Linux unified key setup, whatever its version.
    Luks,
    /// Parallels.
    Parallels,
    /// Bochs growing image.
    Bochs,
    /// Linux cloop.
    Cloop,
    /// Apple disk image (UDIF), by the trailer at its end.
    Dmg,
}

impl FormatName {
    /// The driver name as options spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            FormatName::Raw => "raw",
            FormatName::Qcow2 => "qcow2",
            FormatName::Qcow => "qcow",
            FormatName::Vmdk => "vmdk",
            FormatName::Vdi => "vdi",
            FormatName::Vpc => "vpc",
            FormatName::Vhdx => "vhdx",
            FormatName::Qed => "qed",
            FormatName::Luks => "luks",
            FormatName::Parallels => "parallels",
            FormatName::Bochs => "bochs",
            FormatName::Cloop => "cloop",
            FormatName::Dmg => "dmg",
        }
    }
}

impl std::fmt::Display for FormatName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A format's mark: these bytes at this offset.
struct Mark {
    format: FormatName,
    offset: usize,
    bytes: &'static [u8],
}

const fn mark(format: FormatName, offset: usize, bytes: &'static [u8]) -> Mark {
    Mark { format, offset, bytes }
}

const MARKS: &[Mark] = &[
    mark(FormatName::Vmdk, 0, b"KDMV"),
    mark(FormatName::Vmdk, 0, b"COWD"),
    mark(FormatName::Vmdk, 0, b"\xbe\xba\xfe\xca\0\0\0\0"),
    mark(FormatName::Vdi, 64, b"\x7f\x10\xda\xbe"),
    mark(FormatName::Vpc, 0, b"conectix"),
    mark(FormatName::Vhdx, 0, b"vhdxfile"),
    mark(FormatName::Qed, 0, b"QED\0"),
    mark(FormatName::Luks, 0, b"LUKS\xba\xbe"),
    mark(FormatName::Parallels, 0, b"WithoutFreeSpace"),
    mark(FormatName::Parallels, 0, b"WithouFreSpacExt"),
    mark(FormatName::Bochs, 0, b"Bochs Virtual HD Image"),
    mark(FormatName::Cloop, 0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop"),
];

/// The format of a file whose first bytes are `head` (up to [`PROBE_BYTES`]; fewer where the file is shorter). `Raw`
/// when no mark fits.
pub fn probe(head: &[u8]) -> FormatName {
    if let Some(format) = probe_qcow(head) {
        return format;
    }
    let found = MARKS.iter().find(|mark| head.get(mark.offset..).is_some_and(|tail| tail.starts_with(mark.bytes)));
    match found {
        Some(mark) => mark.format,
        None if is_vmdk_descriptor(head) => FormatName::Vmdk,
        None => FormatName::Raw,
    }
}

/// qcow and qcow2 share the magic; the version distinguishes them. An unknown version is qcow2 all the same: the driver
/// refuses it by its version, which is better than taking its metadata for a disk.
fn probe_qcow(head: &[u8]) -> Option<FormatName> {
    if be32_at(head, 0)? != crate::qcow2::MAGIC {
        return None;
    }
    match be32_at(head, 4)? {
        1 => Some(FormatName::Qcow),
        _ => Some(FormatName::Qcow2),
    }
}

/// A VMDK descriptor is a text that begins with a comment naming it, in any case. Or, behind other comments, it begins
/// with the version of the descriptor.
fn is_vmdk_descriptor(head: &[u8]) -> bool {
    const TITLE: &[u8] = b"# Disk DescriptorFile";
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
    if text.get(..TITLE.len()).is_some_and(|title| title.eq_ignore_ascii_case(TITLE)) {
        return true;
    }
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with(b"#"));
    let version = first.and_then(|line| line.strip_prefix(b"version="));
    version.is_some_and(|version| !version.is_empty() && version.iter().all(u8::is_ascii_digit))
}

/// As [`probe`]; a file that is `Raw` by that is judged by `tail`. These are the last bytes of the file (up to
/// [`PROBE_TAIL_BYTES`]; fewer where the file is shorter).
pub fn probe_with_tail(head: &[u8], tail: &[u8]) -> FormatName {
    match probe(head) {
        FormatName::Raw if has_vhd_footer(tail) => FormatName::Vpc,
        FormatName::Raw if has_udif_trailer(tail) => FormatName::Dmg,
        format => format,
    }
}

/// Length of a VHD footer and of a UDIF trailer, in bytes.
const TRAILER_BYTES: usize = 512;

/// The footer that every VHD ends with: its cookie, version and a type of disk that there is. Old ones lack the last byte.
fn has_vhd_footer(tail: &[u8]) -> bool {
    let is_footer = |footer: &[u8]| {
        footer.starts_with(b"conectix")
            && be32_at(footer, 12).is_some_and(|version| version >> 16 == 1)
            && be32_at(footer, 60).is_some_and(|kind| (2..=4).contains(&kind))
    };
    tail.windows(TRAILER_BYTES - 1).any(is_footer)
}

/// The trailer of a UDIF image: its magic and its own length.
fn has_udif_trailer(tail: &[u8]) -> bool {
    let is_trailer = |part: &[u8]| part.starts_with(b"koly") && be32_at(part, 8) == Some(TRAILER_BYTES as u32);
    tail.windows(TRAILER_BYTES).any(is_trailer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks() {
        for (head, format) in [
            (&b""[..], FormatName::Raw),
            (b"QFI\xfb", FormatName::Raw),
            (b"QFI\xfb\0\0\0\x03", FormatName::Qcow2),
            (b"QFI\xfb\0\0\0\x02....", FormatName::Qcow2),
            (b"QFI\xfb\0\0\0\x01", FormatName::Qcow),
            (b"KDMV\x01\0\0\0", FormatName::Vmdk),
            (b"COWD", FormatName::Vmdk),
            (b"\xbe\xba\xfe\xca\0\0\0\0\x01\0\0\0\x02\0\0\0", FormatName::Vmdk),
            (b"# Disk DescriptorFile\nversion=1\n", FormatName::Vmdk),
            (b"\r\n# Disk DescriptorFile\r\nversion=2\r\nCID=1", FormatName::Vmdk),
            (b"QFI\xfb\0\0\0\x04", FormatName::Qcow2),
            (b"QFI\xfb\0\0\0\0", FormatName::Qcow2),
            (b"# only a comment\nhello", FormatName::Raw),
            (b"\xef\xbb\xbf# disk descriptorfile\nversion=1\n", FormatName::Vmdk),
            (b"# a comment\r\n\r\n # another\r\nversion=1\r\n", FormatName::Vmdk),
            (b"version=1\n", FormatName::Vmdk),
            (b"version=", FormatName::Raw),
            (b"version=one\n", FormatName::Raw),
            (b"vhdxfile", FormatName::Vhdx),
            (b"conectix", FormatName::Vpc),
            (b"QED\0", FormatName::Qed),
            (b"LUKS\xba\xbe\0\x01", FormatName::Luks),
            (b"LUKS\xba\xbe\0\x07", FormatName::Luks),
            (b"hsqs\0\0\0\0", FormatName::Raw),
            (b"\x1f\x8b\x08\0", FormatName::Raw),
            (b"WithoutFreeSpace", FormatName::Parallels),
        ] {
            assert_eq!(probe(head), format, "{:?}", String::from_utf8_lossy(head));
        }
        let mut vdi = vec![b'<'; 64];
        vdi.extend_from_slice(&[0x7f, 0x10, 0xda, 0xbe]);
        assert_eq!(probe(&vdi), FormatName::Vdi);
    }

    /// A tail with `bytes` at the offsets that go with them.
    fn tail(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut tail = vec![0; TRAILER_BYTES];
        for (offset, bytes) in parts {
            tail[*offset..*offset + bytes.len()].copy_from_slice(bytes);
        }
        tail
    }

    #[test]
    fn marks_at_the_end() {
        let head = [0; PROBE_BYTES];
        let footer = |kind: u8, shift: usize| {
            tail(&[(shift, b"conectix"), (12 + shift, &[0, 1, 0, 0]), (60 + shift, &[0, 0, 0, kind])])
        };
        for kind in 2..=4 {
            assert_eq!(probe_with_tail(&head, &footer(kind, 0)), FormatName::Vpc);
            assert_eq!(probe_with_tail(&head, &footer(kind, 1)), FormatName::Vpc);
            assert_eq!(probe_with_tail(&head, &[footer(kind, 0), vec![0; 511]].concat()), FormatName::Vpc);
        }
        assert_eq!(probe_with_tail(&head, &footer(5, 0)), FormatName::Raw);
        assert_eq!(probe_with_tail(&head, &footer(2, 0)[1..]), FormatName::Raw);
        assert_eq!(probe_with_tail(&head, &footer(2, 2)), FormatName::Raw);
        let trailer = tail(&[(0, b"koly"), (4, &[0, 0, 0, 4]), (8, &[0, 0, 2, 0])]);
        assert_eq!(probe_with_tail(&head, &trailer), FormatName::Dmg);
        assert_eq!(probe_with_tail(&head, &[vec![1; 88], trailer.clone(), vec![0; 424]].concat()), FormatName::Dmg);
        assert_eq!(probe_with_tail(&head, &tail(&[(0, b"koly")])), FormatName::Raw);
        // The start has the first word.
        assert_eq!(probe_with_tail(b"QFI\xfb\0\0\0\x03", &trailer), FormatName::Qcow2);
        assert_eq!(probe_with_tail(&head, &[]), FormatName::Raw);
    }
}
