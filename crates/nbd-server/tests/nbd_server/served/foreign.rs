// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Servers of others: qemu-nbd and nbdkit.

use super::text;
use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::waiting::await_listening;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A foreign server on a Unix socket.
pub struct Foreign {
    child: Child,
    pub socket: PathBuf,
}

impl Foreign {
    /// Starts it and waits until it listens. `arguments` have `SOCKET` where the path of the socket goes.
    pub fn start(program: impl AsRef<OsStr>, socket: &Path, arguments: &[&str]) -> Foreign {
        let _ = std::fs::remove_file(socket);
        let arguments = arguments.iter().map(|argument| argument.replace("SOCKET", text(socket)));
        let program = program.as_ref();
        let child = Command::new(program)
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{program:?} must be installed (scripts/setup test): {error}"));
        let mut foreign = Foreign { child, socket: socket.to_owned() };
        await_listening(socket, &mut foreign.child);
        foreign
    }

    pub fn qemu_nbd(qemu: &Qemu, socket: &Path, image: &Path, arguments: &[&str]) -> Foreign {
        let mut all = vec!["-k", "SOCKET", "-t", "-f", "raw", "--discard=unmap"];
        all.extend(arguments);
        all.push(text(image));
        Self::start(qemu.program("qemu-nbd"), socket, &all)
    }

    pub fn nbdkit(socket: &Path, arguments: &[&str]) -> Foreign {
        let mut all = vec!["-f", "-U", "SOCKET"];
        all.extend(arguments);
        Self::start("nbdkit", socket, &all)
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
