// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The structures of images on disk: rules of headers, and images made by the real QEMU.

mod header_rules;
mod qemu_images;
