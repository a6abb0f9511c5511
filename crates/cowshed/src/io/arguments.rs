// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The words of one command line of the shell: flags as getopt reads them, then operands.

use super::outcome::CommandFailed;
use crate::commands::sizes::{self, Fault};
use cowshed_image::Preallocation;

/// A command's words, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    flags: Vec<(char, Option<String>)>,
    /// The first word that holds flags, as it was given.
    pub first_flags: Option<String>,
    /// The arguments that are no flags, in order.
    pub operands: Vec<String>,
    /// Lines about unknown flags, of a command that goes on then.
    pub unknown: Vec<String>,
}

impl Arguments {
    /// Takes `words` apart. `known`: letters, each followed by ':' when it takes a value; a '?' at the end lets
    /// unknown flags pass. Flags may come anywhere; `--` ends them.
    pub fn parse(command: &str, known: &str, words: &[&str]) -> Result<Arguments, CommandFailed> {
        let mut arguments = Arguments::default();
        if known.is_empty() {
            // Where there are no flags, a dash is nothing special.
            arguments.operands = words.iter().map(|word| (*word).to_owned()).collect();
            return Ok(arguments);
        }
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match word.strip_prefix('-').filter(|letters| !letters.is_empty()) {
                Some("-") => {
                    arguments.operands.extend(words.by_ref().map(|word| (*word).to_owned()));
                }
                Some(letters) => {
                    arguments.first_flags.get_or_insert_with(|| (*word).to_owned());
                    arguments.take_flags(command, known, letters, &mut words)?;
                    if arguments.ends_here(command) {
                        return Ok(arguments);
                    }
                }
                None => arguments.operands.push((*word).to_owned()),
            }
        }
        Ok(arguments)
    }

    /// An injected request reports nothing of its rest.
    fn ends_here(&self, command: &str) -> bool {
        matches!(command, "aio_read" | "aio_write") && self.has('i')
    }

    fn take_flags<'a>(
        &mut self,
        command: &str,
        known: &str,
        letters: &'a str,
        words: &mut impl Iterator<Item = &'a &'a str>,
    ) -> Result<(), CommandFailed> {
        for (at, letter) in letters.char_indices() {
            let place = known.find(letter).filter(|_| letter != ':' && letter != '?');
            let Some(place) = place else {
                if known.ends_with('?') {
                    self.unknown.push(format!("{command}: invalid option -- '{letter}'"));
                    continue;
                }
                return Err(CommandFailed::usage().error(format!("{command}: invalid option -- '{letter}'")));
            };
            if !known[place + letter.len_utf8()..].starts_with(':') {
                self.flags.push((letter, None));
                if self.ends_here(command) {
                    return Ok(());
                }
                continue;
            }
            let rest = &letters[at + letter.len_utf8()..];
            let value = if rest.is_empty() { words.next().copied() } else { Some(rest) };
            let Some(value) = value else {
                return Err(
                    CommandFailed::usage().error(format!("{command}: option requires an argument -- '{letter}'"))
                );
            };
            check_value(command, letter, value)?;
            self.flags.push((letter, Some(value.to_owned())));
            break;
        }
        Ok(())
    }

    /// True when the flag was given.
    pub fn has(&self, flag: char) -> bool {
        self.flags.iter().any(|(known, _)| *known == flag)
    }

    /// The last value of the flag.
    pub fn value(&self, flag: char) -> Option<&str> {
        self.flags.iter().rev().find(|(known, _)| *known == flag).and_then(|(_, value)| value.as_deref())
    }

    /// The size given with a flag.
    pub fn size(&self, flag: char) -> Result<Option<u64>, CommandFailed> {
        self.value(flag).map(size).transpose()
    }

    /// The byte given with a flag, in C's notations.
    pub fn pattern(&self, flag: char) -> Result<Option<u8>, CommandFailed> {
        self.value(flag).map(pattern).transpose()
    }
}

/// Refuses the value of a flag at its place, before the next words are looked at.
fn check_value(command: &str, letter: char, value: &str) -> Result<(), CommandFailed> {
    match (command, letter) {
        (_, 'P') => pattern(value).map(drop),
        ("read" | "r", 's' | 'l') => size(value).map(drop),
        ("truncate" | "t", 'm') => preallocation(value).map(drop),
        _ => Ok(()),
    }
}

/// The allocation of a grown part.
pub fn preallocation(word: &str) -> Result<Preallocation, CommandFailed> {
    match word {
        "off" => Ok(Preallocation::Off),
        "metadata" => Ok(Preallocation::Metadata),
        "falloc" => Ok(Preallocation::Falloc),
        "full" => Ok(Preallocation::Full),
        other => Err(CommandFailed::complaint(format!("Invalid preallocation mode '{other}'"))),
    }
}

/// A number of bytes with a suffix.
pub fn size(text: &str) -> Result<u64, CommandFailed> {
    size_named(text, text)
}

/// A number of bytes with a suffix; messages call it `name`.
pub fn size_named(text: &str, name: &str) -> Result<u64, CommandFailed> {
    match sizes::number(text) {
        Ok(bytes) if i64::try_from(bytes).is_ok() => Ok(bytes),
        Ok(_) | Err(Fault::TooLarge) => {
            Err(CommandFailed::output(format!("Parsing error: argument too large -- {name}")))
        }
        Err(Fault::NotASize) if text.strip_prefix('-').is_some_and(|rest| sizes::number(rest).is_ok()) => {
            Err(CommandFailed::output(format!("Parsing error: argument too large -- {name}")))
        }
        Err(Fault::NotASize) => Err(CommandFailed::output(no_number(name))),
    }
}

/// The line for a word that is no number.
pub fn no_number(name: &str) -> String {
    format!("Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- {name}")
}

fn pattern(text: &str) -> Result<u8, CommandFailed> {
    let number = if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        u32::from_str_radix(digits, 16)
    } else if text.len() > 1 && text.starts_with('0') {
        u32::from_str_radix(text, 8)
    } else {
        text.parse()
    };
    let byte = number.ok().and_then(|number| u8::try_from(number).ok());
    byte.ok_or_else(|| CommandFailed::output(format!("{text} is not a valid pattern byte")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, CommandFailed> {
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        Arguments::parse("read", "CqvP:s:", &words)
    }

    #[test]
    fn flags_are_read_as_getopt_does() {
        let arguments = parse("-Cq 0 -P5 -s 1k 4k -v").unwrap();
        assert!(arguments.has('C') && arguments.has('q') && arguments.has('v'));
        assert_eq!(arguments.operands, ["0", "4k"]);
        assert_eq!((arguments.pattern('P').unwrap(), arguments.size('s').unwrap()), (Some(5), Some(1024)));
        assert_eq!(parse("-q -- -1 -v").unwrap().operands, ["-1", "-v"]);
        assert_eq!(parse("-qP 0xab -").unwrap().operands, ["-"]);
    }

    #[test]
    fn mistakes_are_named() {
        for (line, error) in [("-Z", "invalid option -- 'Z'"), ("-P", "requires an argument -- 'P'"), ("-:", "--")] {
            let failed = parse(line).unwrap_err();
            assert!(failed.shows_usage && failed.error.unwrap().contains(error), "{line}");
        }
        for (text, part) in [("x", "non-numeric"), ("99E", "too large"), ("-1", "too large"), ("1s", "unrecognized")] {
            assert!(size(text).unwrap_err().output.unwrap().contains(part), "{text}");
        }
        for (text, byte) in [("0", Some(0)), ("010", Some(8)), ("0xFF", Some(255)), ("256", None), ("-1", None)] {
            assert_eq!(pattern(text).ok(), byte, "{text}");
        }
    }
}
