// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The table of drivers that opening reads. The crate above the formats makes it and hands it in; no module here names its lines.

use super::file_names::{FileNames, WithoutWord};
use super::line::DriverLine;
use super::{HostFiles, OpenRequest, build, names};
use crate::graph::Graph;
use crate::node::Node;
use crate::options::{BlockdevOptions, DriverKind, DriverSchema, Schemas};
use cowshed_layout::probe::FormatName;
use cowshed_storage::{Opening, note_writable};
use cowshed_types::Result;
use std::any::Any;
use std::sync::Arc;

/// The drivers of a program.
pub struct Drivers {
    groups: &'static [&'static [DriverLine]],
    refused: &'static [(FormatName, &'static str)],
}

impl Drivers {
    /// A table of drivers, in groups, in the order of the help. `refused`: formats that are recognised for a clear
    /// refusal, with their names in messages.
    pub const fn new(
        groups: &'static [&'static [DriverLine]],
        refused: &'static [(FormatName, &'static str)],
    ) -> Drivers {
        Drivers { groups, refused }
    }

    /// The table that a graph was made with.
    pub(crate) fn of(graph: &Graph) -> &'static Drivers {
        let schemas: &'static dyn Any = graph.schemas();
        schemas.downcast_ref().unwrap_or_else(|| unreachable!("`Graph::new` takes a table of drivers"))
    }

    fn lines(&self) -> impl Iterator<Item = &'static DriverLine> {
        self.groups.iter().flat_map(|group| group.iter())
    }

    /// The driver with this name.
    pub(super) fn find(&self, name: &str) -> Option<&'static DriverLine> {
        self.lines().find(|line| line.schema.name == name)
    }

    /// The driver that reads a file name by itself, with its names.
    pub(super) fn reading(&self, name: &str) -> Option<(&'static DriverLine, &'static FileNames)> {
        let mut named = self.lines().filter_map(|line| line.names.as_ref().map(|names| (line, names)));
        named.find(|(_, names)| names.claims(name))
    }

    /// The file names of the driver with this name.
    pub(super) fn names_of(&self, driver: &str) -> Option<&'static FileNames> {
        self.find(driver)?.names.as_ref()
    }

    /// True for a driver whose nodes are the files of paths.
    pub fn takes_paths(&self, driver: &str) -> bool {
        self.names_of(driver).is_some_and(|names| matches!(names.without_word, WithoutWord::Path))
    }

    /// True for a format without metadata: its disk is the bytes of its file.
    pub fn is_raw(&self, driver: &str) -> bool {
        self.find(driver).is_some_and(DriverLine::is_raw)
    }

    /// True for a driver whose nodes have the name of their disk.
    pub(super) fn has_name_of_disk(&self, driver: &str) -> bool {
        self.find(driver).is_some_and(|line| line.has_name_of_disk)
    }

    /// Refuses a name that no driver would open again as a file: one with a colon before any slash.
    pub fn check_file_name(&self, name: &str) -> Result<()> {
        names::check_file_name(self, name)
    }

    /// The reason why a recognised format can't be opened.
    pub(super) fn refused(&self, name: &str) -> Option<&'static str> {
        self.refused.iter().find(|(format, _)| format.as_str() == name).map(|(_, about)| *about)
    }

    /// The keys of all drivers, in the order of the help.
    pub fn schemas(&self) -> impl Iterator<Item = &'static DriverSchema> {
        self.lines().map(|line| line.schema)
    }

    /// The keys of the driver with this name.
    pub fn schema(&self, name: &str) -> Option<&'static DriverSchema> {
        self.find(name).map(|line| line.schema)
    }

    /// True for the formats here, and for those that are known by name alone.
    pub fn is_format(&self, name: &str) -> bool {
        self.schema(name).is_some_and(|schema| schema.kind == DriverKind::Format) || self.refused(name).is_some()
    }

    /// True for the protocols here.
    pub fn is_protocol(&self, name: &str) -> bool {
        self.schema(name).is_some_and(|schema| schema.kind == DriverKind::Protocol)
    }

    /// True for the drivers here, and for formats that are known by name alone. Also true for drivers of QEMU that an
    /// image may name for its backing file.
    pub fn is_known(&self, name: &str) -> bool {
        self.schema(name).is_some() || self.refused(name).is_some() || ["nvme", "replication"].contains(&name)
    }

    /// As [`Drivers::is_known`], also for the names of QEMU's schema whose drivers a build may lack.
    pub fn is_name(&self, name: &str) -> bool {
        const NAMES: [&str; 15] = [
            "blkreplay",
            "ftp",
            "ftps",
            "http",
            "https",
            "io_uring",
            "iscsi",
            "nfs",
            "nvme-io_uring",
            "rbd",
            "ssh",
            "virtio-blk-vfio-pci",
            "virtio-blk-vhost-user",
            "virtio-blk-vhost-vdpa",
            "vvfat",
        ];
        self.is_known(name) || NAMES.contains(&name)
    }

    /// The option tree that a file name means, with a format if it is given: to add options to before opening.
    pub fn options_of_name(&self, name: &str, format: Option<&str>) -> Result<BlockdevOptions> {
        build::named(self, name, format, &HostFiles)
    }

    /// Options of a node with a file name beside them, as `open -o OPTIONS NAME` of qemu-io takes them. The name, and
    /// the meaning of its protocol, belong to the lowest `file` of the options. Options that are given count more than
    /// the name's.
    pub fn options_with_name(&self, options: BlockdevOptions, name: &str) -> Result<BlockdevOptions> {
        names::options_with_name(self, options, name)
    }

    /// Opens an image with its whole chain, takes the locks, and returns its top node. A request without a graph gets one of its
    /// own, with these drivers.
    pub async fn open(&'static self, request: OpenRequest) -> Result<Arc<Node>> {
        let _opening = Opening::begin();
        let is_writable = request.is_writable();
        let opened = build::open(self, request).await;
        if is_writable && opened.is_ok() {
            note_writable();
        }
        opened
    }
}

impl Schemas for Drivers {
    fn schema(&self, name: &str) -> Option<&'static DriverSchema> {
        Drivers::schema(self, name)
    }

    fn stays_read_only(&self, name: &str) -> bool {
        self.find(name).is_some_and(|line| line.stays_read_only)
    }

    fn reopens(&self, name: &str) -> bool {
        self.find(name).is_some_and(|line| line.reopens)
    }
}
