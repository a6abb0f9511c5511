// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The files that a creation makes, and how they go again when it fails.

use cowshed_storage::{File, FileIdentity};
use std::path::{Path, PathBuf};

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
}

fn remove(path: &Path, identity: FileIdentity) {
    if FileIdentity::of_path(path) != Some(identity) || !matches!(identity, FileIdentity::Inode(..)) {
        return;
    }
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "could not remove an unfinished image");
    }
}

/// The fate of a file whose creation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// It goes, as with QEMU, also where an older file had the name: it holds a part of an image.
    Remove,
    /// It goes where it is new; an older one stays, and is empty, as with QEMU.
    Empty,
}

/// Gives back the file of a creation that failed. `is_new`: there was no such file.
pub(super) async fn take_back(path: &Path, file: &File, is_new: bool, failed: Failed) {
    if file.is_device() {
        return;
    }
    // Another program may hold it open: its space is given back all the same.
    if let Err(error) = file.set_len(0).await {
        tracing::warn!(%error, "could not empty an unfinished image");
    }
    if is_new || failed == Failed::Remove {
        let mut created = Created::default();
        created.add(path, file);
        created.remove();
    }
}
