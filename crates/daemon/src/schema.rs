// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The schema of this daemon: the definitions of the groups of commands, and the block drivers' options out of their
//! table.

use crate::commands::{GROUPS, REFUSED_BACKENDS};
use crate::objects::OBJECTS_OF_MACHINES;
use cowshed_image::DRIVERS;
use cowshed_image::open::SERVED_BY_NBDKIT;
use cowshed_image::options::{COMMON, Key, KeyType, REQUIRED};
use cowshed_qmp::{Alternative, ObjectType, Schema, SchemaMember, Type};
use cowshed_types::{Error, Result};

/// Types of exports that QEMU has, and why there are none here.
const REFUSED_EXPORTS: &[(&str, &str)] = &[("vduse-blk", "an export is attached with nbd-client")];

/// The type of `blockdev-add`'s arguments.
pub(crate) const BLOCKDEV_OPTIONS: &str = "BlockdevOptions";

/// Everything.
pub(crate) fn build() -> Result<Schema> {
    let wrong = |message: String| Error::internal(format!("the schema is wrong: {message}"));
    let mut schema = Schema::new();
    for group in GROUPS {
        schema.add(group.schema).map_err(wrong)?;
    }
    add_drivers(&mut schema);
    for kind in OBJECTS_OF_MACHINES {
        schema.refuse_as("ObjectType", kind, format!("invalid object type: {kind}"));
    }
    for (driver, server) in SERVED_BY_NBDKIT {
        schema.refuse("BlockdevDriver", driver, server);
    }
    for (kind, reason) in REFUSED_EXPORTS {
        schema.refuse("BlockExportType", kind, *reason);
    }
    for (kind, reason) in REFUSED_BACKENDS {
        schema.refuse("ChardevBackendKind", kind, *reason);
    }
    match schema.dangling().as_slice() {
        [] => Ok(schema),
        missing => Err(wrong(format!("undefined types {missing:?}"))),
    }
}

fn add_drivers(schema: &mut Schema) {
    let names = DRIVERS.schemas().map(|driver| driver.name.to_owned()).collect();
    schema.define_other("BlockdevDriver", Alternative::Enum(names));
    let options = || Type::Named(BLOCKDEV_OPTIONS.to_owned());
    schema.define_other("BlockdevRef", Alternative::Alternate(vec![Type::Str, options()]));
    schema.define_other("BlockdevRefOrNull", Alternative::Alternate(vec![Type::Str, options(), Type::Null]));
    let mut base = object_type(schema, BLOCKDEV_OPTIONS, COMMON);
    for member in base.members.iter_mut().filter(|member| member.name == "driver") {
        member.value = Type::Named("BlockdevDriver".to_owned());
        member.optional = false;
    }
    base.members.push(SchemaMember { name: crate::untrusted::OPTION.to_owned(), value: Type::Bool, optional: true });
    base.tag = Some("driver".to_owned());
    for driver in DRIVERS.schemas() {
        let name = format!("{BLOCKDEV_OPTIONS}-{}", driver.name);
        let object = object_type(schema, &name, driver.keys);
        schema.define_object(name.clone(), object);
        base.variants.push((driver.name.to_owned(), name));
    }
    schema.define_object(BLOCKDEV_OPTIONS, base);
}

/// The numbers that QEMU stores without a sign.
const UNSIGNED: &[(&str, Type)] = &[
    ("cbw-timeout", Type::Uint32),
    ("latency-ns", Type::Uint64),
    ("log-sector-size", Type::Uint32),
    ("log-super-update-interval", Type::Uint64),
    ("min-cluster-size", Type::Uint64),
    ("open-timeout", Type::Uint32),
    ("reconnect-delay", Type::Uint32),
];

fn object_type(schema: &mut Schema, name: &str, keys: &[Key]) -> ObjectType {
    let member = |key: &Key| SchemaMember {
        name: key.name.to_owned(),
        value: match UNSIGNED.iter().find(|(name, _)| *name == key.name) {
            Some((_, value)) => value.clone(),
            None => value_type(schema, &format!("{name}-{}", key.name), &key.value),
        },
        optional: key.default != REQUIRED,
    };
    ObjectType { members: keys.iter().map(member).collect(), ..ObjectType::default() }
}

/// The type of a key; a type that needs a name gets `name`.
fn value_type(schema: &mut Schema, name: &str, key: &KeyType) -> Type {
    match key {
        KeyType::Bool => Type::Bool,
        KeyType::Size | KeyType::Number(..) => Type::Int,
        KeyType::Text => Type::Str,
        KeyType::Texts => {
            schema.define_other(name, Alternative::Alternate(vec![Type::Str, Type::List(Box::new(Type::Str))]));
            Type::Named(name.to_owned())
        }
        KeyType::Choice(words) => choice(schema, name, words),
        KeyType::Child => Type::Named("BlockdevRef".to_owned()),
        KeyType::ChildOrNull => Type::Named("BlockdevRefOrNull".to_owned()),
        KeyType::Struct(keys) => structure(schema, name, keys),
        KeyType::ChoiceOrStruct(words, keys) => {
            // Refusals of a value name the type.
            let name = if name.ends_with("-qcow2-overlap-check") { "Qcow2OverlapChecks" } else { name };
            let types =
                vec![choice(schema, &format!("{name}-word"), words), structure(schema, &format!("{name}-set"), keys)];
            schema.define_other(name, Alternative::Alternate(types));
            Type::Named(name.to_owned())
        }
        KeyType::Children => Type::List(Box::new(Type::Named("BlockdevRef".to_owned()))),
        KeyType::List(keys) => Type::List(Box::new(structure(schema, &format!("{name}-item"), keys))),
    }
}

fn choice(schema: &mut Schema, name: &str, words: &[&str]) -> Type {
    schema.define_other(name, Alternative::Enum(words.iter().map(|&word| word.to_owned()).collect()));
    Type::Named(name.to_owned())
}

fn structure(schema: &mut Schema, name: &str, keys: &[Key]) -> Type {
    let object = object_type(schema, name, keys);
    schema.define_object(name, object);
    Type::Named(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_qmp::Strictness;
    use serde_json::json;

    #[test]
    fn types_that_only_others_have_are_refused_with_the_reason() {
        let schema = build().expect("the schema is right");
        for (kind, reason) in REFUSED_EXPORTS {
            let mut arguments = serde_json::Map::new();
            arguments.insert("type".to_owned(), json!(kind));
            arguments.insert("id".to_owned(), json!("x"));
            let error = schema.check_arguments("block-export-add", arguments).expect_err("is refused");
            assert!(error.description.contains(kind) && error.description.ends_with(reason), "{error}");
        }
    }

    #[test]
    fn each_command_has_a_definition_and_each_definition_a_command() {
        let schema = build().expect("the schema is right");
        let defined: Vec<&str> = schema.commands().collect();
        let mut known: Vec<&str> = GROUPS.iter().flat_map(|group| group.commands).map(|command| command.name).collect();
        known.sort_unstable();
        assert_eq!(defined, known);
    }

    #[test]
    fn driver_options_are_checked_by_their_table() {
        let schema = build().expect("the schema is right");
        let check = |value: serde_json::Value| {
            let object = value.as_object().expect("an object").clone();
            schema.check(BLOCKDEV_OPTIONS, object, Strictness::Exact).map_err(|error| error.description)
        };
        let file = json!({"driver": "file", "filename": "a"});
        assert!(check(json!({"driver": "qcow2", "node-name": "q", "file": file, "backing": null})).is_ok());
        assert!(check(json!({"driver": "qcow2", "file": "f", "overlap-check": {"template": "all"}})).is_ok());
        for (options, refusal) in [
            (json!({"driver": "zzz"}), "Parameter 'driver' does not accept value 'zzz'"),
            (
                json!({"driver": "raw", "file": {"driver": "ssh", "path": "a"}}),
                "Parameter 'driver' does not accept value 'ssh': 'nbdkit ssh HOST:PATH' serves what is there over NBD",
            ),
            (json!({"node-name": "q"}), "Parameter 'driver' is missing"),
            (json!({"driver": "qcow2", "file": file, "foo": 1}), "Parameter 'foo' is unexpected"),
            (json!({"driver": "qcow2", "file": {"driver": "file"}}), "Parameter 'file.filename' is missing"),
            (
                json!({"driver": "file", "filename": "a", "read-only": "on"}),
                "Invalid parameter type for 'read-only', expected: boolean",
            ),
        ] {
            assert_eq!(check(options).expect_err("must be refused"), refusal);
        }
    }
}
