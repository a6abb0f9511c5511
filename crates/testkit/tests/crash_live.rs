// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while guests run and overlays are put on top of their image: live snapshots. `COWSHED_SEED=N` runs one
//! case, `COWSHED_SEEDS=A..B` a range.

use cowshed_block::Errno;
use cowshed_storage::sim::{Effect, Fault, OpKind};
use cowshed_testkit::crash::CrashReport;
use cowshed_testkit::live::LiveScene;
use cowshed_testkit::matrix::Effort;
use cowshed_testkit::random::seeds;

fn run_all(default: u64, effort: &Effort, faults: impl Fn(u64) -> Vec<Fault>) -> (CrashReport, usize) {
    let (mut total, mut snapshots) = (CrashReport::default(), 0);
    for seed in seeds(default) {
        let (report, taken) =
            LiveScene::new(seed).run(effort, &faults(seed)).unwrap_or_else(|complaint| panic!("{complaint}"));
        total.add(&report);
        snapshots += taken;
    }
    println!("{snapshots} live snapshots: {total}");
    (total, snapshots)
}

#[test]
fn no_power_cut_around_a_live_snapshot_harms_an_image() {
    let effort = Effort { requests: 30, states: 150, sample_qemu: 75, room_bytes: None };
    let (total, snapshots) = run_all(12, &effort, |_| Vec::new());
    assert!(snapshots >= 3 && total.distinct() > 20, "{snapshots} snapshots, {total}");
}

#[test]
fn no_failed_live_snapshot_harms_an_image() {
    let effort = Effort { requests: 30, states: 60, sample_qemu: 60, room_bytes: None };
    run_all(12, &effort, |seed| {
        let (kind, effect) = match seed % 3 {
            0 => (OpKind::Sync, Effect::Fail(Errno::EIO)),
            1 => (OpKind::Write, Effect::Torn(Errno::EIO)),
            _ => (OpKind::Write, Effect::Fail(Errno::ENOSPC)),
        };
        vec![Fault::new(effect).kind(kind).skip(seed * 5 % 60)]
    });
}
