// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The contents that a power cut may leave on the disk, worked out from the log of a run.
//!
//! The rules, for each file on its own: everything that a successful barrier covered (all that completed before it was
//! issued) is there. Of every later change any part may be there, sector by sector, also of one still under way. So a
//! sector holds its bytes at the barrier or those after any later change to it. Changes of the length and the
//! appearance of a name are such parts too.

use super::log::{Applied, Change, Event, FileId, OpId};
use super::pages::PageMap;
use super::world::{Snapshot, Trace, apply};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of whole sectors that one change would leave on the disk.
#[derive(Clone, Debug)]
enum SectorChange {
    Data {
        offset: u64,
        bytes: Arc<[u8]>,
    },
    /// Torn at `unit` bytes: a whole number of sectors, larger for large ranges.
    Zero {
        offset: u64,
        len: u64,
        unit: u64,
    },
}

impl SectorChange {
    fn range(&self) -> (u64, u64) {
        match self {
            SectorChange::Data { offset, bytes } => (*offset, offset + bytes.len() as u64),
            SectorChange::Zero { offset, len, .. } => (*offset, offset + len),
        }
    }

    fn unit(&self, sector: u64) -> u64 {
        match self {
            SectorChange::Data { .. } => sector,
            SectorChange::Zero { unit, .. } => *unit,
        }
    }

    fn cut_out(&self, start: u64, end: u64) -> SectorChange {
        match self {
            SectorChange::Data { offset, bytes } => SectorChange::Data {
                offset: start,
                bytes: bytes[(start - offset) as usize..(end - offset) as usize].into(),
            },
            SectorChange::Zero { unit, .. } => SectorChange::Zero { offset: start, len: end - start, unit: *unit },
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum LenChange {
    AtLeast(u64),
    Exactly(u64),
}

/// A change that a power cut may keep or lose, as a whole or in parts.
#[derive(Clone, Debug)]
pub struct CutChange {
    op: OpId,
    file: FileId,
    change: Change,
    pieces: Vec<SectorChange>,
    len: Option<LenChange>,
    create: bool,
    /// Place in the order of completion; 0 while under way.
    sequence: u64,
    /// A failed barrier covered it: no later one will.
    dropped: bool,
}

/// A part of a change that is on disk or not, independently of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atom {
    /// A sector (or a larger unit of a large zeroed range) at this offset in the file.
    Sector(u64),
    /// The new length.
    Length,
    /// The name.
    Name,
}

/// The parts of a change that a power cut has kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// None.
    Nothing,
    /// All.
    Everything,
    /// Those with `true`, in the order of [`CutChange::atoms`].
    Parts(Vec<bool>),
}

impl CutChange {
    /// The operation.
    pub fn op(&self) -> OpId {
        self.op
    }

    /// Index of its file in [`Cut::names`].
    pub fn file(&self) -> FileId {
        self.file
    }

    /// The change that was asked for.
    pub fn change(&self) -> &Change {
        &self.change
    }

    /// It was under way at the moment of the cut.
    pub fn is_in_flight(&self) -> bool {
        self.sequence == 0
    }

    /// Its independent parts.
    pub fn atoms(&self, sector_bytes: u64) -> Vec<Atom> {
        let mut atoms = Vec::new();
        for piece in &self.pieces {
            let (start, end) = piece.range();
            let unit = piece.unit(sector_bytes);
            atoms.extend((0..(end - start).div_ceil(unit)).map(|index| Atom::Sector(start + index * unit)));
        }
        atoms.extend(self.len.map(|_| Atom::Length));
        atoms.extend(self.create.then_some(Atom::Name));
        atoms
    }

    fn build(op: OpId, file: FileId, change: &Change, applied: &Applied, contents: &mut PageMap, sector: u64) -> Self {
        let old_len = contents.len();
        apply(contents, change, applied, sector);
        let new_len = contents.len();
        let mut pieces = Vec::new();
        let (start, end) = change.range();
        match (change, applied) {
            (_, Applied::Nothing) => {}
            (Change::Write { .. }, Applied::All) => pieces.push(after_image(contents, start, end, sector)),
            (Change::Write { .. }, Applied::Prefix(count)) => {
                pieces.push(after_image(contents, start, start + count, sector));
            }
            (Change::Write { .. } | Change::Zero { .. }, Applied::Sectors(sectors)) => {
                let at = |index: &u64| (start / sector + index) * sector;
                pieces.extend(sectors.iter().map(|index| after_image(contents, at(index), at(index) + 1, sector)));
            }
            (Change::Zero { .. }, _) => zero_pieces(&mut pieces, contents, start, end, sector),
            _ => {}
        }
        let len = match change {
            Change::SetLen(len) if *applied == Applied::All => Some(LenChange::Exactly(*len)),
            _ if new_len > old_len => Some(LenChange::AtLeast(new_len)),
            _ => None,
        };
        let create = matches!(change, Change::Create);
        CutChange { op, file, change: change.clone(), pieces, len, create, sequence: 0, dropped: false }
    }

    fn apply(&self, contents: &mut PageMap, choice: &Choice, sector: u64) {
        let parts = match choice {
            Choice::Nothing => return,
            Choice::Everything => None,
            Choice::Parts(parts) => Some(parts),
        };
        let sectors: usize = self.pieces.iter().map(|piece| count_units(piece, sector)).sum();
        let keeps = |index: usize| parts.is_none_or(|parts| parts.get(index).copied().unwrap_or(false));
        if keeps(sectors) {
            match self.len {
                Some(LenChange::AtLeast(len)) => contents.set_len(contents.len().max(len)),
                Some(LenChange::Exactly(len)) => contents.set_len(len),
                None => {}
            }
        }
        let mut first = 0;
        for piece in &self.pieces {
            let count = count_units(piece, sector);
            let mut index = 0;
            while index < count {
                // Neighbours that are both kept are written in one piece.
                let from = index;
                while index < count && keeps(first + index) {
                    index += 1;
                }
                if index > from {
                    write_units(contents, piece, from as u64, index as u64, sector);
                }
                index += 1;
            }
            first += count;
        }
    }
}

fn count_units(piece: &SectorChange, sector: u64) -> usize {
    let (start, end) = piece.range();
    (end - start).div_ceil(piece.unit(sector)) as usize
}

/// Writes the units `from .. to` of `piece`; bytes behind the end of the file are lost.
fn write_units(contents: &mut PageMap, piece: &SectorChange, from: u64, to: u64, sector: u64) {
    let (start, end) = piece.range();
    let unit = piece.unit(sector);
    let limit = contents.len();
    let (from, to) = ((start + from * unit).min(limit), (start + to * unit).min(end).min(limit));
    if from >= to {
        return;
    }
    match piece {
        SectorChange::Data { offset, bytes } => {
            contents.write(from, &bytes[(from - offset) as usize..(to - offset) as usize])
        }
        SectorChange::Zero { .. } => contents.zero(from, to - from, false),
    }
}

/// The whole sectors around `start .. end` as `contents` has them now.
fn after_image(contents: &PageMap, start: u64, end: u64, sector: u64) -> SectorChange {
    let (start, end) = (start / sector * sector, end.next_multiple_of(sector));
    let mut bytes = vec![0; (end - start) as usize];
    contents.read(start, &mut bytes);
    SectorChange::Data { offset: start, bytes: bytes.into() }
}

fn zero_pieces(pieces: &mut Vec<SectorChange>, contents: &PageMap, start: u64, end: u64, sector: u64) {
    let end = end.min(contents.len());
    let (first, last) = (start.next_multiple_of(sector), end / sector * sector);
    if start >= end {
        return;
    }
    if first >= last {
        pieces.push(after_image(contents, start, end, sector));
        return;
    }
    if start < first {
        pieces.push(after_image(contents, start, first, sector));
    }
    // A hole of a gibibyte isn't worth two million independent sectors.
    let unit = ((last - first) / 64).next_multiple_of(sector).max(sector);
    pieces.push(SectorChange::Zero { offset: first, len: last - first, unit });
    if last < end {
        pieces.push(after_image(contents, last, end, sector));
    }
}

/// Takes `start .. end` out of `pieces`.
fn subtract(pieces: &mut Vec<SectorChange>, start: u64, end: u64) {
    let mut rest = Vec::with_capacity(pieces.len());
    for piece in pieces.drain(..) {
        let (from, to) = piece.range();
        if to <= start || end <= from {
            rest.push(piece);
            continue;
        }
        if from < start {
            rest.push(piece.cut_out(from, start));
        }
        if end < to {
            rest.push(piece.cut_out(end, to));
        }
    }
    *pieces = rest;
}

struct FileReplay {
    /// The name is durable.
    named: bool,
    durable: PageMap,
    volatile: PageMap,
    /// Completed and not durable, in order of completion.
    pending: Vec<CutChange>,
    in_flight: BTreeMap<OpId, Change>,
}

/// Walks through the log of a [`Trace`].
pub struct Replay<'a> {
    trace: &'a Trace,
    files: Vec<FileReplay>,
    /// Barriers under way: their file and the last sequence number that they cover.
    syncs: BTreeMap<OpId, (FileId, u64)>,
    op_files: BTreeMap<OpId, FileId>,
    sequence: u64,
    position: usize,
}

impl<'a> Replay<'a> {
    /// At the start of the log.
    pub fn new(trace: &'a Trace) -> Self {
        let file = |(_, initial): &(String, Option<PageMap>)| {
            let contents = initial.clone().unwrap_or_default();
            FileReplay {
                named: initial.is_some(),
                durable: contents.clone(),
                volatile: contents,
                pending: Vec::new(),
                in_flight: BTreeMap::new(),
            }
        };
        Replay {
            trace,
            files: trace.files.iter().map(file).collect(),
            syncs: BTreeMap::new(),
            op_files: BTreeMap::new(),
            sequence: 0,
            position: 0,
        }
    }

    /// Number of log entries passed.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The contents of the file named `name` that a reader sees at this point.
    pub fn contents(&self, name: &str) -> Option<&PageMap> {
        let id = self.trace.files.iter().position(|(other, _)| other == name)?;
        Some(&self.files[id].volatile)
    }

    /// Passes one entry and returns it; `None` at the end of the log.
    pub fn advance(&mut self) -> Option<&'a Event> {
        let event = self.trace.log.get(self.position)?;
        self.position += 1;
        match event {
            Event::Submitted { op, file, change } => {
                self.op_files.insert(*op, *file);
                self.files[*file].in_flight.insert(*op, change.clone());
            }
            Event::Completed { op, applied } => self.complete(*op, applied),
            Event::SyncIssued { op, file } => {
                self.syncs.insert(*op, (*file, self.sequence));
            }
            Event::SyncDone { op } => self.sync_done(*op),
            Event::SyncFailed { op } => {
                if let Some((file, covered)) = self.syncs.remove(op) {
                    let pending = self.files[file].pending.iter_mut();
                    pending.filter(|change| change.sequence <= covered).for_each(|change| change.dropped = true);
                }
            }
            Event::FolderSynced => {
                for file in &mut self.files {
                    file.named |= file.pending.iter().any(|change| change.create);
                    file.pending.retain(|change| !change.create);
                }
            }
            Event::Mark(_) => {}
        }
        Some(event)
    }

    fn complete(&mut self, op: OpId, applied: &Applied) {
        let Some(file) = self.op_files.remove(&op) else { return };
        let replay = &mut self.files[file];
        let Some(change) = replay.in_flight.remove(&op) else { return };
        let sector = self.trace.sector_bytes;
        let mut change = CutChange::build(op, file, &change, applied, &mut replay.volatile, sector);
        self.sequence += 1;
        change.sequence = self.sequence;
        if !change.atoms(sector).is_empty() {
            replay.pending.push(change);
        }
    }

    fn sync_done(&mut self, op: OpId) {
        let Some((file, covered)) = self.syncs.remove(&op) else { return };
        let sector = self.trace.sector_bytes;
        let names = self.trace.sync_covers_name;
        let replay = &mut self.files[file];
        let mut rest: Vec<CutChange> = Vec::new();
        for change in std::mem::take(&mut replay.pending) {
            let covers = change.sequence <= covered && !change.dropped && (names || !change.create);
            if !covers {
                rest.push(change);
                continue;
            }
            replay.named |= change.create;
            change.apply(&mut replay.durable, &Choice::Everything, sector);
            // Bytes dropped earlier can't come back over durable ones.
            for dropped in rest.iter_mut().filter(|earlier| earlier.dropped) {
                change
                    .pieces
                    .iter()
                    .map(SectorChange::range)
                    .for_each(|(from, to)| subtract(&mut dropped.pieces, from, to));
                if change.len.is_some() {
                    dropped.len = None;
                }
            }
        }
        rest.retain(|change| !change.atoms(sector).is_empty());
        replay.pending = rest;
    }

    /// The choices that a power cut at this point has.
    pub fn cut(&self) -> Cut {
        let sector_bytes = self.trace.sector_bytes;
        let mut changes = Vec::new();
        let mut bases = Vec::new();
        for (id, file) in self.files.iter().enumerate() {
            bases.push(Base { name: self.trace.files[id].0.clone(), named: file.named, durable: file.durable.clone() });
            changes.extend(file.pending.iter().cloned());
            let mut volatile = file.volatile.clone();
            for (op, change) in &file.in_flight {
                let change = CutChange::build(*op, id, change, &Applied::All, &mut volatile, sector_bytes);
                if !change.atoms(sector_bytes).is_empty() {
                    changes.push(change);
                }
            }
        }
        Cut { position: self.position, sector_bytes, bases, changes }
    }
}

#[derive(Clone, Debug)]
struct Base {
    name: String,
    named: bool,
    durable: PageMap,
}

/// A point at which the power is cut: the durable contents, and the changes that may be there or not.
#[derive(Clone, Debug)]
pub struct Cut {
    position: usize,
    sector_bytes: u64,
    bases: Vec<Base>,
    changes: Vec<CutChange>,
}

impl Cut {
    /// Number of log entries before the cut.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The unit that the disk writes in one piece, in bytes.
    pub fn sector_bytes(&self) -> u64 {
        self.sector_bytes
    }

    /// Names of the files.
    pub fn names(&self) -> Vec<&str> {
        self.bases.iter().map(|base| base.name.as_str()).collect()
    }

    /// The changes that the cut may keep or lose.
    pub fn changes(&self) -> &[CutChange] {
        &self.changes
    }

    /// The disk that is left when of each change the parts in `choices` were kept.
    pub fn state(&self, choices: &[Choice]) -> CrashState {
        let mut named: Vec<bool> = self.bases.iter().map(|base| base.named).collect();
        let mut contents: Vec<PageMap> = self.bases.iter().map(|base| base.durable.clone()).collect();
        for (change, choice) in self.changes.iter().zip(choices) {
            change.apply(&mut contents[change.file], choice, self.sector_bytes);
            if change.create {
                let kept = match choice {
                    Choice::Nothing => false,
                    Choice::Everything => true,
                    Choice::Parts(parts) => parts.last().copied().unwrap_or(false),
                };
                named[change.file] |= kept;
            }
        }
        let files = self.bases.iter().zip(contents).zip(named).filter(|(_, named)| *named);
        CrashState { files: files.map(|((base, contents), _)| (base.name.clone(), contents)).collect() }
    }
}

/// The disk after a power cut.
#[derive(Clone, Debug)]
pub struct CrashState {
    /// Names and contents.
    pub files: Snapshot,
}

impl CrashState {
    /// A hash of all names (without their folders) and contents: two states with the same hash are the same disk.
    pub fn hash(&self) -> u128 {
        let mut sum: u128 = 0;
        for (name, contents) in &self.files {
            let mut salt: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
            for byte in name.rsplit('/').next().unwrap_or_default().bytes() {
                salt = (salt ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
            }
            sum = sum.wrapping_add((contents.hash() ^ (salt >> 64)).wrapping_mul(salt | 1));
        }
        sum
    }
}
