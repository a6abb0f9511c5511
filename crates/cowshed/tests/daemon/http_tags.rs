// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entity tags of exports of the type `http`: what they know of a disk, and when they are strong.

use super::process::{Monitor, Serving, text};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::waiting::await_that;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

const MIB: usize = 1 << 20;

/// A storage daemon with nodes and exports, among them one over HTTP at `h.sock`.
struct Tagged {
    daemon: Serving,
    monitor: Monitor,
    socket: PathBuf,
    /// The node of that export.
    node: &'static str,
}

impl Tagged {
    fn start(folder: &Path, node: &'static str, nodes: &[Value]) -> Tagged {
        let nodes: Vec<String> = nodes.iter().map(Value::to_string).collect();
        let mut arguments = vec!["qemu-storage-daemon", "--nbd-server", "addr.type=unix,addr.path=n.sock"];
        arguments.extend(["--chardev", "socket,path=m.sock,server=on,wait=off,id=m", "--monitor", "chardev=m"]);
        arguments.extend(nodes.iter().flat_map(|node| ["--blockdev", node]));
        let http = format!("http,id=h,node-name={node},addr.type=unix,addr.path=h.sock");
        arguments.extend(["--export", &http]);
        let daemon = Serving::start(folder, &arguments);
        let socket = folder.join("h.sock");
        let is_there = |socket: &Path| UnixStream::connect(socket).is_ok();
        await_that("the export listens", || is_there(&socket) && is_there(&folder.join("m.sock")));
        Tagged { daemon, monitor: Monitor::connect(&folder.join("m.sock")), socket, node }
    }

    fn curl(&self, arguments: &[&str]) -> String {
        let address = format!("http://localhost/{}", self.node);
        tool("curl", &[&["-sSf", "--unix-socket", text(&self.socket)][..], arguments, &[address.as_str()]].concat())
    }

    fn tag(&self) -> String {
        self.curl(&["-o", "/dev/null", "-w", "%header{etag}"])
    }

    /// Its strong tag. It has a weak one for some seconds after a change of the file.
    fn strong_tag(&self) -> String {
        let mut tag = String::new();
        await_that("a strong tag", || {
            tag = self.tag();
            tag.starts_with('"')
        });
        tag
    }

    /// The status, the length and the first byte for a client that goes on with a part of this tag.
    fn rest(&self, tag: &str) -> (String, char) {
        let field = format!("If-Range: {tag}");
        let first = self.curl(&["-r", "0-99", "-H", &field]).chars().next().expect("a byte");
        (self.curl(&["-r", "0-99", "-H", &field, "-o", "/dev/null", "-w", "%{http_code} %{size_download}"]), first)
    }
}

/// Clients join ranges by a strong tag.
#[test]
fn another_window_of_a_file_has_another_etag() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), [vec![b'A'; MIB], vec![b'B'; MIB]].concat()).expect("an image");
    let file = json!({"driver": "file", "node-name": "f", "filename": "d.raw", "read-only": true});
    let window = |offset: usize| json!({"driver": "raw", "node-name": "w", "file": "f", "read-only": true, "offset": offset, "size": MIB});
    let mut tagged = Tagged::start(folder, "w", &[file, window(0)]);
    let tag = tagged.strong_tag();
    assert_eq!(tagged.rest(&tag), ("206 100".to_owned(), 'A'));
    tagged.monitor.command("blockdev-reopen", json!({"options": [window(MIB)]}));
    let other = tagged.strong_tag();
    assert_ne!(other, tag);
    assert_eq!(tagged.rest(&tag), (format!("200 {MIB}"), 'B'));
    tagged.monitor.command("blockdev-reopen", json!({"options": [window(0)]}));
    assert_eq!(tagged.tag(), tag, "it is the same content again");
    tagged.daemon.stop();
}

#[test]
fn file_with_a_writer_beside_has_a_weak_tag() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![b'A'; MIB]).expect("an image");
    let nodes = [
        json!({"driver": "file", "node-name": "f", "filename": "d.raw"}),
        json!({"driver": "raw", "node-name": "top", "file": "f", "read-only": true}),
    ];
    let mut tagged = Tagged::start(folder, "top", &nodes);
    let tag = tagged.strong_tag();
    let export = json!({"type": "nbd", "id": "e", "node-name": "f", "writable": true});
    tagged.monitor.command("block-export-add", export);
    let weak = tagged.tag();
    assert!(weak.starts_with("W/\""), "a write may be under way: {weak}");
    let disk = format!("nbd+unix:///f?socket={}", text(&folder.join("n.sock")));
    tool("qemu-io", &["-f", "raw", "-c", "write -P 66 0 4k", &disk]);
    assert_ne!(tagged.tag(), weak);
    tagged.monitor.command("block-export-del", json!({"id": "e"}));
    let after = tagged.strong_tag();
    assert_ne!(after, tag);
    assert_eq!(tagged.rest(&tag), (format!("200 {MIB}"), 'B'));
    tagged.daemon.stop();
}

/// Nothing changes the disk as it was, whatever is written to the disk itself.
#[test]
fn disk_of_the_past_keeps_its_strong_tag() {
    const DISK: usize = 32 * MIB;
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![b'A'; DISK]).expect("an image");
    std::fs::File::create(folder.join("t.raw")).and_then(|file| file.set_len(DISK as u64)).expect("a target");
    let raw = |name: &str| {
        let file = json!({"driver": "file", "filename": format!("{name}.raw")});
        json!({"driver": "raw", "node-name": name, "file": file})
    };
    let nodes = [
        raw("d"),
        raw("t"),
        json!({"driver": "copy-before-write", "node-name": "cbw", "file": "d", "target": "t"}),
        json!({"driver": "snapshot-access", "node-name": "past", "file": "cbw"}),
    ];
    let mut tagged = Tagged::start(folder, "past", &nodes);
    let export = json!({"type": "nbd", "id": "e", "node-name": "cbw", "writable": true});
    tagged.monitor.command("block-export-add", export);
    let tag = tagged.tag();
    assert!(tag.starts_with('"'), "{tag}");
    // A download that is under way while the disk is written to.
    let mut download = UnixStream::connect(&tagged.socket).expect("it listens");
    download.write_all(b"GET /past HTTP/1.0\r\n\r\n").expect("it reads");
    let mut download = BufReader::new(download);
    let fields: Vec<String> =
        (&mut download).lines().map_while(|line| line.ok().filter(|line| !line.is_empty())).collect();
    assert!(fields.contains(&format!("ETag: {tag}")), "{fields:?}");
    let disk = format!("nbd+unix:///cbw?socket={}", text(&folder.join("n.sock")));
    tool("qemu-io", &["-f", "raw", "-c", "write -P 66 0 32M", &disk]);
    let mut all = Vec::new();
    download.read_to_end(&mut all).expect("all of it");
    assert!(all == vec![b'A'; DISK], "{} bytes of the past", all.len());
    assert_eq!(tagged.tag(), tag);
    assert_eq!(tagged.rest(&tag), ("206 100".to_owned(), 'A'));
    tagged.daemon.stop();
}
