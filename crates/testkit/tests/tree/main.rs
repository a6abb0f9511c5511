// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rules of the source tree that a machine can check.

mod crate_graph;
mod dependencies;
mod documents;
mod driver_names;
mod module_graph;
mod programs;
mod style;
mod switches;
