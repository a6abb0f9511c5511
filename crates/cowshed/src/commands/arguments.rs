// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments that several verbs share, and what they become.

use crate::output::{Failure, warning};
use clap::{Args, ValueEnum};
use cowshed_image::open::Policy;
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
    /// The image may be hostile: no other file is opened on its word, and its tables have tighter limits
    #[arg(long)]
    pub untrusted: bool,
    /// With --untrusted: what the image may name all the same, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "backing,data-file,json,probe")]
    pub allow: Vec<Allowed>,
}

/// `--allow`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Allowed {
    /// Its backing file
    Backing,
    /// Its external data file
    DataFile,
    /// Names that are json:{…}, which can be any file by any driver
    Json,
    /// A backing file whose format the image doesn't say
    Probe,
}

impl NamingArgs {
    /// Refuses what isn't supported yet, and a format beside an option string, which names its own.
    pub fn check(&self, format: Option<&String>) -> Result<(), Failure> {
        refuse_objects(&self.objects)?;
        if self.image_opts && format.is_some() {
            return Err(Failure::new("--image-opts and --format are mutually exclusive"));
        }
        if !self.untrusted && !self.allow.is_empty() {
            return Err(Failure::new("--allow needs --untrusted: without it everything is allowed"));
        }
        Ok(())
    }

    fn policy(&self) -> Policy {
        if !self.untrusted {
            return Policy::default();
        }
        let allows = |what: Allowed| self.allow.contains(&what);
        Policy {
            allow_backing: allows(Allowed::Backing),
            allow_data_file: allows(Allowed::DataFile),
            allow_json: allows(Allowed::Json),
            allow_backing_probe: allows(Allowed::Probe),
            ..Policy::untrusted()
        }
    }

    /// The image `name`.
    pub fn spec(&self, name: &str, format: Option<&String>) -> Result<ImageSpec, Failure> {
        self.check(format)?;
        Ok(ImageSpec {
            name: name.to_owned(),
            format: format.cloned(),
            image_opts: self.image_opts,
            on_warning: Some(warning::print),
            policy: self.policy(),
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
