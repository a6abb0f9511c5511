// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The values that a key may have, and the check of an option tree against a driver's keys.

use super::schemas::{CACHE, COMMON};
use super::size::parse_size;
use super::tree::{BlockdevOptions, parse_bool};
use cowshed_types::{Error, LINE_END, Result};
use serde_json::{Map, Value};
use std::any::Any;

/// The kind of driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverKind {
    /// Bytes somewhere: the leaves of the graph.
    Protocol,
    /// Finds the data of a disk in its children.
    Format,
    /// Passes requests on to its one child.
    Filter,
}

/// A driver and its keys.
#[derive(Debug)]
pub struct DriverSchema {
    /// The value of `driver`.
    pub name: &'static str,
    /// The kind of driver.
    pub kind: DriverKind,
    /// One line of help.
    pub about: &'static str,
    /// Its keys, besides those that every driver takes.
    pub keys: &'static [Key],
}

/// The drivers of a program, by their names.
pub trait Schemas: Any + Sync {
    /// The keys of the driver with this name.
    fn schema(&self, name: &str) -> Option<&'static DriverSchema>;

    /// True for a driver of which a node stays read-only once it was opened so.
    fn stays_read_only(&self, name: &str) -> bool;

    /// True when an open node of this driver can be given other options.
    fn reopens(&self, name: &str) -> bool;
}

/// An option of a driver.
#[derive(Debug)]
pub struct Key {
    /// The key as it is spelled.
    pub name: &'static str,
    /// The type of its value.
    pub value: KeyType,
    /// The default as help shows it; "" when there is none, [`REQUIRED`] when it must be given.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
}

/// In [`Key::default`]: the key must be given.
pub const REQUIRED: &str = "(required)";

/// The type of a [`Key`]'s value.
#[derive(Clone, Copy, Debug)]
pub enum KeyType {
    /// on or off.
    Bool,
    /// A size in bytes, with suffix.
    Size,
    /// A number between two bounds, both included.
    Number(u64, u64),
    /// Any text.
    Text,
    /// A text, or a list of them.
    Texts,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A node-name or the options of a child.
    Child,
    /// The same, or null (or an empty text) for none.
    ChildOrNull,
    /// An object with these keys.
    Struct(&'static [Key]),
    /// One of these words, or an object with these keys.
    ChoiceOrStruct(&'static [&'static str], &'static [Key]),
    /// A list of children: node-names or their options.
    Children,
    /// A list of objects with these keys.
    List(&'static [Key]),
}

impl DriverSchema {
    /// True when the driver has an option of this name.
    pub fn knows(&self, name: &str) -> bool {
        self.keys.iter().chain(COMMON).any(|key| key.name == name)
    }

    /// True when this option of the driver must be given.
    pub(crate) fn requires(&self, name: &str) -> bool {
        self.keys.iter().any(|key| key.name == name && key.default == REQUIRED)
    }

    /// Checks the options that are given, of which some may be missing, and turns texts into the type of their key.
    pub fn check_values(&self, options: &mut BlockdevOptions) -> Result<()> {
        self.check_given(options, "")
    }

    fn check_given(&self, options: &mut BlockdevOptions, path: &str) -> Result<()> {
        self.leave_out_absent(options);
        for (name, value) in options.values_mut() {
            let full = format!("{path}{name}");
            let Some(key) = self.keys.iter().chain(COMMON).find(|key| key.name == name) else {
                return Err(self.does_not_support(&first_leaf(name, value), &full));
            };
            if let Some(leaf) = unknown_of_cache(name, value) {
                return Err(self.does_not_support(&format!("{name}.{leaf}"), &format!("{full}.{leaf}")));
            }
            check_value(key, value, &full, name).map_err(|error| match self.unfit(key, value) {
                Some(sentence) => error.qemu(sentence),
                None => error,
            })?;
        }
        Ok(())
    }

    /// As QEMU, which takes null for absent. For a backing file it means that there is none. An option of parts is unknown without any.
    fn leave_out_absent(&self, options: &mut BlockdevOptions) {
        let has_parts = |key: &Key| matches!(key.value, KeyType::Struct(_) | KeyType::List(_)) && key.name != "cache";
        let can_be_absent =
            |key: &&Key| !matches!(key.value, KeyType::ChildOrNull) && key.name != "filename" && !has_parts(key);
        for key in self.keys.iter().chain(COMMON).filter(can_be_absent) {
            if options.get(key.name).is_some_and(Value::is_null) {
                options.remove(key.name);
            }
        }
    }

    /// QEMU's sentence where a value is no child, or an option with parts is none, and the other way round.
    fn unfit(&self, key: &Key, value: &Value) -> Option<String> {
        let has_parts = value.as_object().is_some_and(|map| !map.is_empty()) || is_list(value);
        match key.value {
            KeyType::Child if has_parts => Some("Must specify either driver or file".to_owned()),
            KeyType::Text if key.name == "filename" => Some(self.words_for_no_file_name()),
            KeyType::Child => Some(format!("A block device must be specified for \"{}\"", key.name)),
            KeyType::Struct(_) if key.name == "server" && !has_parts => Some("NBD server address missing".to_owned()),
            KeyType::Struct(_) | KeyType::List(_) | KeyType::ChildOrNull if !has_parts => {
                Some(self.words_for_unknown(key.name))
            }
            KeyType::Bool | KeyType::Size | KeyType::Number(..) | KeyType::Text | KeyType::Choice(_) if has_parts => {
                Some(self.words_for_unknown(&first_leaf(key.name, value)))
            }
            _ => None,
        }
    }

    /// QEMU's words for an option that this driver doesn't have.
    fn does_not_support(&self, option: &str, full: &str) -> Error {
        let sentence = self.words_for_unknown(option);
        Error::invalid_argument(sentence.replace(&format!("'{option}'"), &format!("'{full}'"))).qemu(sentence)
    }

    fn words_for_no_file_name(&self) -> String {
        format!("The '{}' block driver requires a file name", self.name)
    }

    fn words_for_unknown(&self, option: &str) -> String {
        match self.kind {
            // Fault injection has names of its own, which makes it a protocol there.
            _ if ["blkdebug", "blkverify"].contains(&self.name) => {
                format!("Block protocol '{}' doesn't support the option '{option}'", self.name)
            }
            DriverKind::Protocol => format!("Block protocol '{}' doesn't support the option '{option}'", self.name),
            _ => format!("Block format '{}' does not support the option '{option}'", self.name),
        }
    }

    /// Checks the options of one node and turns texts into the type of their key. Children given inline are checked
    /// when they are opened, with their own driver. `path` is the node's place in the whole tree ("" or "backing."),
    /// for messages.
    pub(crate) fn check(&'static self, options: &mut BlockdevOptions, path: &str) -> Result<()> {
        let lacks = |key: &&Key| key.default == REQUIRED && options.get(key.name).is_none();
        // QEMU opens the children before it looks at the rest.
        let is_first = |key: &&Key| matches!(key.value, KeyType::Child) || key.name == "filename";
        if let Some(key) = self.keys.iter().filter(lacks).find(is_first) {
            return Err(missing(&format!("{path}{}", key.name), self.name));
        }
        self.check_given(options, path)?;
        match self.keys.iter().find(|key| key.default == REQUIRED && options.get(key.name).is_none()) {
            Some(key) => Err(missing(&format!("{path}{}", key.name), self.name)),
            None => Ok(()),
        }
    }
}

/// The name of an option with dots down to the first value in it.
pub(crate) fn first_leaf(name: &str, value: &Value) -> String {
    let (mut name, mut value) = (name.to_owned(), value);
    loop {
        let (key, nested) = match value {
            Value::Object(map) if !map.is_empty() => map.iter().next().map(|(key, nested)| (key.as_str(), nested)),
            Value::Array(items) => items.first().map(|item| ("0", item)),
            _ => None,
        }
        .unzip();
        let (Some(key), Some(nested)) = (key, nested) else { return name };
        name = format!("{name}.{key}");
        value = nested;
    }
}

/// The key of the option `cache` that no driver has.
fn unknown_of_cache<'a>(name: &str, value: &'a Value) -> Option<&'a String> {
    let keys = value.as_object().filter(|_| name == "cache")?.keys();
    keys.into_iter().find(|leaf| !CACHE.iter().any(|key| key.name == *leaf))
}

/// Checks the keys that every driver takes, before the driver is known. It is the driver that refuses unknown ones.
pub(crate) fn check_common(options: &mut BlockdevOptions, path: &str) -> Result<()> {
    for key in COMMON.iter().filter(|key| key.name != "driver") {
        if options.get(key.name).is_some_and(Value::is_null) {
            options.remove(key.name);
        }
    }
    for (name, value) in options.values_mut() {
        let has_parts = value.as_object().is_some_and(|map| !map.is_empty());
        let is_refused_later = unknown_of_cache(name, value).is_some()
            || (name == "cache" && !has_parts)
            || (name == "driver" && value.is_null());
        if let Some(key) = COMMON.iter().find(|key| key.name == name && !is_refused_later) {
            check_value(key, value, &format!("{path}{name}"), name)?;
        }
    }
    Ok(())
}

fn missing(path: &str, driver: &str) -> Error {
    let error = Error::invalid_argument(format!("driver '{driver}' needs the option '{path}'"));
    match path.rsplit('.').next() {
        Some(child @ ("file" | "image" | "raw" | "test" | "log")) => {
            error.qemu(format!("A block device must be specified for \"{child}\""))
        }
        Some("filename") => error.qemu(format!("The '{driver}' block driver requires a file name")),
        Some("throttle-group") => error.qemu("Please specify a throttle group"),
        Some("target") => error.qemu("Parameter 'target' is missing"),
        _ => error,
    }
}

/// A text, or what QEMU makes of a number or a flag where a text is expected. A driver, a format and a file are never
/// guessed from one.
fn text_of(key: &Key, value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        _ if ["driver", "format", "filename", "config"].contains(&key.name) => None,
        Value::Bool(flag) => Some(if *flag { "on" } else { "off" }.to_owned()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn is_list(value: &Value) -> bool {
    value.as_array().is_some_and(|items| !items.is_empty())
}

/// `path` is the option's place in the whole tree, `leaf` its name in its node, by which QEMU calls it.
fn check_value(key: &Key, value: &mut Value, path: &str, leaf: &str) -> Result<()> {
    let checked = match key.value {
        KeyType::Bool => match value {
            Value::Bool(flag) => Some(Value::Bool(*flag)),
            Value::String(text) => parse_bool(text).map(Value::Bool),
            _ => None,
        },
        KeyType::Size => number(value).map(Value::from),
        KeyType::Number(min, max) => number(value).filter(|n| (min..=max).contains(n)).map(Value::from),
        KeyType::Text => text_of(key, value).map(Value::from),
        KeyType::Texts => match value {
            Value::String(_) => return Ok(()),
            Value::Array(items) if items.iter().all(Value::is_string) => return Ok(()),
            _ => None,
        },
        KeyType::Choice(words) => text_of(key, value).filter(|word| words.contains(&word.as_str())).map(Value::from),
        KeyType::Child => match value {
            Value::Object(parts) if parts.is_empty() && key.default == REQUIRED => None,
            Value::String(name) if name.is_empty() => None,
            Value::String(_) | Value::Object(_) => return Ok(()),
            _ => None,
        },
        KeyType::ChildOrNull => match value {
            Value::String(name) if name.is_empty() => Some(Value::Null),
            Value::String(_) | Value::Object(_) | Value::Null => return Ok(()),
            _ => None,
        },
        KeyType::Struct(_) if value.as_object().is_some_and(Map::is_empty) => None,
        KeyType::Struct(keys) | KeyType::ChoiceOrStruct(_, keys) if value.is_object() => {
            return check_struct(keys, value, path, leaf);
        }
        KeyType::ChoiceOrStruct(words, _) => value.as_str().filter(|word| words.contains(word)).map(Value::from),
        KeyType::List(keys) => match value {
            Value::Array(items) => return check_list(keys, items, path),
            _ => None,
        },
        KeyType::Children => match value {
            Value::Array(_) => return Ok(()),
            _ => None,
        },
        KeyType::Struct(_) => None,
    };
    match checked {
        Some(checked) => {
            *value = checked;
            Ok(())
        }
        None => {
            // In QEMU's words.
            let expected = match key.value {
                KeyType::Bool => "'on' or 'off'".into(),
                KeyType::Size => "a non-negative number below 2^64 with an optional suffix k, M, G, T, P or E".into(),
                ref other => other.describe(),
            };
            let error = Error::invalid_argument(format!("Parameter '{path}' expects {expected}")).value(&*value);
            let text = text_of(key, value).unwrap_or_else(|| value.to_string());
            Err(match (words_of_value(key, value), &key.value) {
                (Some(sentence), _) => error.qemu(sentence),
                (None, KeyType::Size) => error.qemu(size_refused(leaf, &text)),
                (None, KeyType::Bool) => error.qemu(format!("Parameter '{leaf}' expects 'on' or 'off'")),
                (None, KeyType::Number(..)) if text.parse::<i128>().is_err() => {
                    error.qemu(format!("Parameter '{leaf}' expects a number"))
                }
                _ => error,
            })
        }
    }
}

/// QEMU's sentence for a value that an option doesn't take, where the option has one of its own.
fn words_of_value(key: &Key, value: &Value) -> Option<String> {
    let text = &text_of(key, value).unwrap_or_default();
    match key.name {
        "discard" => Some("Invalid discard option".to_owned()),
        "vote-threshold" => match text.parse::<i128>().ok()? {
            ..1 => Some("Parameter 'vote-threshold' expects a value >= 1".to_owned()),
            _ => Some("threshold may not exceed children count".to_owned()),
        },
        "aio" | "locking" | "detect-zeroes" => Some(format!("invalid parameter value: {text}")),
        "overlap-check" => Some(unknown_overlap_check(text)),
        "cache-clean-interval" if text.starts_with('-') => Some("Cache clean interval too big".to_owned()),
        "latency-ns" if text.starts_with('-') || !value.is_string() => Some("latency-ns is invalid".to_owned()),
        _ => None,
    }
}

fn unknown_overlap_check(text: &str) -> String {
    format!(
        "Unsupported value '{text}' for qcow2 option 'overlap-check'. Allowed are any of the following: none, constant, \
         cached, all"
    )
}

/// QEMU's three lines for a parameter that is no size.
fn size_expected(parameter: &str) -> String {
    format!(
        "Parameter '{parameter}' expects a non-negative number below 2^64{LINE_END}\
         Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-{LINE_END}\
         and exabytes, respectively."
    )
}

/// QEMU's sentence for a text that is no size, or too large a one.
pub fn size_refused(parameter: &str, text: &str) -> String {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let with_suffix = text.strip_suffix(|letter: char| "bBkKmMgGtTpPeE".contains(letter));
    let digits = with_suffix.unwrap_or(text.strip_prefix('-').unwrap_or(text));
    match is_number(digits) {
        true => format!("Value '{text}' is out of range for parameter '{parameter}'"),
        false => size_expected(parameter),
    }
}

/// Checks a list of objects with these keys, and turns texts into the type of their key. `path`: the name of the list.
pub(crate) fn check_list(keys: &'static [Key], items: &mut [Value], path: &str) -> Result<()> {
    let list = path.rsplit('.').next().unwrap_or(path);
    for (index, item) in items.iter_mut().enumerate() {
        if !item.is_object() {
            let error = Error::invalid_argument(format!("option '{path}.{index}' expects an object")).value(&*item);
            return Err(error.qemu(format!("[{list}] section (index {index}) does not consist of keys")));
        }
        let known = |leaf: &String| keys.iter().any(|key| key.name == *leaf);
        if let Some(leaf) = item.as_object().and_then(|map| map.keys().find(|leaf| !known(leaf))) {
            let error = Error::invalid_argument(format!("unknown option '{path}.{index}.{leaf}'"));
            return Err(error.qemu(format!("[{list}] section doesn't support the option '{leaf}'")));
        }
        check_struct(keys, item, &format!("{path}.{index}"), "")?;
    }
    Ok(())
}

/// `leaf` is the name of the whole in its node, by which its parts begin; empty for an element of a list.
fn check_struct(keys: &'static [Key], value: &mut Value, path: &str, leaf: &str) -> Result<()> {
    let Value::Object(map) = value else {
        return Err(Error::invalid_argument(format!("option '{path}' expects an object")).value(&*value));
    };
    for (name, value) in map.iter_mut() {
        let full = format!("{path}.{name}");
        let leaf = if leaf.is_empty() { name.clone() } else { format!("{leaf}.{name}") };
        match keys.iter().find(|key| key.name == name) {
            Some(key) => {
                check_value(key, value, &full, &leaf).map_err(|error| match (&key.value, text_of(key, value)) {
                    (KeyType::Choice(_), Some(word)) if name == "template" => error.qemu(unknown_overlap_check(&word)),
                    (KeyType::Choice(_), Some(word)) if ["event", "iotype"].contains(&name.as_str()) => {
                        error.qemu(format!("invalid parameter value: {word}"))
                    }
                    (KeyType::Choice(_), Some(word)) => {
                        error.qemu(format!("Parameter '{name}' does not accept value '{word}'"))
                    }
                    _ => error,
                })?
            }
            None => return Err(Error::invalid_argument(format!("unknown option '{full}'"))),
        }
    }
    match keys.iter().find(|key| key.default == REQUIRED && !map.contains_key(key.name)) {
        Some(key) => {
            Err(Error::invalid_argument(format!("option '{path}.{}' is missing", key.name)).qemu(match key.name {
                "event" => "Missing event name for rule".to_owned(),
                name => format!("Parameter '{name}' is missing"),
            }))
        }
        None => Ok(()),
    }
}

/// A number with a fraction of zero, or with an exponent.
fn whole(number: f64) -> Option<u64> {
    const MOST: f64 = 9_007_199_254_740_992.0;
    (number.fract() == 0.0 && (0.0..=MOST).contains(&number)).then_some(number as u64)
}

/// A number, or a text that is a size.
fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => number.as_u64().or_else(|| whole(number.as_f64()?)),
        Value::String(text) => parse_size(text).ok(),
        _ => None,
    }
}

impl KeyType {
    /// The allowed values, for messages and help: "on or off", …
    pub fn describe(&self) -> String {
        match self {
            KeyType::Bool => "on or off".into(),
            KeyType::Size => "a size in bytes, with an optional suffix k, M, G, T, P or E".into(),
            KeyType::Number(min, max) if *max == u64::MAX => format!("a number of at least {min}"),
            KeyType::Number(min, max) => format!("a number from {min} to {max}"),
            KeyType::Text => "a text".into(),
            KeyType::Texts => "a text or a list of texts".into(),
            KeyType::Choice(words) => format!("one of {}", words.join(", ")),
            KeyType::Child => "a node-name or an object".into(),
            KeyType::ChildOrNull => "a node-name, an object or null".into(),
            KeyType::Struct(_) => "an object".into(),
            KeyType::ChoiceOrStruct(words, _) => format!("an object or one of {}", words.join(", ")),
            KeyType::Children => "a list of node-names or objects".into(),
            KeyType::List(_) => "a list of objects".into(),
        }
    }
}
