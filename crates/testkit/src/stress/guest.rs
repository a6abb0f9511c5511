// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One disk as its clients know it, and the threads that use it.

use super::client::{Client, Cut, Dialect, Ended, Request, Verb};
use super::tally::Tally;
use super::trace::Trace;
use crate::model::{GUEST_SECTOR_BYTES, Model, RequestId, fill};
use crate::random::Random;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

const FLAG_FUA: u16 = 1;
/// The longest request in bytes.
const LONGEST_BYTES: u64 = 192 << 10;
/// Requests in flight over one connection, at most.
const MOST_IN_FLIGHT: u64 = 12;
/// The piece in which a whole disk is read, in bytes.
const PIECE_BYTES: u32 = 1 << 20;

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
    /// Size that was asked for last, in bytes. Bytes behind the first size are never written to.
    grown: AtomicU64,
    /// Held for reading while requests are in flight, and for writing at a quiet point.
    quiet: RwLock<()>,
    /// The requests and the commands so far.
    pub trace: Arc<Trace>,
}

/// A request that is in flight.
struct InFlight {
    verb: Verb,
    began: u64,
    request: Option<RequestId>,
    stamp: u64,
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
            grown: AtomicU64::new(size),
            quiet: RwLock::new(()),
            trace: Arc::new(Trace::new()),
        }
    }

    /// Requests that were sent so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Size in bytes, as it was asked for last.
    pub fn size(&self) -> u64 {
        self.grown.load(Ordering::Relaxed)
    }

    /// The disk has another size, or may have it.
    pub fn grow(&self, size: u64) {
        self.grown.store(size, Ordering::Relaxed);
    }

    /// The part of a copy that requests go to. The rest must read as zeroes.
    fn used<'a>(&self, content: &'a [u8]) -> Result<&'a [u8], String> {
        let (used, rest) = content.split_at_checked(self.size as usize).ok_or("the copy is too short")?;
        match rest.iter().position(|&byte| byte != 0) {
            Some(at) => Err(format!("byte {:#x} holds data, where the disk only grew", self.size as usize + at)),
            None => Ok(used),
        }
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
        let used = self.used(content)?;
        lock(&self.model).check_point_in_time(before.tick, position, 0, used)
    }

    /// Checks the whole disk: after an orderly end every acknowledged request counts, after a kill every flushed one.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_end(&self, is_killed: bool, content: &[u8]) -> Result<(), String> {
        let used = self.used(content)?;
        let mut model = lock(&self.model);
        if is_killed {
            return model.check_after_cut(usize::MAX, 0, used);
        }
        let now = model.begin_read();
        model.check_read(now, 0, used)
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

    /// Sends random requests over connections to the server on `socket` until `stop` is set.
    ///
    /// # Errors
    /// The behaviour that no correct server shows: wrong data, a refused request, silence.
    pub fn use_it(&self, socket: &Path, seed: u64, stop: &AtomicBool, tally: &Tally) -> Result<(), String> {
        let mut random = Random::new(seed);
        while !stop.load(Ordering::Relaxed) {
            let dialect = random.pick(&[Dialect::Simple, Dialect::Structured, Dialect::Extended]);
            // The server may just be stopped, or be about to start.
            let Ok(mut client) = Client::connect(socket, &self.name, dialect) else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            tally.count("(connections)", true);
            if client.size < self.size {
                return Err(format!("{}: the export has {} bytes instead of {}", self.name, client.size, self.size));
            }
            // Connections are short as often as long.
            let mut is_whole = true;
            for _ in 0..1 << random.below(10) {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                is_whole = self.send_some(&mut client, &mut random, tally)?;
                if !is_whole {
                    break;
                }
            }
            if is_whole && random.chance(50) {
                client.disconnect();
            }
        }
        Ok(())
    }

    /// Some requests at once; false when the connection has ended.
    fn send_some(&self, client: &mut Client, random: &mut Random, tally: &Tally) -> Result<bool, String> {
        let _in_flight = self.quiet.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let count = if random.chance(50) { 1 } else { random.below(MOST_IN_FLIGHT) + 1 };
        let requests: Vec<(Request, u64)> = (0..count).map(|_| self.random_request(random)).collect();
        let mut in_flight: Vec<InFlight> = Vec::new();
        {
            let mut model = lock(&self.model);
            for (request, stamp) in &requests {
                in_flight.push(self.begin(&mut model, request, *stamp));
            }
        }
        self.requests.fetch_add(count, Ordering::Relaxed);
        let bytes: usize = requests.iter().map(|(request, _)| 28 + request.payload.len()).sum();
        let cut = match random.below(200) {
            0..3 => Cut::After(random.below(bytes as u64 + 1) as usize),
            3 => Cut::HalfClosed,
            _ => Cut::Never,
        };
        if cut != Cut::Never {
            tally.count("(connections cut)", true);
            self.trace.note(&format!("a connection is cut: {cut:?}"));
        }
        let requests: Vec<Request> = requests.into_iter().map(|(request, _)| request).collect();
        let (mut wrong, mut is_ending) = (Ok(()), false);
        let broken =
            client.batch(&requests, cut, |index, ended| match self.end(&requests[index], &in_flight[index], ended) {
                Ok(is_done) => is_ending |= !is_done,
                Err(text) if wrong.is_ok() => wrong = Err(text),
                Err(_) => {}
            });
        wrong?;
        match broken {
            Some(Ended::Hung) => Err(format!("{}: one of {requests:x?} isn't answered", self.name)),
            Some(_) => Ok(false),
            None => Ok(!is_ending),
        }
    }

    fn random_request(&self, random: &mut Random) -> (Request, u64) {
        let (offset, len) = self.range(random);
        let stamp = self.stamps.fetch_add(1, Ordering::Relaxed);
        let flags = if random.chance(10) { FLAG_FUA } else { 0 };
        let verb = match random.below(100) {
            0..45 => Verb::Write,
            45..55 => Verb::WriteZeroes,
            55..65 => Verb::Trim,
            65..75 => Verb::Flush,
            _ => Verb::Read,
        };
        let mut payload = Vec::new();
        if verb == Verb::Write {
            payload.resize(len as usize, 0);
            fill(stamp, offset, &mut payload);
        }
        let request = match verb {
            Verb::Flush => Request { verb, flags: 0, offset: 0, len: 0, payload },
            Verb::Read => Request { verb, flags: 0, offset, len, payload },
            _ => Request { verb, flags, offset, len, payload },
        };
        (request, stamp)
    }

    /// From now on a request may be carried out.
    fn begin(&self, model: &mut Model, asked: &Request, stamp: u64) -> InFlight {
        let (mut began, mut request) = (0, None);
        let (offset, length) = (asked.offset, u64::from(asked.len));
        match asked.verb {
            Verb::Write => request = Some(model.begin_write(offset, length, stamp, self.next_event())),
            Verb::WriteZeroes => request = Some(model.begin_zero(offset, length, self.next_event())),
            Verb::Trim => request = Some(model.begin_discard(offset, length, self.next_event())),
            Verb::Flush => request = Some(model.begin_flush(self.next_event())),
            _ => began = model.begin_read(),
        }
        self.trace.note(&format!("{stamp} begins: {}", describe(asked)));
        InFlight { verb: asked.verb, began, request, stamp }
    }

    /// A request was answered; false when the server is about to end the connection.
    fn end(&self, asked: &Request, in_flight: &InFlight, ended: Ended) -> Result<bool, String> {
        let what = format!("{}: {}", self.name, describe(asked));
        self.trace.note(&format!(
            "{} ends{}",
            in_flight.stamp,
            if matches!(ended, Ended::Well(_)) { "" } else { " badly" }
        ));
        let data = match ended {
            Ended::Well(data) => data,
            // ESHUTDOWN: the server is about to end the connection.
            Ended::Refused(108) | Ended::Gone => return Ok(false),
            Ended::Refused(number) => return Err(format!("{what} fails with error {number}")),
            Ended::Hung => return Err(format!("{what} isn't answered")),
        };
        let mut model = lock(&self.model);
        let event = self.next_event();
        match (in_flight.verb, in_flight.request) {
            (Verb::Read, _) => {
                let found = model.check_torn_read(in_flight.began, asked.offset, &data);
                found.map_err(|wrong| format!("{what}: {wrong}"))?;
            }
            (Verb::Flush, Some(flush)) => model.end_flush(flush, event),
            (_, Some(request)) => model.end(request, event),
            (_, None) => {}
        }
        Ok(true)
    }

    /// Compares the whole disk with the model while no request is in flight that could be answered. False where the export
    /// isn't there now.
    ///
    /// # Errors
    /// The first difference, or silence.
    pub fn check_quiet(&self, socket: &Path) -> Result<bool, String> {
        let _quiet = self.quiet.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Ok(mut client) = Client::connect(socket, &self.name, Dialect::Extended) else { return Ok(false) };
        let began = lock(&self.model).begin_read();
        let mut content = Vec::new();
        while (content.len() as u64) < client.size {
            let len = PIECE_BYTES.min((client.size - content.len() as u64) as u32);
            match client.read(content.len() as u64, len) {
                Ended::Well(data) => content.extend(data),
                Ended::Gone | Ended::Refused(108) => return Ok(false),
                other => return Err(format!("{}: a read at a quiet point: {other:?}", self.name)),
            }
        }
        client.disconnect();
        let used = self.used(&content)?;
        let found = lock(&self.model).check_read(began, 0, used);
        found.map_err(|wrong| format!("{} at a quiet point: {wrong}", self.name))?;
        Ok(true)
    }
}

fn describe(request: &Request) -> String {
    let fua = if request.flags & FLAG_FUA != 0 { " FUA" } else { "" };
    format!("{:?} at {:#x}+{:#x}{fua}", request.verb, request.offset, request.len)
}
