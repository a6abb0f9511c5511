// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Read-only nodes of one image share its mapping. Many overlays of one base use this.
//!
//! The mapping is shared only while the image has no writers: each node that shares it holds the lock that keeps
//! writers out.

use super::cluster_cache::ClusterCache;
use cowshed_graph::events::Events;
use cowshed_qcow2::{Engine, EngineConfig};
use cowshed_storage::{File, FileIdentity, Permissions, rt};
use cowshed_types::{Error, ErrorKind, Result, without};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// The parts that belong together: the mapping, its waiting requests, and the clusters decompressed by it.
pub(super) struct SharedMetadata {
    pub(super) engine: Arc<Engine>,
    pub(super) events: Arc<Events>,
    pub(super) cluster_cache: Arc<ClusterCache>,
    /// The core was made for this image; no other one had it.
    pub(super) is_new: bool,
    pub(super) membership: MetadataShare,
}

/// One image's part in a core that others may share, for as long as it keeps writers out.
#[derive(Debug, Default)]
pub(super) struct MetadataShare(Mutex<Option<Key>>);

/// The same file, understood in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    identity: FileIdentity,
    file_len: u64,
    l1_offset: u64,
    l1_len: usize,
    size: u64,
    slice_bytes: u64,
    cache_bytes: (u64, u64),
    backing_size: Option<u64>,
}

struct SharedEngine {
    /// Images that share it.
    members: usize,
    engine: Weak<Engine>,
    events: Weak<Events>,
    cluster_cache: Weak<ClusterCache>,
}

fn known() -> MutexGuard<'static, HashMap<Key, SharedEngine>> {
    static KNOWN: OnceLock<Mutex<HashMap<Key, SharedEngine>>> = OnceLock::new();
    KNOWN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedEngine {
    /// The core, with one member more.
    fn join(&mut self, key: Key) -> Option<SharedMetadata> {
        let (engine, events, cluster_cache) =
            (self.engine.upgrade()?, self.events.upgrade()?, self.cluster_cache.upgrade()?);
        self.members += 1;
        Some(SharedMetadata {
            engine,
            events,
            cluster_cache,
            is_new: false,
            membership: MetadataShare(Mutex::new(Some(key))),
        })
    }
}

impl MetadataShare {
    /// Leaves: the image no longer keeps writers out. A core without members is shared no more.
    pub(super) fn leave(&self) {
        let Some(key) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let mut known = known();
        if let Some(core) = known.get_mut(&key) {
            core.members -= 1;
            if core.members == 0 {
                known.remove(&key);
            }
        }
    }

    /// Leaves, because the image is going to be written to, or its mapping to be kept in another way. Refused while others
    /// read by the same mapping.
    pub(super) fn make_exclusive(&self) -> Result<()> {
        let key = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if key.is_some_and(|key| known().get(&key).is_some_and(|core| core.members > 1)) {
            return Err(Error::new(ErrorKind::Busy, "the image is open for reading elsewhere in this process"));
        }
        self.leave();
        Ok(())
    }
}

impl Drop for MetadataShare {
    fn drop(&mut self) {
        self.leave();
    }
}

impl SharedMetadata {
    fn new(config: EngineConfig, l1: &[u64]) -> Result<SharedMetadata> {
        Ok(SharedMetadata {
            engine: Arc::new(Engine::new(config, l1)?),
            events: Arc::default(),
            cluster_cache: Arc::new(ClusterCache::new()),
            is_new: true,
            membership: MetadataShare::default(),
        })
    }

    /// The core of an image in `file`: an existing one, where the image has no writers.
    pub(super) fn of(file: &File, config: EngineConfig, l1: &[u64], is_read_only: bool) -> Result<SharedMetadata> {
        let is_quiet = !without!("mapping_of_a_base_once")
            && is_read_only
            && !rt::is_simulated()
            && !file.is_device()
            && file.faults().is_none();
        let Some(identity) = file.identity().filter(|_| is_quiet && file.permissions() == Permissions::READ) else {
            return SharedMetadata::new(config, l1);
        };
        let key = Key {
            identity,
            file_len: config.file_len,
            l1_offset: config.l1_offset,
            l1_len: l1.len(),
            size: config.size,
            slice_bytes: config.l2_slice_bytes,
            cache_bytes: (config.l2_cache_bytes, config.refcount_cache_bytes),
            backing_size: config.backing_size,
        };
        let mut known = known();
        if let Some(core) = known.get_mut(&key).and_then(|core| core.join(key)) {
            return Ok(core);
        }
        // The membership comes last: one that an error drops would wait for the lock held here.
        let mut core = SharedMetadata::new(config, l1)?;
        core.membership = MetadataShare(Mutex::new(Some(key)));
        let (engine, events) = (Arc::downgrade(&core.engine), Arc::downgrade(&core.events));
        known.insert(
            key,
            SharedEngine { members: 1, engine, events, cluster_cache: Arc::downgrade(&core.cluster_cache) },
        );
        Ok(core)
    }
}
