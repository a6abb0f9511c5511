// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A bound on the memory that decompressions of an image hold while they run. Each holds compressed bytes, and the cluster
//! of a request for a part of it. A queue of thousands of requests would hold as many clusters of 2 MiB otherwise.
//!
//! A decompression that has its share waits for a disk and for a core, and for no other decompression. So each one in
//! the line gets its turn.

use cowshed_graph::events::Events;
use futures_util::lock::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// The bound in bytes. Each core may have one decompression, even where these are more.
const LIMIT_BYTES: u64 = 8 << 20;

/// The bytes that decompressions of one image hold.
pub(super) struct DecodeMemory {
    cores: u64,
    held_bytes: AtomicU64,
    /// Held by the first in the line, which waits for memory.
    line: Mutex<()>,
    freed: Events,
}

/// A decompression's part of the memory, until dropped.
pub(super) struct DecodeShare {
    memory: Arc<DecodeMemory>,
    bytes: u64,
}

impl Drop for DecodeShare {
    fn drop(&mut self) {
        self.memory.held_bytes.fetch_sub(self.bytes, Ordering::SeqCst);
        self.memory.freed.notify();
    }
}

impl DecodeMemory {
    pub(super) fn new() -> Arc<DecodeMemory> {
        static CORES: LazyLock<usize> =
            LazyLock::new(|| std::thread::available_parallelism().map_or(1, |cores| cores.get()));
        Self::of_cores(*CORES as u64)
    }

    fn of_cores(cores: u64) -> Arc<DecodeMemory> {
        let (held_bytes, line, freed) = Default::default();
        Arc::new(DecodeMemory { cores, held_bytes, line, freed })
    }

    /// Waits for room for `bytes`, behind those that came before.
    pub(super) async fn share(self: &Arc<Self>, bytes: u64) -> DecodeShare {
        let _first = self.line.lock().await;
        loop {
            let seen = self.freed.now();
            // Only the first in the line adds.
            let held = self.held_bytes.load(Ordering::SeqCst);
            if held == 0 || held + bytes <= LIMIT_BYTES.max(self.cores * bytes) {
                self.held_bytes.fetch_add(bytes, Ordering::SeqCst);
                return DecodeShare { memory: Arc::clone(self), bytes };
            }
            self.freed.wait(seen).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::future::Future;
    use std::pin::pin;

    fn is_ready<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> bool {
        future.now_or_never().is_some()
    }

    #[test]
    fn decompressions_wait_for_memory_in_their_order() {
        let memory = DecodeMemory::of_cores(2);
        let mut shares: Vec<DecodeShare> =
            (0..LIMIT_BYTES >> 16).map(|_| memory.share(1 << 16).now_or_never().expect("there is room")).collect();
        let (mut large, mut small) = (pin!(memory.share(2 << 16)), pin!(memory.share(1)));
        assert!(!is_ready(large.as_mut()) && !is_ready(small.as_mut()));
        shares.pop();
        assert!(!is_ready(large.as_mut()) && !is_ready(small.as_mut()), "the first in the line needs more");
        shares.pop();
        assert!(is_ready(large.as_mut()));
        assert!(is_ready(small.as_mut()));
        drop(shares);
        assert_eq!(memory.held_bytes.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_decompression_of_any_size_gets_memory() {
        let memory = DecodeMemory::of_cores(2);
        let share = memory.share(1 << 40).now_or_never().expect("nothing else is held");
        let mut next = pin!(memory.share(1));
        assert!(!is_ready(next.as_mut()));
        drop(share);
        assert!(is_ready(next.as_mut()));
    }

    #[test]
    fn a_dropped_wait_leaves_the_line() {
        let memory = DecodeMemory::of_cores(2);
        let share = memory.share(1 << 40).now_or_never().expect("nothing else is held");
        let mut first = Box::pin(memory.share(1));
        let mut second = pin!(memory.share(1));
        assert!(!is_ready(first.as_mut()) && !is_ready(second.as_mut()));
        drop((share, first));
        assert!(is_ready(second.as_mut()));
    }
}
