// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The settings of a server, and the events for its owner.

use cowshed_nbd::ServerTls;
use cowshed_nbd_proto::PORTABLE_PAYLOAD_BYTES;
use cowshed_storage::rt::PollLimit;
use cowshed_types::{Error, Result};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The target of the log's lines about clients that get no export. The field `sentence` is QEMU's.
pub const LOG_REFUSED: &str = "refused";
/// The target of the log's lines about clients whose requests end with an error.
pub const LOG_LOST: &str = "lost";

/// The settings of a [`crate::Server`].
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Threads that serve clients, each connection on one of them in turn: 1 to 256.
    pub queues: usize,
    /// The longest time that a queue looks for requests before it sleeps, where that pays; it keeps a core busy
    /// meanwhile.
    pub poll_limit: PollLimit,
    /// The resources that clients may take from this process.
    pub limits: Limits,
    /// Credentials; none: no encryption.
    pub tls: Option<ServerTls>,
    /// With credentials: clients must encrypt. Else they may.
    pub tls_required: bool,
    /// Decides which clients with a certificate may come; none: all. Needs credentials that verify clients.
    pub authorizer: Option<Authorizer>,
    /// Called for events, on the threads that serve: it must be quick and must not wait for the server.
    pub events: Option<EventHandler>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            queues: 1,
            poll_limit: PollLimit::default(),
            limits: Limits::default(),
            tls: None,
            tls_required: true,
            authorizer: None,
            events: None,
        }
    }
}

impl ServerConfig {
    pub(crate) fn check(&self) -> Result<()> {
        if !(1..=256).contains(&self.queues) {
            return Err(Error::invalid_argument("a server has 1 to 256 queues").value(self.queues));
        }
        let limits = &self.limits;
        if limits.max_requests == 0 || limits.max_connections == 0 || limits.max_payload_bytes < 1 << 16 {
            let message = "a server takes at least one connection, one request of it and payloads of 64 KiB";
            return Err(Error::invalid_argument(message));
        }
        if limits.memory_bytes < limits.max_payload_bytes.into() {
            let message =
                format!("the memory for requests must hold the longest one, {} bytes", limits.max_payload_bytes);
            return Err(Error::invalid_argument(message).value(limits.memory_bytes));
        }
        Ok(())
    }

    pub(crate) fn notify(&self, event: Event) {
        if let Some(EventHandler(handler)) = &self.events {
            handler(event);
        }
    }
}

/// The resources that clients may take from this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time that have sent an option; further ones wait. A negotiating connection that has sent no
    /// option for a second loses its place to a waiting one. It is the one silent for longest of the peer (IP address
    /// or user) with most of them. 64 connections are accepted besides, in the same way. A peer with most connections
    /// in negotiation loses some to peers with fewer.
    pub max_connections: usize,
    /// Places beyond `max_connections`: when all others are taken a peer that has fewer than four may have one.
    pub spare_connections: usize,
    /// The most requests in flight of one connection; further ones wait on the wire.
    pub max_requests: usize,
    /// Memory for the data of these requests, in bytes; one request of any allowed length always fits.
    pub max_bytes_in_flight: u64,
    /// Memory for the data of the requests of all connections, in bytes, at least `max_payload_bytes`. Each connection
    /// has 1 MiB of its own besides. The requests of one export take at most three quarters. Memory that disks have
    /// held for longer than `stall_limit` is left out; at least a quarter and one longest request then remain for other
    /// exports. A longer read or write that gets no memory there goes in pieces through its connection's own memory.
    pub memory_bytes: u64,
    /// The time after which a client that holds such memory is cut off. It neither sends its data nor takes its
    /// replies, while others wait for the memory. 256 KiB in a second, on average, are enough to stay.
    pub stall_limit: Duration,
    /// Longest read or write, in bytes; the block sizes of an export can make it smaller. A longer write than that (or than
    /// 32 MiB, whichever is more) costs the client its connection.
    pub max_payload_bytes: u32,
    /// The time from accepting a client to its first request; zero: for ever.
    pub handshake_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_connections: 100,
            spare_connections: 0,
            max_requests: 128,
            max_bytes_in_flight: 64 << 20,
            memory_bytes: 256 << 20,
            stall_limit: Duration::from_secs(30),
            max_payload_bytes: PORTABLE_PAYLOAD_BYTES,
            handshake_timeout: Duration::from_secs(10),
        }
    }
}

/// Decides whether the client with a certificate for this distinguished name may come; else returns the reason. Called
/// on the threads that serve: it must be quick.
#[derive(Clone)]
pub struct Authorizer(pub Arc<Check>);

/// The function that an [`Authorizer`] calls with a client's name; an error has the reason of a refusal.
pub type Check = dyn Fn(&str) -> std::result::Result<(), String> + Send + Sync;

impl fmt::Debug for Authorizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authorizer")
    }
}

/// An event in the life of a client or of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A client has chosen an export.
    ClientConnected {
        /// The export's name.
        export: String,
        /// The client's name in messages.
        peer: String,
    },
    /// It is gone.
    ClientDisconnected {
        /// The export's name.
        export: String,
        /// The client's name in messages.
        peer: String,
        /// The fault; none: it sent a goodbye, or was sent away.
        error: Option<String>,
    },
    /// A client was sent away, or went away, before it had chosen an export.
    ClientRefused {
        /// The client's name in messages.
        peer: String,
        /// The reason of the refusal.
        reason: String,
    },
    /// An export is gone, and all its clients.
    ExportRemoved {
        /// Its name.
        name: String,
    },
}

/// The function that is called for each [`Event`].
#[derive(Clone)]
pub struct EventHandler(pub Arc<dyn Fn(Event) + Send + Sync>);

impl fmt::Debug for EventHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventHandler")
    }
}
