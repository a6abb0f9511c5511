// SPDX-License-Identifier: Apache-2.0 OR MIT
//! JSON values out of a stream of bytes: several in one read, one over many reads, garbage in between.

use crate::error::{QmpError, QmpResult};
use crate::json::parse_json;
use serde_json::Value;

/// Deepest nesting of objects and lists that is taken.
pub const MAX_DEPTH: usize = 100;

/// Longest text of one value, in bytes. A client can't make us keep more than this.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

/// Where the scanner stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Between values.
    Idle,
    /// In a number, a word or between the members of an object or list.
    Plain,
    /// In a string that ends with this byte.
    Text { quote: u8, escaped: bool },
    /// Something was wrong: up to the next line end nothing is taken.
    Skipping,
}

/// Splits a stream into JSON values.
///
/// As the protocol has it, strings may also stand in single quotes. A control character other than tab, carriage return
/// and line feed, or a byte 0xFF, outside of strings brings the stream back into its initial state.
#[derive(Debug)]
pub struct JsonStream {
    text: Vec<u8>,
    depth: usize,
    state: State,
}

impl Default for JsonStream {
    fn default() -> Self {
        Self::new()
    }
}

impl JsonStream {
    /// At the start of a value.
    pub fn new() -> Self {
        JsonStream { text: Vec::new(), depth: 0, state: State::Idle }
    }

    /// Takes bytes; the values that are complete with them, and what is wrong in between.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<QmpResult<Value>> {
        let mut found = Vec::new();
        for &byte in bytes {
            if let Some(value) = self.take(byte) {
                found.push(value);
            }
        }
        found
    }

    /// The end of the stream: a number or word at its very end is complete only now.
    pub fn finish(&mut self) -> Option<QmpResult<Value>> {
        match self.state {
            State::Plain if self.depth == 0 => Some(self.complete()),
            State::Idle | State::Skipping => None,
            State::Plain | State::Text { .. } => Some(self.fail("the input ends within a value", State::Idle)),
        }
    }

    fn take(&mut self, byte: u8) -> Option<QmpResult<Value>> {
        if self.text.len() >= MAX_TEXT_BYTES {
            return Some(self.fail("the input is too long", State::Skipping));
        }
        match self.state {
            State::Text { quote, escaped } => self.take_in_text(byte, quote, escaped),
            State::Skipping => {
                if byte == b'\n' || is_reset(byte) {
                    self.state = State::Idle;
                }
                None
            }
            State::Idle | State::Plain if is_reset(byte) => Some(self.fail("stray control character", State::Idle)),
            State::Idle | State::Plain => self.take_plain(byte),
        }
    }

    fn take_in_text(&mut self, byte: u8, quote: u8, escaped: bool) -> Option<QmpResult<Value>> {
        let go_on = |escaped| State::Text { quote, escaped };
        match (byte, escaped) {
            // JSON knows no `\'`.
            (b'\'', true) => {
                self.text.pop();
                self.text.push(byte);
                self.state = go_on(false);
            }
            (b'\\', false) => {
                self.text.push(byte);
                self.state = go_on(true);
            }
            (_, false) if byte == quote => {
                self.text.push(b'"');
                self.state = State::Plain;
                return self.complete_at_top();
            }
            (b'"', false) => {
                self.text.extend_from_slice(b"\\\"");
            }
            _ => {
                self.text.push(byte);
                self.state = go_on(false);
            }
        }
        None
    }

    fn take_plain(&mut self, byte: u8) -> Option<QmpResult<Value>> {
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => {
                if self.state == State::Plain {
                    self.text.push(b' ');
                    return self.complete_at_top();
                }
                return None;
            }
            b'"' | b'\'' => {
                self.text.push(b'"');
                self.state = State::Text { quote: byte, escaped: false };
                return None;
            }
            b'{' | b'[' => {
                if self.depth == MAX_DEPTH {
                    return Some(self.fail("nested too deep", State::Skipping));
                }
                self.depth += 1;
            }
            b'}' | b']' => {
                self.text.push(byte);
                if self.depth == 0 {
                    return Some(self.fail("unexpected closing bracket", State::Idle));
                }
                self.depth -= 1;
                self.state = State::Plain;
                return self.complete_at_top();
            }
            _ => {}
        }
        self.state = State::Plain;
        self.text.push(byte);
        None
    }

    fn complete_at_top(&mut self) -> Option<QmpResult<Value>> {
        (self.depth == 0).then(|| self.complete())
    }

    fn complete(&mut self) -> QmpResult<Value> {
        let parsed = parse_json(&self.text);
        self.reset(State::Idle);
        parsed.map_err(|error| parse_error(&error))
    }

    fn fail(&mut self, reason: &str, next: State) -> QmpResult<Value> {
        self.reset(next);
        Err(parse_error(reason))
    }

    fn reset(&mut self, next: State) {
        // What a large value took is given back.
        self.text = Vec::new();
        self.depth = 0;
        self.state = next;
    }
}

/// What forces the stream into its initial state.
fn is_reset(byte: u8) -> bool {
    byte == 0xff || (byte < b' ' && !matches!(byte, b'\t' | b'\r' | b'\n'))
}

fn parse_error(reason: &str) -> QmpError {
    QmpError::generic(format!("JSON parse error, {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn values(text: &[u8]) -> Vec<Result<Value, ()>> {
        let mut stream = JsonStream::new();
        let mut found = stream.feed(text);
        found.extend(stream.finish());
        found.into_iter().map(|value| value.map_err(|_| ())).collect()
    }

    #[test]
    fn several_values_come_out_of_one_read() {
        let text = b" {\"a\": [1, 2]}{'b':'it\\'s \"x\"'}\r\n5 true\n";
        let expected = [json!({"a": [1, 2]}), json!({"b": "it's \"x\""}), json!(5), json!(true)];
        assert_eq!(values(text), expected.map(Ok));
    }

    #[test]
    fn a_value_may_come_byte_by_byte() {
        let mut stream = JsonStream::new();
        let text = r#"{"execute": "x}", "arguments": {"y": "\\\" \u00e9 é"}}"#;
        let found: Vec<_> = text.as_bytes().chunks(1).flat_map(|byte| stream.feed(byte)).collect();
        assert_eq!(found, [Ok(json!({"execute": "x}", "arguments": {"y": "\\\" é é"}}))]);
    }

    #[test]
    fn after_garbage_the_stream_recovers() {
        assert_eq!(values(b"{\"execute\": }\n{}"), [Err(()), Ok(json!({}))]);
        assert_eq!(values(b"]{}"), [Err(()), Ok(json!({}))]);
        assert_eq!(values(b"{\"a\": [\xff{}"), [Err(()), Ok(json!({}))]);
        assert_eq!(values(b"\x1b{}"), [Err(()), Ok(json!({}))]);
        assert_eq!(values(b"{\"a\""), [Err(())]);
    }

    #[test]
    fn a_key_that_comes_twice_is_an_error_of_its_message_alone() {
        let text = b"{\"execute\": \"stop\", 'execute': \"quit\"}{\"a\": {\"b\": 1, \"b\": 2}} {}";
        let mut stream = JsonStream::new();
        let duplicate = || Err(QmpError::generic("JSON parse error, duplicate key"));
        assert_eq!(stream.feed(text), [duplicate(), duplicate(), Ok(json!({}))]);
    }

    #[test]
    fn nesting_and_length_have_their_limits() {
        let mut deep = vec![b'['; MAX_DEPTH + 50];
        deep.extend_from_slice(b"]]]\n{}");
        assert_eq!(values(&deep), [Err(()), Ok(json!({}))]);

        let mut stream = JsonStream::new();
        assert!(stream.feed(b"\"").is_empty());
        let mut errors = 0;
        for _ in 0..8 {
            errors += stream.feed(&vec![b'x'; 1 << 20]).len();
            assert!(stream.text.capacity() <= 2 * MAX_TEXT_BYTES);
        }
        assert_eq!(errors, 1);
        assert_eq!(stream.feed(b"\n{}"), [Ok(json!({}))]);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = values(&bytes);
        }

        #[test]
        fn where_reads_end_doesnt_matter(texts in proptest::collection::vec("[a-z'\" \\\\]{0,8}", 1..6), at in 1usize..9) {
            let stream: String = texts.iter().map(|text| format!("{}\n", json!({"t": text}))).collect();
            let whole = values(stream.as_bytes());
            let mut pieces = JsonStream::new();
            let found: Vec<_> =
                stream.as_bytes().chunks(at).flat_map(|bytes| pieces.feed(bytes)).map(|v| v.map_err(|_| ())).collect();
            prop_assert_eq!(&found, &whole);
            let expected: Vec<_> = texts.iter().map(|text| Ok(json!({"t": text}))).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
