// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The order of members that share limits. It is pure: time is passed in.
//!
//! Each member has a queue for reads and one for writes. Members with waiting requests take turns, one request each,
//! and so do reads and writes. A member without requests is skipped, so no other waits for it.

use super::limits::Limits;
use super::meter::{Direction, Meter};
use slab::Slab;
use std::collections::{HashMap, VecDeque};

/// A waiting request; never used twice.
pub type Ticket = u64;
/// A member of the group.
pub type MemberId = usize;

/// The answer of [`Schedule::enter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It may go.
    Go,
    /// It waits, until its ticket is released.
    Wait(Ticket),
}

#[derive(Debug)]
struct Waiting {
    member: MemberId,
    direction: Direction,
    bytes: u64,
    since_ns: u64,
}

#[derive(Debug, Default)]
struct Member {
    queues: [VecDeque<Ticket>; 2],
    /// While above 0 its requests pass without waiting.
    free: u32,
    waits: u64,
    waited_ns: u64,
}

/// The number and the time of the waits of a member's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleWaits {
    /// Requests that had to wait.
    pub count: u64,
    /// The time that they waited, all together, in nanoseconds.
    pub total_ns: u64,
    /// Number of requests that wait now.
    pub waiting: u64,
}

/// The order in which the requests of a group go.
#[derive(Debug, Default)]
pub struct Schedule {
    meter: Meter,
    members: Slab<Member>,
    waiting: HashMap<Ticket, Waiting>,
    next_ticket: Ticket,
    /// The member whose turn it is, for each direction.
    turns: [MemberId; 2],
    /// The direction whose turn it is.
    first: Option<Direction>,
    /// Requests in the queues of each direction.
    queued: [usize; 2],
    released: Vec<Ticket>,
}

impl Schedule {
    /// A schedule without members.
    pub fn new(limits: Limits, now_ns: u64) -> Schedule {
        Schedule { meter: Meter::new(limits, now_ns), ..Schedule::default() }
    }

    /// The limits.
    pub fn limits(&self) -> &Limits {
        self.meter.limits()
    }

    /// Sets other limits; [`Schedule::dispatch`] should follow.
    pub fn set_limits(&mut self, limits: Limits, now_ns: u64) {
        self.meter.set_limits(limits, now_ns);
    }

    /// A new member.
    pub fn join(&mut self) -> MemberId {
        self.members.insert(Member::default())
    }

    /// Takes a member away. Its waiting requests are released.
    pub fn leave(&mut self, member: MemberId, now_ns: u64) {
        self.release_all(member, now_ns);
        self.members.try_remove(member);
    }

    /// Number of members.
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// The waits of a member's requests.
    pub fn waits(&self, member: MemberId) -> ThrottleWaits {
        self.members.get(member).map_or_else(ThrottleWaits::default, |member| ThrottleWaits {
            count: member.waits,
            total_ns: member.waited_ns,
            waiting: member.queues.iter().map(|queue| queue.len() as u64).sum(),
        })
    }

    /// From now on the member's requests pass without waiting, those that wait too; until as many
    /// [`Schedule::end_free`].
    pub fn begin_free(&mut self, member: MemberId, now_ns: u64) {
        if let Some(state) = self.members.get_mut(member) {
            state.free += 1;
        }
        self.release_all(member, now_ns);
    }

    /// See [`Schedule::begin_free`].
    pub fn end_free(&mut self, member: MemberId) {
        if let Some(state) = self.members.get_mut(member) {
            state.free = state.free.saturating_sub(1);
        }
    }

    /// A request of a member. Others may be released by its coming ([`Schedule::take_released`]).
    pub fn enter(&mut self, member: MemberId, direction: Direction, bytes: u64, now_ns: u64) -> Entry {
        if self.try_enter(member, direction, bytes, now_ns) {
            return Entry::Go;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.insert(ticket, Waiting { member, direction, bytes, since_ns: now_ns });
        self.members[member].queues[direction as usize].push_back(ticket);
        self.queued[direction as usize] += 1;
        self.dispatch(now_ns);
        match self.released.iter().position(|released| *released == ticket) {
            Some(at) => {
                self.released.remove(at);
                Entry::Go
            }
            None => Entry::Wait(ticket),
        }
    }

    /// As [`Schedule::enter`] for a request that doesn't wait: false when it would have to, and nothing is changed.
    pub fn try_enter(&mut self, member: MemberId, direction: Direction, bytes: u64, now_ns: u64) -> bool {
        let may = self.is_free(member) || (self.queued == [0, 0] && self.meter.wait_ns(direction, now_ns) == 0);
        if may {
            self.meter.pour(direction, bytes, now_ns);
        }
        may
    }

    /// Pours in ahead for further requests of a member as large as the one that has just gone; returns for how many.
    /// None while a request waits, and none for a member that is free.
    pub fn lend(&mut self, member: MemberId, direction: Direction, bytes: u64) -> u32 {
        if self.queued != [0, 0] || self.is_free(member) { 0 } else { self.meter.lend(direction, bytes) }
    }

    fn is_free(&self, member: MemberId) -> bool {
        self.members.get(member).is_none_or(|member| member.free > 0)
    }

    /// A waiting request gives up.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.released.retain(|released| *released != ticket);
        let Some(waiting) = self.waiting.remove(&ticket) else { return };
        let queue = &mut self.members[waiting.member].queues[waiting.direction as usize];
        if let Some(at) = queue.iter().position(|queued| *queued == ticket) {
            queue.remove(at);
            self.queued[waiting.direction as usize] -= 1;
        }
    }

    /// Releases the requests that may go now. Returns when the next one may, if one waits: an earlier call changes
    /// nothing.
    pub fn dispatch(&mut self, now_ns: u64) -> Option<u64> {
        loop {
            let first = self.first.unwrap_or(Direction::Read);
            let mut due: Option<u64> = None;
            let mut released = false;
            for direction in [first, first.other()] {
                let Some(member) = self.next_member(direction) else { continue };
                match self.meter.wait_ns(direction, now_ns) {
                    0 => {
                        self.release_head(member, direction, now_ns);
                        self.turns[direction as usize] = member + 1;
                        self.first = Some(direction.other());
                        released = true;
                        break;
                    }
                    wait => due = Some(due.map_or(now_ns + wait, |due| due.min(now_ns + wait))),
                }
            }
            if !released {
                return due;
            }
        }
    }

    /// The tickets that were released since the last call.
    pub fn take_released(&mut self) -> Vec<Ticket> {
        std::mem::take(&mut self.released)
    }

    /// The next member, from the one whose turn it is, with a request in this direction.
    fn next_member(&self, direction: Direction) -> Option<MemberId> {
        if self.queued[direction as usize] == 0 {
            return None;
        }
        let turn = self.turns[direction as usize];
        let has_request =
            |(id, member): (MemberId, &Member)| (!member.queues[direction as usize].is_empty()).then_some(id);
        let mut from_turn = self.members.iter().filter(|(id, _)| *id >= turn).filter_map(has_request);
        from_turn.next().or_else(|| self.members.iter().find_map(has_request))
    }

    fn release_head(&mut self, member: MemberId, direction: Direction, now_ns: u64) {
        let state = &mut self.members[member];
        let Some(ticket) = state.queues[direction as usize].pop_front() else { return };
        self.queued[direction as usize] -= 1;
        if let Some(waiting) = self.waiting.remove(&ticket) {
            state.waits += 1;
            state.waited_ns += now_ns.saturating_sub(waiting.since_ns);
            self.meter.pour(direction, waiting.bytes, now_ns);
            self.released.push(ticket);
        }
    }

    fn release_all(&mut self, member: MemberId, now_ns: u64) {
        for direction in [Direction::Read, Direction::Write] {
            while self.members.get(member).is_some_and(|member| !member.queues[direction as usize].is_empty()) {
                self.release_head(member, direction, now_ns);
            }
        }
    }
}
