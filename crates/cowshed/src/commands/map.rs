// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `map`: where the bytes of an image are.

use super::arguments::{NamingArgs, OutputFormat, one_file};
use super::untrusted::Use;
use super::{Verb, sizes, work};
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_jobs::map::{self, MapEntry, MapOptions};
use cowshed_types::visible_name;

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
    /// Show at most this many bytes of the disk
    #[arg(short = 'l', long, value_name = "LENGTH")]
    max_length: Option<String>,
    /// Text or JSON
    #[arg(long, value_enum, default_value_t, value_name = "human|json")]
    output: OutputFormat,
    /// Open the image even while another process writes to it: reads may be torn
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
    let image = args.naming.shared(file, args.format.as_ref(), args.force_share)?;
    args.naming.untrusted.guard(&[Use::Read(&image)], console)?;
    let options = MapOptions { image, start: start.unwrap_or(0), len };
    let mut writer = match args.output {
        OutputFormat::Json => Writer::Json { opening: "[", line: String::new() },
        OutputFormat::Human => Writer::Table { headed: false, placeless: false },
    };
    let show = |entry: MapEntry| {
        writer.entry(&entry, console);
        Ok(())
    };
    let result = work::run_quietly(async |job| map::each(&options, &job, show).await);
    if let Err(error) = result {
        if error.sentence().starts_with("Could not read file metadata") && matches!(writer, Writer::Table { .. }) {
            writer.head(console);
        }
        return Err(Failure::open(console.persona, file, &error));
    }
    writer.end(options.start, console)
}

/// Prints runs as they come: an image can have millions.
enum Writer {
    Json {
        /// The text before the next run.
        opening: &'static str,
        /// Used again for each run.
        line: String,
    },
    Table {
        /// The heading is printed: it comes once the image is open.
        headed: bool,
        /// There was data without a plain place to show.
        placeless: bool,
    },
}

impl Writer {
    fn head(&mut self, console: &mut Console) {
        if let Writer::Table { headed: headed @ false, .. } = self {
            *headed = true;
            console.line(format_args!("{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to"));
        }
    }

    fn entry(&mut self, entry: &MapEntry, console: &mut Console) {
        self.head(console);
        match self {
            Writer::Json { opening, line } => {
                line.clear();
                line.push_str(opening);
                write_json(entry, line);
                console.print_text(line);
                *opening = ",\n";
            }
            // As in QEMU, the table ends where its error stands.
            Writer::Table { placeless: true, .. } => {}
            Writer::Table { placeless, .. } if entry.data && !entry.zero => match (entry.offset, &entry.file) {
                (Some(offset), Some(file)) => console.line(format_args!(
                    "{:<16}{:<16}{:<16}{}",
                    alternate_hex(entry.start),
                    alternate_hex(entry.length),
                    alternate_hex(offset),
                    visible_name(file),
                )),
                _ => *placeless = true,
            },
            Writer::Table { .. } => {}
        }
    }

    fn end(mut self, start: u64, console: &mut Console) -> Result<u8, Failure> {
        self.head(console);
        match self {
            // qemu-img shows an empty range as one run of length 0.
            Writer::Json { opening: "[", .. } => {
                let flags = "\"depth\": 0, \"present\": false, \"zero\": false, \"data\": false, \"compressed\": false";
                console.line(format_args!("[{{ \"start\": {start}, \"length\": 0, {flags}}}]"));
                Ok(0)
            }
            Writer::Json { .. } => {
                console.line("]");
                Ok(0)
            }
            Writer::Table { placeless: false, .. } => Ok(0),
            Writer::Table { placeless: true, .. } => {
                Err(Failure::new("File contains external, encrypted or compressed clusters."))
            }
        }
    }
}

/// A run on one line, in qemu-img's layout. Not through `serde_json` or `format_args`: there may be millions.
fn write_json(entry: &MapEntry, line: &mut String) {
    let mut digits = itoa::Buffer::new();
    let mut number = |line: &mut String, key: &str, number: u64| {
        line.push_str(key);
        line.push_str(digits.format(number));
    };
    let flag = |line: &mut String, key: &str, is_set: bool| {
        line.push_str(key);
        line.push_str(if is_set { "true" } else { "false" });
    };
    number(line, "{ \"start\": ", entry.start);
    number(line, ", \"length\": ", entry.length);
    number(line, ", \"depth\": ", u64::from(entry.depth));
    flag(line, ", \"present\": ", entry.present);
    flag(line, ", \"zero\": ", entry.zero);
    flag(line, ", \"data\": ", entry.data);
    flag(line, ", \"compressed\": ", entry.compressed);
    if let Some(offset) = entry.offset {
        number(line, ", \"offset\": ", offset);
    }
    line.push('}');
}

/// C's `%#x`: no prefix for zero.
fn alternate_hex(number: u64) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}
