// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The format of a disk of a package, which a URI names.

use crate::tar::printable;
use cowshed_types::{Error, Result};

/// Drivers by a part of the URI of a format, in lower case.
const FORMATS: &[(&str, &str)] = &[
    ("vmdk", "vmdk"),
    ("vhdx", "vhdx"),
    ("vhd", "vpc"),
    ("virtualpc", "vpc"),
    ("vdi", "vdi"),
    ("qcow2", "qcow2"),
    ("qcow-image-format", "qcow2"),
    ("raw", "raw"),
];

/// The driver of a format's URI.
pub(crate) fn format_of(uri: &str) -> Result<&'static str> {
    // The part behind the last slash decides; the host of the URI may have any name.
    let last = uri.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    // A word of three letters may be a part of any other.
    let is_in_last = |part: &str| match part {
        "raw" => last.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == part),
        _ => last.contains(part),
    };
    let known = FORMATS.iter().find(|(part, _)| is_in_last(part));
    let anywhere = || FORMATS.iter().find(|(part, _)| *part != "raw" && uri.to_ascii_lowercase().contains(part));
    let found = known.or_else(anywhere).map(|(_, driver)| *driver);
    found.ok_or_else(|| Error::unsupported(format!("the format '{}' isn't known", printable(uri))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_uris() {
        for (uri, driver) in [
            ("http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized", "vmdk"),
            ("http://www.vmware.com/specifications/vmdk.html#sparse", "vmdk"),
            ("http://www.gnome.org/~markmc/qcow-image-format.html", "qcow2"),
            ("http://go.microsoft.com/fwlink/?LinkId=137171#vhd", "vpc"),
            ("http://www.virtualbox.org/ovf/machine/vdi", "vdi"),
        ] {
            assert_eq!(format_of(uri).unwrap(), driver, "{uri}");
        }
        for uri in ["", "http://example.org/draw/x", "http://example.org/draw", "http://www.ecma-international.org/iso"]
        {
            assert!(format_of(uri).is_err(), "{uri}");
        }
    }
}
