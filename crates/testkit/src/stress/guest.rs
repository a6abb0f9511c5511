// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One disk as its clients know it, and the threads that use it.

use super::client::{Client, Ended, Verb};
use crate::model::{GUEST_SECTOR_BYTES, Model, fill};
use crate::random::Random;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

const FLAG_FUA: u16 = 1;
/// The longest request in bytes.
const LONGEST_BYTES: u64 = 192 << 10;

/// A disk: its model, and where it is now.
pub struct Disk {
    /// Name of the export.
    pub name: String,
    model: Mutex<Model>,
    events: AtomicU64,
    stamps: AtomicU64,
    requests: AtomicU64,
    /// The file that holds the disk, the uppermost of its chain. The lock is held while that changes.
    pub top: Mutex<PathBuf>,
    size: u64,
}

/// Locks, also where another thread has panicked: its message counts, not the lock's.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A moment in the life of a disk, for [`Disk::check_copy`].
#[derive(Clone, Copy, Debug)]
pub struct Instant {
    tick: u64,
}

impl Disk {
    /// A disk that holds `content`.
    pub fn new(name: String, top: PathBuf, content: Vec<u8>) -> Disk {
        let size = content.len() as u64;
        Disk {
            name,
            model: Mutex::new(Model::new(content)),
            events: AtomicU64::new(1),
            stamps: AtomicU64::new(1),
            requests: AtomicU64::new(0),
            top: Mutex::new(top),
            size,
        }
    }

    /// Requests that were sent so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The moment before a copy of the disk is asked for.
    pub fn instant(&self) -> Instant {
        Instant { tick: lock(&self.model).begin_read() }
    }

    /// The number of events so far: none that begins later is in a copy whose job has started by now.
    pub fn position(&self) -> usize {
        // Under the model's lock, where events are numbered.
        let _model = lock(&self.model);
        self.events.load(Ordering::Relaxed) as usize
    }

    /// Checks a copy that shows the disk as it was at some moment between `before` and `position`.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_copy(&self, before: Instant, position: usize, content: &[u8]) -> Result<(), String> {
        lock(&self.model).check_point_in_time(before.tick, position, 0, content)
    }

    /// Checks the whole disk: after an orderly end every acknowledged request counts, after a kill every flushed one.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_end(&self, is_killed: bool, content: &[u8]) -> Result<(), String> {
        let mut model = lock(&self.model);
        if is_killed {
            return model.check_after_cut(usize::MAX, 0, content);
        }
        let now = model.begin_read();
        model.check_read(now, 0, content)
    }

    fn next_event(&self) -> usize {
        self.events.fetch_add(1, Ordering::Relaxed) as usize + 1
    }

    /// A random range; most begin and end at sectors.
    fn range(&self, random: &mut Random) -> (u64, u32) {
        let unit = if random.chance(10) { 1 } else { GUEST_SECTOR_BYTES };
        let longest = if random.chance(70) { 16 << 10 } else { LONGEST_BYTES };
        let len = (random.below(longest / unit) + 1) * unit;
        // Half of all requests meet in an eighth of the disk.
        let area = if random.chance(50) { self.size / 8 } else { self.size };
        let offset = random.below(area / unit) * unit;
        (offset, len.min(self.size - offset) as u32)
    }

    /// Sends random requests over connections to the server on `socket` until `stop` says so.
    ///
    /// # Errors
    /// What no correct server does: wrong data, a refused request, silence.
    pub fn use_it(&self, socket: &Path, seed: u64, stop: &AtomicBool) -> Result<(), String> {
        let mut random = Random::new(seed);
        while !stop.load(Ordering::Relaxed) {
            // The server may just be stopped, or be about to start.
            let Ok(mut client) = Client::connect(socket, &self.name) else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            if client.size != self.size {
                return Err(format!("{}: the export has {} bytes instead of {}", self.name, client.size, self.size));
            }
            // Connections are short as often as long.
            for _ in 0..1 << random.below(12) {
                if stop.load(Ordering::Relaxed) || !self.send_one(&mut client, &mut random)? {
                    break;
                }
            }
            if random.chance(50) {
                client.request(Verb::Disconnect, 0, 0, 0, &[]);
            }
        }
        Ok(())
    }

    /// One request; false when the connection has ended.
    fn send_one(&self, client: &mut Client, random: &mut Random) -> Result<bool, String> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let (offset, len) = self.range(random);
        let flags = if random.chance(10) { FLAG_FUA } else { 0 };
        let (mut payload, stamp) = (Vec::new(), self.stamps.fetch_add(1, Ordering::Relaxed));
        let verb = match random.below(100) {
            0..45 => Verb::Write,
            45..55 => Verb::WriteZeroes,
            55..65 => Verb::Trim,
            65..75 => Verb::Flush,
            _ => Verb::Read,
        };
        let length = u64::from(len);
        let (mut began, mut request) = (0, None);
        {
            let mut model = lock(&self.model);
            match verb {
                Verb::Write => request = Some(model.begin_write(offset, length, stamp, self.next_event())),
                Verb::WriteZeroes => request = Some(model.begin_zero(offset, length, self.next_event())),
                Verb::Trim => request = Some(model.begin_discard(offset, length, self.next_event())),
                Verb::Flush => request = Some(model.begin_flush(self.next_event())),
                _ => began = model.begin_read(),
            }
        }
        if verb == Verb::Write {
            payload.resize(len as usize, 0);
            fill(stamp, offset, &mut payload);
        }
        let ended = match verb {
            Verb::Flush => client.request(verb, 0, 0, 0, &[]),
            Verb::Read => client.request(verb, 0, offset, len, &[]),
            _ => client.request(verb, flags, offset, len, &payload),
        };
        let what = format!("{}: {verb:?} at {offset:#x}+{len:#x}", self.name);
        let data = match ended {
            Ended::Well(data) => data,
            Ended::Gone => return Ok(false),
            Ended::Hung => return Err(format!("{what} isn't answered")),
            // ESHUTDOWN: the server is about to end the connection.
            Ended::Refused(108) => return Ok(false),
            Ended::Refused(number) => return Err(format!("{what} fails with error {number}")),
        };
        let mut model = lock(&self.model);
        let event = self.next_event();
        match (verb, request) {
            (Verb::Read, _) => {
                model.check_torn_read(began, offset, &data).map_err(|wrong| format!("{what}: {wrong}"))?;
            }
            (Verb::Flush, Some(flush)) => model.end_flush(flush, event),
            (_, Some(request)) => model.end(request, event),
            (_, None) => {}
        }
        Ok(true)
    }
}
