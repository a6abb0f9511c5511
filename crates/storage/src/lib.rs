// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where bytes live: files through io_uring or a thread pool, and a simulated disk for tests.
//!
//! The only crate that knows the runtime. Everything above it sees [`File`], [`IoBuf`] and the functions of [`rt`].

pub mod buf;
pub mod file;
pub mod rt;
pub mod sim;

pub use buf::IoBuf;
pub use file::{Alignment, CacheMode, DataRange, Engine, File, OpenOptions};
