// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry points of the parsers of packages: they take any bytes and panic only on a bug.

use super::replay::Entry;
use cowshed_ova::pieces::pieces_of;
use cowshed_ova::tar::{self, Dialect};
use cowshed_ova::{Envelope, Manifest, limits};
use std::io::Cursor;

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[("ova", archive), ("ovf", descriptor)];

/// An archive: its files lie in it, and their headers can be written again.
pub fn archive(data: &[u8]) {
    let _ = tar::starts_with_descriptor(data);
    let Ok(members) = tar::members(&mut Cursor::new(data), data.len() as u64) else { return };
    assert!(members.len() <= limits::MEMBERS);
    for member in &members {
        assert!(member.offset + member.len <= data.len() as u64);
        assert_eq!(tar::plain_name(&member.name).unwrap(), member.name);
        if let Ok(header) = tar::header(&member.name, member.len, 0, Dialect::Ustar) {
            let mut file = header.to_vec();
            file.extend_from_slice(&data[member.offset as usize..][..member.len as usize]);
            let again = tar::members(&mut Cursor::new(&file), file.len() as u64).unwrap();
            assert_eq!((again[0].name.as_str(), again[0].len), (member.name.as_str(), member.len));
        }
        if tar::has_ending(&member.name, "ovf") {
            descriptor(&data[member.offset as usize..][..member.len as usize]);
        }
    }
}

/// A descriptor, and the same bytes as a manifest.
pub fn descriptor(data: &[u8]) {
    if let Ok(manifest) = Manifest::parse(data) {
        let text: String = manifest.lines.iter().map(cowshed_ova::manifest::Line::text).collect();
        assert_eq!(Manifest::parse(text.as_bytes()).unwrap(), manifest);
    }
    let Ok(envelope) = Envelope::parse(data) else { return };
    for file in &envelope.files {
        assert_eq!(tar::plain_name(&file.href).unwrap(), file.href);
        if let Ok(pieces) = pieces_of(file) {
            assert!(pieces.len() <= limits::MEMBERS);
            let sum: u64 = pieces.iter().filter_map(|(_, len)| *len).sum();
            assert!(file.size.is_none_or(|size| size == sum));
        }
    }
    for disk in &envelope.disks {
        assert!(disk.file.as_ref().is_none_or(|file| envelope.file(file).is_some()));
    }
    for kind in ["3", "4", "10"] {
        let _ = envelope.quantity(kind);
    }
}
