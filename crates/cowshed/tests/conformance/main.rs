// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The newest QEMU tools and ours run the same command lines on the same files. Standard output, standard error, exit
//! codes and the files afterwards must be equal, but for the differences that `known.txt` lists with a reason.
//!
//! The tables in `tables/` hold the cases. `COWSHED_CASES=TEXT` runs only the cases that contain the text.

mod case;
mod files;
mod formats;
mod generated;
mod known;
mod runner;
mod session;
mod sessions;

use case::{Case, parse};
use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::random::{again, new_seeds};
use known::Known;
use runner::{Difference, Runner};
use std::cmp::Reverse;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// So many differences are explained.
const FEW: usize = 5;
/// The number of slowest cases that the report names.
const SLOWEST: usize = 10;
/// Differences that one message shows; the report file has all.
const SHOWN: usize = 40;

/// The cases of all tables.
fn table_cases() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/tables");
    let mut names: Vec<_> =
        std::fs::read_dir(&folder).expect("the tables").map(|entry| entry.expect("a file").path()).collect();
    names.sort();
    let mut cases = Vec::new();
    for name in &names {
        let text = std::fs::read_to_string(name).expect("a table is text");
        cases.extend(parse(&name.file_stem().unwrap_or_default().to_string_lossy(), &text));
    }
    cases
}

#[test]
fn tables() {
    compare("tables", &table_cases());
}

/// Every format with every verb.
#[test]
fn formats() {
    compare("formats", &formats::cases());
}

/// Cases of each generator. `COWSHED_FIRST_SEED`, which CI sets by the commit, `COWSHED_SEED` and `COWSHED_SEEDS` choose others.
const GENERATED: u64 = 60;

fn generated_cases(seeds: &[u64]) -> Vec<Case> {
    let io = seeds.iter().map(|&seed| generated::io_sessions(seed));
    let img = seeds.iter().map(|&seed| generated::img_chains(seed));
    io.chain(img).collect()
}

#[test]
fn generated() {
    let seeds = new_seeds(GENERATED);
    compare_seeded("generated", &seeds, &generated_cases(&seeds.clone().collect::<Vec<_>>()));
}

/// All command lines that are compared.
fn lines() -> Vec<String> {
    let generated = generated_cases(&(0..GENERATED).collect::<Vec<_>>());
    table_cases().into_iter().chain(generated).flat_map(|case| case.lines).collect()
}

#[test]
fn the_suite_is_as_large_as_promised() {
    const LINES: usize = 1500;
    const IO_SESSIONS: usize = 400;
    const QMP_SESSIONS: usize = 150;
    let lines = lines();
    let io = lines.iter().filter(|line| line.contains("qemu-io ")).count();
    let generated = (0..SESSIONS).flat_map(sessions::generated).flat_map(|case| case.lines);
    let qmp = lines.iter().cloned().chain(generated).filter(|line| session::is_session(line)).count();
    println!("{} command lines, {io} of them sessions of qemu-io; {qmp} sessions of QMP", lines.len());
    assert!(lines.len() >= LINES && io >= IO_SESSIONS && qmp >= QMP_SESSIONS, "{} lines, {io}, {qmp}", lines.len());
}

/// QEMU's own help lists the commands and flags.
#[test]
fn every_command_and_flag_of_qemu_io_is_in_a_session() {
    let help = Qemu::newest().io(["-c", "help"]).stdout;
    let sessions: Vec<String> = lines().into_iter().filter(|line| line.contains("qemu-io ")).collect();
    let (mut commands, mut missing) = (0, Vec::new());
    for (syntax, _) in help.lines().filter_map(|line| line.split_once(" -- ")) {
        let mut words = syntax.split_whitespace();
        let Some(command) = words.next() else { continue };
        commands += 1;
        let calls: Vec<Vec<&str>> = sessions
            .iter()
            .flat_map(|line| {
                let quoted = line.split('\'').skip(1).step_by(2);
                let bare = line.split(" -c ").skip(1).filter(|part| !part.starts_with('\''));
                quoted.chain(bare)
            })
            .map(|call| call.split_whitespace().collect::<Vec<_>>())
            .filter(|call| call.first() == Some(&command))
            .collect();
        if calls.is_empty() {
            missing.push(command.to_owned());
        }
        // `[-abC]`, `[-P pattern`, `(-r|-w)`: each letter is a flag.
        let groups =
            words.flat_map(|word| word.split('|')).filter_map(|word| word.split_once('-').map(|(_, rest)| rest));
        for flag in groups.flat_map(str::chars).filter(char::is_ascii_alphabetic) {
            let flag = format!("-{flag}");
            if !calls.iter().any(|call| call.contains(&flag.as_str())) {
                missing.push(format!("{command} {flag}"));
            }
        }
    }
    assert!(commands > 30, "{help}");
    assert!(missing.is_empty(), "no session has {missing:?}");
}

/// Sessions of each generator.
const SESSIONS: u64 = 20;

#[test]
fn sessions() {
    let seeds = new_seeds(SESSIONS);
    compare_seeded("sessions", &seeds, &seeds.clone().flat_map(sessions::generated).collect::<Vec<_>>());
}

/// As [`compare`]. A failure says how the same cases run again.
fn compare_seeded(title: &str, seeds: &Range<u64>, cases: &[Case]) {
    if let Err(failure) = find_differences(title, cases) {
        panic!("{failure}\n{}: cargo test -p cowshed --test conformance {title}", again(seeds));
    }
}

/// Runs all cases by both sets of tools and fails when a difference is not known.
fn compare(title: &str, cases: &[Case]) {
    find_differences(title, cases).unwrap_or_else(|failure| panic!("{failure}"));
}

fn find_differences(title: &str, cases: &[Case]) -> Result<(), String> {
    let filter = std::env::var("COWSHED_CASES").unwrap_or_default();
    let cases: Vec<&Case> = cases.iter().filter(|case| case.contains(&filter)).collect();
    assert!(!cases.is_empty(), "no case contains '{filter}'");
    let known = Known::load();
    let (next, found, times) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let (qemu, default_port) = (Qemu::newest(), Mutex::new(()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                let runner = Runner::new(&qemu);
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let _alone = case.takes_default_port().then(|| default_port.lock().expect("no panic"));
                    let started = Instant::now();
                    let differences = runner.compare(case);
                    times.lock().expect("no panic").push((started.elapsed(), case.name.clone()));
                    found.lock().expect("no panic").extend(differences);
                }
            });
        }
    });
    let mut found = found.into_inner().expect("no panic");
    found.sort_by(|one, other| (&one.case, one.line).cmp(&(&other.case, other.line)));
    found.retain(|difference| !known.covers(title, difference));
    let lines: usize = cases.iter().map(|case| case.compared()).sum();
    let told = |difference: &Difference| match cases.iter().find(|case| case.name == difference.case) {
        // Where there are few, the lines before each of them are shown too.
        Some(case) if difference.part == "file" || found.len() <= FEW => {
            format!("{difference}{}\n{}\n", case.setup.join("\n"), case.lines.join("\n"))
        }
        _ => difference.to_string(),
    };
    let report: String = found.iter().map(told).collect();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("conformance-{title}.txt"));
    std::fs::write(&path, &report).expect("the report can be written");
    println!("{title}: {} cases, {lines} command lines, {} differences", cases.len(), found.len());
    let mut times = times.into_inner().expect("no panic");
    times.sort_by_key(|(took, _)| Reverse(*took));
    for (took, name) in times.iter().take(SLOWEST) {
        println!("{:6.1} s  {name}", took.as_secs_f64());
    }
    let shown: String = found.iter().take(SHOWN).map(ToString::to_string).collect();
    // The rows that the generated lines need depend on their seeds.
    let stale =
        if filter.is_empty() && matches!(title, "tables" | "formats") { known.stale(title) } else { Vec::new() };
    match found.is_empty() && stale.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{} differences, all in {}:\n{shown}\nknown.txt has rows that cover nothing:\n{}",
            found.len(),
            path.display(),
            stale.join("\n")
        )),
    }
}
