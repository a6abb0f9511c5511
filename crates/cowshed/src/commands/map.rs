// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `map`: where the bytes of an image are.

use super::arguments::{NamingArgs, OutputFormat, one_file};
use super::{Verb, sizes, work};
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::map::{self, MapEntry, MapOptions};

pub const VERB: Verb = Verb {
    name: "map",
    about: "Show where the data of an image is, through its backing chain",
    operands: "FILE",
    details: "The table lists the runs that hold data, with the file that they are in and the place there. JSON lists \
              every run, zeroes and unallocated ones too.",
    examples: "  cowshed map disk.qcow2
  cowshed map --output=json --start-offset=1G --max-length=64M disk.qcow2",
    in_qemu_img: true,
    arguments: MapArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct MapArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Begin here instead of at the beginning of the disk
    #[arg(short, long, value_name = "OFFSET")]
    start_offset: Option<String>,
    /// Show so many bytes of the disk at most
    #[arg(short = 'l', long, value_name = "LENGTH")]
    max_length: Option<String>,
    /// Text or JSON
    #[arg(long, value_enum, default_value_t, value_name = "human|json")]
    output: OutputFormat,
    /// Open the image even while another process writes to it: what is read may be torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = MapArgs::from_arg_matches(matches)?;
    let start = args.start_offset.as_deref().map(|text| sizes::size("start offset", text)).transpose()?;
    let len = args.max_length.as_deref().map(|text| sizes::size("max length", text)).transpose()?;
    let file = one_file(&args.files)?;
    let image = ImageSpec { force_share: args.force_share, ..args.naming.spec(file, args.format.as_ref())? };
    let options = MapOptions { image, start: start.unwrap_or(0), len };
    let entries = work::run_quietly(async |job| map::run(&options, &job).await)
        .map_err(|error| Failure::open(console.persona, file, &error))?;
    match args.output {
        OutputFormat::Json => {
            print_json(&entries, options.start, console);
            Ok(0)
        }
        OutputFormat::Human => print_table(&entries, console),
    }
}

/// One run a line, as qemu-img has it; an empty range is one run of length 0.
fn print_json(entries: &[MapEntry], start: u64, console: &mut Console) {
    if entries.is_empty() {
        let flags = "\"depth\": 0, \"present\": false, \"zero\": false, \"data\": false, \"compressed\": false";
        console.line(format_args!("[{{ \"start\": {start}, \"length\": 0, {flags}}}]"));
        return;
    }
    let mut opening = "[";
    for MapEntry { start, length, depth, present, zero, data, compressed, offset, .. } in entries {
        console.print(format_args!(
            "{opening}{{ \"start\": {start}, \"length\": {length}, \"depth\": {depth}, \"present\": {present}, \
             \"zero\": {zero}, \"data\": {data}, \"compressed\": {compressed}"
        ));
        if let Some(offset) = offset {
            console.print(format_args!(", \"offset\": {offset}"));
        }
        console.print("}");
        opening = ",\n";
    }
    console.line("]");
}

/// The runs with data. Fails where there is no plain place to show, after showing the others.
fn print_table(entries: &[MapEntry], console: &mut Console) -> Result<u8, Failure> {
    console.line(format_args!("{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to"));
    let mut placeless = false;
    for entry in entries.iter().filter(|entry| entry.data && !entry.zero) {
        match (entry.offset, &entry.file) {
            (Some(offset), Some(file)) => console.line(format_args!(
                "{:<16}{:<16}{:<16}{file}",
                alternate_hex(entry.start),
                alternate_hex(entry.length),
                alternate_hex(offset),
            )),
            _ => placeless = true,
        }
    }
    match placeless {
        true => Err(Failure::new("File contains external, encrypted or compressed clusters.")),
        false => Ok(0),
    }
}

/// C's `%#x`: no prefix for zero.
fn alternate_hex(number: u64) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}
