// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `bitmap`: adds, removes, clears, enables, disables and merges persistent dirty bitmaps.

use super::arguments::NamingArgs;
use super::untrusted::Use;
use super::{Verb, sizes, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure};
use clap::{ArgAction, ArgMatches, Args, FromArgMatches};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::bitmap::{self, BitmapAction, BitmapOptions, BitmapStep};
use cowshed_types::{Error, LINE_END};

pub const VERB: Verb = Verb {
    name: "bitmap",
    about: "Add, remove, clear, enable, disable and merge dirty bitmaps",
    operands: "FILE [BITMAP]",
    details: "A dirty bitmap of a qcow2 image has the parts of the disk that were written since it was cleared. An \
              incremental backup copies these. While it is enabled, each write to the image is recorded in it. Several \
              actions are done in the order in which they stand. Actions before one that fails stay done. A \
              power cut leaves the bitmaps as they were before an action or as they are afterwards.",
    examples: "  cowshed bitmap --add disk.qcow2 since-monday
  cowshed bitmap --add --disable -g 1M disk.qcow2 kept
  cowshed bitmap --merge since-monday disk.qcow2 kept
  cowshed bitmap --merge since-monday -b disk.qcow2 -F qcow2 copy.qcow2 since-monday
  cowshed bitmap --clear disk.qcow2 since-monday
  cowshed bitmap --remove disk.qcow2 since-monday
  cowshed bitmap --remove-all disk.qcow2",
    in_qemu_img: true,
    arguments: BitmapArgs::augment_args,
    run,
};

/// A flag that may be given several times and keeps its places on the command line.
#[derive(Args, Clone, Debug)]
struct BitmapArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Add BITMAP, enabled
    #[arg(long, num_args = 0, default_missing_value = "add", action = ArgAction::Append)]
    add: Vec<String>,
    /// Granularity of a bitmap that is added: 512 to 2G, a power of two [default: the cluster size from 4k to 64k]
    #[arg(short, long, value_name = "GRANULARITY")]
    granularity: Option<String>,
    /// Take BITMAP away
    #[arg(long, num_args = 0, default_missing_value = "remove", action = ArgAction::Append)]
    remove: Vec<String>,
    /// Take all bitmaps away; without another action BITMAP is left out
    #[arg(long, num_args = 0, default_missing_value = "remove-all", action = ArgAction::Append)]
    remove_all: Vec<String>,
    /// Nothing is dirty in BITMAP any more
    #[arg(long, num_args = 0, default_missing_value = "clear", action = ArgAction::Append)]
    clear: Vec<String>,
    /// BITMAP records what is written from now on
    #[arg(long, num_args = 0, default_missing_value = "enable", action = ArgAction::Append)]
    enable: Vec<String>,
    /// BITMAP stays as it is from now on
    #[arg(long, num_args = 0, default_missing_value = "disable", action = ArgAction::Append)]
    disable: Vec<String>,
    /// Ranges that are dirty in SOURCE become dirty in BITMAP too
    #[arg(long, value_name = "SOURCE", action = ArgAction::Append)]
    merge: Vec<String>,
    /// The image that holds SOURCE (default: FILE itself)
    #[arg(short = 'b', long, value_name = "SRC_FILE", value_hint = clap::ValueHint::FilePath)]
    source_file: Option<String>,
    /// Format of SRC_FILE
    #[arg(short = 'F', long, value_name = "SRC_FMT")]
    source_format: Option<String>,
    /// The image and the name of its bitmap
    #[arg(value_name = "FILE [BITMAP]", value_hint = clap::ValueHint::FilePath)]
    operands: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = BitmapArgs::from_arg_matches(matches)?;
    let actions = actions(matches);
    // Only the removal of all bitmaps needs no name.
    check(&args, &actions)?;
    let granularity = args.granularity.as_deref().map(|text| sizes::size_between("granularity", text, 0, sizes::MOST));
    let granularity = granularity.transpose()?;
    let names_none = actions.iter().all(|action| *action == BitmapAction::RemoveAll);
    let (file, name) = match (args.operands.as_slice(), names_none) {
        ([file], true) => (file, String::new()),
        ([file, name], false) => (file, name.clone()),
        (_, true) => return Err(Failure::new("Expecting filename")),
        (_, false) => return Err(Failure::new("Expecting filename and bitmap name")),
    };
    let image = args.naming.spec(file, args.format.as_ref())?;
    let source = match &args.source_file {
        Some(source) => {
            let spec = args.naming.spec(source, None)?;
            Some(ImageSpec { image_opts: false, format: args.source_format.clone(), ..spec })
        }
        None => None,
    };
    // 0 is the default, as there.
    let granularity_bytes = granularity.filter(|bytes| *bytes != 0);
    let options = BitmapOptions { image, name, actions, granularity_bytes, source };
    let mut uses = vec![Use::Write(&options.image)];
    uses.extend(options.source.as_ref().map(Use::Read));
    args.naming.untrusted.guard(&uses, console)?;
    let mut step = None;
    let done = work::run_quietly(async |job| {
        bitmap::run(&options, &job).await.map_err(|(failed, error)| {
            step = Some(failed);
            error
        })
    });
    done.map_err(|error| failed(console.persona, &options, step, &error))?;
    Ok(0)
}

/// The actions in the order of the command line.
fn actions(matches: &ArgMatches) -> Vec<BitmapAction> {
    let plain = [
        ("add", BitmapAction::Add),
        ("remove", BitmapAction::Remove),
        ("remove_all", BitmapAction::RemoveAll),
        ("clear", BitmapAction::Clear),
        ("enable", BitmapAction::Enable),
        ("disable", BitmapAction::Disable),
    ];
    let mut placed: Vec<(usize, BitmapAction)> = Vec::new();
    for (id, action) in plain {
        let places = matches.indices_of(id).into_iter().flatten();
        placed.extend(places.map(|place| (place, action.clone())));
    }
    let sources = matches.get_many::<String>("merge").into_iter().flatten();
    let places = matches.indices_of("merge").into_iter().flatten();
    placed.extend(places.zip(sources).map(|(place, source)| (place, BitmapAction::Merge(source.clone()))));
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, action)| action).collect()
}

/// Refuses contradictory arguments, in qemu-img's words.
fn check(args: &BitmapArgs, actions: &[BitmapAction]) -> Result<(), Failure> {
    let merges = !args.merge.is_empty();
    if let Some(text) = &args.granularity {
        sizes::size("granularity", text)?;
    }
    for (wrong, message) in [
        (
            actions.is_empty(),
            "Need at least one of --add, --remove, --remove-all, --clear, --enable, --disable, or --merge",
        ),
        (args.granularity.is_some() && args.add.is_empty(), "granularity only supported with --add"),
        (args.source_file.is_some() && !merges, "Merge bitmap source file only supported with --merge"),
        (args.source_format.is_some() && args.source_file.is_none(), "-F only supported with -b"),
    ] {
        if wrong {
            return Err(Failure::new(message));
        }
    }
    Ok(())
}

/// qemu-img names the operation and the bitmap that failed.
fn failed(persona: Persona, options: &BitmapOptions, step: Option<BitmapStep>, error: &Error) -> Failure {
    let file = &options.image.name;
    match (step, &options.source) {
        (Some(BitmapStep::Action(index)), _) if persona == Persona::QemuImg => {
            let verb = match options.actions.get(index) {
                Some(BitmapAction::Add) | None => "add",
                Some(BitmapAction::Remove) => "remove",
                Some(BitmapAction::RemoveAll) => "remove-all",
                Some(BitmapAction::Clear) => "clear",
                Some(BitmapAction::Enable) => "enable",
                Some(BitmapAction::Disable) => "disable",
                Some(BitmapAction::Merge(_)) => "merge",
            };
            // The file of the source isn't named either.
            let named = error.file_name().unwrap_or(file);
            let reason = Failure::about(persona, named, error).message;
            let reason = reason.strip_prefix(&format!("{named}: ")).unwrap_or(&reason).to_owned();
            let reason = match reason.split_once(" is inconsistent and cannot be used") {
                Some((bitmap, _)) => format!(
                    "{bitmap} is inconsistent and cannot be used{LINE_END}Try block-dirty-bitmap-remove to delete this bitmap from disk"
                ),
                None => reason,
            };
            Failure::new(format!("Operation {verb} on bitmap {} failed: {reason}", options.name))
        }
        (Some(BitmapStep::Source), Some(source)) => Failure::open(persona, &source.name, error),
        (Some(BitmapStep::Image), _) if error.sentence().starts_with("Lost persistent bitmaps during") => {
            // QEMU says it at both of its attempts.
            let (lost, closing) = (error.sentence(), "Error while closing the image: Invalid argument");
            let all = format!("{lost}{LINE_END}qemu-img: {closing}{LINE_END}qemu-img: {lost}");
            Failure::open(persona, file, &error.clone().qemu(all))
        }
        _ => Failure::open(persona, file, error),
    }
}
