// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs of others, unmodified, that start QEMU's tools or speak with their servers, with ours in the place of QEMU's.
//! `scripts/setup test` installs them.

mod large;
mod libvirt;
mod nbdkit;
mod oslo;
mod pools;
mod tools;
mod virtnbdbackup;
