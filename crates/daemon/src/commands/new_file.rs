// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New images of commands: made whole under a temporary name, then put in their place. A daemon that is killed meanwhile
//! leaves no half image there, which would read as a raw disk. The file goes again when the work fails that it was made for.

use super::{failed, free_name};
use crate::state::Daemon;
use cowshed_create::{CreateRequest, check_device_name, path_of_name, prepare};
use cowshed_image::Node;
use cowshed_image::graph::{AttachRequest, Attachment, files_below};
use cowshed_image::options::BlockdevOptions;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::{FileIdentity, PermissionSet, Permissions as LockPermissions};
use cowshed_storage::{sync_folder_of, text_of_path};
use std::ffi::{OsStr, OsString};
use std::fs::{OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Names that are tried.
const ATTEMPTS: u32 = 100;

/// Names of files have up to 255 bytes; the ending takes at most 19.
const LONGEST_STEM_BYTES: usize = 230;

/// A file that goes when this is dropped.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!(path = %self.0.display(), %error, "could not remove a temporary file");
        }
    }
}

/// An image that a command has made in a file of its own.
#[derive(Debug)]
pub(crate) struct NewFile {
    /// As the command named it.
    pub name: String,
    path: PathBuf,
    identity: FileIdentity,
}

/// The path that the name of a new image means, as text.
pub(super) fn plain_name(name: &str) -> String {
    text_of_path(&path_of_name(name))
}

impl NewFile {
    /// As the command named it, without the protocol.
    pub(super) fn plain_name(&self) -> String {
        plain_name(&self.name)
    }

    /// Removes it, for the command fails. A file that has taken its name stays.
    pub(crate) fn remove(self) {
        // A device stays, with its contents.
        if FileIdentity::of_path(&self.path) != Some(self.identity) || is_device(&self.path) {
            return;
        }
        match std::fs::remove_file(&self.path) {
            Ok(()) => tracing::info!(file = self.name, "removed the unfinished image"),
            Err(error) => tracing::warn!(file = self.name, %error, "could not remove an unfinished image"),
        }
    }

    /// As [`NewFile::remove`], long after the command: by now a node may use the file, and then it stays.
    pub(crate) fn remove_unless_used(self, daemon: &Daemon) {
        match user_of(daemon, &[self.identity], None) {
            Some(user) => tracing::warn!(file = self.name, user, "an unfinished image stays, for a node uses it"),
            None => self.remove(),
        }
    }
}

/// Creates the image of a request. An existing file is replaced when it has no users; the target of a link is left
/// alone.
pub(super) async fn create(daemon: &Rc<Daemon>, request: CreateRequest) -> QmpResult<NewFile> {
    check_device_name(&request.filename).map_err(failed)?;
    let path = path_of_name(&request.filename);
    match path.symlink_metadata() {
        _ if is_device(&path) => on_device(daemon, request).await,
        Ok(found) if found.is_file() => {
            let held = Held::take(daemon, &path, "file").await?;
            let made = make(request, Some(found.permissions())).await;
            let released = held.release(daemon).await;
            let made = made?;
            match released {
                Ok(()) => Ok(made),
                Err(error) => {
                    made.remove();
                    Err(error)
                }
            }
        }
        _ => make(request, None).await,
    }
}

fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_block_device())
}

/// Creates the image of a request on a block device, where it takes the place of the old contents.
async fn on_device(daemon: &Rc<Daemon>, request: CreateRequest) -> QmpResult<NewFile> {
    let file = request.filename.clone();
    let path = path_of_name(&file);
    // No other user has it, which is all that can be held: the creation takes its locks itself.
    Held::take(daemon, &path, "host_device").await?.release(daemon).await?;
    async { prepare(&request).await?.run().await }.await.map_err(failed)?;
    let refused = |error: io::Error| QmpError::generic(format!("Could not create '{file}': {error}"));
    let identity = FileIdentity::of_path(&path).ok_or_else(|| refused(ErrorKind::NotFound.into()))?;
    Ok(NewFile { name: file.clone(), path: std::path::absolute(&path).map_err(refused)?, identity })
}

/// Creates an image under a free name, or in the place of a file with these permissions.
async fn make(request: CreateRequest, replaced: Option<Permissions>) -> QmpResult<NewFile> {
    let file = request.filename.clone();
    let path = path_of_name(&file);
    if replaced.is_none() && path.symlink_metadata().is_ok() {
        return Err(in_the_way(&file));
    }
    let refused = |error: io::Error| QmpError::generic(format!("Could not create '{file}': {error}"));
    let temporary = reserve(&path).map_err(refused)?;
    let request =
        CreateRequest { filename: name_of_path(&temporary.0), final_name: Some(request.filename.clone()), ..request };
    prepare(&request).await.map_err(failed)?.run().await.map_err(failed)?;
    let refused = |error: io::Error| QmpError::generic(format!("Could not create '{file}': {error}"));
    let gone = || refused(ErrorKind::NotFound.into());
    let identity = FileIdentity::of_path(&temporary.0).ok_or_else(gone)?;
    let put = match replaced {
        Some(permissions) => {
            std::fs::set_permissions(&temporary.0, permissions).and_then(|()| std::fs::rename(&temporary.0, &path))
        }
        None => put(&temporary.0, &path),
    };
    put.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => in_the_way(&file),
        _ => refused(error),
    })?;
    drop(temporary);
    // The working directory may change.
    let made = NewFile { name: file.clone(), path: std::path::absolute(&path).map_err(refused)?, identity };
    match sync_folder_of(&path).await {
        Ok(()) => Ok(made),
        Err(error) => {
            made.remove();
            Err(failed(error))
        }
    }
}

/// A file that is locked against other processes, and that no node of ours has.
struct Held {
    node: Arc<Node>,
    user: Arc<Attachment>,
}

impl Held {
    async fn take(daemon: &Rc<Daemon>, path: &Path, driver: &str) -> QmpResult<Held> {
        let mut options = BlockdevOptions::new();
        let name = free_name(daemon, "replaced");
        let file = text_of_path(path);
        for (key, value) in [("driver", driver), ("filename", &file), ("node-name", &name)] {
            options.insert(key, value);
        }
        let node = daemon.graph.add(options).await.map_err(failed)?;
        let user = match check_unused(daemon, &node) {
            Ok(()) => {
                let used = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE | PermissionSet::RESIZE;
                let alone = LockPermissions { used, shared: PermissionSet::NONE };
                daemon.graph.attach(&node, AttachRequest::job(name, alone)).await.map_err(failed)
            }
            Err(error) => Err(error),
        };
        match user {
            Ok(user) => Ok(Held { node, user }),
            Err(error) => {
                daemon.graph.delete(node.name()).await.map_err(failed)?;
                Err(error)
            }
        }
    }

    async fn release(self, daemon: &Rc<Daemon>) -> QmpResult<()> {
        let detached = self.user.detach().await;
        detached.and(daemon.graph.delete(self.node.name()).await).map_err(failed)
    }
}

/// Locks don't show a node that has none.
fn check_unused(daemon: &Daemon, node: &Arc<Node>) -> QmpResult<()> {
    let own: Vec<FileIdentity> = files_below(node).into_iter().map(|(identity, _)| identity).collect();
    match user_of(daemon, &own, Some(node)) {
        Some(user) => {
            tracing::info!(user, "a node has the file of the new image");
            Err(QmpError::generic("Failed to get \"write\" lock"))
        }
        None => Ok(()),
    }
}

/// The name of a node other than `but` that has one of these files, also of one that is closed for the time being.
fn user_of(daemon: &Daemon, files: &[FileIdentity], but: Option<&Arc<Node>>) -> Option<String> {
    let is_other = |node: &Arc<Node>| but.is_none_or(|but| !Arc::ptr_eq(node, but));
    let has_one = |node: &Arc<Node>| files_below(node).iter().any(|(identity, _)| files.contains(identity));
    let active = daemon.graph.snapshot().nodes().into_iter().find(|node| is_other(node) && has_one(node));
    active.map(|node| node.name().to_owned()).or_else(|| daemon.inactive.user_of(files))
}

fn in_the_way(file: &str) -> QmpError {
    if path_of_name(file).is_dir() {
        return QmpError::generic(format!("Could not create '{file}': Is a directory"));
    }
    QmpError::generic(format!("{file}: there is a file of this name already; mode 'existing' takes it as it is"))
}

/// A name that means this path and no protocol.
fn name_of_path(path: &Path) -> String {
    let name = text_of_path(path);
    if path.is_relative() && name.contains(':') { format!("./{name}") } else { name }
}

/// The name of a file, cut where it leaves no room for the ending of a temporary name.
fn stem_of(path: &Path) -> OsString {
    let name = path.file_name().unwrap_or_default().as_bytes();
    let mut len = name.len().min(LONGEST_STEM_BYTES);
    // Whole characters only.
    while len < name.len() && len > 0 && name[len] & 0xc0 == 0x80 {
        len -= 1;
    }
    OsStr::from_bytes(&name[..len]).to_owned()
}

/// A new file beside `path`.
fn reserve(path: &Path) -> io::Result<Temporary> {
    let process = std::process::id();
    for number in 0..ATTEMPTS {
        let mut name = stem_of(path);
        name.push(format!(".{process}-{number}.tmp"));
        let temporary = path.with_file_name(name);
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(_) => return Ok(Temporary(temporary)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(ErrorKind::AlreadyExists, "there is no free temporary name"))
}

/// Gives the file its name, which must be free.
fn put(temporary: &Path, path: &Path) -> io::Result<()> {
    match std::fs::hard_link(temporary, path) {
        // File systems without links.
        Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported) => {
            match path.symlink_metadata() {
                Ok(_) => Err(ErrorKind::AlreadyExists.into()),
                Err(_) => std::fs::rename(temporary, path),
            }
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_storage::rt;

    #[test]
    fn a_temporary_name_is_a_path_and_fits() {
        assert_eq!(name_of_path(Path::new("file:x.tmp")), "./file:x.tmp");
        assert_eq!(name_of_path(Path::new("/file:x.tmp")), "/file:x.tmp");
        assert_eq!(stem_of(Path::new("a/b")), "b");
        assert_eq!(stem_of(Path::new(&"n".repeat(255))).len(), 230);
        assert_eq!(stem_of(Path::new(&format!("{}\u{fc}", "n".repeat(229)))).len(), 229);
    }

    #[test]
    fn new_image_is_named_when_whole_and_follows_no_link() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name).display().to_string();
        let request = |name: &str| CreateRequest {
            filename: at(name),
            format: "qcow2".to_owned(),
            size: Some(1 << 20),
            ..CreateRequest::default()
        };
        rt::block_on(make(request("new"), None)).expect("a free name");
        assert_eq!(std::fs::read(at("new")).expect("a file")[..4], *b"QFI\xfb");
        let error = rt::block_on(make(request("new"), None)).expect_err("it is there");
        assert!(error.description.contains("a file of this name already"), "{error}");
        std::os::unix::fs::symlink(at("elsewhere"), at("link")).expect("a link");
        rt::block_on(make(request("link"), None)).expect_err("a link is in the way");
        // A failed creation leaves nothing behind.
        let wrong = CreateRequest { options: vec!["cluster_size=3".to_owned()], ..request("wrong") };
        rt::block_on(make(wrong, None)).expect_err("a wrong option");
        let list = std::fs::read_dir(folder.path()).expect("a folder");
        let mut names: Vec<_> = list.map(|entry| entry.expect("a file").file_name()).collect();
        names.sort();
        assert_eq!(names, ["link", "new"]);
    }
}
