// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measurements side by side with QEMU.
fn main() {}
