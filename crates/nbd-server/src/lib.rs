// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves disks over NBD.
//!
//! ```text
//! Server::new(config) ─ listen(address) ─ add_export(Export { name, disk, … }) … remove_export(name, mode) ─ stop(grace)
//! ```
//! The server serves anything that is a [`Disk`]: a node of the block graph, or an attachment to it.
//!
//! - `server`: the owner's side; `queue`: the threads; `registry`: exports and their clients; `signal`: waiting across
//!   threads
//! - `negotiation`: from the greeting to the transmission phase; `refusal`: the words of its refusals
//! - `session`: requests of one client. `intake` reads them, `life` decides whether any more may begin. `outbox` sends
//!   the replies, `budget` bounds their memory (`pool`: that of all connections). `commands` carries them out, `sparse`
//!   words reads, `status` answers block status

mod admission;
mod budget;
mod commands;
mod config;
mod disk;
mod export;
mod intake;
mod life;
mod negotiation;
mod outbox;
mod pieces;
mod pool;
mod queue;
mod refusal;
mod registry;
mod server;
mod session;
mod signal;
mod sparse;
mod status;

pub use config::{Authorizer, Check, Event, EventHandler, LOG_LOST, LOG_REFUSED, Limits, ServerConfig};
pub use disk::{DirtyRun, Disk, DiskQueue, DiskRun};
pub use export::{Export, ExportInfo, Removal};
pub use pool::PoolStats;
pub use server::Server;
