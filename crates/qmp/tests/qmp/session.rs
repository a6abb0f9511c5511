// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A conversation: negotiation, ids, refusals.

use cowshed_qmp::{Incoming, Schema, Session};
use serde_json::{Value, json};
use std::sync::Arc;

fn session() -> Session {
    let mut schema = Schema::new();
    let text = "enum QMPCapability: oob\ncommand qmp_capabilities: enable?: [QMPCapability]\ncommand query-version -> any\n\
                command resize: size: int";
    schema.add(text).expect("the text is right");
    Session::new(Arc::new(schema))
}

/// Replies as values, commands as their names.
fn say(session: &mut Session, text: &str) -> Vec<Value> {
    let incoming = session.feed(text.as_bytes());
    let value = |incoming| match incoming {
        Incoming::Reply(reply) => reply,
        Incoming::Run(command) => json!({"run": command.name, "with": command.arguments, "id": command.id}),
    };
    incoming.into_iter().map(value).collect()
}

fn refusal(class: &str, desc: &str) -> Value {
    json!({"error": {"class": class, "desc": desc}})
}

#[test]
fn nothing_runs_before_the_negotiation() {
    let mut session = session();
    let greeting = session.greeting(json!({"v": 1}));
    assert_eq!(greeting, json!({"QMP": {"version": {"v": 1}, "capabilities": ["oob"]}}));
    let said = say(&mut session, r#"{"execute": "query-version", "id": 1}"#);
    let desc = "Expecting capabilities negotiation with 'qmp_capabilities'";
    assert_eq!(said, [json!({"error": {"class": "CommandNotFound", "desc": desc}, "id": 1})]);
    assert!(!session.wants_events());

    assert_eq!(say(&mut session, r#"{"execute": "qmp_capabilities", "arguments": {"enable": ["x"]}}"#).len(), 1);
    assert!(!session.wants_events());
    assert_eq!(say(&mut session, r#"{"execute": "qmp_capabilities", "id": "c"}"#), [json!({"return": {}, "id": "c"})]);
    assert!(session.wants_events());
    let desc = "Capabilities negotiation is already complete, command ignored";
    assert_eq!(say(&mut session, r#"{"execute": "qmp_capabilities"}"#), [refusal("CommandNotFound", desc)]);
}

#[test]
fn commands_come_out_in_order_with_their_ids() {
    let mut session = session();
    let text = r#"{"execute": "qmp_capabilities"} {"execute": "resize", "arguments": {"size": 5}, "id": [1]}
        {"execute": "resize", "arguments": {"size": ""}, "id": 7} {"execute": "query-version"}"#;
    assert_eq!(
        say(&mut session, text),
        [
            json!({"return": {}}),
            json!({"run": "resize", "with": {"size": 5}, "id": [1]}),
            json!({"error": {"class": "GenericError", "desc": "Invalid parameter type for 'size', expected: integer"}, "id": 7}),
            json!({"run": "query-version", "with": {}, "id": null}),
        ]
    );
}

#[test]
fn what_is_no_command_is_refused() {
    let mut session = session();
    say(&mut session, r#"{"execute": "qmp_capabilities"}"#);
    for (text, class, desc) in [
        (r#"{"execute": "nope"}"#, "CommandNotFound", "The command nope has not been found"),
        (
            r#"{"execute": "query-version", "arguments": []}"#,
            "GenericError",
            "QMP input member 'arguments' must be an object",
        ),
        (r#"{"execute": "query-version", "foo": 1}"#, "GenericError", "QMP input member 'foo' is unexpected"),
        (r#"{"exec-oob": "query-version"}"#, "GenericError", "QMP input member 'exec-oob' is unexpected"),
        (r#"{"arguments": {}}"#, "GenericError", "QMP input lacks member 'execute'"),
        (r#"{"execute": 1}"#, "GenericError", "QMP input member 'execute' must be a string"),
        ("[1]", "GenericError", "QMP input must be a JSON object"),
    ] {
        assert_eq!(say(&mut session, text), [refusal(class, desc)], "{text}");
    }
    let said = say(&mut session, "{\"execute\": }\n");
    let desc = said[0]["error"]["desc"].as_str().expect("a text");
    assert!(desc.ends_with("JSON parse error, expecting value"), "{said:?}");
    assert_eq!(say(&mut session, r#"{"execute": "query-version"}"#).len(), 1);
}

#[test]
fn no_command_runs_out_of_band() {
    let mut session = session();
    say(&mut session, r#"{"execute": "qmp_capabilities", "arguments": {"enable": ["oob"]}}"#);
    for (text, class, desc) in [
        (r#"{"exec-oob": "query-version"}"#, "GenericError", "The command query-version does not support OOB"),
        (r#"{"exec-oob": "nope"}"#, "CommandNotFound", "The command nope has not been found"),
        (r#"{"exec-oob": 5}"#, "GenericError", "QMP input member 'exec-oob' must be a string"),
        (
            r#"{"exec-oob": "query-version", "execute": "query-version"}"#,
            "GenericError",
            "QMP input member 'execute' clashes with 'exec-oob'",
        ),
    ] {
        assert_eq!(say(&mut session, text), [refusal(class, desc)], "{text}");
    }
}
