// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header after a change, and the rules of possible changes.

use super::{Amendment, NewBacking};
use crate::snapshots::Image;
use cowshed_layout::qcow2::features::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_KNOWN, AUTOCLEAR_RAW_DATA, COMPAT_LAZY_REFCOUNTS, INCOMPAT_COMPRESSION,
};
use cowshed_layout::qcow2::{Extension, Header, V2_HEADER_LENGTH, extension_type, limits};
use cowshed_types::{Error, ErrorKind, Result, name_of_text};

/// The refcount width of version 2, as log2 of bits.
const V2_REFCOUNT_ORDER: u32 = 4;
/// An L2 table of fresh images with smaller clusters has a header without feature names.
const FEATURE_NAMES_CLUSTER_BYTES: u64 = 8192;

/// The header afterwards; its tables are still those of the old one. `size`: the disk is going to have this many bytes.
pub(super) fn header(image: &Image, amendment: &Amendment, size: Option<u64>) -> Result<Header> {
    let old = &image.header;
    let mut new = old.clone();
    new.autoclear_features &= AUTOCLEAR_KNOWN;
    if amendment.version.is_some_and(|version| version >= 3) && old.version < 3 {
        upgrade(&mut new);
    }
    let is_downgrade = amendment.version == Some(2) && old.version > 2;
    change_refcount_width(&mut new, amendment, is_downgrade)?;
    change_lazy_refcounts(&mut new, amendment, is_downgrade)?;
    if let Some(backing) = &amendment.backing {
        change_backing(&mut new, backing)?;
    }
    change_data_file(&mut new, amendment)?;
    if is_downgrade {
        downgrade(image, &mut new, size)?;
    } else if new.version < 3 && !image.snapshots.is_empty() && size.is_some_and(|size| size != old.size) {
        // Its snapshots have no size of their own.
        let message = "Can't resize a version 2 image which has snapshots";
        let sentence = "Can't resize a v2 image which has snapshots";
        return Err(Error::unsupported(message).field("size").qemu(sentence));
    }
    // Refuses a header that doesn't fit the first cluster.
    if new.encode().is_err_and(|error| error.kind() == ErrorKind::NoSpace) {
        new.remove_extension(extension_type::FEATURE_NAMES);
    }
    new.encode()?;
    Ok(new)
}

/// Version 3 with the bits and names of a fresh image.
fn upgrade(header: &mut Header) {
    let fresh = Header::new(3, header.cluster_bits);
    header.version = fresh.version;
    header.header_length = fresh.header_length;
    header.extra = fresh.extra;
    header.remove_extension(extension_type::FEATURE_NAMES);
    if header.cluster_size() >= FEATURE_NAMES_CLUSTER_BYTES {
        fresh.extensions.into_iter().for_each(|names| header.set_extension(names));
    }
}

fn change_refcount_width(new: &mut Header, amendment: &Amendment, is_downgrade: bool) -> Result<()> {
    let order = amendment.refcount_order.unwrap_or(new.refcount_order);
    if order > 6 {
        let message = "Refcount width must be a power of two and may not exceed 64 bits";
        return Err(Error::invalid_argument(message).field("refcount_bits"));
    }
    let refuse = |message: &str| Err(Error::invalid_argument(message).field("refcount_bits").value(1u32 << order));
    if order != V2_REFCOUNT_ORDER && (new.version < 3 || is_downgrade) {
        return refuse(match amendment.refcount_order {
            Some(_) => {
                "Refcount widths other than 16 bits require compatibility level 1.1 or above (use compat=1.1 or greater)"
            }
            None => "compat=0.10 requires refcount_bits=16",
        });
    }
    new.refcount_order = order;
    Ok(())
}

fn change_lazy_refcounts(new: &mut Header, amendment: &Amendment, is_downgrade: bool) -> Result<()> {
    match amendment.lazy_refcounts {
        Some(true) if new.version < 3 || is_downgrade => {
            let message =
                "Lazy refcounts only supported with compatibility level 1.1 and above (use compat=1.1 or greater)";
            return Err(Error::invalid_argument(message).field("lazy_refcounts"));
        }
        Some(true) => new.compatible_features |= COMPAT_LAZY_REFCOUNTS,
        Some(false) => new.compatible_features &= !COMPAT_LAZY_REFCOUNTS,
        None => {}
    }
    Ok(())
}

fn change_backing(new: &mut Header, backing: &NewBacking) -> Result<()> {
    new.backing_file = match &backing.name {
        Some(name) => Some(checked_name("backing_file", name)?),
        None => None,
    };
    if new.backing_file.is_some() && new.autoclear_features & AUTOCLEAR_RAW_DATA != 0 {
        let message = "an image whose data file is raw (data_file_raw) can't have a backing file";
        return Err(Error::invalid_argument(message).field("backing_file"));
    }
    match backing.format.as_ref().filter(|_| new.backing_file.is_some()) {
        Some(format) => new.set_extension(Extension::BackingFormat(format.as_bytes().to_vec())),
        None => new.remove_extension(extension_type::BACKING_FORMAT),
    }
    Ok(())
}

fn change_data_file(new: &mut Header, amendment: &Amendment) -> Result<()> {
    if let Some(name) = &amendment.data_file {
        if !new.has_data_file() {
            let message = "data-file can only be set for images that use an external data file";
            return Err(Error::invalid_argument(message).field("data_file"));
        }
        match name.is_empty() {
            true => new.remove_extension(extension_type::DATA_FILE),
            false => new.set_extension(Extension::DataFile(checked_name("data_file", name)?)),
        }
    }
    match amendment.data_file_raw {
        Some(true) if !new.is_data_file_raw() => {
            let message = "data-file-raw cannot be set on existing images";
            Err(Error::invalid_argument(message).field("data_file_raw"))
        }
        Some(false) => {
            new.autoclear_features &= !AUTOCLEAR_RAW_DATA;
            Ok(())
        }
        _ => Ok(()),
    }
}

fn checked_name(field: &'static str, name: &str) -> Result<Vec<u8>> {
    let name = name_of_text(name).into_owned();
    if name.contains(&0) {
        return Err(Error::invalid_argument("the file name contains a NUL").field(field));
    }
    if name.len() > limits::NAME_BYTES {
        let message = format!("the file name is longer than the {} bytes that a header may hold", limits::NAME_BYTES);
        return Err(Error::invalid_argument(message).field(field).value(format!("{} bytes", name.len())));
    }
    Ok(name)
}

/// Version 2, unless the image uses features that it can't hold. Compressed clusters are another look:
/// `Rewrite::check_method`.
fn downgrade(image: &Image, new: &mut Header, size: Option<u64>) -> Result<()> {
    let refuse = |message: String| Err(Error::unsupported(message).field("compat"));
    if new.has_data_file() {
        return refuse("Cannot downgrade an image with a data file".to_owned());
    }
    // Its method doesn't matter as long as nothing is compressed.
    let features = new.incompatible_features & !INCOMPAT_COMPRESSION;
    if features != 0 {
        return refuse(format!("Cannot downgrade an image with incompatible features {features:#x} set"));
    }
    let sizes = image.snapshots.iter().filter_map(|snapshot| snapshot.disk_size_bytes());
    let disk = size.unwrap_or(new.size);
    if sizes.into_iter().any(|size| size != disk) {
        return refuse("Internal snapshots prevent downgrade of image".to_owned());
    }
    if new.autoclear_features & AUTOCLEAR_BITMAPS != 0 {
        return refuse("the image has dirty bitmaps, which version 2 can't hold: remove them first".to_owned());
    }
    new.version = 2;
    new.header_length = V2_HEADER_LENGTH;
    new.extra.clear();
    new.incompatible_features = 0;
    new.compression_type = 0;
    new.compatible_features = 0;
    new.autoclear_features = 0;
    new.remove_extension(extension_type::FEATURE_NAMES);
    new.remove_extension(extension_type::BITMAPS);
    Ok(())
}
