// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while guests run and overlays are put on top of their image: live snapshots. `COWSHED_SEED=N` runs one
//! case, `COWSHED_SEEDS=A..B` a range.

use cowshed_create::{CreateRequest, prepare_sized};
use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_simulator::{Config, Effect, Fault, OpKind};
use cowshed_storage::IoBuf;
use cowshed_testkit::audit::{host_offset, l2_entry};
use cowshed_testkit::crash::{CrashPlan, CrashReport};
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::live::LiveScene;
use cowshed_testkit::matrix::Effort;
use cowshed_testkit::random::seeds;
use cowshed_testkit::scenario::{Prepared, Trial};
use cowshed_types::Errno;
use futures_util::future::join;
use std::time::Duration;

fn run_all(
    default: u64,
    scene: impl Fn(u64) -> LiveScene,
    effort: &Effort,
    faults: impl Fn(u64) -> Vec<Fault>,
) -> (CrashReport, usize) {
    let (mut total, mut snapshots) = (CrashReport::default(), 0);
    for seed in seeds(default) {
        let (report, taken) = scene(seed).run(effort, &faults(seed)).unwrap_or_else(|complaint| panic!("{complaint}"));
        total.add(&report);
        snapshots += taken;
    }
    println!("{snapshots} live snapshots: {total}");
    (total, snapshots)
}

#[test]
fn no_power_cut_around_a_live_snapshot_harms_an_image() {
    let effort = Effort { requests: 30, states: 150, sample_qemu: 75, room_bytes: None };
    let (total, snapshots) = run_all(12, LiveScene::new, &effort, |_| Vec::new());
    assert!(snapshots >= 3 && total.distinct() > 20, "{snapshots} snapshots, {total}");
}

fn fault(seed: u64) -> Vec<Fault> {
    let (kind, effect) = match seed % 3 {
        0 => (OpKind::Sync, Effect::Fail(Errno::EIO)),
        1 => (OpKind::Write, Effect::Torn(Errno::EIO)),
        _ => (OpKind::Write, Effect::Fail(Errno::ENOSPC)),
    };
    vec![Fault::new(effect).kind(kind).skip(seed * 5 % 60)]
}

#[test]
fn no_failed_live_snapshot_harms_an_image() {
    let effort = Effort { requests: 30, states: 60, sample_qemu: 60, room_bytes: None };
    run_all(12, LiveScene::new, &effort, fault);
}

#[test]
fn power_cut_around_a_live_internal_snapshot_harms_nothing() {
    let effort = Effort { requests: 30, states: 150, sample_qemu: 75, room_bytes: None };
    let (total, snapshots) = run_all(10, LiveScene::internal, &effort, |_| Vec::new());
    assert!(snapshots >= 10 && total.distinct() > 20, "{snapshots} snapshots, {total}");
}

#[test]
fn no_failed_internal_snapshot_under_clients_harms_an_image() {
    let effort = Effort { requests: 30, states: 60, sample_qemu: 60, room_bytes: None };
    run_all(10, LiveScene::internal, &effort, fault);
}

#[test]
fn a_live_snapshot_waits_for_a_write_that_is_under_way() {
    let written = Op::Write { offset: 0, len: 64 << 10, texture: Texture::Random(1) };
    let spec = Qcow2Spec { cluster_size: 4096, ..Qcow2Spec::default() };
    let layer = Layer { format: Format::Qcow2(spec), size: 64 << 10, sessions: vec![vec![written]] };
    let prepared = Prepared::new(&Chain { layers: vec![layer] });
    let place = host_offset(l2_entry(&prepared.files[&prepared.top], 3));
    let slow = Fault::new(Effect::Delay(Duration::from_secs(1))).kind(OpKind::Write).range(place..place + 512);
    let trial = Trial {
        config: Config::new(1),
        faults: vec![slow],
        options: "",
        steps: Vec::new(),
        queues: 1,
        plan: CrashPlan::new(1),
        sample_qemu: 0,
        amend: "",
        shared: None,
    };
    let world = prepared.world(&trial);
    let top = prepared.top.clone();
    let seen = world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let options = |name: &str, file: &str, more: &str| {
            BlockdevOptions::from_keyval(&format!("driver=qcow2,node-name={name},file.filename={file}{more}"))
        };
        let node = graph.add(options("n0", &top, "")?).await?;
        let guest = graph.attach(&node, AttachRequest::export("guest", true)).await?;
        let snapshot = async {
            let request = CreateRequest {
                filename: "overlay".to_owned(),
                format: "qcow2".to_owned(),
                backing_file: Some(top.clone()),
                backing_format: Some("qcow2".to_owned()),
                backing_unchecked: true,
                ..CreateRequest::default()
            };
            prepare_sized(&request, node.size()).await?.run().await?;
            let overlay = graph.add(options("n1", "overlay", ",backing=")?).await?;
            graph.take_snapshot(&node, &overlay).await?;
            // Copies the cluster's other sectors, that of the slow write among them.
            guest.queue().write(0x3200, IoBuf::copy_from(&[0xbb; 512])).await.0
        };
        let slow = guest.queue();
        let ((first, _), second) = join(slow.write(0x3000, IoBuf::copy_from(&[0xaa; 512])), snapshot).await;
        first.and(second)?;
        let (result, seen) = guest.queue().read(0x3000, IoBuf::zeroed(1024)).await;
        result?;
        guest.detach().await?;
        graph.close_all().await?;
        Ok(seen.to_vec())
    });
    let seen = seen.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert_eq!(world.fault_hits(), 1, "no write was slow");
    assert!(seen[..512] == [0xaa; 512], "a write that was acknowledged is lost below the overlay");
    assert!(seen[512..] == [0xbb; 512]);
}
