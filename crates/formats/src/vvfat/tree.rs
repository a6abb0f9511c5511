// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The files and folders in a folder, and where they go on the disk.

use super::Content;
use cowshed_layout::fat::{
    ClusterChain, DirectoryEntry, DirectoryNames, FIRST_CLUSTER, FatDisk, LABEL_BYTES, MAX_DIRECTORY_BYTES,
    MAX_FILE_BYTES, Name, Times,
};
use cowshed_storage::{File, Locking, OpenOptions};
use cowshed_types::{Error, ErrorKind, Result};
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files and folders of a tree at most.
const MAX_ENTRIES: usize = 128 << 10;
/// Folders within each other at most.
const MAX_DEPTH: usize = 64;

/// A file of the host.
pub(super) struct HostFile {
    /// Below the folder.
    pub path: PathBuf,
    /// Length in bytes.
    pub len: u64,
    /// See [`File::change_stamp`].
    pub stamp: [u64; 7],
}

struct Entry {
    name: Name,
    /// An index into the folders or the files.
    is_directory: bool,
    index: usize,
    times: Times,
}

struct Directory {
    path: PathBuf,
    depth: usize,
    /// The index of the folder that it is in.
    parent: usize,
    times: Times,
    entries: Vec<Entry>,
    /// Length of its entries.
    bytes: u64,
}

/// A tree of folders. The first one is the root.
pub(super) struct Tree {
    directories: Vec<Directory>,
    files: Vec<HostFile>,
    /// The entries that were left out, a sentence each.
    pub warnings: Vec<String>,
}

/// A tree on its disk.
pub(super) struct Laid {
    /// The root folder, where it isn't in clusters.
    pub root: Vec<u8>,
    pub contents: Vec<(ClusterChain, Content)>,
    pub files: Vec<HostFile>,
}

fn stamp_of(about: &Metadata) -> [u64; 7] {
    let number = i64::cast_unsigned;
    let times = [about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()].map(number);
    let [written, written_ns, changed, changed_ns] = times;
    [about.dev(), about.ino(), about.size(), written, written_ns, changed, changed_ns]
}

impl Tree {
    /// Reads the entries of a folder. Blocks.
    pub(super) fn read(root: &Path) -> Result<Tree> {
        let about = fs::metadata(root).map_err(|error| failed(&error, root))?;
        let first = Directory {
            path: PathBuf::new(),
            depth: 0,
            parent: 0,
            times: Times::of(about.mtime()),
            entries: Vec::new(),
            bytes: DirectoryEntry::LABEL_BYTES,
        };
        let mut tree = Tree { directories: vec![first], files: Vec::new(), warnings: Vec::new() };
        let (mut left_out, mut next) = (Vec::new(), 0);
        while next < tree.directories.len() {
            tree.read_directory(root, next, &mut left_out)?;
            next += 1;
        }
        if let Some(first) = left_out.first() {
            tree.warnings.push(format!(
                "{} entries are left out, which are no files or links that lead to none in the folder: '{}' is the first",
                left_out.len(),
                first.display()
            ));
        }
        Ok(tree)
    }

    fn read_directory(&mut self, root: &Path, index: usize, left_out: &mut Vec<PathBuf>) -> Result<()> {
        let (path, depth) = match self.directories.get(index) {
            Some(directory) => (directory.path.clone(), directory.depth),
            None => return Err(Error::internal("a folder went away")),
        };
        let whole = match depth {
            0 => root.to_owned(),
            _ => root.join(&path),
        };
        let mut found = Vec::new();
        for entry in fs::read_dir(&whole).map_err(|error| failed(&error, &whole))? {
            found.push(entry.map_err(|error| failed(&error, &whole))?);
            if self.directories.len() + self.files.len() + found.len() > MAX_ENTRIES {
                let message = format!("the folder has more than {MAX_ENTRIES} files and folders");
                return Err(Error::new(ErrorKind::Limit, message).file(whole.display().to_string()));
            }
        }
        // The same folder is the same disk each time.
        found.sort_by_key(fs::DirEntry::file_name);
        let mut names = DirectoryNames::default();
        let (mut entries, mut bytes) = (Vec::with_capacity(found.len()), self.directories[index].bytes);
        for entry in found {
            let path = path.join(entry.file_name());
            let about = entry.metadata().map_err(|error| failed(&error, &root.join(&path)))?;
            let name = entry.file_name();
            let times = Times::of(about.mtime());
            let (is_directory, place) = if about.is_dir() {
                if depth >= MAX_DEPTH {
                    let message = format!("more than {MAX_DEPTH} folders lie within each other");
                    return Err(Error::new(ErrorKind::Limit, message).file(root.join(&path).display().to_string()));
                }
                let (entries, bytes) = (Vec::new(), DirectoryEntry::OWN_BYTES);
                self.directories.push(Directory { path, depth: depth + 1, parent: index, times, entries, bytes });
                (true, self.directories.len() - 1)
            } else {
                let file = match about.is_file() {
                    true => Some(HostFile { path: path.clone(), len: about.size(), stamp: stamp_of(&about) }),
                    false if about.is_symlink() => linked(root, &path),
                    false => None,
                };
                let Some(file) = file else {
                    left_out.push(path);
                    continue;
                };
                if file.len > MAX_FILE_BYTES {
                    let message = "a file of 4 GiB or more has no place in a FAT file system";
                    let error = Error::new(ErrorKind::Limit, message).value(file.len);
                    return Err(error.file(root.join(&path).display().to_string()));
                }
                self.files.push(file);
                (false, self.files.len() - 1)
            };
            let name = names.add(&name.to_string_lossy());
            bytes += DirectoryEntry::bytes_of(&name);
            entries.push(Entry { name, is_directory, index: place, times });
        }
        if bytes > MAX_DIRECTORY_BYTES {
            let message = "the folder has more entries than a FAT file system takes";
            return Err(Error::new(ErrorKind::Limit, message).file(whole.display().to_string()));
        }
        let directory = &mut self.directories[index];
        (directory.entries, directory.bytes) = (entries, bytes);
        Ok(())
    }

    /// Clusters of this length in bytes that the tree takes. `is_rooted`: the root folder isn't kept in them.
    pub(super) fn clusters(&self, cluster_bytes: u64, is_rooted: bool) -> u64 {
        let directories = self.directories.iter().skip(usize::from(is_rooted));
        let directories: u64 = directories.map(|directory| directory.bytes.div_ceil(cluster_bytes)).sum();
        let files: u64 = self.files.iter().map(|file| file.len.div_ceil(cluster_bytes)).sum();
        directories + files
    }

    /// Gives folders and files their clusters: folders first, each in one piece. They are known to fit.
    pub(super) fn lay_out(self, disk: &FatDisk, label: [u8; LABEL_BYTES]) -> Result<Laid> {
        let root_bytes = disk.root_bytes();
        if let (Some(most), Some(root)) = (root_bytes, self.directories.first())
            && root.bytes > most
        {
            let message =
                format!("the root folder needs {} bytes for its names, and has {most}: FAT32 takes more", root.bytes);
            return Err(Error::new(ErrorKind::Limit, message).qemu("Too many entries in root directory"));
        }
        let mut next = u64::from(FIRST_CLUSTER);
        let mut chain = |bytes: u64| {
            let count = bytes.div_ceil(disk.cluster_bytes());
            let first = if count == 0 { 0 } else { next };
            next += count;
            // There are 2^28 clusters at most.
            ClusterChain { first: first as u32, count: count as u32 }
        };
        let is_rooted = root_bytes.is_some();
        let directories: Vec<ClusterChain> = self
            .directories
            .iter()
            .enumerate()
            .map(|(index, directory)| if is_rooted && index == 0 { chain(0) } else { chain(directory.bytes) })
            .collect();
        let files: Vec<ClusterChain> = self.files.iter().map(|file| chain(file.len)).collect();
        let (mut root, mut contents) = (Vec::new(), Vec::new());
        for (index, directory) in self.directories.iter().enumerate() {
            let mut bytes = Vec::with_capacity(directory.bytes as usize);
            let own = directories[index];
            match index {
                0 => DirectoryEntry::label(label, &mut bytes),
                // The root is 0 there, also where it has a cluster.
                _ if directory.parent == 0 => DirectoryEntry::own(own.first, 0, directory.times, &mut bytes),
                _ => {
                    let parent = directories[directory.parent].first;
                    DirectoryEntry::own(own.first, parent, directory.times, &mut bytes);
                }
            }
            for entry in &directory.entries {
                let (chain, len) = match entry.is_directory {
                    true => (directories[entry.index], 0),
                    false => (files[entry.index], self.files[entry.index].len as u32),
                };
                let Entry { is_directory, times, .. } = *entry;
                DirectoryEntry { is_directory, cluster: chain.first, len, times }.put(&entry.name, &mut bytes);
            }
            match index {
                0 if is_rooted => root = bytes,
                _ => contents.push((own, Content::Directory(bytes))),
            }
        }
        let of_files = files.into_iter().enumerate().filter(|(_, chain)| chain.count > 0);
        contents.extend(of_files.map(|(index, chain)| (chain, Content::File(index))));
        Ok(Laid { root, contents, files: self.files })
    }
}

/// The file that a link leads to, if it is one in the folder.
fn linked(root: &Path, path: &Path) -> Option<HostFile> {
    let whole = root.join(path);
    if !fs::metadata(&whole).is_ok_and(|about| about.is_file()) {
        return None;
    }
    let options = OpenOptions { beneath: Some(root.to_owned()), locking: Locking::Off, ..OpenOptions::default() };
    let file = File::open(&whole, &options).ok()?;
    Some(HostFile { path: path.to_owned(), len: file.len(), stamp: file.change_stamp()? })
}

/// QEMU names the folder, and neither the disk nor the errno.
fn failed(error: &std::io::Error, path: &Path) -> Error {
    let (kind, path) = (Error::io(error, "").kind(), path.display());
    Error::new(kind, format!("could not read the folder '{path}': {error}"))
        .qemu(format!("Could not read directory {path}"))
}
