// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One budget for the metadata that all images of a process keep in memory, and for a cache of other data.
//!
//! The slice that was used least recently goes first, whichever image it belongs to. The clocks of all images are one
//! clock, whose hand goes from image to image, and then to the cache. A slice that was used since the hand last came by
//! stays for another round.

use crate::engine::{Engine, State};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// The process-wide budget by default, in bytes.
const DEFAULT_BYTES: u64 = 256 << 20;
/// Slices that the hand looks at in one image before it goes on to the next.
const STEPS_PER_TURN: usize = 64;
/// Bytes that the hand takes from the cache before it goes on.
const BYTES_PER_TURN: u64 = 256 << 10;

/// A cache of other data that counts in a budget, such as decompressed clusters.
pub trait BudgetedCache: std::fmt::Debug + Send + Sync {
    /// Drops about this many bytes, those first that weren't used since the last call. Returns the bytes that went.
    fn give_up(&self, bytes: u64) -> u64;
}

/// Bytes that images and the cache may keep in memory together. Dirty and busy metadata may exceed it for a while.
#[derive(Debug)]
pub struct Budget {
    limit_bytes: AtomicU64,
    used_bytes: AtomicU64,
    members: Mutex<Vec<Weak<Engine>>>,
    cache: OnceLock<&'static dyn BudgetedCache>,
    /// The image where the hand is.
    hand: AtomicUsize,
}

impl Budget {
    /// A budget of its own, for tests and programs that need several.
    pub fn new(limit_bytes: u64) -> Arc<Budget> {
        Arc::new(Budget {
            limit_bytes: AtomicU64::new(limit_bytes),
            used_bytes: AtomicU64::new(0),
            members: Mutex::default(),
            cache: OnceLock::new(),
            hand: AtomicUsize::new(0),
        })
    }

    /// The one that images join unless they are given another.
    pub fn process_wide() -> &'static Arc<Budget> {
        static BUDGET: OnceLock<Arc<Budget>> = OnceLock::new();
        BUDGET.get_or_init(|| Budget::new(DEFAULT_BYTES))
    }

    /// The limit in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// The memory in use now, in bytes, bookkeeping of metadata included.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Sets the limit; slices beyond it go at once, as far as they are clean and idle.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        self.limit_bytes.store(limit_bytes, Ordering::Relaxed);
        self.relieve(None);
    }

    /// Takes the cache in. Only the first call has an effect.
    pub fn join_cache(&self, cache: &'static dyn BudgetedCache) {
        let _ = self.cache.set(cache);
    }

    /// Corrects the memory of an image or of the cache.
    pub fn change(&self, before: u64, after: u64) {
        if after >= before {
            self.used_bytes.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.used_bytes.fetch_sub(before - after, Ordering::Relaxed);
        }
    }

    /// Drops what goes first until the limit holds. The caller holds no lock of an image or of the cache.
    pub fn keep_limit(&self) {
        self.relieve(None);
    }

    /// Number of images that share it.
    pub fn members(&self) -> usize {
        self.list().len()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Weak<Engine>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_exceeded(&self) -> bool {
        self.used_bytes() > self.limit_bytes()
    }

    /// Moves the hand until the limit holds, or it came around without finding enough. `own` is the image whose lock
    /// the caller holds. Its slices are walked past once at most, so that none leaves that was used under this very
    /// lock. Other images that are busy right now are passed by.
    pub(crate) fn relieve(&self, mut own: Option<(&Engine, &mut State)>) {
        if !self.is_exceeded() {
            return;
        }
        let members: Vec<Weak<Engine>> = {
            let mut list = self.list();
            list.retain(|member| member.strong_count() > 0);
            list.clone()
        };
        // Slices have a second chance: a slice that the first rounds only mark may go in the later ones.
        let mut idle_turns = 0;
        let mut own_steps = own.as_ref().map_or(0, |(_, state)| state.tables.clock_len());
        let turns = members.len() + usize::from(self.cache.get().is_some());
        while self.is_exceeded() && idle_turns < 3 * turns {
            let at = self.hand.load(Ordering::Relaxed) % turns;
            let walked = match (&mut own, members.get(at).and_then(Weak::upgrade)) {
                (Some((engine, state)), Some(member)) if std::ptr::eq(*engine, &*member) => {
                    let steps = STEPS_PER_TURN.min(own_steps);
                    own_steps -= steps;
                    let freed = engine.walk_clock(state, steps, true);
                    engine.account(state);
                    Walk { freed, is_over: freed < STEPS_PER_TURN / 4 }
                }
                (_, Some(member)) => member.sweep_if_idle(STEPS_PER_TURN),
                (_, None) if at == members.len() => self.take_from_cache(),
                (_, None) => Walk::default(),
            };
            if walked.is_over {
                self.hand.store(at + 1, Ordering::Relaxed);
            }
            idle_turns = if walked.freed > 0 { 0 } else { idle_turns + 1 };
        }
    }

    fn take_from_cache(&self) -> Walk {
        let bytes = self.cache.get().map_or(0, |cache| cache.give_up(BYTES_PER_TURN));
        Walk { freed: usize::from(bytes > 0), is_over: bytes < BYTES_PER_TURN }
    }
}

/// The outcome of the hand's walk through one image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    /// Slices and blocks that went; of the cache, 1 for any.
    pub(crate) freed: usize,
    /// The hand should go on to the next image.
    pub(crate) is_over: bool,
}

impl Default for Walk {
    fn default() -> Self {
        Walk { freed: 0, is_over: true }
    }
}

impl Engine {
    /// Counts the image's metadata in a budget from now on. Only the first call has an effect.
    pub fn join_budget(self: &Arc<Self>, budget: &Arc<Budget>) {
        if self.budget.set(Arc::clone(budget)).is_ok() {
            budget.list().push(Arc::downgrade(self));
            let mut state = self.lock_state();
            self.account(&mut state);
        }
    }

    /// Memory of the cached metadata in bytes.
    pub(crate) fn cached_bytes(&self, state: &State) -> u64 {
        state.tables.memory_bytes() + state.refcounts.memory_bytes()
    }

    /// Tells the budget the image's present memory.
    pub(crate) fn account(&self, state: &mut State) {
        let Some(budget) = self.budget.get() else { return };
        let bytes = self.cached_bytes(state);
        if bytes != state.accounted_bytes {
            budget.change(state.accounted_bytes, bytes);
            state.accounted_bytes = bytes;
        }
    }

    /// Makes room in the budget, before something more is cached.
    pub(crate) fn relieve_budget(&self, state: &mut State) {
        if let Some(budget) = self.budget.get() {
            budget.relieve(Some((self, state)));
        }
    }

    /// Walks the hand, unless another thread owns the image: slices that weren't used since it last came by go.
    fn sweep_if_idle(&self, steps: usize) -> Walk {
        let Some(mut state) = self.try_lock_state() else { return Walk::default() };
        let freed = self.walk_clock(&mut state, steps, true) + state.refcounts.drop_idle();
        self.account(&mut state);
        // The longer it finds something, the longer it stays: most goes where most lies idle.
        Walk { freed, is_over: freed < steps / 4 }
    }

    /// Drops slices and blocks that weren't used since the last call and can be read again (`cache-clean-interval`).
    /// Returns their number.
    pub fn clean(&self) -> usize {
        let mut state = self.lock_state();
        let steps = state.tables.clock_len();
        let freed = self.walk_clock(&mut state, steps, false) + state.refcounts.drop_idle();
        self.account(&mut state);
        freed
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let Some(budget) = self.budget.get().cloned() else { return };
        if let Ok(state) = self.state_mut() {
            budget.change(state.accounted_bytes, 0);
        }
        // A weak reference keeps the memory of the whole engine.
        budget.list().retain(|member| member.strong_count() > 0);
    }
}
