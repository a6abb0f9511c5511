// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Objects, and their properties.

use super::{Arguments, Group, command, failed, nothing};
use crate::authorization::{Authorization, Rules};
use crate::monitor_properties::MonitorProperties;
use crate::objects::{
    IoThreadProperties, MAIN_LOOP, Object, REFUSED_OBJECTS, Secret, TYPES, TreeNode, TypeInfo, check_tls_options,
    duplicate, properties_of,
};
use crate::state::Daemon;
use cowshed_image::filters::throttle::Limits;
use cowshed_image::secret::Wrapping;
use cowshed_nbd::{ClientTls, ServerTls};
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use cowshed_types::is_identifier;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
enum ObjectType: authz-list authz-listfile authz-simple colo-compare iothread main-loop secret secret_keyring
  thread-context throttle-group tls-creds-anon tls-creds-psk tls-creds-x509 monitor-qmp
enum QAuthZListPolicy: deny allow
enum QAuthZListFormat: exact glob
object QAuthZListRule: match: str, policy: QAuthZListPolicy, format?: QAuthZListFormat
object AuthZListProperties: policy?: QAuthZListPolicy, rules?: [QAuthZListRule]
object AuthZListFileProperties: filename: str, refresh?: bool
object AuthZSimpleProperties: identity: str
enum MonitorQMPCloseAction: none delete
object MonitorQMPProperties: chardev: str, pretty?: bool, close-action?: MonitorQMPCloseAction
enum QCryptoSecretFormat: raw base64
object SecretProperties: data?: str, file?: str, format?: QCryptoSecretFormat, keyid?: str, iv?: str, loaded?: bool
object SecretKeyringProperties: serial: int, format?: QCryptoSecretFormat, keyid?: str, iv?: str, loaded?: bool
enum QCryptoTLSCredsEndpoint: client server
object TlsCredsAnonProperties: dir?: str, endpoint?: QCryptoTLSCredsEndpoint, verify-peer?: bool, priority?: str
object TlsCredsPskProperties: dir?: str, endpoint?: QCryptoTLSCredsEndpoint, verify-peer?: bool, priority?: str
  , username?: str
object ColoCompareProperties: primary_in: str, secondary_in: str, outdev: str, iothread: str, notify_dev?: str
  , compare_timeout?: uint64, expired_scan_cycle?: uint32, max_queue_size?: uint32, vnet_hdr_support?: bool
object MainLoopProperties: aio-max-batch?: int, thread-pool-min?: int, thread-pool-max?: int
object ThreadContextProperties: cpu-affinity?: [uint64], node-affinity?: [uint64]
object IothreadProperties: poll-max-ns?: int, poll-grow?: int, poll-shrink?: int, poll-weight?: int, aio-max-batch?: int
  , thread-pool-min?: int, thread-pool-max?: int
object TlsCredsX509Properties: dir?: str, endpoint?: QCryptoTLSCredsEndpoint, verify-peer?: bool, priority?: str
  , sanity-check?: bool, passwordid?: str
object ThrottleLimits: bps-total?: int, bps-total-max?: int, bps-total-max-length?: int, bps-read?: int
  , bps-read-max?: int, bps-read-max-length?: int, bps-write?: int, bps-write-max?: int
  , bps-write-max-length?: int, iops-total?: int, iops-total-max?: int, iops-total-max-length?: int
  , iops-read?: int, iops-read-max?: int, iops-read-max-length?: int, iops-write?: int, iops-write-max?: int
  , iops-write-max-length?: int, iops-size?: int
object ThrottleGroupProperties: limits?: ThrottleLimits, x-bps-total?: int, x-bps-total-max?: int
  , x-bps-total-max-length?: int, x-bps-read?: int, x-bps-read-max?: int, x-bps-read-max-length?: int
  , x-bps-write?: int, x-bps-write-max?: int, x-bps-write-max-length?: int, x-iops-total?: int
  , x-iops-total-max?: int, x-iops-total-max-length?: int, x-iops-read?: int, x-iops-read-max?: int
  , x-iops-read-max-length?: int, x-iops-write?: int, x-iops-write-max?: int, x-iops-write-max-length?: int
  , x-iops-size?: int
object ObjectOptions: qom-type: ObjectType, id: str | qom-type = authz-list: AuthZListProperties
  , authz-listfile: AuthZListFileProperties, authz-simple: AuthZSimpleProperties, iothread: IothreadProperties
  , secret: SecretProperties, secret_keyring: SecretKeyringProperties, colo-compare: ColoCompareProperties
  , main-loop: MainLoopProperties, thread-context: ThreadContextProperties
  , throttle-group: ThrottleGroupProperties, tls-creds-x509: TlsCredsX509Properties
  , tls-creds-anon: TlsCredsAnonProperties, tls-creds-psk: TlsCredsPskProperties
  , monitor-qmp: MonitorQMPProperties
object ObjectPropertyInfo: name: str, type: str, description?: str, default-value?: any
command object-add(ObjectOptions)
command object-del: id: str
command qom-list: path: str -> [ObjectPropertyInfo]
command qom-get: path: str, property: str -> any
command qom-set: path: str, property: str, value: any
object ObjectTypeInfo: name: str, abstract?: bool, parent?: str
command qom-list-types: implements?: str, abstract?: bool -> [ObjectTypeInfo]
command qom-list-properties: typename: str -> [ObjectPropertyInfo]
object ObjectPropertyValue: name: str, type: str, value?: any
object ObjectPropertiesValues: properties: [ObjectPropertyValue]
command qom-list-get: paths: [str] -> [ObjectPropertiesValues]
",
    commands: &[
        command!("object-add", object_add),
        command!("object-del", object_del),
        command!("qom-list", qom_list),
        command!("qom-get", qom_get),
        command!("qom-set", qom_set),
        command!("qom-list-types", qom_list_types),
        command!("qom-list-properties", qom_list_properties),
        command!("qom-list-get", qom_list_get),
    ],
};

/// The error of `object-add` for an id. On the command line a further line describes identifiers.
pub(crate) const NO_IDENTIFIER: &str = "Parameter 'id' expects an identifier";

async fn object_add(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let id = arguments.text("id");
    if !is_identifier(id) {
        return Err(QmpError::generic(NO_IDENTIFIER));
    }
    check_kind(arguments.text("qom-type"))?;
    let object = match arguments.text("qom-type") {
        "authz-simple" => {
            let identity = arguments.text("identity").to_owned();
            Object::Authorization(Arc::new(Authorization::Simple { identity }))
        }
        "authz-list" => {
            Object::Authorization(Arc::new(Authorization::List(Rules::from_json(&arguments.clone().into_map())?)))
        }
        "authz-listfile" => {
            let path = Path::new(arguments.text("filename"));
            Object::Authorization(Arc::new(Authorization::from_file(path, arguments.flag("refresh", true))?))
        }
        "iothread" => Object::IoThread(Arc::new(IoThreadProperties::new("iothread", &arguments.clone().into_map())?)),
        MAIN_LOOP => Object::IoThread(Arc::new(main_loop(&daemon, id, &arguments)?)),
        "thread-context" => thread_context(&arguments)?,
        "secret" => Object::Secret(secret(&daemon, &arguments)?),
        "throttle-group" => return add_throttle_group(&daemon, id, &arguments),
        "monitor-qmp" => {
            let deletes = arguments.maybe_text("close-action") == Some("delete");
            let (chardev, pretty) = (arguments.text("chardev"), arguments.flag("pretty", false));
            Object::Monitor(Arc::new(MonitorProperties::new(chardev, pretty, deletes)))
        }
        _ => {
            let dir = check_tls_options(|key| arguments.maybe_text(key))?;
            Object::TlsCreds {
                dir: dir.into(),
                is_server: arguments.maybe_text("endpoint") == Some("server"),
                verify_peer: arguments.flag("verify-peer", true),
                sanity_check: arguments.flag("sanity-check", true),
                priority: arguments.maybe_text("priority").unwrap_or_default().to_owned(),
            }
        }
    };
    if daemon.objects.find(id).is_some() {
        return Err(duplicate(id));
    }
    // Unusable credentials are refused here, not at their first use.
    match &object {
        Object::TlsCreds { dir, is_server: true, verify_peer, sanity_check, .. } => {
            ServerTls::of_object(dir, *verify_peer, *sanity_check).map_err(failed)?;
        }
        Object::TlsCreds { dir, is_server: false, verify_peer, sanity_check, .. } => {
            let credentials = ClientTls::of_object(dir, *verify_peer, *sanity_check).map_err(failed)?;
            daemon.graph.set_tls_credentials(id, Some(credentials));
        }
        Object::Secret(secret) => daemon.graph.set_secret(id, Some(secret.bytes().clone())),
        Object::Monitor(properties) => {
            daemon.start_monitor(properties.chardev(), properties).map_err(failed)?;
        }
        Object::IoThread(_) | Object::ThrottleGroup(_) | Object::Authorization(_) | Object::ThreadContext { .. } => {}
    }
    daemon.objects.add(id, object)?;
    nothing()
}

/// A type of objects whose options QEMU's schema has, and that it has none of.
pub(crate) const NO_TYPE: &str = "colo-compare";

/// Refuses a type of objects whose options QEMU knows, and that there are none of.
pub(crate) fn check_kind(kind: &str) -> QmpResult<()> {
    if kind == NO_TYPE {
        return Err(QmpError::generic(format!("invalid object type: {kind}")));
    }
    match REFUSED_OBJECTS.iter().find(|(name, _)| *name == kind) {
        Some((_, reason)) => Err(QmpError::generic(format!("objects of type '{kind}' are not supported: {reason}"))),
        None => Ok(()),
    }
}

/// There is one at most.
fn main_loop(daemon: &Daemon, id: &str, arguments: &Arguments) -> QmpResult<IoThreadProperties> {
    let properties = IoThreadProperties::new(MAIN_LOOP, &arguments.clone().into_map())?;
    match daemon.objects.find(id) {
        Some(_) => Err(duplicate(id)),
        None if daemon.objects.list().iter().any(|(_, kind)| *kind == MAIN_LOOP) => {
            Err(QmpError::generic("only one main-loop instance allowed"))
        }
        None => Ok(properties),
    }
}

/// Where a thread would run that nothing here starts by it.
fn thread_context(arguments: &Arguments) -> QmpResult<Object> {
    let given = arguments.clone().into_map();
    let numbers =
        |key: &str| given.get(key).and_then(Value::as_array).map(|items| items.iter().filter_map(Value::as_u64));
    if numbers("node-affinity").is_some() && numbers("cpu-affinity").is_some() {
        return Err(QmpError::generic("Mixing CPU and node affinity not supported"));
    }
    let there_are = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let cpus = numbers("cpu-affinity").map_or_else(|| (0..there_are).collect(), Iterator::collect);
    Ok(Object::ThreadContext { cpus })
}

fn secret(daemon: &Daemon, arguments: &Arguments) -> QmpResult<Secret> {
    let is_base64 = arguments.maybe_text("format") == Some("base64");
    let key = arguments.maybe_text("keyid").and_then(|id| daemon.objects.find(id));
    let key = key.as_ref().and_then(|object| match object {
        Object::Secret(secret) => Some(secret.bytes()),
        _ => None,
    });
    let wrapping = Wrapping::of(arguments.maybe_text("keyid"), arguments.maybe_text("iv"), |_| key).map_err(failed)?;
    let file = arguments.maybe_text("file");
    let secret = Secret::new(arguments.maybe_text("data"), file, is_base64, wrapping.as_ref())?;
    if secret.bytes().as_bytes().is_empty() {
        return Err(QmpError::generic("the secret is empty"));
    }
    Ok(secret)
}

fn add_throttle_group(daemon: &Rc<Daemon>, id: &str, arguments: &Arguments) -> QmpResult<Value> {
    let mut given: Map<String, Value> = arguments.object("limits").cloned().unwrap_or_default();
    given.extend(arguments.clone().into_map().into_iter().filter(|(key, _)| key.starts_with("x-")));
    let limits = Limits::from_json(&given).map_err(failed)?;
    if daemon.objects.find(id).is_some() {
        return Err(duplicate(id));
    }
    let group = daemon.graph.throttle_groups().create(id, limits).map_err(failed)?;
    daemon.objects.add(id, Object::ThrottleGroup(group))?;
    nothing()
}

async fn object_del(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let id = arguments.text("id");
    match daemon.objects.find(id) {
        None => return Err(QmpError::generic(format!("object '{id}' not found"))),
        Some(Object::ThrottleGroup(_)) => daemon.graph.throttle_groups().delete(id).map_err(failed)?,
        Some(Object::TlsCreds { .. }) => daemon.graph.set_tls_credentials(id, None),
        Some(Object::Secret(_)) => daemon.graph.set_secret(id, None),
        Some(Object::Monitor(own)) if arguments.monitor.as_ref().is_some_and(|monitor| Arc::ptr_eq(monitor, &own)) => {
            return Err(QmpError::generic("Cannot delete the current QMP monitor"));
        }
        Some(Object::Monitor(properties)) => daemon.chardevs.stop_monitor(properties.chardev()).map_err(failed)?,
        Some(object) if object.kind() == MAIN_LOOP => {
            return Err(QmpError::generic(format!("Deleting main loop '{id}' is not supported")));
        }
        Some(Object::IoThread(_) | Object::Authorization(_) | Object::ThreadContext { .. }) => {}
    }
    daemon.objects.remove(id);
    nothing()
}

/// Its name and its type.
type Property = (String, String);

/// Names and types of the properties of a place.
fn properties_at(daemon: &Daemon, place: &TreeNode) -> Vec<Property> {
    let mut properties = vec![("type".to_owned(), "string".to_owned())];
    match place {
        TreeNode::Container("") => properties.push(("objects".to_owned(), "child<container>".to_owned())),
        TreeNode::Container(_) => {
            let objects = daemon.objects.list().into_iter();
            properties.extend(objects.map(|(id, kind)| (id, format!("child<{kind}>"))));
        }
        TreeNode::Object(_, object) => {
            let own = object.properties().into_iter();
            properties.extend(own.map(|(name, kind)| (name, kind.to_owned())));
        }
    }
    properties
}

/// The value of a property of a place. A child is named by its path.
fn value_at(daemon: &Daemon, place: &TreeNode, name: &str) -> Option<Value> {
    match (place, name) {
        (TreeNode::Container(_), "type") => Some(json!("container")),
        (TreeNode::Container(""), "objects") => Some(json!("/objects")),
        (TreeNode::Container(""), _) => None,
        (TreeNode::Container(path), name) => daemon.objects.find(name).map(|_| json!(format!("{path}/{name}"))),
        (TreeNode::Object(_, object), "type") => Some(json!(object.kind())),
        (TreeNode::Object(_, object), name) => object.get(name),
    }
}

async fn qom_list(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    if arguments.text("path").is_empty() {
        return Err(QmpError::generic("Path '' is ambiguous"));
    }
    let properties = properties_at(&daemon, &daemon.objects.at_path(arguments.text("path"))?);
    Ok(properties.into_iter().map(|(name, kind)| json!({"name": name, "type": kind})).collect())
}

/// [`qom_list`] and `qom-get` of several paths at once.
async fn qom_list_get(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let paths = arguments.get("paths").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let mut list = Vec::new();
    for path in paths {
        let place = daemon.objects.at_path(path)?;
        let with_value = |(name, kind): Property| {
            let mut property = json!({"name": name, "type": kind});
            if let Some(value) = value_at(&daemon, &place, &name) {
                property["value"] = value;
            }
            property
        };
        list.push(
            json!({"properties": properties_at(&daemon, &place).into_iter().map(with_value).collect::<Vec<_>>()}),
        );
    }
    Ok(Value::Array(list))
}

async fn qom_list_types(_daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let (wanted, abstract_too) = (arguments.maybe_text("implements"), arguments.flag("abstract", false));
    let found =
        TYPES.iter().filter(|one| (abstract_too || !one.is_abstract) && wanted.is_none_or(|wanted| one.is_a(wanted)));
    let described = found.map(|one| {
        let mut described = json!({"name": one.name});
        if one.is_abstract {
            described["abstract"] = json!(true);
        }
        if let Some(parent) = one.parent {
            described["parent"] = json!(parent);
        }
        described
    });
    Ok(described.collect())
}

async fn qom_list_properties(_daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let name = arguments.text("typename");
    if TypeInfo::find(name).is_none() {
        return Err(QmpError::new(ErrorClass::DeviceNotFound, format!("Class '{name}' not found")));
    }
    let properties = std::iter::once(("type".to_owned(), "string")).chain(properties_of(name));
    Ok(properties.map(|(name, kind)| json!({"name": name, "type": kind})).collect())
}

async fn qom_get(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let place = daemon.objects.at_path(arguments.text("path"))?;
    let name = arguments.text("property");
    value_at(&daemon, &place, name).ok_or_else(|| refused(&place, name, "not found"))
}

fn refused(place: &TreeNode, property: &str, why: &str) -> QmpError {
    let kind = match place {
        TreeNode::Container(_) => "container",
        TreeNode::Object(_, object) => object.kind(),
    };
    QmpError::generic(format!("Property '{kind}.{property}' {why}"))
}

async fn qom_set(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let place = daemon.objects.at_path(arguments.text("path"))?;
    let name = arguments.text("property");
    if value_at(&daemon, &place, name).is_none() {
        return Err(refused(&place, name, "not found"));
    }
    match &place {
        TreeNode::Object(id, object) if !READ_ONLY.contains(&name) => {
            daemon.objects.set(id, object, name, arguments.get("value").unwrap_or(&Value::Null))?;
        }
        _ => return Err(refused(&place, name, "is not writable")),
    }
    nothing()
}

/// Properties that no object lets change.
const READ_ONLY: [&str; 2] = ["type", "thread-id"];
