// SPDX-License-Identifier: Apache-2.0 OR MIT
//! JSON as QEMU's parser takes it: a key that comes twice in one object is an error, as nobody can tell which one counts.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::borrow::Cow;
use std::fmt;

/// What QEMU says of it.
const DUPLICATE: &str = "duplicate key";

/// The value of a text, or what is wrong with it.
pub fn parse_json(text: &[u8]) -> Result<Value, String> {
    let text = in_double_quotes(text);
    let mut source = serde_json::Deserializer::from_slice(&text);
    let parsed = Strict.deserialize(&mut source).and_then(|value| source.end().map(|()| value));
    parsed.map_err(|error| if error.is_data() { DUPLICATE.to_owned() } else { error.to_string() })
}

/// As QEMU has it, strings may stand in single quotes.
fn in_double_quotes(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.contains(&b'\'') {
        return Cow::Borrowed(text);
    }
    let mut result = Vec::with_capacity(text.len());
    let mut quote = None;
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        match (quote, byte) {
            (None, b'"' | b'\'') => {
                quote = Some(byte);
                result.push(b'"');
            }
            (Some(open), _) if byte == open => {
                quote = None;
                result.push(b'"');
            }
            (Some(_), b'\\') => match bytes.next() {
                // JSON knows no `\'`.
                Some(b'\'') => result.push(b'\''),
                escaped => result.extend(std::iter::once(byte).chain(escaped)),
            },
            // In single quotes a double quote needs no backslash.
            (Some(_), b'"') => result.extend_from_slice(b"\\\""),
            _ => result.push(byte),
        }
    }
    Cow::Owned(result)
}

/// Makes values whose objects have each key once.
struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Value, D::Error> {
        source.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut source: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = source.next_element_seed(Strict)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut source: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = source.next_key::<String>()? {
            let value = source.next_value_seed(Strict)?;
            if map.insert(key, value).is_some() {
                return Err(A::Error::custom(DUPLICATE));
            }
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_comes_twice_is_refused_wherever_it_stands() {
        for text in [r#"{"a": 1, "a": 2}"#, r#"{"b": [{"a": {}, "c": 1, "a": {}}]}"#, r#"{"a": 1, "\u0061": 2}"#] {
            assert_eq!(parse_json(text.as_bytes()), Err(DUPLICATE.to_owned()), "{text}");
        }
    }

    #[test]
    fn strings_may_stand_in_single_quotes() {
        let parse = |text: &str| parse_json(text.as_bytes());
        assert_eq!(parse(r#"{'a': 'b', "c": 'say "x"'}"#), Ok(serde_json::json!({"a": "b", "c": "say \"x\""})));
        assert_eq!(parse(r#"['it\'s', "it's", '\\', 'a\nb']"#), Ok(serde_json::json!(["it's", "it's", "\\", "a\nb"])));
        assert!(parse("{'a: 1}").is_err());
        assert!(parse("'").is_err());
    }

    #[test]
    fn other_values_are_those_of_the_usual_parser() {
        for text in
            [r#"{"a": {"a": [1, -2, 2.5, null, true, "x\ny"]}, "b": {"a": 18446744073709551615}}"#, "[]", "5", "\"é\""]
        {
            assert_eq!(parse_json(text.as_bytes()), Ok(serde_json::from_str::<Value>(text).unwrap()), "{text}");
        }
        for text in ["{", "{} {}", "[1,]", ""] {
            let usual = serde_json::from_str::<Value>(text).unwrap_err().to_string();
            assert_eq!(parse_json(text.as_bytes()), Err(usual), "{text}");
        }
    }
}
