// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The name under which a node opens again: a path, a pseudo name, or `json:{…}` where only options describe it.
//!
//! A plain name stands for a node only if the file behind it names the same backing file and data file as the node has.
//! Else the name has them, children by their own options and not by their node-names.

use super::Drivers;
use super::file_names::ShownName;
use super::line::Telling;
use super::names::resolve as resolve_name;
use crate::node::{ChildRole, HeaderName, Node};
use crate::options::{BlockdevOptions, COMMON, parse_size};
use cowshed_storage::{path_of_text, text_of_path};
use cowshed_types::{Error, Result, name_of_text};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// Options of an NBD client that its URI lacks and without which the server isn't the same.
const NBD_BESIDE_URI: &[&str] = &["tls-creds", "tls-certificates", "tls-hostname", "tls-verify-peer"];

/// The order in which QEMU prints keys, as far as it shows one. Other keys follow `driver`.
const ORDER: &[&str] = &[
    "backing",
    "encrypt.format",
    "encrypt.key-secret",
    "force_size_calc",
    "throttle-group",
    "read-zeroes",
    "read-pattern",
    "children",
    "fat-type",
    "offset",
    "dir",
    "log",
    "log-sector-size",
    "inject-error.0.state",
    "opt-write-zero",
    "inject-error.0.immediately",
    "set-state.0.event",
    "inject-error.0.once",
    "max-write-zero",
    "image",
    "max-transfer",
    "driver",
    "inject-error.0.iotype",
    "set-state.0.new_state",
    "inject-error.0.event",
    "inject-error.0.errno",
    "config",
    "opt-discard",
    "set-state.0.state",
    "inject-error.0.sector",
    "max-discard",
    "align",
    "size",
    "log-append",
    "blkverify",
    "rewrite-corrupted",
    "vote-threshold",
    "data-file",
    "floppy",
    "label",
    "rw",
    "file",
    "filename",
    "key-secret",
];

/// The longest name that a header holds, in bytes.
const MAX_HEADER_NAME_BYTES: usize = 1023;

/// The purpose of a name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// To be shown, with the words of the user.
    Shown,
    /// To be written into a header. Nodes that only watch or slow requests aren't part of the image and are left out,
    /// and paths don't depend on the working directory.
    Written,
}

/// A node by its name and by its options.
struct Named {
    /// A name without options that means the same.
    plain: Option<String>,
    /// The plain name is a path.
    is_path: bool,
    options: Value,
    driver: &'static str,
    /// The drivers of the graph.
    drivers: &'static Drivers,
    /// It is a raw disk whose format was guessed from its content.
    is_probed_raw: bool,
}

impl Named {
    fn text(&self) -> String {
        match &self.plain {
            Some(plain) => plain.clone(),
            None => {
                let mut text = String::from("json:");
                print(&self.options, &mut text);
                text
            }
        }
    }

    fn is_protocol(&self) -> bool {
        is_protocol(self.drivers, self.driver)
    }

    /// Its bytes are those of a file.
    fn is_bytes(&self) -> bool {
        self.drivers.is_raw(self.driver) || self.is_protocol()
    }
}

impl Node {
    /// The name by which the same node can be opened again, as QEMU prints it. Unlike [`Node::filename`] it has options
    /// that count.
    pub fn reference(&self) -> String {
        match self.named(Purpose::Shown, false) {
            Ok(named) => named.text(),
            Err(_) => self.filename(),
        }
    }

    /// The name by which the header of the image in file `overlay` is to name this node as its backing file. A node
    /// opened by that name reads as this node does now. Paths are relative where the user gave a relative one and both
    /// files are in one folder, else absolute.
    ///
    /// # Errors
    /// No name opens the node again, or it is longer than the 1023 bytes of a header.
    pub fn header_name(&self, overlay: Option<&str>) -> Result<HeaderName> {
        let named = self.named(Purpose::Written, false)?;
        let file = match &named.plain {
            Some(path) if named.is_path => place(path, overlay),
            _ => named.text(),
        };
        check_header_name(&file)?;
        Ok(HeaderName { file, format: named.driver })
    }

    /// The path of the file that this image is, unless it is stored in another way.
    pub fn image_path(&self) -> Option<String> {
        let named = self.stored_in()?;
        named.plain.filter(|_| named.is_path)
    }

    fn named(&self, purpose: Purpose, as_storage: bool) -> Result<Named> {
        if purpose == Purpose::Written
            && let Some(child) = self.passed_on_to(as_storage)?
        {
            return child.named(purpose, as_storage);
        }
        let driver = self.driver_name();
        let mut own = self.telling(purpose);
        let is_plain = own.is_empty();
        own.push(("driver".to_owned(), driver.into()));
        let drivers = Drivers::of(self.graph());
        if drivers.takes_paths(driver) {
            let filename = if purpose == Purpose::Written { absolute(&self.filename()) } else { self.filename() };
            own.push(("filename".to_owned(), filename.into()));
        }
        let mut plain = self.plain_protocol(is_plain, purpose);
        let mut is_path = plain.is_some() && drivers.takes_paths(driver);
        let mut replicas = Vec::new();
        for child in self.children() {
            let is_shown = child.role != ChildRole::Header || purpose == Purpose::Written;
            if matches!(child.role, ChildRole::Backing | ChildRole::Extent(_)) || !is_shown {
                continue;
            }
            let named = child.node.named(purpose, true)?;
            match child.role {
                ChildRole::DataFile if self.names_data_file(&named) => continue,
                ChildRole::Image => plain = self.plain_blkdebug(&own, &named),
                ChildRole::Raw => plain = named.plain.clone().filter(|_| drivers.names_of(driver).is_some()),
                ChildRole::Test => {
                    plain = plain.and_then(|raw| Some(format!("blkverify:{raw}:{}", named.plain.as_ref()?)));
                }
                ChildRole::Replica(_) => {
                    plain = None;
                    replicas.push(named.options);
                    continue;
                }
                ChildRole::File if is_plain && named.is_protocol() && !self.is_passing() => {
                    (plain, is_path) = (named.plain.clone(), named.is_path);
                }
                // As in QEMU these have the name of their disk.
                ChildRole::File if drivers.has_name_of_disk(driver) || self.driver().shows_past() => {
                    (plain, is_path) = (Some(named.text()), named.is_path);
                }
                ChildRole::File | ChildRole::Target => {}
                _ => plain = None,
            }
            own.push((child.role.name(), named.options));
        }
        if !replicas.is_empty() {
            own.push(("children".to_owned(), Value::Array(replicas)));
        }
        if let Some(backing) = self.other_backing(purpose)? {
            plain = None;
            own.push(("backing".to_owned(), backing));
        }
        Ok(Named { plain, is_path, options: sorted(own), driver, drivers, is_probed_raw: self.is_probed_raw() })
    }

    /// The storage below an image.
    fn stored_in(&self) -> Option<Named> {
        let child = self.child(ChildRole::File)?;
        child.named(Purpose::Written, true).ok().filter(Named::is_protocol)
    }

    /// The node that reads the same as this one, where this one only passes on.
    fn passed_on_to(&self, as_storage: bool) -> Result<Option<Arc<Node>>> {
        if self.driver().shows_past() {
            let message = format!("node '{}' shows the past of a disk: no name opens that again", self.name());
            return Err(Error::unsupported(message));
        }
        if self.is_filter() || (as_storage && self.driver().shows_all_of_child()) {
            return Ok(self.child(ChildRole::File));
        }
        Ok(self.child(ChildRole::Image))
    }

    /// A filter, which no plain name has.
    fn is_passing(&self) -> bool {
        self.is_filter() || self.driver().shows_past()
    }

    fn plain_protocol(&self, is_plain: bool, purpose: Purpose) -> Option<String> {
        self.driver().protocol_file()?;
        let driver = self.driver_name();
        match Drivers::of(self.graph()).names_of(driver).map_or(ShownName::File, |names| names.shown) {
            ShownName::Children => None,
            ShownName::Word => is_plain.then(|| format!("{driver}://")),
            ShownName::Address => {
                let options = self.options();
                let says_all = NBD_BESIDE_URI.iter().all(|key| options.get(key).is_none());
                // Shown is the address alone, as in QEMU.
                (says_all || purpose == Purpose::Shown).then(|| self.filename())
            }
            ShownName::File => Some(self.filename()).filter(|name| !name.starts_with("json:")),
        }
    }

    fn plain_blkdebug(&self, own: &[(String, Value)], image: &Named) -> Option<String> {
        let config = own.iter().find(|(key, _)| key == "config").and_then(|(_, value)| value.as_str());
        // The driver is among them.
        let is_all = own.len() == 1 + usize::from(config.is_some());
        let image = image.plain.as_ref().filter(|_| is_all)?;
        Some(format!("blkdebug:{}:{image}", config.unwrap_or_default()))
    }

    /// The options that count, with flat keys.
    fn telling(&self, purpose: Purpose) -> Vec<(String, Value)> {
        let driver = self.driver_name();
        let options = self.options();
        let mut flat = given(&options);
        let telling = Drivers::of(self.graph()).find(driver).map_or(Telling::Keys(&[]), |line| line.telling);
        let is_given = |key: &str| self.given().iter().any(|(given, _)| given == key);
        flat.retain(|(key, value)| match telling {
            _ if value.is_null() => false,
            Telling::Keys(keys) => keys.contains(&key.as_str()),
            // The name of a file with rules stands for its rules.
            Telling::AllBut(child) => is_own(key, child) && is_given(key),
        });
        for (key, value) in flat.iter_mut().filter(|_| purpose == Purpose::Shown) {
            // Options changed by a reopening have their present value.
            if let Some((_, given)) = self.given().iter().find(|(given, _)| given == key)
                && is_same(given, value)
            {
                *value = given.clone();
            }
        }
        flat
    }

    /// True when the header names this data file.
    fn names_data_file(&self, data_file: &Named) -> bool {
        match (self.driver().data_file_name(), &data_file.plain) {
            (Some(name), Some(path)) => is_same_file(&name, path),
            _ => false,
        }
    }

    /// The backing file as an option, where it isn't the one that the image itself names.
    fn other_backing(&self, purpose: Purpose) -> Result<Option<Value>> {
        let Some((name, format)) = self.driver().named_backing() else { return Ok(None) };
        let name = name.filter(|name| !name.is_empty());
        let backing = match self.backing() {
            // As in QEMU the name that is shown has the filters; in a header they would need their objects.
            Some(backing) if purpose == Purpose::Shown => backing.named(purpose, false)?,
            Some(backing) => crate::node::below_filters(&backing).named(purpose, false)?,
            None => return Ok(name.map(|_| Value::Null)),
        };
        let is_named = name.is_some_and(|name| self.means(&name, format.as_deref(), &backing, purpose));
        Ok((!is_named).then_some(backing.options))
    }

    /// True when a name in this image's header stands for the node below.
    fn means(&self, name: &str, format: Option<&str>, backing: &Named, purpose: Purpose) -> bool {
        if let Some(options) = BlockdevOptions::from_json_name(name) {
            let Ok(options) = options else { return false };
            let (mut named, mut real) = (given(&options), Vec::new());
            flatten("", &backing.options, &mut real);
            real.iter_mut().for_each(|(key, _)| *key = key.trim_start_matches('.').to_owned());
            named.sort_by(|one, other| one.0.cmp(&other.0));
            real.sort_by(|one, other| one.0.cmp(&other.0));
            let is_equal = |((key, value), (other, real)): (&(String, Value), &(String, Value))| {
                let is_file = key.ends_with("filename") && value.is_string();
                let texts = (value.as_str().unwrap_or_default(), real.as_str().unwrap_or_default());
                key == other && (is_same(value, real) || (is_file && is_same_file(texts.0, texts.1)))
            };
            return named.len() == real.len() && named.iter().zip(&real).all(is_equal);
        }
        let (Some(plain), Ok(named)) = (&backing.plain, resolve_name(name, self.image_path().as_deref())) else {
            return false;
        };
        let is_there = match backing.is_path {
            true if purpose == Purpose::Written => is_same_file(&named, plain),
            true => without_prefix(&named) == plain,
            false => named == *plain,
        };
        is_there && opens_as(format, backing, purpose)
    }
}

/// True when a file opened in this format, or in the one that it seems to have, is the node below.
fn opens_as(format: Option<&str>, backing: &Named, purpose: Purpose) -> bool {
    match format {
        Some(format) => {
            format == backing.driver
                || (backing.is_bytes() && (backing.drivers.is_raw(format) || is_protocol(backing.drivers, format)))
        }
        None => purpose == Purpose::Shown || !backing.is_bytes() || backing.is_probed_raw,
    }
}

fn is_protocol(drivers: &Drivers, driver: &str) -> bool {
    drivers.is_protocol(driver) || drivers.names_of(driver).is_some()
}

fn without_prefix(name: &str) -> &str {
    name.strip_prefix("file:").unwrap_or(name)
}

fn is_same_file(name: &str, path: &str) -> bool {
    let (name, real) = (without_prefix(name), |name: &str| std::fs::canonicalize(path_of_text(name)));
    name == path || real(name).is_ok_and(|one| real(path).is_ok_and(|other| one == other))
}

fn absolute(name: &str) -> String {
    std::path::absolute(path_of_text(name)).map_or_else(|_| name.to_owned(), |path| text_of_path(&path))
}

/// A path as the image in file `overlay` is to name it.
fn place(name: &str, overlay: Option<&str>) -> String {
    let path = path_of_text(name);
    let folder = |path: &Path| match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => std::fs::canonicalize("."),
        Some(parent) => std::fs::canonicalize(parent),
        None => Err(std::io::ErrorKind::NotFound.into()),
    };
    // A link to an image may be opened by either name.
    let overlay = overlay.map(path_of_text).filter(|overlay| !overlay.is_symlink());
    let is_beside = |overlay: &Path| folder(overlay).is_ok_and(|one| folder(&path).is_ok_and(|other| one == other));
    match path.file_name() {
        Some(last) if path.is_relative() && overlay.as_deref().is_some_and(is_beside) => {
            let last = text_of_path(Path::new(last));
            // A part before a colon would be a protocol.
            if last.contains(':') { format!("./{last}") } else { last }
        }
        _ => absolute(name),
    }
}

/// Refuses a name that no header holds.
///
/// # Errors
/// It is longer than 1023 bytes.
pub fn check_header_name(name: &str) -> Result<()> {
    let bytes = name_of_text(name).len();
    if bytes <= MAX_HEADER_NAME_BYTES {
        return Ok(());
    }
    let message = format!("the name of the backing file is longer than the {MAX_HEADER_NAME_BYTES} bytes of a header");
    let error = Error::invalid_argument(message).field("backing_file").value(format!("{bytes} bytes"));
    Err(error.qemu("backing file name too long"))
}

fn sorted(mut all: Vec<(String, Value)>) -> Value {
    let rank = |key: &str| {
        let parts: Vec<&str> =
            key.split('.').map(|part| if part.parse::<u32>().is_ok() { "0" } else { part }).collect();
        let name = parts.join(".");
        let driver = ORDER.iter().position(|known| *known == "driver").unwrap_or(0);
        ORDER.iter().position(|known| *known == name).unwrap_or(driver)
    };
    all.sort_by_key(|(key, _)| rank(key));
    Value::Object(all.into_iter().collect::<Map<_, _>>())
}

/// True for an option that not all drivers have, other than this child.
fn is_own(key: &str, child: &str) -> bool {
    let first = key.split('.').next().unwrap_or_default();
    first != child && COMMON.iter().all(|common| common.name != first)
}

/// The options of a node as they are, with flat keys.
pub(crate) fn given(options: &BlockdevOptions) -> Vec<(String, Value)> {
    let mut flat = Vec::new();
    for (key, value) in options.iter() {
        flatten(key, value, &mut flat);
    }
    flat
}

/// Adds an option, of an object or a list each part. Children are objects too: their keys are no option's name.
fn flatten(key: &str, value: &Value, flat: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, value)| flatten(&format!("{key}.{name}"), value, flat)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(index, value)| flatten(&format!("{key}.{index}"), value, flat));
        }
        other => flat.push((key.to_owned(), other.clone())),
    }
}

/// True when the text that was given means the value.
fn is_same(given: &Value, value: &Value) -> bool {
    match (given, value) {
        (Value::String(text), Value::Number(number)) => parse_size(text).ok() == number.as_u64(),
        (Value::String(text), Value::Bool(flag)) => crate::options::parse_on_off(text) == Some(*flag),
        _ => given == value,
    }
}

/// JSON with QEMU's blanks.
fn print(value: &Value, text: &mut String) {
    let mut opening = "";
    match value {
        Value::Object(map) => {
            text.push('{');
            for (key, value) in map {
                text.push_str(&format!("{opening}{}: ", Value::from(key.as_str())));
                print(value, text);
                opening = ", ";
            }
            text.push('}');
        }
        Value::Array(list) => {
            text.push('[');
            for value in list {
                text.push_str(opening);
                print(value, text);
                opening = ", ";
            }
            text.push(']');
        }
        other => text.push_str(&other.to_string()),
    }
}
