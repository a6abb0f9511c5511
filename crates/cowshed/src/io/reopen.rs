// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `reopen`: the shell's image with other options. An option that the driver can't change while it is open is refused,
//! unless the value is the one that it has.

use super::Shell;
use super::arguments::Arguments;
use super::open::{OpenSpec, close, open, options_of};
use super::outcome::{CommandFailed, Done};
use cowshed_image::DRIVERS;
use cowshed_image::Node;
use cowshed_image::node::ChildRole;
use cowshed_image::options::BlockdevOptions;
use serde_json::Value;

/// Options of every node that may change.
const OF_EVERY_NODE: &[&str] =
    &["read-only", "auto-read-only", "discard", "detect-zeroes", "cache", "backing", "overlap-check"];
/// Options that may change, by their driver.
const BY_DRIVER: &[(&str, &[&str])] = &[
    ("raw", &["offset", "size"]),
    ("file", &["x-check-cache-dropped", "drop-cache"]),
    ("host_device", &["x-check-cache-dropped", "drop-cache"]),
    ("host_cdrom", &["x-check-cache-dropped", "drop-cache"]),
];
/// Options of qcow2 that stay as the image was opened.
const FIXED_IN_QCOW2: &[&str] = &["data-file"];
/// Sizes that stand for one another: those of an earlier reopening don't count any more.
const CACHE_SIZES: [&str; 3] = ["cache-size", "l2-cache-size", "refcount-cache-size"];

pub(super) async fn reopen(shell: &mut Shell, arguments: Arguments) -> Done {
    if !arguments.operands.is_empty() {
        return Err(CommandFailed::usage());
    }
    if arguments.has('r') && arguments.has('w') {
        return Err(CommandFailed::complaint("Only one -r/-w option may be given"));
    }
    let before = shell.opened()?.spec.clone();
    let mut spec = before.clone();
    spec.read_only = (before.read_only || arguments.has('r')) && !arguments.has('w');
    if let Some(mode) = arguments.value('c') {
        spec.cache = Some(mode.to_owned());
    }
    spec.check()?;
    if let Some(text) = arguments.value('o') {
        let options = options_of(text).map_err(|error| CommandFailed::complaint(error.to_string()))?;
        if (arguments.has('r') || arguments.has('w')) && options.get("read-only").is_some() {
            return Err(CommandFailed::complaint("Cannot set both -r/-w and 'read-only'"));
        }
        if arguments.has('c') && options.get("cache").is_some() {
            return Err(CommandFailed::complaint("Cannot set both -c and the cache options"));
        }
        let options = changes(&shell.opened()?.image(), options, !spec.read_only, "")?;
        spec.add(options)?;
    }
    let changes_cache_only = spec.read_only == before.read_only && !arguments.has('o');
    if before.snapshot && changes_cache_only {
        // The overlay's data is gone with the shell, whatever its cache.
        return Ok(());
    }
    if before.snapshot {
        return Err(CommandFailed::complaint("an image with a temporary overlay (-s) can't be opened again"));
    }
    close(shell).await?;
    let opened = open(shell, spec).await;
    if opened.is_err() {
        // As it was: a reopen that fails changes nothing.
        open(shell, before).await?;
    }
    opened
}

/// The options that may change, checked. Others are refused unless the node has them with this value.
fn changes(
    node: &Node,
    options: BlockdevOptions,
    written: bool,
    path: &str,
) -> std::result::Result<BlockdevOptions, CommandFailed> {
    let refused = |key: &str| Err(CommandFailed::complaint(format!("Cannot change the option '{key}'")));
    let driver = node.driver_name();
    let own = BY_DRIVER.iter().find(|(name, _)| *name == driver).map_or(&[][..], |(_, keys)| keys);
    let schema = DRIVERS.schema(driver);
    let mut changed = BlockdevOptions::new();
    for (key, value) in options.iter() {
        let child = match key.as_str() {
            "file" => node.child(ChildRole::File),
            "image" => node.child(ChildRole::Image),
            _ => None,
        };
        if let (Some(child), Value::Object(map)) = (child, value) {
            let below =
                BlockdevOptions::from_map(map.clone()).map_err(|error| CommandFailed::complaint(error.to_string()))?;
            let below = changes(&child, below, written, &format!("{path}{key}."))?;
            if !below.is_empty() {
                changed.insert(key.clone(), below);
            }
            continue;
        }
        if ["backing", "data-file"].contains(&key.as_str())
            && let Value::Object(map) = value
            && node.child(ChildRole::Backing).is_none()
        {
            let inner = map.keys().next().map_or("", String::as_str);
            return refused(&format!("{key}.{inner}"));
        }
        let is_current = match key.as_str() {
            "driver" => value == driver,
            "node-name" => value == node.name(),
            "filename" => value.as_str() == Some(&node.filename()),
            _ => node.options().get(key).is_some_and(|current| current == value),
        };
        if key == "read-only" && written && ["on", "yes", "true", "y"].iter().any(|word| value == word) {
            let message = format!("Read-only block node '{}' cannot support read-write users", node.name());
            return Err(CommandFailed::complaint(message));
        }
        let knows = schema.is_some_and(|schema| schema.knows(key));
        let of_qcow2 = driver == "qcow2" && knows && !FIXED_IN_QCOW2.contains(&key.as_str());
        let fixed = ["driver", "node-name", "force-share", "file"].contains(&key.as_str());
        let may_change = OF_EVERY_NODE.contains(&key.as_str()) || own.contains(&key.as_str()) || of_qcow2;
        match may_change && !fixed {
            true => changed.insert(key.clone(), value.clone()),
            false if is_current => {}
            false => return refused(key),
        }
    }
    match (changed.text("discard"), changed.text("detect-zeroes")) {
        (Some(word), _) if !["ignore", "off", "unmap", "on"].contains(&word) => {
            return Err(CommandFailed::complaint("Invalid discard option"));
        }
        (_, Some(word)) if !["off", "on", "unmap"].contains(&word) => {
            return Err(CommandFailed::complaint(format!("invalid parameter value: {word}")));
        }
        _ => {}
    }
    if let Some(schema) = schema {
        let checked = schema.check_values(&mut changed.clone());
        checked.map_err(|error| CommandFailed::complaint(error.sentence().to_owned()))?;
    }
    Ok(changed)
}

impl OpenSpec {
    /// Lays options over those that the image was opened with.
    fn add(&mut self, more: BlockdevOptions) -> std::result::Result<(), CommandFailed> {
        let complaint = |error: cowshed_types::Error| CommandFailed::complaint(error.to_string());
        let mut options = match self.image_opts {
            true => {
                let text = self.path.take().unwrap_or_default();
                self.image_opts = false;
                BlockdevOptions::from_keyval(&text).map_err(complaint)?
            }
            false => self.options.take().unwrap_or_default(),
        };
        if CACHE_SIZES.iter().any(|size| more.get(size).is_some()) {
            for size in CACHE_SIZES {
                options.remove(size);
            }
        }
        self.options = Some(options.overlaid(more).map_err(complaint)?);
        Ok(())
    }
}
