// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Extents: the places that ranges of a virtual disk map to. The one language between planners and executors.

use crate::{GuestOffset, HostOffset};

/// The file of an image that holds the bytes of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoredIn {
    /// The image file itself.
    Image,
    /// The external data file.
    DataFile,
}

/// The compression type of an image's compressed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Raw deflate (RFC 1951), called "zlib" in option values.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// The place of the bytes of an [`Extent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mapping {
    /// Plain bytes at `host`. With `encrypted` the executor passes them through the image's cipher.
    Data {
        /// First byte, in the file named by `file`.
        host: HostOffset,
        /// The file.
        file: StoredIn,
        /// True when the bytes are encrypted with the image's cipher.
        encrypted: bool,
    },
    /// Reads as zeroes; `host` is set when clusters stay allocated underneath.
    Zero {
        /// Preallocated space behind the zeroes.
        host: Option<HostOffset>,
    },
    /// Not allocated in this layer: reads come from the backing file, or are zeroes without one.
    Unallocated,
    /// Part of one compressed cluster. The extent covers exactly one guest cluster or a part of it.
    Compressed {
        /// First byte of the compressed data.
        host: HostOffset,
        /// Upper bound of the compressed length in bytes (the format counts 512-byte sectors).
        len: u64,
        /// Offset of the extent's first byte inside the decompressed cluster.
        skip: u64,
    },
}

/// A range of the virtual disk with one mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// First guest byte.
    pub guest: GuestOffset,
    /// Length in bytes, never 0.
    pub len: u64,
    /// The place of its bytes.
    pub mapping: Mapping,
}
