// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Our library and the real QEMU on the same images, in both directions, over the matrix of options.
//!
//! Each seed draws a chain of layers, its options and its operations; see `cowshed_testkit::images`. More seeds:
//! `COWSHED_SEEDS=1000 cargo test -p cowshed-testkit --test differential`.

use cowshed_testkit::images::{Built, Chain, Executor, Library, Op, QemuIo, Reader};
use cowshed_testkit::qemu::{MapEntry, Qemu, coalesce, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use std::path::Path;

/// QEMU and we take turns, session by session.
struct Turns<'a> {
    qemu: QemuIo<'a>,
    library: Library,
    random: Random,
}

impl Executor for Turns<'_> {
    fn session(&mut self, image: &Path, ops: &[Op]) {
        if self.random.chance(50) { self.qemu.session(image, ops) } else { self.library.session(image, ops) }
    }
}

/// Builds the chain of `seed` with an executor and holds all views of the result against each other.
fn build_and_compare(seed: u64, executor: &mut dyn Executor, qemu: &Qemu) {
    let (folder, chain) = (temp_dir(), Chain::random(seed));
    eprintln!("seed {seed}:\n{}", chain.describe());
    let mut built = chain.build(qemu, folder.path(), executor);
    for file in built.files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "qcow2")) {
        qemu.expect_clean(file);
    }
    let expected = qemu.content(&built.path, built.format);
    if let Err(difference) = built.content.adopt_read(&expected) {
        panic!("what qemu-img reads is not what was written: {difference}");
    }
    compare_reads(seed, &built, &expected);
    compare_maps(&built, qemu);
}

fn compare_reads(seed: u64, built: &Built, expected: &[u8]) {
    let reader = Reader::open(&built.path, built.format);
    // Small reads first, while nothing is cached.
    let mut random = Random::new(seed);
    for _ in 0..20 {
        let offset = random.below(expected.len() as u64);
        let len = 1 + random.below((expected.len() as u64 - offset).min(70_000));
        let bytes = reader.read(offset, len);
        assert!(bytes[..] == expected[offset as usize..][..len as usize], "we read {len} bytes at {offset} wrongly");
    }
    let bytes = reader.read_all();
    assert_eq!(bytes.len(), expected.len(), "size");
    let wrong = (0..bytes.len()).find(|at| bytes[*at] != expected[*at]);
    if let Some(at) = wrong {
        panic!("we read byte {at:#x} as {:#04x} instead of {:#04x}", bytes[at], expected[at]);
    }
    reader.close();
}

fn compare_maps(built: &Built, qemu: &Qemu) {
    let reader = Reader::open(&built.path, built.format);
    let ours = reader.map();
    reader.close();
    let theirs = qemu.map(&built.path, built.format);
    let knows_compressed = theirs.iter().any(|entry| entry.compressed.is_some());
    let normal = |entries: Vec<MapEntry>| coalesce(entries.into_iter().map(|entry| normal(entry, knows_compressed)));
    let (ours, theirs) = (normal(ours), normal(theirs));
    let different = ours.iter().zip(&theirs).find(|(ours, theirs)| ours != theirs);
    if let Some((ours, theirs)) = different {
        panic!("we map\n{ours:?}\nwhere qemu-img maps\n{theirs:?}");
    }
    assert_eq!(ours.len(), theirs.len(), "the longer map goes on after the end of the other");
}

/// The part of an entry on which two readers must agree.
fn normal(mut entry: MapEntry, knows_compressed: bool) -> MapEntry {
    if !knows_compressed {
        // QEMU before 8.2.
        entry.compressed = None;
    }
    if entry.data && entry.zero {
        // Where QEMU takes an image for preallocated it looks for holes of the file under the data.
        entry.zero = false;
    }
    if !entry.present || !entry.data {
        // Nothing is read from there. QEMU names the host offset of unallocated subclusters in an allocated cluster. It
        // names none for a zero cluster at offset 0 of a data file, which it takes for one without a host cluster.
        entry.offset = None;
    }
    entry
}

/// The tools that write and those that judge, for a seed: all pairs of the system's and the newest.
fn pair(tools: &[Qemu; 2], seed: u64) -> (&Qemu, &Qemu) {
    (&tools[(seed % 2) as usize], &tools[(seed / 2 % 2) as usize])
}

#[test]
fn we_read_what_qemu_wrote() {
    let tools = Qemu::all();
    for_each_seed(40, |seed| {
        let (writer, judge) = pair(&tools, seed);
        build_and_compare(seed, &mut QemuIo(writer), judge);
    });
}

#[test]
fn qemu_reads_what_we_wrote() {
    let tools = Qemu::all();
    for_each_seed(40, |seed| build_and_compare(seed, &mut Library { concurrent: false }, pair(&tools, seed).1));
}

#[test]
fn qemu_reads_what_we_wrote_concurrently() {
    let tools = Qemu::all();
    for_each_seed(40, |seed| build_and_compare(seed, &mut Library { concurrent: true }, pair(&tools, seed).1));
}

#[test]
fn qemu_and_we_take_turns_on_one_image() {
    let tools = Qemu::all();
    for_each_seed(40, |seed| {
        let random = Random::new(seed ^ 0x7475_726e);
        let (writer, judge) = pair(&tools, seed);
        let mut turns = Turns { qemu: QemuIo(writer), library: Library { concurrent: true }, random };
        build_and_compare(seed, &mut turns, judge);
    });
}
