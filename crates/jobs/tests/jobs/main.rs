// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The block jobs, also beside the real QEMU.

mod compare;
mod convert;
mod create;
mod key_slots;
mod measure;
mod oracle;
