// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry points of the fuzzer, and a replay of its inputs on a stable compiler. `fuzz/README.md` describes fuzzing.

pub mod engine;
pub mod fuse;
pub mod http;
pub mod image;
pub mod layout;
pub mod nbd;
pub mod ova;
pub mod replay;
pub mod ublk;
pub mod vhost;
