// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gives an image another backing file.

use crate::layer::geometry;
use crate::runs::{self, Piece, Runs};
use crate::zeroes::is_zero;
use crate::{ImageSpec, JobHandle, in_work};
use cowshed_image::graph::{AttachRequest, check_apart};
use cowshed_image::open::resolve_name;
use cowshed_image::{DRIVERS, Node, StatusExtent};
use cowshed_storage::{File, IoBuf, Permissions};
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// Begins the error for a format that there isn't.
pub const UNKNOWN_FORMAT: &str = "Invalid format name: ";
/// Longest name that a header may hold, in bytes.
const MAX_NAME_BYTES: usize = 1023;
/// Runs that one question about the mapping answers at most.
const RUNS_AT_ONCE: usize = 1024;

/// The image to rebase, and its new backing file.
#[derive(Clone, Debug, Default)]
pub struct RebaseOptions {
    /// The image.
    pub image: ImageSpec,
    /// The new backing file as the header is to name it; `None`: none.
    pub base: Option<String>,
    /// Its format; must be given.
    pub base_format: Option<String>,
    /// Cache mode for backing files.
    pub base_cache: Option<String>,
    /// `-u`: only name it: the new file is taken to read as the old one does, and needn't exist.
    pub only_name: bool,
    /// `-c`: writes of whole clusters are compressed.
    pub compressed: bool,
}

/// Rebases. After an error or a power cut the image reads as before.
pub async fn run(options: &RebaseOptions, job: &JobHandle) -> Result<()> {
    job.pause_point().await?;
    let request = options.image.request()?.force_share(false).writable(true);
    let request = if options.only_name { request.no_backing() } else { request };
    let image = options.image.open(request).await?;
    let mut opened = Vec::new();
    let result = rebase(&image, options, job, &mut opened).await;
    let closed = image.close().await;
    for base in opened {
        // It was only read.
        let _ = base.close().await;
    }
    result.and(closed)
}

/// The opened nodes go to `opened`, to be closed after the image.
async fn rebase(
    image: &Arc<Node>,
    options: &RebaseOptions,
    job: &JobHandle,
    opened: &mut Vec<Arc<Node>>,
) -> Result<()> {
    let cannot = |error: Error| match &options.base {
        Some(base) => error.context(format!("could not change the backing file to '{base}'")),
        None => error,
    };
    if options.compressed && !image.compresses() {
        return Err(Error::unsupported("Compression not supported for this file format"));
    }
    if let Some(format) = options.base_format.as_ref().filter(|format| !DRIVERS.is_known(format)) {
        return Err(Error::invalid_argument(format!("{UNKNOWN_FORMAT}'{format}'")));
    }
    if image.description().is_some_and(|known| known.only_sizes) {
        let message = format!("images of the format '{}' have no backing file", image.driver_name());
        return Err(Error::unsupported(message).qemu("could not get block driver info"));
    }
    // The bytes of a server aren't in clusters, of which QEMU asks first.
    if image.is_raw() && image.file().is_some_and(File::is_remote) {
        let message = format!("images of the format '{}' have no backing file", image.driver_name());
        return Err(Error::unsupported(message).qemu("could not get block driver info"));
    }
    if let (Some(name), false) = (&options.base, options.only_name) {
        opened.push(open_base(image, name, options).await?);
    }
    check_name(options).map_err(cannot)?;
    if image.backing_name().is_none() {
        let message = format!("images of the format '{}' have no backing file", image.driver_name());
        return Err(cannot(Error::unsupported(message)));
    }
    if !options.only_name {
        let copied = keep_content(image, opened.first(), options, job).await;
        let copied = copied.and(image.flush().await);
        copied.map_err(|error| in_work(error, "Error while writing to COW image"))?;
    }
    image.change_backing_file(options.base.as_deref(), options.base_format.as_deref()).await.map_err(cannot)
}

fn check_name(options: &RebaseOptions) -> Result<()> {
    let Some(base) = &options.base else { return Ok(()) };
    if options.base_format.is_none() {
        return Err(Error::invalid_argument("the backing format must be specified").field("backing_fmt"));
    }
    if base.contains('\0') {
        return Err(Error::invalid_argument("the file name contains a NUL").field("backing_file"));
    }
    let bytes = cowshed_types::name_of_text(base).len();
    if bytes > MAX_NAME_BYTES {
        let message = format!("the file name is longer than the {MAX_NAME_BYTES} bytes that a header may hold");
        return Err(Error::invalid_argument(message).field("backing_file").value(format!("{bytes} bytes")));
    }
    Ok(())
}

async fn open_base(image: &Node, name: &str, options: &RebaseOptions) -> Result<Arc<Node>> {
    let resolved = resolve_name(name, Some(&image.filename()))?;
    let spec = ImageSpec {
        name: resolved,
        format: options.base_format.clone(),
        cache: options.base_cache.clone(),
        policy: options.image.policy.clone(),
        secrets: options.image.secrets.clone(),
        tls: options.image.tls.clone(),
        on_warning: options.image.on_warning,
        ..ImageSpec::default()
    };
    let base = spec.open(spec.request()?.graph(Arc::clone(image.graph()))).await?;
    if check_apart(image, [&base]).is_err() {
        let _ = base.close().await;
        let message = format!("'{name}' is the image itself or stands on it: that would be a loop");
        return Err(Error::new(ErrorKind::InvalidArgument, message).field("backing_file"));
    }
    Ok(base)
}

/// Writes ranges into the image that would read otherwise with the new backing file. The image has that one below it
/// already meanwhile, so that zeroes are written wherever it has data. The writes have whole clusters or subclusters,
/// so nothing is filled in from it.
async fn keep_content(
    image: &Arc<Node>,
    base: Option<&Arc<Node>>,
    options: &RebaseOptions,
    job: &JobHandle,
) -> Result<()> {
    let graph = image.graph();
    let old = image.backing();
    let held = match &old {
        Some(old) => Some(graph.attach(old, AttachRequest::job("rebase", Permissions::READ)).await?),
        None => None,
    };
    graph.set_backing(image, base).await?;
    let result = keep_ranges(&Move { image, old: old.as_ref(), base, options, job }).await;
    match held {
        Some(held) => result.and(held.detach().await),
        None => result,
    }
}

struct Move<'a> {
    image: &'a Arc<Node>,
    old: Option<&'a Arc<Node>>,
    base: Option<&'a Arc<Node>>,
    options: &'a RebaseOptions,
    job: &'a JobHandle,
}

async fn keep_ranges(change: &Move<'_>) -> Result<()> {
    change.job.set_len(change.image.size());
    if change.old.is_none() && change.base.is_none() {
        change.job.advance(change.image.size());
        return Ok(());
    }
    // The image's own data stays.
    let below = |run: &StatusExtent| !(run.present && run.depth == 0);
    // Where both backing files read as zeroes, or aren't there, nothing changes.
    let runs =
        Runs::new(change.image, below, change.image).passing_zeroes_of(change.old.into_iter().chain(change.base));
    runs::for_each(runs, change.job, async |pieces| {
        for piece in in_whole_units(pieces, change.unit()) {
            change.keep(piece).await?;
        }
        Ok(())
    })
    .await
}

/// The pieces with borders between units where they touch one another. The unit in which one ends and the next one
/// begins belongs to that which isn't zero. So a unit is looked at, and written or compressed, as a whole.
fn in_whole_units(pieces: Vec<Piece>, unit: u64) -> Vec<Piece> {
    let mut whole: Vec<Piece> = Vec::with_capacity(pieces.len());
    for mut piece in pieces {
        let end = piece.start + piece.len;
        if let Some(last) = whole.last_mut().filter(|last| last.start + last.len == piece.start) {
            let border = match (last.zero, piece.zero) {
                (true, false) => (piece.start / unit * unit).max(last.start),
                (false, true) => piece.start.next_multiple_of(unit).min(end),
                // They go the same way.
                _ => end,
            };
            last.len = border - last.start;
            piece = Piece { start: border, len: end - border, zero: piece.zero };
            if last.len == 0 {
                whole.pop();
            }
        }
        if piece.len != 0 {
            whole.push(piece);
        }
    }
    whole
}

impl Move<'_> {
    async fn keep(&self, piece: Piece) -> Result<()> {
        match self.base.is_none() || piece.zero {
            true => self.keep_against_zeroes(piece).await,
            false => self.keep_differing(piece).await,
        }
    }

    /// The new backing file reads as zeroes there: known zeroes of the old one need no look.
    async fn keep_against_zeroes(&self, piece: Piece) -> Result<()> {
        let Some(old) = self.old else { return Ok(()) };
        let unit = self.unit();
        let end = (piece.start + piece.len).min(old.size());
        // Whole units: bytes beside data in one go along, so that none of them is lost should this stop half-way.
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut at = piece.start;
        while at < end {
            let runs = old.block_status_chain(at, end - at, RUNS_AT_ONCE).await?;
            let before = at;
            for run in runs {
                at = run.start + run.len;
                if run.zero {
                    continue;
                }
                let (start, stop) = (run.start / unit * unit, at.next_multiple_of(unit));
                let (start, stop) = (start.max(piece.start), stop.min(piece.start + piece.len));
                match ranges.last_mut() {
                    Some((_, last)) if start <= *last => *last = stop.max(*last),
                    _ => ranges.push((start, stop)),
                }
            }
            if at == before {
                return Err(Error::internal("a map without progress").offset(at));
            }
        }
        for (start, stop) in ranges {
            let bytes = read_below(self.old, start, stop - start).await?;
            self.write_units(start, bytes, |_, unit| !is_zero(unit)).await?;
        }
        Ok(())
    }

    async fn keep_differing(&self, piece: Piece) -> Result<()> {
        let old = read_below(self.old, piece.start, piece.len).await?;
        let new = read_below(self.base, piece.start, piece.len).await?;
        self.write_units(piece.start, old, |at, unit| *unit != new[at..at + unit.len()]).await
    }

    /// The unit that is looked at, and written, as a whole: compressed data need a cluster.
    fn unit(&self) -> u64 {
        match geometry(self.image) {
            Some(geometry) if self.options.compressed => geometry.cluster_bytes,
            Some(geometry) => geometry.allocation_unit_bytes,
            None => self.image.description().and_then(|known| known.cluster_bytes).unwrap_or(runs::PIECE_BYTES),
        }
    }

    /// Writes those units of `bytes`, which begin at `start`, that differ from the data that would be read there;
    /// `differs` also gets where in `bytes` a unit begins.
    async fn write_units(&self, start: u64, bytes: IoBuf, differs: impl Fn(usize, &[u8]) -> bool) -> Result<()> {
        let unit = self.unit();
        let end = start + bytes.len() as u64;
        // Neighbours that go the same way: bytes, and whether they are written.
        let mut parts: Vec<(usize, bool)> = Vec::new();
        let mut at = start;
        while at < end {
            let stop = ((at / unit + 1) * unit).min(end);
            let (from, len) = ((at - start) as usize, (stop - at) as usize);
            let is_written = differs(from, &bytes[from..from + len]);
            match parts.last_mut() {
                Some((bytes, was_written)) if *was_written == is_written => *bytes += len,
                _ => parts.push((len, is_written)),
            }
            at = stop;
        }
        let (mut at, mut rest) = (start, bytes);
        for (len, is_written) in parts {
            let part = rest.split_to(len);
            if is_written {
                self.write(at, part).await?;
            }
            at += len as u64;
        }
        Ok(())
    }

    async fn write(&self, start: u64, bytes: IoBuf) -> Result<()> {
        let len = bytes.len() as u64;
        if is_zero(&bytes) {
            return runs::write_zeroes(self.image, start, len).await;
        }
        self.job.throttle(len).await?;
        let unit = self.image.cluster_bytes().unwrap_or(0);
        // The disk's last cluster may be a part of one.
        let ends_whole = len.is_multiple_of(unit.max(1)) || start + len == self.image.size();
        let whole = unit != 0 && start.is_multiple_of(unit) && ends_whole;
        if self.options.compressed && whole {
            let clusters = bytes
                .chunks(unit as usize)
                .zip((start..).step_by(unit as usize))
                .map(|(cluster, at)| (at, IoBuf::copy_from(cluster)));
            return self.image.write_compressed(clusters.collect()).await;
        }
        self.image.write(start, bytes).await.0?;
        self.image.note_bulk_write(len);
        Ok(())
    }
}

/// The data of a backing file there: zeroes behind its end, and without one.
async fn read_below(node: Option<&Arc<Node>>, start: u64, len: u64) -> Result<IoBuf> {
    match node {
        Some(node) => {
            let (result, buf) = node.read_padded(start, IoBuf::scratch(len as usize)).await;
            result.map(|()| buf)
        }
        None => Ok(IoBuf::zeroed(len as usize)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_not_divided() {
        let piece = |start, len, zero| Piece { start, len, zero };
        for (pieces, whole) in [
            (
                vec![piece(0, 100, true), piece(100, 300, false), piece(400, 112, true)],
                vec![piece(0, 64, true), piece(64, 384, false), piece(448, 64, true)],
            ),
            (vec![piece(0, 10, true), piece(10, 10, false), piece(20, 10, true)], vec![piece(0, 30, false)]),
            (vec![piece(0, 100, false), piece(100, 100, false)], vec![piece(0, 200, false)]),
            (vec![piece(0, 64, true), piece(128, 10, false)], vec![piece(0, 64, true), piece(128, 10, false)]),
        ] {
            assert_eq!(in_whole_units(pieces, 64), whole);
        }
    }
}
