// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that take exports from under their clients, and moments at which the whole disk is compared.

use super::commander::{Commander, node_options};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A disk grows up to this size, in bytes.
const LARGEST_BYTES: u64 = 20 << 20;
/// The time, in seconds, after which an export that can't be made again is lost.
const EXPORT_LIMIT_S: u64 = 90;

/// The NBD server that all disks share.
pub struct Server {
    /// The socket that it listens on.
    pub socket: PathBuf,
    /// Held while it is stopped.
    turn: Mutex<()>,
    /// Stops so far.
    stops: AtomicU64,
}

impl Server {
    /// A server that listens on `socket`.
    pub fn new(socket: PathBuf) -> Server {
        Server { socket, turn: Mutex::default(), stops: AtomicU64::new(0) }
    }

    /// Stops so far.
    pub fn stops(&self) -> u64 {
        self.stops.load(Ordering::SeqCst)
    }
}

impl Commander<'_> {
    /// Removes the disk's own export, and makes it again.
    pub(super) fn export_again(&mut self) -> Result<bool, String> {
        let mode = self.random.pick(&["safe", "hard", "hard"]);
        match self.run("block-export-del", &json!({"id": self.export_id(), "mode": mode}))? {
            Some(true) => self.have_export(),
            Some(false) => Ok(true),
            None => Ok(false),
        }
    }

    /// Stops the server, with the exports of all disks, and starts it again. Each commander makes its own export again.
    pub(super) fn restart_server(&mut self) -> Result<bool, String> {
        let server = self.server;
        // One at a time; the next command of a disk whose turn this isn't is another one.
        let Ok(_turn) = server.turn.try_lock() else { return Ok(true) };
        if self.run("nbd-server-stop", &json!({}))? != Some(true) {
            return Ok(!self.is_over());
        }
        server.stops.fetch_add(1, Ordering::SeqCst);
        // The clients meet a server that is away.
        std::thread::sleep(Duration::from_millis(self.random.below(30)));
        let address = json!({"type": "unix", "data": {"path": server.socket}});
        match self.run("nbd-server-start", &json!({"addr": address, "max-connections": 0}))? {
            Some(true) => self.have_export(),
            Some(false) => Err(format!("the server can't be started again: {}", self.tally.last_refusal())),
            None => Ok(false),
        }
    }

    /// Makes the disk's export where it is missing.
    pub(super) fn have_export(&mut self) -> Result<bool, String> {
        let began = Instant::now();
        while !self.is_over() {
            let id = self.export_id();
            let arguments = json!({
                "type": "nbd", "id": id, "node-name": self.top().node, "name": self.disk.name, "writable": true,
            });
            match self.run("block-export-add", &arguments)? {
                Some(true) => return Ok(true),
                Some(false) if self.tally.last_refusal().contains("already in use") && !self.is_going(&id)? => {
                    return Ok(true);
                }
                Some(false) if self.tally.last_refusal().contains("Cannot find") && !self.add_missing()? => {
                    return Ok(false);
                }
                Some(false) => {}
                None => return Ok(false),
            }
            if began.elapsed() > Duration::from_secs(EXPORT_LIMIT_S) {
                return Err(format!("the export {id} can't be made again: {}", self.tally.last_refusal()));
            }
            // Between two attempts.
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }

    /// Adds the layers again that went with the export: the daemon owns no overlay that a snapshot made.
    fn add_missing(&mut self) -> Result<bool, String> {
        let nodes = match self.monitor.command("query-named-block-nodes", &json!({"flat": true}))? {
            super::monitor::Answer::Done(nodes) => nodes,
            _ => return Ok(false),
        };
        let is_there =
            |name: &str| nodes.as_array().is_some_and(|nodes| nodes.iter().any(|node| node["node-name"] == name));
        let layers = self.chain.clone();
        for (at, layer) in layers.iter().enumerate().filter(|(_, layer)| !is_there(&layer.node)) {
            let below = at.checked_sub(1).and_then(|below| layers.get(below));
            let writable = at + 1 == layers.len();
            if self.run("blockdev-add", &node_options(layer, below, writable))?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// True for an export that is being removed, or gone.
    fn is_going(&mut self, id: &str) -> Result<bool, String> {
        let exports = self.monitor.command("query-block-exports", &json!({}))?;
        let super::monitor::Answer::Done(exports) = exports else { return Ok(true) };
        let export =
            exports.as_array().and_then(|exports| exports.iter().find(|export| export["id"] == json!(id)).cloned());
        Ok(export.is_none_or(|export| export["shutting-down"] == json!(true)))
    }

    /// Compares the whole disk while its clients wait.
    pub(super) fn quiet_point(&mut self) -> Result<bool, String> {
        if self.disk.check_quiet(&self.server.socket)? {
            self.tally.count("(quiet points compared)", true);
        }
        Ok(!self.is_over())
    }

    /// Makes the disk longer, or sets the size that it has.
    pub(super) fn resize(&mut self) -> Result<bool, String> {
        let now = self.disk.size();
        let more = if now < LARGEST_BYTES { self.random.below(4) * (64 << 10) } else { 0 };
        let arguments = json!({"node-name": self.top().node, "size": now + more});
        let done = self.run("block_resize", &arguments)?;
        if done != Some(false) {
            self.disk.grow(now + more);
        }
        Ok(done.is_some())
    }
}
