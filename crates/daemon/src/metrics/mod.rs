// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The OpenMetrics endpoint: one page of text, over HTTP.

mod endpoint;

pub(crate) use endpoint::listen;

use crate::nbd::Exported;
use crate::servers::VHOST_USER_BLK;
use crate::state::Daemon;
use cowshed_image::stats::{AttachmentStats, HistogramSnapshot, IoKind, KindStats, LatencyStats};
use cowshed_image::{Budget, Node};
use std::fmt::Write as _;
use std::sync::Arc;

/// A family of values, one a line.
struct Family<'a> {
    page: &'a mut String,
    name: &'static str,
}

impl<'a> Family<'a> {
    fn new(page: &'a mut String, name: &'static str, kind: &str, help: &str) -> Family<'a> {
        let _ = writeln!(page, "# TYPE {name} {kind}\n# HELP {name} {help}");
        Family { page, name }
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let _ = writeln!(self.page, "{}{suffix}{{{}}} {value}", self.name, labels.join(","));
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// A counter of requests: name, help, and its value.
type Counter = (&'static str, &'static str, fn(&KindStats) -> f64);

const COUNTERS: &[Counter] = &[
    ("cowshed_export_operations", "Requests that were carried out.", |kind| kind.operations as f64),
    ("cowshed_export_bytes", "Bytes of these requests.", |kind| kind.bytes as f64),
    ("cowshed_export_failed", "Requests that failed.", |kind| kind.failed as f64),
    ("cowshed_export_invalid", "Requests that were refused as impossible.", |kind| kind.invalid as f64),
    ("cowshed_export_merged", "Requests that were joined with another.", |kind| kind.merged as f64),
    ("cowshed_export_seconds", "Time that the requests took, all together.", |kind| seconds(kind.total_ns)),
];

/// The page.
pub(crate) fn render(daemon: &Daemon) -> String {
    let mut page = String::new();
    let exports = daemon.exports();
    let stats: Vec<_> = exports.iter().map(|export| (export, export.attachment.statistics())).collect();
    let mut connections = Family::new(&mut page, "cowshed_connections", "gauge", "Connected NBD clients.");
    connections.line("", &[], daemon.nbd().map_or(0, |nbd| nbd.connections()));
    for (name, help, value) in COUNTERS {
        let mut family = Family::new(&mut page, name, "counter", help);
        for (export, stats) in &stats {
            for kind in IoKind::ALL {
                let labels = [("export", export.id.as_str()), ("kind", kind.name())];
                family.line("_total", &labels, value(stats.kind(kind)));
            }
        }
    }
    let mut connected = Family::new(&mut page, "cowshed_vhost_user_connections", "gauge", "Connected front ends.");
    connected.line("", &[], daemon.servers.connected(VHOST_USER_BLK));
    let mut family = Family::new(&mut page, "cowshed_export_in_flight", "gauge", "Requests in flight.");
    for (export, stats) in &stats {
        family.line("", &[("export", &export.id)], stats.in_flight);
    }
    let mut family = Family::new(&mut page, "cowshed_export_size_bytes", "gauge", "Size of the disk.");
    for (export, _) in &stats {
        family.line("", &[("export", &export.id)], export.attachment.size());
    }
    let help = "Latencies, where histograms were asked for.";
    let mut family = Family::new(&mut page, "cowshed_export_latency_seconds", "histogram", help);
    for (export, stats) in &stats {
        for kind in IoKind::of_latencies() {
            if let Some(histogram) = &stats.histograms[kind as usize] {
                buckets(&mut family, &export.id, kind, histogram);
            }
        }
    }
    intervals(&mut page, &stats);
    budget(&mut page);
    request_memory(daemon, &mut page);
    nodes(daemon, &mut page);
    page.push_str("# EOF\n");
    page
}

/// A value of an interval.
type Latency = (&'static str, fn(&LatencyStats) -> f64);

const LATENCIES: &[Latency] = &[
    ("min", |latency| seconds(latency.min_ns)),
    ("max", |latency| seconds(latency.max_ns)),
    ("average", |latency| seconds(latency.average_ns)),
];

fn intervals(page: &mut String, stats: &[(&Exported, AttachmentStats)]) {
    let each = |line: &mut dyn FnMut(&str, &str, &str, &LatencyStats)| {
        for (export, stats) in stats {
            for interval in &stats.intervals {
                let length = (interval.length_ns / 1_000_000_000).to_string();
                for kind in IoKind::of_latencies() {
                    line(&export.id, kind.name(), &length, interval.kind(kind));
                }
            }
        }
    };
    let help = "Latencies over the intervals that were asked for.";
    let mut family = Family::new(page, "cowshed_export_interval_latency_seconds", "gauge", help);
    each(&mut |export, kind, length, latency| {
        for (name, value) in LATENCIES {
            let labels = [("export", export), ("kind", kind), ("interval", length), ("value", *name)];
            family.line("", &labels, value(latency));
        }
    });
    let help = "Average number of requests in flight over the intervals.";
    let mut family = Family::new(page, "cowshed_export_interval_queue_depth", "gauge", help);
    each(&mut |export, kind, length, latency| {
        let depth = latency.average_queue_depth_milli as f64 / 1000.0;
        family.line("", &[("export", export), ("kind", kind), ("interval", length)], depth);
    });
}

fn buckets(family: &mut Family<'_>, export: &str, kind: IoKind, histogram: &HistogramSnapshot) {
    let mut count = 0;
    let bounds = histogram.bounds_ns.iter().map(|bound| seconds(*bound).to_string());
    for (bin, bound) in histogram.bins.iter().zip(bounds.chain(std::iter::once("+Inf".to_owned()))) {
        count += bin;
        family.line("_bucket", &[("export", export), ("kind", kind.name()), ("le", &bound)], count);
    }
    family.line("_count", &[("export", export), ("kind", kind.name())], count);
}

/// The memory of all images together, and its limit.
fn budget(page: &mut String) {
    let budget = Budget::process_wide();
    for (name, help, value) in [
        (
            "cowshed_metadata_budget_limit_bytes",
            "Memory that metadata and decompressed clusters of all images may take.",
            budget.limit_bytes(),
        ),
        (
            "cowshed_metadata_budget_used_bytes",
            "Memory that metadata and decompressed clusters of all images take.",
            budget.used_bytes(),
        ),
        ("cowshed_metadata_budget_images", "Images that share it.", budget.members() as u64),
    ] {
        Family::new(page, name, "gauge", help).line("", &[], value);
    }
}

/// The memory of the requests of all NBD clients together, and its limit.
fn request_memory(daemon: &Daemon, page: &mut String) {
    let memory = daemon.nbd().map(|nbd| nbd.memory()).unwrap_or_default();
    for (name, help, value) in [
        ("cowshed_request_memory_limit_bytes", "Memory that the requests of all clients share.", memory.limit_bytes),
        ("cowshed_request_memory_used_bytes", "What of it requests hold.", memory.used_bytes),
        ("cowshed_request_memory_stuck_bytes", "What of that disks have not given back in time.", memory.stuck_bytes),
        ("cowshed_request_memory_waiting", "Requests that wait for it.", memory.waiting as u64),
    ] {
        Family::new(page, name, "gauge", help).line("", &[], value);
    }
    let help = "Clients that were cut off because they kept it from others.";
    Family::new(page, "cowshed_request_memory_cut", "counter", help).line("_total", &[], memory.cut);
}

/// A value of a node: name, kind, help.
type NodeValue = (&'static str, &'static str, &'static str);

const CACHE: &[NodeValue] = &[
    ("cowshed_node_l2_hits", "counter", "Look-ups of the mapping that were answered from memory."),
    ("cowshed_node_l2_misses", "counter", "Look-ups of the mapping that had to read the image."),
    ("cowshed_node_l2_bytes", "gauge", "Memory that the mapping takes."),
    ("cowshed_node_l2_entries", "gauge", "Slices of the mapping in memory."),
    ("cowshed_node_l2_limit_bytes", "gauge", "Memory that the mapping may take (l2-cache-size)."),
    ("cowshed_node_refcount_hits", "counter", "Look-ups of refcount blocks that were answered from memory."),
    ("cowshed_node_refcount_misses", "counter", "Refcount blocks read from the image."),
    ("cowshed_node_refcount_bytes", "gauge", "Memory that refcounts take."),
    ("cowshed_node_refcount_entries", "gauge", "Refcount blocks in memory."),
    ("cowshed_node_refcount_limit_bytes", "gauge", "Memory that refcounts may take (refcount-cache-size)."),
];

const NODE_COUNTERS: &[Counter] = &[
    ("cowshed_node_operations", "Requests of a node that were carried out.", |kind| kind.operations as f64),
    ("cowshed_node_bytes", "Bytes of these requests.", |kind| kind.bytes as f64),
    ("cowshed_node_failed", "Requests of a node that failed.", |kind| kind.failed as f64),
    ("cowshed_node_invalid", "Requests of a node that were refused as impossible.", |kind| kind.invalid as f64),
];

fn node_counters(nodes: &[Arc<Node>], page: &mut String) {
    let stats: Vec<_> = nodes.iter().map(|node| (node.name(), node.statistics())).collect();
    for (name, help, value) in NODE_COUNTERS {
        let mut family = Family::new(page, name, "counter", help);
        for (node, stats) in &stats {
            for kind in IoKind::ALL {
                family.line("_total", &[("node", *node), ("kind", kind.name())], value(stats.kind(kind)));
            }
        }
    }
    let help = "End of the furthest byte written.";
    let mut family = Family::new(page, "cowshed_node_highest_written_bytes", "gauge", help);
    for (node, stats) in &stats {
        family.line("", &[("node", node)], stats.highest_written_byte);
    }
}

fn nodes(daemon: &Daemon, page: &mut String) {
    let nodes: Vec<_> = daemon.graph.snapshot().nodes().collect();
    node_counters(&nodes, page);
    let caches: Vec<_> = nodes
        .iter()
        .filter_map(|node| {
            let stats = node.cache_statistics()?;
            let values = [
                stats.l2_hits,
                stats.l2_misses,
                stats.l2_bytes,
                stats.l2_slices,
                stats.l2_limit_bytes,
                stats.refcount_hits,
                stats.refcount_misses,
                stats.refcount_bytes,
                stats.refcount_blocks,
                stats.refcount_limit_bytes,
            ];
            Some((node.name(), values))
        })
        .collect();
    for (index, (name, kind, help)) in CACHE.iter().enumerate() {
        let mut family = Family::new(page, name, kind, help);
        let suffix = if *kind == "counter" { "_total" } else { "" };
        for (node, values) in &caches {
            family.line(suffix, &[("node", node)], values[index]);
        }
    }
    let throttles: Vec<_> = nodes
        .iter()
        .filter_map(|node| Some((node.name(), node.throttle()?.group().name().to_owned(), node.throttle()?.waits())))
        .collect();
    let help = "Requests that had to wait for their limits.";
    let mut family = Family::new(page, "cowshed_throttle_waits", "counter", help);
    for (node, group, waits) in &throttles {
        family.line("_total", &[("node", node), ("group", group)], waits.count);
    }
    let mut family = Family::new(page, "cowshed_throttle_wait_seconds", "counter", "How long they waited.");
    for (node, group, waits) in &throttles {
        family.line("_total", &[("node", node), ("group", group)], seconds(waits.total_ns));
    }
    let mut family = Family::new(page, "cowshed_throttle_waiting", "gauge", "Requests that wait now.");
    for (node, group, waits) in &throttles {
        family.line("", &[("node", node), ("group", group)], waits.waiting);
    }
}
