// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Refcount blocks that are many, or that can't be read: no change waits for ever, and no flush fails for them.

use crate::oracle::{Oracle, ours};
use serde_json::{Value, json};
use std::process::{Command, Output};

/// Our qemu-io with these commands, within a minute.
fn io(oracle: &Oracle, commands: &[String], image: &str) -> Output {
    let mut command = Command::new("timeout");
    command.args(["60", env!("CARGO_BIN_EXE_cowshed"), "qemu-io", "-t", "writeback", "-d", "unmap"]);
    for text in commands {
        command.args(["-c", text]);
    }
    command.arg(image).current_dir(oracle.work()).output().expect("timeout must be installed (coreutils)")
}

/// Where the disk shows the first mapped cluster at or behind a host offset.
fn guest_of(map: &[Value], host: u64) -> u64 {
    let of = |entry: &Value| {
        let (start, length, offset) = (entry["start"].as_u64()?, entry["length"].as_u64()?, entry["offset"].as_u64()?);
        (offset..offset + length).contains(&host).then(|| start + host - offset)
    };
    map.iter().find_map(of).unwrap_or_else(|| guest_of(map, host + 512))
}

/// A new L1 table needs a run of clusters across two refcount blocks while others are dirty and fill the cache.
#[test]
fn dirty_refcount_blocks_leave_room_for_others() {
    const CLUSTER: u64 = 512;
    const COUNTED: u64 = CLUSTER / 2 * CLUSTER;
    const SIZE: u64 = 24 * COUNTED;
    let oracle = Oracle::new();
    oracle.make(&format!("create -q -f qcow2 -o cluster_size={CLUSTER} a.qcow2 {SIZE}"));
    oracle.io(&[&format!("write -q -P 1 0 {SIZE}")], "a.qcow2");
    let map: Vec<Value> = serde_json::from_str(&ours(&oracle, "map --output=json a.qcow2")).expect("JSON");
    for free in [5, 6, 7] {
        std::fs::copy(oracle.work().join("a.qcow2"), oracle.work().join("b.qcow2")).expect("a copy");
        let border = guest_of(&map, 10 * COUNTED - free * CLUSTER);
        let freed = io(&oracle, &[format!("discard {border} {}", 2 * free * CLUSTER)], "b.qcow2");
        assert!(freed.status.success(), "{freed:?}");
        let mut commands: Vec<String> = (12..22)
            .map(|block| format!("discard {} {CLUSTER}", guest_of(&map, block * COUNTED + COUNTED / 2)))
            .collect();
        commands.extend(["flush".to_owned(), format!("truncate {}", SIZE * 5)]);
        let grown = io(&oracle, &commands, "b.qcow2");
        assert!(grown.status.success(), "{free} free clusters on both sides: {grown:?}");
        oracle.make("check -q b.qcow2");
    }
}

/// The data are durable: a cluster whose count can't be lowered is a leak.
#[test]
fn unreadable_refcount_block_costs_a_leak_alone() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 -o cluster_size=4k a.qcow2 32M");
    oracle.io(&["write -q -P 1 0 32M"], "a.qcow2");
    let bytes = std::fs::read(oracle.work().join("a.qcow2")).expect("an image");
    let word = |at: u64| u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().expect("8 bytes"));
    let sector = word(word(48) + 2 * 8) / 512;
    let rules: Vec<Value> = (sector..sector + 8)
        .map(|sector| json!({"event": "none", "iotype": "read", "sector": sector, "errno": 5}))
        .collect();
    let image = json!({"driver": "qcow2", "discard": "unmap", "file": {"driver": "blkdebug", "discard": "unmap",
        "image": {"driver": "file", "filename": "a.qcow2"}, "inject-error": rules}});
    let commands =
        ["discard 18M 4k", "flush", "write -P 2 0 4k", "flush", "discard 1M 1M", "flush", "write -P 3 30M 4k", "flush"];
    let output = io(&oracle, &commands.map(str::to_owned), &format!("json:{image}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("failed"), "{said}");
    oracle.io(&["read -q -P 2 0 4k", "read -q -P 3 30M 4k", "read -q -P 0 1M 1M", "read -q -P 1 2M 4k"], "a.qcow2");
    let checked = oracle.ours(&oracle.work(), &crate::oracle::words("check a.qcow2"));
    assert_eq!(checked.code, Some(3), "leaks alone: {}{}", checked.out, checked.err);
}
