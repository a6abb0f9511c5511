// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unix sockets in the file system: those that others left behind are taken over, ours are taken away.

pub use cowshed_storage::socket::SocketFile;
use cowshed_storage::socket::clear_stale;
use cowshed_types::{Errno, Error, ErrorKind, LINE_END, Result};
use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// The bytes of a socket's path that are too many.
pub const MAX_PATH_BYTES: usize = 108;

/// The port that a text means. An error is in QEMU's words, where it isn't a number too high.
pub fn port(host: &str, text: &str, key: &str) -> std::result::Result<u16, String> {
    text.parse().map_err(|_| match text.parse::<u64>() {
        Err(_) if !text.is_empty() => {
            format!("address resolution failed for {host}:{text}: Servname not supported for ai_socktype")
        }
        _ => format!("{key} expects a number up to 65535, not '{text}'"),
    })
}

/// Binds a socket to `path`.
pub fn bind_unix(path: &Path) -> Result<(UnixListener, SocketFile)> {
    clear_stale(path)?;
    let listener = UnixListener::bind(path).map_err(|error| failed(path, &error))?;
    let file = SocketFile::bound(path).map_err(|error| failed(path, &error))?;
    Ok((listener, file))
}

fn failed(path: &Path, error: &io::Error) -> Error {
    let name = path.display().to_string();
    match error.raw_os_error() {
        // A name that doesn't fit.
        None => {
            let words =
                format!("UNIX socket path '{name}' is too long{LINE_END}Path must be less than {MAX_PATH_BYTES} bytes");
            Error::new(ErrorKind::InvalidArgument, format!("could not bind the socket: {error}")).qemu(words).file(name)
        }
        Some(errno) => {
            let sentence = format!("Failed to bind socket to {name}");
            Error::os(Errno(errno), "could not bind the socket").qemu(sentence).file(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_sockets_are_taken_over_and_live_ones_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let (live, file) = bind_unix(&path).expect("a free name");
        assert_eq!(bind_unix(&path).expect_err("in use").kind(), ErrorKind::Busy);
        drop(live);
        std::mem::forget(file);
        assert!(path.exists(), "left behind, as after a crash");
        let (listener, file) = bind_unix(&path).expect("a stale socket is no obstacle");
        drop(file);
        assert!(!path.exists());
        drop(listener);
    }

    #[test]
    fn other_files_are_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("precious");
        std::fs::write(&path, "data").expect("a file");
        assert_eq!(bind_unix(&path).expect_err("no socket").kind(), ErrorKind::Busy);
        assert!(path.exists());

        let path = folder.path().join("s");
        let (_, file) = bind_unix(&path).expect("a free name");
        std::fs::remove_file(&path).expect("taken away");
        std::fs::write(&path, "other").expect("another file of the same name");
        drop(file);
        assert!(path.exists(), "not ours any more");
    }
}
