// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes on the command line, and the messages about wrong ones.

use crate::output::Failure;
use cowshed_image::options::parse_size;

/// The largest size of anything: QEMU counts in signed 64-bit numbers.
pub const MOST: u64 = i64::MAX as u64;

/// A number of bytes with QEMU's suffixes; `what` names it in the message ("image size").
pub fn size(what: &str, text: &str) -> Result<u64, Failure> {
    size_between(what, text, 0, MOST)
}

/// As [`size`], within limits.
pub fn size_between(what: &str, text: &str, least: u64, most: u64) -> Result<u64, Failure> {
    let refused = || Failure::new(format!("Invalid {what} specified. Must be between {least} and {most}."));
    // Without a suffix a number is read with its sign.
    if text
        .strip_prefix('-')
        .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit()))
    {
        return Err(refused());
    }
    match number(text) {
        Ok(bytes) if (least..=most).contains(&bytes) => Ok(bytes),
        Ok(_) | Err(Fault::TooLarge) => Err(refused()),
        Err(Fault::NotASize) => {
            let failure = Failure::new(format!("Invalid {what} specified: '{text}'"));
            Err(match right_spelling(text) {
                Some(right) => failure.hint(&format!(" (sizes are written '{right}', in powers of 1024)")),
                None => failure,
            })
        }
    }
}

/// `10G` for `10GB` and `10GiB`.
pub fn right_spelling(text: &str) -> Option<&str> {
    let text = text.trim_end();
    let right = ["iB", "ib", "IB", "B", "i"].iter().find_map(|end| text.strip_suffix(end))?;
    (right.ends_with(|last: char| last.is_ascii_alphabetic()) && number(right).is_ok()).then_some(right)
}

/// The reason for which a text is no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It can't be read.
    NotASize,
    /// It does not fit in 64 bits.
    TooLarge,
}

/// A number of bytes, see [`parse_size`]; digits with a good suffix that it refuses are too many.
pub fn number(text: &str) -> Result<u64, Fault> {
    parse_size(text).map_err(|_| {
        let digits = text.strip_suffix(|suffix: char| "bkmgtpeBKMGTPE".contains(suffix)).unwrap_or(text);
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { Fault::TooLarge } else { Fault::NotASize }
    })
}

/// A whole number as C's `strtol` reads it in any base: blanks in front, a sign, `0x` or a leading `0`.
pub fn integer(text: &str) -> Option<i64> {
    let (negative, magnitude) = signed(text)?;
    let number = i64::try_from(magnitude).ok()?;
    Some(if negative { -number } else { number })
}

/// As [`integer`], as `strtoul` does it: a number below zero is counted down from 2^64.
pub fn unsigned(text: &str) -> Option<u64> {
    let (negative, magnitude) = signed(text)?;
    Some(if negative { magnitude.wrapping_neg() } else { magnitude })
}

/// True where the number is below zero, and the digits behind its sign.
fn signed(text: &str) -> Option<(bool, u64)> {
    let digits = text.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    let (negative, digits) = match digits.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, digits.strip_prefix('+').unwrap_or(digits)),
    };
    let (base, digits) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(rest) => (16, rest),
        None if digits.len() > 1 && digits.starts_with('0') => (8, &digits[1..]),
        None => (10, digits),
    };
    // The parser of Rust takes a second sign.
    let starts_well = digits.starts_with(|first: char| first.is_digit(base));
    u64::from_str_radix(digits, base).ok().filter(|_| starts_well).map(|number| (negative, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_as_c_reads_them() {
        for (text, number) in [
            ("2", Some(2)),
            (" 2", Some(2)),
            ("+2", Some(2)),
            ("-2", Some(-2)),
            ("0x10", Some(16)),
            ("010", Some(8)),
            ("0", Some(0)),
            ("2 ", None),
            ("", None),
            (" ", None),
            ("0x", None),
            ("0x+1", None),
            ("--2", None),
            ("08", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(integer(text), number, "{text:?}");
        }
    }

    #[test]
    fn sizes_are_read_as_qemu_img_reads_them() {
        for (text, bytes) in [
            ("0", Ok(0)),
            ("512b", Ok(512)),
            ("64k", Ok(65_536)),
            ("64K", Ok(65_536)),
            ("1.5G", Ok(1_610_612_736)),
            ("1.3k", Ok(1_331)),
            ("7E", Ok(8_070_450_532_247_928_832)),
            ("0x1000", Ok(4_096)),
            ("", Err(Fault::NotASize)),
            ("k", Err(Fault::NotASize)),
            ("10Q", Err(Fault::NotASize)),
            ("1 k", Err(Fault::NotASize)),
            ("1é", Err(Fault::NotASize)),
            ("99E", Err(Fault::TooLarge)),
        ] {
            assert_eq!(number(text), bytes, "{text}");
        }
    }

    #[test]
    fn wrong_sizes_are_named() {
        for (text, right) in
            [("10GB", Some("10G")), ("1.5TiB", Some("1.5T")), ("10B", None), ("xGB", None), ("10Q", None)]
        {
            assert_eq!(right_spelling(text), right, "{text}");
        }
        assert_eq!(size("image size", "10Q").unwrap_err().message, "Invalid image size specified: '10Q'");
        assert_eq!(size("image size", "-64k").unwrap_err().message, "Invalid image size specified: '-64k'");
        for text in ["-5", "-99999999999999999999", "100E"] {
            assert_eq!(
                size("image size", text).unwrap_err().message,
                "Invalid image size specified. Must be between 0 and 9223372036854775807."
            );
        }
    }
}
