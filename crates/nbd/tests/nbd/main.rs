// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The NBD client: the kernel's device, hostile servers and outages.

mod device;
mod fake;
mod hostile_server;
mod outages;
