// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The files that a creation makes, and how they go again when it fails.

use cowshed_storage::{File, FileIdentity};
use cowshed_types::Error;
use std::io;
use std::path::{Path, PathBuf};

/// The words before the error of a job whose target stays, with a part of its contents or with none.
pub const INCOMPLETE: &str = "the target is incomplete";

/// Files that were not there before. They stay, unless [`Created::remove`] takes them away.
#[derive(Clone, Debug, Default)]
pub struct Created {
    files: Vec<(PathBuf, FileIdentity)>,
}

impl Created {
    /// Notes that `file` has been made under `path`.
    pub(super) fn add(&mut self, path: &Path, file: &File) {
        // By its real name: behind a symbolic link, the link stays. The working directory may change.
        if let (Some(identity), Ok(path)) = (file.identity(), path.canonicalize()) {
            self.files.push((path, identity));
        }
    }

    /// The files of both.
    pub(super) fn and(mut self, other: Created) -> Created {
        self.files.extend(other.files);
        self
    }

    /// True when nothing was made that wasn't there before.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Removes the files, because the operation that needed them has failed. Another file that has the name by now
    /// stays.
    pub fn remove(self) {
        for (path, identity) in &self.files {
            remove(path, *identity);
        }
    }

    /// As [`Created::remove`] after this error, which says so where a file could only be emptied.
    pub fn take_back(self, error: Error) -> Error {
        let left = self.files.iter().filter(|(path, identity)| !remove(path, *identity)).count();
        if left == 0 { error } else { error.context(INCOMPLETE) }
    }
}

/// False when the file is still there. A confined process may remove none: it is empty then.
fn remove(path: &Path, identity: FileIdentity) -> bool {
    if FileIdentity::of_path(path) != Some(identity) || !matches!(identity, FileIdentity::Inode(..)) {
        return true;
    }
    let Err(error) = std::fs::remove_file(path) else { return true };
    let emptied = match error.kind() {
        io::ErrorKind::PermissionDenied => identity.empty(path),
        _ => Err(error),
    };
    if let Err(error) = emptied {
        tracing::warn!(path = %path.display(), %error, "could not remove an unfinished image");
    }
    false
}

/// The fate of a file whose creation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// It goes, as with QEMU, also where an older file had the name: it holds a part of an image.
    Remove,
    /// It goes where it is new; an older one stays, and is empty, as with QEMU.
    Empty,
}

/// Gives back the file of a creation that failed with this error. `is_new`: there was no such file.
pub(super) async fn discard_file(path: &Path, file: &File, is_new: bool, failed: Failed, error: Error) -> Error {
    if file.is_device() {
        return error;
    }
    // Another program may hold it open: its space is given back all the same.
    if let Err(error) = file.set_len(0).await {
        tracing::warn!(%error, "could not empty an unfinished image");
    }
    if !is_new && failed == Failed::Empty {
        return error;
    }
    let mut created = Created::default();
    created.add(path, file);
    created.take_back(error)
}
