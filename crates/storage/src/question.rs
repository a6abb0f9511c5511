// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Questions to the kernel whose answer may never come: those for which a server of a file system, or another process, has to move first.

use crate::sys::SysResult;
use cowshed_types::Errno;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// The answer of another thread, named `name`. Without one that thread stays, and drops its answer if that comes after all.
///
/// # Errors
/// `ETIMEDOUT`: no answer within `limit`. Others: there is no thread.
pub fn answer_within<T: Send + 'static>(
    limit: Duration,
    name: &str,
    ask: impl FnOnce() -> T + Send + 'static,
) -> SysResult<T> {
    let (done, answer) = sync_channel(1);
    let thread = std::thread::Builder::new().name(name.to_owned());
    // Without a reader the answer is dropped there, too.
    let asking = thread.spawn(move || drop(done.send(ask())));
    asking.map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
    answer.recv_timeout(limit).map_err(|_| Errno(libc::ETIMEDOUT))
}
