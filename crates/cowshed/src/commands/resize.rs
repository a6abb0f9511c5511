// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `resize`: changes the size of the virtual disk.

use super::arguments::NamingArgs;
use super::untrusted::Use;
use super::{Verb, sizes, work};
use crate::invocation::Persona;
use crate::output::{Console, Failure, size::human};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_image::node::Preallocation;
use cowshed_image::options::size_refused;
use cowshed_jobs::ImageSpec;
use cowshed_jobs::resize::{self, NewSize, ResizeOptions};
use cowshed_types::{Error, LINE_END};

pub const VERB: Verb = Verb {
    name: "resize",
    about: "Grow or shrink the virtual disk of an image",
    operands: "FILE [+-]SIZE",
    details: "SIZE is the new size, or with + or - in front the difference. Grow the disk first and its partitions \
              and file systems afterwards; shrink in the other order, because shrinking deletes what is beyond the \
              new end.",
    examples: "  cowshed resize disk.qcow2 +10G
  cowshed resize disk.qcow2 50G
  cowshed resize --shrink disk.qcow2 -- -5G
  cowshed resize -f raw --preallocation=falloc disk.img 20G",
    in_qemu_img: true,
    arguments: ResizeArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct ResizeArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Allow a smaller size: data beyond the new end is lost
    #[arg(long)]
    shrink: bool,
    /// Preallocation of the new part: off, metadata, falloc, full
    #[arg(long, value_name = "PREALLOC")]
    preallocation: Option<String>,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// FILE and its new size, or the difference, in bytes or with a suffix k, M, G, T, P, E (powers of 1024)
    #[arg(value_name = "FILE [+-]SIZE", value_hint = clap::ValueHint::FilePath)]
    operands: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = ResizeArgs::from_arg_matches(matches)?;
    let preallocation = preallocation(args.preallocation.as_deref())?;
    let (file, size) = match args.operands.as_slice() {
        [file, size] => (file, size),
        [_, _, _, ..] => return Err(Failure::usage("Extra argument(s) in command line")),
        _ => return Err(Failure::usage("Expecting image file name and size")),
    };
    let is_late = |failure: &Failure| failure.message.starts_with("New image size");
    let size = match new_size(console.persona, size) {
        Err(failure) if !is_late(&failure) => return Err(failure),
        size => size,
    };
    let image = args.naming.spec(file, args.format.as_ref())?;
    let options = ResizeOptions {
        size: size.map_err(|later| opened_to_write(console.persona, &args.naming, &image, later))?,
        image,
        shrink: args.shrink,
        preallocation,
    };
    args.naming.untrusted.guard(&[Use::Write(&options.image)], console)?;
    let outcome = work::run_quietly(async |job| resize::run(&options, &job).await)
        .map_err(|error| failed(console.persona, file, &error))?;
    match console.persona {
        _ if args.quiet => {}
        Persona::QemuImg => console.line("Image resized."),
        Persona::Cowshed | Persona::Tool(_) => {
            console.line(format_args!("{file}: {} -> {}", human(outcome.old_size), human(outcome.new_size)));
        }
    }
    Ok(0)
}

/// qemu-img's message where the image can't be opened and the size is wrong too, after its warnings about the image.
fn opened_to_write(persona: Persona, naming: &NamingArgs, image: &ImageSpec, later: Failure) -> Failure {
    if persona != Persona::QemuImg || naming.untrusted.is_on() {
        return later;
    }
    let opened = work::run_quietly(async |_| image.open_for_writing().await?.close().await);
    opened.err().map_or(later, |error| Failure::open(persona, &image.name, &error))
}

/// qemu-img has words of its own for two refusals that scripts meet.
fn failed(persona: Persona, file: &str, error: &Error) -> Failure {
    match error.message() {
        _ if persona != Persona::QemuImg => Failure::open(persona, file, error),
        message if message.starts_with("shrinking") => Failure::new(format!(
            "Use the --shrink option to perform a shrink operation.{LINE_END}\
             qemu-img: warning: Shrinking an image will delete all data beyond the shrunken image's end. Before performing such \
             an operation, make sure there is no important data there."
        )),
        message if message.starts_with("the new image size must be positive") => {
            Failure::new("New image size must be positive")
        }
        message
            if ["the size of a device or export", "Image format driver does not support"]
                .iter()
                .any(|start| message.starts_with(start)) =>
        {
            Failure::new(error.sentence())
        }
        message if message.contains("which has snapshots can't be resized") => {
            Failure::new("Can't resize a v2 image which has snapshots")
        }
        // The request is wrong, not the image.
        message
            if [
                "Preallocation can",
                "The new size must be a multiple",
                "Unsupported preallocation",
                "Bitmap '",
                "Invalid image size specified",
                "Shrinking images is",
            ]
            .iter()
            .any(|start| message.starts_with(start)) =>
        {
            Failure::new(message)
        }
        _ => Failure::open(persona, file, error),
    }
}

fn new_size(persona: Persona, text: &str) -> Result<NewSize, Failure> {
    let (sign, digits) = match text.strip_prefix(['+', '-']) {
        Some(digits) => (text.as_bytes().first().copied(), digits),
        None => (None, text),
    };
    let bytes = match sizes::number(digits) {
        Ok(bytes) if bytes <= sizes::MOST => bytes,
        // The size has 63 bits and a sign there.
        Ok(_) if sign.is_none() => return Err(Failure::new("New image size must be positive")),
        Ok(_) | Err(sizes::Fault::TooLarge) => {
            return Err(Failure::new(format!("Value '{digits}' is out of range for parameter 'size'")));
        }
        Err(sizes::Fault::NotASize) => {
            return Err(Failure::new(match persona {
                Persona::Cowshed | Persona::Tool(_) => {
                    let right = sizes::right_spelling(digits).map(|right| format!(" ('{right}' in powers of 1024)"));
                    let right = right.unwrap_or_default();
                    format!(
                        "Invalid size '{text}': expected a number with an optional suffix k, M, G, T, P or E{right}"
                    )
                }
                Persona::QemuImg => size_refused("size", "x"),
            }));
        }
    };
    Ok(match sign {
        Some(b'+') => NewSize::Grow(bytes),
        Some(_) => NewSize::Shrink(bytes),
        None => NewSize::Absolute(bytes),
    })
}

fn preallocation(mode: Option<&str>) -> Result<Preallocation, Failure> {
    match mode {
        None | Some("off") => Ok(Preallocation::Off),
        Some("metadata") => Ok(Preallocation::Metadata),
        Some("falloc") => Ok(Preallocation::Falloc),
        Some("full") => Ok(Preallocation::Full),
        Some(other) => Err(Failure::new(format!("Invalid preallocation mode '{other}'"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_make_differences() {
        assert_eq!(new_size(Persona::QemuImg, "5M").unwrap(), NewSize::Absolute(5 << 20));
        assert_eq!(new_size(Persona::QemuImg, "+1G").unwrap(), NewSize::Grow(1 << 30));
        assert_eq!(new_size(Persona::QemuImg, "-1k").unwrap(), NewSize::Shrink(1024));
        assert!(new_size(Persona::QemuImg, "+x").unwrap_err().message.starts_with("Parameter 'size' expects"));
        assert_eq!(
            new_size(Persona::QemuImg, "100E").unwrap_err().message,
            "Value '100E' is out of range for parameter 'size'"
        );
        assert!(new_size(Persona::QemuImg, "--1").is_err());
    }
}
