// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The demands of a VMDK file: the files of its parts, and its parent.

use super::{Asked, Inspection, strange_name};
use cowshed_image::open::Policy;
use cowshed_layout::vmdk::{
    Descriptor, HEADER_BYTES, SECTOR_BYTES, SparseHeader, check_kind, embedded_descriptor, limits, sectors_to_bytes,
};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};
use std::path::{Component, Path};

/// Adds the facts in the descriptor and the header.
pub(super) async fn inspect(inspection: &mut Inspection, file: &File) {
    if let Err(error) = look(inspection, file).await {
        inspection.suspicions.push(error.to_string());
    }
}

async fn look(inspection: &mut Inspection, file: &File) -> Result<()> {
    let first = read(file, 0, HEADER_BYTES as u64).await?;
    check_kind(&first)?;
    let is_sparse = first.starts_with(b"KDMV") || first.starts_with(b"COWD");
    let (descriptor, sectors) = if is_sparse {
        let header = SparseHeader::parse(&first)?;
        let policy = Policy::untrusted();
        check_limit("grain directory", header.directory_bytes(), policy.max_table_bytes)?;
        let (start, sectors) = header.descriptor.unwrap_or((0, 0));
        let len = sectors.saturating_mul(SECTOR_BYTES).min(limits::DESCRIPTOR_BYTES as u64);
        let text = read(file, start.saturating_mul(SECTOR_BYTES), len).await?;
        (embedded_descriptor(&text, start)?, header.capacity_sectors)
    } else {
        let descriptor = Descriptor::parse(&read(file, 0, file.len().min(limits::DESCRIPTOR_BYTES as u64)).await?)?;
        let sectors = descriptor.total_sectors()?;
        (descriptor, sectors)
    };
    inspection.virtual_size = sectors_to_bytes(sectors);
    check_limit("size", inspection.virtual_size.unwrap_or(u64::MAX), Policy::untrusted().max_virtual_size_bytes)?;
    if descriptor.has_parent() {
        let format = Some("vmdk".to_owned());
        inspection.asks_for.push(Asked { role: "backing-file", name: descriptor.parent_hint.clone(), format });
    }
    // The extent line of an image in one file names that file.
    for extent in descriptor.extents.iter().filter(|extent| !is_sparse && !extent.name.is_empty()) {
        let goes_down = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
        if !Path::new(&extent.name).components().all(goes_down) {
            let name = extent.name.escape_debug();
            inspection.suspicions.push(format!("the name of one of its parts leads out of its folder: '{name}'"));
        }
        inspection.asks_for.push(Asked { role: "extent", name: Some(extent.name.clone()), format: None });
    }
    if let Some(name) = descriptor.parent_hint.as_deref().and_then(strange_name) {
        inspection.suspicions.push(format!("the name of its backing-file is {name}"));
    }
    Ok(())
}

fn check_limit(field: &'static str, value: u64, limit: u64) -> Result<()> {
    if value <= limit {
        return Ok(());
    }
    let message = format!("larger than the policy for images from strangers allows, {limit}");
    Err(Error::new(ErrorKind::Limit, message).field(field).value(value))
}

/// A piece of the file, as far as there is one.
async fn read(file: &File, offset: u64, len: u64) -> Result<IoBuf> {
    let len = len.min(file.len().saturating_sub(offset));
    let len = usize::try_from(len).map_err(|_| Error::internal("a piece of metadata is too large").value(len))?;
    let (result, bytes) = file.read_at(IoBuf::zeroed(len), offset).await;
    result.map(|()| bytes)
}
