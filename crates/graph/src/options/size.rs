// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes with QEMU's suffixes.

use cowshed_types::{Error, Result};

/// Longest accepted text; more digits than this can't be a size.
const MAX_TEXT_BYTES: usize = 64;

/// A size in bytes: digits with an optional suffix `b` (bytes), `k`, `M`, `G`, `T`, `P`, `E` (powers of 1024, upper or
/// lower case). The digits may have a fraction ("1.5G"; rounded to a byte, and without a suffix it must be
/// zero; "0.5G" may be written ".5G"), or be hexadecimal behind `0x`, then without a suffix. A number alone counts
/// bytes. As in QEMU, leading space and one `+` are skipped. The largest result is 2^64 - 1.
pub fn parse_size(text: &str) -> Result<u64> {
    parse(text).ok_or_else(|| {
        Error::invalid_argument(format!(
            "invalid size '{text}': a number with an optional suffix k, M, G, T, P or E (kilo-, mega-, giga-, tera-, \
             peta- and exabytes, respectively) is expected"
        ))
    })
}

fn parse(text: &str) -> Option<u64> {
    if text.len() > MAX_TEXT_BYTES {
        return None;
    }
    let text = text.trim_start_matches([' ', '\t']);
    let text = text.strip_prefix('+').unwrap_or(text);
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    if let Some(hex) = hex {
        // b and e are digits in it, so that suffixes would be guesses.
        let all_digits = !hex.is_empty() && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        return if all_digits { u64::from_str_radix(hex, 16).ok() } else { None };
    }
    let (number, shift) = suffix(text);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    // As in QEMU 11 the digits in front of the point may be left out where there are some behind it.
    let whole = if whole.is_empty() && !fraction.is_empty() { "0" } else { whole };
    let bytes = digits(whole)?.checked_mul(1 << shift)?;
    bytes.checked_add(fraction_bytes(fraction, shift)?)
}

/// Splits a suffix off the end: the rest, and the power of two that the letter stands for.
fn suffix(text: &str) -> (&str, u32) {
    match text.as_bytes().last() {
        Some(last) if b"bBkKmMgGtTpPeE".contains(last) => {
            let shift = match last.to_ascii_lowercase() {
                b'k' => 10,
                b'm' => 20,
                b'g' => 30,
                b't' => 40,
                b'p' => 50,
                b'e' => 60,
                _ => 0,
            };
            (&text[..text.len() - 1], shift)
        }
        _ => (text, 0),
    }
}

fn digits(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

/// `0.fraction << shift`, rounded to the nearest byte, as QEMU rounds it in floating point.
fn fraction_bytes(text: &str, shift: u32) -> Option<u64> {
    if !text.bytes().all(|byte| byte.is_ascii_digit()) || (shift == 0 && text.bytes().any(|byte| byte != b'0')) {
        return None;
    }
    let fraction: f64 = format!("0.{text}0").parse().ok()?;
    Some((fraction * (1u64 << shift) as f64 + 0.5) as u64)
}

#[cfg(test)]
mod tests {
    use super::parse_size;
    use proptest::prelude::*;

    #[test]
    fn suffixes_are_binary() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("512B", 512),
            ("64k", 65536),
            ("64K", 65536),
            ("1M", 1 << 20),
            ("1m", 1 << 20),
            ("1.5G", 3 << 29),
            ("0.5k", 512),
            ("2T", 2 << 40),
            ("1P", 1 << 50),
            ("15E", 15 << 60),
            ("0x10000", 65536),
            ("0x1b", 27),
            (" 1M", 1 << 20),
            ("+1M", 1 << 20),
            ("1.1k", 1126),
            ("1.", 1),
            ("1.M", 1 << 20),
            ("1.0b", 1),
            (".5G", 1 << 29),
            (".0", 0),
            ("010", 10),
            ("0.3333333333333333333333M", 349525),
            ("1.3M", 1363149),
            (".9k", 922),
            ("0.9999999999999999999999M", 1 << 20),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text).ok(), Some(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        let texts =
            "|k|-1|++1|1 |1kk|1kB|1Q|1.5|1.5b|.|.M|.5|1.5.5G|0x|0xg|0x1k|0x1.5k|16E|1,5G|1e3|18446744073709551616|٣";
        for text in texts.split('|') {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = parse_size(&text);
        }

        #[test]
        fn numbers_come_back(bytes in any::<u64>()) {
            prop_assert_eq!(parse_size(&bytes.to_string()).ok(), Some(bytes));
            prop_assert_eq!(parse_size(&format!("{bytes:#x}")).ok(), Some(bytes));
        }
    }
}
