// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The images to be copied, seen as one disk.

use crate::{ImageSpec, in_work};
use cowshed_image::{Node, StatusExtent};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// The kind of bytes in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Bytes to be read.
    Data,
    /// Read as zeroes.
    Zero,
    /// Left to the backing file, which the target has too.
    Backing,
}

/// A range of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRun {
    /// First byte.
    pub start: u64,
    /// First byte behind.
    pub end: u64,
    /// The kind of bytes.
    pub kind: RunKind,
}

/// The place of the plain bytes of a range of the disk.
#[derive(Clone, Debug)]
pub struct SourcePlace {
    /// First byte of the range.
    pub start: u64,
    /// First byte behind it.
    pub end: u64,
    /// The file's name.
    pub file: Arc<str>,
    /// Where `start` is in the file.
    pub offset: u64,
}

struct Part {
    node: Arc<Node>,
    start: u64,
    end: u64,
    /// Where in the image `start` is.
    skip: u64,
}

impl Part {
    /// The offset in the image of byte `offset` of the disk.
    fn within(&self, offset: u64) -> u64 {
        offset - self.start + self.skip
    }
}

/// Open images, one behind the other.
#[derive(Default)]
pub struct Sources {
    parts: Vec<Part>,
    /// Ask the top layer alone: ranges that it leaves to its backing file are left out.
    top_layer_only: bool,
    /// Ranges that can't be looked up are data.
    salvages: bool,
    /// The errors of the ranges that could not be looked up.
    unknown: Mutex<Vec<Error>>,
}

/// Runs asked for at once: bounds the memory of the answer.
const MAX_RUNS: usize = 4096;
/// The longest range that is taken for data where nothing can be looked up, in bytes.
const UNKNOWN_BYTES: u64 = 1 << 20;
/// Bytes asked about at once.
const STATUS_WINDOW_BYTES: u64 = 4 << 30;

impl Sources {
    /// Opens all images for reading.
    pub async fn open(specs: &[ImageSpec], top_layer_only: bool) -> Result<Sources> {
        let mut sources = Sources { top_layer_only, ..Sources::default() };
        for spec in specs {
            match spec.open_for_reading().await.and_then(|node| sources.push(node)) {
                Ok(()) => {}
                Err(error) => {
                    let _ = sources.close().await;
                    return Err(error);
                }
            }
        }
        Ok(sources)
    }

    /// Takes ranges that can't be looked up for data, where `salvages`.
    #[must_use]
    pub fn salvaging(self, salvages: bool) -> Sources {
        Sources { salvages, ..self }
    }

    /// Takes the errors of lookups so far.
    pub fn take_unknown(&self) -> Vec<Error> {
        std::mem::take(&mut self.unknown.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The image, where there is only one.
    pub fn only(&self) -> Option<&Node> {
        match self.parts.as_slice() {
            [part] => Some(&part.node),
            _ => None,
        }
    }

    fn push(&mut self, node: Arc<Node>) -> Result<()> {
        let start = self.size();
        let end = start
            .checked_add(node.size())
            .filter(|end| i64::try_from(*end).is_ok())
            .ok_or_else(|| Error::invalid_argument("the images together are too large").value(node.size()))?;
        self.parts.push(Part { node, start, end, skip: 0 });
        Ok(())
    }

    /// `len` bytes of one open image from `skip` on, which must lie within it.
    pub fn window(node: Arc<Node>, skip: u64, len: u64) -> Sources {
        Sources { parts: vec![Part { node, start: 0, end: len, skip }], ..Sources::default() }
    }

    /// Size of all together, bytes.
    pub fn size(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.end)
    }

    /// The only image, when there is one and all of it counts.
    pub fn single(&self) -> Option<&Arc<Node>> {
        match &self.parts[..] {
            [part] if part.skip == 0 => Some(&part.node),
            _ => None,
        }
    }

    /// Runs from byte `offset` on: at least one before the end of the disk, in order, without gaps.
    pub async fn runs(&self, offset: u64) -> Result<Vec<SourceRun>> {
        let Some(part) = self.parts.iter().find(|part| offset >= part.start && offset < part.end) else {
            return Ok(Vec::new());
        };
        let within = part.within(offset);
        let len = (part.end - offset).min(STATUS_WINDOW_BYTES);
        let asked = match self.top_layer_only {
            true => part.node.block_status(within, len, MAX_RUNS).await,
            false => part.node.block_status_chain(within, len, MAX_RUNS).await,
        };
        let extents = match asked {
            Ok(extents) => extents,
            Err(error) if self.salvages => {
                let error = in_work(error, format!("error while reading block status at offset {offset}"));
                self.unknown.lock().unwrap_or_else(PoisonError::into_inner).push(error);
                let end = part.end.min((offset / UNKNOWN_BYTES + 1) * UNKNOWN_BYTES);
                return Ok(vec![SourceRun { start: offset, end, kind: RunKind::Data }]);
            }
            Err(error) => {
                return Err(in_work(error, format!("error while reading block status at offset {offset}")));
            }
        };
        let has_backing = part.node.backing().is_some();
        let mut runs: Vec<SourceRun> = Vec::with_capacity(extents.len());
        for extent in extents {
            let kind = self.kind(&extent, has_backing);
            let start = part.start + extent.start.saturating_sub(part.skip);
            let end = start + extent.len;
            match runs.last_mut() {
                Some(last) if last.kind == kind => last.end = end,
                _ => runs.push(SourceRun { start, end, kind }),
            }
        }
        Ok(runs)
    }

    fn kind(&self, extent: &StatusExtent, has_backing: bool) -> RunKind {
        if self.top_layer_only && !extent.present && has_backing {
            RunKind::Backing
        } else if extent.zero {
            RunKind::Zero
        } else {
            RunKind::Data
        }
    }

    /// The files that [`SourcePlace`]s are in, each once; none where a name could mean several.
    pub fn content_files(&self) -> Vec<File> {
        let mut files: Vec<File> = Vec::new();
        for part in &self.parts {
            let Some(of_part) = part.node.content_files() else { return Vec::new() };
            for file in of_part {
                match files.iter().find(|known| known.name() == file.name()) {
                    Some(known) if known.identity() != file.identity() => return Vec::new(),
                    Some(_) => {}
                    None => files.push(file),
                }
            }
        }
        files
    }

    /// The places of the plain bytes of a range, in order; some bytes may have none.
    pub async fn places(&self, start: u64, end: u64) -> Result<Vec<SourcePlace>> {
        let mut places = Vec::new();
        let mut at = start;
        while let Some(part) = self.parts.iter().find(|part| at < end && at >= part.start && at < part.end) {
            let (len, before) = (part.end.min(end) - at, at);
            for extent in part.node.block_status_chain(part.within(at), len, MAX_RUNS).await? {
                let from = part.start + extent.start.saturating_sub(part.skip);
                at = from + extent.len;
                if let (true, Some(offset), Some(file)) = (extent.data, extent.offset, extent.file) {
                    places.push(SourcePlace { start: from, end: at, file, offset });
                }
            }
            if at == before {
                return Err(Error::internal("an image says nothing of a range").offset(at));
            }
        }
        Ok(places)
    }

    /// Fills `buf` from byte `offset`, across the borders of images.
    pub async fn read(&self, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        let end = offset.saturating_add(buf.len() as u64);
        let Some(part) = self.parts.iter().find(|part| offset >= part.start && end <= part.end) else {
            // Rare: the chunk crosses from one image into the next.
            let result = self.read_across(offset, &mut buf).await;
            return (result, buf);
        };
        part.node.read(part.within(offset), buf).await
    }

    async fn read_across(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let Some(part) = self.parts.iter().find(|part| at >= part.start && at < part.end) else {
                return Err(Error::internal("read past the end of the images").offset(at));
            };
            let len = (buf.len() - done).min(usize::try_from(part.end - at).unwrap_or(usize::MAX));
            let (result, piece) = part.node.read(part.within(at), IoBuf::scratch(len)).await;
            result?;
            buf[done..done + len].copy_from_slice(&piece);
            done += len;
        }
        Ok(())
    }

    /// The images.
    pub fn nodes(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.parts.iter().map(|part| &part.node)
    }

    /// Closes all images; the first error counts.
    pub async fn close(&self) -> Result<()> {
        let mut result = Ok(());
        for part in &self.parts {
            let closed = part.node.close().await;
            result = result.and(closed);
        }
        result
    }
}
