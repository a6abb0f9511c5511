// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server, on a driver that knows what a server does wrong.

mod fake;
mod life;
mod recovery;
mod served;
mod serving;
