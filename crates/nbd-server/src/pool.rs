// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory that the requests of all connections share, beyond the share that each connection owns.
//!
//! Reservations are whole: a request waits until all of its memory is there and holds none of the pool meanwhile. A
//! reservation ends by itself, when the disk and the peer have done their part. So two connections never wait for each
//! other. A peer that is too slow while others wait is cut off.

use crate::signal::lock;
use cowshed_storage::{Socket, rt};
use futures_util::future::{Either, select};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

/// How often a request that waits looks for peers that keep memory from it.
const LOOK: Duration = Duration::from_millis(250);
/// What a peer must move on average while it keeps shared memory from others: 256 KiB in a second, in ns for one byte.
const NS_PER_BYTE: u64 = 1_000_000_000 / (256 << 10);

/// The shared memory of a server.
#[derive(Debug)]
pub(crate) struct Pool {
    limit_bytes: u64,
    /// The requests of one export hold at most so much, that a disk that hangs leaves others something.
    export_limit_bytes: u64,
    stall_ns: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    used_bytes: u64,
    accounts: Vec<Arc<Account>>,
    waiting: Vec<Waiting>,
    next_ticket: u64,
    cut: u64,
}

/// A request that waits.
#[derive(Debug)]
struct Waiting {
    ticket: u64,
    bytes: u64,
    account: Arc<Account>,
    is_granted: bool,
    waker: Waker,
}

/// Bytes of the pool that the requests of one export hold. Written under the pool's lock.
#[derive(Debug, Default)]
pub(crate) struct ExportShare(AtomicU64);

/// What one connection holds of the pool, and whether its peer does its part.
#[derive(Debug)]
pub(crate) struct Account {
    socket: Socket,
    peer: String,
    export: Arc<ExportShare>,
    /// Written under the pool's lock.
    held_bytes: AtomicU64,
    pub receiving: Patience,
    pub sending: Patience,
    is_cut: AtomicBool,
}

/// How long one direction of a connection may still wait for the peer. The connection's thread writes it.
#[derive(Debug)]
pub(crate) struct Patience {
    stall_ns: u64,
    /// By [`rt::now_ns`]; 0: nothing is waited for, or nothing shared is held.
    until_ns: AtomicU64,
    /// The rest of `stall_ns` once the running operation has had the time for its bytes.
    left_ns: AtomicU64,
    /// Bytes of the operation that runs; 0: none runs.
    bytes: AtomicU64,
    begun_ns: AtomicU64,
}

/// What a pool has at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// All of it, in bytes.
    pub limit_bytes: u64,
    /// What requests hold, in bytes.
    pub used_bytes: u64,
    /// Requests that wait for memory.
    pub waiting: usize,
    /// Connections that were cut off because their peers kept memory from others for too long.
    pub cut: u64,
}

impl Patience {
    fn new(stall_ns: u64) -> Patience {
        let zero = || AtomicU64::new(0);
        Patience { stall_ns, until_ns: zero(), left_ns: AtomicU64::new(stall_ns), bytes: zero(), begun_ns: zero() }
    }

    /// An operation of so many bytes begins. `counts`: shared memory is held.
    pub(crate) fn begin(&self, bytes: usize, counts: bool) {
        self.bytes.store((bytes as u64).max(1), Ordering::Relaxed);
        if counts {
            self.count();
        }
    }

    /// Shared memory is held from now on: an operation that runs counts.
    pub(crate) fn count(&self) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        if bytes > 0 && self.until_ns.load(Ordering::Relaxed) == 0 {
            let now_ns = rt::now_ns();
            self.begun_ns.store(now_ns, Ordering::Relaxed);
            let time_ns = bytes.saturating_mul(NS_PER_BYTE).saturating_add(self.left_ns.load(Ordering::Relaxed));
            self.until_ns.store(now_ns.saturating_add(time_ns), Ordering::Relaxed);
        }
    }

    /// The operation has ended. `counts`: shared memory is held still.
    pub(crate) fn end(&self, counts: bool) {
        self.end_at(counts, rt::now_ns);
    }

    fn end_at(&self, counts: bool, now_ns: impl FnOnce() -> u64) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        if self.until_ns.swap(0, Ordering::Relaxed) == 0 {
            return;
        }
        let left_ns = match counts {
            true => {
                let took_ns = now_ns().saturating_sub(self.begun_ns.load(Ordering::Relaxed));
                let left_ns = self.left_ns.load(Ordering::Relaxed).saturating_add(bytes.saturating_mul(NS_PER_BYTE));
                left_ns.saturating_sub(took_ns).min(self.stall_ns)
            }
            false => self.stall_ns,
        };
        self.left_ns.store(left_ns, Ordering::Relaxed);
    }

    fn is_over(&self, now_ns: u64) -> bool {
        let until_ns = self.until_ns.load(Ordering::Relaxed);
        until_ns != 0 && until_ns < now_ns
    }
}

impl Account {
    /// True while requests of the connection hold shared memory.
    pub(crate) fn holds(&self) -> bool {
        self.held_bytes.load(Ordering::Relaxed) > 0
    }

    /// True when the peer has kept shared memory from others for too long.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: u64) {
        self.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.export.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: u64) {
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.export.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Pool {
    pub(crate) fn new(limit_bytes: u64, stall: Duration) -> Arc<Pool> {
        let stall_ns = u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX);
        let export_limit_bytes = limit_bytes - limit_bytes / 4;
        Arc::new(Pool { limit_bytes, export_limit_bytes, stall_ns, state: Mutex::default() })
    }

    /// A connection comes.
    pub(crate) fn open(&self, socket: &Socket, export: &Arc<ExportShare>) -> Arc<Account> {
        let account = Arc::new(Account {
            socket: socket.clone(),
            peer: socket.peer(),
            export: Arc::clone(export),
            held_bytes: AtomicU64::new(0),
            receiving: Patience::new(self.stall_ns),
            sending: Patience::new(self.stall_ns),
            is_cut: AtomicBool::new(false),
        });
        lock(&self.state).accounts.push(Arc::clone(&account));
        account
    }

    /// A connection goes.
    pub(crate) fn close(&self, account: &Arc<Account>) {
        lock(&self.state).accounts.retain(|other| !Arc::ptr_eq(other, account));
    }

    pub(crate) fn stats(&self) -> PoolStats {
        let state = lock(&self.state);
        PoolStats {
            limit_bytes: self.limit_bytes,
            used_bytes: state.used_bytes,
            waiting: state.waiting.iter().filter(|waiting| !waiting.is_granted).count(),
            cut: state.cut,
        }
    }

    /// Takes `bytes` if they are free and nobody waits.
    pub(crate) fn try_take(&self, account: &Account, bytes: u64) -> bool {
        let mut state = lock(&self.state);
        let takes = state.waiting.is_empty() && self.fits(&state, account, bytes);
        if takes {
            state.used_bytes += bytes;
            account.add(bytes);
        }
        takes
    }

    /// Waits for `bytes` until they are there (true), or `gives_up`, which is asked at each wake, says so (false).
    pub(crate) async fn take(
        &self,
        account: &Arc<Account>,
        bytes: u64,
        mut gives_up: impl FnMut(&Waker) -> bool,
    ) -> bool {
        if self.try_take(account, bytes) {
            return true;
        }
        let mut place = Place { pool: self, account, ticket: None };
        let mut waiting = pin!(poll_fn(|context| {
            if place.poll(bytes, context.waker()) {
                return Poll::Ready(true);
            }
            if gives_up(context.waker()) { Poll::Ready(false) } else { Poll::Pending }
        }));
        loop {
            match select(waiting.as_mut(), pin!(rt::sleep(LOOK))).await {
                Either::Left((is_taken, _)) => return is_taken,
                Either::Right(_) => self.cut_stalled(account),
            }
        }
    }

    /// `bytes` of the account are free again.
    pub(crate) fn give(&self, account: &Account, bytes: u64) {
        let mut state = lock(&self.state);
        state.used_bytes = state.used_bytes.saturating_sub(bytes);
        account.subtract(bytes);
        self.serve(&mut state);
    }

    fn fits(&self, state: &State, account: &Account, bytes: u64) -> bool {
        state.used_bytes.saturating_add(bytes) <= self.limit_bytes && self.fits_export(account, bytes)
    }

    fn fits_export(&self, account: &Account, bytes: u64) -> bool {
        let held = account.export.0.load(Ordering::Relaxed);
        held == 0 || held.saturating_add(bytes) <= self.export_limit_bytes
    }

    /// Hands free memory to those who wait: first to the connections that hold least, of these to the one that came first.
    /// A request that doesn't fit yet lets none past it, but for one of an export that has its part.
    fn serve(&self, state: &mut State) {
        loop {
            let candidates = state
                .waiting
                .iter()
                .enumerate()
                .filter(|(_, waiting)| !waiting.is_granted && self.fits_export(&waiting.account, waiting.bytes));
            let first = candidates
                .min_by_key(|(_, waiting)| (waiting.account.held_bytes.load(Ordering::Relaxed), waiting.ticket));
            let Some((index, _)) = first else { return };
            let waiting = &mut state.waiting[index];
            if state.used_bytes.saturating_add(waiting.bytes) > self.limit_bytes {
                return;
            }
            waiting.is_granted = true;
            waiting.account.add(waiting.bytes);
            state.used_bytes += waiting.bytes;
            waiting.waker.wake_by_ref();
        }
    }

    /// Cuts off the peers that keep memory from `waiting` and don't do their part.
    fn cut_stalled(&self, waiting: &Arc<Account>) {
        let now_ns = rt::now_ns();
        let mut state = lock(&self.state);
        let is_stalled = |account: &&Arc<Account>| {
            account.holds()
                && (account.receiving.is_over(now_ns) || account.sending.is_over(now_ns))
                && !Arc::ptr_eq(account, waiting)
                && !account.is_cut.swap(true, Ordering::Relaxed)
        };
        let stalled: Vec<_> = state.accounts.iter().filter(is_stalled).cloned().collect();
        state.cut += stalled.len() as u64;
        drop(state);
        for account in stalled {
            let (peer, bytes) = (&account.peer, account.held_bytes.load(Ordering::Relaxed));
            tracing::warn!(
                peer,
                bytes,
                "a client that neither sends nor receives keeps memory from others; it is cut off"
            );
            account.socket.shutdown();
        }
    }
}

/// A place among those who wait, given up when dropped.
struct Place<'a> {
    pool: &'a Pool,
    account: &'a Arc<Account>,
    ticket: Option<u64>,
}

impl Place<'_> {
    /// True when the memory is there.
    fn poll(&mut self, bytes: u64, waker: &Waker) -> bool {
        let mut state = lock(&self.pool.state);
        let Some(ticket) = self.ticket else {
            let ticket = state.next_ticket;
            state.next_ticket += 1;
            let (account, waker) = (Arc::clone(self.account), waker.clone());
            state.waiting.push(Waiting { ticket, bytes, account, is_granted: false, waker });
            self.ticket = Some(ticket);
            self.pool.serve(&mut state);
            return self.leave_if(&mut state, |waiting| waiting.is_granted).is_some();
        };
        if let Some(waiting) = state.waiting.iter_mut().find(|waiting| waiting.ticket == ticket) {
            waiting.waker.clone_from(waker);
        }
        self.leave_if(&mut state, |waiting| waiting.is_granted).is_some()
    }

    fn leave_if(&mut self, state: &mut State, leaves: impl Fn(&Waiting) -> bool) -> Option<Waiting> {
        let ticket = self.ticket?;
        let index = state.waiting.iter().position(|waiting| waiting.ticket == ticket && leaves(waiting))?;
        self.ticket = None;
        Some(state.waiting.swap_remove(index))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.ticket.is_none() {
            return;
        }
        let pool = self.pool;
        let mut state = lock(&pool.state);
        if let Some(waiting) = self.leave_if(&mut state, |_| true) {
            if waiting.is_granted {
                state.used_bytes = state.used_bytes.saturating_sub(waiting.bytes);
                waiting.account.subtract(waiting.bytes);
            }
            // Others may have waited behind this one.
            pool.serve(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::poll;

    const NEVER: fn(&Waker) -> bool = |_| false;

    fn account(pool: &Pool) -> Arc<Account> {
        pool.open(&Socket::pair().expect("a pair").0, &Arc::default())
    }

    #[test]
    fn free_memory_goes_to_who_holds_least_and_then_to_who_came_first() {
        rt::block_on(async {
            let pool = Pool::new(100, Duration::from_secs(3600));
            let (a, b, c) = (account(&pool), account(&pool), account(&pool));
            assert!(pool.try_take(&a, 25) && pool.try_take(&b, 10) && pool.try_take(&c, 65));
            let mut more_of_a = pin!(pool.take(&a, 20, NEVER));
            let mut more_of_c = pin!(pool.take(&c, 20, NEVER));
            let mut more_of_b = pin!(pool.take(&b, 20, NEVER));
            assert!(poll!(&mut more_of_a).is_pending() && poll!(&mut more_of_c).is_pending());
            assert!(poll!(&mut more_of_b).is_pending());
            pool.give(&c, 20);
            assert!(poll!(&mut more_of_a).is_pending() && poll!(&mut more_of_c).is_pending());
            assert_eq!(poll!(&mut more_of_b), Poll::Ready(true));
            pool.give(&c, 10);
            assert!(poll!(&mut more_of_a).is_pending() && poll!(&mut more_of_c).is_pending());
            // Both hold 25 now: the first of those who wait.
            pool.give(&c, 10);
            assert!(poll!(&mut more_of_c).is_pending());
            assert_eq!(poll!(&mut more_of_a), Poll::Ready(true));
        });
    }

    #[test]
    fn a_large_request_is_not_passed_by_small_ones_and_one_that_is_given_up_blocks_nobody() {
        rt::block_on(async {
            let pool = Pool::new(100, Duration::from_secs(3600));
            let (a, b, c) = (account(&pool), account(&pool), account(&pool));
            assert!(pool.try_take(&a, 75));
            let mut large = Box::pin(pool.take(&b, 70, NEVER));
            assert!(poll!(&mut large).is_pending());
            assert!(!pool.try_take(&c, 5), "others wait");
            let mut small = pin!(pool.take(&c, 5, NEVER));
            assert!(poll!(&mut small).is_pending());
            drop(large);
            assert_eq!(poll!(&mut small), Poll::Ready(true));
            // What was granted and not taken goes back.
            let mut late = Box::pin(pool.take(&b, 70, NEVER));
            assert!(poll!(&mut late).is_pending());
            pool.give(&a, 75);
            drop(late);
            assert_eq!(pool.stats().used_bytes, 5);
            assert_eq!(b.held_bytes.load(Ordering::Relaxed), 0);
        });
    }

    #[test]
    fn a_peer_that_moves_little_uses_its_patience_up_over_many_operations() {
        let second_ns = 1_000_000_000;
        let patience = Patience::new(10 * second_ns);
        // 256 KiB have a second each and take three.
        for _ in 0..4 {
            patience.begin(256 << 10, true);
            assert!(!patience.is_over(rt::now_ns() + 2 * second_ns));
            patience.end_at(true, || rt::now_ns() + 3 * second_ns);
        }
        patience.begin(256 << 10, true);
        assert!(patience.is_over(rt::now_ns() + 4 * second_ns));
        patience.end(false);
        patience.begin(256 << 10, true);
        assert!(!patience.is_over(rt::now_ns() + 10 * second_ns), "memory that was given back is forgotten");
    }
}
