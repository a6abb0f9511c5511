// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulated machine: files, operations under way, a clock, and chance.

use super::fault::{Effect, Fault, FaultPlan};
use super::file::SimFile;
use super::log::{Applied, Change, Event, FileId, OpId};
use super::pages::{PAGE_BYTES, PageMap};
use super::pending::{Completion, OpState, Outcome, Pending, Request, Sleep, Value};
use super::queues::interleave;
use cowshed_storage::OpenOptions;
use cowshed_storage::rng::Rng;
use cowshed_storage::simulated::SimulatedFile;
use cowshed_types::{Errno, Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

/// The abilities of a [`World`]'s file system beyond reading and writing.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Features {
    pub punch_hole: bool,
    pub zero_range: bool,
    pub allocate: bool,
    pub seek_data: bool,
    pub copy_range: bool,
}

impl Default for Features {
    fn default() -> Self {
        Features { punch_hole: true, zero_range: true, allocate: true, seek_data: true, copy_range: true }
    }
}

/// The settings of a [`World`].
#[derive(Clone, Debug)]
pub struct Config {
    /// The source of chance.
    pub seed: u64,
    /// The unit that the disk writes in one piece, in bytes (512 or 4096); also the alignment of direct I/O.
    pub sector_bytes: u64,
    /// Every file is opened for direct I/O, whatever its options.
    pub direct: bool,
    /// Bytes on the disk; a write that needs more gets `ENOSPC`.
    pub capacity_bytes: Option<u64>,
    /// Files that are there from the start keep their length, as block devices do: a write past the end gets `ENOSPC`.
    pub fixed_length: bool,
    /// The abilities of the file system.
    pub features: Features,
    /// A sync of a new file makes its name durable too, as ext4, XFS and btrfs do.
    pub sync_covers_name: bool,
    /// Operations end in the order in which they were submitted, rather than in random order.
    pub in_order: bool,
}

impl Config {
    /// 512-byte sectors, buffered, endless space, everything supported.
    pub fn new(seed: u64) -> Self {
        Config {
            seed,
            sector_bytes: 512,
            direct: false,
            capacity_bytes: None,
            fixed_length: false,
            features: Features::default(),
            sync_covers_name: true,
            in_order: false,
        }
    }
}

/// The outcome of [`World::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It ended an operation or let a timer ring.
    Progress,
    /// No operation is under way and no task sleeps.
    Idle,
}

/// The files of a world at one moment: name and contents as a reader sees them.
pub type Snapshot = BTreeMap<String, PageMap>;

/// All that is needed to work out power cuts: the durable start and everything that happened since.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The unit that the disk writes in one piece, in bytes.
    pub sector_bytes: u64,
    /// A sync of a new file makes its name durable too.
    pub sync_covers_name: bool,
    /// Name and durable contents of every file when the log began; no contents: the file was created later.
    pub files: Vec<(String, Option<PageMap>)>,
    /// The operations and their ends, in order.
    pub log: Vec<Event>,
}

/// Two changes that were under way at once on the same bytes.
#[derive(Clone, Debug)]
pub struct Overlap {
    /// The file.
    pub file: String,
    /// The bytes that both touch.
    pub range: std::ops::Range<u64>,
    /// Length of the log when the second began.
    pub position: usize,
    /// The two changes, for a message.
    pub changes: String,
}

pub(super) struct FileState {
    pub name: String,
    initial: Option<PageMap>,
    pub volatile: PageMap,
}

pub(super) struct WorldState {
    pub config: Config,
    order: Rng,
    chance: Rng,
    pub files: Vec<FileState>,
    pub slots: BTreeMap<OpId, OpState>,
    next_op: OpId,
    pub clock_ns: u64,
    pub timers: BTreeMap<(u64, u64), Waker>,
    pub next_timer: u64,
    log: Vec<Event>,
    faults: FaultPlan,
    overlaps: Vec<Overlap>,
}

/// A simulated machine. Copies are the same machine.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<WorldState>>,
}

impl World {
    /// An empty machine.
    pub fn new(config: Config) -> Self {
        let mut seed = Rng::new(config.seed);
        let (order, chance) = (seed.fork(), seed.fork());
        let state = WorldState {
            config,
            order,
            chance,
            files: Vec::new(),
            slots: BTreeMap::new(),
            next_op: 0,
            clock_ns: 0,
            timers: BTreeMap::new(),
            next_timer: 0,
            log: Vec::new(),
            faults: FaultPlan::default(),
            overlaps: Vec::new(),
        };
        World { state: Arc::new(Mutex::new(state)) }
    }

    /// A machine whose disk holds `files`, all durable.
    pub fn with_files(config: Config, files: &Snapshot) -> Self {
        let world = World::new(config);
        for (name, contents) in files {
            world.add_file(name, contents.clone());
        }
        world
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, WorldState> {
        // A panic elsewhere must not hide behind a second one: the state is only data.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Puts a durable file on the disk; replaces one of the same name. For the time before a run.
    pub fn add_file(&self, name: &str, contents: PageMap) {
        let mut state = self.lock();
        let file = FileState { name: name.to_owned(), initial: Some(contents.clone()), volatile: contents };
        match state.find(name) {
            Some(id) => state.files[id] = file,
            None => state.files.push(file),
        }
    }

    /// As [`World::open`], for an executor.
    pub(crate) fn open_dyn(&self, name: &str, options: &OpenOptions) -> Result<Arc<dyn SimulatedFile>> {
        Ok(Arc::new(self.open(name, options)?))
    }

    /// Opens a file by name; see [`cowshed_storage::File::open`].
    pub fn open(&self, name: &str, options: &OpenOptions) -> Result<SimFile> {
        let mut state = self.lock();
        let id = match (state.find(name), options.create) {
            (None, false) => return Err(Error::os(Errno::ENOENT, "could not open").file(name)),
            (None, true) => state.create(name),
            // A device is opened, whatever it holds.
            (Some(id), true) if state.is_fixed(id) => id,
            (Some(id), true) => {
                state.change_now(id, Change::SetLen(0));
                id
            }
            (Some(id), false) => id,
        };
        let direct = options.cache.direct || state.config.direct;
        let alignment = if direct { state.config.sector_bytes } else { 1 };
        drop(state);
        Ok(SimFile::new(self.clone(), id, name, options.write || options.create, alignment))
    }

    /// The number of a file, if there is one of that name.
    pub fn file_id(&self, name: &str) -> Option<FileId> {
        self.lock().find(name)
    }

    /// Names and contents as a reader sees them now.
    pub fn snapshot(&self) -> Snapshot {
        self.lock().files.iter().map(|file| (file.name.clone(), file.volatile.clone())).collect()
    }

    /// Contents of one file as a reader sees them now.
    pub fn contents(&self, name: &str) -> Option<PageMap> {
        let state = self.lock();
        state.find(name).map(|id| state.files[id].volatile.clone())
    }

    /// A copy of the log and of the disk's contents at its beginning.
    pub fn trace(&self) -> Trace {
        let state = self.lock();
        Trace {
            sector_bytes: state.config.sector_bytes,
            sync_covers_name: state.config.sync_covers_name,
            files: state.files.iter().map(|file| (file.name.clone(), file.initial.clone())).collect(),
            log: state.log.clone(),
        }
    }

    /// Length of the log: the position between past and future events.
    pub fn position(&self) -> usize {
        self.lock().log.len()
    }

    /// Writes a note into the log.
    pub fn mark(&self, note: u64) {
        self.lock().log.push(Event::Mark(note));
    }

    /// Makes the names of all files durable, as a sync of their folder does.
    pub fn sync_folder(&self) {
        self.lock().log.push(Event::FolderSynced);
    }

    /// Adds a rule by which operations fail.
    pub fn add_fault(&self, fault: Fault) {
        self.lock().faults.rules.push(fault);
    }

    /// Takes all such rules away.
    pub fn clear_faults(&self) {
        self.lock().faults.rules.clear();
    }

    /// The number of operations that were hit by a [`Fault`].
    pub fn fault_hits(&self) -> u64 {
        self.lock().faults.hits
    }

    /// The settings that it was made with.
    pub fn config(&self) -> Config {
        self.lock().config.clone()
    }

    /// Changes the size of the disk in bytes.
    pub fn set_capacity(&self, capacity_bytes: Option<u64>) {
        self.lock().config.capacity_bytes = capacity_bytes;
    }

    /// Pairs of changes that were under way at once on the same bytes. A disk permits them, but for metadata they are a
    /// slip of an engine.
    pub fn overlaps(&self) -> Vec<Overlap> {
        self.lock().overlaps.clone()
    }

    /// Virtual time since the machine was made.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.lock().clock_ns)
    }

    /// Waits in virtual time.
    pub fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + use<> {
        let now_ns = self.lock().clock_ns;
        let duration_ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Sleep::new(self.clone(), now_ns.saturating_add(duration_ns))
    }

    /// Ends one operation, chosen by chance among those under way, or lets the next timer ring. Tasks that wait for it
    /// are woken. The executor calls this when every task waits.
    pub fn step(&self) -> Step {
        let wakers = self.lock().step();
        let progress = wakers.is_some();
        wakers.into_iter().flatten().for_each(Waker::wake);
        if progress { Step::Progress } else { Step::Idle }
    }

    /// The operations under way, a line each: for the message about a deadlock.
    pub fn describe_pending(&self) -> String {
        let state = self.lock();
        let mut text = format!("virtual time {} ns, {} timers\n", state.clock_ns, state.timers.len());
        for (op, slot) in &state.slots {
            let line = match slot {
                OpState::Waiting(pending) => {
                    format!("#{op} {}: {:?}\n", state.files[pending.file].name, pending.request)
                }
                OpState::Done(_) => format!("#{op} ended, without a waiter\n"),
            };
            text.push_str(&line);
        }
        text
    }

    pub(super) fn submit(&self, file: FileId, request: Request) -> Completion {
        interleave();
        let op = self.lock().submit(file, request);
        Completion::new(self.clone(), op)
    }
}

impl WorldState {
    fn find(&self, name: &str) -> Option<FileId> {
        self.files.iter().position(|file| file.name == name)
    }

    fn next_op(&mut self) -> OpId {
        self.next_op += 1;
        self.next_op
    }

    fn create(&mut self, name: &str) -> FileId {
        self.files.push(FileState { name: name.to_owned(), initial: None, volatile: PageMap::default() });
        let id = self.files.len() - 1;
        self.change_now(id, Change::Create);
        id
    }

    /// A change that ends at once (opening is synchronous).
    fn change_now(&mut self, file: FileId, change: Change) {
        let op = self.next_op();
        apply(&mut self.files[file].volatile, &change, &Applied::All, self.config.sector_bytes);
        self.log.push(Event::Submitted { op, file, change });
        self.log.push(Event::Completed { op, applied: Applied::All });
    }

    fn submit(&mut self, file: FileId, request: Request) -> OpId {
        let op = self.next_op();
        let effect = self.faults.decide(&mut self.chance, &self.files[file].name, request.kind(), &request.range());
        let delay_ns = match effect {
            Some(Effect::Delay(delay)) => u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX),
            _ => 0,
        };
        if let Some(change) = request.change() {
            self.note_overlaps(op, file, &request);
            self.log.push(Event::Submitted { op, file, change: change.clone() });
        } else if matches!(request, Request::Sync) {
            self.log.push(Event::SyncIssued { op, file });
        }
        let ready_ns = self.clock_ns.saturating_add(delay_ns);
        let pending = Pending { file, request, effect, ready_ns, waker: None, abandoned: false };
        self.slots.insert(op, OpState::Waiting(pending));
        op
    }

    fn note_overlaps(&mut self, op: OpId, file: FileId, request: &Request) {
        let range = request.range();
        for (other, slot) in &self.slots {
            let OpState::Waiting(pending) = slot else { continue };
            if pending.file != file || pending.request.change().is_none() {
                continue;
            }
            let other_range = pending.request.range();
            let common = range.start.max(other_range.start)..range.end.min(other_range.end);
            if !common.is_empty() {
                self.overlaps.push(Overlap {
                    file: self.files[file].name.clone(),
                    range: common,
                    position: self.log.len(),
                    changes: format!("#{other} {:?} and #{op} {request:?}", pending.request),
                });
            }
        }
    }

    /// `None` when there is nothing to do.
    fn step(&mut self) -> Option<Vec<Waker>> {
        let now_ns = self.clock_ns;
        let mut ready: Vec<OpId> = Vec::new();
        let mut earliest_ns = self.timers.keys().next().map(|(deadline_ns, _)| *deadline_ns);
        for (op, slot) in &self.slots {
            if let OpState::Waiting(pending) = slot {
                if pending.ready_ns <= now_ns {
                    ready.push(*op);
                } else {
                    earliest_ns = Some(earliest_ns.map_or(pending.ready_ns, |ns| ns.min(pending.ready_ns)));
                }
            }
        }
        if ready.is_empty() {
            // Every task waits for time to pass: it passes at once.
            self.clock_ns = earliest_ns?.max(now_ns);
            return Some(self.ring());
        }
        self.clock_ns += 1_000 + self.order.below(100_000);
        let choice = if self.config.in_order { 0 } else { self.order.index(ready.len()) };
        let mut wakers = self.ring();
        wakers.extend(self.finish(ready[choice]));
        Some(wakers)
    }

    fn ring(&mut self) -> Vec<Waker> {
        let later = self.timers.split_off(&(self.clock_ns + 1, 0));
        std::mem::replace(&mut self.timers, later).into_values().collect()
    }

    fn finish(&mut self, op: OpId) -> Option<Waker> {
        let Some(OpState::Waiting(pending)) = self.slots.remove(&op) else { return None };
        let Pending { file, request, effect, waker, abandoned, .. } = pending;
        let outcome = match request {
            Request::Read { offset, buf } => self.finish_read(file, offset, buf, effect),
            Request::NextData { offset } => self.finish_next_data(file, offset, effect),
            Request::Sync => {
                let failed =
                    if let Some(Effect::Fail(errno) | Effect::Torn(errno)) = effect { Some(errno) } else { None };
                if effect != Some(Effect::Lie) && failed != Some(Errno::EINTR) {
                    self.log.push(if failed.is_some() { Event::SyncFailed { op } } else { Event::SyncDone { op } });
                }
                Outcome { result: failed.map_or(Ok(Value::Count(0)), Err), bufs: Vec::new() }
            }
            Request::Write { change, bufs } => {
                let result = self.finish_change(op, file, &change, effect);
                Outcome { result, bufs }
            }
            Request::Change { change, .. } => {
                let result = self.finish_change(op, file, &change, effect);
                Outcome { result, bufs: Vec::new() }
            }
        };
        if !abandoned {
            self.slots.insert(op, OpState::Done(outcome));
        }
        waker
    }

    fn finish_read(
        &mut self,
        file: FileId,
        offset: u64,
        mut buf: cowshed_storage::IoBuf,
        effect: Option<Effect>,
    ) -> Outcome {
        let contents = &self.files[file].volatile;
        let mut count = contents.len().saturating_sub(offset).min(buf.len() as u64);
        let mut result = Ok(());
        match effect {
            Some(Effect::Fail(errno) | Effect::Torn(errno)) => result = Err(errno),
            Some(Effect::Short(limit)) => count = count.min(limit),
            _ => {}
        }
        if result.is_ok() {
            contents.read(offset, &mut buf[..count as usize]);
        }
        Outcome { result: result.map(|()| Value::Count(count)), bufs: vec![buf] }
    }

    fn finish_next_data(&mut self, file: FileId, offset: u64, effect: Option<Effect>) -> Outcome {
        let contents = &self.files[file].volatile;
        let whole =
            (offset < contents.len()).then(|| cowshed_storage::DataRange { start: offset, end: contents.len() });
        let result = match effect {
            Some(Effect::Fail(errno) | Effect::Torn(errno)) => Err(errno),
            _ if !self.config.features.seek_data => Ok(Value::Data(whole)),
            _ => Ok(Value::Data(contents.next_data(offset))),
        };
        Outcome { result, bufs: Vec::new() }
    }

    fn finish_change(
        &mut self,
        op: OpId,
        file: FileId,
        change: &Change,
        effect: Option<Effect>,
    ) -> std::result::Result<Value, Errno> {
        let (start, end) = change.range();
        let sector = self.config.sector_bytes;
        let (applied, result) = match effect {
            Some(Effect::Fail(errno)) => (Applied::Nothing, Err(errno)),
            Some(Effect::Torn(errno)) if matches!(change, Change::Allocate { .. }) => {
                let sectors = (end - start) / sector;
                (prefix(self.chance.below(sectors + 1) * sector), Err(errno))
            }
            Some(Effect::Torn(errno)) => {
                let sectors = 0..end.div_ceil(sector) - start / sector;
                (Applied::Sectors(sectors.filter(|_| self.chance.chance(1, 2)).collect()), Err(errno))
            }
            Some(Effect::Short(limit)) if matches!(change, Change::Write { .. }) => {
                let count = limit.min(end - start);
                (Applied::Prefix(count), Ok(count))
            }
            _ => match self.room_for(file, change) {
                None => (Applied::All, Ok(end - start)),
                Some(count) if count == 0 || matches!(change, Change::Allocate { .. }) => {
                    (prefix(count), Err(Errno::ENOSPC))
                }
                Some(count) => (Applied::Prefix(count), Ok(count)),
            },
        };
        apply(&mut self.files[file].volatile, change, &applied, sector);
        self.log.push(Event::Completed { op, applied });
        result.map(Value::Count)
    }

    /// True for a file whose length can't change.
    pub fn is_fixed(&self, file: FileId) -> bool {
        self.config.fixed_length && self.files[file].initial.is_some()
    }

    /// `None`: there is room. Else how many bytes of a write fit before the disk is full.
    fn room_for(&self, file: FileId, change: &Change) -> Option<u64> {
        if self.is_fixed(file) {
            let len = self.files[file].volatile.len();
            let (start, end) = match change {
                Change::SetLen(wanted) => return (*wanted != len).then_some(0),
                other => other.range(),
            };
            return match change {
                _ if end <= len => None,
                Change::Write { .. } => Some(len.saturating_sub(start)),
                _ => Some(0),
            };
        }
        let capacity = self.config.capacity_bytes?;
        let used: u64 = self.files.iter().map(|file| file.volatile.allocated_bytes()).sum();
        let free_pages = capacity.saturating_sub(used) / PAGE_BYTES;
        let contents = &self.files[file].volatile;
        let (start, end) = match change {
            Change::Write { .. } | Change::Allocate { .. } | Change::Zero { keep_space: true, .. } => change.range(),
            _ => return None,
        };
        if contents.missing_pages(start, end - start) <= free_pages {
            return None;
        }
        if !matches!(change, Change::Write { .. } | Change::Allocate { .. }) {
            return Some(0);
        }
        let mut fits = start;
        while fits < end {
            let next = ((fits / PAGE_BYTES + 1) * PAGE_BYTES).min(end);
            if contents.missing_pages(start, next - start) > free_pages {
                break;
            }
            fits = next;
        }
        Some(fits - start)
    }
}

/// Carries out `change`, as far as `applied`, on `contents`.
pub(super) fn apply(contents: &mut PageMap, change: &Change, applied: &Applied, sector_bytes: u64) {
    match (change, applied) {
        (_, Applied::Nothing) | (Change::Create, _) => {}
        (Change::Write { offset, bytes }, Applied::All) => contents.write(*offset, bytes),
        (Change::Write { offset, bytes }, Applied::Prefix(count)) => contents.write(*offset, &bytes[..*count as usize]),
        (Change::Zero { offset, len, keep_space, grow }, Applied::All) => {
            if *grow {
                contents.set_len(contents.len().max(offset + len));
            }
            contents.zero(*offset, *len, *keep_space);
        }
        (Change::Allocate { offset, .. }, Applied::Prefix(count)) => contents.allocate(*offset, *count, true),
        (Change::Allocate { offset, len }, Applied::All) => contents.allocate(*offset, *len, true),
        (Change::SetLen(len), Applied::All) => contents.set_len(*len),
        (_, Applied::Sectors(sectors)) => {
            let (start, end) = change.range();
            for sector in sectors {
                let from = ((start / sector_bytes + sector) * sector_bytes).max(start);
                let to = ((start / sector_bytes + sector + 1) * sector_bytes).min(end);
                match change {
                    Change::Write { bytes, .. } => {
                        contents.write(from, &bytes[(from - start) as usize..(to - start) as usize]);
                    }
                    Change::Zero { keep_space, .. } => contents.zero(from, to - from, *keep_space),
                    _ => {}
                }
            }
        }
        (_, Applied::Prefix(_)) => unreachable!("only writes and allocations end short"),
    }
}

/// The first `count` bytes of a change.
fn prefix(count: u64) -> Applied {
    if count == 0 { Applied::Nothing } else { Applied::Prefix(count) }
}
