// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `check`: looks for damage, and repairs it.

use super::arguments::{NamingArgs, OutputFormat, cache_mode, one_file};
use super::{Verb, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure, json};
use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::check::{self, CheckOptions, CheckOutcome, report};

/// Exit code for formats that have nothing to check.
const NOT_CHECKABLE_EXIT_CODE: u8 = 63;

pub const VERB: Verb = Verb {
    name: "check",
    about: "Check an image for damage, and repair it",
    operands: "FILE",
    details: "Counts every reference in the image and compares with what the image says of itself. Leaked clusters \
              waste space and harm nothing; errors can cost data. Repair while nobody uses the image, and keep a copy \
              where the data matters.\n\nExit code: 0 clean (or everything repaired), 1 the check could not be made, \
              2 errors, 3 leaked clusters only, 63 the format has no checks.",
    examples: "  cowshed check disk.qcow2
  cowshed check -r leaks disk.qcow2
      Frees leaked clusters.
  cowshed check -r all disk.qcow2
      Repairs what can be repaired.",
    in_qemu_img: true,
    arguments: CheckArgs::augment_args,
    run,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Repair {
    /// Leaked clusters only
    Leaks,
    /// Everything
    All,
}

#[derive(Args, Clone, Debug)]
struct CheckArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Cache mode: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 'T', long, value_name = "CACHE_MODE")]
    cache: Option<String>,
    /// Repair what is found; not together with -U
    #[arg(short, long, value_enum, value_name = "leaks|all")]
    repair: Option<Repair>,
    /// Open the image even while another process writes to it: what is read may be torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Text or JSON
    #[arg(long, value_enum, default_value_t, value_name = "human|json")]
    output: OutputFormat,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = CheckArgs::from_arg_matches(matches)?;
    let file = one_file(&args.files)?;
    let image = ImageSpec {
        force_share: args.force_share,
        cache: cache_mode("source ", args.cache.as_ref())?,
        ..args.naming.spec(file, args.format.as_ref())?
    };
    let repair = match args.repair {
        None => check::Repair::None,
        Some(Repair::Leaks) => check::Repair::Leaks,
        Some(Repair::All) => check::Repair::All,
    };
    if args.force_share && repair != check::Repair::None {
        let reason = "force-share=on can only be used with read-only images";
        return Err(Failure::new(format!("Could not open '{file}': {reason}")));
    }
    let options = CheckOptions { image, repair, ..CheckOptions::default() };
    let quiet = args.quiet || args.output == OutputFormat::Json;
    let job = work::Foreground::new(console.persona, args.progress, quiet, "checking")?;
    let failed = |error: &cowshed_block::Error| Failure::open(console.persona, file, error);
    let Some(outcome) = job.run(async |handle| check::run(&options, &handle).await, failed)? else {
        let message = match console.persona {
            Persona::QemuImg => "This image format does not support checks".to_owned(),
            Persona::Cowshed => format!("{file}: this format has nothing to check"),
        };
        return Err(Failure::new(message).code(NOT_CHECKABLE_EXIT_CODE));
    };
    print(&outcome, &args, console);
    Ok(outcome.exit_code())
}

/// The findings go to standard error, whatever else is asked for; `-q` leaves only them.
fn print(outcome: &CheckOutcome, args: &CheckArgs, console: &mut Console) {
    for line in report::finding_lines(outcome) {
        console.error_text(&format!("{line}\n"));
    }
    match args.output {
        _ if args.quiet => {}
        OutputFormat::Json => console.line(json::pretty(&json::in_qemu_order(report::json(outcome)))),
        OutputFormat::Human => console.print(report::human(outcome)),
    }
}
