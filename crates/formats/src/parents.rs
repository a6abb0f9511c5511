// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parents of differencing images: their names, and whether they are the right ones.

use super::blocks::BlockFormat;
use cowshed_graph::node::Node;
use cowshed_graph::open::{BackingReference, Draft, Opener};
use cowshed_types::{Error, Result};

/// The parent of a difference. `name`: its file, relative to the image, where the image has one. `what` names it
/// otherwise.
pub(crate) fn parent_of<F: BlockFormat>(
    opener: &Opener,
    draft: &Draft,
    name: Option<String>,
    what: &str,
) -> Result<BackingReference> {
    if name.is_none() && opener.opens_backing(draft) && draft.options.get("backing").is_none() {
        let parent = match what {
            "" => "a parent".to_owned(),
            what => format!("the parent {what}"),
        };
        let message =
            format!("the disk is a difference of {parent}, and names no file: say which one it is with 'backing'");
        return Err(Error::invalid_image("parent", "missing", message));
    }
    Ok(BackingReference { name, format: Some(F::NAME.to_owned()) })
}

/// Refuses a parent whose content is another than the image was made of. A parent of another format is the user's choice.
pub(crate) fn check_identity(parent: &Node, field: &'static str, wanted: &[String]) -> Result<()> {
    match parent.description().and_then(|known| known.identity) {
        Some(found) if !wanted.contains(&found) => {
            let message =
                format!("'{}' is not the parent of this disk, or was changed since: it is {found}", parent.filename());
            Err(Error::invalid_image(field, wanted.join(", "), message))
        }
        _ => Ok(()),
    }
}
