// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A short run of the stress program on this very build; `scripts/stress` runs it for as long as one likes.

use super::process::COWSHED;
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::random::for_each_seed;
use cowshed_testkit::stress::{Config, run};

#[test]
fn random_commands_and_kills_lose_no_byte() {
    for_each_seed(2, |seed| {
        let folder = temp_dir();
        let config = Config {
            program: COWSHED.into(),
            folder: folder.path().to_owned(),
            seed,
            seconds: 10,
            disks: 2,
            connections: 3,
        };
        match run(&config, |_| {}) {
            Ok(report) => assert!(report.requests > 100 && report.images > 0, "{} requests", report.requests),
            Err(wrong) => panic!("{wrong}; images and log stay in {}", folder.keep().display()),
        }
    });
}
