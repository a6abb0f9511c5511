// SPDX-License-Identifier: Apache-2.0 OR MIT
//! JSON as qemu-img prints it: four spaces, an empty list on two lines, keys in its order.
//!
//! QEMU's order of keys is fixed (it comes from the hashes of their names), so one list can hold it. Some callers
//! compare the text, so we keep to it.

use super::Console;
use cowshed_types::shown_name;
use serde_json::{Map, Value};

/// Every key of `info`, `check` and `measure`, in the order of QEMU's output (observed with 7.2 and 11.1). Keys of
/// different objects are in one list: the order is the same wherever two of them meet.
const ORDER: &[&str] = &[
    "limits",
    "compressed",
    "cid",
    "parent-cid",
    "create-type",
    "extents",
    "write-zeroes-alignment",
    "request-alignment",
    "opt-transfer",
    "min-mem-alignment",
    "max-transfer",
    "max-hw-transfer",
    "discard-alignment",
    "opt-mem-alignment",
    "max-iov",
    "max-hw-iov",
    "max-write-zeroes",
    "max-discard",
    "icount",
    "image-end-offset",
    "compressed-clusters",
    "total-clusters",
    "corruptions-fixed",
    "corruptions",
    "check-errors",
    "leaks-fixed",
    "leaks",
    "children",
    "backing-filename-format",
    "snapshots",
    "virtual-size",
    "vm-clock-nsec",
    "flags",
    "allocated-clusters",
    "bitmaps-fixed",
    "name",
    "granularity",
    "info",
    "filename",
    "cluster-size",
    "type",
    "ivgen-alg",
    "detached-header",
    "hash-alg",
    "cipher-alg",
    "uuid",
    "ivgen-hash-alg",
    "format",
    "cipher-mode",
    "slots",
    "payload-offset",
    "master-key-iters",
    "fragmented-clusters",
    "actual-size",
    "format-specific",
    "full-backing-filename",
    "encrypted",
    "backing-filename",
    "dirty-flag",
    "date-sec",
    "date-nsec",
    "vm-clock-sec",
    "id",
    "vm-state-size",
    "compat",
    "compression-type",
    "lazy-refcounts",
    "bitmaps",
    "required",
    "fully-allocated",
    "refcount-bits",
    "data-file",
    "data-file-raw",
    "encrypt",
    "corrupt",
    "extended-l2",
    "active",
    "iters",
    "key-offset",
    "stripes",
    "data",
];

/// Puts the keys of every object in QEMU's order; unknown ones follow in the order they came in.
pub fn in_qemu_order(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<(String, Value)> = map.into_iter().collect();
            entries.sort_by_key(|(key, _)| ORDER.iter().position(|known| known == key).unwrap_or(ORDER.len()));
            Value::Object(entries.into_iter().map(|(key, value)| (key, in_qemu_order(value))).collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(in_qemu_order).collect()),
        other => other,
    }
}

/// The value as qemu-img prints it, without a line end after it.
pub fn pretty(value: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, value, 0);
    text
}

/// Prints the object as [`pretty`] shows it, with a list as its last entry. An item at a time: there may be a hundred
/// thousand.
pub fn print_with_list(console: &mut Console, object: &Value, key: &str, items: impl Iterator<Item = Value>) {
    let mut text = pretty(object);
    text.truncate(text.trim_end_matches(['\n', '}']).len());
    text.push_str(",\n");
    indent(&mut text, 1);
    write_string(&mut text, key);
    text.push_str(": [");
    for (index, item) in items.enumerate() {
        text.push_str(if index == 0 { "\n" } else { ",\n" });
        indent(&mut text, 2);
        write_value(&mut text, &item, 2);
        console.print_text(&text);
        text.clear();
    }
    text.push_str("\n    ]\n}\n");
    console.print_text(&text);
}

fn write_value(text: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Object(map) => {
            let entries = map.iter().map(|(key, value)| (Some(key.as_str()), value));
            write_items(text, ('{', '}'), entries, depth);
        }
        Value::Array(items) => write_items(text, ('[', ']'), items.iter().map(|value| (None, value)), depth),
        Value::String(string) => write_string(text, string),
        other => text.push_str(&other.to_string()),
    }
}

fn write_items<'a>(
    text: &mut String,
    (open, close): (char, char),
    items: impl Iterator<Item = (Option<&'a str>, &'a Value)>,
    depth: usize,
) {
    text.push(open);
    let mut separator = "\n";
    for (key, value) in items {
        text.push_str(separator);
        separator = ",\n";
        indent(text, depth + 1);
        if let Some(key) = key {
            write_string(text, key);
            text.push_str(": ");
        }
        write_value(text, value, depth + 1);
    }
    text.push('\n');
    indent(text, depth);
    text.push(close);
}

fn indent(text: &mut String, depth: usize) {
    for _ in 0..depth {
        text.push_str("    ");
    }
}

/// QEMU escapes everything outside ASCII, as UTF-16 code units, and DEL; bytes that are no UTF-8 become U+FFFD.
fn write_string(text: &mut String, string: &str) {
    text.push('"');
    for character in shown_name(string).chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            ' '..='~' => text.push(character),
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    text.push_str(&format!("\\u{unit:04X}"));
                }
            }
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn empty_lists_take_two_lines() {
        assert_eq!(pretty(&json!({"children": [], "n": 1})), "{\n    \"children\": [\n    ],\n    \"n\": 1\n}");
    }

    #[test]
    fn keys_are_put_in_order_and_unknown_ones_last() {
        let value = json!({"zzz": 1, "format": "qcow2", "filename": "a", "virtual-size": 5});
        let ordered = in_qemu_order(value);
        let keys: Vec<_> = ordered.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["virtual-size", "filename", "format", "zzz"]);
    }

    #[test]
    fn strings_are_escaped() {
        assert_eq!(pretty(&json!("a\"b\\\u{e9}\u{1f404}")), "\"a\\\"b\\\\\\u00E9\\uD83D\\uDC04\"");
    }
}
