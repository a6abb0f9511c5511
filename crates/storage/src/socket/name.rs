// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The name of a bound Unix socket in the file system.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The name of a socket that we bound. Dropping it removes the name, if it still is the one that we made.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode number.
    identity: (u64, u64),
}

impl SocketFile {
    /// The name `path`, which was just bound.
    ///
    /// # Errors
    /// Those of lstat(2), and of finding the folder of this process.
    pub fn bound(path: &Path) -> std::io::Result<SocketFile> {
        let metadata = std::fs::symlink_metadata(path)?;
        // The process may leave its folder before it removes the file.
        let path = std::path::absolute(path)?;
        Ok(SocketFile { path, identity: (metadata.dev(), metadata.ino()) })
    }

    /// Leaves the file where it is, for its socket is used on.
    pub fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_own = std::fs::symlink_metadata(&self.path).is_ok_and(|metadata| {
            metadata.file_type().is_socket() && (metadata.dev(), metadata.ino()) == self.identity
        });
        if is_own && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "could not remove the socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::socket::{Listener, SocketAddress};
    use std::os::unix::net::UnixListener;

    #[test]
    fn listener_removes_no_socket_of_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let bind = || Listener::bind(&SocketAddress::Unix(path.to_str().unwrap().to_owned())).unwrap();
        drop(bind());
        assert!(!path.exists(), "its own goes");
        let first = bind();
        std::fs::remove_file(&path).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        // The path of a socket without a listener is taken over; a file isn't one.
        let third = bind();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        drop(third);
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }
}
