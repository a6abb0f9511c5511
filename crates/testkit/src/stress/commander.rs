// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands that change the layers below a disk, one disk each: snapshots, jobs, bitmaps, limits, other exports.

use super::client::{Client, Dialect, Ended};
use super::exports::Server;
use super::guest::{Disk, lock};
use super::monitor::{Answer, Monitor};
use super::tally::Tally;
use crate::qemu::Qemu;
use crate::random::Random;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A job that takes longer, in seconds, counts as hung.
const JOB_LIMIT_S: u64 = 120;
/// Layers of a chain, at most.
const MOST_LAYERS: usize = 6;

/// A layer of a chain: its node and its file.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Name of the node.
    pub node: String,
    /// The file below it.
    pub file: PathBuf,
    /// Format: `qcow2` or `raw`.
    pub format: String,
}

/// The options of a layer's node for `blockdev-add` and `--blockdev`.
pub fn node_options(layer: &Layer, below: Option<&Layer>, is_top: bool) -> Value {
    let mut options = json!({
        "driver": layer.format, "node-name": layer.node, "read-only": !is_top, "discard": "unmap",
        "file": {"driver": "file", "filename": layer.file, "discard": "unmap"},
    });
    if layer.format == "qcow2" {
        options["backing"] = below.map_or(Value::Null, |below| json!(below.node));
    }
    options
}

/// Commands for one disk.
pub struct Commander<'a> {
    /// The disk.
    pub disk: &'a Disk,
    /// Its chain, the base first.
    pub chain: Vec<Layer>,
    /// Where new files go.
    pub folder: &'a Path,
    /// The NBD server.
    pub server: &'a Server,
    /// A monitor of its own.
    pub monitor: Monitor,
    /// Its choices.
    pub random: Random,
    /// Set when the life ends.
    pub stop: &'a AtomicBool,
    /// The counts of the work.
    pub tally: &'a Tally,
    /// Makes names unique within a run.
    pub prefix: String,
    /// Number of the next name.
    pub next_name: u64,
}

/// The end of a job.
#[derive(Debug, PartialEq, Eq)]
enum JobEnd {
    Success,
    Failure,
    Unknown,
}

impl Commander<'_> {
    /// Runs commands until the life ends.
    ///
    /// # Errors
    /// The behaviour that no correct daemon shows.
    pub fn command_it(mut self) -> Result<(), String> {
        let mut stops = self.server.stops();
        while !self.is_over() {
            if stops != self.server.stops() {
                stops = self.server.stops();
                if !self.have_export()? {
                    return Ok(());
                }
            }
            let alive = match self.random.below(112) {
                0..20 => self.snapshot()?,
                20..32 => self.commit()?,
                32..42 => self.stream()?,
                42..52 => self.mirror()?,
                52..62 => self.backup()?,
                62..72 => self.bitmaps()?,
                72..77 => self.internal_snapshot()?,
                77..84 => self.limits()?,
                84..90 => self.other_export()?,
                90..96 => self.reopen()?,
                96..100 => self.resize()?,
                100..104 => self.export_again()?,
                104..106 => self.restart_server()?,
                _ => self.quiet_point()?,
            };
            if !alive {
                return Ok(());
            }
        }
        Ok(())
    }

    /// True when the life ends.
    pub(super) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Runs a command: its result, `Err(None)` for a refusal, and `Ok(None)` for a monitor that has gone.
    pub(super) fn run(&mut self, name: &str, arguments: &Value) -> Result<Option<bool>, String> {
        Ok(match self.monitor.command(name, arguments)? {
            Answer::Done(_) => {
                self.tally.count(name, true);
                Some(true)
            }
            Answer::Refused(reason) => {
                self.tally.refuse(name, &reason);
                Some(false)
            }
            Answer::Gone => None,
        })
    }

    /// Runs a command; false when the monitor has gone.
    fn go(&mut self, name: &str, arguments: &Value) -> Result<bool, String> {
        Ok(self.run(name, arguments)?.is_some())
    }

    fn new_name(&mut self, kind: &str) -> String {
        self.next_name += 1;
        format!("{}{kind}{}", self.prefix, self.next_name)
    }

    pub(super) fn export_id(&self) -> String {
        format!("e-{}", self.disk.name)
    }

    pub(super) fn top(&self) -> Layer {
        self.chain.last().expect("a chain is never empty").clone()
    }

    fn new_options(&mut self) -> String {
        super::random_options(&mut self.random)
    }

    /// Makes an empty image and a node of it.
    fn add_target(&mut self) -> Result<Option<Layer>, String> {
        let node = self.new_name("t");
        let file = self.folder.join(format!("{node}.qcow2"));
        let options = self.new_options();
        Qemu::system().create(&file, "qcow2", &options, self.disk.size());
        let layer = Layer { node, file, format: "qcow2".to_owned() };
        match self.run("blockdev-add", &node_options(&layer, None, true))? {
            Some(true) => Ok(Some(layer)),
            Some(false) => Err(format!("a fresh image isn't taken: {}", self.tally.last_refusal())),
            None => Ok(None),
        }
    }

    fn snapshot(&mut self) -> Result<bool, String> {
        if self.chain.len() >= MOST_LAYERS {
            return Ok(true);
        }
        let node = self.new_name("s");
        let file = self.folder.join(format!("{node}.qcow2"));
        let top = self.top();
        let layer = Layer { node: node.clone(), file: file.clone(), format: "qcow2".to_owned() };
        let disk = self.disk;
        let mut place = lock(&disk.top);
        let done = match self.random.below(3) {
            0 => {
                let options = self.new_options();
                let backing = format!("backing_file={},backing_fmt={}", top.file.display(), top.format);
                let options = if options.is_empty() { backing } else { format!("{options},{backing}") };
                // `-u`: without it qemu-img opens the backing file, whose header the daemon may be writing meanwhile.
                let size = disk.size().to_string();
                let arguments: [&OsStr; 9] = [
                    "create".as_ref(),
                    "-q".as_ref(),
                    "-u".as_ref(),
                    "-f".as_ref(),
                    "qcow2".as_ref(),
                    "-o".as_ref(),
                    options.as_ref(),
                    file.as_os_str(),
                    size.as_ref(),
                ];
                Qemu::system().img(arguments).expect_ok();
                match self.run("blockdev-add", &node_options(&layer, None, true))? {
                    Some(true) => self.run("blockdev-snapshot", &json!({"node": top.node, "overlay": node}))?,
                    other => other,
                }
            }
            kind => {
                let data = json!({"node-name": top.node, "snapshot-file": file, "snapshot-node-name": node, "format": "qcow2"});
                let bitmap = self.new_name("b");
                let actions = json!({"actions": [
                    {"type": "block-dirty-bitmap-add", "data": {"node": top.node, "name": bitmap, "persistent": true}},
                    {"type": "blockdev-snapshot-sync", "data": data},
                ]});
                if kind == 1 && top.format == "qcow2" {
                    self.run("transaction", &actions)?
                } else {
                    self.run("blockdev-snapshot-sync", &data)?
                }
            }
        };
        match done {
            Some(true) => {
                place.clone_from(&file);
                self.chain.push(layer);
                Ok(true)
            }
            Some(false) => Ok(true),
            None => {
                // Whether the answer was lost or the change never happened, an overlay of the old image shows all.
                if is_overlay_of(&file, &top.file) {
                    place.clone_from(&file);
                }
                Ok(false)
            }
        }
    }

    /// Starts a job and follows it to its end. With `pivots` it is completed once it is ready, and on success the disk is then in
    /// that file.
    fn job(&mut self, command: &str, mut arguments: Value, pivots: Option<&Path>) -> Result<Option<JobEnd>, String> {
        let id = self.new_name("j");
        arguments["job-id"] = json!(id);
        arguments["auto-dismiss"] = json!(false);
        match self.run(command, &arguments)? {
            Some(true) => {}
            Some(false) => return Ok(Some(JobEnd::Failure)),
            None => return Ok(None),
        }
        let cancels = self.random.chance(25);
        let patience = Duration::from_millis(self.random.below(1500));
        let started = Instant::now();
        loop {
            let (status, failed) = match self.monitor.command("query-jobs", &json!({}))? {
                Answer::Done(jobs) => {
                    let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == json!(id)).cloned());
                    let job = job.ok_or_else(|| format!("the job {id} ({command}) has vanished: {jobs}"))?;
                    (job["status"].as_str().unwrap_or_default().to_owned(), job.get("error").is_some())
                }
                Answer::Refused(reason) => return Err(format!("query-jobs: {reason}")),
                Answer::Gone => return Ok(None),
            };
            if status == "concluded" {
                let end = if failed { JobEnd::Failure } else { JobEnd::Success };
                return Ok(self
                    .run("job-dismiss", &json!({"id": id}))?
                    .map(|_| if cancels { JobEnd::Unknown } else { end }));
            }
            if started.elapsed() > Duration::from_secs(JOB_LIMIT_S) {
                return Err(format!("the job {id} ({command}) is still {status} after {JOB_LIMIT_S} s"));
            }
            if cancels && started.elapsed() > patience {
                if !self.go("block-job-cancel", &json!({"device": id, "force": true}))? {
                    return Ok(None);
                }
            } else if status == "ready" && !cancels && started.elapsed() > patience {
                return self.complete(&id, command, pivots);
            }
            // Between two queries.
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Completes a job that is ready, and waits for its end. No other thread may end the life meanwhile.
    fn complete(&mut self, id: &str, command: &str, pivots: Option<&Path>) -> Result<Option<JobEnd>, String> {
        let disk = self.disk;
        let mut place = lock(&disk.top);
        if self.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut is_asked = false;
        let started = Instant::now();
        loop {
            if !is_asked {
                match self.run("job-complete", &json!({"id": id}))? {
                    Some(done) => is_asked = done,
                    None => return Err(format!("the daemon is gone while it completes {id} ({command})")),
                }
            }
            match self.monitor.command("query-jobs", &json!({}))? {
                Answer::Done(jobs) => {
                    let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == json!(id)).cloned());
                    let job = job.ok_or_else(|| format!("the job {id} ({command}) has vanished"))?;
                    if job["status"] == "concluded" {
                        self.run("job-dismiss", &json!({"id": id}))?;
                        if job.get("error").is_some() {
                            return Ok(Some(JobEnd::Failure));
                        }
                        if let Some(file) = pivots {
                            *place = file.to_owned();
                        }
                        return Ok(Some(JobEnd::Success));
                    }
                    if job["status"] == "standby" || job["status"] == "paused" {
                        is_asked = false;
                    }
                }
                other => return Err(format!("query-jobs: {other:?}")),
            }
            if started.elapsed() > Duration::from_secs(JOB_LIMIT_S) {
                return Err(format!("the job {id} ({command}) can't be completed within {JOB_LIMIT_S} s"));
            }
            // Between two queries.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Forgets layers that a job has made superfluous. Their nodes may be gone already.
    fn drop_layers(&mut self, range: std::ops::Range<usize>) -> Result<bool, String> {
        let layers: Vec<Layer> = self.chain.drain(range).collect();
        for layer in layers.iter().rev() {
            if !self.go("blockdev-del", &json!({"node-name": layer.node}))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn commit(&mut self) -> Result<bool, String> {
        let layers = self.chain.len();
        if layers < 2 {
            return Ok(true);
        }
        let base = self.random.below(layers as u64 - 1) as usize;
        let top = base + 1 + self.random.below((layers - base - 1) as u64) as usize;
        let is_active = top + 1 == layers;
        let (export, base_layer) = (self.export_id(), self.chain[base].clone());
        let device = if self.random.chance(50) { self.top().node } else { export };
        let mut arguments = json!({"device": device, "base-node": base_layer.node});
        if !is_active {
            arguments["top-node"] = json!(self.chain[top].node);
        }
        let pivots = is_active.then_some(base_layer.file.as_path());
        match self.job("block-commit", arguments, pivots)? {
            Some(JobEnd::Success) => self.drop_layers(base + 1..top + 1),
            Some(JobEnd::Failure) => Ok(true),
            Some(JobEnd::Unknown) => self.look_again(),
            None => Ok(false),
        }
    }

    fn stream(&mut self) -> Result<bool, String> {
        let layers = self.chain.len();
        if layers < 2 {
            return Ok(true);
        }
        let base = self.random.below(layers as u64) as usize;
        let mut arguments = json!({"device": self.top().node});
        if base + 1 < layers && base > 0 {
            arguments["base-node"] = json!(self.chain[base - 1].node);
        }
        let first_gone = if arguments.get("base-node").is_some() { base } else { 0 };
        match self.job("block-stream", arguments, None)? {
            Some(JobEnd::Success) => self.drop_layers(first_gone..layers - 1),
            Some(JobEnd::Failure) => Ok(true),
            Some(JobEnd::Unknown) => self.look_again(),
            None => Ok(false),
        }
    }

    fn mirror(&mut self) -> Result<bool, String> {
        let Some(target) = self.add_target()? else { return Ok(false) };
        let mode = self.random.pick(&["background", "write-blocking"]);
        let mut arguments =
            json!({"device": self.top().node, "target": target.node, "sync": "full", "copy-mode": mode});
        if self.random.chance(30) {
            arguments["granularity"] = json!(4096u64 << self.random.below(6));
        }
        let file = target.file.clone();
        match self.job("blockdev-mirror", arguments, Some(&file))? {
            Some(JobEnd::Success) => {
                let layers = self.chain.len();
                self.chain.push(target);
                self.drop_layers(0..layers)
            }
            Some(_) => self.go("blockdev-del", &json!({"node-name": target.node})),
            None => Ok(false),
        }
    }

    fn backup(&mut self) -> Result<bool, String> {
        let Some(target) = self.add_target()? else { return Ok(false) };
        let id = self.new_name("k");
        let mut arguments = json!({
            "device": self.top().node, "target": target.node, "sync": "full", "job-id": id, "auto-dismiss": false,
        });
        if self.random.chance(30) {
            arguments["compress"] = json!(true);
        }
        let before = self.disk.instant();
        let done = self.run("blockdev-backup", &arguments)?;
        let position = self.disk.position();
        let mut is_whole = false;
        if done == Some(true) {
            let started = Instant::now();
            loop {
                let Answer::Done(jobs) = self.monitor.command("query-jobs", &json!({}))? else { return Ok(false) };
                let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == json!(id)).cloned());
                let job = job.ok_or_else(|| format!("the backup {id} has vanished"))?;
                if job["status"] == "concluded" {
                    is_whole = job.get("error").is_none();
                    break;
                }
                if started.elapsed() > Duration::from_secs(JOB_LIMIT_S) {
                    return Err(format!("the backup {id} isn't over after {JOB_LIMIT_S} s: {job}"));
                }
                // Between two queries.
                std::thread::sleep(Duration::from_millis(10));
            }
            if !self.go("job-dismiss", &json!({"id": id}))? {
                return Ok(false);
            }
        }
        if self.run("blockdev-del", &json!({"node-name": target.node}))? != Some(true) {
            return Ok(false);
        }
        if is_whole {
            let qemu = Qemu::system();
            qemu.expect_clean(&target.file);
            let content = qemu.content(&target.file, "qcow2");
            self.disk
                .check_copy(before, position, &content)
                .map_err(|wrong| format!("the backup {} of {}: {wrong}", target.file.display(), self.disk.name))?;
            self.tally.count("(backups compared)", true);
        }
        std::fs::remove_file(&target.file).map_err(|error| format!("{}: {error}", target.file.display()))?;
        Ok(true)
    }

    fn bitmaps(&mut self) -> Result<bool, String> {
        let (node, name) = (self.top().node, format!("b{}", self.random.below(4)));
        let arguments = json!({"node": node, "name": name});
        let verb = self.random.pick(&["add", "remove", "clear", "enable", "disable", "merge"]);
        let arguments = match verb {
            "add" => json!({"node": node, "name": name, "persistent": self.random.chance(70), "granularity": 4096}),
            "merge" => json!({"node": node, "target": name, "bitmaps": [format!("b{}", self.random.below(4))]}),
            _ => arguments,
        };
        self.go(&format!("block-dirty-bitmap-{verb}"), &arguments)
    }

    fn internal_snapshot(&mut self) -> Result<bool, String> {
        let arguments = json!({"device": self.export_id(), "name": format!("i{}", self.random.below(3))});
        let verb = self.random.pick(&["blockdev-snapshot-internal-sync", "blockdev-snapshot-delete-internal-sync"]);
        self.go(verb, &arguments)
    }

    fn limits(&mut self) -> Result<bool, String> {
        let iops = self.random.pick(&[0, 0, 200, 2000, 50_000]);
        let arguments = json!({
            "id": self.export_id(), "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": iops, "iops_rd": 0, "iops_wr": 0,
        });
        self.go("block_set_io_throttle", &arguments)
    }

    fn other_export(&mut self) -> Result<bool, String> {
        let id = self.new_name("x");
        let arguments = json!({"type": "nbd", "id": id, "node-name": self.top().node, "name": id});
        if self.run("block-export-add", &arguments)? != Some(true) {
            return Ok(!self.stop.load(Ordering::Relaxed));
        }
        if let Ok(mut client) = Client::connect(&self.server.socket, &id, Dialect::Structured)
            && matches!(client.read(0, 4096), Ended::Hung)
        {
            return Err(format!("a read of the export {id} isn't answered"));
        }
        let mode = self.random.pick(&["safe", "hard"]);
        self.go("block-export-del", &json!({"id": id, "mode": mode}))
    }

    fn reopen(&mut self) -> Result<bool, String> {
        let top = self.top();
        let below = self.chain.len().checked_sub(2).map(|index| self.chain[index].clone());
        let mut options = node_options(&top, below.as_ref(), true);
        if top.format == "qcow2" {
            options["l2-cache-size"] = json!(64u64 << (10 + self.random.below(5)));
            options["lazy-refcounts"] = json!(self.random.chance(30));
            options["pass-discard-request"] = json!(self.random.chance(50));
        }
        self.go("blockdev-reopen", &json!({"options": [options]}))
    }

    /// The chain as the daemon has it, after a job whose end can't be known.
    fn look_again(&mut self) -> Result<bool, String> {
        let nodes = match self.monitor.command("query-named-block-nodes", &json!({"flat": true}))? {
            Answer::Done(nodes) => nodes,
            Answer::Refused(reason) => return Err(format!("query-named-block-nodes: {reason}")),
            Answer::Gone => return Ok(false),
        };
        let file_below = |name: &str| {
            let node = nodes.as_array()?.iter().find(|node| node["node-name"] == json!(name))?;
            Some(node["backing_file"].as_str().map(PathBuf::from))
        };
        let mut chain = vec![self.top()];
        while let Some(Some(file)) = file_below(&chain[0].node) {
            let Some(layer) = self.chain.iter().find(|layer| layer.file == file) else {
                return Err(format!("{} stands on {}, which isn't of the chain", chain[0].node, file.display()));
            };
            chain.insert(0, layer.clone());
        }
        let gone: Vec<Layer> =
            self.chain.iter().filter(|layer| chain.iter().all(|kept| kept.node != layer.node)).cloned().collect();
        self.chain = chain;
        for layer in gone.iter().rev() {
            if !self.go("blockdev-del", &json!({"node-name": layer.node}))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// True for an image that is whole and has `base` as its backing file.
fn is_overlay_of(file: &Path, base: &Path) -> bool {
    let info = Qemu::system().img(["info".as_ref(), "-U".as_ref(), "--output=json".as_ref(), file.as_os_str()]);
    let backing = |info: &Value| info["full-backing-filename"].as_str().map(PathBuf::from);
    info.code == 0 && serde_json::from_str(&info.stdout).ok().and_then(|info| backing(&info)).as_deref() == Some(base)
}
