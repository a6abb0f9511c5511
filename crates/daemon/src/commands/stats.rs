// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics and latency histograms.

use super::names::{self, NamedObject};
use super::nodes::newest_first;
use super::{Arguments, Group, command, failed, nothing};
use crate::nbd::Exported;
use crate::state::Daemon;
use crate::statistics;
use cowshed_image::stats::{Histogram, IoKind};
use cowshed_image::{Budget, Node};
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
object BlockLatencyHistogramInfo: boundaries: [int], bins: [int]
object BlockDeviceTimedStats: interval_length: int, min_rd_latency_ns: int, max_rd_latency_ns: int, avg_rd_latency_ns: int
  , min_wr_latency_ns: int, max_wr_latency_ns: int, avg_wr_latency_ns: int, min_zone_append_latency_ns: int
  , max_zone_append_latency_ns: int, avg_zone_append_latency_ns: int, min_flush_latency_ns: int, max_flush_latency_ns: int
  , avg_flush_latency_ns: int, avg_rd_queue_depth: number, avg_wr_queue_depth: number, avg_zone_append_queue_depth: number
  , x-min_unmap_latency_ns: int, x-max_unmap_latency_ns: int, x-avg_unmap_latency_ns: int, x-avg_unmap_queue_depth: number
  , x-avg_flush_queue_depth: number
object BlockDeviceStats: rd_bytes: int, wr_bytes: int, zone_append_bytes: int, unmap_bytes: int, rd_operations: int
  , wr_operations: int, zone_append_operations: int, flush_operations: int, unmap_operations: int, rd_total_time_ns: int
  , wr_total_time_ns: int, zone_append_total_time_ns: int, flush_total_time_ns: int, unmap_total_time_ns: int
  , wr_highest_offset: int, rd_merged: int, wr_merged: int, zone_append_merged: int, unmap_merged: int, idle_time_ns?: int
  , failed_rd_operations: int, failed_wr_operations: int, failed_zone_append_operations: int, failed_flush_operations: int
  , failed_unmap_operations: int, invalid_rd_operations: int, invalid_wr_operations: int
  , invalid_zone_append_operations: int, invalid_flush_operations: int, invalid_unmap_operations: int
  , account_invalid: bool, account_failed: bool, timed_stats: [BlockDeviceTimedStats]
  , rd_latency_histogram?: BlockLatencyHistogramInfo, wr_latency_histogram?: BlockLatencyHistogramInfo
  , flush_latency_histogram?: BlockLatencyHistogramInfo, x-unmap_latency_histogram?: BlockLatencyHistogramInfo
object BlockStats: device?: str, qdev?: str, node-name?: str, stats: BlockDeviceStats, driver-specific?: any, x-cache?: any
  , x-throttle?: any, parent?: BlockStats, backing?: BlockStats
command query-blockstats: query-nodes?: bool -> [BlockStats]
object BlockInfo: device: str, qdev?: str, type: str, removable: bool, locked: bool, inserted?: BlockDeviceInfo
command query-block: flat?: bool -> [BlockInfo]
command block-latency-histogram-set: id: str, boundaries?: [int], boundaries-read?: [int], boundaries-write?: [int]
  , boundaries-zap?: [int], boundaries-flush?: [int], x-boundaries-unmap?: [int]
object MetadataBudget: limit-bytes: int, used-bytes: int, images: int
command x-query-metadata-budget -> MetadataBudget
command x-metadata-budget-set: limit-bytes: int
command x-block-stats-intervals-set: id: str, intervals: [int]
command block-set-write-threshold: node-name: str, write-threshold: uint64
event BLOCK_WRITE_THRESHOLD: node-name: str, amount-exceeded: int, write-threshold: int
enum QuorumOpType: read write flush
event QUORUM_REPORT_BAD: type: QuorumOpType, error?: str, node-name: str, sector-num: int, sectors-count: int
event QUORUM_FAILURE: reference: str, sector-num: int, sectors-count: int
",
    commands: &[
        command!("query-blockstats", query_blockstats),
        command!("query-block", query_block),
        command!("block-latency-histogram-set", histogram_set),
        command!("x-block-stats-intervals-set", intervals_set),
        command!("x-query-metadata-budget", query_metadata_budget),
        command!("x-metadata-budget-set", set_metadata_budget),
        command!("block-set-write-threshold", set_write_threshold),
    ],
};

fn exports(daemon: &Daemon) -> Vec<Exported> {
    daemon.exports()
}

async fn query_blockstats(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    if arguments.flag("query-nodes", false) {
        let nodes = newest_first(&daemon).into_iter().rev();
        return Ok(nodes.map(|node| statistics::of_node(&node)).collect());
    }
    Ok(exports(&daemon).iter().map(|export| statistics::of_attachment(&export.id, &export.attachment)).collect())
}

/// The exports are our devices.
async fn query_block(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let flat = arguments.flag("flat", false);
    let mut list = Vec::new();
    for export in exports(&daemon) {
        let inserted = super::nodes::describe(&daemon, &export.attachment.node(), flat).await?;
        list.push(
            json!({"device": export.id, "qdev": export.id, "type": "unknown", "removable": false, "locked": false,
                         "inserted": inserted}),
        );
    }
    Ok(Value::Array(list))
}

fn numbers(arguments: &Arguments, key: &str) -> QmpResult<Option<Vec<u64>>> {
    let Some(list) = arguments.get(key).and_then(Value::as_array) else { return Ok(None) };
    let number = |value: &Value| {
        value.as_u64().ok_or_else(|| QmpError::generic(format!("Parameter '{key}' expects numbers of at least 0")))
    };
    list.iter().map(number).collect::<QmpResult<Vec<u64>>>().map(Some)
}

/// The owner of the kept latencies: an export, by its id, else a node, by its name.
enum Observed {
    Export(Exported),
    Node(Arc<Node>),
}

fn observed(daemon: &Daemon, id: &str) -> QmpResult<Observed> {
    match names::device(daemon, id) {
        Ok(NamedObject::Export(export)) => Ok(Observed::Export(export)),
        Ok(NamedObject::Node(node)) => Ok(Observed::Node(node)),
        Err(_) => Err(QmpError::new(ErrorClass::DeviceNotFound, format!("Device '{id}' not found"))),
    }
}

impl Observed {
    fn set_histogram(&self, kind: IoKind, bounds_ns: &[u64]) -> QmpResult<()> {
        let set = match self {
            Observed::Export(export) => export.attachment.set_histogram(kind, bounds_ns),
            Observed::Node(node) => node.set_histogram(kind, bounds_ns),
        };
        set.map_err(failed)
    }

    fn set_intervals(&self, lengths_seconds: &[u64]) -> QmpResult<()> {
        let set = match self {
            Observed::Export(export) => export.attachment.set_intervals(lengths_seconds),
            Observed::Node(node) => node.set_intervals(lengths_seconds),
        };
        set.map_err(failed)
    }
}

/// Boundaries of one kind of requests; writes are those of zeroes too.
const BOUNDARIES: &[(&str, IoKind)] = &[
    ("boundaries-read", IoKind::Read),
    ("boundaries-write", IoKind::Write),
    ("boundaries-flush", IoKind::Flush),
    ("x-boundaries-unmap", IoKind::Discard),
];

async fn histogram_set(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let target = observed(&daemon, arguments.text("id"))?;
    let all = numbers(&arguments, "boundaries")?;
    // Nothing here appends to zones: their boundaries are checked, there is nothing to count.
    let appends = numbers(&arguments, "boundaries-zap")?;
    let mut wanted = Vec::new();
    for (key, kind) in BOUNDARIES {
        if let Some(bounds) = numbers(&arguments, key)?.or_else(|| all.clone()) {
            wanted.push((*kind, bounds));
        }
    }
    // All are looked at before the first is set.
    let given = wanted.iter().map(|(_, bounds)| bounds).chain(&appends);
    for bounds in given.filter(|bounds| !bounds.is_empty()) {
        Histogram::new(bounds).map_err(failed)?;
    }
    if wanted.is_empty() && appends.is_none() {
        wanted = IoKind::of_latencies().map(|kind| (kind, Vec::new())).collect();
    }
    wanted.into_iter().try_for_each(|(kind, bounds)| target.set_histogram(kind, &bounds))?;
    nothing()
}

async fn intervals_set(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let target = observed(&daemon, arguments.text("id"))?;
    target.set_intervals(&numbers(&arguments, "intervals")?.unwrap_or_default())?;
    nothing()
}

/// The memory that metadata and decompressed clusters of all images take and may take.
async fn query_metadata_budget(_daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    let budget = Budget::process_wide();
    Ok(json!({"limit-bytes": budget.limit_bytes(), "used-bytes": budget.used_bytes(), "images": budget.members()}))
}

async fn set_metadata_budget(_daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let limit_bytes = arguments.number("limit-bytes")?.unwrap_or(0);
    set_budget(limit_bytes).map_err(|error| QmpError::generic(format!("Parameter 'limit-bytes': {error}")))?;
    nothing()
}

/// Least memory for the metadata of all images, in bytes: below, each request would read its metadata anew.
const LEAST_BUDGET_BYTES: u64 = 1 << 20;

/// Lets the metadata of all images of the process take up to `limit_bytes` bytes of memory from now on, at least 1 MiB.
pub(crate) fn set_budget(limit_bytes: u64) -> cowshed_types::Result<()> {
    if limit_bytes < LEAST_BUDGET_BYTES {
        let message = format!("the metadata budget must be at least {LEAST_BUDGET_BYTES} bytes, not {limit_bytes}");
        return Err(cowshed_types::Error::invalid_argument(message));
    }
    Budget::process_wide().set_limit_bytes(limit_bytes);
    Ok(())
}

/// One threshold for each node; it is off again when a write has crossed it.
async fn set_write_threshold(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let name = arguments.text("node-name");
    let node = names::node(&daemon, name).map_err(|_| QmpError::generic(format!("Device '{name}' not found")))?;
    node.set_write_threshold(arguments.number("write-threshold")?.unwrap_or(0));
    nothing()
}
