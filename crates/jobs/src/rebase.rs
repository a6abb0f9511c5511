// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gives an image another backing file.

use crate::runs::{self, Piece, Runs};
use crate::zeroes::is_zero;
use crate::{ImageSpec, JobHandle};
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_image::graph::AttachRequest;
use cowshed_image::open::resolve_name;
use cowshed_image::{Node, StatusExtent};
use cowshed_storage::{IoBuf, Permissions};
use std::sync::Arc;

/// Longest name that a header may hold, in bytes.
const MAX_NAME_BYTES: usize = 1023;

/// What to rebase and where to.
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
    /// `-c`: what must be written is compressed where it is a whole cluster.
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

/// What it opens goes to `opened`, to be closed after the image.
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
    let Some(driver) = image.qcow2() else {
        let message = format!("images of the format '{}' have no backing file", image.driver_name());
        return Err(cannot(Error::unsupported(message)));
    };
    check_name(options).map_err(cannot)?;
    if !options.only_name {
        if let Some(name) = &options.base {
            opened.push(open_base(image, name, options).await?);
        }
        keep_content(image, opened.first(), options, job).await?;
        image.flush().await?;
    }
    driver.change_backing_file(options.base.as_deref(), options.base_format.as_deref()).await.map_err(cannot)
}

fn check_name(options: &RebaseOptions) -> Result<()> {
    let Some(base) = &options.base else { return Ok(()) };
    if options.base_format.is_none() {
        return Err(Error::invalid_argument("the backing format must be specified").field("backing_fmt"));
    }
    if base.contains('\0') {
        return Err(Error::invalid_argument("the file name contains a NUL").field("backing_file"));
    }
    let bytes = cowshed_block::name_of_text(base).len();
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
        on_warning: options.image.on_warning,
        ..ImageSpec::default()
    };
    let base = spec.open(spec.request()?.graph(Arc::clone(image.graph()))).await?;
    let same_file = |a: &Node, b: &Node| {
        let identity = |node: &Node| node.child(cowshed_image::node::ChildRole::File)?.file()?.identity();
        identity(a).is_some_and(|one| identity(b) == Some(one))
    };
    let mut layer = Some(Arc::clone(&base));
    while let Some(node) = layer {
        if same_file(&node, image) {
            let _ = base.close().await;
            let message = format!("'{name}' is the image itself or stands on it: that would be a loop");
            return Err(Error::new(ErrorKind::InvalidArgument, message).field("backing_file"));
        }
        layer = node.backing();
    }
    Ok(base)
}

/// Writes into the image what would read otherwise with the new backing file. The image stands on that one already
/// meanwhile, so that zeroes are written wherever it has data; what is written is whole clusters or subclusters, so nothing
/// is filled in from it.
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
    // What the image holds itself stays.
    let below = |run: &StatusExtent| !(run.present && run.depth == 0);
    runs::for_each(Runs::new(change.image, below), change.job, async |pieces| {
        for piece in pieces {
            change.keep(piece).await?;
        }
        Ok(())
    })
    .await
}

impl Move<'_> {
    async fn keep(&self, piece: Piece) -> Result<()> {
        let old = read_below(self.old, piece.start, piece.len, false).await?;
        let new = read_below(self.base, piece.start, piece.len, piece.zero).await?;
        let unit = self.image.qcow2().map_or(runs::PIECE_BYTES, |driver| driver.cluster_size());
        let mut at = piece.start;
        let end = piece.start + piece.len;
        let mut differing: Option<(u64, u64)> = None;
        while at < end {
            let stop = ((at / unit + 1) * unit).min(end);
            let range = (at - piece.start) as usize..(stop - piece.start) as usize;
            if old[range.clone()] == new[range] {
                self.write(differing.take(), &old, piece.start).await?;
            } else {
                differing = Some((differing.map_or(at, |(start, _)| start), stop));
            }
            at = stop;
        }
        self.write(differing, &old, piece.start).await
    }

    async fn write(&self, range: Option<(u64, u64)>, old: &IoBuf, first: u64) -> Result<()> {
        let Some((start, end)) = range else { return Ok(()) };
        let bytes = &old[(start - first) as usize..(end - first) as usize];
        if is_zero(bytes) {
            return runs::write_zeroes(self.image, start, end - start).await;
        }
        self.job.throttle(end - start).await?;
        let unit = self.image.qcow2().map_or(0, |driver| driver.cluster_size());
        let whole = unit != 0 && start.is_multiple_of(unit) && (end - start).is_multiple_of(unit);
        if self.options.compressed && whole {
            let clusters = bytes
                .chunks(unit as usize)
                .zip((start..).step_by(unit as usize))
                .map(|(cluster, at)| (at, IoBuf::copy_from(cluster)));
            return self.image.write_compressed(clusters.collect()).await;
        }
        self.image.write(start, IoBuf::copy_from(bytes)).await.0
    }
}

/// What a backing file gives there: zeroes behind its end, and without one.
async fn read_below(node: Option<&Arc<Node>>, start: u64, len: u64, zero: bool) -> Result<IoBuf> {
    let buf = IoBuf::zeroed(len as usize);
    match node.filter(|_| !zero) {
        Some(node) => {
            let (result, buf) = node.read_padded(start, buf).await;
            result.map(|()| buf)
        }
        None => Ok(buf),
    }
}
