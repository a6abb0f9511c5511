// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes on the command line, and what is said of wrong ones.

use crate::output::Failure;

/// The largest size of anything: QEMU counts in signed 64-bit numbers.
pub const MOST: u64 = i64::MAX as u64;

/// A number of bytes with QEMU's suffixes; `what` names it in the message ("image size").
pub fn size(what: &str, text: &str) -> Result<u64, Failure> {
    size_between(what, text, 0, MOST)
}

/// As [`size`], within limits.
pub fn size_between(what: &str, text: &str, least: u64, most: u64) -> Result<u64, Failure> {
    let refused = || Failure::new(format!("Invalid {what} specified. Must be between {least} and {most}."));
    if text.strip_prefix('-').is_some_and(|digits| number(digits).is_ok()) {
        return Err(refused());
    }
    match number(text) {
        Ok(bytes) if (least..=most).contains(&bytes) => Ok(bytes),
        Ok(_) | Err(Fault::TooLarge) => Err(refused()),
        Err(Fault::NotASize) => Err(Failure::new(format!("Invalid {what} specified: '{text}'"))),
    }
}

/// Why a text is no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It can't be read.
    NotASize,
    /// It does not fit in 64 bits.
    TooLarge,
}

/// A number of bytes: decimal with an optional fraction and suffix, or hexadecimal.
pub fn number(text: &str) -> Result<u64, Fault> {
    if let Some(hexadecimal) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(hexadecimal, 16).map_err(|_| Fault::NotASize);
    }
    let suffix = text.chars().last().filter(char::is_ascii_alphabetic);
    let shift = match suffix.map(|suffix| suffix.to_ascii_lowercase()) {
        None | Some('b') => 0,
        Some('k') => 10,
        Some('m') => 20,
        Some('g') => 30,
        Some('t') => 40,
        Some('p') => 50,
        Some('e') => 60,
        Some(_) => return Err(Fault::NotASize),
    };
    let digits = &text[..text.len() - suffix.map_or(0, char::len_utf8)];
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let all_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !all_digits(whole) || !all_digits(fraction) {
        return Err(Fault::NotASize);
    }
    let whole: u64 = whole.parse().map_err(|_| Fault::TooLarge)?;
    let fraction: f64 = format!("0.{fraction}0").parse().map_err(|_| Fault::NotASize)?;
    let unit = 1_u64 << shift;
    whole.checked_mul(unit).and_then(|bytes| bytes.checked_add((fraction * unit as f64) as u64)).ok_or(Fault::TooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(size("image size", "10Q").unwrap_err().message, "Invalid image size specified: '10Q'");
        for text in ["-5", "100E"] {
            assert_eq!(
                size("image size", text).unwrap_err().message,
                "Invalid image size specified. Must be between 0 and 9223372036854775807."
            );
        }
    }
}
