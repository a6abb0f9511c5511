// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `snapshot`: lists, takes, applies and deletes internal snapshots.

use super::arguments::NamingArgs;
use super::untrusted::Use;
use super::{Verb, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure, info};
use clap::{ArgAction, ArgMatches, Args, FromArgMatches};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::snapshot::{self, SnapshotAction};
use cowshed_types::{Errno, Error, ErrorKind};

pub const VERB: Verb = Verb {
    name: "snapshot",
    about: "List, take, apply and delete internal snapshots",
    operands: "FILE",
    details: "Snapshots live inside the image and share its clusters. Applying one gives the disk the content that it had when the \
              snapshot was taken: later data is lost unless another snapshot has it. A name that \
              stands for an ID and for another snapshot's name means the ID with -a, and the name with -d. A power cut \
              leaves the image as it was before or as it is afterwards.",
    examples: "  cowshed snapshot disk.qcow2
  cowshed snapshot -c before-upgrade disk.qcow2
  cowshed snapshot -a before-upgrade disk.qcow2
  cowshed snapshot -d before-upgrade disk.qcow2",
    in_qemu_img: true,
    arguments: SnapshotArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct SnapshotArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// List the snapshots (the default)
    #[arg(short, long, action = ArgAction::Count)]
    list: u8,
    /// Take a snapshot of this name
    #[arg(short, long, value_name = "SNAPSHOT", action = ArgAction::Append)]
    create: Vec<String>,
    /// Give the disk the content of this snapshot
    #[arg(short, long, value_name = "SNAPSHOT", action = ArgAction::Append)]
    apply: Vec<String>,
    /// Delete the snapshot of this name
    #[arg(short, long, value_name = "SNAPSHOT", action = ArgAction::Append)]
    delete: Vec<String>,
    /// List even while another process writes to the image
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = SnapshotArgs::from_arg_matches(matches)?;
    let created = args.create.iter().cloned().map(SnapshotAction::Create);
    let applied = args.apply.iter().cloned().map(SnapshotAction::Apply);
    let mut actions = created.chain(applied).chain(args.delete.iter().cloned().map(SnapshotAction::Delete));
    let action = actions.next();
    if actions.count() + usize::from(args.list) + usize::from(action.is_some()) > 1 {
        return Err(Failure::usage("Cannot mix '-l', '-a', '-c', '-d'"));
    }
    let [file] = args.files.as_slice() else {
        return Err(Failure::usage("Expecting one image file name"));
    };
    let image = args.naming.shared(file, args.format.as_ref(), args.force_share)?;
    args.naming.untrusted.guard(&[if action.is_some() { Use::Write(&image) } else { Use::Read(&image) }], console)?;
    let Some(action) = action else {
        return list(&image, file, console);
    };
    if args.force_share {
        let error = Error::invalid_argument("force-share=on can only be used with read-only images");
        return Err(Failure::open(console.persona, file, &error));
    }
    let job = work::Foreground::new(console.persona, false, args.quiet, "rewriting metadata")?;
    let failed = |error: &Error| failed(console.persona, file, &action, error);
    job.run(async |handle| snapshot::run(&image, &action, &handle).await, failed)?;
    Ok(0)
}

fn list(image: &ImageSpec, file: &str, console: &mut Console) -> Result<u8, Failure> {
    let listed = work::run_quietly(async |_| snapshot::list(image).await);
    let snapshots = listed.map_err(|error| Failure::open(console.persona, file, &error))?;
    match snapshots.is_empty() {
        false => console.line(info::snapshot_table(&snapshots).trim_end()),
        true if console.persona == Persona::Cowshed => console.line(format_args!("{file}: no internal snapshots")),
        true => {}
    }
    Ok(0)
}

/// qemu-img names the snapshot that could not be taken, applied or deleted, and then the reason.
fn failed(persona: Persona, file: &str, action: &SnapshotAction, error: &Error) -> Failure {
    // A file that isn't there has no snapshots to look among.
    let is_about_snapshot = match error.kind() {
        ErrorKind::NotFound => error.message().starts_with("there is no snapshot"),
        ErrorKind::Busy | ErrorKind::Unsupported | ErrorKind::NoSpace => true,
        _ => is_full_count(error),
    };
    if persona == Persona::Cowshed || !is_about_snapshot {
        return Failure::open(persona, file, error);
    }
    let (verb, name, missing) = match action {
        SnapshotAction::Create(name) => ("create", name, "Operation not supported"),
        SnapshotAction::Apply(name) => ("apply", name, "Failed to load snapshot: No such file or directory"),
        SnapshotAction::Delete(name) => ("delete", name, "snapshot not found"),
    };
    let why = match error.kind() {
        ErrorKind::NotFound => missing,
        ErrorKind::Busy if error.message().contains("bitmaps") => "Device has active dirty bitmaps",
        ErrorKind::Unsupported if error.message().contains("have no internal snapshots") => match action {
            SnapshotAction::Create(_) => "Operation not supported",
            SnapshotAction::Apply(_) => "Block driver does not support snapshots",
            SnapshotAction::Delete(_) => missing,
        },
        ErrorKind::Unsupported if error.message().contains("data file") => match action {
            SnapshotAction::Create(_) => "Operation not supported",
            SnapshotAction::Apply(_) => "Failed to load snapshot: Operation not supported",
            SnapshotAction::Delete(_) => missing,
        },
        ErrorKind::Unsupported => "Operation not supported",
        ErrorKind::NoSpace => {
            let words = if error.errno() == Errno::ENOSPC { "No space left on device" } else { "Disk quota exceeded" };
            match action {
                SnapshotAction::Delete(_) => &format!("Failed to remove snapshot from snapshot list: {words}"),
                _ => words,
            }
        }
        _ if is_full_count(error) => &format!("{}: Invalid argument", error.message()),
        _ => return Failure::open(persona, file, error),
    };
    Failure::new(format!("Could not {verb} snapshot '{name}': {why}"))
}

/// A cluster would have more users than its refcount can hold.
fn is_full_count(error: &Error) -> bool {
    error.message().contains("of which refcounts of")
}
