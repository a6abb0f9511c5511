// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `commit`: writes an image's data into its backing file.

use super::arguments::{NamingArgs, cache_mode};
use super::untrusted::Use;
use super::{Verb, sizes, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::commit::{self, CommitOptions};
use cowshed_types::Error;

pub const VERB: Verb = Verb {
    name: "commit",
    about: "Write what an image holds into its backing file",
    operands: "FILE",
    details: "The backing file reads as FILE did afterwards, and grows where it is smaller. Other images that stand on the \
              same backing file are ruined by that: their view changes below them. FILE is emptied at the end, once \
              all is durable, so that it can be used further.",
    examples: "  cowshed commit overlay.qcow2
  cowshed commit -d overlay.qcow2
  cowshed commit -b base.qcow2 top.qcow2",
    in_qemu_img: true,
    arguments: CommitArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct CommitArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Cache mode: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,
    /// Leave FILE as it is at the end
    #[arg(short, long)]
    drop: bool,
    /// Commit to this image of the chain, everything between included; FILE is left as it is
    #[arg(short, long, value_name = "BASE_IMG")]
    base: Option<String>,
    /// Bytes a second at most
    #[arg(short, long, value_name = "RATE")]
    rate_limit: Option<String>,
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
    let args = CommitArgs::from_arg_matches(matches)?;
    let rate = args.rate_limit.as_deref().map(|text| sizes::size("rate limit", text)).transpose()?;
    let [file] = args.files.as_slice() else {
        return Err(Failure::usage("Expecting one image file name"));
    };
    let spec = args.naming.spec(file, args.format.as_ref())?;
    let options = CommitOptions {
        image: ImageSpec { cache: cache_mode("", args.cache.as_ref())?, ..spec },
        base: args.base.clone(),
        keep: args.drop,
        rate,
    };
    if args.naming.untrusted.is_on() && options.base.is_none() {
        return Err(Failure::new("with --untrusted the file to commit to must be named by -b"));
    }
    let base = options.base.as_deref().map(Use::WriteFile);
    let uses: Vec<Use<'_>> = [Use::Write(&options.image)].into_iter().chain(base).collect();
    args.naming.untrusted.guard(&uses, console)?;
    let job = work::Foreground::new(console.persona, args.progress, args.quiet, "committing")?.starting_with_images();
    let failed = |error: &Error| failed(console.persona, &options, error);
    job.run(async |handle| commit::run(&options, &handle).await, failed)?;
    if !args.quiet {
        console.line("Image committed.");
    }
    Ok(0)
}

/// qemu-img has words of its own for two refusals.
fn failed(persona: Persona, options: &CommitOptions, error: &Error) -> Failure {
    let file = &options.image.name;
    match (persona, &options.base) {
        (Persona::QemuImg, _) if error.message().contains("does not have a backing file") => {
            Failure::new("Image does not have a backing file")
        }
        (Persona::QemuImg, Some(base)) if error.message().ends_with("is not in the backing chain") => {
            Failure::new(format!("Did not find '{base}' in the backing chain of '{file}'"))
        }
        _ => Failure::open(persona, file, error),
    }
}
