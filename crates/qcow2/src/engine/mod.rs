// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine: state shared by all queues of one image, and how missing tables are asked for. Its parts own their state; the modules
//! beside this folder plan with them, and none of these parts needs those.

mod budget;
mod contiguous;
mod damage;
mod emptied;
mod epochs;
mod overlap;
mod reclaim;
mod refcounts;
mod room;
mod tables;
mod tuning;

pub use budget::{Budget, BudgetedCache};
pub(crate) use damage::Purpose;
pub(crate) use epochs::Epochs;
pub use reclaim::Reclaim;
pub(crate) use refcounts::Refcounts;
pub(crate) use room::{Edit, Room};
pub(crate) use tables::Tables;
use tuning::Tuning;

use crate::config::EngineConfig;
use crate::directory::Directory;
use crate::inflight::Inflight;
use crate::interleaving;
use crate::metadata_map::MetadataMap;
use crate::pins::{EpochGuard, Pins};
use crate::stall::{Load, Stall, TableId};
use crate::structures::Structure;
use cowshed_layout::qcow2::Geometry;
use cowshed_types::{CacheStatistics, Error, GuestOffset, HostOffset, without};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};

/// Most bytes of dirty L2 slices, however large the cache is.
const MOST_DIRTY_BYTES: u64 = 16 << 20;

/// Most bytes that wait for a flush before they may be used again, however large the disk is.
const MOST_FREED_BYTES: u64 = 32 << 20;
/// The bound of a small disk, in clusters.
const LEAST_FREED_CLUSTERS: u64 = 8;
/// Most freed clusters that wait while nothing is allocated: only their memory counts then.
const MOST_FREED_CLUSTERS: u64 = 1 << 16;

/// The state that only the holder of the engine's lock sees and changes.
pub(crate) struct State {
    pub(crate) tables: Tables,
    pub(crate) refcounts: Refcounts,
    pub(crate) inflight: Inflight,
    pub(crate) room: Room,
    pub(crate) epochs: Epochs,
    /// Tables that requests are reading.
    pub(crate) loading: HashSet<TableId>,
    /// The place of the next compressed cluster, where one may be packed: a sector-aligned host offset in a cluster
    /// that the image has to itself.
    pub(crate) pack_next: Option<HostOffset>,
    /// Everything at or above this offset in the data file (if there is one) was never written.
    pub(crate) data_high_water: u64,
    pub(crate) l2_misses: u64,
    pub(crate) refcount_misses: u64,
    /// The memory of the image as the budget last heard it, in bytes.
    pub(crate) accounted_bytes: u64,
    /// L1 indices of L2 tables that share their cluster with other metadata.
    pub(crate) overlapping_tables: Vec<usize>,
    /// Metadata that mapping and counting don't need: structure, offset, length in bytes.
    pub(crate) other_metadata: Vec<(Structure, u64, u64)>,
}

/// The mapping of one image in memory. All methods may be called from any thread.
///
/// Reading plans ([`Engine::map`], [`Engine::map_overwrite`]) take no lock when the tables are cached. Each change
/// of the mapping happens under the lock of the state, for one short step without a wait.
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) geometry: Geometry,
    pub(crate) directory: Directory,
    pub(crate) pins: Pins,
    pub(crate) metadata: MetadataMap,
    pub(crate) tuning: Tuning,
    size: AtomicU64,
    pub(crate) budget: OnceLock<Arc<Budget>>,
    /// See [`Engine::tolerated_damage`].
    pub(crate) tolerated: OnceLock<Error>,
    state: Mutex<State>,
}

impl Engine {
    /// From the header's facts and the active L1 table.
    /// `ENOMEM` where there is no memory for it.
    pub fn new(config: EngineConfig, l1: &[u64]) -> Result<Self, Error> {
        let geometry = config.geometry();
        let slices_per_table = (geometry.cluster_size() / config.l2_slice_bytes) as usize;
        let state = State {
            tables: Tables::new(&config, l1.len()),
            refcounts: Refcounts::new(&config),
            inflight: Inflight::default(),
            room: Room::default(),
            epochs: Epochs::new(),
            loading: HashSet::new(),
            pack_next: None,
            data_high_water: config.data_file_len,
            l2_misses: 0,
            refcount_misses: 0,
            accounted_bytes: 0,
            overlapping_tables: Vec::new(),
            other_metadata: config.other_metadata.clone(),
        };
        let engine = Engine {
            geometry,
            directory: Directory::new(l1, slices_per_table)?,
            pins: Pins::new(),
            size: AtomicU64::new(config.size),
            metadata: MetadataMap::default(),
            tuning: Tuning::new(&config),
            budget: OnceLock::new(),
            tolerated: OnceLock::new(),
            state: Mutex::new(state),
            config,
        };
        let mut state = engine.lock_state();
        state.overlapping_tables = engine.mark_known(&state, l1);
        drop(state);
        Ok(engine)
    }

    /// Locks the state. A panic under the lock is a bug; the state behind it can't be trusted any more.
    pub(crate) fn lock_state(&self) -> MutexGuard<'_, State> {
        const PANICKED: &str = "an earlier panic left the mapping of the image half changed";
        interleaving::point();
        while interleaving::is_simulated() {
            match self.state.try_lock() {
                Ok(state) => {
                    interleaving::count_lock();
                    return state;
                }
                Err(TryLockError::WouldBlock) => interleaving::point(),
                Err(TryLockError::Poisoned(_)) => panic!("{PANICKED}"),
            }
        }
        self.state.lock().unwrap_or_else(|_| panic!("{PANICKED}"))
    }

    /// Locks the state, if no other thread holds it.
    pub(crate) fn try_lock_state(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock().ok()
    }

    pub(crate) fn state_mut(&mut self) -> std::sync::LockResult<&mut State> {
        self.state.get_mut()
    }

    /// Facts given at open.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Sizes and index arithmetic.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    pub(crate) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Starts a request: mappings that it sees from now on stay good until the pin is dropped, which must be after its
    /// I/O has completed. Never hold a pin while waiting for anything but that I/O.
    pub fn pin(&self) -> EpochGuard<'_> {
        self.pins.pin()
    }

    /// Hands in a table that [`Stall::Load`] asked for. `bytes` must have the asked length.
    pub fn loaded(&self, load: &Load, bytes: &[u8]) -> Result<(), Error> {
        let mut state = self.lock_state();
        state.loading.remove(&load.table);
        if bytes.len() != load.len {
            return Err(Error::internal("a table was handed in with a wrong length"));
        }
        match load.table {
            TableId::L2Slice(number) => {
                state.l2_misses += 1;
                let shape = self.slice_shape();
                self.insert_slice(&mut state, number, crate::slice::Slice::from_bytes(bytes, shape));
            }
            TableId::RefcountTable => {
                state.refcounts.set_table(self.geometry, bytes)?;
                self.mark_refcount_blocks(&mut state);
            }
            TableId::RefcountBlock(index) => {
                state.refcount_misses += 1;
                self.relieve_budget(&mut state);
                state.refcounts.insert_block(index, bytes);
                self.account(&mut state);
            }
        }
        Ok(())
    }

    /// Notes that reading a table failed, so that others may try.
    pub fn load_failed(&self, load: &Load) {
        self.lock_state().loading.remove(&load.table);
    }

    /// Asks for a table, or for patience when another request has asked already.
    pub(crate) fn stall_for(state: &mut State, load: Load) -> Stall {
        if state.loading.insert(load.table) { Stall::Load(load) } else { Stall::Wait }
    }

    /// A plan goes on without the table or space it would have to wait for: another plan may ask for it.
    pub(crate) fn withdraw(&self, state: &mut State, stall: &Stall) {
        match stall {
            Stall::Load(load) => drop(state.loading.remove(&load.table)),
            Stall::Reserve(reserve) => state.room.withdraw(reserve, self.geometry.cluster_bits()),
            _ => {}
        }
    }

    /// Counters of the cache.
    pub fn statistics(&self) -> CacheStatistics {
        let state = self.lock_state();
        CacheStatistics {
            l2_slices: state.tables.cached() as u64,
            l2_dirty: state.tables.dirty_slices() as u64,
            l2_hits: self.pins.hits(),
            l2_misses: state.l2_misses,
            l2_bytes: state.tables.memory_bytes(),
            l2_limit_bytes: self.cache_limits().0,
            refcount_hits: state.refcounts.hits(),
            refcount_misses: state.refcount_misses,
            refcount_bytes: state.refcounts.memory_bytes(),
            refcount_limit_bytes: self.cache_limits().1,
            refcount_blocks: state.refcounts.cached() as u64,
            quarantined: state.epochs.waiting(),
        }
    }

    /// True when the caller should run a write-back cycle before going on: enough of the cache is dirty, or enough
    /// freed space waits for one. `allocates`: the caller is going to make the file longer otherwise.
    pub fn wants_writeback(&self, allocates: bool) -> bool {
        self.is_beyond_bound(&self.lock_state(), allocates)
    }

    pub(crate) fn is_beyond_bound(&self, state: &State, allocates: bool) -> bool {
        if state.epochs.freed_in_open() > LEAST_FREED_CLUSTERS
            && self.holds_much_freed(state.epochs.freed_in_open(), allocates)
        {
            return true;
        }
        let cache_bytes = self.cache_limits().0;
        let mapping_bytes = self.geometry.clusters(self.size()).saturating_mul(self.geometry.l2_entry_size());
        // Dirty slices can't make room for others. Where there is room for all of them, nothing is won by writing early:
        // random writes touch the same slices again and again.
        let share = if cache_bytes >= mapping_bytes && !without!("late_write_back") {
            MOST_DIRTY_BYTES
        } else {
            cache_bytes / 2
        };
        let limit = share.min(MOST_DIRTY_BYTES).max(8 * self.slice_bytes());
        state.tables.dirty_slices() as u64 * self.slice_bytes() > limit
            || state.refcounts.dirty_bytes() > self.cache_limits().1.max(16 << 20)
    }

    /// Without a flush of the guest's, nothing freed is used again: an eighth of the disk waits for one at most.
    fn holds_much_freed(&self, clusters: u64, allocates: bool) -> bool {
        let bytes = clusters.saturating_mul(self.geometry.cluster_size());
        clusters > MOST_FREED_CLUSTERS || (allocates && bytes > MOST_FREED_BYTES.min(self.size() / 8))
    }

    /// Number of the guest cluster at `guest`.
    pub(crate) fn guest_cluster(&self, guest: GuestOffset) -> u64 {
        guest.0 >> self.geometry.cluster_bits()
    }
}
