// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The run-time options as the driver takes them. They have passed the schema, so a key that is there has its type.

use crate::{OverlapChecks, Qcow2RuntimeOptions};
use cowshed_graph::options::BlockdevOptions;
use cowshed_types::{Error, Result};
use serde_json::{Map, Value};

/// The options. `discard`: the node passes discards on.
pub(super) fn runtime_options(options: &BlockdevOptions, discard: bool) -> Result<Qcow2RuntimeOptions> {
    let defaults = Qcow2RuntimeOptions::default();
    let result = Qcow2RuntimeOptions {
        lazy_refcounts: options.flag("lazy-refcounts"),
        l2_cache_bytes: options.number("l2-cache-size"),
        l2_cache_coverage_bytes: options.number("l2-cache-coverage"),
        l2_cache_entry_bytes: options.number("l2-cache-entry-size"),
        refcount_cache_bytes: options.number("refcount-cache-size"),
        cache_bytes: options.number("cache-size"),
        cache_clean_interval_s: options.number("cache-clean-interval").unwrap_or(defaults.cache_clean_interval_s),
        overlap_check: overlap_checks(options.get("overlap-check")),
        discard_no_unref: options.flag("discard-no-unref").unwrap_or(false),
        pass_discard_request: options.flag("pass-discard-request").unwrap_or(discard),
        pass_discard_snapshot: options.flag("pass-discard-snapshot").unwrap_or(true),
        pass_discard_other: options.flag("pass-discard-other").unwrap_or(false),
    };
    check_caches(&result)?;
    Ok(result)
}

/// The cache sizes depend on one another; refused with QEMU's words where it has the option.
fn check_caches(options: &Qcow2RuntimeOptions) -> Result<()> {
    let refused = |message: &str, value: u64| Err(Error::invalid_argument(message).value(value));
    if options.cache_clean_interval_s > u64::from(u32::MAX) {
        return refused("Cache clean interval too big", options.cache_clean_interval_s);
    }
    if let Some(coverage) = options.l2_cache_coverage_bytes
        && (options.l2_cache_bytes.is_some() || options.cache_bytes.is_some())
    {
        return refused("l2-cache-coverage and l2-cache-size or cache-size may not be set at the same time", coverage);
    }
    let Some(total) = options.cache_bytes else { return Ok(()) };
    match (options.l2_cache_bytes, options.refcount_cache_bytes) {
        (Some(_), Some(_)) => {
            refused("cache-size, l2-cache-size and refcount-cache-size may not be set at the same time", total)
        }
        (Some(l2), None) if l2 > total => refused("l2-cache-size may not exceed cache-size", l2),
        (None, Some(refcount)) if refcount > total => {
            refused("refcount-cache-size may not exceed cache-size", refcount)
        }
        _ => Ok(()),
    }
}

fn overlap_checks(value: Option<&Value>) -> OverlapChecks {
    let template = |name: Option<&str>| match name {
        Some("none") => OverlapChecks::NONE,
        Some("constant") => OverlapChecks::CONSTANT,
        Some("all") => OverlapChecks::ALL,
        _ => OverlapChecks::CACHED,
    };
    let map: &Map<String, Value> = match value {
        Some(Value::Object(map)) => map,
        other => return template(other.and_then(Value::as_str)),
    };
    let mut checks = template(map.get("template").and_then(Value::as_str));
    for (name, flag) in [
        ("main-header", &mut checks.main_header),
        ("active-l1", &mut checks.active_l1),
        ("active-l2", &mut checks.active_l2),
        ("refcount-table", &mut checks.refcount_table),
        ("refcount-block", &mut checks.refcount_block),
        ("snapshot-table", &mut checks.snapshot_table),
        ("inactive-l1", &mut checks.inactive_l1),
        ("inactive-l2", &mut checks.inactive_l2),
        ("bitmap-directory", &mut checks.bitmap_directory),
    ] {
        *flag = map.get(name).and_then(Value::as_bool).unwrap_or(*flag);
    }
    checks
}
