// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether files are still those that were looked at. A disk of a package is read twice: for its digest, and for its copy.

use cowshed_types::{Error, ErrorKind, Result};
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The place of a file, its length, and the times of its changes: each change of the file makes another stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    place: (u64, u64),
    len: u64,
    times: [(i64, i64); 2],
}

impl Stamp {
    pub(crate) fn of(about: &Metadata) -> Stamp {
        let times = [(about.mtime(), about.mtime_nsec()), (about.ctime(), about.ctime_nsec())];
        Stamp { place: (about.dev(), about.ino()), len: about.len(), times }
    }
}

/// Files as they were.
#[derive(Clone, Debug)]
pub struct Stamps(Vec<(PathBuf, Stamp)>);

impl Stamps {
    pub(crate) fn new(files: Vec<(PathBuf, Stamp)>) -> Stamps {
        Stamps(files)
    }

    /// Refuses a file that isn't as it was.
    ///
    /// # Errors
    /// For such a file, and for one that can't be looked at.
    pub fn check(&self) -> Result<()> {
        for (path, stamp) in &self.0 {
            let named = |error: Error| error.file(path.display().to_string());
            let about = fs::metadata(path).map_err(|error| named(Error::io(&error, "could not look at")))?;
            if Stamp::of(&about) != *stamp {
                let message = "the package was changed while its disk was read: the target isn't that disk";
                return Err(named(Error::new(ErrorKind::InvalidImage, message)));
            }
        }
        Ok(())
    }
}
