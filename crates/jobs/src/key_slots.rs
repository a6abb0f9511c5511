// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Key slots of encrypted images: which passphrases open them. `encrypt.*` of qcow2, the same without that prefix of
//! `luks`.

use crate::{ImageSpec, JobHandle};
use cowshed_create::iteration_ms;
use cowshed_create::schema::{LUKS_SLOTS, OptionValues, amended_options_of};
use cowshed_image::Node;
use cowshed_image::encryption::{SlotChange, change_slots, check_slot_change};
use cowshed_image::graph::Graph;
use cowshed_image::secret::Secret;
use cowshed_types::{Error, Result};
use serde_json::Value;
use std::sync::Arc;

/// The image and the changes of its key slots.
#[derive(Clone, Debug, Default)]
pub struct KeySlotOptions {
    /// The image.
    pub image: ImageSpec,
    /// `-o`: each a `key=value,key=value` list of [`amended_options_of`].
    pub options: Vec<String>,
    /// A slot in use may be overwritten, and the last one erased, with which all data is lost.
    pub force: bool,
}

/// Opens an image, changes its key slots and closes it.
pub async fn run(options: &KeySlotOptions, job: &JobHandle) -> Result<()> {
    job.pause_point().await?;
    // Without its cipher: the data isn't looked at.
    let request = options.image.request()?.force_share(false).writable(true).for_check();
    let node = options.image.open(request).await?;
    let result =
        match amended_options_of(node.driver_name()).map(|schema| OptionValues::parse(schema, &options.options)) {
            Some(Ok(values)) => amend(&node, &options.image, &values, options.force).await,
            Some(Err(error)) => Err(error.file(node.filename())),
            None => Err(Error::unsupported("only encrypted images have key slots").file(node.filename())),
        };
    let closed = node.close().await;
    result.and(closed)
}

/// Adds or erases key slots of the image in `node`, which is open for writing and has no readers. Durable when it
/// returns. After a power cut in between, the old keys still open the image.
pub async fn amend(node: &Node, image: &ImageSpec, values: &OptionValues, force: bool) -> Result<()> {
    let in_file = |error: Error| if error.file_name().is_none() { error.file(node.filename()) } else { error };
    let (area, prefix) = node.key_slots()?;
    let request = SlotRequest { image, values, prefix };
    let change = request.change().map_err(in_file)?;
    let secret = opening_secret(node, image).map_err(in_file)?;
    if secret.is_none() && matches!(change, SlotChange::Activate { .. }) {
        let message = "a new key slot needs the secret that opens the image now";
        return Err(in_file(Error::invalid_argument(format!(
            "Parameter '{prefix}key-secret' is required for cipher: {message}"
        ))));
    }
    change_slots(&area, secret.as_ref(), &change, force).await.map_err(in_file)
}

/// A change of the key slots of an image that a graph has open.
pub struct LiveSlots {
    graph: Arc<Graph>,
    node: Arc<Node>,
    /// The secrets that options can name.
    image: ImageSpec,
    values: OptionValues,
    prefix: &'static str,
    /// The secret that opens the image, where that isn't the one of the node.
    opened_by: Option<String>,
    force: bool,
}

impl LiveSlots {
    /// `options`: `key=value` as [`amended_options_of`] has them. `opened_by`: the secret that opens the image, else its node's.
    pub fn new(
        graph: &Arc<Graph>,
        node: &Arc<Node>,
        secrets: Vec<(String, Secret)>,
        (options, opened_by): (&[String], Option<String>),
        force: bool,
    ) -> Result<LiveSlots> {
        let (_, prefix) = node.key_slots()?;
        let schema = amended_options_of(node.driver_name()).unwrap_or(LUKS_SLOTS);
        Ok(LiveSlots {
            graph: Arc::clone(graph),
            node: Arc::clone(node),
            image: ImageSpec { secrets, ..ImageSpec::default() },
            values: OptionValues::parse(schema, options)?,
            prefix,
            opened_by,
            force,
        })
    }

    fn request(&self) -> SlotRequest<'_> {
        SlotRequest { image: &self.image, values: &self.values, prefix: self.prefix }
    }

    /// Refuses impossible changes before any key is looked at.
    pub async fn check(&self) -> Result<()> {
        let request = self.request();
        let erases = request.erases()?;
        if erases && self.opened_by.is_some() {
            return Err(Error::invalid_argument("'secret' must not be given when erasing keyslots"));
        }
        let (area, _) = self.node.key_slots()?;
        let by_secret = request.get("old-secret").is_some();
        check_slot_change(&area, request.slot()?, (erases, by_secret), self.force).await
    }

    /// Carries it out.
    pub async fn run(&self) -> Result<()> {
        let change = self.request().change()?;
        let secret = match &self.opened_by {
            Some(id) => Some(find(&self.image, id)?),
            None => opening_secret(&self.node, &self.image)?,
        };
        self.graph.change_key_slots(&self.node, secret, change, self.force).await
    }
}

/// The secret that opens the image now, which its options name.
fn opening_secret(node: &Node, image: &ImageSpec) -> Result<Option<Secret>> {
    let options = node.options();
    let id = match options.get("encrypt") {
        Some(encrypt) => encrypt.get("key-secret").and_then(Value::as_str),
        None => options.text("key-secret"),
    };
    id.map(|id| find(image, id)).transpose()
}

fn find(image: &ImageSpec, id: &str) -> Result<Secret> {
    let found = image.secrets.iter().find(|(known, _)| known == id).map(|(_, secret)| secret.clone());
    found.ok_or_else(|| Error::invalid_argument(format!("No secret with id '{id}'")))?.passphrase(id)
}

/// The options of one change.
struct SlotRequest<'a> {
    image: &'a ImageSpec,
    values: &'a OptionValues,
    prefix: &'static str,
}

impl SlotRequest<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn get(&self, key: &str) -> Option<&str> {
        let name = self.name(key);
        self.values.get(&name).filter(|_| self.values.is_given(&name))
    }

    fn secret(&self, key: &str) -> Result<Option<Secret>> {
        self.get(key).map(|id| find(self.image, id)).transpose()
    }

    fn refuse(&self, keys: &[&str], when: &str) -> Result<()> {
        match keys.iter().find(|key| self.get(key).is_some()) {
            Some(key) => Err(Error::invalid_argument(format!("'{key}' must not be given when {when} keyslots"))),
            None => Ok(()),
        }
    }

    fn slot(&self) -> Result<Option<usize>> {
        let slot = self.values.integer(&self.name("keyslot"), "keyslot")?;
        Ok(slot.map(|slot| usize::try_from(slot).unwrap_or(usize::MAX)))
    }

    /// Whether slots become inactive. The options must go together.
    fn erases(&self) -> Result<bool> {
        match self.get("state") {
            Some("active") => {
                self.refuse(&["old-secret"], "activating")?;
                match self.get("new-secret") {
                    Some(_) => Ok(false),
                    None => Err(Error::invalid_argument("'new-secret' is required to activate a keyslot")),
                }
            }
            Some("inactive") => {
                self.refuse(&["new-secret", "iter-time"], "erasing")?;
                Ok(true)
            }
            Some(other) => Err(Error::invalid_argument(format!("Parameter 'state' does not accept value '{other}'"))),
            None => Err(Error::invalid_argument("Parameter 'state' is missing")),
        }
    }

    fn change(&self) -> Result<SlotChange> {
        let slot = self.slot()?;
        match self.erases()? {
            false => {
                let Some(new_secret) = self.secret("new-secret")? else {
                    return Err(Error::invalid_argument("'new-secret' is required to activate a keyslot"));
                };
                let iteration_ms = iteration_ms(self.values, &self.name("iter-time"), "iter-time")?;
                Ok(SlotChange::Activate { slot, new_secret, iteration_ms })
            }
            true => Ok(SlotChange::Deactivate { slot, old_secret: self.secret("old-secret")? }),
        }
    }
}
