// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server, driven by a front end that misbehaves as no real one does.

mod hostile;
mod known_faults;
mod life;
mod model;
mod notes;
mod served;
mod serving;
