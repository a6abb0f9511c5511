// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cuts the power of the real engine on simulated disks and prints how many states were tried.
//!
//! `cargo run -p cowshed-testkit --example crash -- --seed 0 --cases 100 --requests 40 --states 2000 --qemu 200`
//!
//! `--fail-sync N`, `--fail-write N` and `--fail-read N` let the operation after the first N of its kind fail, `--room N`
//! lets the disk get full after N bytes.
//!
//! A failing case prints its seed and the fewest requests that show it; `--replay 'REQUESTS'` with that seed runs
//! just those.

use cowshed_block::Errno;
use cowshed_storage::sim::{Effect, Fault, OpKind};
use cowshed_testkit::matrix::{CrashScene, Effort, Tally};
use cowshed_testkit::operations::parse_steps;
use cowshed_testkit::scenario::Prepared;
use std::process::ExitCode;

fn number(value: Option<String>, name: &str) -> u64 {
    value.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{name} wants a number"))
}

fn main() -> ExitCode {
    let (mut first, mut cases) = (0, 20);
    let mut effort = Effort { requests: 40, states: 1000, sample_qemu: 0, room_bytes: None };
    let (mut replay, mut faults) = (None, Vec::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--seed" => (first, cases) = (number(words.next(), &word), 1),
            "--first" => first = number(words.next(), &word),
            "--cases" => cases = number(words.next(), &word),
            "--requests" => effort.requests = number(words.next(), &word) as usize,
            "--states" => effort.states = number(words.next(), &word) as usize,
            "--qemu" => effort.sample_qemu = number(words.next(), &word) as usize,
            "--room" => effort.room_bytes = Some(number(words.next(), &word)),
            "--fail-read" => {
                let skip = number(words.next(), &word);
                faults.push(Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Read).skip(skip));
            }
            "--fail-sync" => {
                let skip = number(words.next(), &word);
                faults.push(Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Sync).skip(skip));
            }
            "--fail-write" => {
                let skip = number(words.next(), &word);
                faults.push(Fault::new(Effect::Torn(Errno::EIO)).kind(OpKind::Write).skip(skip));
            }
            "--replay" => replay = words.next(),
            _ => {
                eprintln!("unknown option {word}; see the head of this file");
                return ExitCode::from(2);
            }
        }
    }
    if let Some(text) = replay {
        return run_again(first, &text, &effort, faults);
    }
    let (mut tally, mut failures) = (Tally::default(), 0);
    let started = std::time::Instant::now();
    for seed in first..first + cases {
        let scene = CrashScene::new(seed);
        match scene.run(&effort, faults.clone()) {
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
        "{failures} of {cases} cases failed; {:.0} distinct states a second",
        tally.total.distinct as f64 / seconds
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_again(seed: u64, text: &str, effort: &Effort, faults: Vec<Fault>) -> ExitCode {
    let steps = parse_steps(text).unwrap_or_else(|complaint| panic!("{complaint}"));
    let scene = CrashScene::new(seed);
    let prepared = Prepared::new(&scene.chain);
    println!("{scene:#?}");
    match prepared.crash(&scene.trial(steps, effort, faults)) {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(complaint) => {
            println!("{complaint}");
            ExitCode::FAILURE
        }
    }
}
