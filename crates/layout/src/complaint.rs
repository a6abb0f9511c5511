// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Complaints about headers that can't be used: the field, its offset, and its value.

use cowshed_types::Error;
use std::fmt::Display;

/// A field that breaks a rule of the format.
pub(crate) fn wrong(field: &'static str, offset: u64, value: impl Display, message: impl Into<String>) -> Error {
    Error::invalid_image(field, value, message).offset(offset)
}

/// The error of a field that needs an unsupported feature.
pub(crate) fn refused(field: &'static str, offset: u64, value: impl Display, message: &str) -> Error {
    Error::unsupported(message).field(field).offset(offset).value(value)
}
