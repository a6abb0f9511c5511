// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Folders of tests.

/// An empty folder for a test, removed with it, on the disk that holds the build. It is never tmpfs where the build
/// isn't: holes, `fallocate` and direct I/O behave differently there.
pub fn temp_dir() -> tempfile::TempDir {
    let executable = std::env::current_exe().expect("the test knows its own path");
    // target/TRIPLE/PROFILE/deps/TEST-HASH → target/TRIPLE/tmp
    let target = executable.ancestors().nth(3).expect("a test lies three folders deep in target/TRIPLE");
    let parent = target.join("tmp");
    std::fs::create_dir_all(&parent).expect("target/TRIPLE/tmp can be made");
    tempfile::Builder::new().prefix("cowshed-").tempdir_in(parent).expect("a folder in target/TRIPLE/tmp can be made")
}
