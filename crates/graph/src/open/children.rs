// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The backing file of an image, from the options or on the header's word, and keys.

use super::BackingPolicy;
use super::build::{Draft, Opener, Role, TreePlace, named};
use super::file_names::WithoutWord;
use super::names::{driver_for, file_options, resolve};
use crate::node::{ChildRole, Node};
use crate::options::{BlockdevOptions, first_leaf};
use crate::secret::Secret;
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::Value;
use std::rc::Rc;
use std::sync::Arc;

/// The backing file as an image names it.
#[derive(Clone, Debug, Default)]
pub struct BackingReference {
    /// Its name.
    pub name: Option<String>,
    /// Its format.
    pub format: Option<String>,
}

impl Opener {
    /// False where only the image's own words are asked for.
    pub fn needs_keys(&self, draft: &Draft) -> bool {
        draft.is_metadata || (!self.no_io && !self.no_keys && (!self.check || self.try_keys))
    }

    /// True when the image is opened to be checked.
    pub fn checks(&self, draft: &Draft) -> bool {
        self.check && !draft.is_metadata
    }

    /// True when the size is going to be changed, and nothing else uses the image.
    pub fn resizes(&self) -> bool {
        self.resizes
    }

    /// Refuses an encrypted image without a secret from the option `name`, where its content is to be read.
    pub fn require_key(&self, draft: &Draft, is_encrypted: bool, given: Option<&str>, name: &str) -> Result<()> {
        let is_read = draft.is_metadata || !(self.no_content || self.no_io || self.check);
        if !is_encrypted || given.is_some() || !is_read {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("Parameter '{name}' is required for cipher")))
    }

    /// The secret with this id.
    pub fn secret(&self, id: &str) -> Result<Secret> {
        let given = self.secrets.iter().find(|(known, _)| known == id).map(|(_, secret)| secret.clone());
        let secret = given.or_else(|| self.graph.secret(id));
        secret.ok_or_else(|| Error::invalid_argument(format!("No secret with id '{id}'")))?.passphrase(id)
    }

    /// The options of the file that an image names as its data file. Other than a backing file's name, this one is relative to
    /// the working directory, as in QEMU: when the image is made, too. It names a file also where it looks like an address or
    /// like options.
    pub fn data_file_by_name(&self, name: &str, image: &str) -> Result<BlockdevOptions> {
        self.policy.check(self.policy.allow_data_file, "the data file", name, image)?;
        Ok(file_options(driver_for(name, &*self.files), name))
    }

    /// True when the backing file is to be opened, or the options name one. As in QEMU only the root goes without.
    pub fn opens_backing(&self, draft: &Draft) -> bool {
        draft.is_metadata || draft.place.role != Role::Root || self.backing != BackingPolicy::None
    }

    /// Refuses options of a backing file that isn't opened, as QEMU does: nothing would look at them.
    fn refuse_unused_backing(&self, draft: &Draft) -> Result<()> {
        let given = draft.options.get("backing").filter(|given| given.is_object() || given.is_string());
        let Some(option) = given.map(|given| first_leaf("backing", given)) else { return Ok(()) };
        let driver = draft.options.text("driver").unwrap_or_default();
        Err(Error::invalid_argument(format!("Block format '{driver}' does not support the option '{option}'")))
    }

    /// Opens the backing file of the image in file `image`. The second is true when there is one and it was left out.
    pub async fn backing_child(
        self: &Rc<Self>,
        draft: &mut Draft,
        image: &str,
        named: &BackingReference,
    ) -> Result<(Option<Arc<Node>>, bool)> {
        if !self.opens_backing(draft) {
            // Checks and snapshots look at a backing file in QEMU.
            if !self.check && !self.no_content {
                self.refuse_unused_backing(draft)?;
            }
            return Ok((None, named.name.is_some()));
        }
        let given = draft.options.get("backing").cloned();
        Ok((self.backing_file(draft, image, named, given).await?, false))
    }

    /// Whether a name in an image may be a `json:` name. Such a name describes nodes; it never refers to those of the
    /// user, which the image can't know.
    fn check_json(&self, name: &str, image: &str) -> Result<()> {
        if names_rules(name) {
            return self.policy.check(false, "rules by", name, image);
        }
        let Some(options) = BlockdevOptions::from_json_name(name) else { return Ok(()) };
        self.policy.check(self.policy.allow_json, "a file by", name, image)?;
        let options = Value::from(options.map_err(|error| error.file(image))?);
        if refers_to_node(&options) {
            self.policy.check(false, "a node of the graph by", name, image)?;
        }
        Ok(())
    }

    async fn backing_file(
        self: &Rc<Self>,
        draft: &mut Draft,
        image: &str,
        header: &BackingReference,
        given: Option<Value>,
    ) -> Result<Option<Arc<Node>>> {
        // A policy names the refused file itself.
        let below = |error: Error| match error.kind() {
            ErrorKind::PermissionDenied => error,
            _ => error.context(format!("could not open the backing file of '{image}'")),
        };
        let (spec, name) = match given {
            Some(Value::Null) => return Ok(None),
            Some(Value::String(node)) => (Value::String(node.clone()), node),
            Some(Value::Object(map)) => {
                let options = BlockdevOptions::from_map(map)?;
                (self.complete_backing(options, image, header).map_err(below)?.into(), "backing".to_owned())
            }
            _ => match &header.name {
                None => return Ok(None),
                Some(name) if name.is_empty() => return Ok(None),
                Some(name) => (self.backing_by_name(name, image, header).map_err(below)?.into(), name.clone()),
            },
        };
        if draft.place.depth >= self.policy.max_chain_depth {
            let message = format!("the backing chain is longer than {} images", self.policy.max_chain_depth);
            return Err(Error::new(ErrorKind::Limit, message).file(image));
        }
        let place = TreePlace {
            role: Role::Backing,
            path: format!("{}backing.", draft.place.path),
            writable: false,
            writethrough: false,
            depth: draft.place.depth + 1,
            is_metadata: draft.is_metadata,
            ..draft.place.clone()
        };
        let is_named = spec.is_string();
        let node = self.child(draft, ChildRole::Backing, spec, place).await.map_err(|error| {
            if is_named && self.locks_by_users {
                return error.context("Could not open backing file");
            }
            let error = if error.file_name().is_none() { error.file(name) } else { error };
            error.context(format!("could not open the backing file of '{image}'"))
        })?;
        Ok(Some(node))
    }

    /// The options of the backing file that the header names.
    fn backing_by_name(&self, name: &str, image: &str, header: &BackingReference) -> Result<BlockdevOptions> {
        self.policy.check(self.policy.allow_backing, "the backing file", name, image)?;
        self.check_json(name, image)?;
        let name = resolve(name, path_of(image)).map_err(|error| error.file(image))?;
        let options = named(self.drivers, &name, header.format.as_deref(), &*self.files)?;
        self.policy.check_drivers(self.drivers, &options.clone().into(), &name, image)?;
        Ok(options)
    }

    /// Options for the backing file without its place get that from the header.
    fn complete_backing(
        &self,
        mut options: BlockdevOptions,
        image: &str,
        header: &BackingReference,
    ) -> Result<BlockdevOptions> {
        let has_place = options.get("filename").is_some()
            || match options.get("file") {
                None => false,
                Some(Value::Object(file)) => file.contains_key("filename") || file.contains_key("file"),
                Some(_) => true,
            };
        let Some(name) = header.name.as_ref().filter(|_| !has_place) else { return Ok(options) };
        if let Some(driver) = options.text("driver")
            && let Some(names) = self.drivers.names_of(driver).filter(|names| !names.claims(name))
            && let WithoutWord::Refused(words) = names.without_word
        {
            let message = format!("the header names the backing file '{name}', and a disk of '{driver}' has no file");
            return Err(Error::invalid_argument(message).qemu(words(name)));
        }
        let driver = options.remove("driver");
        let from_header = self.backing_by_name(name, image, header)?;
        let mut merged = from_header.overlaid(options)?;
        if let Some(driver) = driver {
            merged.insert("driver", driver);
        }
        Ok(merged)
    }
}

/// The keys that may hold a child's node-name.
const CHILD_KEYS: [&str; 8] = ["file", "backing", "data-file", "image", "target", "raw", "test", "log"];

/// True when a name of an image leads to a second file, with rules; which one is the user's business.
pub(super) fn names_rules(name: &str) -> bool {
    let options = || BlockdevOptions::from_json_name(name).and_then(Result::ok);
    name.starts_with("blkdebug:")
        || name.starts_with("blkverify:")
        || options().is_some_and(|options| has_rules(&Value::from(options)))
}

/// True when a node of an option tree reads its rules from a file (`blkdebug`, `fault`).
fn has_rules(options: &Value) -> bool {
    match options {
        Value::Object(map) => map.iter().any(|(key, value)| {
            (matches!(key.as_str(), "config" | "scenario") && value.is_string()) || has_rules(value)
        }),
        Value::Array(nodes) => nodes.iter().any(has_rules),
        _ => false,
    }
}

/// True when a child is given by its node-name somewhere in an option tree.
fn refers_to_node(options: &Value) -> bool {
    let Value::Object(map) = options else { return false };
    map.iter().any(|(key, value)| match value {
        Value::String(name) => CHILD_KEYS.contains(&key.as_str()) && !name.is_empty(),
        Value::Array(nodes) if key == "children" => nodes.iter().any(|node| node.is_string() || refers_to_node(node)),
        nested => refers_to_node(nested),
    })
}

/// The path of an image for resolving names; none for `json:` names.
fn path_of(image: &str) -> Option<&str> {
    if image.starts_with("json:") { None } else { Some(image) }
}
