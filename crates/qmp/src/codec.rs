// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The messages of the server: greeting, replies, events. ASCII, each message one object that ends with CR LF.

use crate::error::QmpResult;
use crate::order::ordered;
use serde_json::{Map, Number, Value, json};

/// Wall-clock time of an event, since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timestamp {
    /// Whole seconds; -1 when the time is not known.
    pub seconds: i64,
    /// 0 to 999,999; -1 when the time is not known.
    pub microseconds: i64,
}

/// An event, which every client gets.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name, in capitals.
    pub name: &'static str,
    /// Its members; empty for none.
    pub data: Map<String, Value>,
    /// When it happened.
    pub timestamp: Timestamp,
}

impl Event {
    /// The message.
    pub fn to_value(&self) -> Value {
        let time = json!({"seconds": self.timestamp.seconds, "microseconds": self.timestamp.microseconds});
        let mut message = Map::from_iter([("timestamp".into(), time), ("event".into(), self.name.into())]);
        if !self.data.is_empty() {
            message.insert("data".into(), Value::Object(self.data.clone()));
        }
        Value::Object(message)
    }
}

/// The first message; `version` is the result of `query-version`.
pub fn greeting(version: Value) -> Value {
    json!({"QMP": {"version": version, "capabilities": ["oob"]}})
}

/// The reply to a command that had this id.
pub fn reply(result: QmpResult<Value>, id: Option<Value>) -> Value {
    let mut message = Map::new();
    match result {
        Ok(value) => message.insert("return".into(), value),
        Err(error) => message.insert("error".into(), error.to_value()),
    };
    if let Some(id) = id {
        message.insert("id".into(), id);
    }
    Value::Object(message)
}

/// The bytes of a message, as QEMU writes them. `pretty`: over several lines, for a reader.
pub fn encode(message: &Value, pretty: bool) -> Vec<u8> {
    let mut writer = Writer { bytes: Vec::with_capacity(128), depth: pretty.then_some(0) };
    writer.value(message);
    writer.bytes.extend_from_slice(b"\r\n");
    writer.bytes
}

/// Blanks for each level of a message over several lines.
const INDENT: usize = 4;

struct Writer {
    bytes: Vec<u8>,
    /// The number of open objects and lists; `None` where all is in one line.
    depth: Option<usize>,
}

impl Writer {
    fn value(&mut self, value: &Value) {
        match value {
            Value::Null => self.put("null"),
            Value::Bool(flag) => self.put(if *flag { "true" } else { "false" }),
            Value::Number(number) => self.put(&number_text(number)),
            Value::String(text) => self.text(text),
            Value::Array(items) => self.nested('[', ']', items, |writer, item| writer.value(item)),
            Value::Object(members) => self.nested('{', '}', &ordered(members), |writer, (name, value)| {
                writer.text(name);
                writer.put(": ");
                writer.value(value);
            }),
        }
    }

    fn nested<T>(&mut self, open: char, close: char, items: &[T], mut item: impl FnMut(&mut Self, &T)) {
        self.put(open.encode_utf8(&mut [0; 4]));
        self.depth = self.depth.map(|depth| depth + 1);
        for (at, one) in items.iter().enumerate() {
            match (at, self.depth) {
                (0, _) => {}
                (_, None) => self.put(", "),
                (_, Some(_)) => self.put(","),
            }
            self.line();
            item(self, one);
        }
        self.depth = self.depth.map(|depth| depth - 1);
        self.line();
        self.put(close.encode_utf8(&mut [0; 4]));
    }

    /// A new line, where there is more than one.
    fn line(&mut self) {
        if let Some(depth) = self.depth {
            self.put("\r\n");
            self.bytes.resize(self.bytes.len() + depth * INDENT, b' ');
        }
    }

    fn put(&mut self, ascii: &str) {
        self.bytes.extend_from_slice(ascii.as_bytes());
    }

    fn text(&mut self, text: &str) {
        self.put("\"");
        for character in text.chars() {
            match character {
                '"' => self.put("\\\""),
                '\\' => self.put("\\\\"),
                '\u{8}' => self.put("\\b"),
                '\u{c}' => self.put("\\f"),
                '\n' => self.put("\\n"),
                '\r' => self.put("\\r"),
                '\t' => self.put("\\t"),
                ' '..='~' => self.bytes.push(character as u8),
                // Also DEL, which is ASCII, but not for a terminal.
                other => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        self.put(&format!("\\u{unit:04X}"));
                    }
                }
            }
        }
        self.put("\"");
    }
}

/// A number: one with a fraction by 17 digits at most, without zeroes at the end.
fn number_text(number: &Number) -> String {
    const DIGITS: i32 = 17;
    let value = match number.as_f64() {
        Some(value) if number.is_f64() => value,
        _ => return number.to_string(),
    };
    let scientific = format!("{value:.16e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let short = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if (-4..DIGITS).contains(&exponent) {
        return short(&format!("{value:.*}", usize::try_from(DIGITS - 1 - exponent).unwrap_or(0)));
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{}e{sign}{:02}", short(mantissa), exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ErrorClass, QmpError};

    fn text(message: &Value, pretty: bool) -> String {
        String::from_utf8(encode(message, pretty)).expect("ASCII")
    }

    #[test]
    fn messages_are_ascii_lines() {
        let message = json!({"return": "é\u{1f404}\u{7f}/\u{8}\u{1}"});
        assert_eq!(text(&message, false), "{\"return\": \"\\u00E9\\uD83D\\uDC04\\u007F/\\b\\u0001\"}\r\n");
        let message = json!({"return": {}, "id": [[], 1, {"a": 2}]});
        assert_eq!(text(&message, false), "{\"return\": {}, \"id\": [[], 1, {\"a\": 2}]}\r\n");
        let lines = [
            "{",
            "    \"return\": {",
            "    },",
            "    \"id\": [",
            "        [",
            "        ],",
            "        1,",
            "        {",
            "            \"a\": 2",
            "        }",
            "    ]",
            "}",
            "",
        ];
        assert_eq!(text(&message, true), lines.join("\r\n"));
    }

    #[test]
    fn members_come_in_qemus_order() {
        let messages = [
            (json!({"id": 1, "return": {}}), "{\"return\": {}, \"id\": 1}"),
            (
                json!({"error": {"desc": "x", "class": "y"}, "id": 1}),
                "{\"id\": 1, \"error\": {\"class\": \"y\", \"desc\": \"x\"}}",
            ),
            (json!({"major": 11, "minor": 1, "micro": 3}), "{\"micro\": 3, \"minor\": 1, \"major\": 11}"),
            (json!({"id": "j", "status": "null"}), "{\"status\": \"null\", \"id\": \"j\"}"),
            (
                json!({"zz-unlisted": 1, "aa-unlisted": 2, "id": 3}),
                "{\"id\": 3, \"zz-unlisted\": 1, \"aa-unlisted\": 2}",
            ),
        ];
        for (message, expected) in messages {
            assert_eq!(text(&message, false), format!("{expected}\r\n"));
        }
    }

    #[test]
    fn numbers_are_written_as_by_qemu() {
        let numbers = json!([
            1.5,
            1e3,
            1.0,
            0.1,
            1e100,
            1.2345678901234568e29,
            18446744073709551615u64,
            i64::MIN,
            -9.3e18,
            1e-5,
            -0.0,
            0.25e-4
        ]);
        let expected = "[1.5, 1000, 1, 0.10000000000000001, 1e+100, 1.2345678901234568e+29, 18446744073709551615, \
                        -9223372036854775808, -9.3e+18, 1.0000000000000001e-05, -0, 2.5000000000000001e-05]\r\n";
        assert_eq!(text(&numbers, false), expected);
    }

    #[test]
    fn replies_carry_their_id() {
        let error = QmpError::new(ErrorClass::DeviceNotFound, "gone");
        assert_eq!(
            reply(Err(error), Some(json!({"n": [1]}))),
            json!({"error": {"class": "DeviceNotFound", "desc": "gone"}, "id": {"n": [1]}})
        );
        assert_eq!(reply(Ok(json!({})), None), json!({"return": {}}));
    }

    #[test]
    fn events_have_a_time_and_perhaps_data() {
        let timestamp = Timestamp { seconds: 7, microseconds: 9 };
        let event = Event { name: "STOP", data: Map::new(), timestamp };
        assert_eq!(event.to_value(), json!({"timestamp": {"seconds": 7, "microseconds": 9}, "event": "STOP"}));
    }
}
