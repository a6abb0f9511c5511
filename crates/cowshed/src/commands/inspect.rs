// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `inspect`: the files and resources that an image asks for.

use super::arguments::{IS_PACKAGE, OutputFormat, one_file};
use super::untrusted::confine_to;
use super::{Verb, work};
use crate::output::{Console, Failure, json, size::human};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_jobs::inspect::{self, InspectVerdict, Inspection};
use cowshed_ova::Package;
use cowshed_storage::confine::Confined;
use cowshed_storage::path_of_text;
use cowshed_types::{shown_name, visible_name};
use serde_json::Value;

pub const VERB: Verb = Verb {
    name: "inspect",
    about: "Say what an image asks for, without opening anything but its file",
    operands: "FILE",
    details: "For images from strangers: the other files that an image names, its sizes, what is unknown or strange \
              about it. Nothing that it names is opened. FILE is a path, also where it looks like json:{…}.\n\n\
              Exit code: 0 harmless, 1 the file could not be read, 2 it asks for other files or is suspicious.",
    examples: "  cowshed inspect upload.qcow2
  cowshed inspect --output=json upload.qcow2
      For services that take images.",
    in_qemu_img: false,
    arguments: InspectArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct InspectArgs {
    /// Text or JSON
    #[arg(long, value_enum, default_value_t, value_name = "human|json")]
    output: OutputFormat,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = InspectArgs::from_arg_matches(matches)?;
    let file = one_file(&args.files)?;
    if Package::is_one(&path_of_text(file)) {
        return Err(Failure::new(format!("{file}: {IS_PACKAGE}")));
    }
    let confined = confine_to(file, console)?;
    let inspection = work::run_quietly(async |_| inspect::run(file).await)
        .map_err(|error| Failure::open(console.persona, file, &error))?;
    match args.output {
        OutputFormat::Json => {
            let value = serde_json::to_value(&inspection);
            let mut value = value.map_err(|error| Failure::new(format!("could not make JSON: {error}")))?;
            if let Value::Object(map) = &mut value {
                map.insert("confinement".to_owned(), confinement(confined));
            }
            console.line(json::pretty(&value));
        }
        OutputFormat::Human => print_human(&inspection, console),
    }
    Ok(inspection.exit_code())
}

fn confinement(confined: Confined) -> Value {
    serde_json::json!({ "files": confined.files.as_str(), "system-calls": confined.system_calls.as_str() })
}

fn print_human(inspection: &Inspection, console: &mut Console) {
    let Inspection { filename, format, file_size, .. } = inspection;
    let verdict = match inspection.verdict {
        InspectVerdict::Harmless => "harmless",
        InspectVerdict::AsksForFiles => "asks for other files",
        InspectVerdict::Suspicious => "suspicious",
    };
    console.line(format_args!("{}: {verdict}", printable(filename)));
    console.line(format_args!("format: {format}, {} on disk", human(*file_size)));
    if let Some(size) = inspection.virtual_size {
        console.line(format_args!("virtual size: {} ({size} bytes)", human(size)));
    }
    for asked in &inspection.asks_for {
        let name = asked.name.as_deref().map_or("a file that it doesn't name".to_owned(), printable);
        let format = asked.format.as_deref().map_or("not said".to_owned(), printable);
        match asked.role {
            "backing-file" => console.line(format_args!("backing file: {name} (format: {format})")),
            _ => console.line(format_args!("data file: {name}")),
        }
    }
    if let Some(encryption) = inspection.encryption {
        console.line(format_args!("encryption: {encryption}"));
    }
    if inspection.snapshots > 0 || inspection.bitmaps > 0 {
        console.line(format_args!("snapshots: {}, bitmaps: {}", inspection.snapshots, inspection.bitmaps));
    }
    for unknown in &inspection.unknown_features {
        console.line(format_args!("unknown: {}", printable(unknown)));
    }
    for suspicion in &inspection.suspicions {
        console.line(format_args!("suspicious: {}", printable(suspicion)));
    }
}

/// Text from a stranger: a character that could command a terminal is shown as an escape.
pub(super) fn printable(text: &str) -> String {
    visible_name(&shown_name(text)).into_owned()
}
