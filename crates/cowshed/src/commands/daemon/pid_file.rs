// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The pid file: made under a temporary name and put in its place whole, so that no link leads the write elsewhere.

use crate::output::Failure;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

/// Attempts when other processes start at the same moment.
const ATTEMPTS: u32 = 100;

/// A file with the number of this process; locked while it lives, removed when it ends in order.
pub struct PidFile {
    path: String,
    file: File,
}

/// A file that goes when this is dropped.
struct Temporary(String);

impl Drop for Temporary {
    fn drop(&mut self) {
        // It may have been renamed.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl PidFile {
    pub fn write(path: &str) -> Result<PidFile, Failure> {
        // The process may leave its folder before it removes the file.
        let anchor = |mut file: PidFile| {
            let anchored = std::path::absolute(path).ok().and_then(|path| path.into_os_string().into_string().ok());
            file.path = anchored.unwrap_or_else(|| path.to_owned());
            file
        };
        Self::put(path).map(anchor).map_err(|reason| {
            let words = reason.split(" (os error").next().unwrap_or_default();
            let words = words.strip_prefix(&format!("{}: ", temporary_name(path))).unwrap_or(words);
            let sentence = format!("Could not create '{path}': {words}");
            let message = format!("{path}: could not write the pid file: {reason}");
            Failure { sentence: Some(sentence), ..Failure::new(message) }
        })
    }

    fn put(path: &str) -> Result<PidFile, String> {
        let failed = |error: io::Error| error.to_string();
        let id = std::process::id();
        let temporary = Temporary(temporary_name(path));
        let make = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary.0);
        let mut file = make.map_err(|error| format!("{}: {error}", temporary.0))?;
        file.try_lock().map_err(|error| error.to_string())?;
        file.write_all(format!("{id}\n").as_bytes()).map_err(failed)?;
        for _ in 0..ATTEMPTS {
            let Some(known) = open_known(path)? else {
                // Not over another one that has come meanwhile.
                match std::fs::hard_link(&temporary.0, path) {
                    Ok(()) => return Ok(PidFile { path: path.to_owned(), file }),
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                    Err(error) => return Err(failed(error)),
                }
            };
            if known.try_lock().is_err() {
                return Err("another process has locked it".to_owned());
            }
            // While this one is locked no other process puts another one in its place.
            if is_at(&known, path) {
                std::fs::rename(&temporary.0, path).map_err(failed)?;
                return Ok(PidFile { path: path.to_owned(), file });
            }
        }
        Err("other processes keep changing it".to_owned())
    }
}

/// Stops the process that holds the pid file, as SIGTERM does, and waits for its end, however long that takes. Without such a
/// process there is nothing to do.
pub fn stop_owner(path: &str) -> Result<(), Failure> {
    let wrong = |reason: String| Failure::new(format!("{path}: could not take over: {reason}"));
    let Some(known) = open_known(path).map_err(wrong)? else { return Ok(()) };
    if known.try_lock().is_ok() {
        return Ok(());
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let number = text.trim().parse().ok().and_then(Pid::from_raw);
    let number = number.ok_or_else(|| wrong("it holds no number of a process".to_owned()))?;
    let failed = |error: rustix::io::Errno| wrong(format!("process {}: {error}", number.as_raw_nonzero()));
    let process = pidfd_open(number, PidfdFlags::empty()).map_err(failed)?;
    // The number may have become another's while the file was read: its process holds the lock as long as it lives.
    if known.try_lock().is_ok() {
        return Ok(());
    }
    tracing::info!(process = number.as_raw_nonzero(), "taking over from a daemon");
    pidfd_send_signal(&process, Signal::TERM).map_err(failed)?;
    let mut polled = [PollFd::new(&process, PollFlags::IN)];
    loop {
        match poll(&mut polled, None) {
            Err(rustix::io::Errno::INTR) => {}
            ended => return ended.map(drop).map_err(failed),
        }
    }
}

fn temporary_name(path: &str) -> String {
    format!("{path}.{}.tmp", std::process::id())
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Nothing depends on it: the lock decides.
        if is_at(&self.file, &self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The pid file that another process has left, if there is one.
fn open_known(path: &str) -> Result<Option<File>, String> {
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let kind = metadata.file_type();
    if kind.is_symlink() {
        return Err("it is a symbolic link, which is not followed".to_owned());
    }
    if !kind.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    match OpenOptions::new().write(true).custom_flags(flags).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// True when this file still has this name.
fn is_at(file: &File, path: &str) -> bool {
    let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
    let named = std::fs::symlink_metadata(path).map(identity);
    matches!((file.metadata().map(identity), named), (Ok(ours), Ok(named)) if ours == named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &str) -> String {
        std::fs::read_to_string(path).expect("a file")
    }

    #[test]
    fn links_are_not_followed_and_files_in_use_are_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name).to_str().expect("text").to_owned();
        let (path, precious) = (at("pid"), at("precious"));
        std::fs::write(&precious, "data").expect("a file");
        std::os::unix::fs::symlink(&precious, &path).expect("a link");
        let error = PidFile::write(&path).err().expect("a link is refused").message;
        assert!(error.contains("symbolic link"), "{error}");
        assert_eq!(read(&precious), "data");
        std::fs::remove_file(&path).expect("a link");

        std::fs::write(&path, "1234567\nof a process that is gone").expect("a file");
        let ours = PidFile::write(&path).expect("no process has locked it");
        assert_eq!(read(&path), format!("{}\n", std::process::id()));
        let error = PidFile::write(&path).err().expect("it is locked").message;
        assert!(error.contains("another process has locked it"), "{error}");

        // Another file of this name is not ours to remove.
        std::fs::rename(&path, at("moved")).expect("a file");
        std::fs::write(&path, "other").expect("a file");
        drop(ours);
        assert_eq!(read(&path), "other");
        let mut left: Vec<_> =
            std::fs::read_dir(folder.path()).expect("a folder").map(|e| e.expect("a file").file_name()).collect();
        left.sort();
        assert_eq!(left, ["moved", "pid", "precious"]);
    }
}
