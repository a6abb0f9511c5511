// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checked options as the structs that drivers take. Everything here has passed the schema, so a key that is there
//! has the type that the table says.

use super::BlockdevOptions;
use crate::filters::{Agreement, FaultOp, FaultRule, SavingOptions};
use crate::formats::{OverlapChecks, Qcow2RuntimeOptions};
use crate::node::DetectZeroes;
use cowshed_block::{Errno, Error, Result};
use cowshed_qcow2::DirtyBits;
use cowshed_storage::{Engine, Locking};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;

/// Largest part that is saved at once, in bytes.
const MAX_PART_BYTES: u64 = 2 << 30;

impl BlockdevOptions {
    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        self.get(key).and_then(Value::as_bool)
    }

    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        self.get(key).and_then(Value::as_u64)
    }

    /// All texts in it.
    pub(crate) fn texts(&self) -> Vec<String> {
        fn collect(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::String(text) => found.push(text.clone()),
                Value::Array(list) => list.iter().for_each(|one| collect(one, found)),
                Value::Object(map) => map.values().for_each(|one| collect(one, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        self.iter().for_each(|(_, value)| collect(value, &mut found));
        found
    }
}

/// What becomes of zeroes in a node that passes discards on (`discard`) or not. `path` is for messages.
pub(crate) fn detect_zeroes(options: &BlockdevOptions, discard: bool, path: &str) -> Result<DetectZeroes> {
    match options.text("detect-zeroes") {
        Some("on") => Ok(DetectZeroes::On),
        Some("unmap") if !discard => {
            let message = format!("'{path}detect-zeroes=unmap' needs '{path}discard=unmap'");
            Err(Error::invalid_argument(message))
        }
        Some("unmap") => Ok(DetectZeroes::Unmap),
        _ => Ok(DetectZeroes::Off),
    }
}

/// Options of `file` and `host_device`.
#[derive(Debug)]
pub(crate) struct FileOptions {
    pub filename: String,
    pub engine: Engine,
    pub locking: Locking,
}

impl FileOptions {
    pub(crate) fn new(options: &BlockdevOptions) -> FileOptions {
        FileOptions {
            filename: options.text("filename").unwrap_or_default().to_owned(),
            engine: match options.text("aio") {
                Some("threads") => Engine::Threads,
                Some("io_uring") => Engine::IoUring,
                // Linux' older asynchronous interface has nothing that io_uring lacks.
                _ => Engine::Auto,
            },
            locking: match options.text("locking") {
                Some("on") => Locking::On,
                Some("off") => Locking::Off,
                _ => Locking::Auto,
            },
        }
    }
}

/// Refuses `aio=native` of a file that goes through the page cache (not `direct`), in QEMU's words.
pub(crate) fn check_aio(options: &BlockdevOptions, direct: bool) -> Result<()> {
    if options.text("aio") == Some("native") && !direct {
        let message = "aio=native was specified, but it requires cache.direct=on, which was not specified.";
        return Err(Error::invalid_argument(message));
    }
    Ok(())
}

/// Options of `null-co`.
#[derive(Debug)]
pub(crate) struct NullOptions {
    pub size: u64,
    pub latency_ns: u64,
    /// Whether a map shows zeroes. Reads give zeroes in any case.
    pub read_zeroes: bool,
}

impl NullOptions {
    pub(crate) fn new(options: &BlockdevOptions) -> NullOptions {
        NullOptions {
            size: options.number("size").unwrap_or(1 << 30),
            latency_ns: options.number("latency-ns").unwrap_or(0),
            read_zeroes: options.flag("read-zeroes").unwrap_or(true),
        }
    }
}

/// Options of `raw`.
#[derive(Debug)]
pub(crate) struct RawOptions {
    pub offset: u64,
    pub size: Option<u64>,
}

impl RawOptions {
    pub(crate) fn new(options: &BlockdevOptions) -> RawOptions {
        RawOptions { offset: options.number("offset").unwrap_or(0), size: options.number("size") }
    }
}

/// Options of `qcow2`. `discard`: the node passes discards on.
pub(crate) fn qcow2_options(options: &BlockdevOptions, discard: bool) -> Result<Qcow2RuntimeOptions> {
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

/// Options of `copy-before-write`. `path` is for messages, `bits` what is kept of the disk.
pub(crate) fn saving_options(
    options: &BlockdevOptions,
    path: &str,
    bits: Option<Arc<DirtyBits>>,
) -> Result<SavingOptions> {
    let least_part_bytes = options.number("min-cluster-size").unwrap_or(0);
    if least_part_bytes != 0 && (!least_part_bytes.is_power_of_two() || least_part_bytes > MAX_PART_BYTES) {
        let message = format!("option '{path}min-cluster-size' expects a power of two up to 2 GiB");
        return Err(Error::invalid_argument(message).value(least_part_bytes));
    }
    Ok(SavingOptions {
        breaks_writes: options.text("on-cbw-error") != Some("break-snapshot"),
        timeout: options.number("cbw-timeout").filter(|seconds| *seconds > 0).map(Duration::from_secs),
        least_part_bytes,
        bits,
    })
}

/// Refuses what no quorum is, in QEMU's order and words, before the keys are looked at one by one.
pub(crate) fn check_quorum(options: &BlockdevOptions) -> Result<()> {
    match options.get("children").and_then(Value::as_array) {
        Some(children) if !children.is_empty() => Ok(()),
        _ => Err(Error::invalid_argument("Number of provided children must be 1 or more")),
    }
}

/// Options of `quorum`.
pub(crate) fn quorum_agreement(options: &BlockdevOptions) -> Result<Agreement> {
    let refused = |message: &str| Err(Error::invalid_argument(message));
    let children = options.get("children").and_then(Value::as_array).map_or(0, Vec::len);
    let threshold = usize::try_from(options.number("vote-threshold").unwrap_or(0)).unwrap_or(usize::MAX);
    if threshold == 0 {
        return refused("Parameter 'vote-threshold' expects a value >= 1");
    }
    if threshold > children {
        return refused("threshold may not exceed children count");
    }
    let fifo = match options.text("read-pattern") {
        None | Some("quorum") => false,
        Some("fifo") => true,
        Some(_) => return refused("Please set read-pattern as fifo or quorum"),
    };
    // Where only one node is read, nothing is compared.
    let flag = |key: &str| !fifo && options.flag(key).unwrap_or(false);
    let (verify, rewrite) = (flag("blkverify"), flag("rewrite-corrupted"));
    if verify && (children != 2 || threshold != 2) {
        return refused("blkverify=on can only be set if there are exactly two files and vote-threshold is 2");
    }
    if verify && rewrite {
        return refused("rewrite-corrupted=on cannot be used with blkverify=on");
    }
    Ok(Agreement::Votes { threshold, fifo, rewrite, verify })
}

/// The rules of a `fault` filter.
pub(crate) fn fault_rules(options: &BlockdevOptions) -> Vec<FaultRule> {
    let rules = options.get("rules").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    rules.iter().filter_map(fault_rule).collect()
}

fn fault_rule(rule: &Value) -> Option<FaultRule> {
    let number = |key: &str| rule.get(key).and_then(Value::as_u64);
    let range = match (number("offset"), number("len")) {
        (None, None) => None,
        (offset, len) => {
            let start = offset.unwrap_or(0);
            Some(start..len.map_or(u64::MAX, |len| start.saturating_add(len)))
        }
    };
    Some(FaultRule {
        op: FaultOp::parse(rule.get("op")?.as_str()?)?,
        errno: number("errno").and_then(|errno| i32::try_from(errno).ok()).map_or(Errno::EIO, Errno),
        range,
        after: number("after").unwrap_or(0),
        once: rule.get("once").and_then(Value::as_bool).unwrap_or(false),
    })
}
