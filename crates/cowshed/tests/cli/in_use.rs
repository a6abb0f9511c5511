// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that somebody else has open for writing: who may look, and who is refused.

use crate::oracle::Oracle;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// `info` reads no data, so a raw image may be in use; the metadata of qcow2 changes under a writer.
#[test]
fn info_of_an_image_in_use_as_qemu_img() {
    for (name, format) in [("a.raw", "raw"), ("a.qcow2", "qcow2")] {
        let oracle = Oracle::new();
        oracle.make(&format!("create -q -f {format} {name} 4M"));
        let mut writer = Command::new(oracle.qemu.io_path())
            .args(["-f", format, name])
            .current_dir(oracle.work())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io runs");
        let (mut input, output) = (writer.stdin.take().expect("a pipe"), writer.stdout.take().expect("a pipe"));
        writeln!(input, "write 0 4k").expect("qemu-io listens");
        // It answers once the image is open and locked.
        assert!(BufReader::new(output).lines().any(|line| line.expect("text").contains("wrote 4096/4096")));
        for line in [format!("info {name}"), format!("info -f {format} {name}"), format!("info -U {name}")] {
            oracle.compare(&line);
        }
        // The next overlay of a running machine's disk.
        let image = oracle.work().join(name);
        oracle.compare_writing(&format!("create -q -f qcow2 -b {} -F {format} next.qcow2", image.display()), |_, _| {});
        drop(input);
        assert!(writer.wait().expect("it ends").success());
        oracle.verdict();
    }
}
