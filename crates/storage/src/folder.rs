// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A folder of the host, whose entries are read without ever leaving it.

use crate::sys;
use cowshed_types::Errno;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The kinds of entries of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// A socket, a pipe or a device.
    Other,
}

/// The attributes of an entry.
#[derive(Clone, Copy, Debug)]
pub struct EntryStatus {
    /// Its kind.
    pub kind: EntryKind,
    /// The length of a file in bytes.
    pub len: u64,
    /// The time of its last change, in seconds since 1970.
    pub modified_seconds: i64,
    /// See [`crate::File::change_stamp`].
    pub stamp: [u64; 7],
}

/// An open folder. It stays the same one, whatever its path means by now.
#[derive(Debug)]
pub struct Folder(OwnedFd);

/// The numbers of [`crate::File::change_stamp`].
pub(crate) fn stamp_of(stat: &Stat) -> [u64; 7] {
    [
        stat.st_dev,
        stat.st_ino,
        stat.st_size.cast_unsigned(),
        stat.st_mtime.cast_unsigned(),
        stat.st_mtime_nsec,
        stat.st_ctime.cast_unsigned(),
        stat.st_ctime_nsec,
    ]
}

fn status_of(stat: &Stat) -> EntryStatus {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => EntryKind::File,
        FileType::Directory => EntryKind::Folder,
        FileType::Symlink => EntryKind::Link,
        _ => EntryKind::Other,
    };
    EntryStatus { kind, len: stat.st_size.cast_unsigned(), modified_seconds: stat.st_mtime, stamp: stamp_of(stat) }
}

impl Folder {
    /// Opens a folder, also by a path with links.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open(path: &Path) -> Result<Folder, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        sys::retry(|| rustix::fs::open(path, flags, Mode::empty()).map_err(sys::errno)).map(Folder)
    }

    /// Its attributes.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn status(&self) -> Result<EntryStatus, Errno> {
        rustix::fs::fstat(&self.0).map(|stat| status_of(&stat)).map_err(sys::errno)
    }

    /// Opens a folder at a path below this one, of which no part is a link.
    ///
    /// # Errors
    /// Those of openat2(2): `ELOOP` where a part is a link.
    pub fn folder(&self, path: &Path) -> Result<Folder, Errno> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY, resolve).map(Folder)
    }

    /// The attributes of the file that a path below this folder leads to, also by links that stay in the folder.
    ///
    /// # Errors
    /// Those of openat2(2): `EXDEV` where a link leads out.
    pub fn status_beneath(&self, path: &Path) -> Result<EntryStatus, Errno> {
        let found = self.open_at(path, OFlags::PATH, ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS)?;
        Folder(found).status()
    }

    fn open_at(&self, path: &Path, flags: OFlags, resolve: ResolveFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::CLOEXEC;
        sys::retry(|| rustix::fs::openat2(&self.0, path, flags, Mode::empty(), resolve).map_err(sys::errno))
    }

    /// Its entries by their names, at most `most` of them and one more. An entry that went away meanwhile isn't among
    /// them. Links are not followed.
    ///
    /// # Errors
    /// Those of getdents(2) and fstatat(2).
    pub fn entries(&self, most: usize) -> Result<Vec<(OsString, EntryStatus)>, Errno> {
        let mut found = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.0).map_err(sys::errno)? {
            let entry = entry.map_err(sys::errno)?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            match rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => found.push((OsStr::from_bytes(name.to_bytes()).to_owned(), status_of(&stat))),
                Err(rustix::io::Errno::NOENT) => continue,
                Err(error) => return Err(sys::errno(error)),
            }
            if found.len() > most {
                break;
            }
        }
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn errno<T>(result: Result<T, Errno>) -> Option<i32> {
        result.err().map(|errno| errno.0)
    }

    #[test]
    fn links_lead_out_of_no_folder() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = |name: &str| inside.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/file"), [1; 1000]).unwrap();
        fs::write(outside.path().join("secret"), [2; 10]).unwrap();
        symlink("file", at("a/link")).unwrap();
        symlink(outside.path(), at("out")).unwrap();
        let folder = Folder::open(inside.path()).unwrap();
        let names = |path: &str| {
            let entries = folder.folder(Path::new(path)).and_then(|folder| folder.entries(10))?;
            let kinds = entries.into_iter().map(|(name, status)| (name.into_string().unwrap(), status.kind));
            Ok::<Vec<(String, EntryKind)>, Errno>(kinds.collect())
        };
        let expected = [("b", EntryKind::Folder), ("file", EntryKind::File), ("link", EntryKind::Link)];
        assert_eq!(names("a"), Ok(expected.map(|(name, kind)| (name.to_owned(), kind)).to_vec()));
        assert_eq!(folder.status_beneath(Path::new("a/link")).unwrap().len, 1000);
        assert_eq!(errno(names("out")), Some(libc::ELOOP));
        assert_eq!(errno(names("../")), Some(libc::EXDEV));
        assert_eq!(errno(names("a/file")), Some(libc::ENOTDIR));
        assert_eq!(errno(folder.status_beneath(Path::new("out/secret"))), Some(libc::EXDEV));
        // A folder on the way, and the root itself, are replaced.
        fs::rename(at("a"), at("old")).unwrap();
        symlink("old", at("a")).unwrap();
        assert_eq!(errno(names("a/b")), Some(libc::ELOOP));
        let old = inside.path().with_extension("old");
        fs::rename(inside.path(), &old).unwrap();
        symlink(outside.path(), inside.path()).unwrap();
        let now: Vec<OsString> = folder.entries(10).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(now, ["a", "old", "out"]);
        assert_eq!(folder.entries(1).unwrap().len(), 2, "one more than asked for");
        fs::remove_file(inside.path()).unwrap();
        fs::rename(&old, inside.path()).unwrap();
    }
}
