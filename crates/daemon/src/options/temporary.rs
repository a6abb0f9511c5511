// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A temporary overlay, unlinked once it is open.

use crate::state::Daemon;
use cowshed_create::{CreateRequest, prepare_sized};
use cowshed_image::Node;
use cowshed_image::options::BlockdevOptions;
use cowshed_storage::text_of_path;
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::json;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// The default folder, unless the environment names another: large files are no good in a `/tmp` in memory.
const FOLDER: &str = "/var/tmp";
/// Names that are tried.
const ATTEMPTS: u32 = 100;

/// A file with a name of its own, which goes when this is dropped.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn create() -> Result<TemporaryFile> {
        let folder = std::env::var_os("TMPDIR").filter(|folder| !folder.is_empty()).unwrap_or_else(|| FOLDER.into());
        let process = std::process::id();
        for number in 0..ATTEMPTS {
            let path = PathBuf::from(&folder).join(format!("cowshed-overlay-{process}-{number}"));
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(_) => return Ok(TemporaryFile(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let error = Error::io(&error, "could not create a temporary overlay (TMPDIR says where)");
                    return Err(error.file(text_of_path(&path)));
                }
            }
        }
        let message = "there is no free name for a temporary overlay (TMPDIR says where)";
        Err(Error::new(ErrorKind::Busy, message).file(text_of_path(folder.as_ref())))
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "could not remove a temporary overlay");
        }
    }
}

/// Adds the node `id`: an overlay over `below`, whose options it takes over as far as they are about requests.
pub(super) async fn add_overlay(
    daemon: &Rc<Daemon>,
    id: &str,
    below: &Arc<Node>,
    options: &BlockdevOptions,
) -> Result<()> {
    let file = TemporaryFile::create()?;
    let filename = text_of_path(&file.0);
    let request = CreateRequest { filename: filename.clone(), format: "qcow2".to_owned(), ..CreateRequest::default() };
    prepare_sized(&request, below.size()).await?.run().await?;
    let mut overlay = BlockdevOptions::new()
        .with("driver", "qcow2")
        .with("node-name", id)
        .with("backing", below.name())
        .with("file", json!({"driver": "file", "filename": filename}))
        // The file isn't read after a crash.
        .with("cache", json!({"no-flush": true}));
    for key in ["discard", "detect-zeroes"] {
        if let Some(value) = options.get(key) {
            overlay.insert(key, value.clone());
        }
    }
    daemon.graph.add(overlay).await.map(drop)
}
