// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `convert --for`: each platform's requirements, in one table.

use super::{ConvertArgs, options, package, summary};
use crate::commands::{new_image, ova, work};
use crate::output::{Console, Failure};
use cowshed_jobs::convert::ConvertOptions;
use std::time::Instant;

/// A place where a disk is to run.
#[derive(Clone, Copy, Debug)]
pub struct Platform {
    /// Its word.
    pub name: &'static str,
    /// The format.
    pub format: &'static str,
    /// Options of the format.
    pub options: &'static str,
    /// The size is a multiple of this many bytes.
    pub size_unit_bytes: u64,
    /// The disk has the identifiers that VMware's programs write.
    pub has_vmware_ids: bool,
    /// The sub-format and its reason, for the one line that is printed.
    pub about: &'static str,
    /// The ending of a file that the platform takes, in lower case; none: any.
    pub ending: Option<&'static str>,
}

impl Platform {
    /// Prints one line about the new image.
    pub fn print_summary(self, size: u64, console: &mut Console) {
        console.complain(format_args!("for {}: {} ({size} bytes)", self.name, self.about));
    }
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
        has_vmware_ids: false,
        about: "fixed VHD, the size exactly in whole MiB",
        ending: Some("vhd"),
    },
    Platform {
        name: "hyperv",
        format: "vhdx",
        options: "subformat=dynamic",
        size_unit_bytes: MIB,
        has_vmware_ids: false,
        about: "dynamic VHDX; copy it there without holes, for Hyper-V takes no sparse files",
        ending: Some("vhdx"),
    },
    Platform {
        name: "vmware",
        format: "vmdk",
        options: STREAM,
        size_unit_bytes: 512,
        has_vmware_ids: true,
        about: "stream-optimised VMDK of version 3 (a machine for an import: a target that ends with .ova)",
        ending: Some("vmdk"),
    },
    Platform {
        name: "virtualbox",
        format: "vdi",
        options: "static=off",
        size_unit_bytes: 512,
        has_vmware_ids: false,
        about: "dynamic VDI (a machine for an import: a target that ends with .ova)",
        ending: Some("vdi"),
    },
    Platform {
        name: "gcp",
        format: GCP_FORMAT,
        options: "",
        size_unit_bytes: GIB,
        has_vmware_ids: false,
        about: "disk.raw in whole GiB, in a tar archive of GNU's old format, compressed with gzip",
        ending: Some("tar.gz"),
    },
    Platform {
        name: "aws",
        format: "vmdk",
        options: STREAM,
        size_unit_bytes: 512,
        has_vmware_ids: true,
        about: "stream-optimised VMDK, which the import of snapshots and of machines takes",
        ending: Some("vmdk"),
    },
];

/// The format of the archive for Google's cloud.
pub const GCP_FORMAT: &str = "tar.gz";

/// The platform of this word, for a target of this name, where the user may have given a format.
fn find(word: &str, format: Option<&str>, target: &str) -> Result<Platform, Failure> {
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

/// The platform that `--for` names for the target; the format and its options are set then.
pub fn apply(args: &mut ConvertArgs, target: &str) -> Result<Option<Platform>, Failure> {
    let Some(word) = &args.platform else { return Ok(None) };
    let platform = find(word, args.target_format.as_deref(), target)?;
    for (wrong, option) in [
        (args.no_create, "-n"),
        (!args.options.is_empty(), "-o"),
        (args.compress, "-c"),
        (args.backing.is_some() || args.backing_format.is_some(), "-b"),
        (args.bitmaps, "--bitmaps"),
    ] {
        if wrong {
            return Err(Failure::new(format!("{option} can't be given with --for, which says how the target is made")));
        }
    }
    args.target_format = Some(platform.format.to_owned());
    if !platform.options.is_empty() {
        args.options = vec![platform.options.to_owned()];
    }
    Ok(Some(platform))
}

/// `--for gcp`.
pub fn pack(mut args: ConvertArgs, sources: &[String], target: &str, console: &mut Console) -> Result<u8, Failure> {
    if args.naming.untrusted.is_on() {
        return Err(Failure::new(package::NO_ARCHIVES));
    }
    let Some(platform) = args.platform.as_deref().map(|word| find(word, None, target)).transpose()? else {
        return Err(Failure::new("--for is missing"));
    };
    if package::is_one(&mut args, sources, console)? {
        return Err(Failure::new("an archive is made of a disk: convert the package's first"));
    }
    let args = ConvertArgs { target_format: Some("raw".to_owned()), ..args };
    let options = ConvertOptions { size_unit_bytes: platform.size_unit_bytes, ..options(&args, sources, target)? };
    let path = new_image::local_path(target);
    let (started, persona) = (Instant::now(), console.persona);
    let job = work::Foreground::new(persona, args.progress, args.quiet, "packing")?.leaving_nothing();
    let work = async |handle| ova::cloud::pack(&options, &path, args.force, &handle).await;
    let outcome = job.run(work, |error| package::failed(persona, &options, &path, error))?;
    if !args.quiet {
        platform.print_summary(outcome.size, console);
        summary(&outcome, target, started, console);
    }
    Ok(0)
}
