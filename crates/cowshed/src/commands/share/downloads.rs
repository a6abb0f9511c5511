// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts of the content that clients have.

use cowshed_http_server::SentBytes;
use cowshed_types::Error;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Different errors that are told.
const MOST_TOLD: usize = 10;

/// A share has few clients; one that comes from many hosts has no need of its past.
const MOST_CLIENTS: usize = 1024;

#[derive(Default)]
pub(super) struct Downloads(Mutex<DownloadState>);

#[derive(Default)]
struct DownloadState {
    /// By the client's host and the version.
    clients: BTreeMap<(String, u64), ClientBytes>,
    /// By the client's name.
    connections: BTreeMap<String, ConnectionBytes>,
    is_complete: bool,
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
}

/// The bytes that a connection was sent, and may have lost.
#[derive(Default)]
struct ConnectionBytes {
    by_version: BTreeMap<u64, SentBytes>,
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
        let connection = progress.connections.entry(peer.to_owned()).or_default();
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
            is_complete |= client.arrived.is_all(len);
        }
        progress.is_complete |= is_complete;
    }

    pub(super) fn is_complete(&self) -> bool {
        self.lock().is_complete
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
