// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The objects that `object-add` makes (throttle groups, credentials, secrets, threads), and their types.

use crate::authorization::{Authorization, Authorizations};
use crate::failure::failed;
use crate::monitor_properties::MonitorProperties;
use cowshed_image::filters::throttle::{Group, Limits};
use cowshed_image::secret;
use cowshed_nbd::ServerTls;
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use cowshed_storage::rt::PollLimit;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Types of objects whose options are checked as in QEMU, and why there are none here.
pub(crate) const REFUSED_OBJECTS: &[(&str, &str)] = &[
    ("tls-creds-psk", "the TLS library has no pre-shared keys; use tls-creds-x509"),
    (
        "tls-creds-anon",
        "the TLS library has no anonymous key exchange, which an attacker in between could read; use tls-creds-x509",
    ),
    ("secret_keyring", "secrets come from a text or a file; use secret"),
];

/// Types of objects that QEMU knows by name, and that none of its tools for images makes.
pub(crate) const OBJECTS_OF_MACHINES: &[&str] = &[
    "acpi-generic-initiator",
    "acpi-generic-port",
    "authz-pam",
    "can-bus",
    "can-host-socketcan",
    "cryptodev-backend",
    "cryptodev-backend-builtin",
    "cryptodev-backend-lkcf",
    "cryptodev-vhost-user",
    "dbus-vmstate",
    "filter-buffer",
    "filter-dump",
    "filter-mirror",
    "filter-redirector",
    "filter-replay",
    "filter-rewriter",
    "input-barrier",
    "input-linux",
    "iommufd",
    "memory-backend-epc",
    "memory-backend-file",
    "memory-backend-memfd",
    "memory-backend-ram",
    "memory-backend-shm",
    "monitor-hmp",
    "pef-guest",
    "qtest",
    "rng-builtin",
    "rng-egd",
    "rng-random",
    "s390-pv-guest",
    "sev-guest",
    "sev-snp-guest",
    "tdx-guest",
    "tls-cipher-suites",
    "x-remote-object",
    "x-vfio-user-server",
];

/// An object.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    /// A name for a thread: connections are spread over the daemon's own threads, so only its `poll-max-ns` counts.
    IoThread(Arc<IoThreadProperties>),
    /// `throttle-group`: limits that its members share.
    ThrottleGroup(Arc<Group>),
    /// `secret`: a passphrase or key for others. It is never shown.
    Secret(Secret),
    /// `tls-creds-x509`: a folder with certificates.
    TlsCreds { dir: PathBuf, is_server: bool, verify_peer: bool, sanity_check: bool, priority: String },
    /// `authz-…`: which clients may come.
    Authorization(Arc<Authorization>),
    /// `monitor-qmp`: a monitor on a character device.
    Monitor(Arc<MonitorProperties>),
    /// `thread-context`: where threads are to run. Nothing here asks for one.
    ThreadContext { cpus: Vec<u64> },
}

impl Object {
    /// Its type.
    pub fn kind(&self) -> &'static str {
        match self {
            Object::IoThread(properties) => properties.kind,
            Object::ThrottleGroup(_) => "throttle-group",
            Object::Secret(_) => "secret",
            Object::TlsCreds { .. } => "tls-creds-x509",
            Object::Authorization(authorization) => authorization.kind(),
            Object::Monitor(_) => "monitor-qmp",
            Object::ThreadContext { .. } => "thread-context",
        }
    }

    /// The names and types of its properties that have a value.
    pub fn properties(&self) -> Vec<(String, &'static str)> {
        let mut properties = properties_of(self.kind());
        properties.retain(|(name, _)| self.get(name).is_some());
        properties
    }

    /// The value of a property.
    pub fn get(&self, property: &str) -> Option<Value> {
        match (self, property) {
            (Object::ThrottleGroup(group), "limits") => Some(Value::Object(group.limits().to_json())),
            (Object::ThrottleGroup(group), name) => group.limits().get(name.strip_prefix("x-")?).map(Value::from),
            (Object::Secret(secret), "file") => Some(secret.file.as_deref().unwrap_or_default().into()),
            (Object::Secret(secret), "format") => Some(if secret.is_base64 { "base64" } else { "raw" }.into()),
            (Object::TlsCreds { dir, .. }, "dir") => Some(dir.to_string_lossy().into()),
            (Object::TlsCreds { is_server, .. }, "endpoint") => {
                Some(if *is_server { "server" } else { "client" }.into())
            }
            (Object::TlsCreds { verify_peer, .. }, "verify-peer") => Some((*verify_peer).into()),
            (Object::TlsCreds { sanity_check, .. }, "sanity-check") => Some((*sanity_check).into()),
            (Object::TlsCreds { priority, .. }, "priority") => Some(priority.as_str().into()),
            (Object::TlsCreds { .. }, "passwordid") => Some("".into()),
            (Object::Authorization(authorization), name) => authorization.get(name),
            (Object::IoThread(properties), name) => properties.lock().all.get(name).map(|value| json!(value)),
            (Object::ThreadContext { .. }, "thread-id") => Some(std::process::id().into()),
            (Object::ThreadContext { cpus }, "cpu-affinity") => Some(json!(cpus)),
            (Object::Monitor(properties), "chardev") => Some(properties.chardev().into()),
            (Object::Monitor(properties), "pretty") => Some(properties.is_pretty().into()),
            (Object::Monitor(properties), "close-action") => {
                Some(if properties.is_deleted_on_close() { "delete" } else { "none" }.into())
            }
            _ => None,
        }
    }

    /// Changes a property. A wrong value changes nothing.
    pub fn set(&self, property: &str, value: &Value) -> QmpResult<()> {
        let failed = |error: cowshed_types::Error| QmpError::generic(error.to_string());
        if let Object::IoThread(properties) = self {
            return properties.set(property, value);
        }
        if let (Object::Monitor(properties), "pretty" | "close-action") = (self, property) {
            return set_monitor(properties, property, value);
        }
        let Object::ThrottleGroup(group) = self else {
            return Err(QmpError::generic(format!("Property '{property}' of '{}' cannot be changed", self.kind())));
        };
        let mut limits = group.limits();
        match (property, value) {
            ("limits", Value::Object(given)) => {
                check_limits(given)?;
                // Limits that aren't named stay as they are.
                let mut all = limits.to_json();
                for (name, value) in given {
                    all.insert(name.clone(), value.clone());
                }
                limits = Limits::from_json(&all).map_err(failed)?;
            }
            ("limits", _) => {
                return Err(QmpError::generic("Invalid parameter type for 'limits', expected: object"));
            }
            _ => return Err(QmpError::generic("Property cannot be set after initialization")),
        }
        group.set_limits(limits).map_err(failed)
    }
}

/// Refuses keys and types of values that limits don't have.
fn check_limits(given: &Map<String, Value>) -> QmpResult<()> {
    let known: Vec<String> = Limits::option_names().collect();
    if let Some(name) = known.iter().find(|name| given.get(*name).is_some_and(|value| !value.is_i64())) {
        return Err(QmpError::generic(format!("Invalid parameter type for 'limits.{name}', expected: integer")));
    }
    match given.keys().find(|key| !known.contains(key)) {
        Some(key) => Err(QmpError::generic(format!("Parameter 'limits.{key}' is unexpected"))),
        None => Ok(()),
    }
}

fn set_monitor(properties: &MonitorProperties, property: &str, value: &Value) -> QmpResult<()> {
    let expected = |kind: &str| QmpError::generic(format!("Invalid parameter type for '{property}', expected: {kind}"));
    if property == "pretty" {
        properties.set_pretty(value.as_bool().ok_or_else(|| expected("boolean"))?);
        return Ok(());
    }
    match value.as_str().ok_or_else(|| expected("string"))? {
        "none" => properties.set_deleted_on_close(false),
        "delete" => properties.set_deleted_on_close(true),
        other => {
            return Err(QmpError::generic(format!("Parameter 'close-action' does not accept value '{other}'")));
        }
    }
    Ok(())
}

/// A node of the tree of objects.
pub(crate) enum TreeNode {
    /// One with others in it; its path, empty for the root.
    Container(&'static str),
    /// An object, with its id.
    Object(String, Object),
}

/// A type of objects, or one that others are built on.
pub(crate) struct TypeInfo {
    pub name: &'static str,
    pub parent: Option<&'static str>,
    /// There are no objects of it, only of types that are built on it.
    pub is_abstract: bool,
    /// Made by `object-add`.
    pub is_creatable: bool,
}

const fn creatable(name: &'static str, parent: &'static str) -> TypeInfo {
    TypeInfo { name, parent: Some(parent), is_abstract: false, is_creatable: true }
}

const fn base(name: &'static str) -> TypeInfo {
    TypeInfo { name, parent: Some("object"), is_abstract: true, is_creatable: false }
}

/// All types, with QEMU's names and kinship.
pub(crate) const TYPES: &[TypeInfo] = &[
    base("authz"),
    creatable("authz-list", "authz"),
    creatable("authz-listfile", "authz"),
    creatable("authz-simple", "authz"),
    TypeInfo { name: "container", parent: Some("object"), is_abstract: false, is_creatable: false },
    base("event-loop-base"),
    creatable("iothread", "event-loop-base"),
    creatable("main-loop", "event-loop-base"),
    base("monitor"),
    creatable("monitor-qmp", "monitor"),
    TypeInfo { name: "object", parent: None, is_abstract: true, is_creatable: false },
    creatable("secret", "secret_common"),
    base("secret_common"),
    creatable("thread-context", "object"),
    creatable("throttle-group", "object"),
    base("tls-creds"),
    creatable("tls-creds-x509", "tls-creds"),
];

impl TypeInfo {
    pub fn find(name: &str) -> Option<&'static TypeInfo> {
        TYPES.iter().find(|one| one.name == name)
    }

    /// True when it is the type `name`, is built on it, or has the interface of that name.
    pub fn is_a(&self, name: &str) -> bool {
        let kin = std::iter::successors(Some(self), |one| one.parent.and_then(TypeInfo::find));
        (name == "user-creatable" && self.is_creatable) || kin.map(|one| one.name).any(|one| one == name)
    }
}

/// The names and types of the properties that objects of a type can have, `type` left out.
pub(crate) fn properties_of(kind: &str) -> Vec<(String, &'static str)> {
    let named = |names: &[(&str, &'static str)]| names.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect();
    match kind {
        "throttle-group" => {
            let names = Limits::option_names().map(|name| (format!("x-{name}"), "int"));
            std::iter::once(("limits".to_owned(), "ThrottleLimits")).chain(names).collect()
        }
        "authz-simple" => named(&[("identity", "string")]),
        "authz-list" => named(&[("policy", "QAuthZListPolicy"), ("rules", "QAuthZListRule")]),
        "authz-listfile" => named(&[("filename", "string"), ("refresh", "bool")]),
        "iothread" => IoThreadProperties::ranges(kind).map(|(name, ..)| (name.to_owned(), "int")).collect(),
        MAIN_LOOP => named(&[("thread-pool-min", "int"), ("aio-max-batch", "int"), ("thread-pool-max", "int")]),
        "thread-context" => named(&[("thread-id", "int"), ("node-affinity", "int"), ("cpu-affinity", "int")]),
        "monitor-qmp" => named(&[("chardev", "string"), ("pretty", "bool"), ("close-action", "MonitorQMPCloseAction")]),
        "secret" => named(&[("file", "string"), ("format", "QCryptoSecretFormat")]),
        "tls-creds-x509" => named(&[
            ("endpoint", "QCryptoTLSCredsEndpoint"),
            ("dir", "string"),
            ("verify-peer", "bool"),
            ("priority", "string"),
            ("sanity-check", "bool"),
            ("passwordid", "string"),
        ]),
        _ => Vec::new(),
    }
}

/// The type of the one object that is about the daemon's own thread.
pub(crate) const MAIN_LOOP: &str = "main-loop";

/// The settings of an `iothread` or of the `main-loop` for polling and workers: kept and shown. `poll-max-ns` counts where
/// it is given: for all threads that serve ([`Objects::poll_limit`]).
#[derive(Debug)]
pub(crate) struct IoThreadProperties {
    kind: &'static str,
    values: Mutex<IoThreadValues>,
}

#[derive(Debug)]
struct IoThreadValues {
    all: BTreeMap<&'static str, i64>,
    /// `poll-max-ns` was given, not left as QEMU has it.
    says_poll_max: bool,
}

impl IoThreadProperties {
    /// Names, largest values, and default values.
    const RANGES: &[(&str, i64, i64)] = &[
        ("poll-max-ns", i64::MAX, 32768),
        ("poll-grow", i64::MAX, 2),
        ("poll-shrink", i64::MAX, 2),
        ("poll-weight", 63, 3),
        ("aio-max-batch", i64::MAX, 0),
        ("thread-pool-min", i64::MAX, 0),
        ("thread-pool-max", i64::MAX, 64),
    ];

    /// The properties of a type: the main loop doesn't poll.
    fn ranges(kind: &str) -> impl DoubleEndedIterator<Item = (&'static str, i64, i64)> {
        let polls = kind != MAIN_LOOP;
        Self::RANGES.iter().copied().filter(move |(name, ..)| polls || !name.starts_with("poll-"))
    }

    /// With the given properties; the rest is as in QEMU.
    pub fn new(kind: &'static str, given: &serde_json::Map<String, Value>) -> QmpResult<IoThreadProperties> {
        let all = Self::ranges(kind).map(|(name, _, default)| (name, default)).collect();
        let values = Mutex::new(IoThreadValues { all, says_poll_max: false });
        let properties = IoThreadProperties { kind, values };
        // The most before the least, so that both may be given in any order.
        for (name, ..) in Self::ranges(kind).rev() {
            if let Some(value) = given.get(name) {
                properties.set(name, value)?;
            }
        }
        Ok(properties)
    }

    fn lock(&self) -> MutexGuard<'_, IoThreadValues> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `poll-max-ns`, where it is given.
    fn poll_max(&self) -> Option<Duration> {
        let values = self.lock();
        let ns = values.all.get("poll-max-ns").filter(|_| values.says_poll_max)?;
        Some(Duration::from_nanos(u64::try_from(*ns).unwrap_or(0)))
    }

    fn set(&self, property: &str, value: &Value) -> QmpResult<()> {
        let Some((name, most, _)) = Self::ranges(self.kind).find(|(name, ..)| *name == property) else {
            return Err(QmpError::generic(format!("Property '{}.{property}' not found", self.kind)));
        };
        let wrong = || QmpError::generic(format!("Invalid parameter type for '{name}', expected: integer"));
        let value = value.as_i64().ok_or_else(wrong)?;
        let mut values = self.lock();
        let all = &mut values.all;
        let least = all.get("thread-pool-min").copied().unwrap_or(0);
        let top = all.get("thread-pool-max").copied().unwrap_or(i64::MAX);
        let is_pool = match name {
            "thread-pool-min" => value <= top,
            "thread-pool-max" => value > 0 && value >= least && i32::try_from(value).is_ok(),
            _ => true,
        };
        if !(0..=most).contains(&value) {
            return Err(QmpError::generic(format!("{name} value must be in range [0, {most}]")));
        }
        if !is_pool {
            return Err(QmpError::generic("bad thread-pool-min/thread-pool-max values"));
        }
        all.insert(name, value);
        values.says_poll_max |= name == "poll-max-ns";
        Ok(())
    }
}

/// A secret, and where it came from.
#[derive(Clone, Debug)]
pub(crate) struct Secret {
    bytes: secret::Secret,
    file: Option<String>,
    is_base64: bool,
}

impl Secret {
    /// From its text or from a file, as it is or in base64. Exactly one of the two must be given.
    pub fn new(
        data: Option<&str>,
        file: Option<&str>,
        is_base64: bool,
        wrapping: Option<&secret::Wrapping<'_>>,
    ) -> QmpResult<Secret> {
        let bytes = secret::Secret::load_wrapped(data, file.map(Path::new), is_base64, wrapping).map_err(failed)?;
        Ok(Secret { bytes, file: file.map(str::to_owned), is_base64 })
    }

    /// The bytes by which images are opened.
    pub fn bytes(&self) -> &secret::Secret {
        &self.bytes
    }
}

/// The objects by id.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    all: RefCell<BTreeMap<String, Object>>,
    /// The objects that decide which clients may come.
    pub authorizations: Authorizations,
    /// The longest time that serving threads look for requests before they sleep: the largest of the `iothread`
    /// objects.
    pub poll_limit: PollLimit,
}

impl Objects {
    /// Adds one; its id must be new.
    pub fn add(&self, id: &str, object: Object) -> QmpResult<()> {
        let mut objects = self.all.borrow_mut();
        if objects.contains_key(id) {
            return Err(duplicate(id));
        }
        if let Object::Authorization(authorization) = &object {
            self.authorizations.set(id, Some(Arc::clone(authorization)));
        }
        objects.insert(id.to_owned(), object);
        drop(objects);
        self.update_poll_limit();
        Ok(())
    }

    /// Changes a property of one of them. A wrong value changes nothing.
    pub fn set(&self, id: &str, object: &Object, property: &str, value: &Value) -> QmpResult<()> {
        if let Object::Authorization(authorization) = object
            && let Some(changed) = authorization.with(property, value)?
        {
            // Clients that are in stay, as in QEMU.
            let changed = Arc::new(changed);
            self.authorizations.set(id, Some(Arc::clone(&changed)));
            self.all.borrow_mut().insert(id.to_owned(), Object::Authorization(changed));
            return Ok(());
        }
        object.set(property, value)?;
        self.update_poll_limit();
        Ok(())
    }

    fn update_poll_limit(&self) {
        let objects = self.all.borrow();
        let said = objects.values().filter_map(|object| match object {
            Object::IoThread(properties) => properties.poll_max(),
            _ => None,
        });
        self.poll_limit.set(said.max().unwrap_or(PollLimit::DEFAULT));
    }

    /// The secrets, with their ids.
    pub fn secrets(&self) -> Vec<(String, secret::Secret)> {
        let objects = self.all.borrow();
        let secrets = objects.iter().filter_map(|(id, object)| match object {
            Object::Secret(secret) => Some((id.clone(), secret.bytes().clone())),
            _ => None,
        });
        secrets.collect()
    }

    /// The object with this id.
    pub fn find(&self, id: &str) -> Option<Object> {
        self.all.borrow().get(id).cloned()
    }

    /// Takes one away.
    pub fn remove(&self, id: &str) -> Option<Object> {
        self.authorizations.set(id, None);
        let removed = self.all.borrow_mut().remove(id);
        self.update_poll_limit();
        removed
    }

    /// Ids and types.
    pub fn list(&self) -> Vec<(String, &'static str)> {
        self.all.borrow().iter().map(|(id, object)| (id.clone(), object.kind())).collect()
    }

    /// The place that a path means: from the root, or the end of such a path.
    pub fn at_path(&self, path: &str) -> QmpResult<TreeNode> {
        // Empty parts count for nothing.
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let id = match (path.starts_with('/'), parts.as_slice()) {
            (true, []) => return Ok(TreeNode::Container("")),
            (_, ["objects"]) => return Ok(TreeNode::Container("/objects")),
            (_, ["objects", id]) | (false, [id]) => *id,
            _ => "",
        };
        let found = self.find(id).map(|object| TreeNode::Object(id.to_owned(), object));
        found.ok_or_else(|| QmpError::new(ErrorClass::DeviceNotFound, format!("Device '{path}' not found")))
    }

    /// Makes a server's credentials.
    pub fn server_tls(&self, id: &str) -> QmpResult<ServerTls> {
        match self.find(id) {
            Some(Object::TlsCreds { dir, is_server: true, verify_peer, sanity_check, .. }) => {
                ServerTls::of_object(&dir, verify_peer, sanity_check)
                    .map_err(|error| QmpError::generic(error.to_string()))
            }
            Some(Object::TlsCreds { .. }) => Err(QmpError::generic("Expected TLS credentials for a server endpoint")),
            Some(_) => Err(QmpError::generic(format!("Object with id '{id}' is not TLS credentials"))),
            None => Err(QmpError::generic(format!("No TLS credentials with id '{id}'"))),
        }
    }

    /// There must be such a thread.
    pub fn check_iothread(&self, id: &str) -> QmpResult<()> {
        match self.find(id) {
            Some(Object::IoThread(properties)) if properties.kind != MAIN_LOOP => Ok(()),
            _ => Err(QmpError::generic(format!("iothread \"{id}\" not found"))),
        }
    }
}

/// Options of credentials that the TLS library has no place for. `text` returns an option's value.
pub(crate) fn check_tls_options<'a>(text: impl Fn(&str) -> Option<&'a str>) -> QmpResult<&'a str> {
    if let Some(priority) = text("priority").filter(|priority| !matches!(*priority, "" | "NORMAL")) {
        return Err(QmpError::generic(format!(
            "Parameter 'priority' does not accept value '{priority}': only NORMAL; TLS 1.2 and 1.3 are offered with the \
             library's own choice of ciphers"
        )));
    }
    if text("passwordid").is_some() {
        return Err(QmpError::generic(
            "Parameter 'passwordid' is not supported: keys are read unencrypted (openssl pkcs8 -topk8 -nocrypt), from a \
             folder that nobody else may read",
        ));
    }
    let dir = text("dir").ok_or_else(|| QmpError::generic("Missing 'dir' property value"))?;
    // An empty one is the root folder, as in QEMU: never the folder that the program runs in.
    Ok(if dir.is_empty() { "/" } else { dir })
}

/// The error for an id that is taken.
pub(crate) fn duplicate(id: &str) -> QmpError {
    QmpError::generic(format!("attempt to add duplicate property '{id}' to object (type 'container')"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_options_without_a_meaning_here_are_refused_by_name() {
        let check =
            |key: &'static str, value: &'static str| check_tls_options(move |asked| (asked == key).then_some(value));
        assert_eq!(check("dir", "x").unwrap(), "x");
        assert_eq!(check("dir", "").unwrap(), "/");
        assert_eq!(check("priority", "NORMAL").unwrap_err().description, "Missing 'dir' property value");
        let error = check("priority", "NORMAL:-VERS-TLS1.2").unwrap_err().description;
        assert!(error.contains("'priority'") && error.contains("TLS 1.2 and 1.3 are offered"), "{error}");
        assert!(check("passwordid", "s").unwrap_err().description.contains("'passwordid' is not supported"));
    }

    #[test]
    fn threads_that_serve_look_as_long_as_an_iothread_says() {
        let objects = Objects::default();
        let iothread = |given: Value| {
            Object::IoThread(Arc::new(IoThreadProperties::new("iothread", given.as_object().unwrap()).unwrap()))
        };
        let limit_ns = || objects.poll_limit.get().as_nanos();
        let default_ns = PollLimit::DEFAULT.as_nanos();
        objects.add("plain", iothread(json!({"poll-grow": 3}))).unwrap();
        assert_eq!(limit_ns(), default_ns, "nothing is said");
        objects.add("some", iothread(json!({"poll-max-ns": 7000}))).unwrap();
        assert_eq!(limit_ns(), 7000);
        objects.add("more", iothread(json!({"poll-max-ns": 9000}))).unwrap();
        assert_eq!(limit_ns(), 9000);
        let more = objects.find("more").unwrap();
        objects.set("more", &more, "poll-max-ns", &json!(0)).unwrap();
        assert_eq!(limit_ns(), 7000);
        objects.set("more", &more, "poll-max-ns", &json!(-1)).unwrap_err();
        objects.remove("some");
        assert_eq!(limit_ns(), 0, "never");
        objects.remove("more");
        assert_eq!(limit_ns(), default_ns);
        let plain = objects.find("plain").unwrap();
        objects.set("plain", &plain, "poll-max-ns", &json!(32768)).unwrap();
        assert_eq!(limit_ns(), 32768, "said, though it is QEMU's default");
    }

    #[test]
    fn secrets_come_from_a_text_or_a_file() {
        let secret = Secret::new(Some("geheim"), None, false, None).unwrap();
        assert_eq!(secret.bytes().as_bytes(), b"geheim");
        assert!(!format!("{secret:?}").contains("geheim"));
        assert_eq!(Secret::new(Some("AAEC/w=="), None, true, None).unwrap().bytes().as_bytes(), [0, 1, 2, 255]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        std::fs::write(&path, "Zm9v\n").unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(Secret::new(None, Some(path), true, None).unwrap().bytes().as_bytes(), b"foo");
        assert_eq!(Secret::new(None, Some(path), false, None).unwrap().bytes().as_bytes(), b"Zm9v\n");
        std::fs::write(path, [0xff, 0xfe]).unwrap();
        assert_eq!(Secret::new(None, Some(path), false, None).unwrap().bytes().as_bytes(), [0xff, 0xfe]);
        for (wrong, reason) in [
            (Secret::new(None, Some(path), true, None), "Base64"),
            (Secret::new(None, Some("/nonexistent"), true, None), "Unable to read /nonexistent"),
            (Secret::new(Some("a"), Some(path), true, None), "mutually exclusive"),
            (Secret::new(None, None, true, None), "'file' or 'data' must be provided"),
        ] {
            assert!(wrong.unwrap_err().description.contains(reason), "{reason}");
        }
    }
}
