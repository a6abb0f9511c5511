// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors at single steps of the qcow2 format: the request fails, and acknowledged data stay. QEMU raises the same
//! events in the same operations.

use cowshed_image::{Node, OpenRequest, Preallocation, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::{finish, run_to_code};
use cowshed_types::{Errno, Result};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// The bytes flushed before the fault: this many bytes of `KEPT_FILL` from the start.
const KEPT_BYTES: u64 = 64 << 10;
const KEPT_FILL: u8 = 7;
/// ENOSPC: no error of another cause is taken for the one injected.
const ERRNO: i32 = 28;

/// One event and the operation that raises it.
struct Step {
    event: &'static str,
    options: &'static str,
    size: &'static str,
    ours: fn(&Arc<Node>) -> Result<()>,
    /// The same for qemu-io; empty: its name for that is another one.
    theirs: &'static str,
}

fn bytes(len: u64, fill: u8) -> IoBuf {
    IoBuf::copy_from(&vec![fill; len as usize])
}

fn write_and_flush(node: &Arc<Node>, at: u64, len: u64) -> Result<()> {
    rt::block_on(node.write(at, bytes(len, 9))).0?;
    rt::block_on(node.flush())
}

/// Clusters of 512 bytes and counts of 64 bits: a block counts 32 KiB, and a table of one cluster 2 MiB.
const TINY: &str = "cluster_size=512,refcount_bits=64";

fn grow_refcounts(node: &Arc<Node>) -> Result<()> {
    write_and_flush(node, 1 << 20, 4 << 20)
}

const GROW_REFCOUNTS: &str = "write -P 9 1M 4M";

fn grow_l1(node: &Arc<Node>) -> Result<()> {
    rt::block_on(node.resize(64 << 20, Preallocation::Off))
}

const STEPS: &[Step] = &[
    Step {
        event: "write_compressed",
        options: "cluster_size=64k",
        size: "16M",
        ours: |node| rt::block_on(node.write_compressed(vec![(1 << 20, bytes(64 << 10, 9))])),
        theirs: "write -c -P 9 1M 64k",
    },
    Step {
        event: "reftable_update",
        options: TINY,
        size: "16M",
        ours: |node| write_and_flush(node, 1 << 20, 256 << 10),
        // There a new block's entry is the event that follows.
        theirs: "",
    },
    Step {
        event: "refblock_alloc_hookup",
        options: TINY,
        size: "16M",
        ours: |node| write_and_flush(node, 1 << 20, 256 << 10),
        theirs: "write -P 9 1M 256k",
    },
    Step { event: "reftable_grow", options: TINY, size: "16M", ours: grow_refcounts, theirs: GROW_REFCOUNTS },
    Step {
        event: "refblock_alloc_write_table",
        options: TINY,
        size: "16M",
        ours: grow_refcounts,
        theirs: GROW_REFCOUNTS,
    },
    Step {
        event: "refblock_alloc_switch_table",
        options: TINY,
        size: "16M",
        ours: grow_refcounts,
        theirs: GROW_REFCOUNTS,
    },
    Step { event: "l1_grow_alloc_table", options: TINY, size: "1M", ours: grow_l1, theirs: "truncate 64M" },
    Step { event: "l1_grow_write_table", options: TINY, size: "1M", ours: grow_l1, theirs: "truncate 64M" },
    Step { event: "l1_grow_activate_table", options: TINY, size: "1M", ours: grow_l1, theirs: "truncate 64M" },
];

fn create(image: &str, step: &Step) {
    run_to_code("qemu-img", &["create", "-q", "-f", "qcow2", "-o", step.options, image, step.size], &[0]);
    let kept = format!("write -P {KEPT_FILL} 0 {KEPT_BYTES}");
    run_to_code("qemu-io", &["-f", "qcow2", "-c", &kept, image], &[0]);
}

/// Leaks are no errors.
fn expect_no_errors(image: &str, step: &Step) {
    let said = finish(Command::new("qemu-img").args(["check", image]));
    assert!(matches!(said.code, Some(0 | 3)), "{}: {said:?}", step.event);
}

/// The image has no error, and holds the flushed data.
fn expect_sound(image: &str, step: &Step) {
    expect_no_errors(image, step);
    let kept = format!("read -P {KEPT_FILL} 0 {KEPT_BYTES}");
    let text = run_to_code("qemu-io", &["-r", "-f", "qcow2", "-c", &kept, image], &[0]);
    assert!(!text.contains("failed"), "{}: {text}", step.event);
}

fn open_with_fault(image: &str, event: &str) -> Arc<Node> {
    let options = format!(
        "driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename={image},\
         file.set-state.0.event={event},file.set-state.0.state=1,file.set-state.0.new_state=2,\
         file.inject-error.0.event={event},file.inject-error.0.errno={ERRNO},file.inject-error.0.once=on"
    );
    rt::block_on(open(OpenRequest::image_opts(&options).unwrap().writable(true))).unwrap()
}

#[test]
fn error_at_any_step_costs_no_flushed_data() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = folder.path().join("a.qcow2").to_str().unwrap().to_owned();
    for step in STEPS {
        create(&image, step);
        let node = open_with_fault(&image, step.event);
        let more = (KEPT_BYTES, 64 << 10);
        rt::block_on(node.write(more.0, bytes(more.1, 3))).0.unwrap();
        // The fault is armed for the step, unless the flush meets it.
        let flushed = rt::block_on(node.flush());
        let outcome = flushed.clone().and_then(|()| (step.ours)(&node));
        let error = outcome.expect_err(step.event);
        assert_eq!(error.errno(), Errno(ERRNO), "{}: {error}", step.event);
        assert!(error.to_string().contains("a.qcow2"), "{}: {error}", step.event);
        assert_eq!(node.faults().unwrap().state(), 2, "{}", step.event);
        let closed = rt::block_on(node.close());
        drop(node);
        expect_sound(&image, step);
        if flushed.is_ok() {
            let range = format!("read -P 3 {} {}", more.0, more.1);
            let text = run_to_code("qemu-io", &["-r", "-f", "qcow2", "-c", &range, &image], &[0]);
            assert!(!text.contains("failed"), "{}: {text}", step.event);
        }
        // It is an image as any other from then on: the same operation succeeds.
        let node = rt::block_on(open(OpenRequest::file(&image).format("qcow2").writable(true)))
            .unwrap_or_else(|error| panic!("{} (closed: {closed:?}): {error}", step.event));
        (step.ours)(&node).unwrap_or_else(|error| panic!("{}: {error}", step.event));
        rt::block_on(node.close()).unwrap();
        expect_sound(&image, step);
    }
}

#[test]
fn qemu_raises_the_same_events_in_the_same_operations() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = folder.path().join("a.qcow2").to_str().unwrap().to_owned();
    let rules = folder.path().join("rules.conf");
    for step in STEPS.iter().filter(|step| !step.theirs.is_empty()) {
        create(&image, step);
        let text = format!("[inject-error]\nevent = \"{}\"\nerrno = \"{ERRNO}\"\nonce = \"on\"\n", step.event);
        std::fs::write(&rules, text).unwrap();
        let name = format!("blkdebug:{}:{image}", rules.display());
        let said = finish(Command::new("qemu-io").args(["-f", "qcow2", "-c", step.theirs, &name]));
        let text = said.out + &said.err;
        assert!(text.contains("No space left on device"), "{}: {text}", step.event);
        assert!(Path::new(&image).exists());
        expect_no_errors(&image, step);
    }
}
