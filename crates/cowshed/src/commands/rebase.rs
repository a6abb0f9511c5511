// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `rebase`: gives an image another backing file.

use super::arguments::{NamingArgs, cache_mode};
use super::untrusted::Use;
use super::{Verb, work};
use crate::invocation::Persona;
use crate::output::failure::is_unreached;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_image::DRIVERS;
use cowshed_image::open::resolve_name;
use cowshed_jobs::ImageSpec;
use cowshed_jobs::rebase::{self, RebaseOptions, UNKNOWN_FORMAT};
use cowshed_types::Error;

pub const VERB: Verb = Verb {
    name: "rebase",
    about: "Give an image another backing file",
    operands: "FILE",
    details: "The content of FILE stays the same: where the new backing file differs from the old one, the old content is \
              written into FILE first. With -u only the name changes, for a backing file that was moved or \
              converted. A relative name is relative to the folder of FILE. An empty name takes the backing file away.",
    examples: "  cowshed rebase -b new-base.qcow2 -F qcow2 overlay.qcow2
  cowshed rebase -u -b moved/base.qcow2 -F qcow2 overlay.qcow2
  cowshed rebase -p -b '' overlay.qcow2",
    in_qemu_img: true,
    arguments: RebaseArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct RebaseArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Cache mode for FILE: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,
    /// The new backing file; empty for none
    #[arg(short, long, value_name = "BACKING_FILE")]
    backing: Option<String>,
    /// Format of the new backing file
    #[arg(short = 'F', short_alias = 'B', long, value_name = "BACKING_FMT")]
    backing_format: Option<String>,
    /// Cache mode for backing files
    #[arg(short = 'T', long, value_name = "CACHE")]
    backing_cache: Option<String>,
    /// Only change the name: nothing is read or compared
    #[arg(short = 'u', long = "backing-unsafe")]
    only_name: bool,
    /// Compress what is written, where it is a whole cluster
    #[arg(short, long)]
    compress: bool,
    /// Accepted for qemu-img's sake: an image that is changed can't be shared
    #[arg(short = 'U', long)]
    force_share: bool,
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
    let args = RebaseArgs::from_arg_matches(matches)?;
    let [file] = args.files.as_slice() else {
        return Err(Failure::usage("Expecting one image file name"));
    };
    if args.backing.is_none() && !args.only_name {
        return Err(Failure::usage("Must specify backing file (-b) or use unsafe mode (-u)"));
    }
    let (cache, base_cache) =
        (cache_mode("", args.cache.as_ref())?, cache_mode("source ", args.backing_cache.as_ref())?);
    let spec = args.naming.spec(file, args.format.as_ref())?;
    if let Some(format) = &args.backing_format
        && !DRIVERS.is_known(format)
        && (console.persona != Persona::QemuImg || args.naming.untrusted.is_on())
    {
        return Err(Failure::new(format!("{UNKNOWN_FORMAT}'{format}'")));
    }
    let options = RebaseOptions {
        image: ImageSpec { cache, ..spec },
        base: args.backing.clone().filter(|name| !name.is_empty()),
        base_format: args.backing_format.clone(),
        base_cache,
        only_name: args.only_name,
        compressed: args.compress,
    };
    let base = options.base.as_deref().filter(|_| !options.only_name);
    let base =
        base.map(|base| resolve_name(base, Some(file)).map_err(|error| Failure::open(console.persona, base, &error)));
    let base = base.transpose()?;
    let uses: Vec<Use<'_>> =
        [Use::Write(&options.image)].into_iter().chain(base.as_deref().map(Use::ReadFile)).collect();
    args.naming.untrusted.guard(&uses, console)?;
    let job = work::Foreground::new(console.persona, args.progress, args.quiet, "rebasing")?.saying_end_again();
    let failed = |error: &Error| failed(console.persona, &options, error);
    job.run(async |handle| rebase::run(&options, &handle).await, failed)?;
    Ok(0)
}

/// qemu-img names the backing file that could not be opened or named.
fn failed(persona: Persona, options: &RebaseOptions, error: &Error) -> Failure {
    if persona != Persona::QemuImg {
        return Failure::open(persona, &options.image.name, error);
    }
    let base = options.base.clone().unwrap_or_default();
    if error.message().contains("the backing format must be specified") {
        return Failure::new(format!(
            "Could not change the backing file to '{base}': backing format must be specified"
        ));
    }
    if error.sentence() == "could not get block driver info" || error.sentence().starts_with(UNKNOWN_FORMAT) {
        return Failure::new(error.sentence());
    }
    if error.message().contains("have no backing file") {
        return Failure::new(format!("Could not change the backing file to '{base}': Operation not supported"));
    }
    let message = error.message();
    let is_base = error.file_name().is_some_and(|name| name.ends_with(base.as_str()));
    let is_base = (is_base || is_unreached(&base, error)) && !base.is_empty() && base != options.image.name;
    // The new chain leads to the image, which is open already.
    // A hint may name the format cloop.
    let is_loop = error.sentence().contains("loop") || message.contains(": this process ");
    let of_image = message.starts_with(&format!("could not open the backing file of '{}'", options.image.name));
    let below_base = message.starts_with("could not open the backing file of");
    match !of_image && (is_base || is_loop || below_base) {
        true => {
            let reason = Failure::open(persona, &base, error).message;
            // The file that could not be opened is named once.
            let reason = reason.strip_prefix(&format!("Could not open '{base}': ")).unwrap_or(&reason);
            Failure::new(format!("Could not open new backing file '{base}': {reason}"))
        }
        false => Failure::open(persona, &options.image.name, error),
    }
}
