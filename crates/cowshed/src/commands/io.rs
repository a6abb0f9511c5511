// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `io`: an I/O shell over an image, and `qemu-io`.

use super::Verb;
use super::arguments::NamingArgs;
use super::untrusted::Use;
use crate::io::{Manner, OpenSpec, Shell};
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_storage::rt;

pub const VERB: Verb = Verb {
    name: "io",
    about: "Read and write an image by hand: an I/O shell",
    operands: "[FILE]",
    details: "Runs the commands of -c one after the other, or asks for them, with history on a terminal. 'help' lists \
              them: read, write, discard, map and others, with patterns that are written and checked. The words are \
              those of qemu-io; under that name the program takes its place in scripts. Without -t each write is \
              durable when it returns.\n\nExit code: 1 when a command failed.",
    examples: "  cowshed io -c 'write -P 0xab 0 64k' -c 'read -P 0xab 0 64k' disk.qcow2
  cowshed io -r -c map disk.qcow2
  cowshed io -s disk.qcow2
      Tries something out: what is written is gone afterwards.",
    in_qemu_img: false,
    arguments: IoArgs::augment_args,
    run,
};

/// The program of that name.
pub const QEMU_IO: Verb = Verb {
    name: "qemu-io",
    about: "Read and write disk images by hand",
    operands: "[FILE]",
    details: "See 'qemu-io -c help' for the commands.",
    examples: "  qemu-io -c 'write -P 0xab 0 64k' disk.qcow2",
    in_qemu_img: false,
    arguments: IoArgs::augment_args,
    run: run_qemu_io,
};

#[derive(Args, Clone, Debug)]
struct IoArgs {
    /// Run this command; may be given again
    #[arg(short, long = "cmd", value_name = "COMMAND")]
    commands: Vec<String>,
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Open the image for reading
    #[arg(short, long)]
    read_only: bool,
    /// Write to a temporary overlay, which is gone afterwards
    #[arg(short, long)]
    snapshot: bool,
    /// The same as -t none
    #[arg(short, long)]
    nocache: bool,
    /// Keep what is read from the backing file
    #[arg(short = 'C', long)]
    copy_on_read: bool,
    /// Accepted, without effect
    #[arg(short, long)]
    misalign: bool,
    /// The same as -i native
    #[arg(short = 'k', long)]
    native_aio: bool,
    /// The engine of the I/O: threads, native, io_uring
    #[arg(short = 'i', long, value_name = "MODE")]
    aio: Option<String>,
    /// Cache mode: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 't', long, value_name = "MODE")]
    cache: Option<String>,
    /// Discards: ignore (or off), unmap (or on)
    #[arg(short, long, value_name = "MODE")]
    discard: Option<String>,
    /// Accepted for the sake of scripts, without effect
    #[arg(short = 'T', long = "trace", value_name = "TRACE")]
    traces: Vec<String>,
    /// Open the image even while another process writes to it; needs -r
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = IoArgs::from_arg_matches(matches)?;
    run_shell(args, console, Manner { program: "cowshed", terse: false })
}

fn run_qemu_io(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = IoArgs::from_arg_matches(matches)?;
    run_shell(args, console, Manner { program: QEMU_IO.name, terse: true })
}

fn run_shell(args: IoArgs, console: &mut Console, manner: Manner) -> Result<u8, Failure> {
    args.naming.check(None)?;
    if args.naming.image_opts && args.format.is_some() {
        return Err(Failure::new("--image-opts and -f are mutually exclusive"));
    }
    let image = match &args.files[..] {
        [] => None,
        [file] => {
            let image = args.naming.spec(file, None)?;
            let prompt = args.commands.is_empty().then_some(Use::Prompt);
            let uses: Vec<Use<'_>> = [Use::Write(&image)].into_iter().chain(prompt).collect();
            args.naming.untrusted.guard(&uses, console)?;
            Some(open_spec(&args, file)?)
        }
        _ => return Err(Failure::usage("Expecting one image file name")),
    };
    Ok(rt::block_on(Shell::new(Console::new(console.persona), manner).run(image, &args.commands)))
}

fn open_spec(args: &IoArgs, file: &str) -> Result<OpenSpec, Failure> {
    let spec = args.naming.spec(file, None)?;
    let native = args.native_aio.then(|| "native".to_owned());
    Ok(OpenSpec {
        path: Some(file.to_owned()),
        image_opts: args.naming.image_opts,
        format: args.format.clone(),
        options: None,
        read_only: args.read_only,
        snapshot: args.snapshot,
        cache: if args.nocache { Some("none".to_owned()) } else { args.cache.clone() },
        discard: args.discard.clone(),
        aio: native.or_else(|| args.aio.clone()),
        force_share: args.force_share,
        copy_on_read: args.copy_on_read,
        policy: spec.policy,
        secrets: spec.secrets,
        tls: spec.tls,
        graph: spec.graph,
    })
}
