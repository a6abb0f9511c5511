// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that an image identifies by their contents, looked for in folders that the user names and nowhere else.

use super::build::{Draft, Opener};
use cowshed_storage::{IoBuf, Locking, OpenOptions, path_of_text, text_of_path};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Entries of a folder that are looked at.
const MAX_ENTRIES: usize = 16 << 10;

impl Opener {
    /// The folders in option `key` of an image: a text, or a list of them.
    pub fn folders(&self, draft: &Draft, key: &str) -> Vec<String> {
        match draft.options.get(key) {
            Some(Value::String(folder)) => vec![folder.clone()],
            Some(Value::Array(folders)) => folders.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            _ => Vec::new(),
        }
    }

    /// Regular files right in these folders whose first `len` bytes `is_wanted` takes. Links aren't followed. `what` is
    /// the file's name for the policy, which decides about it as about any backing file of image `image`.
    pub async fn find_backing(
        &self,
        folders: &[String],
        len: usize,
        is_wanted: impl Fn(&[u8]) -> bool,
        (what, image): (&str, &str),
    ) -> Result<Vec<String>> {
        self.policy.check(self.policy.allow_backing, "the backing file", what, image)?;
        let mut found = Vec::new();
        for folder in folders {
            for path in regular_files(&path_of_text(folder)).map_err(|error| error.file(folder.as_str()))? {
                let beneath = path.parent().map(Path::to_owned);
                let options = OpenOptions { beneath, locking: Locking::Off, ..OpenOptions::default() };
                // A file that can't be opened or read isn't the one, or its absence will be reported.
                let Ok(file) = self.files.open(&path, &options) else { continue };
                if file.len() < len as u64 {
                    continue;
                }
                let (read, bytes) = file.read_at(IoBuf::try_zeroed(len)?, 0).await;
                if read.is_ok() && is_wanted(&bytes) {
                    found.push(text_of_path(&path));
                }
            }
        }
        Ok(found)
    }
}

fn regular_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error: std::io::Error| Error::io(&error, "could not read the folder");
    let mut files = Vec::new();
    for (index, entry) in std::fs::read_dir(folder).map_err(failed)?.enumerate() {
        if index >= MAX_ENTRIES {
            return Err(Error::new(ErrorKind::Limit, format!("the folder has more than {MAX_ENTRIES} entries")));
        }
        let entry = entry.map_err(failed)?;
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            files.push(entry.path());
        }
    }
    files.sort_unstable();
    Ok(files)
}
