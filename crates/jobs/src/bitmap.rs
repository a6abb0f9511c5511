// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Persistent dirty bitmaps of an image that isn't in use: added, removed, cleared, enabled, disabled, merged.

use crate::{ImageSpec, JobHandle};
use cowshed_image::Node;
use cowshed_image::node::{BitmapChange, BitmapStatus, Bitmaps, ChildRole, check_new_bitmap};
use cowshed_types::{Error, ErrorKind, LINE_END, Result};
use std::sync::Arc;

/// Begins the error of a close that loses bitmaps.
const LOST: &str = "Lost persistent bitmaps";

/// A change of a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapAction {
    /// Add it, enabled.
    Add,
    /// Take it away.
    Remove,
    /// Take all bitmaps of the image away, whatever the name.
    RemoveAll,
    /// Nothing is dirty any more.
    Clear,
    /// Record writes from now on.
    Enable,
    /// Stay as it is.
    Disable,
    /// Add the dirty parts of the bitmap of this name.
    Merge(String),
}

/// The changes of one bitmap of one image.
#[derive(Clone, Debug)]
pub struct BitmapOptions {
    /// The image.
    pub image: ImageSpec,
    /// The bitmap; not looked at by [`BitmapAction::RemoveAll`].
    pub name: String,
    /// In this order; changes before an error stay.
    pub actions: Vec<BitmapAction>,
    /// Granularity of a bitmap that is added, in bytes.
    pub granularity_bytes: Option<u64>,
    /// The image with the bitmaps to merge from; the image itself when `None`.
    pub source: Option<ImageSpec>,
}

/// The image or the action that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapStep {
    /// The image could not be opened, or closed.
    Image,
    /// The image to merge from could not be opened.
    Source,
    /// The action with this index failed.
    Action(usize),
}

/// Carries the actions out; an error comes with the step that failed. The image is locked for writing meanwhile.
pub async fn run(options: &BitmapOptions, job: &JobHandle) -> Result<(), (BitmapStep, Error)> {
    let of_image = |error| (BitmapStep::Image, error);
    job.pause_point().await.map_err(of_image)?;
    let request = options.image.request().map_err(of_image)?.force_share(false).writable(true);
    let node = options.image.open(request.no_backing()).await.map_err(of_image)?;
    let result = run_on(&node, options).await;
    let closed = node.close().await.map_err(|error| match error.message().starts_with(LOST) {
        true => {
            let sentence = format!("{LOST} during inactivation of node '{}': No memory", node.name());
            error.qemu(sentence)
        }
        false => error,
    });
    result.and(closed.map_err(of_image))
}

async fn run_on(node: &Node, options: &BitmapOptions) -> Result<(), (BitmapStep, Error)> {
    let source = match &options.source {
        Some(spec) => {
            let of_source = |error| (BitmapStep::Source, error);
            let request = spec.request().map_err(of_source)?;
            let source = spec.open(request.no_backing()).await.map_err(of_source)?;
            if let Err(error) = check_apart(node, &source) {
                source.close().await.map_err(of_source)?;
                return Err(of_source(error));
            }
            Some(source)
        }
        None => None,
    };
    let mut result = Ok(());
    for (index, action) in options.actions.iter().enumerate() {
        result =
            act(node, source.as_deref(), options, action).await.map_err(|error| (BitmapStep::Action(index), error));
        if result.is_err() {
            break;
        }
    }
    if let Some(source) = source {
        let closed = source.close().await.map_err(|error| (BitmapStep::Source, error));
        result = result.and(closed);
    }
    result
}

/// Refuses a source in the image's own file, which an earlier action may have changed by then. Locks show that, where files have
/// them. A data file may be the same: bitmaps are not in it.
fn check_apart(node: &Node, source: &Node) -> Result<()> {
    let identity_of = |node: &Node| {
        node.stored_bitmaps()?;
        node.child(ChildRole::File)?.storage().identity()
    };
    let identity = identity_of(source);
    if identity.is_none() || identity != identity_of(node) {
        return Ok(());
    }
    let message = format!("the bitmaps to merge would be read from '{}': both are one file", node.filename());
    Err(Error::invalid_argument(message).file(source.filename()))
}

async fn act(node: &Node, source: Option<&Node>, options: &BitmapOptions, action: &BitmapAction) -> Result<()> {
    let name = options.name.clone();
    if let (BitmapAction::Add, Some(bytes)) = (action, options.granularity_bytes) {
        check_new_bitmap(&name, bytes)?;
    }
    let stored = match (node.changeable_bitmaps(), action) {
        (Some(stored), _) => stored,
        // There are none to remove.
        (None, BitmapAction::RemoveAll) => return Ok(()),
        (None, _) => return Err(no_bitmaps(node, &name, action)),
    };
    let change = match action {
        BitmapAction::Add => BitmapChange::Add { name, granularity_bytes: options.granularity_bytes, enabled: true },
        BitmapAction::Remove => BitmapChange::Remove(name),
        BitmapAction::RemoveAll => {
            let all = stored.list().await?.into_iter().map(|bitmap| BitmapChange::Remove(bitmap.name));
            return stored.change(&all.collect::<Vec<_>>()).await;
        }
        BitmapAction::Clear => BitmapChange::Clear(name),
        BitmapAction::Enable => BitmapChange::Enable(name),
        BitmapAction::Disable => BitmapChange::Disable(name),
        BitmapAction::Merge(from) => {
            // A fault of the target is reported first.
            stored.bits(&name).await?;
            let source = source.unwrap_or(node);
            let source = source.stored_bitmaps().ok_or_else(|| no_bitmaps(source, from, action))?;
            BitmapChange::Merge { target: name, source: source.bits(from).await? }
        }
    };
    stored.change(&[change]).await.map_err(|error| {
        // QEMU names the node, of which the driver doesn't know.
        let file = format!("persistent in '{}': ", node.filename());
        let sentence = error.message().replacen(&file, &format!("persistent in '{}': ", node.name()), 1);
        if sentence == error.message() { error } else { error.qemu(sentence) }
    })
}

/// A format without bitmaps: none can be added, and other actions find none, in QEMU's words.
fn no_bitmaps(node: &Node, name: &str, action: &BitmapAction) -> Error {
    let file = node.filename();
    let error = match action {
        BitmapAction::Add => {
            let sentence = |of: &str| format!("Can't store persistent bitmaps to {of}: Operation not supported");
            Error::unsupported(sentence(&file)).qemu(sentence(node.name()))
        }
        _ => Error::new(ErrorKind::NotFound, format!("Dirty bitmap '{name}' not found")),
    };
    error.file(file)
}

fn bitmaps_of(node: &Node) -> Result<&dyn Bitmaps> {
    node.stored_bitmaps().ok_or_else(|| {
        let message = format!("images of the format '{}' have no persistent bitmaps", node.driver_name());
        Error::unsupported(message).file(node.filename())
    })
}

/// Fails when `target` can't hold persistent bitmaps.
pub fn check_target(target: &Node) -> Result<()> {
    match target.changeable_bitmaps().is_some_and(Bitmaps::may_have_bitmaps) {
        true => Ok(()),
        false => Err(Error::unsupported(format!("Format driver '{}' does not support bitmaps", target.driver_name()))),
    }
}

/// Fails when `target`, which was there before, has no place for the bitmaps of `source`: a name is taken, or the disks differ
/// in size. Its data isn't written yet.
pub async fn check_existing_target(source: &Node, target: &Node) -> Result<()> {
    let (from, to) = (bitmaps_of(source)?, bitmaps_of(target)?);
    let taken = to.list().await?;
    // QEMU begins with the one that was added last.
    for BitmapStatus { name, .. } in from.list().await?.into_iter().rev() {
        if taken.iter().any(|other| other.name == name) {
            let message = format!("Failed to create bitmap {name}: Bitmap already exists: {name}");
            return Err(Error::invalid_argument(message).file(target.filename()));
        }
        if source.size() != target.size() {
            let message = format!(
                "Failed to populate bitmap {name}: Bitmaps are of different sizes (destination size is {}, source size is \
                 {}) and can't be merged",
                target.size(),
                source.size()
            );
            return Err(Error::invalid_argument(message).file(target.filename()));
        }
    }
    Ok(())
}

/// Copies the persistent bitmaps of `source` to `target`, with their names, granularities and whether they are enabled.
/// Inconsistent ones are an error, or with `skip_broken` left out: their names are returned. The image's data is written.
pub async fn copy(source: &Node, target: &Node, skip_broken: bool) -> Result<Vec<String>> {
    let (from, to) = (bitmaps_of(source)?, bitmaps_of(target)?);
    let (mut changes, mut skipped) = (Vec::new(), Vec::new());
    for BitmapStatus { name, granularity_bytes, enabled, inconsistent } in from.list().await? {
        if inconsistent && skip_broken {
            skipped.push(name);
            continue;
        }
        let mut bits = from.bits(&name).await?;
        if bits.disk_bytes() != target.size() {
            // A target that was there before may be larger.
            Arc::make_mut(&mut bits).resize(target.size());
        }
        let granularity_bytes = Some(granularity_bytes);
        changes.push(BitmapChange::Add { name: name.clone(), granularity_bytes, enabled });
        changes.push(BitmapChange::Merge { target: name, source: bits });
    }
    if !changes.is_empty() {
        to.change(&changes).await?;
    }
    Ok(skipped)
}

/// Fails when a bitmap of `source` can't be copied ([`copy`]), before anything is created.
pub async fn check_copy(source: &Node, skip_broken: bool) -> Result<()> {
    let Some(stored) = source.stored_bitmaps().filter(|stored| stored.may_have_bitmaps()) else {
        return Err(Error::unsupported("Source lacks bitmap support"));
    };
    // QEMU names the one that was added last.
    let broken = stored.list().await?.into_iter().rfind(|bitmap| bitmap.inconsistent);
    match broken.filter(|_| !skip_broken) {
        Some(bitmap) => {
            let message = format!(
                "Cannot copy inconsistent bitmap '{}'{LINE_END}Try --skip-broken-bitmaps, or use 'bitmap --remove' to delete it",
                bitmap.name
            );
            Err(Error::new(cowshed_types::ErrorKind::InvalidImage, message))
        }
        None => Ok(()),
    }
}
