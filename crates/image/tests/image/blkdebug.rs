// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults below a qcow2 image: a failed operation gives its error, and the image stays sound.

use cowshed_image::formats::DriverOf;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_storage::fault::{FaultAction, FaultRule, IoType};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const CLUSTER_BYTES: u64 = 64 << 10;

struct Bench {
    _folder: tempfile::TempDir,
    image: String,
}

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = folder.path().join("a.qcow2").to_str().unwrap().to_owned();
        tool("qemu-img", &["create", "-q", "-f", "qcow2", &image, "64M"]);
        Bench { _folder: folder, image }
    }

    fn try_open(&self, rules: &str) -> Result<Arc<Node>> {
        let image = &self.image;
        let options =
            format!("driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename={image},{rules}");
        rt::block_on(open(OpenRequest::image_opts(&options).unwrap().writable(true)))
    }

    fn open(&self, rules: &str) -> Arc<Node> {
        self.try_open(rules).unwrap()
    }

    /// qemu-img finds no error; leaked clusters are allowed after a fault.
    fn expect_sound(&self) {
        run_to_code("qemu-img", &["check", &self.image], &[0, 3]);
    }
}

fn write(node: &Node, cluster: u64, fill: u8) -> Result<()> {
    let buf = IoBuf::copy_from(&vec![fill; CLUSTER_BYTES as usize]);
    rt::block_on(node.write(cluster * CLUSTER_BYTES, buf)).0
}

fn read(node: &Node, cluster: u64) -> Result<Vec<u8>> {
    let (result, buf) = rt::block_on(node.read(cluster * CLUSTER_BYTES, IoBuf::zeroed(CLUSTER_BYTES as usize)));
    result.map(|()| buf.to_vec())
}

fn refused(result: Result<Arc<Node>>) -> String {
    match result {
        Ok(node) => panic!("{node:?} was opened"),
        Err(error) => error.to_string(),
    }
}

/// Whichever write or flush fails: the error is reported, flushed data stays, and the image is sound.
#[test]
fn the_nth_write_or_flush_fails() {
    for (iotype, errno, kind) in
        [("write", 5, ErrorKind::Io), ("write", 28, ErrorKind::NoSpace), ("flush", 5, ErrorKind::Io)]
    {
        let mut told = 0;
        for skip in 0..12 {
            let bench = Bench::new();
            let node = bench.open(&format!(
                "file.inject-error.0.iotype={iotype},file.inject-error.0.skip={skip},file.inject-error.0.errno={errno},\
                 file.inject-error.0.once=on"
            ));
            let mut flushed = Vec::new();
            let mut errors: Vec<Error> = Vec::new();
            for cluster in 0..4u64 {
                let result = write(&node, cluster * 9, 7).and_then(|()| rt::block_on(node.flush()));
                match result {
                    Ok(()) => flushed.push(cluster * 9),
                    Err(error) => errors.push(error),
                }
            }
            errors.extend(rt::block_on(node.close()).err());
            let hits = node.faults().unwrap().hits();
            drop(node);
            if hits > 0 {
                assert!(!errors.is_empty(), "{iotype} {skip}: a fault, and nobody was told");
                assert_eq!(errors[0].kind(), kind, "{}", errors[0]);
                assert_eq!(errors[0].errno(), Errno(errno));
                assert!(errors[0].to_string().contains(&bench.image), "{}", errors[0]);
                told += 1;
            }
            bench.expect_sound();
            let node = rt::block_on(open(OpenRequest::file(&bench.image).format("qcow2"))).unwrap();
            for cluster in flushed {
                assert!(
                    read(&node, cluster).unwrap().iter().all(|byte| *byte == 7),
                    "{iotype} {skip}: {cluster} is lost"
                );
            }
            rt::block_on(node.close()).unwrap();
        }
        assert!(told >= 4, "{iotype}: only {told} faults met an operation");
    }
}

#[test]
fn rules_are_armed_and_disarmed_at_run_time() {
    let bench = Bench::new();
    let node = bench.open("");
    write(&node, 0, 1).unwrap();
    rt::block_on(node.flush()).unwrap();
    let faults = node.faults().unwrap();
    let reads = FaultRule { io_type: Some(IoType::Read), ..FaultRule::new(FaultAction::Fail(Errno::EIO)) };
    let id = faults.arm(reads.clone());
    assert_eq!(read(&node, 0).unwrap_err().errno(), Errno::EIO);
    assert!(faults.disarm(id));
    assert_eq!(read(&node, 0).unwrap(), [1; CLUSTER_BYTES as usize]);

    faults.arm(FaultRule { delay: Duration::from_millis(50), times: 1, action: FaultAction::Pass, ..reads.clone() });
    let started = Instant::now();
    assert_eq!(read(&node, 0).unwrap(), [1; CLUSTER_BYTES as usize]);
    assert!(started.elapsed() >= Duration::from_millis(50));

    faults.arm(FaultRule { action: FaultAction::Short { bytes: Some(512) }, times: 3, ..reads.clone() });
    assert_eq!(read(&node, 0).unwrap(), [1; CLUSTER_BYTES as usize], "short reads are continued");

    faults.arm(FaultRule { action: FaultAction::Corrupt, times: 1, ..reads });
    let wrong = read(&node, 0).unwrap();
    for sector in wrong.chunks(512) {
        assert_eq!(sector.iter().filter(|byte| **byte != 1).count(), 1, "one byte a sector");
    }
    faults.disarm_all();
    assert_eq!(read(&node, 0).unwrap(), [1; CLUSTER_BYTES as usize]);
    rt::block_on(node.close()).unwrap();
    bench.expect_sound();
}

#[test]
fn torn_and_lost_writes() {
    let bench = Bench::new();
    let node = bench.open("");
    write(&node, 0, 1).unwrap();
    rt::block_on(node.flush()).unwrap();
    let faults = node.faults().unwrap();
    let writes = |action| FaultRule { io_type: Some(IoType::Write), times: 1, ..FaultRule::new(action) };
    faults.arm(writes(FaultAction::Torn { errno: Errno::EIO, bytes: Some(1500) }));
    assert_eq!(write(&node, 0, 2).unwrap_err().errno(), Errno::EIO);
    let torn = read(&node, 0).unwrap();
    assert!(torn[..1024].iter().all(|byte| *byte == 2) && torn[1024..].iter().all(|byte| *byte == 1));
    faults.arm(writes(FaultAction::Lose));
    write(&node, 0, 3).unwrap();
    assert_eq!(read(&node, 0).unwrap(), torn, "the write is lost");
    rt::block_on(node.close()).unwrap();
    bench.expect_sound();
}

/// A device may ask for large blocks and take little at once; the image works all the same.
#[test]
fn alignment_and_transfer_limits() {
    let bench = Bench::new();
    let node = bench.open("file.align=4k,file.max-transfer=8k");
    for cluster in 0..3 {
        write(&node, cluster, cluster as u8 + 1).unwrap();
    }
    let (result, _) = rt::block_on(node.write(100, IoBuf::copy_from(b"odd")));
    result.unwrap();
    rt::block_on(node.flush()).unwrap();
    assert_eq!(&read(&node, 0).unwrap()[99..104], b"\x01odd\x01");
    assert_eq!(read(&node, 2).unwrap(), [3; CLUSTER_BYTES as usize]);
    rt::block_on(node.close()).unwrap();
    bench.expect_sound();
    for (rules, part) in [
        ("file.align=3", "power of two"),
        ("file.align=4k,file.max-transfer=512", "multiple of the alignment"),
        ("file.config=/nonexistent/rules.conf", "could not read the rules: No such file"),
        ("file.inject-error.0.event=l2_explode", "flush_to_disk"),
        ("file.opt-nothing=4k", "doesn't support the option 'file.opt-nothing'"),
    ] {
        let error = refused(bench.try_open(rules));
        assert!(error.contains(part), "{error}");
    }
}

/// The rule tables of QEMU's manual mean the same here: a state machine that lets one read pass.
#[test]
fn states_choose_the_second_read() {
    let bench = Bench::new();
    let raw = Path::new(&bench.image).with_extension("raw");
    std::fs::write(&raw, vec![1; CLUSTER_BYTES as usize]).unwrap();
    let options = format!(
        "driver=raw,file.driver=blkdebug,file.image.driver=file,file.image.filename={},\
         file.set-state.0.event=read_aio,file.set-state.0.state=1,file.set-state.0.new_state=2,\
         file.inject-error.0.event=read_aio,file.inject-error.0.state=2,file.inject-error.0.once=on",
        raw.display()
    );
    let node = rt::block_on(open(OpenRequest::image_opts(&options).unwrap())).unwrap();
    let results: Vec<bool> = (0..4).map(|_| read(&node, 0).is_ok()).collect();
    assert_eq!(results, [true, false, true, true]);
    rt::block_on(node.close()).unwrap();
}

/// The steps of a request inside of the qcow2 format reach the faults under QEMU's names.
#[test]
fn the_steps_of_the_format_are_events() {
    type Step = fn(&Arc<Node>);
    fn write_new(node: &Arc<Node>) {
        write(node, 5, 5).unwrap();
        rt::block_on(node.flush()).unwrap();
    }
    fn write_part(node: &Arc<Node>) {
        rt::block_on(node.write(1000, IoBuf::copy_from(b"part"))).0.unwrap();
    }
    let table: &[(&str, &str, Step)] = &[
        ("plain", "l2_load", |node| drop(read(node, 0).unwrap())),
        ("plain", "reftable_load", write_new),
        ("plain", "refblock_load", write_new),
        ("plain", "cluster_alloc", write_new),
        ("plain", "refblock_update", write_new),
        ("plain", "l2_update", write_new),
        ("plain", "l1_update", write_new),
        ("plain", "cluster_free", |node| {
            rt::block_on(node.discard(0, CLUSTER_BYTES)).unwrap();
            rt::block_on(node.flush()).unwrap();
        }),
        ("plain", "l1_grow_write_table", |node| {
            rt::block_on(node.resize(1 << 44, cowshed_image::Preallocation::Off)).unwrap();
        }),
        ("plain", "vmstate_load", |node| {
            rt::block_on(node.qcow2().unwrap().read_vm_state(0, IoBuf::zeroed(512))).0.unwrap();
        }),
        ("plain", "vmstate_save", |node| {
            rt::block_on(node.write_vm_state(0, IoBuf::zeroed(512))).0.unwrap();
        }),
        ("plain", "empty_image_prepare", |node| rt::block_on(node.make_empty()).unwrap()),
        ("over", "cow_read", write_part),
        ("over", "cow_write", write_part),
        ("over", "read_backing_aio", |node| drop(read(node, 0).unwrap())),
        ("compressed", "read_compressed", |node| drop(read(node, 0).unwrap())),
    ];
    for (kind, event, step) in table {
        let bench = Bench::new();
        let plain = bench.open("");
        write(&plain, 0, 1).unwrap();
        rt::block_on(plain.close()).unwrap();
        let image = Path::new(&bench.image).with_file_name(format!("{kind}.qcow2")).display().to_string();
        match *kind {
            "over" => {
                drop(tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", &bench.image, "-F", "qcow2", &image]))
            }
            "compressed" => drop(tool("qemu-img", &["convert", "-c", "-O", "qcow2", &bench.image, &image])),
            _ => std::fs::rename(&bench.image, &image).unwrap(),
        }
        let options = format!(
            "driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename={image},\
             file.set-state.0.event={event},file.set-state.0.state=1,file.set-state.0.new_state=7"
        );
        let node = rt::block_on(open(OpenRequest::image_opts(&options).unwrap().writable(true))).unwrap();
        let faults = node.faults().unwrap();
        step(&node);
        rt::block_on(node.close()).unwrap();
        assert_eq!(faults.state(), 7, "{event}");
        Bench { image, ..bench }.expect_sound();
    }
}

/// Rules in a file, as QEMU's manual writes them, in front of those of the options.
#[test]
fn rules_come_from_a_file() {
    let bench = Bench::new();
    let plain = bench.open("");
    write(&plain, 0, 1).unwrap();
    rt::block_on(plain.close()).unwrap();
    let config = Path::new(&bench.image).with_file_name("rules.conf").display().to_string();
    let rules = "# the second read of a table's slice\n[set-state]\nevent = \"l2_load\"\nstate = \"1\"\nnew_state = \"2\"\n\n\
                 [inject-error]\nevent = \"read_aio\"\nstate = \"2\"\nerrno = \"28\"\nonce = \"on\"\n";
    std::fs::write(&config, rules).unwrap();
    let node =
        bench.open(&format!("file.config={config},file.inject-error.0.event=none,file.inject-error.0.iotype=flush,file.inject-error.0.errno=5"));
    assert_eq!(read(&node, 0).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(read(&node, 0).unwrap()[0], 1);
    assert!(rt::block_on(node.flush()).is_err() || rt::block_on(node.close()).is_err(), "the rule of the options");
    for (rules, part) in [
        ("[inject]\n", "line 1: a section is"),
        ("errno = \"5\"\n", "line 1: no section has begun"),
        ("[inject-error]\nerrno = 5\n", "line 2: expected key"),
        ("[inject-error]\nerrno = \"5\"\nerrno = \"6\"\n", "line 3: the key is given twice"),
        ("[inject-error]\nerrno = \"many\"\n", "errno"),
        ("[inject-error]\nevent = \"l2_explode\"\n", "l2_explode"),
        ("[set-state]\nnew_state = \"2\"\n", "event"),
    ] {
        std::fs::write(&config, rules).unwrap();
        let error = refused(bench.try_open(&format!("file.config={config}")));
        assert!(error.contains(part), "{rules}: {error}");
    }
    // An image can't name such a file.
    let over = Path::new(&bench.image).with_file_name("over.qcow2").display().to_string();
    let backing = format!("blkdebug:{config}:{}", bench.image);
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-u", "-b", &backing, "-F", "qcow2", &over, "64M"]);
    let error = refused(rt::block_on(open(OpenRequest::file(&over))));
    assert!(error.contains("policy"), "{error}");
}
