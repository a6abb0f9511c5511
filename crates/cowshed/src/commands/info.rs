// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `info`: a description of an image, without reading its data.

use super::arguments::{NamingArgs, OutputFormat, cache_mode, one_file};
use super::untrusted::Use;
use super::{Verb, work};
use crate::invocation::Persona;
use crate::output::info::{Paint, render};
use crate::output::{Console, Failure, json};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::info::{self, InfoOptions};
use serde_json::Value;
use std::cell::RefCell;

pub const VERB: Verb = Verb {
    name: "info",
    about: "Show what an image is: format, sizes, backing file, snapshots",
    operands: "FILE",
    details: "Reads the header and little else, so it takes as long for a terabyte as for a megabyte.",
    examples: "  cowshed info disk.qcow2
  cowshed info --backing-chain vm1.qcow2
      Every layer, the top first.
  cowshed info -U --output=json disk.qcow2
      For scripts, and while a virtual machine is using the image.",
    in_qemu_img: true,
    arguments: InfoArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct InfoArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Show every layer of the backing chain
    #[arg(long)]
    backing_chain: bool,
    /// Cache mode for FILE: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,
    /// Open the image even while another process writes to it: reads may be torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Show alignments and largest sizes of requests
    #[arg(long)]
    limits: bool,
    /// Text or JSON
    #[arg(long, value_enum, default_value_t, value_name = "human|json")]
    output: OutputFormat,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = InfoArgs::from_arg_matches(matches)?;
    let file = one_file(&args.files)?;
    let image = ImageSpec {
        cache: cache_mode("", args.cache.as_ref())?,
        ..args.naming.shared(file, args.format.as_ref(), args.force_share)?
    };
    args.naming.untrusted.guard(&[Use::Read(&image)], console)?;
    let options = InfoOptions { image, backing_chain: args.backing_chain, limits: args.limits };
    // Each image of a chain is opened by its own name.
    let opened = RefCell::new(file.to_owned());
    let tell = |name: &str| name.clone_into(&mut opened.borrow_mut());
    let layers = work::run_quietly(async |job| info::run_telling(&options, &job, &tell).await).map_err(|error| {
        let named = if console.persona == Persona::QemuImg { opened.borrow().clone() } else { file.to_owned() };
        Failure::open(console.persona, &named, &error)
    })?;
    let layers = layers.iter().map(serde_json::to_value).collect::<Result<Vec<Value>, _>>();
    let layers = layers.map_err(|error| Failure::new(format!("could not make JSON: {error}")))?;
    let layers: Vec<Value> = layers.into_iter().map(json::in_qemu_order).collect();
    match (args.output, layers.as_slice()) {
        (OutputFormat::Json, [layer]) if !args.backing_chain => console.line(json::pretty(layer)),
        (OutputFormat::Json, _) => console.line(json::pretty(&Value::Array(layers))),
        (OutputFormat::Human, _) => {
            let paint = Paint::new(console.colour());
            for (index, layer) in layers.iter().enumerate() {
                if index > 0 {
                    console.line("");
                }
                console.print(render(layer, console.persona, paint));
            }
        }
    }
    Ok(0)
}
