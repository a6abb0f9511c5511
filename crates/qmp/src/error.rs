// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The answer of a command that fails.

use serde_json::{Value, json};
use std::fmt;

/// A line end within a description, which no name has: `cowshed_types::LINE_END`.
const LINE_END: char = '\u{10fe0a}';

/// Result with [`QmpError`].
pub type QmpResult<T> = Result<T, QmpError>;

/// The class of an error, on which a program may depend, as opposed to the description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Everything that has no class of its own.
    Generic,
    /// No such command, or not in this mode.
    CommandNotFound,
    /// A device or object that doesn't exist.
    DeviceNotFound,
    /// A block job that doesn't run.
    DeviceNotActive,
}

impl ErrorClass {
    /// The class as it is written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorClass::Generic => "GenericError",
            ErrorClass::CommandNotFound => "CommandNotFound",
            ErrorClass::DeviceNotFound => "DeviceNotFound",
            ErrorClass::DeviceNotActive => "DeviceNotActive",
        }
    }
}

/// An error with its class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QmpError {
    /// The class.
    pub class: ErrorClass,
    /// The text for a user.
    pub description: String,
    /// For logs and command lines: more than the description, where there is more.
    pub whole: Option<String>,
    /// For command lines: the line that QEMU prints behind the description.
    pub hint: Option<String>,
}

impl QmpError {
    /// An error of any class.
    pub fn new(class: ErrorClass, description: impl Into<String>) -> Self {
        QmpError { class, description: description.into(), whole: None, hint: None }
    }

    /// With more for logs and command lines, which begins anew.
    #[must_use]
    pub fn with_whole(mut self, whole: impl Into<String>) -> Self {
        self.whole = Some(whole.into());
        self
    }

    /// With a line for command lines.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// `GenericError`.
    pub fn generic(description: impl Into<String>) -> Self {
        Self::new(ErrorClass::Generic, description)
    }

    /// The value of the member `error` of a reply.
    pub fn to_value(&self) -> Value {
        json!({"class": self.class.as_str(), "desc": self.description.replace(LINE_END, "\n")})
    }
}

impl fmt::Display for QmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description)
    }
}

impl std::error::Error for QmpError {}
