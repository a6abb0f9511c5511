// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments that several verbs share, and what they become.

use super::untrusted::UntrustedArgs;
use crate::output::{Failure, warning};
use clap::{Args, ValueEnum};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::secret::{Secret, Wrapping};
use cowshed_jobs::ImageSpec;
use cowshed_storage::path_of_text;
use std::cell::OnceCell;

/// `--output`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Text for people.
    #[default]
    Human,
    /// JSON with qemu-img's keys.
    Json,
}

/// Secrets by their ids.
pub type Secrets = Vec<(String, Secret)>;

/// How an image is named, for every verb that opens one.
#[derive(Args, Clone, Debug)]
pub struct NamingArgs {
    /// FILE is an option string (driver=…,file.filename=…), not a file name
    #[arg(long)]
    pub image_opts: bool,
    /// A secret for encrypted images: secret,id=ID,file=FILE (or data=TEXT; format=raw|base64)
    #[arg(long = "object", value_name = "OBJDEF")]
    pub objects: Vec<String>,
    #[arg(skip)]
    loaded: OnceCell<Secrets>,
    /// For images from strangers.
    #[command(flatten)]
    pub untrusted: UntrustedArgs,
}

impl NamingArgs {
    /// The secrets that `--object` says, read once: a file may be a pipe.
    pub fn secrets(&self) -> Result<Secrets, Failure> {
        if let Some(loaded) = self.loaded.get() {
            return Ok(loaded.clone());
        }
        let loaded = secrets(&self.objects)?;
        Ok(self.loaded.get_or_init(|| loaded).clone())
    }

    /// Refuses what isn't supported yet, and a format beside an option string, which names its own.
    pub fn check(&self, format: Option<&String>) -> Result<(), Failure> {
        if self.image_opts && format.is_some() {
            return Err(Failure::new("--image-opts and --format are mutually exclusive"));
        }
        self.untrusted.check()
    }

    /// The image `name`.
    pub fn spec(&self, name: &str, format: Option<&String>) -> Result<ImageSpec, Failure> {
        self.check(format)?;
        Ok(ImageSpec {
            name: name.to_owned(),
            format: format.cloned(),
            image_opts: self.image_opts,
            on_warning: Some(warning::print),
            shares_raw: true,
            policy: self.untrusted.policy()?,
            secrets: self.secrets()?,
            ..ImageSpec::default()
        })
    }
}

/// The properties of a secret.
const SECRET_KEYS: &[&str] = &["id", "data", "file", "format", "keyid", "iv"];

fn is_identifier(id: &str) -> bool {
    id.starts_with(|first: char| first.is_ascii_alphabetic())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

/// What `--object` says: secrets, each with its id.
pub fn secrets(objects: &[String]) -> Result<Secrets, Failure> {
    let mut secrets = Secrets::new();
    for object in objects {
        let (kind, rest) = object.split_once(',').unwrap_or((object, ""));
        let kind = kind.strip_prefix("qom-type=").unwrap_or(kind);
        if kind.is_empty() {
            return Err(Failure::new("Parameter 'qom-type' is missing"));
        }
        if kind != "secret" {
            let failure = Failure::new(format!("Parameter 'qom-type' does not accept value '{kind}'"));
            return Err(failure.hint(" (images need objects of the type 'secret')"));
        }
        let options = BlockdevOptions::from_keyval(rest)?;
        if let Some((key, _)) = options.iter().find(|(key, _)| !SECRET_KEYS.contains(&key.as_str())) {
            let failure = Failure::new(format!("Parameter '{key}' is unexpected"));
            return Err(failure.hint(&format!(" (a secret has {})", SECRET_KEYS.join(", "))));
        }
        let Some(id) = options.text("id") else { return Err(Failure::new("Parameter 'id' is missing")) };
        if !is_identifier(id) {
            return Err(Failure::new(
                "Parameter 'id' expects an identifier\n\
                 Identifiers consist of letters, digits, '-', '.', '_', starting with a letter.",
            ));
        }
        let is_base64 = match options.text("format") {
            None | Some("raw") => false,
            Some("base64") => true,
            Some(other) => {
                let failure = Failure::new(format!("Parameter 'format' does not accept value '{other}'"));
                return Err(failure.hint(" (raw or base64)"));
            }
        };
        let file = options.text("file").map(path_of_text);
        let find = |id: &str| secrets.iter().find(|(known, _)| known == id).map(|(_, secret)| secret);
        let wrapping = Wrapping::of(options.text("keyid"), options.text("iv"), find)?;
        let secret = Secret::load_wrapped(options.text("data"), file.as_deref(), is_base64, wrapping.as_ref())?;
        if secrets.iter().any(|(known, _)| known == id) {
            return Err(Failure::new(format!("attempt to add duplicate property '{id}' to object (type 'container')")));
        }
        secrets.push((id.to_owned(), secret));
    }
    Ok(secrets)
}

/// A cache mode of `-t` or `-T`; `which` is "" or "source " for the message.
pub fn cache_mode(which: &str, mode: Option<&String>) -> Result<Option<String>, Failure> {
    match mode.map(String::as_str) {
        None => Ok(None),
        // "off" is the old word for "none".
        Some("off") => Ok(Some("none".to_owned())),
        Some("none" | "writeback" | "writethrough" | "directsync" | "unsafe") => Ok(mode.cloned()),
        Some(other) => Err(Failure::new(format!("Invalid {which}cache option: {other}"))),
    }
}

/// The one image file of a verb.
pub fn one_file(files: &[String]) -> Result<&str, Failure> {
    match files {
        [file] => Ok(file),
        _ => Err(Failure::usage("Expecting one image file name")),
    }
}
