// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `compare`: whether two images read the same.

use super::arguments::{NamingArgs, cache_mode};
use super::untrusted::Use;
use super::{Verb, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::compare::{self, CompareOptions, CompareOutcome, Failed, FailedAt, SIZE_WARNING};
use cowshed_types::Error;
use std::cell::RefCell;

/// Exit code of an error while opening, and of all but the two below: 1 means "different".
const ERROR_EXIT_CODE: u8 = 2;
const STATUS_EXIT_CODE: u8 = 3;
const READ_EXIT_CODE: u8 = 4;

pub const VERB: Verb = Verb {
    name: "compare",
    about: "Check whether two images have the same content",
    operands: "FILE1 FILE2",
    details: "Formats and layout don't matter, only what a guest would read. Where one image is longer, the rest of \
              it must be zero.\n\nExit code: 0 identical, 1 different, 2 an image could not be opened, 3 what is allocated could not be \
              found out, 4 reading failed.",
    examples: "  cowshed compare disk.raw disk.qcow2
  cowshed compare -s -p a.qcow2 b.qcow2
      Sizes and allocation must be the same too; with progress.",
    in_qemu_img: true,
    arguments: CompareArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct CompareArgs {
    /// Format of FILE1 (default: probed)
    #[arg(short = 'f', long = "a-format", value_name = "FMT")]
    format: Option<String>,
    /// Format of FILE2 (default: probed)
    #[arg(short = 'F', long, value_name = "FMT")]
    b_format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Different sizes or different allocation count as different
    #[arg(short, long)]
    strict: bool,
    /// Cache mode: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 'T', long, value_name = "CACHE")]
    cache: Option<String>,
    /// Open the images even while another process writes to them: reads may be torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The two images
    #[arg(value_name = "FILE1 FILE2", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = CompareArgs::from_arg_matches(matches)?;
    let [first, second] = args.files.as_slice() else {
        return Err(Failure::usage("Expecting two image file names"));
    };
    run_checked(&args, first, second, console).map_err(|failure| Failure {
        // An interrupted run keeps its own code.
        code: if failure.code == 1 { ERROR_EXIT_CODE } else { failure.code },
        ..failure
    })
}

fn run_checked(args: &CompareArgs, first: &str, second: &str, console: &mut Console) -> Result<u8, Failure> {
    let cache = cache_mode("source ", args.cache.as_ref())?;
    let spec = |name: &str, format: Option<&String>| {
        let cache = cache.clone();
        args.naming.shared(name, format, args.force_share).map(|spec| ImageSpec { cache, ..spec })
    };
    let options = CompareOptions {
        first: spec(first, args.format.as_ref())?,
        second: spec(second, args.b_format.as_ref())?,
        strict: args.strict,
    };
    work::fail_with(ERROR_EXIT_CODE);
    args.naming.untrusted.guard(&[Use::Read(&options.first), Use::Read(&options.second)], console)?;
    let job = work::Foreground::new(console.persona, args.progress, args.quiet, "comparing")?;
    let job = job.starting_late().reading();
    let failed_at = FailedAt::default();
    let persona = console.persona;
    let failed = |error: &Error| failure(persona, [first, second], failed_at.get(), error);
    // As qemu-img: the warning comes where the longer disk's rest begins. A bar goes before it.
    let (console, warns_early) = (RefCell::new(console), persona == Persona::QemuImg);
    let print = |line: &str| {
        if !args.quiet {
            console.borrow_mut().line(line);
            console.borrow_mut().flush();
        }
    };
    let at_rest = || {
        if warns_early {
            print(SIZE_WARNING);
        }
    };
    let say = |outcome: &CompareOutcome| {
        if outcome.size_warning && !warns_early {
            print(SIZE_WARNING);
        }
        print(&outcome.message());
    };
    let work = async |handle| compare::run_noting(&options, &handle, &failed_at, &at_rest).await;
    let whole = |outcome: &CompareOutcome| outcome.exit_code() == 0 && !outcome.is_empty;
    let outcome = job.run_saying(work, failed, whole, say)?;
    Ok(u8::try_from(outcome.exit_code()).unwrap_or(ERROR_EXIT_CODE))
}

/// The failure of a comparison, in qemu-img's words under its name.
fn failure(persona: Persona, names: [&str; 2], failed: Option<Failed>, error: &Error) -> Failure {
    let reason = std::io::Error::from_raw_os_error(error.errno().0).to_string();
    let reason = reason.split(" (os error").next().unwrap_or_default();
    let (words, code) = match failed {
        None => return Failure::open_either(persona, &names, error),
        Some(Failed::Status { image }) => {
            (format!("Sector allocation test failed for {}", names[image]), STATUS_EXIT_CODE)
        }
        Some(Failed::Read { image, offset }) => {
            (format!("Error while reading offset {offset} of {}: {reason}", names[image]), READ_EXIT_CODE)
        }
    };
    match persona {
        Persona::QemuImg => Failure::new(words).code(code),
        _ => Failure::open_either(persona, &names, error).code(code),
    }
}
