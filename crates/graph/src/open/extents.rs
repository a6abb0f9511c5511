// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that hold parts of a disk, on the word of a descriptor. They are opened only where the policy lets an image
//! name them, and only in the descriptor's own folder, unless the user allows another. In a folder of uploads the
//! neighbour's file is as near as the image's own parts.

use super::build::{Draft, Opener, Role, TreePlace};
use super::names::driver_for;
use crate::options::BlockdevOptions;
use cowshed_storage::path_of_text;
use cowshed_types::{Error, ErrorKind, Result};
use std::path::{Component, Path, PathBuf};

/// The place of a part of a disk, and the driver that opens it.
pub struct ExtentPlace {
    pub filename: String,
    pub options: BlockdevOptions,
    pub place: TreePlace,
}

impl Opener {
    /// The place of the file `name` that the descriptor in file `image` names as its part `index`. A name is a plain
    /// path and nothing else; it may not lead out of the image's folder unless `anywhere` (the user's word).
    pub fn extent_place(
        &self,
        draft: &Draft,
        image: &str,
        name: &str,
        index: usize,
        anywhere: bool,
    ) -> Result<ExtentPlace> {
        if !self.policy.allow_extents {
            let message = format!(
                "the image names the file '{}' as a part of its disk, which the policy for this image doesn't allow \
                 ('--allow extents' does)",
                name.escape_debug()
            );
            return Err(Error::new(ErrorKind::PermissionDenied, message).file(image));
        }
        // A plain join: a name with a colon or a "json:" in front is a file name all the same.
        let joined = match image.rfind('/') {
            _ if Path::new(name).is_absolute() => name.to_owned(),
            _ if image.starts_with("json:") => {
                let message = format!("can't resolve the relative name '{name}': the image has no file name");
                return Err(Error::invalid_argument(message).file(image));
            }
            Some(end) => format!("{}{name}", &image[..=end]),
            None => name.to_owned(),
        };
        let mut place = TreePlace {
            role: Role::Storage,
            // New grains go where another writer would put its own.
            share_writes: false,
            ..draft.place.storage(&format!("extents.{index}"), !draft.settings.read_only)
        };
        let driver = if anywhere { driver_for(&joined, &*self.files) } else { "file" };
        if !anywhere {
            check_inside(name, image)?;
            if !self.policy.allow_extent_links {
                place.beneath = Some(folder_of(image));
            }
        }
        let options = BlockdevOptions::new().with("driver", driver).with("filename", joined.clone());
        Ok(ExtentPlace { filename: joined, options, place })
    }
}

fn check_inside(name: &str, image: &str) -> Result<()> {
    let goes_down = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
    if Path::new(name).components().all(goes_down) {
        return Ok(());
    }
    let message = format!(
        "the image names the file '{}', which is not in its own folder; the option 'extents=anywhere' allows it",
        name.escape_debug()
    );
    Err(Error::new(ErrorKind::PermissionDenied, message).file(image))
}

fn folder_of(image: &str) -> PathBuf {
    match path_of_text(image).parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}
