// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `amend`: changes format options of an image that exists.

use super::arguments::{NamingArgs, cache_mode, one_file};
use super::new_image::local_path;
use super::untrusted::Use;
use super::{Verb, create_options, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_create::schema::{amended_options_of, help_lines};
use cowshed_image::DRIVERS;
use cowshed_jobs::ImageSpec;
use cowshed_jobs::amend::{self, AmendOptions};
use cowshed_types::{Error, ErrorKind};

pub const VERB: Verb = Verb {
    name: "amend",
    about: "Change format options of an image",
    operands: "FILE",
    details: "The content of the disk stays the same. Version 2 (compat=0.10) has no zero clusters: where there is a backing file \
              they become clusters that share one full of zeroes. A power cut leaves the image as it was before or as it is \
              afterwards. With a new size beside other options it may have some of the changes. A backing file is only \
              named, as by 'rebase -u'.",
    examples: "  cowshed amend -o compat=0.10 disk.qcow2
  cowshed amend -o refcount_bits=64 -p disk.qcow2
  cowshed amend -o lazy_refcounts=on,size=20G disk.qcow2
  cowshed amend -f qcow2 -o help",
    in_qemu_img: true,
    arguments: AmendArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct AmendArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Options of the format: key=value,key=value ("help" lists them)
    #[arg(short = 'o', long, value_name = "FMT_OPTS")]
    options: Vec<String>,
    /// Allow what may lose the last way to the data (key slots)
    #[arg(long)]
    force: bool,
    /// Cache mode: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = AmendArgs::from_arg_matches(matches)?;
    if args.options.is_empty() {
        return Err(Failure::usage("Must specify options (-o)"));
    }
    let asks_for_help = create_options::asks_for_help(&args.options)?;
    if asks_for_help && let Some(format) = &args.format {
        return print_help(format, console);
    }
    // This verb of qemu-img doesn't point to its help here.
    let file = one_file(&args.files).map_err(|failure| Failure { usage: false, ..failure })?;
    let spec = args.naming.spec(file, args.format.as_ref())?;
    let image = ImageSpec { cache: cache_mode("", args.cache.as_ref())?, ..spec };
    args.naming.untrusted.guard(&[Use::Write(&image)], console)?;
    if asks_for_help {
        let node = work::run_quietly(async |_| image.open_for_reading().await);
        let node = node.map_err(|error| Failure::open(console.persona, file, &error))?;
        return print_help(node.driver_name(), console);
    }
    // The rule is qemu-img's; renaming is as safe here as by 'rebase -u'.
    let keeps_backing = console.persona == Persona::QemuImg;
    let options = AmendOptions { image, options: args.options, keeps_backing, force: args.force };
    let job = work::Foreground::new(console.persona, args.progress, args.quiet, "amending")?
        .starting_late()
        .saying_end_again()
        .ending_with(is_refused_by_format);
    let failed = |error: &Error| {
        let failure = failed(console.persona, file, error);
        match error.kind() {
            // A folder is opened for writing, and refused there.
            _ if local_path(file).is_dir() => {
                let error = Error::invalid_argument("it is a folder").file(file);
                Failure::open(console.persona, file, &error.qemu(format!("Could not open '{file}': Is a directory")))
            }
            // Faults of the image itself come with its name.
            ErrorKind::InvalidArgument | ErrorKind::Unsupported => {
                work::opened_first(console.persona, &args.naming, &[&options.image], failure)
            }
            _ => failure,
        }
    };
    job.run(async |handle| amend::run(&options, &handle).await, failed)?;
    Ok(0)
}

/// qemu-img has opened the image and read the options by then.
fn is_refused_by_format(error: &Error) -> bool {
    if matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace) && error.sentence().starts_with("Failed to ") {
        return true;
    }
    let fields = ["compat", "data_file", "data_file_raw", "keyslot", "lazy_refcounts", "refcount_bits"];
    let is_late = error.field_name().is_some_and(|field| fields.contains(&field));
    let is_backing = error.message().starts_with("Cannot amend the backing file");
    (is_late || is_backing) && !error.message().contains("arameter")
}

fn print_help(format: &str, console: &mut Console) -> Result<u8, Failure> {
    let Some(options) = amended_options_of(format) else {
        return Err(match DRIVERS.is_format(format) {
            true => Failure::new(format!("Format driver '{format}' does not support option amendment")),
            false => Failure::new(format!("Unknown file format '{format}'")),
        });
    };
    console.line(format_args!("Amend options for '{format}':"));
    help_lines(options).iter().for_each(|line| console.line(line));
    Ok(0)
}

/// qemu-img reports a wrong option without the name of the file.
fn failed(persona: Persona, file: &str, error: &Error) -> Failure {
    match error.kind() {
        _ if persona == Persona::QemuImg && error.field_name() == Some("keyslot") => Failure::new(error.message()),
        _ if persona == Persona::QemuImg && error.message().contains("it has no key slots") => {
            Failure::new("Can't amend encryption options - encryption not present")
        }
        // Also qemu-img finds out when it opens the image.
        _ if error.message().contains("cannot unlock any keyslot") || error.message().starts_with("Unknown driver") => {
            Failure::open(persona, file, error)
        }
        ErrorKind::InvalidArgument | ErrorKind::Unsupported if persona == Persona::QemuImg => {
            let sentence = error.sentence();
            let is_of_value =
                ["Value '", "Parameter '", "Invalid parameter '"].iter().any(|start| sentence.starts_with(start));
            let message = if is_of_value || error.field_name() == Some("size") { &sentence } else { error.message() };
            Failure::new(match message.strip_prefix("invalid ") {
                Some(rest) => format!("Invalid {rest}"),
                None => message.to_owned(),
            })
        }
        _ => Failure::open(persona, file, error),
    }
}
