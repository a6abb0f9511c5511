// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Everything the tool prints: the console, messages, JSON, the text of `info`, progress.

pub mod console;
pub mod failure;
pub mod info;
pub mod json;
pub mod progress;
pub mod size;
pub mod warning;

pub use console::Console;
pub use failure::Failure;
