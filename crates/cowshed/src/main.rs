// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cowshed command.
fn main() {}
