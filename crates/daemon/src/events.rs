// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events, from wherever they happen to every monitor's clients.

use cowshed_qmp::{Event, Timestamp};
use serde_json::{Map, Value};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Who gets events. Must not block: it may be called by any thread.
pub trait Listener: Send + Sync {
    /// Something happened.
    fn event(&self, event: &Event);
    /// Waits until everything that is owed has been delivered, no longer than `patience`, and hangs up.
    fn settle(&self, patience: Duration);
}

/// The list of those who get events; clones are the same list.
#[derive(Clone, Default)]
pub struct EventBus(Arc<Mutex<Vec<Weak<dyn Listener>>>>);

impl EventBus {
    /// Adds a listener; it is forgotten when it is dropped.
    pub fn subscribe(&self, listener: Weak<dyn Listener>) {
        let mut listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|known| known.strong_count() > 0);
        listeners.push(listener);
    }

    /// Tells everybody. `data` is an object.
    pub fn emit(&self, name: &'static str, data: Value) {
        let data = match data {
            Value::Object(data) => data,
            _ => Map::new(),
        };
        let event = Event { name, data, timestamp: now() };
        let text = event.to_value().to_string();
        tracing::info!(event = name, "{text}");
        self.listeners().iter().for_each(|listener| listener.event(&event));
    }

    /// Gives what was said the time to reach the listeners, before the process ends, and hangs up.
    pub fn settle(&self, patience: Duration) {
        self.listeners().iter().for_each(|listener| listener.settle(patience));
    }

    fn listeners(&self) -> Vec<Arc<dyn Listener>> {
        let listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().filter_map(Weak::upgrade).collect()
    }
}

fn now() -> Timestamp {
    let unknown = Timestamp { seconds: -1, microseconds: -1 };
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(unknown, |since| Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(-1),
        microseconds: i64::from(since.subsec_micros()),
    })
}
