// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Single cases where engines differ or go wrong, each held against the real QEMU.

use cowshed_image::node::{Node, Preallocation, ZeroFlags};
use cowshed_image::{OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::images::{Executor, Library, Op, QemuIo, Reader, Texture};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::Random;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MIB: u64 = 1 << 20;

struct Fixture {
    qemu: Qemu,
    folder: tempfile::TempDir,
}

impl Fixture {
    /// One for the system's tools and one for the newest, each with a folder of its own.
    fn all() -> [Self; 2] {
        Qemu::all().map(|qemu| Fixture { qemu, folder: temp_dir() })
    }

    fn image(&self, options: &str, size: u64) -> PathBuf {
        let path = self.folder.path().join("image.qcow2");
        self.qemu.create(&path, "qcow2", options, size);
        path
    }
}

fn ours(path: &Path, ops: &[Op]) {
    Library { concurrent: false }.session(path, ops);
}

fn write(offset: u64, len: u64, tag: u32) -> Op {
    Op::Write { offset, len, texture: Texture::Counted(tag) }
}

fn resize(size: u64) -> Op {
    Op::Resize { size, preallocation: Preallocation::Off }
}

fn open_writable(path: &Path) -> cowshed_types::Result<Arc<Node>> {
    rt::block_on(open(OpenRequest::file(path.to_string_lossy()).format("qcow2").writable(true)))
}

#[test]
fn what_a_shrink_cut_off_does_not_come_back() {
    for fixture in Fixture::all() {
        for options in ["", "cluster_size=512", "extended_l2=on", "compat=0.10", "data_file=NAME"] {
            let data_file = fixture.folder.path().join("image.data");
            let path = fixture.image(&options.replace("NAME", &data_file.to_string_lossy()), MIB);
            ours(&path, &[write(0, MIB, 1), resize(300_032), resize(MIB)]);
            let content = fixture.qemu.content(&path, "qcow2");
            assert!(content[300_032..].iter().all(|byte| *byte == 0), "{options}: old bytes are back");
            assert!(content[..300_032].iter().any(|byte| *byte != 0), "{options}: the rest is gone");
            fixture.qemu.expect_clean(&path);
        }
    }
}

#[test]
fn growth_over_a_longer_backing_file_reads_zero() {
    for fixture in Fixture::all() {
        let base = fixture.folder.path().join("base.qcow2");
        fixture.qemu.create(&base, "qcow2", "", 2 * MIB);
        QemuIo(&fixture.qemu).session(&base, &[write(0, 2 * MIB, 7)]);
        for extended in ["off", "on"] {
            let options = format!("extended_l2={extended},backing_file={},backing_fmt=qcow2", base.display());
            let path = fixture.image(&options, MIB - 1536);
            ours(&path, &[write(MIB - 4096, 512, 2), resize(2 * MIB)]);
            let content = fixture.qemu.content(&path, "qcow2");
            assert!(content[MIB as usize - 1536..].iter().all(|byte| *byte == 0), "the backing file shows through");
            assert!(content[..4096].iter().any(|byte| *byte != 0), "the backing file doesn't show at all");
            fixture.qemu.expect_clean(&path);
        }
    }
}

#[test]
fn tables_grow_under_scattered_writes() {
    const SIZE: u64 = 256 * MIB;
    for fixture in Fixture::all() {
        let spread = |index: u64| index * 0x9e37_79b9 * 512 % (SIZE - 2048);
        let ops: Vec<Op> = (0..1500).map(|index| write(spread(index), 700, index as u32 + 1)).collect();
        let control = fixture.folder.path().join("control.qcow2");
        fixture.qemu.create(&control, "qcow2", "", SIZE);
        QemuIo(&fixture.qemu).session(&control, &ops);
        for options in ["cluster_size=512,refcount_bits=64", "cluster_size=512,refcount_bits=1", "cluster_size=4k"] {
            let path = fixture.image(options, SIZE);
            ours(&path, &ops);
            fixture.qemu.expect_clean(&path);
            assert!(fixture.qemu.is_equal((&path, "qcow2"), (&control, "qcow2")), "{options}");
            std::fs::remove_file(&path).expect("the image can be removed");
        }
    }
}

#[test]
fn an_image_that_qemu_left_dirty_is_rebuilt() {
    for fixture in Fixture::all() {
        let path = fixture.image("lazy_refcounts=on", 4 * MIB);
        let commands = ["write -q -P 9 0 1M", "write -q -P 10 3M 64k", "flush", "abort"];
        let mut arguments = vec!["-f", "qcow2"];
        commands.iter().for_each(|command| arguments.extend(["-c", command]));
        let name = path.to_string_lossy();
        arguments.push(&name);
        assert_ne!(fixture.qemu.io(arguments).code, 0, "abort must end qemu-io");
        let before = std::fs::read(&path).expect("the image is readable");
        assert_eq!(before[79] & 1, 1, "the dirty bit must be set for this test");
        ours(&path, &[write(2 * MIB, 4096, 5)]);
        fixture.qemu.expect_clean(&path);
        let content = fixture.qemu.content(&path, "qcow2");
        assert!(content[..MIB as usize].iter().all(|byte| *byte == 9), "flushed data is lost");
        assert!(content[3 * MIB as usize..][..65536].iter().all(|byte| *byte == 10), "flushed data is lost");
    }
}

#[test]
fn an_image_that_we_left_dirty_is_repaired_by_qemu() {
    for fixture in Fixture::all() {
        let path = fixture.image("lazy_refcounts=on", 4 * MIB);
        let node = open_writable(&path).expect("a fresh image opens");
        rt::block_on(async {
            let mut buffer = IoBuf::zeroed(MIB as usize);
            buffer.fill(9);
            node.write(0, buffer).await.0?;
            node.flush().await
        })
        .expect("write and flush succeed");
        // As after a crash: never closed. The copy is the content of the disk, without locks.
        let copy = fixture.folder.path().join("copy.qcow2");
        std::fs::copy(&path, &copy).expect("the image can be copied");
        let header = std::fs::read(&copy).expect("the copy is readable");
        assert_eq!(header[79] & 1, 1, "with lazy refcounts a written image is dirty until it is closed");
        assert_eq!(fixture.qemu.check_with(&copy, "qcow2", &["-r", "all"]).code, 0, "repair by QEMU");
        fixture.qemu.expect_clean(&copy);
        let content = fixture.qemu.content(&copy, "qcow2");
        assert!(content[..MIB as usize].iter().all(|byte| *byte == 9), "flushed data is lost");
        rt::block_on(node.close()).expect("it closes");
        fixture.qemu.expect_clean(&path);
        assert_eq!(std::fs::read(&path).expect("the image is readable")[79] & 1, 0, "closing clears the dirty bit");
    }
}

#[test]
fn images_with_internal_snapshots_are_written_and_the_snapshots_stay() {
    for fixture in Fixture::all() {
        let path = fixture.image("", MIB);
        QemuIo(&fixture.qemu).session(&path, &[write(0, 200_000, 1)]);
        let name = path.to_string_lossy();
        let before = fixture.qemu.content(&path, "qcow2");
        fixture.qemu.img(["snapshot", "-c", "first", &name]).expect_ok();
        QemuIo(&fixture.qemu).session(&path, &[write(100_000, 200_000, 2)]);
        Library { concurrent: true }.session(&path, &[write(50_000, 300_000, 3)]);
        fixture.qemu.expect_clean(&path);
        assert!(fixture.qemu.content(&path, "qcow2") != before, "nothing was written");
        fixture.qemu.img(["snapshot", "-a", "first", &name]).expect_ok();
        assert!(fixture.qemu.content(&path, "qcow2") == before, "the snapshot has changed");
    }
}

#[test]
fn images_with_bitmaps_are_written_and_the_bitmaps_stay() {
    for fixture in Fixture::all() {
        let path = fixture.image("", MIB);
        let name = path.to_string_lossy();
        fixture.qemu.img(["bitmap", "--add", &name, "dirty"]).expect_ok();
        QemuIo(&fixture.qemu).session(&path, &[write(0, 200_000, 1)]);
        Library { concurrent: true }.session(&path, &[write(300_000, 200_000, 2)]);
        fixture.qemu.expect_clean(&path);
        let reader = Reader::open(&path, "qcow2");
        assert!(reader.read_all() == fixture.qemu.content(&path, "qcow2"), "content");
        reader.close();
        let info = fixture.qemu.img(["info", "--output=json", &name]).expect_ok();
        assert!(info.stdout.contains("\"dirty\"") && !info.stdout.contains("in-use"), "{}", info.stdout);
    }
}

#[test]
fn encrypted_images_are_refused_by_name() {
    for fixture in Fixture::all() {
        let path = fixture.image("", MIB);
        // crypt_method, the big-endian field at byte 32: 1 is AES.
        poke(&path, 35, 1);
        let error = rt::block_on(open(OpenRequest::file(path.to_string_lossy()).format("qcow2"))).map(|_| ());
        let error = error.and_then(|()| open_writable(&path).map(|_| ())).expect_err("opened without its key");
        assert!(error.to_string().contains("encr") && error.to_string().contains("image.qcow2"), "{error}");
    }
}

fn poke(path: &Path, offset: usize, bits: u8) {
    let mut bytes = std::fs::read(path).expect("the image is readable");
    bytes[offset] |= bits;
    std::fs::write(path, bytes).expect("the image is writable");
}

#[test]
fn an_unknown_incompatible_feature_is_refused_by_number_or_name() {
    for fixture in Fixture::all() {
        let path = fixture.image("", MIB);
        // Bit 40 of the big-endian field at byte 72.
        poke(&path, 74, 1);
        let error = rt::block_on(open(OpenRequest::file(path.to_string_lossy()).format("qcow2"))).map(|_| ());
        let error = error.expect_err("opened with an unknown feature").to_string();
        assert!(error.contains("40") || error.contains("0x10000000000"), "{error}");
    }
}

#[test]
fn unknown_autoclear_bits_are_cleared_by_the_first_writable_open_only() {
    for fixture in Fixture::all() {
        let path = fixture.image("", MIB);
        poke(&path, 90, 1);
        Reader::open(&path, "qcow2").close();
        assert_eq!(std::fs::read(&path).expect("readable")[90], 1, "reading must not change the image");
        ours(&path, &[write(0, 512, 1)]);
        assert_eq!(std::fs::read(&path).expect("readable")[88..96], [0; 8], "autoclear bits stay after writing");
        fixture.qemu.expect_clean(&path);
    }
}

#[test]
fn an_unknown_header_extension_is_kept() {
    for fixture in Fixture::all() {
        let path = fixture.image("", MIB);
        let mut bytes = std::fs::read(&path).expect("readable");
        // Behind the header: the extensions, ended by eight zero bytes.
        let mut at = u32::from_be_bytes(bytes[100..104].try_into().expect("four bytes")) as usize;
        while bytes[at..at + 4] != [0; 4] {
            let len = u32::from_be_bytes(bytes[at + 4..at + 8].try_into().expect("four bytes")) as usize;
            at += 8 + len.next_multiple_of(8);
        }
        let extension = *b"\x12\x34\x56\x78\0\0\0\x05hello\0\0\0";
        bytes[at..at + 16].copy_from_slice(&extension);
        std::fs::write(&path, &bytes).expect("writable");
        ours(&path, &[write(0, 200_000, 1), resize(2 * MIB)]);
        assert_eq!(std::fs::read(&path).expect("readable")[at..at + 16], extension, "the extension was lost");
        fixture.qemu.expect_clean(&path);
    }
}

#[test]
fn a_discarded_tail_is_given_back_to_the_file_system() {
    for fixture in Fixture::all() {
        let path = fixture.image("", 64 * MIB);
        ours(&path, &[write(0, 64 * MIB, 3)]);
        let full = std::fs::metadata(&path).expect("there").len();
        ours(&path, &[Op::Discard { offset: MIB, len: 63 * MIB }]);
        let rest = std::fs::metadata(&path).expect("there").len();
        assert!(full > 64 * MIB && rest < 4 * MIB, "{full} bytes, then {rest}");
        fixture.qemu.expect_clean(&path);
    }
}

#[test]
fn a_resize_keeps_what_preallocation_promises() {
    for fixture in Fixture::all() {
        for mode in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
            let path = fixture.image("", MIB);
            let node = open_writable(&path).expect("a fresh image opens");
            rt::block_on(async {
                node.resize(9 * MIB, mode).await?;
                node.close().await
            })
            .unwrap_or_else(|error| panic!("{mode:?}: {error}"));
            fixture.qemu.expect_clean(&path);
            let map = fixture.qemu.map(&path, "qcow2");
            let allocated: u64 = map.iter().filter(|run| run.offset.is_some()).map(|run| run.length).sum();
            assert!(allocated >= 8 * MIB, "{mode:?}: only {allocated} bytes are mapped\n{map:?}");
            assert_eq!(fixture.qemu.content(&path, "qcow2"), vec![0; 9 << 20], "{mode:?}");
        }
    }
}

/// The base ends within a cluster, or is longer than the overlay. Its data before the old end stays, and nothing of it
/// shows behind.
#[test]
fn growth_with_preallocation_keeps_what_the_backing_file_shows() {
    const OLD: u64 = 100 << 10;
    const NEW: u64 = 5 * MIB;
    for fixture in Fixture::all() {
        let base = |format: &str, len: u64| {
            let path = fixture.folder.path().join(format!("{format}-{len}"));
            fixture.qemu.create(&path, format, "", len);
            fixture.qemu.io_commands(&path, format, &[format!("write -P 5 0 {len}")]).expect_ok();
            path
        };
        let bases = [("raw", OLD), ("qcow2", OLD), ("raw", 3 * MIB)];
        let bases = bases.map(|(format, len)| (format, len, base(format, len)));
        let kinds = ["compat=0.10", "cluster_size=4k", "cluster_size=64k", "cluster_size=2M", "extended_l2=on"];
        for (options, (format, len, base)) in
            kinds.iter().flat_map(|options| bases.iter().map(move |base| (options, base)))
        {
            for (preallocation, tool_grows) in [
                (Preallocation::Metadata, false),
                (Preallocation::Metadata, true),
                (Preallocation::Falloc, false),
                (Preallocation::Full, false),
            ] {
                let case = format!("{options} over {}, {preallocation:?}", base.display());
                let options = format!("{options},backing_file={},backing_fmt={format}", base.display());
                let path = fixture.image(&options, OLD);
                if tool_grows && options.contains("0.10") && *len > OLD {
                    // QEMU refuses: no zero cluster hides the backing file there.
                    continue;
                }
                let grow = Op::Resize { size: NEW, preallocation };
                match tool_grows {
                    true => QemuIo(&fixture.qemu).session(&path, &[grow]),
                    false => ours(&path, &[grow]),
                }
                let content = fixture.qemu.content(&path, "qcow2");
                assert_eq!(content.len() as u64, NEW, "{case}");
                let (kept, added) = content.split_at(OLD as usize);
                assert!(kept.iter().all(|byte| *byte == 5), "{case}: the backing file is gone");
                assert!(added.iter().all(|byte| *byte == 0), "{case}: old bytes show");
                fixture.qemu.expect_clean(&path);
                // All of it has its space: writes there fit.
                let map = fixture.qemu.map(&path, "qcow2");
                let own: u64 =
                    map.iter().filter(|run| run.depth == 0 && run.offset.is_some()).map(|run| run.length).sum();
                assert!(own >= NEW - OLD, "{case}: only {own} bytes are mapped");
            }
        }
    }
}

/// Also where the overlay has nothing: version 3 can record that the backing file must not show.
#[test]
fn a_discard_hides_the_backing_file_as_in_qemu() {
    for qemu in Qemu::all() {
        let folder = temp_dir();
        let path = |name: &str| folder.path().join(name);
        for (options, is_hidden) in [("cluster_size=64k", true), ("compat=0.10", false), ("extended_l2=on", true)] {
            qemu.create(&path("base"), "qcow2", "", 1 << 20);
            qemu.io_commands(&path("base"), "qcow2", &["write -P 66 0 1M".to_owned()]).expect_ok();
            for name in ["theirs", "ours"] {
                let text = path(name).to_str().expect("text path").to_owned();
                qemu.img(["create", "-q", "-f", "qcow2", "-o", options, "-b", "base", "-F", "qcow2", &text])
                    .expect_ok();
                qemu.io_commands(&path(name), "qcow2", &["write -P 3 96k 32k".to_owned()]).expect_ok();
            }
            qemu.io_commands(&path("theirs"), "qcow2", &["discard 0 512k".to_owned()]).expect_ok();
            let discarded = rt::block_on(async {
                let node =
                    open(OpenRequest::file(path("ours").to_string_lossy()).format("qcow2").writable(true)).await?;
                node.discard(0, 512 << 10).await?;
                node.close().await
            });
            discarded.unwrap_or_else(|error| panic!("{options}: {error}"));
            let content = qemu.content(&path("ours"), "qcow2");
            assert!(content == qemu.content(&path("theirs"), "qcow2"), "{options}");
            assert_eq!(content[0] == 0, is_hidden, "{options}");
            assert_eq!(qemu.check(&path("ours"), "qcow2").code, 0, "{options}");
        }
    }
}

/// The ranges that the guest zeroed or discarded, by offset, length and kind; kinds as `qemu-io` names them.
const ZEROED: [&[(&str, u64, u64)]; 7] = [
    &[("write -z", 0, 1 << 20), ("write -z -u", 2 << 20, 1 << 16), ("write -z", 3 << 20, 1 << 16)],
    &[("discard", 0, 1 << 20), ("discard", 2 << 20, 1 << 16)],
    &[("write -z", 3 << 10, 2 << 10), ("write -z", 1027 << 10, 2 << 10), ("write -z -u", 2051 << 10, 2 << 10)],
    &[("write -z", 100 << 10, 100 << 10), ("write -z", 2100 << 10, 100 << 10)],
    &[
        ("write", 0, 128 << 10),
        ("write -z", 0, 64 << 10),
        ("write", 2 << 20, 128 << 10),
        ("write -z -u", 2 << 20, 64 << 10),
    ],
    &[("write", 0, 128 << 10), ("discard", 0, 64 << 10), ("write", 2 << 20, 128 << 10), ("discard", 2 << 20, 64 << 10)],
    &[
        ("write -z", 0, 128 << 10),
        ("write -z", 3 << 10, 2 << 10),
        ("discard", 64 << 10, 64 << 10),
        ("write", 70 << 10, 1 << 10),
    ],
];

async fn zero_by_library(path: &Path, steps: &[(&str, u64, u64)]) -> cowshed_types::Result<()> {
    let node = open(OpenRequest::file(path.to_string_lossy()).format("qcow2").writable(true)).await?;
    for (kind, offset, len) in steps {
        let flags = ZeroFlags { may_unmap: kind.ends_with("-u"), no_fallback: false };
        match *kind {
            "write" => {
                let mut bytes = IoBuf::zeroed(*len as usize);
                bytes.fill(0xcd);
                node.write(*offset, bytes).await.0?;
            }
            "discard" => node.discard(*offset, *len).await?,
            _ => node.write_zeroes(*offset, *len, flags).await?,
        }
    }
    node.close().await
}

/// Zeroes that were written stay zeroes whatever backing file an image gets later, or however long it becomes.
#[test]
fn guest_zeroes_survive_another_backing_file() {
    for qemu in Qemu::all() {
        let folder = temp_dir();
        let path = |name: &str| folder.path().join(name);
        let text = |name: &str| path(name).to_str().expect("text path").to_owned();
        for (name, size, filled) in [("short", "1M", "256k"), ("empty", "4M", "0"), ("full", "4M", "4M")] {
            qemu.img(["create", "-q", "-f", "qcow2", &text(name), size]).expect_ok();
            if filled != "0" {
                qemu.io_commands(&path(name), "qcow2", &[format!("write -P 66 0 {filled}")]).expect_ok();
            }
        }
        for options in ["cluster_size=64k", "compat=0.10", "extended_l2=on,cluster_size=64k"] {
            for backing in [None, Some("short"), Some("empty")] {
                for steps in ZEROED {
                    let case = format!("{options}, backing file {backing:?}, {steps:?}");
                    for name in ["theirs", "ours"] {
                        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", options];
                        if let Some(backing) = backing {
                            arguments.extend(["-b", backing, "-F", "qcow2"]);
                        }
                        let target = text(name);
                        arguments.extend([target.as_str(), "4M"]);
                        qemu.img(arguments).expect_ok();
                    }
                    let commands: Vec<String> =
                        steps.iter().map(|(kind, offset, len)| format!("{kind} {offset} {len}")).collect();
                    qemu.io_commands(&path("theirs"), "qcow2", &commands).expect_ok();
                    rt::block_on(zero_by_library(&path("ours"), steps))
                        .unwrap_or_else(|error| panic!("{case}: {error}"));
                    assert_eq!(qemu.check(&path("ours"), "qcow2").code, 0, "{case}");
                    let content = |name: &str| qemu.content(&path(name), "qcow2");
                    assert!(content("ours") == content("theirs"), "{case}");
                    for name in ["theirs", "ours"] {
                        qemu.img(["rebase", "-u", "-b", "full", "-F", "qcow2", &text(name)]).expect_ok();
                    }
                    assert!(content("ours") == content("theirs"), "{case}: on another backing file");
                }
            }
        }
    }
}

/// The data of an image: position and length of each run in bytes, and the layer.
fn data_runs(qemu: &Qemu, path: &Path) -> Vec<(u64, u64, u64)> {
    let mut runs: Vec<(u64, u64, u64)> = Vec::new();
    for entry in qemu.map(path, "qcow2").into_iter().filter(|entry| entry.data) {
        match runs.last_mut().filter(|run| run.0 + run.1 == entry.start && run.2 == entry.depth) {
            Some(run) => run.1 += entry.length,
            None => runs.push((entry.start, entry.length, entry.depth)),
        }
    }
    runs
}

/// A write to a cluster that a snapshot shares takes over the subclusters that have data, and those between them.
#[test]
fn shared_subclusters_are_copied_as_in_qemu() {
    for qemu in Qemu::all() {
        let folder = temp_dir();
        let path = |name: &str| folder.path().join(name);
        let text = |name: &str| path(name).to_str().expect("text path").to_owned();
        qemu.create(&path("base"), "qcow2", "", MIB);
        qemu.io_commands(&path("base"), "qcow2", &["write -P 66 0 300k".to_owned()]).expect_ok();
        for (backing, cluster) in [(false, "64k"), (true, "64k"), (true, "16k")] {
            for seed in 0..4 {
                let case = format!("backing file: {backing}, clusters of {cluster}, seed {seed}");
                let mut random = Random::new(seed);
                let options = format!("extended_l2=on,cluster_size={cluster}");
                for name in ["theirs", "ours"] {
                    let target = text(name);
                    let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", &options];
                    if backing {
                        arguments.extend(["-b", "base", "-F", "qcow2"]);
                    }
                    arguments.extend([target.as_str(), "1M"]);
                    qemu.img(arguments).expect_ok();
                }
                for round in 0..4 {
                    let writes: Vec<(u64, u64)> =
                        (0..6).map(|_| (random.below(700) * 512, (1 + random.below(12)) * 512)).collect();
                    let commands: Vec<String> =
                        writes.iter().map(|(at, len)| format!("write -P {} {at} {len}", round + 1)).collect();
                    qemu.io_commands(&path("theirs"), "qcow2", &commands).expect_ok();
                    let written = rt::block_on(async {
                        let request = OpenRequest::file(text("ours")).format("qcow2").writable(true);
                        let node = open(request).await?;
                        for (at, len) in &writes {
                            let mut bytes = IoBuf::zeroed(*len as usize);
                            bytes.fill(round + 1);
                            node.write(*at, bytes).await.0?;
                        }
                        node.close().await
                    });
                    written.unwrap_or_else(|error| panic!("{case}: {error}"));
                    assert!(
                        qemu.content(&path("ours"), "qcow2") == qemu.content(&path("theirs"), "qcow2"),
                        "{case}, round {round}"
                    );
                    let [found, wanted] = ["ours", "theirs"].map(|name| data_runs(&qemu, &path(name)));
                    assert_eq!(found, wanted, "{case}, round {round}, {writes:x?}");
                    qemu.expect_clean(&path("ours"));
                    for name in ["theirs", "ours"] {
                        qemu.img(["snapshot", "-c", "kept", &text(name)]).expect_ok();
                    }
                }
            }
        }
    }
}

/// A guest that never flushes doesn't make the file longer and longer: its freed clusters are used again.
#[test]
fn space_that_was_freed_is_used_again_without_a_flush() {
    for fixture in Fixture::all() {
        for punched in [true, false] {
            let path = fixture.image("", 64 * MIB);
            let written = rt::block_on(async {
                let options = format!(
                    "driver=qcow2,discard=unmap,pass-discard-request={},file.driver=file,file.filename={}",
                    if punched { "on" } else { "off" },
                    path.display()
                );
                let node = open(OpenRequest::image_opts(&options)?.writable(true)).await?;
                for _ in 0..30 {
                    node.discard(0, 8 * MIB).await?;
                    let mut at = 0;
                    while at < 8 * MIB {
                        let mut bytes = IoBuf::zeroed(MIB as usize);
                        bytes.fill(0x5a);
                        node.write(at, bytes).await.0?;
                        at += MIB;
                    }
                }
                node.close().await
            });
            written.unwrap_or_else(|error| panic!("punched: {punched}: {error}"));
            let len = std::fs::metadata(&path).expect("there").len();
            assert!(len < 32 * MIB, "punched: {punched}: {len} bytes for 8 MiB of data");
            fixture.qemu.expect_clean(&path);
        }
    }
}

/// Clusters that a shrink cuts off are given back, also where guests' discards are ignored.
#[test]
fn a_shrink_gives_space_back_whatever_discard_says() {
    for fixture in Fixture::all() {
        let path = fixture.image("", 64 * MIB);
        let shrunk = rt::block_on(async {
            let options = format!("driver=qcow2,discard=ignore,file.driver=file,file.filename={}", path.display());
            let node = open(OpenRequest::image_opts(&options)?.writable(true)).await?;
            // The part that stays is the last in the file.
            for at in [MIB, 2 * MIB, 3 * MIB, 4 * MIB, 0] {
                let mut bytes = IoBuf::zeroed(MIB as usize);
                bytes.fill(0x5a);
                node.write(at, bytes).await.0?;
            }
            node.flush().await?;
            node.resize(MIB, Preallocation::Off).await?;
            // Guests' discards are ignored as before.
            node.discard(0, 64 << 10).await?;
            node.close().await
        });
        shrunk.unwrap_or_else(|error| panic!("{error}"));
        let held = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).expect("there")) * 512;
        assert!(held < 2 * MIB, "{held} bytes for 1 MiB of data");
        fixture.qemu.expect_clean(&path);
        fixture.qemu.io(["-f", "qcow2", "-c", "read -P 90 0 1M", path.to_str().expect("text")]).expect_ok();
    }
}

/// Compressed clusters share host clusters, so one of those comes back when the last of its pieces does. QEMU refuses to compress a
/// cluster again, so the bound is ours: an eighth of the disk waits for a flush at most.
#[test]
fn compressed_clusters_that_are_overwritten_come_back_without_a_flush() {
    const CLUSTER: u64 = 64 << 10;
    let [_, fixture] = Fixture::all();
    let path = fixture.image("", 32 * MIB);
    let half_random = |seed: u64| {
        let mut state = seed * 2 + 1;
        let next = |index: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if index % 512 < 256 { (state >> 56) as u8 } else { 0 }
        };
        IoBuf::copy_from(&(0..CLUSTER as usize).map(next).collect::<Vec<u8>>())
    };
    let written = rt::block_on(async {
        let node = open(OpenRequest::file(path.to_string_lossy()).format("qcow2").writable(true)).await?;
        for round in 0..60 {
            for cluster in 0..16 {
                node.write_compressed(vec![(cluster * CLUSTER, half_random(round * 16 + cluster))]).await?;
            }
            // Every third round parts of them become plain clusters.
            for cluster in (0..16).step_by(2).filter(|_| round % 3 == 0) {
                node.write(cluster * CLUSTER + 4096, IoBuf::copy_from(&[round as u8; 512])).await.0?;
            }
        }
        let len = std::fs::metadata(&path).expect("there").len();
        node.close().await.map(|()| len)
    });
    let len = written.unwrap_or_else(|error| panic!("{error}"));
    // 35 MiB were written.
    assert!(len < 12 * MIB, "{len} bytes for 1 MiB of data");
    fixture.qemu.expect_clean(&path);
    let content = fixture.qemu.content(&path, "qcow2");
    for cluster in 0..16 {
        let at = (cluster * CLUSTER) as usize;
        assert!(content[at..at + CLUSTER as usize] == half_random(59 * 16 + cluster)[..], "cluster {cluster}");
    }
}
