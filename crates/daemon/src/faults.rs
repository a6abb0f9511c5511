// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults of nodes, as events: `BLOCK_IO_ERROR`, `BLOCK_IMAGE_CORRUPTED`, `BLOCK_WRITE_THRESHOLD`, `QUORUM_REPORT_BAD`
//! and `QUORUM_FAILURE`.

use crate::events::EventBus;
use crate::inbox::Sender;
use crate::jobs::words_of;
use crate::message::Message;
use cowshed_image::graph::{Corruption, FailedRequest, Graph, QuorumReport, QuorumWork};
use cowshed_image::stats::IoKind;
use cowshed_types::ErrorKind;
use serde_json::{Value, json};
use std::sync::Arc;

/// Tells the monitors' clients of failed requests, corrupt images and crossed thresholds from now on.
pub(crate) fn watch(graph: &Arc<Graph>, events: EventBus, control: Sender<Message>) {
    let (bus, weak) = (events.clone(), Arc::downgrade(graph));
    graph.observe_corruptions(Arc::new(move |corruption| {
        if let Some(graph) = weak.upgrade() {
            bus.emit("BLOCK_IMAGE_CORRUPTED", corrupted(&graph, corruption));
        }
    }));
    let bus = events.clone();
    graph.observe_thresholds(Arc::new(move |crossed| {
        let data = json!({"node-name": crossed.node_name, "amount-exceeded": crossed.exceeded_bytes,
                          "write-threshold": crossed.threshold_bytes});
        bus.emit("BLOCK_WRITE_THRESHOLD", data);
    }));
    let (bus, later) = (events.clone(), control.clone());
    graph.observe_quorums(Arc::new(move |report, offset, len| {
        let (name, about, data) = quorum(report, offset, len);
        if let Some(delay) = bus.emit_limited(name, about, data) {
            // Fails only when the daemon has stopped.
            let _ = later.send(Message::EventsDue(delay));
        }
    }));
    graph.on_failed(move |failed| {
        let data = io_error(failed);
        if let Some(delay) = events.emit_limited("BLOCK_IO_ERROR", failed.export, data) {
            // Fails only when the daemon has stopped.
            let _ = control.send(Message::EventsDue(delay));
        }
    });
}

/// The name of the event, the node that it is about, and its data.
fn quorum(report: &QuorumReport, offset: u64, len: u64) -> (&'static str, &str, Value) {
    const SECTOR_BYTES: u64 = 512;
    let first = offset / SECTOR_BYTES;
    let count = offset.saturating_add(len).div_ceil(SECTOR_BYTES) - first;
    match report {
        QuorumReport::Bad { node_name, work, error } => {
            let work = match work {
                QuorumWork::Read => "read",
                QuorumWork::Write => "write",
                QuorumWork::Flush => "flush",
            };
            let mut data = json!({"type": work, "node-name": node_name, "sector-num": first, "sectors-count": count});
            if let Some(error) = error {
                data["error"] = json!(words_of(*error));
            }
            ("QUORUM_REPORT_BAD", node_name, data)
        }
        QuorumReport::Failure { node_name } => {
            let data = json!({"reference": node_name, "sector-num": first, "sectors-count": count});
            ("QUORUM_FAILURE", node_name, data)
        }
    }
}

fn io_error(failed: &FailedRequest<'_>) -> Value {
    let operation = if failed.kind == IoKind::Read { "read" } else { "write" };
    let mut data = json!({"qom-path": "", "device": failed.export, "node-name": failed.node.name(),
                          "operation": operation, "action": "report", "reason": failed.error.to_string()});
    if failed.error.kind() == ErrorKind::NoSpace {
        data["nospace"] = json!(true);
    }
    data
}

/// The export is the first one that the image is below; a job may have found it where there is none.
fn corrupted(graph: &Graph, corruption: &Corruption) -> Value {
    let export = graph.exports_over(&corruption.node_name).into_iter().next().unwrap_or_default();
    let mut data = json!({"device": export, "node-name": corruption.node_name, "msg": corruption.words(),
                          "fatal": corruption.fatal});
    if let Some(offset) = corruption.offset {
        data["offset"] = json!(offset);
    }
    if let Some(size) = corruption.size_bytes {
        data["size"] = json!(size);
    }
    data
}
