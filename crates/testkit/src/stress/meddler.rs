// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A second monitor that asks for everything else: every query, commands with senseless arguments, pauses of jobs.

use super::monitor::{Answer, Monitor};
use super::tally::Tally;
use crate::random::Random;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Commands that would end the life, or that only a disk's own commander may give.
const LEFT_OUT: &[&str] = &[
    "quit",
    "block-job-cancel",
    "job-cancel",
    "job-complete",
    "block-job-complete",
    "job-dismiss",
    "block-job-dismiss",
    "nbd-server-stop",
    "block-export-del",
    "nbd-server-remove",
    "blockdev-del",
    "blockdev-snapshot-sync",
    "blockdev-snapshot",
    "blockdev-set-active",
    "block-commit",
    "block-stream",
    "blockdev-mirror",
    "drive-mirror",
];

/// Gives commands until the life ends.
///
/// # Errors
/// The behaviour that no correct daemon shows.
pub fn meddle(mut monitor: Monitor, mut random: Random, stop: &AtomicBool, tally: &Tally) -> Result<(), String> {
    let Answer::Done(commands) = monitor.command("query-commands", &json!({}))? else { return Ok(()) };
    let names: Vec<String> = commands
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|command| command["name"].as_str().map(str::to_owned))
        .filter(|name| !LEFT_OUT.contains(&name.as_str()))
        .collect();
    while !stop.load(Ordering::Relaxed) {
        if random.chance(20) {
            if !pause_a_job(&mut monitor, &mut random, tally)? {
                return Ok(());
            }
            continue;
        }
        let name = &names[random.below(names.len() as u64) as usize];
        let arguments = senseless(name, &mut random);
        match monitor.command(name, &arguments)? {
            Answer::Done(_) => tally.count(name, true),
            Answer::Refused(reason) => tally.refuse(name, &reason),
            Answer::Gone => return Ok(()),
        }
        // The pace of the load.
        std::thread::sleep(Duration::from_millis(random.below(20)));
    }
    Ok(())
}

/// Arguments that mostly miss: queries take none, others get a few of the usual keys.
fn senseless(name: &str, random: &mut Random) -> Value {
    if name.starts_with("query-") || random.chance(20) {
        return json!({});
    }
    let mut arguments = serde_json::Map::new();
    for key in ["device", "node-name", "node", "id", "name", "size", "filename", "options", "job-id", "value"] {
        if random.chance(30) {
            let value = match random.below(5) {
                0 => json!("e-d0"),
                1 => json!("no such thing"),
                2 => json!(random.below(1 << 40)),
                3 => json!({}),
                _ => json!(""),
            };
            arguments.insert(key.to_owned(), value);
        }
    }
    // These have an effect with such arguments: the disk's size and its node stay.
    if matches!(name, "block_resize" | "blockdev-reopen") {
        arguments.remove("size");
    }
    Value::Object(arguments)
}

/// Pauses one of the jobs for a moment, or changes its speed; false when the monitor has gone.
fn pause_a_job(monitor: &mut Monitor, random: &mut Random, tally: &Tally) -> Result<bool, String> {
    let Answer::Done(jobs) = monitor.command("query-jobs", &json!({}))? else { return Ok(false) };
    let jobs = jobs.as_array().cloned().unwrap_or_default();
    if jobs.is_empty() {
        // A job may come meanwhile.
        std::thread::sleep(Duration::from_millis(10));
        return Ok(true);
    }
    let id = jobs[random.below(jobs.len() as u64) as usize]["id"].clone();
    let steps = match random.below(2) {
        0 => [("job-pause", json!({"id": id})), ("job-resume", json!({"id": id}))],
        _ => [
            ("block-job-set-speed", json!({"device": id, "speed": 1 << 20})),
            ("block-job-set-speed", json!({"device": id, "speed": 0})),
        ],
    };
    for (name, arguments) in steps {
        match monitor.command(name, &arguments)? {
            Answer::Done(_) => tally.count(name, true),
            Answer::Refused(reason) => tally.refuse(name, &reason),
            Answer::Gone => return Ok(false),
        }
        // The job is paused, or slow, for so long.
        std::thread::sleep(Duration::from_millis(random.below(60)));
    }
    Ok(true)
}
