// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A new package as the target of a conversion: each source becomes a disk.

use super::archive::{Archive, Content, beside, claim};
use super::{ForArg, manifest_name};
use crate::commands::sizes;
use crate::output::Failure;
use clap::{Args, ValueEnum};
use cowshed_block::{Error, Result};
use cowshed_jobs::convert::{self, ConvertOptions, ConvertOutcome};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_ova::machine::{Firmware, Importer, NewDisk, NewMachine};
use cowshed_ova::manifest::{DigestKind, Line};
use cowshed_ova::tar::has_ending;
use std::fs::File;
use std::path::Path;
use tempfile::NamedTempFile;

/// `--vm-firmware`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum FirmwareArg {
    #[default]
    Bios,
    Efi,
}

/// The machine of a new package.
#[derive(Args, Clone, Debug)]
pub struct MachineArgs {
    /// With -O ova: the machine's name [default: the target's name without its ending]
    #[arg(long, value_name = "NAME")]
    vm_name: Option<String>,
    /// With -O ova: its processors [default: 1]
    #[arg(long, value_name = "COUNT")]
    vm_cpus: Option<u32>,
    /// With -O ova: its memory [default: 1G]
    #[arg(long, value_name = "SIZE")]
    vm_memory: Option<String>,
    /// With -O ova: its firmware [default: bios]
    #[arg(long, value_enum, value_name = "bios|efi")]
    vm_firmware: Option<FirmwareArg>,
    /// With -O ova: a network that it has a card for, several times for several cards; none: no card
    /// [default: the first one that importers know, "VM Network" or "NAT"]
    #[arg(long, value_name = "NETWORK")]
    vm_network: Vec<String>,
}

impl MachineArgs {
    /// True where nothing was given.
    pub fn is_empty(&self) -> bool {
        let MachineArgs { vm_name, vm_cpus, vm_memory, vm_firmware, vm_network } = self;
        vm_name.is_none() && vm_cpus.is_none() && vm_memory.is_none() && vm_firmware.is_none() && vm_network.is_empty()
    }

    /// The machine for these importers, without its disks.
    pub fn machine(&self, target: &Path, importer: Importer) -> Result<NewMachine, Failure> {
        let stem = target.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let memory = match &self.vm_memory {
            Some(text) => sizes::size("memory size", text)?,
            None => 1 << 30,
        };
        if !memory.is_multiple_of(1 << 20) {
            return Err(Failure::new("the memory of a machine is a whole number of MiB"));
        }
        let usual = if importer == Importer::VirtualBox { "NAT" } else { "VM Network" };
        let networks = match self.vm_network.as_slice() {
            [] => vec![usual.to_owned()],
            [only] if only == "none" => Vec::new(),
            several => several.to_vec(),
        };
        let machine = NewMachine {
            name: self.vm_name.clone().unwrap_or_else(|| stem.to_owned()),
            cpus: self.vm_cpus.unwrap_or(1),
            memory_mib: memory >> 20,
            firmware: match self.vm_firmware.unwrap_or_default() {
                FirmwareArg::Bios => Firmware::Bios,
                FirmwareArg::Efi => Firmware::Efi,
            },
            networks,
            importer,
            disks: Vec::new(),
        };
        // An error that shows now would show after the copying, too.
        machine.descriptor().map_err(|error| Failure::new(error.to_string()))?;
        Ok(machine)
    }
}

/// True where a package is to be made: by its format, else by the ending of its name.
pub fn is_meant(format: Option<&str>, target: &str) -> bool {
    match format {
        Some(format) => format == "ova",
        None => has_ending(target, "ova"),
    }
}

/// The importers by the word of `--for`.
pub fn importer(word: Option<&str>) -> Result<Importer, Failure> {
    let Some(word) = word else { return Ok(Importer::default()) };
    let given = ForArg::from_str(word, false);
    given
        .map(Importer::from)
        .map_err(|_| Failure::new(format!("no importer of packages is called '{word}': vmware, virtualbox or both")))
}

/// Options of the VMDK disks: what ESXi wants in their descriptors.
fn disk_options(importer: Importer) -> String {
    let hardware = if importer.has_vmware() { 10 } else { 4 };
    format!("subformat=streamOptimized,adapter_type=lsilogic,hwversion={hardware},toolsversion=2147483647")
}

/// What a new package became.
pub struct Packed {
    /// Of each disk.
    pub disks: Vec<ConvertOutcome>,
    /// The length of the package in bytes.
    pub len: u64,
}

/// Converts each source to a disk of the machine, and packs it. `options` has the sources and how they are copied.
pub async fn pack(
    options: &ConvertOptions,
    mut machine: NewMachine,
    target: &Path,
    force: bool,
    job: &JobHandle,
) -> Result<Packed> {
    // A file that another one uses, and one of the sources, keep their name.
    let _held = claim(target, force)?;
    let stem = target.file_stem().and_then(|stem| stem.to_str()).unwrap_or("machine").to_owned();
    let mut files: Vec<NamedTempFile> = Vec::new();
    let mut outcomes = Vec::new();
    for (index, source) in options.sources.iter().enumerate() {
        let file = beside(target)?;
        let name = file.path().display().to_string();
        let disk = ImageSpec { name, format: Some("vmdk".to_owned()), ..options.target.clone() };
        let options = ConvertOptions {
            sources: vec![source.clone()],
            target: disk,
            create_options: vec![disk_options(machine.importer)],
            ..options.clone()
        };
        let outcome = convert::run(&options, job).await?;
        // The conversion makes the file anew.
        let len =
            std::fs::metadata(file.path()).map_err(|error| Error::io(&error, "could not look at the disk"))?.len();
        let name = format!("{stem}-disk{}.vmdk", index + 1);
        machine.disks.push(NewDisk {
            name,
            file_bytes: len,
            capacity_bytes: outcome.size,
            populated_bytes: Some(outcome.data_bytes),
        });
        files.push(file);
        outcomes.push(outcome);
    }
    let descriptor = machine.descriptor()?;
    let descriptor_name = format!("{stem}.ovf");
    let digest = |name: &str, reader: &mut dyn std::io::Read| {
        let digest = DigestKind::Sha256.of(reader).map_err(|error| Error::io(&error, "could not read the disk"))?;
        Ok::<Line, Error>(Line { kind: DigestKind::Sha256, name: name.to_owned(), digest })
    };
    let open =
        |file: &NamedTempFile| File::open(file.path()).map_err(|error| Error::io(&error, "could not read the disk"));
    let mut manifest = digest(&descriptor_name, &mut descriptor.as_bytes())?.text();
    for (disk, file) in machine.disks.iter().zip(&files) {
        manifest.push_str(&digest(&disk.name, &mut open(file)?)?.text());
    }
    let mut archive = Archive::create(target)?;
    archive.add(&descriptor_name, Content::of(descriptor.as_bytes()), job)?;
    archive.add(&manifest_name(&descriptor_name), Content::of(manifest.as_bytes()), job)?;
    for (disk, file) in machine.disks.iter().zip(&files) {
        archive.add(&disk.name, Content { reader: Box::new(open(file)?), len: disk.file_bytes }, job)?;
    }
    archive.finish(target, force)?;
    let len = std::fs::metadata(target).map_or(0, |about| about.len());
    Ok(Packed { disks: outcomes, len })
}
