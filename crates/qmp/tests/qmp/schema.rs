// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments against the schema: refusals and their words. The words are those of QEMU's storage daemon.

use cowshed_qmp::{Schema, Strictness};
use serde_json::{Map, Value, json};

const TEXT: &str = "
enum Mode: safe hard
enum Kind: inet unix   # told apart by 'type'
object Unix: path: str
object Inet: host: str, port: str
object Address: type: Kind | type = unix: Unix, inet: Inet
alternate Reference: str, Address, null
object Options: driver: Kind, file?: Reference
  , list?: [Address]
object Info: id: str
command resize: node-name?: str, size: int, force?: bool
command remove: id: str, mode?: Mode
command start: addr: Address
command add(Options)
command query-info -> [Info]
event REMOVED: id: str
";

fn schema() -> Schema {
    let mut schema = Schema::new();
    schema.add(TEXT).expect("the text is right");
    assert_eq!(schema.dangling(), Vec::<String>::new());
    schema
}

fn map(value: Value) -> Map<String, Value> {
    value.as_object().expect("an object").clone()
}

fn refusal(command: &str, arguments: Value) -> String {
    schema().check_arguments(command, map(arguments)).expect_err("must be refused").description
}

#[test]
fn wrong_arguments_are_named() {
    assert_eq!(refusal("resize", json!({"size": "a"})), "Invalid parameter type for 'size', expected: integer");
    assert_eq!(refusal("resize", json!({"size": 1.5})), "Invalid parameter type for 'size', expected: integer");
    assert_eq!(refusal("resize", json!({"size": 1, "foo": 2})), "Parameter 'foo' is unexpected");
    assert_eq!(refusal("resize", json!({})), "Parameter 'size' is missing");
    assert_eq!(
        refusal("resize", json!({"size": 1, "force": 1})),
        "Invalid parameter type for 'force', expected: boolean"
    );
    assert_eq!(refusal("remove", json!({"id": "q", "mode": "foo"})), "Parameter 'mode' does not accept value 'foo'");
    assert_eq!(refusal("start", json!({"addr": {"type": "unix"}})), "Parameter 'addr.path' is missing");
    assert_eq!(
        refusal("start", json!({"addr": {"type": "unix", "path": "a", "port": "1"}})),
        "Parameter 'addr.port' is unexpected"
    );
    assert_eq!(refusal("start", json!({"addr": 5})), "Invalid parameter type for 'addr', expected: object");
    assert_eq!(
        refusal("add", json!({"driver": "unix", "file": 5})),
        "Invalid parameter type for 'file', expected: Reference"
    );
    assert_eq!(
        refusal("add", json!({"driver": "unix", "list": [{"type": "inet", "host": "h"}]})),
        "Parameter 'list[0].port' is missing"
    );
    assert_eq!(refusal("query-info", json!({"a": 1})), "Parameter 'a' is unexpected");
}

#[test]
fn alternates_are_told_apart_by_their_json_type() {
    for file in [json!("name"), json!(null), json!({"type": "unix", "path": "a"})] {
        let arguments = map(json!({"driver": "unix", "file": file}));
        assert_eq!(schema().check_arguments("add", arguments.clone()), Ok(arguments));
    }
}

#[test]
fn texts_become_what_the_schema_says_on_a_command_line() {
    for (text, size) in [("65536", 65536), ("0x10000", 65536), ("010", 8), (" +5", 5), ("-1", -1)] {
        let given = map(json!({"size": text, "force": "on"}));
        let checked = schema().check("resize-arg", given.clone(), Strictness::Texts).expect("texts are taken");
        assert_eq!(Value::Object(checked), json!({"size": size, "force": true}), "'{text}'");
        assert!(schema().check("resize-arg", given, Strictness::Exact).is_err(), "'{text}'");
    }
    for wrong in [
        json!({"size": "x"}),
        json!({"size": ""}),
        json!({"size": "64k"}),
        json!({"size": "09"}),
        json!({"size": "0x"}),
        json!({"size": "9223372036854775808"}),
        json!({"size": "1", "force": "maybe"}),
    ] {
        assert!(schema().check("resize-arg", map(wrong.clone()), Strictness::Texts).is_err(), "{wrong}");
    }
    let error = schema().check("remove-arg", map(json!({"id": "a", "mode": "x"})), Strictness::Texts);
    let expected = "Parameter 'mode' does not accept value 'x': one of safe, hard";
    let error = error.expect_err("must be refused");
    assert_eq!(error.whole.as_deref(), Some(expected));
    assert_eq!(error.description, "Parameter 'mode' does not accept value 'x'");
}

#[test]
fn the_schema_describes_itself_without_loose_ends() {
    let described = schema().query_schema();
    let entries = described.as_array().expect("a list");
    let names: Vec<&str> = entries.iter().map(|entry| entry["name"].as_str().expect("a name")).collect();
    let mut unique = names.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), names.len(), "{names:?}");
    let check = |name: &Value| {
        let name = name.as_str().expect("a type's name");
        assert!(names.contains(&name), "{name} is used and not described");
    };
    for entry in entries {
        for key in ["arg-type", "ret-type", "element-type"] {
            entry.get(key).map(check);
        }
        for list in ["members", "variants"] {
            for item in entry.get(list).and_then(Value::as_array).into_iter().flatten() {
                item.get("type").map(check);
            }
        }
    }
    let add = entries.iter().find(|entry| entry["name"] == "add").expect("the command is described");
    assert_eq!(add["arg-type"], "Options");
    assert!(schema().query_commands().as_array().expect("a list").contains(&json!({"name": "resize"})));
}

#[test]
fn a_schema_that_contradicts_itself_is_refused() {
    assert!(schema().add("enum Mode: other").is_err());
    assert!(Schema::new().add("enum").is_err());
    assert!(Schema::new().add("thing Mode: a").is_err());
    assert!(Schema::new().add("object A: b").is_err());
    let mut loose = Schema::new();
    loose.add("object A: b: [Nothing]").expect("can be read");
    assert_eq!(loose.dangling(), ["Nothing"]);
}
