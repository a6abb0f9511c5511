// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The name under which a node opens again: a path, a pseudo name, or `json:{…}` where only options say what it is.

use super::driver::Driver;
use super::{ChildRole, Node};
use crate::options::parse_size;
use serde_json::{Map, Value};
use std::sync::PoisonError;

/// Options that change what a node is, by its driver. `blkdebug` has all of its own.
const TELLING: &[(&str, &[&str])] = &[
    ("raw", &["offset", "size"]),
    ("null-co", &["size", "read-zeroes"]),
    ("null-aio", &["size", "read-zeroes"]),
    ("qcow2", &["encrypt.format", "encrypt.key-secret"]),
    ("luks", &["key-secret"]),
    ("vpc", &["force_size_calc"]),
    ("throttle", &["throttle-group"]),
    ("blklogwrites", &["log-append", "log-sector-size"]),
    ("quorum", &["vote-threshold", "blkverify", "rewrite-corrupted", "read-pattern"]),
];

/// The order in which QEMU prints keys, as far as it shows one. Other keys follow `driver`.
const ORDER: &[&str] = &[
    "encrypt.format",
    "encrypt.key-secret",
    "force_size_calc",
    "throttle-group",
    "read-zeroes",
    "read-pattern",
    "children",
    "offset",
    "log",
    "log-sector-size",
    "inject-error.0.state",
    "opt-write-zero",
    "inject-error.0.immediately",
    "set-state.0.event",
    "inject-error.0.once",
    "max-write-zero",
    "image",
    "max-transfer",
    "driver",
    "inject-error.0.iotype",
    "set-state.0.new_state",
    "inject-error.0.event",
    "inject-error.0.errno",
    "config",
    "opt-discard",
    "set-state.0.state",
    "inject-error.0.sector",
    "max-discard",
    "align",
    "size",
    "log-append",
    "blkverify",
    "rewrite-corrupted",
    "vote-threshold",
    "file",
    "filename",
    "key-secret",
];

impl Node {
    /// The node's name for who wants to open the same thing again, as QEMU prints it. Other than [`Node::filename`] it says
    /// options that count.
    pub fn reference(&self) -> String {
        self.plain_reference().unwrap_or_else(|| {
            let mut text = String::from("json:");
            print(&self.telling_options(), &mut text);
            text
        })
    }

    /// A name without options.
    fn plain_reference(&self) -> Option<String> {
        let own = self.telling();
        let child = |role| self.child(role)?.plain_reference();
        match (&self.driver, self.driver_name()) {
            (Driver::File(_), "blkdebug") => {
                let config = own.iter().find(|(key, _)| key == "config").and_then(|(_, value)| value.as_str());
                let is_all = own.len() == usize::from(config.is_some());
                let image = child(ChildRole::Image).filter(|_| is_all)?;
                Some(format!("blkdebug:{}:{image}", config.unwrap_or_default()))
            }
            (Driver::File(_), driver @ ("null-co" | "null-aio")) => own.is_empty().then(|| format!("{driver}://")),
            (Driver::File(_), _) => Some(self.filename.clone()).filter(|name| !name.starts_with("json:")),
            (Driver::Replicas(_), "blkverify") => {
                Some(format!("blkverify:{}:{}", child(ChildRole::Raw)?, child(ChildRole::Test)?))
            }
            (Driver::Filter(_) | Driver::Snapshot(_) | Driver::Replicas(_), _) => None,
            _ if own.is_empty() => child(ChildRole::File),
            _ => None,
        }
    }

    /// The options that count, as the user gave them, with flat keys.
    fn telling(&self) -> Vec<(String, Value)> {
        let driver = self.driver_name();
        let options = self.options.lock().unwrap_or_else(PoisonError::into_inner);
        let mut flat = Vec::new();
        for (key, value) in options.iter() {
            flatten(key, value, &mut flat);
        }
        drop(options);
        let telling = TELLING.iter().find(|(name, _)| *name == driver).map_or(&[][..], |(_, keys)| keys);
        let is_own = |key: &str| {
            let first = key.split('.').next().unwrap_or_default();
            let of_all = ["driver", "node-name", "read-only", "auto-read-only", "discard", "detect-zeroes", "cache"];
            driver == "blkdebug" && first != "image" && !of_all.contains(&first) && first != "force-share"
        };
        // The rules of a file with rules are said by its name.
        let is_given = |key: &str| self.given.iter().any(|(given, _)| given == key);
        flat.retain(|(key, _)| telling.contains(&key.as_str()) || (is_own(key) && is_given(key)));
        for (key, value) in &mut flat {
            // What a reopening has changed is said as it is now.
            if let Some((_, given)) = self.given.iter().find(|(given, _)| given == key)
                && is_same(given, value)
            {
                *value = given.clone();
            }
        }
        flat
    }

    /// Everything that opens the node again.
    fn telling_options(&self) -> Value {
        let mut all = self.telling();
        all.push(("driver".to_owned(), self.driver_name().into()));
        if let Driver::File(file) = &self.driver
            && ["file", "host_device", "host_cdrom"].contains(&file.name)
        {
            all.push(("filename".to_owned(), self.filename.clone().into()));
        }
        let mut replicas = Vec::new();
        for child in self.children() {
            match child.role {
                ChildRole::Backing | ChildRole::DataFile | ChildRole::Header => {}
                ChildRole::Replica(_) => replicas.push(child.node.telling_options()),
                role => all.push((role.name(), child.node.telling_options())),
            }
        }
        if !replicas.is_empty() {
            all.push(("children".to_owned(), Value::Array(replicas)));
        }
        let rank = |key: &str| {
            let first = key.split('.').map(|part| if part.parse::<u32>().is_ok() { "0" } else { part });
            let first: Vec<&str> = first.collect();
            let first = first.join(".");
            let driver = ORDER.iter().position(|known| *known == "driver").unwrap_or(0);
            ORDER.iter().position(|known| *known == first).unwrap_or(driver)
        };
        all.sort_by_key(|(key, _)| rank(key));
        Value::Object(all.into_iter().collect::<Map<_, _>>())
    }
}

/// The options of a node as the user gave them, with flat keys.
pub(crate) fn given(options: &crate::options::BlockdevOptions) -> Vec<(String, Value)> {
    let mut flat = Vec::new();
    for (key, value) in options.iter() {
        flatten(key, value, &mut flat);
    }
    flat
}

/// Adds an option, of an object or a list each part. Children are objects too: their keys are no option's name.
fn flatten(key: &str, value: &Value, flat: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, value)| flatten(&format!("{key}.{name}"), value, flat)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(index, value)| flatten(&format!("{key}.{index}"), value, flat));
        }
        other => flat.push((key.to_owned(), other.clone())),
    }
}

/// True when the text that was given means the value.
fn is_same(given: &Value, value: &Value) -> bool {
    match (given, value) {
        (Value::String(text), Value::Number(number)) => parse_size(text).ok() == number.as_u64(),
        (Value::String(text), Value::Bool(flag)) => crate::options::parse_on_off(text) == Some(*flag),
        _ => given == value,
    }
}

/// JSON with QEMU's blanks.
fn print(value: &Value, text: &mut String) {
    let mut opening = "";
    match value {
        Value::Object(map) => {
            text.push('{');
            for (key, value) in map {
                text.push_str(&format!("{opening}{}: ", Value::from(key.as_str())));
                print(value, text);
                opening = ", ";
            }
            text.push('}');
        }
        Value::Array(list) => {
            text.push('[');
            for value in list {
                text.push_str(opening);
                print(value, text);
                opening = ", ";
            }
            text.push(']');
        }
        other => text.push_str(&other.to_string()),
    }
}
