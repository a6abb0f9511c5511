// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A Debian kernel in an emulated machine. `scripts/guest` fetches it, `scripts/setup test` runs that.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// The time without a word from the guest after which it is dead: emulated, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// The folder that `scripts/guest` has filled: `vmlinuz`, `modules/`, `busybox`, `tree/`.
///
/// Panics when it is not complete: a test without its guest proves nothing.
pub fn guest_files() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    let is_complete = folder.join("complete").exists() && folder.join("modules/loop.ko").exists();
    assert!(is_complete, "{} is not complete: scripts/setup test fetches it", folder.display());
    folder
}

/// The first file system of a guest: busybox, all modules, `init`, and more programs by their names and contents.
pub fn initial_file_system(files: &Path, init: &str, programs: &[(&str, Vec<u8>)]) -> Vec<u8> {
    const FOLDER: u32 = 0o040_755;
    const PROGRAM: u32 = 0o100_755;
    let mut archive = Archive(Vec::new());
    for folder in ["bin", "dev", "proc", "disk", "modules"] {
        archive.add(folder, FOLDER, b"");
    }
    archive.add("init", PROGRAM, init.as_bytes());
    let read = |path: &Path| std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    archive.add("bin/busybox", PROGRAM, &read(&files.join("busybox")));
    for (name, content) in programs {
        archive.add(name, PROGRAM, content);
    }
    for module in std::fs::read_dir(files.join("modules")).expect("modules") {
        let module = module.expect("a module");
        let name = format!("modules/{}", module.file_name().to_string_lossy());
        archive.add(&name, PROGRAM, &read(&module.path()));
    }
    archive.add("TRAILER!!!", 0, b"");
    archive.0
}

/// An archive in the "newc" format of cpio, which the kernel unpacks as its first file system.
struct Archive(Vec<u8>);

impl Archive {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        let number = self.0.len() as u32 + 1;
        let fields = [number, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.0.extend_from_slice(b"070701");
        for field in fields {
            self.0.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(0);
        self.pad();
        self.0.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

/// A virtual machine without acceleration, with its console at our hands. It is killed when this is dropped.
#[derive(Debug)]
pub struct Guest {
    machine: Child,
    console: Receiver<String>,
    /// Its console's other direction.
    pub keyboard: ChildStdin,
    /// The text of its console so far.
    pub said: String,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.machine.kill();
        let _ = self.machine.wait();
    }
}

impl Guest {
    /// Boots the kernel with a first file system; `devices` are further arguments of QEMU.
    pub fn boot(files: &Path, initrd: &Path, devices: &[&str]) -> Guest {
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        let mut machine = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-m", "256", "-nodefaults", "-no-user-config", "-nographic", "-serial", "stdio"])
            .args(["-no-reboot", "-kernel", &text(&files.join("vmlinuz")), "-initrd", &text(initrd)])
            .args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check"])
            .args(devices)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("qemu-system-x86_64 runs: scripts/setup test installs it");
        let (sender, console) = channel();
        let output = machine.stdout.take().expect("a pipe");
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output);
            let mut line = Vec::new();
            while lines.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
                line.clear();
            }
        });
        let keyboard = machine.stdin.take().expect("a pipe");
        Guest { machine, console, keyboard, said: String::new() }
    }

    /// Waits for a line of the console with these words.
    #[track_caller]
    pub fn await_words(&mut self, words: &str) {
        loop {
            match self.console.recv_timeout(PATIENCE) {
                Ok(line) => self.said += &line,
                Err(RecvTimeoutError::Timeout) => panic!("the guest is silent; it said:\n{}", self.said),
                Err(RecvTimeoutError::Disconnected) => panic!("the machine has ended; the guest said:\n{}", self.said),
            }
            if self.said.lines().any(|line| line.contains(words)) {
                return;
            }
        }
    }

    /// Its text until it turned itself off. Linux takes its virtual disk away before the machine ends (since 6.14). A
    /// read-ahead of that moment is then reported as an I/O error, though no server failed it.
    pub fn said_while_up(&self) -> &str {
        ["sysrq: Power Off", "reboot: Power down"]
            .iter()
            .filter_map(|words| self.said.find(words))
            .min()
            .map_or(&self.said, |end| &self.said[..end])
    }

    /// True while the machine runs.
    pub fn is_running(&mut self) -> bool {
        self.machine.try_wait().expect("a child").is_none()
    }

    /// Waits until the machine has turned itself off, and takes the rest of its output.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        loop {
            match self.console.recv_timeout(PATIENCE) {
                Ok(line) => self.said += &line,
                Err(RecvTimeoutError::Timeout) => panic!("the guest does not end; it said:\n{}", self.said),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.machine.wait().expect("a child")
    }
}
