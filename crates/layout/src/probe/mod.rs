// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which format a file is in, judged from its first bytes.
//!
//! A guess is only ever made on the word of the user who named the file, never on the word of another image: a guest
//! can write any header into a raw disk.

use crate::bytes::be32_at;

/// Bytes from the start of a file that [`probe`] looks at.
pub const PROBE_BYTES: usize = 2048;

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
    /// VMware: sparse extent, ESX sparse extent, or a text descriptor.
    Vmdk,
    /// VirtualBox.
    Vdi,
    /// Virtual PC (VHD) with a copy of the footer at the start: dynamic and differencing disks.
    Vpc,
    /// Hyper-V.
    Vhdx,
    /// QEMU enhanced disk.
    Qed,
    /// Linux unified key setup, versions 1 and 2.
    Luks,
    /// Parallels.
    Parallels,
    /// Bochs growing image.
    Bochs,
    /// Linux cloop.
    Cloop,
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
    mark(FormatName::Vdi, 64, b"\x7f\x10\xda\xbe"),
    mark(FormatName::Vpc, 0, b"conectix"),
    mark(FormatName::Vhdx, 0, b"vhdxfile"),
    mark(FormatName::Qed, 0, b"QED\0"),
    mark(FormatName::Luks, 0, b"LUKS\xba\xbe\0\x01"),
    mark(FormatName::Luks, 0, b"LUKS\xba\xbe\0\x02"),
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

/// qcow and qcow2 share the magic; the version tells them apart. One that nobody knows yet is qcow2 all the same: the
/// driver refuses it by its version, which is better than taking its metadata for a disk.
fn probe_qcow(head: &[u8]) -> Option<FormatName> {
    if be32_at(head, 0)? != crate::qcow2::MAGIC {
        return None;
    }
    match be32_at(head, 4)? {
        0 => None,
        1 => Some(FormatName::Qcow),
        _ => Some(FormatName::Qcow2),
    }
}

/// A VMDK descriptor is a text that begins with a comment naming it.
fn is_vmdk_descriptor(head: &[u8]) -> bool {
    head.trim_ascii_start().starts_with(b"# Disk DescriptorFile")
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
            (b"# Disk DescriptorFile\nversion=1\n", FormatName::Vmdk),
            (b"\r\n# Disk DescriptorFile\r\nversion=2\r\nCID=1", FormatName::Vmdk),
            (b"QFI\xfb\0\0\0\x04", FormatName::Qcow2),
            (b"QFI\xfb\0\0\0\0", FormatName::Raw),
            (b"# only a comment\nhello", FormatName::Raw),
            (b"vhdxfile", FormatName::Vhdx),
            (b"conectix", FormatName::Vpc),
            (b"QED\0", FormatName::Qed),
            (b"LUKS\xba\xbe\0\x01", FormatName::Luks),
            (b"WithoutFreeSpace", FormatName::Parallels),
        ] {
            assert_eq!(probe(head), format, "{:?}", String::from_utf8_lossy(head));
        }
        let mut vdi = vec![b'<'; 64];
        vdi.extend_from_slice(&[0x7f, 0x10, 0xda, 0xbe]);
        assert_eq!(probe(&vdi), FormatName::Vdi);
    }
}
