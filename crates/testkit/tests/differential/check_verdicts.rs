// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random damage to every kind of metadata, over the feature matrix: our verdict beside that of the real qemu-img.
//! Where the two differ, the difference is one of a list, and docs/check.md has the reason.

use cowshed_jobs::check::{self, CheckOptions, CheckOutcome, Repair, report};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_offline::check::{Finding, FindingKind};
use cowshed_storage::rt;
use cowshed_testkit::damage::Victim;
use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::random::{Random, seeds};
use cowshed_testkit::specimens::{SPECIMENS, Workbench};
use std::path::Path;

fn run(image: &Path, repair: Repair) -> cowshed_types::Result<CheckOutcome> {
    let image = ImageSpec::file(image.to_str().expect("text path")).format("qcow2");
    let options = CheckOptions { image, repair, threads: Some(1), ..CheckOptions::default() };
    Ok(rt::block_on(check::run(&options, &JobHandle::new()))?.expect("qcow2 is checked"))
}

#[test]
fn random_damage_gets_qemus_verdict() {
    let (bench, tools) = (Workbench::new(), Qemu::all());
    let mut failures = Vec::new();
    for base in SPECIMENS {
        let image = bench.base(base.name);
        let sites = Victim::open(&image).sites();
        for seed in seeds(12) {
            let copy = bench.copy(&image, "damaged");
            let mut random = Random::new(seed.wrapping_mul(0x9e37).wrapping_add(base.name.len() as u64));
            let victim = Victim::open(&copy);
            let done: Vec<String> = (0..1 + seed % 2).map(|_| victim.harm(&sites, &mut random)).collect();
            drop(victim);
            for qemu in &tools {
                if let Err(why) = compare(qemu, &copy) {
                    let version = qemu.version();
                    failures.push(format!("{} seed {seed}, QEMU {version:?}: {}\n{why}", base.name, done.join("; ")));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} differences\n\n{}", failures.len(), failures.join("\n\n"));
}

/// The same exit code, or a difference that docs/check.md lists.
fn compare(qemu: &Qemu, image: &Path) -> Result<(), String> {
    let theirs = qemu.check(image, "qcow2");
    let told = format!("qemu {} {}{}", theirs.code, theirs.json, head(&theirs.stderr));
    let ours = match run(image, Repair::None) {
        Ok(ours) => ours,
        // A header that breaks a rule of the format: QEMU goes on with some of them, and mostly finds errors.
        Err(_) if theirs.code != 0 => return Ok(()),
        Err(error) if REFUSED_HERE.iter().any(|part| error.to_string().contains(part)) => return Ok(()),
        Err(error) => return Err(format!("ours: {error}\n{told}")),
    };
    let lines = head(&report::finding_lines(&ours).collect::<Vec<_>>().join("\n"));
    let what = format!("ours {} {:?}\n{lines}\n{told}", ours.exit_code(), ours.report.counters);
    match (ours.exit_code(), theirs.code) {
        (ours, theirs) if i32::from(ours) == theirs => Ok(()),
        // Where QEMU stops because it can't read refcounts or snapshots, we name the missing part.
        (2, 1) => Ok(()),
        (0 | 3, 1) if OPENS_MORE.iter().any(|part| theirs.stderr.contains(part)) => Ok(()),
        (2, _) if ours.report.findings.iter().any(only_ours) => Ok(()),
        _ => Err(what),
    }
}

/// QEMU opens the backing file and needs the key of an encrypted image. It judges the place of a snapshot table that
/// isn't there, and of an empty backing file name. It has no extra data of bitmaps.
const OPENS_MORE: [&str; 5] = [
    "backing file",
    "encrypt.key-secret",
    "snapshot table offset invalid",
    "Header extension too large",
    "Bitmap extra data is not supported",
];

/// Rules for the header that QEMU doesn't hold an image to.
const REFUSED_HERE: [&str; 3] =
    ["bitmaps bit set without", "contains a NUL byte", "header length is not a multiple of 8"];

/// True for a fault that QEMU doesn't look for.
fn only_ours(finding: &Finding) -> bool {
    match finding.kind {
        FindingKind::DataFileOffset { .. } => true,
        FindingKind::Overlap { .. } => true,
        // Bit 0 in version 2: neither program can read such a cluster.
        FindingKind::ReservedL2 { entry } => entry & 1 != 0,
        _ => false,
    }
}

/// The first lines: one broken table makes hundreds.
fn head(text: &str) -> String {
    text.lines().take(5).collect::<Vec<_>>().join("\n")
}
