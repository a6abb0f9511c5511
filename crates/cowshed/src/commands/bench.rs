// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `bench`: reads or writes an image as fast as it goes, and prints the time.

use super::arguments::{NamingArgs, OutputFormat, cache_mode, one_file};
use super::untrusted::Use;
use super::{Verb, sizes, work};
use crate::invocation::Persona;
use crate::output::size::human;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_jobs::ImageSpec;
use cowshed_jobs::bench::{Bench, BenchOptions, BenchOutcome};
use cowshed_types::{Error, ErrorKind};
use serde_json::json;

pub const VERB: Verb = Verb {
    name: "bench",
    about: "Measure reads or writes of an image",
    operands: "FILE",
    details: "Carries out COUNT requests of one size, DEPTH of them at a time. Each begins one STEP behind the one before. Behind the end of \
              the image they go on at its start. With -w they are writes: the content of the image is lost.",
    examples: "  cowshed bench disk.qcow2
  cowshed bench -c 100000 -d 32 -s 64k -t none -n disk.qcow2
  cowshed bench -w -c 10000 --pattern 0xa5 --flush-interval 100 -d 16 scratch.qcow2",
    in_qemu_img: true,
    arguments: BenchArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct BenchArgs {
    /// Format of the image (default: probed)
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Cache mode: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 't', long, value_name = "CACHE")]
    cache: Option<String>,
    /// Requests
    #[arg(short, long, value_name = "COUNT", default_value = "75000")]
    count: String,
    /// Requests at a time
    #[arg(short, long, value_name = "DEPTH", default_value = "64")]
    depth: String,
    /// Where the first one starts
    #[arg(short, long, value_name = "OFFSET", default_value = "0")]
    offset: String,
    /// Bytes of each
    #[arg(short = 's', long, value_name = "BUFFER_SIZE", default_value = "4k")]
    buffer_size: String,
    /// Bytes from the start of one to the start of the next (default: BUFFER_SIZE)
    #[arg(short = 'S', long, value_name = "STEP_SIZE")]
    step_size: Option<String>,
    /// Write, and don't read: the content of the image is lost
    #[arg(short, long)]
    write: bool,
    /// The byte to write
    #[arg(long, value_name = "PATTERN")]
    pattern: Option<String>,
    /// With -w: flush after this many requests
    #[arg(long, value_name = "FLUSH_INTERVAL")]
    flush_interval: Option<String>,
    /// With --flush-interval: flush while other requests are in flight
    #[arg(long)]
    no_drain: bool,
    /// The engine of the I/O: threads, native, io_uring
    #[arg(short = 'i', long, value_name = "AIO")]
    aio: Option<String>,
    /// The same as -i native; needs -t none or -t directsync
    #[arg(short, long)]
    native: bool,
    /// Open the image even while another process writes to it; not with -w
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t, value_name = "OFMT")]
    output: OutputFormat,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = BenchArgs::from_arg_matches(matches)?;
    let mut options = options(&args, matches)?;
    let file = one_file(&args.files)?;
    let spec = args.naming.shared(file, args.format.as_ref(), args.force_share)?;
    options.image = ImageSpec { cache: options.image.cache, aio: options.image.aio, ..spec };
    if args.write && args.force_share {
        let message = "force-share=on can only be used with read-only images";
        return Err(Failure::open(console.persona, file, &Error::invalid_argument(message)));
    }
    let used = if args.write { Use::Write(&options.image) } else { Use::Read(&options.image) };
    args.naming.untrusted.guard(&[used], console)?;
    let persona = console.persona;
    let job = work::Foreground::new(persona, false, true, "measuring")?;
    let job = if args.write { job } else { job.reading() };
    // qemu-img speaks also with -q.
    let is_quiet = args.quiet && persona != Persona::QemuImg;
    let is_plain = args.output == OutputFormat::Human && !is_quiet;
    let outcome = job.run(
        async |handle| {
            let bench = Bench::open(&options).await?;
            if is_plain {
                introduce(&options, console);
            }
            bench.run(&handle).await
        },
        |error| failed(persona, file, error),
    )?;
    match (args.output, persona) {
        (OutputFormat::Json, _) => console.line(to_json(&options, outcome)),
        _ if is_quiet => {}
        (_, Persona::QemuImg) => {
            console.line(format_args!("Run completed in {:.3} seconds.", outcome.elapsed.as_secs_f64()));
        }
        _ => {
            let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
            console.line(format_args!(
                "{} in {seconds:.3} s: {:.0} requests/s, {}/s",
                human(outcome.bytes),
                outcome.requests as f64 / seconds,
                human((outcome.bytes as f64 / seconds) as u64)
            ));
        }
    }
    Ok(0)
}

/// All but the image's name. qemu-img checks values while it reads the options: the first wrong one is named.
fn options(args: &BenchArgs, matches: &ArgMatches) -> Result<BenchOptions, Failure> {
    const INT: u64 = i32::MAX as u64;
    let mut wrong: Option<(usize, Failure)> = None;
    let mut note = |id: &str, failure: Failure| {
        let place = matches.index_of(id).unwrap_or(usize::MAX);
        if wrong.as_ref().is_none_or(|(first, _)| place < *first) {
            wrong = Some((place, failure));
        }
    };
    let mut number = |id: &str, what: &str, text: Option<&String>, (least, most): (u64, u64)| {
        let number = text.map_or(Ok(0), |text| sizes::size_between(what, text, least, most));
        number.unwrap_or_else(|failure| {
            note(id, failure);
            0
        })
    };
    let pattern = number("pattern", "pattern byte", args.pattern.as_ref(), (0, 0xff)) as u8;
    let count = number("count", "request count", Some(&args.count), (1, INT));
    let depth = number("depth", "queue depth", Some(&args.depth), (1, INT));
    let offset = number("offset", "offset", Some(&args.offset), (0, sizes::MOST));
    let buffer_bytes = number("buffer_size", "buffer size", Some(&args.buffer_size), (1, INT));
    let step_bytes = number("step_size", "step size", args.step_size.as_ref(), (0, INT));
    let flush_interval = number("flush_interval", "flush interval", args.flush_interval.as_ref(), (0, INT));
    let aio = match (args.native, &args.aio) {
        (true, _) => Some("native".to_owned()),
        (false, Some(mode)) => {
            if !["threads", "native", "io_uring"].contains(&mode.as_str()) {
                note("aio", Failure::new(format!("Invalid aio option: {mode}")));
            }
            Some(mode.clone())
        }
        (false, None) => None,
    };
    let cache = cache_mode("", args.cache.as_ref()).unwrap_or_else(|_| {
        note("cache", Failure::new("Invalid cache mode"));
        None
    });
    if let Some((_, failure)) = wrong {
        return Err(failure);
    }
    Ok(BenchOptions {
        image: ImageSpec { cache, aio, ..ImageSpec::default() },
        count,
        depth,
        offset,
        buffer_bytes,
        step_bytes,
        pattern: args.write.then_some(pattern),
        flush_interval,
        keeps_flowing: args.no_drain,
    })
}

fn introduce(options: &BenchOptions, console: &mut Console) {
    console.line(format_args!(
        "Sending {} {} requests, {} bytes each, {} in parallel (starting at offset {}, step size {})",
        options.count,
        if options.pattern.is_some() { "write" } else { "read" },
        options.buffer_bytes,
        options.depth,
        options.offset,
        options.step()
    ));
    if options.flush_interval > 0 {
        console.line(format_args!("Sending flush every {} requests", options.flush_interval));
    }
    console.flush();
}

fn to_json(options: &BenchOptions, outcome: BenchOutcome) -> String {
    let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
    json!({
        "kind": if options.pattern.is_some() { "write" } else { "read" },
        "requests": outcome.requests,
        "flushes": outcome.flushes,
        "bytes": outcome.bytes,
        "depth": options.depth,
        "buffer-size": options.buffer_bytes,
        "step-size": options.step(),
        "seconds": seconds,
        "requests-per-second": outcome.requests as f64 / seconds,
        "bytes-per-second": outcome.bytes as f64 / seconds,
    })
    .to_string()
}

/// qemu-img reports a failed request without a reason.
fn failed(persona: Persona, file: &str, error: &Error) -> Failure {
    match error.kind() {
        ErrorKind::InvalidArgument
            if persona == Persona::QemuImg && error.message().starts_with("the request reaches") =>
        {
            Failure::new("Failed request: Input/output error")
        }
        ErrorKind::InvalidArgument if persona == Persona::QemuImg && error.field_name().is_some() => {
            Failure::new(error.message().to_owned())
        }
        _ => Failure::open(persona, file, error),
    }
}
