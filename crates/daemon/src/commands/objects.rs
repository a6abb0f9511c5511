// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Objects, and their properties.

use super::{Arguments, Group, command, nothing};
use crate::objects::Object;
use crate::state::Daemon;
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use serde_json::{Value, json};
use std::rc::Rc;

pub(super) const GROUP: Group = Group {
    schema: "
enum ObjectType: iothread tls-creds-x509
enum QCryptoTLSCredsEndpoint: client server
object IothreadProperties: poll-max-ns?: int, poll-grow?: int, poll-shrink?: int, aio-max-batch?: int
object TlsCredsX509Properties: dir?: str, endpoint?: QCryptoTLSCredsEndpoint, verify-peer?: bool
object ObjectOptions: qom-type: ObjectType, id: str | qom-type = iothread: IothreadProperties
  , tls-creds-x509: TlsCredsX509Properties
object ObjectPropertyInfo: name: str, type: str, description?: str, default-value?: any
command object-add(ObjectOptions)
command object-del: id: str
command qom-list: path: str -> [ObjectPropertyInfo]
command qom-get: path: str, property: str -> any
command qom-set: path: str, property: str, value: any
",
    commands: &[
        command!("object-add", object_add),
        command!("object-del", object_del),
        command!("qom-list", qom_list),
        command!("qom-get", qom_get),
        command!("qom-set", qom_set),
    ],
};

async fn object_add(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let id = arguments.text("id");
    let starts_well = id.starts_with(|first: char| first.is_ascii_alphabetic());
    if !starts_well || !id.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)) {
        return Err(QmpError::generic("Parameter 'id' expects an identifier"));
    }
    let object = match arguments.text("qom-type") {
        "iothread" => Object::IoThread,
        _ => Object::TlsCreds {
            dir: arguments.maybe_text("dir").unwrap_or("/etc/pki/qemu").into(),
            is_server: arguments.maybe_text("endpoint") == Some("server"),
            verify_peer: arguments.flag("verify-peer", true),
        },
    };
    daemon.objects.add(id, object)?;
    // Credentials that can't be used are refused here, not when a server needs them.
    if let Some(Object::TlsCreds { is_server: true, .. }) = daemon.objects.find(id)
        && let Err(error) = daemon.objects.server_tls(id)
    {
        daemon.objects.remove(id);
        return Err(error);
    }
    nothing()
}

async fn object_del(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let id = arguments.text("id");
    match daemon.objects.remove(id) {
        Some(_) => nothing(),
        None => Err(QmpError::generic(format!("object '{id}' not found"))),
    }
}

async fn qom_list(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let mut entries = vec![json!({"name": "type", "type": "string"})];
    match arguments.text("path").trim_end_matches('/') {
        "" => entries.push(json!({"name": "objects", "type": "child<container>"})),
        "/objects" => {
            let objects = daemon.objects.list();
            entries.extend(objects.iter().map(|(id, kind)| json!({"name": id, "type": format!("child<{kind}>")})));
        }
        path => {
            let (_, object) = daemon.objects.at_path(path)?;
            entries.extend(object.properties().iter().map(|(name, kind)| json!({"name": name, "type": kind})));
        }
    }
    Ok(Value::Array(entries))
}

async fn qom_get(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let (_, object) = daemon.objects.at_path(arguments.text("path"))?;
    let name = arguments.text("property");
    let value = if name == "type" { Some(json!(object.kind())) } else { object.get(name) };
    value.ok_or_else(|| no_property(&object, name))
}

fn no_property(object: &Object, name: &str) -> QmpError {
    QmpError::new(ErrorClass::Generic, format!("Property '{}.{name}' not found", object.kind()))
}

async fn qom_set(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let (_, object) = daemon.objects.at_path(arguments.text("path"))?;
    let name = arguments.text("property");
    if object.get(name).is_none() {
        return Err(no_property(&object, name));
    }
    object.set(name, arguments.get("value").unwrap_or(&Value::Null))?;
    nothing()
}
