// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rule table of a file with faults: the operations that are hit, and the faults. No I/O here.

use super::breakpoints::{Breakpoints, SuspendedOp};
use super::metadata::is_metadata;
use crate::rng::Rng;
use cowshed_types::Errno;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The kind of an operation, as QEMU's `iotype` names it (`resize` is ours).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoType {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Zeroing and allocation of ranges without a transfer.
    WriteZeroes,
    /// Giving space back.
    Discard,
    /// Flushes.
    Flush,
    /// Looking for data and holes.
    BlockStatus,
    /// Changes of the file's length.
    Resize,
}

impl IoType {
    /// The spellings of the option, in the order of the variants.
    pub const NAMES: &'static [&'static str] =
        &["read", "write", "write-zeroes", "discard", "flush", "block-status", "resize"];

    const ALL: [IoType; 7] = [
        IoType::Read,
        IoType::Write,
        IoType::WriteZeroes,
        IoType::Discard,
        IoType::Flush,
        IoType::BlockStatus,
        IoType::Resize,
    ];

    /// From the option's spelling.
    pub fn parse(name: &str) -> Option<IoType> {
        Self::NAMES.iter().position(|known| *known == name).map(|index| Self::ALL[index])
    }

    /// True for the kinds that a rule without `iotype` is for.
    fn by_default(self) -> bool {
        !matches!(self, IoType::BlockStatus | IoType::Resize)
    }
}

macro_rules! events {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// An event in the file or in the qcow2 format above it, by QEMU's name. A rule waits for its event, and sees
        /// the operations from then on, the one that caused the event included.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Event {
            $($(#[$doc])* $variant,)*
        }

        impl Event {
            /// The spellings of the option, in the order of the variants.
            pub const NAMES: &'static [&'static str] = &[$($name),*];
            const ALL: &'static [Event] = &[$(Event::$variant),*];
        }
    };
}

events! {
    /// The rule doesn't wait.
    None = "none",
    /// Before a read of guest data: of any but those that a format marks as its own ([`super::as_metadata`]).
    ReadAio = "read_aio",
    /// Before a write of guest data: of any but those that a format marks as its own.
    WriteAio = "write_aio",
    /// Before any write, after [`Event::WriteAio`].
    Pwritev = "pwritev",
    /// Before a range is zeroed without a transfer.
    PwritevZero = "pwritev_zero",
    /// After a write that succeeded.
    PwritevDone = "pwritev_done",
    /// Before a flush of the file.
    FlushToOs = "flush_to_os",
    /// Before a flush, after [`Event::FlushToOs`].
    FlushToDisk = "flush_to_disk",
    /// Before entries of L1 and L2 tables are written back.
    L1Update = "l1_update",
    /// Before the L1 table moves to a larger place.
    L1GrowAllocTable = "l1_grow_alloc_table",
    /// Before the larger L1 table is written.
    L1GrowWriteTable = "l1_grow_write_table",
    /// Before the header names the larger L1 table.
    L1GrowActivateTable = "l1_grow_activate_table",
    /// Before a slice of an L2 table is read.
    L2Load = "l2_load",
    /// Together with `L1Update`.
    L2Update = "l2_update",
    /// Known for the sake of scripts; nothing here causes it.
    L2UpdateCompressed = "l2_update_compressed",
    /// Known for the sake of scripts; nothing here causes it.
    L2AllocCowRead = "l2_alloc_cow_read",
    /// Known for the sake of scripts; nothing here causes it.
    L2AllocWrite = "l2_alloc_write",
    /// Before the backing file is read.
    ReadBackingAio = "read_backing_aio",
    /// Before a compressed cluster is read.
    ReadCompressed = "read_compressed",
    /// Before compressed clusters are written.
    WriteCompressed = "write_compressed",
    /// Before the state of a virtual machine is read.
    VmstateLoad = "vmstate_load",
    /// Before the state of a virtual machine is written.
    VmstateSave = "vmstate_save",
    /// Before old data is read to be copied.
    CowRead = "cow_read",
    /// Before data is written that copied data surrounds.
    CowWrite = "cow_write",
    /// Before the refcount table is read.
    ReftableLoad = "reftable_load",
    /// Before the refcount table moves to a larger place.
    ReftableGrow = "reftable_grow",
    /// Before entries of the refcount table are written back.
    ReftableUpdate = "reftable_update",
    /// Before a refcount block is read.
    RefblockLoad = "refblock_load",
    /// Before refcounts and the contents of new tables are written back.
    RefblockUpdate = "refblock_update",
    /// Known for the sake of scripts; nothing here causes it.
    RefblockUpdatePart = "refblock_update_part",
    /// Known for the sake of scripts; nothing here causes it.
    RefblockAlloc = "refblock_alloc",
    /// Known for the sake of scripts; nothing here causes it.
    RefblockAllocHookup = "refblock_alloc_hookup",
    /// Known for the sake of scripts; nothing here causes it.
    RefblockAllocWrite = "refblock_alloc_write",
    /// Known for the sake of scripts; nothing here causes it.
    RefblockAllocWriteBlocks = "refblock_alloc_write_blocks",
    /// Before the larger refcount table is written.
    RefblockAllocWriteTable = "refblock_alloc_write_table",
    /// Before the header names the larger refcount table.
    RefblockAllocSwitchTable = "refblock_alloc_switch_table",
    /// Before clusters are looked for to be written to.
    ClusterAlloc = "cluster_alloc",
    /// Known for the sake of scripts; nothing here causes it.
    ClusterAllocBytes = "cluster_alloc_bytes",
    /// Before freed clusters may be used again.
    ClusterFree = "cluster_free",
    /// Before the first block of a write is read, where the write covers a part of it only.
    PwritevRmwHead = "pwritev_rmw_head",
    /// After that block was read.
    PwritevRmwAfterHead = "pwritev_rmw_after_head",
    /// Before the last block of a write is read, where the write covers a part of it only.
    PwritevRmwTail = "pwritev_rmw_tail",
    /// After that block was read.
    PwritevRmwAfterTail = "pwritev_rmw_after_tail",
    /// Before all clusters of a disk are given back.
    EmptyImagePrepare = "empty_image_prepare",
    /// Known for the sake of scripts; nothing here causes it.
    L1ShrinkWriteTable = "l1_shrink_write_table",
    /// Known for the sake of scripts; nothing here causes it.
    L1ShrinkFreeL2Clusters = "l1_shrink_free_l2_clusters",
    /// Known for the sake of scripts; nothing here causes it.
    CorWrite = "cor_write",
    /// Known for the sake of scripts; nothing here causes it.
    ClusterAllocSpace = "cluster_alloc_space",
}

impl Event {
    /// From the option's spelling.
    pub fn parse(name: &str) -> Option<Event> {
        Self::NAMES.iter().position(|known| *known == name).map(|index| Self::ALL[index])
    }

    fn before(io: IoType) -> &'static [Event] {
        match io {
            IoType::Read if is_metadata() => &[],
            IoType::Write if is_metadata() => &[Event::Pwritev],
            IoType::Read => &[Event::ReadAio],
            IoType::Write => &[Event::WriteAio, Event::Pwritev],
            IoType::WriteZeroes => &[Event::PwritevZero],
            IoType::Flush => &[Event::FlushToOs, Event::FlushToDisk],
            IoType::Discard | IoType::BlockStatus | IoType::Resize => &[],
        }
    }
}

/// The effect on an operation that a rule hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// It fails, and nothing of it happens.
    Fail(Errno),
    /// The first `bytes` of a write (half of it when `None`), in whole sectors, reach the file; then it fails. Other
    /// operations fail without effect.
    Torn {
        /// The error.
        errno: Errno,
        /// The written part in bytes.
        bytes: Option<u64>,
    },
    /// A read or write moves only the first `bytes` (half of it when `None`), in whole sectors and at least one, and
    /// reports that. The layer above continues it, as with a short system call. No effect on others.
    Short {
        /// The moved part in bytes.
        bytes: Option<u64>,
    },
    /// One random bit in each sector of a read is wrong. No effect on others.
    Corrupt,
    /// It is reported as done, and nothing of it happens: a lost write, a flush that the drive ignores. Reads and
    /// searches for data are not lost.
    Lose,
    /// Nothing but the delay.
    Pass,
}

/// A rule: which operations it hits, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// The event that the rule waits for.
    pub event: Event,
    /// Its event counts only in this state; a rule without event counts only in this state. `None`: in any.
    pub state: Option<u32>,
    /// Only operations of this kind; `None`: reads, writes, zeroing, discards and flushes.
    pub io_type: Option<IoType>,
    /// Only operations that touch one of these bytes; flushes and changes of the length have no place and are then
    /// left alone.
    pub range: Option<Range<u64>>,
    /// The number of matching operations that pass unharmed first.
    pub skip: u64,
    /// The number of operations that are hit then.
    pub times: u64,
    /// The share of the rest that is hit, in percent.
    pub probability_percent: u8,
    /// The delay of an operation that is hit, before its effect.
    pub delay: Duration,
    /// The effect on the operation.
    pub action: FaultAction,
}

impl FaultRule {
    /// A rule for every operation (see [`FaultRule::io_type`]), without waiting.
    pub fn new(action: FaultAction) -> FaultRule {
        FaultRule {
            event: Event::None,
            state: None,
            io_type: None,
            range: None,
            skip: 0,
            times: u64::MAX,
            probability_percent: 100,
            delay: Duration::ZERO,
            action,
        }
    }
}

/// A change of the state: on `event`, in `state` (`None`: any), the state becomes `new_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRule {
    /// When.
    pub event: Event,
    /// The state in which it counts.
    pub state: Option<u32>,
    /// The state afterwards.
    pub new_state: u32,
}

/// The state of a fresh table, as in QEMU.
const FIRST_STATE: u32 = 1;

/// The fate of one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperationFault {
    pub delay: Duration,
    pub action: FaultAction,
}

struct Armed {
    id: u64,
    rule: FaultRule,
    /// Its event has come.
    active: bool,
}

struct Table {
    rules: Vec<Armed>,
    states: Vec<StateRule>,
    state: u32,
    next_id: u64,
    rng: Rng,
}

/// The rules of a file with faults ([`crate::File::with_faults`]). They can be changed while it is in use, from any
/// thread; without rules an operation costs one load of an atomic.
pub struct Faults {
    armed: AtomicBool,
    hits: AtomicU64,
    breakpoints: Breakpoints,
    table: Mutex<Table>,
}

impl Faults {
    /// An empty table; `seed` decides the choices left to chance.
    pub fn new(seed: u64) -> Faults {
        let table =
            Table { rules: Vec::new(), states: Vec::new(), state: FIRST_STATE, next_id: 1, rng: Rng::new(seed) };
        Faults {
            armed: AtomicBool::new(false),
            hits: AtomicU64::new(0),
            breakpoints: Breakpoints::default(),
            table: Mutex::new(table),
        }
    }

    /// Adds a rule behind the others; of those that match the first decides. The number takes it away again.
    pub fn arm(&self, rule: FaultRule) -> u64 {
        let mut table = self.table();
        let (id, active) = (table.next_id, rule.event == Event::None);
        table.next_id += 1;
        table.rules.push(Armed { id, rule, active });
        self.armed.store(true, Ordering::Release);
        id
    }

    /// Takes one rule away; false when it isn't there (any more).
    pub fn disarm(&self, id: u64) -> bool {
        let mut table = self.table();
        let before = table.rules.len();
        table.rules.retain(|armed| armed.id != id);
        table.rules.len() < before
    }

    /// Takes all rules away. The state stays.
    pub fn disarm_all(&self) {
        let mut table = self.table();
        self.armed.store(false, Ordering::Release);
        table.rules.clear();
        table.states.clear();
    }

    /// Adds a change of the state.
    pub fn on_event(&self, rule: StateRule) {
        self.table().states.push(rule);
        self.armed.store(true, Ordering::Release);
    }

    /// The state now; 1 at first.
    pub fn state(&self) -> u32 {
        self.table().state
    }

    /// Sets the state.
    pub fn set_state(&self, state: u32) {
        self.table().state = state;
    }

    /// The next operation that meets `event` is held up until [`Faults::resume`] lets it go on.
    pub fn set_break(&self, event: Event, tag: &str) {
        self.breakpoints.set(event, tag);
        self.armed.store(true, Ordering::Release);
    }

    /// The tags of the operations that are held up, in the order they came.
    pub fn held(&self) -> Vec<String> {
        self.breakpoints.held()
    }

    /// Lets one operation go on; false when none is held up by this tag.
    pub fn resume(&self, tag: &str) -> bool {
        self.breakpoints.resume(tag)
    }

    /// Takes a breakpoint away that nothing has met yet; false when there is none with this tag.
    pub fn remove_break(&self, tag: &str) -> bool {
        self.breakpoints.remove(tag)
    }

    /// Takes all breakpoints away and lets everything go on.
    pub fn remove_all_breaks(&self) {
        self.breakpoints.clear();
    }

    /// The format above the file is at this point: breakpoints hold it up, rules and states take note.
    pub async fn meet(&self, event: Event) {
        if !self.armed.load(Ordering::Acquire) {
            return;
        }
        if let Some(held) = self.breakpoints.meet(&[event]) {
            held.await;
        }
        self.table().happen(event);
    }

    /// The hold that an operation has to wait for before it begins.
    pub(super) fn hold_before(&self, io: IoType) -> Option<SuspendedOp> {
        if self.armed.load(Ordering::Acquire) { self.breakpoints.meet(Event::before(io)) } else { None }
    }

    /// The hold that a write has to wait for after its success.
    pub(super) fn hold_after_write(&self) -> Option<SuspendedOp> {
        if self.armed.load(Ordering::Acquire) { self.breakpoints.meet(&[Event::PwritevDone]) } else { None }
    }

    /// Number of operations hit so far.
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides about an operation; `range` is `None` where it has no place.
    pub(super) fn decide(&self, io: IoType, range: Option<Range<u64>>) -> Option<OperationFault> {
        if !self.armed.load(Ordering::Acquire) {
            return None;
        }
        let mut table = self.table();
        Event::before(io).iter().for_each(|event| table.happen(*event));
        let verdict = table.decide(io, range.as_ref());
        self.hits.fetch_add(u64::from(verdict.is_some()), Ordering::Relaxed);
        verdict
    }

    /// A write has succeeded.
    pub(super) fn written(&self) {
        if self.armed.load(Ordering::Acquire) {
            self.table().happen(Event::PwritevDone);
        }
    }

    /// A random number below `bound`, which isn't 0.
    pub(super) fn random_below(&self, bound: u64) -> u64 {
        self.table().rng.below(bound)
    }
}

impl Table {
    /// Rules first, then the state: a rule of the new state waits for the next event.
    fn happen(&mut self, event: Event) {
        let state = self.state;
        let counts = |wanted: Option<u32>| wanted.is_none_or(|wanted| wanted == state);
        for armed in self.rules.iter_mut().filter(|armed| armed.rule.event == event && counts(armed.rule.state)) {
            armed.active = true;
        }
        if let Some(rule) = self.states.iter().find(|rule| rule.event == event && counts(rule.state)) {
            self.state = rule.new_state;
        }
    }

    fn decide(&mut self, io: IoType, range: Option<&Range<u64>>) -> Option<OperationFault> {
        let state = self.state;
        for index in 0..self.rules.len() {
            let Armed { rule, active, .. } = &mut self.rules[index];
            let out_of_state = rule.event == Event::None && rule.state.is_some_and(|wanted| wanted != state);
            if !*active || out_of_state || !rule.matches(io, range) {
                continue;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
                continue;
            }
            if rule.probability_percent < 100 && !self.rng.chance(u64::from(rule.probability_percent), 100) {
                continue;
            }
            let verdict = OperationFault { delay: rule.delay, action: rule.action };
            rule.times = rule.times.saturating_sub(1);
            if rule.times == 0 {
                self.rules.remove(index);
            }
            return Some(verdict);
        }
        None
    }
}

impl FaultRule {
    fn matches(&self, io: IoType, range: Option<&Range<u64>>) -> bool {
        let touches = match (&self.range, range) {
            (None, _) => true,
            (Some(wanted), Some(range)) => range.start < wanted.end && wanted.start < range.end,
            (Some(_), None) => false,
        };
        self.io_type.map_or(io.by_default(), |wanted| wanted == io) && touches
    }
}

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faults").field("rules", &self.table().rules.len()).field("hits", &self.hits()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail() -> FaultRule {
        FaultRule::new(FaultAction::Fail(Errno::EIO))
    }

    fn hit(faults: &Faults, io: IoType) -> bool {
        faults.decide(io, Some(0..512)).is_some()
    }

    #[test]
    fn a_rule_waits_for_its_event_and_stays() {
        let faults = Faults::new(0);
        faults.arm(FaultRule { event: Event::FlushToDisk, ..fail() });
        assert!(!hit(&faults, IoType::Write));
        assert!(hit(&faults, IoType::Flush) && hit(&faults, IoType::Write) && hit(&faults, IoType::Read));
        assert!(!hit(&faults, IoType::Resize) && !hit(&faults, IoType::BlockStatus));
        assert_eq!(faults.hits(), 3);
    }

    #[test]
    fn states_count_events() {
        let faults = Faults::new(0);
        faults.on_event(StateRule { event: Event::ReadAio, state: Some(1), new_state: 2 });
        faults.on_event(StateRule { event: Event::ReadAio, state: Some(2), new_state: 3 });
        faults.arm(FaultRule { event: Event::ReadAio, state: Some(2), times: 1, ..fail() });
        let hits: Vec<bool> = (0..4).map(|_| hit(&faults, IoType::Read)).collect();
        assert_eq!(hits, [false, true, false, false]);
        assert_eq!(faults.state(), 3);
    }

    #[test]
    fn skip_times_and_place() {
        let faults = Faults::new(0);
        let rule = FaultRule { io_type: Some(IoType::Write), skip: 1, times: 2, range: Some(512..1024), ..fail() };
        let id = faults.arm(rule);
        assert!(faults.decide(IoType::Write, Some(0..512)).is_none());
        let hits: Vec<bool> = (0..4).map(|_| faults.decide(IoType::Write, Some(0..513)).is_some()).collect();
        assert_eq!(hits, [false, true, true, false]);
        assert!(!faults.disarm(id), "it is spent");
        let id = faults.arm(fail());
        assert!(hit(&faults, IoType::Read) && faults.disarm(id) && !hit(&faults, IoType::Read));
    }

    #[test]
    fn chance_is_a_matter_of_the_seed() {
        let run = |seed| {
            let faults = Faults::new(seed);
            faults.arm(FaultRule { probability_percent: 30, ..fail() });
            (0..1000).map(|_| hit(&faults, IoType::Read)).collect::<Vec<bool>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
        let hits = run(7).into_iter().filter(|hit| *hit).count();
        assert!((200..400).contains(&hits), "{hits}");
    }
}
