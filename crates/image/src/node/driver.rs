// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The drivers behind a node: static dispatch over one enum.

use crate::filters::{Filter, Replicas, SnapshotAccess};
use crate::formats::luks::LuksDriver;
use crate::formats::mapped::MappedDriver;
use crate::formats::qcow2::Qcow2Driver;
use crate::formats::raw::RawDriver;
use cowshed_block::Result;
use cowshed_storage::File;
use std::future::Future;
use std::pin::Pin;

/// A boxed future that stays on its thread: breaks the recursion of nodes over nodes.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// After so many nodes below one another a request goes on as a task of its own: polling recurses from node to node,
/// and a chain of 200 images would need more stack than a thread has.
pub(crate) const NESTED_POLLS: u32 = 8;

/// A protocol node: bytes in a [`File`].
#[derive(Debug)]
pub(crate) struct FileDriver {
    pub name: &'static str,
    pub file: File,
    /// For `null-co`: whether reads are promised to give zeroes.
    pub null_reads_zeroes: Option<bool>,
    /// What a map shows in place of where data is.
    pub context: Option<ForeignContext>,
}

/// A metadata context of an NBD server that the user named (`x-dirty-bitmap`).
#[derive(Debug)]
pub(crate) struct ForeignContext {
    pub client: std::sync::Arc<cowshed_nbd::Client>,
    /// It tells depths, and not bits.
    pub has_depths: bool,
}

pub(crate) enum Driver {
    File(FileDriver),
    Raw(RawDriver),
    Qcow2(Box<Qcow2Driver>),
    Luks(Box<LuksDriver>),
    /// Every format that is only read.
    Mapped(MappedDriver),
    Filter(Filter),
    /// What a copy-before-write filter keeps.
    Snapshot(SnapshotAccess),
    /// One disk in several nodes.
    Replicas(Box<Replicas>),
}

/// Virtual disks are counted in sectors: a file with an odd tail is shown rounded up, its tail reads as zeroes.
const SECTOR_BYTES: u64 = 512;

/// The length of a file rounded up to whole sectors; `u64::MAX` when that can't be.
pub(crate) fn whole_sectors(len: u64) -> u64 {
    len.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(u64::MAX)
}

impl Driver {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Driver::File(file) => file.name,
            Driver::Raw(_) => "raw",
            Driver::Qcow2(_) => "qcow2",
            Driver::Luks(_) => "luks",
            Driver::Mapped(mapped) => mapped.name(),
            Driver::Filter(filter) => filter.name(),
            Driver::Snapshot(_) => "snapshot-access",
            Driver::Replicas(replicas) => replicas.name(),
        }
    }

    /// Size of the node in bytes.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Driver::File(file) => whole_sectors(file.file.len()),
            Driver::Raw(raw) => raw.size(),
            Driver::Qcow2(qcow2) => qcow2.size(),
            Driver::Luks(luks) => luks.size(),
            Driver::Mapped(mapped) => mapped.size(),
            Driver::Filter(filter) => filter.size(),
            Driver::Snapshot(snapshot) => snapshot.size(),
            Driver::Replicas(replicas) => replicas.size(),
        }
    }

    /// The file, if the node's bytes are that file's bytes one to one.
    pub(crate) fn whole_file(&self) -> Option<&File> {
        match self {
            Driver::File(file) => Some(&file.file),
            Driver::Raw(raw) => raw.whole_file(),
            _ => None,
        }
    }

    pub(crate) async fn close(&self, read_only: bool) -> Result<()> {
        match self {
            Driver::Qcow2(qcow2) => qcow2.close().await,
            Driver::File(file) => {
                let synced = if read_only { Ok(()) } else { file.file.sync().await };
                // Whoever still holds the node keeps the file open, but not its locks.
                synced.and(file.file.unlock())
            }
            Driver::Filter(Filter::Throttle(throttle)) => {
                throttle.leave();
                Ok(())
            }
            Driver::Filter(Filter::CopyBeforeWrite(copy)) => {
                copy.idle().await;
                Ok(())
            }
            Driver::Filter(Filter::CopyOnRead(copy)) => {
                copy.idle().await;
                Ok(())
            }
            Driver::Filter(Filter::Preallocate(ahead)) if !read_only => ahead.trim().await,
            Driver::Filter(Filter::LogWrites(log)) if !read_only => log.flush().await,
            Driver::Luks(_) if read_only => Ok(()),
            Driver::Luks(luks) => luks.flush().await,
            Driver::Raw(_) | Driver::Mapped(_) | Driver::Filter(_) | Driver::Snapshot(_) | Driver::Replicas(_) => {
                Ok(())
            }
        }
    }
}
