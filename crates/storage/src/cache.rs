// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The use of the host's page cache by an open file, and its change.

use crate::file::File;
use crate::medium::Medium;
use crate::{Alignment, CacheMode};
use cowshed_types::{Error, Result};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// An [`Alignment`] that changes while no operation runs.
#[derive(Debug)]
pub(crate) struct LiveAlignment {
    memory: AtomicUsize,
    offset: AtomicU64,
}

impl LiveAlignment {
    pub(crate) fn new(alignment: Alignment) -> LiveAlignment {
        LiveAlignment { memory: AtomicUsize::new(alignment.memory), offset: AtomicU64::new(alignment.offset) }
    }

    #[inline]
    pub(crate) fn get(&self) -> Alignment {
        Alignment { memory: self.memory.load(Ordering::Relaxed), offset: self.offset.load(Ordering::Relaxed) }
    }

    pub(crate) fn set(&self, alignment: Alignment) {
        self.memory.store(alignment.memory, Ordering::Release);
        self.offset.store(alignment.offset, Ordering::Release);
    }
}

impl File {
    /// The file's present use of the page cache.
    pub fn cache_mode(&self) -> CacheMode {
        let inner = self.inner();
        let direct = match &inner.medium {
            Medium::Host(host) => host.is_direct(),
            Medium::Faulty(faulty) => faulty.base().cache_mode().direct,
            Medium::Sim(sim) => sim.is_direct(),
            Medium::Null(_) | Medium::Remote(_) => false,
        };
        CacheMode { direct, no_flush: inner.no_flush.load(Ordering::Relaxed) }
    }

    /// Uses the page cache so from now on. No operation may run on the file. On an error (the file system has no direct
    /// I/O) everything is as before. A medium without page cache, as bytes behind a protocol, takes either.
    pub fn set_cache_mode(&self, mode: CacheMode) -> Result<()> {
        let inner = self.inner();
        match &inner.medium {
            Medium::Host(host) if host.is_direct() != mode.direct => {
                inner.alignment.set(host.set_direct(mode.direct).map_err(|error| error.file(self.name()))?);
            }
            Medium::Sim(sim) if sim.is_direct() != mode.direct => inner.alignment.set(sim.set_direct(mode.direct)),
            Medium::Faulty(_) if self.cache_mode().direct != mode.direct => {
                let message = "the use of the page cache can't change below a file with faults";
                return Err(Error::unsupported(message).file(self.name()));
            }
            _ => {}
        }
        // Flushes that were left out are made up for by the next one: it covers everything written before.
        inner.no_flush.store(mode.no_flush, Ordering::Release);
        Ok(())
    }
}
