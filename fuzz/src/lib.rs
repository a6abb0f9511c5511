// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The entry points of the fuzz targets. See README.md.

pub use cowshed_testkit::fuzz::{engine, fuse, http, image, layout, nbd, ova, ublk, vhost};
