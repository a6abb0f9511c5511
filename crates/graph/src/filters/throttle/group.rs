// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Throttle groups: limits that several filters share, from any number of threads.
//!
//! One of the waiting requests leads. It sleeps on its own thread's timer until the next one may go, and releases those
//! whose time has come. The others sleep until they are released or become the leader.
//!
//! While the buckets are less than half full, a queue borrows for several requests at once. Then it passes them without
//! a lock or a look at the clock ([`Credit`]). The buckets hold the borrowed amount at once, so the limits never let
//! more through. As soon as one request has to wait, all credit is void.

use super::limits::Limits;
use super::meter::Direction;
use super::schedule::{Entry, MemberId, Schedule, ThrottleWaits, Ticket};
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Limits with the members that share them.
pub struct Group {
    name: String,
    /// False: nothing is limited, and requests pass with one look at this.
    limited: AtomicBool,
    state: Mutex<GroupState>,
}

struct GroupState {
    schedule: Schedule,
    sleepers: BTreeMap<Ticket, Sleeper>,
    leader: Option<Ticket>,
    /// When the leader should look again, in nanoseconds.
    due_ns: u64,
    /// Counts the reasons for the leader to look again before that.
    pokes: u64,
    /// The clock never runs backwards, whichever thread read it.
    now_ns: u64,
    /// The credit that queues may have left.
    lent: Vec<Arc<AtomicU64>>,
}

/// The requests and bytes that a queue may still let pass without asking the group.
#[derive(Debug, Default)]
pub(crate) struct Credit {
    /// Requests of fewer bytes go: longer ones count as more than one operation (`iops-size`). 0, set by the group: the
    /// next request must ask it.
    below_bytes: Arc<AtomicU64>,
    requests: Cell<u64>,
    bytes: Cell<u64>,
}

impl Credit {
    /// Takes the cost of a request of `bytes`; false when there isn't enough.
    #[inline]
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let requests = self.requests.get();
        if requests == 0 {
            return false;
        }
        let Some(left) = self.bytes.get().checked_sub(bytes) else { return false };
        if bytes >= self.below_bytes.load(Ordering::Relaxed) {
            return false;
        }
        self.requests.set(requests - 1);
        self.bytes.set(left);
        true
    }

    /// Returns the credit of a request of `bytes` that wasn't carried out to the next one.
    #[cold]
    pub(crate) fn give_back(&self, bytes: u64) {
        self.fill(self.requests.get().saturating_add(1), self.bytes.get().saturating_add(bytes));
    }

    fn fill(&self, requests: u64, bytes: u64) {
        self.requests.set(requests);
        self.bytes.set(bytes);
    }
}

struct Sleeper {
    waker: Option<Waker>,
    released: bool,
}

/// The next step of a waiting request.
enum WaiterStep {
    Go,
    /// The client is gone.
    Cancelled,
    /// Sleep until then, or until the pokes have moved on, and dispatch.
    Lead {
        sleep_ns: u64,
        pokes: u64,
    },
}

impl GroupState {
    /// From now on every member asks again.
    fn revoke(&mut self) {
        for below_bytes in self.lent.drain(..) {
            below_bytes.store(0, Ordering::Relaxed);
        }
    }

    /// Notes that `credit` was given to a queue.
    fn note_lent(&mut self, credit: &Credit, longest: u64) {
        if credit.below_bytes.swap(longest.saturating_add(1), Ordering::Relaxed) == 0 {
            // Removes credits of queues that are gone.
            self.lent.retain(|below_bytes| Arc::strong_count(below_bytes) > 1);
            self.lent.push(Arc::clone(&credit.below_bytes));
        }
    }

    fn now(&mut self) -> u64 {
        let now = u64::try_from(rt::now().as_nanos()).unwrap_or(u64::MAX);
        self.now_ns = self.now_ns.max(now);
        self.now_ns
    }

    /// Releases the requests that may go. Returns the tasks to wake, once the lock is gone.
    fn dispatch(&mut self) -> Vec<Waker> {
        let now = self.now();
        let due = self.schedule.dispatch(now);
        self.wake_released(due)
    }

    /// Marks the released requests, ensures that one queue leads, and notes when that one should look next.
    fn wake_released(&mut self, due_ns: Option<u64>) -> Vec<Waker> {
        let mut wake = Vec::new();
        for ticket in self.schedule.take_released() {
            if let Some(sleeper) = self.sleepers.get_mut(&ticket) {
                sleeper.released = true;
                wake.extend(sleeper.waker.take());
            }
            if self.leader == Some(ticket) {
                self.leader = None;
            }
        }
        let Some(due_ns) = due_ns else { return wake };
        if self.leader.is_some() && due_ns < self.due_ns {
            self.pokes += 1;
            wake.extend(self.leader_waker());
        }
        self.due_ns = due_ns;
        if self.leader.is_none()
            && let Some((ticket, sleeper)) = self.sleepers.iter_mut().find(|(_, sleeper)| !sleeper.released)
        {
            self.leader = Some(*ticket);
            wake.extend(sleeper.waker.take());
        }
        wake
    }

    fn leader_waker(&mut self) -> Option<Waker> {
        self.leader.and_then(|ticket| self.sleepers.get_mut(&ticket)).and_then(|sleeper| sleeper.waker.take())
    }
}

impl Group {
    /// A group without members.
    pub fn new(name: impl Into<String>, limits: Limits) -> Result<Arc<Group>> {
        limits.check()?;
        let now_ns = u64::try_from(rt::now().as_nanos()).unwrap_or(u64::MAX);
        Ok(Arc::new(Group {
            name: name.into(),
            limited: AtomicBool::new(limits.is_limited()),
            state: Mutex::new(GroupState {
                schedule: Schedule::new(limits, now_ns),
                sleepers: BTreeMap::new(),
                leader: None,
                due_ns: 0,
                pokes: 0,
                now_ns,
                lent: Vec::new(),
            }),
        }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        *self.state().schedule.limits()
    }

    /// Other limits for all members, from now on; requests that wait go by them too.
    pub fn set_limits(&self, limits: Limits) -> Result<()> {
        limits.check()?;
        let wake = {
            let mut state = self.state();
            let now = state.now();
            state.revoke();
            state.schedule.set_limits(limits, now);
            self.limited.store(limits.is_limited(), Ordering::Release);
            state.dispatch()
        };
        wake.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// Number of members.
    pub fn members(&self) -> usize {
        self.state().schedule.members()
    }

    fn state(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something to the schedule, and wakes whom that released.
    fn change<T>(&self, change: impl FnOnce(&mut Schedule, u64) -> T) -> T {
        let (result, wake) = {
            let mut state = self.state();
            state.revoke();
            let now = state.now();
            let result = change(&mut state.schedule, now);
            (result, state.dispatch())
        };
        wake.into_iter().for_each(Waker::wake);
        result
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("name", &self.name).field("limits", &self.limits()).finish_non_exhaustive()
    }
}

/// One filter's place in a group; dropping it leaves the group.
#[derive(Debug)]
pub(super) struct Membership {
    group: Arc<Group>,
    id: MemberId,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.group.change(|schedule, now| schedule.leave(self.id, now));
    }
}

impl Membership {
    pub(super) fn new(group: Arc<Group>) -> Membership {
        let id = group.state().schedule.join();
        Membership { group, id }
    }

    pub(super) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    pub(super) fn waits(&self) -> ThrottleWaits {
        self.group.state().schedule.waits(self.id)
    }

    pub(super) fn begin_free(&self) {
        self.group.change(|schedule, now| schedule.begin_free(self.id, now));
    }

    pub(super) fn end_free(&self) {
        self.group.change(|schedule, _| schedule.end_free(self.id));
    }

    pub(super) fn lend(&self, credit: &Credit, direction: Direction, bytes: u64) -> bool {
        let mut state = self.group.state();
        if !self.group.limited.load(Ordering::Relaxed) {
            credit.fill(u64::MAX, u64::MAX);
            state.note_lent(credit, u64::MAX);
            return true;
        }
        let now = state.now();
        if !state.sleepers.is_empty() || !state.schedule.try_enter(self.id, direction, bytes, now) {
            return false;
        }
        let longest = match state.schedule.limits().iops_size {
            0 => u64::MAX,
            size => size,
        };
        let lent = if bytes > longest { 0 } else { u64::from(state.schedule.lend(self.id, direction, bytes)) };
        if lent > 0 {
            // The rest of an earlier credit is lost: it was poured, and has leaked since.
            credit.fill(lent, lent.saturating_mul(bytes));
            state.note_lent(credit, longest);
        }
        true
    }

    /// Returns when a request of `bytes` may go; with `may_cancel`, an error when its client goes meanwhile.
    #[inline]
    pub(super) async fn admit(&self, direction: Direction, bytes: u64, may_cancel: bool) -> Result<()> {
        match self.group.limited.load(Ordering::Relaxed) {
            true => self.admit_limited(direction, bytes, may_cancel).await,
            false => Ok(()),
        }
    }

    async fn admit_limited(&self, direction: Direction, bytes: u64, may_cancel: bool) -> Result<()> {
        let (entry, wake) = {
            let mut state = self.group.state();
            let now = state.now();
            let entry = state.schedule.enter(self.id, direction, bytes, now);
            match entry {
                Entry::Go if state.sleepers.is_empty() => return Ok(()),
                Entry::Go => (entry, state.dispatch()),
                Entry::Wait(ticket) => {
                    state.revoke();
                    state.sleepers.insert(ticket, Sleeper { waker: None, released: false });
                    (entry, state.dispatch())
                }
            }
        };
        wake.into_iter().for_each(Waker::wake);
        if let Entry::Wait(ticket) = entry {
            // Boxed: a request that may go at once doesn't carry the room for waiting.
            let mut wait = Box::pin(Wait { group: &self.group, ticket, may_cancel }.run());
            // As a drain does, a caller that has left lets its request go.
            std::future::poll_fn(|context| match rt::is_left() {
                true => Poll::Ready(Ok(())),
                false => wait.as_mut().poll(context),
            })
            .await
        } else {
            Ok(())
        }
    }
}

/// A request that waits; dropping it gives up.
struct Wait<'a> {
    group: &'a Group,
    ticket: Ticket,
    may_cancel: bool,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let wake = {
            let mut state = self.group.state();
            state.sleepers.remove(&self.ticket);
            if state.leader == Some(self.ticket) {
                state.leader = None;
            }
            state.schedule.cancel(self.ticket);
            if state.leader.is_none() && !state.sleepers.is_empty() { state.dispatch() } else { Vec::new() }
        };
        wake.into_iter().for_each(Waker::wake);
    }
}

impl Wait<'_> {
    async fn run(self) -> Result<()> {
        loop {
            match std::future::poll_fn(|context| self.poll_turn(context)).await {
                WaiterStep::Go => return Ok(()),
                WaiterStep::Cancelled => {
                    return Err(Error::new(ErrorKind::Cancelled, "the client of the request is gone"));
                }
                WaiterStep::Lead { sleep_ns, pokes } => {
                    let mut sleep = pin!(rt::sleep(Duration::from_nanos(sleep_ns)));
                    std::future::poll_fn(|context| {
                        if self.is_poked(pokes, context) { Poll::Ready(()) } else { sleep.as_mut().poll(context) }
                    })
                    .await;
                    let wake = self.group.state().dispatch();
                    wake.into_iter().for_each(Waker::wake);
                }
            }
        }
    }

    fn is_cancelled(&self) -> bool {
        self.may_cancel && rt::is_cancelled()
    }

    fn poll_turn(&self, context: &mut Context<'_>) -> Poll<WaiterStep> {
        if self.is_cancelled() {
            return Poll::Ready(WaiterStep::Cancelled);
        }
        let mut state = self.group.state();
        let now = state.now();
        let is_leader = state.leader == Some(self.ticket);
        let (due_ns, pokes) = (state.due_ns, state.pokes);
        match state.sleepers.get_mut(&self.ticket) {
            Some(sleeper) if !sleeper.released && is_leader => {
                sleeper.waker = None;
                Poll::Ready(WaiterStep::Lead { sleep_ns: due_ns.saturating_sub(now), pokes })
            }
            Some(sleeper) if !sleeper.released => {
                sleeper.waker = Some(context.waker().clone());
                Poll::Pending
            }
            _ => Poll::Ready(WaiterStep::Go),
        }
    }

    /// True when the leader should look again: others' limits or requests have changed, or it was released itself.
    fn is_poked(&self, pokes: u64, context: &mut Context<'_>) -> bool {
        if self.is_cancelled() {
            return true;
        }
        let mut state = self.group.state();
        let changed = state.pokes != pokes || state.leader != Some(self.ticket);
        match state.sleepers.get_mut(&self.ticket) {
            Some(sleeper) if !sleeper.released && !changed => {
                sleeper.waker = Some(context.waker().clone());
                false
            }
            _ => true,
        }
    }
}

/// The throttle groups by name.
#[derive(Debug, Default)]
pub struct Groups(Mutex<BTreeMap<String, Arc<Group>>>);

impl Groups {
    fn map(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Group>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new group; its name must be new.
    pub fn create(&self, name: &str, limits: Limits) -> Result<Arc<Group>> {
        let mut map = self.map();
        if map.contains_key(name) {
            return Err(Error::invalid_argument(format!("attempt to add duplicate property '{name}' to object")));
        }
        let group = Group::new(name, limits)?;
        map.insert(name.to_owned(), Arc::clone(&group));
        Ok(group)
    }

    /// The group with this name.
    pub fn find(&self, name: &str) -> Option<Arc<Group>> {
        self.map().get(name).cloned()
    }

    /// The group with this name, made without limits where there is none.
    pub fn find_or_create(&self, name: &str) -> Result<Arc<Group>> {
        match self.find(name) {
            Some(group) => Ok(group),
            None => self.create(name, Limits::new()),
        }
    }

    /// Takes a group away. Refused while it has members.
    pub fn delete(&self, name: &str) -> Result<()> {
        let mut map = self.map();
        match map.get(name) {
            None => Err(Error::new(ErrorKind::NotFound, format!("object '{name}' not found"))),
            Some(group) if group.members() > 0 => {
                let message = format!("object '{name}' is in use, can not be deleted");
                let sentence = format!("Cannot delete throttle group '{name}' with active references");
                Err(Error::new(ErrorKind::Busy, message).qemu(sentence))
            }
            Some(_) => {
                map.remove(name);
                Ok(())
            }
        }
    }

    /// All groups, ordered by name.
    pub fn list(&self) -> Vec<Arc<Group>> {
        self.map().values().cloned().collect()
    }
}
