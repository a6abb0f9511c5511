// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats: drivers that say where data is.
