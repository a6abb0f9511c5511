// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments that have passed the schema.

use crate::monitor_properties::MonitorProperties;
use crate::waiting::TurnId;
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::{Map, Value};
use std::sync::Arc;

/// The arguments of one call. The members that the schema demands are there, with its types.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arguments {
    map: Map<String, Value>,
    /// The turn of a command that changes the graph.
    pub turn: Option<TurnId>,
    /// The monitor by which the command came.
    pub monitor: Option<Arc<MonitorProperties>>,
}

impl Arguments {
    pub fn new(map: Map<String, Value>) -> Arguments {
        Arguments { map, turn: None, monitor: None }
    }

    /// A text that must be there.
    pub fn text(&self, key: &str) -> &str {
        self.maybe_text(key).unwrap_or_default()
    }

    /// A text that may be missing.
    pub fn maybe_text(&self, key: &str) -> Option<&str> {
        self.map.get(key).and_then(Value::as_str)
    }

    /// A flag; `default` when it is missing.
    pub fn flag(&self, key: &str, default: bool) -> bool {
        self.map.get(key).and_then(Value::as_bool).unwrap_or(default)
    }

    /// A number from 0 on; `None` when it is missing.
    pub fn number(&self, key: &str) -> QmpResult<Option<u64>> {
        match self.map.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) => Ok(Some(number)),
                None => Err(QmpError::generic(format!("Parameter '{key}' expects a number of at least 0"))),
            },
        }
    }

    /// An object that may be missing.
    pub fn object(&self, key: &str) -> Option<&Map<String, Value>> {
        self.map.get(key).and_then(Value::as_object)
    }

    /// Any value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key)
    }

    /// The same with another text at `key`.
    pub fn with(mut self, key: &str, text: &str) -> Arguments {
        self.map.insert(key.to_owned(), text.into());
        self
    }

    /// All of them.
    pub fn into_map(self) -> Map<String, Value> {
        self.map
    }
}
