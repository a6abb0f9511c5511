// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports: disks under a name.

use crate::Disk;
use cowshed_nbd_proto::MAX_STRING_BYTES;
use cowshed_nbd_proto::option::BlockSizes;
use cowshed_types::{Error, Result};

/// A disk, and how it is shown to clients.
#[derive(Debug)]
pub struct Export<D> {
    /// The name by which clients choose it: any text without NUL, at most 4,096 bytes. "" is the export of a client
    /// that names none.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// The served disk.
    pub disk: D,
    /// Clients may write. Without it the export is read-only whatever the disk allows.
    pub writable: bool,
    /// Each change is durable before it is answered, as if clients asked for it (FUA).
    pub writethrough: bool,
    /// Clients that give no name get this one, if none is named "".
    pub is_default: bool,
    /// Another name that finds it, if none is named so.
    pub alias: Option<String>,
    /// Several connections of one client see one disk: a flush of one covers the writes of all. True for every disk of
    /// ours, also when it is written to; false forbids clients to rely on it.
    pub multi_conn: bool,
    /// The context `qemu:allocation-depth` is offered.
    pub allocation_depth: bool,
    /// Names of dirty bitmaps whose contexts are offered.
    pub bitmaps: Vec<String>,
    /// Advertised and enforced, in bytes.
    pub block_sizes: BlockSizes,
    /// The block in which the disk itself works, in bytes. A client that asks for block sizes is told it as the smallest one, where
    /// the disk is made of such blocks. Requests of other ranges are carried out.
    pub unit_bytes: u32,
}

impl<D: Disk> Export<D> {
    /// A read-only export with the defaults.
    pub fn new(name: impl Into<String>, disk: D) -> Export<D> {
        Export {
            name: name.into(),
            description: String::new(),
            disk,
            writable: false,
            writethrough: false,
            is_default: false,
            alias: None,
            multi_conn: true,
            allocation_depth: false,
            bitmaps: Vec::new(),
            block_sizes: BlockSizes::UNSAID,
            unit_bytes: 1,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let name = &self.name;
        let is_string = |text: &str| text.len() <= MAX_STRING_BYTES && !text.contains('\0');
        if name.len() > MAX_STRING_BYTES {
            return Err(Error::invalid_argument(format!("export name '{name}' too long")));
        }
        if self.description.len() > MAX_STRING_BYTES {
            return Err(Error::invalid_argument(format!("description '{}' too long", self.description)));
        }
        if !is_string(name) || !is_string(&self.description) {
            let message = "the name and the description of an export have no NUL and at most 4096 bytes";
            return Err(Error::invalid_argument(message));
        }
        if self.writable && self.disk.is_read_only() {
            return Err(Error::invalid_argument(format!("export '{name}' can't be writable, its disk is read-only")));
        }
        self.block_sizes.check().map_err(|error| Error::invalid_argument(format!("export '{name}': {error}")))?;
        if !self.disk.size().is_multiple_of(self.block_sizes.minimum.into()) {
            let message = format!("the size of export '{name}' is no multiple of its smallest block");
            return Err(Error::invalid_argument(message).value(self.disk.size()));
        }
        Ok(())
    }

    pub(crate) fn is_read_only(&self) -> bool {
        !self.writable
    }
}

/// The way of removing an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Removal {
    /// Only when no client uses it; an error otherwise.
    #[default]
    Safe,
    /// Its clients are disconnected, after the replies to their requests; they have 5 seconds to take them.
    Hard,
}

/// An export as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its name.
    pub name: String,
    /// Its description for a user; may be empty.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// Clients may write.
    pub writable: bool,
    /// Number of connections that use it.
    pub clients: usize,
    /// It is being removed.
    pub shutting_down: bool,
}
