// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where bytes live: files through io_uring or a thread pool.
//!
//! This crate has the runtime, and all `unsafe` code. Everything above it sees [`File`], [`IoBuf`] and the functions of [`rt`].

mod attempts;
mod blocklock;
pub mod buf;
mod cache;
pub mod confine;
mod counters;
mod data_cache;
mod direct;
mod event;
pub mod fault;
pub mod file;
mod file_systems;
mod flush;
mod folder;
mod fuse_device;
mod holder;
mod host;
mod identity;
#[cfg(test)]
mod kernel_faults;
pub mod lock;
mod medium;
mod names;
mod nbd_device;
mod null;
mod opening;
pub mod options;
mod payload;
mod question;
mod remote;
mod reopen;
mod ring;
pub mod rng;
pub mod rt;
mod shared;
pub mod signal;
mod signal_mask;
pub mod simulated;
pub mod socket;
mod stamp;
mod sys;
mod transfer;
mod ublk_device;
mod write_behind;

pub use buf::{IoBuf, SCRATCH_POISON, fill_no_scratch_buffers};
pub use counters::{EndedOp, FileObserver, FileOp, FileOpStats, FileStats, ShardedCounters};
pub use event::{EventCounter, Interruption};
pub use file::File;
pub use folder::{EntryKind, EntryStatus, Folder};
pub use fuse_device::{FUSE_DEVICE, FuseDevice, ServedMount, block_signals, is_served_here, mounted_device};
pub use identity::FileIdentity;
pub use lock::{Locking, PermissionSet, Permissions};
pub use names::{path_of_text, sync_folder_of, text_of_path};
pub use nbd_device::{NbdCall, NbdControl, NbdDevice};
pub use opening::{Opening, note_writable, only_opens};
pub use options::{
    Alignment, CacheMode, DataRange, DeviceQueue, IoEngine, LayoutHints, NullOptions, OpenOptions, TransferSizes,
};
pub use question::answer_within;
pub use remote::{Remote, RemoteFuture};
pub use shared::{MappingBudget, SharedBufs, SharedMemory};
pub use signal_mask::{SignalMask, spawn_apart};
pub use socket::{
    Dispatch, HangUp, KeepAlive, ListenOptions, Listener, PassedFiles, Socket, SocketAddress, Want, connect_unix,
};
pub use ublk_device::{
    UBLK_CONTROL, UblkCall, UblkChar, UblkCharQueue, UblkControl, UblkDevice, UblkDriver, UblkQueue, UblkShape,
    UblkTarget,
};
