// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The file that a name or a descriptor means: links, `/dev/fd/N` and other nodes of one device all mean the same one.
//!
//! The process keeps a list of the files that it has open. Creating an image over one of them would empty it under its
//! reader, so [`crate::File::open`] refuses that, even without locks on the file.

use rustix::fs::{FileType, Mode, OFlags, Stat};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The identity that all names of one file share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileIdentity {
    /// A file: the device and the inode number of the file system.
    Inode(u64, u64),
    /// A block device, by its number: several nodes in the file system can stand for it.
    BlockDevice(u64),
}

impl FileIdentity {
    /// The identity of the file at `path` now, links followed; `None` where nothing is there, or it can't be looked at.
    pub fn of_path(path: &Path) -> Option<FileIdentity> {
        rustix::fs::stat(path).ok().map(|stat| Self::of(&stat))
    }

    /// Empties the file at `path`, where it is this one. Another one may have its name by now, or a link to another one:
    /// that stays as it is.
    ///
    /// # Errors
    /// Those of opening and of cutting the file.
    pub fn empty(self, path: &Path) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        if Self::of(&rustix::fs::fstat(&file)?) == self {
            rustix::fs::ftruncate(&file, 0)?;
        }
        Ok(())
    }

    pub(crate) fn of(stat: &Stat) -> FileIdentity {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => FileIdentity::BlockDevice(stat.st_rdev),
            _ => FileIdentity::Inode(stat.st_dev, stat.st_ino),
        }
    }
}

struct OpenFile {
    number: u64,
    name: String,
}

type OpenFiles = BTreeMap<FileIdentity, Vec<OpenFile>>;

static OPEN: Mutex<OpenFiles> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(0);

fn open_files() -> MutexGuard<'static, OpenFiles> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The place of an open file on the list; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct ListedFile {
    identity: FileIdentity,
    number: u64,
}

impl ListedFile {
    pub(crate) fn new(identity: FileIdentity, name: String) -> ListedFile {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        open_files().entry(identity).or_default().push(OpenFile { number, name });
        ListedFile { identity, number }
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// The name of another open file that is the same one.
    pub(crate) fn other_name(&self) -> Option<String> {
        let open = open_files();
        open.get(&self.identity)?.iter().find(|file| file.number != self.number).map(|file| file.name.clone())
    }
}

impl Drop for ListedFile {
    fn drop(&mut self) {
        let mut open = open_files();
        let Some(files) = open.get_mut(&self.identity) else { return };
        files.retain(|file| file.number != self.number);
        if files.is_empty() {
            open.remove(&self.identity);
        }
    }
}
