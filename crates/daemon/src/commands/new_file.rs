// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New images of commands: made whole under a temporary name, then put in their place. A daemon that is killed meanwhile
//! leaves no half image there, which would read as a raw disk.

use super::failed;
use cowshed_image::create::{CreateRequest, prepare};
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::{path_of_text, sync_folder_of, text_of_path};
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Names that are tried.
const ATTEMPTS: u32 = 100;

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

/// Creates the image of a request. A file that is there already is left alone, and so is what a link leads to.
pub(super) async fn create(request: CreateRequest) -> QmpResult<()> {
    let file = request.filename.clone();
    let path = path_of_text(&file);
    if path.symlink_metadata().is_ok() {
        return Err(in_the_way(&file));
    }
    let temporary = reserve(&path).map_err(|error| QmpError::generic(format!("Could not create '{file}': {error}")))?;
    let request = CreateRequest { filename: text_of_path(&temporary.0), ..request };
    prepare(&request).await.map_err(failed)?.run().await.map_err(failed)?;
    put(&temporary.0, &path).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => in_the_way(&file),
        _ => QmpError::generic(format!("Could not create '{file}': {error}")),
    })?;
    drop(temporary);
    sync_folder_of(&path).await.map_err(failed)
}

fn in_the_way(file: &str) -> QmpError {
    QmpError::generic(format!("{file}: there is a file of this name already; mode 'existing' takes it as it is"))
}

/// A new file beside `path`.
fn reserve(path: &Path) -> io::Result<Temporary> {
    let process = std::process::id();
    for number in 0..ATTEMPTS {
        let mut name = OsString::from(path.file_name().unwrap_or_default());
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
    fn an_image_gets_its_name_when_it_is_whole_and_follows_no_link() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name).display().to_string();
        let request = |name: &str| CreateRequest {
            filename: at(name),
            format: "qcow2".to_owned(),
            size: Some(1 << 20),
            ..CreateRequest::default()
        };
        rt::block_on(create(request("new"))).expect("a free name");
        assert_eq!(std::fs::read(at("new")).expect("a file")[..4], *b"QFI\xfb");
        let error = rt::block_on(create(request("new"))).expect_err("it is there");
        assert!(error.description.contains("a file of this name already"), "{error}");
        std::os::unix::fs::symlink(at("elsewhere"), at("link")).expect("a link");
        rt::block_on(create(request("link"))).expect_err("a link is in the way");
        // What fails leaves nothing behind.
        let wrong = CreateRequest { options: vec!["cluster_size=3".to_owned()], ..request("wrong") };
        rt::block_on(create(wrong)).expect_err("a wrong option");
        let list = std::fs::read_dir(folder.path()).expect("a folder");
        let mut names: Vec<_> = list.map(|entry| entry.expect("a file").file_name()).collect();
        names.sort();
        assert_eq!(names, ["link", "new"]);
    }
}
