// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Undo logs of repairs: made for a repair, and used to take it back.

use super::stored_in;
use crate::{ImageSpec, JobHandle};
use cowshed_offline::check as offline_check;
pub use cowshed_offline::check::UndoReport;
use cowshed_storage::{File, OpenOptions, path_of_text};
use cowshed_types::{Error, Result};
use std::path::{Path, PathBuf};

/// An empty log is no longer than this, in bytes: nothing was written to the image.
const EMPTY_LOG_BYTES: u64 = 64;

/// Takes the repair of an image back that is in `log`. Refuses, before anything is written, when the image isn't as the
/// repair left it.
pub async fn undo(image: &ImageSpec, log: &str, job: &JobHandle) -> Result<UndoReport> {
    if image.force_share {
        return Err(Error::invalid_argument("an undo can't share the image with writers"));
    }
    let log = File::open(&path_of_text(log), &OpenOptions { write: true, ..OpenOptions::default() })?;
    let node = image.open(image.request()?.writable(true).for_check()).await?;
    job.pause_point().await?;
    let result = match stored_in(&node) {
        Ok(file) => offline_check::undo(&file, &log).await,
        Err(error) => Err(error),
    };
    let closed = node.close().await;
    let report = result?;
    closed?;
    Ok(report)
}

/// A log that is being written.
pub(super) struct NewLog {
    pub file: File,
    path: PathBuf,
}

impl NewLog {
    /// Creates the file, which must not be there yet: an older log may be the only way back. Its name is durable
    /// before the first change is.
    pub fn create(text: &str) -> Result<NewLog> {
        let failed = |error: std::io::Error| Error::io(&error, "could not create the undo log").file(text);
        let path = path_of_text(text);
        std::fs::File::create_new(&path).map_err(failed)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        std::fs::File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all()).map_err(failed)?;
        let file = File::open(&path, &OpenOptions { write: true, ..OpenOptions::default() })?;
        Ok(NewLog { file, path })
    }

    /// Takes the file away again when a check failed before it changed anything.
    pub fn discard_if_empty(&self) {
        if self.file.len() <= EMPTY_LOG_BYTES {
            // The check's own error is the one to report; a log without changes does no harm.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
