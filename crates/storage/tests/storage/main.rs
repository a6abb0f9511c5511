// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files, locks, sockets and the executor on the real kernel.

mod behind;
mod completion;
mod confine;
mod faults;
mod file;
mod runtime;
mod shared;
mod sockets;
