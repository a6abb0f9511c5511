// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The children of a qcow2 image: its data file and its backing file. They and the other needs of its driver come from
//! the options or from the header.

use crate::{EncryptionOptions, OpenContext, Qcow2RuntimeOptions};
use cowshed_graph::node::ChildRole;
use cowshed_graph::open::{BackingReference, Draft, Opener, Role, TreePlace};
use cowshed_layout::qcow2::Header;
use cowshed_storage::File;
use cowshed_types::{Error, Result};
use serde_json::Value;
use std::rc::Rc;

/// Opens the children of the image in `file` and puts the context of its driver together.
pub(super) async fn context(
    opener: &Rc<Opener>,
    draft: &mut Draft,
    image: &str,
    file: File,
    header: &Header,
    options: Qcow2RuntimeOptions,
) -> Result<OpenContext> {
    let data_file = data_file(opener, draft, image, header).await?;
    let named = BackingReference {
        name: header.backing_file_name().map(|name| name.into_owned()),
        format: header.backing_format().map(|format| format.into_owned()),
    };
    let (backing, no_backing) = opener.backing_child(draft, image, &named).await?;
    let encryption = encryption(opener, draft, header.crypt_method != 0).map_err(|error| error.file(image))?;
    Ok(OpenContext {
        encryption,
        file,
        file_name: image.to_owned(),
        data_file,
        backing,
        options,
        writable: !draft.settings.read_only,
        check: opener.checks(draft),
        no_backing,
        no_data: draft.settings.no_data,
        snapshot: opener.snapshot.clone().filter(|_| draft.place.role == Role::Root),
        max_decompressed_bytes: opener.policy().max_decompressed_bytes,
    })
}

fn encrypt_option<'a>(draft: &'a Draft, key: &str) -> Option<&'a str> {
    let Some(Value::Object(map)) = draft.options.get("encrypt") else { return None };
    map.get(key).and_then(Value::as_str)
}

/// The id of the secret that opens the image, where the options name one.
pub(super) fn encrypt_key(draft: &Draft) -> Option<&str> {
    encrypt_option(draft, "key-secret")
}

/// The options of encryption. The image's own statements need no key.
fn encryption(opener: &Opener, draft: &Draft, is_encrypted: bool) -> Result<EncryptionOptions> {
    let secret = match encrypt_key(draft) {
        Some(id) if is_encrypted && opener.needs_keys(draft) => Some(opener.secret(id)?),
        _ => None,
    };
    Ok(EncryptionOptions { format: encrypt_option(draft, "format").map(str::to_owned), secret })
}

async fn data_file(opener: &Rc<Opener>, draft: &mut Draft, image: &str, header: &Header) -> Result<Option<File>> {
    let given = draft.options.get("data-file").cloned();
    if !header.has_data_file() {
        // As in QEMU it is nothing wrong to give one: the image needs no second file.
        return Ok(None);
    }
    let spec = match (given, header.data_file_name()) {
        // The image's own statements need no data: nothing is opened on the image's word then.
        _ if opener.no_io && !draft.is_metadata => {
            draft.settings.no_data = true;
            draft.options.remove("data-file");
            return Ok(None);
        }
        (Some(spec), _) => spec,
        (None, None) => {
            let message = "'data-file' is required for this image: its header names none";
            return Err(Error::invalid_argument(message).file(image).qemu("'data-file' is required for this image"));
        }
        (None, Some(name)) => opener.data_file_by_name(&name, image)?.into(),
    };
    let place =
        TreePlace { is_metadata: draft.is_metadata, ..draft.place.storage("data-file", !draft.settings.read_only) };
    let node = opener.child(draft, ChildRole::DataFile, spec, place).await;
    let node = node.map_err(|error| error.context(format!("could not open the data file of '{image}'")))?;
    Ok(Some(node.storage()))
}
