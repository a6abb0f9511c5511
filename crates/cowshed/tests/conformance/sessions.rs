// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sessions of QMP from seeds, as `session.rs` runs them: each kind has its own commands, right and wrong ones.

use crate::case::Case;
use cowshed_testkit::random::Random;
use serde_json::{Value, json};

/// Commands of one session.
const COMMANDS: usize = 14;

/// Images of 1 MiB that each session finds: `a`, `b`, `over` on `a`, `top` on `over`, empty `t` and `u`, raw `r`.
const SETUP: &[&str] = &[
    "for i in a b t u; do qemu-img create -q -f qcow2 $i 1M; done; qemu-img create -q -f raw r 1M",
    "qemu-img create -q -f qcow2 -b a -F qcow2 over; qemu-img create -q -f qcow2 -b over -F qcow2 top",
    "for i in a b; do qemu-io -c 'write -P 5 0 600k' $i; done; qemu-io -c 'write -P 6 128k 256k' over",
];

/// One session of each kind.
pub fn generated(seed: u64) -> Vec<Case> {
    type Kind = (&'static str, fn(&mut Script));
    let kinds: [Kind; 8] = [
        ("text", text),
        ("nodes", nodes),
        ("job", job),
        ("bitmaps", bitmaps),
        ("exports", exports),
        ("objects", objects),
        ("transactions", transactions),
        ("snapshots", snapshots),
    ];
    kinds
        .into_iter()
        .map(|(name, kind)| {
            let mut script = Script::new(seed);
            kind(&mut script);
            let mut case = Case::new(format!("qmp {name} {seed}"));
            case.setup = SETUP.iter().map(|line| (*line).to_owned()).collect();
            case.lines.push(script.finish());
            case
        })
        .collect()
}

/// A session that is being written.
struct Script {
    random: Random,
    lines: Vec<String>,
    /// Ids of the answers.
    id: u32,
}

impl Script {
    fn new(seed: u64) -> Script {
        let mut random = Random::new(seed);
        let pretty = if random.chance(25) { ",pretty=on" } else { "" };
        let capabilities = json!({"execute": "qmp_capabilities"});
        Script { random, lines: vec![format!("qmp{pretty}"), format!("> {capabilities}")], id: 0 }
    }

    fn finish(mut self) -> String {
        self.lines.push("> {\"execute\": \"quit\"}".to_owned());
        self.lines.join("\n")
    }

    /// A command, now and then with an id and spoiled arguments.
    fn run(&mut self, command: &str, arguments: Value) {
        let mut message = json!({"execute": command, "arguments": arguments});
        if self.random.chance(20) {
            self.id += 1;
            message["id"] = match self.random.below(4) {
                0 => json!({"n": [self.id, null, 1.5], "b": "é\u{1}"}),
                1 => json!(format!("id {}", self.id)),
                _ => json!(self.id),
            };
        }
        self.lines.push(format!("> {message}"));
    }

    /// A command whose arguments are spoiled at times.
    fn risk(&mut self, command: &str, mut arguments: Value) {
        if self.random.chance(12) {
            self.spoil(&mut arguments);
        }
        self.run(command, arguments);
    }

    fn spoil(&mut self, arguments: &mut Value) {
        let Some(members) = arguments.as_object_mut() else { return };
        let keys: Vec<String> = members.keys().cloned().collect();
        let wrong = [json!(null), json!(5), json!("x"), json!(true), json!([]), json!({}), json!(-1), json!(1.5)];
        match (self.random.below(4), keys.is_empty()) {
            (0, _) | (_, true) => drop(members.insert("nosuch".to_owned(), json!(1))),
            (1, _) => drop(members.shift_remove(self.random.pick(&keys.iter().collect::<Vec<_>>()).as_str())),
            _ => {
                let key = self.random.pick(&keys.iter().collect::<Vec<_>>()).clone();
                let value = wrong[usize::try_from(self.random.below(wrong.len() as u64)).expect("small")].clone();
                // QEMU ends with an assertion where a list of nodes to reopen is empty.
                let is_empty_list = key == "options" && value == json!([]);
                members.insert(key, if is_empty_list { json!({}) } else { value });
            }
        }
    }

    fn wait(&mut self, words: &str) {
        self.lines.push(format!("< {words}"));
    }

    fn node(&mut self) -> &'static str {
        self.random.pick(&["a", "a", "b", "over", "t", "u", "r", "zz"])
    }

    /// Opens images; `over` and `top` have nodes below them.
    fn open(&mut self, names: &[&str]) {
        for name in names {
            let mut options = qcow2(name);
            match *name {
                "over" => options["backing"] = json!("a"),
                "top" => options["backing"] = json!("over"),
                _ => {}
            }
            self.run("blockdev-add", options);
        }
    }
}

fn qcow2(name: &str) -> Value {
    json!({"driver": "qcow2", "node-name": name, "file": {"driver": "file", "filename": name, "node-name": format!("{name}-file")}})
}

/// Lines that are no message, or no command.
fn text(script: &mut Script) {
    const PIECES: &[&str] = &[
        "{\"execute\": \"query-block-exports\"}",
        "{'execute': 'query-jobs', 'id': 'it\\'s'}",
        "{\"execute\": \"query-jobs\", \"id\": {\"a\": [], \"b\": {}, \"c\": 1e3}}",
        "{\"execute\": \"nosuch\"}",
        "{\"execute\": \"qmp_capabilities\"}",
        "{\"exec-oob\": \"query-jobs\"}",
        "{\"execute\": \"query-jobs\", \"arguments\": {\"x\": 1}}",
        "{\"execute\": \"query-jobs\", \"arguments\": 5, \"id\": 1}",
        "{\"execute\": \"query-jobs\", \"foo\": 5}",
        "{\"execute\": 5}",
        "{\"arguments\": {}}",
        "{}",
        "[1, {\"a\": null}]",
        "5 ",
        "\"text\"",
        "true ",
        "nul ",
        "{\"a\": 1, \"a\": 2}",
        "{\"a\": }",
        "{\"a\" 1}",
        "{\"a\": 1,}",
        "[1 2]",
        "[1,]",
        "[1}",
        "]",
        "}",
        ",",
        "\"\\q\"",
        "\"\\u12\"",
        "\"\\ud800\"",
        "01 \n",
        "-a \n",
        "1.5e \n",
        "%d \n",
        "\"a\tb\" \n",
        "{\"a\": nul}",
        "{\"execute\": \"query-jobs\", \"id\": \"\\u00e9\\ud83d\\udc04\\u007f\\/\\b\"}",
        "{\"execute\": \"query-jobs\", \"id\": [18446744073709551615, -9223372036854775808, 0.1, 1e100, -0, true]}",
    ];
    for _ in 0..6 {
        let pieces: String = (0..1 + script.random.below(4)).map(|_| script.random.pick(PIECES)).collect();
        for line in pieces.lines() {
            script.lines.push(format!(">> {line}"));
        }
        // The last answer is known by its id.
        script.id += 1;
        script.lines.push(format!(">> {}", json!({"execute": "query-jobs", "id": format!("end{}", script.id)})));
        let id = format!("end{}", script.id);
        script.wait(&id);
    }
}

fn nodes(script: &mut Script) {
    for _ in 0..COMMANDS {
        let node = script.node();
        let file = script.random.pick(&["a", "b", "t", "r", "missing"]);
        match script.random.below(14) {
            0..=3 => script.risk("blockdev-add", qcow2(node)),
            4 => {
                let options = json!({"driver": "raw", "node-name": format!("raw-{node}"), "file": node});
                script.risk("blockdev-add", options);
            }
            5 => {
                let driver =
                    script.random.pick(&["file", "null-co", "raw", "qcow2", "nosuch", "copy-on-read", "blkdebug"]);
                script.risk("blockdev-add", json!({"driver": driver, "node-name": node, "filename": file}));
            }
            6 => script.risk("blockdev-del", json!({"node-name": node})),
            7 => {
                let size = script.random.pick(&[0_i64, 1, 1 << 20, 2 << 20, -1, 1 << 19]);
                script.risk("block_resize", json!({"node-name": node, "size": size}));
            }
            8 => {
                let mut options = qcow2(node);
                options["read-only"] = json!(script.random.chance(50));
                script.risk("blockdev-reopen", json!({"options": [options]}));
            }
            9 => {
                let name = script.random.pick(&["9x", "", "a.b", "x y", "averyveryverylongnameofanodethatislong"]);
                script.risk("blockdev-add", json!({"driver": "null-co", "node-name": name, "size": 512}));
            }
            10 => script.risk("blockdev-set-active", json!({"node-name": node, "active": true})),
            11 => script.risk("query-named-block-nodes", json!({"flat": true})),
            12 => script.risk("block-set-write-threshold", json!({"node-name": node, "write-threshold": 4096})),
            _ => script
                .risk("change-backing-file", json!({"device": node, "image-node-name": node, "backing-file": file})),
        }
    }
}

/// One job from its start to its end.
fn job(script: &mut Script) {
    let (command, mut arguments, copies): (_, _, bool) = match script.random.below(6) {
        0 => ("blockdev-backup", json!({"device": "a", "target": "t", "sync": "full"}), false),
        1 => ("blockdev-mirror", json!({"device": "a", "target": "t", "sync": "full"}), true),
        2 => ("block-stream", json!({"device": "over"}), false),
        3 => ("block-commit", json!({"device": "top", "top-node": "over"}), false),
        4 => ("block-commit", json!({"device": "over"}), true),
        _ => ("blockdev-backup", json!({"device": "over", "target": "t", "sync": "top"}), false),
    };
    let nodes: &[&str] = match (command, copies) {
        ("block-commit", false) => &["a", "over", "top", "t"],
        ("block-commit", true) | ("block-stream", _) => &["a", "over", "t"],
        _ if arguments["device"] == "over" => &["a", "over", "t"],
        _ => &["a", "t"],
    };
    script.open(nodes);
    arguments["job-id"] = json!("j");
    let keeps = script.random.chance(40);
    let waits = script.random.chance(40);
    // The first progress of a backup is each tool's own choice.
    let is_slow = !copies && command != "blockdev-backup" && script.random.chance(30);
    for (key, is_on) in [("auto-dismiss", keeps), ("auto-finalize", waits)] {
        if is_on {
            arguments[key] = json!(false);
        }
    }
    if is_slow {
        arguments["speed"] = json!(1);
    }
    let mut wrong = arguments.clone();
    wrong["nosuch"] = json!(1);
    script.run(command, wrong);
    script.run(command, arguments);
    if command == "blockdev-backup" {
        // It stops for a moment at its start.
        script.wait("paused");
    }
    // The state in which the job rests until it is told to go on.
    match (is_slow, copies, waits) {
        (true, _, _) => {}
        (_, true, _) => script.wait("BLOCK_JOB_READY"),
        (_, _, true) => script.wait("BLOCK_JOB_PENDING"),
        _ => script.wait("concluded"),
    }
    let verb = script.random.pick(&["pause", "resume", "complete", "finalize", "dismiss"]);
    match (script.random.chance(30), verb) {
        (true, "finalize" | "dismiss") => script.risk(&format!("block-job-{verb}"), json!({"id": "zz"})),
        (true, _) => script.risk(&format!("block-job-{verb}"), json!({"device": "zz"})),
        _ => script.risk(&format!("job-{verb}"), json!({"id": "zz"})),
    }
    match (is_slow, copies, waits) {
        (true, _, _) => {
            // It sleeps after its first piece.
            let query = json!({"execute": "query-jobs"});
            script.lines.push(format!("~ \"current-progress\": 0, | {query}"));
            if command == "block-commit" {
                // QEMU passes over ranges that the top lacks, and shows the progress for a moment.
                script.lines.push(format!("~ \"current-progress\": 131072, | {query}"));
            }
            script.run("job-pause", json!({"id": "j"}));
            script.wait("paused");
            script.run("job-pause", json!({"id": "j"}));
            script.run("query-jobs", json!({}));
            script.run("query-block-jobs", json!({}));
            script.run("job-finalize", json!({"id": "j"}));
            script.run("job-dismiss", json!({"id": "j"}));
            script.run("block-job-complete", json!({"device": "j"}));
            if script.random.chance(50) {
                script.run("job-cancel", json!({"id": "j"}));
                script.wait("concluded");
            }
        }
        (_, true, _) => {
            script.run("query-jobs", json!({}));
            if script.random.chance(30) {
                script.run("job-pause", json!({"id": "j"}));
                script.run("query-block-jobs", json!({}));
                script.run("job-resume", json!({"id": "j"}));
            }
            let end = script.random.below(5);
            match end {
                0 => script.run("block-job-cancel", json!({"device": "j"})),
                1 => script.run("block-job-cancel", json!({"device": "j", "force": true})),
                2 => script.run("job-cancel", json!({"id": "j"})),
                3 => script.run("job-complete", json!({"id": "j"})),
                _ => return,
            }
            if matches!(end, 1 | 2) || !waits {
                script.wait("concluded");
            } else {
                script.wait("BLOCK_JOB_PENDING");
                script.run("query-jobs", json!({}));
                script.run("job-finalize", json!({"id": "j"}));
            }
        }
        (_, _, true) => {
            script.run("query-jobs", json!({}));
            script.run("job-pause", json!({"id": "j"}));
            let verb = script.random.pick(&["finalize", "cancel", "complete"]);
            script.run(&format!("job-{verb}"), json!({"id": "j"}));
        }
        _ => {}
    }
    script.run("query-jobs", json!({}));
    if keeps {
        for verb in ["pause", "resume", "cancel", "complete", "finalize"] {
            if script.random.chance(30) {
                script.run(&format!("job-{verb}"), json!({"id": "j"}));
            }
        }
        script.run("query-block-jobs", json!({}));
        script.run("job-dismiss", json!({"id": "j"}));
    }
    script.run("query-jobs", json!({}));
}

fn bitmaps(script: &mut Script) {
    script.open(&["a", "over"]);
    for _ in 0..COMMANDS {
        let node = script.random.pick(&["a", "a", "a", "over", "zz", "a-file"]);
        let name = script.random.pick(&["b", "c", "b", "d", ""]);
        let one = json!({"node": node, "name": name});
        match script.random.below(12) {
            0..=3 => {
                let mut arguments = one;
                if script.random.chance(30) {
                    arguments["granularity"] = json!(script.random.pick(&[512_i64, 65536, 1000, 0, 1 << 32, -1]));
                }
                if script.random.chance(40) {
                    arguments["persistent"] = json!(true);
                }
                if script.random.chance(30) {
                    arguments["disabled"] = json!(true);
                }
                script.risk("block-dirty-bitmap-add", arguments);
            }
            4 => script.risk("block-dirty-bitmap-remove", one),
            5 => script.risk("block-dirty-bitmap-clear", one),
            6 => script.risk("block-dirty-bitmap-enable", one),
            7 => script.risk("block-dirty-bitmap-disable", one),
            8 => {
                let list = match script.random.below(4) {
                    // QEMU doesn't survive a merge of nothing.
                    0 if node == "zz" => json!([]),
                    1 => json!(["b", {"node": "over", "name": "c"}]),
                    2 => json!([5]),
                    _ => json!(["b", "zz"]),
                };
                script.risk("block-dirty-bitmap-merge", json!({"node": node, "target": name, "bitmaps": list}));
            }
            9 => {
                let mode = script.random.pick(&["on-success", "always", "never", "x"]);
                let sync = script.random.pick(&["incremental", "bitmap", "none", "top"]);
                let arguments =
                    json!({"device": "a", "target": "zz", "sync": sync, "bitmap": name, "bitmap-mode": mode});
                script.risk("blockdev-backup", arguments);
            }
            10 => script.risk("x-debug-block-dirty-bitmap-sha256", one),
            // Of several unknown arguments each tool names another one.
            _ => script.run("block-dirty-bitmap-add", json!({"node": node, "name": name, "x": 1})),
        }
    }
}

fn exports(script: &mut Script) {
    script.open(&["a", "over"]);
    for _ in 0..COMMANDS {
        let id = script.random.pick(&["e", "f", "g", "9", "e.1", ""]);
        let node = script.random.pick(&["a", "over", "zz", "a-file"]);
        match script.random.below(12) {
            0..=1 => {
                let address = script.random.pick(&["n.sock", "m.sock"]);
                script.risk("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": address}}}));
            }
            2..=5 => {
                let mut arguments = json!({"type": "nbd", "id": id, "node-name": node});
                for (key, values) in [
                    ("name", &[json!("x"), json!("y")][..]),
                    ("writable", &[json!(true), json!(false)]),
                    ("description", &[json!("words")]),
                    ("bitmaps", &[json!(["b"]), json!([])]),
                    ("iothread", &[json!("io"), json!(["io"]), json!([])]),
                    ("fixed-iothread", &[json!(true)]),
                    ("type", &[json!("nosuch")]),
                ] {
                    if script.random.chance(15) {
                        let at = script.random.below(values.len() as u64);
                        arguments[key] = values[usize::try_from(at).expect("small")].clone();
                    }
                }
                script.risk("block-export-add", arguments);
            }
            6 => script.risk("block-export-del", json!({"id": id})),
            7 => script.risk("block-export-del", json!({"id": id, "mode": script_mode(id)})),
            8 => script.risk("nbd-server-add", json!({"device": node, "name": id, "writable": true})),
            9 => script.risk("nbd-server-remove", json!({"name": id})),
            10 => script.risk("query-block-exports", json!({})),
            _ => script.risk("nbd-server-stop", json!({})),
        }
    }
}

fn script_mode(id: &str) -> &'static str {
    match id {
        "e" => "hard",
        "f" => "safe",
        _ => "x",
    }
}

fn objects(script: &mut Script) {
    for _ in 0..COMMANDS {
        let id = script.random.pick(&["g", "h", "s", "t", "9", "/x"]);
        match script.random.below(12) {
            0..=1 => {
                let limits = match script.random.below(6) {
                    0 => json!({"iops-total": 100}),
                    1 => json!({"bps-read": 1000, "bps-total": 5}),
                    2 => json!({"iops-total-max": 5}),
                    3 => json!({"iops-total": -1}),
                    4 => json!({"bps-total": 1000, "bps-total-max": 2000, "bps-total-max-length": 3}),
                    _ => json!({}),
                };
                script.risk("object-add", json!({"qom-type": "throttle-group", "id": id, "limits": limits}));
            }
            2 => script.risk("object-add", json!({"qom-type": "secret", "id": id, "data": "abc"})),
            3 => script.risk("object-add", json!({"qom-type": "iothread", "id": id, "poll-max-ns": 5})),
            4 => script.risk("object-add", json!({"qom-type": "nosuch", "id": id})),
            5 => script.risk("object-del", json!({"id": id})),
            6 => script.risk("qom-list", json!({"path": "/nosuch"})),
            7 => {
                let property = script.random.pick(&["limits", "type", "nosuch", "x-iops-total"]);
                script.risk("qom-get", json!({"path": format!("/objects/{id}"), "property": property}));
            }
            8 => {
                let value = json!({"iops-total": 200});
                script.risk("qom-set", json!({"path": format!("/objects/{id}"), "property": "limits", "value": value}));
            }
            9 => {
                let name = script.random.pick(&["n", "m"]);
                let node = json!({"driver": "throttle", "node-name": name, "throttle-group": id,
                                  "file": {"driver": "null-co", "node-name": format!("{name}-file")}});
                script.risk("blockdev-add", node);
            }
            10 => script.risk("blockdev-del", json!({"node-name": script_name(id)})),
            _ => {
                let backend = match script.random.below(4) {
                    0 => json!({"type": "null", "data": {}}),
                    1 => json!({"type": "ringbuf", "data": {"size": 1024}}),
                    2 => json!({"type": "ringbuf", "data": {"size": 1000}}),
                    _ => json!({"type": "nosuch", "data": {}}),
                };
                script.risk("chardev-add", json!({"id": id, "backend": backend}));
            }
        }
    }
}

fn script_name(id: &str) -> &'static str {
    if id == "g" { "n" } else { "m" }
}

fn transactions(script: &mut Script) {
    script.open(&["a", "b"]);
    script.run("block-dirty-bitmap-add", json!({"node": "a", "name": "b"}));
    for number in 0..6 {
        let count = 1 + script.random.below(3);
        let actions: Vec<Value> = (0..count)
            .map(|at| {
                let name = script.random.pick(&["b", "c", "zz"]);
                let node = script.random.pick(&["a", "b", "zz"]);
                let bitmap = json!({"node": node, "name": name});
                match script.random.below(9) {
                    0 => json!({"type": "abort", "data": {}}),
                    1 => json!({"type": "block-dirty-bitmap-add", "data": bitmap}),
                    2 => json!({"type": "block-dirty-bitmap-clear", "data": bitmap}),
                    3 => json!({"type": "block-dirty-bitmap-disable", "data": bitmap}),
                    4 => json!({"type": "block-dirty-bitmap-remove", "data": {"node": node, "name": "c"}}),
                    5 => json!({"type": "block-dirty-bitmap-merge",
                                "data": {"node": node, "target": name, "bitmaps": ["b"]}}),
                    6 => json!({"type": "nosuch", "data": {}}),
                    7 => json!({"type": "blockdev-snapshot-internal-sync",
                                "data": {"device": node, "name": format!("s{number}{at}")}}),
                    // QEMU doesn't survive one that isn't there.
                    _ => json!({"type": "block-dirty-bitmap-enable", "data": {"node": "a", "name": "b"}}),
                }
            })
            .collect();
        let mut arguments = json!({"actions": actions});
        if script.random.chance(15) {
            arguments["properties"] = json!({"completion-mode": script.random.pick(&["individual", "grouped", "x"])});
        }
        script.risk("transaction", arguments);
    }
}

fn snapshots(script: &mut Script) {
    script.open(&["a", "b"]);
    for number in 0..8 {
        let node = script.random.pick(&["a", "a", "b", "zz", "s0", "s1", "s2", "b-file"]);
        // A snapshot of the file below an image is refused here, and changes all that follows in QEMU.
        let image = if node == "b-file" { "a" } else { node };
        match script.random.below(9) {
            0..=2 => {
                let (file, name) = (format!("snap{number}"), format!("s{number}"));
                let mut arguments = json!({"node-name": image, "snapshot-file": file, "snapshot-node-name": name});
                if script.random.chance(25) {
                    arguments["format"] = json!(script.random.pick(&["qcow2", "raw", "nosuch"]));
                }
                script.risk("blockdev-snapshot-sync", arguments);
            }
            3 => script.risk("blockdev-snapshot", json!({"node": image, "overlay": "b"})),
            4 => script.risk("blockdev-snapshot-internal-sync", json!({"device": node, "name": "i"})),
            5 => script.risk("blockdev-snapshot-internal-sync", json!({"device": node, "name": ""})),
            6 => script.risk("blockdev-snapshot-delete-internal-sync", json!({"device": node, "name": "i"})),
            7 => script.risk("blockdev-snapshot-delete-internal-sync", json!({"device": node})),
            _ => script.risk("blockdev-del", json!({"node-name": node})),
        }
    }
}
