// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client: negotiation first, then commands in order.

use crate::codec::{encode, greeting, reply};
use crate::error::{ErrorClass, QmpError, QmpResult};
use crate::schema::Schema;
use crate::stream::JsonStream;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A command that may run: there is one of this name, and its arguments are as the schema says.
#[derive(Clone, Debug, PartialEq)]
pub struct Command {
    /// Its name.
    pub name: String,
    /// Its arguments, checked.
    pub arguments: Map<String, Value>,
    /// What the reply carries along.
    pub id: Option<Value>,
}

/// What came out of a client's bytes, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Incoming {
    /// To be sent back as it is.
    Reply(Vec<u8>),
    /// To be run; the reply is made with [`Session::reply`].
    Run(Command),
}

/// The state of the conversation with one client. Pure: bytes in, bytes out.
#[derive(Debug)]
pub struct Session {
    schema: Arc<Schema>,
    stream: JsonStream,
    negotiated: bool,
    pretty: bool,
}

impl Session {
    /// A client that has just come. `pretty`: messages over several lines.
    pub fn new(schema: Arc<Schema>, pretty: bool) -> Self {
        Session { schema, stream: JsonStream::new(), negotiated: false, pretty }
    }

    /// The first thing to send.
    pub fn greeting(&self, version: Value) -> Vec<u8> {
        encode(&greeting(version), self.pretty)
    }

    /// True once the client gets events.
    pub fn wants_events(&self) -> bool {
        self.negotiated
    }

    /// Takes what the client sent.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Incoming> {
        let messages = self.stream.feed(bytes);
        messages.into_iter().map(|message| self.message(message)).collect()
    }

    /// The reply to a command, as bytes.
    pub fn reply(&self, result: QmpResult<Value>, id: Option<Value>) -> Vec<u8> {
        encode(&reply(result, id), self.pretty)
    }

    fn message(&mut self, message: QmpResult<Value>) -> Incoming {
        let mut id = None;
        let result = message.and_then(|message| self.command(message, &mut id));
        match result {
            Ok(Some(command)) => Incoming::Run(Command { id, ..command }),
            Ok(None) => Incoming::Reply(self.reply(Ok(json!({})), id)),
            Err(error) => Incoming::Reply(self.reply(Err(error), id)),
        }
    }

    /// `None`: the session itself has carried it out.
    fn command(&mut self, message: Value, id: &mut Option<Value>) -> QmpResult<Option<Command>> {
        let Value::Object(mut message) = message else {
            return Err(QmpError::generic("QMP input must be a JSON object"));
        };
        *id = message.remove("id");
        let name = message.remove("execute");
        let arguments = message.remove("arguments");
        if let Some(unexpected) = message.keys().next() {
            return Err(QmpError::generic(format!("QMP input member '{unexpected}' is unexpected")));
        }
        let name = match name {
            Some(Value::String(name)) => name,
            Some(_) => return Err(QmpError::generic("QMP input member 'execute' must be a string")),
            None => return Err(QmpError::generic("QMP input lacks member 'execute'")),
        };
        let arguments = match arguments {
            Some(Value::Object(arguments)) => arguments,
            Some(_) => return Err(QmpError::generic("QMP input member 'arguments' must be an object")),
            None => Map::new(),
        };
        let not_found = |text: String| Err(QmpError::new(ErrorClass::CommandNotFound, text));
        match (name == "qmp_capabilities", self.negotiated) {
            (true, false) => self.negotiate(&arguments).map(|()| None),
            (true, true) => not_found("Capabilities negotiation is already complete, command ignored".into()),
            (false, false) => not_found("Expecting capabilities negotiation with 'qmp_capabilities'".into()),
            (false, true) if !self.schema.has_command(&name) => {
                not_found(format!("The command {name} has not been found"))
            }
            (false, true) => {
                let arguments = self.schema.check_arguments(&name, arguments)?;
                Ok(Some(Command { name, arguments, id: None }))
            }
        }
    }

    /// `enable` lists capabilities, and we offer none.
    fn negotiate(&mut self, arguments: &Map<String, Value>) -> QmpResult<()> {
        for (key, value) in arguments {
            if key != "enable" {
                return Err(QmpError::generic(format!("Parameter '{key}' is unexpected")));
            }
            let Some(wanted) = value.as_array() else {
                return Err(QmpError::generic("Invalid parameter type for 'enable', expected: array"));
            };
            if let Some(first) = wanted.first() {
                let name = first.as_str().map_or_else(|| first.to_string(), str::to_owned);
                return Err(QmpError::generic(format!("Capability '{name}' is not available")));
            }
        }
        self.negotiated = true;
        Ok(())
    }
}
