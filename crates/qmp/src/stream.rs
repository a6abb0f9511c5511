// SPDX-License-Identifier: Apache-2.0 OR MIT
//! JSON values out of a stream of bytes: several in one read, one over many reads, garbage in between.

use crate::error::{QmpError, QmpResult};
use crate::json::{Parser, TOO_LONG};
use crate::lexer::Lexer;
use serde_json::Value;

/// Longest text of one value, in bytes. A client can't make us keep more than this.
pub const MAX_TEXT_BYTES: usize = 4 << 20;

/// Splits a stream into JSON values.
///
/// As in the protocol, strings may also have single quotes. A control character other than tab, carriage return and
/// line feed, or a byte 0xFF, brings the stream back into its initial state.
#[derive(Debug)]
pub struct JsonStream {
    lexer: Lexer,
    parser: Parser,
    /// Length of the open value in bytes.
    len: usize,
}

impl Default for JsonStream {
    fn default() -> Self {
        Self::new()
    }
}

impl JsonStream {
    /// At the start of a value.
    pub fn new() -> Self {
        JsonStream { lexer: Lexer::new(MAX_TEXT_BYTES), parser: Parser::default(), len: 0 }
    }

    /// Takes bytes; returns the values that are complete with them, and the faults in between.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<QmpResult<Value>> {
        let mut found = Vec::new();
        let mut rest = bytes;
        loop {
            let len = self.lexer.take_text(rest);
            self.len += len;
            let Some((&byte, behind)) = rest[len..].split_first() else { break };
            rest = behind;
            for token in self.lexer.take(byte).into_iter().flatten() {
                found.extend(self.parser.take(token));
            }
            self.len = if self.parser.is_idle() { 0 } else { self.len + 1 };
            if self.len > MAX_TEXT_BYTES && self.parser.give_up() {
                found.push(Err(TOO_LONG.to_owned()));
            }
        }
        found.into_iter().map(|value| value.map_err(QmpError::generic)).collect()
    }

    /// The end of the stream: a number or word at its very end is complete only now.
    pub fn finish(&mut self) -> Option<QmpResult<Value>> {
        let found = self.lexer.finish().0.and_then(|token| self.parser.take(token));
        *self = Self::new();
        found.map(|value| value.map_err(QmpError::generic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::MAX_DEPTH;
    use proptest::prelude::*;
    use serde_json::json;

    fn values(text: &[u8]) -> Vec<Result<Value, String>> {
        let mut stream = JsonStream::new();
        let mut found = stream.feed(text);
        found.extend(stream.finish());
        found.into_iter().map(|value| value.map_err(|error| error.description)).collect()
    }

    /// The faults of a text in a stream, in QEMU's words.
    fn errors(text: &[u8]) -> Vec<String> {
        values(text).into_iter().filter_map(Result::err).collect()
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
    fn after_garbage_the_stream_recovers_where_qemus_does() {
        // Each of these ends with a value that is taken.
        let cases: &[(&[u8], &[&str])] = &[
            (b"{\"execute\": }\n{}", &["1:13: JSON parse error, expecting value"]),
            (b"]{}", &["1:1: JSON parse error, expecting value"]),
            (b"[1}{}", &["1:4: JSON parse error, expected ',' or ']'"]),
            (b"{\"a\":[}]}{}", &["1:7: JSON parse error, expecting value", "1:9: JSON parse error, expecting value"]),
            (b"{\"a\": [\xff{}", &["1:8: JSON parse error, stray '\u{fffd}'"]),
            (b"\x1b{}", &["1:1: JSON parse error, stray '\x1b'"]),
            (b"{\"a\": \"a\n{}", &["1:7: JSON parse error, stray '\"a\n'"]),
            (b"1.5e 01 {}", &["1:1: JSON parse error, stray '1.5e '"]),
            (b"1.5e 7}{}", &["1:1: JSON parse error, stray '1.5e '", "1:8: JSON parse error, expecting value"]),
            (b"1.5e 7:\n{}", &["1:1: JSON parse error, stray '1.5e '", "1:8: JSON parse error, expecting value"]),
            (b"\x01 \x02 {}", &["1:1: JSON parse error, stray '\x01'", "1:4: JSON parse error, stray '\x02'"]),
            (b"{\"a\":1,\"a\":x}{}", &["1:12: JSON parse error, invalid keyword 'x'"]),
        ];
        for (text, expected) in cases {
            let about = String::from_utf8_lossy(text);
            assert_eq!(errors(text), *expected, "{about}");
            assert_eq!(values(text).last(), Some(&Ok(json!({}))), "{about}");
        }
        assert_eq!(values(b"{\"a\""), []);
    }

    #[test]
    fn duplicate_key_fails_its_message_alone() {
        let text = b"{\"execute\": \"stop\", 'execute': \"quit\"}{\"a\": {\"b\": 1, \"b\": 2}} {}";
        assert_eq!(errors(text).len(), 2);
        assert_eq!(values(text).last(), Some(&Ok(json!({}))));
    }

    #[test]
    fn nesting_and_length_have_their_limits() {
        let nested = |depth: usize| [vec![b'['; depth], vec![b']'; depth], b"{}".to_vec()].concat();
        assert_eq!(errors(&nested(MAX_DEPTH)), [""; 0]);
        assert_eq!(errors(&nested(MAX_DEPTH + 50)), ["JSON nesting depth limit exceeded"]);
        assert_eq!(values(&nested(MAX_DEPTH + 50)).last(), Some(&Ok(json!({}))));

        let mut stream = JsonStream::new();
        assert!(stream.feed(b"\"").is_empty());
        let errors: usize = (0..8).map(|_| stream.feed(&vec![b'x'; 1 << 20]).len()).sum();
        assert_eq!(errors, 1);
        assert_eq!(stream.feed(b"\n{}"), [Ok(json!({}))]);
        let long = [b"\"".to_vec(), vec![b'x'; 1 << 20], b"\",".to_vec()].concat();
        let errors: usize =
            std::iter::once(stream.feed(b"[").len()).chain((0..5).map(|_| stream.feed(&long).len())).sum();
        assert_eq!(errors, 1);
        assert_eq!(stream.feed(b"1]{}"), [Ok(json!({}))]);
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
            let found: Vec<_> = stream
                .as_bytes()
                .chunks(at)
                .flat_map(|bytes| pieces.feed(bytes))
                .map(|value| value.map_err(|error| error.description))
                .collect();
            prop_assert_eq!(&found, &whole);
            let expected: Vec<_> = texts.iter().map(|text| Ok(json!({"t": text}))).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
