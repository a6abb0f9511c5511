// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images on NBD servers, by their names on the command line.

use crate::oracle::{Oracle, words};
use cowshed_testkit::waiting::await_listening;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// qemu-nbd with an image, as raw bytes, for any number of clients.
struct QemuNbd {
    child: Child,
    socket: PathBuf,
}

impl QemuNbd {
    fn start(oracle: &Oracle, image: &str, format: &str) -> QemuNbd {
        QemuNbd::start_with(oracle, image, format, &["-t", "--shared=8"])
    }

    fn start_with(oracle: &Oracle, image: &str, format: &str, more: &[&str]) -> QemuNbd {
        let socket = oracle.work().join(format!("{image}.sock"));
        let mut child = Command::new("qemu-nbd")
            .args(more)
            .args(["--discard=unmap", "-f", format, "-k"])
            .arg(&socket)
            .arg(oracle.work().join(image))
            .stderr(Stdio::null())
            .spawn()
            .expect("qemu-nbd must be installed (scripts/setup test)");
        await_listening(&socket, &mut child);
        QemuNbd { child, socket }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn cowshed(oracle: &Oracle, arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(arguments)
        .current_dir(oracle.work())
        .output()
        .expect("our own binary runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn images_on_a_server_are_images() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 8M");
    oracle.io(&["write -P 7 1M 2M", "write -z 5M 64k"], "disk.qcow2");
    let server = QemuNbd::start(&oracle, "disk.qcow2", "qcow2");
    let uri = server.uri();
    let info = cowshed(&oracle, &["info", "-f", "raw", &uri]);
    assert!(info.contains("8 MiB") && info.contains("disk size: unavailable"), "{info}");
    let map = cowshed(&oracle, &["map", "-f", "raw", "--output=json", &uri]);
    let map: serde_json::Value = serde_json::from_str(&map).expect("JSON");
    let data: Vec<u64> = map
        .as_array()
        .expect("a list")
        .iter()
        .filter(|run| run["data"] == true)
        .filter_map(|run| run["start"].as_u64())
        .collect();
    assert_eq!(data, [1 << 20], "{map}");
    cowshed(&oracle, &["convert", "-f", "raw", "-O", "qcow2", &uri, "copy.qcow2"]);
    cowshed(&oracle, &["compare", "-f", "raw", "-F", "qcow2", &uri, "copy.qcow2"]);
    oracle.qemu.expect_clean(&oracle.work().join("copy.qcow2"));
    drop(server);
    assert!(
        oracle
            .qemu
            .is_equal((&oracle.work().join("disk.qcow2"), "qcow2"), (&oracle.work().join("copy.qcow2"), "qcow2"))
    );
}

#[test]
fn a_conversion_to_a_server_replaces_what_was_there() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 source.qcow2 8M");
    oracle.io(&["write -P 3 2M 1M"], "source.qcow2");
    oracle.make("create -q -f raw target.raw 8M");
    oracle.io(&["write -P 255 0 8M"], "target.raw");
    let server = QemuNbd::start(&oracle, "target.raw", "raw");
    // As new, and with -n into an existing image: nothing of the old content may show through.
    for more in [&[][..], &["-n"]] {
        let uri = server.uri();
        let mut arguments = vec!["convert", "-f", "qcow2", "-O", "raw"];
        arguments.extend(more);
        arguments.extend(["source.qcow2", &uri]);
        cowshed(&oracle, &arguments);
        cowshed(&oracle, &["compare", "-f", "qcow2", "-F", "raw", "source.qcow2", &uri]);
    }
    // An image as the content of the export, which is long enough for it.
    oracle.make("create -q -f raw room.raw 16M");
    oracle.io(&["write -P 255 0 16M"], "room.raw");
    let room = QemuNbd::start(&oracle, "room.raw", "raw");
    cowshed(&oracle, &["convert", "-f", "qcow2", "-O", "qcow2", "source.qcow2", &room.uri()]);
    drop((server, room));
    let work = oracle.work();
    assert!(oracle.qemu.is_equal((&work.join("source.qcow2"), "qcow2"), (&work.join("target.raw"), "raw")));
    assert!(oracle.qemu.is_equal((&work.join("source.qcow2"), "qcow2"), (&work.join("room.raw"), "qcow2")));
    // A container that is too small is refused before anything is lost.
    oracle.make("create -q -f raw small.raw 1M");
    let small = QemuNbd::start(&oracle, "small.raw", "raw");
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["convert", "-f", "qcow2", "-O", "raw", "source.qcow2", &small.uri()])
        .current_dir(work)
        .output()
        .expect("our own binary runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("1048576"), "{error}");
}

/// A QED image counts all bytes of its file as its own, and an export can't be cut. QEMU's words.
#[test]
fn qed_needs_an_export_of_its_length() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 1M");
    oracle.make("create -q -f raw room.raw 8M");
    oracle.io(&["write -P 90 0 8M"], "room.raw");
    let server = QemuNbd::start(&oracle, "room.raw", "raw");
    for line in
        [format!("create -f qed {} 1M", server.uri()), format!("convert -f raw -O qed source.raw {}", server.uri())]
    {
        let said = oracle.ours(&oracle.work(), &words(&line));
        let left = std::fs::read(oracle.work().join("room.raw")).expect("a file");
        assert!(left.iter().all(|byte| *byte == 90), "{line}: the export is as it was");
        // It writes over the first sector.
        let real = oracle.real(&oracle.work(), &words(&line));
        std::fs::write(oracle.work().join("room.raw"), vec![90; 8 << 20]).expect("a file");
        assert_eq!((said.code, real.code), (Some(1), Some(1)), "{line}: {}{}", said.err, real.err);
        assert!(said.err.ends_with("Cannot resize NBD nodes\n"), "{line}: {}", said.err);
        assert_eq!(said.err, real.err, "{line}");
    }
}

#[test]
fn the_overlay_of_a_session_needs_one_connection() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 1M");
    oracle.io(&["write -P 7 0 64k"], "disk.qcow2");
    // Without -t it ends behind its first client.
    for format in [&["-f", "raw"][..], &[]] {
        let server = QemuNbd::start_with(&oracle, "disk.qcow2", "qcow2", &[]);
        let uri = server.uri();
        let commands = ["-c", "write -P 5 0 4k", "-c", "read -P 5 0 4k", "-c", "read -P 7 4k 60k"];
        let said = cowshed(&oracle, &[&["io", "-s"], format, &commands[..], &[&uri]].concat());
        assert!(said.contains("read 61440/61440 bytes at offset 4096") && !said.contains("failed"), "{said}");
    }
    let after = cowshed(&oracle, &["io", "-r", "-c", "read -P 7 0 64k", "disk.qcow2"]);
    assert!(!after.contains("failed"), "{after}");
}

#[test]
fn limits_of_a_server_reach_the_image_on_it() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 1M");
    let server = QemuNbd::start(&oracle, "disk.qcow2", "raw");
    let uri = server.uri();
    let above = cowshed(&oracle, &["info", "--limits", &uri]);
    // The words of QEMU 11.
    let expected = "    request alignment: 1\n    opt transfer: 4096\n    min mem alignment: 512\n    \
                    max transfer: 33554432\n    discard alignment: 65536\n";
    assert!(above.contains(expected), "{above}");
    let raw = cowshed(&oracle, &["info", "--limits", "--output=json", "-f", "raw", &uri]);
    let raw: serde_json::Value = serde_json::from_str(&raw).expect("JSON");
    let limits = serde_json::json!({"request-alignment": 1, "opt-transfer": 4096, "min-mem-alignment": 512,
                                    "max-transfer": 33_554_432, "opt-mem-alignment": 4096, "max-iov": 1024});
    assert_eq!(raw["limits"], limits);
}
