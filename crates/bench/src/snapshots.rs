// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots of a large image: every guest cluster of 200 GiB is mapped.

use crate::Settings;
use crate::measure::alternate;
use crate::table::{Outcome, Row};
use cowshed_testkit::bigimage::{self, Placement};
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = 200 << 30;
const CLUSTER_BITS: u32 = 16;
const TARGET: &str = "≥ 2×";

/// Taking, applying and deleting.
pub fn run(settings: &Settings) -> Result<Vec<Row>, String> {
    let plain = image(settings, "mapped-200g.qcow2", None)?;
    let taken = image(settings, "mapped-200g-taken.qcow2", Some(&plain))?;
    let mut rows = Vec::new();
    for (name, source, option) in [
        ("snapshot -c, 200 GiB mapped", &plain, "-c"),
        ("snapshot -a, 200 GiB mapped", &taken, "-a"),
        ("snapshot -d, 200 GiB mapped", &taken, "-d"),
    ] {
        let work = settings.folder.join("snapshot-work.qcow2");
        let recipe = |program: &Path| {
            copy(source, &work)?;
            let mut command = Command::new(program);
            command.args(["snapshot", "-q", option, "one"]).arg(&work);
            Ok(command)
        };
        let pairs = alternate(settings.rounds, &|| recipe(&settings.cowshed), &|| recipe(&settings.qemu))?;
        std::fs::remove_file(&work).map_err(|e| format!("{}: {e}", work.display()))?;
        rows.push(Row::new(name, TARGET, Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 }));
    }
    Ok(rows)
}

/// The image, made once; with `of` a copy of that one in which qemu-img has taken a snapshot.
fn image(settings: &Settings, name: &str, of: Option<&Path>) -> Result<PathBuf, String> {
    let path = settings.folder.join(name);
    if path.exists() {
        return Ok(path);
    }
    let partial = path.with_extension("partial");
    match of {
        None => bigimage::build(&partial, SIZE, CLUSTER_BITS, Placement::Contiguous).map_err(|e| e.to_string())?,
        Some(source) => {
            copy(source, &partial)?;
            run_to_end(Command::new(&settings.qemu).args(["snapshot", "-c", "one"]).arg(&partial))?;
        }
    }
    std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

/// A copy with the same holes, on the disk and in the page cache.
fn copy(source: &Path, target: &Path) -> Result<(), String> {
    run_to_end(Command::new("cp").args(["--sparse=always", "--reflink=never"]).arg(source).arg(target))?;
    let file = std::fs::File::open(target).map_err(|e| format!("{}: {e}", target.display()))?;
    file.sync_all().map_err(|e| format!("{}: {e}", target.display()))
}

fn run_to_end(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("could not run {command:?}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}
