// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `block_resize` of a VDI disk in use, and commits into a shorter one. Its map grows where there is room. Else it moves while
//! the disk is drained.

use super::running::Running;
use cowshed_testkit::qemu::Qemu;
use serde_json::json;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

/// Rounds of a client, each of 40 requests.
const ROUNDS: u64 = 16;

/// A client that reads what it has written.
fn start_writer(uri: String) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for round in 1..=ROUNDS {
            let mut words = vec!["-f".to_owned(), "raw".to_owned()];
            for step in 0..20 {
                let place = format!("{} {}k 100k", (round * 20 + step) & 0xff, (step * 7 % 20) * 400 + round);
                words.extend(["-c".to_owned(), format!("write -P {place}")]);
                words.extend(["-c".to_owned(), format!("read -P {place}")]);
            }
            words.push(uri.clone());
            let output = Qemu::newest().io(words);
            let text = output.stdout + &output.stderr;
            assert!(!text.contains("failed"), "round {round}: {text}");
        }
    })
}

/// QEMU finds the image whole, and reads what the writer left; the output of these commands, too.
fn read_back(path: &Path, more: &[String]) -> String {
    Qemu::newest().img(["check".as_ref(), "-f".as_ref(), "vdi".as_ref(), path.as_os_str()]).expect_ok();
    let mut words: Vec<String> = ["-r", "-f", "vdi"].map(str::to_owned).to_vec();
    for step in 0..20 {
        let place = format!("{} {}k 100k", (ROUNDS * 20 + step) & 0xff, (step * 7 % 20) * 400 + ROUNDS);
        words.extend(["-c".to_owned(), format!("read -P {place}")]);
    }
    words.extend(more.iter().flat_map(|command| ["-c".to_owned(), command.clone()]));
    words.push(path.display().to_string());
    let output = Qemu::newest().io(words);
    assert!(!output.stdout.contains("failed") && output.stderr.is_empty(), "{}{}", output.stdout, output.stderr);
    output.stdout
}

#[test]
fn a_vdi_grows_under_a_client_that_writes() {
    // By the node itself, and by a filter that the client's requests don't pass.
    for (options, resized) in [("", "v"), ("static=on", "v"), ("", "f")] {
        let daemon = Running::start(Vec::new());
        let mut client = daemon.client();
        let path = daemon.path("a.vdi");
        Qemu::newest().create(&path, "vdi", options, 8 << 20);
        let node = json!({"driver": "vdi", "node-name": "v", "file": {"driver": "file", "filename": path}});
        client.command("blockdev-add", node);
        client.command("blockdev-add", json!({"driver": "copy-on-read", "node-name": "f", "file": "v"}));
        let socket = daemon.path("n.sock");
        client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
        client.command(
            "block-export-add",
            json!({"type": "nbd", "id": "v", "name": "v", "node-name": "v", "writable": true}),
        );
        let uri = format!("nbd+unix:///v?socket={}", socket.display());
        let writer = start_writer(uri);
        // The map has room for 128 blocks, then it moves: into the place of one block, and of a second one.
        for size in [16 << 20, 64 << 20, 100 << 20, 3 << 30, 400u64 << 30] {
            if options.is_empty() || size < 1 << 32 {
                client.command("block_resize", json!({"node-name": resized, "size": size}));
                // A load: the client writes meanwhile.
                std::thread::sleep(Duration::from_millis(150));
            }
        }
        writer.join().expect("no request fails");
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        let path = folder.path().join("a.vdi");
        let read = read_back(&path, &["length".to_owned()]);
        let length = if options.is_empty() { "400 GiB" } else { "3 GiB" };
        assert!(read.contains(length), "{read}");
    }
}

#[test]
fn a_live_commit_lengthens_a_vdi_base() {
    for (options, size) in [("", 100u64 << 20), ("", 3 << 30), ("static=on", 300 << 20)] {
        let daemon = Running::start(Vec::new());
        let mut client = daemon.client();
        let (qemu, base, top) = (Qemu::newest(), daemon.path("base.vdi"), daemon.path("top.qcow2"));
        qemu.create(&base, "vdi", options, 8 << 20);
        qemu.io_commands(&base, "vdi", &["write -P 8 7800k 100k".to_owned()]);
        qemu.create(&top, "qcow2", &format!("backing_file={},backing_fmt=vdi", base.display()), size);
        qemu.io_commands(&top, "qcow2", &[format!("write -P 9 {} 1M", size - (1 << 20))]);
        let file = |path: &Path| json!({"driver": "file", "filename": path});
        let backing = json!({"driver": "vdi", "node-name": "v", "file": file(&base)});
        let node = json!({"driver": "qcow2", "node-name": "t", "file": file(&top), "backing": backing});
        client.command("blockdev-add", node);
        let socket = daemon.path("n.sock");
        client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
        client.command("block-export-add", json!({"type": "nbd", "id": "t", "node-name": "t", "writable": true}));
        let writer = start_writer(format!("nbd+unix:///t?socket={}", socket.display()));
        client.command("block-commit", json!({"job-id": "c", "device": "t"}));
        client.event("BLOCK_JOB_READY");
        client.command("job-complete", json!({"id": "c"}));
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert!(completed.get("error").is_none(), "{completed}");
        writer.join().expect("no request fails");
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        let last = format!("read -P 9 {} 1M", size - (1 << 20));
        read_back(&folder.path().join("base.vdi"), &["read -P 8 7800k 100k".to_owned(), last]);
    }
}
