// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon as its clients see it.

mod exports;
mod monitors;
mod nodes;
mod running;
