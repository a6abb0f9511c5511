// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client: negotiation first, then commands in order.

use crate::codec::{greeting, reply};
use crate::error::{ErrorClass, QmpError, QmpResult};
use crate::order::ordered;
use crate::schema::Schema;
use crate::stream::JsonStream;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A command that may run: there is one of this name, and its arguments fit the schema.
#[derive(Clone, Debug, PartialEq)]
pub struct Command {
    /// Its name.
    pub name: String,
    /// Its arguments, checked.
    pub arguments: Map<String, Value>,
    /// The client's mark, which the reply carries along.
    pub id: Option<Value>,
}

/// The messages in a client's bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum Incoming {
    /// To be sent back as it is.
    Reply(Value),
    /// To be run; its reply is made by [`reply`](crate::reply).
    Run(Command),
}

/// The state of the conversation with one client. Pure: bytes in, bytes out.
#[derive(Debug)]
pub struct Session {
    schema: Arc<Schema>,
    stream: JsonStream,
    negotiated: bool,
    /// The client may send `exec-oob`.
    out_of_band: bool,
}

impl Session {
    /// A client that has just come.
    pub fn new(schema: Arc<Schema>) -> Self {
        Session { schema, stream: JsonStream::new(), negotiated: false, out_of_band: false }
    }

    /// The first message to send.
    pub fn greeting(&self, version: Value) -> Value {
        greeting(version)
    }

    /// True once the client gets events.
    pub fn wants_events(&self) -> bool {
        self.negotiated
    }

    /// Takes the client's bytes.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Incoming> {
        let messages = self.stream.feed(bytes);
        messages.into_iter().map(|message| self.message(message)).collect()
    }

    fn message(&mut self, message: QmpResult<Value>) -> Incoming {
        let mut id = None;
        let result = message.and_then(|message| self.command(message, &mut id));
        match result {
            Ok(Some(command)) => Incoming::Run(Command { id, ..command }),
            Ok(None) => Incoming::Reply(reply(Ok(json!({})), id)),
            Err(error) => Incoming::Reply(reply(Err(error), id)),
        }
    }

    /// `None`: the session itself has carried it out.
    fn command(&mut self, message: Value, id: &mut Option<Value>) -> QmpResult<Option<Command>> {
        let Value::Object(mut message) = message else {
            return Err(QmpError::generic("QMP input must be a JSON object"));
        };
        *id = message.shift_remove("id");
        let Called { name, arguments, out_of_band } = self.called(&message)?;
        let not_found = |text: String| Err(QmpError::new(ErrorClass::CommandNotFound, text));
        match (name == "qmp_capabilities", self.negotiated) {
            (true, false) => self.negotiate(arguments).map(|()| None),
            (false, false) => not_found("Expecting capabilities negotiation with 'qmp_capabilities'".into()),
            (false, true) if !self.schema.has_command(&name) => {
                not_found(format!("The command {name} has not been found"))
            }
            // As in QEMU's storage daemon there is none that does.
            (_, true) if out_of_band => Err(QmpError::generic(format!("The command {name} does not support OOB"))),
            (true, true) => {
                self.schema.check_arguments(&name, arguments)?;
                not_found("Capabilities negotiation is already complete, command ignored".into())
            }
            (false, true) => {
                let arguments = self.schema.check_arguments(&name, arguments)?;
                Ok(Some(Command { name, arguments, id: None }))
            }
        }
    }

    /// The call in a message. Of several faults the first one counts, in QEMU's order of members.
    fn called(&self, message: &Map<String, Value>) -> QmpResult<Called> {
        let wrong = |what: String| Err(QmpError::generic(format!("QMP input {what}")));
        let mut execute: Option<(&String, String)> = None;
        let mut arguments = Map::new();
        for (key, value) in ordered(message) {
            match (key.as_str(), value) {
                ("execute", _) | ("exec-oob", _) if key == "execute" || self.out_of_band => {
                    if let Some((other, _)) = execute {
                        return wrong(format!("member '{key}' clashes with '{other}'"));
                    }
                    let Some(name) = value.as_str() else { return wrong(format!("member '{key}' must be a string")) };
                    execute = Some((key, name.to_owned()));
                }
                ("arguments", Value::Object(members)) => arguments = members.clone(),
                ("arguments", _) => return wrong("member 'arguments' must be an object".into()),
                _ => return wrong(format!("member '{key}' is unexpected")),
            }
        }
        match execute {
            Some((key, name)) => Ok(Called { name, arguments, out_of_band: key == "exec-oob" }),
            None => wrong("lacks member 'execute'".into()),
        }
    }

    /// `enable` lists capabilities.
    fn negotiate(&mut self, arguments: Map<String, Value>) -> QmpResult<()> {
        let arguments = self.schema.check_arguments("qmp_capabilities", arguments)?;
        let enabled = arguments.get("enable").and_then(Value::as_array);
        self.out_of_band = enabled.is_some_and(|list| list.iter().any(|name| name == "oob"));
        self.negotiated = true;
        Ok(())
    }
}

/// The call in a message.
struct Called {
    name: String,
    arguments: Map<String, Value>,
    out_of_band: bool,
}
