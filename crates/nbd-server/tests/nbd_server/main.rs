// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The NBD server: the protocol, hostile and departed clients, and real client programs.

mod client;
mod departed;
mod hostile;
mod memory;
mod peers;
mod protocol;
mod real_clients;
mod served;
mod throttled;
mod tls;
mod turns;
