// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the tool prints by its own name, kept as text. After a change that is meant: `TRYCMD=overwrite cargo test -p
//! cowshed golden`, and read the difference.

#[test]
fn golden() {
    trycmd::TestCases::new().case("tests/cli/golden/*.trycmd");
}
