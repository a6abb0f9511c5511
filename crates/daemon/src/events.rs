// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sends events to the clients of all monitors.

use cowshed_qmp::{Event, Timestamp};
use serde_json::{Map, Value};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A receiver of events. Must not block: it may be called by any thread.
pub trait EventListener: Send + Sync {
    /// Something happened.
    fn event(&self, event: &Event);
    /// Waits until everything that is owed has been delivered, no longer than `patience`, and hangs up.
    fn flush_and_close(&self, patience: Duration);
}

/// An event of a limited kind comes at most once in this time; the newest one in between comes at its end.
const PERIOD: Duration = Duration::from_secs(1);

/// One kind of event about one subject, held to its limit.
struct Limit {
    name: &'static str,
    about: String,
    /// From then on the next one may go.
    free_at: Instant,
    held: Option<Value>,
}

#[derive(Default)]
struct Shared {
    listeners: Mutex<Vec<Weak<dyn EventListener>>>,
    limits: Mutex<Vec<Limit>>,
}

/// The list of receivers; clones are the same list.
#[derive(Clone, Default)]
pub struct EventBus(Arc<Shared>);

impl EventBus {
    /// As [`EventBus::emit`], for events that come in floods: at most one of this name about `about` in a second. An
    /// event that comes too early is held back, the newest of it. The result is then the time until
    /// [`EventBus::emit_due`] is to be called, unless an earlier call has returned it.
    pub fn emit_limited(&self, name: &'static str, about: &str, data: Value) -> Option<Duration> {
        let now = Instant::now();
        {
            let mut limits = self.limits();
            match limits.iter_mut().find(|limit| limit.name == name && limit.about == about) {
                Some(limit) if now < limit.free_at => {
                    let first = limit.held.replace(data).is_none();
                    return first.then(|| limit.free_at - now);
                }
                Some(limit) => limit.free_at = now + PERIOD,
                None => {
                    limits.retain(|limit| limit.held.is_some() || now < limit.free_at);
                    limits.push(Limit { name, about: about.to_owned(), free_at: now + PERIOD, held: None });
                }
            }
        }
        self.emit(name, data);
        None
    }

    /// Sends events that were held back and may go now.
    pub fn emit_due(&self) {
        let now = Instant::now();
        let mut due = Vec::new();
        for limit in self.limits().iter_mut().filter(|limit| limit.free_at <= now) {
            if let Some(data) = limit.held.take() {
                limit.free_at = now + PERIOD;
                due.push((limit.name, data));
            }
        }
        due.into_iter().for_each(|(name, data)| self.emit(name, data));
    }

    fn limits(&self) -> MutexGuard<'_, Vec<Limit>> {
        self.0.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a listener; it is forgotten when it is dropped.
    pub fn subscribe(&self, listener: Weak<dyn EventListener>) {
        let mut listeners = self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|known| known.strong_count() > 0);
        listeners.push(listener);
    }

    /// Tells every listener. `data` is an object.
    pub fn emit(&self, name: &'static str, data: Value) {
        let data = match data {
            Value::Object(data) => data,
            _ => Map::new(),
        };
        let event = Event { name, data, timestamp: now() };
        match name {
            // Told with the whole error where it happens.
            "BLOCK_JOB_ERROR" => {}
            // A job's other events carry the interesting facts.
            "JOB_STATUS_CHANGE" => tracing::debug!("{}", words(&event)),
            _ => tracing::info!("{}", words(&event)),
        }
        self.listeners().iter().for_each(|listener| listener.event(&event));
    }

    /// Gives earlier events the time to reach the listeners, before the process ends, and hangs up. `patience` is for
    /// all together.
    pub fn flush_and_close(&self, patience: Duration) {
        let end = Instant::now() + patience;
        self.listeners()
            .iter()
            .for_each(|listener| listener.flush_and_close(end.saturating_duration_since(Instant::now())));
    }

    fn listeners(&self) -> Vec<Arc<dyn EventListener>> {
        let listeners = self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().filter_map(Weak::upgrade).collect()
    }
}

/// The event as a log line: `export deleted: id e`.
fn words(event: &Event) -> String {
    let name = event.name.to_lowercase().replace('_', " ");
    let name = name.strip_prefix("block ").filter(|rest| !rest.starts_with("io ")).unwrap_or(&name);
    let detail = |(key, value): (&String, &Value)| match value {
        Value::String(text) => format!("{} {text}", key.replace('-', " ")),
        value => format!("{} {value}", key.replace('-', " ")),
    };
    let details: Vec<String> = event.data.iter().filter(|(_, value)| *value != "").map(detail).collect();
    format!("{name}: {}", details.join(", "))
}

fn now() -> Timestamp {
    let unknown = Timestamp { seconds: -1, microseconds: -1 };
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(unknown, |since| Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(-1),
        microseconds: i64::from(since.subsec_micros()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_log_tells_events_in_words() {
        let told = |name, data: Value| {
            let data = data.as_object().expect("an object").clone();
            words(&Event { name, data, timestamp: now() })
        };
        assert_eq!(told("BLOCK_EXPORT_DELETED", json!({"id": "e"})), "export deleted: id e");
        let completed = json!({"type": "backup", "device": "j", "len": 5, "offset": 5, "speed": 0});
        assert_eq!(
            told("BLOCK_JOB_COMPLETED", completed),
            "job completed: type backup, device j, len 5, offset 5, speed 0"
        );
        let failed = json!({"qom-path": "", "device": "e", "operation": "read", "reason": "gone"});
        assert_eq!(told("BLOCK_IO_ERROR", failed), "block io error: device e, operation read, reason gone");
    }
}
