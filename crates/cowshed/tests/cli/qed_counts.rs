// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The counts of a check of QED images, damaged at random, beside QEMU's.

use crate::oracle::{Oracle, words};
use cowshed_testkit::random::{Random, for_each_seed};
use std::fs;

const CLUSTER: u64 = 4096;
/// Of two clusters.
const TABLE: u64 = 2 * CLUSTER;
const L1_AT: u64 = CLUSTER;

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).unwrap();
    bytes.get(at..at + 8).map_or(0, |word| u64::from_le_bytes(word.try_into().unwrap()))
}

fn put(bytes: &mut [u8], at: u64, value: u64) {
    let at = usize::try_from(at).unwrap();
    if let Some(word) = bytes.get_mut(at..at + 8) {
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Damages entries of both tables, and cuts the file or makes it longer.
fn damage(good: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = good.to_vec();
    let tables: Vec<u64> =
        (0..TABLE / 8).map(|index| word(good, L1_AT + index * 8)).filter(|table| *table != 0).collect();
    for _ in 0..=random.below(4) {
        let table = tables[random.below(tables.len() as u64) as usize];
        let value = match random.below(7) {
            0 => CLUSTER * random.below(good.len() as u64 / CLUSTER + 3),
            1 => tables[random.below(tables.len() as u64) as usize],
            2 => table + CLUSTER,
            3 => L1_AT,
            4 => random.below(1 << 40),
            5 => CLUSTER * random.below(40) + random.pick(&[0, 0, 1, 8, 512]),
            _ => random.below(3),
        };
        match random.below(6) {
            0..=2 => put(&mut bytes, table + 8 * random.below(30), value),
            3 => put(&mut bytes, L1_AT + 8 * random.pick(&[0, 1, 5, 8, 100, 1000, 1023]), value),
            4 => {
                let least = L1_AT + TABLE + 10;
                let len = least + random.below((bytes.len() as u64).saturating_sub(least).max(1));
                bytes.resize(usize::try_from(len).unwrap().min(bytes.len()), 0);
            }
            _ => bytes.resize(bytes.len() + 1 + random.below(20_000) as usize, 0),
        }
    }
    bytes
}

#[test]
fn a_check_of_qed_counts_as_qemu_does() {
    let oracle = Oracle::new();
    let work = oracle.work();
    oracle.make("create -q -f qed -o cluster_size=4k,table_size=2 good 64M");
    oracle.io(
        &[
            "write -q -P 1 0 64k",
            "write -q -P 2 1M 16k",
            "write -q -z 3M 64k",
            "write -q -P 3 32M 8k",
            "write -q -P 5 40k 4k",
            "write -q 20M 12k",
        ],
        "good",
    );
    let good = fs::read(work.join("good")).unwrap();
    let line = words("check -f qed --output=json image");
    let counts = |out: &str| -> Option<Vec<u64>> {
        let found: serde_json::Value = serde_json::from_str(out).ok()?;
        let names = [
            "corruptions",
            "leaks",
            "allocated-clusters",
            "fragmented-clusters",
            "total-clusters",
            "check-errors",
            "corruptions-fixed",
        ];
        Some(names.iter().map(|name| found[*name].as_u64().unwrap_or(0)).collect())
    };
    for_each_seed(40, |seed| {
        let bytes = damage(&good, &mut Random::new(seed));
        for line in [&line, &words("check -r all -f qed --output=json image")] {
            let [real, ours] = [true, false].map(|is_real| {
                fs::write(work.join("image"), &bytes).unwrap();
                let said = if is_real { oracle.real(&work, line) } else { oracle.ours(&work, line) };
                (said.code, counts(&said.out), fs::read(work.join("image")).unwrap())
            });
            assert_eq!((ours.0, &ours.1), (real.0, &real.1), "seed {seed}: {line:?}");
            assert!(ours.2 == real.2, "seed {seed}: {line:?} leaves other bytes");
        }
    });
}
