// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `rescue`: the remains of a damaged image.

use super::arguments::{NamingArgs, Objects, OutputFormat};
use super::inspect::printable;
use super::sizes::{MOST, size, size_between};
use super::untrusted::Use;
use super::{Verb, work};
use crate::output::{Console, Failure, json, size::human};
use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use cowshed_image::SnapshotName;
use cowshed_jobs::ImageSpec;
use cowshed_jobs::rescue::{self, Overrides, RescueMap, RescueOptions};
use std::io::Write;

/// Ranges and tables that the text lists; the map has all.
const LISTED_MAX: usize = 20;

pub const VERB: Verb = Verb {
    name: "rescue",
    about: "Read what is left of a damaged qcow2 image into a new one",
    operands: "FILE [TARGET]",
    details: "Reads every cluster that can still be reached, also where the image can't be opened any more. Lost ranges \
              are zeroes in TARGET, and are listed with the reason. Data that may be wrong is listed as \
              doubtful. Without TARGET nothing is written at all. FILE is never written to.\n\nWhere the header is \
              damaged, --cluster-size, --size and --l1-offset replace its fields. --snapshot reads an internal snapshot \
              instead of the disk. --scan looks for L2 tables \
              that nothing leads to. All that it finds is a guess, and nothing of it is used before --assign says where \
              on the disk a table belongs.\n\nExit code: 0 everything was read, 1 nothing could be done, 2 something is \
              lost.",
    examples: "  cowshed rescue broken.qcow2
      Says which parts can be read and which are lost.
  cowshed rescue --map lost.json broken.qcow2 new.qcow2
  cowshed rescue --size 20G --l1-offset 0x30000 broken.qcow2 new.qcow2
      With a damaged header.
  cowshed rescue -l before-upgrade broken.qcow2 old.qcow2
      Reads an internal snapshot.
  cowshed rescue --object secret,id=s,file=passphrase.txt --key-secret s broken.qcow2 new.qcow2
      Of an encrypted image; with -o encrypt.format=luks,encrypt.key-secret=s the new one is encrypted too.
  cowshed rescue --scan broken.qcow2
  cowshed rescue --assign 0x5a0000=512M broken.qcow2 new.qcow2
      Finds a lost L2 table, and takes it for the disk from 512M on.",
    in_qemu_img: false,
    arguments: RescueArgs::augment_args,
    run,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    /// They are
    On,
    /// They aren't
    Off,
}

#[derive(Args, Clone, Debug)]
struct RescueArgs {
    #[command(flatten)]
    naming: NamingArgs,
    /// Format of the new image
    #[arg(short = 'O', long, value_name = "TARGET_FMT", default_value = "qcow2")]
    target_format: String,
    /// Options of the new image; '-o help' of 'create' lists them
    #[arg(short = 'o', long = "target-format-options", value_name = "TARGET_FMT_OPTS")]
    options: Vec<String>,
    /// Read an internal snapshot instead of the disk: an ID or name, snapshot.id=ID or snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", conflicts_with = "l1_offset")]
    snapshot: Option<String>,
    /// Write the map of what is lost to a new file, as JSON
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    map: Option<String>,
    /// Look for L2 tables that nothing leads to
    #[arg(long)]
    scan: bool,
    /// Take the table at this offset of the file for the disk from this offset on
    #[arg(long, value_name = "OFFSET=GUEST_OFFSET")]
    assign: Vec<String>,
    /// Cluster size, whatever the header says
    #[arg(long, value_name = "SIZE")]
    cluster_size: Option<String>,
    /// Size of the disk, whatever the header says
    #[arg(long, value_name = "SIZE")]
    size: Option<String>,
    /// Where the L1 table is in the file, whatever the header says
    #[arg(long, value_name = "OFFSET")]
    l1_offset: Option<String>,
    /// Whether L2 entries are extended, whatever the header says
    #[arg(long, value_enum, value_name = "on|off")]
    extended_l2: Option<Switch>,
    /// Backing file instead of the one that the image names
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    backing: Option<String>,
    /// Format of that backing file (default: probed)
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
    /// Leave the backing file out: what isn't allocated is zeroes
    #[arg(long, conflicts_with = "backing")]
    no_backing: bool,
    /// External data file instead of the one that the image names
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    data_file: Option<String>,
    /// Id of the secret (--object) that opens an encrypted image
    #[arg(long, value_name = "ID")]
    key_secret: Option<String>,
    /// Open the image even while another process writes to it: reads may be torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Overwrite files that exist already
    #[arg(long)]
    force: bool,
    /// Text or JSON
    #[arg(long, value_enum, default_value_t, value_name = "human|json")]
    output: OutputFormat,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// The damaged image, and the new one
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = RescueArgs::from_arg_matches(matches)?;
    let (file, target) = match args.files.as_slice() {
        [file] => (file, None),
        [file, target] => (file, Some(target)),
        _ => return Err(Failure::usage("Expecting one image file name, and that of the new image")),
    };
    let options = options(&args, file, target)?;
    guard(&args, &options, console)?;
    // A map that can't be written is better known before the work than after it; it replaces no other file.
    let map_failed = |name: &str, error: &std::io::Error| Failure::new(format!("{name}: {error}"));
    let mut map_file = match &args.map {
        None => None,
        Some(name) => {
            cowshed_storage::note_writable();
            let created = std::fs::File::create_new(name);
            Some((name, created.map_err(|error| map_failed(name, &error))?))
        }
    };
    let quiet = args.quiet || args.output == OutputFormat::Json;
    let job = work::Foreground::new(console.persona, args.progress, quiet, "rescuing")?;
    let failed = |error: &cowshed_types::Error| Failure::new(error.to_string());
    let map = job.run(async |handle| rescue::run(&options, &handle).await, failed)?;
    let value = serde_json::to_value(&map).map_err(|error| Failure::new(format!("could not make JSON: {error}")))?;
    let text = json::pretty(&value);
    if let Some((name, file)) = &mut map_file {
        writeln!(file, "{text}").and_then(|()| file.sync_all()).map_err(|error| map_failed(name, &error))?;
    }
    match args.output {
        _ if args.quiet => {}
        OutputFormat::Json => console.line(text),
        OutputFormat::Human => print_human(&map, target.is_some(), console),
    }
    Ok(map.exit_code())
}

fn options(args: &RescueArgs, file: &str, target: Option<&String>) -> Result<RescueOptions, Failure> {
    let number = |what: &str, text: &Option<String>| text.as_deref().map(|text| size(what, text)).transpose();
    if args.backing_format.is_some() && args.backing.is_none() {
        return Err(Failure::usage("--backing-format is for a backing file: it needs --backing"));
    }
    if target.is_none() && !args.options.is_empty() {
        return Err(Failure::usage("options for a new image need its name"));
    }
    let backing = match (&args.backing, args.no_backing) {
        (Some(name), _) => Some((name.clone(), args.backing_format.clone())),
        (None, true) => Some((String::new(), None)),
        (None, false) => None,
    };
    let Objects { secrets, tls, .. } = args.naming.objects()?;
    let target = target.map(|name| ImageSpec { secrets, tls, ..ImageSpec::file(name).format(&args.target_format) });
    Ok(RescueOptions {
        image: args.naming.shared(file, None, args.force_share)?,
        target,
        create_options: args.options.clone(),
        snapshot: args.snapshot.as_deref().map(SnapshotName::parse).transpose()?,
        overrides: Overrides {
            cluster_size_bytes: number("cluster size", &args.cluster_size)?,
            size_bytes: number("size", &args.size)?,
            l1_offset_bytes: number("L1 offset", &args.l1_offset)?,
            extended_l2: args.extended_l2.map(|switch| switch == Switch::On),
            backing_is_given: backing.is_some(),
        },
        backing,
        data_file: args.data_file.clone(),
        key_secret: args.key_secret.clone(),
        keeps_existing: !args.force,
        scan: args.scan,
        assign: args.assign.iter().map(|text| assignment(text)).collect::<Result<_, _>>()?,
    })
}

fn guard(args: &RescueArgs, options: &RescueOptions, console: &mut Console) -> Result<(), Failure> {
    let backing = args.backing.as_deref().map(ImageSpec::file);
    let mut uses = vec![Use::Read(&options.image)];
    uses.extend(backing.iter().map(Use::Read));
    uses.extend(options.data_file.as_deref().map(Use::ReadFile));
    uses.extend(options.target.iter().map(Use::Write));
    uses.extend(args.map.as_deref().map(Use::WriteFile));
    args.naming.untrusted.guard(&uses, console)
}

/// `OFFSET=GUEST_OFFSET`.
fn assignment(text: &str) -> Result<(u64, u64), Failure> {
    let Some((offset, guest)) = text.split_once('=') else {
        return Err(Failure::usage(format!("--assign takes OFFSET=GUEST_OFFSET, not '{text}'")));
    };
    Ok((size_between("table offset", offset, 1, MOST)?, size("guest offset", guest)?))
}

fn print_human(map: &RescueMap, wrote: bool, console: &mut Console) {
    let RescueMap { image, virtual_size, cluster_size, data_bytes, zero_bytes, .. } = map;
    for note in &map.notes {
        console.line(format_args!("note: {}", printable(note)));
    }
    console.line(format_args!("{image}: a disk of {}, clusters of {}", human(*virtual_size), human(*cluster_size)));
    console.line(format_args!("read: {} of data, {} of zeroes", human(*data_bytes), human(*zero_bytes)));
    let listed = |shown: usize, all: usize, console: &mut Console| {
        if all > shown {
            console.line(format_args!("  … {} more (--map or --output=json lists them)", all - shown));
        }
    };
    if map.snapshot.is_none() && !map.snapshots.is_empty() {
        console.line("internal snapshots (--snapshot reads one):");
        for snapshot in map.snapshots.iter().take(LISTED_MAX) {
            console.line(format_args!("  {}: {}", printable(&snapshot.id), printable(&snapshot.name)));
        }
        listed(LISTED_MAX, map.snapshots.len(), console);
    }
    if map.is_whole() {
        console.line("lost: nothing");
    } else {
        let what = if wrote { ", zeroes in the new image" } else { "" };
        console.line(format_args!("lost: {}{what}", human(map.lost_bytes)));
        for lost in map.lost.iter().take(LISTED_MAX) {
            let detail = lost.detail.as_deref().map(|text| format!(" ({})", printable(text))).unwrap_or_default();
            console.line(format_args!("  {:#x}, {}: {}{detail}", lost.start, human(lost.length), lost.reason));
        }
        listed(LISTED_MAX, map.lost.len(), console);
    }
    if map.doubtful_bytes != 0 {
        console.line(format_args!("doubtful: {}", human(map.doubtful_bytes)));
        for doubtful in map.doubtful.iter().take(LISTED_MAX) {
            let reason = doubtful.reason;
            console.line(format_args!("  {:#x}, {}: {reason}", doubtful.start, human(doubtful.length)));
        }
        listed(LISTED_MAX, map.doubtful.len(), console);
    }
    if !map.orphans.is_empty() {
        console.line("tables that nothing leads to (guesses):");
        for orphan in map.orphans.iter().take(LISTED_MAX) {
            let place = match (orphan.assigned, orphan.suggested) {
                (Some(guest), _) => format!(", taken for {guest:#x}"),
                (None, Some(guest)) => format!(", perhaps for {guest:#x}: --assign {:#x}={guest:#x}", orphan.offset),
                (None, None) => String::new(),
            };
            let (offset, looks_like, entries) = (orphan.offset, orphan.looks_like, orphan.entries);
            console.line(format_args!("  {offset:#x}: looks like {looks_like}, {entries} entries{place}"));
        }
        listed(LISTED_MAX, map.orphans.len(), console);
    }
}
