// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics as QMP shows them.

use cowshed_image::Node;
use cowshed_image::graph::Attachment;
use cowshed_image::node::ChildRole;
use cowshed_image::stats::{AttachmentStats, HistogramSnapshot, IntervalStats, IoKind, KindStats, NodeStats};
use cowshed_storage::rt;
use serde_json::{Map, Value, json};

/// Kinds of requests under QEMU's names: writes of zeroes are writes there.
const KINDS: &[(&str, &[IoKind])] = &[
    ("rd", &[IoKind::Read]),
    ("wr", &[IoKind::Write, IoKind::WriteZeroes]),
    ("flush", &[IoKind::Flush]),
    ("unmap", &[IoKind::Discard]),
];

/// Kinds whose latencies are kept, with QEMU's names; names of our own begin with `x-`.
const LATENCIES: &[(&str, &str, IoKind)] = &[
    ("", "rd", IoKind::Read),
    ("", "wr", IoKind::Write),
    ("", "flush", IoKind::Flush),
    ("x-", "unmap", IoKind::Discard),
];

/// The counters of one name.
fn sum(kinds: &[IoKind], of: impl Fn(IoKind) -> KindStats) -> KindStats {
    kinds.iter().fold(KindStats::default(), |sum, kind| {
        let more = of(*kind);
        KindStats {
            operations: sum.operations + more.operations,
            bytes: sum.bytes + more.bytes,
            merged: sum.merged + more.merged,
            failed: sum.failed + more.failed,
            invalid: sum.invalid + more.invalid,
            total_ns: sum.total_ns + more.total_ns,
        }
    })
}

fn counters(of: impl Fn(IoKind) -> KindStats) -> Map<String, Value> {
    let mut map = Map::new();
    for (name, kinds) in KINDS {
        let KindStats { operations, bytes, merged, failed, invalid, total_ns } = sum(kinds, &of);
        map.insert(format!("{name}_operations"), operations.into());
        map.insert(format!("{name}_total_time_ns"), total_ns.into());
        map.insert(format!("failed_{name}_operations"), failed.into());
        map.insert(format!("invalid_{name}_operations"), invalid.into());
        if *name != "flush" {
            map.insert(format!("{name}_bytes"), bytes.into());
            map.insert(format!("{name}_merged"), merged.into());
        }
    }
    // Nothing here appends to zones; QEMU's schema has these members in any case.
    for name in ["bytes", "operations", "merged", "total_time_ns"] {
        map.insert(format!("zone_append_{name}"), 0.into());
    }
    map.insert("failed_zone_append_operations".into(), 0.into());
    map.insert("invalid_zone_append_operations".into(), 0.into());
    map
}

/// A `BlockDeviceStats` of an export.
pub(crate) fn of_export(stats: &AttachmentStats) -> Value {
    let mut map = counters(|kind| *stats.kind(kind));
    map.insert("wr_highest_offset".into(), stats.highest_written_byte.into());
    map.insert("account_invalid".into(), stats.accounting.invalid.into());
    map.insert("account_failed".into(), stats.accounting.failed.into());
    add_latencies(&mut map, stats.idle_ns, &stats.intervals, &stats.histograms);
    Value::Object(map)
}

fn add_latencies(
    map: &mut Map<String, Value>,
    idle_ns: Option<u64>,
    intervals: &[IntervalStats],
    histograms: &[Option<HistogramSnapshot>],
) {
    if let Some(idle_ns) = idle_ns {
        map.insert("idle_time_ns".into(), idle_ns.into());
    }
    map.insert("timed_stats".into(), intervals.iter().map(interval).collect());
    for (ours, name, kind) in LATENCIES {
        if let Some(histogram) = &histograms[*kind as usize] {
            let value = json!({"boundaries": histogram.bounds_ns, "bins": histogram.bins});
            map.insert(format!("{ours}{name}_latency_histogram"), value);
        }
    }
}

/// A `BlockDeviceTimedStats`.
fn interval(stats: &IntervalStats) -> Value {
    let mut map = Map::new();
    map.insert("interval_length".into(), (stats.length_ns / 1_000_000_000).into());
    for (ours, name, kind) in LATENCIES {
        let latency = stats.kind(*kind);
        map.insert(format!("{ours}min_{name}_latency_ns"), latency.min_ns.into());
        map.insert(format!("{ours}max_{name}_latency_ns"), latency.max_ns.into());
        map.insert(format!("{ours}avg_{name}_latency_ns"), latency.average_ns.into());
        let depth = latency.average_queue_depth_milli as f64 / 1000.0;
        // QEMU has none of flushes.
        let ours = if *name == "flush" { "x-" } else { ours };
        map.insert(format!("{ours}avg_{name}_queue_depth"), depth.into());
    }
    for name in ["min_zone_append_latency_ns", "max_zone_append_latency_ns", "avg_zone_append_latency_ns"] {
        map.insert(name.into(), 0.into());
    }
    map.insert("avg_zone_append_queue_depth".into(), 0.0.into());
    Value::Object(map)
}

/// A `BlockDeviceStats` of a node.
fn of_node_counters(stats: &NodeStats) -> Value {
    let mut map = counters(|kind| *stats.kind(kind));
    map.insert("wr_highest_offset".into(), stats.highest_written_byte.into());
    // The requests that an export leaves out of its latencies are its own affair. As in QEMU a node says nothing of them.
    map.insert("account_invalid".into(), false.into());
    map.insert("account_failed".into(), false.into());
    let idle_ns = (stats.last_end_ns != 0).then(|| rt::now_ns().saturating_sub(stats.last_end_ns));
    add_latencies(&mut map, idle_ns, &stats.intervals, &stats.histograms);
    Value::Object(map)
}

/// A `BlockStats` of a node, with those of the nodes below it.
pub(crate) fn of_node(node: &Node) -> Value {
    let mut stats = json!({"node-name": node.name(), "stats": of_node_counters(&node.statistics())});
    if let Some(cache) = node.cache_statistics() {
        stats["x-cache"] = json!({
            "l2-hits": cache.l2_hits, "l2-misses": cache.l2_misses, "l2-bytes": cache.l2_bytes,
            "l2-entries": cache.l2_slices, "l2-limit-bytes": cache.l2_limit_bytes,
            "refcount-hits": cache.refcount_hits, "refcount-misses": cache.refcount_misses, "refcount-bytes": cache.refcount_bytes,
            "refcount-entries": cache.refcount_blocks, "refcount-limit-bytes": cache.refcount_limit_bytes,
        });
    }
    if node.is_on_host() {
        let discards = *node.statistics().kind(IoKind::Discard);
        stats["driver-specific"] = json!({
            "driver": node.driver_name(), "discard-nb-ok": discards.operations, "discard-nb-failed": discards.failed,
            "discard-bytes-ok": discards.bytes,
        });
    }
    if let Some(throttle) = node.throttle() {
        let waits = throttle.waits();
        stats["x-throttle"] = json!({"group": throttle.group().name(), "waits": waits.count,
                                     "wait-ns": waits.total_ns, "waiting": waits.waiting});
    }
    // `blkdebug` and `blkverify` stand above an image.
    let stored = [ChildRole::File, ChildRole::Image, ChildRole::Raw];
    if let Some(below) = stored.into_iter().find_map(|role| node.child(role)) {
        stats["parent"] = of_node(&below);
    }
    if let Some(backing) = node.backing() {
        stats["backing"] = of_node(&backing);
    }
    stats
}

/// A `BlockStats` of an export.
pub(crate) fn of_attachment(id: &str, attachment: &Attachment) -> Value {
    let node = attachment.node();
    let mut stats = of_node(&node);
    stats["device"] = json!(id);
    stats["qdev"] = json!(id);
    let counts = attachment.statistics();
    stats["stats"] = of_export(&counts);
    stats["x-in-flight"] = counts.in_flight.into();
    stats
}
