// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The crash test finds a planted bug, prints its seed, and reduces it to the fewest requests that show it. The printed
//! line shows the bug again. The bug is a disk that reports flushes and lies: no engine survives that.

use cowshed_simulator::{Effect, Fault, OpKind};
use cowshed_testkit::matrix::{CrashScene, Effort};
use cowshed_testkit::operations::{Op, parse_steps};

fn lies() -> Vec<Fault> {
    vec![Fault::new(Effect::Lie).kind(OpKind::Sync).times(u64::MAX)]
}

#[test]
fn a_failing_case_prints_its_seed_and_shrinks_to_what_matters() {
    let effort = Effort { requests: 30, states: 200, sample_qemu: 0, room_bytes: None };
    for seed in [3, 10, 21] {
        let scene = CrashScene::new(seed);
        let complaint = scene.run(&effort, lies()).expect_err("a disk that lies was not noticed");
        assert!(complaint.contains(&format!("seed {seed} ")), "{complaint}");
        let printed = complaint.lines().find_map(|line| line.strip_prefix("the same with "));
        let (count, text) = printed.and_then(|rest| rest.split_once(" requests: ")).expect("the shrunk requests");
        let steps = parse_steps(text).expect("what is printed can be read");
        assert_eq!(count.parse(), Ok(steps.len()));
        // Lost data need a write, and a flush that promised its safety.
        assert!((1..=4).contains(&steps.len()), "seed {seed}: {text}");
        assert!(steps.iter().any(|step| !matches!(step.op, Op::Flush | Op::Read { .. })), "seed {seed}: {text}");
        scene.run_steps(&effort, lies(), steps.clone()).expect_err("the replay shows nothing");
        scene.run_steps(&effort, Vec::new(), steps).expect("without the lie all is well");
    }
}
