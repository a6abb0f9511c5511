// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks and repairs qcow2 images: the reading and writing around `cowshed_qcow2::check`.
//!
//! It works on the bare file of a closed image; the caller holds the locks. Nothing of the engine is used, so a bug
//! there can't hide itself here.

mod journal;
mod lossy;
mod metadata;
mod rebuild;
mod relocate;
mod repair;
mod room;
mod session;
mod snapshots;
mod stale;
mod sweep;
mod undo;
mod undo_log;
mod worker_threads;

use crate::ProgressFn;
use cowshed_qcow2::check::Ledger;
pub use cowshed_qcow2::check::{CheckedStructure, Finding, FindingKind, Outlook, Remedy, Severity};
use cowshed_storage::{CacheMode, File};
use cowshed_types::{CheckCounters, Error, ErrorKind, Repair, Result};
use journal::RepairLog;
pub use repair::REBUILT;
use session::CheckSession;
use std::sync::OnceLock;
pub use undo::{UndoReport, undo};

/// The settings of a check.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// The extent of the repair; the file must be writable for one.
    pub repair: Repair,
    /// With [`Repair::All`]: also give up data that can't be reached any more, so that it reads as zeroes.
    pub lossy: bool,
    /// Threads that read and count. 1: everything on the caller's thread.
    pub threads: usize,
    /// Memory in bytes, about: lists of tables, buffers, and reference counts, two bytes for each host cluster. Images
    /// that need more take several passes.
    pub memory_bytes: u64,
    /// Findings that are kept; more are only counted.
    pub findings_max: usize,
    /// An empty file, open for writing, for the log that takes the repair back with [`undo`].
    pub undo_log: Option<File>,
}

impl Default for CheckOptions {
    fn default() -> Self {
        CheckOptions {
            repair: Repair::None,
            lossy: false,
            threads: 1,
            memory_bytes: 256 << 20,
            findings_max: 100_000,
            undo_log: None,
        }
    }
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// qemu-img's counters, as they are after the repair.
    pub counters: CheckCounters,
    /// The present findings.
    pub findings: Vec<Finding>,
    /// The findings that the repair has ended.
    pub repaired: Vec<Finding>,
    /// Findings that were counted but not kept.
    pub omitted: u64,
    /// The reasons for which findings weren't repaired, in words.
    pub notes: Vec<String>,
    /// True when the repair wrote anything.
    pub changed: bool,
    /// The possible effect of a repair on the findings before it.
    pub outlook: Outlook,
}

impl CheckReport {
    /// True without corruptions, leaks and check errors.
    pub fn is_clean(&self) -> bool {
        let CheckCounters { corruptions, leaks, check_errors, .. } = self.counters;
        corruptions == 0 && leaks == 0 && check_errors == 0
    }
}

/// Checks the image in `file` and repairs it by the options. An error means that the check couldn't be made; the writes
/// of a repair until then leave the image no worse than it was.
///
/// A repair of a file with direct I/O goes by way of the page cache if the file ends, or may end, within a sector. No
/// other operation may run on the file then.
pub async fn check(file: &File, options: &CheckOptions, watch: ProgressFn<'_>) -> Result<CheckReport> {
    let named = |error: Error| error.file(file.name());
    if options.repair != Repair::None && !file.is_writable() {
        return Err(named(Error::new(ErrorKind::ReadOnly, "a repair needs a writable file")));
    }
    let mode = file.cache_mode();
    let result = check_file(file, options, watch).await;
    if file.cache_mode() != mode {
        file.set_cache_mode(mode)?;
    }
    result
}

/// Switches direct I/O off before a repair of a file that ends within a sector, or may do so. A direct write to the
/// last sector makes the file longer for a moment. A power cut then would create the cluster of an entry past the end,
/// which the check doesn't count.
fn leave_odd_ends_to_the_cache(session: &CheckSession<'_>) {
    let (file, sector) = (session.file, session.file.alignment().offset);
    let may_be_odd = !file.len().is_multiple_of(sector) || session.geometry.cluster_size() < sector;
    let mode = file.cache_mode();
    if mode.direct
        && may_be_odd
        && let Err(error) = file.set_cache_mode(CacheMode { direct: false, ..mode })
    {
        // A file with faults stays as it is.
        tracing::debug!("{}: {error}", file.name());
    }
}

/// The end in bytes of the last cluster that has a count, or that something refers to without one. `u64::MAX` where that
/// can't be found out.
pub async fn end_of_use(file: &File) -> u64 {
    let options = CheckOptions { findings_max: 1, ..CheckOptions::default() };
    match check(file, &options, &|_, _| true).await {
        Ok(report) if report.counters.check_errors == 0 => report.counters.image_end_offset,
        _ => u64::MAX,
    }
}

async fn check_file(file: &File, options: &CheckOptions, watch: ProgressFn<'_>) -> Result<CheckReport> {
    let named = |error: Error| error.file(file.name());
    let mut ledger = Ledger::new(options.findings_max);
    let journal = match &options.undo_log {
        Some(log) if options.repair != Repair::None => Some(RepairLog::start(log, file).await.map_err(named)?),
        _ => None,
    };
    let mut session = CheckSession::load(file, options, watch, journal.as_ref(), &mut ledger).await.map_err(named)?;
    let overlaps = session.survey(&mut ledger).await.map_err(named)?;
    let outlook = session.outlook(&ledger).await.map_err(named)?;
    if options.repair == Repair::None {
        return Ok(CheckReport { outlook, ..report_of(ledger) });
    }
    leave_odd_ends_to_the_cache(&session);
    let mut report = repair::run(session, ledger, &overlaps).await.map_err(named)?;
    if let Some(journal) = &journal {
        journal.finish(file.len()).await?;
    }
    report.outlook = outlook;
    Ok(report)
}

fn report_of(ledger: Ledger) -> CheckReport {
    let Ledger { counters, mut findings, omitted, .. } = ledger;
    // In place: a stable sort takes as much memory again.
    findings.sort_unstable_by_key(Finding::order);
    CheckReport { counters, findings, omitted, ..CheckReport::default() }
}

/// Told of repairs of every image that was not closed cleanly.
static PRINTER: OnceLock<fn(&File, &CheckReport)> = OnceLock::new();

/// Passes every image of this process that [`recover_dirty`] looked at to `print`. The first call counts.
pub fn print_recoveries(print: fn(&File, &CheckReport)) {
    let _ = PRINTER.set(print);
}

/// Restores an image whose dirty bit is set, before anything else reads its refcounts, and clears the bit. Fails when
/// a corruption remains: the image then stays dirty and must not be written to.
pub async fn recover_dirty(file: &File) -> Result<()> {
    let options = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
    let report = check(file, &options, &|_, _| true).await?;
    if let Some(print) = PRINTER.get() {
        print(file, &report);
    }
    if report.counters.corruptions == 0 && report.counters.check_errors == 0 {
        return Ok(());
    }
    let why = report.notes.first().cloned().or_else(|| report.findings.first().map(Finding::to_string));
    let message = format!("image was not closed cleanly and can't be recovered: {}", why.unwrap_or_default());
    Err(Error::invalid_image("incompatible_features", "dirty", message).file(file.name()))
}
