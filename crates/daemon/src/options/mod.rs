// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The option grammars of `qemu-storage-daemon`: each option becomes a [`Step`], carried out in the order given.

mod chardev;
mod drive;
mod help;
mod temporary;

pub use chardev::Chardevs;
pub use drive::{Drive, OFFSET};
pub use help::{chardev_help, object_help};

use crate::chardevs::ChardevOptions;
use crate::commands;
use crate::metrics;
use crate::monitor::MonitorAddress;
use crate::objects::OBJECTS_OF_MACHINES;
use crate::state::Daemon;
use cowshed_image::options::{BareKey, BlockdevOptions, parse_list, short_forms};
use cowshed_image::{DRIVERS, TlsCredentials};
use cowshed_nbd::{ClientTls, ServerTls};
use cowshed_qmp::{QmpError, Strictness, parse_json};
use cowshed_storage::{ListenOptions, SocketAddress, path_of_text, text_of_path};
use cowshed_types::{Error, IDENTIFIERS, LINE_END, Result, check_identifier};
use drive::Controls;
use serde_json::{Map, Value};
use std::rc::Rc;

/// The start of the option of a character device.
const CHARDEV: &str = "--chardev ";
/// The error of a user that writes to an image in use.
const WRITE_LOCK: &str = "Failed to get \"write\" lock";

/// One step of the start.
#[derive(Clone, Debug)]
pub struct Step {
    /// The option that asks for it, for messages.
    option: String,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    /// A command, its arguments checked as an object of this type.
    Command {
        name: &'static str,
        object: &'static str,
        arguments: Map<String, Value>,
        strictness: Strictness,
    },
    /// A monitor at an address.
    Monitor {
        address: MonitorAddress,
        pretty: bool,
    },
    /// A character device where a monitor can be.
    Chardev {
        id: String,
        options: ChardevOptions,
    },
    /// A monitor on such a device.
    MonitorOn {
        chardev: String,
        /// That of the object.
        id: Option<String>,
        pretty: bool,
    },
    Metrics(String),
    /// Bytes that the metadata of all images may take.
    MetadataBudget(u64),
    Drive(Box<Drive>),
    /// The settings of a drive for its export, by the export's id.
    Controls(String, Box<Controls>),
    /// An NBD server on the sockets that a service manager passed, or at an address.
    Serve {
        address: Option<SocketAddress>,
        tls: Option<String>,
        authz: Option<String>,
        max_connections: usize,
        handshake_seconds: Option<u64>,
        /// See [`Step::answering_to_ids`].
        by_ids: bool,
    },
    /// No step: the option is known to be wrong.
    Refused(Error),
}

/// Parses the value of an option: JSON, or `key=value` with dotted keys. A first word without `=` is the value of
/// `implied`.
fn parse(text: &str, implied: &str, bare: BareKey) -> Result<(Map<String, Value>, Strictness)> {
    if text.trim_start().starts_with('{') {
        return match parse_json(text.as_bytes()) {
            Ok(Value::Object(map)) => Ok((map, Strictness::Exact)),
            Ok(_) => Err(Error::invalid_argument("the JSON text must be an object")),
            Err(error) => Err(Error::invalid_argument(error)),
        };
    }
    let first = text.split(',').next().unwrap_or_default();
    let pairs = match first.contains('=') || first.is_empty() || implied.is_empty() {
        true => parse_list(text, bare)?,
        false => parse_list(&format!("{implied}={text}"), bare)?,
    };
    let flat = Map::from_iter(pairs.into_iter().map(|(key, value)| (key, Value::String(value))));
    match Value::from(BlockdevOptions::from_map(flat)?) {
        Value::Object(map) => Ok((map, Strictness::Texts)),
        _ => Err(Error::internal("options are no object")),
    }
}

/// Makes the names of files and folders absolute, in the options of a node or an object and of those in it.
fn anchor(options: &mut Map<String, Value>) {
    let kind = ["driver", "qom-type"].into_iter().find_map(|key| options.get(key)).and_then(Value::as_str);
    let key = match kind {
        Some("authz-listfile") => "filename",
        Some(driver) if DRIVERS.takes_paths(driver) => "filename",
        Some("tls-creds-x509") => "dir",
        _ => "",
    };
    for (name, value) in options.iter_mut() {
        match value {
            Value::String(path) if name == key && !path.is_empty() => {
                if let Ok(anchored) = std::path::absolute(path_of_text(path)) {
                    *path = text_of_path(&anchored);
                }
            }
            Value::Object(child) => anchor(child),
            Value::Array(children) => children.iter_mut().filter_map(Value::as_object_mut).for_each(anchor),
            _ => {}
        }
    }
}

/// True for a type of objects that QEMU knows, and that its tools don't make: `invalid object type`.
pub fn is_object_of_machines(kind: &str) -> bool {
    OBJECTS_OF_MACHINES.contains(&kind)
}

/// Refuses an object whose properties aren't those of its type, `[qom-type=]TYPE,id=ID,…` or JSON.
///
/// # Errors
/// In QEMU's words: a property is missing, unexpected or of another type.
pub fn check_object(definition: &str) -> Result<()> {
    let (arguments, strictness) = parse(definition, "qom-type", BareKey::Refused)?;
    let checked = crate::schema::build()?.check("ObjectOptions", arguments, strictness);
    let checked = checked.map_err(worded)?;
    let text = |key: &str| checked.get(key).and_then(Value::as_str).unwrap_or_default();
    check_identifier(text("id"))?;
    commands::check_kind(text("qom-type")).map_err(worded)
}

/// The credentials that `[qom-type=]tls-creds-x509,id=ID,dir=FOLDER,…`, or the same as JSON, defines. Credentials of a
/// server are only checked.
pub fn tls_credentials(definition: &str) -> Result<TlsCredentials> {
    let (arguments, strictness) = parse(definition, "qom-type", BareKey::Refused)?;
    let arguments = crate::schema::build()?.check("ObjectOptions", arguments, strictness).map_err(worded)?;
    let text = |key: &str| arguments.get(key).and_then(Value::as_str);
    let dir = crate::objects::check_tls_options(text).map_err(worded)?;
    let flag = |key: &str| arguments.get(key).and_then(Value::as_bool).unwrap_or(true);
    let (dir, verify_peer, sanity_check) = (dir.as_ref(), flag("verify-peer"), flag("sanity-check"));
    if text("endpoint") == Some("server") {
        return ServerTls::of_object(dir, verify_peer, sanity_check).map(|_| TlsCredentials::Server);
    }
    ClientTls::of_object(dir, verify_peer, sanity_check).map(TlsCredentials::Client)
}

/// The credentials of a client that the object `id` stands for, of those that these options define.
pub fn client_credentials(objects: &[String], id: &str) -> Result<ClientTls> {
    match credentials(objects, id)? {
        TlsCredentials::Client(credentials) => Ok(credentials),
        TlsCredentials::Server => Err(no_credentials("Expected TLS credentials for a client endpoint")),
    }
}

/// Refuses a text that is no id of credentials of a server among the objects of a command line.
pub fn check_server_credentials(objects: &[String], id: &str) -> Result<()> {
    match credentials(objects, id)? {
        TlsCredentials::Server => Ok(()),
        TlsCredentials::Client(_) => Err(no_credentials("Expected TLS credentials for a server endpoint")),
    }
}

fn no_credentials(reason: &str) -> Error {
    Error::invalid_argument(format!("Failed to get TLS creds: {reason}"))
}

fn credentials(objects: &[String], id: &str) -> Result<TlsCredentials> {
    let mut found = None;
    for text in objects {
        Step::object(text)?;
        let option = format!("--object {text}");
        let (arguments, _) = parse(text, "qom-type", BareKey::Refused).map_err(|error| error.file(option.clone()))?;
        let kind = arguments.get("qom-type").and_then(Value::as_str);
        let credentials = match kind == Some("tls-creds-x509") {
            true => Some(tls_credentials(text).map_err(|error| error.file(option))?),
            false => None,
        };
        if arguments.get("id").and_then(Value::as_str) == Some(id) {
            found = Some(credentials);
        }
    }
    match found {
        Some(Some(credentials)) => Ok(credentials),
        Some(None) => Err(no_credentials(&format!("Object with id '{id}' is not TLS credentials"))),
        None => Err(no_credentials(&format!("No TLS credentials with id '{id}'"))),
    }
}

/// An error of a command as command lines say it.
fn worded(error: QmpError) -> Error {
    let mut sentence = error.description;
    if sentence == commands::NO_IDENTIFIER {
        sentence = format!("{sentence}{LINE_END}{IDENTIFIERS}");
    }
    if let Some(hint) = &error.hint {
        sentence = format!("{sentence}{LINE_END}{hint}");
    }
    let whole = error.whole.unwrap_or_else(|| sentence.clone());
    Error::invalid_argument(whole).qemu(sentence)
}

/// Paths of missing parameters as they were given.
fn with_dots(error: QmpError) -> QmpError {
    match error.description.ends_with(" is missing") {
        true => QmpError { description: error.description.replace('[', ".").replace(']', ""), ..error },
        false => error,
    }
}

/// Refuses a word that asks for help, of an option that has none.
fn refuse_help(text: &str, option: &str) -> Result<()> {
    match help::is_asked(text) {
        true => Err(Error::invalid_argument("Help is not available for this option").file(option)),
        false => Ok(()),
    }
}

impl Step {
    fn command(option: &str, text: &str, implied: &str, name: &'static str, object: &'static str) -> Result<Step> {
        let whole = format!("{option} {text}");
        refuse_help(text, &whole)?;
        let (arguments, strictness) =
            parse(text, implied, BareKey::Refused).map_err(|error| error.file(whole.clone()))?;
        Ok(Step { option: whole, what: What::Command { name, object, arguments, strictness } })
    }

    /// `--blockdev [driver=]DRIVER,node-name=NAME,…` or JSON.
    pub fn blockdev(text: &str) -> Result<Step> {
        let option = format!("--blockdev {text}");
        refuse_help(text, &option)?;
        let (arguments, strictness) =
            parse(text, "driver", BareKey::Refused).map_err(|error| error.file(option.clone()))?;
        let object = crate::schema::BLOCKDEV_OPTIONS;
        let what = What::Command { name: "blockdev-add", object, arguments, strictness };
        Ok(Step { option, what })
    }

    /// `--object [qom-type=]TYPE,id=ID,…` or JSON.
    pub fn object(text: &str) -> Result<Step> {
        Self::command("--object", text, "qom-type", "object-add", "ObjectOptions")
    }

    /// `--nbd-server addr.type=…,…` or JSON.
    pub fn nbd_server(text: &str) -> Result<Step> {
        // QEMU has no key without a name here.
        let kind = text.split(',').next().unwrap_or_default();
        let implied = if ["inet", "unix", "fd", "vsock"].contains(&kind) { "addr.type" } else { "" };
        Self::command("--nbd-server", text, implied, "nbd-server-start", "NbdServerOptions")
    }

    /// `--export [type=]nbd,id=…,node-name=…` or JSON.
    pub fn export(text: &str) -> Result<Step> {
        Self::command("--export", text, "type", "block-export-add", "BlockExportOptions")
    }

    /// A command of a monitor with its arguments as JSON.
    pub fn call(option: &str, name: &'static str, object: &'static str, arguments: Value) -> Step {
        let arguments = match arguments {
            Value::Object(map) => map,
            _ => Map::new(),
        };
        let what = What::Command { name, object, arguments, strictness: Strictness::Exact };
        Step { option: option.to_owned(), what }
    }

    /// `--chardev BACKEND,id=ID,…`: the device is there from now on, also for [`Step::monitor`].
    pub fn chardev(text: &str, chardevs: &mut Chardevs) -> Result<Step> {
        let (id, options) = chardevs.add(text)?;
        Ok(Step { option: format!("{CHARDEV}{text}"), what: What::Chardev { id, options } })
    }

    /// Its names of files and folders are of the present folder, wherever the process goes before it uses them again.
    #[must_use]
    pub fn anchored(mut self) -> Step {
        if let What::Command { name: "blockdev-add" | "object-add", arguments, .. } = &mut self.what {
            anchor(arguments);
        }
        self
    }

    /// The option that asks for it.
    pub fn option(&self) -> &str {
        &self.option
    }

    /// True for a monitor on the standard streams, which a process in the background doesn't have.
    pub fn uses_standard_streams(&self) -> bool {
        matches!(&self.what, What::Chardev { options, .. } if options.is_stdio())
            || matches!(&self.what, What::Monitor { address: MonitorAddress::Stdio, .. })
    }

    /// `--monitor [chardev=]ID[,mode=control][,pretty=on|off]`: the character device must have been named before.
    pub fn monitor(text: &str, chardevs: &Chardevs) -> Result<Step> {
        let option = format!("--monitor {text}");
        refuse_help(text, &option)?;
        let refused = |message: String| Err(Error::invalid_argument(message).file(option.clone()));
        let (map, _) = parse(text, "chardev", BareKey::Refused).map_err(|error| error.file(option.clone()))?;
        if let Some(id) = map.get("id").and_then(Value::as_str) {
            check_identifier(id).map_err(|error| error.file(option.clone()))?;
        }
        let object = map.get("id").and_then(Value::as_str).map(str::to_owned);
        let mut pretty = false;
        for (key, value) in &map {
            let value = value.as_str().unwrap_or_default();
            match key.as_str() {
                "chardev" | "id" => {}
                "mode" if value == "control" => {}
                "mode" if value == "readline" => return refused("Only QMP is supported".to_owned()),
                "mode" => return refused(format!("Parameter 'mode' does not accept value '{value}'")),
                "pretty" => match cowshed_image::options::parse_on_off(value) {
                    Some(flag) => pretty = flag,
                    None => return refused("Parameter 'pretty' expects 'on' or 'off'".to_owned()),
                },
                other => return refused(format!("Parameter '{other}' is unexpected")),
            }
        }
        let Some(id) = map.get("chardev").and_then(Value::as_str) else {
            return refused("Parameter 'chardev' is missing".to_owned());
        };
        match chardevs.contains(id) {
            true => Ok(Step { option, what: What::MonitorOn { chardev: id.to_owned(), id: object, pretty } }),
            false => refused(format!("chardev \"{id}\" not found")),
        }
    }

    /// A monitor at an address.
    pub fn monitor_at(option: &str, address: MonitorAddress, pretty: bool) -> Step {
        Step { option: option.to_owned(), what: What::Monitor { address, pretty } }
    }

    /// An OpenMetrics endpoint at `HOST:PORT`.
    pub fn metrics(option: &str, address: &str) -> Step {
        Step { option: option.to_owned(), what: What::Metrics(address.to_owned()) }
    }

    /// `--metadata-budget SIZE`: bytes of memory, at least 1 MiB, that the metadata of all images may take. It limits
    /// the contents of caches, not their sizes.
    pub fn metadata_budget(option: &str, text: &str) -> Result<Step> {
        let bytes = cowshed_image::options::parse_size(text).map_err(|error| error.file(option))?;
        Ok(Step { option: option.to_owned(), what: What::MetadataBudget(bytes) })
    }

    /// The node of a drive.
    pub fn drive(option: &str, drive: Drive) -> Step {
        Step { option: option.to_owned(), what: What::Drive(Box::new(drive)) }
    }

    /// An option that is wrong by itself, and fails in its turn.
    pub fn refused(option: &str, error: Error) -> Step {
        Step { option: option.to_owned(), what: What::Refused(error) }
    }

    /// True for an option that is wrong by itself.
    pub fn is_refused(&self) -> bool {
        matches!(self.what, What::Refused(_))
    }

    /// The step that applies a drive's settings to the export with its id: limits, and statistics. It comes after the
    /// export.
    pub fn controls(option: &str, drive: &Drive) -> Step {
        Step { option: option.to_owned(), what: What::Controls(drive.id.clone(), Box::new(drive.controls())) }
    }

    /// The NBD server; without an address it listens on the sockets that were passed to this process. `tls` is the id
    /// of credentials, `authz` that of the permitted clients, 0 `max_connections` are any number, 0 `handshake_seconds` is for ever.
    pub fn serve(
        address: Option<SocketAddress>,
        (tls, authz): (Option<String>, Option<String>),
        max_connections: usize,
        handshake_seconds: Option<u64>,
    ) -> Step {
        Step {
            option: "the NBD server".to_owned(),
            what: What::Serve { address, tls, authz, max_connections, handshake_seconds, by_ids: false },
        }
    }

    /// Exports are found by their ids besides their names, and the first one without a name.
    #[must_use]
    pub fn answering_to_ids(mut self) -> Step {
        if let What::Serve { by_ids, .. } = &mut self.what {
            *by_ids = true;
        }
        self
    }

    pub(crate) async fn run(self, daemon: &Rc<Daemon>) -> Result<()> {
        if let Some(text) = self.option.strip_prefix(CHARDEV) {
            let warnings = short_forms(text, true);
            warnings.iter().for_each(|warning| crate::warnings::say(&format!("{}: {warning}", self.option)));
        }
        let result = match self.what {
            What::Metrics(address) => {
                daemon.note_metrics(metrics::listen(&address, daemon.control.clone())?);
                return Ok(());
            }
            What::MetadataBudget(bytes) => {
                return commands::set_budget(bytes).map_err(|error| error.file(self.option));
            }
            What::Drive(drive) => return drive.add(daemon).await,
            What::Refused(error) => return Err(error.file(self.option)),
            What::Serve { address, tls, authz, max_connections, handshake_seconds, by_ids } => {
                let access = commands::TlsAccess { tls_creds: tls.as_deref(), tls_authz: authz.as_deref() };
                commands::start_nbd(
                    daemon,
                    (address.into(), ListenOptions::default()),
                    access,
                    max_connections,
                    handshake_seconds,
                )
                .inspect(|()| daemon.nbd().iter().filter(|_| by_ids).for_each(|nbd| nbd.answer_to_ids()))
            }
            What::Controls(id, controls) => controls.apply(daemon, &id).await,
            What::Monitor { address, pretty } => return daemon.add_monitor(&address, pretty),
            What::Chardev { id, options } => {
                let named = |error: Error| {
                    let sentence = error.sentence();
                    Error::invalid_argument(error.to_string()).qemu(sentence).file(self.option)
                };
                return daemon.chardevs.add(&id, &options).map_err(named);
            }
            What::MonitorOn { chardev, id, pretty } => {
                return daemon.add_first_monitor(&chardev, id, pretty).map_err(|error| error.file(self.option));
            }
            What::Command { name, object, arguments, strictness } => {
                let done = match daemon.schema.check(object, arguments, strictness) {
                    Ok(arguments) => commands::call(daemon, name, arguments).await.map(drop),
                    Err(error) => Err(error),
                };
                done.map_err(|error| match strictness {
                    Strictness::Texts => with_dots(error),
                    _ => error,
                })
            }
        };
        // As QEMU, whose export of a writable image asks for its locks anew.
        let is_export = self.option.starts_with("--export ");
        result.map_err(|mut error| {
            if is_export && error.description == WRITE_LOCK {
                error.hint = None;
            }
            worded(error).file(self.option)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::REFUSED_OBJECTS;
    use serde_json::json;

    #[test]
    fn options_are_texts_with_an_implied_first_key_or_json() {
        let parsed = |text: &str| parse(text, "type", BareKey::Refused).map(|(map, how)| (Value::Object(map), how));
        let expected = json!({"type": "nbd", "id": "e", "addr": {"path": "a,b"}});
        assert_eq!(parsed("nbd,id=e,addr.path=a,,b").unwrap(), (expected.clone(), Strictness::Texts));
        assert_eq!(parsed("type=nbd,id=e,addr.path=a,,b").unwrap(), (expected, Strictness::Texts));
        assert_eq!(parsed("{\"id\": 5}").unwrap(), (json!({"id": 5}), Strictness::Exact));
        for wrong in ["nbd,id", "{\"id\": ", "[]x", "a=1,a.b=2"] {
            assert!(parsed(wrong).is_err() || wrong == "[]x", "{wrong}");
        }
    }

    #[test]
    fn objects_that_there_are_not_are_refused_with_the_reason() {
        for (kind, reason) in REFUSED_OBJECTS {
            let more = if *kind == "secret_keyring" { ",serial=1" } else { "" };
            let error = check_object(&format!("{kind},id=x{more}")).unwrap_err().to_string();
            assert!(error.contains(kind) && error.contains(reason), "{error}");
        }
        assert_eq!(check_object("secret_keyring,id=x").unwrap_err().message(), "Parameter 'serial' is missing");
        assert!(check_object("secret,id=x,data=abc").is_ok());
    }

    #[test]
    fn monitors_name_their_character_device() {
        let mut chardevs = Chardevs::default();
        Step::chardev("socket,path=/run/m,id=m,server=on,wait=off", &mut chardevs).unwrap();
        Step::chardev("stdio,id=s", &mut chardevs).unwrap();
        assert!(Step::monitor("m", &chardevs).is_ok());
        assert!(Step::monitor("chardev=s,mode=control,pretty=on", &chardevs).is_ok());
        for wrong in ["x", "m,mode=readline", "m,pretty=maybe", "m,foo=1", "m,id=1", "m,id="] {
            assert!(Step::monitor(wrong, &chardevs).is_err(), "{wrong}");
        }
    }
}
