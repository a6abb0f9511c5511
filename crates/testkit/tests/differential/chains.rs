// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commit and rebase over random chains: an image's data never changes, for us and for QEMU. The memory of a chain is
//! also tested: with layers that are written to later, and with a whole chain without writers.

use cowshed_image::formats::DriverOf;
use cowshed_image::graph::Graph;
use cowshed_image::node::Node;
use cowshed_image::options::BlockdevOptions;
use cowshed_image::stats::IoKind;
use cowshed_jobs::commit::{self, CommitOptions};
use cowshed_jobs::rebase::{self, RebaseOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use std::path::{Path, PathBuf};

/// Layers of a chain, the base first.
const LAYERS: u64 = 4;

struct Bench<'a> {
    qemu: &'a Qemu,
    folder: &'a Path,
    random: Random,
}

impl Bench<'_> {
    fn options(&mut self) -> String {
        let bits = 9 + self.random.below(8);
        match self.random.below(4) {
            0 => format!("cluster_size={},compat=0.10", 1 << bits),
            1 if bits >= 14 => format!("cluster_size={},extended_l2=on", 1 << bits),
            2 => format!("cluster_size={},refcount_bits=64,compression_type=zstd", 1 << bits),
            _ => format!("cluster_size={}", 1 << bits),
        }
    }

    fn size(&mut self) -> u64 {
        (64 + self.random.below(1500)) * 1024
    }

    fn fill(&mut self, path: &Path, format: &str, size: u64) {
        let mut commands = Vec::new();
        for _ in 0..1 + self.random.below(6) {
            let start = self.random.below(size / 512);
            let len = 1 + self.random.below((size / 512 - start).min(300));
            let (start, len) = (start * 512, len * 512);
            match self.random.below(4) {
                0 => commands.push(format!("write -z {start} {len}")),
                1 => commands.push(format!("discard {start} {len}")),
                _ => commands.push(format!("write -P {} {start} {len}", 1 + self.random.below(250))),
            }
        }
        self.qemu.io_commands(path, format, &commands);
    }

    /// A chain of qcow2 images over a raw or qcow2 base; the paths, base first, and their formats.
    fn chain(&mut self, name: &str) -> Vec<(PathBuf, &'static str)> {
        let mut layers: Vec<(PathBuf, &'static str)> = Vec::new();
        for number in 0..1 + self.random.below(LAYERS) {
            let (path, size) = (self.folder.join(format!("{name}{number}")), self.size());
            let format = if number == 0 && self.random.chance(40) { "raw" } else { "qcow2" };
            let options = match (format, layers.last()) {
                ("raw", _) => String::new(),
                (_, None) => self.options(),
                (_, Some((below, format))) => {
                    format!("{},backing_file={},backing_fmt={format}", self.options(), below.display())
                }
            };
            self.qemu.create(&path, format, &options, size);
            self.fill(&path, format, size);
            layers.push((path, format));
        }
        layers
    }

    fn content(&self, image: &(PathBuf, &str)) -> Vec<u8> {
        self.qemu.content(&image.0, image.1)
    }

    fn expect_clean(&self, layers: &[(PathBuf, &str)]) {
        for (path, _) in layers.iter().filter(|(_, format)| *format == "qcow2") {
            self.qemu.expect_clean(path);
        }
    }
}

fn spec(image: &(PathBuf, &str)) -> ImageSpec {
    ImageSpec::file(image.0.to_str().expect("text path")).format(image.1)
}

#[test]
fn a_rebased_image_reads_as_before() {
    for_each_seed(24, |seed| {
        let qemu = Qemu::for_seed(seed);
        let folder = temp_dir();
        let mut bench = Bench { qemu: &qemu, folder: folder.path(), random: Random::new(seed ^ 0x7265_6261) };
        let mut old = bench.chain("old");
        if old.len() == 1 {
            let (below, format) = &old[0];
            let (top, size) = (folder.path().join("top"), bench.size());
            let options = format!("backing_file={},backing_fmt={format}", below.display());
            qemu.create(&top, "qcow2", &options, size);
            bench.fill(&top, "qcow2", size);
            old.push((top, "qcow2"));
        }
        let new = bench.chain("new");
        let top = old.last().expect("a layer").clone();
        let expected = bench.content(&top);
        // Away from any chain, onto another one, onto an image of its own chain.
        let base = match bench.random.below(4) {
            0 => None,
            1 => Some(old[bench.random.below(old.len() as u64 - 1) as usize].clone()),
            _ => new.last().cloned(),
        };
        let options = RebaseOptions {
            image: spec(&top),
            base: base.as_ref().map(|(path, _)| path.to_str().expect("text path").to_owned()),
            base_format: base.as_ref().map(|(_, format)| (*format).to_owned()),
            compressed: bench.random.chance(30),
            ..RebaseOptions::default()
        };
        rt::block_on(rebase::run(&options, &JobHandle::new())).unwrap_or_else(|error| panic!("{error}"));
        bench.expect_clean(&old);
        assert!(bench.content(&top) == expected, "the image reads otherwise");
        let info = qemu.info(&top.0, "qcow2");
        assert_eq!(info["backing-filename"].as_str(), options.base.as_deref());
        assert_eq!(info["backing-filename-format"].as_str(), options.base_format.as_deref());
    });
}

#[test]
fn a_committed_image_is_in_its_base() {
    for_each_seed(24, |seed| {
        let qemu = Qemu::for_seed(seed);
        let folder = temp_dir();
        let mut bench = Bench { qemu: &qemu, folder: folder.path(), random: Random::new(seed ^ 0x636f_6d6d) };
        let layers = bench.chain("layer");
        let Some(below) = layers.len().checked_sub(2) else { return };
        let top = layers.last().expect("a layer");
        let expected = bench.content(top);
        let base = if bench.random.chance(50) { below } else { bench.random.below(below as u64 + 1) as usize };
        let named = base != below || bench.random.chance(30);
        let keep = bench.random.chance(50);
        let options = CommitOptions {
            image: spec(top),
            base: named.then(|| layers[base].0.to_str().expect("text path").to_owned()),
            keep,
            ..CommitOptions::default()
        };
        rt::block_on(commit::run(&options, &JobHandle::new())).unwrap_or_else(|error| panic!("{error}"));
        bench.expect_clean(&layers);
        assert!(bench.content(top) == expected, "the image reads otherwise");
        let committed = bench.content(&layers[base]);
        assert!(committed[..expected.len()] == expected, "the base reads otherwise");
        if !named && !keep {
            let own = qemu.map(&top.0, "qcow2").into_iter().any(|run| run.depth == 0 && (run.data || run.present));
            assert!(!own, "the image was to be emptied");
        }
    });
}

#[test]
fn a_short_layer_hides_what_the_base_has_behind_its_end() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = |name: &str| folder.path().join(name);
    let mut below: Option<&str> = None;
    for (name, size, write) in [
        ("base", 2 << 20, "write -P 1 0 2M"),
        ("short", 1 << 20, "write -P 2 0 64k"),
        ("top", 2 << 20, "write -P 3 1088k 64k"),
    ] {
        let options =
            below.map_or(String::new(), |below| format!("backing_file={},backing_fmt=qcow2", path(below).display()));
        qemu.create(&path(name), "qcow2", &options, size);
        qemu.io_commands(&path(name), "qcow2", &[write.to_owned()]).expect_ok();
        below = Some(name);
    }
    let expected = qemu.content(&path("top"), "qcow2");
    let options = CommitOptions {
        image: spec(&(path("top"), "qcow2")),
        base: path("base").to_str().map(str::to_owned),
        ..CommitOptions::default()
    };
    rt::block_on(commit::run(&options, &JobHandle::new())).unwrap_or_else(|error| panic!("{error}"));
    assert!(qemu.content(&path("base"), "qcow2") == expected, "the base reads otherwise");
    assert!(qemu.content(&path("top"), "qcow2") == expected, "the image reads otherwise");
    qemu.expect_clean(&path("base"));
}

#[test]
fn writable_layer_forgets_its_cached_places() {
    const PIECE: usize = 4096;
    const CLUSTER: usize = 65536;
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let at = folder.path();
    let fill = |name: &str, backing: &str, write: &str| {
        let backing =
            if backing.is_empty() { String::new() } else { format!(",backing_file={backing},backing_fmt=qcow2") };
        qemu.create(&at.join(name), "qcow2", &format!("cluster_size=64k{backing}"), 1 << 20);
        if !write.is_empty() {
            qemu.io_commands(&at.join(name), "qcow2", &[write.to_owned()]).expect_ok();
        }
    };
    fill("base.qcow2", "", "write -P 1 0 1M");
    fill("mid.qcow2", "base.qcow2", "write -P 2 128k 256k");
    fill("top.qcow2", "mid.qcow2", "");
    let mut model = vec![1; 1 << 20];
    model[128 << 10..384 << 10].fill(2);
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let name = |name: &str| at.join(name).display().to_string();
    let options = format!(
        "driver=qcow2,node-name=top,file.filename={},backing.driver=qcow2,backing.node-name=mid,backing.discard=unmap,\
         backing.read-only=on,backing.auto-read-only=on,backing.file.filename={}",
        name("top.qcow2"),
        name("mid.qcow2")
    );
    let top = rt::block_on(graph.add(BlockdevOptions::from_keyval(&options).unwrap())).unwrap();
    let mid = graph.node("mid").unwrap();
    let verify = |model: &[u8], when: &str| {
        for _ in 0..2 {
            for (index, expected) in model.chunks(PIECE).enumerate() {
                let (result, buf) = rt::block_on(top.read((index * PIECE) as u64, IoBuf::zeroed(PIECE)));
                result.unwrap();
                assert!(buf[..] == *expected, "{when}: piece {index} is {} for {}", buf[0], expected[0]);
            }
        }
    };
    verify(&model, "first");
    // Small reads by a known place don't ask the layer's mapping.
    let looked_up = mid.qcow2().unwrap().statistics().l2_hits;
    verify(&model, "known");
    assert_eq!(mid.qcow2().unwrap().statistics().l2_hits, looked_up);

    let file_len = || std::fs::metadata(at.join("mid.qcow2")).unwrap().len();
    let before = file_len();
    rt::block_on(graph.set_read_only(&mid, false)).unwrap();
    let mut fill = 2;
    for round in 0..4 {
        // Places are learnt again while it may be written to, or not.
        if round % 2 == 0 {
            verify(&model, "writable");
        }
        let (gone, new) = ((2 + round) * CLUSTER, (8 + round) * CLUSTER);
        rt::block_on(mid.discard(gone as u64, CLUSTER as u64)).unwrap();
        // Discarded clusters can be used again after a flush.
        rt::block_on(mid.flush()).unwrap();
        model[gone..gone + CLUSTER].fill(0);
        fill += 1;
        rt::block_on(mid.write(new as u64, IoBuf::copy_from(&[fill; CLUSTER]))).0.unwrap();
        model[new..new + CLUSTER].fill(fill);
        verify(&model, "written to");
    }
    assert_eq!(file_len(), before, "the new data are in clusters that were given up");
    rt::block_on(graph.set_read_only(&mid, true)).unwrap();
    verify(&model, "read-only again");
    rt::block_on(graph.close_all()).unwrap();
}

/// Opens a chain through its uppermost image, read-only, as a node "top".
fn open_read_only(graph: &std::sync::Arc<Graph>, image: &(PathBuf, &str)) -> std::sync::Arc<Node> {
    let options =
        format!("driver={},node-name=top,read-only=on,file.driver=file,file.filename={}", image.1, image.0.display());
    rt::block_on(graph.add(BlockdevOptions::from_keyval(&options).unwrap())).unwrap()
}

fn read(node: &Node, offset: usize, len: usize) -> IoBuf {
    let (result, buf) = rt::block_on(node.read(offset as u64, IoBuf::copy_from(&vec![0xee; len])));
    result.unwrap();
    buf
}

/// Of random chains, by reads of any size in any order, with nothing known and with much known.
#[test]
fn a_chain_without_writers_reads_the_same_from_memory() {
    let folder = temp_dir();
    for_each_seed(4, |seed| {
        let qemu = Qemu::for_seed(seed);
        let mut bench = Bench { qemu: &qemu, folder: folder.path(), random: Random::new(seed) };
        for number in 0..4 {
            let layers = bench.chain(&format!("seen{seed}-{number}-"));
            let image = layers.last().unwrap();
            let model = bench.content(image);
            let graph = Graph::new(&cowshed_image::DRIVERS);
            let top = open_read_only(&graph, image);
            assert_eq!(top.size(), model.len() as u64);
            for _ in 0..3000 {
                let start = bench.random.below(model.len() as u64) as usize;
                let longest = if bench.random.chance(10) { 600 << 10 } else { 9000 };
                let len = 1 + bench.random.below((model.len() - start).min(longest) as u64) as usize;
                // Mostly as guests read.
                let (start, end) = match bench.random.chance(70) {
                    true => (start / 512 * 512, (start + len).next_multiple_of(512).min(model.len())),
                    false => (start, start + len),
                };
                let buf = read(&top, start, end - start);
                assert!(buf[..] == model[start..end], "seed {seed}, chain {number}: {start}..{end}");
            }
            rt::block_on(graph.close_all()).unwrap();
        }
    });
}

/// The image above the layers too: known as they are while it has no writer, and no longer.
#[test]
fn writable_image_is_never_passed_over() {
    const PIECE: usize = 4096;
    const CLUSTER: usize = 65536;
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = |name: &str| folder.path().join(name);
    let size = (1 << 20) - 3 * 512;
    qemu.create(&path("base"), "qcow2", "cluster_size=64k", size);
    // Four clusters are nowhere.
    let all = ["write -P 1 0 512k".to_owned(), format!("write -P 1 768k {}", size - (768 << 10))];
    qemu.io_commands(&path("base"), "qcow2", &all).expect_ok();
    let backing = format!("cluster_size=64k,backing_file={},backing_fmt=qcow2", path("base").display());
    qemu.create(&path("top"), "qcow2", &backing, size);
    // Its last cluster, which ends within a granule, is its own.
    let own = ["write -P 2 128k 128k".to_owned(), format!("write -P 3 960k {}", size - (960 << 10))];
    qemu.io_commands(&path("top"), "qcow2", &own).expect_ok();
    let mut model = vec![1; size as usize];
    model[128 << 10..256 << 10].fill(2);
    model[512 << 10..768 << 10].fill(0);
    model[960 << 10..].fill(3);

    let graph = Graph::new(&cowshed_image::DRIVERS);
    let top = open_read_only(&graph, &(path("top"), "qcow2"));
    let hits = || top.qcow2().unwrap().statistics().l2_hits;
    let verify = |model: &[u8], when: &str| {
        for (index, expected) in model.chunks(PIECE).enumerate() {
            let buf = read(&top, index * PIECE, expected.len());
            assert!(buf[..] == *expected, "{when}: piece {index} is {} for {}", buf[0], expected[0]);
        }
    };
    verify(&model, "first");
    let looked_up = hits();
    verify(&model, "known");
    // Only the last granule is looked up again: a part of a granule isn't remembered.
    assert!(hits() - looked_up <= (CLUSTER / PIECE) as u64, "{} look-ups", hits() - looked_up);
    let operations = top.statistics().kind(IoKind::Read).operations;
    verify(&model, "counted");
    assert_eq!(top.statistics().kind(IoKind::Read).operations - operations, size.div_ceil(PIECE as u64));

    let write = |at: usize, fill: u8, model: &mut Vec<u8>| {
        rt::block_on(top.write(at as u64, IoBuf::copy_from(&[fill; CLUSTER]))).0.unwrap();
        assert!(read(&top, at, CLUSTER)[..] == [fill; CLUSTER]);
        model[at..at + CLUSTER].fill(fill);
    };
    for round in 0..3 {
        rt::block_on(graph.set_read_only(&top, false)).unwrap();
        // Into a range without data, into its own, and into a range from below.
        write((8 + usize::from(round)) * CLUSTER, 30 + round, &mut model);
        write(2 * CLUSTER, 10 + round, &mut model);
        write((4 + usize::from(round)) * CLUSTER, 20 + round, &mut model);
        verify(&model, "written to");
        rt::block_on(graph.set_read_only(&top, true)).unwrap();
        verify(&model, "read-only again");
        verify(&model, "known again");
        assert!(rt::block_on(top.write(0, IoBuf::zeroed(512))).0.is_err());
    }
    rt::block_on(graph.close_all()).unwrap();
    qemu.expect_clean(&path("top"));
    assert!(qemu.content(&path("top"), "qcow2") == model);
}

#[test]
fn what_an_image_has_is_read_without_its_backing_file() {
    const MIB: usize = 1 << 20;
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = |name: &str| folder.path().join(name);
    qemu.create(&path("base"), "qcow2", "cluster_size=64k", 128 << 20);
    let parts = ["write -P 1 0 1M", "write -P 1 96M 1M"].map(str::to_owned);
    qemu.io_commands(&path("base"), "qcow2", &parts).expect_ok();
    let backing = format!("cluster_size=64k,backing_file={},backing_fmt=qcow2", path("base").display());
    qemu.create(&path("top"), "qcow2", &backing, 128 << 20);
    qemu.io_commands(&path("top"), "qcow2", &["write -P 2 96M 128k".to_owned()]).expect_ok();
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let top = open_read_only(&graph, &(path("top"), "qcow2"));
    let base = top.backing().unwrap();
    let asked = || {
        let statistics = base.qcow2().unwrap().statistics();
        statistics.l2_hits + statistics.l2_misses
    };
    let expect = |offset: usize, fill: u8| {
        for at in (offset..offset + 64 * 1024).step_by(4096) {
            assert!(read(&top, at, 4096)[..] == [fill; 4096], "{at}");
        }
    };
    // From here on there is a map.
    expect(0, 1);
    let (own, before) = (|| top.qcow2().unwrap().statistics().l2_hits, asked());
    expect(96 * MIB, 2);
    let known = own();
    expect(96 * MIB, 2);
    assert_eq!((own(), asked()), (known, before));
    // The layer below beside it, and then this one again.
    expect(96 * MIB + 128 * 1024, 1);
    assert!(asked() > before);
    expect(96 * MIB + 64 * 1024, 2);
    expect(97 * MIB, 0);
    rt::block_on(graph.close_all()).unwrap();
}
