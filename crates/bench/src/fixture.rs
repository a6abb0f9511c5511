// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The images that are measured, made once and kept in the folder of images.

use crate::Settings;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// A raw image of `size_mib`, in turns 8 MiB of real bytes and 8 MiB of hole.
pub fn half_full(settings: &Settings) -> Result<PathBuf, String> {
    raw(settings, &format!("half-full-{}.raw", settings.size_mib), settings.size_mib, |mib| mib / 8 % 2 == 0)
}

/// A raw image full of real bytes, an eighth as large as the others: compression is slow.
pub fn full(settings: &Settings) -> Result<PathBuf, String> {
    let size_mib = settings.size_mib / 8;
    raw(settings, &format!("full-{size_mib}.raw"), size_mib, |_| true)
}

/// The layout of data and holes in an image.
#[derive(Clone, Copy)]
pub enum Kind {
    /// No holes.
    Full,
    /// A MiB of data in 64.
    Sparse,
    /// In turns 64 KiB of data and of hole.
    HoleRich,
}

/// Their names.
pub const KINDS: &[(&str, Kind)] = &[("full", Kind::Full), ("sparse", Kind::Sparse), ("hole-rich", Kind::HoleRich)];

/// A raw image of half `size_mib`.
pub fn of_kind(settings: &Settings, kind: Kind) -> Result<PathBuf, String> {
    let size_mib = settings.size_mib / 2;
    match kind {
        Kind::Full => raw(settings, &format!("copy-full-{size_mib}.raw"), size_mib, |_| true),
        Kind::Sparse => raw(settings, &format!("copy-sparse-{size_mib}.raw"), size_mib, |mib| mib % 64 == 0),
        Kind::HoleRich => {
            let path = settings.folder.join(format!("copy-hole-rich-{size_mib}.raw"));
            if path.exists() {
                return Ok(path);
            }
            let fail = |e: std::io::Error| format!("{}: {e}", path.display());
            let partial = path.with_extension("partial");
            let file = File::create(&partial).map_err(fail)?;
            file.set_len(size_mib * MIB).map_err(fail)?;
            let mut bytes = RealBytes::new()?;
            let mut buffer = vec![0; 64 << 10];
            for pair in 0..size_mib * MIB / (128 << 10) {
                bytes.fill(&mut buffer)?;
                file.write_all_at(&buffer, pair * (128 << 10)).map_err(fail)?;
            }
            file.sync_all().map_err(fail)?;
            std::fs::rename(&partial, &path).map_err(fail)?;
            Ok(path)
        }
    }
}

/// A sparse raw image of four times `size_mib`: the start of a process counts for less there.
pub fn large_sparse(settings: &Settings) -> Result<PathBuf, String> {
    let size_mib = 4 * settings.size_mib;
    raw(settings, &format!("copy-sparse-{size_mib}.raw"), size_mib, |mib| mib % 64 == 0)
}

/// `source` (raw) converted by qemu-img with `options`, so that no side reads its own writes.
pub fn converted(settings: &Settings, source: &Path, name: &str, options: &[&str]) -> Result<PathBuf, String> {
    let path = settings.folder.join(format!("{name}-{}.qcow2", settings.size_mib));
    if !path.exists() {
        let started = Instant::now();
        let partial = path.with_extension("partial");
        let mut command = Command::new(&settings.qemu);
        command.args(["convert", "-f", "raw", "-O", "qcow2"]).args(options).arg(source).arg(&partial);
        let output = command.output().map_err(|e| format!("could not run {command:?}: {e}"))?;
        if !output.status.success() {
            return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
        made(&path, started);
    }
    Ok(path)
}

/// Prints the time that an image took: large ones take minutes.
pub fn made(path: &Path, started: Instant) {
    eprintln!("made {} in {:.1} s", path.display(), started.elapsed().as_secs_f64());
}

fn raw(settings: &Settings, name: &str, size_mib: u64, is_data: impl Fn(u64) -> bool) -> Result<PathBuf, String> {
    let path = settings.folder.join(name);
    if path.exists() {
        return Ok(path);
    }
    let started = Instant::now();
    let partial = path.with_extension("partial");
    let fail = |e: std::io::Error| format!("{}: {e}", partial.display());
    let file = File::create(&partial).map_err(fail)?;
    file.set_len(size_mib * MIB).map_err(fail)?;
    let mut bytes = RealBytes::new()?;
    let mut buffer = vec![0; MIB as usize];
    for mib in (0..size_mib).filter(|mib| is_data(*mib)) {
        bytes.fill(&mut buffer)?;
        file.write_all_at(&buffer, mib * MIB).map_err(fail)?;
    }
    file.sync_all().map_err(fail)?;
    std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    made(&path, started);
    Ok(path)
}

/// The programs, libraries and texts of the running system, one after the other and again from the start. Disks of
/// virtual machines are full of them.
struct RealBytes {
    files: Vec<PathBuf>,
    next: usize,
    current: Option<File>,
}

impl RealBytes {
    fn new() -> Result<Self, String> {
        let mut files = Vec::new();
        for folder in ["/usr/bin", "/usr/lib", "/usr/share"] {
            collect(Path::new(folder), &mut files);
        }
        if files.is_empty() {
            return Err("found no files to fill images with".into());
        }
        // Spread over the kinds of files, the same way in each run.
        files.sort();
        let stride = (files.len() / 64).max(1);
        let spread = (0..stride).flat_map(|first| files.iter().skip(first).step_by(stride).cloned()).collect();
        Ok(RealBytes { files: spread, next: 0, current: None })
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), String> {
        let (mut filled, mut failures) = (0, 0);
        while filled < buffer.len() {
            let Some(file) = &mut self.current else {
                self.current = File::open(&self.files[self.next % self.files.len()]).ok();
                self.next += 1;
                failures += 1;
                if failures > 10 * self.files.len() {
                    return Err("the files to fill images with can't be read".into());
                }
                continue;
            };
            match file.read(&mut buffer[filled..]) {
                Ok(count) if count > 0 => filled += count,
                _ => self.current = None,
            }
        }
        Ok(())
    }
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    // Folders that can't be read have nothing for us.
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => collect(&entry.path(), files),
            Ok(kind) if kind.is_file() && entry.metadata().is_ok_and(|meta| meta.len() >= 16384) => {
                files.push(entry.path());
            }
            _ => {}
        }
    }
}
