// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `convert --for`: what each platform takes, in one table.

use crate::output::Failure;

/// A place where a disk is to run.
#[derive(Clone, Copy, Debug)]
pub struct Platform {
    /// Its word.
    pub name: &'static str,
    /// The format.
    pub format: &'static str,
    /// Options of the format.
    pub options: &'static str,
    /// The size is a multiple of so many bytes.
    pub size_unit_bytes: u64,
    /// The sub-format and its reason, for the one line that is said.
    pub about: &'static str,
    /// The ending of a file that the platform takes, in lower case; none: any.
    pub ending: Option<&'static str>,
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const STREAM: &str = "subformat=streamOptimized,adapter_type=lsilogic,hwversion=10,toolsversion=2147483647";

/// The platforms.
const PLATFORMS: &[Platform] = &[
    Platform {
        name: "azure",
        format: "vpc",
        options: "subformat=fixed,force_size=on",
        size_unit_bytes: MIB,
        about: "fixed VHD, the size exactly in whole MiB",
        ending: Some("vhd"),
    },
    Platform {
        name: "hyperv",
        format: "vhdx",
        options: "subformat=dynamic",
        size_unit_bytes: MIB,
        about: "dynamic VHDX; copy it there without holes, for Hyper-V takes no sparse files",
        ending: Some("vhdx"),
    },
    Platform {
        name: "vmware",
        format: "vmdk",
        options: STREAM,
        size_unit_bytes: 512,
        about: "stream-optimised VMDK of version 3 (a machine for an import: a target that ends with .ova)",
        ending: Some("vmdk"),
    },
    Platform {
        name: "virtualbox",
        format: "vdi",
        options: "static=off",
        size_unit_bytes: 512,
        about: "dynamic VDI (a machine for an import: a target that ends with .ova)",
        ending: Some("vdi"),
    },
    Platform {
        name: "gcp",
        format: GCP_FORMAT,
        options: "",
        size_unit_bytes: GIB,
        about: "disk.raw in whole GiB, in a tar archive of GNU's old format, compressed with gzip",
        ending: Some("tar.gz"),
    },
    Platform {
        name: "aws",
        format: "vmdk",
        options: STREAM,
        size_unit_bytes: 512,
        about: "stream-optimised VMDK, which the import of snapshots and of machines takes",
        ending: Some("vmdk"),
    },
];

/// The format of the archive for Google's cloud.
pub const GCP_FORMAT: &str = "tar.gz";

/// The platform of this word, for a target of this name, where the user may have given a format.
pub fn find(word: &str, format: Option<&str>, target: &str) -> Result<Platform, Failure> {
    let platform = PLATFORMS.iter().find(|platform| platform.name == word).copied().ok_or_else(|| {
        let names: Vec<&str> = PLATFORMS.iter().map(|platform| platform.name).collect();
        Failure::new(format!("no platform is called '{word}': {}", names.join(", ")))
    })?;
    if let Some(format) = format.filter(|format| *format != platform.format) {
        return Err(Failure::new(format!("--for {word} makes the format '{}', not '{format}'", platform.format)));
    }
    if let Some(ending) = platform.ending.filter(|ending| !target.to_ascii_lowercase().ends_with(&format!(".{ending}")))
    {
        return Err(Failure::new(format!("{target}: --for {word} makes a file that ends with .{ending}")));
    }
    Ok(platform)
}
