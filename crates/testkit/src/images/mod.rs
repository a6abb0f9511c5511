// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Seeded images over the whole matrix of options, filled by seeded operations, with a byte model of their data.
//!
//! A [`Chain`] is drawn from a seed: layers from the base up, each with its options and its operations in sessions. In
//! [`Chain::build`] `qemu-img` creates the layers, and an [`Executor`] carries out each session: qemu-io, our own
//! library, or both in turns.

mod chain;
mod content;
mod library;
mod ops;
mod spec;

pub use chain::{Built, Chain, Executor, Layer, QemuIo};
pub use content::Content;
pub use library::{Library, Reader};
pub use ops::{Op, Texture, generate as generate_ops};
pub use spec::{DataFile, Format, Qcow2Spec};
