// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The option tree, which is made of `json:{…}`, `--image-opts`, `--blockdev` and `blockdev-add`.

use super::keyval::{BareKey, parse_list};
use cowshed_types::keyval::next_item;
use cowshed_types::{Error, LINE_END, Result, text_of_name};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Deepest nesting of dotted keys; the JSON parser has a limit of its own (128).
const MAX_DEPTH: usize = 64;
/// Most elements of a list given by dotted keys.
const MAX_LIST: usize = 4096;

/// Options of a node and its children, nested: a child is a node-name, an object with the child's options, or null.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockdevOptions(Map<String, Value>);

impl BlockdevOptions {
    /// No options.
    pub fn new() -> Self {
        Self::default()
    }

    /// From a JSON object. Its keys may be dotted too.
    pub fn from_map(map: Map<String, Value>) -> Result<Self> {
        Ok(BlockdevOptions(unfold(map, 0)?))
    }

    /// From the text of a JSON object.
    pub fn from_json(text: &str) -> Result<Self> {
        match cowshed_qmp::parse_json(text.as_bytes()) {
            Ok(Value::Object(map)) => Self::from_map(names_without_line_ends(map)),
            Ok(_) => Err(Error::invalid_argument("the JSON text of block device options must be an object")
                .qemu("Invalid JSON object given")),
            Err(error) => Err(Error::invalid_argument(format!("Could not parse the JSON options: {error}"))),
        }
    }

    /// From a `json:{…}` pseudo file name; `None` when `name` isn't one.
    pub fn from_json_name(name: &str) -> Option<Result<Self>> {
        name.strip_prefix("json:").map(Self::from_json)
    }

    /// From `driver=qcow2,file.filename=disk.qcow2,…`. The last one of a repeated key counts; a key without a value is
    /// `on`.
    pub fn from_keyval(text: &str) -> Result<Self> {
        let mut map = Map::new();
        for (key, value) in parse_list(text, BareKey::On)? {
            map.insert(key, Value::String(value));
        }
        Self::from_map(map)
    }

    /// From the value of `--image-opts`: as [`BlockdevOptions::from_keyval`], but a word without `=` in front is the name of a
    /// node, of which there is none.
    pub fn from_image_opts(text: &str) -> Result<Self> {
        let (first, rest) = next_item(text);
        if text.is_empty() || first.contains('=') {
            let options = Self::from_keyval(text);
            return match gap(text) {
                Some(words) => Err(options.err().unwrap_or_else(|| Error::invalid_argument(&words)).qemu(words)),
                None => options,
            };
        }
        let error = Error::invalid_argument(format!("Cannot find device='{first}' nor node-name='{first}'"));
        // The word is the node of the child `file`, which takes no options then.
        Err(match rest.starts_with("file.") || rest.contains(",file.") {
            false => error,
            true => error.qemu("Cannot reference an existing block device with additional options or a new filename"),
        })
    }

    /// The value of a key of this node.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// A text value of this node.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(Value::as_str)
    }

    /// Sets a key.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        self.0.insert(key.into(), value.into());
    }

    /// Sets a key and returns the options.
    #[must_use]
    pub fn with(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.insert(key, value);
        self
    }

    /// These options with others laid over them, nested ones key by key.
    pub fn overlaid(self, over: BlockdevOptions) -> Result<BlockdevOptions> {
        let mut merged = Value::from(self);
        overlay(&mut merged, over.into());
        match merged {
            Value::Object(map) => Self::from_map(map),
            _ => Err(Error::internal("options are no object")),
        }
    }

    /// Takes a key out.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        self.0.shift_remove(key)
    }

    /// Sets `aio` at the host file below: the first node from the top on that is one. A tree without a host file stays
    /// as it is. True where there is one.
    pub fn set_aio(&mut self, mode: &str) -> bool {
        let mut node = &mut self.0;
        loop {
            let driver = node.get("driver").and_then(Value::as_str);
            if matches!(driver, Some("file" | "host_device" | "host_cdrom"))
                || (driver.is_none() && node.contains_key("filename"))
            {
                node.insert("aio".to_owned(), mode.into());
                return true;
            }
            // A driver has one of the two.
            let child = if node.contains_key("image") { "image" } else { "file" };
            match node.get_mut(child) {
                Some(Value::Object(below)) => node = below,
                _ => return false,
            }
        }
    }

    /// True when no key is set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The keys and values of this node.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.0.iter()
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = (&String, &mut Value)> {
        self.0.iter_mut()
    }

    /// As the text behind `json:`.
    pub fn to_json(&self) -> String {
        Value::Object(self.0.clone()).to_string()
    }

    /// As a pseudo file name, `json:{…}`.
    pub fn to_json_name(&self) -> String {
        format!("json:{}", self.to_json())
    }
}

/// Lays the keys of `over` onto `under`, nested objects key by key.
fn overlay(under: &mut Value, over: Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            for (key, value) in over {
                overlay(under.entry(key).or_insert(Value::Null), value);
            }
        }
        (under, over) => *under = over,
    }
}

impl From<BlockdevOptions> for Value {
    fn from(options: BlockdevOptions) -> Value {
        Value::Object(options.0)
    }
}

/// `on`/`yes`/`true`/`y` or `off`/`no`/`false`/`n`.
pub(crate) fn parse_bool(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// The escapes of JSON can write a [`LINE_END`], which no text of a name has.
fn names_without_line_ends(map: Map<String, Value>) -> Map<String, Value> {
    let name = |text: String| match text.contains(LINE_END) {
        true => text.replace(LINE_END, &text_of_name(LINE_END.to_string().as_bytes())),
        false => text,
    };
    let value = |value: Value| match value {
        Value::String(text) => Value::String(name(text)),
        Value::Object(inner) => Value::Object(names_without_line_ends(inner)),
        other => other,
    };
    map.into_iter().map(|(key, inner)| (name(key), value(inner))).collect()
}

/// Turns dotted keys into nested objects and lists, at every level.
fn unfold(map: Map<String, Value>, depth: usize) -> Result<Map<String, Value>> {
    if depth > MAX_DEPTH {
        return Err(Error::invalid_argument(format!("options are nested deeper than {MAX_DEPTH}")));
    }
    let mut result = Map::new();
    let mut dotted: Vec<String> = Vec::new();
    for (key, value) in map {
        let value = match value {
            Value::Object(inner) => Value::Object(unfold(inner, depth + 1)?),
            other => other,
        };
        match key.split_once('.') {
            // An empty part begins no nested option: the driver refuses the whole key.
            None | Some(("", _)) => merge(&mut result, &key, value, &key)?,
            Some((first, rest)) => {
                if !dotted.iter().any(|known| known == first) {
                    dotted.push(first.to_owned());
                }
                // The rest is unfolded with its siblings, once they are all there.
                let nested = Map::from_iter([(rest.to_owned(), value)]);
                merge(&mut result, first, Value::Object(nested), &key)?;
            }
        }
    }
    for key in dotted {
        if let Some(Value::Object(inner)) = result.get_mut(&key) {
            let inner = unfold(std::mem::take(inner), depth + 1)?;
            let value = as_list(inner, &key)?;
            result.insert(key, value);
        }
    }
    Ok(result)
}

/// Adds `value` under `key`; two objects become one, anything else twice contradicts itself.
fn merge(map: &mut Map<String, Value>, key: &str, value: Value, path: &str) -> Result<()> {
    match (map.get_mut(key), value) {
        (None, value) => {
            map.insert(key.to_owned(), value);
        }
        (Some(Value::Object(known)), Value::Object(more)) => {
            for (inner, value) in more {
                merge(known, &inner, value, path)?;
            }
        }
        (Some(known), value) if *known == value => {}
        (Some(known), value) => {
            let error = Error::invalid_argument(format!("option '{path}' contradicts another option '{key}'"));
            let is_node = known.is_string() && value.is_object() || known.is_object() && value.is_string();
            let sentence = "Cannot reference an existing block device with additional options or a new filename";
            return Err(if is_node { error.qemu(sentence) } else { error });
        }
    }
    Ok(())
}

/// QEMU's words for a list in `--image-opts` whose elements aren't numbered 0, 1, 2, …: each driver has its own.
fn gap(text: &str) -> Option<String> {
    let pairs = parse_list(text, BareKey::On).ok()?;
    let mut lists: Vec<(&str, Vec<(&str, &str)>)> = Vec::new();
    for (key, _) in &pairs {
        for (at, _) in key.match_indices('.') {
            let (list, rest) = (&key[..at], &key[at + 1..]);
            let index = rest.split('.').next().unwrap_or_default();
            match lists.iter_mut().find(|(known, _)| *known == list) {
                Some((_, elements)) => elements.push((index, rest)),
                None => lists.push((list, vec![(index, rest)])),
            }
        }
    }
    let is_list = |elements: &[(&str, &str)]| elements.iter().all(|(index, _)| index.parse::<u32>().is_ok());
    for (list, elements) in lists.iter().filter(|(_, elements)| is_list(elements)) {
        let has = |number: usize| elements.iter().any(|(index, _)| *index == number.to_string());
        let count = (0..elements.len()).take_while(|number| has(*number)).count();
        let is_left = |index: &str| !(0..count).any(|number| index == number.to_string());
        let Some((_, left)) = elements.iter().find(|(index, _)| is_left(index)) else { continue };
        let name = list.rsplit('.').next().unwrap_or(list);
        let numbers: BTreeSet<u32> = elements.iter().filter_map(|(index, _)| index.parse().ok()).collect();
        let (seen, largest) = (numbers.len(), numbers.last().copied().unwrap_or_default());
        return Some(match name {
            "inject-error" | "set-state" => format!("Unused option '{left}' for [{name}]"),
            "children" => format!("Option {name} is not a valid array"),
            _ => format!("List indices are not contiguous, saw {seen} elements but {largest} largest index"),
        });
    }
    None
}

/// An object whose keys are 0, 1, 2, … is a list.
fn as_list(map: Map<String, Value>, path: &str) -> Result<Value> {
    let is_index = |key: &String| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit());
    if map.is_empty() || !map.keys().all(is_index) {
        return Ok(Value::Object(map));
    }
    let is_there = |index: &usize| map.contains_key(&index.to_string());
    let missing = (0..map.len()).find(|index| !is_there(index)).unwrap_or_default();
    let gap = || {
        let error = Error::invalid_argument(format!("the elements of list '{path}' must be numbered from 0 on"));
        error.qemu(format!("Parameter '{path}.{missing}' missing"))
    };
    let mut items: Vec<Option<Value>> = vec![None; map.len().min(MAX_LIST)];
    for (key, value) in map {
        let slot = key.parse::<usize>().ok().and_then(|index| items.get_mut(index)).ok_or_else(gap)?;
        *slot = Some(value);
    }
    let items: Option<Vec<Value>> = items.into_iter().collect();
    items.map(Value::Array).ok_or_else(gap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn keyval(text: &str) -> Value {
        BlockdevOptions::from_keyval(text).unwrap().into()
    }

    #[test]
    fn dotted_keys_nest() {
        assert_eq!(
            keyval("driver=qcow2,file.driver=file,file.filename=a,,b.qcow2,backing.file.filename=x"),
            json!({"driver": "qcow2", "file": {"driver": "file", "filename": "a,b.qcow2"},
                   "backing": {"file": {"filename": "x"}}})
        );
        assert_eq!(
            keyval("rules.0.op=read,rules.1.op=write,rules.0.errno=5"),
            json!({"rules": [{"op": "read", "errno": "5"}, {"op": "write"}]})
        );
    }

    #[test]
    fn json_keys_may_be_dotted_and_mixed() {
        let options = BlockdevOptions::from_json_name(
            r#"json:{"driver":"raw","file.filename":"a","file":{"driver":"file"},"x":{"y.z":1}}"#,
        );
        assert_eq!(
            Value::from(options.unwrap().unwrap()),
            json!({"driver": "raw", "file": {"filename": "a", "driver": "file"}, "x": {"y": {"z": 1}}})
        );
        assert!(BlockdevOptions::from_json_name("disk.json").is_none());
    }

    #[test]
    fn contradictions_are_refused() {
        for text in ["file=a,file.filename=b", "file.filename=b,file=a", "l.0=1,l.2=2", "l.00=1,l.0=2"] {
            assert!(BlockdevOptions::from_keyval(text).is_err(), "{text}");
        }
        for text in ["json:", "json:[]", "json:{", "json:{\"a\":1,\"a.b\":2}"] {
            assert!(BlockdevOptions::from_json_name(text).unwrap().is_err(), "{text}");
        }
        assert!(BlockdevOptions::from_keyval(&format!("{}a=1", "a.".repeat(200))).is_err());
    }

    #[test]
    fn an_empty_part_of_a_key_stays() {
        assert_eq!(keyval("a..b=1,.c=2,d.=3"), json!({"a": {".b": "1"}, ".c": "2", "d": {"": "3"}}));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*", keys in "([a-c0-2.]{1,8}=[a-z,]{0,3},?){0,6}") {
            let _ = BlockdevOptions::from_keyval(&text);
            let _ = BlockdevOptions::from_keyval(&keys);
            let _ = BlockdevOptions::from_json(&text);
        }

        #[test]
        fn json_names_come_back(name in "\\PC*", key in "[a-z-]{1,8}") {
            let options = BlockdevOptions::new().with(key, name);
            let back = BlockdevOptions::from_json_name(&options.to_json_name()).unwrap().unwrap();
            prop_assert_eq!(back, options);
        }
    }
}
