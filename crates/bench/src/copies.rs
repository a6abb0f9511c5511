// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Conversions that only copy: full, sparse and hole-rich images, here and on XFS, where clusters can be shared.

use crate::Settings;
use crate::cases::{command, convert, row};
use crate::fixture;
use crate::large::done;
use crate::measure::alternate;
use crate::memory;
use crate::table::{Outcome, Row};
use std::path::{Path, PathBuf};
use std::process::Command;

const TO_QCOW2: &[&str] = &["-f", "raw", "-O", "qcow2"];
const TO_RAW: &[&str] = &["-f", "qcow2", "-O", "raw"];
const QCOW2: &[&str] = &["-f", "qcow2", "-O", "qcow2"];
const RAW: &[&str] = &["-f", "raw", "-O", "raw"];
const TARGET: &str = "≥ 1.2×";
const AS_CP: &str = "as fast as cp";
/// Memory that is there for a run of milliseconds beside `cp`, whichever pages it is given, see [`memory::back`].
const BACKED_MIB: u64 = 2048;

/// On the disk of the images.
pub fn here(settings: &Settings) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for (name, kind) in fixture::KINDS {
        let raw = fixture::of_kind(settings, *kind)?;
        let image = fixture::converted(settings, &raw, name, &[])?;
        rows.push(convert(settings, &format!("{name}: raw → qcow2"), TARGET, &raw, TO_QCOW2, TO_QCOW2)?);
        rows.push(convert(settings, &format!("{name}: qcow2 → raw"), TARGET, &image, TO_RAW, TO_RAW)?);
        rows.push(convert(settings, &format!("{name}: qcow2 → qcow2"), TARGET, &image, QCOW2, QCOW2)?);
        rows.push(beside_cp(settings, &format!("{name}: raw → raw, theirs is cp"), &raw, &[])?);
    }
    let large = fixture::large_sparse(settings)?;
    rows.push(beside_cp(settings, "sparse, eight times as large: raw → raw, theirs is cp", &large, &[])?);
    Ok(rows)
}

/// On a fresh XFS in a file; root only.
pub fn xfs(settings: &Settings) -> Result<Vec<Row>, String> {
    let mounted = Mounted::new(settings)?;
    let on_xfs = Settings { folder: mounted.folder.clone(), ..settings.clone() };
    let mut rows = Vec::new();
    for (name, kind) in &fixture::KINDS[..1] {
        let raw = fixture::of_kind(&on_xfs, *kind)?;
        let image = fixture::converted(&on_xfs, &raw, name, &[])?;
        rows.push(convert(&on_xfs, &format!("XFS, {name}: raw → qcow2"), TARGET, &raw, TO_QCOW2, TO_QCOW2)?);
        rows.push(convert(&on_xfs, &format!("XFS, {name}: qcow2 → raw"), TARGET, &image, TO_RAW, TO_RAW)?);
        rows.push(convert(&on_xfs, &format!("XFS, {name}: qcow2 → qcow2"), TARGET, &image, QCOW2, QCOW2)?);
        rows.push(convert(&on_xfs, &format!("XFS, {name}: raw → raw"), TARGET, &raw, RAW, RAW)?);
        // Neither reads anything.
        rows.push(beside_cp(&on_xfs, &format!("XFS, {name}: raw → raw with -C, theirs is cp"), &raw, &["-C"])?);
        let unread = |arguments: &[&'static str]| [arguments, &["-C"]].concat();
        let (to_raw, to_qcow2) = (unread(TO_RAW), unread(TO_QCOW2));
        rows.push(convert(
            &on_xfs,
            &format!("XFS, {name}: qcow2 → raw, both with -C"),
            TARGET,
            &image,
            &to_raw,
            &to_raw,
        )?);
        rows.push(convert(
            &on_xfs,
            &format!("XFS, {name}: raw → qcow2, both with -C"),
            TARGET,
            &raw,
            &to_qcow2,
            &to_qcow2,
        )?);
    }
    Ok(rows)
}

fn beside_cp(settings: &Settings, name: &str, source: &Path, more: &[&str]) -> Result<Row, String> {
    let (ours, theirs) = (settings.folder.join("ours.out"), settings.folder.join("theirs.out"));
    let clear = || {
        for output in [&ours, &theirs].into_iter().filter(|output| output.exists()) {
            std::fs::remove_file(output).map_err(|e| format!("{}: {e}", output.display()))?;
        }
        // Writes and freed space of the run before aren't this one's to wait for.
        done(&mut Command::new("sync"))?;
        memory::back(BACKED_MIB.max(3 * settings.size_mib / 2))
    };
    let pairs = alternate(
        settings.rounds,
        &|| clear().map(|()| command(&settings.cowshed, &[&["convert"], RAW, more].concat(), &[source, &ours])),
        &|| clear().map(|()| command(Path::new("cp"), &["--reflink=auto"], &[source, &theirs])),
    )?;
    clear()?;
    Ok(row(name, AS_CP, Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 }))
}

/// A file system in a file, unmounted when dropped.
pub struct Mounted {
    /// The mount point.
    pub folder: PathBuf,
    file: PathBuf,
}

impl Mounted {
    /// A fresh XFS that shares clusters; root only.
    pub fn new(settings: &Settings) -> Result<Mounted, String> {
        let mounted = Mounted { folder: settings.folder.join("xfs"), file: settings.folder.join("xfs.image") };
        let fail = |e: std::io::Error| format!("{}: {e}", mounted.file.display());
        std::fs::create_dir_all(&mounted.folder).map_err(fail)?;
        let file = std::fs::File::create(&mounted.file).map_err(fail)?;
        file.set_len((settings.size_mib * 6).max(1024) << 20).map_err(fail)?;
        done(Command::new("mkfs.xfs").args(["-q", "-f", "-m", "reflink=1"]).arg(&mounted.file))?;
        done(Command::new("mount").args(["-o", "loop"]).args([&mounted.file, &mounted.folder]))?;
        Ok(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A file that can't be removed is left in the folder of images; the next run makes it anew.
        let _ = done(Command::new("umount").arg(&self.folder));
        let _ = std::fs::remove_file(&self.file);
        let _ = std::fs::remove_dir(&self.folder);
    }
}
