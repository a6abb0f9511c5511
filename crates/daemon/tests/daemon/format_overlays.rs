// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Live snapshots with overlays of other formats than qcow2, beside QEMU's newest daemon: the same answers, the same disk.

use super::beside_qemu::Theirs;
use super::jobs::concluded;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A daemon with the disks `q` (qcow2, ones) and `v` (VMDK, twos) of 1 MiB, exported under these names.
struct Side {
    client: Client,
    folder: PathBuf,
}

impl Side {
    fn new(mut client: Client, folder: &Path) -> Side {
        client.files_in(folder);
        let socket = folder.join("n.sock");
        client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
        let mut side = Side { client, folder: folder.to_owned() };
        for (name, format, byte) in [("q", "qcow2", "1"), ("v", "vmdk", "2")] {
            let file = format!("{name}.{format}");
            side.img(&["create", "-q", "-f", format, &file, "1M"]);
            let path = side.folder.join(&file);
            let fill = format!("write -P {byte} 0 1M");
            Qemu::newest().io(["-f", format, "-c", &fill, path.to_str().expect("text")]).expect_ok();
            side.make_overlays(format, &file);
            let node = json!({"driver": format, "node-name": name, "file": {"driver": "file", "filename": file}});
            side.client.command("blockdev-add", node);
            let export = json!({"type": "nbd", "id": name, "name": name, "node-name": name, "writable": true});
            side.client.command("block-export-add", export);
        }
        side
    }

    /// Disks over a base that no daemon has open yet.
    fn make_overlays(&self, format: &str, base: &str) {
        let (kind, names) = match format {
            "vmdk" => ("vmdk", ["a.vmdk", "b.vmdk"]),
            _ => ("qcow", ["a.qcow", "b.qcow"]),
        };
        for name in names {
            self.img(&["create", "-q", "-f", kind, "-F", format, "-b", base, name]);
        }
    }

    /// Runs `qemu-img` with names of this folder.
    fn img(&self, words: &[&str]) {
        let named = |word: &&str| match word.contains('.') {
            true => self.folder.join(word).display().to_string(),
            false => (*word).to_owned(),
        };
        Qemu::newest().img(words.iter().map(named)).expect_ok();
    }

    /// An image that exists and has no backing node yet.
    fn add(&mut self, format: &str, name: &str, file: &str) {
        let node =
            json!({"driver": format, "node-name": name, "file": {"driver": "file", "filename": file}, "backing": null});
        self.client.command("blockdev-add", node);
    }

    fn answer(&mut self, command: &str, arguments: &Value) -> Result<(), String> {
        let answer = self.client.execute(command, arguments.clone());
        answer.map(drop).map_err(|error| error["desc"].as_str().expect("words").to_owned())
    }

    /// The requests of a client of an export; what `qemu-io` prints of their results.
    fn guest(&self, export: &str, requests: &[&str]) -> Vec<String> {
        let uri = format!("nbd+unix:///{export}?socket={}", self.folder.join("n.sock").display());
        let mut words = vec!["-f", "raw"];
        words.extend(requests.iter().flat_map(|request| ["-c", request]));
        words.push(&uri);
        let output = Qemu::newest().io(words);
        let text = output.stdout + &output.stderr;
        text.lines().filter(|line| !line.contains(" ops")).map(str::to_owned).collect()
    }
}

/// Both daemons, which must not differ.
struct Both {
    ours: Side,
    theirs: Side,
    daemon: Running,
    _peer: Theirs,
}

impl Both {
    fn start() -> Both {
        let (peer, client) = Theirs::start_newest();
        let theirs = Side::new(client, peer.folder.path());
        let daemon = Running::start(Vec::new());
        let ours = Side::new(daemon.client(), daemon.folder.path());
        Both { ours, theirs, daemon, _peer: peer }
    }

    fn img(&self, words: &[&str]) {
        self.ours.img(words);
        self.theirs.img(words);
    }

    fn add(&mut self, format: &str, name: &str, file: &str) {
        self.ours.add(format, name, file);
        self.theirs.add(format, name, file);
    }

    #[track_caller]
    fn command(&mut self, command: &str, arguments: Value) {
        let answers = [self.ours.answer(command, &arguments), self.theirs.answer(command, &arguments)];
        assert_eq!(answers, [Ok(()), Ok(())], "{command} {arguments}");
    }

    #[track_caller]
    fn refused(&mut self, command: &str, arguments: Value, words: &str) {
        let answers = [self.ours.answer(command, &arguments), self.theirs.answer(command, &arguments)];
        assert_eq!(answers, [Err(words.to_owned()), Err(words.to_owned())], "{command} {arguments}");
    }

    #[track_caller]
    fn guest(&self, export: &str, requests: &[&str]) {
        let ours = self.ours.guest(export, requests);
        assert_eq!(ours, self.theirs.guest(export, requests), "{requests:?}");
        let failed = ours.iter().find(|line| line.contains("failed"));
        assert_eq!(failed, None, "{requests:?}");
    }

    /// A job that waits for its completion.
    fn complete(&mut self, id: &str) {
        for side in [&mut self.ours, &mut self.theirs] {
            side.client.event("BLOCK_JOB_READY");
            side.client.command("job-complete", json!({"id": id}));
            assert_eq!(concluded(&mut side.client, id), None);
        }
    }

    fn stop(self) {
        self.daemon.stop().expect("stopped in order");
    }
}

const WRITES: &[&str] = &["write -P 7 64k 64k", "write -z 192k 4k", "write -P 8 300k 512", "discard 320k 64k", "flush"];

#[test]
fn guests_write_to_overlays_of_vmdk_and_qcow() {
    let mut both = Both::start();
    both.add("qcow", "oq", "a.qcow");
    both.add("vmdk", "ov", "a.vmdk");
    for (below, overlay, byte) in [("q", "oq", "1"), ("v", "ov", "2")] {
        both.command("blockdev-snapshot", json!({"node": below, "overlay": overlay}));
        both.guest(below, WRITES);
        let under = format!("read -P {byte} 512k 256k");
        let reads = ["read -P 7 64k 64k", "read -P 0 192k 4k", "read -P 8 300k 512", &under];
        both.guest(below, &reads);
        let commit = json!({"job-id": "c", "device": overlay, "auto-dismiss": false});
        both.command("block-commit", commit);
        both.complete("c");
        both.guest(below, &reads);
    }
    // Another backing node, and none.
    both.add("qcow", "pq", "b.qcow");
    let reopen = |backing: Value| {
        let node = json!({"driver": "qcow", "node-name": "pq", "file": {"driver": "file", "filename": "b.qcow"}});
        let mut options = json!({"options": [node]});
        if !backing.is_boolean() {
            options["options"][0]["backing"] = backing;
        }
        options
    };
    both.command("blockdev-reopen", reopen(json!("q")));
    both.refused("blockdev-reopen", reopen(json!(true)), "backing is missing for 'pq'");
    both.command("blockdev-reopen", reopen(Value::Null));
    both.stop();
}

#[test]
fn images_without_backing_files_are_no_overlays() {
    let mut both = Both::start();
    for format in ["vdi", "vpc", "vhdx", "raw"] {
        both.img(&["create", "-q", "-f", format, &format!("n.{format}"), "1M"]);
        let file = json!({"driver": "file", "filename": format!("n.{format}")});
        both.command("blockdev-add", json!({"driver": format, "node-name": format, "file": file}));
        let words = "The overlay does not support backing images";
        both.refused("blockdev-snapshot", json!({"node": "q", "overlay": format}), words);
    }
    both.stop();
}

#[test]
fn overlays_of_other_formats_are_made_by_the_command() {
    let mut both = Both::start();
    let snapshot = |below: &str, format: &str| json!({"node-name": below, "snapshot-file": format!("s.{format}"), "snapshot-node-name": format, "format": format});
    both.command("blockdev-snapshot-sync", snapshot("q", "qcow"));
    both.command("blockdev-snapshot-sync", snapshot("qcow", "qed"));
    both.guest("q", WRITES);
    both.guest("q", &["read -P 7 64k 64k", "read -P 0 192k 4k", "read -P 1 512k 256k"]);
    both.refused("blockdev-snapshot-sync", snapshot("qed", "vmdk"), "backing_file must be a vmdk image");
    both.refused("blockdev-snapshot-sync", snapshot("qed", "vdi"), "Backing file not supported for file format 'vdi'");
    // QEMU can't open the parent a second time.
    both.ours.client.command("blockdev-snapshot-sync", snapshot("v", "vmdk"));
    assert_eq!(both.ours.guest("v", WRITES).iter().find(|line| line.contains("failed")), None);
    let folder = both.ours.folder.clone();
    let (_folder, stopped) = both.daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let path = folder.join("s.vmdk").display().to_string();
    let reads = ["-c", "read -P 7 64k 64k", "-c", "read -P 2 512k 256k", "-r", "-f", "vmdk", &path];
    let output = Qemu::newest().io(reads);
    assert!(!output.stdout.contains("failed"), "{}{}", output.stdout, output.stderr);
}

/// QEMU takes both overlays, and fails the requests of guests then.
#[test]
fn a_vmdk_overlay_stands_on_its_parent_only() {
    let daemon = Running::start(Vec::new());
    let mut side = Side::new(daemon.client(), daemon.folder.path());
    side.img(&["create", "-q", "-f", "vmdk", "alone.vmdk", "1M"]);
    let used = side.folder.join("a.vmdk").display().to_string();
    let node = format!("driver=vmdk,backing=,file.filename={used}");
    Qemu::newest().io(["--image-opts", "-c", "write -P 3 0 64k", &node]).expect_ok();
    // The parent is another one from now on.
    side.guest("v", &["write -P 5 64k 64k", "flush"]);
    for (name, why) in [("a", "was changed since this disk was made of it"), ("alone", "is no difference to a parent")]
    {
        side.add("vmdk", name, &format!("{name}.vmdk"));
        let words = side.client.refusal("blockdev-snapshot", json!({"node": "v", "overlay": name}));
        assert!(words.contains(why), "{words}");
    }
    assert_eq!(side.guest("v", &["write -P 6 0 64k"]), ["wrote 65536/65536 bytes at offset 0"]);
    // A disk without data is a difference to whatever it stands on.
    side.add("vmdk", "new", "b.vmdk");
    side.client.command("blockdev-snapshot", json!({"node": "v", "overlay": "new"}));
    side.guest("v", &["write -P 9 128k 64k", "flush"]);
    let folder = side.folder.clone();
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let reads = ["read -P 6 0 64k", "read -P 5 64k 64k", "read -P 9 128k 64k", "read -P 2 192k 64k"];
    let new = folder.join("b.vmdk").display().to_string();
    let words = reads.iter().flat_map(|read| ["-c", read]).chain(["-r", "-f", "vmdk", &new]);
    let output = Qemu::newest().io(words);
    assert!(!output.stdout.contains("failed") && output.stderr.is_empty(), "{}{}", output.stdout, output.stderr);
}
