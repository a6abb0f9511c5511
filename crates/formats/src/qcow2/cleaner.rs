// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cache-clean-interval`: one thread for the process drops the metadata that images have not used in that time.

use cowshed_qcow2::Engine;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// An image that is cleaned from time to time.
struct Entry {
    engine: Weak<Engine>,
    interval: Duration,
    due: Instant,
}

#[derive(Default)]
struct Cleaner {
    entries: Mutex<Vec<Entry>>,
    changed: Condvar,
}

impl Cleaner {
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cleans the caches that are due, and sleeps until the next is.
    fn run(&self) {
        let mut entries = self.entries();
        loop {
            entries.retain(|entry| entry.engine.strong_count() > 0);
            let now = Instant::now();
            let mut due = Vec::new();
            for entry in entries.iter_mut().filter(|entry| entry.due <= now) {
                entry.due = now + entry.interval;
                due.push(entry.engine.clone());
            }
            if !due.is_empty() {
                // Not under the lock: cleaning waits for the owner of the image.
                drop(entries);
                for engine in due.iter().filter_map(Weak::upgrade) {
                    engine.clean();
                }
                entries = self.entries();
                continue;
            }
            let next = entries.iter().map(|entry| entry.due).min();
            entries = match next {
                None => self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner),
                Some(next) => {
                    let pause = next.saturating_duration_since(now);
                    self.changed.wait_timeout(entries, pause).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

fn cleaner() -> Option<&'static Arc<Cleaner>> {
    static CLEANER: OnceLock<Option<Arc<Cleaner>>> = OnceLock::new();
    let start = || {
        let cleaner: Arc<Cleaner> = Arc::default();
        let for_thread = Arc::clone(&cleaner);
        let thread = std::thread::Builder::new().name("cache-cleaner".to_owned());
        match thread.spawn(move || for_thread.run()) {
            Ok(_) => Some(cleaner),
            Err(error) => {
                tracing::warn!("no thread for cleaning caches: {error}");
                None
            }
        }
    };
    CLEANER.get_or_init(start).as_ref()
}

/// Cleans an image each `interval_s` seconds from now on; 0 ends it.
pub(super) fn clean_each(engine: &Arc<Engine>, interval_s: u64) {
    let Some(cleaner) = cleaner() else { return };
    let mut entries = cleaner.entries();
    entries.retain(|entry| !std::ptr::eq(entry.engine.as_ptr(), Arc::as_ptr(engine)));
    if interval_s > 0 {
        let interval = Duration::from_secs(interval_s);
        entries.push(Entry { engine: Arc::downgrade(engine), interval, due: Instant::now() + interval });
    }
    drop(entries);
    cleaner.changed.notify_one();
}
