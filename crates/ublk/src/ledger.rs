// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether the kernel heard of the end of changes that die with this process.
//!
//! A flush promises that all changes are durable whose end was reported before. A process that was killed has taken
//! mappings along that only its memory had. The next one must not answer a flush as if they were there. Each user of the
//! device learns it from a flush of its own, so all flushes fail until the device is made anew. A file in a
//! folder of memory notes that: it lives as long as the device does.

use cowshed_storage::signal::lock;
use rustix::fs::{FileType, Mode, OFlags};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const CLEAN: u8 = b'-';
const UNFLUSHED: u8 = b'u';

/// The changes of a device.
#[derive(Debug)]
pub(crate) struct DeviceLedger {
    path: PathBuf,
    state: Mutex<LedgerState>,
}

#[derive(Debug, Default)]
struct LedgerState {
    /// `None`: there is no file, and the next server takes changes for lost.
    note: Option<File>,
    is_marked: bool,
    /// Changes that ended.
    changes: u64,
    /// Changes of an earlier life are lost: no flush succeeds.
    is_lost: bool,
}

impl LedgerState {
    fn write(&mut self) {
        let byte = if self.is_marked || self.is_lost { UNFLUSHED } else { CLEAN };
        if let Some(note) = &self.note
            && let Err(error) = note.write_all_at(&[byte], 0)
        {
            tracing::warn!(%error, "could not note whether changes are flushed");
            self.note = None;
        }
    }
}

/// The path of a device's note.
fn path_of(folder: &Path, device: u32) -> PathBuf {
    folder.join(format!("cowshed-ublk-{device}"))
}

/// Opens a note, which must be this user's own file: others may write to the folder.
fn open(path: &Path, flags: OFlags) -> Option<File> {
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).ok()?;
    let status = rustix::fs::fstat(&fd).ok()?;
    let is_file = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
    (is_file && status.st_uid == rustix::process::geteuid().as_raw()).then(|| File::from(fd))
}

impl DeviceLedger {
    /// The ledger of a new device.
    pub fn begin(folder: &Path, device: u32) -> DeviceLedger {
        let path = path_of(folder, device);
        let note = open(&path, OFlags::CREATE);
        if note.is_none() {
            tracing::warn!(
                path = %path.display(),
                "no note can be kept there: after a takeover of the device all flushes will fail"
            );
        }
        let mut state = LedgerState { note, ..LedgerState::default() };
        state.write();
        DeviceLedger { path, state: Mutex::new(state) }
    }

    /// The ledger of a device whose server has died. Without a note of that one its changes count as lost.
    pub fn take_up(folder: &Path, device: u32) -> DeviceLedger {
        let path = path_of(folder, device);
        let note = open(&path, OFlags::empty());
        let mut byte = [UNFLUSHED];
        let is_read = note.as_ref().is_some_and(|note| note.read_exact_at(&mut byte, 0).is_ok());
        let is_lost = !is_read || byte != [CLEAN];
        let note = note.or_else(|| open(&path, OFlags::CREATE));
        let mut state = LedgerState { note, is_lost, ..LedgerState::default() };
        state.write();
        DeviceLedger { path, state: Mutex::new(state) }
    }

    /// The device is gone.
    pub fn end(&self) {
        if lock(&self.state).note.take().is_some()
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::debug!(%error, "the note of a device was gone already");
        }
    }

    /// A change has ended and the kernel hears of it next. `dies` is true if it dies with this process.
    pub fn note_change(&self, dies: impl FnOnce() -> bool) {
        let mut state = lock(&self.state);
        state.changes += 1;
        if !state.is_marked && dies() {
            state.is_marked = true;
            state.write();
        }
    }

    /// The state that [`DeviceLedger::end_flush`] needs from the beginning of a flush.
    pub fn begin_flush(&self) -> u64 {
        lock(&self.state).changes
    }

    /// A flush has made all changes durable that had ended when it began.
    pub fn end_flush(&self, began: u64) {
        let mut state = lock(&self.state);
        if state.is_marked && state.changes == began {
            state.is_marked = false;
            state.write();
        }
    }

    /// Changes of an earlier life are lost: nothing may be promised.
    pub fn is_lost(&self) -> bool {
        lock(&self.state).is_lost
    }
}
