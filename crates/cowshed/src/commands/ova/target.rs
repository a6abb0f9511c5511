// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A new package as the target of a conversion: each source becomes a disk.

use super::archive::{Archive, beside, claim, copy};
use super::{ForArg, manifest_name};
use crate::commands::sizes;
use crate::output::Failure;
use clap::{Args, ValueEnum};
use cowshed_jobs::convert::{self, ConvertOptions, ConvertOutcome};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_ova::machine::{Firmware, Importer, NewDisk, NewMachine, file_name};
use cowshed_ova::tar::{self, Dialect, has_ending};
use cowshed_types::{Error, Result};
use std::fs::File;
use std::io::Read;
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
    /// With -O ova: a network that it has a card for, several times for several cards; none: no card.
    /// The default is the first one that importers know, "VM Network" or "NAT"
    #[arg(long, value_name = "NETWORK")]
    vm_network: Vec<String>,
}

impl MachineArgs {
    /// True where nothing was given.
    pub fn is_empty(&self) -> bool {
        let MachineArgs { vm_name, vm_cpus, vm_memory, vm_firmware, vm_network } = self;
        vm_name.is_none() && vm_cpus.is_none() && vm_memory.is_none() && vm_firmware.is_none() && vm_network.is_empty()
    }

    /// The machine for these importers, with this many disks, whose lengths aren't known yet.
    pub fn machine(&self, target: &Path, importer: Importer, disks: usize) -> Result<NewMachine, Failure> {
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
            several if several.iter().any(|network| network == "none") => {
                return Err(Failure::new("--vm-network none: a machine without a card has no other networks"));
            }
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
            disks: (1..=disks).map(|number| new_disk(format!("{}-disk{number}.vmdk", stem_of(target)))).collect(),
        };
        // An error that shows now would show after the copying, too.
        let names = machine.disks.last().map(|disk| tar::header(&disk.name, 0, 0, Dialect::Ustar).map(drop));
        let checked = machine.descriptor().map(drop).and_then(|()| names.unwrap_or(Ok(())));
        checked.map_err(|error| Failure::new(error.to_string()))?;
        Ok(machine)
    }
}

/// A disk of which only the name is known: of one sector.
fn new_disk(name: String) -> NewDisk {
    NewDisk { name, file_bytes: 0, capacity_bytes: 512, populated_bytes: None }
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

/// Options of the VMDK disks: those that ESXi wants in their descriptors.
fn disk_options(importer: Importer) -> String {
    let hardware = if importer.has_vmware() { 10 } else { 4 };
    format!("subformat=streamOptimized,adapter_type=lsilogic,hwversion={hardware},toolsversion=2147483647")
}

/// The result of packing: the disks and the length.
pub struct PackedPackage {
    /// The result of each disk's conversion.
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
) -> Result<PackedPackage> {
    // A file that another one uses, and one of the sources, keep their name.
    let _held = claim(target, force)?;
    let mut files: Vec<NamedTempFile> = Vec::new();
    let mut outcomes = Vec::new();
    for (source, disk) in options.sources.iter().zip(&mut machine.disks) {
        let file = beside(target)?;
        let name = file.path().display().to_string();
        let spec = ImageSpec { name, format: Some("vmdk".to_owned()), ..options.target.clone() };
        let options = ConvertOptions {
            sources: vec![source.clone()],
            target: spec,
            create_options: vec![disk_options(machine.importer)],
            refuses_empty: true,
            final_name: Some(disk.name.clone()),
            replaced: Some(target.to_owned()),
            has_vmware_ids: machine.importer.has_vmware(),
            ..options.clone()
        };
        let outcome = convert::run(&options, job).await?;
        // The conversion makes the file anew.
        disk.file_bytes = std::fs::metadata(file.path()).map_err(|error| unread(&error))?.len();
        disk.capacity_bytes = outcome.size;
        disk.populated_bytes = Some(outcome.data_bytes);
        files.push(file);
        outcomes.push(outcome);
    }
    let descriptor = machine.descriptor()?;
    let descriptor_name = format!("{}.ovf", stem_of(target));
    let mut archive = Archive::create(target)?;
    let add = |archive: &mut Archive, name: &str, len: u64, reader: &mut dyn Read| {
        archive.add(name, len, |file| copy(reader, file, job).map(|(_, digest)| digest))
    };
    add(&mut archive, &descriptor_name, descriptor.len() as u64, &mut descriptor.as_bytes())?;
    let names = machine.disks.iter().map(|disk| disk.name.as_str());
    archive.place_manifest(&manifest_name(&descriptor_name), std::iter::once(descriptor_name.as_str()).chain(names))?;
    for (disk, file) in machine.disks.iter().zip(&files) {
        let mut reader = File::open(file.path()).map_err(|error| unread(&error))?;
        add(&mut archive, &disk.name, disk.file_bytes, &mut reader)?;
    }
    archive.finish(force)?;
    let len = std::fs::metadata(target).map_or(0, |about| about.len());
    Ok(PackedPackage { disks: outcomes, len })
}

fn unread(error: &std::io::Error) -> Error {
    Error::io(error, "could not read the disk")
}

/// The beginning of the names of a package's files.
fn stem_of(target: &Path) -> String {
    file_name(target.file_stem().and_then(|stem| stem.to_str()).unwrap_or("machine"))
}
