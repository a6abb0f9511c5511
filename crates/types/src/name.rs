// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File names as text. On Linux a name is any bytes; options, JSON and messages need text.
//!
//! A byte that is no part of UTF-8 is in the text as one private character, U+10FE00 plus the byte. So do the bytes of
//! such characters themselves, and those of [`LINE_END`]. Every name has exactly one text. So nothing is lost on the
//! way from the command line through options and errors back to the file system or into an image's header.

use crate::{Error, Result};
use std::borrow::Cow;

/// The character of byte 0, if that one needed any.
const ESCAPES: u32 = 0x10_fe00;

/// The end of a line within a message. No name has it, so a name in a message begins no line, whatever its characters
/// are. [`in_lines`] makes a line end of it, and shows one of a name as `\n`.
pub const LINE_END: char = '\u{10fe0a}';

/// A message with its line ends, for a reader that is neither a terminal nor reads by lines.
pub fn with_line_ends(message: &str) -> Cow<'_, str> {
    match message.contains(LINE_END) {
        true => Cow::Owned(message.replace(LINE_END, "\n")),
        false => Cow::Borrowed(message),
    }
}

/// A message in lines. Names in it begin none, and command no terminal.
pub fn in_lines(message: &str) -> Cow<'_, str> {
    if !message.contains(|character: char| character == LINE_END || character.is_control()) {
        return Cow::Borrowed(message);
    }
    let lines: Vec<Cow<'_, str>> = message.split(LINE_END).map(visible_name).collect();
    Cow::Owned(lines.join("\n"))
}

/// The byte that a private character stands for.
fn escaped_byte(character: char) -> Option<u8> {
    let byte = u32::from(character).checked_sub(ESCAPES)?;
    u8::try_from(byte).ok().filter(|byte| *byte >= 0x80)
}

/// True for a character that never stands for itself.
fn is_reserved(character: char) -> bool {
    character == LINE_END || escaped_byte(character).is_some()
}

fn escape(text: &mut String, byte: u8) {
    text.extend(char::from_u32(ESCAPES + u32::from(byte)));
}

/// The text of a name.
pub fn text_of_name(name: &[u8]) -> Cow<'_, str> {
    if let Ok(text) = std::str::from_utf8(name)
        && !text.chars().any(is_reserved)
    {
        return Cow::Borrowed(text);
    }
    let mut text = String::with_capacity(name.len() + 8);
    for chunk in name.utf8_chunks() {
        for character in chunk.valid().chars() {
            match is_reserved(character) {
                false => text.push(character),
                true => character.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| escape(&mut text, byte)),
            }
        }
        chunk.invalid().iter().for_each(|byte| escape(&mut text, *byte));
    }
    Cow::Owned(text)
}

/// The name that a text stands for.
pub fn name_of_text(text: &str) -> Cow<'_, [u8]> {
    // Most names, and all of a long list of numbers.
    if text.is_ascii() || !text.chars().any(|character| escaped_byte(character).is_some()) {
        return Cow::Borrowed(text.as_bytes());
    }
    let mut name = Vec::with_capacity(text.len());
    for character in text.chars() {
        match escaped_byte(character) {
            Some(byte) => name.push(byte),
            None => name.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    Cow::Owned(name)
}

/// The text with U+FFFD for each byte that is no part of UTF-8: for a text that must be Unicode and is only looked at.
pub fn shown_name(text: &str) -> Cow<'_, str> {
    match name_of_text(text) {
        Cow::Borrowed(_) => Cow::Borrowed(text),
        Cow::Owned(name) => Cow::Owned(String::from_utf8_lossy(&name).into_owned()),
    }
}

/// The text with escapes for control characters: a name from an image must not command a terminal or begin a line.
pub fn visible_name(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut visible = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match character.is_control() {
            true => visible.extend(character.escape_default()),
            false => visible.push(character),
        }
    }
    Cow::Owned(visible)
}

/// The form of identifiers, as a further line of the message that a name isn't one.
pub const IDENTIFIERS: &str = "Identifiers consist of letters, digits, '-', '.', '_', starting with a letter.";

/// True for an id as QEMU has them: a letter, then letters, digits and `-._`, of any length.
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

/// Refuses an `id` on the command line that is no identifier.
///
/// # Errors
/// In QEMU's words, two lines.
pub fn check_identifier(id: &str) -> Result<()> {
    match is_identifier(id) {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!("Parameter 'id' expects an identifier{LINE_END}{IDENTIFIERS}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_visible_name_is_one_line_without_commands() {
        assert_eq!(visible_name("a\n\u{1b}[31m\u{9b}\u{7f}ü"), "a\\n\\u{1b}[31m\\u{9b}\\u{7f}ü");
        assert!(matches!(visible_name("plain ü\u{10fe80}"), Cow::Borrowed(_)));
    }

    #[test]
    fn only_line_ends_of_messages_begin_lines() {
        let name = text_of_name("a\nqemu-img: b\u{10fe0a}qemu-img: c".as_bytes()).into_owned();
        assert!(!name.contains(LINE_END));
        assert_eq!(name_of_text(&name), "a\nqemu-img: b\u{10fe0a}qemu-img: c".as_bytes());
        let message = format!("'{name}' is wrong{LINE_END}Try another\u{1b}");
        let shown = in_lines(&message).into_owned();
        assert_eq!(shown.lines().count(), 2, "{shown}");
        assert!(shown.starts_with("'a\\nqemu-img: b") && shown.ends_with("\nTry another\\u{1b}"), "{shown}");
        assert_eq!(with_line_ends("a\u{10fe0a}b"), "a\nb");
    }

    #[test]
    fn identifiers_start_with_a_letter() {
        for good in ["a", "Z9", "a-b.c_d"] {
            assert!(check_identifier(good).is_ok(), "{good}");
        }
        for wrong in ["", "1a", "-a", "a b", "ü", "aü", "a\n"] {
            let error = check_identifier(wrong).expect_err(wrong);
            assert_eq!(error.message().split(LINE_END).count(), 2, "{wrong}");
        }
    }

    #[test]
    fn every_name_comes_back() {
        let private = "\u{10feff}".as_bytes();
        for name in [&b""[..], b"disk.raw", "k\u{fc}he/\u{1f404}".as_bytes(), b"a\xff/b\xc3", b"\x80\xfe\xff", private]
        {
            let text = text_of_name(name).into_owned();
            assert_eq!(name_of_text(&text), name, "{name:?}");
            assert_eq!(text_of_name(&name_of_text(&text)), text, "{name:?}");
        }
        assert!(matches!(text_of_name(b"plain"), Cow::Borrowed(_)));
    }

    #[test]
    fn what_is_no_text_is_shown_as_such() {
        assert_eq!(shown_name(&text_of_name(b"a\xff.raw")), "a\u{fffd}.raw");
        assert_eq!(shown_name("plain"), "plain");
    }
}
