// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory whose size comes from an image and that the system doesn't have is an error of the verb, not the end of the
//! process.

use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

const MIB: u64 = 1 << 20;

/// Runs the tool with this many bytes of memory of its own.
fn limited(folder: &Path, bytes: u64, line: &str) -> Output {
    let mut command = Command::new("prlimit");
    command.arg(format!("--data={bytes}")).arg(env!("CARGO_BIN_EXE_cowshed")).args(line.split(' '));
    command.current_dir(folder).output().expect("prlimit must be installed (util-linux)")
}

/// Memory in which the line works on a small image, and little more.
fn little(folder: &Path, line: &str) -> u64 {
    let works = |mib: &u64| limited(folder, mib * MIB, line).status.success();
    let least = (8..=2048).step_by(8).find(works);
    (least.unwrap_or_else(|| panic!("`{line}` needs more than 2 GiB")) + 8) * MIB
}

/// The line with the small image works with memory with which the same with the hostile one fails in good order.
#[track_caller]
fn expect_refusal(folder: &Path, line: &str) {
    let bytes = little(folder, &line.replace("IMAGE", "small.qcow2"));
    let hostile = line.replace("IMAGE", "hostile.qcow2");
    let output = limited(folder, bytes, &hostile);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "`{hostile}` with {bytes} bytes: {:?}: {said}", output.status);
    assert!(said.contains("could not get memory"), "`{hostile}`: {said}");
}

#[test]
fn tables_of_an_image_that_memory_does_not_hold_are_refused() {
    let folder = temp_dir();
    let folder = folder.path();
    let qemu = Qemu::system();
    qemu.create(&folder.join("small.qcow2"), "qcow2", "cluster_size=512", MIB);
    let hostile = folder.join("hostile.qcow2");
    // An L1 table of 32 MiB.
    qemu.create(&hostile, "qcow2", "cluster_size=512", 128 << 30);
    for line in ["map IMAGE", "convert --force -O raw IMAGE out.raw", "check IMAGE", "qemu-io -r -c length IMAGE"] {
        expect_refusal(folder, line);
    }
    // Two bytes for each of 16 million clusters.
    std::fs::copy(folder.join("small.qcow2"), &hostile).expect("copy");
    std::fs::OpenOptions::new().write(true).open(&hostile).expect("open").set_len(8 << 30).expect("a hole");
    expect_refusal(folder, "check IMAGE");
}

/// An image with a refcount table of 8 MiB, of whose entries `named` name blocks that hold nothing.
fn with_large_refcount_table(small: &Path, path: &Path, named: u64) {
    const TABLE_BYTES: u64 = 8 * MIB;
    let mut bytes = std::fs::read(small).expect("an image");
    let table = u64::from_be_bytes(bytes[48..56].try_into().expect("8 bytes")) as usize;
    let first: [u8; 8] = bytes[table..table + 8].try_into().expect("8 bytes");
    let start = bytes.len().next_multiple_of(512) as u64;
    bytes.resize(start as usize, 0);
    bytes[48..56].copy_from_slice(&start.to_be_bytes());
    bytes[56..60].copy_from_slice(&((TABLE_BYTES / 512) as u32).to_be_bytes());
    bytes.extend(first);
    for index in 1..TABLE_BYTES / 8 {
        let block = if index < named { start + TABLE_BYTES + index % 1000 * 512 } else { 0 };
        bytes.extend(block.to_be_bytes());
    }
    bytes.resize((start + TABLE_BYTES + 1000 * 512) as usize, 0);
    std::fs::write(path, bytes).expect("an image");
}

/// An image with one L2 table of 2 MiB, of whose entries each has a reserved bit set.
fn with_damaged_entries(path: &Path) {
    const CLUSTER: u64 = 2 * MIB;
    Qemu::newest().create(path, "qcow2", "cluster_size=2M", CLUSTER * (CLUSTER / 8));
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("open");
    let mut header = [0; 104];
    file.read_exact_at(&mut header, 0).expect("a header");
    let l1_offset = u64::from_be_bytes(header[40..48].try_into().expect("8 bytes"));
    let table = file.metadata().expect("metadata").len().next_multiple_of(CLUSTER);
    file.write_all_at(&2u64.to_be_bytes().repeat((CLUSTER / 8) as usize), table).expect("a table");
    file.write_all_at(&(table | 1 << 63).to_be_bytes(), l1_offset).expect("an entry");
}

/// Copies a file without its zeroes, which a flush would wait for.
fn copy_sparsely(from: &Path, to: &Path) {
    const PIECE: usize = 1 << 16;
    let bytes = std::fs::read(from).expect("an image");
    let copy = std::fs::File::create(to).expect("a copy");
    copy.set_len(bytes.len() as u64).expect("a hole");
    for (index, piece) in bytes.chunks(PIECE).enumerate().filter(|(_, piece)| *piece != &[0; PIECE][..piece.len()]) {
        copy.write_all_at(piece, (index * PIECE) as u64).expect("a write");
    }
}

/// The bytes for lack of which a process ended.
fn untried_bytes(said: &str) -> Option<u64> {
    let behind = said.split("memory allocation of ").nth(1)?;
    behind.split(' ').next()?.parse().ok()
}

const LINES: &[&str] = &[
    "info IMAGE",
    "map IMAGE",
    "check IMAGE",
    "check --output=json IMAGE",
    "check -r all IMAGE",
    "qemu-io -c length IMAGE",
    "snapshot -c one IMAGE",
    "amend -o lazy_refcounts=on IMAGE",
    "bitmap --add IMAGE b",
    "rescue IMAGE",
];

/// With any memory, from the need of a small image on, a verb does its work or refuses it.
#[test]
fn no_amount_of_memory_ends_a_verb_half_way() {
    let folder = temp_dir();
    let folder = folder.path();
    let small = folder.join("small.qcow2");
    Qemu::system().create(&small, "qcow2", "cluster_size=512", MIB);
    // An L1 table of 8 MiB.
    Qemu::system().create(&folder.join("l1.qcow2"), "qcow2", "cluster_size=512", 32 << 30);
    with_large_refcount_table(&small, &folder.join("blocks.qcow2"), 0);
    with_large_refcount_table(&small, &folder.join("shared.qcow2"), MIB / 8);
    with_damaged_entries(&folder.join("entries.qcow2"));
    for line in LINES {
        // These take long, and use the same tables.
        let is_change = ["-r all", "snapshot", "amend", "bitmap"].iter().any(|part| line.contains(part));
        let least = little(folder, &line.replace("IMAGE", "small.qcow2"));
        for image in ["l1.qcow2", "blocks.qcow2", "shared.qcow2", "entries.qcow2"] {
            // A repair gives each of the shared blocks a place of its own.
            let takes_long = line.contains("-r all") && image != "blocks.qcow2";
            if takes_long {
                continue;
            }
            let (mut refused, mut done, mut enough) = (0, 0, 0);
            for more in [0, 2, 5, 9, 14, 20, 26, 32, 40, 60, 100, 160] {
                let name = if is_change { "copy.qcow2" } else { image };
                if is_change {
                    copy_sparsely(&folder.join(image), &folder.join(name));
                }
                let output = limited(folder, least + more * MIB, &line.replace("IMAGE", name));
                let said = String::from_utf8_lossy(&output.stderr);
                let text = format!("`{line}` of {image} with {more} MiB more: {:?}: {said}", output.status);
                assert!(!said.contains("panicked"), "{text}");
                // Memory of a cluster or less is not tried first: where a table took nearly all, that may be missing.
                match untried_bytes(&said) {
                    Some(bytes) => assert!(bytes <= 2 * MIB, "{text}"),
                    None => assert!(output.status.code().is_some_and(|code| code < 100), "{text}"),
                }
                refused += u64::from(said.contains("could not get memory"));
                done += u64::from(!said.contains("could not get memory"));
                let lacks_memory = said.contains("could not get memory") || untried_bytes(&said).is_some();
                enough = if lacks_memory { 0 } else { enough + 1 };
                // With more memory the verb does the same again.
                if enough == 2 {
                    break;
                }
            }
            // A damaged image may be refused for its damage.
            assert!(done > 0, "`{line}` of {image} was never done");
            assert!(refused > 0 || image != "l1.qcow2", "`{line}` of {image} was never refused");
        }
    }
}

/// The disk of an image may be as large as its header claims, while its file holds a megabyte or two.
#[test]
fn a_snapshot_takes_memory_for_what_the_file_holds() {
    let folder = temp_dir();
    Qemu::newest().create(&folder.path().join("wide.qcow2"), "qcow2", "cluster_size=64k", 1 << 46);
    for line in ["snapshot -c one wide.qcow2", "snapshot -d one wide.qcow2"] {
        let output = limited(folder.path(), 64 * MIB, line);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "`{line}`: {:?}: {said}", output.status);
    }
}
