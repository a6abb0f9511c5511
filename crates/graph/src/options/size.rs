// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes with QEMU's suffixes.

use cowshed_qmp::size_of_text;
use cowshed_types::{Error, Result};

/// A size in bytes, see [`size_of_text`].
///
/// # Errors
/// The text is no size, or one of more than 64 bits.
pub fn parse_size(text: &str) -> Result<u64> {
    size_of_text(text).ok_or_else(|| {
        Error::invalid_argument(format!(
            "invalid size '{text}': a number with an optional suffix k, M, G, T, P or E (kilo-, mega-, giga-, tera-, \
             peta- and exabytes, respectively) is expected"
        ))
    })
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
