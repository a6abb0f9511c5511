// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Room for new clients.
//!
//! A connection that has sent no option yet takes a seat. Once an option is there with all of its data, the connection
//! takes one of the places of the limit. So silent connections keep no place from the others. Silent ones lose their
//! seats, and in negotiation their places, when all are taken. Seats and places go to the peer that has fewest of them.
//! A peer with several in negotiation loses one to a peer with fewer.
//!
//! Clients of an export keep their places, however idle they are. A peer with many of them doesn't keep the others out.
//! When all others are taken, a peer with few connections may have one of some spare places.

use crate::Disk;
use crate::config::Limits;
use crate::registry::Registry;
use crate::signal::lock;
use cowshed_storage::{Socket, rt};
use futures_util::FutureExt;
use futures_util::future::{Either, select};
use std::cell::Cell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A connection in negotiation is silent after this time without an option or TLS.
pub(crate) const SILENCE: Duration = Duration::from_secs(1);

/// So long a cut connection may take to its end before a waiter looks again.
const CUT_PAUSE: Duration = Duration::from_millis(20);

/// The origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
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

/// Connections with a place that leave a peer its right to a spare one.
const FEW: usize = 4;

/// Connections that are accepted beyond the limit: that have sent no option, or wait for a place.
pub(crate) const SEATS: usize = 64;
/// Connections that are accepted beyond these, and wait for a seat. Not one byte of them is read.
pub(crate) const PARKED: usize = 256;
/// The most of these that one address may have. The server closes further ones: the clients behind them would wait.
const PARKED_OF_ONE: usize = PARKED / 2;

/// Places or seats, and the connections that wait for one.
#[derive(Debug, Default)]
struct Line {
    /// The connections that each peer has.
    held: BTreeMap<Origin, usize>,
    /// The connections that wait, in the order of their coming.
    waiting: VecDeque<(u64, Origin)>,
    next_number: u64,
}

impl Line {
    fn stand(&mut self, origin: Origin) -> u64 {
        self.next_number += 1;
        self.waiting.push_back((self.next_number, origin));
        self.next_number
    }

    fn stop_waiting(&mut self, number: u64) {
        self.waiting.retain(|(other, _)| *other != number);
    }

    fn held(&self, origin: Origin) -> usize {
        self.held.get(&origin).copied().unwrap_or(0)
    }

    /// Takes one, if it is this connection's turn: that of the peer with fewest comes first.
    fn take(&mut self, number: u64) -> Option<()> {
        let &(next, origin) = self.waiting.iter().min_by_key(|(number, origin)| (self.held(*origin), *number))?;
        (next == number).then(|| self.enter(number, origin))
    }

    fn enter(&mut self, number: u64, origin: Origin) {
        self.stop_waiting(number);
        *self.held.entry(origin).or_default() += 1;
    }

    fn give(&mut self, origin: Origin) {
        if let Entry::Occupied(mut held) = self.held.entry(origin) {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
    }
}

/// The connections that are counted.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    /// The number of those that have sent an option and count against the limit.
    pub placed: usize,
    /// The number of the others.
    pub seated: usize,
    places: Line,
    seats: Line,
}

impl Connections {
    pub(crate) fn all(&self) -> usize {
        self.placed + self.seated
    }

    /// Takes a seat, if there is one and it is this connection's turn.
    fn seat(&mut self, number: u64) -> Option<()> {
        if self.seated >= SEATS {
            return None;
        }
        self.seats.take(number)?;
        self.seated += 1;
        Some(())
    }

    /// Moves the connection from its seat to a place, if there is one and it is its turn, or to a spare one.
    fn place(&mut self, number: u64, origin: Origin, limits: &Limits) -> Option<()> {
        match self.placed.checked_sub(limits.max_connections) {
            None => self.places.take(number)?,
            Some(beyond) if beyond < limits.spare_connections && self.places.held(origin) < FEW => {
                self.places.enter(number, origin);
            }
            Some(_) => return None,
        }
        self.seats.give(origin);
        self.placed += 1;
        self.seated -= 1;
        Some(())
    }

    /// A connection with a place has ended.
    fn release_place(&mut self, origin: Origin) {
        self.placed -= 1;
        self.places.give(origin);
    }
}

/// The stage of a connection's negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No option has come.
    Seated,
    /// It waits for a place: no fault of the client.
    Waiting,
    Placed,
}

/// Since when.
#[derive(Clone, Copy, Debug)]
struct StageTimes {
    stage: Stage,
    since: Instant,
    /// The last option, or the begin.
    progress: Instant,
}

impl StageTimes {
    fn new(stage: Stage, since: Instant) -> Mutex<StageTimes> {
        Mutex::new(StageTimes { stage, since, progress: since })
    }
}

/// The two stages of a connection that are bounded: a seat before its first option, and a place behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotKind {
    Seat,
    Place,
}

/// A connection in negotiation that is counted.
#[derive(Debug)]
struct Admission {
    socket: Socket,
    origin: Origin,
    stage: Mutex<StageTimes>,
    cut: AtomicBool,
}

impl Admission {
    /// True where its end makes such room.
    fn takes(&self, kind: SlotKind) -> bool {
        match kind {
            SlotKind::Seat => self.stage() != Stage::Placed,
            SlotKind::Place => self.stage() == Stage::Placed,
        }
    }

    fn stage(&self) -> Stage {
        lock(&self.stage).stage
    }

    fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(lock(&self.stage).progress)
    }

    /// The time since its stage began.
    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(lock(&self.stage).since)
    }

    fn cut(&self) {
        self.cut.store(true, Ordering::Release);
        self.socket.shutdown();
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }
}

/// All connections in negotiation that are counted, in the order of their coming.
#[derive(Debug, Default)]
pub(crate) struct Admissions(Mutex<Vec<Arc<Admission>>>);

/// One connection's negotiation, from its begin to its end.
#[derive(Debug)]
pub(crate) struct Haggling<'a> {
    all: &'a Admissions,
    admission: Arc<Admission>,
}

impl Admissions {
    pub(crate) fn enter(&self, socket: &Socket) -> Haggling<'_> {
        let admission = Arc::new(Admission {
            socket: socket.clone(),
            origin: Origin::of(socket),
            stage: StageTimes::new(Stage::Seated, Instant::now()),
            cut: AtomicBool::new(false),
        });
        lock(&self.0).push(Arc::clone(&admission));
        Haggling { all: self, admission }
    }

    /// Cuts one connection for one of `newcomer`: of the peer that has most of them, the silent one that is silent for
    /// longest. Where none is silent, one of the peer that has most, if that is more than `newcomer` will have. Returns
    /// how long to wait for free room before another attempt. While one that was cut is about to end, nothing more is
    /// cut.
    pub(crate) fn evict_for(&self, kind: SlotKind, newcomer: Origin, now: Instant) -> Duration {
        let all = lock(&self.0);
        let those: Vec<&Arc<Admission>> = all.iter().filter(|admission| admission.takes(kind)).collect();
        if those.iter().any(|admission| admission.is_cut()) {
            return CUT_PAUSE;
        }
        // The wait for a place is no silence.
        let talking: Vec<_> = those.iter().filter(|admission| admission.stage() != Stage::Waiting).collect();
        let silent = talking.iter().filter(|admission| admission.silence(now) >= SILENCE);
        let most = by_origin(silent.map(|admission| **admission)).into_values().max_by_key(Vec::len);
        let longest = most.and_then(|most| most.into_iter().max_by_key(|admission| admission.silence(now)));
        if let Some(cut) = longest.or_else(|| excess(&those, kind, newcomer, now)) {
            cut.cut();
            return CUT_PAUSE;
        }
        let left = |admission: &&&Arc<Admission>| SILENCE.saturating_sub(admission.silence(now));
        talking.iter().map(left).min().filter(|left| !left.is_zero()).unwrap_or(SILENCE)
    }
}

fn by_origin<'a>(those: impl Iterator<Item = &'a Arc<Admission>>) -> BTreeMap<Origin, Vec<&'a Arc<Admission>>> {
    let mut origins: BTreeMap<Origin, Vec<&Arc<Admission>>> = BTreeMap::new();
    those.for_each(|admission| origins.entry(admission.origin).or_default().push(admission));
    origins
}

/// A connection that its peer has beyond the number that `newcomer` will have. It is the last that waits for a place,
/// or the one that negotiates for longest, and for `SILENCE` at least.
fn excess<'a>(
    those: &[&'a Arc<Admission>],
    kind: SlotKind,
    newcomer: Origin,
    now: Instant,
) -> Option<&'a Arc<Admission>> {
    let mut origins = by_origin(those.iter().copied());
    let own = origins.remove(&newcomer).map_or(0, |own| own.len());
    let most = origins.into_values().max_by_key(Vec::len).filter(|most| most.len() >= own + 2)?;
    match kind {
        SlotKind::Seat => most.into_iter().rfind(|admission| admission.stage() == Stage::Waiting),
        SlotKind::Place => most
            .into_iter()
            .filter(|admission| admission.age(now) >= SILENCE)
            .max_by_key(|admission| admission.age(now)),
    }
}

impl Haggling<'_> {
    /// An option came, or TLS was started.
    pub(crate) fn note_progress(&self) {
        lock(&self.admission.stage).progress = Instant::now();
    }

    fn enter(&self, stage: Stage) {
        let now = Instant::now();
        *lock(&self.admission.stage) = StageTimes { stage, since: now, progress: now };
    }

    /// True when this connection had to make room.
    pub(crate) fn was_cut(&self) -> bool {
        self.admission.is_cut()
    }
}

/// The seat or the place of a connection.
#[derive(Debug)]
pub(crate) struct ConnectionSlot<D: Disk> {
    registry: Arc<Registry<D>>,
    origin: Origin,
    has_place: Cell<bool>,
}

impl<D: Disk> ConnectionSlot<D> {
    /// Waits for a free seat and takes it. `None` when too many connections of the peer's address wait for one.
    pub(crate) async fn take(registry: &Arc<Registry<D>>, socket: &Socket) -> Option<ConnectionSlot<D>> {
        let origin = Origin::of(socket);
        let number = registry.connections.change(|all| {
            let waiting = all.seats.waiting.iter().filter(|(_, other)| *other == origin).count();
            let is_flood = matches!(origin, Origin::Ip(_)) && waiting >= PARKED_OF_ONE;
            (!is_flood).then(|| all.seats.stand(origin))
        })?;
        let in_line = InLine { registry, number, kind: SlotKind::Seat };
        registry.wait_for_room(SlotKind::Seat, origin, |all| all.seat(number)).await;
        let slot = ConnectionSlot { registry: Arc::clone(registry), origin, has_place: Cell::new(false) };
        drop(in_line);
        Some(slot)
    }

    /// The client has sent an option: waits for a place, until it is its turn. False when the client goes first.
    pub(crate) async fn rise(&self, haggling: &Haggling<'_>) -> bool {
        let (registry, origin) = (&self.registry, self.origin);
        let limits = registry.config.limits;
        let number = registry.connections.change(|all| all.places.stand(origin));
        let in_line = InLine { registry, number, kind: SlotKind::Place };
        haggling.enter(Stage::Waiting);
        let take = move |all: &mut Connections| all.place(number, origin, &limits);
        let mut place = pin!(registry.wait_for_room(SlotKind::Place, origin, take));
        let has_place = match place.as_mut().now_or_never() {
            Some(()) => true,
            None => {
                tracing::info!(peer = haggling.admission.socket.peer(), "all connections are taken, the client waits");
                matches!(select(place, pin!(haggling.admission.socket.hung_up())).await, Either::Left(_))
            }
        };
        drop(in_line);
        if has_place {
            self.has_place.set(true);
            haggling.enter(Stage::Placed);
        }
        has_place
    }
}

impl<D: Disk> Drop for ConnectionSlot<D> {
    fn drop(&mut self) {
        self.registry.connections.change(|all| match self.has_place.get() {
            true => all.release_place(self.origin),
            false => {
                all.seated -= 1;
                all.seats.give(self.origin);
            }
        });
    }
}

/// A place in line, given up when dropped.
struct InLine<'a, D: Disk> {
    registry: &'a Registry<D>,
    number: u64,
    kind: SlotKind,
}

impl<D: Disk> Drop for InLine<'_, D> {
    fn drop(&mut self) {
        self.registry.connections.change(|all| match self.kind {
            SlotKind::Seat => all.seats.stop_waiting(self.number),
            SlotKind::Place => all.places.stop_waiting(self.number),
        });
    }
}

impl<D: Disk> Registry<D> {
    /// Waits until `take` takes the room that one of `newcomer` needs. Connections in negotiation make room.
    async fn wait_for_room(
        &self,
        kind: SlotKind,
        newcomer: Origin,
        mut take: impl FnMut(&mut Connections) -> Option<()> + Unpin,
    ) {
        let mut pause = Duration::ZERO;
        loop {
            let free = pin!(self.connections.wait(&mut take));
            match select(free, pin!(rt::sleep(pause))).await {
                Either::Left(_) => return,
                Either::Right(_) => pause = self.admissions.evict_for(kind, newcomer, Instant::now()),
            }
        }
    }
}

impl Drop for Haggling<'_> {
    fn drop(&mut self) {
        lock(&self.all.0).retain(|admission| !Arc::ptr_eq(admission, &self.admission));
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
        let [first, second, third] = [(); 3].map(|()| all.places.stand(origin));
        assert_eq!(all.place(first, origin, &limits(1)), None, "there is no place");
        assert_eq!(all.place(second, origin, &limits(3)), None, "it isn't its turn");
        assert_eq!(all.place(first, origin, &limits(3)), Some(()));
        assert_eq!(all.place(second, origin, &limits(3)), Some(()));
        assert_eq!(all.place(third, origin, &limits(3)), None);
        assert_eq!((all.placed, all.seated, all.all()), (3, 1, 4));
    }

    #[test]
    fn peer_with_few_connections_has_a_spare_place() {
        let limits = Limits { max_connections: 6, spare_connections: 5, ..Limits::default() };
        let mut all = Connections { seated: 20, ..Connections::default() };
        let (many, other) = (Origin::User(1), Origin::User(2));
        let mut come = |origin| {
            let number = all.places.stand(origin);
            let has_place = all.place(number, origin, &limits).is_some();
            all.places.stop_waiting(number);
            has_place
        };
        assert_eq!([(); 8].map(|()| come(many)), [true, true, true, true, true, true, false, false]);
        assert_eq!([(); 5].map(|()| come(other)), [true, true, true, true, false], "few of each peer");
        assert!(come(Origin::Unknown), "the last spare place");
        assert!(!come(Origin::User(3)), "none is left");
        for origin in [many, other, other] {
            all.release_place(origin);
        }
        // The limit counts those in spare places too.
        let number = all.places.stand(many);
        assert_eq!((all.place(number, many, &limits), all.placed), (None, 8));
        let number = all.places.stand(other);
        assert_eq!(all.place(number, other, &limits), Some(()));
        (0..9).for_each(|_| all.release_place(other));
        assert_eq!((all.placed, all.places.held.get(&other)), (0, None));
    }

    #[test]
    fn the_peer_that_has_fewest_has_its_turn_first() {
        let (many, few) = (Origin::User(1), Origin::User(2));
        let mut all = Connections::default();
        let [first, second, third] = [(); 3].map(|()| all.seats.stand(many));
        let late = all.seats.stand(few);
        assert_eq!(all.seat(late), None, "both have none, and the other came first");
        assert_eq!(all.seat(first), Some(()));
        assert_eq!(all.seat(second), None);
        assert_eq!(all.seat(late), Some(()));
        all.seats.stop_waiting(second);
        assert_eq!(all.seat(third), Some(()));
        all.seats.give(many);
        all.seats.give(many);
        assert_eq!(all.seats.held, BTreeMap::from([(few, 1)]), "a peer that has none is forgotten");
    }

    /// Admissions of these origins in this stage, since so many milliseconds after `started`, without a moment of silence.
    fn talkers(started: Instant, those: &[(u32, Stage, u64)]) -> (Admissions, Vec<Arc<Admission>>) {
        let admissions = Admissions::default();
        let (socket, _peer) = Socket::pair().expect("a pair");
        let all: Vec<_> = those
            .iter()
            .map(|&(user, stage, after)| {
                let since = started + Duration::from_millis(after);
                let progress = started + Duration::from_secs(3600);
                let stage = Mutex::new(StageTimes { stage, since, progress });
                let (socket, origin) = (socket.clone(), Origin::User(user));
                Arc::new(Admission { socket, origin, stage, cut: AtomicBool::new(false) })
            })
            .collect();
        lock(&admissions.0).extend(all.iter().cloned());
        (admissions, all)
    }

    fn cut_of(all: &[Arc<Admission>]) -> Vec<usize> {
        (0..all.len()).filter(|&index| all[index].is_cut()).collect()
    }

    #[test]
    fn peer_with_most_places_gives_up_its_longest_negotiation() {
        let started = Instant::now();
        let (admissions, all) =
            talkers(started, &[(1, Stage::Placed, 900), (1, Stage::Placed, 200), (2, Stage::Placed, 0)]);
        let at = |user: u32, millis: u64| {
            admissions.evict_for(SlotKind::Place, Origin::User(user), started + Duration::from_millis(millis));
            cut_of(&all)
        };
        assert_eq!(at(1, 5000), [0; 0], "its own");
        assert_eq!(at(2, 5000), [0; 0], "it has as many then");
        assert_eq!(at(3, 1100), [0; 0], "none of them has had its second");
        assert_eq!(at(3, 1200), [1]);
    }

    #[test]
    fn peer_with_most_seats_gives_up_the_last() {
        let started = Instant::now();
        let those = [(1, Stage::Waiting, 0), (1, Stage::Waiting, 1), (1, Stage::Seated, 2), (2, Stage::Waiting, 3)];
        let (admissions, all) = talkers(started, &those);
        admissions.evict_for(SlotKind::Seat, Origin::User(1), started);
        assert_eq!(cut_of(&all), [0; 0]);
        admissions.evict_for(SlotKind::Seat, Origin::User(3), started);
        assert_eq!(cut_of(&all), [1]);
    }

    #[test]
    fn peer_with_most_silent_connections_loses_the_oldest() {
        let admissions = Admissions::default();
        let (socket, _peer) = Socket::pair().expect("a pair");
        let started = Instant::now();
        let enter = |origin: Origin, after: u64| {
            let socket = socket.clone();
            let stage = StageTimes::new(Stage::Placed, started + Duration::from_millis(after));
            let admission = Arc::new(Admission { socket, origin, stage, cut: AtomicBool::new(false) });
            lock(&admissions.0).push(Arc::clone(&admission));
            admission
        };
        let lone = enter(Origin::User(1), 0);
        let (second, first) = (enter(Origin::User(2), 300), enter(Origin::User(2), 100));
        let young = enter(Origin::User(2), 5000);
        let at = |millis: u64| {
            // A newcomer of the same peer: the rule on shares has no part in this.
            admissions.evict_for(SlotKind::Place, Origin::User(2), started + Duration::from_millis(millis))
        };
        let end_cut = || lock(&admissions.0).retain(|admission| !admission.cut.load(Ordering::Acquire));
        let cut = || [&lone, &first, &second, &young].map(|admission| admission.cut.load(Ordering::Acquire));
        assert_eq!(admissions.evict_for(SlotKind::Seat, Origin::User(2), started + Duration::from_secs(9)), SILENCE);
        assert_eq!(cut(), [false; 4], "none of them has a seat");
        // No client is silent long enough yet.
        assert_eq!(at(900), Duration::from_millis(100));
        assert_eq!(cut(), [false; 4]);
        assert_eq!(at(1400), CUT_PAUSE);
        assert_eq!(cut(), [false, true, false, false]);
        // Its end comes first.
        assert_eq!(at(1400), CUT_PAUSE);
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
