// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Overlap checks: a mapping that points into metadata is never written through; the image is marked as corrupt and stays
//! otherwise as it was.

use cowshed_image::graph::{Corruption, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{OpenRequest, ZeroFlags, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::tool;
use cowshed_types::Errno;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// An image with data in guest clusters 0 and 1; `patch` gets its bytes and the place of its L2 table.
fn image(folder: &Path, patch: impl FnOnce(&mut [u8], usize)) -> PathBuf {
    let path = folder.join("image.qcow2");
    let name = path.to_str().unwrap();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", name, "64M"]);
    tool("qemu-io", &["-c", "write -P 1 0 128k", name]);
    let mut bytes = std::fs::read(&path).unwrap();
    let l2 = (word(&bytes, word(&bytes, 40) as usize) & OFFSET) as usize;
    patch(&mut bytes, l2);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Points guest cluster 1 to `host`.
fn redirect(bytes: &mut [u8], l2: usize, host: u64) {
    bytes[l2 + 8..l2 + 16].copy_from_slice(&(host | 1 << 63).to_be_bytes());
}

async fn attempt(name: &str, how: &str) -> (cowshed_types::Result<()>, String) {
    let node = open(OpenRequest::file(name).writable(true).discard(true)).await.unwrap();
    let result = match how {
        "write" => node.write(65536 + 4096, IoBuf::copy_from(&[9; 4096])).await.0,
        "zero" => node.write_zeroes(65536, 65536, ZeroFlags { may_unmap: true, no_fallback: false }).await,
        "discard" => node.discard(65536, 65536).await,
        _ => node.write_compressed(vec![(65536, IoBuf::zeroed(65536))]).await,
    };
    let next = node.write(0, IoBuf::copy_from(&[7; 65536 * 4])).await.0;
    let later = next.map_or_else(|error| error.to_string(), |()| String::new());
    let _ = node.close().await;
    (result, later)
}

/// From the file's bytes and the offset of the L2 table: the host offset that the test points an entry at.
type TargetOffset = fn(&[u8], usize) -> u64;

#[test]
fn writes_never_land_on_metadata() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let places: [(&str, TargetOffset); 4] = [
        ("refcount table", |bytes, _| word(bytes, 48)),
        ("refcount block", |bytes, _| word(bytes, word(bytes, 48) as usize)),
        ("active L1 table", |bytes, _| word(bytes, 40)),
        ("active L2 table", |_, l2| l2 as u64),
    ];
    for (structure, place) in places {
        for how in ["write", "zero", "discard", "compressed"] {
            let path = image(folder.path(), |bytes, l2| {
                let host = place(bytes, l2);
                redirect(bytes, l2, host);
            });
            let mut before = std::fs::read(&path).unwrap();
            let (result, later) = rt::block_on(attempt(path.to_str().unwrap(), how));
            let error = result.expect_err(&format!("{how} onto the {structure}"));
            assert!(error.to_string().contains(&format!("overlaps with {structure}")), "{how}: {error}");
            assert_eq!(error.errno(), Errno::EIO);
            assert!(later.contains("marked as corrupt"), "{later}");
            // Nothing but the corrupt bit has changed.
            before[79] |= 2;
            assert!(std::fs::read(&path).unwrap() == before, "{how} onto the {structure} changed the image");
            assert!(tool("qemu-img", &["info", path.to_str().unwrap()]).contains("corrupt: true"));
        }
    }
}

#[test]
fn metadata_is_never_allocated_whatever_its_refcount() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // The refcount of the L1 table's cluster is lost.
    let path = image(folder.path(), |bytes, _| {
        let block = word(bytes, word(bytes, 48) as usize) as usize;
        let cluster = word(bytes, 40) as usize / 65536;
        bytes[block + cluster * 2..block + cluster * 2 + 2].fill(0);
    });
    rt::block_on(async {
        let node = open(OpenRequest::file(path.to_str().unwrap()).writable(true)).await.unwrap();
        let error = node.write(1 << 20, IoBuf::copy_from(&[1; 512])).await.0.unwrap_err();
        assert!(error.to_string().contains("overlaps with active L1 table"), "{error}");
        let _ = node.close().await;
    });
}

/// A class of structures: its option, its name in messages, where it is, the first template that has it (of `CLASSES`),
/// how it is met.
struct Class {
    option: &'static str,
    name: &'static str,
    place: TargetOffset,
    since: &'static str,
    how: &'static str,
}

const CLASSES: [Class; 8] = [
    // Offset 0 in an entry means that there is no cluster: only a compressed one can be there.
    Class { option: "main-header", name: "qcow2_header", place: |_, _| 1 << 62, since: "constant", how: "discard" },
    Class {
        option: "active-l1",
        name: "active L1 table",
        place: |bytes, _| word(bytes, 40),
        since: "constant",
        how: "write",
    },
    Class { option: "active-l2", name: "active L2 table", place: |_, l2| l2 as u64, since: "cached", how: "write" },
    Class {
        option: "refcount-table",
        name: "refcount table",
        place: |bytes, _| word(bytes, 48),
        since: "constant",
        how: "write",
    },
    Class {
        option: "refcount-block",
        name: "refcount block",
        place: |bytes, _| word(bytes, word(bytes, 48) as usize),
        since: "cached",
        how: "write",
    },
    Class {
        option: "snapshot-table",
        name: "snapshot table",
        place: |bytes, _| word(bytes, 64),
        since: "constant",
        how: "write",
    },
    Class {
        option: "inactive-l1",
        name: "inactive L1 table",
        place: |bytes, _| word(bytes, word(bytes, 64) as usize),
        since: "cached",
        how: "write",
    },
    Class {
        option: "inactive-l2",
        name: "inactive L2 table",
        place: |bytes, _| word(bytes, word(bytes, word(bytes, 64) as usize) as usize) & OFFSET,
        since: "all",
        how: "write",
    },
];

const TEMPLATES: [&str; 4] = ["none", "constant", "cached", "all"];

/// Opens with the options, changes guest cluster 1, and returns the error and the messages to the graph's observer.
fn attempt_observed(path: &Path, options: &str, how: &str) -> (cowshed_types::Result<()>, Vec<Corruption>) {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let told: Arc<Mutex<Vec<Corruption>>> = Arc::default();
    let sink = Arc::clone(&told);
    graph.observe_corruptions(Arc::new(move |corruption| sink.lock().unwrap().push(corruption.clone())));
    let name = path.to_str().unwrap();
    let options = format!("driver=qcow2,node-name=top,discard=unmap,file.filename={name}{options}");
    let result = rt::block_on(async {
        let node = graph.add(BlockdevOptions::from_keyval(&options).unwrap()).await.unwrap();
        let result = match how {
            "discard" => node.discard(65536, 65536).await,
            _ => node.write(65536, IoBuf::copy_from(&[9; 512])).await.0,
        };
        if result.is_err() {
            // Reported once, however many requests fail.
            node.write(65536, IoBuf::copy_from(&[9; 512])).await.0.unwrap_err();
        }
        drop(node);
        let _ = graph.close_all().await;
        result
    });
    let told = told.lock().unwrap().clone();
    (result, told)
}

/// Offset of the bitmap directory.
fn directory(bytes: &[u8]) -> u64 {
    let mut at = 112;
    while bytes[at..at + 4] != 0x2385_2875u32.to_be_bytes() {
        let len = u32::from_be_bytes(bytes[at + 4..at + 8].try_into().unwrap());
        at += 8 + len.next_multiple_of(8) as usize;
    }
    word(bytes, at + 24)
}

fn image_with_bitmap(folder: &Path, arguments: &[&str], patch: impl FnOnce(&mut [u8], usize)) -> PathBuf {
    let path = image(folder, |_, _| {});
    let name = path.to_str().unwrap();
    tool("qemu-img", &[&["bitmap", "--add"], arguments, &[name, "b0"]].concat());
    tool("qemu-io", &["-c", "write -P 1 0 4k", name]);
    let mut bytes = std::fs::read(&path).unwrap();
    let l2 = (word(&bytes, word(&bytes, 40) as usize) & OFFSET) as usize;
    patch(&mut bytes, l2);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn the_bitmap_directory_is_not_written_as_data() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (option, is_checked) in [("", true), (",overlap-check.bitmap-directory=off", false)] {
        let path = image_with_bitmap(folder.path(), &["--disable"], |bytes, l2| {
            let place = directory(bytes);
            redirect(bytes, l2, place);
        });
        let (result, told) = attempt_observed(&path, option, "write");
        assert_eq!(result.is_err(), is_checked, "{option}");
        assert_eq!(told.len(), usize::from(is_checked));
        if let Some(corruption) = told.first() {
            assert!(corruption.message.contains("bitmap directory"), "{}", corruption.message);
        }
    }
}

/// Data of a bitmap that claim to be where the refcount table is.
#[test]
fn bits_are_not_recorded_over_metadata() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = image_with_bitmap(folder.path(), &["-g", "512"], |bytes, _| {
        let table = word(bytes, directory(bytes) as usize) as usize;
        let refcount_table = word(bytes, 48);
        bytes[table..table + 8].copy_from_slice(&refcount_table.to_be_bytes());
    });
    let before = std::fs::read(&path).unwrap();
    let (result, told) = attempt_observed(&path, "", "write");
    let error = result.unwrap_err();
    assert_eq!((error.errno(), told.len()), (Errno::EIO, 1), "{error}");
    let (after, table) = (std::fs::read(&path).unwrap(), word(&before, 48) as usize);
    assert!(after[table..table + 65536] == before[table..table + 65536], "the refcount table was written");
}

#[test]
fn overlap_classes_follow_their_options_and_templates() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = image(folder.path(), |_, _| {});
    let name = path.to_str().unwrap();
    tool("qemu-img", &["snapshot", "-c", "one", name]);
    tool("qemu-io", &["-c", "write -P 2 0 128k", name]);
    tool("qemu-img", &["check", "-q", name]);
    let whole = std::fs::read(&path).unwrap();
    let l2 = (word(&whole, word(&whole, 40) as usize) & OFFSET) as usize;
    let rank = |template: &str| TEMPLATES.iter().position(|known| *known == template).unwrap();
    for class in &CLASSES {
        let mut damaged = whole.clone();
        let place = (class.place)(&whole, l2);
        match place {
            // Compressed entries have no COPIED flag.
            0x4000_0000_0000_0000 => damaged[l2 + 8..l2 + 16].copy_from_slice(&place.to_be_bytes()),
            _ => redirect(&mut damaged, l2, place),
        }
        let by_template = TEMPLATES.iter().flat_map(|template| {
            let caught = rank(template) >= rank(class.since);
            [(format!(",overlap-check={template}"), caught), (format!(",overlap-check.template={template}"), caught)]
        });
        let others = CLASSES.iter().filter(|other| other.option != class.option);
        let all_others: String = others.map(|other| format!(",overlap-check.{}=on", other.option)).collect();
        let singly = [
            (String::new(), class.since != "all"),
            (format!(",overlap-check.template=none,overlap-check.{}=on", class.option), true),
            (format!(",overlap-check.template=all,overlap-check.{}=off", class.option), false),
            (format!(",overlap-check.template=none{all_others}"), false),
        ];
        for (options, caught) in by_template.chain(singly) {
            std::fs::write(&path, &damaged).unwrap();
            let (result, told) = attempt_observed(&path, &options, class.how);
            let about = format!("{} with {options}: {result:?}", class.option);
            assert_eq!(result.is_err(), caught, "{about}");
            let after = std::fs::read(&path).unwrap();
            assert_eq!(after[79] & 2 != 0, caught, "{about}: the corrupt bit");
            let Err(error) = result else {
                assert!(told.is_empty(), "{about}: {told:?}");
                continue;
            };
            assert!(error.to_string().contains(&format!("overlaps with {}", class.name)), "{about}");
            assert_eq!(error.errno(), Errno::EIO);
            let [corruption] = &told[..] else { panic!("{about}: told {told:?}") };
            let hit_bytes = if class.how == "discard" { 65536 } else { 512 };
            assert_eq!((corruption.offset, corruption.size_bytes), (Some(place & OFFSET), Some(hit_bytes)), "{about}");
            assert!(corruption.fatal && corruption.node_name == "top", "{corruption:?}");
            assert!(corruption.message.contains(class.name), "{corruption:?}");
            // Nothing but the corrupt bit has changed.
            let mut expected = damaged.clone();
            expected[79] |= 2;
            assert!(after == expected, "{about}: the image changed");
        }
    }
}
