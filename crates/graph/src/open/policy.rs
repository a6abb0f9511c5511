// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The gate: which files may be opened on whose word, and how a file is opened at all.

use super::Drivers;
use super::build::without_format;
use super::children::names_rules;
use super::line::Mention;
use crate::options::schemas::COPY_ON_READ;
use cowshed_layout::qcow2::Header;
use cowshed_storage::{File, OpenOptions};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// The rights that an image has on this process. A name from the user is always opened; this is about names from
/// images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Open the backing file that an image names.
    pub allow_backing: bool,
    /// Open the external data file that an image names.
    pub allow_data_file: bool,
    /// Take `json:{…}` as a name in an image: it can name any driver and any file.
    pub allow_json: bool,
    /// Open the files that an image names as parts of its disk (the extents of a VMDK descriptor).
    pub allow_extents: bool,
    /// Follow symbolic links out of the folder of an image whose parts lie in files of their own.
    pub allow_extent_links: bool,
    /// Guess the format of a backing file whose overlay doesn't name it. The guess is reported as a warning.
    pub allow_backing_probe: bool,
    /// The most layers of a chain, the top one included.
    pub max_chain_depth: u32,
    /// Largest virtual size of a layer, in bytes.
    pub max_virtual_size_bytes: u64,
    /// Largest table of a layer that is read whole (L1, refcount table, bitmap directory), in bytes. Formats have limits of
    /// their own besides.
    pub max_table_bytes: u64,
    /// The most internal snapshots of a layer.
    pub max_snapshots: u32,
    /// This much may come out of compressed clusters of a layer while it is open, in bytes, whole clusters each time.
    pub max_decompressed_bytes: u64,
    /// The time for which the image may be used, from its opening on; later requests fail. A request that runs already
    /// isn't cut off.
    pub time_limit: Option<Duration>,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            allow_backing: true,
            allow_data_file: true,
            allow_json: true,
            allow_extents: true,
            allow_extent_links: true,
            allow_backing_probe: true,
            max_chain_depth: 200,
            max_virtual_size_bytes: u64::MAX,
            max_table_bytes: u64::MAX,
            max_snapshots: u32::MAX,
            max_decompressed_bytes: u64::MAX,
            time_limit: None,
        }
    }
}

impl Policy {
    /// For images from strangers: the file that the user named and nothing else, and nothing of extraordinary size: 16
    /// layers, a disk of 16 TiB, tables of 4 MiB, 256 snapshots, 1 TiB of decompressed data.
    pub fn untrusted() -> Policy {
        Policy {
            allow_backing: false,
            allow_data_file: false,
            allow_json: false,
            allow_extents: false,
            allow_extent_links: false,
            allow_backing_probe: false,
            max_chain_depth: 16,
            max_virtual_size_bytes: 16 << 40,
            max_table_bytes: 4 << 20,
            max_snapshots: 256,
            max_decompressed_bytes: 1 << 40,
            time_limit: None,
        }
    }

    /// Whether a qcow2 image with this header is within the limits.
    pub fn check_header(&self, header: &Header) -> Result<()> {
        let bitmaps = header.bitmaps().map_or(0, |bitmaps| bitmaps.directory_size);
        let refcount_table = u64::from(header.refcount_table_clusters).saturating_mul(header.cluster_size());
        for (field, value, limit) in [
            ("size", header.size, self.max_virtual_size_bytes),
            ("l1_size", u64::from(header.l1_size) * 8, self.max_table_bytes),
            ("refcount_table_clusters", refcount_table, self.max_table_bytes),
            ("bitmap_directory_size", bitmaps, self.max_table_bytes),
            ("nb_snapshots", u64::from(header.nb_snapshots), u64::from(self.max_snapshots)),
        ] {
            self.check_limit(field, value, limit)?;
        }
        Ok(())
    }

    /// Whether a disk may have this size in bytes, for formats other than qcow2.
    pub fn check_size(&self, bytes: u64) -> Result<()> {
        self.check_limit("size", bytes, self.max_virtual_size_bytes)
    }

    /// Whether a table that is read whole may have this length in bytes, for formats other than qcow2.
    pub fn check_table(&self, field: &'static str, bytes: u64) -> Result<()> {
        self.check_limit(field, bytes, self.max_table_bytes)
    }

    fn check_limit(&self, field: &'static str, value: u64, limit: u64) -> Result<()> {
        if value <= limit {
            return Ok(());
        }
        let message = format!("larger than the policy for this image allows, {limit}");
        Err(Error::new(ErrorKind::Limit, message).field(field).value(value))
    }

    /// Whether the backing file `name` of `image` may be opened: for callers that follow a chain by themselves.
    pub fn check_backing(&self, drivers: &Drivers, name: &str, image: &str) -> Result<()> {
        self.check(self.allow_backing, "the backing file", name, image)?;
        self.check(self.allow_json || !name.starts_with("json:"), "a file by", name, image)?;
        self.check(!names_rules(name), "rules by", name, image)?;
        // A name that means nothing is an error of its own where it is opened.
        match without_format(drivers, name, &HostFiles) {
            Ok(options) => self.check_drivers(drivers, &options.into(), name, image),
            Err(_) => Ok(()),
        }
    }

    /// Refuses drivers that no image needs, whatever else is allowed ([`Mention`]).
    pub(crate) fn check_drivers(&self, drivers: &Drivers, options: &Value, name: &str, image: &str) -> Result<()> {
        for driver in drivers_in(options) {
            if driver == COPY_ON_READ.name && says_writable(options) {
                self.check(false, "a file that is written to by", name, image)?;
            }
            match drivers.find(driver).map(|line| line.mention) {
                Some(Mention::Never(words)) => self.check(false, words, name, image)?,
                // All files there are parts of the disk.
                Some(Mention::AsExtent(words)) => self.check(self.allow_extents, words, name, image)?,
                Some(Mention::AsFile) | None => {}
            }
        }
        Ok(())
    }

    pub(crate) fn check(&self, allowed: bool, what: &str, name: &str, image: &str) -> Result<()> {
        if allowed {
            return Ok(());
        }
        let message = format!("the image names {what} '{name}', which the policy for this image doesn't allow");
        Err(Error::new(ErrorKind::PermissionDenied, message).file(image))
    }
}

/// True when a node of an option tree is open for writing whatever the node above is.
fn says_writable(options: &Value) -> bool {
    match options {
        Value::Object(map) => map.iter().any(|(key, value)| match key.as_str() {
            "read-only" => *value == Value::Bool(false) || ["off", "no", "n", "false"].iter().any(|word| value == word),
            _ => says_writable(value),
        }),
        Value::Array(nodes) => nodes.iter().any(says_writable),
        _ => false,
    }
}

/// The drivers that an option tree names.
fn drivers_in(options: &Value) -> Vec<&str> {
    match options {
        Value::Object(map) => map
            .iter()
            .flat_map(|(key, value)| match value {
                Value::String(driver) if key == "driver" => vec![driver.as_str()],
                nested => drivers_in(nested),
            })
            .collect(),
        Value::Array(nodes) => nodes.iter().flat_map(drivers_in).collect(),
        _ => Vec::new(),
    }
}

/// The kind of file that a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
    /// A character device.
    CharacterDevice,
    /// A folder.
    Folder,
    /// A socket.
    Socket,
    /// A pipe.
    Other,
}

impl FileKind {
    /// True of block and character devices.
    pub fn is_device(self) -> bool {
        matches!(self, FileKind::BlockDevice | FileKind::CharacterDevice)
    }
}

/// Where protocol nodes get their files from. The simulator and later remote storage put themselves here.
pub trait Files: Send + Sync {
    /// Opens `path`.
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<File>;
    /// The kind of file at `path`; `None` if unknown, or if nothing is there.
    fn kind(&self, path: &Path) -> Option<FileKind>;
}

/// The files of this machine (in a simulation, of that one).
#[derive(Clone, Copy, Debug, Default)]
pub struct HostFiles;

impl Files for HostFiles {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<File> {
        File::open(path, options)
    }

    fn kind(&self, path: &Path) -> Option<FileKind> {
        use std::os::unix::fs::FileTypeExt;
        let file_type = std::fs::metadata(path).ok()?.file_type();
        Some(if file_type.is_file() {
            FileKind::Regular
        } else if file_type.is_block_device() {
            FileKind::BlockDevice
        } else if file_type.is_char_device() {
            FileKind::CharacterDevice
        } else if file_type.is_dir() {
            FileKind::Folder
        } else if file_type.is_socket() {
            FileKind::Socket
        } else {
            FileKind::Other
        })
    }
}

impl fmt::Debug for dyn Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Files")
    }
}
