// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A layer between this crate and the kernel, for tests. It replaces results of system calls and of operations on a
//! ring, makes transfers short, and refuses `io_uring_enter`.

use crate::payload::MAX_TRANSFER;
use crate::rng::Rng;
use io_uring::{opcode, squeue};
use std::cell::Cell;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// A call of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    Read,
    Write,
    Sync,
    Allocate,
    Receive,
    Send,
    Poll,
}

/// By which way it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum IoPath {
    Ring,
    Thread,
}

/// The effect of a faulty kernel call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It does nothing, and returns this errno.
    Fail(i32),
    /// It moves at most this many bytes.
    Short(usize),
}

enum Plan {
    /// The effects of calls, and how often.
    Script(Vec<(IoPath, Call, Effect, u32)>),
    /// In this many of a hundred calls one of these effects, by chance.
    Weather(Rng, u64, Vec<(IoPath, Effect)>),
}

struct Faulty {
    plan: Plan,
    calls: HashMap<(IoPath, Call), u32>,
    hits: u32,
}

static FILES: LazyLock<Mutex<HashMap<RawFd, Faulty>>> = LazyLock::new(Mutex::default);

fn files() -> MutexGuard<'static, HashMap<RawFd, Faulty>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The faults of one descriptor, until this is dropped. The descriptor stays open for as long.
pub(crate) struct KernelFaults(RawFd);

impl KernelFaults {
    fn new(file: impl AsFd, plan: Plan) -> Self {
        let fd = file.as_fd().as_raw_fd();
        let before = files().insert(fd, Faulty { plan, calls: HashMap::new(), hits: 0 });
        assert!(before.is_none(), "descriptor {fd} has faults already");
        KernelFaults(fd)
    }

    /// Each entry has its number of uses; the first that fits is used first.
    pub(crate) fn script(file: impl AsFd, script: Vec<(IoPath, Call, Effect, u32)>) -> Self {
        Self::new(file, Plan::Script(script))
    }

    /// In `percent` of all calls one of the effects.
    pub(crate) fn random_faults(file: impl AsFd, seed: u64, percent: u64, effects: Vec<(IoPath, Effect)>) -> Self {
        Self::new(file, Plan::Weather(Rng::new(seed), percent, effects))
    }

    /// The number of faults so far.
    pub(crate) fn hits(&self) -> u32 {
        files()[&self.0].hits
    }

    /// The number of calls to the kernel.
    pub(crate) fn calls(&self, way: IoPath, call: Call) -> u32 {
        files()[&self.0].calls.get(&(way, call)).copied().unwrap_or(0)
    }
}

impl Drop for KernelFaults {
    fn drop(&mut self) {
        files().remove(&self.0);
    }
}

/// The effect on this call.
pub(crate) fn next(file: impl AsFd, way: IoPath, call: Call) -> Option<Effect> {
    let mut files = files();
    let faulty = files.get_mut(&file.as_fd().as_raw_fd())?;
    *faulty.calls.entry((way, call)).or_default() += 1;
    let effect = match &mut faulty.plan {
        Plan::Script(script) => {
            let found = script.iter_mut().find(|(when, what, _, left)| (*when, *what) == (way, call) && *left > 0)?;
            found.3 = found.3.saturating_sub(u32::from(found.3 != u32::MAX));
            found.2
        }
        Plan::Weather(rng, percent, effects) => {
            if rng.below(100) >= *percent {
                return None;
            }
            let (when, effect) = effects[rng.below(effects.len() as u64) as usize];
            // Only transfers can be short.
            let fits = matches!(effect, Effect::Fail(_)) || matches!(call, Call::Read | Call::Write);
            (when == way && fits).then_some(effect)?
        }
    };
    faulty.hits += 1;
    Some(effect)
}

/// As [`next`] for a system call: its error, or the most bytes that it moves.
pub(crate) fn of_system_call(file: impl AsFd, call: Call) -> Result<usize, i32> {
    match next(file, IoPath::Thread, call) {
        Some(Effect::Fail(errno)) => Err(errno),
        Some(Effect::Short(most)) => Ok(most),
        None => Ok(MAX_TRANSFER),
    }
}

/// As [`next`] for an entry of a ring: the entry to submit, and the result for its completion.
pub(crate) fn of_entry(
    file: impl AsFd,
    entry: squeue::Entry,
    vectors: &mut Vec<libc::iovec>,
) -> (squeue::Entry, Option<i32>) {
    let code = entry.get_opcode() as u8;
    let call = match code {
        opcode::Read::CODE | opcode::Readv::CODE => Call::Read,
        opcode::Write::CODE | opcode::Writev::CODE => Call::Write,
        opcode::Fsync::CODE => Call::Sync,
        opcode::Fallocate::CODE => Call::Allocate,
        opcode::Recv::CODE => Call::Receive,
        opcode::SendMsg::CODE => Call::Send,
        opcode::PollAdd::CODE => Call::Poll,
        _ => return (entry, None),
    };
    match next(file, IoPath::Ring, call) {
        None => (entry, None),
        Some(Effect::Fail(errno)) => (opcode::Nop::new().build(), Some(-errno)),
        Some(Effect::Short(most)) if vectors.is_empty() => (with_len(entry, |len| len.min(most as u32)), None),
        Some(Effect::Short(mut most)) => {
            for vector in vectors.iter_mut() {
                vector.iov_len = vector.iov_len.min(most);
                most -= vector.iov_len;
            }
            vectors.retain(|vector| vector.iov_len > 0);
            (with_len(entry, |_| vectors.len() as u32), None)
        }
    }
}

/// The entry with another length: of memory in bytes, or of its list of vectors.
fn with_len(entry: squeue::Entry, change: impl FnOnce(u32) -> u32) -> squeue::Entry {
    /// Where `struct io_uring_sqe` has `len`.
    const LEN: std::ops::Range<usize> = 24..28;
    // SAFETY: an entry is 64 bytes of plain numbers, which the size checked here is the one of.
    let mut bytes: [u8; 64] = unsafe { std::mem::transmute(entry) };
    let len = u32::from_ne_bytes(bytes[LEN].try_into().expect("four bytes"));
    bytes[LEN].copy_from_slice(&change(len).to_ne_bytes());
    // SAFETY: as above. Its pointers are as before, and its length is no greater.
    unsafe { std::mem::transmute::<[u8; 64], squeue::Entry>(bytes) }
}

thread_local! {
    /// The errno of `io_uring_enter` on this thread, and how many calls still get it.
    static REFUSAL: Cell<(i32, u64)> = const { Cell::new((0, 0)) };
    static REFUSED: Cell<u64> = const { Cell::new(0) };
}

/// The next `times` calls of `io_uring_enter` on this thread fail with `errno`.
pub(crate) fn refuse_enter(errno: i32, times: u64) {
    REFUSAL.set((errno, times));
}

/// The number of times that `io_uring_enter` was refused on this thread.
pub(crate) fn refused_enters() -> u64 {
    REFUSED.get()
}

/// The error that `io_uring_enter` is to return now, in place of the kernel's.
pub(crate) fn of_enter() -> Option<std::io::Error> {
    let (errno, left) = REFUSAL.get();
    if left == 0 {
        return None;
    }
    REFUSAL.set((errno, left - 1));
    REFUSED.set(REFUSED.get() + 1);
    Some(std::io::Error::from_raw_os_error(errno))
}
