// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packages of virtual machines as the source and as the target of a conversion.

use super::{ConvertArgs, guard, options};
use crate::commands::{new_image, ova, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure, size::human};
use cowshed_jobs::convert::ConvertOptions;
use cowshed_ova::Package;
use cowshed_ova::tar::has_ending;
use cowshed_types::Error;
use std::path::Path;
use std::time::Instant;

/// Such targets have other names at first, and a confined process can't rename or remove files.
pub const NO_ARCHIVES: &str =
    "--untrusted makes no packages: convert the image to qcow2 with it first, and then to a package without";

/// True where the source is a package. A format on the command line, but for "ova", is that of the file itself.
pub fn is_one(args: &mut ConvertArgs, sources: &[String], console: &Console) -> Result<bool, Failure> {
    let is_named = args.format.as_deref() == Some("ova");
    let may_be = console.persona == Persona::Cowshed && !args.naming.image_opts && (is_named || args.format.is_none());
    let is_one = |source: &String| may_be && (is_named || Package::is_one(&new_image::local_path(source)));
    match (sources, sources.iter().any(is_one)) {
        ([_], true) => {
            args.format = None;
            Ok(true)
        }
        (_, true) => Err(Failure::new("a package (OVA, OVF) is converted by itself, one disk at a time")),
        (_, false) if args.disk.is_some() => Err(Failure::new("--disk chooses a disk of a package (OVA, OVF)")),
        _ => Ok(false),
    }
}

/// The disk of the package that is the source.
pub fn disk(
    args: &ConvertArgs,
    options: &ConvertOptions,
    console: &Console,
) -> Result<ova::source::ChosenDisk, Failure> {
    let [image] = options.sources.as_slice() else { return Err(Failure::new("one package at a time")) };
    let job = work::Foreground::new(console.persona, false, true, "checking")?.reading();
    let target = new_image::local_path(&options.target.name);
    let is_untrusted = args.naming.untrusted.is_on();
    let choose = async |handle| {
        // Its disks are other files, which a confined process can't open.
        if is_untrusted && has_ending(&image.name, "ovf") {
            let message = "--untrusted takes a package in one file (.ova): `cowshed ova pack` makes one";
            return Err(Error::unsupported(message).file(&image.name));
        }
        let package = Package::open(&new_image::local_path(&image.name))?;
        package.check_target(&target)?;
        let disk = ova::source::choose(&package, args.disk.as_deref(), image, &target, is_untrusted, &handle);
        disk.map_err(|error| error.file(&image.name))
    };
    job.run(choose, |error| Failure::new(error.to_string()))
}

/// `-O ova`.
pub fn pack(args: ConvertArgs, sources: &[String], target: &str, console: &mut Console) -> Result<u8, Failure> {
    if args.naming.untrusted.is_on() {
        return Err(Failure::new(NO_ARCHIVES));
    }
    for (wrong, option) in [
        (args.no_create, "-n"),
        (!args.options.is_empty(), "-o"),
        (args.compress, "-c"),
        (args.backing.is_some() || args.backing_format.is_some(), "-b"),
        (args.bitmaps, "--bitmaps"),
        (args.copy_range_offloading, "-C"),
        (args.target_cache.is_some(), "-t"),
        (args.disk.is_some(), "--disk"),
    ] {
        if wrong {
            return Err(Failure::new(format!("{option} has no meaning for a package (-O ova)")));
        }
    }
    let importer = ova::target::importer(args.platform.as_deref())?;
    let path = new_image::local_path(target);
    let machine = args.machine.machine(&path, importer, sources.len())?;
    let args = ConvertArgs { target_format: Some("vmdk".to_owned()), ..args };
    let options = options(&args, sources, target)?;
    let started = Instant::now();
    guard(&args, &options, console)?;
    let job = work::Foreground::new(console.persona, args.progress, args.quiet, "packing")?.leaving_nothing();
    let persona = console.persona;
    let work = async |handle| ova::target::pack(&options, machine, &path, args.force, &handle).await;
    let packed = job.run(work, |error| failed(persona, &options, &path, error))?;
    if !args.quiet {
        let size: u64 = packed.disks.iter().map(|disk| disk.size).sum();
        let (disks, seconds) = (packed.disks.len(), started.elapsed().as_secs_f64());
        let what = if disks == 1 { "disk" } else { "disks" };
        let (size, len) = (human(size), human(packed.len));
        console.line(format_args!("{target}: a machine with {disks} {what} of {size}, in {len}, in {seconds:.1} s"));
    }
    Ok(0)
}

/// As [`super::failed`]; a file that has another name until it is whole has the target's.
pub fn failed(persona: Persona, options: &ConvertOptions, target: &Path, error: &Error) -> Failure {
    let failure = super::failed(persona, options, error);
    Failure { message: ova::archive::with_final_names(&failure.message, target), ..failure }
}
