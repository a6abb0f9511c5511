// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes in the notation of qemu-img: three significant digits and a binary unit.

const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// `1.5 GiB`, `977 KiB`, `0 B`: the largest unit in which the number is at least 1000/1024.
pub fn human(bytes: u64) -> String {
    let mut unit = 0;
    let mut value = bytes as f64;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}B", three_digits(value), UNITS[unit])
}

/// A number in C's `%0.3g`: three significant digits, no trailing zeroes, `1e+03` when it rounds up to a thousand.
fn three_digits(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let scientific = format!("{value:.2e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if exponent >= 3 {
        return format!("{}e+{exponent:02}", without_trailing_zeroes(mantissa));
    }
    let decimals = usize::try_from(2 - exponent).unwrap_or(0);
    without_trailing_zeroes(&format!("{value:.decimals$}")).to_owned()
}

fn without_trailing_zeroes(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The right column was printed by qemu-img 7.2 for images of these sizes.
    #[test]
    fn as_qemu_img_prints_them() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (1024, "1 KiB"),
            (1_022_976, "999 KiB"),
            (1_023_488, "1e+03 KiB"),
            (1_024_000, "0.977 MiB"),
            (1_047_552, "0.999 MiB"),
            (1_048_064, "1 MiB"),
            (1_048_576_000, "0.977 GiB"),
            (1_047_947_264, "999 MiB"),
            (1_048_051_712, "1e+03 MiB"),
            (1_079_110_656, "1.01 GiB"),
            (10_791_105_536, "10.1 GiB"),
            (107_911_053_312, "100 GiB"),
            (108_984_795_136, "102 GiB"),
            (12_345_856, "11.8 MiB"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
        assert_eq!(human(u64::MAX), "16 EiB");
    }
}
