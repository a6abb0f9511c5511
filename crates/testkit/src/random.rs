// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A small seeded generator, so that a seed means the same operations on every machine and in every release.

/// SplitMix64: 64 bits of state, good enough to choose test cases.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next_u64() % end
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of `choices`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// The seeds that a test runs: `COWSHED_SEED=N` for one, `COWSHED_SEEDS=N` for 0 to N-1, `COWSHED_SEEDS=A..B` for a
/// range, else 0 to `default - 1`.
pub fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |text: &str| text.trim().parse::<u64>().unwrap_or_else(|_| panic!("`{text}` is no seed"));
    if let Ok(one) = std::env::var("COWSHED_SEED") {
        let seed = number(&one);
        return seed..seed + 1;
    }
    match std::env::var("COWSHED_SEEDS") {
        Ok(text) => match text.split_once("..") {
            Some((first, end)) => number(first)..number(end),
            None => 0..number(&text),
        },
        Err(_) => 0..default,
    }
}

/// As [`seeds`], but with `COWSHED_FIRST_SEED=N` the default is N to N + `default` - 1. `COWSHED_NEW_SEEDS=1 .ci/run` derives N
/// from the commit. The output names the seeds.
pub fn new_seeds(default: u64) -> std::ops::Range<u64> {
    let chosen = ["COWSHED_SEED", "COWSHED_SEEDS"].iter().any(|name| std::env::var_os(name).is_some());
    let first = std::env::var("COWSHED_FIRST_SEED").ok().filter(|_| !chosen);
    let seeds = match first.map(|text| text.trim().parse::<u64>().unwrap_or_else(|_| panic!("`{text}` is no seed"))) {
        Some(first) => first..first + default,
        None => seeds(default),
    };
    println!("seeds {}; {}", seeds.start, again(&seeds));
    seeds
}

/// The words that say how the same seeds run again.
pub fn again(seeds: &std::ops::Range<u64>) -> String {
    format!("COWSHED_SEEDS={}..{} runs the same cases again", seeds.start, seeds.end)
}

/// Runs `test` with each of [`seeds`], goes on after a failure, and at the end panics with the seeds that failed.
#[track_caller]
pub fn for_each_seed(default: u64, test: impl Fn(u64)) {
    let mut failed = Vec::new();
    for seed in seeds(default) {
        let run = std::panic::AssertUnwindSafe(|| test(seed));
        if std::panic::catch_unwind(run).is_err() {
            eprintln!("seed {seed} failed; run it alone with COWSHED_SEED={seed}");
            failed.push(seed);
            if failed.len() == 10 {
                eprintln!("ten seeds failed: stopping");
                break;
            }
        }
    }
    assert!(failed.is_empty(), "failed with seeds {failed:?}");
}
