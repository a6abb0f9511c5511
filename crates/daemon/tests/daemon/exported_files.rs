// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file node that is exported and has a parent, in every order, beside the newest QEMU. Clients of an export rely on its length, and
//! an image in that file may change it.

use super::beside_qemu::Theirs;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

type Step = (&'static str, Value);

/// A node over the file node `below`.
fn over(driver: &str, name: String, below: &str, read_only: bool) -> Step {
    ("blockdev-add", json!({"driver": driver, "node-name": name, "file": below, "read-only": read_only}))
}

fn export(id: String, node: &str, writable: bool) -> Step {
    ("block-export-add", json!({"type": "nbd", "id": id, "node-name": node, "name": id, "writable": writable}))
}

fn throttle(name: &str, file: &str) -> Step {
    ("blockdev-add", json!({"driver": "throttle", "node-name": name, "throttle-group": "g", "file": file}))
}

/// The steps that use the file node `f`, under names that begin with it, each list with its title.
fn orders(f: &str) -> Vec<(&'static str, Vec<Step>)> {
    let name = |what: &str| format!("{f}-{what}");
    let mut all = Vec::new();
    for writable in [false, true] {
        let exported = || export(name("e"), f, writable);
        for read_only in [false, true] {
            let image = || over("qcow2", name("q"), f, read_only);
            all.push(("an image over an exported file", vec![exported(), image()]));
            all.push(("an export of an image's file", vec![image(), exported()]));
            let raw = || over("raw", name("r"), f, read_only);
            all.push(("raw over an exported file", vec![exported(), raw(), export(name("s"), &name("r"), false)]));
            all.push(("an export of a raw disk's file", vec![raw(), export(name("s"), &name("r"), false), exported()]));
        }
        let through = |filter: Step| vec![exported(), filter, over("qcow2", name("q"), &name("t"), false), exported()];
        all.push(("an image over a filter over an exported file", through(throttle(&name("t"), f))));
        all.push(("an image over raw over an exported file", through(over("raw", name("t"), f, false))));
        let again = json!({"driver": "qcow2", "node-name": name("q"), "file": f, "read-only": false});
        let reopen = ("blockdev-reopen", json!({"options": [again]}));
        all.push((
            "an image that becomes writable over an exported file",
            vec![exported(), over("qcow2", name("q"), f, true), reopen],
        ));
        let job = json!({"job-id": name("j"), "device": "source", "target": f, "sync": "none"});
        all.push(("a backup to an exported file", vec![exported(), ("blockdev-backup", job.clone())]));
        all.push(("an export of a backup's target", vec![("blockdev-backup", job), exported()]));
    }
    all
}

fn answer(client: &mut Client, (command, arguments): &Step) -> String {
    match client.execute(command, arguments.clone()) {
        Ok(_) => "taken".to_owned(),
        Err(error) => error["desc"].as_str().unwrap_or("?").to_owned(),
    }
}

#[test]
fn exported_files_and_their_parents_are_answered_as_by_qemu() {
    let (theirs, mut theirs_client) = Theirs::start_newest();
    let ours = Running::start(Vec::new());
    let mut client = ours.client();
    client.files_in(ours.folder.path());
    let qemu = Qemu::newest();
    for folder in [theirs.folder.path(), ours.folder.path()] {
        qemu.create(&folder.join("image"), "qcow2", "", 1 << 20);
        qemu.create(&folder.join("source"), "raw", "", std::fs::metadata(folder.join("image")).expect("a file").len());
    }
    let first: [Step; 3] = [
        ("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": "n.sock"}}})),
        ("object-add", json!({"qom-type": "throttle-group", "id": "g"})),
        ("blockdev-add", json!({"driver": "file", "node-name": "source", "filename": "source"})),
    ];
    for (command, arguments) in first {
        client.command(command, arguments.clone());
        theirs_client.command(command, arguments);
    }
    let mut wrong = Vec::new();
    for number in 0..orders("").len() {
        let f = format!("f{number}");
        for folder in [theirs.folder.path(), ours.folder.path()] {
            std::fs::copy(folder.join("image"), folder.join(&f)).expect("a copy");
        }
        let (about, steps) = orders(&f).swap_remove(number);
        let file = ("blockdev-add", json!({"driver": "file", "node-name": f, "filename": f}));
        for step in std::iter::once(&file).chain(&steps) {
            let (our, their) = (answer(&mut client, step), answer(&mut theirs_client, step));
            if our != their {
                wrong.push(format!("{about}: {} {}:\n  ours   {our}\n  theirs {their}", step.0, step.1));
            }
        }
        if about.contains("backup") {
            for client in [&mut client, &mut theirs_client] {
                // Refused ones have no job.
                let _ = client.execute("block-job-cancel", json!({"device": format!("{f}-j")}));
                while client.command("query-block-jobs", json!({})) != json!([]) {
                    std::thread::yield_now();
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
    ours.stop().expect("stopped in order");
}
