// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `check`: looks for damage, and repairs it.

use super::arguments::{NamingArgs, OutputFormat, cache_mode, one_file};
use super::sizes::{MOST, size_between};
use super::untrusted::Use;
use super::{Verb, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure, json};
use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::check::{self, CheckOptions, CheckOutcome, report};

/// Exit code for formats that have nothing to check.
const NOT_CHECKABLE_EXIT_CODE: u8 = 63;
/// Least memory: with less, an image would be read again and again.
const MEMORY_MIN: u64 = 1 << 20;

pub const VERB: Verb = Verb {
    name: "check",
    about: "Check an image for damage, and repair it",
    operands: "FILE",
    details: "Counts every reference in the image and compares with what the image says of itself. Leaked clusters \
              waste space and harm nothing; errors can cost data. Repair while the image has no users. Where the data \
              matters, keep a copy or an undo log. The log holds the bytes that the repair overwrites, and --undo puts them back. A \
              dry run says of each finding what the repair would do, and writes nothing; with --output=json as \
              'findings'. No repair loses data that can be read; what can't be is left as it is (try 'cowshed \
              rescue'), unless --lossy gives it up.\n\nExit code: 0 clean (or everything repaired), 1 the check could not be made, \
              2 errors, 3 leaked clusters only, 63 the format has no checks.",
    examples: "  cowshed check disk.qcow2
  cowshed check -r leaks disk.qcow2
      Frees leaked clusters.
  cowshed check -r all disk.qcow2
      Repairs what can be repaired.
  cowshed check -r all --dry-run disk.qcow2
      Says what that would do.
  cowshed check -r all --lossy disk.qcow2
      Also gives up what is beyond repair, such as clusters behind the end of a
      file that was cut off: they read as zeroes afterwards.
  cowshed check -r all --undo-log disk.undo disk.qcow2
  cowshed check --undo disk.undo disk.qcow2
      Repairs, and takes the repair back.",
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
    /// With -r all: also give up what can't be reached any more, so that it reads as zeroes
    #[arg(long)]
    lossy: bool,
    /// Only say what the repair (-r) would do
    #[arg(long)]
    dry_run: bool,
    /// Keep what the repair (-r) overwrites in a new file, so that it can be taken back
    #[arg(long, value_name = "LOG", value_hint = clap::ValueHint::FilePath)]
    undo_log: Option<String>,
    /// Take back the repair that this undo log tells of, also one that was cut off
    #[arg(long, value_name = "LOG", value_hint = clap::ValueHint::FilePath)]
    undo: Option<String>,
    /// Memory to use, about (default: 256M); images that need more are read several times
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Open the image even while another process writes to it: reads may be torn
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
        cache: cache_mode("source ", args.cache.as_ref())?,
        ..args.naming.shared(file, args.format.as_ref(), args.force_share)?
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
    refuse_contradictions(&args)?;
    guard(&args, &image, console)?;
    if let Some(log) = &args.undo {
        return undo(&image, log, &args, console);
    }
    let undo_log = args.undo_log.clone();
    let options = CheckOptions {
        image,
        repair,
        undo_log,
        lossy: args.lossy,
        dry_run: args.dry_run,
        memory_bytes: args.memory.as_deref().map(|text| size_between("memory", text, MEMORY_MIN, MOST)).transpose()?,
        ..CheckOptions::default()
    };
    let quiet = args.quiet || args.output == OutputFormat::Json;
    let job = work::Foreground::new(console.persona, args.progress, quiet, "checking")?;
    let job = if options.repair == check::Repair::None || options.dry_run { job.reading() } else { job };
    let failed = |error: &cowshed_types::Error| Failure::open(console.persona, file, error);
    let Some(outcome) = job.run(async |handle| check::run(&options, &handle).await, failed)? else {
        let message = match console.persona {
            Persona::QemuImg => "This image format does not support checks".to_owned(),
            Persona::Cowshed | Persona::Tool(_) => format!("{file}: this format has nothing to check"),
        };
        return Err(Failure::new(message).code(NOT_CHECKABLE_EXIT_CODE));
    };
    print(&outcome, &args, console);
    Ok(outcome.exit_code())
}

fn guard(args: &CheckArgs, image: &ImageSpec, console: &mut Console) -> Result<(), Failure> {
    let writes = args.undo.is_some() || (args.repair.is_some() && !args.dry_run);
    let mut uses = vec![if writes { Use::Write(image) } else { Use::Read(image) }];
    uses.extend(args.undo_log.iter().chain(&args.undo).map(|log| Use::WriteFile(log)));
    args.naming.untrusted.guard(&uses, console)
}

fn refuse_contradictions(args: &CheckArgs) -> Result<(), Failure> {
    let repairs = args.repair.is_some();
    if args.undo.is_some() && (repairs || args.dry_run || args.undo_log.is_some() || args.force_share) {
        return Err(Failure::usage("--undo goes with no -r, --dry-run, --undo-log or -U"));
    }
    if !repairs && (args.dry_run || args.undo_log.is_some()) {
        return Err(Failure::usage("--dry-run and --undo-log are for repairs: they need -r"));
    }
    if args.lossy && args.repair != Some(Repair::All) {
        return Err(Failure::usage("--lossy is for full repairs: it needs -r all"));
    }
    if args.dry_run && args.undo_log.is_some() {
        return Err(Failure::usage("a dry run has nothing to keep in an undo log"));
    }
    Ok(())
}

fn undo(image: &ImageSpec, log: &str, args: &CheckArgs, console: &mut Console) -> Result<u8, Failure> {
    let report = work::run_quietly(async |handle| check::undo(image, log, &handle).await)?;
    let check::UndoReport { bytes_restored, bytes_cut, was_complete } = report;
    match args.output {
        _ if args.quiet => {}
        OutputFormat::Json => console.line(json::pretty(&serde_json::json!({
            "filename": image.name,
            "bytes-restored": bytes_restored,
            "bytes-cut": bytes_cut,
            "was-complete": was_complete,
        }))),
        OutputFormat::Human => {
            let what = if was_complete { "The repair" } else { "The repair, which had not come to its end," };
            console.print(format!(
                "{what} was taken back: {bytes_restored} bytes restored, {bytes_cut} bytes cut off at the end.\n"
            ));
        }
    }
    Ok(0)
}

/// The findings go to standard error, whatever else is asked for; `-q` leaves only them.
fn print(outcome: &CheckOutcome, args: &CheckArgs, console: &mut Console) {
    for line in report::finding_lines(outcome) {
        console.error_text(&format!("{line}\n"));
    }
    match args.output {
        _ if args.quiet => {}
        OutputFormat::Json => {
            let counters = json::in_qemu_order(report::json(outcome));
            match console.persona == Persona::Cowshed || args.dry_run {
                true => json::print_with_list(console, &counters, "findings", report::findings(outcome)),
                false => console.line(json::pretty(&counters)),
            }
        }
        OutputFormat::Human => console.print(report::human(outcome)),
    }
}
