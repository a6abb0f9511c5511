// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `ova`: packages of virtual machines.

pub mod archive;
pub mod cloud;
mod gzip;
pub mod source;
pub mod target;

use super::arguments::OutputFormat;
use super::{Verb, new_image, untrusted, work};
use crate::output::{Console, Failure, json, size::human};
use archive::{Archive, Holes};
use clap::{ArgMatches, Args, FromArgMatches, Subcommand, ValueEnum};
use cowshed_jobs::JobHandle;
use cowshed_ova::Package;
use cowshed_ova::checks::{self, Finding, Weight};
use cowshed_ova::envelope::resource;
use cowshed_ova::machine::Importer;
use cowshed_ova::manifest::DigestKind;
use cowshed_ova::tar::{has_ending, printable};
use cowshed_storage::path_of_text;
use cowshed_types::{Error, Result};
use serde_json::json;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tempfile::TempPath;

/// The exit code for a package that is damaged, or that an importer rejects.
const REJECTED: u8 = 2;

pub const VERB: Verb = Verb {
    name: "ova",
    about: "Look at, check, unpack and pack packages of virtual machines",
    operands: "info|verify|unpack|pack FILE...",
    details: "A package is an OVF descriptor with its disks, in one tar file (.ova) or in a folder (.ovf). `convert` reads \
              a disk out of it (convert X.ova disk.qcow2), and makes one of disks (convert -O ova disk.qcow2 X.ova).\n\n\
              verify compares every file with the manifest, and lists what importers reject. Exit code: 0 nothing \
              wrong, 1 it could not be looked at, 2 something is wrong. See docs/formats/ova.md.",
    examples: "  cowshed ova info machine.ova
  cowshed ova verify --for vmware machine.ova
  cowshed ova unpack machine.ova folder
      Compares the files with the manifest, and overwrites nothing.
  cowshed ova pack folder/machine.ovf machine.ova
      With a new manifest, in the order that importers want.",
    in_qemu_img: false,
    arguments: OvaArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct OvaArgs {
    #[command(subcommand)]
    action: Action,
}

/// The programs that are to import a package.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum ForArg {
    Vmware,
    Virtualbox,
    #[default]
    Both,
}

impl From<ForArg> for Importer {
    fn from(given: ForArg) -> Importer {
        match given {
            ForArg::Vmware => Importer::Vmware,
            ForArg::Virtualbox => Importer::VirtualBox,
            ForArg::Both => Importer::Both,
        }
    }
}

#[derive(Clone, Debug, Subcommand)]
enum Action {
    /// Show the machine and its disks
    Info {
        /// Text or JSON
        #[arg(long, value_enum, default_value_t, value_name = "human|json")]
        output: OutputFormat,
        /// The package
        #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
        file: String,
    },
    /// Compare the files with the manifest, and list what importers reject
    Verify {
        /// The importers that are to take it
        #[arg(long = "for", value_enum, default_value_t, value_name = "vmware|virtualbox|both")]
        importer: ForArg,
        /// The package
        #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
        file: String,
    },
    /// Write the files of a package to a folder
    Unpack {
        /// The package
        #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
        file: String,
        /// The folder [default: the package's name without its ending]
        #[arg(value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
        folder: Option<String>,
    },
    /// Make one file of a descriptor and the files that it names
    Pack {
        /// Overwrite an OVA that exists
        #[arg(long)]
        force: bool,
        /// The descriptor
        #[arg(value_name = "OVF", value_hint = clap::ValueHint::FilePath)]
        file: String,
        /// The package
        #[arg(value_name = "OVA", value_hint = clap::ValueHint::FilePath)]
        target: String,
    },
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    match OvaArgs::from_arg_matches(matches)?.action {
        Action::Info { output, file } => info(&file, output, console),
        Action::Verify { importer, file } => verify(&file, importer.into(), console),
        Action::Unpack { file, folder } => unpack(&file, folder.as_deref(), console),
        Action::Pack { force, file, target } => pack(&file, &target, force, console),
    }
}

/// Opens a package in a process that reads nothing else.
fn open(file: &str, console: &mut Console) -> Result<Package, Failure> {
    let path = path_of_text(file);
    if !path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("ovf")) && path.is_file() {
        untrusted::confine_to(file, console)?;
    }
    Package::open(&path).map_err(failed)
}

fn failed(error: Error) -> Failure {
    Failure::new(error.to_string())
}

fn info(file: &str, output: OutputFormat, console: &mut Console) -> Result<u8, Failure> {
    let package = open(file, console)?;
    let envelope = &package.envelope;
    let disks: Vec<_> = package.disks().collect();
    let quantity = |kind| envelope.quantity(kind);
    let machine = envelope.machines.first();
    if output == OutputFormat::Json {
        let disks = disks.iter().map(|disk| match disk {
            Ok(disk) => json!({
                "number": disk.number, "id": disk.id, "filename": disk.name, "format": disk.format,
                "virtual-size": disk.capacity_bytes, "gzip": disk.is_gzip,
                "file-length": disk.pieces.iter().map(|piece| piece.len).sum::<u64>(), "pieces": disk.pieces.len(),
            }),
            Err(error) => json!({ "error": error.to_string() }),
        });
        let value = json!({
            "filename": file,
            "name": machine.and_then(|machine| machine.name.clone()),
            "hardware": machine.map(|machine| machine.families.clone()),
            "cpus": quantity(resource::PROCESSOR),
            "memory-bytes": quantity(resource::MEMORY),
            "firmware": machine.and_then(|machine| machine.firmware.clone()),
            "manifest": package.manifest.is_some(),
            "disks": disks.collect::<Vec<_>>(),
            "files": package.members.iter().map(|member| json!({ "name": member.name, "length": member.len }))
                .collect::<Vec<_>>(),
        });
        console.line(json::pretty(&value));
        return Ok(0);
    }
    console.line(format_args!("package: {}", printable(file)));
    for machine in &envelope.machines {
        let name = machine.name.as_deref().unwrap_or(&machine.id);
        console.line(format_args!("machine: {}", printable(name)));
        console.line(format_args!("hardware: {}", printable(&machine.families.join(" "))));
        if let Some(firmware) = &machine.firmware {
            console.line(format_args!("firmware: {}", printable(firmware)));
        }
    }
    if let Some(cpus) = quantity(resource::PROCESSOR) {
        console.line(format_args!("CPUs: {cpus}"));
    }
    if let Some(memory) = quantity(resource::MEMORY) {
        console.line(format_args!("memory: {}", human(memory)));
    }
    console.line(format_args!("manifest: {}", if package.manifest.is_some() { "yes" } else { "no" }));
    for disk in &disks {
        match disk {
            Ok(disk) => {
                let len: u64 = disk.pieces.iter().map(|piece| piece.len).sum();
                let capacity = disk.capacity_bytes.map_or("unknown".to_owned(), human);
                let (number, name, format) = (disk.number, printable(&disk.name), disk.format);
                let pieces = match disk.pieces.len() {
                    1 => String::new(),
                    count => format!(", in {count} pieces"),
                };
                console.line(format_args!(
                    "disk {number}: {name}, {format}, {capacity} ({} in the file{pieces})",
                    human(len)
                ));
            }
            Err(error) => console.line(format_args!("{error}")),
        }
    }
    Ok(0)
}

fn verify(file: &str, importer: Importer, console: &mut Console) -> Result<u8, Failure> {
    let package = open(file, console)?;
    let findings = checks::findings(&package, importer, true).map_err(failed)?;
    for Finding { weight, text } in &findings {
        let word = if *weight == Weight::Error { "error" } else { "warning" };
        console.line(format_args!("{word}: {text}"));
    }
    let has_errors = findings.iter().any(|finding| finding.weight == Weight::Error);
    if !has_errors {
        let digests = package.manifest.as_ref().map_or(0, |manifest| manifest.lines.len());
        console.line(format_args!("{}: nothing wrong ({digests} digests compared)", printable(file)));
    }
    Ok(if has_errors { REJECTED } else { 0 })
}

fn unpack(file: &str, folder: Option<&str>, console: &mut Console) -> Result<u8, Failure> {
    let path = path_of_text(file);
    let package = Package::open(&path).map_err(failed)?;
    let folder = match folder {
        Some(folder) => path_of_text(folder),
        None => {
            let stem = path.file_stem().map(PathBuf::from).unwrap_or_default();
            if ["", ".", ".."].iter().any(|part| stem.as_os_str() == *part) || path.extension().is_none() {
                return Err(Failure::new("name the folder to unpack to"));
            }
            stem
        }
    };
    let job = work::Foreground::new(console.persona, false, true, "unpacking")?.leaving_nothing();
    let unpacked =
        job.run(async |handle| unpack_to(&package, &folder, &handle), |error| Failure::new(error.to_string()));
    let count = unpacked?;
    let missing = if package.manifest.is_none() { ", unchecked: there is no manifest" } else { "" };
    console.line(format_args!("{}: {count} files{missing}", folder.display()));
    Ok(0)
}

/// Writes the files, and compares the written bytes with the manifest. They have other names until all are right; after
/// an error none of them is there.
fn unpack_to(package: &Package, folder: &Path, job: &JobHandle) -> Result<usize> {
    check(package)?;
    let named = |path: &Path, error: &io::Error, doing: &str| Error::io(error, doing).file(path.display().to_string());
    let is_new = match fs::create_dir(folder) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(named(folder, &error, "could not make the folder")),
    };
    let mut made = Vec::new();
    let result = write_parts(package, folder, job).and_then(|parts| {
        for (part, path) in parts {
            part.persist_noclobber(&path).map_err(|error| named(&path, &error.error, "could not make"))?;
            made.push(path);
        }
        archive::flush_folder(folder)
    });
    if result.is_err() {
        made.iter().for_each(|path| drop(fs::remove_file(path)));
        if is_new {
            let _ = fs::remove_dir(folder);
        }
    }
    result.map(|()| package.members.len())
}

/// The files of a package in a folder, with the names that they are to have.
fn write_parts(package: &Package, folder: &Path, job: &JobHandle) -> Result<Vec<(TempPath, PathBuf)>> {
    let mut parts = Vec::new();
    let paths = package.members.iter().map(|member| folder.join(&member.name));
    if let Some(path) = paths.clone().find(|path| path.symlink_metadata().is_ok()) {
        let error = io::Error::from(rustix::io::Errno::EXIST);
        return Err(Error::io(&error, "could not make").file(path.display().to_string()));
    }
    for (member, path) in package.members.iter().zip(paths) {
        let named = |error: Error| error.file(path.display().to_string());
        let part = archive::beside(&path)?;
        let mut writer = Holes::new(part.as_file());
        package.copy(member, &mut writer, None, &|| job.is_cancelled()).map_err(named)?;
        writer.finish().map_err(|error| named(Error::io(&error, "could not flush")))?;
        // Not all can be open at once.
        parts.push((part.into_temp_path(), path));
    }
    Ok(parts)
}

fn pack(file: &str, target: &str, force: bool, console: &mut Console) -> Result<u8, Failure> {
    let path = path_of_text(file);
    let package = Package::open(&path).map_err(failed)?;
    if package.is_archive() {
        return Err(Failure::new(format!("{file}: it is packed already; pack wants a descriptor (.ovf)")));
    }
    let target_path = new_image::local_path(target);
    let _held = archive::claim(&target_path, force).map_err(failed)?;
    let job = work::Foreground::new(console.persona, false, true, "packing")?.leaving_nothing();
    let count = job.run(
        async |handle| pack_to(&package, &target_path, force, &handle),
        |error| Failure::new(archive::with_final_names(&error.to_string(), &target_path)),
    )?;
    for name in package.members.iter().map(|member| &member.name).filter(|name| has_ending(name, "cert")) {
        let name = printable(name);
        console.complain(format_args!("warning: {name} is left out: it signs the manifest that was there"));
    }
    console.line(format_args!("{target}: {count} files"));
    Ok(0)
}

/// Copies each file once: its digests are those of the bytes in the archive. The count of files there.
fn pack_to(package: &Package, target: &Path, force: bool, job: &JobHandle) -> Result<usize> {
    package.check_target(target)?;
    // An error that shows now shows before any importer sees the package.
    check(package)?;
    let files: Vec<_> = package.members.iter().filter(|member| !package.needs_no_digest(&member.name)).collect();
    let is_second = |name: &str| ["ovf", "mf"].iter().any(|ending| has_ending(name, ending));
    if let Some(member) = files.iter().find(|member| member.name != package.descriptor && is_second(&member.name)) {
        let message = format!("'{}' would be a second descriptor or manifest", printable(&member.name));
        return Err(Error::new(cowshed_types::ErrorKind::InvalidImage, message));
    }
    let mut archive = Archive::create(target)?;
    for (index, member) in files.iter().enumerate() {
        let copy = |file: &mut fs::File| package.copy(member, file, Some(DigestKind::Sha256), &|| job.is_cancelled());
        archive.add(&member.name, member.len, copy)?;
        if index == 0 {
            let names = files.iter().map(|member| member.name.as_str());
            archive.place_manifest(&manifest_name(&package.descriptor), names)?;
        }
    }
    archive.finish(force)?;
    Ok(files.len() + 1)
}

/// Refuses a package that lacks a part of a disk, or whose manifest names other files. No file is read.
fn check(package: &Package) -> Result<()> {
    for reference in &package.envelope.files {
        package.pieces(reference)?;
    }
    package.check_names()
}

/// The name of the manifest of a descriptor.
fn manifest_name(descriptor: &str) -> String {
    let stem = descriptor.rsplit_once('.').map_or(descriptor, |(stem, _)| stem);
    format!("{stem}.mf")
}
