// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients that write while a test does something else, and the disk's expected contents afterwards.

use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::random::Random;
use std::process::{Child, Command, Stdio};

const WRITERS: u64 = 3;
const WRITES: u64 = 250;

/// Several `qemu-io` at work, each on its own part of the disk.
pub struct Load(Vec<Child>);

impl Load {
    /// Starts them; `model` is the disk before, and afterwards its contents once they have ended.
    pub fn start(uri: &str, model: &mut [u8], seed: u64) -> Load {
        let part = model.len() as u64 / WRITERS / 65536 * 65536;
        let start = |writer: u64| {
            let mut random = Random::new(seed * WRITERS + writer);
            let mut command = Command::new(Qemu::system().io_path());
            command.args(["-f", "raw"]);
            for _ in 0..WRITES {
                let offset = writer * part + random.below(part / 512 - 130) * 512;
                let most = if random.chance(30) { 128 } else { 16 };
                let len = 512 * (1 + random.below(most));
                let range = offset as usize..(offset + len) as usize;
                let pattern = 1 + random.below(250) as u8;
                match random.below(8) {
                    0 => {
                        model[range].fill(0);
                        command.args(["-c", &format!("write -z {offset} {len}")]);
                    }
                    1 => {
                        model[range].fill(pattern);
                        command.args(["-c", &format!("write -P {pattern} {offset} {len}")]);
                        command.args(["-c", &format!("read -P {pattern} {offset} {len}")]);
                    }
                    2 => {
                        model[range].fill(0);
                        command.args(["-c", &format!("write -z -u {offset} {len}")]);
                    }
                    _ => {
                        model[range].fill(pattern);
                        command.args(["-c", &format!("write -P {pattern} {offset} {len}")]);
                    }
                }
            }
            command.arg(uri).stdout(Stdio::piped()).spawn().expect("qemu-io runs")
        };
        Load((0..WRITERS).map(start).collect())
    }

    /// Waits for their ends; no request may have failed or read something else.
    pub fn join(self) {
        for writer in self.0 {
            let output = writer.wait_with_output().expect("qemu-io ends");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && !text.contains("failed"), "no request may fail: {text}");
        }
    }
}

/// Applies `write -P`/`write -z` commands to a model.
pub fn apply(model: &mut [u8], commands: &[(u8, usize, usize)]) {
    for &(pattern, offset, len) in commands {
        model[offset..offset + len].fill(pattern);
    }
}

/// The same as commands of `qemu-io`.
pub fn as_commands(writes: &[(u8, usize, usize)]) -> Vec<String> {
    let command = |&(pattern, offset, len): &(u8, usize, usize)| match pattern {
        0 => format!("write -z {offset} {len}"),
        _ => format!("write -P {pattern} {offset} {len}"),
    };
    writes.iter().map(command).collect()
}
