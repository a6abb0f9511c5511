// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks an image and repairs it.

pub mod report;
mod undo;

use crate::{ImageSpec, JobHandle, in_work};
use cowshed_image::node::ChildRole;
use cowshed_image::node::MappedCheck;
use cowshed_image::{Node, OpenRequest};
use cowshed_offline::check as offline_check;
pub use cowshed_offline::check::CheckReport;
use cowshed_storage::File;
use cowshed_storage::fault::as_metadata;
pub use cowshed_types::Repair;
use cowshed_types::{Error, ErrorKind, Result};
use undo::NewLog;
pub use undo::{UndoReport, undo};

/// Findings that are listed for formats without reference counts.
const MAX_MAPPED_FINDINGS: usize = 1000;

/// The image to check, and the way to do it.
#[derive(Clone, Debug, Default)]
pub struct CheckOptions {
    /// The image.
    pub image: ImageSpec,
    /// The extent of the repair.
    pub repair: Repair,
    /// With [`Repair::All`]: also give up data that can't be reached any more, so that it reads as zeroes.
    pub lossy: bool,
    /// Threads; `None`: one for each core, 8 at most.
    pub threads: Option<usize>,
    /// Memory in bytes, about; images that need more take several passes. `None`: 256 MiB.
    pub memory_bytes: Option<u64>,
    /// Name of a new file for the undo log of the repair.
    pub undo_log: Option<String>,
    /// Only report the effect of the repair.
    pub dry_run: bool,
}

/// A check that was made.
#[derive(Clone, Debug)]
pub struct CheckOutcome {
    /// Name of the image file.
    pub filename: String,
    /// Format of the image.
    pub format: String,
    /// The findings and the changes.
    pub report: CheckReport,
    /// The extent of the repair; for a dry run, of the one that would have been.
    pub repair: Repair,
    /// Nothing was written, with any `repair`.
    pub is_dry_run: bool,
}

impl CheckOutcome {
    /// qemu-img's exit code: 0 clean, 1 parts couldn't be checked, 2 corruptions, 3 leaks only.
    pub fn exit_code(&self) -> u8 {
        match self.report.counters {
            counters if counters.check_errors != 0 => 1,
            counters if counters.corruptions != 0 => 2,
            counters if counters.leaks != 0 => 3,
            _ => 0,
        }
    }
}

/// Checks an image; `None`: its format has nothing to check. Progress counts tables of metadata. The image is opened
/// and locked for the time, for writing when something is to be repaired.
pub async fn run(options: &CheckOptions, job: &JobHandle) -> Result<Option<CheckOutcome>> {
    as_metadata(check_image(options, job)).await
}

async fn check_image(options: &CheckOptions, job: &JobHandle) -> Result<Option<CheckOutcome>> {
    let node = options.image.open(request(options)?.for_check()).await?;
    let findings = match options.repair {
        Repair::None => node.check_mapped(MAX_MAPPED_FINDINGS).await,
        _ if options.dry_run => node.check_mapped(MAX_MAPPED_FINDINGS).await,
        what => node.repair_mapped(what, MAX_MAPPED_FINDINGS).await,
    };
    if let Some(findings) = findings {
        let closed = node.close().await;
        let check = findings?;
        closed?;
        return Ok(check.map(|check| mapped_outcome(&node, check, options)));
    }
    if node.metadata().is_none() {
        return Ok(None);
    }
    let result = match stored_in(&node) {
        Ok(file) => check_file(&file, options, job).await,
        Err(error) => Err(error),
    };
    let closed = node.close().await;
    let report = result.map_err(|error| in_work(error, "Check failed"))?;
    closed?;
    Ok(Some(CheckOutcome {
        filename: options.image.name.clone(),
        format: node.driver_name().to_owned(),
        report,
        repair: options.repair,
        is_dry_run: options.dry_run,
    }))
}

/// Findings in a format without reference counts.
fn mapped_outcome(node: &Node, check: MappedCheck, options: &CheckOptions) -> CheckOutcome {
    let report = CheckReport { counters: check.counters, notes: check.findings, ..CheckReport::default() };
    CheckOutcome {
        filename: options.image.name.clone(),
        format: node.driver_name().to_owned(),
        report,
        repair: options.repair,
        is_dry_run: options.dry_run,
    }
}

fn stored_in(node: &Node) -> Result<File> {
    let file = node.child(ChildRole::File).map(|child| child.storage());
    file.ok_or_else(|| Error::unsupported("the image isn't stored in a file").file(node.filename()))
}

fn request(options: &CheckOptions) -> Result<OpenRequest> {
    let request = options.image.request()?;
    if options.repair == Repair::None || options.dry_run {
        return Ok(request);
    }
    if options.image.force_share {
        return Err(Error::invalid_argument("a repair can't share the image with writers"));
    }
    Ok(request.writable(true))
}

/// Checks the qcow2 image in a file that the caller has locked.
pub async fn check_file(file: &File, options: &CheckOptions, job: &JobHandle) -> Result<CheckReport> {
    let defaults = offline_check::CheckOptions::default();
    let log = match &options.undo_log {
        Some(_) if options.repair == Repair::None || options.dry_run => {
            return Err(Error::invalid_argument("an undo log is for a repair"));
        }
        Some(path) => Some(NewLog::create(path)?),
        None => None,
    };
    let options = offline_check::CheckOptions {
        undo_log: log.as_ref().map(|log| log.file.clone()),
        repair: if options.dry_run { Repair::None } else { options.repair },
        lossy: options.lossy,
        threads: options.threads.unwrap_or_else(default_threads),
        memory_bytes: options.memory_bytes.unwrap_or(defaults.memory_bytes),
        ..defaults
    };
    let watch = |done: u64, total: u64| {
        job.set_progress(done, total);
        !job.is_cancelled()
    };
    job.pause_point().await?;
    let result = offline_check::check(file, &options, &watch).await;
    if let (Err(_), Some(log)) = (&result, &log) {
        log.discard_if_empty();
    }
    let report = result?;
    if job.is_cancelled() {
        return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
    }
    Ok(report)
}

/// More threads than this wait for memory, not for each other.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(8)
}
