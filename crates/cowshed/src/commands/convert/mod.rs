// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `convert`: copies images into a new one, in another format.

mod package;
mod platform;

use super::arguments::{NamingArgs, Objects, cache_mode};
use super::untrusted::Use;
use super::{Verb, create_options, new_image, ova, sizes, work};
use crate::invocation::Persona;
use crate::output::failure::{qemu_reason, reason_behind};
use crate::output::{Console, Failure, size::human, warning};
use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use cowshed_create::NO_EXPORT;
use cowshed_create::schema::{ImageCompression, compression_of, options_of};
use cowshed_image::SnapshotName;
use cowshed_image::open::resolve_name;
use cowshed_image::options::{BareKey, parse_list};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::convert::{self, ConvertOptions, ConvertOutcome};
use cowshed_ova::tar::has_ending;
use cowshed_types::{Errno, Error, ErrorKind};
use platform::GCP_FORMAT;
use std::time::Instant;

/// Requests in flight with `-m`.
const MOST_REQUESTS: i64 = 16;
/// Zeroes scanned for at once: `-S` can't ask for a coarser grain.
const MOST_SPARSE_BYTES: u64 = 16 << 20;
/// The default of `-S`, in bytes.
const DEFAULT_SPARSE_BYTES: u64 = 4096;
/// `-S` counts whole sectors.
const SECTOR_BYTES: u64 = 512;

pub const VERB: Verb = Verb {
    name: "convert",
    about: "Copy images into a new one, in another format",
    operands: "SRC_FILE... TGT_FILE",
    details: "Reads SRC_FILE, or several one after the other as one disk, and writes TGT_FILE. Holes and zeroes of the \
              source stay holes in the target. An existing TGT_FILE is overwritten with --force only, or written into with -n.",
    examples: "  cowshed convert -p -O qcow2 disk.raw disk.qcow2
  cowshed convert -c -O qcow2 -o compression_type=zstd disk.raw small.qcow2
      Compressed.
  cowshed convert -c --compression-window 32k -O qcow2 disk.raw small.qcow2
      Faster and smaller, for readers that decompress whole clusters.
  cowshed convert -O raw vm1.qcow2 vm1.raw
      The whole backing chain of vm1 in one file.
  cowshed convert -O qcow2 -b golden.qcow2 -F qcow2 vm1.qcow2 copy.qcow2
      A copy of an overlay on the same base: only the parts that vm1.qcow2 has itself.
  cowshed convert -n --target-is-zero -O raw disk.qcow2 /dev/vg/disk
      Into a device that exists already.
  cowshed convert --for azure disk.qcow2 disk.vhd
      A fixed VHD, its size rounded up to whole MiB.
  cowshed convert --disk 2 machine.ova disk.qcow2
      The second disk of a package, compared with its manifest.
  cowshed convert -O ova --for vmware --vm-cpus 2 --vm-memory 4G system.qcow2 data.qcow2 vm.ova
      A machine with two disks, for an import.",
    in_qemu_img: true,
    arguments: ConvertArgs::augment_args,
    run,
};

/// As `cp --reflink`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Reflink {
    #[default]
    Auto,
    Never,
}

#[derive(Args, Clone, Debug)]
struct ConvertArgs {
    /// Format of the sources (default: probed)
    #[arg(short = 'f', long = "source-format", value_name = "SRC_FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Cache mode for the sources: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 'T', long = "source-cache", value_name = "SRC_CACHE")]
    source_cache: Option<String>,
    /// Copy an internal snapshot: an ID or name, snapshot.id=ID or snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Copy persistent bitmaps too
    #[arg(long)]
    bitmaps: bool,
    /// Leave out inconsistent bitmaps instead of giving up; needs --bitmaps
    #[arg(long)]
    skip_broken_bitmaps: bool,
    /// Convert unreadable parts to zeroes instead of giving up
    #[arg(long)]
    salvage: bool,
    /// Format of the target [default: what the ending of TGT_FILE means, else raw]
    #[arg(short = 'O', long, value_name = "TGT_FMT")]
    target_format: Option<String>,
    /// TGT_FILE is an option string (driver=…,file.filename=…), not a file name; needs -n
    #[arg(long)]
    target_image_opts: bool,
    /// Options of the target's format: key=value,key=value ("help" lists them)
    #[arg(short = 'o', long = "target-format-options", value_name = "TGT_FMT_OPTS")]
    options: Vec<String>,
    /// Cache mode for the target [default: unsafe]
    #[arg(short = 't', long, value_name = "TGT_CACHE")]
    target_cache: Option<String>,
    /// Make the target an overlay on top of this image (QEMU up to 10.0 spells the short option -B)
    #[arg(short, short_alias = 'B', long, value_name = "BACKING_FILE", value_hint = clap::ValueHint::FilePath)]
    backing: Option<String>,
    /// Format of BACKING_FILE
    #[arg(short = 'F', long, value_name = "BACKING_FMT")]
    backing_format: Option<String>,
    /// Shorter runs of zeroes are written as data; 0: write everything [default: 4k]
    #[arg(short = 'S', long, value_name = "SPARSE_SIZE")]
    sparse_size: Option<String>,
    /// Overwrite a TGT_FILE that exists
    #[arg(long)]
    force: bool,
    /// Write into a target that exists already
    #[arg(short, long)]
    no_create: bool,
    /// The target that exists already reads as zeroes; needs -n
    #[arg(long)]
    target_is_zero: bool,
    /// Compress (qcow2, qcow, vmdk)
    #[arg(short, long)]
    compress: bool,
    /// Effort of -c: for zlib 1 (fast) to 9 (small), to 12 with a wide window; for zstd 1 to 22, or negative [default: 2 for zlib, else 1]
    #[arg(long, value_name = "LEVEL", allow_hyphen_values = true)]
    compression_level: Option<i32>,
    /// Window of zlib: 4k, for any reader, or 32k, faster and smaller, for readers that decompress whole clusters as QEMU does [default: 4k]
    #[arg(long, value_name = "SIZE")]
    compression_window: Option<String>,
    /// Open the sources even while another process writes to them: reads may be torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Bytes a second at most
    #[arg(short, long, value_name = "RATE")]
    rate_limit: Option<String>,
    /// Requests in flight, 1 to 16
    #[arg(short = 'm', long, value_name = "NUM_PARALLEL", default_value = "8")]
    parallel: String,
    /// Copy inside the kernel where it can, without reading: zeroes that are stored in the source stay stored
    #[arg(short = 'C', long)]
    copy_range_offloading: bool,
    /// Let the file system share data of sources and target (XFS, btrfs): where it can, or never
    #[arg(long, value_enum, default_value_t, value_name = "auto|never")]
    reflink: Reflink,
    /// Allow writes out of order
    #[arg(short = 'W', long)]
    oob_writes: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Of a package with several disks (OVA, OVF): the one with this name, id or number
    #[arg(long, value_name = "DISK")]
    disk: Option<String>,
    /// Make what a platform takes, and say what that is: azure, hyperv, vmware, virtualbox, gcp or aws. With -O ova the
    /// importers that are to take the package: vmware, virtualbox or both [default there: both]
    #[arg(long = "for", value_name = "PLATFORM")]
    platform: Option<String>,
    #[command(flatten)]
    machine: ova::target::MachineArgs,
    /// One or more sources, and the target
    #[arg(value_name = "SRC_FILE... TGT_FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let mut args = ConvertArgs::from_arg_matches(matches)?;
    if create_options::asks_for_help(&args.options)? {
        let format = args.target_format.as_deref().unwrap_or("raw");
        return create_options::print_help(format, args.files.len() > 1, console);
    }
    let files = args.files.clone();
    check_values(&args)?;
    check_combination(&args)?;
    let Some((target, sources)) = files.split_last().filter(|(_, sources)| !sources.is_empty()) else {
        return Err(Failure::new("Must specify image file name"));
    };
    if console.persona == Persona::Cowshed && ova::target::is_meant(args.target_format.as_deref(), target) {
        if package::is_one(&mut args, sources, console)? {
            return Err(Failure::new("a package is made of disks: convert those of the other one first"));
        }
        return package::pack(args, sources, target, console);
    }
    if !args.machine.is_empty() {
        return Err(Failure::new("--vm-... is about the machine of a package: it needs -O ova"));
    }
    let platform = platform::apply(&mut args, target)?;
    if platform.is_some_and(|platform| platform.format == GCP_FORMAT) {
        return platform::pack(args, sources, target, console);
    }
    let is_known_by_name = |name: &String| ["ova", "ovf"].iter().any(|ending| has_ending(name, ending));
    let is_told = args.format.is_some() || sources.iter().any(is_known_by_name);
    let is_package = package::is_one(&mut args, sources, console)?;
    let mut chosen = None;
    if !args.no_create {
        let of_name = new_image::format(args.target_format.as_deref(), target, "-O", console)?;
        args.target_format = Some(of_name.format.clone());
        chosen = Some(of_name);
        new_image::check_absent(target, args.force, console)?;
    }
    let mut options = options(&args, sources, target)?;
    options.size_unit_bytes = platform.map_or(1, |platform| platform.size_unit_bytes);
    options.refuses_empty = platform.is_some();
    options.has_vmware_ids = platform.is_some_and(|platform| platform.has_vmware_ids);
    options.keeps_existing = new_image::keeps_existing(args.force, console);
    let later = check_snapshot(&args, sources)
        .and_then(|()| check_target(&args, console.persona))
        .and_then(|()| check_single_source(&args, sources))
        .and_then(|()| check_backing(&args, &options));
    let cache = later.and_then(|()| cache_mode("", args.target_cache.as_ref()));
    options.target.cache = cache.map_err(|later| sources_first(console.persona, &args, &options, later))?;
    let started = Instant::now();
    guard(&args, &options, console)?;
    let packed = is_package.then(|| package::disk(&args, &options, console)).transpose()?;
    if let Some(disk) = &packed {
        if !is_told {
            // A guest may write the first sector of its disk.
            let disk = &disk.shown;
            console.complain(format_args!(
                "warning: {disk} is taken, as the file begins as a package; -f raw takes the file"
            ));
        }
        options.sources = vec![disk.spec.clone()];
    }
    let job = work::Foreground::new(console.persona, args.progress, args.quiet, "converting")?;
    let job = job.saying_end_again().leaving_what_errors_say();
    let persona = console.persona;
    let failed = |error: &Error| {
        let failure = failed(persona, &options, error);
        let is_source = options.sources.iter().any(|source| source.name == options.target.name);
        let failure = if is_source { sources_first(persona, &args, &options, failure) } else { failure };
        match &packed {
            Some(disk) => disk.named(failure),
            None => failure,
        }
    };
    let outcome = job.run(async |handle| convert::run(&options, &handle).await, failed)?;
    if let Some(chosen) = chosen {
        chosen.print_notice(args.quiet, console);
    }
    if let Some(disk) = &packed {
        disk.print_warnings(outcome.source_bytes, console)?;
    }
    for error in &outcome.unknown {
        console.complain(format_args!("warning: {}", error.sentence()));
    }
    if !outcome.salvaged.is_empty() {
        console.complain(format_args!(
            "warning: {} unreadable parts became zeroes, the first at offset {}",
            outcome.salvaged.len(),
            outcome.salvaged.first().copied().unwrap_or(0)
        ));
    }
    for name in &outcome.skipped_bitmaps {
        console.complain(format_args!("warning: Skipping inconsistent bitmap '{name}'"));
    }
    if let Some(platform) = platform.filter(|_| !args.quiet) {
        platform.print_summary(outcome.size, console);
    }
    if console.persona == Persona::Cowshed && !args.quiet {
        summary(&outcome, target, started, console);
    }
    Ok(0)
}

fn guard(args: &ConvertArgs, options: &ConvertOptions, console: &mut Console) -> Result<(), Failure> {
    let mut uses: Vec<Use<'_>> = options.sources.iter().map(Use::Read).collect();
    uses.push(Use::Write(&options.target));
    let backing = options.backing_file.as_deref().map(|name| resolve_name(name, Some(&options.target.name)));
    let backing = backing.transpose()?;
    uses.extend(backing.as_deref().map(Use::ReadFile));
    let mut data_files = Vec::new();
    for list in &args.options {
        for (key, value) in parse_list(list, BareKey::On)? {
            match key.as_str() {
                "data_file" => data_files.push(value),
                "nocow" | "extent_size_hint" => uses.push(Use::Place),
                _ => {}
            }
        }
    }
    uses.extend(data_files.iter().map(|name| Use::WriteFile(name)));
    args.naming.untrusted.guard(&uses, console)
}

/// The failure of a source that can't be opened, else `later`, the failure of the target.
fn sources_first(persona: Persona, args: &ConvertArgs, options: &ConvertOptions, later: Failure) -> Failure {
    // QEMU looks for a snapshot by its bare name or ID only where there is one source.
    let is_bare = args.snapshot.as_deref().is_some_and(|text| !text.starts_with("snapshot."));
    let is_sought = options.sources.len() == 1 || !is_bare;
    let sources: Vec<ImageSpec> = options
        .sources
        .iter()
        .map(|source| ImageSpec { snapshot: source.snapshot.clone().filter(|_| is_sought), ..source.clone() })
        .collect();
    work::opened_first(persona, &args.naming, &sources.iter().collect::<Vec<_>>(), later)
}

/// The values that qemu-img checks while it reads the options.
fn check_values(args: &ConvertArgs) -> Result<(), Failure> {
    args.sparse_size.as_deref().map(sparse_bytes).transpose()?;
    requests(&args.parallel)?;
    args.rate_limit.as_deref().map(|text| sizes::size("rate limit", text)).transpose()?;
    args.snapshot.as_deref().map(SnapshotName::parse).transpose()?;
    Ok(())
}

/// Refuses contradictory arguments, in qemu-img's words and order.
fn check_combination(args: &ConvertArgs) -> Result<(), Failure> {
    for (wrong, message) in [
        (args.skip_broken_bitmaps && !args.bitmaps, "Use of --skip-broken-bitmaps requires --bitmaps"),
        (
            !args.compress && (args.compression_level.is_some() || args.compression_window.is_some()),
            "--compression-level and --compression-window need -c",
        ),
        (args.copy_range_offloading && args.compress, "Cannot enable copy offloading when -c is used"),
        (args.copy_range_offloading && args.sparse_size.is_some(), "Cannot enable copy offloading when -S is used"),
        (
            args.copy_range_offloading && args.reflink == Reflink::Never,
            "Cannot enable copy offloading with --reflink=never",
        ),
        (args.copy_range_offloading && args.salvage, "Cannot use copy offloading in salvaging mode"),
        (args.target_image_opts && !args.no_create, "--target-image-opts requires use of -n flag"),
        (args.target_is_zero && !args.no_create, "--target-is-zero requires use of -n flag"),
        (args.no_create && !args.options.is_empty(), "-o has no effect when skipping image creation"),
        (args.image_opts_and_format(), "--image-opts and --format are mutually exclusive"),
        (args.target_image_opts && args.target_format.is_some(), "--image-opts and --format are mutually exclusive"),
        (
            args.target_is_zero && args.backing.is_some(),
            "Cannot use --target-is-zero when the destination image has a backing file",
        ),
    ] {
        if wrong {
            return Err(Failure::new(message));
        }
    }
    Ok(())
}

/// A snapshot is one source's.
fn check_snapshot(args: &ConvertArgs, sources: &[String]) -> Result<(), Failure> {
    match sources.len() > 1 && args.snapshot.is_some() {
        true => Err(Failure::new("No support for concatenating multiple snapshot")),
        false => Ok(()),
    }
}

/// Refuses what a target of several sources can't have.
fn check_single_source(args: &ConvertArgs, sources: &[String]) -> Result<(), Failure> {
    let message = match (args.backing.is_some(), args.bitmaps) {
        (true, _) => "Having a backing file for the target makes no sense when concatenating multiple input images",
        (false, true) => "Copying bitmaps only possible with single source",
        (false, false) => return Ok(()),
    };
    if sources.len() > 1 { Err(Failure::new(message)) } else { Ok(()) }
}

/// qemu-img's words for `-c` of a format without compression.
const NO_COMPRESSION: &str = "Compression not supported for this file format";

/// Refuses options that the target's format can't have, in qemu-img's words.
fn check_target(args: &ConvertArgs, persona: Persona) -> Result<(), Failure> {
    let format = args.target_format.as_deref().unwrap_or("raw");
    if args.no_create {
        return Ok(());
    }
    if args.compress && create_options::is_storage(format) {
        return Err(Failure::new(NO_COMPRESSION));
    }
    create_options::require_format(args.target_format.as_deref())?;
    if args.target_image_opts || options_of(format).is_none() {
        return Ok(());
    }
    let known = options_of(format).unwrap_or_default();
    for list in &args.options {
        if let Some((key, _)) =
            parse_list(list, BareKey::On)?.iter().find(|(key, _)| !known.iter().any(|option| option.name == key))
        {
            let written = if list.split(',').any(|item| item == format!("no{key}")) { "no" } else { "" };
            let error = Error::invalid_argument(format!("Invalid parameter '{written}{key}'"));
            return Err(error.qemu(format!("Invalid parameter '{key}'")).into());
        }
    }
    let lacks = |name: &str| !known.iter().any(|option| option.name == name);
    if lacks("backing_file") && args.backing.is_some() {
        return Err(Failure::new(format!("Backing file not supported for file format '{format}'")));
    }
    if lacks("backing_fmt") && args.backing_format.is_some() {
        return Err(Failure::new(format!("Backing file format not supported for file format '{format}'")));
    }
    if !args.compress {
        return Ok(());
    }
    match compression_of(format, &args.options) {
        // Of the disks that QEMU takes and keeps plain: one kind is compressed, and its options decide.
        ImageCompression::Plain | ImageCompression::None if format == "vmdk" && persona == Persona::Cowshed => {
            Err(Failure::new("a VMDK disk is compressed with -o subformat=streamOptimized only"))
        }
        // QEMU asks no kind of them.
        ImageCompression::None if format != "vmdk" => Err(Failure::new(NO_COMPRESSION)),
        _ => Ok(()),
    }
}

/// A new overlay names the format of its backing file, by `-F` or by `-o backing_fmt`.
fn check_backing(args: &ConvertArgs, options: &ConvertOptions) -> Result<(), Failure> {
    match (&options.backing_file, &options.backing_format) {
        (Some(_), None) if !args.no_create => Err(Failure::new("Use of backing file requires explicit backing format")),
        _ => Ok(()),
    }
}

impl ConvertArgs {
    fn image_opts_and_format(&self) -> bool {
        self.naming.image_opts && self.format.is_some()
    }
}

fn options(args: &ConvertArgs, sources: &[String], target: &str) -> Result<ConvertOptions, Failure> {
    let cache = cache_mode("source ", args.source_cache.as_ref())?;
    let sources: Result<Vec<ImageSpec>, Failure> = sources
        .iter()
        .map(|source| {
            let spec = args.naming.spec_of_any(source, args.format.as_ref())?;
            let spec = args.naming.sharing(spec, args.force_share)?;
            let snapshot = args.snapshot.as_deref().map(SnapshotName::parse).transpose()?;
            Ok(ImageSpec { cache: cache.clone(), shares_raw: false, snapshot, ..spec })
        })
        .collect();
    let Objects { secrets, tls, graph, .. } = args.naming.objects()?;
    let target = ImageSpec {
        name: target.to_owned(),
        format: args.target_format.clone(),
        image_opts: args.target_image_opts,
        force_share: false,
        on_warning: Some(warning::print),
        shares_raw: true,
        policy: args.naming.untrusted.policy_of_target(!args.no_create)?,
        secrets,
        tls,
        graph,
        ..ImageSpec::default()
    };
    let rate = args.rate_limit.as_deref().map(|text| sizes::size("rate limit", text)).transpose()?;
    let backing_file = last_value(&args.options, "backing_file")?;
    let backing_format = last_value(&args.options, "backing_fmt")?;
    Ok(ConvertOptions {
        create_options: args.options.clone(),
        compressed: args.compress,
        compression_level: args.compression_level,
        wide_window: wide_window(args.compression_window.as_deref())?,
        skip_create: args.no_create,
        target_is_zero: args.target_is_zero,
        backing_file: args.backing.clone().or(backing_file),
        backing_format: args.backing_format.clone().or(backing_format),
        sparse_bytes: args.sparse_size.as_deref().map_or(Ok(DEFAULT_SPARSE_BYTES), sparse_bytes)?,
        out_of_order: args.oob_writes,
        requests: requests(&args.parallel)?,
        rate,
        salvage: args.salvage,
        copy_range: args.copy_range_offloading,
        share: args.reflink == Reflink::Auto,
        bitmaps: args.bitmaps,
        skip_broken_bitmaps: args.skip_broken_bitmaps,
        ..ConvertOptions::new(sources?, target)
    })
}

/// The value that counts of a key in the lists of `-o`: the last one.
fn last_value(lists: &[String], key: &str) -> Result<Option<String>, Failure> {
    let mut last = None;
    for list in lists {
        let values = parse_list(list, BareKey::On)?.into_iter();
        last = values.filter(|(name, _)| name == key).map(|(_, value)| value).next_back().or(last);
    }
    Ok(last)
}

fn wide_window(text: Option<&str>) -> Result<bool, Failure> {
    match text {
        None | Some("4k" | "4K" | "4096") => Ok(false),
        Some("32k" | "32K" | "32768") => Ok(true),
        Some(other) => Err(Failure::new(format!("Invalid compression window '{other}': must be 4k or 32k"))),
    }
}

fn sparse_bytes(text: &str) -> Result<u64, Failure> {
    let bytes = sizes::size("buffer size for sparse output", text)?;
    if !bytes.is_multiple_of(SECTOR_BYTES) || bytes > MOST_SPARSE_BYTES {
        return Err(Failure::new(format!(
            "Invalid buffer size for sparse output specified. Valid sizes are multiples of {SECTOR_BYTES} up to \
             {MOST_SPARSE_BYTES}. Select 0 to disable sparse detection (fully allocates output)."
        )));
    }
    Ok(bytes)
}

fn requests(text: &str) -> Result<usize, Failure> {
    let Some(number) = sizes::integer(text) else {
        return Err(Failure::new(format!("Invalid number of coroutines specified: '{text}'")));
    };
    let requests = Some(number).filter(|requests| (1..=MOST_REQUESTS).contains(requests));
    requests.and_then(|requests| usize::try_from(requests).ok()).ok_or_else(|| {
        Failure::new(format!("Invalid number of coroutines specified. Must be between 1 and {MOST_REQUESTS}."))
    })
}

/// QEMU's sentence for a copy that fails on its way.
pub(super) fn of_copying(sentence: &str) -> Option<&str> {
    let sentence = sentence.strip_prefix("the target is incomplete: ").unwrap_or(sentence);
    sentence.starts_with("error while ").then_some(sentence)
}

/// An error names its file; where that is the target, qemu-img words it differently.
fn failed(persona: Persona, options: &ConvertOptions, error: &Error) -> Failure {
    let target = &options.target;
    let sentence = error.sentence();
    if let (Persona::QemuImg, Some(sentence)) = (persona, of_copying(&sentence)) {
        let of_system = matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace | ErrorKind::Poisoned);
        // QEMU reports damage with the system's words only; here its sentence comes, with the image.
        return Failure::new(match error.file_name().filter(|_| !of_system && error.errno() != Errno::EFBIG) {
            Some(file) => format!("{file}: {sentence}"),
            None => sentence.to_owned(),
        });
    }
    if let (Persona::QemuImg, Some(reason)) = (persona, reason_behind("could not open the backing image: ", error)) {
        let name = &target.name;
        return Failure::new(match reason.strip_prefix("Unknown driver ") {
            Some(driver) => {
                let format = target.format.as_deref().unwrap_or("raw");
                format!(
                    "{name}: error while converting {format}: Parameter 'backing-fmt' does not accept value {driver}"
                )
            }
            None => format!("Could not open '{name}': Could not open backing file: {reason}"),
        });
    }
    // Its data file is a part of the target.
    let starts = ["could not create", NO_EXPORT];
    let about_target =
        error.file_name() == Some(target.name.as_str()) || starts.iter().any(|start| sentence.starts_with(start));
    if persona == Persona::QemuImg && about_target && !options.skip_create {
        let format = target.format.as_deref().unwrap_or("raw");
        let reason = qemu_reason(&target.name, error);
        // An error in `-o` is no failed conversion.
        let expects = reason.starts_with("Parameter '") && reason.contains("' expects ");
        let plain = ["Invalid parameter '", "Value '", "Format driver '", "Unknown protocol '"]
            .iter()
            .any(|start| reason.starts_with(start));
        if expects || plain || reason.ends_with(UNCREATED) {
            return Failure::new(reason);
        }
        if reason.starts_with("Backing file specified without backing format") {
            return Failure::new("Use of backing file requires explicit backing format");
        }
        return Failure::new(format!("{}: error while converting {format}: {reason}", target.name));
    }
    let mut names: Vec<&str> = options.sources.iter().map(|source| source.name.as_str()).collect();
    names.push(&target.name);
    Failure::open_either(persona, &names, error)
}

/// The end of QEMU's sentence about a name whose driver makes no images.
pub const UNCREATED: &str = "' does not support image creation";

fn summary(outcome: &ConvertOutcome, target: &str, started: Instant, console: &mut Console) {
    let seconds = started.elapsed().as_secs_f64();
    let ConvertOutcome { size, data_bytes, zero_bytes, .. } = outcome;
    let rate = if seconds > 0.0 { *data_bytes as f64 / seconds } else { 0.0 };
    console.line(format_args!(
        "{target}: {} disk, {} data, {} zero, in {seconds:.1} s ({}/s of data)",
        human(*size),
        human(*data_bytes),
        human(*zero_bytes),
        human(rate as u64)
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_sizes() {
        assert_eq!(sparse_bytes("4k").unwrap(), 4096);
        assert_eq!(sparse_bytes("0").unwrap(), 0);
        assert!(sparse_bytes("1").unwrap_err().message.contains("multiples of 512 up to 16777216"));
        assert!(sparse_bytes("32M").is_err());
    }

    #[test]
    fn requests_in_flight() {
        assert_eq!(requests("16").unwrap(), 16);
        for text in ["0", "17", "-1"] {
            assert!(requests(text).unwrap_err().message.ends_with("between 1 and 16."), "{text}");
        }
        for text in ["x", "", "1k"] {
            assert_eq!(
                requests(text).unwrap_err().message,
                format!("Invalid number of coroutines specified: '{text}'")
            );
        }
    }
}
