// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Former findings of the crash test: the smallest requests that showed each, kept so that it stays away.

use cowshed_simulator::{Config, Effect, Fault, OpKind};
use cowshed_testkit::crash::CrashPlan;
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::operations::parse_steps;
use cowshed_testkit::scenario::{Prepared, Trial};
use cowshed_types::Errno;
use std::time::Duration;

fn layer(cluster_size: u64, refcount_bits: u64, size: u64, ops: Vec<Op>) -> Layer {
    let spec = Qcow2Spec { cluster_size, refcount_bits, ..Qcow2Spec::default() };
    Layer { format: Format::Qcow2(spec), size, sessions: vec![ops] }
}

fn survives(layers: Vec<Layer>, config: &Config, faults: &[Fault], requests: &str) {
    let prepared = Prepared::new(&Chain { layers });
    for seed in 0..6 {
        let trial = Trial {
            config: Config { seed, ..config.clone() },
            faults: faults.to_vec(),
            steps: parse_steps(requests).expect("the requests are well written"),
            options: "",
            queues: 1,
            plan: CrashPlan { max_distinct: 300, ..CrashPlan::new(seed) },
            sample_qemu: 0,
            amend: "",
            shared: None,
        };
        let report = prepared.crash(&trial).unwrap_or_else(|complaint| panic!("seed {seed}: {complaint}"));
        assert!(report.distinct() > 2, "{report}");
    }
}

/// The padding of compressed data to the disk's block went over the clusters behind it, an L2 table among them.
#[test]
fn compressed_data_is_not_padded_past_its_cluster() {
    let written = Op::Write { offset: 0x10000, len: 0x400, texture: Texture::Random(1) };
    let config = Config { direct: true, sector_bytes: 4096, ..Config::new(0) };
    let requests = "3 compressed 0x3400 0x200 4294967297; 1 discard 0x10000 0x200; 3 flush; \
                    3 compressed 0xfe00 0x200 4294967314; 3 read 0x3400 0x200; 3 flush; 3 compressed 0xfa00 0x200 4294967315";
    survives(vec![layer(512, 64, 128 << 10, vec![written])], &config, &[], requests);
}

/// Clusters that a shrink cut off lost their zero flags before the disk had lost them, and showed the backing file.
#[test]
fn a_shrink_never_shows_the_backing_file() {
    let base = layer(512, 16, 64 << 10, vec![Op::Write { offset: 0, len: 64 << 10, texture: Texture::Random(2) }]);
    let zeroes = Op::WriteZeroes { offset: 0x8000, len: 0x8000, unmap: true };
    let top = || layer(1024, 16, 64 << 10, vec![zeroes]);
    survives(vec![base.clone(), top()], &Config::new(0), &[], "0 resize 0x4400");
    let again =
        "0 resize 0x4400; 1 flush; 0 resize 0x10000; 0 resize 0x6a00; 0 flush; 0 resize 0xf000; 0 read 0x0 0xf000";
    survives(vec![base, top()], &Config::new(0), &[], again);
}

/// After a cycle had failed between its pointers, tables that a pointer might name already were written again as new
/// ones. The counts that they needed were written beside.
#[test]
fn after_a_failed_pointer_write_new_tables_count_as_linked() {
    let requests = "1 write 0x200 0x400 4; 2 write 0x1ba00 0x400 5; 0 write 0x17000 0x600 7; 1 write 0x1800 0x200 8; \
                    2 write 0x2c00 0x200 9; 1 write 0x16c00 0x400 14; 1 flush; 1 write 0x1200 0x200 25; \
                    3 write 0x16e00 0x200 27; 3 flush; \
                    0 write 0x1a00 0x400 28; 1 write 0x9000 0x200 29; 2 flush; 2 write 0x2e00 0x200 30; 0 flush";
    for skip in 5..24 {
        let fault = Fault::new(Effect::Torn(Errno::EIO)).kind(OpKind::Write).skip(skip);
        survives(vec![layer(512, 1, 128 << 10, Vec::new())], &Config::new(0), &[fault], requests);
    }
}

/// With lazy refcounts a flush looked whether anything was dirty. Another queue's changes before its cycle began went
/// out without the dirty bit.
#[test]
fn what_another_queue_changes_goes_out_with_the_dirty_bit() {
    let spec = Qcow2Spec { cluster_size: 4096, lazy_refcounts: true, ..Qcow2Spec::default() };
    let image = Layer { format: Format::Qcow2(spec), size: 1 << 20, sessions: vec![Vec::new()] };
    // The first flush has nothing to write and a slow barrier. The second one waits for it, and the write comes meanwhile.
    let slow_barrier = Fault::new(Effect::Delay(Duration::from_secs(1))).kind(OpKind::Sync);
    let requests = "0 flush; 1 flush; 2 write 0x0 0x1000 6; 3 flush; 3 write 0x8000 0x1000 7; 3 flush";
    survives(vec![image], &Config::new(0), &[slow_barrier], requests);
}

/// The cause, in one sentence.
#[test]
fn a_discard_beside_a_write_keeps_both() {
    let requests = "0 write 0x0 0x10000 1; 0 flush; 0 discard 0x0 0x8000; 1 write 0x8000 0x200 2; 1 flush";
    survives(vec![layer(4096, 16, 1 << 20, Vec::new())], &Config::new(0), &[], requests);
}
