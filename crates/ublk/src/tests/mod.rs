// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server, on a driver that finds faults of a server.

mod fake;
mod life;
mod recovery;
mod served;
mod serving;
