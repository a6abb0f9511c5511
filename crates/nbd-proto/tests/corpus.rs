// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fuzzer's inputs through the fuzzer's entry points, on a stable compiler.

#[path = "../../../fuzz/src/nbd.rs"]
mod entries;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

#[test]
fn corpus_and_regressions() {
    replay::replay(entries::ENTRIES);
}

#[test]
fn mutations_of_the_corpus() {
    replay::mutate(entries::ENTRIES, 20_000);
}
