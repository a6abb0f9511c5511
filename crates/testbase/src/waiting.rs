// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting for a state of another thread or process, with a bound.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

/// The longest wait: long on the slowest machine, and short beside a run of all tests.
pub const PATIENCE: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(5);

/// Waits until `is_so`; fails with `what` when that takes too long.
#[track_caller]
pub fn await_that(what: &str, is_so: impl FnMut() -> bool) {
    await_with(is_so, || what.to_owned());
}

/// Waits until `found` returns something, and returns it; fails with `what` when that takes too long.
#[track_caller]
pub fn await_some<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let mut result = None;
    await_that(what, || {
        result = found();
        result.is_some()
    });
    result.expect("the wait has ended")
}

/// As [`await_that`], with the text of the failure made at its end.
#[track_caller]
pub fn await_with(mut is_so: impl FnMut() -> bool, what: impl FnOnce() -> String) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "in vain: {}", what());
        // Between two looks.
        std::thread::sleep(PAUSE);
    }
}

/// Waits until a process listens on the Unix socket with this path, as the process named it; fails when `server` ends first.
///
/// No connection is tried: a server may take the first one for its client, and end with it. The file alone is no
/// proof: it may be an earlier server's, or a socket between `bind` and `listen`.
#[track_caller]
pub fn await_listening(socket: &Path, server: &mut Child) {
    await_that(&format!("a server listens on {}", socket.display()), || {
        assert!(server.try_wait().expect("a child").is_none(), "the server of {} has ended", socket.display());
        listens(socket)
    });
}

/// True when a process listens on the Unix socket with this path, as the process named it (without blanks).
fn listens(socket: &Path) -> bool {
    const LISTENING: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("a list of sockets");
    let name = socket.to_str().expect("a path in UTF-8");
    let mut lines = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.any(|fields| fields.get(3) == Some(&LISTENING) && fields.get(7) == Some(&name))
}

/// Waits until the Unix socket with this path takes a connection: for servers with any number of clients.
#[track_caller]
pub fn await_connection(socket: &Path) {
    await_that(&format!("{} takes a connection", socket.display()), || UnixStream::connect(socket).is_ok());
}
