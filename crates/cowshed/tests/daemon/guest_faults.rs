// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest meets the faults that QMP arms while it runs, as docs/fault-injection.md writes it.

use super::process::{COWSHED, Monitor, Serving, text};
use cowshed_testkit::guest::{Guest, guest_files};
use cowshed_testkit::programs::finish_well;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::waiting::await_that;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// The blocks of the page with this word behind their fence.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    page.match_indices(&fence).map(|(at, _)| page[at + fence.len()..].split("```").next().unwrap_or_default()).collect()
}

/// Runs a block of the page.
fn run_block(block: &str, folder: &Path, files: &Path) {
    let programs = Path::new(COWSHED).parent().expect("its folder").display();
    let path = format!("{programs}:{}:/usr/sbin:/sbin", std::env::var("PATH").expect("PATH"));
    let mut shell = Command::new("sh");
    shell.args(["-eux", "-c", block]).current_dir(folder);
    finish_well(shell.env("PATH", path).env("guest", files));
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_guest_meets_faults_that_are_armed_while_it_runs() {
    const DISK: &str = "vhost-user-blk,id=v,node-name=disk,addr.type=unix,addr.path=v.sock,writable=on";
    let (files, folder) = (guest_files().canonicalize().expect("a path"), temp_dir());
    let folder = folder.path();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/fault-injection.md");
    let page = fs::read_to_string(page).expect("the page");
    let (shell, commands) = (blocks(&page, "shell"), blocks(&page, "json"));
    let [before, after] = shell[..] else { panic!("{shell:?}") };
    fs::write(folder.join("init"), blocks(&page, "ash").concat()).expect("a program");
    run_block(before, folder, &files);

    let arguments = ["serve", "--fault", "seed=7", "-k", "n.sock", "--monitor", "qmp.sock", "--export", DISK];
    assert!(page.contains(&arguments[..7].join(" ")) && page.contains(DISK), "the page has another daemon");
    let mut daemon = Serving::start(folder, &[&arguments[..], &["disk.qcow2"]].concat());
    daemon.line();
    let mut monitor = Monitor::connect(&folder.join("qmp.sock"));
    let mut commands = commands[0].lines().map(|line| serde_json::from_str::<Value>(line).expect("a command"));
    let mut next = || {
        let command = commands.next().expect("a command");
        monitor.command(command["execute"].as_str().expect("a name"), command["arguments"].clone())
    };

    let memory = ["-object", "memory-backend-memfd,id=mem,size=256M,share=on", "-machine", "memory-backend=mem"];
    let socket = format!("socket,id=c,path={}", text(&folder.join("v.sock")));
    let devices = [&memory[..], &["-chardev", &socket, "-device", "vhost-user-blk-pci,chardev=c"]].concat();
    let mut guest = Guest::boot(&files, &folder.join("initrd"), &devices);
    guest.await_words("GUEST: 5 changes");
    next();
    // The page has this command once; a reader repeats it as well.
    let query = next();
    let is_hit = |faults: &Value| faults["hits"].as_u64().is_some_and(|hits| hits > 0);
    if !is_hit(&query) {
        let mut other = Monitor::connect(&folder.join("qmp.sock"));
        let mut ask = || other.command("x-query-faults", serde_json::json!({"node-name": "disk"}));
        await_that("a request of the guest", || is_hit(&ask()));
    }
    next();
    guest.await_words("GUEST: 20 changes");
    assert!(!guest.said.contains("I/O error") && !guest.said.contains("EXT4-fs error"), "{}", guest.said);

    next();
    guest.await_words("GUEST: press enter");
    for words in ["GUEST: the database says so", "GUEST: the file system is read-only", "I/O error, dev vda"] {
        assert!(guest.said.contains(words), "no '{words}': {}", guest.said);
    }
    next();
    next();
    guest.keyboard.write_all(b"\n").expect("the machine reads");
    guest.await_words("GUEST: no mount");
    next();
    guest.keyboard.write_all(b"\n").expect("the machine reads");
    guest.await_words("GUEST: finished");
    assert!(guest.wait().success(), "{}", guest.said);
    let said = guest.said.lines().filter_map(|line| line.split_once("GUEST: ")?.1.trim_end().strip_suffix(" changes"));
    let (kept, made) = said.filter_map(|words| words.split_once(" of ")).next().expect("a count of changes");
    let [kept, made] = [kept, made].map(|number| number.parse::<u64>().expect("a number"));
    assert!(made >= 20 && (made..=made + 1).contains(&kept), "{kept} of {made} changes");
    daemon.stop();
    Qemu::system().expect_clean(&folder.join("disk.qcow2"));
    run_block(after, folder, &files);
}
