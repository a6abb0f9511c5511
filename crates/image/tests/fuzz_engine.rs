// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole images through the fuzzer's entry points, on a stable compiler: `corpus.rs` does the same for the parsers.

#[path = "../../../fuzz/src/engine.rs"]
mod entries;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

#[test]
fn corpus_and_regressions() {
    replay::replay(entries::ENTRIES);
}

#[test]
fn mutations_of_the_corpus() {
    replay::mutate(entries::ENTRIES, 2_000);
}
