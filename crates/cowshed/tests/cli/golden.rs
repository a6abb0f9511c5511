// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The tool's output by its own name, kept as text. After a change that is meant:
//! `TRYCMD=overwrite cargo test -p cowshed golden`, and read the difference.

use std::path::Path;

#[test]
fn golden() {
    // Files of an earlier run would be in the way of this one.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/golden/flow.in");
    for entry in std::fs::read_dir(&folder).expect("the folder of the main job") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|ending| ending == "qcow2" || ending == "raw") {
            std::fs::remove_file(path).expect("the file can be removed");
        }
    }
    trycmd::TestCases::new().case("tests/cli/golden/*.trycmd");
}
