// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptors that a peer has passed, before the first call on them. A file of a FUSE mount, or of another machine, has a server, and
//! `fstat`, `fstatfs` and `close` wait for that. So another thread asks, and keeps what has no answer.

use crate::file_systems;
use crate::sys::{self, SysResult};
use cowshed_types::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// The longest wait for a file system, in which nothing else of the connection is served.
const PATIENCE: Duration = Duration::from_secs(1);

/// The looks at the files that the peers of one server pass. At most one thread waits for a file system, with the descriptors of one
/// message. Until that one answers no other descriptor is taken.
#[derive(Clone, Debug, Default)]
pub struct PassedFiles {
    is_waiting: Arc<AtomicBool>,
}

/// The look of a thread, which ends with it.
struct Look(Arc<AtomicBool>);

impl Drop for Look {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl PassedFiles {
    /// True while a file system hasn't answered.
    pub(super) fn is_waiting(&self) -> bool {
        self.is_waiting.load(Ordering::SeqCst)
    }

    /// The descriptors, where the kernel alone answers for them: those without a file, and files in memory or in a local file system.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: another file system; all of them are closed, each where no other work waits for it. `ETIMEDOUT`: it did not
    /// answer within a second.
    pub(super) fn answered_here(&self, descriptors: Vec<OwnedFd>) -> SysResult<Vec<OwnedFd>> {
        if !descriptors.iter().any(is_file) {
            return Ok(descriptors);
        }
        self.is_waiting.store(true, Ordering::SeqCst);
        let look = Look(Arc::clone(&self.is_waiting));
        // The thread owns them until it has looked: it may wait for ever, and with it the descriptors.
        let (done, found) = sync_channel(1);
        let thread = std::thread::Builder::new().name("passed-files".to_owned());
        let looking = thread.spawn(move || {
            let is_foreign = descriptors.iter().any(|descriptor| is_file(descriptor) && !is_local(descriptor));
            let answer = match is_foreign {
                true => {
                    drop(descriptors);
                    Err(Errno(libc::EOPNOTSUPP))
                }
                false => Ok(descriptors),
            };
            // The receiver may take the next ones at once.
            drop(look);
            drop(done.send(answer));
        });
        looking.map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        found.recv_timeout(PATIENCE).unwrap_or(Err(Errno(libc::ETIMEDOUT)))
    }
}

/// True for a file with a place in a file system. The kernel knows that by itself.
fn is_file(descriptor: &OwnedFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
    link.is_ok_and(|link| link.is_absolute())
}

fn is_local(descriptor: &OwnedFd) -> bool {
    let found = rustix::fs::fstatfs(descriptor.as_fd()).map_err(sys::errno);
    let is_known = |kind: u64| file_systems::IN_MEMORY.contains(&kind) || file_systems::LOCAL.contains(&kind);
    found.is_ok_and(|found| is_known(found.f_type as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl PassedFiles {
        /// As long as a file system doesn't answer.
        pub(crate) fn waiting() -> PassedFiles {
            PassedFiles { is_waiting: Arc::new(AtomicBool::new(true)) }
        }
    }

    #[test]
    fn files_of_this_kernel_are_passed_on() {
        let file = |path: &str| OwnedFd::from(std::fs::File::open(path).expect("a file"));
        let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let (pair, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let passed = PassedFiles::default();
        assert_eq!(passed.answered_here(vec![memory, pair.into()]).expect("in memory").len(), 2);
        // A kernel's own file system that holds no memory of guests.
        assert_eq!(passed.answered_here(vec![file("/proc/self/status")]).unwrap_err(), Errno(libc::EOPNOTSUPP));
        assert!(!passed.is_waiting());
    }
}
