// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening a LUKS volume.

use super::LuksDriver;
use cowshed_graph::encryption::{Cipher, LuksArea, SectorsOf, Writers};
use cowshed_graph::node::{ChildRole, Driver};
use cowshed_graph::open::{Draft, DriverLine, FirstUse, Opened, Opener, Telling};
use cowshed_graph::options::{DriverKind, DriverSchema, Key, KeyType, REQUIRED};
use cowshed_storage::Permissions;
use cowshed_types::Error;
use std::rc::Rc;
use std::sync::Arc;

const SCHEMA: DriverSchema = DriverSchema {
    name: "luks",
    kind: DriverKind::Format,
    about: "an encrypted volume (LUKS version 1)",
    keys: &[
        Key { name: "file", value: KeyType::Child, default: REQUIRED, help: "the volume" },
        Key {
            name: "header",
            value: KeyType::Child,
            default: "none",
            help: "where its header is, if that is detached",
        },
        Key { name: "key-secret", value: KeyType::Text, default: "", help: "id of the secret with the passphrase" },
    ],
};

/// The line of the table. Its header is read before it has users.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)))
    .asking_first(FirstUse::WhereUsersLock(Permissions::READ.sharing_all()))
    .following_file()
    .telling(Telling::Keys(&["key-secret"]));

async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let child = opener.unshared_file_child(draft).await?;
    let filename = child.filename();
    let named = |error: Error| if error.file_name().is_none() { error.file(filename.clone()) } else { error };
    let file = child.storage();
    let header = match draft.options.get("header").cloned().filter(|header| !header.is_null()) {
        None => None,
        Some(spec) => {
            let place = draft.place.storage("header", !draft.settings.read_only);
            Some(opener.child(draft, ChildRole::Header, spec, place).await?)
        }
    };
    let is_detached = header.is_some();
    let header_file = match &header {
        Some(node) => node.storage(),
        None => file.clone(),
    };
    let area = LuksArea { offset: 0, len: header_file.len(), file: header_file };
    let named_header = |error: Error| match &header {
        Some(node) => error.file(node.filename()),
        None => named(error),
    };
    let secret = match draft.options.text("key-secret") {
        Some(id) if opener.needs_keys(draft) => Some(opener.secret(id).map_err(named)?),
        _ => None,
    };
    opener.require_key(draft, true, draft.options.text("key-secret"), "key-secret").map_err(named)?;
    let volume = area.volume().await.map_err(named_header)?;
    let payload_offset = match is_detached {
        true => 0,
        false => volume.header().payload_offset,
    };
    if !is_detached && payload_offset == 0 {
        let message = "this is a detached header: the volume is another file (options 'header' and 'file')";
        return Err(named(Error::invalid_argument(message).field("luks_payload_offset")));
    }
    let cipher = match &secret {
        None => None,
        Some(secret) => {
            let (_, cipher) = area.unlock(secret).await.map_err(named_header)?;
            let cipher: Arc<dyn Cipher> = Arc::new(SectorsOf { cipher, by_host: false });
            Some(cipher)
        }
    };
    let driver = LuksDriver { file, payload_offset, area, is_detached, cipher, writers: Writers::default() };
    opener.policy().check_size(driver.size()).map_err(named)?;
    Ok((Box::new(driver), filename))
}
