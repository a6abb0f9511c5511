// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Room for new clients.
//!
//! A connection that has sent no option yet takes a seat; with its first option it takes one of the places of the limit. So
//! connections that say nothing keep no place from those that do. Silent ones lose their seats, and in negotiation their
//! places, when all are taken. Clients of an export keep their places, however idle they are. So that a peer with many of them
//! doesn't keep everybody else out, a peer with few connections may have one of some spare places when all others are taken.

use crate::Disk;
use crate::config::Limits;
use crate::registry::Registry;
use crate::signal::lock;
use cowshed_storage::{Socket, rt};
use futures_util::FutureExt;
use futures_util::future::{Either, select};
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::pin;
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

/// So many connections with a place leave a peer its right to a spare one.
const FEW: usize = 4;

/// Connections that are accepted beyond the limit: that have sent no option, or wait for a place.
pub(crate) const SEATS: usize = 64;

/// The connections that are counted.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    /// Those that have sent an option and count against the limit.
    pub placed: usize,
    /// The others.
    pub seated: usize,
    /// The numbers of those that wait for a place, in the order of their coming.
    line: VecDeque<u64>,
    next_number: u64,
    /// How many of each peer have a place.
    by_origin: BTreeMap<Origin, usize>,
}

impl Connections {
    pub(crate) fn all(&self) -> usize {
        self.placed + self.seated
    }

    fn stand_in_line(&mut self) -> u64 {
        self.next_number += 1;
        self.line.push_back(self.next_number);
        self.next_number
    }

    /// Moves the connection from its seat to a place, if there is one and it is the first in line, or to a spare one.
    fn place(&mut self, number: u64, origin: Origin, limits: &Limits) -> Option<()> {
        let of_peer = self.by_origin.get(&origin).copied().unwrap_or(0);
        let fits = match self.placed.checked_sub(limits.max_connections) {
            None => self.line.front() == Some(&number),
            Some(beyond) => beyond < limits.spare_connections && of_peer < FEW,
        };
        if !fits {
            return None;
        }
        self.line.retain(|other| *other != number);
        self.placed += 1;
        self.seated -= 1;
        self.by_origin.insert(origin, of_peer + 1);
        Some(())
    }

    /// A connection with a place has ended.
    fn leave(&mut self, origin: Origin) {
        self.placed -= 1;
        match self.by_origin.get_mut(&origin) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.by_origin.remove(&origin)),
        }
    }
}

/// How far the negotiation of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No option has come.
    Seated,
    /// It waits for a place: no fault of the client.
    Waiting,
    Placed,
}

/// What newcomers need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Seat,
    Place,
}

/// A connection in negotiation that is counted.
#[derive(Debug)]
struct Haggler {
    socket: Socket,
    origin: Origin,
    /// With the time of the last option, or of the begin.
    stage: Mutex<(Stage, Instant)>,
    cut: AtomicBool,
}

impl Haggler {
    /// True where its end makes such room.
    fn takes(&self, room: Room) -> bool {
        match room {
            Room::Seat => lock(&self.stage).0 == Stage::Seated,
            Room::Place => lock(&self.stage).0 == Stage::Placed,
        }
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }
}

/// All connections in negotiation that are counted, in the order of their coming.
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
            stage: Mutex::new((Stage::Seated, Instant::now())),
            cut: AtomicBool::new(false),
        });
        lock(&self.0).push(Arc::clone(&haggler));
        Haggling { all: self, haggler }
    }

    /// Cuts one silent connection: the one that is silent for longest of the peer that has most of them. Returns how long to
    /// wait for free room before another attempt. While one that was cut is about to end, nothing more is cut.
    pub(crate) fn make_room(&self, room: Room, now: Instant) -> Duration {
        let all = lock(&self.0);
        let those: Vec<&Arc<Haggler>> = all.iter().filter(|haggler| haggler.takes(room)).collect();
        if those.iter().any(|haggler| haggler.is_cut()) {
            return SILENCE;
        }
        let silence = |haggler: &Haggler| now.saturating_duration_since(lock(&haggler.stage).1);
        let mut silent: BTreeMap<Origin, Vec<&Arc<Haggler>>> = BTreeMap::new();
        for haggler in those.iter().filter(|haggler| silence(haggler) >= SILENCE) {
            silent.entry(haggler.origin).or_default().push(haggler);
        }
        if let Some(most) = silent.into_values().max_by_key(Vec::len)
            && let Some(longest) = most.into_iter().max_by_key(|haggler| silence(haggler))
        {
            longest.cut.store(true, Ordering::Release);
            longest.socket.shutdown();
            return SILENCE;
        }
        let soonest = those.iter().map(|haggler| SILENCE.saturating_sub(silence(haggler))).min();
        soonest.unwrap_or(SILENCE)
    }
}

impl Haggling<'_> {
    /// An option came, or TLS was started.
    pub(crate) fn note_progress(&self) {
        lock(&self.haggler.stage).1 = Instant::now();
    }

    fn enter(&self, stage: Stage) {
        *lock(&self.haggler.stage) = (stage, Instant::now());
    }

    /// True when this connection had to make room.
    pub(crate) fn was_cut(&self) -> bool {
        self.haggler.is_cut()
    }
}

/// The seat or the place of a connection.
#[derive(Debug)]
pub(crate) struct Slot<D: Disk> {
    registry: Arc<Registry<D>>,
    /// Of its place: where the connection comes from.
    place_of: Cell<Option<Origin>>,
}

impl<D: Disk> Slot<D> {
    /// Waits for a free seat and takes it.
    pub(crate) async fn take(registry: &Arc<Registry<D>>) -> Slot<D> {
        let free = |all: &mut Connections| (all.seated < SEATS).then(|| all.seated += 1);
        registry.wait_for_room(Room::Seat, free).await;
        Slot { registry: Arc::clone(registry), place_of: Cell::new(None) }
    }

    /// The client has sent an option: waits for a place, behind those that wait already. False when the client goes first.
    pub(crate) async fn rise(&self, haggling: &Haggling<'_>) -> bool {
        let registry = &self.registry;
        let (limits, origin) = (registry.config.limits, haggling.haggler.origin);
        let number = registry.connections.change(Connections::stand_in_line);
        let in_line = InLine { registry, number };
        haggling.enter(Stage::Waiting);
        let mut place = pin!(registry.wait_for_room(Room::Place, move |all| all.place(number, origin, &limits)));
        let has_place = match place.as_mut().now_or_never() {
            Some(()) => true,
            None => {
                tracing::info!(peer = haggling.haggler.socket.peer(), "all connections are taken, the client waits");
                matches!(select(place, pin!(haggling.haggler.socket.hung_up())).await, Either::Left(_))
            }
        };
        drop(in_line);
        if has_place {
            self.place_of.set(Some(origin));
            haggling.enter(Stage::Placed);
        }
        has_place
    }
}

impl<D: Disk> Drop for Slot<D> {
    fn drop(&mut self) {
        self.registry.connections.change(|all| match self.place_of.get() {
            Some(origin) => all.leave(origin),
            None => all.seated -= 1,
        });
    }
}

/// A place in line, given up when dropped.
struct InLine<'a, D: Disk> {
    registry: &'a Registry<D>,
    number: u64,
}

impl<D: Disk> Drop for InLine<'_, D> {
    fn drop(&mut self) {
        self.registry.connections.change(|all| all.line.retain(|other| *other != self.number));
    }
}

impl<D: Disk> Registry<D> {
    /// Waits until `take` takes what it needs. Silent connections in negotiation make room.
    async fn wait_for_room(&self, room: Room, mut take: impl FnMut(&mut Connections) -> Option<()> + Unpin) {
        let mut pause = Duration::ZERO;
        loop {
            let free = pin!(self.connections.wait(&mut take));
            match select(free, pin!(rt::sleep(pause))).await {
                Either::Left(_) => return,
                Either::Right(_) => pause = self.hagglers.make_room(room, Instant::now()),
            }
        }
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
    fn places_are_given_in_the_order_of_the_wait() {
        let mut all = Connections { placed: 1, seated: 3, ..Connections::default() };
        let limits = |max_connections| Limits { max_connections, ..Limits::default() };
        let origin = Origin::User(1);
        let [first, second, third] = [(); 3].map(|()| all.stand_in_line());
        assert_eq!(all.place(first, origin, &limits(1)), None, "there is no place");
        assert_eq!(all.place(second, origin, &limits(3)), None, "it isn't its turn");
        assert_eq!(all.place(first, origin, &limits(3)), Some(()));
        assert_eq!(all.place(second, origin, &limits(3)), Some(()));
        assert_eq!(all.place(third, origin, &limits(3)), None);
        assert_eq!((all.placed, all.seated, all.all()), (3, 1, 4));
    }

    #[test]
    fn a_peer_with_few_connections_has_a_spare_place_when_all_are_taken() {
        let limits = Limits { max_connections: 6, spare_connections: 5, ..Limits::default() };
        let mut all = Connections { seated: 20, ..Connections::default() };
        let (many, other) = (Origin::User(1), Origin::User(2));
        let mut come = |origin| {
            let number = all.stand_in_line();
            let has_place = all.place(number, origin, &limits).is_some();
            all.line.retain(|waiting| *waiting != number);
            has_place
        };
        assert_eq!([(); 8].map(|()| come(many)), [true, true, true, true, true, true, false, false]);
        assert_eq!([(); 5].map(|()| come(other)), [true, true, true, true, false], "few of each peer");
        assert!(come(Origin::Unknown), "the last spare place");
        assert!(!come(Origin::User(3)), "none is left");
        for origin in [many, other, other] {
            all.leave(origin);
        }
        // The limit counts those in spare places too.
        let number = all.stand_in_line();
        assert_eq!((all.place(number, many, &limits), all.placed), (None, 8));
        assert_eq!(all.place(number, other, &limits), Some(()));
        (0..9).for_each(|_| all.leave(other));
        assert_eq!((all.placed, all.by_origin.get(&other)), (0, None));
    }

    #[test]
    fn the_peer_with_most_silent_connections_loses_the_one_that_is_silent_for_longest() {
        let hagglers = Hagglers::default();
        let (socket, _peer) = Socket::pair().expect("a pair");
        let started = Instant::now();
        let enter = |origin: Origin, after: u64| {
            let socket = socket.clone();
            let stage = Mutex::new((Stage::Placed, started + Duration::from_millis(after)));
            let haggler = Arc::new(Haggler { socket, origin, stage, cut: AtomicBool::new(false) });
            lock(&hagglers.0).push(Arc::clone(&haggler));
            haggler
        };
        let lone = enter(Origin::User(1), 0);
        let (second, first) = (enter(Origin::User(2), 300), enter(Origin::User(2), 100));
        let young = enter(Origin::User(2), 5000);
        let at = |millis: u64| hagglers.make_room(Room::Place, started + Duration::from_millis(millis));
        let end_cut = || lock(&hagglers.0).retain(|haggler| !haggler.cut.load(Ordering::Acquire));
        let cut = || [&lone, &first, &second, &young].map(|haggler| haggler.cut.load(Ordering::Acquire));
        assert_eq!(hagglers.make_room(Room::Seat, started + Duration::from_secs(9)), SILENCE);
        assert_eq!(cut(), [false; 4], "none of them has a seat");
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
