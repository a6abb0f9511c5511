// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Drivers are told apart by facts in their lines of the table, or by capabilities of their nodes. Code that chooses by the name of a
//! driver must be found for each new one.

use super::crate_graph::rust_files;
use std::collections::BTreeSet;
use std::path::Path;

/// Crates that work for any driver.
const CRATES: &[&str] = &["cowshed", "create", "daemon", "graph", "jobs", "ova"];

/// The names of drivers that their code has all the same. These are lines of tables, keys of options, defaults, words of
/// QEMU, and choices. A name that is gone is struck here; a new one is a fact that a line lacks.
const STILL_NAMED: &[(&str, &[&str])] = &[
    ("cowshed/src/commands/arguments.rs", &["fault", "raw"]),
    ("cowshed/src/commands/completions.rs", &["qcow2"]),
    ("cowshed/src/commands/convert/mod.rs", &["raw", "vmdk"]),
    ("cowshed/src/commands/convert/package.rs", &["vmdk"]),
    ("cowshed/src/commands/convert/platform.rs", &["raw", "vdi", "vhdx", "vmdk", "vpc"]),
    ("cowshed/src/commands/create.rs", &["qcow2", "raw"]),
    (
        "cowshed/src/commands/create_options.rs",
        &["bochs", "cloop", "dmg", "fault", "null-aio", "null-co", "qcow2", "raw", "vvfat"],
    ),
    ("cowshed/src/commands/daemon/nbd.rs", &["nbd", "raw"]),
    ("cowshed/src/commands/daemon/serve.rs", &["nbd"]),
    ("cowshed/src/commands/help.rs", &["fault"]),
    ("cowshed/src/commands/measure.rs", &["luks", "qcow2", "raw"]),
    ("cowshed/src/commands/new_image.rs", &["luks", "qcow", "qcow2", "qed", "raw", "vdi", "vhdx", "vmdk", "vpc"]),
    ("cowshed/src/commands/ova/cloud.rs", &["raw"]),
    ("cowshed/src/commands/ova/source.rs", &["raw"]),
    ("cowshed/src/commands/ova/target.rs", &["vmdk"]),
    ("cowshed/src/commands/parser.rs", &["compress", "copy-on-read"]),
    ("cowshed/src/commands/rescue.rs", &["qcow2"]),
    ("cowshed/src/commands/share/mod.rs", &["qcow2", "raw"]),
    ("cowshed/src/commands/untrusted.rs", &["nbd"]),
    ("cowshed/src/io/open.rs", &["copy-on-read", "qcow2", "raw"]),
    ("cowshed/src/io/reopen.rs", &["host_cdrom", "host_device", "qcow2", "raw"]),
    ("cowshed/src/output/failure.rs", &["host_cdrom", "host_device", "nbd"]),
    ("create/src/encryption.rs", &["luks"]),
    ("create/src/fresh.rs", &["parallels", "qcow", "qcow2", "qed", "raw", "vdi", "vhdx", "vmdk", "vpc"]),
    ("create/src/layout.rs", &["qcow2"]),
    ("create/src/lib.rs", &["luks", "qcow2"]),
    ("create/src/qcow2.rs", &["luks", "qcow2"]),
    ("create/src/schema.rs", &["luks", "qcow2", "raw"]),
    ("daemon/src/commands/block_jobs.rs", &["compress"]),
    ("daemon/src/commands/create.rs", &["qcow"]),
    ("daemon/src/commands/drives.rs", &["raw"]),
    ("daemon/src/commands/experimental.rs", &["luks"]),
    ("daemon/src/commands/new_file.rs", &["host_device"]),
    ("daemon/src/commands/nodes.rs", &["nbd"]),
    ("daemon/src/commands/snapshot.rs", &["qcow2"]),
    ("daemon/src/commands/throttle.rs", &["throttle"]),
    ("daemon/src/nbd.rs", &["nbd"]),
    ("daemon/src/objects.rs", &["raw"]),
    ("daemon/src/options/drive.rs", &["copy-on-read", "raw"]),
    ("daemon/src/options/temporary.rs", &["qcow2"]),
    ("graph/src/filters/fault/mod.rs", &["fault"]),
    ("graph/src/filters/replicas.rs", &["blkverify", "quorum"]),
    ("graph/src/nbd_client.rs", &["nbd"]),
    ("graph/src/node/edge.rs", &["raw"]),
    ("graph/src/open/children.rs", &["raw"]),
    ("graph/src/open/drivers.rs", &["vvfat"]),
    ("graph/src/open/file_names.rs", &["raw"]),
    ("graph/src/open/filters.rs", &["blkverify", "raw"]),
    ("graph/src/open/names.rs", &["host_device"]),
    ("graph/src/open/naming.rs", &["blkverify"]),
    ("graph/src/options/nbd.rs", &["nbd"]),
    ("graph/src/options/schema.rs", &["blkdebug", "blkverify", "raw"]),
    (
        "graph/src/options/schemas.rs",
        &[
            "blkdebug",
            "blklogwrites",
            "blkverify",
            "compress",
            "copy-before-write",
            "copy-on-read",
            "host_cdrom",
            "host_device",
            "nbd",
            "null-aio",
            "null-co",
            "preallocate",
            "quorum",
            "raw",
            "snapshot-access",
            "throttle",
        ],
    ),
    ("graph/src/options/tree.rs", &["host_cdrom", "host_device"]),
    ("jobs/src/commit/merge.rs", &["raw"]),
    ("jobs/src/convert/target.rs", &["raw"]),
    ("jobs/src/info.rs", &["luks", "qcow2"]),
    ("jobs/src/inspect.rs", &["luks", "qcow2", "raw", "vmdk"]),
    ("jobs/src/inspect/blocks.rs", &["parallels", "qcow", "qed", "vdi", "vhdx", "vpc"]),
    ("jobs/src/inspect/vmdk.rs", &["vmdk"]),
    ("jobs/src/measure.rs", &["luks", "qcow2", "raw"]),
    ("jobs/src/rescue.rs", &["raw"]),
    ("jobs/src/stream.rs", &["copy-on-read"]),
    ("ova/src/checks.rs", &["raw", "vmdk"]),
    ("ova/src/disk_format.rs", &["qcow2", "raw", "vdi", "vhdx", "vmdk", "vpc"]),
];

/// The names of drivers in a source, tests and comments apart.
fn named(source: &str, drivers: &[&'static str]) -> BTreeSet<&'static str> {
    let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = lines.join("\n");
    drivers.iter().copied().filter(|name| code.contains(&format!("\"{name}\""))).collect()
}

#[test]
fn only_the_table_chooses_by_the_name_of_a_driver() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // `file` is a child's role too.
    let names = cowshed_image::DRIVERS.schemas().map(|schema| schema.name).filter(|name| *name != "file");
    let drivers: Vec<&'static str> = names.collect();
    assert!(drivers.contains(&"qcow2") && drivers.contains(&"throttle"), "the table is read");
    let mut seen = BTreeSet::new();
    for path in CRATES.iter().flat_map(|name| rust_files(&crates.join(name).join("src"))) {
        if path.ends_with("tests.rs") {
            continue;
        }
        let file = path.strip_prefix(&crates).expect("a file of a crate").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).expect("a source file is readable");
        let still: &[&str] = STILL_NAMED.iter().find(|(name, _)| *name == file).map_or(&[], |(_, names)| names);
        let still: BTreeSet<&str> = still.iter().copied().collect();
        let found = named(&text, &drivers);
        let new: Vec<&&str> = found.difference(&still).collect();
        assert!(new.is_empty(), "{file} names the drivers {new:?}: a fact of their lines, or a capability, says more");
        let gone: Vec<&&str> = still.difference(&found).collect();
        assert!(gone.is_empty(), "{file} doesn't name {gone:?} any more: strike them from STILL_NAMED");
        seen.insert(file);
    }
    for (file, _) in STILL_NAMED {
        assert!(seen.contains(*file), "{file} is gone: strike it from STILL_NAMED");
    }
}

#[test]
fn names_in_comments_and_tests_do_not_count() {
    let source = "// \"raw\"\nlet name = \"vdi\";\n#[cfg(test)]\nmod tests { const NAME: &str = \"qed\"; }";
    assert_eq!(named(source, &["raw", "vdi", "qed"]), BTreeSet::from(["vdi"]));
}
