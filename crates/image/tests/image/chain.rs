// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Backing chains and data files: found, overridden, read through, mapped.

use cowshed_image::formats::DriverOf;
use cowshed_image::graph::Graph;
use cowshed_image::node::ChildRole;
use cowshed_image::options::BlockdevOptions;
use cowshed_image::stats::IoKind;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::{output, run, tool};
use std::sync::Arc;

/// `sub/top.qcow2` (3 MiB) over `mid.qcow2` (2 MiB, other cluster size) over `base.raw` (1 MiB): bytes 1, 2 and 3
/// where each was written.
fn chain() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("sub")).unwrap();
    std::fs::write(at.join("base.raw"), vec![1; 1 << 20]).unwrap();
    let create = |args: &[&str]| run("qemu-img", at, &[&["create", "-q", "-f", "qcow2"], args].concat());
    create(&["-o", "cluster_size=4k", "-F", "raw", "-b", "base.raw", "mid.qcow2", "2M"]);
    create(&["-F", "qcow2", "-b", "../mid.qcow2", "sub/top.qcow2", "3M"]);
    run("qemu-io", at, &["-c", "write -P 2 100k 200k", "-c", "write -P 2 1900k 148k", "mid.qcow2"]);
    run("qemu-io", at, &["-c", "write -P 3 200k 64k", "-c", "write -z 512k 64k", "sub/top.qcow2"]);
    folder
}

fn open_now(request: OpenRequest) -> Arc<Node> {
    rt::block_on(open(request)).unwrap()
}

fn top(folder: &tempfile::TempDir) -> String {
    folder.path().join("sub/top.qcow2").to_str().unwrap().to_owned()
}

fn read_all(node: &Node) -> Vec<u8> {
    let (result, buf) = rt::block_on(node.read(0, IoBuf::zeroed(node.size() as usize)));
    result.unwrap();
    buf.to_vec()
}

#[test]
fn a_chain_is_found_and_read() {
    let folder = chain();
    run("qemu-img", folder.path(), &["convert", "-O", "raw", "sub/top.qcow2", "flat.raw"]);
    let expected = std::fs::read(folder.path().join("flat.raw")).unwrap();
    let node = open_now(OpenRequest::file(top(&folder)));
    assert_eq!((node.driver_name(), node.size()), ("qcow2", 3 << 20));
    let mid = node.backing().unwrap();
    let base = mid.backing().unwrap();
    assert_eq!((mid.driver_name(), base.driver_name()), ("qcow2", "raw"));
    assert!(mid.filename().ends_with("sub/../mid.qcow2") && base.filename().ends_with("sub/../base.raw"));
    assert_eq!(node.child(ChildRole::File).unwrap().driver_name(), "file");
    assert!(mid.is_read_only() && base.is_read_only());
    assert!(read_all(&node) == expected, "content differs from what qemu-img reads");
    rt::block_on(node.close()).unwrap();
}

#[test]
fn small_reads_count_for_the_layer_that_has_them() {
    const PIECE: usize = 4096;
    let folder = chain();
    run("qemu-img", folder.path(), &["convert", "-O", "raw", "sub/top.qcow2", "flat.raw"]);
    let expected = std::fs::read(folder.path().join("flat.raw")).unwrap();
    let node = open_now(OpenRequest::file(top(&folder)));
    let mid = node.backing().unwrap();
    let base = mid.backing().unwrap();
    let reads = |node: &Node| node.statistics().kind(IoKind::Read).operations;
    // The first reads learn the layer of each range; later ones go straight there.
    for _ in 0..2 {
        let before = [&node, &mid, &base].map(|node| reads(node));
        for (index, piece) in expected.chunks(PIECE).enumerate() {
            let (result, buf) = rt::block_on(node.read((index * PIECE) as u64, IoBuf::zeroed(PIECE)));
            result.unwrap();
            assert!(buf[..] == *piece, "piece {index}");
        }
        // Its two clusters of 64 KiB that were written to in part have the rest of them, too.
        let in_top = (192 << 10) / PIECE..(320 << 10) / PIECE;
        let written_by = |layer: u8| {
            let pieces = expected.chunks(PIECE).enumerate();
            pieces.filter(|(index, piece)| piece[0] == layer && !in_top.contains(index)).count() as u64
        };
        let after = [&node, &mid, &base].map(|node| reads(node));
        let counted = [0, 1, 2].map(|layer| after[layer] - before[layer]);
        assert_eq!(counted, [(expected.len() / PIECE) as u64, written_by(2), written_by(1)]);
    }
    rt::block_on(node.close()).unwrap();
}

/// Start, length, depth, present, zero, data, offset.
type MapRun = (u64, u64, u64, bool, bool, bool, Option<u64>);

#[test]
fn the_map_of_a_chain_is_the_one_of_qemu_img() {
    let folder = chain();
    let text = run("qemu-img", folder.path(), &["map", "--output=json", "sub/top.qcow2"]);
    let expected: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let node = open_now(OpenRequest::file(top(&folder)));
    for max_runs in [1, 3, 1000] {
        let mut runs: Vec<MapRun> = Vec::new();
        let mut at = 0;
        while at < node.size() {
            let more = rt::block_on(node.block_status_chain(at, node.size() - at, max_runs)).unwrap();
            assert!(!more.is_empty() && more.len() <= max_runs);
            for run in more {
                assert_eq!(run.start, at, "a gap");
                at += run.len;
                let item = (run.start, run.len, run.depth.into(), run.present, run.zero, run.data, run.offset);
                match runs.last_mut() {
                    // qemu-img joins adjacent runs.
                    Some(last)
                        if (last.2, last.3, last.4, last.5) == (item.2, item.3, item.4, item.5)
                            && last.6.map(|offset| offset + last.1) == item.6 =>
                    {
                        last.1 += item.1;
                    }
                    _ => runs.push(item),
                }
            }
        }
        let expected: Vec<_> = expected
            .iter()
            .map(|run| {
                let number = |key: &str| run[key].as_u64();
                let flag = |key: &str| run[key].as_bool().unwrap();
                let (start, len) = (number("start").unwrap(), number("length").unwrap());
                (start, len, number("depth").unwrap(), flag("present"), flag("zero"), flag("data"), number("offset"))
            })
            .collect();
        assert_eq!(runs, expected);
    }
}

#[test]
fn the_backing_file_can_be_overridden_or_left_out() {
    let folder = chain();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("other.raw"), vec![9; 3 << 20]).unwrap();
    let opts =
        |rest: &str| OpenRequest::image_opts(&format!("driver=qcow2,file.filename={},{rest}", top(&folder))).unwrap();
    let first = |node: &Node| read_all(node)[0];
    let none = open_now(opts("backing="));
    assert!(none.backing().is_none());
    assert_eq!(first(&none), 0);
    let other = open_now(opts(&format!("backing.driver=raw,backing.file.filename={}", at("other.raw"))));
    assert_eq!(first(&other), 9);
    // Options without a place are about the file that the header names.
    let named = open_now(opts("backing.node-name=mid,backing.file.locking=off"));
    assert_eq!((first(&named), named.backing().unwrap().name()), (1, "mid"));
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = OpenRequest::image_opts(&format!("driver=raw,node-name=base,file.filename={}", at("other.raw")));
    let base = open_now(node.unwrap().graph(Arc::clone(&graph)));
    let by_name = open_now(opts("backing=base").graph(graph));
    assert_eq!(first(&by_name), 9);
    rt::block_on(by_name.close()).unwrap();
    assert_eq!(read_all(&base)[0], 9, "closing an overlay must not close a backing file that has another user");
    let left_out = open_now(OpenRequest::file(top(&folder)).no_backing());
    assert!(left_out.backing().is_none());
}

#[test]
fn a_missing_backing_format_is_guessed_with_a_warning() {
    let folder = chain();
    run("qemu-img", folder.path(), &["rebase", "-u", "-F", "qcow2", "-b", "", "sub/top.qcow2"]);
    // qemu-img no longer writes an image without a backing format, so the extension's type is overwritten.
    let name = top(&folder);
    run("qemu-img", folder.path(), &["rebase", "-u", "-F", "qcow2", "-b", "../mid.qcow2", "sub/top.qcow2"]);
    let mut bytes = std::fs::read(&name).unwrap();
    let at = bytes.windows(4).position(|window| window == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[at..at + 4].copy_from_slice(b"Xtra");
    std::fs::write(&name, bytes).unwrap();
    let node = open_now(OpenRequest::file(&name));
    assert_eq!(node.backing().unwrap().driver_name(), "qcow2");
    assert!(node.warnings().iter().any(|text| text.contains("mid.qcow2") && text.contains("guessed qcow2")));
    let policy = cowshed_image::open::Policy { allow_backing_probe: false, ..Default::default() };
    let error = rt::block_on(open(OpenRequest::file(&name).policy(policy))).unwrap_err().to_string();
    assert!(error.contains("mid.qcow2") && error.contains("policy"), "{error}");
}

#[test]
fn a_data_file_is_found_or_given() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = folder.path();
    let data = at.join("data.raw").to_str().unwrap().to_owned();
    let name = at.join("disk.qcow2").to_str().unwrap().to_owned();
    let option = format!("data_file={data}");
    run("qemu-img", at, &["create", "-q", "-f", "qcow2", "-o", &option, "disk.qcow2", "1M"]);
    run("qemu-io", at, &["-c", "write -P 5 64k 64k", "disk.qcow2"]);
    let node = open_now(OpenRequest::file(&name));
    assert_eq!(node.child(ChildRole::DataFile).unwrap().filename(), data);
    assert_eq!(read_all(&node)[65535..65537], [0, 5]);
    rt::block_on(node.close()).unwrap();
    let moved = at.join("moved.raw");
    std::fs::rename(&data, &moved).unwrap();
    let error = rt::block_on(open(OpenRequest::file(&name))).unwrap_err().to_string();
    assert!(error.contains("data.raw") && error.contains("disk.qcow2") && error.contains("No such file"), "{error}");
    let opts = format!("driver=qcow2,file.filename={name},data-file.filename={}", moved.to_str().unwrap());
    let node = open_now(OpenRequest::image_opts(&opts).unwrap());
    assert_eq!(read_all(&node)[65536], 5);
}

#[test]
fn an_overlay_and_its_backing_file_are_locked() {
    let folder = chain();
    let node = open_now(OpenRequest::file(top(&folder)).writable(true));
    let writes = |name: &str| {
        let args = ["-c", "write 0 512", name];
        let (good, said) = output("qemu-io", folder.path(), &args);
        good && said.contains("wrote")
    };
    for name in ["sub/top.qcow2", "mid.qcow2", "base.raw"] {
        assert!(!writes(name), "qemu wrote to {name} while we have it open");
    }
    // Another overlay on the same backing file is fine.
    let args = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "mid.qcow2", "second.qcow2"];
    run("qemu-img", folder.path(), &args);
    assert!(writes("second.qcow2"));
    rt::block_on(node.close()).unwrap();
    assert!(writes("sub/top.qcow2") && writes("mid.qcow2"));
}

/// The longest chain that the policy allows is opened and read on the small stack of a test thread.
#[test]
fn a_chain_of_the_greatest_length_works() {
    const LAYERS: usize = 200;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = folder.path();
    run("qemu-img", at, &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "0.qcow2", "64k"]);
    run("qemu-io", at, &["-c", "write -P 7 0 64k", "0.qcow2"]);
    run(
        "qemu-img",
        at,
        &["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "BASE.qcow2", "layer.qcow2", "64k"],
    );
    let layer = std::fs::read(at.join("layer.qcow2")).unwrap();
    let name_at = layer.windows(10).position(|bytes| bytes == b"BASE.qcow2").unwrap();
    for number in 1..=LAYERS {
        let mut bytes = layer.clone();
        bytes[name_at..name_at + 10].copy_from_slice(format!("{:0>4}.qcow2", number - 1).as_bytes());
        std::fs::write(at.join(format!("{number:0>4}.qcow2")), bytes).unwrap();
    }
    std::fs::rename(at.join("0.qcow2"), at.join("0000.qcow2")).unwrap();
    let name = |number: usize| at.join(format!("{number:0>4}.qcow2")).to_str().unwrap().to_owned();
    let node = open_now(OpenRequest::file(name(LAYERS - 1)));
    assert_eq!(read_all(&node), vec![7; 65536]);
    let runs = rt::block_on(node.block_status_chain(0, 65536, 1000)).unwrap();
    assert_eq!(runs[0].depth as usize, LAYERS - 1);
    rt::block_on(node.close()).unwrap();
    let error = rt::block_on(open(OpenRequest::file(name(LAYERS)))).unwrap_err();
    assert!(error.to_string().contains("longer than 200"), "{error}");
}

/// Clusters too small for a map of the chain: a read asks one layer after the other, and counts in each.
#[test]
fn layers_that_have_nothing_pass_a_read_on_and_count_it() {
    const LAYERS: usize = 20;
    const SHORT: usize = 3;
    const IN_PARTS: usize = 9;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = folder.path();
    run("qemu-img", at, &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "0.qcow2", "64k"]);
    run("qemu-io", at, &["-c", "write -P 7 0 64k", "0.qcow2"]);
    for number in 1..LAYERS {
        let (name, below) = (format!("{number}.qcow2"), format!("{}.qcow2", number - 1));
        let size = if number == SHORT { "32k" } else { "64k" };
        let options = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "-F", "qcow2", "-b"];
        run("qemu-img", at, &[&options[..], &[&below, &name, size]].concat());
    }
    run("qemu-io", at, &["-c", "write -P 9 8k 512", &format!("{IN_PARTS}.qcow2")]);
    let node = open_now(OpenRequest::file(at.join(format!("{}.qcow2", LAYERS - 1)).to_str().unwrap()));
    let mut chain = vec![Arc::clone(&node)];
    while let Some(below) = chain.last().unwrap().backing() {
        chain.push(below);
    }
    let counts =
        || -> Vec<u64> { chain.iter().rev().map(|node| node.statistics().kind(IoKind::Read).operations).collect() };
    let read = |offset| {
        let (result, buf) = rt::block_on(node.read(offset, IoBuf::zeroed(4096)));
        result.unwrap();
        buf.to_vec()
    };
    for _ in 0..3 {
        let before = counts();
        assert_eq!(read(0), [7; 4096]);
        let after = counts();
        assert_eq!(after, before.iter().map(|count| count + 1).collect::<Vec<_>>());
        // One sector of it lies in a layer, and the rest below.
        assert_eq!(read(8 << 10), [vec![9; 512], vec![7; 3584]].concat());
        let parts: Vec<u64> = counts().iter().zip(&after).map(|(count, before)| count - before).collect();
        assert_eq!(parts, vec![1; LAYERS]);
        // A layer that ends here hides the data below it.
        let after = counts();
        assert_eq!(read(30 << 10), [vec![7; 2048], vec![0; 2048]].concat());
        let short: Vec<u64> = counts().iter().zip(&after).map(|(count, before)| count - before).collect();
        assert_eq!(short, vec![1; LAYERS]);
        assert_eq!(read(48 << 10), [0; 4096]);
    }
    rt::block_on(node.close()).unwrap();
}

/// Long chains: layers of several cluster sizes and lengths, each with pieces of its own, and a model of the data.
struct LongChain {
    folder: tempfile::TempDir,
    model: Vec<u8>,
}

const LAYERS: usize = 12;

impl LongChain {
    fn new(seed: u64) -> LongChain {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut state = seed | 1;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        std::fs::write(folder.path().join("0.raw"), vec![100; 3 << 20]).unwrap();
        let (mut model, mut below) = (vec![100; 3 << 20], "0.raw".to_owned());
        for layer in 1..LAYERS {
            let size = (2 + random(5)) << 20;
            let options =
                ["cluster_size=64k", "cluster_size=4k", "cluster_size=256k", "cluster_size=128k,extended_l2=on"];
            let options = options[random(4) as usize];
            let name = format!("{layer}.qcow2");
            let format = if layer == 1 { "raw" } else { "qcow2" };
            let create = ["create", "-q", "-f", "qcow2", "-F", format, "-b", &below, "-o", options, &name];
            run("qemu-img", folder.path(), &[&create[..], &[&size.to_string()]].concat());
            model.resize(size as usize, 0);
            let mut commands = Vec::new();
            for _ in 0..6 {
                let (at, len) = (random(size / 512) * 512, (random(600) + 1) * 512);
                let len = len.min(size - at);
                let zero = random(4) == 0;
                let how = if zero { "-z".to_owned() } else { format!("-P {layer}") };
                commands.push("-c".to_owned());
                commands.push(format!("write {how} {at} {len}"));
                model[at as usize..(at + len) as usize].fill(if zero { 0 } else { layer as u8 });
            }
            commands.push(name.clone());
            run("qemu-io", folder.path(), &commands.iter().map(String::as_str).collect::<Vec<_>>());
            below = name;
        }
        LongChain { folder, model }
    }

    fn top(&self) -> String {
        self.folder.path().join(format!("{}.qcow2", LAYERS - 1)).to_str().unwrap().to_owned()
    }

    /// Reads pieces of all sizes, twice: first they are looked up, then known.
    fn verify(&self, node: &Node) {
        let size = node.size();
        assert_eq!(size, self.model.len() as u64);
        for len in [512, 4096, 65536, 3 * 65536 + 512, 1 << 20, 512] {
            let mut at = 0;
            while at < size {
                let len = len.min(size - at);
                let (result, buf) = rt::block_on(node.read(at, IoBuf::zeroed(len as usize)));
                result.unwrap();
                assert!(*buf == self.model[at as usize..(at + len) as usize], "{at}+{len} differs");
                at += len;
            }
        }
    }
}

#[test]
fn long_chains_read_as_the_layers_say() {
    for seed in 1..=6 {
        let chain = LongChain::new(seed);
        let node = open_now(OpenRequest::file(chain.top()));
        chain.verify(&node);
        rt::block_on(node.close()).unwrap();
    }
}

#[test]
fn a_long_chain_that_becomes_shorter_in_use_reads_the_same() {
    let chain = LongChain::new(99);
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let options = format!("driver=qcow2,node-name=top,file.filename={}", chain.top());
    let node = rt::block_on(graph.add(BlockdevOptions::from_keyval(&options).unwrap())).unwrap();
    chain.verify(&node);
    // The same disk as one image takes the place of everything below the top.
    let below = chain.folder.path().join(format!("{}.qcow2", LAYERS - 2));
    let flat = chain.folder.path().join("flat.qcow2");
    let args = ["convert", "-O", "qcow2", "-S", "0", below.to_str().unwrap(), flat.to_str().unwrap()];
    run("qemu-img", chain.folder.path(), &args);
    // Something else in it shows that the old layers are no longer asked.
    let mut model = chain.model.clone();
    let add = format!("driver=qcow2,node-name=flat,file.filename={}", flat.display());
    rt::block_on(graph.add(BlockdevOptions::from_keyval(&add).unwrap())).unwrap();
    let whole = read_all(&graph.node("flat").unwrap());
    rt::block_on(graph.delete("flat")).unwrap();
    let holes: Vec<u64> = holes_of(&chain, &node);
    let at = *holes.iter().find(|at| whole[**at as usize] != 0).expect("a cluster that a layer below has");
    run("qemu-io", chain.folder.path(), &["-c", &format!("write -P 222 {at} 512"), flat.to_str().unwrap()]);
    model[at as usize..at as usize + 512].fill(222);
    rt::block_on(graph.add(BlockdevOptions::from_keyval(&add).unwrap())).unwrap();
    let reopen = format!("driver=qcow2,node-name=top,backing=flat,file.filename={}", chain.top());
    rt::block_on(graph.reopen(vec![BlockdevOptions::from_keyval(&reopen).unwrap()])).unwrap();
    LongChain { model, ..chain }.verify(&node);
    rt::block_on(graph.close_all()).unwrap();
}

/// Clusters that the top itself doesn't have.
fn holes_of(chain: &LongChain, node: &Node) -> Vec<u64> {
    let runs = rt::block_on(node.block_status(0, chain.model.len() as u64, 10_000)).unwrap();
    runs.iter().filter(|run| !run.present).map(|run| run.start).collect()
}

#[test]
fn overlays_of_one_base_have_its_mapping_in_memory_once() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "base.qcow2", "8M"]);
    run("qemu-io", folder.path(), &["-c", "write -P 7 0 8M", "base.qcow2"]);
    let tops: Vec<Arc<Node>> = (0..50)
        .map(|number| {
            let name = format!("{number}.qcow2");
            run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", &name]);
            open_now(OpenRequest::file(folder.path().join(&name).to_str().unwrap()).writable(true))
        })
        .collect();
    assert!(read_all(&tops[0]).iter().all(|byte| *byte == 7));
    let stats = |top: &Node| top.backing().unwrap().qcow2().unwrap().statistics();
    let once = stats(&tops[0]);
    assert!(once.l2_misses > 0 && once.l2_bytes > 0);
    for top in &tops {
        assert!(read_all(top).iter().all(|byte| *byte == 7));
        assert_eq!((stats(top).l2_misses, stats(top).l2_bytes), (once.l2_misses, once.l2_bytes), "read again");
    }
    // Data that an overlay gets stays its own.
    rt::block_on(tops[3].write(4096, IoBuf::copy_from(&[9; 4096]))).0.unwrap();
    assert_eq!(read_all(&tops[3])[4096], 9);
    assert_eq!(read_all(&tops[4])[4096], 7);
    // A base that others read can't be written to; by the last one it can.
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let base = |name: &str, more: &str| {
        let file = folder.path().join("base.qcow2");
        let text = format!("driver=qcow2,node-name={name},file.filename={}{more}", file.display());
        BlockdevOptions::from_keyval(&text).unwrap()
    };
    let alone = rt::block_on(graph.add(base("alone", ",read-only=on,auto-read-only=on"))).unwrap();
    assert!(rt::block_on(graph.set_read_only(&alone, false)).is_err(), "fifty overlays read it");
    tops.into_iter().for_each(|top| rt::block_on(top.close()).unwrap());
    rt::block_on(graph.set_read_only(&alone, false)).unwrap();
    rt::block_on(alone.write(0, IoBuf::copy_from(&[1; 512]))).0.unwrap();
    // A later opening doesn't share the mapping that is written to.
    let other = rt::block_on(graph.add(base("other", ",read-only=on,file.locking=off")));
    if let Ok(other) = other {
        assert!(read_all(&other).len() == 8 << 20);
    }
    rt::block_on(graph.close_all()).unwrap();
}

/// Version 2 has no zero clusters. An image that names a backing file may be opened without it, as after a stream.
#[test]
fn discard_of_version_2_works_without_the_backing_file() {
    for compat in ["0.10", "1.1"] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::write(folder.path().join("base.raw"), vec![1; 1 << 20]).unwrap();
        let options = format!("compat={compat}");
        let args = ["create", "-q", "-f", "qcow2", "-o", &options, "-F", "raw", "-b", "base.raw", "top.qcow2"];
        run("qemu-img", folder.path(), &args);
        run("qemu-io", folder.path(), &["-c", "write -P 2 64k 64k", "top.qcow2"]);
        let file = folder.path().join("top.qcow2");
        let options = format!("driver=qcow2,discard=unmap,backing=,file.driver=file,file.filename={}", file.display());
        let options = BlockdevOptions::from_keyval(&options).unwrap();
        let node = open_now(OpenRequest::options(options).writable(true));
        assert!(node.backing().is_none());
        rt::block_on(async {
            node.discard(0, 1 << 20).await.unwrap();
            node.write(0, IoBuf::copy_from(&[3; 65536])).await.0.unwrap();
            node.discard(512, 131_072).await.unwrap();
            node.flush().await.unwrap();
        });
        let content = read_all(&node);
        assert!(content[..512] == [3; 512] && content[131_584..].iter().all(|&byte| byte == 0), "{compat}");
        rt::block_on(node.close()).unwrap();
        // With the backing file nothing older shows where the guest wrote.
        let with_base = read_all(&open_now(OpenRequest::file(file.to_str().unwrap().to_owned())));
        assert!(!with_base[65536..131_072].contains(&1), "{compat}: older data shows");
    }
}

#[test]
fn a_short_base_reads_zero_behind_its_end() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = folder.path();
    std::fs::write(at.join("base.raw"), vec![1; 64 << 10]).unwrap();
    run("qemu-img", at, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "top.qcow2", "1M"]);
    let node = open_now(OpenRequest::file(at.join("top.qcow2").to_str().unwrap()).format("qcow2"));
    let (result, buf) = rt::block_on(node.read(60 << 10, IoBuf::zeroed(8 << 10)));
    result.unwrap();
    assert_eq!(buf.to_vec(), [[1; 4 << 10], [0; 4 << 10]].concat());
    rt::block_on(node.close()).unwrap();
}

/// The outer image grows by whole sectors, though the inner one asks for the end of its data.
#[test]
fn nested_image_takes_a_write_of_few_bytes() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &path("inner"), "64M"]);
    tool("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &path("inner"), &path("outer")]);
    let options = format!("driver=qcow2,file.driver=qcow2,file.file.driver=file,file.file.filename={}", path("outer"));
    let node = rt::block_on(open(OpenRequest::image_opts(&options).unwrap().writable(true))).unwrap();
    rt::block_on(node.write(0, IoBuf::copy_from(&[5; 100]))).0.unwrap();
    rt::block_on(node.close()).unwrap();
    tool("qemu-img", &["check", "-q", &path("outer")]);
    tool("qemu-io", &["--image-opts", &options, "-c", "read -P 5 0 100", "-c", "read -P 0 100 412"]);
    tool("qemu-img", &["check", "-q", "--image-opts", &options]);
}
