// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A back end of vhost-user that is killed between any two of its steps. The guest's memory, the region that notes
//! requests in flight, and the back end's writes to its files survive. A new back end on the same region goes on. A power
//! cut takes all of it but the synced part of the files.

use crate::fresh_images::{IMAGE, Kind, kinds};
use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_simulator::{Config, PageMap, Snapshot, Trace, World};
use cowshed_storage::rng::Rng;
use cowshed_storage::{SharedMemory, rt};
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::images::{Chain, Format, Layer, Qcow2Spec};
use cowshed_testkit::scenario::Prepared;
use cowshed_vhost_user::proto::inflight::{NOTE_BYTES, part_bytes};
use cowshed_vhost_user::proto::ring::RingPlace;
use cowshed_vhost_user::proto::{Memory, Shared};
use cowshed_vhost_user::simulated::serve_ring;
use futures_util::future::{Either, select};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A guest ends sooner, in the time of the simulation: a longer run waits for an answer that was lost.
const PATIENCE: Duration = Duration::from_secs(10);
const RING: u16 = 16;
/// Requests at a time; each has three descriptors of its own.
const SLOTS: usize = 4;
const DESCRIPTORS_AT: usize = 0;
const AVAILABLE_AT: usize = 0x200;
const USED_AT: usize = 0x400;
const REQUESTS_AT: usize = 0x1000;
const REQUEST_BYTES: usize = 0x400;
const STATUS_AT: usize = 0x100;
const DATA_AT: usize = 0x200;
const NOTES_AT: usize = 0x4000;
const UNFLUSHED_AT: usize = 0x5000;
const MEMORY_BYTES: usize = 0x6000;
const SECTOR: usize = 512;
/// Places of a slot on the disk, one sector in a cluster of its own each.
const PLACES: usize = 3;
const CLUSTER: u64 = 4096;
const DISK_BYTES: u64 = 1 << 20;
/// Lives of back ends.
static LIVES: AtomicU64 = AtomicU64::new(1);

/// One place of the disk as the guest knows it.
#[derive(Clone, Debug)]
struct Cell {
    /// The values that the last flush may have left there.
    base: Vec<u32>,
    /// The writes since, in order.
    newer: Vec<u32>,
    /// Writes that have ended.
    ended: usize,
}

impl Cell {
    fn push(&mut self, value: u32) {
        self.newer.push(value);
        self.ended += 1;
    }

    /// Any of its values may be on the disk.
    fn after_a_cut(&self) -> Cell {
        Cell { base: self.base.iter().chain(&self.newer).copied().collect(), newer: Vec::new(), ended: self.ended }
    }
}

#[derive(Clone, Debug)]
enum Pending {
    Write {
        place: usize,
        value: u32,
    },
    /// Two clusters, one after the other.
    Zero {
        places: [usize; 2],
    },
    Read {
        place: usize,
    },
    /// The number of writes of each place that had been acknowledged.
    Flush {
        covered: Vec<usize>,
    },
}

/// The driver of the disk. It knows nothing of kills.
#[derive(Clone, Debug)]
struct Guest {
    next_available: u16,
    seen: u16,
    slots: Vec<Option<Pending>>,
    cells: Vec<Cell>,
    random: Rng,
    next_value: u32,
    /// Requests that it begins yet.
    left: usize,
    /// Then it flushes, and each slot reads its places: so many are begun.
    read: [usize; SLOTS],
    has_flushed: bool,
    failed_flushes: usize,
    /// A write that was acknowledged and not flushed may read as before.
    may_lose: bool,
    /// It zeroes clusters, too.
    has_zeroes: bool,
}

impl Guest {
    fn new(seed: u64, requests: usize) -> Guest {
        let cells = (0..SLOTS * PLACES).map(|_| Cell { base: vec![0], newer: Vec::new(), ended: 0 }).collect();
        Guest {
            next_available: 0,
            seen: 0,
            slots: (0..SLOTS).map(|_| None).collect(),
            cells,
            random: Rng::new(seed),
            next_value: 1,
            left: requests,
            read: [0; SLOTS],
            has_flushed: false,
            failed_flushes: 0,
            may_lose: false,
            has_zeroes: false,
        }
    }

    fn is_done(&self) -> bool {
        self.left == 0 && self.read == [PLACES; SLOTS] && self.slots.iter().all(Option::is_none)
    }

    /// Takes the requests given back, and begins the next ones.
    fn step(&mut self, bytes: &mut [u8]) {
        while number(bytes, USED_AT + 2) != self.seen {
            let entry = USED_AT + 4 + 8 * usize::from(self.seen % RING);
            let slot = usize::from(number(bytes, entry)) / 3;
            self.seen = self.seen.wrapping_add(1);
            let request = self.slots[slot].take().expect("a request is given back twice");
            self.complete(request, &bytes[REQUESTS_AT + slot * REQUEST_BYTES..][..REQUEST_BYTES]);
        }
        let is_idle = self.slots.iter().all(Option::is_none);
        for slot in 0..SLOTS {
            if self.slots[slot].is_some() {
                continue;
            }
            let own = slot * PLACES + self.random.below(PLACES as u64) as usize;
            let request = if self.left > 0 {
                self.left -= 1;
                match self.random.below(if self.has_zeroes { 8 } else { 6 }) {
                    0 => Pending::Read { place: own },
                    1 => self.flush(),
                    6 => self.flush(),
                    7 => Pending::Zero { places: [own, slot * PLACES + (own + 1) % PLACES] },
                    _ => {
                        self.next_value += 1;
                        Pending::Write { place: own, value: self.next_value }
                    }
                }
            } else if !self.has_flushed {
                if !is_idle {
                    return;
                }
                self.has_flushed = true;
                self.begin(slot, self.flush(), bytes);
                return;
            } else if self.read[slot] < PLACES && (is_idle || self.read != [0; SLOTS]) {
                self.read[slot] += 1;
                Pending::Read { place: slot * PLACES + self.read[slot] - 1 }
            } else {
                continue;
            };
            self.begin(slot, request, bytes);
        }
    }

    fn flush(&self) -> Pending {
        Pending::Flush { covered: self.cells.iter().map(|cell| cell.ended).collect() }
    }

    fn begin(&mut self, slot: usize, request: Pending, bytes: &mut [u8]) {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        let at = REQUESTS_AT + slot * REQUEST_BYTES;
        let (kind, place, data) = match &request {
            Pending::Read { place } => (0u32, *place, Some((SECTOR, NEXT | WRITE))),
            Pending::Zero { places } => {
                for (number, place) in places.iter().enumerate() {
                    let segment = &mut bytes[at + DATA_AT + 16 * number..][..16];
                    segment[..8].copy_from_slice(&(*place as u64 * CLUSTER / SECTOR as u64).to_le_bytes());
                    segment[8..].copy_from_slice(&(CLUSTER / SECTOR as u64).to_le_bytes());
                }
                (13, 0, Some((32, NEXT)))
            }
            Pending::Write { place, value } => {
                let data: Vec<u8> = value.to_le_bytes().repeat(SECTOR / 4);
                bytes[at + DATA_AT..][..SECTOR].copy_from_slice(&data);
                (1, *place, Some((SECTOR, NEXT)))
            }
            Pending::Flush { .. } => (4, 0, None),
        };
        bytes[at..at + 8].copy_from_slice(&u64::from(kind).to_le_bytes());
        let sector = place as u64 * CLUSTER / SECTOR as u64;
        bytes[at + 8..at + 16].copy_from_slice(&sector.to_le_bytes());
        bytes[at + STATUS_AT] = 0xff;
        let head = 3 * slot as u16;
        let mut describe = |number: u16, place: usize, len: usize, flags: u16, next: u16| {
            let descriptor = &mut bytes[DESCRIPTORS_AT + 16 * usize::from(number)..][..16];
            descriptor[..8].copy_from_slice(&(place as u64).to_le_bytes());
            descriptor[8..12].copy_from_slice(&(len as u32).to_le_bytes());
            descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
            descriptor[14..].copy_from_slice(&next.to_le_bytes());
        };
        describe(head, at, 16, NEXT, if data.is_some() { head + 1 } else { head + 2 });
        if let Some((len, flags)) = data {
            describe(head + 1, at + DATA_AT, len, flags, head + 2);
        }
        describe(head + 2, at + STATUS_AT, 1, WRITE, 0);
        let entry = AVAILABLE_AT + 4 + 2 * usize::from(self.next_available % RING);
        bytes[entry..entry + 2].copy_from_slice(&head.to_le_bytes());
        self.next_available = self.next_available.wrapping_add(1);
        bytes[AVAILABLE_AT + 2..AVAILABLE_AT + 4].copy_from_slice(&self.next_available.to_le_bytes());
        self.slots[slot] = Some(request);
    }

    fn complete(&mut self, request: Pending, bytes: &[u8]) {
        let status = bytes[STATUS_AT];
        match request {
            Pending::Write { place, value } => {
                assert_eq!(status, 0, "a write fails");
                self.cells[place].push(value);
            }
            Pending::Zero { places } => {
                assert_eq!(status, 0, "a write of zeroes fails");
                places.iter().for_each(|&place| self.cells[place].push(0));
            }
            Pending::Read { place } => {
                assert_eq!(status, 0, "a read fails");
                let data = &bytes[DATA_AT..][..SECTOR];
                let read = u32::from_le_bytes(data[..4].try_into().expect("four bytes"));
                assert!(data == read.to_le_bytes().repeat(SECTOR / 4), "a sector is torn");
                self.read(place, read);
            }
            Pending::Flush { covered } if status == 0 => {
                assert_eq!(self.failed_flushes, 0, "a flush promises what is lost: the guest has reset nothing");
                for (cell, covered) in self.cells.iter_mut().zip(covered) {
                    let known = cell.ended - cell.newer.len();
                    if let Some(last) = covered.checked_sub(known + 1) {
                        cell.base = vec![cell.newer[last]];
                        cell.newer.drain(..=last);
                    }
                }
            }
            Pending::Flush { .. } => {
                self.failed_flushes += 1;
                for cell in &mut self.cells {
                    let newer = std::mem::take(&mut cell.newer);
                    cell.base.extend(newer);
                }
            }
        }
    }

    fn read(&mut self, place: usize, read: u32) {
        let cell = &mut self.cells[place];
        let newest = *cell.newer.last().or(cell.base.last()).expect("a value");
        if self.may_lose {
            assert!(cell.base.contains(&read) || cell.newer.contains(&read), "place {place} has {read}: {cell:?}");
            if read != newest && !cell.newer.contains(&read) {
                // It stays as it is.
                *cell = Cell { base: vec![read], newer: Vec::new(), ended: cell.ended };
            }
        } else {
            assert_eq!(read, newest, "place {place}: {cell:?}");
        }
    }
}

fn number(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The parts of a machine that survive a back end, but for its files: at some moment.
#[derive(Clone)]
struct Machine {
    bytes: Vec<u8>,
    guest: Guest,
}

/// A moment at which a back end may be killed.
#[derive(Clone)]
struct Moment {
    machine: Machine,
    files: Snapshot,
    position: usize,
}

struct Host {
    guest: Mutex<Guest>,
    /// The guest's memory. Requests move data between it and the disk, also without these pieces.
    memory: SharedMemory,
    world: World,
    /// The moments before each step.
    moments: Mutex<Vec<Moment>>,
    /// The guest after each of its own steps, with the length of the log.
    steps: Mutex<Vec<(usize, Guest)>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_BYTES];
        self.memory.read(0, &mut bytes);
        bytes
    }

    fn note_moment(&self, guest: &Guest) {
        let mut moments = locked(&self.moments);
        let (position, bytes) = (self.world.position(), self.bytes());
        if moments.last().is_some_and(|last| last.position == position && last.machine.bytes == bytes) {
            return;
        }
        let machine = Machine { bytes, guest: guest.clone() };
        moments.push(Moment { machine, files: self.world.snapshot(), position });
    }
}

/// A piece of memory. The back end's writes are its steps.
#[derive(Clone)]
struct Piece {
    host: Arc<Host>,
    memory: SharedMemory,
}

impl Shared for Piece {
    fn len(&self) -> usize {
        self.memory.len()
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        self.memory.read(at, into);
    }

    fn write(&self, at: usize, from: &[u8]) {
        self.host.note_moment(&locked(&self.host.guest));
        self.memory.write(at, from);
    }

    fn load(&self, at: usize) -> u16 {
        self.memory.load(at)
    }

    fn store(&self, at: usize, value: u16) {
        self.write(at, &value.to_le_bytes());
    }

    fn part(&self, at: usize, len: usize) -> Piece {
        Piece { host: Arc::clone(&self.host), memory: self.memory.part(at, len) }
    }
}

impl Memory for Piece {
    type Piece = Piece;

    fn piece(&self, address: u64, len: usize) -> Option<Piece> {
        let at = usize::try_from(address).ok()?;
        (at.checked_add(len)? <= self.memory.len()).then(|| self.part(at, len))
    }

    fn pieces(&self, address: u64, len: usize, pieces: &mut Vec<Piece>) -> bool {
        let piece = self.piece(address, len);
        let is_there = piece.is_some();
        pieces.extend(piece);
        is_there
    }
}

/// An image.
#[derive(Clone)]
enum Disk {
    Raw,
    Qcow2(Qcow2Spec),
    /// Of a format in blocks, with its bytes.
    Blocks(Kind, Vec<u8>),
}

impl Disk {
    fn qcow2() -> Disk {
        Disk::Qcow2(Qcow2Spec { cluster_size: CLUSTER, ..Qcow2Spec::default() })
    }
}

/// A disk, and the data that its guest may see.
struct Scene {
    disk: Disk,
    seed: u64,
}

/// A life of a back end that has ended well.
struct Run {
    moments: Vec<Moment>,
    steps: Vec<(usize, Guest)>,
    guest: Guest,
    trace: Trace,
}

impl Scene {
    /// The back end keeps changes in its memory.
    fn may_lose(&self) -> bool {
        !matches!(self.disk, Disk::Raw)
    }

    fn options(&self, top: &str) -> BlockdevOptions {
        let driver = match &self.disk {
            Disk::Raw => "raw",
            Disk::Qcow2(_) => "qcow2",
            Disk::Blocks(kind, _) => kind.format,
        };
        let text = format!("driver={driver},node-name=d,file.driver=file,file.filename={top}");
        BlockdevOptions::from_keyval(&text).expect("options")
    }

    /// The name of the disk, and its files.
    fn files(&self) -> (String, Snapshot) {
        match &self.disk {
            Disk::Raw => {
                ("disk.raw".to_owned(), Snapshot::from([("disk.raw".to_owned(), PageMap::with_len(DISK_BYTES))]))
            }
            Disk::Blocks(_, bytes) => {
                (IMAGE.to_owned(), Snapshot::from([(IMAGE.to_owned(), PageMap::from_bytes(bytes))]))
            }
            Disk::Qcow2(spec) => {
                let layer = Layer { format: Format::Qcow2(spec.clone()), size: DISK_BYTES, sessions: Vec::new() };
                let prepared = Prepared::new(&Chain { layers: vec![layer] });
                (prepared.top, prepared.files)
            }
        }
    }

    /// Serves until the guest has ended.
    fn run(&self, top: &str, start: Moment) -> Run {
        let world = World::with_files(Config::new(self.seed), &start.files);
        let (shared, _) = SharedMemory::create("guest", MEMORY_BYTES as u64).expect("memory");
        shared.write(0, &start.machine.bytes);
        let guest = Mutex::new(start.machine.guest);
        let host =
            Arc::new(Host { guest, memory: shared.clone(), world, moments: Mutex::default(), steps: Mutex::default() });
        let memory = Piece { host: Arc::clone(&host), memory: shared };
        let place = RingPlace {
            size: RING,
            descriptors: DESCRIPTORS_AT as u64,
            available: AVAILABLE_AT as u64,
            used: USED_AT as u64,
            event_index: false,
            indirect: false,
        };
        let step = || {
            let (mut guest, mut bytes) = (locked(&host.guest), host.bytes());
            let seen = guest.seen;
            guest.step(&mut bytes);
            host.memory.write(0, &bytes);
            // The guest relies on each answer that it has seen.
            if guest.seen != seen {
                host.world.mark(guest.seen.into());
            }
            locked(&host.steps).push((host.world.position(), guest.clone()));
            guest.is_done()
        };
        host.world.run(async {
            let graph = Graph::new(&cowshed_image::DRIVERS);
            let node = graph.add(self.options(top)).await.expect("it opens");
            let export = graph.attach(&node, AttachRequest::export("disk", true)).await.expect("an export");
            let disk = export.queue();
            let (notes, unflushed) = (memory.part(NOTES_AT, part_bytes(RING)), memory.part(UNFLUSHED_AT, NOTE_BYTES));
            // No life has the number of another one.
            let life = LIVES.fetch_add(1, Ordering::Relaxed);
            let server = serve_ring(&disk, memory.clone(), place, notes, (unflushed, life), |piece| &piece.memory);
            let driver = async {
                while !step() {
                    // Simulated time between two steps of the guest.
                    rt::sleep(Duration::from_micros(30)).await;
                }
            };
            match select(pin!(server), pin!(rt::within(PATIENCE, driver))).await {
                Either::Left((outcome, _)) => panic!("the ring has stopped: {outcome:?}"),
                Either::Right((ended, _)) => ended.expect("each request of the guest is answered"),
            }
            drop(disk);
            export.detach().await.expect("no user");
            graph.close_all().await.expect("a good close");
        });
        let guest = locked(&host.guest).clone();
        let moments = std::mem::take(&mut *locked(&host.moments));
        let steps = std::mem::take(&mut *locked(&host.steps));
        Run { moments, steps, guest, trace: host.world.trace() }
    }

    /// Kills the back end at each moment, and its successor at some moment of its life.
    fn kill_everywhere(&self) -> (usize, usize) {
        const REQUESTS: usize = 24;
        let (top, files) = self.files();
        let guest = Guest { has_zeroes: true, ..Guest::new(self.seed, REQUESTS) };
        let machine = Machine { bytes: vec![0; MEMORY_BYTES], guest };
        let Run { moments, guest, .. } = self.run(&top, Moment { machine, files, position: 0 });
        assert_eq!(guest.failed_flushes, 0, "nothing was lost without a kill");
        let (mut kills, mut failed) = (0, 0);
        for (index, moment) in moments.into_iter().enumerate() {
            let after_kill = |mut moment: Moment| {
                moment.machine.guest.may_lose = self.may_lose();
                moment.machine.guest.left += 6;
                (moment.machine.guest.has_flushed, moment.machine.guest.read) = (false, [0; SLOTS]);
                moment
            };
            let Run { moments: later, guest, .. } = self.run(&top, after_kill(moment));
            kills += 1;
            failed += guest.failed_flushes;
            assert!(guest.may_lose || guest.failed_flushes == 0, "moment {index}: {guest:?}");
            if let Some(moment) = later.get(index * 7 % later.len().max(1)) {
                let Run { guest, .. } = self.run(&top, after_kill(moment.clone()));
                kills += 1;
                assert!(guest.may_lose || guest.failed_flushes == 0, "moment {index}: {guest:?}");
            }
        }
        (kills, failed)
    }

    /// Cuts the power all over a run. A machine that starts anew finds at each place what the last flush has left there,
    /// or a write since.
    fn cut_everywhere(&self) -> CrashReport {
        const REQUESTS: usize = 40;
        let (top, files) = self.files();
        let machine = |guest: Guest| Machine { bytes: vec![0; MEMORY_BYTES], guest };
        let start = Moment { machine: machine(Guest::new(self.seed, REQUESTS)), files, position: 0 };
        let Run { steps, guest, trace, .. } = self.run(&top, start);
        assert_eq!(guest.failed_flushes, 0, "nothing was lost");
        let verify = |case: &CrashCase<'_>| {
            let before = steps.partition_point(|(position, _)| *position <= case.position);
            let mut after = Guest::new(self.seed, 0);
            after.may_lose = true;
            if let Some((_, guest)) = steps[..before].last() {
                after.cells = guest.cells.iter().map(|cell| cell.after_a_cut()).collect();
                for pending in guest.slots.iter().flatten() {
                    match pending {
                        Pending::Write { place, value } => after.cells[*place].base.push(*value),
                        Pending::Zero { places } => places.iter().for_each(|&place| after.cells[place].base.push(0)),
                        _ => {}
                    }
                }
            }
            let start = Moment { machine: machine(after), files: case.state.files.clone(), position: 0 };
            // It flushes, and reads each place.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.run(&top, start).guest));
            match outcome {
                Ok(guest) if guest.failed_flushes == 0 => Ok(()),
                Ok(guest) => Err(format!("{} flushes fail after a power cut", guest.failed_flushes)),
                Err(panic) => Err(panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic".to_owned())),
            }
        };
        explore(&trace, &CrashPlan::new(self.seed), verify).unwrap_or_else(|failure| panic!("{failure}"))
    }
}

/// A raw image keeps nothing in the memory of the back end: each write acknowledged to the guest is there.
#[test]
fn a_kill_between_any_two_steps_loses_nothing_and_repeats_nothing() {
    for seed in 1..=3 {
        let (kills, _) = Scene { disk: Disk::Raw, seed }.kill_everywhere();
        assert!(kills > 200, "{kills}");
    }
}

/// The image's changes in the back end's memory are gone. No flush promises them.
#[test]
fn a_flush_after_a_kill_promises_nothing_that_is_lost() {
    let mut failed = 0;
    for seed in 1..=3 {
        let (kills, flushes) = Scene { disk: Disk::qcow2(), seed }.kill_everywhere();
        assert!(kills > 200, "{kills}");
        failed += flushes;
    }
    assert!(failed > 20, "{failed} flushes have told of lost changes");
    for (kind, bytes) in kinds() {
        let (kills, flushes) = Scene { disk: Disk::Blocks(kind, bytes), seed: 1 }.kill_everywhere();
        assert!(kills > 200 && flushes > 0, "{}: {kills} kills, {flushes} flushes", kind.format);
    }
}

#[test]
fn a_power_cut_takes_nothing_that_the_guest_has_flushed() {
    for disk in [Disk::Raw, Disk::qcow2()] {
        let mut report = CrashReport::default();
        for seed in 1..=3 {
            report.add(&Scene { disk: disk.clone(), seed }.cut_everywhere());
        }
        println!("{report}");
        assert!(report.distinct() > 1000, "{report}");
    }
}
