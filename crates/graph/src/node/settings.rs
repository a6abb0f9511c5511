// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The generic settings of a node; some of them change while it is in use, always when no request runs.

use super::{DetectZeroes, LockSource, NodeSettings};
use crate::options::BlockdevOptions;
use cowshed_types::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// [`NodeSettings`] as a running node has them.
#[derive(Debug)]
pub(crate) struct LiveSettings {
    read_only: AtomicBool,
    /// The word of an option on that, as [`code_of`] has it. Only a reopen of this node changes it, no node above.
    said_read_only: AtomicU8,
    /// It took writes until a snapshot made it read-only. This stays while jobs have it take writes again.
    below_snapshot: AtomicBool,
    discard: AtomicBool,
    detect_zeroes: AtomicU8,
    writethrough: bool,
    probed_raw: bool,
    no_data: bool,
    locks: LockSource,
}

impl LiveSettings {
    pub(crate) fn new(settings: NodeSettings) -> LiveSettings {
        let live = LiveSettings {
            read_only: AtomicBool::new(settings.read_only),
            said_read_only: AtomicU8::new(code_of(settings.said_read_only)),
            below_snapshot: AtomicBool::new(false),
            discard: AtomicBool::new(settings.discard),
            detect_zeroes: AtomicU8::new(0),
            writethrough: settings.writethrough,
            probed_raw: settings.probed_raw,
            no_data: settings.no_data,
            locks: settings.locks,
        };
        live.set_detect_zeroes(settings.detect_zeroes);
        live
    }

    #[inline]
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    pub(crate) fn set_read_only(&self, read_only: bool) {
        self.read_only.store(read_only, Ordering::Release);
        super::edge::note_graph_change();
    }

    pub(crate) fn said_read_only(&self) -> Option<bool> {
        match self.said_read_only.load(Ordering::Relaxed) {
            0 => None,
            code => Some(code == code_of(Some(true))),
        }
    }

    pub(crate) fn set_said_read_only(&self, said: Option<bool>) {
        self.said_read_only.store(code_of(said), Ordering::Release);
    }

    pub(crate) fn is_below_snapshot(&self) -> bool {
        self.below_snapshot.load(Ordering::Relaxed)
    }

    pub(crate) fn set_below_snapshot(&self, below: bool) {
        self.below_snapshot.store(below, Ordering::Release);
    }

    #[inline]
    pub(crate) fn has_no_data(&self) -> bool {
        self.no_data
    }

    #[inline]
    pub(crate) fn discards(&self) -> bool {
        self.discard.load(Ordering::Relaxed)
    }

    pub(crate) fn set_discards(&self, discards: bool) {
        self.discard.store(discards, Ordering::Release);
    }

    #[inline]
    pub(crate) fn detect_zeroes(&self) -> DetectZeroes {
        match self.detect_zeroes.load(Ordering::Relaxed) {
            0 => DetectZeroes::Off,
            1 => DetectZeroes::On,
            _ => DetectZeroes::Unmap,
        }
    }

    pub(crate) fn set_detect_zeroes(&self, detect: DetectZeroes) {
        let code = match detect {
            DetectZeroes::Off => 0,
            DetectZeroes::On => 1,
            DetectZeroes::Unmap => 2,
        };
        self.detect_zeroes.store(code, Ordering::Release);
    }

    #[inline]
    pub(crate) fn is_writethrough(&self) -> bool {
        self.writethrough
    }

    pub(crate) fn locks(&self) -> LockSource {
        self.locks
    }

    #[inline]
    pub(crate) fn is_probed_raw(&self) -> bool {
        self.probed_raw
    }
}

/// An option that may be left out, as a number.
fn code_of(said: Option<bool>) -> u8 {
    match said {
        None => 0,
        Some(false) => 1,
        Some(true) => 2,
    }
}

/// The treatment of zeroes in a node that passes discards on (`discard`) or not. `path` is for messages.
pub(crate) fn detect_zeroes(options: &BlockdevOptions, discard: bool, path: &str) -> Result<DetectZeroes> {
    match options.text("detect-zeroes") {
        Some("on") => Ok(DetectZeroes::On),
        Some("unmap") if !discard => {
            let message = format!("'{path}detect-zeroes=unmap' needs '{path}discard=unmap'");
            let sentence = "setting detect-zeroes to unmap is not allowed without setting discard operation to unmap";
            Err(Error::invalid_argument(message).qemu(sentence))
        }
        Some("unmap") => Ok(DetectZeroes::Unmap),
        _ => Ok(DetectZeroes::Off),
    }
}
