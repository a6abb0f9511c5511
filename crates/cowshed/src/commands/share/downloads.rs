// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts of the content that clients have.

use cowshed_http_server::SentBytes;
use cowshed_types::Error;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Different errors that are told.
const MOST_TOLD: usize = 10;

/// A share has few clients; one that comes from many hosts has no need of its past.
const MOST_CLIENTS: usize = 1024;

/// After so long without a connection a host doesn't come back for bytes that broken ones may have lost.
const QUIET: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Downloads(Mutex<DownloadState>);

#[derive(Default)]
struct DownloadState {
    /// By the client's host and the version.
    clients: BTreeMap<(String, u64), ClientBytes>,
    /// By the client's name.
    connections: BTreeMap<String, ConnectionBytes>,
    is_complete: bool,
    /// Hosts that were sent all bytes, some of them over connections that broke, and the time since when they have none.
    quiet: BTreeMap<String, Instant>,
    /// The errors that were told. A client chooses the places that it reads, so they are bounded.
    told: BTreeSet<String>,
}

/// The bytes of one version that a host was sent.
#[derive(Default)]
struct ClientBytes {
    sent: SentBytes,
    /// Those that have arrived.
    arrived: SentBytes,
    /// Those of connections that broke. A request for the rest, once it is answered, says which of them have arrived.
    broken: SentBytes,
    /// Those of them whose connection was one of several.
    broken_beside: SentBytes,
}

impl ClientBytes {
    /// True for a client with several connections that has no reason to come back. The end has arrived, and it was sent all bytes before:
    /// it breaks a connection off where the range of another one begins.
    fn is_all_in_ranges(&self, len: u64) -> bool {
        let mut all = SentBytes::default();
        self.arrived.ranges().chain(self.broken_beside.ranges()).for_each(|range| _ = all.add(range));
        all.is_all(len) && self.arrived.ranges().last().is_some_and(|last| last.end == len)
    }
}

/// The bytes that a connection was sent, and may have lost.
#[derive(Default)]
struct ConnectionBytes {
    by_version: BTreeMap<u64, SentBytes>,
    /// Its host was sent the same version over another connection meanwhile.
    is_beside: bool,
    /// The version and the place of its request for the rest of a download.
    resumed: Option<(u64, u64)>,
}

fn host_of(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(host, _)| host)
}

impl DownloadState {
    fn client(&mut self, peer: &str, version: u64) -> &mut ClientBytes {
        let key = (host_of(peer).to_owned(), version);
        if self.clients.len() >= MOST_CLIENTS && !self.clients.contains_key(&key) {
            self.clients.pop_first();
        }
        self.clients.entry(key).or_default()
    }
}

impl Downloads {
    fn lock(&self) -> MutexGuard<'_, DownloadState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports an error, once for many requests that meet it.
    pub(super) fn report(&self, error: &Error) {
        let text = format!("the disk can't be sent: {error}");
        let mut progress = self.lock();
        if progress.told.len() >= MOST_TOLD || !progress.told.insert(text.clone()) {
            return;
        }
        crate::output::warning::print(&text);
        if progress.told.len() == MOST_TOLD {
            crate::output::warning::print("further errors of the disk are not shown");
        }
    }

    /// Notes a piece that was sent; how many bytes this client was sent so far.
    pub(super) fn add(&self, peer: &str, version: u64, piece: Range<u64>) -> u64 {
        let mut progress = self.lock();
        progress.quiet.remove(host_of(peer));
        let connections = progress.connections.iter_mut();
        let beside = connections.filter(|(other, connection)| {
            **other != peer && host_of(other) == host_of(peer) && connection.by_version.contains_key(&version)
        });
        let is_beside = beside.map(|(_, connection)| connection.is_beside = true).count() > 0;
        let connection = progress.connections.entry(peer.to_owned()).or_default();
        connection.is_beside |= is_beside;
        connection.by_version.entry(version).or_default().add(piece.clone());
        progress.client(peer, version).sent.add(piece)
    }

    /// A client asks for all bytes from `start` on: it says that it has those before.
    pub(super) fn resume(&self, peer: &str, version: u64, start: u64) {
        self.lock().connections.entry(peer.to_owned()).or_default().resumed = Some((version, start));
    }

    /// A connection has ended, with all bytes arrived or not. A client that has all bytes by now has the whole content of `len` bytes.
    pub(super) fn end(&self, peer: &str, has_arrived: bool, len: u64) {
        let mut progress = self.lock();
        let connection = progress.connections.remove(peer).unwrap_or_default();
        let mut is_complete = has_arrived && len == 0;
        for (version, bytes) in connection.by_version {
            let client = progress.client(peer, version);
            if let Some((_, start)) = connection.resumed.filter(|(of, _)| has_arrived && *of == version)
                && let Some(before) = client.broken.up_to(start)
            {
                client.arrived.add(before);
            }
            let to = if has_arrived { &mut client.arrived } else { &mut client.broken };
            bytes.ranges().for_each(|range| _ = to.add(range));
            if !has_arrived && connection.is_beside {
                bytes.ranges().for_each(|range| _ = client.broken_beside.add(range));
            }
            is_complete |= client.arrived.is_all(len);
        }
        progress.is_complete |= is_complete;
        let host = host_of(peer);
        let is_last = !progress.connections.keys().any(|other| host_of(other) == host);
        let mut versions = progress.clients.iter().filter(|((of, _), _)| of == host);
        if is_last && versions.any(|(_, client)| client.is_all_in_ranges(len)) {
            progress.quiet.insert(host.to_owned(), Instant::now());
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.is_complete_at(Instant::now())
    }

    fn is_complete_at(&self, now: Instant) -> bool {
        let progress = self.lock();
        progress.is_complete || progress.quiet.values().any(|since| now.saturating_duration_since(*since) >= QUIET)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn download_is_complete_with_all_of_one_version() {
        let downloads = Downloads::default();
        assert_eq!(downloads.add("10.0.0.1:5", 1, 0..50), 50);
        assert_eq!(downloads.add("10.0.0.2:5", 1, 50..100), 50);
        assert_eq!(downloads.add("10.0.0.1:6", 2, 40..100), 60);
        ["10.0.0.1:5", "10.0.0.2:5", "10.0.0.1:6"].iter().for_each(|peer| downloads.end(peer, true, 100));
        assert!(!downloads.is_complete());
        assert_eq!(downloads.add("10.0.0.1:7", 1, 40..100), 100);
        assert!(!downloads.is_complete(), "the connection has not ended");
        downloads.end("10.0.0.1:7", true, 100);
        assert!(downloads.is_complete());
    }

    #[test]
    fn broken_connections_count_once_their_client_stays_away() {
        let later = || Instant::now() + QUIET;
        let downloads = Downloads::default();
        downloads.add("10.0.0.1:5", 1, 0..60);
        downloads.add("10.0.0.1:6", 1, 50..100);
        downloads.end("10.0.0.1:6", true, 100);
        assert!(!downloads.is_complete_at(later()), "a connection is open");
        downloads.end("10.0.0.1:5", false, 100);
        assert!(!downloads.is_complete() && downloads.is_complete_at(later()));
        downloads.add("10.0.0.1:7", 1, 20..30);
        assert!(!downloads.is_complete_at(later()), "it has come back");
        downloads.end("10.0.0.1:7", false, 100);
        assert!(downloads.is_complete_at(later()));
        // One that has not gone on behind its broken connection may lack the end. Another one lacks a piece.
        for (broken, arrived) in [(50..100, 0..50), (0..40, 50..100)] {
            let downloads = Downloads::default();
            downloads.add("10.0.0.1:5", 1, broken);
            downloads.add("10.0.0.1:6", 1, arrived);
            downloads.end("10.0.0.1:6", true, 100);
            downloads.end("10.0.0.1:5", false, 100);
            assert!(!downloads.is_complete_at(later()));
        }
        // A connection that broke before the other one began is of another client.
        let downloads = Downloads::default();
        downloads.add("10.0.0.1:5", 1, 0..100);
        downloads.end("10.0.0.1:5", false, 100);
        downloads.add("10.0.0.1:6", 1, 90..100);
        downloads.end("10.0.0.1:6", true, 100);
        assert!(!downloads.is_complete_at(later()));
    }

    #[test]
    fn bytes_of_a_broken_connection_count_with_the_rest() {
        let downloads = Downloads::default();
        downloads.add("10.0.0.1:5", 1, 0..50);
        downloads.add("10.0.0.1:5", 1, 50..100);
        downloads.end("10.0.0.1:5", false, 100);
        // A piece says nothing of the bytes before it, whichever it is.
        downloads.add("10.0.0.1:6", 1, 99..100);
        downloads.end("10.0.0.1:6", true, 100);
        assert!(!downloads.is_complete());
        // The rest has to arrive.
        downloads.resume("10.0.0.1:7", 1, 60);
        downloads.add("10.0.0.1:7", 1, 60..80);
        downloads.end("10.0.0.1:7", false, 100);
        assert!(!downloads.is_complete());
        downloads.resume("10.0.0.1:8", 2, 70);
        downloads.add("10.0.0.1:8", 2, 70..100);
        downloads.end("10.0.0.1:8", true, 100);
        assert!(!downloads.is_complete(), "another version");
        downloads.resume("10.0.0.1:9", 1, 70);
        assert_eq!(downloads.add("10.0.0.1:9", 1, 70..100), 100);
        downloads.end("10.0.0.1:9", true, 100);
        assert!(downloads.is_complete());
    }

    #[test]
    fn empty_content_has_to_arrive_too() {
        let downloads = Downloads::default();
        downloads.end("10.0.0.1:5", false, 0);
        assert!(!downloads.is_complete());
        downloads.end("10.0.0.1:6", true, 0);
        assert!(downloads.is_complete());
    }
}
