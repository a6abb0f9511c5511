// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names in a folder: a long one in UTF-16, and one of eight and three characters. No two are the same but for their case.

use super::LABEL_BYTES;
use std::collections::{HashMap, HashSet};

/// Units of UTF-16 in a long name at most.
const MAX_UNITS: usize = 255;
/// The marks that a short name may have besides capitals and digits.
const ALSO_SHORT: &[u8] = b"!#$%&'()-@^_`{}~";

/// The names of one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// Eight characters and three, with blanks.
    pub short: [u8; LABEL_BYTES],
    /// The long one; none where the short one is the whole name.
    pub long: Option<Vec<u16>>,
}

/// The names of a folder so far.
#[derive(Debug, Default)]
pub struct DirectoryNames {
    long: HashSet<String>,
    short: HashSet<[u8; LABEL_BYTES]>,
    /// The next number behind the start of a short name.
    next: HashMap<Vec<u8>, u32>,
}

impl DirectoryNames {
    /// Gives an entry its names. A character that a name can't hold becomes `_`, and a name that is there already gets
    /// a number.
    pub fn add(&mut self, name: &str) -> Name {
        let wanted = allowed(name);
        let mut long = wanted.clone();
        let mut number = 1;
        while !self.long.insert(long.to_lowercase()) {
            let (stem, ending) = split(&wanted);
            let tail = format!("~{number}{}{ending}", if ending.is_empty() { "" } else { "." });
            long = format!("{}{tail}", shortened(stem, MAX_UNITS.saturating_sub(tail.encode_utf16().count())));
            number += 1;
        }
        let (short, says_all) = self.short_of(&long);
        Name { short, long: (!says_all).then(|| long.encode_utf16().collect()) }
    }

    /// The short name, and whether it is the whole name.
    fn short_of(&mut self, long: &str) -> ([u8; LABEL_BYTES], bool) {
        let (stem, ending) = split(long);
        let is_short = |part: &str, most: usize| {
            part.len() <= most && part.bytes().all(|byte| short_byte(byte) == Some(byte.to_ascii_uppercase()))
        };
        let capitals = |part: &str| -> Vec<u8> {
            let characters = part.chars().filter(|character| !matches!(character, ' ' | '.'));
            characters.map(|character| u8::try_from(character).ok().and_then(short_byte).unwrap_or(b'_')).collect()
        };
        let (start, end) = (capitals(stem), capitals(ending));
        if is_short(stem, 8) && !stem.is_empty() && is_short(ending, 3) && !long.ends_with('.') {
            let short = padded(&start, &end);
            if self.short.insert(short) {
                return (short, !long.bytes().any(|byte| byte.is_ascii_lowercase()));
            }
        }
        let start = &start[..start.len().min(6)];
        let key = padded(start, &end).to_vec();
        let number = self.next.entry(key).or_insert(1);
        loop {
            let tail = format!("~{number}");
            *number += 1;
            let mut name = start[..start.len().min(8usize.saturating_sub(tail.len()))].to_vec();
            name.extend_from_slice(tail.as_bytes());
            let short = padded(&name, &end);
            if self.short.insert(short) {
                return (short, false);
            }
        }
    }
}

/// A byte of a short name for one of a long name.
fn short_byte(byte: u8) -> Option<u8> {
    let byte = byte.to_ascii_uppercase();
    (byte.is_ascii_uppercase() || byte.is_ascii_digit() || ALSO_SHORT.contains(&byte)).then_some(byte)
}

fn padded(start: &[u8], end: &[u8]) -> [u8; LABEL_BYTES] {
    let mut short = [b' '; LABEL_BYTES];
    for (place, byte) in short.iter_mut().zip(start.iter().take(8)) {
        *place = *byte;
    }
    for (place, byte) in short[8..].iter_mut().zip(end) {
        *place = *byte;
    }
    short
}

/// The stem before the last dot, and the ending behind it.
fn split(name: &str) -> (&str, &str) {
    match name.rsplit_once('.') {
        Some((stem, ending)) if !stem.is_empty() => (stem, ending),
        _ => (name, ""),
    }
}

/// The start of a text, of this many units of UTF-16 at most.
fn shortened(text: &str, most: usize) -> &str {
    let mut units = 0;
    for (at, character) in text.char_indices() {
        units += character.len_utf16();
        if units > most {
            return &text[..at];
        }
    }
    text
}

/// A name as a long one can be.
fn allowed(name: &str) -> String {
    let name = shortened(name, MAX_UNITS);
    let end = name.trim_end_matches(['.', ' ']).len();
    let with = |(at, character): (usize, char)| {
        let is_refused = character.is_control() || "\"*/:<>?\\|".contains(character) || at >= end;
        if is_refused { '_' } else { character }
    };
    let allowed: String = name.char_indices().map(with).collect();
    if allowed.is_empty() { "_".to_owned() } else { allowed }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(given: &[&str]) -> Vec<(String, Option<String>)> {
        let mut names = DirectoryNames::default();
        let text = |name: Name| {
            let long = name.long.map(|units| String::from_utf16(&units).unwrap());
            (String::from_utf8(name.short.to_vec()).unwrap(), long)
        };
        given.iter().map(|name| text(names.add(name))).collect()
    }

    #[test]
    fn names_are_apart_and_of_the_right_characters() {
        let long = |name: &str| Some(name.to_owned());
        let found = names(&[
            "README.TXT",
            "readme.txt",
            "a.txt",
            "Long name.text",
            "long names.text",
            ".profile",
            "ä:b",
            "x.",
            "...",
        ]);
        let expected = [
            ("README  TXT", None),
            ("README~1TXT", long("readme~1.txt")),
            ("A       TXT", long("a.txt")),
            ("LONGNA~1TEX", long("Long name.text")),
            ("LONGNA~2TEX", long("long names.text")),
            ("PROFIL~1   ", long(".profile")),
            ("__B~1      ", long("ä_b")),
            ("X_         ", long("x_")),
            ("___        ", None),
        ];
        assert_eq!(found, expected.map(|(short, long)| (short.to_owned(), long)));
    }

    #[test]
    fn many_names_with_one_start_are_apart() {
        let given: Vec<String> = (0..30_000).map(|index| format!("a file with a number {index}.dat")).collect();
        let given: Vec<&str> = given.iter().map(String::as_str).collect();
        let found = names(&given);
        let shorts: HashSet<&String> = found.iter().map(|(short, _)| short).collect();
        assert_eq!(shorts.len(), found.len());
        assert!(shorts.iter().all(|short| short.len() == LABEL_BYTES));
    }

    #[test]
    fn a_name_that_is_too_long_is_cut() {
        let name = "é".repeat(400);
        let found = names(&[&name, &name]);
        assert!(found.iter().all(|(_, long)| long.as_ref().unwrap().encode_utf16().count() <= MAX_UNITS));
        assert_ne!(found[0].1, found[1].1);
    }
}
