// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The error for bytes of a stranger that break the rules.

use std::fmt;

/// A field that breaks the rules, and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// The field and the rule.
    pub what: &'static str,
    /// The value that was found.
    pub value: u64,
}

impl Malformed {
    pub(crate) fn new(what: &'static str, value: impl Into<u64>) -> Malformed {
        Malformed { what, value: value.into() }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:#x})", self.what, self.value)
    }
}

impl std::error::Error for Malformed {}

/// The number at `at`, little-endian; zero where the bytes end before it does.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u16::from_le_bytes(*bytes))
}

/// As [`u16_at`].
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// As [`u16_at`].
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
