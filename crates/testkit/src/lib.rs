// SPDX-License-Identifier: Apache-2.0 OR MIT
//! See the README of this crate.
