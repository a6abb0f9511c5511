// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The names that commands write into headers: QEMU reads the guest's data from the files, after the daemon has ended.

use super::beside_qemu::Theirs;
use super::running::{Client, Running};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use serde_json::{Value, json};
use std::path::Path;

const SIZE: u64 = 2 << 20;
const SECRET: &str = "secret,id=s0,data=pw";

/// One way to put a disk together.
struct Case {
    about: &'static str,
    /// Commands that add the node `a`; names of files are relative.
    nodes: Vec<(&'static str, Value)>,
    /// The disk's data.
    content: Vec<u8>,
}

fn file(name: &str) -> Value {
    json!({"driver": "file", "filename": name})
}

fn qcow2(node: &str, name: &str) -> Value {
    json!({"driver": "qcow2", "node-name": node, "file": file(name)})
}

fn over(node: &str, name: &str, backing: Value) -> Value {
    let mut options = qcow2(node, name);
    options["backing"] = backing;
    options
}

fn cases(folder: &Path) -> Vec<Case> {
    let all = |pattern: u8| vec![pattern; SIZE as usize];
    let case = |about, content, nodes| Case { about, nodes, content };
    let add = |options: Value| ("blockdev-add", options);
    let raw = |more: Value| {
        let mut options = json!({"driver": "raw", "node-name": "a"});
        options.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        add(options)
    };
    let mut container = std::fs::read(folder.join("base")).expect("an image");
    container.resize(SIZE as usize, 0);
    let group = json!({"qom-type": "throttle-group", "id": "g"});
    let secret = json!({"qom-type": "secret", "id": "s0", "data": "pw"});
    let reopened = json!({"options": [{"driver": "qcow2", "node-name": "a", "file": "f", "backing": "b"}]});
    vec![
        case("as the header says", all(3), vec![add(qcow2("a", "top"))]),
        case("another backing file", all(5), vec![add(qcow2("b", "base2")), add(over("a", "top", json!("b")))]),
        case("no backing file", all(0), vec![add(over("a", "top", Value::Null))]),
        case(
            "a container as a disk",
            container,
            vec![
                add(json!({"driver": "raw", "node-name": "b", "file": file("base")})),
                add(over("a", "top", json!("b"))),
            ],
        ),
        case("raw over an image", all(3), vec![raw(json!({"file": {"driver": "qcow2", "file": file("base")}}))]),
        case(
            "a window of a node",
            all(0x22)[..1 << 20].to_vec(),
            vec![
                add(json!({"driver": "file", "node-name": "f", "filename": "flat"})),
                raw(json!({"offset": 1 << 20, "file": "f"})),
            ],
        ),
        case(
            "an image in a window",
            all(3),
            vec![add(json!({"driver": "qcow2", "node-name": "a",
                            "file": {"driver": "raw", "offset": 1 << 20, "file": file("win")}}))],
        ),
        case(
            "an encrypted volume",
            all(7),
            vec![
                ("object-add", secret),
                add(json!({"driver": "luks", "node-name": "a", "key-secret": "s0", "file": file("luks")})),
            ],
        ),
        case(
            "another data file",
            all(9),
            vec![add(json!({"driver": "qcow2", "node-name": "a", "file": file("ext"), "data-file": file("ext2.raw")}))],
        ),
        case(
            "an overlay without a name",
            all(5),
            vec![
                add(qcow2("b", "base2")),
                add(qcow2("a", "none")),
                ("blockdev-snapshot", json!({"node": "b", "overlay": "a"})),
            ],
        ),
        case(
            "a filter",
            all(5),
            vec![
                ("object-add", group),
                add(qcow2("b", "base2")),
                add(json!({"driver": "throttle", "node-name": "a", "throttle-group": "g",
                           "file": {"driver": "qcow2", "file": file("top"), "backing": "b"}})),
            ],
        ),
        case(
            "a reopened image",
            all(5),
            vec![
                add(qcow2("b", "base2")),
                add(json!({"driver": "qcow2", "node-name": "a",
                           "file": {"driver": "file", "node-name": "f", "filename": "top"}})),
                ("blockdev-reopen", reopened),
            ],
        ),
    ]
}

/// The files of all cases.
fn make(folder: &Path) {
    let qemu = Qemu::newest();
    let at = |name: &str| folder.join(name);
    let fill = |name: &str, format: &str, commands: &[&str]| {
        let commands: Vec<String> = commands.iter().map(|&text| text.to_owned()).collect();
        qemu.io_commands(&at(name), format, &commands).expect_ok();
    };
    qemu.create(&at("flat"), "raw", "", SIZE);
    fill("flat", "raw", &["write -P 17 0 1M", "write -P 34 1M 1M"]);
    for (name, write) in [("base", "write -P 3 0 2M"), ("base2", "write -P 5 0 2M")] {
        qemu.create(&at(name), "qcow2", "", SIZE);
        fill(name, "qcow2", &[write]);
    }
    qemu.create(&at("none"), "qcow2", "", SIZE);
    for name in ["top", "mid", "above"] {
        qemu.create(&at(name), "qcow2", "backing_file=base,backing_fmt=qcow2", SIZE);
    }
    let ext = format!("data_file={}", at("ext.raw").display());
    qemu.create(&at("ext"), "qcow2", &ext, SIZE);
    fill("ext", "qcow2", &["write -P 6 0 2M"]);
    std::fs::write(at("ext2.raw"), vec![9; SIZE as usize]).expect("written");
    let mut window = vec![0; 1 << 20];
    window.extend(std::fs::read(at("base")).expect("an image"));
    window.resize(16 << 20, 0);
    std::fs::write(at("win"), window).expect("written");
    let luks = at("luks").display().to_string();
    let size = SIZE.to_string();
    let options = ["create", "-q", "-f", "luks", "--object", SECRET, "-o", "key-secret=s0,iter-time=10", &luks, &size];
    qemu.img(options).expect_ok();
    let image = format!("driver=luks,key-secret=s0,file.filename={luks}");
    qemu.io(["--object", SECRET, "-c", "write -P 7 0 2M", "--image-opts", &image]).expect_ok();
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("a file");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
    }
}

/// The data that QEMU reads from an image, by its header alone, in another folder than the daemon's.
fn content(path: &Path) -> Vec<u8> {
    let raw = path.with_extension("content");
    let arguments = ["convert", "--object", SECRET, "-f", "qcow2", "-O", "raw"].map(std::ffi::OsStr::new);
    Qemu::newest().img(arguments.into_iter().chain([path.as_os_str(), raw.as_os_str()])).expect_ok();
    std::fs::read(&raw).expect("just written")
}

/// An image of the disk by one of the commands that name it in a header; its name.
type Command = (&'static str, fn(&mut Client) -> &'static str);

fn chain(client: &mut Client) {
    client.command("blockdev-add", over("m", "mid", json!("a")));
    client.command("blockdev-add", over("t", "above", json!("m")));
}

fn ended(client: &mut Client) {
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
}

const COMMANDS: &[Command] = &[
    ("blockdev-snapshot-sync", |client| {
        let file = json!({"node-name": "a", "snapshot-file": "made", "snapshot-node-name": "s"});
        client.command("blockdev-snapshot-sync", file);
        "made"
    }),
    ("block-commit", |client| {
        chain(client);
        client.command("block-commit", json!({"job-id": "j", "device": "t", "top-node": "m", "base-node": "a"}));
        ended(client);
        "above"
    }),
    ("block-stream", |client| {
        chain(client);
        client.command("block-stream", json!({"job-id": "j", "device": "t", "base-node": "a"}));
        ended(client);
        "above"
    }),
    ("drive-backup", |client| {
        chain(client);
        // In full: `mode` is absolute-paths.
        let target = client.in_folder("made.qcow2");
        client.command("drive-backup", json!({"job-id": "j", "device": "m", "target": target, "sync": "top"}));
        ended(client);
        "made.qcow2"
    }),
    ("drive-mirror", |client| {
        client.command("blockdev-add", over("m", "mid", json!("a")));
        let target = client.in_folder("made.qcow2");
        client.command("drive-mirror", json!({"job-id": "j", "device": "m", "target": target, "sync": "top"}));
        client.event("BLOCK_JOB_READY");
        client.command("job-complete", json!({"id": "j"}));
        ended(client);
        "made.qcow2"
    }),
];

#[test]
fn closed_image_reads_as_it_did_in_the_daemon() {
    let files = temp_dir();
    make(files.path());
    for case in cases(files.path()) {
        for (command, run) in COMMANDS {
            let daemon = Running::start(Vec::new());
            copy(files.path(), daemon.folder.path());
            let mut client = daemon.client();
            client.files_in(daemon.folder.path());
            for (name, arguments) in &case.nodes {
                client.command(name, arguments.clone());
            }
            let made = run(&mut client);
            let (folder, stopped) = daemon.keep_after_stop();
            stopped.expect("stopped in order");
            let mut found = content(&folder.path().join(made));
            // The images above are as large as the largest disk.
            found.truncate(case.content.len());
            let differs = found.iter().zip(&case.content).position(|(one, other)| one != other);
            assert_eq!(
                differs,
                None,
                "{}, {command}: {}",
                case.about,
                Qemu::newest().info(&folder.path().join(made), "qcow2")
            );
        }
    }
}

/// A name as its bytes in a header.
fn named(path: &Path) -> Value {
    Qemu::newest().info(path, "qcow2")["backing-filename"].clone()
}

#[test]
fn a_header_names_nodes_with_the_words_of_qemu() {
    let files = temp_dir();
    make(files.path());
    let (theirs, mut theirs_client) = Theirs::start_newest();
    let daemon = Running::start(Vec::new());
    // Both get absolute names: a relative one is relative to the daemon's folder, and ours runs in the test's own.
    let folder = temp_dir();
    for case in cases(files.path())
        .into_iter()
        .filter(|case| !["a filter", "another data file", "a container as a disk"].contains(&case.about))
    {
        let mut names = Vec::new();
        for (number, client) in [&mut daemon.client(), &mut theirs_client].into_iter().enumerate() {
            copy(files.path(), folder.path());
            let made = format!("made{number}.qcow2");
            client.files_in(folder.path());
            for (name, arguments) in &case.nodes {
                client.command(name, arguments.clone());
            }
            let file = json!({"node-name": "a", "snapshot-file": made, "snapshot-node-name": "s"});
            client.command("blockdev-snapshot-sync", file);
            let _ = client.execute("blockdev-del", json!({"node-name": "s"}));
            let nodes = client.command("query-named-block-nodes", json!({}));
            let about = |node: &Value| json!([node["file"], node["image"]["filename"], node["backing_file"]]);
            let about = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "a").map(about);
            names.push(json!([named(&folder.path().join(&made)), about]));
            for node in ["a", "b", "f"] {
                let _ = client.execute("blockdev-del", json!({"node-name": node}));
            }
            let _ = client.execute("object-del", json!({"id": "s0"}));
            std::fs::remove_file(folder.path().join(&made)).expect("it was made");
        }
        assert_eq!(names[0], names[1], "{}", case.about);
    }
    drop(theirs);
    daemon.stop().expect("stopped in order");
}

#[test]
fn later_action_names_a_node_of_an_earlier() {
    let files = temp_dir();
    make(files.path());
    let daemon = Running::start(Vec::new());
    copy(files.path(), daemon.folder.path());
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    client.command("blockdev-add", qcow2("b", "base2"));
    client.command("blockdev-add", over("o", "top", Value::Null));
    let made = json!({"node-name": "o", "snapshot-file": "made", "snapshot-node-name": "s"});
    client.command(
        "transaction",
        json!({"actions": [{"type": "blockdev-snapshot", "data": {"node": "b", "overlay": "o"}},
                           {"type": "blockdev-snapshot-sync", "data": made}]}),
    );
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert!(content(&folder.path().join("made")).iter().all(|&byte| byte == 5));
}

#[test]
fn a_changed_image_over_a_changed_image_opens_in_another_session() {
    let files = temp_dir();
    make(files.path());
    let daemon = Running::start(Vec::new());
    copy(files.path(), daemon.folder.path());
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    let below = json!({"driver": "qcow2", "file": file("base2")});
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "a", "file": below}));
    chain(&mut client);
    let made = json!({"node-name": "t", "snapshot-file": "made", "snapshot-node-name": "s"});
    client.command("blockdev-snapshot-sync", made);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    // QEMU doesn't open such a name: it takes the header's name of the backing file, too.
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    client.command("blockdev-add", qcow2("made", &folder.path().join("made").display().to_string()));
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    client.command("block-export-add", json!({"type": "nbd", "id": "made", "node-name": "made"}));
    let uri = super::exports::uri(&daemon, "made");
    let read = Qemu::newest().io(["-r", "-f", "raw", "-c", "read -P 5 0 2M", &uri]).expect_ok();
    assert!(!read.stdout.contains("verification failed"), "{}", read.stdout);
    daemon.stop().expect("stopped in order");
}

#[test]
fn too_long_backing_name_is_refused_first() {
    let daemon = Running::start(Vec::new());
    let deep = daemon.folder.path().join([&"d".repeat(200); 4].map(String::as_str).join("/"));
    std::fs::create_dir_all(&deep).expect("made");
    let (low, qemu) = (deep.join("f".repeat(200)), Qemu::newest());
    std::fs::create_dir_all(&deep).expect("made");
    qemu.create(&daemon.path("low"), "qcow2", "", SIZE);
    std::fs::rename(daemon.path("low"), &low).expect("moved");
    for name in ["mid", "above"] {
        qemu.create(&daemon.path(name), "qcow2", "", SIZE);
    }
    let mut client = daemon.client();
    client.command(
        "blockdev-add",
        json!({"driver": "qcow2", "node-name": "a", "file": file(&low.display().to_string())}),
    );
    let made = daemon.path("made");
    let sync = json!({"node-name": "a", "snapshot-file": made, "snapshot-node-name": "s"});
    let too_long = |refusal: String| assert_eq!(refusal, "backing file name too long");
    too_long(client.refusal("blockdev-snapshot-sync", sync));
    assert!(!made.exists());
    client.files_in(daemon.folder.path());
    chain(&mut client);
    too_long(client.refusal("block-commit", json!({"job-id": "j", "device": "t", "top-node": "m", "base-node": "a"})));
    too_long(client.refusal("block-stream", json!({"job-id": "j", "device": "t", "base-node": "a"})));
    let named = json!({"job-id": "j", "device": "t", "base-node": "a", "backing-file": "y".repeat(1024)});
    too_long(client.refusal("block-stream", named));
    let backup = json!({"job-id": "j", "device": "m", "target": made, "sync": "top"});
    too_long(client.refusal("drive-backup", backup));
    assert!(!made.exists());
    assert_eq!(client.command("query-jobs", json!({})), json!([]));
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_stream_of_nothing_leaves_the_header() {
    let files = temp_dir();
    make(files.path());
    let daemon = Running::start(Vec::new());
    copy(files.path(), daemon.folder.path());
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    client.command("blockdev-add", over("t", "top", Value::Null));
    client.command("block-stream", json!({"job-id": "j", "device": "t"}));
    ended(&mut client);
    // On its present backing node, which isn't the one in its header.
    client.command("blockdev-add", qcow2("b", "base2"));
    client.command("blockdev-add", over("m", "mid", json!("b")));
    client.command("block-stream", json!({"job-id": "j", "device": "m", "base-node": "b"}));
    ended(&mut client);
    // A disk of another format without a backing file.
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "r", "file": file("flat")}));
    client.command("block-stream", json!({"job-id": "j", "device": "r"}));
    ended(&mut client);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    for name in ["top", "mid"] {
        assert_eq!(named(&folder.path().join(name)), "base", "{name}");
    }
}

/// The same path from the folder in which this test runs.
fn relative(path: &Path) -> String {
    let here = std::env::current_dir().expect("a folder");
    let (mut here, mut there) = (here.components().peekable(), path.components().peekable());
    while here.peek() == there.peek() && here.peek().is_some() {
        here.next();
        there.next();
    }
    let up = here.map(|_| "..".to_owned());
    let down = there.map(|part| part.as_os_str().to_str().expect("text").to_owned());
    up.chain(down).collect::<Vec<_>>().join("/")
}

#[test]
fn images_in_one_folder_stay_together_when_it_moves() {
    let files = temp_dir();
    make(files.path());
    let daemon = Running::start(Vec::new());
    let at = |name: &str| relative(&daemon.path(name));
    copy(files.path(), daemon.folder.path());
    std::fs::create_dir(daemon.path("sub")).expect("made");
    std::fs::rename(daemon.path("base2"), daemon.path("vm:1")).expect("moved");
    for (image, below) in [("mid", "./vm:1"), ("above", "mid")] {
        let image = daemon.path(image).display().to_string();
        Qemu::newest().img(["rebase", "-u", "-F", "qcow2", "-b", below, &image]).expect_ok();
    }
    let mut client = daemon.client();
    client.command("blockdev-add", qcow2("b", &at("vm:1")));
    client.command("blockdev-add", over("m", &at("mid"), json!("b")));
    client.command("blockdev-add", over("t", &at("above"), json!("m")));
    // So that an overlay has a user.
    let server = json!({"type": "unix", "data": {"path": daemon.path("n")}});
    client.command("nbd-server-start", json!({"addr": server}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "t", "writable": true}));
    let snapshot = |file: &str, node: &str, of: &str| json!({"node-name": of, "snapshot-file": at(file), "snapshot-node-name": node});
    client.command("blockdev-snapshot-sync", snapshot("beside", "s1", "t"));
    client.command("blockdev-snapshot-sync", snapshot("sub/apart", "s2", "s1"));
    client.command("block-commit", json!({"job-id": "j", "device": "s2", "top-node": "m", "base-node": "b"}));
    ended(&mut client);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert_eq!(named(&folder.path().join("beside")), "above");
    assert_eq!(named(&folder.path().join("above")), "./vm:1");
    let name = named(&folder.path().join("sub/apart"));
    let path = Path::new(name.as_str().expect("a name"));
    assert!(path.is_absolute() && path.canonicalize().is_ok_and(|path| path == folder.path().join("beside")), "{name}");
    assert!(content(&folder.path().join("sub/apart")).iter().all(|&byte| byte == 5));
    let moved = temp_dir();
    copy_files(folder.path(), moved.path());
    assert!(content(&moved.path().join("beside")).iter().all(|&byte| byte == 5));
}

fn copy_files(from: &Path, to: &Path) {
    for name in ["beside", "above", "vm:1"] {
        std::fs::rename(from.join(name), to.join(name)).expect("moved");
    }
}

/// The results of a conversation with the newest QEMU and with ours.
fn with_both(mut talk: impl FnMut(&mut Client, &Path) -> Value) -> [Value; 2] {
    let (theirs, mut client) = Theirs::start_newest();
    let found = talk(&mut client, theirs.folder.path());
    let daemon = Running::start(Vec::new());
    let ours = talk(&mut daemon.client(), daemon.folder.path());
    daemon.stop().expect("stopped in order");
    [ours, found]
}

fn in_file(folder: &Path, more: &Value) -> Value {
    let path = folder.join("a");
    let mut options = json!({"driver": "qcow2", "node-name": "a",
                             "file": {"driver": "file", "node-name": "f", "filename": path, "discard": "unmap"}});
    options.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    options
}

/// The same node with other options.
fn again(more: &Value) -> Value {
    let mut options = json!({"driver": "qcow2", "node-name": "a", "file": "f"});
    options.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    json!({"options": [options]})
}

fn said(answer: Result<Value, Value>) -> Value {
    answer.map_or_else(|error| error["desc"].clone(), |_| json!("done"))
}

#[test]
fn a_reopened_node_discards_as_before_unless_told_otherwise() {
    let qemu = Qemu::newest();
    let words = [json!({"discard": "unmap"}), json!({"discard": "ignore"}), json!({})];
    let [ours, theirs] = with_both(|client, folder| {
        let server = folder.join("n");
        client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": server}}}));
        let mut found = Vec::new();
        for first in &words {
            for second in &words {
                let image = folder.join("a");
                qemu.create(&image, "qcow2", "", 1 << 20);
                qemu.io_commands(&image, "qcow2", &["write -P 4 0 1M".to_owned()]).expect_ok();
                client.command("blockdev-add", in_file(folder, first));
                client
                    .command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "a", "writable": true}));
                client.command("blockdev-reopen", again(second));
                let uri = format!("nbd+unix:///a?socket={}", server.display());
                qemu.io(["-f", "raw", "-c", "discard 0 1M", &uri]).expect_ok();
                client.command("block-export-del", json!({"id": "e", "mode": "hard"}));
                client.event("BLOCK_EXPORT_DELETED");
                client.command("blockdev-del", json!({"node-name": "a"}));
                let is_gone = qemu.content(&image, "qcow2").iter().all(|&byte| byte == 0);
                found.push(json!([first, second, is_gone]));
                std::fs::remove_file(&image).expect("removed");
            }
        }
        Value::Array(found)
    });
    assert_eq!(ours, theirs);
}

#[test]
fn reopen_keeps_or_resets_options_as_qemu() {
    let qemu = Qemu::newest();
    let options = [
        json!({"detect-zeroes": "on"}),
        json!({"detect-zeroes": "unmap", "discard": "unmap"}),
        json!({"read-only": true}),
        json!({"cache": {"no-flush": true}}),
        json!({"auto-read-only": true}),
        json!({"force-share": true, "read-only": true}),
        json!({"lazy-refcounts": true}),
        json!({"overlap-check": "all"}),
        json!({"discard-no-unref": true}),
        json!({"pass-discard-request": true}),
        json!({"cache-clean-interval": 5}),
    ];
    let [ours, theirs] = with_both(|client, folder| {
        qemu.create(&folder.join("a"), "qcow2", "", 1 << 20);
        let mut found = Vec::new();
        for first in &options {
            for second in [json!({}), json!({"read-only": false}), json!({"read-only": true})] {
                // A node that forbids to share stays shared in both, each with words of its own.
                if first.get("force-share").is_some() && second != json!({}) {
                    continue;
                }
                client.command("blockdev-add", in_file(folder, first));
                let answer = said(client.execute("blockdev-reopen", again(&second)));
                let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
                let node = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "a").cloned();
                let node = node.expect("the node");
                found.push(json!([first, second, answer, node["ro"], node["detect_zeroes"], node["cache"]]));
                client.command("blockdev-del", json!({"node-name": "a"}));
            }
        }
        Value::Array(found)
    });
    for (ours, theirs) in ours.as_array().expect("a list").iter().zip(theirs.as_array().expect("a list")) {
        assert_eq!(ours, theirs);
    }
}

#[test]
fn version_2_has_no_discard_without_unreferencing() {
    let qemu = Qemu::newest();
    let [ours, theirs] = with_both(|client, folder| {
        qemu.create(&folder.join("a"), "qcow2", "compat=0.10", 1 << 20);
        let on = json!({"discard-no-unref": true});
        let refused = client.refusal("blockdev-add", in_file(folder, &on));
        client.command("blockdev-add", in_file(folder, &json!({"discard-no-unref": false})));
        let reopened = client.refusal("blockdev-reopen", again(&on));
        json!([refused, reopened])
    });
    let both = |text: &Value| {
        text.as_str().expect("a text").contains("discard-no-unref is only supported since qcow2 version 3")
    };
    assert!(both(&ours[0]) && both(&ours[1]) && both(&theirs[0]) && both(&theirs[1]), "{ours} {theirs}");
}

#[test]
fn jobs_at_rest_take_the_same_verbs_as_in_qemu() {
    let qemu = Qemu::newest();
    let status = |client: &mut Client, wanted: &str| loop {
        let jobs = client.command("query-jobs", json!({}));
        if jobs[0]["status"] == wanted {
            return;
        }
        std::thread::yield_now();
    };
    let [ours, theirs] = with_both(|client, folder| {
        for name in ["a", "b"] {
            let path = folder.join(name);
            qemu.create(&path, "qcow2", "", 1 << 20);
            qemu.io_commands(&path, "qcow2", &["write -P 4 0 1M".to_owned()]).expect_ok();
            client.command("blockdev-add", qcow2(name, &path.display().to_string()));
        }
        let mut found = Vec::new();
        for pending in [true, false] {
            let backup = json!({"job-id": "j", "device": "a", "target": "b", "sync": "full", "auto-dismiss": false,
                                "auto-finalize": !pending});
            client.command("blockdev-backup", backup);
            status(client, if pending { "pending" } else { "concluded" });
            for (verb, arguments) in [
                ("block-job-set-speed", json!({"device": "j", "speed": 5})),
                ("block-job-pause", json!({"device": "j"})),
                ("block-job-resume", json!({"device": "j"})),
                ("block-job-complete", json!({"device": "j"})),
                ("job-pause", json!({"id": "j"})),
                ("job-resume", json!({"id": "j"})),
                ("job-complete", json!({"id": "j"})),
            ] {
                found.push(json!([pending, verb, said(client.execute(verb, arguments))]));
            }
            if pending {
                client.command("job-finalize", json!({"id": "j"}));
                status(client, "concluded");
            }
            client.command("job-dismiss", json!({"id": "j"}));
        }
        client.command("blockdev-mirror", json!({"job-id": "j", "device": "a", "target": "b", "sync": "full"}));
        client.event("BLOCK_JOB_READY");
        client.command("block-job-pause", json!({"device": "j"}));
        for (verb, arguments) in [
            ("job-complete", json!({"id": "j"})),
            ("block-job-complete", json!({"device": "j"})),
            ("block-job-set-speed", json!({"device": "j", "speed": 0})),
        ] {
            found.push(json!([verb, said(client.execute(verb, arguments))]));
        }
        found.push(client.command("query-jobs", json!({}))[0]["status"].clone());
        client.command("block-job-resume", json!({"device": "j"}));
        ended(client);
        Value::Array(found)
    });
    assert_eq!(ours, theirs);
}
