// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Room for new clients: silent connections in negotiation lose their places when all are taken.

use crate::signal::lock;
use cowshed_storage::Socket;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A connection in negotiation is silent after this time without an option or TLS.
pub(crate) const SILENCE: Duration = Duration::from_secs(1);

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    /// An IPv4 address, or the first 64 bits of an IPv6 address: a host can have all of the rest.
    Ip(IpAddr),
    /// The user at the other end of a Unix socket.
    User(u32),
    Unknown,
}

impl Origin {
    fn of(socket: &Socket) -> Origin {
        let address = rustix::net::getpeername(socket).ok().flatten();
        if let Some(address) = address.and_then(|address| SocketAddr::try_from(address).ok()) {
            return Origin::Ip(network(address.ip()));
        }
        rustix::net::sockopt::socket_peercred(socket)
            .map_or(Origin::Unknown, |credentials| Origin::User(credentials.uid.as_raw()))
    }
}

/// The address, or of an IPv6 address the network.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

/// A connection in negotiation that takes a place.
#[derive(Debug)]
struct Haggler {
    socket: Socket,
    origin: Origin,
    /// The last option or the begin.
    progress: Mutex<Instant>,
    cut: AtomicBool,
}

/// All connections in negotiation that take places, in the order of their coming.
#[derive(Debug, Default)]
pub(crate) struct Hagglers(Mutex<Vec<Arc<Haggler>>>);

/// One connection's negotiation, from its begin to its end.
#[derive(Debug)]
pub(crate) struct Haggling<'a> {
    all: &'a Hagglers,
    haggler: Arc<Haggler>,
}

impl Hagglers {
    pub(crate) fn enter(&self, socket: &Socket) -> Haggling<'_> {
        let haggler = Arc::new(Haggler {
            socket: socket.clone(),
            origin: Origin::of(socket),
            progress: Mutex::new(Instant::now()),
            cut: AtomicBool::new(false),
        });
        lock(&self.0).push(Arc::clone(&haggler));
        Haggling { all: self, haggler }
    }

    /// Cuts one silent connection: the one that is silent for longest of the peer that has most of them. Returns how long to
    /// wait for a free place before another attempt. While one that was cut is about to end, nothing more is cut.
    pub(crate) fn make_room(&self, now: Instant) -> Duration {
        let all = lock(&self.0);
        if all.iter().any(|haggler| haggler.cut.load(Ordering::Acquire)) {
            return SILENCE;
        }
        let silence = |haggler: &Haggler| now.saturating_duration_since(*lock(&haggler.progress));
        let mut silent: BTreeMap<Origin, Vec<&Arc<Haggler>>> = BTreeMap::new();
        for haggler in all.iter().filter(|haggler| silence(haggler) >= SILENCE) {
            silent.entry(haggler.origin).or_default().push(haggler);
        }
        if let Some(most) = silent.into_values().max_by_key(Vec::len)
            && let Some(longest) = most.into_iter().max_by_key(|haggler| silence(haggler))
        {
            longest.cut.store(true, Ordering::Release);
            longest.socket.shutdown();
            return SILENCE;
        }
        let soonest = all.iter().map(|haggler| SILENCE.saturating_sub(silence(haggler))).min();
        soonest.unwrap_or(SILENCE)
    }
}

impl Haggling<'_> {
    /// An option came, or TLS was started.
    pub(crate) fn note_progress(&self) {
        *lock(&self.haggler.progress) = Instant::now();
    }

    /// True when this connection lost its place.
    pub(crate) fn was_cut(&self) -> bool {
        self.haggler.cut.load(Ordering::Acquire)
    }
}

impl Drop for Haggling<'_> {
    fn drop(&mut self) {
        lock(&self.all.0).retain(|haggler| !Arc::ptr_eq(haggler, &self.haggler));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_one_origin_whatever_its_address_within_the_network() {
        let origin = |address: &str| network(address.parse().expect("an address"));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:2:3:4"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_ne!(origin("10.0.0.1"), origin("10.0.0.2"));
        assert_eq!(origin("::ffff:10.0.0.1"), origin("10.0.0.1"));
    }

    #[test]
    fn the_peer_with_most_silent_connections_loses_the_one_that_is_silent_for_longest() {
        let hagglers = Hagglers::default();
        let (socket, _peer) = Socket::pair().expect("a pair");
        let started = Instant::now();
        let enter = |origin: Origin, after: u64| {
            let socket = socket.clone();
            let progress = Mutex::new(started + Duration::from_millis(after));
            let haggler = Arc::new(Haggler { socket, origin, progress, cut: AtomicBool::new(false) });
            lock(&hagglers.0).push(Arc::clone(&haggler));
            haggler
        };
        let lone = enter(Origin::User(1), 0);
        let (second, first) = (enter(Origin::User(2), 300), enter(Origin::User(2), 100));
        let young = enter(Origin::User(2), 5000);
        let at = |millis: u64| hagglers.make_room(started + Duration::from_millis(millis));
        let end_cut = || lock(&hagglers.0).retain(|haggler| !haggler.cut.load(Ordering::Acquire));
        let cut = || [&lone, &first, &second, &young].map(|haggler| haggler.cut.load(Ordering::Acquire));
        // Nobody is silent long enough yet.
        assert_eq!(at(900), Duration::from_millis(100));
        assert_eq!(cut(), [false; 4]);
        assert_eq!(at(1400), SILENCE);
        assert_eq!(cut(), [false, true, false, false]);
        // Its end comes first.
        assert_eq!(at(1400), SILENCE);
        assert_eq!(cut(), [false, true, false, false]);
        // Both peers have one that is silent now.
        for _ in 0..2 {
            end_cut();
            at(1400);
        }
        assert_eq!(cut(), [true, true, true, false]);
        end_cut();
        assert_eq!(at(5400), Duration::from_millis(600));
        assert_eq!(cut(), [true, true, true, false]);
    }
}
