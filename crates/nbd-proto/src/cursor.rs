// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading big-endian numbers and strings from a message, never past its end.

use std::fmt;

/// A message that contradicts the protocol; the text has the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl Malformed {
    /// It ends before its last field.
    pub const TOO_SHORT: Malformed = Malformed("the message is too short");
    /// Something follows its last field.
    pub const TOO_LONG: Malformed = Malformed("the message is too long");
    /// A string exceeds [`crate::MAX_STRING_BYTES`].
    pub const LONG_STRING: Malformed = Malformed("a string is longer than 4096 bytes");
    /// A string holds a NUL.
    pub const NUL: Malformed = Malformed("a string holds a NUL");
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Malformed {}

/// The rest of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Cursor { rest: bytes }
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(Malformed::TOO_SHORT)?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(Malformed::TOO_SHORT)?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string of `len` bytes by the rules of the protocol: UTF-8, no NUL, at most 4096 bytes.
    pub(crate) fn string(&mut self, len: usize) -> Result<&'a str, Malformed> {
        if len > crate::MAX_STRING_BYTES {
            return Err(Malformed::LONG_STRING);
        }
        text(self.take(len)?)
    }

    /// A string behind its 32-bit length.
    pub(crate) fn counted_string(&mut self) -> Result<&'a str, Malformed> {
        let len = self.u32()?;
        self.string(usize::try_from(len).unwrap_or(usize::MAX))
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.rest
    }

    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() { Ok(()) } else { Err(Malformed::TOO_LONG) }
    }
}

/// `bytes` as a string by the rules of the protocol.
pub(crate) fn text(bytes: &[u8]) -> Result<&str, Malformed> {
    if bytes.len() > crate::MAX_STRING_BYTES {
        return Err(Malformed::LONG_STRING);
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        Ok(_) => Err(Malformed::NUL),
        Err(_) => Err(Malformed("a string is not UTF-8")),
    }
}
