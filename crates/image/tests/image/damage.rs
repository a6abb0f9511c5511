// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Damage that a request meets in an open image. The request fails with EIO. The image is marked as corrupt where it is
//! open for writing, as QEMU does.

use cowshed_image::graph::{Corruption, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{OpenRequest, open};
use cowshed_offline::snapshots::{self, SnapshotOptions};
use cowshed_storage::{File, IoBuf, OpenOptions, rt};
use cowshed_testkit::programs::{failing_tool, tool};
use cowshed_types::Errno;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The low byte of the header's incompatible features, and its bit of corrupt images.
const FEATURES_AT: usize = 79;
const CORRUPT: u8 = 2;

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn set_word(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// An image with data in guest clusters 0 and 1, and a compressed cluster at 512 KiB; `patch` gets its bytes and the
/// places of its L1 and its L2 table.
fn image(path: &Path, patch: impl FnOnce(&mut [u8], usize, usize)) -> Vec<u8> {
    let name = path.to_str().unwrap();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", name, "64M"]);
    tool("qemu-io", &["-c", "write -P 1 0 128k", "-c", "write -c -P 2 512k 64k", name]);
    let mut bytes = std::fs::read(path).unwrap();
    let l1 = word(&bytes, 40) as usize;
    let l2 = (word(&bytes, l1) & OFFSET) as usize;
    patch(&mut bytes, l1, l2);
    std::fs::write(path, &bytes).unwrap();
    bytes
}

/// Reads or writes at `offset`, then writes elsewhere; returns both results, and the messages to the graph's observer.
fn attempt(
    path: &Path,
    how: &str,
    offset: u64,
) -> (cowshed_types::Result<()>, cowshed_types::Result<()>, Vec<Corruption>) {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let told: Arc<Mutex<Vec<Corruption>>> = Arc::default();
    let sink = Arc::clone(&told);
    graph.observe_corruptions(Arc::new(move |corruption| sink.lock().unwrap().push(corruption.clone())));
    let options = format!("driver=qcow2,node-name=top,file.filename={}", path.display());
    let (first, later) = rt::block_on(async {
        let node = graph.add(BlockdevOptions::from_keyval(&options).unwrap()).await.unwrap();
        let first = match how {
            "read" => node.read(offset, IoBuf::zeroed(4096)).await.0,
            _ => node.write(offset, IoBuf::copy_from(&[9; 4096])).await.0,
        };
        let later = node.write(65536, IoBuf::copy_from(&[7; 512])).await.0;
        drop(node);
        let _ = graph.close_all().await;
        (first, later)
    });
    let told = told.lock().unwrap().clone();
    (first, later, told)
}

/// From the file's bytes and the places of its tables: damages the entry of guest offset 0.
type Damage = fn(&mut [u8], usize, usize);

const DAMAGES: [(&str, Damage); 3] = [
    ("data cluster", |bytes, _, l2| set_word(bytes, l2, word(bytes, l2) | 0x200)),
    ("zero cluster", |bytes, _, l2| set_word(bytes, l2, word(bytes, l2) | 0x201)),
    ("L2 table", |bytes, l1, _| set_word(bytes, l1, word(bytes, l1) | 0x200)),
];

#[test]
fn damage_met_by_a_request_marks_the_image() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, theirs): (PathBuf, PathBuf) = (folder.path().join("ours"), folder.path().join("theirs"));
    for (damage, patch) in DAMAGES {
        for how in ["read", "write"] {
            let about = format!("{damage}, {how}");
            let mut expected = image(&path, patch);
            std::fs::copy(&path, &theirs).unwrap();
            failing_tool("qemu-io", &["-c", &format!("{how} 0 4k"), theirs.to_str().unwrap()]);
            assert_eq!(std::fs::read(&theirs).unwrap()[FEATURES_AT] & CORRUPT, CORRUPT, "{about}: qemu-io");

            let (first, later, told) = attempt(&path, how, 0);
            let error = first.expect_err(&about);
            assert_eq!(error.errno(), Errno::EIO, "{about}: {error}");
            assert!(error.to_string().contains("not cluster-aligned"), "{about}: {error}");
            let later = later.expect_err(&about);
            assert!(later.to_string().contains("marked as corrupt"), "{about}: {later}");
            let [corruption] = &told[..] else { panic!("{about}: told {told:?}") };
            assert!(corruption.fatal && corruption.message.contains("not cluster-aligned"), "{corruption:?}");
            // Nothing but the corrupt bit has changed.
            expected[FEATURES_AT] |= CORRUPT;
            assert!(std::fs::read(&path).unwrap() == expected, "{about}: the image changed");
            let request = OpenRequest::file(path.to_str().unwrap()).writable(true);
            let Err(refused) = rt::block_on(open(request)) else { panic!("{about}") };
            assert!(refused.to_string().contains("marked as corrupt"), "{about}: {refused}");
        }
    }
}

#[test]
fn damage_that_a_reader_meets_changes_no_byte() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("image");
    for (damage, patch) in DAMAGES {
        let before = image(&path, patch);
        let error = rt::block_on(async {
            let node = open(OpenRequest::file(path.to_str().unwrap())).await.unwrap();
            let error = node.read(0, IoBuf::zeroed(4096)).await.0.expect_err(damage);
            node.close().await.unwrap();
            error
        });
        assert_eq!(error.errno(), Errno::EIO, "{damage}: {error}");
        assert!(std::fs::read(&path).unwrap() == before, "{damage}: the image changed");
    }
}

/// Compressed data that can't be decompressed, or lies past the end of the file, and tables past it: EIO without a mark.
#[test]
fn what_cannot_be_read_is_an_error_without_a_mark() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("image");
    let cases: [(&str, Damage, bool); 3] = [
        (
            "garbage",
            |bytes, _, l2| {
                let host = (word(bytes, l2 + 64) & 0x3f_ffff_ffff_ffff) as usize;
                bytes[host..host + 64].fill(0xff);
            },
            true,
        ),
        ("compressed data past the end", |bytes, _, l2| set_word(bytes, l2 + 64, word(bytes, l2 + 64) | 1 << 40), true),
        ("a table past the end", |bytes, l1, _| set_word(bytes, l1, word(bytes, l1) | 1 << 40), false),
    ];
    for (damage, patch, others_work) in cases {
        for how in ["read", "write"] {
            let about = format!("{damage}, {how}");
            image(&path, patch);
            let opened = rt::block_on(open(OpenRequest::file(path.to_str().unwrap()).writable(true)));
            let Ok(node) = opened else {
                // A lost structure is looked for first.
                assert_eq!(opened.err().unwrap().errno(), Errno::EIO, "{about}");
                continue;
            };
            rt::block_on(node.close()).unwrap();
            let (first, later, told) = attempt(&path, how, 512 << 10);
            let error = first.expect_err(&about);
            assert_eq!(error.errno(), Errno::EIO, "{about}: {error}");
            assert_eq!(later.is_ok(), others_work, "{about}: {later:?}");
            assert!(told.iter().all(|corruption| !corruption.fatal), "{about}: {told:?}");
            assert_eq!(std::fs::read(&path).unwrap()[FEATURES_AT] & CORRUPT, 0, "{about}");
        }
    }
}

/// An entry of a snapshot that points into a cluster of the disk's: its count must not fall with the snapshot.
#[test]
fn snapshots_are_not_changed_where_an_entry_points_into_a_cluster() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("image");
    let mut bytes = image(&path, |_, _, _| ());
    let name = path.to_str().unwrap();
    tool("qemu-img", &["snapshot", "-c", "one", name]);
    tool("qemu-io", &["-c", "write -P 7 1M 64k", name]);
    for in_snapshot in [true, false] {
        bytes.clone_from(&std::fs::read(&path).unwrap());
        let table_of = |bytes: &[u8], l1: usize| (word(bytes, l1) & OFFSET) as usize;
        let active = table_of(&bytes, word(&bytes, 40) as usize);
        let snapshot_l1 = word(&bytes, word(&bytes, 64) as usize) as usize;
        let table = if in_snapshot { table_of(&bytes, snapshot_l1) } else { active };
        // The cluster at 1 MiB is the disk's alone.
        let host = word(&bytes, active + 16 * 8) & OFFSET;
        set_word(&mut bytes, table + 8, host | 0x200);
        let damaged = folder.path().join("damaged");
        for how in ["create", "apply", "delete"] {
            std::fs::write(&damaged, &bytes).unwrap();
            let options = OpenOptions { write: true, ..OpenOptions::default() };
            let result = rt::block_on(async {
                let file = File::open(&damaged, &options)?;
                let with = SnapshotOptions::default();
                match how {
                    "create" => snapshots::create(&file, b"two", &with, &|_, _| true).await.map(drop),
                    "apply" => snapshots::apply(&file, b"one", &with, &|_, _| true).await,
                    _ => snapshots::delete(&file, b"one", &with, &|_, _| true).await,
                }
            });
            // Only a change of the tree with that entry looks at it.
            let is_concerned = match how {
                "create" => !in_snapshot,
                "apply" => true,
                _ => in_snapshot,
            };
            let about = format!("{how}, damage in the snapshot: {in_snapshot}");
            if is_concerned {
                let error = result.expect_err(&about);
                assert!(error.to_string().contains("not cluster-aligned"), "{about}: {error}");
                assert!(std::fs::read(&damaged).unwrap() == bytes, "{about}: the image changed");
            } else {
                result.unwrap_or_else(|error| panic!("{about}: {error}"));
            }
        }
    }
}
