// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Our program under the names of QEMU's, and runs of others with it first on the PATH.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

const COWSHED: &str = env!("CARGO_BIN_EXE_cowshed");

/// A folder of links under QEMU's names, with a copy of the program, which users without rights in our folders can run.
pub(crate) fn make_tools(folder: &Path) -> PathBuf {
    let tools = folder.join("bin");
    fs::create_dir(&tools).expect("a folder");
    let program = tools.join("cowshed");
    fs::copy(COWSHED, &program).expect("our own program");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("permissions");
    for tool in ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"] {
        symlink("cowshed", tools.join(tool)).expect("a link");
    }
    tools
}

/// The PATH with a folder in front of it.
pub(crate) fn path_with(tools: Option<&Path>) -> String {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").expect("PATH"));
    tools.map_or(path.clone(), |tools| format!("{}:{path}", tools.display()))
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}
