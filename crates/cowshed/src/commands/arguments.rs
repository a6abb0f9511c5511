// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments that several verbs share, and the values made of them.

use super::new_image::local_path;
use super::untrusted::UntrustedArgs;
use crate::invocation::Persona;
use crate::output::{Failure, warning};
use clap::{Args, ValueEnum};
use cowshed_daemon::{check_object, is_object_of_machines, tls_credentials};
use cowshed_image::DRIVERS;
use cowshed_image::TlsCredentials;
use cowshed_image::filters::fault_options;
use cowshed_image::filters::throttle::Limits;
use cowshed_image::graph::Graph;
use cowshed_image::options::{BareKey, BlockdevOptions, parse_list};
use cowshed_image::secret::{Secret, Wrapping};
use cowshed_jobs::ImageSpec;
use cowshed_ova::Package;
use cowshed_storage::path_of_text;
use cowshed_types::{Error, check_identifier};
use serde_json::{Map, Value};
use std::cell::{OnceCell, RefCell};
use std::sync::Arc;

/// `--output`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Text for people.
    #[default]
    Human,
    /// JSON with qemu-img's keys.
    Json,
}

/// The objects that `--object` defines, by their ids.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    /// The secrets for encrypted images, by their ids.
    pub secrets: Vec<(String, Secret)>,
    /// For images on servers.
    pub tls: Vec<(String, TlsCredentials)>,
    /// Holds the throttle groups, where there are any.
    pub graph: Option<Arc<Graph>>,
    /// The ids of objects that images have no use for.
    unused: Vec<String>,
}

impl Objects {
    fn has(&self, id: &str) -> bool {
        let groups = self.graph.as_ref().is_some_and(|graph| graph.throttle_groups().find(id).is_some());
        let named = self.secrets.iter().map(|(known, _)| known).chain(self.tls.iter().map(|(known, _)| known));
        groups || named.chain(&self.unused).any(|known| known == id)
    }
}

/// The reason why a file isn't taken for a raw disk.
pub const IS_PACKAGE: &str = "it is a package of a virtual machine (OVA, OVF): `cowshed ova` shows and unpacks it, \
                              `cowshed convert` reads a disk out of it";

/// The parser's name of `--object`.
pub const DEFINITIONS: &str = "definitions";

/// How an image is named, for every verb that opens one.
#[derive(Args, Clone, Debug)]
pub struct NamingArgs {
    /// FILE is an option string (driver=…,file.filename=…), not a file name
    #[arg(long)]
    pub image_opts: bool,
    /// A secret for encrypted images, secret,id=ID,file=FILE (or data=TEXT; format=raw|base64), TLS credentials for
    /// servers, tls-creds-x509,id=ID,dir=FOLDER, or limits for the driver throttle, throttle-group,id=ID,x-iops-total=N
    #[arg(long = "object", value_name = "OBJDEF")]
    pub definitions: Vec<String>,
    #[arg(skip)]
    loaded: OnceCell<Objects>,
    /// For images from strangers.
    #[command(flatten)]
    pub untrusted: UntrustedArgs,
}

impl NamingArgs {
    /// The objects that `--object` defines, read once: a file may be a pipe.
    pub fn objects(&self) -> Result<Objects, Failure> {
        if let Some(loaded) = self.loaded.get() {
            return Ok(loaded.clone());
        }
        let loaded = objects(&self.definitions)?;
        Ok(self.loaded.get_or_init(|| loaded).clone())
    }

    /// Refuses options that aren't supported yet, and a format beside an option string, which names its own.
    pub fn check(&self, format: Option<&String>) -> Result<(), Failure> {
        if self.image_opts && format.is_some() {
            return Err(Failure::new("--image-opts and --format are mutually exclusive"));
        }
        self.untrusted.check()
    }

    /// The image `name`, shared with other users of its files under `-U` (`force_share`).
    pub fn shared(&self, name: &str, format: Option<&String>, force_share: bool) -> Result<ImageSpec, Failure> {
        self.sharing(self.spec(name, format)?, force_share)
    }

    /// The same for an image that is named already.
    pub fn sharing(&self, spec: ImageSpec, force_share: bool) -> Result<ImageSpec, Failure> {
        let options = BlockdevOptions::from_image_opts(&spec.name);
        if force_share && self.image_opts && options.is_ok_and(|options| denies_sharing(&options)) {
            return Err(Failure::new("--force-share/-U conflicts with image options"));
        }
        Ok(ImageSpec { force_share, ..spec })
    }

    /// The image `name`. Under our own name a package of a virtual machine isn't taken for a raw disk.
    pub fn spec(&self, name: &str, format: Option<&String>) -> Result<ImageSpec, Failure> {
        let is_probed = format.is_none() && !self.image_opts && warning::persona() == Persona::Cowshed;
        if is_probed && Package::is_one(&local_path(name)) {
            return Err(Failure::new(format!("{name}: {IS_PACKAGE}; -f raw takes the file itself")));
        }
        self.spec_of_any(name, format)
    }

    /// The image `name`, whatever it is.
    pub fn spec_of_any(&self, name: &str, format: Option<&String>) -> Result<ImageSpec, Failure> {
        self.check(format)?;
        if let Some(id) = BlockdevOptions::from_image_opts(name)
            .ok()
            .filter(|_| self.image_opts)
            .as_ref()
            .and_then(|options| options.text("id"))
        {
            check_identifier(id)?;
        }
        let Objects { secrets, tls, graph, .. } = self.objects()?;
        Ok(ImageSpec {
            name: name.to_owned(),
            format: format.cloned(),
            image_opts: self.image_opts,
            on_warning: Some(warning::print),
            shares_raw: true,
            policy: self.untrusted.policy()?,
            secrets,
            tls,
            graph,
            ..ImageSpec::default()
        })
    }
}

/// True for options that set anything but `force-share=on` of sharing.
pub fn denies_sharing(options: &BlockdevOptions) -> bool {
    options.get("force-share").is_some_and(|value| !matches!(value, Value::Bool(true)) && value != "on")
}

/// Faults that a disk has on purpose.
#[derive(Args, Clone, Debug)]
pub struct FaultArgs {
    /// Make the disk fail: a rule (`op=read,errno=5,offset=1M,len=4k`), or a file with a list of rules; may be given several times.
    /// See docs/fault-injection.md
    #[arg(long = "fault", value_name = "RULE|FILE")]
    given: Vec<String>,
}

impl FaultArgs {
    /// The options of the node above the disk; `None` without faults.
    pub fn options(&self) -> Result<Option<BlockdevOptions>, Failure> {
        Ok(fault_options(&self.given)?)
    }
}

/// The properties of a secret.
const SECRET_KEYS: &[&str] = &["id", "data", "file", "format", "keyid", "iv"];

/// The objects that `--object` defines, read once: a file may be a pipe.
pub fn objects(definitions: &[String]) -> Result<Objects, Failure> {
    thread_local! {
        static LOADED: RefCell<Option<(Vec<String>, Objects)>> = const { RefCell::new(None) };
    }
    let loaded = LOADED.with_borrow(|loaded| loaded.clone().filter(|(known, _)| known == definitions));
    if let Some((_, objects)) = loaded {
        return Ok(objects);
    }
    let objects = read_objects(definitions)?;
    LOADED.set(Some((definitions.to_vec(), objects.clone())));
    Ok(objects)
}

fn read_objects(definitions: &[String]) -> Result<Objects, Failure> {
    let mut objects = Objects::default();
    for definition in definitions {
        let (kind, options) = definition_of(definition)?;
        if !is_known(&kind) {
            if NOT_OF_IMAGES.contains(&kind.as_str()) {
                id_of(&options)?;
            }
            let message = match NOT_OF_IMAGES.contains(&kind.as_str()) || is_object_of_machines(&kind) {
                true => format!("invalid object type: {kind}"),
                false => format!("Parameter 'qom-type' does not accept value '{kind}'"),
            };
            return Err(
                Failure::new(message).hint(&format!(" (images need objects of the types {})", KNOWN.join(", ")))
            );
        }
        let id = id_of(&options)?;
        if objects.has(&id) {
            return Err(Failure::new(format!("attempt to add duplicate property '{id}' to object (type 'container')")));
        }
        match kind.as_str() {
            "secret" => {
                let secret = secret(&options, &objects)?;
                objects.secrets.push((id, secret));
            }
            "tls-creds-x509" => objects.tls.push((id, tls_credentials(definition)?)),
            "throttle-group" => {
                let limits = limits(&options)?;
                objects.graph.get_or_insert_with(|| Graph::new(&DRIVERS)).throttle_groups().create(&id, limits)?;
            }
            _ => {
                check_object(definition)?;
                check_loop(&kind)?;
                objects.unused.push(id);
            }
        }
    }
    Ok(objects)
}

/// The type and the properties of an object: `[qom-type=]TYPE,id=ID,…` or JSON.
fn definition_of(text: &str) -> Result<(String, BlockdevOptions), Failure> {
    let (kind, options) = if text.starts_with('{') {
        let mut options = BlockdevOptions::from_json(text).map_err(|error| {
            let reason = error.message().strip_prefix("Could not parse the JSON options: ").map(str::to_owned);
            reason.map_or(error, Error::invalid_argument)
        })?;
        let kind = options.text("qom-type").unwrap_or_default().to_owned();
        options.remove("qom-type");
        (kind, options)
    } else {
        let (kind, rest) = text.split_once(',').unwrap_or((text, ""));
        let kind = match kind.split_once('=') {
            Some(("qom-type", kind)) => kind,
            // A list without the type in front.
            Some(_) => "",
            None => kind,
        };
        let kind = kind.to_owned();
        // The options of an unknown type are not looked at.
        let has_meaning = is_known(&kind) || NOT_OF_IMAGES.contains(&kind.as_str());
        let pairs = if has_meaning { parse_list(rest, BareKey::Refused)? } else { Vec::new() };
        let map = pairs.into_iter().map(|(key, value)| (key, value.into())).collect();
        (kind, BlockdevOptions::from_map(map)?)
    };
    match kind.is_empty() {
        true => Err(Failure::new("Parameter 'qom-type' is missing")),
        false => Ok((kind, options)),
    }
}

/// The types that are known here. No image asks for authorization, but scripts define such objects.
const KNOWN: [&str; 6] = ["secret", "tls-creds-x509", "throttle-group", "authz-simple", "authz-list", "authz-listfile"];
/// Types whose options are checked, and that images have no use for.
const CHECKED: [&str; 6] =
    ["colo-compare", "main-loop", "secret_keyring", "thread-context", "tls-creds-anon", "tls-creds-psk"];
/// Types that only daemons have.
const NOT_OF_IMAGES: [&str; 2] = ["iothread", "monitor-qmp"];

/// Only qemu-img has its loop when it reads its options.
pub fn check_loop(kind: &str) -> Result<(), Failure> {
    match warning::persona() {
        Persona::Tool(_) if kind == "main-loop" => Err(Failure::new("qemu aio context not ready")),
        _ => Ok(()),
    }
}

/// True for the definition of an object that images can have a use for.
pub fn is_of_images(definition: &str) -> bool {
    definition_of(definition).is_ok_and(|(kind, _)| !NOT_OF_IMAGES.contains(&kind.as_str()))
}

fn is_known(kind: &str) -> bool {
    KNOWN.contains(&kind) || CHECKED.contains(&kind)
}

/// The limits of a throttle group: `x-iops-total=N`, `limits.iops-total=N`, or the JSON of QMP.
fn limits(options: &BlockdevOptions) -> Result<Limits, Failure> {
    let mut given = match options.get("limits") {
        Some(Value::Object(map)) => map.clone(),
        _ => Map::new(),
    };
    for (key, value) in options.iter().filter(|(key, _)| !["id", "limits"].contains(&key.as_str())) {
        if !key.starts_with("x-") || !Limits::is_name(key) {
            return Err(Failure::new(format!("Parameter '{key}' is unexpected")));
        }
        given.insert(key.clone(), value.clone());
    }
    if let Some(key) = given.keys().find(|key| !Limits::is_name(key)) {
        return Err(Failure::new(format!("Parameter 'limits.{key}' is unexpected")));
    }
    Ok(Limits::from_json(&given)?)
}

fn id_of(options: &BlockdevOptions) -> Result<String, Failure> {
    let Some(id) = options.text("id") else { return Err(Failure::new("Parameter 'id' is missing")) };
    check_identifier(id)?;
    Ok(id.to_owned())
}

/// A secret; `known` may hold the key that it is encrypted with.
fn secret(options: &BlockdevOptions, known: &Objects) -> Result<Secret, Failure> {
    if let Some((key, _)) = options.iter().find(|(key, _)| !SECRET_KEYS.contains(&key.as_str())) {
        let failure = Failure::new(format!("Parameter '{key}' is unexpected"));
        return Err(failure.hint(&format!(" (a secret has {})", SECRET_KEYS.join(", "))));
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
    let find = |id: &str| known.secrets.iter().find(|(known, _)| known == id).map(|(_, secret)| secret);
    let wrapping = Wrapping::of(options.text("keyid"), options.text("iv"), find)?;
    Ok(Secret::load_wrapped(options.text("data"), file.as_deref(), is_base64, wrapping.as_ref())?)
}

/// The cache modes of `-t` and `-T`.
pub const CACHE_MODES: &[&str] = &["none", "writeback", "writethrough", "directsync", "unsafe"];

/// A cache mode of `-t` or `-T`; `which` is "" or "source " for the message.
pub fn cache_mode(which: &str, mode: Option<&String>) -> Result<Option<String>, Failure> {
    match mode.map(String::as_str) {
        None => Ok(None),
        // "off" is the old word for "none".
        Some("off") => Ok(Some("none".to_owned())),
        Some(known) if CACHE_MODES.contains(&known) => Ok(mode.cloned()),
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
