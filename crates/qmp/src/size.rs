// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes with suffixes, as QEMU's texts have them.

/// Longest accepted text; more digits than this can't be a size.
const MAX_TEXT_BYTES: usize = 64;

/// A size in bytes: digits with an optional suffix `b` (bytes), `k`, `M`, `G`, `T`, `P`, `E` (powers of 1024, upper or
/// lower case). The digits may have a fraction ("1.5G"; rounded to a byte, and without a suffix it must be
/// zero; "0.5G" may be written ".5G"), or be hexadecimal behind `0x`, then without a suffix. A number alone counts
/// bytes. As in QEMU, leading space and one `+` are skipped. The largest result is 2^64 - 1.
pub fn size_of_text(text: &str) -> Option<u64> {
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
