// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk of a package as the source of a conversion.

use super::archive::{aside, folder_of};
use crate::output::{Console, Failure};
use cowshed_image::open::Policy;
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_ova::tar::printable;
use cowshed_ova::{Package, PackedDisk, Stamps};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::json;
use std::path::Path;
use tempfile::NamedTempFile;

/// A chosen disk.
pub struct ChosenDisk {
    /// The description for its opening.
    pub spec: ImageSpec,
    /// Its length by the descriptor, in bytes.
    capacity_bytes: Option<u64>,
    /// Its name in messages, in place of the name in `spec`.
    pub shown: String,
    /// The manifest that its files were compared with.
    has_manifest: bool,
    /// Its files as they were before that.
    stamps: Stamps,
    /// The names that messages may have for it.
    names: [String; 2],
    /// The file that pieces were put together in.
    joined: Option<NamedTempFile>,
}

/// Chooses a disk and compares its files with the manifest. `target` is where pieces are put together; `is_untrusted`: in a
/// process that can make no other files.
pub fn choose(
    package: &Package,
    wanted: Option<&str>,
    image: &ImageSpec,
    target: &Path,
    is_untrusted: bool,
    job: &JobHandle,
) -> Result<ChosenDisk> {
    let disk = find(package, wanted)?;
    if disk.is_gzip {
        let name = printable(&disk.name);
        for reference in package.envelope.files.iter().filter(|reference| reference.href == disk.name) {
            if package.is_plain(reference)? {
                let message = format!("disk '{name}' isn't stored with gzip, as its package says (ovf:compression)");
                return Err(Error::new(ErrorKind::InvalidImage, message));
            }
        }
        let message =
            format!("disk '{name}' is stored with gzip: unpack the package, and decompress that file (gunzip)");
        return Err(Error::unsupported(message));
    }
    let stamps = package.stamps(&disk)?;
    let is_ended = || job.is_cancelled();
    let has_manifest = package.manifest.is_some();
    // Pieces are compared when they are put together.
    let in_place = match disk.pieces.as_slice() {
        // A window of a file has whole sectors.
        [piece] if !package.is_archive() || piece.len.is_multiple_of(512) => Some(piece),
        _ => None,
    };
    for name in disk.pieces.iter().map(|piece| piece.name.as_str()).chain([package.descriptor.as_str()]) {
        let is_named = package.manifest.iter().any(|manifest| manifest.of(name).is_some());
        if has_manifest && !is_named {
            return Err(package.no_digest(name));
        }
        if in_place.is_some() || name == package.descriptor {
            package.check_digest(name, &is_ended)?;
        }
    }
    let (name, joined) = match in_place {
        Some(piece) => {
            let file = json!({ "driver": "file", "filename": piece.path.display().to_string() });
            let file = match package.is_archive() {
                true => json!({ "driver": "raw", "offset": piece.offset, "size": piece.len, "file": file }),
                false => file,
            };
            (json!({ "driver": disk.format, "file": file }), None)
        }
        None if is_untrusted => {
            let what = match disk.pieces.as_slice() {
                [piece] => format!("a disk of no whole number of sectors ({} bytes)", piece.len),
                _ => "a disk in pieces".to_owned(),
            };
            let message =
                format!("{what} is put together in another file first, which --untrusted doesn't make: unpack it");
            return Err(Error::unsupported(message));
        }
        None => {
            let mut joined = aside(target)?;
            for piece in &disk.pieces {
                let member = package.member(&piece.name).ok_or_else(|| Error::internal("a piece without a file"))?;
                let copied = package.copy(member, joined.as_file_mut(), None, &is_ended);
                copied.map_err(|error| error.file(folder_of(joined.path()).display().to_string()))?;
            }
            let file = json!({ "driver": "file", "filename": joined.path().display().to_string() });
            (json!({ "driver": disk.format, "file": file }), Some(joined))
        }
    };
    let policy = Policy {
        // Its names lead out of the package.
        allow_backing: false,
        allow_data_file: false,
        allow_extents: false,
        allow_json: false,
        ..image.policy.clone()
    };
    let names = [format!("json:{name}"), format!("json:{}", name["file"])];
    let name = names[0].clone();
    let shown = format!("{}: disk '{}'", image.name, printable(&disk.name));
    let spec = ImageSpec { name, format: None, image_opts: false, policy, ..image.clone() };
    Ok(ChosenDisk { spec, capacity_bytes: disk.capacity_bytes, shown, has_manifest, stamps, names, joined })
}

impl ChosenDisk {
    /// Prints the warnings about the copied disk, which has `bytes`.
    ///
    /// # Errors
    /// A file that was changed meanwhile.
    pub fn print_warnings(&self, bytes: u64, console: &mut Console) -> Result<(), Failure> {
        self.stamps.check().map_err(|error| Failure::new(error.to_string()))?;
        let shown = &self.shown;
        if !self.has_manifest {
            console.complain(format_args!("warning: {shown} is unchecked: there is no manifest"));
        }
        if let Some(said) = self.capacity_bytes.filter(|said| *said != bytes) {
            console.complain(format_args!("warning: {shown} has {bytes} bytes, and its package says {said}"));
        }
        Ok(())
    }

    /// An error or a message about the disk, in words that the user gave.
    pub fn named(&self, failure: Failure) -> Failure {
        let mut message = failure.message.clone();
        for name in &self.names {
            message = message.replace(name, &self.shown);
        }
        let joined = self.joined.as_ref().and_then(|file| file.path().file_name()?.to_str().map(str::to_owned));
        if let Some((_, behind)) =
            joined.and_then(|name| message.rsplit_once(&name).map(|(a, b)| (a.to_owned(), b.to_owned())))
        {
            message = format!("{}{behind}", self.shown);
        }
        // A name in a disk leads out of its package, whatever is allowed.
        if let Some((before, hint)) = message.split_once(" ('--allow ")
            && let Some((_, behind)) = hint.split_once(" does)")
        {
            message = format!("{before}{behind}");
        }
        Failure { message, ..failure }
    }
}

/// The disk with this number, name or id; the only one without any.
fn find(package: &Package, wanted: Option<&str>) -> Result<PackedDisk> {
    let envelope = &package.envelope;
    // As the descriptor has them, for a disk that can't be read may be the right one.
    let disks: Vec<(&str, &str)> = (envelope.disks.iter())
        .filter_map(|disk| Some((disk, disk.file.as_deref()?)))
        .map(|(disk, file)| (disk.id.as_str(), envelope.file(file).map_or("?", |file| file.href.as_str())))
        .collect();
    let list = |shown: &mut dyn Iterator<Item = usize>| {
        let shown = shown.map(|index| {
            format!("{} ({})", index + 1, disks.get(index).map_or("?".to_owned(), |disk| printable(disk.1)))
        });
        shown.collect::<Vec<_>>().join(", ")
    };
    let nth = |index: usize| {
        let lacking = || Err(Error::new(ErrorKind::InvalidImage, "the package has no disk"));
        package.disks().nth(index).unwrap_or_else(lacking)
    };
    let Some(wanted) = wanted else {
        return match disks.len() {
            0 | 1 => nth(0),
            count => {
                let names = list(&mut (0..count));
                Err(Error::invalid_argument(format!("the package has several disks: choose one with --disk: {names}")))
            }
        };
    };
    let number = wanted.parse::<usize>().ok().and_then(|number| number.checked_sub(1));
    let found: Vec<usize> = (disks.iter().enumerate())
        .filter(|&(index, &(id, name))| id == wanted || name == wanted || Some(index) == number)
        .map(|(index, _)| index)
        .collect();
    let shown = printable(wanted);
    match found.as_slice() {
        [index] => nth(*index),
        [] => {
            let names = list(&mut (0..disks.len()));
            Err(Error::new(ErrorKind::NotFound, format!("the package has no disk '{shown}': it has {names}")))
        }
        _ => {
            let names = list(&mut found.iter().copied());
            Err(Error::invalid_argument(format!("'{shown}' is the number, name or id of several disks: {names}")))
        }
    }
}
