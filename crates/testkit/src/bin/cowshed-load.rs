// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes to an image from several threads until it is killed, or for a number of rounds. It prints each step on
//! standard output: the journal that `cowshed_testkit::journal` follows. Used by `tests/processes/real_processes.rs`.
//!
//! `cowshed-load IMAGE CLUSTER_BYTES SEED ROUNDS [OPTIONS [LIMIT_BYTES]]`: OPTIONS are the driver's, as `--image-opts`
//! takes them; files can't grow past LIMIT_BYTES, as on a full disk.

use cowshed_storage::rt;
use cowshed_testkit::model::Model;
use cowshed_testkit::operations::OpGen;
use cowshed_testkit::runner::{GuestDisk, Journal, run_steps_on_threads};
use cowshed_testkit::scenario::ImageDisk;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The signal that a process gets when its file is too large; by default it ends it.
const SIGXFSZ: i32 = 25;

fn print(line: &str) {
    let mut out = std::io::stdout().lock();
    // The pipe has no reader any more: the test is over.
    if out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush()).is_err() {
        std::process::exit(3);
    }
}

fn limit_files(limit_bytes: u64) {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).expect("a handler for SIGXFSZ");
    let limit = rustix::process::Rlimit { current: Some(limit_bytes), maximum: Some(limit_bytes) };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).expect("a lower limit is always allowed");
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| words.get(index).and_then(|word| word.parse::<u64>().ok());
    let (Some(image), Some(cluster_bytes), Some(seed), Some(rounds)) = (words.first(), number(1), number(2), number(3))
    else {
        eprintln!("usage: cowshed-load IMAGE CLUSTER_BYTES SEED ROUNDS [OPTIONS [LIMIT_BYTES]]");
        std::process::exit(2);
    };
    let options = words.get(4).map_or("", String::as_str);
    let mut disk = rt::block_on(ImageDisk::open_with(image, true, false, options)).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(1);
    });
    if let Some(limit_bytes) = number(5) {
        limit_files(limit_bytes);
    }
    let requests = OpGen { streams: 8, compressed: true, flush_every: 25, ..OpGen::new(disk.size(), cluster_bytes) };
    let mut number = 0;
    let journal_base = Arc::new(std::sync::atomic::AtomicU64::new(0));
    for round in 0..rounds {
        let base = journal_base.load(std::sync::atomic::Ordering::Relaxed);
        let counted = Arc::clone(&journal_base);
        // Numbers go on from round to round.
        let journal: Journal = Arc::new(move |line: &str| {
            let mut parts = line.splitn(3, ' ');
            let (verb, local) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            let local: u64 = local.parse().unwrap_or_default();
            counted.fetch_max(base + local + 1, std::sync::atomic::Ordering::Relaxed);
            print(&format!("{verb} {} {}", base + local, parts.next().unwrap_or_default()));
        });
        let mut steps = requests.steps(seed.wrapping_mul(1000) + round, 200);
        for step in &mut steps {
            number += 1;
            step.op.set_stamp(number);
        }
        // The reads of one round are compared with the writes of that round. The reader of the journal checks the rest.
        let before = rt::block_on(whole(&disk));
        let model = Model::new(before);
        let (outcome, back) = run_steps_on_threads(disk, model, &steps, 4, Some(journal));
        disk = back;
        if let Some(wrong) = outcome.wrong_reads.first() {
            eprintln!("{wrong}");
            std::process::exit(4);
        }
    }
    if let Err(error) = rt::block_on(disk.0.close()) {
        eprintln!("closing: {error}");
        std::process::exit(5);
    }
}

async fn whole(disk: &ImageDisk) -> Vec<u8> {
    let (result, bytes) = disk.read(0, cowshed_storage::IoBuf::zeroed(disk.size() as usize)).await;
    if let Err(error) = result {
        eprintln!("reading it all: {error}");
        std::process::exit(6);
    }
    bytes.to_vec()
}
