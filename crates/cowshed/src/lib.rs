// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The public face of Cowshed.
