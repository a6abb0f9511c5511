// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands on large images beside qemu-img's: map, measure and compare, commit and rebase.

use crate::Settings;
use crate::cases::{command, row, terabyte};
use crate::fixture;
use crate::measure::alternate;
use crate::memory;
use crate::table::{Outcome, Row};
use cowshed_testkit::bigimage::{self, Placement};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// `map` of large images, in order and scattered.
pub fn map(settings: &Settings) -> Result<Vec<Row>, String> {
    let images = [
        ("map, 1 TiB allocated in order", terabyte(settings, Placement::Contiguous)?),
        ("map, 64 GiB allocated, scattered", scattered(settings)?),
    ];
    images
        .iter()
        .map(|(name, image)| both(settings, name, "≥ 4×", &["map", "--output=json", "-f", "qcow2"], &[image]))
        .collect()
}

/// Every cluster of 64 GiB far from the next: a million lines of output.
pub fn scattered(settings: &Settings) -> Result<PathBuf, String> {
    let path = settings.folder.join("scattered-64g.qcow2");
    if !path.exists() {
        let partial = path.with_extension("partial");
        bigimage::build(&partial, 64 << 30, 16, Placement::Scattered).map_err(|error| error.to_string())?;
        std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(path)
}

/// `measure` of 1 TiB of metadata.
pub fn measure(settings: &Settings) -> Result<Vec<Row>, String> {
    let image = terabyte(settings, Placement::Contiguous)?;
    let how = ["measure", "-f", "qcow2", "-O", "qcow2"];
    Ok(vec![both(settings, "measure, 1 TiB allocated in order", "≥ 1.5×", &how, &[&image])?])
}

/// `compare` of a raw and a qcow2 image with the same content: out of the page cache, then past it.
pub fn compare(settings: &Settings) -> Result<Vec<Row>, String> {
    let raw = fixture::half_full(settings)?;
    let image = fixture::converted(settings, &raw, "half-full", &[])?;
    let rows: [(&str, &'static str, &[&str]); 2] = [
        ("compare, raw and qcow2, half full", "≥ 1.5×", &[]),
        ("compare, the same past the page cache (`-T none`)", "the disk's rate", &["-T", "none"]),
    ];
    rows.iter()
        .map(|(name, target, more)| {
            let how: Vec<&str> = ["compare", "-f", "raw", "-F", "qcow2"].iter().chain(*more).copied().collect();
            let recipe = |program: &Path| {
                if more.is_empty() {
                    warm(&raw)?;
                    warm(&image)?;
                }
                Ok(command(program, &how, &[&raw, &image]))
            };
            let pairs = alternate(settings.rounds, &|| recipe(&settings.cowshed), &|| recipe(&settings.qemu))?;
            Ok(row(name, target, Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 }))
        })
        .collect()
}

/// Reads a file, so that the page cache has it, or its end where memory is too small for it.
fn warm(path: &Path) -> Result<(), String> {
    let mut file = std::fs::File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut buf = vec![0; 1 << 20];
    while file.read(&mut buf).map_err(|e| format!("{}: {e}", path.display()))? > 0 {}
    Ok(())
}

fn both(settings: &Settings, name: &str, target: &'static str, how: &[&str], files: &[&Path]) -> Result<Row, String> {
    let pairs = alternate(settings.rounds, &|| Ok(command(&settings.cowshed, how, files)), &|| {
        Ok(command(&settings.qemu, how, files))
    })?;
    Ok(row(name, target, Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 }))
}

/// `commit` of an overlay with a quarter of the disk into its backing file. Then only its work of the processor:
/// nothing is flushed, and the overlay's space isn't given back. Both tools wait for the disk as long for these.
pub fn commit(settings: &Settings) -> Result<Vec<Row>, String> {
    let layers = Layers::of(settings)?;
    let rows: [(&str, &'static str, &[&str]); 2] = [
        ("commit, a quarter of the disk", "≥ 1.5× where CPU-bound", &[]),
        ("commit, only the copying (`-d -t unsafe`)", "≥ 1.5×", &["-d", "-t", "unsafe"]),
    ];
    rows.iter()
        .map(|(name, target, more)| {
            let how: Vec<&str> = ["commit", "-q", "-f", "qcow2"].iter().chain(*more).copied().collect();
            let recipe = |program: &Path| {
                layers.refresh(settings, Base::Written)?;
                Ok(command(program, &how, &[&layers.overlay]))
            };
            let pairs = alternate(settings.rounds, &|| recipe(&settings.cowshed), &|| recipe(&settings.qemu))?;
            Ok(row(name, target, Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 }))
        })
        .collect()
}

/// `rebase` of the same overlay to no backing file: its ranges there are copied.
pub fn rebase(settings: &Settings) -> Result<Vec<Row>, String> {
    let layers = Layers::of(settings)?;
    let name = "rebase to no backing file";
    let recipe = |program: &Path| {
        layers.refresh(settings, Base::Read)?;
        Ok(command(program, &["rebase", "-f", "qcow2", "-b", ""], &[&layers.overlay]))
    };
    let pairs = alternate(settings.rounds, &|| recipe(&settings.cowshed), &|| recipe(&settings.qemu))?;
    Ok(vec![row(name, "≥ 1.5× where CPU-bound", Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 })])
}

/// The use of the backing file by a command.
#[derive(Clone, Copy)]
enum Base {
    Read,
    Written,
}

/// A half-full base and an overlay that has written a quarter of the disk, kept to be copied for each run.
struct Layers {
    base: PathBuf,
    kept: PathBuf,
    work: PathBuf,
    overlay: PathBuf,
}

impl Layers {
    fn of(settings: &Settings) -> Result<Layers, String> {
        let base = fixture::converted(settings, &fixture::half_full(settings)?, "half-full", &[])?;
        let kept = settings.folder.join(format!("overlay-{}.qcow2", settings.size_mib));
        let work = settings.folder.join("work-base.qcow2");
        let layers = Layers { base, kept, work, overlay: settings.folder.join("work-overlay.qcow2") };
        if !layers.kept.exists() {
            let started = Instant::now();
            layers.link_base()?;
            let partial = layers.kept.with_extension("partial");
            let mut create = Command::new(&settings.qemu);
            create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "work-base.qcow2"]).arg(&partial);
            done(&mut create)?;
            let mut write = Command::new(settings.qemu.with_file_name("qemu-io"));
            write.arg("-f").arg("qcow2");
            for piece in 0..settings.size_mib / 32 {
                write.args(["-c", &format!("write -P {} {}M 8M", piece % 250 + 1, piece * 32)]);
            }
            done(write.arg(&partial))?;
            std::fs::rename(&partial, &layers.kept).map_err(|e| e.to_string())?;
            fixture::made(&layers.kept, started);
        }
        Ok(layers)
    }

    /// The base itself under the name of its copy.
    fn link_base(&self) -> Result<(), String> {
        let _ = std::fs::remove_file(&self.work);
        std::fs::hard_link(&self.base, &self.work).map_err(|e| format!("{}: {e}", self.work.display()))
    }

    /// Fresh images in the place of those that the last run changed, complete on the disk: no run waits for writing them.
    fn refresh(&self, settings: &Settings, base: Base) -> Result<(), String> {
        let copy = |from: &Path, to: &Path| {
            // The file goes first, to free its space: there may be no room for both.
            let _ = std::fs::remove_file(to);
            let copied = std::fs::copy(from, to).and_then(|_| std::fs::File::open(to)?.sync_all());
            copied.map_err(|e| format!("{}: {e}", to.display()))
        };
        match base {
            Base::Written => copy(&self.base, &self.work)?,
            Base::Read => self.link_base()?,
        }
        copy(&self.kept, &self.overlay)?;
        memory::back(settings.size_mib)
    }
}

impl Drop for Layers {
    fn drop(&mut self) {
        for path in [&self.work, &self.overlay] {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Runs a command to its end; the error of a failure has its output.
pub fn done(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("could not run {command:?}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}
