// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `measure`: how much space an image would take.

use super::arguments::{NamingArgs, OutputFormat};
use super::untrusted::Use;
use super::{Verb, create_options, sizes, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure, json, size::human};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_create::schema::{OptionValues, options_of};
use cowshed_image::options::DriverKind;
use cowshed_image::{DRIVERS, SnapshotName};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::measure::{self, MeasureOptions, Measurement};
use cowshed_types::{Error, LINE_END};

pub const VERB: Verb = Verb {
    name: "measure",
    about: "Say how large a file a conversion or a new image needs",
    operands: "(--size SIZE | FILE)",
    details: "\"required size\" is what a converted image takes at once, \"fully allocated size\" what it can grow to.",
    examples: "  cowshed measure -O qcow2 disk.raw
      For converting disk.raw.
  cowshed measure -O qcow2 -o cluster_size=2M --size 1T
      For a new image.",
    in_qemu_img: true,
    arguments: MeasureArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct MeasureArgs {
    /// Format of FILE (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Measure an internal snapshot of FILE: an ID or name, snapshot.id=ID or snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Format of the new image (default: raw)
    #[arg(short = 'O', long, value_name = "TARGET_FMT")]
    target_format: Option<String>,
    /// Options of the new image's format
    #[arg(short = 'o', long = "target-format-options", value_name = "TARGET_FMT_OPTS")]
    options: Vec<String>,
    /// Text or JSON
    #[arg(long, value_enum, default_value_t, value_name = "human|json")]
    output: OutputFormat,
    /// Open the image even while another process writes to it: reads may be torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Measure a new image of this size
    #[arg(short, long, value_name = "SIZE")]
    size: Option<String>,
    /// Measure the conversion of this image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = MeasureArgs::from_arg_matches(matches)?;
    if create_options::asks_for_help(&args.options)? {
        return create_options::print_help(args.target_format.as_deref().unwrap_or("raw"), false, console);
    }
    let size = args.size.as_deref().map(|text| sizes::size("image size", text)).transpose()?;
    let snapshot = args.snapshot.as_deref().map(SnapshotName::parse).transpose()?;
    let names_image = args.naming.image_opts || args.format.is_some() || args.snapshot.is_some();
    match args.files.as_slice() {
        [_, _, ..] => return Err(Failure::new("At most one filename argument is allowed.")),
        [] if names_image => {
            return Err(Failure::new("--image-opts, -f, and -l require a filename argument."));
        }
        _ => {}
    }
    let source = match (size, args.files.as_slice()) {
        (Some(_), []) => {
            args.naming.check(args.format.as_ref())?;
            None
        }
        (Some(_), _) => return Err(Failure::new("--size N cannot be used together with a filename.")),
        (None, [file]) => {
            let spec = args.naming.shared(file, args.format.as_ref(), args.force_share)?;
            Some(ImageSpec { snapshot, ..spec })
        }
        (None, _) => return Err(Failure::new("Either --size N or one filename must be specified.")),
    };
    let images: Vec<&ImageSpec> = source.iter().collect();
    measurable(console.persona, args.target_format.as_deref(), &args.options)
        .map_err(|later| work::opened_first(console.persona, &args.naming, &images, later))?;
    let options = MeasureOptions { source, size, target_format: args.target_format, create_options: args.options };
    let uses: Vec<Use<'_>> = options.source.iter().map(Use::Read).collect();
    args.naming.untrusted.guard(&uses, console)?;
    // qemu-img opens the image before it reads the options.
    check_options(console.persona, &options).map_err(|error| {
        let images: Vec<&ImageSpec> = options.source.iter().collect();
        let later = of_options(console.persona, &options, &error);
        work::opened_first(console.persona, &args.naming, &images, later)
    })?;
    let measurement = work::run_quietly(async |job| measure::run(&options, &job).await).map_err(|error| {
        let names: Vec<&str> = options.source.iter().map(|source| source.name.as_str()).collect();
        let sentence = error.sentence();
        match console.persona == Persona::QemuImg && sentence.starts_with("The image size ") {
            true => Failure::new("The image size is too large (try using a larger cluster size)"),
            false => Failure::open_either(console.persona, &names, &error),
        }
    })?;
    match args.output {
        OutputFormat::Json => {
            let value = serde_json::to_value(measurement);
            let value = value.map_err(|error| Failure::new(format!("could not make JSON: {error}")))?;
            console.line(json::pretty(&json::in_qemu_order(value)));
        }
        OutputFormat::Human => print_human(&measurement, console),
    }
    Ok(0)
}

/// Formats that no image can be created in have no size to report; neither have protocols.
fn measurable(persona: Persona, format: Option<&str>, options: &[String]) -> Result<(), Failure> {
    let is_image = |name: &str| match DRIVERS.schema(name) {
        Some(schema) => schema.kind != DriverKind::Filter && !name.starts_with("null-"),
        None => false,
    };
    match format.filter(|name| is_image(name)) {
        Some(name) if persona == Persona::QemuImg && !["qcow2", "raw", "luks"].contains(&name) => {
            let is_format = DRIVERS.schema(name).is_some_and(|schema| schema.kind == DriverKind::Format);
            let unmeasured = format!("Block driver '{name}' does not support size measurement");
            let message = match options_of(name) {
                None if is_format => format!("Format driver '{name}' does not support image creation"),
                None => unmeasured,
                Some(known) => match OptionValues::parse(known, options) {
                    Ok(_) => unmeasured,
                    Err(error) => {
                        let sentence = error.sentence();
                        format!("{sentence}{LINE_END}qemu-img: Invalid options for file format '{name}'")
                    }
                },
            };
            Err(Failure::new(message))
        }
        _ => create_options::require_format(format),
    }
}

/// Checks the options. The short names of versions are none in this verb of qemu-img.
fn check_options(persona: Persona, options: &MeasureOptions) -> Result<(), Error> {
    measure::check(options)?;
    let items = options.create_options.iter().flat_map(|list| list.split(','));
    let version = items.filter_map(|item| item.strip_prefix("compat=")).next_back();
    match version.filter(|name| persona == Persona::QemuImg && ["v2", "v3"].contains(name)) {
        Some(name) => Err(Error::invalid_argument(format!("Invalid compatibility level: '{name}'"))),
        None => Ok(()),
    }
}

/// Faults of the options, in qemu-img's words.
fn of_options(persona: Persona, options: &MeasureOptions, error: &Error) -> Failure {
    let sentence = error.sentence();
    let format = options.target_format.as_deref().unwrap_or("raw");
    let is_unread = ["Invalid parameter '", "Parameter '", "Value '"].iter().any(|start| sentence.starts_with(start));
    match persona {
        Persona::QemuImg if is_unread => {
            Failure::new(format!("{sentence}{LINE_END}qemu-img: Invalid options for file format '{format}'"))
        }
        Persona::QemuImg => Failure::new(sentence),
        _ => Failure::from(error.clone()),
    }
}

fn print_human(measurement: &Measurement, console: &mut Console) {
    let Measurement { required, fully_allocated, bitmaps } = *measurement;
    for (label, bytes) in
        [("required size", Some(required)), ("fully allocated size", Some(fully_allocated)), ("bitmaps size", bitmaps)]
    {
        let Some(bytes) = bytes else { continue };
        match console.persona {
            Persona::QemuImg => console.line(format_args!("{label}: {bytes}")),
            Persona::Cowshed | Persona::Tool(_) => {
                console.line(format_args!("{label}: {} ({bytes} bytes)", human(bytes)))
            }
        }
    }
}
