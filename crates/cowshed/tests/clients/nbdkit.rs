// SPDX-License-Identifier: Apache-2.0 OR MIT
//! nbdkit's plugins and filters on our files and exports, with our tools as clients of nbdkit.

use super::tools::{make_tools, path_with, text};
use cowshed_testkit::programs::finish_well;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A shell command with our tools first on the PATH, in which nbdkit and our servers are started and end.
fn shell(folder: &Path, tools: &Path, script: &str) -> String {
    finish_well(Command::new("bash").args(["-euc", script]).current_dir(folder).env("PATH", path_with(Some(tools))))
}

#[test]
fn nbdkit_and_our_tools_pass_disks_to_each_other() {
    let (folder, qemu) = (temp_dir(), Qemu::newest());
    let tools = make_tools(folder.path());
    let here = folder.path();
    // A partition table with one partition of 4 MiB at 1 MiB: one entry, and the mark at the sector's end.
    let mut disk = vec![0; 8 << 20];
    disk[446..462].copy_from_slice(&[0, 0, 2, 0, 0x83, 0, 2, 0, 0, 8, 0, 0, 0, 0x20, 0, 0]);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    for (at, byte) in disk.iter_mut().enumerate().skip(1 << 20).take(3 << 20) {
        *byte = (at / 4096) as u8;
    }
    fs::write(here.join("disk.raw"), &disk).expect("a file");
    qemu.img(["convert", "-f", "raw", "-O", "qcow2", text(&here.join("disk.raw")), text(&here.join("disk.qcow2"))])
        .expect_ok();
    fs::write(here.join("one"), &disk[..3 << 20]).expect("a file");
    fs::write(here.join("two"), &disk[3 << 20..]).expect("a file");
    let read = |name: &str| fs::read(here.join(name)).expect("a file");

    // Its servers, our client.
    let plugins = [("file disk.raw", "file"), ("split one two", "split"), ("--filter=cow file disk.raw", "cow")];
    for (plugin, name) in plugins {
        shell(
            here,
            &tools,
            &format!("nbdkit -U - {plugin} --run 'qemu-img convert -f raw -O raw \"$uri\" {name}.out'"),
        );
        assert!(read(&format!("{name}.out")) == disk, "{plugin}");
    }
    let written = "qemu-io -f raw -c \"write -q -P 9 2M 64k\" -c \"write -q -z 3M 1M\" -c \"discard -q 1M 64k\" -c flush \"$uri\" && \
                   qemu-img convert -f raw -O qcow2 \"$uri\" cow.qcow2";
    shell(here, &tools, &format!("nbdkit -U - --filter=cow file disk.raw --run '{written}'"));
    assert!(read("disk.raw") == disk, "the filter keeps writes");
    let mut changed = disk.clone();
    changed[2 << 20..(2 << 20) + (64 << 10)].fill(9);
    changed[3 << 20..4 << 20].fill(0);
    let cow = here.join("cow.qcow2");
    qemu.img(["convert", "-f", "qcow2", "-O", "raw", text(&cow), text(&here.join("cow.raw"))]).expect_ok();
    let mut kept = read("cow.raw");
    // The data after a discard is free.
    kept[1 << 20..(1 << 20) + (64 << 10)].copy_from_slice(&changed[1 << 20..(1 << 20) + (64 << 10)]);
    assert!(kept == changed);
    shell(here, &tools, "nbdkit -U - partitioning one two --run 'qemu-img convert -f raw -O raw \"$uri\" parts.out'");
    let parts = read("parts.out");
    let holds =
        |part: &[u8]| parts.windows(part.len().min(4096)).step_by(512).any(|window| window == &part[..window.len()]);
    assert!(holds(&disk[2 << 20..]) && parts.len() > disk.len());

    // Our server, its client.
    let serve = "qemu-nbd -t -f qcow2 -k $PWD/ours.sock --fork --pid-file pid disk.qcow2; trap 'kill $(cat pid); while kill -0 $(cat pid) 2>/dev/null; do sleep 0.05; done' EXIT; ";
    let uri = "uri='nbd+unix:///?socket=ours.sock'";
    shell(here, &tools, &format!("{serve} nbdkit -U - nbd {uri} --run 'nbdcopy \"$uri\" through.out'"));
    assert!(read("through.out") == disk, "nbdkit's nbd plugin");
    let partition = format!(
        "nbdkit -U - --filter=partition nbd {uri} partition=1 --run 'qemu-img convert -f raw -O raw \"$uri\" first.out'"
    );
    shell(here, &tools, &format!("{serve} {partition}"));
    assert!(read("first.out") == disk[1 << 20..5 << 20], "nbdkit's partition filter");
    let cow = format!("nbdkit -U - --filter=cow nbd {uri} --run '{}'", written.replace("cow.qcow2", "cow2.qcow2"));
    shell(here, &tools, &format!("{serve} {cow}"));
    assert!(
        qemu.is_equal((&here.join("disk.raw"), "raw"), (&here.join("disk.qcow2"), "qcow2")),
        "no write has come through"
    );
}
