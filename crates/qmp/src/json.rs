// SPDX-License-Identifier: Apache-2.0 OR MIT
//! JSON as QEMU's parser takes it, with its words for errors. Strings may have single quotes. A key that comes twice in
//! one object is an error, because either value could be meant.

use crate::lexer::{Kind, Lexer, Position, Token};
use serde_json::{Map, Number, Value};

/// The deepest nesting of objects and lists that is taken.
pub const MAX_DEPTH: usize = 1024;

/// QEMU's sentence for a text that is longer than it takes.
pub(crate) const TOO_LONG: &str = "JSON token size limit exceeded";

/// The value of a text, or its fault.
pub fn parse_json(text: &[u8]) -> Result<Value, String> {
    let (mut lexer, mut parser) = (Lexer::new(usize::MAX), Parser::default());
    let mut values = Vec::new();
    for &byte in text {
        for token in lexer.take(byte).into_iter().flatten() {
            values.extend(parser.take(token));
        }
    }
    let (token, end) = lexer.finish();
    values.extend(token.and_then(|token| parser.take(token)));
    values.extend(parser.finish(end));
    let mut values = values.into_iter();
    match (values.next(), values.next()) {
        (None, _) => Err("Expecting a JSON value".to_owned()),
        (Some(Ok(_)), Some(_)) => Err("Expecting at most one JSON value".to_owned()),
        (Some(first), _) => first,
    }
}

/// An object or list that is open.
#[derive(Debug)]
enum Open {
    List(Vec<Value>),
    /// With the key of the value that comes next.
    Object(Map<String, Value>, String),
}

/// The tokens that may come next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Expected {
    #[default]
    Value,
    /// Or the end of the list.
    FirstValue,
    Key,
    /// Or the end of the object.
    FirstKey,
    Colon,
    More,
}

/// Tokens to values. After an error it takes nothing up to the end of the open value.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    open: Vec<Open>,
    expected: Expected,
    braces: i64,
    brackets: i64,
    skips: bool,
}

type Parsed<T> = Result<T, String>;

impl Parser {
    /// Takes a token; returns a value that is complete with it, or the fault.
    pub fn take(&mut self, token: Token) -> Option<Parsed<Value>> {
        match token.kind {
            Kind::Stray(text) => {
                *self = Parser::default();
                let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
                return Some(Err(wrong(token.place, &format!("stray '{}'", String::from_utf8_lossy(text)))));
            }
            Kind::TooLong => {
                *self = Parser::default();
                return Some(Err(TOO_LONG.to_owned()));
            }
            Kind::Mark(b'{') => self.braces += 1,
            Kind::Mark(b'}') => self.braces -= 1,
            Kind::Mark(b'[') => self.brackets += 1,
            Kind::Mark(b']') => self.brackets -= 1,
            _ => {}
        }
        let mut result = None;
        if !self.skips {
            result = self.step(token).transpose();
            self.skips = matches!(result, Some(Err(_)));
        }
        if self.braces < 0 || self.brackets < 0 || self.braces == 0 && self.brackets == 0 {
            *self = Parser::default();
        }
        result
    }

    /// The end of the input, which may leave something open.
    pub fn finish(&mut self, end: Position) -> Option<Parsed<Value>> {
        let is_open = !self.open.is_empty() && !self.skips;
        *self = Parser::default();
        is_open.then(|| Err(wrong(end, "premature end of input")))
    }

    /// True between values.
    pub fn is_idle(&self) -> bool {
        self.braces == 0 && self.brackets == 0
    }

    /// Gives up the value that is open, and its memory. False when that has been done before.
    pub fn give_up(&mut self) -> bool {
        let first = !self.skips;
        *self = Parser { skips: true, braces: self.braces, brackets: self.brackets, ..Parser::default() };
        first
    }

    fn step(&mut self, token: Token) -> Parsed<Option<Value>> {
        let place = token.place;
        match (self.expected, token.kind) {
            (Expected::FirstKey, Kind::Mark(b'}')) | (Expected::FirstValue, Kind::Mark(b']')) => self.close(place),
            (Expected::Key | Expected::FirstKey, Kind::Text(text)) => {
                let name = self::text(&text, place)?;
                if let Some(Open::Object(_, key)) = self.open.last_mut() {
                    *key = name;
                }
                self.expected = Expected::Colon;
                Ok(None)
            }
            (Expected::Key | Expected::FirstKey, _) => Err(wrong(place, "expecting key")),
            (Expected::Colon, Kind::Mark(b':')) => {
                self.expected = Expected::Value;
                Ok(None)
            }
            (Expected::Colon, _) => Err(wrong(place, "expecting ':'")),
            (Expected::More, kind) => match (self.open.last(), kind) {
                (Some(Open::Object(..)), Kind::Mark(b'}')) | (Some(Open::List(_)), Kind::Mark(b']')) => {
                    self.close(place)
                }
                (Some(Open::Object(..)), Kind::Mark(b',')) => {
                    self.expected = Expected::Key;
                    Ok(None)
                }
                (Some(Open::List(_)), Kind::Mark(b',')) => {
                    self.expected = Expected::Value;
                    Ok(None)
                }
                (Some(Open::Object(..)), _) => Err(wrong(place, "expected ',' or '}'")),
                _ => Err(wrong(place, "expected ',' or ']'")),
            },
            (Expected::Value | Expected::FirstValue, kind) => self.value(kind, place),
        }
    }

    fn value(&mut self, kind: Kind, place: Position) -> Parsed<Option<Value>> {
        let value = match kind {
            Kind::Mark(mark @ (b'{' | b'[')) => {
                if self.open.len() == MAX_DEPTH {
                    return Err("JSON nesting depth limit exceeded".to_owned());
                }
                let (open, expected) = match mark {
                    b'{' => (Open::Object(Map::new(), String::new()), Expected::FirstKey),
                    _ => (Open::List(Vec::new()), Expected::FirstValue),
                };
                self.open.push(open);
                self.expected = expected;
                return Ok(None);
            }
            Kind::Text(bytes) => Value::String(text(&bytes, place)?),
            Kind::Number(text) => number(&text),
            Kind::Word(word) => match &word[..] {
                b"true" => Value::Bool(true),
                b"false" => Value::Bool(false),
                b"null" => Value::Null,
                _ => {
                    return Err(wrong(place, &format!("invalid keyword '{}'", String::from_utf8_lossy(&word))));
                }
            },
            _ => return Err(wrong(place, "expecting value")),
        };
        self.put(value, place)
    }

    /// Ends the innermost object or list.
    fn close(&mut self, place: Position) -> Parsed<Option<Value>> {
        match self.open.pop() {
            Some(Open::List(items)) => self.put(Value::Array(items), place),
            Some(Open::Object(members, _)) => self.put(Value::Object(members), place),
            None => Err(wrong(place, "expecting value")),
        }
    }

    /// Puts a complete value where it belongs.
    fn put(&mut self, value: Value, place: Position) -> Parsed<Option<Value>> {
        self.expected = Expected::More;
        match self.open.last_mut() {
            None => {
                self.expected = Expected::Value;
                return Ok(Some(value));
            }
            Some(Open::List(items)) => items.push(value),
            Some(Open::Object(members, key)) => {
                if members.insert(std::mem::take(key), value).is_some() {
                    return Err(wrong(place, "duplicate key"));
                }
            }
        }
        Ok(None)
    }
}

fn wrong(place: Position, what: &str) -> String {
    format!("{}:{}: JSON parse error, {what}", place.line, place.column)
}

fn number(text: &[u8]) -> Value {
    let text = std::str::from_utf8(text).unwrap_or_default();
    if let Ok(number) = text.parse::<i64>() {
        return number.into();
    }
    if let Ok(number) = text.parse::<u64>() {
        return number.into();
    }
    text.parse::<f64>().ok().and_then(Number::from_f64).map_or(Value::Null, Value::Number)
}

/// The text in a token in quotes.
fn text(token: &[u8], place: Position) -> Parsed<String> {
    let mut bytes = token.get(1..token.len().saturating_sub(1)).unwrap_or_default();
    let mut result = String::new();
    while let Some((&byte, rest)) = bytes.split_first() {
        if byte != b'\\' {
            let (character, len) = character(bytes).ok_or_else(|| wrong(place, "invalid UTF-8 sequence in string"))?;
            result.push(character);
            bytes = &bytes[len..];
            continue;
        }
        let escape = rest.first().copied().unwrap_or_default();
        bytes = rest.get(1..).unwrap_or_default();
        result.push(match escape {
            b'"' | b'\'' | b'\\' | b'/' => char::from(escape),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let (character, len) = escaped(bytes).ok_or_else(|| {
                    // The quote that ends the token belongs to the text shown.
                    let shown = &token[token.len() - 1 - bytes.len()..];
                    let shown = String::from_utf8_lossy(&shown[..shown.len().min(4)]);
                    wrong(place, &format!("\\u{shown} is not a valid Unicode character"))
                })?;
                bytes = &bytes[len..];
                character
            }
            _ => return Err(wrong(place, "invalid escape sequence in string")),
        });
    }
    Ok(result)
}

/// The first character, and how many bytes it takes. Two bytes may stand for NUL.
fn character(bytes: &[u8]) -> Option<(char, usize)> {
    if bytes.starts_with(&[0xc0, 0x80]) {
        return Some(('\0', 2));
    }
    let len = match bytes.first()? {
        ..0x80 => 1,
        ..0xe0 => 2,
        ..0xf0 => 3,
        _ => 4,
    };
    let found = std::str::from_utf8(bytes.get(..len)?).ok()?.chars().next()?;
    is_character(found).then_some((found, len))
}

/// The character of four digits, or of two times four, and how many bytes it takes.
fn escaped(bytes: &[u8]) -> Option<(char, usize)> {
    let unit = |at: usize| {
        let digits = bytes.get(at..at + 4)?;
        let all = digits.iter().all(u8::is_ascii_hexdigit);
        all.then(|| u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()).flatten()
    };
    let first = unit(0)?;
    let (units, len) = match first {
        0xd800..0xdc00 if bytes.get(4..6) == Some(b"\\u") => (vec![first, unit(6)?], 10),
        _ => (vec![first], 4),
    };
    let mut decoded = char::decode_utf16(units);
    let (found, rest) = (decoded.next()?.ok()?, decoded.next());
    (rest.is_none() && is_character(found)).then_some((found, len))
}

/// False for code points that are no characters.
fn is_character(found: char) -> bool {
    let code = u32::from(found);
    code & 0xfffe != 0xfffe && !(0xfdd0..0xfdf0).contains(&code)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts and QEMU's errors about them.
    const WRONG: &[(&str, &str)] = &[
        ("{x}", "1:2: JSON parse error, expecting key"),
        ("{", "1:2: JSON parse error, premature end of input"),
        ("{\"a\":1", "1:8: JSON parse error, premature end of input"),
        ("{\"driver\":\"raw\"", "1:16: JSON parse error, premature end of input"),
        ("{\"a\":1}}", "Expecting at most one JSON value"),
        ("{} {}", "Expecting at most one JSON value"),
        ("", "Expecting a JSON value"),
        ("{\"a\"}", "1:5: JSON parse error, expecting ':'"),
        ("{\"a\":1 \"b\":2}", "1:8: JSON parse error, expected ',' or '}'"),
        ("{\"a\":1,}", "1:8: JSON parse error, expecting key"),
        ("[1 2]", "1:4: JSON parse error, expected ',' or ']'"),
        ("[1,]", "1:4: JSON parse error, expecting value"),
        ("\n x", "2:2: JSON parse error, invalid keyword 'x'"),
        ("{\"a\":{\"a\":1,\n\"a\":2}}", "2:5: JSON parse error, duplicate key"),
        ("{\"a\":1,\"a\":{\"b\":1}}", "1:19: JSON parse error, duplicate key"),
        ("{\"a\": 1, \"\\u0061\": 2}", "1:20: JSON parse error, duplicate key"),
        ("\"\\q\"", "1:1: JSON parse error, invalid escape sequence in string"),
        ("\"\\u00\"", "1:1: JSON parse error, \\u00\" is not a valid Unicode character"),
        ("\"\\ud800\\u0041\"", "1:1: JSON parse error, \\ud800 is not a valid Unicode character"),
        ("\"\\ufffe\"", "1:1: JSON parse error, \\ufffe is not a valid Unicode character"),
        ("\"a\tb\"", "1:1: JSON parse error, stray '\"a\t'"),
        ("01", "1:1: JSON parse error, stray '01'"),
        ("1.5e ", "1:1: JSON parse error, stray '1.5e '"),
        ("nul-l", "1:1: JSON parse error, invalid keyword 'nul'"),
    ];

    #[test]
    fn what_is_wrong_is_said_in_qemus_words() {
        for (text, message) in WRONG {
            assert_eq!(parse_json(text.as_bytes()), Err((*message).to_owned()), "{text}");
        }
        assert_eq!(
            parse_json(b"\"\xed\xa0\x80\""),
            Err("1:1: JSON parse error, invalid UTF-8 sequence in string".into())
        );
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
        for text in [
            r#"{"a": {"a": [1, -2, 2.5, null, true, "x\ny"]}, "b": {"a": 18446744073709551615}}"#,
            "[]",
            "5",
            "\"é\"",
            r#""\ud83d\udc04\u00e9 \b\f\n\r\t\/\\\"""#,
            "[1e3, -0.5E-2, 0.1e+5, -9223372036854775808, 9223372036854775807, 18446744073709551616, {}]",
        ] {
            assert_eq!(parse_json(text.as_bytes()), Ok(serde_json::from_str::<Value>(text).unwrap()), "{text}");
        }
    }
}
