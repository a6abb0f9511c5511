// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest on a disk that gets full below it: acknowledged data can be flushed, and flushed data is there, as QEMU
//! reads it. A refused write leaves a sound image, and with room again everything goes on. (Power cuts on full disks:
//! `crash_engine.rs`; verbs: `full_disk.rs`.)

use cowshed_image::formats::DriverOf;
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_simulator::{Config, Effect, Event, Fault, Features, OpKind, PageMap, Snapshot, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use cowshed_types::{Errno, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

const PIECE: u64 = 4096;

/// An image as it is made, and how a guest writes to it.
struct Case {
    options: &'static str,
    size: u64,
    /// Distance of the guest's writes: most of them need a table of their own.
    step: u64,
}

const CASES: &[Case] = &[
    Case { options: "cluster_size=4k", size: 512 << 20, step: 4 << 20 },
    Case { options: "cluster_size=4k,refcount_bits=64", size: 512 << 20, step: 2 << 20 },
    Case { options: "cluster_size=512,compat=0.10", size: 16 << 20, step: 64 << 10 },
    Case { options: "cluster_size=64k", size: 64 << 30, step: 1 << 30 },
    Case { options: "cluster_size=64k,extended_l2=on", size: 16 << 30, step: 256 << 20 },
    Case { options: "cluster_size=16k,lazy_refcounts=on", size: 4 << 30, step: 64 << 20 },
    Case { options: "cluster_size=4k,data_file=data,data_file_raw=on", size: 32 << 20, step: 256 << 10 },
];

/// The acknowledged writes of the guest, by place.
type Written = BTreeMap<u64, u8>;

fn image_of(qemu: &Qemu, folder: &Path, case: &Case) -> Snapshot {
    let path = |name: &str| folder.join(name).to_str().expect("text path").to_owned();
    let options = case.options.replace("data_file=data", &format!("data_file={}", path("data")));
    qemu.create(&folder.join("image"), "qcow2", &options, case.size);
    let names = [path("image"), path("data")].into_iter().filter(|name| Path::new(name).exists());
    // Pages of zeroes are holes here, as in an image that was copied.
    names.map(|name| (name.clone(), PageMap::from_bytes(&std::fs::read(name).expect("an image")))).collect()
}

async fn opened(image: &str) -> Result<Arc<Node>> {
    open(OpenRequest::file(image).format("qcow2").writable(true)).await
}

async fn write(node: &Node, at: u64, byte: u8) -> Result<()> {
    node.write(at, IoBuf::copy_from(&[byte; PIECE as usize])).await.0
}

/// QEMU finds no error in the image, and in it all that was written, and nothing where a write was refused.
fn judge(qemu: &Qemu, image: &str, files: &Snapshot, written: &Written, refused: &[u64], case: &str) {
    for (name, contents) in files {
        std::fs::write(name, contents.to_vec()).expect("a file for QEMU");
    }
    if case.contains("lazy_refcounts") {
        // Counts lag behind while the dirty bit is set.
        qemu.img(["check", "-q", "-r", "all", image]).expect_ok();
    }
    qemu.expect_no_corruption(Path::new(image));
    let mut commands: Vec<String> = written.iter().map(|(at, byte)| format!("read -P {byte} {at} {PIECE}")).collect();
    commands.extend(refused.iter().map(|at| format!("read -P 0 {at} {PIECE}")));
    for part in commands.chunks(60) {
        let said = qemu.io_commands(Path::new(image), "qcow2", part).expect_ok();
        let is_wrong = said.stdout.contains("Pattern verification failed") || said.stdout.contains("read failed");
        assert!(!is_wrong, "{case}: {}", said.stdout);
    }
}

/// A machine with this image, on which this much room is left once the image has been opened and flushed.
struct Machine {
    world: World,
    image: String,
}

impl Machine {
    fn new(files: &Snapshot, image: &str, features: Features) -> Machine {
        let world = World::with_files(Config { features, ..Config::new(1) }, files);
        Machine { world, image: image.to_owned() }
    }

    fn leave_room(&self, room_bytes: u64) {
        let used: u64 = self.world.snapshot().values().map(PageMap::allocated_bytes).sum();
        self.world.set_capacity(Some(used + room_bytes));
    }
}

fn features_of(allocate: bool) -> Features {
    Features { allocate, ..Features::default() }
}

/// Writes all pieces; those that found no space, in order.
async fn write_pieces(node: &Node, case: &Case, written: &mut Written, byte: u8) -> Vec<u64> {
    let mut refused = Vec::new();
    for at in (0..case.size).step_by(case.step as usize) {
        match write(node, at, byte).await {
            Ok(()) => drop(written.insert(at, byte)),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{}: {error}", case.options);
                refused.push(at);
            }
        }
    }
    refused
}

#[test]
fn what_a_full_disk_acknowledges_it_keeps() {
    let qemu = Qemu::all();
    for (number, case) in CASES.iter().enumerate() {
        for allocate in [true, false] {
            // Without reservations only metadata that comes into being is certain: an image without holes.
            let folder = temp_dir();
            let mut files = image_of(&qemu[number % 2], folder.path(), case);
            let image = folder.path().join("image").to_str().expect("text path").to_owned();
            if !allocate {
                files.get_mut(&image).into_iter().for_each(|file| file.allocate(0, file.len(), false));
            }
            for room in [0, 12 << 10, 100 << 10, 400 << 10] {
                let text = format!("{}, {room} bytes of room, fallocate: {allocate}", case.options);
                let machine = Machine::new(&files, &image, features_of(allocate));
                let mut written = Written::new();
                let refused = machine.world.run(async {
                    let node = opened(&machine.image).await.expect("the image opens");
                    write(&node, case.step / 2, 1).await.expect("there is room");
                    written.insert(case.step / 2, 1);
                    node.flush().await.expect("there is room");
                    machine.leave_room(room);
                    let refused = write_pieces(&node, case, &mut written, 2).await;
                    node.flush().await.unwrap_or_else(|error| panic!("{text}: {error}"));
                    // The machine stops here, and with it all that isn't in a file.
                    let killed = machine.world.snapshot();
                    judge(&qemu[number % 2], &image, &killed, &written, &refused, &text);
                    // More on a disk that stays full, then a clean end.
                    write(&node, case.step / 2, 3).await.expect("in place");
                    written.insert(case.step / 2, 3);
                    node.close().await.unwrap_or_else(|error| panic!("{text}: {error}"));
                    refused
                });
                assert!(!refused.is_empty(), "{text}: no write was refused");
                assert!(room < 400 << 10 || written.len() > 2, "{text}: every write was refused");
                let closed = machine.world.snapshot();
                judge(&qemu[1 - number % 2], &image, &closed, &written, &refused, &text);
                // With room again everything goes on.
                machine.world.set_capacity(None);
                machine.world.run(async {
                    let node = opened(&machine.image).await.expect("the image opens");
                    let refused = write_pieces(&node, case, &mut written, 4).await;
                    assert!(refused.is_empty(), "{text}: {refused:x?}");
                    node.close().await.unwrap_or_else(|error| panic!("{text}: {error}"));
                });
                judge(&qemu[number % 2], &image, &machine.world.snapshot(), &written, &[], &text);
            }
        }
    }
}

/// An image that was copied with holes: the counts of its next clusters lie in a hole of the block that counts them.
#[test]
fn counts_in_a_hole_of_their_block_have_room() {
    const CLUSTER: u64 = 16 << 10;
    // With the metadata 2,035 clusters; the first page of the block counts 2,048.
    const USED: u64 = 2030;
    let qemu = Qemu::system();
    let folder = temp_dir();
    let case = Case { options: "cluster_size=16k", size: 64 << 20, step: CLUSTER };
    image_of(&qemu, folder.path(), &case);
    let image = folder.path().join("image").to_str().expect("text path").to_owned();
    qemu.io(["-f", "qcow2", "-c", &format!("write -P 0 0 {}", USED * CLUSTER), &image]).expect_ok();
    let files = Snapshot::from([(image.clone(), PageMap::from_bytes(&std::fs::read(&image).expect("an image")))]);
    let (mut all_refused, mut all_written) = (0, 0);
    for room in (0..=96 << 10).step_by(PIECE as usize) {
        let text = format!("{room} bytes of room");
        let machine = Machine::new(&files, &image, Features::default());
        let (mut written, mut refused) = (Written::new(), Vec::new());
        machine.world.run(async {
            let node = opened(&image).await.expect("the image opens");
            machine.leave_room(room);
            for at in (USED..USED + 18).map(|cluster| cluster * CLUSTER) {
                match write(&node, at, 2).await {
                    Ok(()) => drop(written.insert(at, 2)),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::NoSpace, "{text}: {error}");
                        refused.push(at);
                    }
                }
            }
            node.flush().await.unwrap_or_else(|error| panic!("{text}: {error}"));
        });
        judge(&qemu, &image, &machine.world.snapshot(), &written, &refused, &text);
        all_refused += usize::from(written.is_empty());
        all_written += usize::from(refused.is_empty());
    }
    assert!(all_refused > 0 && all_written > 0, "{all_refused} and {all_written}");
}

/// Some places of an image have no space, and no way to reserve it: metadata that was copied with holes. A flush fails there as
/// long as the disk is full. Data in place gets its barrier all the same.
#[test]
fn a_flush_that_found_no_space_succeeds_once_there_is_some() {
    let qemu = Qemu::system();
    let folder = temp_dir();
    let case = Case { options: "cluster_size=64k", size: 64 << 20, step: 64 << 10 };
    image_of(&qemu, folder.path(), &case);
    let image = folder.path().join("image").to_str().expect("text path").to_owned();
    qemu.io(["-f", "qcow2", "-c", "write -P 1 0 4k", &image]).expect_ok();
    let files = Snapshot::from([(image.clone(), PageMap::from_bytes(&std::fs::read(&image).expect("an image")))]);
    let machine = Machine::new(&files, &image, features_of(false));
    // The entry of this cluster lies in the second page of its table.
    let far = 600 << 16;
    machine.world.run(async {
        let node = opened(&image).await.expect("the image opens");
        machine.leave_room(PIECE);
        write(&node, far, 2).await.expect("room for the data");
        for round in 0..2 {
            let start = machine.world.position();
            write(&node, 0, 3 + round).await.expect("in place");
            let written = machine.world.position();
            let error = node.flush().await.expect_err("no room for the table");
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            let log = machine.world.trace().log;
            let is_synced = log[written..].iter().any(|event| matches!(event, Event::SyncDone { .. }));
            assert!(written > start && is_synced, "round {round}: data in place has no barrier");
        }
        machine.world.set_capacity(None);
        node.flush().await.expect("there is room");
        let killed = machine.world.snapshot();
        judge(&qemu, &image, &killed, &Written::from([(0, 4), (far, 2)]), &[], "after a flush");
        write(&node, far + PIECE, 5).await.expect("there is room");
        node.close().await.expect("there is room");
    });
    let written = Written::from([(0, 4), (far, 2), (far + PIECE, 5)]);
    judge(&qemu, &image, &machine.world.snapshot(), &written, &[], "closed");
}

/// Whichever write of a flush fails, and however: data in place gets its barrier, and the next flush brings everything to the disk.
#[test]
fn a_flush_whose_write_failed_can_be_made_again() {
    let (qemu, folder) = (Qemu::newest(), temp_dir());
    let case = Case { options: "cluster_size=4k,refcount_bits=64", size: 64 << 20, step: 2 << 20 };
    let files = image_of(&qemu, folder.path(), &case);
    let image = folder.path().join("image").to_str().expect("text path").to_owned();
    for effect in [Effect::Fail(Errno::ENOSPC), Effect::Torn(Errno::ENOSPC), Effect::Torn(Errno::EIO)] {
        let mut failed = 0;
        for skip in 0.. {
            let machine = Machine::new(&files, &image, Features::default());
            let text = format!("{effect:?} at write {skip} of the flush");
            let mut written = Written::new();
            machine.world.run(async {
                let node = opened(&image).await.expect("the image opens");
                assert!(write_pieces(&node, &case, &mut written, 1).await.is_empty());
                machine.world.add_fault(Fault::new(effect).kind(OpKind::Write).skip(skip).times(1));
                let start = machine.world.position();
                let flushed = node.flush().await;
                assert_eq!(flushed.is_err(), machine.world.fault_hits() > 0, "{text}");
                let log = machine.world.trace().log;
                let is_synced = log[start..].iter().any(|event| matches!(event, Event::SyncDone { .. }));
                assert!(is_synced, "{text}: data in place has no barrier");
                machine.world.clear_faults();
                // Into tables that the failed flush may have linked.
                for at in written.keys().copied().collect::<Vec<_>>() {
                    write(&node, at + PIECE, 2).await.unwrap_or_else(|error| panic!("{text}: {error}"));
                    written.insert(at + PIECE, 2);
                }
                node.flush().await.unwrap_or_else(|error| panic!("{text}: {error}"));
            });
            judge(&qemu, &image, &machine.world.snapshot(), &written, &[], &text);
            if machine.world.fault_hits() == 0 {
                break;
            }
            failed += 1;
        }
        assert!(failed > 5, "{effect:?}: the flush made {failed} writes");
    }
}

/// The bytes of the disk's sectors.
struct Sectors(Vec<u8>);

impl Sectors {
    const BYTES: u64 = 512;

    fn range(offset: u64, len: u64) -> Range<usize> {
        (offset / Self::BYTES) as usize..((offset + len) / Self::BYTES) as usize
    }

    fn fill(&mut self, offset: u64, len: u64, byte: u8) {
        self.0[Self::range(offset, len)].fill(byte);
    }

    /// A request to fill a range has ended: it found room, or each sector has its old byte or the new one.
    async fn ended(&mut self, node: &Node, range: (u64, u64), byte: u8, outcome: Result<()>, text: &str) {
        let Err(error) = outcome else { return self.fill(range.0, range.1, byte) };
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{text}: {error}");
        self.adopt(node, range, byte, text).await;
    }

    /// Each sector has its old byte or the new one.
    async fn adopt(&mut self, node: &Node, (offset, len): (u64, u64), byte: u8, text: &str) {
        let (result, buf) = node.read(offset, IoBuf::zeroed(len as usize)).await;
        result.unwrap_or_else(|error| panic!("{text}: {error}"));
        for (sector, now) in self.0[Self::range(offset, len)].iter_mut().zip(buf.chunks(Self::BYTES as usize)) {
            let is_torn = now.iter().any(|other| *other != now[0]) || ![*sector, byte].contains(&now[0]);
            assert!(!is_torn, "{text}: a sector is neither old nor new");
            *sector = now[0];
        }
    }

    fn expand(&self) -> Vec<u8> {
        self.0.iter().flat_map(|byte| [*byte; Self::BYTES as usize]).collect()
    }
}

/// One request, which may find no space.
async fn act(node: &Node, random: &mut Random, sectors: &mut Sectors, text: &str) {
    let cluster = node.qcow2().expect("a qcow2 image").cluster_size();
    let byte = 1 + random.below(250) as u8;
    let at = random.below(node.size() / cluster) * cluster;
    let part = random.below(cluster / Sectors::BYTES) * Sectors::BYTES;
    match random.below(12) {
        0..5 => {
            // A part of a cluster: the rest is copied from the backing file.
            let len = (1 + random.below((cluster - part) / Sectors::BYTES)) * Sectors::BYTES;
            let outcome = node.write(at + part, IoBuf::copy_from(&vec![byte; len as usize])).await.0;
            sectors.ended(node, (at + part, len), byte, outcome, text).await;
        }
        5..7 => {
            let flags = ZeroFlags { may_unmap: random.chance(50), no_fallback: false };
            let outcome = node.write_zeroes(at, cluster, flags).await;
            sectors.ended(node, (at, cluster), 0, outcome, text).await;
        }
        7 => {
            // A hint.
            match node.discard(at, cluster).await {
                Ok(()) => sectors.adopt(node, (at, cluster), 0, text).await,
                refused => sectors.ended(node, (at, cluster), 0, refused, text).await,
            }
        }
        8..10 => {
            let driver = node.qcow2().expect("a qcow2 image");
            let outcome = driver.write_compressed(vec![(at, IoBuf::copy_from(&vec![byte; cluster as usize]))]).await;
            sectors.ended(node, (at, cluster), byte, outcome, text).await;
        }
        _ => node.flush().await.unwrap_or_else(|error| panic!("{text}: {error}")),
    }
}

#[test]
fn requests_of_all_kinds_keep_their_word_on_a_full_disk() {
    const BYTES: u64 = 4 << 20;
    for_each_seed(24, |seed| {
        let mut random = Random::new(seed);
        let (qemu, folder) = (Qemu::for_seed(seed), temp_dir());
        let options =
            random.pick(&["cluster_size=4k", "cluster_size=64k", "cluster_size=64k,extended_l2=on", "cluster_size=1k"]);
        let path = |name: &str| folder.path().join(name).to_str().expect("text path").to_owned();
        qemu.create(Path::new(&path("base")), "raw", "", BYTES / 2);
        qemu.io(["-f", "raw", "-c", "write -P 77 0 2M", &path("base")]).expect_ok();
        let overlay = format!("{options},backing_file={},backing_fmt=raw", path("base"));
        qemu.create(Path::new(&path("image")), "qcow2", &overlay, BYTES);
        let read = |name: &str| (path(name), PageMap::from_bytes(&std::fs::read(path(name)).expect("a file")));
        let machine = Machine::new(&Snapshot::from([read("base"), read("image")]), &path("image"), Features::default());
        let mut sectors = Sectors(vec![0; (BYTES / Sectors::BYTES) as usize]);
        sectors.fill(0, BYTES / 2, 77);
        let text = format!("seed {seed}, {options}");
        machine.world.run(async {
            let request = OpenRequest::file(&machine.image).format("qcow2").writable(true).discard(random.chance(50));
            let node = open(request).await.expect("the image opens");
            for _ in 0..12 {
                machine.leave_room(random.pick(&[0, 0, 4096, 20 << 10, 150 << 10]));
                for _ in 0..25 {
                    act(&node, &mut random, &mut sectors, &text).await;
                }
                let (result, buf) = node.read(0, IoBuf::zeroed(BYTES as usize)).await;
                result.unwrap_or_else(|error| panic!("{text}: {error}"));
                assert!(buf[..] == sectors.expand(), "{text}: other contents");
            }
            node.flush().await.unwrap_or_else(|error| panic!("{text}: {error}"));
            let killed = machine.world.contents(&machine.image).expect("there");
            std::fs::write(&machine.image, killed.to_vec()).expect("a file for QEMU");
            qemu.expect_no_corruption(Path::new(&machine.image));
            assert!(
                qemu.content(Path::new(&machine.image), "qcow2") == sectors.expand(),
                "{text}: QEMU reads other contents"
            );
            node.close().await.unwrap_or_else(|error| panic!("{text}: {error}"));
        });
        let closed = machine.world.contents(&machine.image).expect("there");
        std::fs::write(&machine.image, closed.to_vec()).expect("a file for QEMU");
        qemu.expect_clean(Path::new(&machine.image));
        assert!(
            qemu.content(Path::new(&machine.image), "qcow2") == sectors.expand(),
            "{text}: closed with other contents"
        );
    });
}

/// A table that finds no space takes none.
#[test]
fn a_growth_that_found_no_space_leaks_nothing() {
    let (qemu, folder) = (Qemu::newest(), temp_dir());
    let case = Case { options: "cluster_size=4k", size: 64 << 20, step: 2 << 20 };
    let files = image_of(&qemu, folder.path(), &case);
    let image = folder.path().join("image").to_str().expect("text path").to_owned();
    let machine = Machine::new(&files, &image, Features::default());
    let mut written = Written::new();
    machine.world.run(async {
        let node = opened(&image).await.expect("the image opens");
        assert!(write_pieces(&node, &case, &mut written, 1).await.is_empty());
        machine.leave_room(100 << 10);
        // An L1 table of 256 KiB.
        let error = node.resize(64 << 30, Preallocation::Off).await.expect_err("no room");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        write(&node, PIECE, 2).await.expect("what the table took is free again");
        written.insert(PIECE, 2);
        node.flush().await.expect("a flush on a full disk");
        node.close().await.expect("a close on a full disk");
    });
    judge(&qemu, &image, &machine.world.snapshot(), &written, &[], case.options);
    qemu.expect_clean(Path::new(&image));
}

/// A table that is shared with a snapshot must be copied before its end is unmapped, and there is no space for the copy.
#[test]
fn a_shrink_that_found_no_space_changes_nothing() {
    let (qemu, folder) = (Qemu::newest(), temp_dir());
    let case = Case { options: "cluster_size=4k", size: 64 << 20, step: 2 << 20 };
    image_of(&qemu, folder.path(), &case);
    let image = folder.path().join("image").to_str().expect("text path").to_owned();
    qemu.io(["-f", "qcow2", "-c", "write -P 1 0 512k", "-c", "write -P 9 48M 64k", &image]).expect_ok();
    qemu.img(["snapshot", "-c", "s", &image]).expect_ok();
    // No snapshot has this table: it needs no copy.
    qemu.io(["-f", "qcow2", "-c", "write -P 8 40M 64k", &image]).expect_ok();
    let files = Snapshot::from([(image.clone(), PageMap::from_bytes(&std::fs::read(&image).expect("an image")))]);
    let machine = Machine::new(&files, &image, Features::default());
    machine.world.run(async {
        let node = opened(&image).await.expect("the image opens");
        machine.leave_room(0);
        let error = node.resize(32 << 20, Preallocation::Off).await.expect_err("no room");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        assert_eq!(node.size(), case.size);
        node.flush().await.expect("a flush on a full disk");
        for (offset, stamp) in [(40 << 20, 8), (48 << 20, 9)] {
            let (result, buf) = node.read(offset, IoBuf::zeroed(PIECE as usize)).await;
            result.expect("a read");
            assert!(buf.iter().all(|byte| *byte == stamp), "what a refused shrink would cut off is there");
        }
    });
    let written = Written::from([(0, 1), (40 << 20, 8), (48 << 20, 9)]);
    judge(&qemu, &image, &machine.world.snapshot(), &written, &[], "refused");
    machine.world.run(async {
        machine.world.set_capacity(None);
        let node = opened(&image).await.expect("the image opens");
        node.resize(32 << 20, Preallocation::Off).await.expect("there is room");
        assert_eq!(node.size(), 32 << 20);
        node.close().await.expect("a close");
    });
    judge(&qemu, &image, &machine.world.snapshot(), &Written::from([(0, 1)]), &[], "shrunk");
    qemu.expect_clean(Path::new(&image));
}

/// A table at an impossible place is met before anything is cut off.
#[test]
fn a_shrink_that_met_damage_changes_nothing() {
    let (qemu, folder) = (Qemu::newest(), temp_dir());
    let case = Case { options: "cluster_size=4k", size: 64 << 20, step: 2 << 20 };
    image_of(&qemu, folder.path(), &case);
    let image = folder.path().join("image").to_str().expect("text path").to_owned();
    qemu.io(["-f", "qcow2", "-c", "write -P 1 0 4k", "-c", "write -P 9 48M 64k", &image]).expect_ok();
    let mut bytes = std::fs::read(&image).expect("an image");
    let l1_offset = u64::from_be_bytes(bytes[40..48].try_into().expect("eight bytes")) as usize;
    // The entry of the table for 48 MiB: each covers 2 MiB.
    bytes[l1_offset + 24 * 8 + 6] |= 2;
    let files = Snapshot::from([(image.clone(), PageMap::from_bytes(&bytes))]);
    let machine = Machine::new(&files, &image, Features::default());
    machine.world.run(async {
        let node = opened(&image).await.expect("the image opens");
        let error = node.resize(32 << 20, Preallocation::Off).await.expect_err("a damaged table");
        assert_eq!(error.errno(), Errno::EIO, "{error}");
        assert_eq!(node.size(), case.size);
    });
    let header = machine.world.snapshot()[&image].to_vec()[..104].to_vec();
    assert_eq!(u64::from_be_bytes(header[24..32].try_into().expect("eight bytes")), case.size);
    assert_eq!(header[79] & 2, 2, "the image is marked as corrupt");
}

/// The dirty image of a killed process is repaired when it is opened for writing. On a full disk the new counts go to free
/// clusters of the file.
#[test]
fn a_killed_image_opens_on_a_full_disk() {
    let (qemu, folder) = (Qemu::newest(), temp_dir());
    let case = Case { options: "cluster_size=4k,lazy_refcounts=on", size: 64 << 20, step: 64 << 10 };
    image_of(&qemu, folder.path(), &case);
    let image = folder.path().join("image").to_str().expect("text path").to_owned();
    let files = Snapshot::from([(image.clone(), PageMap::from_bytes(&std::fs::read(&image).expect("an image")))]);
    let killed = Machine::new(&files, &image, Features::default());
    let files = killed.world.run(async {
        let options = format!("driver=qcow2,pass-discard-request=off,file.filename={image}");
        let request = OpenRequest::image_opts(&options).expect("good options").writable(true);
        let node = open(request).await.expect("the image opens");
        // A block counts 2,048 clusters: the second one is in memory only.
        for (at, len, byte) in [(0, 10 << 20, 1), (32 << 20, 1 << 20, 2)] {
            node.write(at, IoBuf::copy_from(&vec![byte; len])).await.0.expect("a write");
        }
        node.discard(0, 1 << 20).await.expect("a discard");
        node.flush().await.expect("a flush");
        killed.world.snapshot()
    });
    let machine = Machine::new(&files, &image, Features::default());
    machine.leave_room(0);
    let mut written = Written::from([(2 << 20, 1), (32 << 20, 2)]);
    let len = files[&image].len();
    machine.world.run(async {
        let node = opened(&image).await.expect("the image is repaired and opens");
        write(&node, 32 << 20, 5).await.expect("in place");
        written.insert(32 << 20, 5);
        node.close().await.expect("a close on a full disk");
    });
    let closed = machine.world.snapshot();
    assert!(closed[&image].len() <= len, "the file did not grow");
    judge(&qemu, &image, &closed, &written, &[], case.options);
}
