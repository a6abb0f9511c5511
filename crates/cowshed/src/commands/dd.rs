// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `dd`: copies blocks of one image into a new one.

use super::arguments::{NamingArgs, Objects};
use super::convert::{UNCREATED, of_copying};
use super::untrusted::Use;
use super::{Verb, create_options, new_image, sizes, work};
use crate::invocation::Persona;
use crate::output::failure::qemu_reason;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_create::NO_EXPORT;
use cowshed_jobs::ImageSpec;
use cowshed_jobs::dd::{self, DdOptions};
use cowshed_storage::{FileIdentity, path_of_text};
use cowshed_types::Error;

/// The largest block.
const MOST_BLOCK_BYTES: u64 = i32::MAX as u64;
/// The default of `bs=`, in bytes.
const DEFAULT_BLOCK_BYTES: u64 = 512;

pub const VERB: Verb = Verb {
    name: "dd",
    about: "Copy blocks of an image into a new image",
    operands: "if=INPUT of=OUTPUT [bs=BLOCK_SIZE] [count=BLOCKS] [skip=BLOCKS]",
    details: "The operands are those of dd(1): if=INPUT, of=OUTPUT, bs=BLOCK_SIZE (default 512), count=BLOCKS, \
              skip=BLOCKS. OUTPUT is created anew, as large as what is copied.",
    examples: "  cowshed dd -O qcow2 bs=1M count=100 if=disk.raw of=start.qcow2
      The first 100 MiB.
  cowshed dd bs=512 skip=2048 if=disk.qcow2 of=partition.raw
      From the first partition on.",
    in_qemu_img: true,
    arguments: DdArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct DdArgs {
    /// Format of INPUT (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Format of OUTPUT [default: what the ending of OUTPUT means, else raw]
    #[arg(short = 'O', long, value_name = "OUTPUT_FMT")]
    output_format: Option<String>,
    /// Overwrite an OUTPUT that exists
    #[arg(long)]
    force: bool,
    /// Open INPUT even while another process writes to it: reads may be torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// if=INPUT of=OUTPUT [bs=BLOCK_SIZE] [count=BLOCKS] [skip=BLOCKS]
    #[arg(value_name = "OPERAND")]
    operands: Vec<String>,
}

#[derive(Debug, Default)]
struct Operands {
    input: Option<String>,
    output: Option<String>,
    block_bytes: Option<u64>,
    count: Option<u64>,
    skip: Option<u64>,
}

fn operands(words: &[String]) -> Result<Operands, Failure> {
    let mut operands = Operands::default();
    for word in words {
        let Some((key, value)) = word.split_once('=') else {
            return Err(Failure::new(format!("unrecognized operand {word}")));
        };
        match key {
            "if" => operands.input = Some(value.to_owned()),
            "of" => operands.output = Some(value.to_owned()),
            "bs" => operands.block_bytes = Some(sizes::size_between("bs", value, 1, MOST_BLOCK_BYTES)?),
            "count" => operands.count = Some(sizes::size("count", value)?),
            "skip" => operands.skip = Some(sizes::size("skip", value)?),
            other => return Err(Failure::new(format!("unrecognized operand {other}"))),
        }
    }
    Ok(operands)
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = DdArgs::from_arg_matches(matches)?;
    let operands = operands(&args.operands)?;
    let (Some(input), Some(output)) = (operands.input, operands.output) else {
        return Err(Failure::new("Must specify both input and output files"));
    };
    let chosen = new_image::format(args.output_format.as_deref(), &output, "-O", console)?;
    let format = chosen.format.clone();
    new_image::check_absent(&output, args.force, console)?;
    let Objects { secrets, tls, graph, .. } = args.naming.objects()?;
    let options = DdOptions {
        // A file that is copied onto itself would be lost.
        source: ImageSpec {
            shares_raw: !is_same(&input, &output),
            ..args.naming.shared(&input, args.format.as_ref(), args.force_share)?
        },
        target: ImageSpec { shares_raw: true, secrets, tls, graph, ..ImageSpec::file(&output).format(format) },
        block_bytes: operands.block_bytes.unwrap_or(DEFAULT_BLOCK_BYTES),
        count: operands.count,
        skip: operands.skip.unwrap_or(0),
        keeps_existing: new_image::keeps_existing(args.force, console),
    };
    args.naming.untrusted.guard(&[Use::Read(&options.source), Use::Write(&options.target)], console)?;
    let job = work::Foreground::new(console.persona, false, false, "copying")?;
    let failed = |error: &Error| failed(console.persona, &input, &output, error);
    let outcome = job.run(async |handle| dd::run(&options, &handle).await, failed)?;
    chosen.print_notice(false, console);
    if outcome.skipped_past_end {
        console.complain(format_args!("{input}: cannot skip to specified offset"));
    }
    Ok(0)
}

/// True where both names are of one file.
fn is_same(input: &str, output: &str) -> bool {
    let identity = |name: &str| FileIdentity::of_path(&path_of_text(name));
    identity(input).is_some_and(|file| identity(output) == Some(file))
}

/// An error names its file; where that can't be made, qemu-img words it differently.
fn failed(persona: Persona, input: &str, output: &str, error: &Error) -> Failure {
    let sentence = error.sentence();
    if let (Persona::QemuImg, Some(copying)) = (persona, of_copying(&sentence)) {
        let what = match copying.starts_with("error while writing") {
            true => "error while writing to output image file",
            false => "error while reading from input image file",
        };
        let reason = copying.split_once(": ").map_or("", |(_, reason)| reason);
        return Failure::new(format!("{what}: {reason}"));
    }
    let about_output =
        persona == Persona::QemuImg && (error.file_name() == Some(output) || sentence.starts_with(NO_EXPORT));
    if about_output && (sentence.starts_with("Unknown protocol '") || sentence.ends_with(UNCREATED)) {
        return Failure::new(sentence);
    }
    if about_output && sentence.starts_with("Unknown file format '") {
        let format = sentence.split('\'').nth(1).unwrap_or_default();
        let refusal = create_options::refusal(format);
        // This verb doesn't name an unknown format.
        return Failure::new(if refusal.starts_with("Unknown") { "Unknown file format" } else { &refusal });
    }
    if about_output
        && ["could not create", "failed to get \"", "could not change the size: ", "Protocol driver 'host_", NO_EXPORT]
            .iter()
            .any(|start| sentence.starts_with(start))
    {
        return Failure::new(format!("{output}: error while creating output image: {}", qemu_reason(output, error)));
    }
    Failure::open_either(persona, &[input, output], error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[test]
    fn the_last_operand_of_a_kind_counts() {
        let operands = operands(&words(&["if=a", "if=b=c", "bs=64k", "count=2"])).unwrap();
        assert_eq!(operands.input.as_deref(), Some("b=c"));
        assert_eq!((operands.block_bytes, operands.count), (Some(65_536), Some(2)));
    }

    #[test]
    fn wrong_operands_are_named() {
        let message = |list: &[&str]| operands(&words(list)).unwrap_err().message;
        assert_eq!(message(&["foo=1"]), "unrecognized operand foo");
        assert_eq!(message(&["foo"]), "unrecognized operand foo");
        assert_eq!(message(&["bs=0"]), "Invalid bs specified. Must be between 1 and 2147483647.");
        assert_eq!(message(&["count=x"]), "Invalid count specified: 'x'");
    }
}
