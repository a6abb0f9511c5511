// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The end of a bitmap journal that a crash has left, on the bare file (`docs/formats/bitmap-journal.md`).
//!
//! `qemu-img check -r` drops every internal snapshot of an image with an autoclear bit that it doesn't know. So an image
//! has the journal's bit or snapshots, never both.

use crate::read_header;
use cowshed_layout::qcow2::bitmap::{FLAG_AUTO, FLAG_IN_USE, parse_directory};
use cowshed_layout::qcow2::features::AUTOCLEAR_BITMAP_JOURNAL;
use cowshed_layout::qcow2::{Header, HeaderStages, limits, offset};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{ErrorKind, Result};

/// The offset of the flags in an entry of the directory.
const FLAGS_AT: u64 = 12;

/// The writes that end the journal, each stage durable before the next one: marks of bitmaps that it vouches for go,
/// then its bit. Empty without the bit.
pub(crate) async fn stages(file: &File, header: &Header) -> Result<HeaderStages> {
    if header.autoclear_features & AUTOCLEAR_BITMAP_JOURNAL == 0 {
        return Ok(Vec::new());
    }
    let marks = match marks(file, header).await {
        // Bitmaps that can't be read stay in use.
        Err(error) if error.kind() == ErrorKind::InvalidImage => Vec::new(),
        marks => marks?,
    };
    let left = header.autoclear_features & !AUTOCLEAR_BITMAP_JOURNAL;
    Ok(vec![marks, vec![(offset::AUTOCLEAR_FEATURES, left.to_be_bytes().to_vec())]])
}

/// The flags of bitmaps that are up to date by the journal, without "in use".
async fn marks(file: &File, header: &Header) -> Result<Vec<(u64, Vec<u8>)>> {
    let (Some(journal), Some(extension)) = (header.bitmap_journal(), header.bitmaps()) else { return Ok(Vec::new()) };
    let len = extension.directory_size.min(limits::BITMAP_DIRECTORY_BYTES);
    let (result, bytes) = file.read_at(IoBuf::try_zeroed(len as usize)?, extension.directory_offset).await;
    result?;
    let mut at = extension.directory_offset;
    let mut marks = Vec::new();
    for (index, mut entry) in parse_directory(&bytes, extension)?.into_iter().enumerate() {
        let is_vouched_for = journal.entries.contains(&(index as u32)) && entry.flags & FLAG_AUTO != 0;
        let was_in_use = entry.flags & FLAG_IN_USE != 0;
        entry.flags &= !FLAG_IN_USE;
        if is_vouched_for && was_in_use && entry.validate(header.size, header.cluster_bits).is_ok() {
            marks.push((at + FLAGS_AT, entry.flags.to_be_bytes().to_vec()));
        }
        at += entry.encoded_len() as u64;
    }
    Ok(marks)
}

/// Ends the journal durably. `header` is that of the image in `file`, before and afterwards.
pub(crate) async fn end(file: &File, header: &mut Header) -> Result<()> {
    let stages = stages(file, header).await?;
    if stages.is_empty() {
        return Ok(());
    }
    for stage in stages {
        for (at, bytes) in stage {
            file.write_at(IoBuf::copy_from(&bytes), at).await.0.map_err(|error| error.offset(at))?;
        }
        file.sync().await?;
    }
    *header = read_header(file).await?;
    Ok(())
}
