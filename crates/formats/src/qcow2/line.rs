// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's line in the table, and its opening from options.

use super::Qcow2Driver;
use super::children::{context, encrypt_key};
use super::options::runtime_options;
use super::schema::SCHEMA;
use cowshed_graph::node::ChildRole;
use cowshed_graph::open::{Draft, DriverLine, Opened, Opener, Telling};
use cowshed_offline::read_header_as;
use cowshed_types::{Error, Result};
use std::rc::Rc;
use std::sync::Arc;

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)))
    .prepared_by(warn_of_old_words)
    .telling(Telling::Keys(&["encrypt.key-secret"]));

fn warn_of_old_words(opener: &Opener, draft: &mut Draft) -> Result<()> {
    if draft.options.text("backing") == Some("") {
        opener.warn("Use of \"backing\": \"\" is deprecated; use \"backing\": null instead".to_owned());
    }
    Ok(())
}

async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let child = opener.unshared_file_child(draft).await?;
    let filename = child.filename();
    let in_file = |error: Error| error.file(filename.clone());
    let file = child.storage();
    let options = runtime_options(&draft.options, draft.settings.discard).map_err(in_file)?;
    let header = read_header_as(&file, opener.checks(draft)).await.map_err(in_file)?;
    opener.policy().check_header(&header).map_err(in_file)?;
    let key = encrypt_key(draft);
    opener.require_key(draft, header.crypt_method != 0, key, "encrypt.key-secret").map_err(in_file)?;
    // A request about the snapshots themselves gets the error from their reader.
    let is_asked = opener.check || opener.no_io || opener.no_content;
    let reads_disk = draft.settings.read_only && (draft.is_metadata || !is_asked);
    if let Err(error) = header.check_snapshot_table_within(file.len())
        && reads_disk
    {
        let text = format!("{}; the disk is read, internal snapshots can't be", in_file(error));
        opener.warn(text);
    }
    let context = context(opener, draft, &filename, file, &header, options).await?;
    let driver = Qcow2Driver::open(context).await.map_err(in_file)?;
    draft.children.share(ChildRole::Backing, Arc::clone(driver.backing_link()));
    Ok((Box::new(driver), filename))
}
