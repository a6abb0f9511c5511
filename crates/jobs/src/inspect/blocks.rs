// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The demands of an image whose format keeps a disk in blocks: a backing file at most, and only qcow and QED have one.

use super::{Asked, Inspection, strange_name};
use cowshed_image::OpenRequest;
use cowshed_image::open::Policy;
use cowshed_image::options::BlockdevOptions;
use cowshed_types::Result;

/// The formats that are judged here.
pub(super) const FORMATS: &[&str] = &["vdi", "vpc", "vhdx", "qcow", "qed", "parallels"];

/// Adds the facts in the header. The limits are those for images from strangers, and nothing else is opened.
pub(super) async fn inspect(inspection: &mut Inspection, path: &str) {
    if let Err(error) = look(inspection, path).await {
        inspection.suspicions.push(error.to_string());
    }
}

async fn look(inspection: &mut Inspection, path: &str) -> Result<()> {
    let file = BlockdevOptions::new().with("driver", "file").with("filename", path).with("locking", "off");
    let options = BlockdevOptions::new().with("driver", inspection.format.as_str()).with("file", file);
    let request = OpenRequest::options(options).policy(Policy::untrusted()).no_backing().no_io();
    let node = cowshed_image::open(request).await?;
    inspection.virtual_size = Some(node.size());
    let description = node.description().unwrap_or_default();
    node.close().await?;
    let Some(name) = description.backing_name else {
        // VDI knows its parent by UUIDs alone.
        if description.specific.pointer("/data/parent-uuid").is_some() {
            let format = Some(inspection.format.clone());
            inspection.asks_for.push(Asked { role: "backing-file", name: None, format });
        }
        return Ok(());
    };
    if let Some(strange) = strange_name(&name) {
        inspection.suspicions.push(format!("the name of its backing-file is {strange}"));
    }
    if description.backing_format.is_none() {
        let text = "it doesn't say the format of its backing file, whose content would decide";
        inspection.suspicions.push(text.to_owned());
    }
    let format = description.backing_format.map(str::to_owned);
    inspection.asks_for.push(Asked { role: "backing-file", name: Some(name), format });
    Ok(())
}
