// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The nodes that are closed for the time being: their names and their options.

use cowshed_image::options::BlockdevOptions;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::{FileIdentity, path_of_text};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The options that name a child.
const CHILDREN: &[&str] = &["file", "backing", "data-file", "header", "target", "image"];

/// The rest of a node.
#[derive(Clone, Debug)]
pub(crate) struct Closed {
    pub options: BlockdevOptions,
    /// Its `BlockDeviceInfo` when it was closed, without the nodes below it.
    pub described: Map<String, Value>,
    /// A command put it in, not the user.
    pub is_inserted: bool,
}

/// The inactive nodes by name.
#[derive(Default)]
pub(crate) struct InactiveNodes(RefCell<BTreeMap<String, Closed>>);

impl InactiveNodes {
    /// Adds one.
    pub fn insert(&self, name: String, closed: Closed) {
        self.0.borrow_mut().insert(name, closed);
    }

    /// Forgets one.
    pub fn remove(&self, name: &str) {
        self.0.borrow_mut().remove(name);
    }

    /// True when there is one of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.0.borrow().contains_key(name)
    }

    /// Their descriptions for `query-named-block-nodes`.
    pub fn described(&self) -> Vec<Value> {
        self.0.borrow().values().map(|closed| Value::Object(closed.described.clone())).collect()
    }

    /// Refuses a command that needs an active node.
    pub fn check(&self, name: &str) -> QmpResult<()> {
        match self.contains(name) {
            true => Err(QmpError::generic(format!("Node '{name}' is inactive"))),
            false => Ok(()),
        }
    }

    /// The name of a node whose options name one of these files.
    pub fn user_of(&self, files: &[FileIdentity]) -> Option<String> {
        let is_one =
            |name: &str| FileIdentity::of_path(&path_of_text(name)).is_some_and(|identity| files.contains(&identity));
        let nodes = self.0.borrow();
        let found = nodes.iter().find(|(_, closed)| file_names(&closed.options).iter().any(|name| is_one(name)));
        found.map(|(name, _)| name.clone())
    }

    pub fn names(&self) -> Vec<String> {
        self.0.borrow().keys().cloned().collect()
    }

    pub fn find(&self, name: &str) -> Option<Closed> {
        self.0.borrow().get(name).cloned()
    }

    /// Forgets a node, for `blockdev-del`. False when there is none of this name.
    pub fn delete(&self, name: &str) -> QmpResult<bool> {
        if !self.contains(name) {
            return Ok(false);
        }
        let users = self
            .0
            .borrow()
            .iter()
            .filter(|(_, closed)| references(&closed.options).iter().any(|one| one == name))
            .count();
        if users > 0 {
            return Err(QmpError::generic(format!("Node {name} is in use")));
        }
        Ok(self.0.borrow_mut().remove(name).is_some())
    }
}

/// The nodes that options name as children, at any depth.
pub(crate) fn references(options: &BlockdevOptions) -> Vec<String> {
    fn collect(map: &Map<String, Value>, found: &mut Vec<String>) {
        for key in CHILDREN {
            match map.get(*key) {
                Some(Value::String(name)) if !name.is_empty() => found.push(name.clone()),
                Some(Value::Object(child)) => collect(child, found),
                _ => {}
            }
        }
    }
    let map: Map<String, Value> = options.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    let mut found = Vec::new();
    collect(&map, &mut found);
    found
}

/// The files that options name, at any depth.
fn file_names(options: &BlockdevOptions) -> Vec<String> {
    fn collect(key: &str, value: &Value, found: &mut Vec<String>) {
        match value {
            Value::String(name) if key == "filename" => found.push(name.clone()),
            Value::Object(map) => map.iter().for_each(|(key, value)| collect(key, value, found)),
            Value::Array(list) => list.iter().for_each(|value| collect(key, value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    options.iter().for_each(|(key, value)| collect(key, value, &mut found));
    found
}
