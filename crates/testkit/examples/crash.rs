// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cuts the power of the real engine on simulated disks and prints how many states were tried.
//!
//! A long run, on all cores, with some failing disks among the cases; `--table FILE` writes the states per combination
//! of features as markdown:
//! `cargo run -p cowshed-testkit --example crash -- --minutes 60 --table states.md`
//!
//! So many cases and no more: `--first 0 --cases 100 --requests 40 --states 2000 --qemu 200`.
//!
//! `--fail-sync N`, `--fail-write N` and `--fail-read N` let the operation after the first N of its kind fail,
//! `--room N` lets the disk get full after N bytes; `--weather` takes the long run's settings for the seed.
//!
//! A failing case prints its seed and the fewest requests that show it; `--replay 'REQUESTS'` with that seed runs
//! just those.

use cowshed_simulator::{Effect, Fault, OpKind};
use cowshed_testkit::campaign::{Campaign, weather};
use cowshed_testkit::matrix::{CrashScene, Effort};
use cowshed_testkit::operations::parse_steps;
use cowshed_testkit::tally::Tally;
use cowshed_types::Errno;
use std::process::ExitCode;
use std::time::Duration;

struct Arguments {
    first: u64,
    cases: u64,
    seconds: Option<f64>,
    threads: usize,
    report_seconds: f64,
    effort: Effort,
    faults: Vec<Fault>,
    weather: bool,
    replay: Option<String>,
    table: Option<String>,
}

fn number<T: std::str::FromStr>(value: Option<String>, name: &str) -> T {
    value.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{name} wants a number"))
}

fn parse() -> Result<Arguments, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut arguments = Arguments {
        first: 0,
        cases: 20,
        seconds: None,
        threads: cores,
        report_seconds: 30.0,
        effort: Effort { requests: 50, states: 1500, sample_qemu: 400, room_bytes: None },
        faults: Vec::new(),
        weather: false,
        replay: None,
        table: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut fault = |effect, kind| {
            let skip = number(words.next(), &word);
            arguments.faults.push(Fault::new(effect).kind(kind).skip(skip));
        };
        match word.as_str() {
            "--fail-read" => fault(Effect::Fail(Errno::EIO), OpKind::Read),
            "--fail-sync" => fault(Effect::Fail(Errno::EIO), OpKind::Sync),
            "--fail-write" => fault(Effect::Torn(Errno::EIO), OpKind::Write),
            "--seed" => (arguments.first, arguments.cases) = (number(words.next(), &word), 1),
            "--first" => arguments.first = number(words.next(), &word),
            "--cases" => arguments.cases = number(words.next(), &word),
            "--hours" => arguments.seconds = Some(number::<f64>(words.next(), &word) * 3600.0),
            "--minutes" => arguments.seconds = Some(number::<f64>(words.next(), &word) * 60.0),
            "--threads" => arguments.threads = number(words.next(), &word),
            "--every" => arguments.report_seconds = number(words.next(), &word),
            "--requests" => arguments.effort.requests = number(words.next(), &word),
            "--states" => arguments.effort.states = number(words.next(), &word),
            "--qemu" => arguments.effort.sample_qemu = number(words.next(), &word),
            "--room" => arguments.effort.room_bytes = Some(number(words.next(), &word)),
            "--weather" => arguments.weather = true,
            "--replay" => arguments.replay = words.next(),
            "--table" => arguments.table = words.next(),
            _ => return Err(format!("unknown option {word}; see the head of examples/crash.rs")),
        }
    }
    Ok(arguments)
}

fn main() -> ExitCode {
    let arguments = match parse() {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    let is_good = match (&arguments.replay, arguments.seconds) {
        (Some(text), _) => run_again(&arguments, text),
        (None, Some(seconds)) => run_long(&arguments, seconds),
        (None, None) => run_cases(&arguments),
    };
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn write_table(arguments: &Arguments, tally: &Tally) {
    if let Some(path) = &arguments.table
        && let Err(error) = std::fs::write(path, tally.markdown())
    {
        eprintln!("could not write {path}: {error}");
    }
}

fn run_long(arguments: &Arguments, seconds: f64) -> bool {
    let campaign = Campaign {
        first_seed: arguments.first,
        time: Duration::from_secs_f64(seconds),
        threads: arguments.threads,
        effort: arguments.effort.clone(),
        report_every: Duration::from_secs_f64(arguments.report_seconds),
        failures_max: 20,
    };
    let report = campaign.run(&|line| println!("{line}"));
    println!("{}", report.tally);
    println!(
        "{} of {} cases failed; {:.0} distinct states an hour on {} threads",
        report.failures.len(),
        report.cases,
        report.states_per_hour(),
        arguments.threads
    );
    write_table(arguments, &report.tally);
    report.failures.is_empty()
}

fn faults_of(arguments: &Arguments, seed: u64) -> (Effort, Vec<Fault>) {
    match arguments.weather {
        true => weather(seed, &arguments.effort),
        false => (arguments.effort.clone(), arguments.faults.clone()),
    }
}

fn run_cases(arguments: &Arguments) -> bool {
    let (mut tally, mut failures) = (Tally::default(), 0);
    let started = std::time::Instant::now();
    for seed in arguments.first..arguments.first + arguments.cases {
        let scene = CrashScene::new(seed);
        let (effort, faults) = faults_of(arguments, seed);
        match scene.run(&effort, faults) {
            Ok(report) => tally.add(&scene, &report),
            Err(complaint) => {
                failures += 1;
                println!("{complaint}\n");
            }
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{tally}");
    println!(
        "{failures} of {} cases failed; {:.0} distinct states a second",
        arguments.cases,
        tally.total.distinct() as f64 / seconds
    );
    write_table(arguments, &tally);
    failures == 0
}

fn run_again(arguments: &Arguments, text: &str) -> bool {
    let steps = parse_steps(text).unwrap_or_else(|complaint| panic!("{complaint}"));
    let scene = CrashScene::new(arguments.first);
    println!("{scene:#?}");
    let (effort, faults) = faults_of(arguments, arguments.first);
    match scene.run_steps(&effort, faults, steps) {
        Ok(report) => println!("{report}"),
        Err(complaint) => {
            println!("{complaint}");
            return false;
        }
    }
    true
}
