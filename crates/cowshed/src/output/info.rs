// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The human text of `info`, made from the same object that `--output=json` prints.

use super::size::human;
use crate::invocation::Persona;
use cowshed_jobs::info::SnapshotInfo;
use cowshed_types::visible_name;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Map, Value};

/// ANSI sequences for headings, empty without colour.
#[derive(Clone, Copy, Debug, Default)]
pub struct Paint {
    on: bool,
}

impl Paint {
    /// Colours when `on`.
    pub fn new(on: bool) -> Self {
        Self { on }
    }

    /// Bold text.
    fn bold(self, text: &str) -> String {
        if self.on { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Something to worry about.
    fn warning(self, text: &str) -> String {
        if self.on { format!("\x1b[1;31m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Renders one image. `image` is an object with qemu-img's keys.
pub fn render(image: &Value, persona: Persona, paint: Paint) -> String {
    let mut text = Text { out: String::new(), indent: 0, persona, paint, zone: TimeZone::system() };
    text.image(image, "");
    text.out
}

/// The part of the text that only the image's format has.
pub fn render_specific(image: &Value, persona: Persona) -> String {
    let mut text = Text { out: String::new(), indent: 0, persona, paint: Paint::default(), zone: TimeZone::UTC };
    text.specific(image);
    text.out
}

struct Text {
    out: String,
    indent: usize,
    persona: Persona,
    paint: Paint,
    zone: TimeZone,
}

impl Text {
    fn line(&mut self, text: &str) {
        for _ in 0..self.indent {
            self.out.push_str("    ");
        }
        self.out.push_str(text);
        self.out.push('\n');
    }

    fn image(&mut self, image: &Value, path: &str) {
        // A child node without children of its own is a file, and qemu-img words its lines accordingly.
        let children = image.get("children").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let is_protocol = !path.is_empty() && children.is_empty();
        self.general(image, is_protocol);
        self.backing(image);
        self.limits(image);
        self.snapshots(image);
        self.specific(image);
        for child in children {
            let role = string(child, "name");
            let child_path = format!("{path}/{role}");
            self.line(&format!("Child node '{child_path}':"));
            self.indent += 1;
            self.image(child.get("info").unwrap_or(&Value::Null), &child_path);
            self.indent -= 1;
        }
    }

    fn general(&mut self, image: &Value, is_protocol: bool) {
        let (name, format, size) = match is_protocol {
            true => ("filename", "protocol type", "file length"),
            false => ("image", "file format", "virtual size"),
        };
        self.line(&format!("{name}: {}", self.paint.bold(&visible_name(string(image, "filename")))));
        self.line(&format!("{format}: {}", string(image, "format")));
        let bytes = number(image, "virtual-size");
        self.line(&format!("{size}: {} ({bytes} bytes)", human(bytes)));
        match image.get("actual-size").and_then(Value::as_u64) {
            Some(bytes) => self.line(&format!("disk size: {}", human(bytes))),
            None => self.line("disk size: unavailable"),
        }
        if flag(image, "encrypted") {
            self.line("encrypted: yes");
        }
        if let Some(bytes) = image.get("cluster-size").and_then(Value::as_u64) {
            match self.persona {
                Persona::QemuImg => self.line(&format!("cluster_size: {bytes}")),
                Persona::Cowshed | Persona::Tool(_) => {
                    self.line(&format!("cluster size: {} ({bytes} bytes)", human(bytes)))
                }
            }
        }
        if flag(image, "dirty-flag") {
            let text = format!("cleanly shut down: {}", self.paint.warning("no"));
            self.line(&text);
        }
    }

    fn backing(&mut self, image: &Value) {
        let shown = |key: &str| image.get(key).and_then(Value::as_str).map(visible_name);
        let Some(name) = shown("backing-filename") else { return };
        match shown("full-backing-filename") {
            Some(full) if full == name => self.line(&format!("backing file: {name}")),
            Some(full) => self.line(&format!("backing file: {name} (actual path: {full})")),
            None => self.line(&format!("backing file: {name} (cannot determine actual path)")),
        }
        if let Some(format) = shown("backing-filename-format") {
            self.line(&format!("backing file format: {format}"));
        }
    }

    fn snapshots(&mut self, image: &Value) {
        let Some(snapshots) = image.get("snapshots").and_then(Value::as_array).filter(|list| !list.is_empty()) else {
            return;
        };
        let lines: Vec<String> = snapshot_lines(snapshots, &self.zone).collect();
        for line in lines {
            self.line(&line);
        }
    }

    fn limits(&mut self, image: &Value) {
        let Some(limits) = image.get("limits").and_then(Value::as_object) else { return };
        self.line("Block limits:");
        self.indent += 1;
        self.object(limits);
        self.indent -= 1;
    }

    fn specific(&mut self, image: &Value) {
        let data = image.get("format-specific").and_then(|specific| specific.get("data"));
        let Some(data) = data.and_then(Value::as_object).filter(|data| !data.is_empty()) else { return };
        self.line("Format specific information:");
        self.indent += 1;
        self.object(data);
        self.indent -= 1;
    }

    /// Any object, a key a line; dashes in keys become spaces.
    fn object(&mut self, object: &Map<String, Value>) {
        for (key, value) in object {
            self.entry(&key.replace('-', " "), value);
        }
    }

    fn entry(&mut self, label: &str, value: &Value) {
        match value {
            Value::Object(object) => {
                self.line(&format!("{label}:"));
                self.indent += 1;
                self.object(object);
                self.indent -= 1;
            }
            Value::Array(items) => {
                self.line(&format!("{label}:"));
                self.indent += 1;
                for (index, item) in items.iter().enumerate() {
                    self.entry(&format!("[{index}]"), item);
                }
                self.indent -= 1;
            }
            Value::String(text) => self.line(&format!("{label}: {}", visible_name(text))),
            Value::Bool(true) if label == "corrupt" => {
                let text = format!("{label}: {}", self.paint.warning("true"));
                self.line(&text);
            }
            other => self.line(&format!("{label}: {other}")),
        }
    }
}

/// The list of snapshots as `snapshot -l` prints it.
pub fn snapshot_table(snapshots: &[SnapshotInfo]) -> String {
    let values: Vec<Value> = snapshots.iter().filter_map(|snapshot| serde_json::to_value(snapshot).ok()).collect();
    snapshot_lines(&values, &TimeZone::system()).map(|line| line + "\n").collect()
}

fn snapshot_lines(snapshots: &[Value], zone: &TimeZone) -> impl Iterator<Item = String> {
    let heading = ["Snapshot list:".to_owned(), snapshot_row("ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT")];
    heading.into_iter().chain(snapshots.iter().map(|snapshot| {
        let clock = number(snapshot, "vm-clock-sec");
        let clock = format!(
            "{:04}:{:02}:{:02}.{:03}",
            clock / 3600,
            clock / 60 % 60,
            clock % 60,
            number(snapshot, "vm-clock-nsec") / 1_000_000
        );
        let icount = match snapshot.get("icount").and_then(Value::as_u64) {
            Some(count) => count.to_string(),
            None => "--".to_owned(),
        };
        snapshot_row(
            &visible_name(string(snapshot, "id")),
            &visible_name(string(snapshot, "name")),
            &human(number(snapshot, "vm-state-size")),
            &local_time(number(snapshot, "date-sec"), zone),
            &clock,
            &icount,
        )
    }))
}

/// Local time, as qemu-img shows it.
fn local_time(seconds: u64, zone: &TimeZone) -> String {
    let timestamp = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    match timestamp {
        Some(timestamp) => timestamp.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S").to_string(),
        None => format!("{seconds} s"),
    }
}

fn snapshot_row(id: &str, tag: &str, size: &str, date: &str, clock: &str, icount: &str) -> String {
    // qemu-img counts the bytes of the name where it pads it.
    let padding = 16_usize.saturating_sub(tag.len());
    format!("{id:<7} {tag}{:padding$} {size:>8} {date:>19} {clock:>15} {icount:>10}", "")
}

fn string<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or(0)
}

fn flag(value: &Value, key: &str) -> bool {
    value.get(key).and_then(Value::as_bool).unwrap_or(false)
}
