// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The NBD protocol as bytes and structs, for both sides: no I/O, no runtime, no allocation by a number from the wire.
//!
//! The sources are `doc/proto.md` and `doc/uri.md` of the NetworkBlockDevice project, with the extension for 64-bit
//! lengths. For the namespace `qemu:` it is QEMU's `docs/interop/nbd.rst`.

pub mod context;
mod cursor;
pub mod errno;
pub mod flags;
pub mod greeting;
pub mod option;
pub mod reply;
pub mod request;
pub mod uri;

pub use cursor::Malformed;
pub use errno::NbdErrno;
pub use reply::{Chunk, ReplyHeader, ReplyStyle};
pub use request::{Command, HeaderStyle, Request};
pub use uri::NbdUri;

/// Longest string in bytes (export names, descriptions, queries, messages): "MUST be no longer than 4096 bytes".
pub const MAX_STRING_BYTES: usize = 4096;

/// Port of the protocol, assigned by IANA.
pub const DEFAULT_PORT: u16 = 10809;

/// The longest request that a client may send without having learned more, in bytes: 32 MiB.
pub const PORTABLE_PAYLOAD_BYTES: u32 = 1 << 25;
