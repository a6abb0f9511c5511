// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory that the requests of all connections share, beyond the share that each connection owns.
//!
//! Reservations are whole: a request waits until all of its memory is there and holds none of the pool meanwhile. A
//! reservation ends by itself, when the disk and the peer have done their part. So two connections never wait for each
//! other. A peer that is too slow while others wait is cut off. Memory that a disk doesn't give back in time is left
//! out of the count. The export of that disk gets nothing more of the pool meanwhile.

use crate::signal::lock;
use cowshed_storage::{Socket, rt};
use futures_util::future::{Either, select};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

/// The pause between the looks of a waiting request at peers that keep memory from it.
const LOOK: Duration = Duration::from_millis(250);
/// The rate that a peer must keep on average while it holds shared memory from others: 256 KiB in a second, in ns for
/// one byte.
const NS_PER_BYTE: u64 = 1_000_000_000 / (256 << 10);

/// The shared memory of a server.
#[derive(Debug)]
pub(crate) struct Pool {
    limit_bytes: u64,
    /// The longest request, in bytes.
    max_request_bytes: u64,
    stall_ns: u64,
    state: Mutex<PoolState>,
}

#[derive(Debug, Default)]
struct PoolState {
    used_bytes: u64,
    accounts: Vec<Arc<Account>>,
    waiting: Vec<Waiting>,
    /// Requests that their disks carry out.
    working: Vec<Working>,
    /// The part of it that is stuck in disks, in bytes.
    stuck_bytes: u64,
    next_ticket: u64,
    cut: u64,
}

/// A request that its disk carries out.
#[derive(Debug)]
struct Working {
    ticket: u64,
    bytes: u64,
    export: Arc<ExportShare>,
    since_ns: u64,
    is_stuck: bool,
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
pub(crate) struct ExportShare {
    export: String,
    held_bytes: AtomicU64,
    /// The part of it that its disk has held for too long, in bytes.
    stuck_bytes: AtomicU64,
}

impl ExportShare {
    pub(crate) fn new(export: &str) -> Arc<ExportShare> {
        Arc::new(ExportShare { export: export.to_owned(), ..ExportShare::default() })
    }

    fn holds(&self) -> bool {
        self.held_bytes.load(Ordering::Relaxed) > 0
    }
}

/// The memory of the pool that one connection holds, and whether its peer does its part.
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

/// The rest of the time for which one direction of a connection may wait for the peer. The connection's thread writes
/// it.
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

/// The state of a pool at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// All of it, in bytes.
    pub limit_bytes: u64,
    /// Memory that requests hold, in bytes. More than all of it only with `stuck_bytes`.
    pub used_bytes: u64,
    /// The part of it that requests hold whose disks haven't answered for longer than [`crate::Limits::stall_limit`].
    pub stuck_bytes: u64,
    /// Number of requests that wait for memory.
    pub waiting: usize,
    /// Number of connections that were cut off because their peers kept memory from others for too long.
    pub cut: u64,
}

impl Patience {
    fn new(stall_ns: u64) -> Patience {
        let zero = || AtomicU64::new(0);
        Patience { stall_ns, until_ns: zero(), left_ns: AtomicU64::new(stall_ns), bytes: zero(), begun_ns: zero() }
    }

    /// An operation of this many bytes begins. `counts`: shared memory is held.
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
        self.held() > 0
    }

    fn held(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// True when the peer has kept shared memory from others for too long.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: u64) {
        self.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.export.held_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: u64) {
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.export.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Pool {
    /// A pool of `limit_bytes`, for requests of up to `max_request_bytes`.
    pub(crate) fn new(limit_bytes: u64, max_request_bytes: u64, stall: Duration) -> Arc<Pool> {
        let stall_ns = u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX);
        Arc::new(Pool { limit_bytes, max_request_bytes, stall_ns, state: Mutex::default() })
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
            stuck_bytes: state.stuck_bytes,
            waiting: state.waiting.iter().filter(|waiting| !waiting.is_granted).count(),
            cut: state.cut,
        }
    }

    /// Takes `bytes` if they are free and no account waits.
    pub(crate) fn try_take(&self, account: &Account, bytes: u64) -> bool {
        let mut state = lock(&self.state);
        let takes = state.waiting.is_empty() && self.fits(&state, account, bytes);
        if takes {
            state.used_bytes += bytes;
            account.add(bytes);
        }
        takes
    }

    /// Waits for `bytes` until they are there (true), or until `gives_up`, which is asked at each wake, is true
    /// (false).
    pub(crate) async fn take(
        &self,
        account: &Arc<Account>,
        bytes: u64,
        mut gives_up: impl FnMut(&Waker) -> bool,
    ) -> bool {
        if self.try_take(account, bytes) {
            return true;
        }
        self.cut_stalled(account);
        self.note_stuck();
        let mut ticket = WaitTicket { pool: self, account, ticket: None };
        let mut waiting = pin!(poll_fn(|context| {
            if ticket.poll(bytes, context.waker()) {
                return Poll::Ready(true);
            }
            if gives_up(context.waker()) { Poll::Ready(false) } else { Poll::Pending }
        }));
        loop {
            match select(waiting.as_mut(), pin!(rt::sleep(LOOK))).await {
                Either::Left((is_taken, _)) => return is_taken,
                Either::Right(_) => {
                    self.cut_stalled(account);
                    self.note_stuck();
                }
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

    /// The disk begins with a request that holds `bytes`. [`Pool::end_work`] must follow.
    pub(crate) fn begin_work(&self, account: &Account, bytes: u64) -> u64 {
        let (export, since_ns) = (Arc::clone(&account.export), rt::now_ns());
        let mut state = lock(&self.state);
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.working.push(Working { ticket, bytes, export, since_ns, is_stuck: false });
        ticket
    }

    /// The disk has done its part.
    pub(crate) fn end_work(&self, ticket: u64) {
        let mut state = lock(&self.state);
        let Some(index) = state.working.iter().position(|working| working.ticket == ticket) else { return };
        let ended = state.working.swap_remove(index);
        if ended.is_stuck {
            state.stuck_bytes -= ended.bytes;
            ended.export.stuck_bytes.fetch_sub(ended.bytes, Ordering::Relaxed);
            self.serve(&mut state);
        }
    }

    /// Finds the memory that disks have held for too long, and hands on the room that its absence makes.
    fn note_stuck(&self) {
        let now_ns = rt::now_ns();
        let mut state = lock(&self.state);
        let PoolState { working, stuck_bytes, .. } = &mut *state;
        let mut is_new = false;
        for working in working.iter_mut().filter(|working| !working.is_stuck) {
            if now_ns.saturating_sub(working.since_ns) <= self.stall_ns {
                continue;
            }
            (working.is_stuck, is_new) = (true, true);
            *stuck_bytes += working.bytes;
            let export = &working.export;
            if export.stuck_bytes.fetch_add(working.bytes, Ordering::Relaxed) == 0 {
                let (export, seconds) = (&export.export, self.stall_ns / 1_000_000_000);
                tracing::warn!(
                    export,
                    seconds,
                    "the disk of an export has not answered for so long; other exports get memory in place of what its requests hold"
                );
            }
        }
        if is_new {
            self.serve(&mut state);
        }
    }

    /// The memory for requests that aren't stuck: the rest that stuck ones leave, but at least a quarter of the pool
    /// and one request.
    fn open_bytes(&self, state: &PoolState) -> u64 {
        let left = self.limit_bytes.saturating_sub(state.stuck_bytes);
        left.max(self.limit_bytes / 4).max(self.max_request_bytes).min(self.limit_bytes)
    }

    fn fits(&self, state: &PoolState, account: &Account, bytes: u64) -> bool {
        self.fits_pool(state, bytes) && self.fits_export(state, account, bytes)
    }

    fn fits_pool(&self, state: &PoolState, bytes: u64) -> bool {
        state.used_bytes.saturating_sub(state.stuck_bytes).saturating_add(bytes) <= self.open_bytes(state)
    }

    /// The requests of one export hold at most three quarters, that a disk that hangs leaves others something; none more
    /// begins while one is stuck.
    fn fits_export(&self, state: &PoolState, account: &Account, bytes: u64) -> bool {
        let ExportShare { held_bytes, stuck_bytes, .. } = &*account.export;
        let (held, open) = (held_bytes.load(Ordering::Relaxed), self.open_bytes(state));
        stuck_bytes.load(Ordering::Relaxed) == 0 && (held == 0 || held.saturating_add(bytes) <= open - open / 4)
    }

    /// Hands free memory to requests that wait: first to those of exports that hold nothing, then to the connections
    /// that hold least. Of these, the first one in the line gets it. A connection that is cut off gets none. A request
    /// that doesn't fit yet lets none past it, but for one of an export that has its part.
    fn serve(&self, state: &mut PoolState) {
        loop {
            let candidates = state.waiting.iter().enumerate().filter(|(_, waiting)| {
                let account = &waiting.account;
                !waiting.is_granted && !account.is_cut() && self.fits_export(state, account, waiting.bytes)
            });
            let first = candidates
                .min_by_key(|(_, Waiting { account, ticket, .. })| (account.export.holds(), account.held(), *ticket));
            let Some((index, _)) = first else { return };
            if !self.fits_pool(state, state.waiting[index].bytes) {
                return;
            }
            let waiting = &mut state.waiting[index];
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

/// A place in the queue of waiters, given up when dropped.
struct WaitTicket<'a> {
    pool: &'a Pool,
    account: &'a Arc<Account>,
    ticket: Option<u64>,
}

impl WaitTicket<'_> {
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

    fn leave_if(&mut self, state: &mut PoolState, leaves: impl Fn(&Waiting) -> bool) -> Option<Waiting> {
        let ticket = self.ticket?;
        let index = state.waiting.iter().position(|waiting| waiting.ticket == ticket && leaves(waiting))?;
        self.ticket = None;
        Some(state.waiting.swap_remove(index))
    }
}

impl Drop for WaitTicket<'_> {
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
    fn free_memory_goes_to_the_smallest_holder_first() {
        rt::block_on(async {
            let pool = Pool::new(100, 100, Duration::from_secs(3600));
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
            // Both hold 25 now: the first in the queue is served.
            pool.give(&c, 10);
            assert!(poll!(&mut more_of_c).is_pending());
            assert_eq!(poll!(&mut more_of_a), Poll::Ready(true));
        });
    }

    #[test]
    fn idle_export_comes_first_and_a_cut_connection_never() {
        rt::block_on(async {
            let pool = Pool::new(100, 100, Duration::from_secs(3600));
            let of = |export: &Arc<ExportShare>| pool.open(&Socket::pair().expect("a pair").0, export);
            let (busy, idle) = (ExportShare::new("busy"), ExportShare::new("idle"));
            let (holder, first, cut, late) = (of(&busy), of(&busy), of(&idle), of(&idle));
            assert!(pool.try_take(&holder, 75));
            let mut first_of_busy = pin!(pool.take(&first, 50, NEVER));
            let mut cut_of_idle = pin!(pool.take(&cut, 50, NEVER));
            let mut late_of_idle = pin!(pool.take(&late, 50, NEVER));
            assert!(poll!(&mut first_of_busy).is_pending() && poll!(&mut cut_of_idle).is_pending());
            assert!(poll!(&mut late_of_idle).is_pending());
            cut.is_cut.store(true, Ordering::Relaxed);
            pool.give(&holder, 55);
            assert!(poll!(&mut first_of_busy).is_pending() && poll!(&mut cut_of_idle).is_pending());
            assert_eq!(poll!(&mut late_of_idle), Poll::Ready(true));
            pool.give(&late, 50);
            assert_eq!(poll!(&mut first_of_busy), Poll::Ready(true));
            assert!(poll!(&mut cut_of_idle).is_pending());
        });
    }

    #[test]
    fn small_requests_do_not_overtake_a_large_one() {
        rt::block_on(async {
            let pool = Pool::new(100, 100, Duration::from_secs(3600));
            let (a, b, c) = (account(&pool), account(&pool), account(&pool));
            assert!(pool.try_take(&a, 75));
            let mut large = Box::pin(pool.take(&b, 70, NEVER));
            assert!(poll!(&mut large).is_pending());
            assert!(!pool.try_take(&c, 5), "others wait");
            let mut small = pin!(pool.take(&c, 5, NEVER));
            assert!(poll!(&mut small).is_pending());
            drop(large);
            assert_eq!(poll!(&mut small), Poll::Ready(true));
            // Granted memory that was not taken goes back.
            let mut late = Box::pin(pool.take(&b, 70, NEVER));
            assert!(poll!(&mut late).is_pending());
            pool.give(&a, 75);
            drop(late);
            assert_eq!(pool.stats().used_bytes, 5);
            assert_eq!(b.held_bytes.load(Ordering::Relaxed), 0);
        });
    }

    #[test]
    fn slow_peer_uses_its_patience_up() {
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
