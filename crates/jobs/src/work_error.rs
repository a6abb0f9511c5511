// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QEMU's sentences for work that fails on an image that could be opened.

use cowshed_types::{Errno, Error, ErrorKind};

/// Words an I/O error of work as QEMU does: `sentence`, then the system's words. Other errors have sentences of their own.
pub(crate) fn in_work(error: Error, sentence: impl Into<String>) -> Error {
    match error.kind() {
        // The driver knows better.
        _ if error.sentence().starts_with("Failed to discard cropped clusters") => error,
        ErrorKind::Io | ErrorKind::NoSpace | ErrorKind::Poisoned => {
            let errno = error.errno();
            error.qemu(sentence).with_errno(errno)
        }
        // A file that may grow no further, or one that the system protects while it is open.
        _ if error.errno() == Errno::EFBIG => error.qemu(sentence),
        ErrorKind::PermissionDenied if error.message().starts_with("could not ") => error.qemu(sentence),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_system_says_is_reworded() {
        let full = in_work(Error::os(Errno::ENOSPC, "could not write").offset(4096), "Failed request");
        assert_eq!(full.sentence(), "Failed request: No space left on device");
        assert_eq!(full.to_string(), "could not write: No space left on device (at offset 0x1000)");
        let wrong = in_work(Error::invalid_argument("a wrong size"), "Failed request");
        assert_eq!(wrong.sentence(), "a wrong size");
        let sealed = in_work(Error::os(Errno::EPERM, "could not write").offset(0), "Failed request");
        assert_eq!(sealed.sentence(), "Failed request: Operation not permitted");
    }
}
