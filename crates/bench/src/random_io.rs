// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CPU time of a 4 KiB request through the library and on the raw file.

use crate::Settings;
use crate::table::Row;

/// Random reads.
pub fn read(settings: &Settings) -> Result<Vec<Row>, String> {
    let _ = settings;
    Err("waits for image::open".into())
}

/// Random overwrites of allocated clusters.
pub fn overwrite(settings: &Settings) -> Result<Vec<Row>, String> {
    let _ = settings;
    Err("waits for image::open".into())
}
