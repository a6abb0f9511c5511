// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stress on a real daemon, see `cowshed_testkit::stress`; `scripts/stress` builds and calls this.
//!
//! `stress --program PATH --folder PATH [--minutes N] [--seed S] [--disks N] [--connections N]`

use cowshed_testkit::stress::{Config, Report, run};
use std::io::Write;

fn print(report: &Report) {
    let counts = report.tally.counts();
    // Counts of other kinds than commands have their names in brackets.
    let commands = counts.iter().filter(|(name, _)| !name.starts_with('('));
    let commands: u64 = commands.map(|(_, counts)| counts.done + counts.refused).sum();
    let done = |name: &str| counts.get(name).map_or(0, |counts| counts.done);
    println!(
        "{} lives ({} killed), {} requests, {} connections ({} cut), {commands} commands, {} exports taken away, {} stops of the \
         server, {} backups and {} quiet points compared, {} images checked, {} MiB at most",
        report.lives,
        report.kills,
        report.requests,
        done("(connections)"),
        done("(connections cut)"),
        done("block-export-del"),
        done("nbd-server-stop"),
        done("(backups compared)"),
        done("(quiet points compared)"),
        report.images,
        report.memory_kib >> 10
    );
    let _ = std::io::stdout().flush();
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let find = |name: &str| words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
    let number = |name: &str, default: u64| match find(name) {
        Some(text) => text.parse().unwrap_or_else(|_| panic!("{name}: `{text}` is no number")),
        None => default,
    };
    let (Some(program), Some(folder)) = (find("--program"), find("--folder")) else {
        eprintln!("usage: stress --program PATH --folder PATH [--minutes N] [--seed S] [--disks N] [--connections N]");
        std::process::exit(2);
    };
    let config = Config {
        program: program.into(),
        folder: folder.into(),
        seed: number("--seed", 0),
        seconds: number("--minutes", 1) * 60,
        disks: number("--disks", 2) as usize,
        connections: number("--connections", 3) as usize,
    };
    let every = number("--every", 10);
    let outcome = run(&config, |report| {
        if report.lives.is_multiple_of(every) {
            print(report);
        }
    });
    match outcome {
        Ok(report) => {
            for (name, counts) in report.tally.counts() {
                println!("{name:45} {:7} done {:7} refused  {}", counts.done, counts.refused, counts.reason);
            }
            print(&report);
        }
        Err(wrong) => {
            eprintln!("stress: {wrong}");
            std::process::exit(1);
        }
    }
}
