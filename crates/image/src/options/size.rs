// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes with QEMU's suffixes.

use cowshed_block::{Error, Result};

/// Longest accepted text; more digits than this can't be a size.
const MAX_TEXT_BYTES: usize = 64;

/// A size in bytes: digits with an optional suffix `b` (bytes), `k`, `M`, `G`, `T`, `P`, `E` (powers of 1024, upper or
/// lower case), also with a fraction when the suffix is larger than a byte ("1.5G", rounded down), or `0x` and
/// hexadecimal digits. A number alone counts bytes. The largest result is 2^64 - 1.
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
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let all_digits = !hex.is_empty() && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        return if all_digits { u64::from_str_radix(hex, 16).ok() } else { None };
    }
    let (number, shift) = match text.as_bytes().last()? {
        b'b' | b'B' => (&text[..text.len() - 1], 0),
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        b't' | b'T' => (&text[..text.len() - 1], 40),
        b'p' | b'P' => (&text[..text.len() - 1], 50),
        b'e' | b'E' => (&text[..text.len() - 1], 60),
        _ => (text, 0),
    };
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (number, None),
    };
    let whole = digits(whole)?;
    let bytes = whole.checked_mul(1 << shift)?;
    let part = match fraction {
        None => 0,
        Some(_) if shift == 0 => return None,
        Some(fraction) => fraction_bytes(fraction, shift)?,
    };
    bytes.checked_add(part)
}

fn digits(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

/// `0.fraction << shift`, rounded down. Digits past the 18th can't move a 60-bit result by more than one byte.
fn fraction_bytes(text: &str, shift: u32) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let text = &text[..text.len().min(18)];
    let numerator = u128::from(digits(text)?);
    let denominator = 10u128.pow(text.len() as u32);
    u64::try_from((numerator << shift) / denominator).ok()
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
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text).ok(), Some(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in [
            "",
            "k",
            "-1",
            "+1",
            " 1",
            "1 ",
            "1kk",
            "1Q",
            "1.5",
            "1.",
            ".5G",
            "1.5.5G",
            "0x",
            "0xg",
            "16E",
            "1,5G",
            "1e3",
            "18446744073709551616",
            "٣",
        ] {
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
