// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options of `convert`.

use super::{Taken, in_turns, is_wanted};
use crate::Settings;
use crate::cases::{allocated, command};
use crate::copies::Mounted;
use crate::fixture::{self, Kind};
use crate::measure;
use crate::memory;
use crate::nbd::written_bytes;
use crate::reads::Side;
use crate::table::{Outcome, Row};
use std::path::{Path, PathBuf};

/// The source of a conversion.
#[derive(Clone, Copy)]
enum Source {
    /// A raw file full of data.
    Full,
    /// A smaller one: compression is slow.
    Small,
}

struct Case {
    name: &'static str,
    off: &'static [&'static str],
    on: &'static [&'static str],
    source: Source,
    /// QEMU has the option too.
    has_theirs: bool,
}

const TARGET: &str = "report";
const ZSTD: &str = "compression_type=zstd";

const fn both(name: &'static str, off: &'static [&'static str], on: &'static [&'static str]) -> Case {
    Case { name, off, on, source: Source::Full, has_theirs: true }
}

const fn level(name: &'static str, on: &'static [&'static str], off: &'static [&'static str]) -> Case {
    Case { name, off, on, source: Source::Small, has_theirs: false }
}

const CASES: &[Case] = &[
    both("convert: -m 2 instead of -m 1", &["-m", "1"], &["-m", "2"]),
    both("convert: -m 8 instead of -m 1", &["-m", "1"], &["-m", "8"]),
    both("convert: -W", &[], &["-W"]),
    both("convert: cluster_size=1M instead of 64k", &["-o", "cluster_size=64k"], &["-o", "cluster_size=1M"]),
    both("convert: cluster_size=2M instead of 64k", &["-o", "cluster_size=64k"], &["-o", "cluster_size=2M"]),
    Case {
        name: "convert -c: compression_type=zstd instead of zlib",
        off: &["-c"],
        on: &["-c", "-o", ZSTD],
        source: Source::Small,
        has_theirs: true,
    },
    level("convert -c, zlib: --compression-level 1 instead of 3", &zlib("1"), &zlib("3")),
    level("convert -c, zlib: --compression-level 9 instead of 3", &zlib("9"), &zlib("3")),
    level("convert -c, zstd: --compression-level 3 instead of 1", &zstd("3"), &zstd("1")),
    level("convert -c, zstd: --compression-level 9 instead of 1", &zstd("9"), &zstd("1")),
    level(
        "convert -c, zlib: --compression-window 32k instead of 4k",
        &["-c", "--compression-window", "32k"],
        &["-c", "--compression-window", "4k"],
    ),
];

const fn zlib(level: &'static str) -> [&'static str; 3] {
    ["-c", "--compression-level", level]
}

const fn zstd(level: &'static str) -> [&'static str; 5] {
    ["-c", "-o", ZSTD, "--compression-level", level]
}

/// Cases on a file system that shares clusters.
const SHARED: &[Case] = &[
    both("convert on XFS: -C", &[], &["-C"]),
    Case {
        name: "convert on XFS: --reflink=auto instead of never",
        off: &["--reflink=never"],
        on: &["--reflink=auto"],
        source: Source::Full,
        has_theirs: false,
    },
];

pub fn rows(settings: &Settings) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for case in CASES.iter().filter(|case| is_wanted(settings, case.name)) {
        rows.push(row(settings, case)?);
    }
    let shared: Vec<&Case> = SHARED.iter().filter(|case| is_wanted(settings, case.name)).collect();
    if shared.is_empty() {
        return Ok(rows);
    }
    match Mounted::new(settings) {
        Ok(mounted) => {
            let on_xfs = Settings { folder: mounted.folder.clone(), ..settings.clone() };
            for case in shared {
                rows.push(row(&on_xfs, case)?);
            }
        }
        Err(error) => {
            let skipped = format!("skipped, no XFS here: {error}");
            rows.extend(shared.iter().map(|case| Row::new(case.name, TARGET, Outcome::Skipped(skipped.clone()))));
        }
    }
    Ok(rows)
}

fn row(settings: &Settings, case: &Case) -> Result<Row, String> {
    let source = match case.source {
        Source::Full => fixture::of_kind(settings, Kind::Full)?,
        Source::Small => fixture::full(settings)?,
    };
    let once = |side: Side, is_on: bool| {
        let options = if is_on { case.on } else { case.off };
        once(settings, side, options, &source)
    };
    // The page cache is warm then.
    once(Side::Ours, false)?;
    let (ours, theirs) = in_turns(settings, case.has_theirs, once)?;
    Ok(Row::new(case.name, TARGET, Outcome::Options { ours, theirs, is_command: true }))
}

fn once(settings: &Settings, side: Side, options: &[&str], source: &Path) -> Result<Taken, String> {
    let program = if side == Side::Ours { &settings.cowshed } else { &settings.qemu };
    let output = Output(settings.folder.join("option.out"));
    memory::back(settings.size_mib)?;
    // Writes that others have left aren't this run's.
    rustix::fs::sync();
    let before = written_bytes(source)?;
    let arguments = [&["convert", "-f", "raw", "-O", "qcow2"], options].concat();
    let sample = measure::once(command(program, &arguments, &[source, &output.0]))?;
    let fail = |e: std::io::Error| format!("{}: {e}", output.0.display());
    std::fs::File::open(&output.0).and_then(|file| file.sync_all()).map_err(fail)?;
    Ok(Taken {
        seconds: sample.wall.as_secs_f64(),
        cpu_seconds: sample.cpu.as_secs_f64(),
        peak_bytes: sample.peak_bytes,
        written_bytes: Some((written_bytes(&output.0)? - before) as f64),
        size_bytes: Some(allocated(&output.0)?),
    })
}

/// A file that goes when it is done with.
struct Output(PathBuf);

impl Drop for Output {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
