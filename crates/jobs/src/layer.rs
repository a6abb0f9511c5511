// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Facts from the header of a qcow2 image, beyond those that every node has.

use cowshed_image::Node;
use cowshed_layout::luks::{self, LuksHeader};
use cowshed_layout::qcow2::bitmap::{BitmapEntry, parse_directory};
use cowshed_layout::qcow2::{Header, Snapshot, limits};
use cowshed_offline::snapshots;
use cowshed_storage::fault::as_metadata;
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};

/// A qcow2 image's header and the file it came from.
pub struct Qcow2Layer {
    /// The header.
    pub header: Header,
    /// The image file.
    pub file: File,
}

/// The header of `node`, `None` when it isn't qcow2.
pub fn qcow2_layer(node: &Node) -> Option<Qcow2Layer> {
    node.metadata().map(|metadata| Qcow2Layer { header: metadata.header(), file: metadata.file().clone() })
}

/// A format's units of allocation, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerGeometry {
    /// Cluster size.
    pub cluster_bytes: u64,
    /// A subcluster's size where the image has them, else a cluster's.
    pub allocation_unit_bytes: u64,
}

/// The geometry of `node`, `None` for formats without clusters.
pub fn geometry(node: &Node) -> Option<LayerGeometry> {
    let header = qcow2_layer(node)?.header;
    let cluster_bytes = header.cluster_size();
    let allocation_unit_bytes = if header.has_extended_l2() { cluster_bytes / 32 } else { cluster_bytes };
    Some(LayerGeometry { cluster_bytes, allocation_unit_bytes })
}

impl Qcow2Layer {
    /// The internal snapshots.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let listed = as_metadata(snapshots::list(&self.file, &self.header)).await;
        listed.map_err(|error| {
            let error = match error.kind() {
                ErrorKind::Io | ErrorKind::NoSpace => error.qemu("Failed to read snapshot table"),
                _ => error,
            };
            error.file(self.file.name())
        })
    }

    /// The persistent bitmaps; none when the extension doesn't count (its autoclear bit is not set).
    pub async fn bitmaps(&self) -> Result<Vec<BitmapEntry>> {
        let Some(extension) = self.header.bitmaps() else { return Ok(Vec::new()) };
        if self.header.autoclear_features & cowshed_layout::qcow2::features::AUTOCLEAR_BITMAPS == 0 {
            return Ok(Vec::new());
        }
        let len = usize::try_from(extension.directory_size)
            .ok()
            .filter(|len| *len as u64 <= limits::BITMAP_DIRECTORY_BYTES)
            .ok_or_else(|| {
                Error::invalid_image("bitmap_directory_size", extension.directory_size, "bitmap directory is too large")
                    .file(self.file.name())
            })?;
        let bytes = self.read(extension.directory_offset, len).await?;
        parse_directory(&bytes, extension).map_err(|error| error.file(self.file.name()))
    }

    /// The LUKS header; `None` where the encryption has none.
    pub async fn luks_header(&self) -> Result<Option<LuksHeader>> {
        let Some(place) = self.header.encryption_header() else { return Ok(None) };
        let bytes = self.read(place.offset, luks::HEADER_BYTES).await?;
        LuksHeader::parse(&bytes).map(Some).map_err(|error| error.file(self.file.name()))
    }

    async fn read(&self, offset: u64, len: usize) -> Result<IoBuf> {
        let (result, buf) = as_metadata(self.file.read_at(IoBuf::zeroed(len), offset)).await;
        result.map(|()| buf)
    }
}
