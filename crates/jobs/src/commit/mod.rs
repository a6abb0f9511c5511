// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes an image's data into an image below it.

pub mod merge;
pub(crate) mod opened;

use crate::runs::{Runs, copy_runs};
use crate::{ImageSpec, JobHandle, in_work};
use cowshed_image::graph::below_filters;
use cowshed_image::node::{ChildRole, Marks};
use cowshed_image::open::resolve_name;
use cowshed_image::{Node, Preallocation};
use cowshed_storage::path_of_text;
use cowshed_types::{Errno, Error, Result};
use std::sync::Arc;

/// The image to commit, and its target.
#[derive(Clone, Debug, Default)]
pub struct CommitOptions {
    /// The image.
    pub image: ImageSpec,
    /// `-b`: the image of its chain to commit to, all between included. `None`: its backing file.
    pub base: Option<String>,
    /// `-d`: leave the image as it is; without it, it is emptied. With `base` it never is.
    pub keep: bool,
    /// `-r`: bytes a second at most.
    pub rate: Option<u64>,
}

/// Commits. After an error or a power cut the image still has all it had, and its chain reads as before.
pub async fn run(options: &CommitOptions, job: &JobHandle) -> Result<()> {
    job.pause_point().await?;
    job.set_speed(options.rate);
    let top = options.image.open_for_writing().await?;
    job.set_progress(0, 1);
    let result = commit(&top, options, job).await;
    let result = result.map_err(|error| error.file(top.filename()));
    let closed = top.close().await;
    result.and(closed)
}

async fn commit(top: &Arc<Node>, options: &CommitOptions, job: &JobHandle) -> Result<()> {
    let (outer, top) = (top, &image_below(top));
    let (base, depth) = find_base(top, options.base.as_deref())?;
    let graph = top.graph();
    graph.set_read_only(&base, false).await?;
    // Before the base gets another content id: one that can't be longer stays as it is.
    let result = match lengthen(top, &base).await {
        Ok(()) => announce_change(&base, &layer_above(top, &base)).await,
        Err(error) => Err(error),
    };
    let result = match result {
        Ok(()) => copy_down(top, &base, depth, job).await,
        Err(error) => Err(error),
    };
    let flushed = base.flush().await;
    let result = result.and(flushed);
    let locked = graph.set_read_only(&base, true).await;
    result.and(locked).map_err(|error| in_work(error, "Block job failed"))?;
    // As in QEMU, the image below a filter keeps its clusters.
    if options.keep || options.base.is_some() || !Arc::ptr_eq(outer, top) {
        return Ok(());
    }
    match top.backing_name().filter(|backing| backing.can_be_emptied()) {
        Some(_) => {
            let emptied = top.make_empty().await;
            emptied.map_err(|error| in_work(error, format!("Failed to empty {}", top.reference())))
        }
        // Where a format has no way to empty an image, it keeps its clusters: they read as the base does.
        None => Ok(()),
    }
}

/// Has `above`, the image above the base, note that the base changes. A commit that fails, or that a power cut ends,
/// leaves both as a chain. The base is open for writing. After an error both are as they were.
pub(crate) async fn announce_change(base: &Arc<Node>, above: &Arc<Node>) -> Result<()> {
    let (base, above) = (below_filters(base), below_filters(above));
    let Some(marks) = base.marks() else { return Ok(()) };
    let Some(notes) = above.marks().filter(|notes| notes.notes_backing()) else {
        return marks.announce_change(u32::BITS).await;
    };
    let graph = above.graph();
    let was_read_only = above.is_read_only();
    // A refusal of the layer above comes first.
    if was_read_only {
        graph.set_read_only(&above, false).await?;
    }
    let noted = announce_to(notes, marks).await;
    let restored = if was_read_only { graph.set_read_only(&above, true).await } else { Ok(()) };
    noted.and(restored)
}

async fn announce_to(above: &dyn Marks, base: &dyn Marks) -> Result<()> {
    let bits = above.room_bits().await?;
    let noted = match base.announce_change(bits).await {
        Ok(()) => above.note_backing().await,
        Err(error) => Err(error),
    };
    if noted.is_err()
        && let Err(error) = base.take_back_change().await
    {
        tracing::error!("could not take back the mark of a change: {error}");
    }
    noted
}

/// The layer directly above `base`.
fn layer_above(top: &Arc<Node>, base: &Arc<Node>) -> Arc<Node> {
    let mut above = Arc::clone(top);
    while let Some(next) = above.backing().filter(|next| !Arc::ptr_eq(next, base)) {
        above = next;
    }
    above
}

/// The image that requests reach through filters and `blkdebug`.
fn image_below(top: &Arc<Node>) -> Arc<Node> {
    let mut node = below_filters(top);
    while let Some(image) = node.child(ChildRole::Image) {
        node = below_filters(&image);
    }
    node
}

/// The node to commit to, and how many layers it is below `top`.
fn find_base(top: &Arc<Node>, wanted: Option<&str>) -> Result<(Arc<Node>, u32)> {
    let not_there =
        |wanted: &str| Error::invalid_argument(format!("'{wanted}' is not in the backing chain")).field("base");
    let (mut node, wanted) = match (top.backing(), wanted) {
        (Some(node), None) => return Ok((node, 1)),
        (Some(node), Some(wanted)) => (node, wanted),
        (None, None) => return Err(Error::invalid_argument("the image does not have a backing file")),
        (None, Some(wanted)) => return Err(not_there(wanted)),
    };
    let (mut above, mut depth) = (Arc::clone(top), 1);
    loop {
        if is_named(&above, &node, wanted) {
            return Ok((node, depth));
        }
        depth += 1;
        above = Arc::clone(&node);
        node = node.backing().ok_or_else(|| not_there(wanted))?;
    }
}

/// Names are those of the headers, and relative to the image that has them. A file of the same name may lie in the
/// working directory, too.
fn is_named(above: &Node, backing: &Node, wanted: &str) -> bool {
    if above.backing_name().is_some_and(|backing| backing.name().is_some_and(|name| name == wanted)) {
        return true;
    }
    let Ok(resolved) = resolve_name(wanted, Some(&above.filename())) else { return false };
    let real = |name: &str| std::fs::canonicalize(path_of_text(name));
    resolved == backing.filename()
        || real(&resolved).is_ok_and(|path| real(&backing.filename()).is_ok_and(|other| path == other))
}

/// Makes the base as long as the image.
async fn lengthen(top: &Arc<Node>, base: &Arc<Node>) -> Result<()> {
    if base.size() < top.size() {
        let image = below_filters(base);
        // No request runs yet.
        let moving = image.moving_blocks();
        let resized = base.resize(top.size(), Preallocation::Off).await;
        resized.map_err(|error| match error.message() {
            "Image format driver does not support resize" => error.qemu("Block job failed").with_errno(Errno::ENOTSUP),
            _ => error,
        })?;
        drop(moving);
    }
    Ok(())
}

async fn copy_down(top: &Arc<Node>, base: &Arc<Node>, depth: u32, job: &JobHandle) -> Result<()> {
    job.set_len(top.size());
    // Also ranges that no layer holds: behind the end of a shorter layer the base must not show through.
    let above_base = |run: &cowshed_image::StatusExtent| run.depth < depth;
    copy_runs(Runs::new(top, above_base, base), top, base, job).await
}
