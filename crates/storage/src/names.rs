// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Paths and the texts that stand for them, see [`cowshed_block::text_of_name`].

use cowshed_block::{name_of_text, text_of_name};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The path that a name means, whatever bytes it holds.
pub fn path_of_text(text: &str) -> PathBuf {
    PathBuf::from(OsString::from_vec(name_of_text(text).into_owned()))
}

/// The text of a path: nothing is lost.
pub fn text_of_path(path: &Path) -> String {
    text_of_name(path.as_os_str().as_bytes()).into_owned()
}
