// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Apple's disk images (UDIF), for reading: docs/formats/block-formats.md.

use super::blocks::{BlockFormat, FILE_KEY, ImageFile, finish};
use super::mapped::{LARGE_BYTES, RunSource, zeroed};
use cowshed_codec::{inflate_zlib, unpack_adc, unpack_bzip2, unpack_lzfse, unpack_xz};
use cowshed_graph::node::Description;
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener};
use cowshed_graph::options::{DriverKind, DriverSchema};
use cowshed_layout::dmg::{DmgChunk, DmgPacking, DmgTrailer};
use cowshed_layout::probe::PROBE_TAIL_BYTES;
use cowshed_storage::rt;
use cowshed_types::{Errno, Error, ErrorKind, Result};
use std::rc::Rc;

const SCHEMA: DriverSchema = DriverSchema {
    name: "dmg",
    kind: DriverKind::Format,
    about: "Apple disk images (UDIF), for reading",
    keys: &[FILE_KEY],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Dmg {
    trailer: DmgTrailer,
    /// In the order of the disk.
    chunks: Vec<DmgChunk>,
    /// Some packed piece is large.
    packs_large: bool,
}

async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft).await?;
    let dmg = load(&file).await.map_err(|error| file.named(error))?;
    finish(opener, draft, file, dmg, BackingReference::default()).await
}

async fn load(file: &ImageFile) -> Result<Dmg> {
    let tail = file.len().saturating_sub(PROBE_TAIL_BYTES as u64);
    let trailer = DmgTrailer::parse(&file.read(tail, PROBE_TAIL_BYTES).await?)?;
    let (offset, len) = trailer.list;
    if offset.checked_add(len).is_none_or(|end| end > file.len()) {
        return Err(Error::invalid_image("XMLOffset", offset, "the property list is not in the file"));
    }
    let chunks = trailer.chunks(&file.read(offset, len as usize).await?)?;
    let packs_large = chunks.iter().any(|chunk| chunk.packing.is_packed() && chunk.len > LARGE_BYTES);
    Ok(Dmg { trailer, chunks, packs_large })
}

impl BlockFormat for Dmg {
    const NAME: &'static str = SCHEMA.name;
    const READ_ONLY: bool = true;

    fn size(&self) -> u64 {
        self.trailer.size
    }

    fn describe(&self) -> Description {
        Description { only_sizes: true, in_sectors: true, ..Description::default() }
    }

    fn takes_backing(&self) -> bool {
        false
    }

    async fn before_writing(&self, _file: &ImageFile) -> Result<()> {
        Err(Error::new(ErrorKind::ReadOnly, "disk images of Apple can only be read").qemu("Image is read-only"))
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let next = self.chunks.partition_point(|chunk| chunk.start + chunk.len <= at);
        let chunk = self.chunks.get(next).filter(|chunk| chunk.start <= at);
        // Zeroes are a piece too: a range without a table is lost.
        let chunk = chunk.ok_or_else(|| {
            let message = "no table of the image has this part of the disk";
            Error::new(ErrorKind::InvalidImage, message).offset(at).with_errno(Errno::EIO)
        })?;
        let skip = at - chunk.start;
        let len = len.min(chunk.len - skip);
        match chunk.packing {
            DmgPacking::Zero => Ok((RunSource::Zero, len)),
            DmgPacking::Raw => {
                file.check_data("compOffset", chunk.host + skip, len, at)?;
                Ok((RunSource::Data { file: 0, host: chunk.host + skip }, len))
            }
            _ => Ok((RunSource::Packed { block: chunk.start }, len)),
        }
    }

    fn packs_large(&self) -> bool {
        self.packs_large
    }

    async fn unpack(&self, file: &ImageFile, block: u64) -> Result<Vec<u8>> {
        let found = self.chunks.binary_search_by_key(&block, |chunk| chunk.start);
        let chunk = found.ok().and_then(|index| self.chunks.get(index).copied());
        let chunk = chunk.ok_or_else(|| Error::internal("a packed piece went away").offset(block))?;
        file.check_data("compOffset", chunk.host, chunk.host_len, block)?;
        let packed = file.read(chunk.host, chunk.host_len as usize).await?;
        rt::run_on_cpu_pool(move || {
            let mut out = zeroed(chunk.len as usize)?;
            match chunk.packing {
                DmgPacking::Zlib => inflate_zlib(&packed, &mut out, chunk.len as usize)?,
                DmgPacking::Bzip2 => unpack_bzip2(&packed, &mut out)?,
                DmgPacking::Adc => unpack_adc(&packed, &mut out)?,
                DmgPacking::Lzfse => unpack_lzfse(&packed, &mut out)?,
                DmgPacking::Xz => unpack_xz(&packed, &mut out)?,
                DmgPacking::Zero | DmgPacking::Raw => return Err(Error::internal("a piece that isn't packed")),
            }
            Ok(out)
        })
        .await
        .map_err(|error: Error| error.offset(chunk.host))
    }
}
