// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes format options of an image that exists.
//!
//! Options of the header and the refcounts are in `cowshed_offline::amend`. The size is changed as `resize` does it. Key
//! slots of encrypted images have a file of their own here.

use crate::snapshot::file_of;
use crate::{ImageSpec, JobHandle, in_work, key_slots};
use cowshed_create::schema::{CreateOption, LUKS, LUKS_SLOTS, OptionValues, QCOW2, amended_options_of};
use cowshed_image::{Node, OpenRequest, Preallocation};
use cowshed_offline::amend::{self, Amendment, NewBacking};
use cowshed_storage::fault::as_metadata;
use cowshed_types::{Error, LINE_END, Result};
use std::sync::Arc;

/// The options of an amendment.
#[derive(Clone, Debug, Default)]
pub struct AmendOptions {
    /// The image.
    pub image: ImageSpec,
    /// `-o`: each a `key=value,key=value` list.
    pub options: Vec<String>,
    /// Another backing file can't be named, as in qemu-img: `rebase` does that.
    pub keeps_backing: bool,
    /// `--force`: allows changes that lose the last way to the data.
    pub force: bool,
}

/// The parsed options.
#[derive(Clone, Debug)]
struct Wanted {
    amendment: Amendment,
    size: Option<u64>,
    key_slots: bool,
    values: OptionValues,
}

/// Amends. Every refusal comes before the first change. After an error or a power cut in between the image is whole,
/// with some of the changes made.
pub async fn run(options: &AmendOptions, job: &JobHandle) -> Result<()> {
    job.pause_point().await?;
    let node = open_bare(&options.image).await?;
    if node.encrypted_volume().is_some() {
        let amended = amend_luks(&node, options).await;
        let closed = node.close().await;
        return amended.and(closed);
    }
    let wanted = wanted(&node, options);
    let wanted = match wanted {
        Ok(wanted) => wanted,
        Err(error) => {
            let _ = node.close().await;
            return Err(error);
        }
    };
    // Nothing of it is done yet.
    job.set_progress(0, 1);
    let result = amend_bare(&node, options, &wanted, job).await;
    let closed = node.close().await;
    result.and(closed)?;
    let Some(size) = wanted.size else { return Ok(()) };
    // A version 2 image is made so last: before, it could not be resized with its snapshots.
    let (first, last) = in_turns(&wanted.amendment);
    debug_assert!(first.version != Some(2));
    resize(&options.image, size).await?;
    if last.is_empty() {
        return Ok(());
    }
    let node = open_bare(&options.image).await?;
    let result = change(&node, &last, job).await;
    let closed = node.close().await;
    result.and(closed)
}

/// With a new size the change of version comes before it or after it.
fn in_turns(amendment: &Amendment) -> (Amendment, Amendment) {
    match amendment.version {
        Some(2) => {
            let first = Amendment { version: None, ..amendment.clone() };
            (first, Amendment { version: Some(2), ..Amendment::default() })
        }
        _ => (amendment.clone(), Amendment::default()),
    }
}

async fn open_bare(image: &ImageSpec) -> Result<Arc<Node>> {
    let request: OpenRequest = image.request()?.force_share(false).writable(true);
    image.open(request.for_check().trying_keys()).await
}

/// A LUKS volume has nothing but its key slots.
async fn amend_luks(node: &Node, options: &AmendOptions) -> Result<()> {
    let lists = &options.options;
    let values = OptionValues::parse(LUKS_SLOTS, lists).map_err(|error| only_for_creation(LUKS, error, lists))?;
    key_slots::amend(node, &options.image, &values, options.force).await
}

async fn amend_bare(node: &Node, options: &AmendOptions, wanted: &Wanted, job: &JobHandle) -> Result<()> {
    let file = file_of(node)?;
    as_metadata(amend::check(&file, &wanted.amendment, wanted.size)).await?;
    if wanted.size.is_some_and(|size| !size.is_multiple_of(512)) {
        return Err(Error::invalid_argument("The new size must be a multiple of 512").field("size").file(file.name()));
    }
    if wanted.key_slots {
        key_slots::amend(node, &options.image, &wanted.values, options.force).await?;
    }
    match wanted.size {
        None => change(node, &wanted.amendment, job).await,
        Some(_) => change(node, &in_turns(&wanted.amendment).0, job).await,
    }
}

async fn change(node: &Node, amendment: &Amendment, job: &JobHandle) -> Result<()> {
    if amendment.is_empty() {
        return Ok(());
    }
    let watch = |done: u64, total: u64| {
        job.set_progress(done, total);
        !job.is_cancelled()
    };
    let amended = as_metadata(amend::amend(&file_of(node)?, amendment, true, &watch)).await;
    let sentence = match amendment.refcount_order {
        Some(_) => "Failed to write refblock",
        None => "Failed to update the image header",
    };
    amended.map_err(|error| in_work(error, sentence))
}

/// Shrinks as well as grows: a named size is meant.
async fn resize(image: &ImageSpec, size: u64) -> Result<()> {
    let node = image.open(image.request()?.force_share(false).writable(true).for_resize()).await?;
    let sentence = match node.mapped_bytes().is_some_and(|reach| size > reach) {
        true => "Failed to grow the L1 table",
        false => "Failed to update the image size",
    };
    let result = match node.resize(size, Preallocation::Off).await {
        Ok(()) => node.flush().await,
        Err(error) => Err(error),
    };
    let closed = node.close().await;
    result.and(closed).map_err(|error| in_work(error, sentence))
}

/// Explains that an option is one of `create` only.
fn only_for_creation(created: &'static [CreateOption], error: Error, lists: &[String]) -> Error {
    let unknown = match OptionValues::parse(created, lists) {
        // Options of the file below are no options of the format. They may stand behind one that is.
        Ok(values) if ["nocow", "extent_size_hint"].iter().any(|option| values.is_given(option)) => return error,
        Ok(_) => {
            let message = format!("{}{LINE_END}This option is only supported for image creation", error.sentence());
            return Error::new(error.kind(), message);
        }
        Err(unknown) => unknown,
    };
    // The first look has named the wrong one of several.
    if unknown.message() == error.message() { unknown } else { error }
}

fn wanted(node: &Node, options: &AmendOptions) -> Result<Wanted> {
    let lists = &options.options;
    let format = node.driver_name();
    let refused = || Error::unsupported(format!("Format driver '{format}' does not support option amendment"));
    let (Some(known), Some(metadata)) = (amended_options_of(format), node.metadata()) else {
        return Err(refused().file(node.filename()));
    };
    let values = OptionValues::parse(known, lists).map_err(|error| only_for_creation(QCOW2, error, lists))?;
    let header = metadata.header();
    let version = match values.get("compat") {
        None => None,
        Some("0.10" | "v2") => Some(2),
        Some("1.1" | "v3") => Some(3),
        Some(other) => {
            return Err(Error::invalid_argument(format!("Unknown compatibility level {other}")).field("compat"));
        }
    };
    let refcount_order = match values.number("refcount_bits").filter(|_| values.is_given("refcount_bits")) {
        None => None,
        Some(bits) if bits.is_power_of_two() && bits <= 64 => Some(bits.trailing_zeros()),
        Some(bits) => {
            let message = "Refcount width must be a power of two and may not exceed 64 bits";
            return Err(Error::invalid_argument(message).field("refcount_bits").value(bits));
        }
    };
    let switch = |key: &str| values.is_given(key).then(|| values.switch(key));
    let backing = (values.is_given("backing_file") || values.is_given("backing_fmt")).then(|| NewBacking {
        name: match values.get("backing_file") {
            Some(name) => Some(name.to_owned()).filter(|name| !name.is_empty()),
            None => header.backing_file_name().map(|name| name.into_owned()),
        },
        format: match values.get("backing_fmt") {
            Some(format) => Some(format.to_owned()).filter(|format| !format.is_empty()),
            None => header.backing_format().map(|format| format.into_owned()),
        },
    });
    let named = NewBacking {
        name: header.backing_file_name().map(|name| name.into_owned()),
        format: header.backing_format().map(|format| format.into_owned()),
    };
    let is_said_as_it_is =
        values.get("backing_file") == named.name.as_deref() && values.get("backing_fmt") == named.format.as_deref();
    if backing.is_some() && options.keeps_backing && !is_said_as_it_is {
        let message = format!("Cannot amend the backing file{LINE_END}You can use 'qemu-img rebase' instead.");
        return Err(Error::invalid_argument(message));
    }
    let backing = backing.filter(|backing| *backing != named);
    Ok(Wanted {
        amendment: Amendment {
            version: version.filter(|version| *version != header.version),
            refcount_order,
            lazy_refcounts: switch("lazy_refcounts"),
            backing,
            data_file: values.get("data_file").map(str::to_owned),
            data_file_raw: switch("data_file_raw"),
        },
        // QEMU takes 0 for "not given"; no user gives up a whole disk so.
        size: values.number("size").filter(|size| *size != 0),
        key_slots: known.iter().any(|option| option.name.starts_with("encrypt.") && values.is_given(option.name)),
        values,
    })
}
