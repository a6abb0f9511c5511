// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the server says: greeting, replies, events. ASCII, each message one object that ends with CR LF.

use crate::error::QmpResult;
use serde_json::{Map, Value, json};

/// Wall-clock time of an event, since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timestamp {
    /// Whole seconds; -1 when the time is not known.
    pub seconds: i64,
    /// 0 to 999,999; -1 when the time is not known.
    pub microseconds: i64,
}

/// Something that happened, told to every client.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name, in capitals.
    pub name: &'static str,
    /// What belongs to it; empty for none.
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

/// The first message; `version` is what `query-version` returns.
pub fn greeting(version: Value) -> Value {
    json!({"QMP": {"version": version, "capabilities": []}})
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

/// The bytes of a message. `pretty`: over several lines, for people.
pub fn encode(message: &Value, pretty: bool) -> Vec<u8> {
    let text = if pretty { format!("{message:#}") } else { message.to_string() };
    let mut bytes = Vec::with_capacity(text.len() + 2);
    for character in text.chars() {
        match character {
            // DEL is ASCII, but not for a terminal.
            '\u{7f}' => bytes.extend_from_slice(b"\\u007f"),
            ascii if ascii.is_ascii() => bytes.push(ascii as u8),
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    bytes.extend_from_slice(format!("\\u{unit:04x}").as_bytes());
                }
            }
        }
    }
    bytes.extend_from_slice(b"\r\n");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ErrorClass, QmpError};

    #[test]
    fn messages_are_ascii_lines() {
        let bytes = encode(&json!({"return": "é\u{1f404}\u{7f}"}), false);
        assert_eq!(bytes, b"{\"return\":\"\\u00e9\\ud83d\\udc04\\u007f\"}\r\n");
        let pretty = encode(&json!({"a": 1}), true);
        assert_eq!(pretty, b"{\n  \"a\": 1\n}\r\n");
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
