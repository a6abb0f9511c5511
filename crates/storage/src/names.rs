// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Paths and the texts that stand for them, see [`cowshed_types::text_of_name`].

use crate::rt;
use cowshed_types::{Errno, Error, Result, name_of_text, text_of_name};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The path that a name means, whatever bytes it holds.
pub fn path_of_text(text: &str) -> PathBuf {
    PathBuf::from(OsString::from_vec(name_of_text(text).into_owned()))
}

/// The text of a path: nothing is lost.
pub fn text_of_path(path: &Path) -> String {
    text_of_name(path.as_os_str().as_bytes()).into_owned()
}

/// Makes the name of a new file durable: a sync of the file alone doesn't promise that it is found after a power cut.
/// Where the folder can't be opened or synced at all (no right to, a file system without it) nothing is done.
///
/// # Errors
/// An I/O error of the folder's disk.
pub async fn sync_folder_of(path: &Path) -> Result<()> {
    if rt::current_simulation().is_some_and(|simulation| simulation.sync_folder()) {
        return Ok(());
    }
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = real.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
    let name = text_of_path(&folder);
    let synced = rt::run_on_cpu_pool(move || std::fs::File::open(&folder).and_then(|folder| folder.sync_all())).await;
    match synced.map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno)) {
        Err(errno @ (Errno::EIO | Errno::ENOSPC)) => {
            Err(Error::os(errno, "could not make the names in the folder durable").file(name))
        }
        _ => Ok(()),
    }
}
