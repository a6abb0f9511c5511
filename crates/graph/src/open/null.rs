// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The drivers `null-co` and `null-aio`: disks without storage. Reads are zeroes, and writes go nowhere.

use crate::node::{Driver, StorageKind};
use crate::options::{BlockdevOptions, NullOptions};
use crate::protocols::FileDriver;
use cowshed_storage::File;

/// The driver, and the file name that means the same disk.
pub(super) fn driver(options: &BlockdevOptions, driver: &'static str) -> (Box<dyn Driver>, String) {
    let values = NullOptions::new(options);
    let mut named = BlockdevOptions::new().with("driver", driver);
    for key in ["size", "latency-ns", "read-zeroes"] {
        if let Some(value) = options.get(key) {
            named.insert(key, value.clone());
        }
    }
    let plain = options.get("size").is_none();
    let filename = if plain { format!("{driver}://") } else { named.to_json_name() };
    let file = File::null_with(cowshed_storage::NullOptions {
        len: values.size,
        latency: std::time::Duration::from_nanos(values.latency_ns),
    });
    let null_reads_zeroes = Some(values.read_zeroes);
    let driver = FileDriver { name: driver, file, kind: Some(StorageKind::Nothing), null_reads_zeroes, context: None };
    (Box::new(driver), filename)
}
