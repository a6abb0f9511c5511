// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Failed requests of exports as events: `BLOCK_IO_ERROR` and `BLOCK_IMAGE_CORRUPTED`.

use crate::control::Message;
use crate::events::EventBus;
use crate::inbox::Sender;
use cowshed_block::ErrorKind;
use cowshed_image::Node;
use cowshed_image::graph::{FailedRequest, Graph, nodes_below};
use cowshed_image::stats::IoKind;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Tells the monitors' clients of failed requests from now on.
pub(crate) fn watch(graph: &Graph, events: EventBus, control: Sender<Message>) {
    let told = Mutex::new(HashSet::new());
    graph.on_failed(move |failed| {
        if failed.error.kind() == ErrorKind::InvalidImage {
            tell_corrupted(failed, &events, &told);
        }
        let data = io_error(failed);
        if let Some(delay) = events.emit_limited("BLOCK_IO_ERROR", failed.export, data) {
            // Fails only when the daemon has stopped.
            let _ = control.send(Message::EventsDue(delay));
        }
    });
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

/// Once for each image, and once more when it is marked as corrupt.
fn tell_corrupted(failed: &FailedRequest<'_>, events: &EventBus, told: &Mutex<HashSet<(String, bool)>>) {
    let nodes = nodes_below(failed.node);
    let marked = nodes.iter().find(|node| node.qcow2().is_some_and(|qcow2| qcow2.is_corrupt()));
    let named = |node: &&Arc<Node>| !node.is_filter() && failed.error.file_name() == Some(node.filename().as_str());
    let node = marked.or_else(|| nodes.iter().find(named)).unwrap_or(failed.node);
    let fatal = marked.is_some();
    if !told.lock().unwrap_or_else(PoisonError::into_inner).insert((node.name().to_owned(), fatal)) {
        return;
    }
    let data = json!({"device": failed.export, "node-name": node.name(), "msg": failed.error.to_string(),
                      "fatal": fatal});
    events.emit("BLOCK_IMAGE_CORRUPTED", data);
}
