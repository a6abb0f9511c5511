// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of other formats, damaged in thousands of ways. A read returns data, or one error that names the file. It
//! never panics, and no image gets memory or time for the asking. A write changes its own bytes, or is refused.

use cowshed_image::node::{ChildRole, Intent, Mapped};
use cowshed_image::stats::IoKind;
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_layout::{vhdx, vpc};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::run;
use cowshed_types::{Error, ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A format, the options of `qemu-img create` and where in the file its metadata are: offset and length.
type Kind = (&'static str, &'static [&'static str], &'static [(u64, u64)]);

const KINDS: [Kind; 7] = [
    ("vdi", &[], &[(64, 32), (340, 112), (512, 48)]),
    ("vpc", &["-o", "force_size=on"], &[(0, 88), (512, 48), (1536, 24)]),
    ("vpc", &["-o", "subformat=fixed,force_size=on"], &[(5 << 20, 88)]),
    ("qcow", &[], &[(0, 48), (48, 32), (4096, 64)]),
    ("qed", &["-o", "cluster_size=4k"], &[(0, 64), (4096, 64), (20480, 64)]),
    (
        "vhdx",
        &["-o", "block_size=1M"],
        &[(0x10000, 80), (0x20000, 80), (0x30000, 80), (2 << 20, 48), (3 << 20, 192), (0x31_0000, 96)],
    ),
    ("parallels", &[], &[(0, 64), (64, 40)]),
];

/// A disk of 5 MiB with a little data.
fn make(folder: &Path, format: &str, options: &[&str]) -> PathBuf {
    run("qemu-img", folder, &[&["create", "-q", "-f", format], options, &["image", "5M"]].concat());
    run("qemu-io", folder, &["-f", format, "-c", "write -P 1 0 5000", "-c", "write -P 2 3M 64k", "image"]);
    folder.join("image")
}

fn open_image(path: &Path, format: &str) -> Result<Arc<Node>> {
    rt::block_on(open(OpenRequest::file(path.to_str().unwrap()).format(format)))
}

/// Everything that a reader does: opens, reads both ends, maps, checks. The first error, if any.
fn use_image(path: &Path, format: &str) -> Result<()> {
    let node = open_image(path, format)?;
    let used = rt::block_on(async {
        let (first, last) = (node.size().min(6 << 20), node.size().saturating_sub(65_536));
        let parts = (0..first).step_by(1 << 19).map(|at| (at, (first - at).min(1 << 19)));
        for (at, len) in parts.chain(Some((last, node.size() - last))) {
            node.read(at, IoBuf::zeroed(len as usize)).await.0?;
            if len > 0 {
                node.block_status(at, len, 64).await?;
            }
        }
        if node.size() < 1 << 40 {
            let check = node.check_mapped(8).await.expect("a format that is only read")?;
            assert!(check.is_none_or(|check| check.findings.len() <= 8));
        }
        Ok(())
    });
    rt::block_on(node.close())?;
    used
}

/// An error may have any words but "bug", and names the file.
#[track_caller]
fn judge(what: &str, result: Result<()>) -> bool {
    let Err(error) = result else { return true };
    let told: &Error = &error;
    assert!(told.kind() != ErrorKind::Internal, "{what}: {told}");
    assert!(told.to_string().contains("image: "), "{what}: the file is not named: {told}");
    false
}

/// Puts the checksums right that a format has, so that damage behind them is met.
fn put_checksums(path: &Path, format: &str) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    let sum = |at: u64, bytes: usize, field: usize, is_vhdx: bool| {
        let mut buffer = vec![0; bytes];
        if file.read_exact_at(&mut buffer, at).is_ok() {
            let sum = if is_vhdx {
                vhdx::checksum(&buffer).to_le_bytes()
            } else {
                vpc::checksum(&buffer, field).to_be_bytes()
            };
            file.write_all_at(&sum, at + field as u64).unwrap();
        }
    };
    match format {
        "vpc" => {
            sum(len.saturating_sub(512), 512, 64, false);
            let mut cookie = [0; 8];
            file.read_exact_at(&mut cookie, 0).unwrap();
            if &cookie == vpc::COOKIE {
                sum(0, 512, 64, false);
                sum(512, 1024, 36, false);
            }
        }
        "vhdx" => {
            vhdx::HEADER_OFFSETS.iter().for_each(|at| sum(*at, vhdx::HEADER_BYTES, 4, true));
            vhdx::REGION_TABLE_OFFSETS.iter().for_each(|at| sum(*at, vhdx::REGION_TABLE_BYTES, 4, true));
        }
        _ => {}
    }
}

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn a_file_cut_anywhere_gives_one_error_or_the_disk() {
    for (format, options, metadata) in KINDS {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = make(folder.path(), format, options);
        assert!(judge(format, use_image(&path, format)), "the whole image");
        let whole = std::fs::metadata(&path).unwrap().len();
        let mut lengths: Vec<u64> = (0..64).map(|part| whole * part / 64).collect();
        lengths.extend((0..520).step_by(8));
        lengths.extend(metadata.iter().flat_map(|(at, len)| [*at, at + 1, at + len / 2, at + len]));
        lengths.extend([whole - 1, whole - 511, whole - 512, whole - 513]);
        lengths.retain(|len| *len < whole);
        lengths.sort_unstable();
        let mut refused = 0;
        for len in lengths.into_iter().rev() {
            std::fs::File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
            refused += u32::from(!judge(&format!("{format} {options:?} cut to {len}"), use_image(&path, format)));
        }
        assert!(refused > 60, "{format}: only {refused} cuts were noticed");
    }
}

#[test]
fn damaged_metadata_give_one_error_or_a_disk() {
    let rounds =
        300 * std::env::var("COWSHED_FUZZ_FACTOR").map_or(1, |factor| factor.parse::<u64>().expect("a number"));
    for (format, options, metadata) in KINDS {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = make(folder.path(), format, options);
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let (mut state, mut refused) = (0x5eed, 0);
        for round in 0..rounds {
            let seed = state;
            let mut undo: Vec<(u64, Vec<u8>)> = Vec::new();
            for (at, len) in [(0, 2048), (0x10000, 4096), (0x20000, 4096), (0x30000, 4096), (0x40000, 4096)] {
                let mut bytes = vec![0; len];
                if file.read_exact_at(&mut bytes, at).is_ok() {
                    undo.push((at, bytes));
                }
            }
            for _ in 0..1 + random(&mut state) % 3 {
                let (start, len) = metadata[random(&mut state) as usize % metadata.len()];
                let at = start + random(&mut state) % len;
                let mut old = vec![0; 1 + (random(&mut state) % 8) as usize];
                if file.read_exact_at(&mut old, at).is_err() {
                    continue;
                }
                let byte = [0, 0xff, 0x7f, 1, random(&mut state) as u8][random(&mut state) as usize % 5];
                file.write_all_at(&vec![byte; old.len()], at).unwrap();
                undo.push((at, old));
            }
            if !random(&mut state).is_multiple_of(4) {
                put_checksums(&path, format);
            }
            let what = format!("{format} {options:?}, round {round}, state {seed:#x}");
            refused += u32::from(!judge(&what, use_image(&path, format)));
            for (at, old) in undo.iter().rev() {
                file.write_all_at(old, *at).unwrap();
            }
            put_checksums(&path, format);
        }
        assert!(judge(format, use_image(&path, format)), "{format}: the image is whole again");
        assert!(refused > 20, "{format}: only {refused} of {rounds} were noticed");
    }
}

/// The whole disk.
fn content(path: &Path, format: &str) -> Result<Vec<u8>> {
    let node = open_image(path, format)?;
    let (result, bytes) = rt::block_on(node.read(0, IoBuf::zeroed(node.size().min(16 << 20) as usize)));
    rt::block_on(node.close())?;
    result.map(|()| bytes.to_vec())
}

/// Writes a piece through the format, as a guest would.
fn write(path: &Path, format: &str, at: u64, bytes: &[u8]) -> Result<()> {
    let request = OpenRequest::file(path.to_str().unwrap()).format(format).writable(true);
    let node = rt::block_on(open(request))?;
    let written = rt::block_on(node.write(at, IoBuf::copy_from(bytes))).0;
    let closed = rt::block_on(node.close());
    written.and(closed)
}

/// Formats that can be written to.
const WRITTEN: [&str; 6] = ["vdi", "vpc", "vhdx", "qed", "qcow", "parallels"];

#[test]
fn write_to_a_damaged_image_changes_nothing_else() {
    for (format, options, metadata) in KINDS.into_iter().filter(|(format, ..)| WRITTEN.contains(format)) {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let whole = std::fs::read(make(folder.path(), format, options)).unwrap();
        let path = folder.path().join("image");
        let (mut state, mut written) = (0x5eed, 0);
        for round in 0..150 {
            let seed = state;
            let mut bytes = whole.clone();
            for _ in 0..1 + random(&mut state) % 3 {
                let (start, len) = metadata[random(&mut state) as usize % metadata.len()];
                let at = (start + random(&mut state) % len) as usize;
                let byte = [0, 0xff, 1, 2, random(&mut state) as u8][random(&mut state) as usize % 5];
                bytes[at..at + 1 + (random(&mut state) % 4) as usize].fill(byte);
            }
            std::fs::write(&path, &bytes).unwrap();
            put_checksums(&path, format);
            let what = format!("{format} {options:?}, round {round}, state {seed:#x}");
            let Ok(mut expected) = content(&path, format) else { continue };
            if expected.len() < 70_000 || expected.len() == 16 << 20 {
                continue;
            }
            let at = (random(&mut state) % (expected.len() as u64 - 65_536)) as usize / 512 * 512;
            match write(&path, format, at as u64, &[0xab; 65_536]) {
                Ok(()) => {
                    written += 1;
                    expected[at..at + 65_536].fill(0xab);
                    assert!(content(&path, format).unwrap() == expected, "{what}");
                }
                refused => assert!(!judge(&what, refused)),
            }
        }
        assert!(written > 15, "{format} {options:?}: {written}");
    }
}

#[test]
fn overlapping_blocks_take_no_writes() {
    // Where the entries are, and a second one that is no place for a block.
    let vdi_entry = |at: usize| 512 + at * 4;
    let vpc_entry = |at: usize| 1536 + at * 4;
    for (format, options, entry, from) in
        [("vdi", &[][..], vdi_entry(1), Some(vdi_entry(0))), ("vpc", &[], vpc_entry(1), Some(vpc_entry(0)))]
    {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = make(folder.path(), format, options);
        let mut bytes = std::fs::read(&path).unwrap();
        let from = from.unwrap();
        bytes.copy_within(from..from + 4, entry);
        std::fs::write(&path, &bytes).unwrap();
        let error = write(&path, format, 0, &[1; 512]).unwrap_err();
        assert!(error.to_string().contains("two blocks of the disk lie on each other"), "{format}: {error}");
        assert!(std::fs::read(&path).unwrap() == bytes, "{format}: nothing was written");
    }
    // A block of a VHD on the header, on the table, and half on the table: sector numbers.
    for sector in [0u32, 1, 2, 3] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = make(folder.path(), "vpc", &[]);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[vpc_entry(0)..vpc_entry(1)].copy_from_slice(&sector.to_be_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let error = write(&path, "vpc", 0, &[1; 512]).unwrap_err();
        assert!(error.to_string().contains("lies on the metadata"), "sector {sector}: {error}");
        assert!(std::fs::read(&path).unwrap() == bytes, "sector {sector}: nothing was written");
    }
}

#[test]
fn a_guessed_raw_disk_does_not_turn_into_another_format() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk");
    for (format, options, _) in KINDS {
        if options.contains(&"subformat=fixed,force_size=on") {
            continue;
        }
        let image = std::fs::read(make(folder.path(), format, options)).unwrap();
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let request = OpenRequest::file(path.to_str().unwrap()).writable(true);
        let node = rt::block_on(open(request)).unwrap();
        assert!(node.is_probed_raw());
        let (result, _) = rt::block_on(node.write(0, IoBuf::copy_from(&image[..4096])));
        let error = result.unwrap_err();
        assert!(error.kind() == ErrorKind::PermissionDenied && error.to_string().contains(format), "{error}");
        rt::block_on(node.write_zeroes(0, 4096, ZeroFlags::default())).unwrap();
        rt::block_on(node.close()).unwrap();
        // An image is none of these formats on the word of an overlay that names none.
        let overlay = folder.path().join("over.qcow2");
        run(
            "qemu-img",
            folder.path(),
            &["create", "-q", "-u", "-f", "qcow2", "-b", "image", "-F", "raw", "over.qcow2", "5M"],
        );
        let node = rt::block_on(open(OpenRequest::file(overlay.to_str().unwrap()))).unwrap();
        let (result, bytes) = rt::block_on(node.read(0, IoBuf::zeroed(2048)));
        result.unwrap();
        assert!(bytes[..] == image[..2048], "{format}: the bytes of the file, as the overlay says");
        rt::block_on(node.close()).unwrap();
    }
}

/// Two writers would give one place to two blocks; a reader would see tables that change under it.
#[test]
fn an_image_in_use_takes_no_second_writer() {
    let kinds: [(&str, &[&str]); 9] = [
        ("vdi", &[]),
        ("vpc", &[]),
        ("vhdx", &[]),
        ("qed", &[]),
        ("qcow", &[]),
        ("parallels", &[]),
        ("vmdk", &[]),
        ("vmdk", &["-o", "subformat=twoGbMaxExtentSparse"]),
        ("vmdk", &["-o", "subformat=monolithicFlat"]),
    ];
    for (format, options) in kinds {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        run("qemu-img", folder.path(), &[&["create", "-q", "-f", format], options, &["image", "5M"]].concat());
        let path = folder.path().join("image");
        // As qemu-img and qemu-io open images, whose raw ones others may write to.
        let opened = |writable: bool| {
            let request = OpenRequest::file(path.to_str().unwrap()).format(format).writable(writable).sharing_raw();
            rt::block_on(open(request))
        };
        for first_writes in [true, false] {
            let first = opened(first_writes).unwrap();
            let second = opened(true).err().unwrap_or_else(|| panic!("{format} {options:?}: a second one writes"));
            assert!(second.to_string().contains("lock"), "{format} {options:?}: {second}");
            // The files of the extents are not free either.
            for entry in std::fs::read_dir(folder.path()).unwrap() {
                let part = entry.unwrap().path();
                let request = OpenRequest::file(part.to_str().unwrap()).format("raw").writable(true);
                let result = rt::block_on(open(request));
                assert!(result.is_err(), "{format} {options:?}: {} is written to", part.display());
            }
            rt::block_on(first.close()).unwrap();
        }
        rt::block_on(opened(true).unwrap().close()).unwrap();
    }
}

/// Tables that were never written are holes of the file: an opening for writing asks for them, and reads the others.
#[test]
fn large_sparse_disk_opens_without_reading_its_tables() {
    let folder = cowshed_testkit::qemu::temp_dir();
    let at = (1 << 39) + 4096;
    for (format, size, most_bytes) in [("vmdk", "16T", 5 << 20), ("qcow", "1T", 1 << 20), ("qed", "16T", 1 << 20)] {
        run("qemu-img", folder.path(), &["create", "-q", "-f", format, "made", size]);
        run("cp", folder.path(), &["--sparse=always", "made", "image"]);
        let write = format!("write -P 5 {at} 64k");
        run("qemu-io", folder.path(), &["-f", format, "-c", &write, "image"]);
        let path = folder.path().join("image");
        rt::block_on(async {
            let request = OpenRequest::file(path.to_str().unwrap()).format(format).writable(true);
            let node = open(request).await.unwrap();
            let below = node.children().into_iter().find(|child| child.role == ChildRole::File).unwrap().node;
            let before = below.statistics();
            let read = before.kind(IoKind::Read);
            assert!(read.bytes < most_bytes && read.operations < 300, "{format}: {read:?}");
            // Beside the data of another program, and where the table is a hole.
            for at in [at + (64 << 10), at + (1 << 38)] {
                node.write(at, IoBuf::copy_from(&[7; 8192])).await.0.unwrap();
            }
            let (result, bytes) = node.read(at, IoBuf::zeroed(72 << 10)).await;
            result.unwrap();
            assert!(bytes[..64 << 10] == [5; 64 << 10] && bytes[64 << 10..] == [7; 8192], "{format}");
            node.close().await.unwrap();
            let after = below.statistics();
            let read = after.kind(IoKind::Read);
            assert!(read.bytes < 2 * most_bytes, "{format}, with the writes: {read:?}");
        });
        let second = at + (1 << 38);
        let reads = [
            format!("read -P 5 {at} 64k"),
            format!("read -P 7 {} 8k", at + (64 << 10)),
            format!("read -P 7 {second} 8k"),
            format!("read -P 0 {} 8k", second + 8192),
        ];
        let mut arguments = vec!["-f", format, "-r"];
        arguments.extend(reads.iter().flat_map(|read| ["-c", read]));
        arguments.push("image");
        let said = run("qemu-io", folder.path(), &arguments);
        assert!(!said.contains("failed"), "{format}: {said}");
        for name in ["made", "image"] {
            std::fs::remove_file(folder.path().join(name)).unwrap();
        }
    }
}

/// An opening for reading takes the headers; a read then takes the pages of the tables that lead to it.
#[test]
fn opening_for_reading_takes_no_whole_tables() {
    let folder = cowshed_testkit::qemu::temp_dir();
    for (format, options, size) in [
        ("vdi", "static=off", "2T"),
        ("vdi", "static=on", "2T"),
        ("vpc", "subformat=dynamic", "2000G"),
        ("vhdx", "block_size=1M", "2T"),
        ("parallels", "cluster_size=1M", "2T"),
        ("vmdk", "subformat=monolithicSparse", "2T"),
        ("qed", "cluster_size=64k", "2T"),
        ("qcow", "", "1T"),
    ] {
        let mut arguments = vec!["create", "-q", "-f", format];
        if !options.is_empty() {
            arguments.extend(["-o", options]);
        }
        run("qemu-img", folder.path(), &[&arguments[..], &["image", size]].concat());
        let path = folder.path().join("image");
        rt::block_on(async {
            let node = open(OpenRequest::file(path.to_str().unwrap()).format(format)).await.unwrap();
            let below = node.children().into_iter().find(|child| child.role == ChildRole::File).unwrap().node;
            let count = || {
                let statistics = below.statistics();
                let read = statistics.kind(IoKind::Read);
                (read.operations, read.bytes)
            };
            // The directory of VMDK is read whole: 4 bytes for 32 MiB of the disk, and its copy. The region tables of VHDX are 64 KiB each.
            let most = match format {
                "vmdk" => 600 << 10,
                "vhdx" => 160 << 10,
                _ => 64 << 10,
            };
            let (operations, bytes) = count();
            assert!(operations < 12 && bytes < most, "{format} {options}: {operations} reads of {bytes} bytes");
            let (result, read) = node.read(1 << 39, IoBuf::zeroed(4096)).await;
            result.unwrap();
            assert!(read.iter().all(|byte| *byte == 0), "{format} {options}");
            let (operations, bytes) = (count().0 - operations, count().1 - bytes);
            assert!(operations < 6 && bytes < 200 << 10, "{format} {options}, a read: {operations} of {bytes} bytes");
            node.close().await.unwrap();
        });
        std::fs::remove_file(path).unwrap();
    }
}

/// Such a read takes the way of images with an engine, by the node alone.
#[test]
fn a_range_whose_table_is_in_memory_has_a_place() {
    let others: [Kind; 2] = [("vmdk", &[], &[]), ("vmdk", &["-o", "subformat=monolithicFlat"], &[])];
    for (format, options, _) in KINDS.iter().chain(&others) {
        let folder = cowshed_testkit::qemu::temp_dir();
        let node = open_image(&make(folder.path(), format, options), format).unwrap();
        rt::block_on(async {
            for at in [3 << 20, 2 << 20] {
                node.read(at, IoBuf::zeroed(4096)).await.0.unwrap();
            }
            match node.driver().map(3 << 20, 4096, Intent::Read) {
                Mapped::File { file, host, .. } => {
                    let (result, bytes) = file.read_at(IoBuf::zeroed(4096), host).await;
                    result.unwrap();
                    assert!(bytes.iter().all(|byte| *byte == 2), "{format} {options:?}");
                }
                _ => panic!("{format} {options:?}: no place"),
            }
            let hole = node.driver().map(2 << 20, 4096, Intent::Read);
            assert!(matches!(hole, Mapped::Zeroes | Mapped::File { .. }), "{format} {options:?}: a hole");
            node.close().await.unwrap();
        });
    }
}

/// The first bytes of a disk.
fn start_of(node: &Node, len: usize) -> Vec<u8> {
    let (result, bytes) = rt::block_on(node.read(0, IoBuf::zeroed(len)));
    result.expect("it is read");
    bytes.to_vec()
}

/// Whichever write or flush of a growth fails: the disk keeps its data, takes more, and grows later. Its map moves to the
/// place of the first block.
#[test]
fn vdi_keeps_data_when_its_growth_fails() {
    const OLD: usize = 5 << 20;
    const NEW: u64 = 150 << 20;
    let fixed = &["-o", "static=on"];
    let cases: [(&[&str], &str, i32); 4] =
        [(&[], "write", 28), (&[], "write", 5), (&[], "flush", 5), (fixed, "write", 28)];
    for (options, kind, errno) in cases {
        let mut told = 0;
        for skip in 0.. {
            let what = format!("{options:?}, {kind} {skip} fails with {errno}");
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let path = make(folder.path(), "vdi", options);
            let mut model = vec![0; OLD];
            model[..5000].fill(1);
            model[3 << 20..(3 << 20) + (64 << 10)].fill(2);
            let fault = format!(
                "driver=vdi,file.driver=blkdebug,file.image.driver=file,file.image.filename={},\
                 file.inject-error.0.iotype={kind},file.inject-error.0.skip={skip},\
                 file.inject-error.0.errno={errno},file.inject-error.0.once=on",
                path.display()
            );
            let request = OpenRequest::image_opts(&fault).unwrap().writable(true).for_resize();
            let node = rt::block_on(open(request)).unwrap();
            let is_grown = rt::block_on(node.resize(NEW, Preallocation::Off)).is_ok();
            let is_hit = node.faults().unwrap().hits() > 0;
            assert_eq!(is_hit, !is_grown, "{what}");
            assert!(start_of(&node, OLD) == model, "{what}: other data");
            if is_hit {
                told += 1;
                // After a flush that failed, writes may fail that need another.
                let over = rt::block_on(node.write(0, IoBuf::copy_from(&[3; 8192]))).0;
                assert!(over.is_ok() || kind == "flush", "{what}: {over:?}");
                if over.is_ok() {
                    model[..8192].fill(3);
                }
                let taken = rt::block_on(node.write(1 << 20, IoBuf::copy_from(&[4; 8192]))).0;
                assert!(taken.is_ok() || kind == "flush", "{what}: {taken:?}");
                if taken.is_ok() {
                    model[1 << 20..(1 << 20) + 8192].fill(4);
                    let flushed = rt::block_on(node.flush());
                    assert!(flushed.is_ok() || kind == "flush", "{what}: {flushed:?}");
                }
                assert!(start_of(&node, OLD) == model, "{what}: other data after writes");
            }
            let closed = rt::block_on(node.close());
            assert!(closed.is_ok() || kind == "flush", "{what}: {closed:?}");
            drop(node);
            if !is_hit {
                break;
            }
            let request = OpenRequest::file(path.to_str().unwrap()).format("vdi").writable(true).for_resize();
            let node = rt::block_on(open(request)).unwrap();
            assert!(start_of(&node, OLD) == model, "{what}: other data after an opening");
            if node.size() < NEW {
                rt::block_on(node.resize(NEW, Preallocation::Off)).expect(&what);
            }
            rt::block_on(node.close()).unwrap();
            drop(node);
            let node = open_image(&path, "vdi").unwrap();
            model.resize(8 << 20, 0);
            assert!(start_of(&node, 8 << 20) == model, "{what}: other data in the longer disk");
            assert_eq!(node.size(), NEW, "{what}");
            rt::block_on(node.close()).unwrap();
            run("qemu-img", folder.path(), &["check", "-q", "-f", "vdi", "image"]);
        }
        assert!(told >= 4, "{options:?}, {kind}: only {told} faults");
    }
}

/// The map would move to where the header can't say it any more.
#[test]
fn vdi_header_without_room_stays_as_it_was() {
    const MAP: u64 = 0xffff_fa00;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    run("qemu-img", folder.path(), &["create", "-q", "-f", "vdi", "image", "3M"]);
    let path = folder.path().join("image");
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&(MAP as u32).to_le_bytes(), 340).unwrap();
    file.write_all_at(&(MAP as u32 + 512).to_le_bytes(), 344).unwrap();
    file.write_all_at(&[0xff; 512], MAP).unwrap();
    let state = || {
        let mut bytes = vec![0; 1024];
        file.read_exact_at(&mut bytes[..512], 0).unwrap();
        file.read_exact_at(&mut bytes[512..], MAP).unwrap();
        (bytes, file.metadata().unwrap().len())
    };
    let before = state();
    let request = OpenRequest::file(path.to_str().unwrap()).format("vdi").writable(true).for_resize();
    let node = rt::block_on(open(request)).unwrap();
    let error = rt::block_on(node.resize(150 << 20, Preallocation::Off)).unwrap_err();
    assert!(error.to_string().contains("a VDI header can't say so much"), "{error}");
    assert!(state() == before, "it changed");
    rt::block_on(node.resize(100 << 20, Preallocation::Off)).unwrap();
    rt::block_on(node.close()).unwrap();
}
