// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The files and folders in a folder, and where they go on the disk.

use super::Content;
use cowshed_layout::fat::{
    ClusterChain, DirectoryEntry, DirectoryNames, FIRST_CLUSTER, FatDisk, LABEL_BYTES, MAX_DIRECTORY_BYTES,
    MAX_FILE_BYTES, Name, Times,
};
use cowshed_storage::{EntryKind, Folder};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// Files and folders of a tree at most.
const MAX_ENTRIES: usize = 128 << 10;
/// Folders within each other at most.
const MAX_DEPTH: usize = 64;

/// A file of the host.
pub(super) struct FolderFile {
    /// Below the folder.
    pub path: PathBuf,
    /// Length in bytes.
    pub len: u64,
    /// See [`cowshed_storage::File::change_stamp`].
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
    files: Vec<FolderFile>,
    /// The entries that were left out, a sentence each.
    pub warnings: Vec<String>,
}

/// A tree on its disk.
pub(super) struct Laid {
    /// The root folder, where it isn't in clusters.
    pub root: Vec<u8>,
    pub contents: Vec<(ClusterChain, Content)>,
    pub files: Vec<FolderFile>,
}

impl Tree {
    /// Reads the entries of a folder. Blocks.
    pub(super) fn read(root: &Path) -> Result<Tree> {
        let folder = Folder::open(root).map_err(|errno| failed(errno, root))?;
        let about = folder.status().map_err(|errno| failed(errno, root))?;
        let first = Directory {
            path: PathBuf::new(),
            depth: 0,
            parent: 0,
            times: Times::of(about.modified_seconds),
            entries: Vec::new(),
            bytes: DirectoryEntry::LABEL_BYTES,
        };
        let mut tree = Tree { directories: vec![first], files: Vec::new(), warnings: Vec::new() };
        let (mut left_out, mut next) = (Vec::new(), 0);
        while next < tree.directories.len() {
            tree.read_directory(&folder, root, next, &mut left_out)?;
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

    /// `top` is the root, which `root` names. A folder may be a link to another place by now, and is an error then.
    fn read_directory(&mut self, top: &Folder, root: &Path, index: usize, left_out: &mut Vec<PathBuf>) -> Result<()> {
        let (path, depth) = match self.directories.get(index) {
            Some(directory) => (directory.path.clone(), directory.depth),
            None => return Err(Error::internal("a folder went away")),
        };
        let whole = match depth {
            0 => root.to_owned(),
            _ => root.join(&path),
        };
        let room = MAX_ENTRIES.saturating_sub(self.directories.len() + self.files.len());
        let found = match depth {
            0 => top.entries(room),
            _ => top.folder(&path).and_then(|folder| folder.entries(room)),
        };
        // In the order of their names: the same folder is the same disk each time.
        let found = found.map_err(|errno| failed(errno, &whole))?;
        if found.len() > room {
            let message = format!("the folder has more than {MAX_ENTRIES} files and folders");
            return Err(Error::new(ErrorKind::Limit, message).file(whole.display().to_string()));
        }
        let mut names = DirectoryNames::default();
        let (mut entries, mut bytes) = (Vec::with_capacity(found.len()), self.directories[index].bytes);
        for (name, about) in found {
            let path = path.join(&name);
            let times = Times::of(about.modified_seconds);
            let (is_directory, place) = if about.kind == EntryKind::Folder {
                if depth >= MAX_DEPTH {
                    let message = format!("more than {MAX_DEPTH} folders lie within each other");
                    return Err(Error::new(ErrorKind::Limit, message).file(root.join(&path).display().to_string()));
                }
                let (entries, bytes) = (Vec::new(), DirectoryEntry::OWN_BYTES);
                self.directories.push(Directory { path, depth: depth + 1, parent: index, times, entries, bytes });
                (true, self.directories.len() - 1)
            } else {
                let file = match about.kind {
                    EntryKind::File => Some(about),
                    // The file that it leads to, if it is one in the folder.
                    EntryKind::Link => top.status_beneath(&path).ok().filter(|about| about.kind == EntryKind::File),
                    _ => None,
                };
                let file = file.map(|about| FolderFile { path: path.clone(), len: about.len, stamp: about.stamp });
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

/// QEMU names the folder, and neither the disk nor the errno.
fn failed(errno: Errno, path: &Path) -> Error {
    let (kind, path, error) = (Error::os(errno, "").kind(), path.display(), std::io::Error::from_raw_os_error(errno.0));
    Error::new(kind, format!("could not read the folder '{path}': {error}"))
        .qemu(format!("Could not read directory {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Names and lengths are content, too.
    #[test]
    fn folder_that_becomes_a_link_is_refused() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = inside.path();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/file"), [1; 100]).unwrap();
        fs::create_dir(outside.path().join("b")).unwrap();
        fs::write(outside.path().join("b/secret"), [2; 100]).unwrap();
        let tree = Tree::read(root).unwrap();
        assert_eq!((tree.directories.len(), tree.files.len()), (3, 1));
        let mut left_out = Vec::new();
        for changed in [1, 2] {
            let top = Folder::open(root).unwrap();
            let mut tree = Tree { directories: tree_of(&tree), files: Vec::new(), warnings: Vec::new() };
            fs::rename(root.join("a"), root.join("old")).unwrap();
            symlink(outside.path(), root.join("a")).unwrap();
            let refused = tree.read_directory(&top, root, changed, &mut left_out).unwrap_err();
            assert!(refused.to_string().contains("Too many levels of symbolic links"), "{refused}");
            assert!(tree.files.is_empty());
            fs::remove_file(root.join("a")).unwrap();
            fs::rename(root.join("old"), root.join("a")).unwrap();
        }
    }

    /// The folders of a tree, not read yet.
    fn tree_of(tree: &Tree) -> Vec<Directory> {
        let fresh = |one: &Directory| Directory { path: one.path.clone(), entries: Vec::new(), ..*one };
        tree.directories.iter().map(fresh).collect()
    }
}
