// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments that several verbs share, and what they become.

use super::untrusted::UntrustedArgs;
use crate::output::{Failure, warning};
use clap::{Args, ValueEnum};
use cowshed_jobs::ImageSpec;

/// `--output`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Text for people.
    #[default]
    Human,
    /// JSON with qemu-img's keys.
    Json,
}

/// How an image is named, for every verb that opens one.
#[derive(Args, Clone, Debug)]
pub struct NamingArgs {
    /// FILE is an option string (driver=…,file.filename=…), not a file name
    #[arg(long)]
    pub image_opts: bool,
    /// QEMU user-creatable object, for example a secret (not yet supported)
    #[arg(long = "object", value_name = "OBJDEF")]
    pub objects: Vec<String>,
    /// For images from strangers.
    #[command(flatten)]
    pub untrusted: UntrustedArgs,
}

impl NamingArgs {
    /// Refuses what isn't supported yet, and a format beside an option string, which names its own.
    pub fn check(&self, format: Option<&String>) -> Result<(), Failure> {
        refuse_objects(&self.objects)?;
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
            ..ImageSpec::default()
        })
    }
}

/// Objects hold secrets, which only encrypted images need.
pub fn refuse_objects(objects: &[String]) -> Result<(), Failure> {
    if objects.is_empty() { Ok(()) } else { Err(Failure::not_yet("--object")) }
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
