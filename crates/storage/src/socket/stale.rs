// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names of Unix sockets that processes left behind which ended without taking them away.

use cowshed_types::{Error, ErrorKind, Result};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);
/// The kernel may go on to answer for a process that was killed until it has taken its rings down.
const DYING: Duration = Duration::from_secs(10);

/// Removes the name of a Unix socket without a listener; waits for a process that is about to be gone. `Busy` when the
/// socket has a listener, or where the file is no socket. May block for some seconds.
pub fn clear_stale(path: &Path) -> Result<()> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    let busy = |message: &str| Err(Error::new(ErrorKind::Busy, message).file(path.display().to_string()));
    if !metadata.file_type().is_socket() {
        let refused = busy("a file that is no socket is in the way");
        // QEMU removes other files.
        let sentence = || format!("Failed to unlink socket {}: Is a directory", path.display());
        return refused.map_err(|error| if metadata.is_dir() { error.qemu(sentence()) } else { error });
    }
    let until = Instant::now() + DYING;
    let mut refused = false;
    loop {
        match UnixStream::connect(path) {
            // Twice, so that a server between its bind and its listen isn't taken for a dead one.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && refused => break,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => refused = true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::io(&error, "could not look whether a socket is in use").file(name(path))),
            Ok(stream) if Instant::now() < until && is_of_a_dying_process(&stream) => refused = false,
            Ok(_) => return busy("another process listens on this socket"),
        }
        std::thread::sleep(PAUSE);
    }
    tracing::info!(path = %path.display(), "removing a stale socket");
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(&error, "could not remove a stale socket").file(name(path)))
        }
        _ => Ok(()),
    }
}

fn name(path: &Path) -> String {
    path.display().to_string()
}

/// True when the process that listens was killed and isn't quite gone.
fn is_of_a_dying_process(stream: &UnixStream) -> bool {
    let Ok(credentials) = rustix::net::sockopt::socket_peercred(stream) else { return false };
    is_dying(&format!("/proc/{}", credentials.pid.as_raw_nonzero()))
}

/// Gone, a zombie, or about to get the signal that no process survives. In doubt it lives.
fn is_dying(process: &str) -> bool {
    let status = match std::fs::read_to_string(format!("{process}/status")) {
        Ok(status) => status,
        Err(error) => return error.kind() == io::ErrorKind::NotFound && Path::new("/proc/self/status").exists(),
    };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map_or("", str::trim);
    let is_killed = |name: &str| u64::from_str_radix(field(name), 16).is_ok_and(|signals| signals & SIGKILL_BIT != 0);
    field("State:").starts_with(['Z', 'X']) || is_killed("SigPnd:") || is_killed("ShdPnd:")
}

const SIGKILL_BIT: u64 = 1 << (libc::SIGKILL - 1);

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    #[test]
    fn the_living_and_the_dead_are_told_apart() {
        assert!(!is_dying("/proc/self"));
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = format!("/proc/{}", child.id());
        assert!(!is_dying(&process));
        child.kill().unwrap();
        // Not waited for yet: a zombie, or on its way to be one.
        let until = Instant::now() + Duration::from_secs(10);
        while !is_dying(&process) {
            assert!(Instant::now() < until, "a killed process counts as living");
        }
        child.wait().unwrap();
        assert!(is_dying(&process));
    }

    #[test]
    fn a_name_is_freed_only_without_a_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        clear_stale(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(clear_stale(&path).unwrap_err().kind(), ErrorKind::Busy);
        drop(listener);
        assert!(path.exists());
        // A child that another test starts has the listener too, from its fork to its exec.
        let until = Instant::now() + Duration::from_secs(10);
        while let Err(error) = clear_stale(&path) {
            assert!(error.kind() == ErrorKind::Busy && Instant::now() < until, "{error}");
        }
        assert!(!path.exists());
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(clear_stale(&path).unwrap_err().kind(), ErrorKind::Busy);
        assert!(path.exists());
    }
}
