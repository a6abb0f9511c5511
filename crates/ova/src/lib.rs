// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packages of virtual machines: OVF (DMTF DSP0243) in one tar file (`.ova`) or in a folder.
//!
//! A package is text and files from a stranger: counts, lengths and depths are bounded, and no name leads out of it.

pub mod checks;
mod disk_format;
pub mod envelope;
pub mod machine;
pub mod manifest;
pub mod package;
pub mod pieces;
mod stamp;
pub mod tar;

pub use envelope::Envelope;
pub use manifest::Manifest;
pub use package::{FileRange, Package, PackedDisk};
pub use stamp::Stamps;

/// Upper limits of a package.
pub mod limits {
    /// The most files of a package.
    pub const MEMBERS: usize = 4096;
    /// Bytes of a descriptor, which is held in memory.
    pub const DESCRIPTOR_BYTES: u64 = 8 << 20;
    /// Bytes of a manifest.
    pub const MANIFEST_BYTES: u64 = 4 << 20;
    /// The most elements of a descriptor.
    pub const ELEMENTS: usize = 100_000;
    /// The most elements inside of each other.
    pub const DEPTH: usize = 64;
    /// Bytes of a file's name.
    pub const NAME_BYTES: usize = 255;
}
