// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The version that the daemon reports.

use serde_json::{Value, json};

/// The release of QEMU whose commands and arguments we follow.
const LEVEL: (u32, u32, u32) = (11, 1, 0);

/// The result of `query-version`, which is in the greeting too.
pub fn version() -> Value {
    let (major, minor, micro) = LEVEL;
    let package = concat!("Cowshed ", env!("CARGO_PKG_VERSION"));
    json!({"qemu": {"major": major, "minor": minor, "micro": micro}, "package": package})
}
