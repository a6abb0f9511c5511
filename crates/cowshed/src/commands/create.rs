// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `create`: makes a new image.

use super::arguments::{Objects, objects};
use super::{Verb, create_options, new_image, sizes, work};
use crate::invocation::Persona;
use crate::output::failure::reason_behind;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_create::schema::options_of;
use cowshed_image::DRIVERS;
use cowshed_jobs::create::{self, CreateRequest};
use cowshed_types::{Errno, Error, LINE_END};

pub const VERB: Verb = Verb {
    name: "create",
    about: "Create an image",
    operands: "FILE [SIZE]",
    details: "Writes an empty image of SIZE bytes to FILE. With -b it is an overlay, which starts out with the content of \
              another image and takes its size. An existing FILE is overwritten with --force only.",
    examples: "  cowshed create -f qcow2 disk.qcow2 20G
      An empty disk of 20 GiB.
  cowshed create -f qcow2 -b golden.qcow2 -F qcow2 vm1.qcow2
      An overlay: changes of vm1 go to vm1.qcow2, the rest is read from golden.qcow2.
  cowshed create -f qcow2 -o cluster_size=128k,extended_l2=on,preallocation=metadata disk.qcow2 1T
      With options of the format.
  cowshed create -f qcow2 --object secret,id=s,file=passphrase.txt \\
      -o encrypt.format=luks,encrypt.key-secret=s disk.qcow2 20G
      Encrypted: this hides the data, it does not notice damage to it.
  cowshed create -f qcow2 -o help
      The options that the format has.",
    in_qemu_img: true,
    arguments: CreateArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct CreateArgs {
    /// Format of the new image [default: what the ending of FILE means, else raw]
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// Overwrite a FILE that exists
    #[arg(long)]
    force: bool,
    /// Options of the format: key=value,key=value ("help" lists them)
    #[arg(short = 'o', long, value_name = "FMT_OPTS")]
    options: Vec<String>,
    /// Make an overlay on top of this image
    #[arg(short, long, value_name = "BACKING_FILE", value_hint = clap::ValueHint::FilePath)]
    backing: Option<String>,
    /// Format of BACKING_FILE (QEMU 11 spells the short option -B)
    #[arg(short = 'F', short_alias = 'B', long, value_name = "BACKING_FMT")]
    backing_format: Option<String>,
    /// Don't open BACKING_FILE, which then need not exist; SIZE is needed
    #[arg(short = 'u', long)]
    backing_unsafe: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// A secret for encrypted images, secret,id=ID,file=FILE (or data=TEXT; format=raw|base64), or TLS credentials for
    /// servers, tls-creds-x509,id=ID,dir=FOLDER
    #[arg(id = super::arguments::DEFINITIONS, long = "object", value_name = "OBJDEF")]
    objects: Vec<String>,
    /// FILE, and SIZE in bytes or with a suffix k, M, G, T, P, E (powers of 1024); no SIZE: as large as BACKING_FILE
    #[arg(value_name = "FILE [SIZE]", value_hint = clap::ValueHint::FilePath)]
    operands: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = CreateArgs::from_arg_matches(matches)?;
    if create_options::asks_for_help(&args.options)? {
        let format = args.format.as_deref().unwrap_or("raw");
        return create_options::print_help(format, !args.operands.is_empty(), console);
    }
    let (file, size) = match args.operands.as_slice() {
        [] => return Err(Failure::usage("Expecting image file name")),
        [file] => (file, None),
        [file, size] => (file, Some(sizes::size("image size", size)?)),
        [_, size, extra, ..] => {
            sizes::size("image size", size)?;
            return Err(Failure::usage(format!("Unexpected argument: {extra}")));
        }
    };
    let chosen = new_image::format(args.format.as_deref(), file, "-f", console)?;
    let format = chosen.format.clone();
    // The name counts before what the format can do.
    if console.persona == Persona::QemuImg && (options_of(&format).is_some() || DRIVERS.is_known(&format)) {
        DRIVERS.check_file_name(file).map_err(|error| Failure::new(format!("{file}: {}", error.sentence())))?;
    }
    if console.persona == Persona::QemuImg && options_of(&format).is_none() {
        return Err(Failure::new(format!("{file}: {}", create_options::refusal(&format))));
    }
    new_image::check_absent(file, args.force, console)?;
    let Objects { secrets, tls, .. } = objects(&args.objects)?;
    let request = CreateRequest {
        filename: file.clone(),
        format,
        size,
        options: args.options,
        backing_file: args.backing,
        backing_format: args.backing_format,
        backing_unchecked: args.backing_unsafe,
        secrets,
        tls,
        keeps_existing: new_image::keeps_existing(args.force, console),
        ..CreateRequest::default()
    };
    let persona = console.persona;
    let failed = |error| failed_with(persona, file, &request.format, &error);
    let plan = work::run_quietly(|_| create::prepare(&request)).map_err(failed)?;
    if !args.quiet {
        console.line(plan.summary());
        console.flush();
    }
    match plan.is_preallocated() {
        // That may take its time.
        true => {
            let job = work::Foreground::new(persona, false, true, "creating")?;
            job.run(
                |handle| plan.run_until(handle.cancel_flag()),
                |error| failed_with(persona, file, &request.format, error),
            )?;
        }
        false => {
            work::run_quietly(|_| plan.run()).map_err(failed)?;
        }
    }
    chosen.print_notice(args.quiet, console);
    Ok(0)
}

/// qemu-img first names the backing file that it could not open.
fn failed_with(persona: Persona, file: &str, format: &str, error: &Error) -> Failure {
    let text = error.sentence();
    if persona == Persona::QemuImg && error.errno() == Errno::EFBIG {
        let hint = if format == "qcow2" { " (try using a larger cluster size)" } else { "" };
        return Failure::new(format!("{file}: The image size is too large for file format '{format}'{hint}"));
    }
    if persona == Persona::QemuImg && text.starts_with("The image size must be below 2^63") {
        let reason = match format {
            "qcow2" => "Could not resize image: Image size cannot be negative",
            _ => "Could not resize file: Invalid argument",
        };
        return Failure::new(format!("{file}: {reason}"));
    }
    match (persona, reason_behind("could not open the backing image: ", error)) {
        (Persona::QemuImg, Some(reason)) => {
            Failure::new(format!("{file}: {reason}{LINE_END}Could not open backing image."))
        }
        (Persona::QemuImg, None) if text.starts_with("Invalid option list") => Failure::new(text),
        _ => Failure::about(persona, file, error),
    }
}
