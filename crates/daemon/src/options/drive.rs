// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--drive`: the grammar of QEMU's `-drive`, as far as it is about the image and not about a guest's device.

use super::temporary;
use crate::commands;
use crate::state::Daemon;
use crate::warnings;
use cowshed_image::OpenRequest;
use cowshed_image::filters::throttle::Limits;
use cowshed_image::open::{Cache, Policy};
use cowshed_image::options::{BareKey, BlockdevOptions, parse_list, parse_on_off, short_forms};
use cowshed_image::stats::Accounting;
use cowshed_image::{DRIVERS, SnapshotName};
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::{Map, json};
use std::collections::BTreeMap;
use std::rc::Rc;

/// An image with how to open it.
#[derive(Clone, Debug)]
pub struct Drive {
    /// The node's name, and the export's.
    pub id: String,
    /// Clients may write.
    pub writable: bool,
    options: BlockdevOptions,
    /// QEMU's warnings of options without a value.
    short_forms: Vec<String>,
    cache: Cache,
    snapshot: Option<SnapshotName>,
    /// Writes go to an overlay that is gone with the process.
    apart: bool,
    /// Data that are read from a backing file are written to the image (`copy-on-read`).
    copies: bool,
    /// The disk is this partition of the image's.
    partition: Option<u32>,
    /// The disk begins at this byte of the image's.
    offset: Option<u64>,
    /// The limits of a stranger's image.
    policy: Option<Policy>,
    /// Its only user is its export.
    exported_alone: bool,
    /// The options of a `fault` node above the disk, without its name and its file.
    faults: Option<BlockdevOptions>,
    controls: Controls,
}

/// The settings of a drive for its export: limits, and statistics.
#[derive(Clone, Debug, Default)]
pub(crate) struct Controls {
    limits: Option<Limits>,
    group: Option<String>,
    intervals_seconds: Vec<u64>,
    accounting: Accounting,
}

/// Errors of [`Drive::show_from`] name this option.
pub const OFFSET: &str = "--offset";

/// Keys that are about a guest's device: they decide nothing here.
const OF_A_DEVICE: &[&str] = &["if", "index", "media", "bus", "unit", "serial", "werror", "rerror", "snapshot"];

impl Drive {
    /// The image `name`, as `id`.
    pub fn file(id: &str, name: &str, format: Option<&str>, writable: bool) -> Result<Drive> {
        let options = DRIVERS.options_of_name(name, format)?;
        Drive::of_image(id, options, writable)
    }

    /// An image by its options (`--image-opts`), as `id`.
    pub fn image_opts(id: &str, text: &str, writable: bool) -> Result<Drive> {
        let options = BlockdevOptions::from_image_opts(text).map_err(|error| error.file(text))?;
        Ok(Drive { short_forms: short_forms(text, true), ..Drive::of_image(id, options, writable)? })
    }

    /// Options of an image that say that it is only read count more than the command line.
    fn of_image(id: &str, options: BlockdevOptions, writable: bool) -> Result<Drive> {
        let is_read_only =
            options.flag("read-only") == Some(true) || options.text("read-only").and_then(parse_on_off) == Some(true);
        if writable && is_read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
        }
        Ok(Drive::new(id, options, writable))
    }

    fn new(id: &str, options: BlockdevOptions, writable: bool) -> Drive {
        let options = options.with("node-name", id).with("read-only", !writable);
        let controls = Controls::default();
        Drive {
            id: id.to_owned(),
            short_forms: Vec::new(),
            writable,
            options,
            cache: Cache::default(),
            snapshot: None,
            apart: false,
            copies: false,
            partition: None,
            offset: None,
            policy: None,
            exported_alone: false,
            faults: None,
            controls,
        }
    }

    /// `file=NAME,format=FORMAT,id=ID,readonly=on,cache=MODE,…` and options of the format. `id` is the default name,
    /// and `writable` the default of `readonly`.
    pub fn parse(text: &str, id: &str, writable: bool) -> Result<Drive> {
        let option = || format!("--drive {text}");
        let wrong = |message: String| Error::invalid_argument(message).file(option());
        let (mut name, mut format, mut id) = (None, None, id.to_owned());
        let mut writable = writable;
        let on_off = |key: &str, value: &str| {
            parse_on_off(value).ok_or_else(|| wrong(format!("'{key}' expects 'on' or 'off', not '{value}'")))
        };
        let (mut writeback, mut copies) = (None, false);
        let mut settings: Vec<(String, String)> = Vec::new();
        let mut controls = Controls::default();
        let (mut limits, mut spelled) = (Map::new(), BTreeMap::new());
        let mut rest = Vec::new();
        for (key, value) in parse_list(text, BareKey::On).map_err(|error| error.file(option()))? {
            match key.as_str() {
                "file" => name = Some(value),
                "format" | "driver" => format = Some(value),
                "id" | "node-name" => id = value,
                "readonly" | "read-only" => {
                    writable = !on_off(&key, &value)?;
                }
                "cache" | "aio" | "discard" | "detect-zeroes" => settings.push((key, value)),
                "cache.writeback" => writeback = Some(on_off(&key, &value)?),
                "copy-on-read" => copies = on_off(&key, &value)?,
                key if Controls::is_key(key) => {
                    controls.set(key, &value).map_err(|error| error.file(option()))?;
                }
                key if Limits::is_name(key) && !key.starts_with("x-") => {
                    // `iops` and `throttling.iops-total` are one limit.
                    let limit = Limits::option_name(key).unwrap_or_default();
                    if let Some(other) = spelled.insert(limit, key.to_owned()) {
                        return Err(wrong(if other == key {
                            format!("'{key}' is given twice")
                        } else {
                            format!("'{other}' and its alias '{key}' can't be used at the same time")
                        }));
                    }
                    limits.insert(key.to_owned(), value.into());
                }
                key if key.starts_with("throttling.") => return Err(wrong(format!("unknown option '{key}'"))),
                key if OF_A_DEVICE.contains(&key) => {
                    return Err(wrong(format!("'{key}' is for a guest's device and means nothing here")));
                }
                _ => rest.push((key, value)),
            }
        }
        let mut options = match name {
            Some(name) => DRIVERS.options_of_name(&name, format.as_deref())?,
            None if rest.iter().any(|(key, _)| key.starts_with("file.")) => {
                format.map_or_else(BlockdevOptions::new, |format| BlockdevOptions::new().with("driver", format))
            }
            None => return Err(wrong("'file' is missing".to_owned())),
        };
        // The rest as dotted keys beside the options in the name.
        for (key, value) in rest {
            options.insert(key, value);
        }
        let tree = match serde_json::Value::from(options) {
            serde_json::Value::Object(map) => BlockdevOptions::from_map(map).map_err(|error| error.file(option()))?,
            _ => return Err(Error::internal("options are no object")),
        };
        let mut drive = Drive::new(&id, tree, writable);
        if !limits.is_empty() {
            let limits = Limits::from_json(&limits).map_err(|error| error.file(option()))?;
            controls.limits = limits.is_limited().then_some(limits);
        }
        drive.controls = controls;
        for (key, value) in settings {
            drive.set(&key, &value).map_err(|error| error.file(option()))?;
        }
        if let Some(writeback) = writeback {
            drive.cache.writethrough = !writeback;
        }
        drive.copies = copies;
        Ok(drive)
    }

    /// Sets `cache`, `aio`, `discard` or `detect-zeroes`, by the words of the command line.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "cache" => {
                self.cache = Cache::parse(value)?;
                // An option for one of them counts more than the mode.
                let mut cache = match self.options.remove("cache") {
                    Some(serde_json::Value::Object(map)) => map,
                    _ => Map::new(),
                };
                for (key, value) in [("direct", self.cache.direct), ("no-flush", self.cache.no_flush)] {
                    cache.entry(key).or_insert(json!(value));
                }
                self.options.insert("cache", cache);
            }
            "aio" => {
                self.options.set_aio(value);
            }
            _ => self.options.insert(key, value),
        }
        Ok(())
    }

    /// The same where the options of the image say nothing of it.
    pub fn set_default(&mut self, key: &str, value: &str) {
        if self.options.get(key).is_none() {
            self.options.insert(key, value);
        }
    }

    /// Opens an internal snapshot in place of the disk as it is now; only for reading.
    pub fn load_snapshot(&mut self, name: &str) -> Result<()> {
        if self.writable {
            return Err(Error::invalid_argument("an internal snapshot can only be read").value(name));
        }
        self.snapshot = Some(SnapshotName::parse(name)?);
        Ok(())
    }

    /// Shows one partition in place of the disk: 1 to 4 of an MBR, from 5 on its logical ones, or those of a GPT.
    pub fn show_partition(&mut self, number: u32) {
        self.partition = Some(number);
    }

    /// Leaves bytes out in front.
    pub fn show_from(&mut self, offset: u64) {
        self.offset = Some(offset);
    }

    /// Makes the disk fail by rules: the options of a `fault` node, without its name and its file.
    pub fn fail_by(&mut self, faults: BlockdevOptions) {
        self.faults = Some(faults);
    }

    /// The image is a stranger's: it is held to this policy.
    pub fn hold_to(&mut self, policy: Policy) {
        self.policy = Some(policy);
    }

    /// Leaves the image as it is: clients' writes go to a temporary overlay, in the folder that `TMPDIR` names, else in
    /// `/var/tmp`.
    pub fn keep_writes_apart(&mut self) {
        self.apart = true;
    }

    /// Declares that only the export of the drive uses its node, now and later. A raw image is then locked as far as
    /// the export needs it. Others may read and write beside it, as with qemu-nbd.
    pub fn export_alone(&mut self) {
        self.exported_alone = true;
    }

    /// The options of the export, for [`super::Step::controls`].
    pub(super) fn controls(&self) -> Controls {
        self.controls.clone()
    }

    pub(crate) async fn add(mut self, daemon: &Rc<Daemon>) -> Result<()> {
        self.short_forms.iter().for_each(|warning| crate::warnings::say(warning));
        let Some(offset) = self.offset.take() else { return self.add_whole(daemon).await };
        let name = std::mem::replace(&mut self.id, commands::free_name(daemon, "below"));
        let (below, read_only, snapshot) = (self.id.clone(), !self.writable, self.snapshot.take());
        self.options.insert("node-name", below.as_str());
        self.add_whole(daemon).await?;
        let size = daemon.graph.find(&below).map_or(0, |node| node.size());
        let signed = offset.cast_signed();
        let wrong = if signed < 0 {
            Some(format!("Value '{signed}' is out of range for parameter 'offset'"))
        } else if offset > size {
            Some(format!("Offset ({offset}) cannot be greater than size of the containing file ({size})"))
        } else {
            snapshot.map(|_| {
                let why =
                    "Block format 'raw' used by device '' does not support temporarily loading internal snapshots";
                format!("Failed to load snapshot: {why}")
            })
        };
        if let Some(message) = wrong {
            return Err(Error::invalid_argument(message).file(OFFSET));
        }
        let window = BlockdevOptions::new().with("driver", "raw").with("node-name", name).with("offset", offset);
        let window = window.with("read-only", read_only).with("discard", "unmap").with("file", below);
        daemon.graph.add(window).await.map(drop)
    }

    async fn add_whole(mut self, daemon: &Rc<Daemon>) -> Result<()> {
        let Some(faults) = self.faults.take() else { return self.add_disk(daemon).await };
        let name = self.id;
        let read_only = !self.writable;
        self.id = commands::free_name(daemon, "below");
        let below = self.id.clone();
        self.options.insert("node-name", below.as_str());
        self.add_disk(daemon).await?;
        let faults = faults.with("node-name", name).with("read-only", read_only).with("discard", "unmap");
        daemon.graph.add(faults.with("file", below)).await.map(drop)
    }

    async fn add_disk(self, daemon: &Rc<Daemon>) -> Result<()> {
        let mut options = self.options;
        let copies = self.copies && self.writable;
        if self.copies && !self.writable {
            tracing::warn!(drive = self.id, "disabling copy-on-read on read-only drive");
        }
        if self.apart || copies || self.partition.is_some() {
            options.insert("node-name", commands::free_name(daemon, "below"));
        }
        if self.apart {
            options.insert("read-only", true);
        }
        let above = self.apart.then(|| options.clone());
        if let Some(policy) = self.policy {
            daemon.untrusted.hold(&options, policy);
        }
        let (cache, snapshot) = (self.cache, self.snapshot);
        // The nodes below an overlay must not change.
        let shares = self.exported_alone && !self.apart && !copies;
        let more = |request: OpenRequest| {
            let request = request.cache_mode(cache).snapshot(snapshot);
            if shares { request.sharing_raw_of_one_size() } else { request }
        };
        let node = daemon.untrusted.add_with(&daemon.graph, options, more).await?;
        warnings::report(&node);
        if let Some(number) = self.partition {
            let part =
                cowshed_image::partitions::find(&node, number).await.map_err(|error| error.file(node.filename()))?;
            let window = BlockdevOptions::new().with("driver", "raw").with("node-name", self.id.as_str());
            let window = window.with("offset", part.start).with("size", part.end - part.start);
            let window = window.with("read-only", !self.writable).with("discard", "unmap").with("file", node.name());
            daemon.graph.add(window).await?;
            return Ok(());
        }
        if copies {
            let filter = BlockdevOptions::new().with("driver", "copy-on-read").with("node-name", self.id.as_str());
            // The drive's own setting counts, which the image has.
            daemon.graph.add(filter.with("discard", "unmap").with("file", node.name())).await?;
            return Ok(());
        }
        match above {
            Some(below) => temporary::add_overlay(daemon, &self.id, &node, &below).await,
            None => Ok(()),
        }
    }
}

impl Controls {
    fn is_key(key: &str) -> bool {
        matches!(key, "throttling.group" | "group" | "stats-account-failed" | "stats-account-invalid")
            || key.starts_with("stats-intervals")
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let wrong = |what: &str| Error::invalid_argument(format!("'{key}' expects {what}, not '{value}'"));
        match key {
            "throttling.group" | "group" if value.is_empty() => return Err(wrong("the name of a group")),
            "throttling.group" | "group" => self.group = Some(value.to_owned()),
            "stats-account-failed" => {
                self.accounting.failed = parse_on_off(value).ok_or_else(|| wrong("'on' or 'off'"))?
            }
            "stats-account-invalid" => {
                self.accounting.invalid = parse_on_off(value).ok_or_else(|| wrong("'on' or 'off'"))?;
            }
            // A list: stats-intervals.0, stats-intervals.1, …, or all of them with colons between.
            _ => {
                let index = key.strip_prefix("stats-intervals.").and_then(|index| index.parse::<usize>().ok());
                if key != "stats-intervals" && index != Some(self.intervals_seconds.len()) {
                    let message = format!("'{key}': the intervals are numbered from 0 without gaps");
                    return Err(Error::invalid_argument(message));
                }
                for text in value.split(':') {
                    let seconds = text.parse().ok().filter(|seconds| *seconds > 0);
                    self.intervals_seconds.push(seconds.ok_or_else(|| wrong("seconds of at least 1"))?);
                }
            }
        }
        Ok(())
    }

    /// Gives an export the drive's settings for it.
    pub(crate) async fn apply(self, daemon: &Rc<Daemon>, id: &str) -> QmpResult<()> {
        let export = daemon.find_export(id).ok_or_else(|| QmpError::generic(format!("there is no export '{id}'")))?;
        let failed = |error: Error| QmpError::generic(error.to_string());
        export.attachment.set_intervals(&self.intervals_seconds).map_err(failed)?;
        export.attachment.set_accounting(self.accounting);
        if self.limits.is_some() || self.group.is_some() {
            commands::throttle_export(daemon, id, self.group.as_deref(), self.limits).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_drive_is_a_name_and_options() {
        let drive = Drive::parse(
            "file=a,,b.qcow2,format=qcow2,readonly=on,l2-cache-size=4M,cache=none,aio=threads",
            "d0",
            true,
        )
        .unwrap();
        assert_eq!((drive.id.as_str(), drive.writable), ("d0", false));
        let expected = json!({
            "file": {"driver": "file", "filename": "a,b.qcow2", "aio": "threads"}, "driver": "qcow2",
            "l2-cache-size": "4M", "node-name": "d0", "read-only": true, "cache": {"direct": true, "no-flush": false},
        });
        assert_eq!(Value::from(drive.options), expected);
        let drive = Drive::parse("driver=raw,file.filename=x,file.locking=off,id=me", "d0", true).unwrap();
        assert_eq!((drive.id.as_str(), drive.writable), ("me", true));
    }

    #[test]
    fn limits_and_statistics_are_about_the_export() {
        let text = "file=hd.qcow2,throttling.iops-total=100,throttling.iops-total-max=2000,bps_rd=1M,throttling.group=foo,\
                    l2-cache-size=4194304,stats-intervals.0=5,stats-intervals.1=60,stats-account-failed=off";
        let drive = Drive::parse(text, "d0", true).unwrap();
        let options = Value::from(drive.options.clone());
        assert!(options.get("throttling").is_none() && options.get("bps_rd").is_none(), "{options}");
        assert_eq!(options["l2-cache-size"], "4194304");
        let Controls { limits, group, intervals_seconds, accounting } = drive.controls();
        let limits = limits.unwrap();
        let found = ["iops", "iops_max", "bps_rd"].map(|name| limits.get(name).unwrap());
        assert_eq!((found, group.as_deref()), ([100, 2000, 1 << 20], Some("foo")));
        assert_eq!((intervals_seconds, accounting.failed, accounting.invalid), (vec![5, 60], false, true));
        let older = Drive::parse("file=a,iops=100,iops_size=4096,group=g,stats-intervals=1:2", "d", true).unwrap();
        assert_eq!(older.controls().limits.unwrap().get("iops-size"), Some(4096));
        assert_eq!(older.controls().intervals_seconds, [1, 2]);
        assert!(Drive::parse("file=a,iops=0,bps=0", "d", true).unwrap().controls().limits.is_none());
    }

    #[test]
    fn the_cache_and_what_is_read_have_switches() {
        let drive = |text: &str| Drive::parse(text, "d", true).unwrap();
        assert!(drive("file=a,cache.writeback=off").cache.writethrough);
        let both = drive("file=a,cache.writeback=off,cache=none").cache;
        assert!(both.writethrough && both.direct);
        assert!(!drive("file=a,cache=writethrough,cache.writeback=on").cache.writethrough);
        // A single option counts more than the mode, on either side of it.
        let cache = |text: &str| Value::from(drive(text).options)["cache"].clone();
        assert_eq!(cache("file=a,cache=none,cache.direct=off"), json!({"direct": "off", "no-flush": false}));
        assert_eq!(cache("file=a,cache.no-flush=off,cache=unsafe"), json!({"direct": false, "no-flush": "off"}));
        assert_eq!(cache("file=a,cache=writeback,cache.direct=on"), json!({"direct": "on", "no-flush": false}));
        assert!(drive("file=a,copy-on-read=on").copies && !drive("file=a,copy-on-read=off").copies);
    }

    #[test]
    fn what_means_nothing_is_refused_by_name() {
        for (wrong, reason) in [
            ("format=qcow2", "'file' is missing"),
            ("file=a,if=virtio", "'if'"),
            ("file=a,readonly=maybe", "'readonly' expects 'on' or 'off'"),
            ("file=a,copy-on-read=maybe", "'copy-on-read' expects 'on' or 'off', not 'maybe'"),
            ("file=a,cache.writeback=1", "'cache.writeback' expects 'on' or 'off', not '1'"),
            ("file=a,cache=fast", "invalid cache mode 'fast'"),
            ("file=zzz:a", "zzz"),
            ("file=a,iops=5,throttling.iops-read=1", "cannot be used at the same time"),
            ("file=a,iops_max=5", "require corresponding"),
            ("file=a,iops=5,iops=6", "'iops' is given twice"),
            ("file=a,iops=5,throttling.iops-total=6", "'iops' and its alias 'throttling.iops-total' can't be used"),
            ("file=a,bps_rd_max=5,throttling.bps-read-max=5,bps_rd=1", "can't be used at the same time"),
            ("file=a,throttling.iops-totl=5", "iops-totl"),
            ("file=a,throttling.group=", "the name of a group"),
            ("file=a,stats-intervals.1=5", "numbered from 0"),
            ("file=a,stats-intervals.0=0", "seconds of at least 1"),
            ("file=a,stats-account-failed=x", "'stats-account-failed' expects 'on' or 'off'"),
        ] {
            let error = Drive::parse(wrong, "d", true).unwrap_err().to_string();
            assert!(error.contains(reason), "{wrong}: {error}");
        }
    }
}
