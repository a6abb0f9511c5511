// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults of a `fault` node: rules are armed, changed, taken away and read back while clients run.

use super::{Arguments, Group, command, nothing};
use crate::state::Daemon;
use cowshed_image::Node;
use cowshed_image::filters::{Fault, FaultRule};
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
enum FaultOperation: read write write-zeroes discard flush resize any
enum FaultAction: fail torn short corrupt lose misdirect stuck hang delay
object FaultRule: op: FaultOperation, action?: FaultAction, errno?: uint32, offset?: uint64, len?: uint64, after?: uint64
  , once?: bool, times?: uint64, probability-percent?: uint32, bytes?: uint64, distance?: uint64, delay-ms?: uint32
  , jitter-ms?: uint32, start-ms?: uint64, end-ms?: uint64
object FaultRuleInfo: id: int, hits: int, rule: FaultRule
object FaultInfo: hits: int, rules: [FaultRuleInfo]
object FaultRuleId: id: int
command x-fault-arm: node-name: str, rule: FaultRule, id?: uint64 -> FaultRuleId
command x-fault-disarm: node-name: str, id?: uint64
command x-query-faults: node-name: str -> FaultInfo
",
    commands: &[
        command!("x-fault-arm", arm),
        command!("x-fault-disarm", disarm),
        command!("x-query-faults", query),
    ],
};

fn node(daemon: &Daemon, arguments: &Arguments) -> QmpResult<Arc<Node>> {
    let node = daemon.node(arguments.text("node-name"))?;
    match node.fault() {
        Some(_) => Ok(node),
        None => Err(QmpError::generic(format!("Node '{}' is no fault node", node.name()))),
    }
}

fn fault(node: &Node) -> QmpResult<&Fault> {
    node.fault().ok_or_else(|| QmpError::generic("a node without faults"))
}

fn no_rule(id: u64) -> QmpError {
    QmpError::generic(format!("There is no rule {id}"))
}

async fn arm(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let node = node(&daemon, &arguments)?;
    let given = arguments.object("rule").cloned().unwrap_or_default();
    let number = |key: &str| given.get(key).and_then(Value::as_u64);
    for (key, range) in [("errno", 1..=4095), ("probability-percent", 1..=100), ("times", 1..=u64::MAX)] {
        if number(key).is_some_and(|number| !range.contains(&number)) {
            let (least, most) = range.into_inner();
            return Err(QmpError::generic(format!("'{key}' is a number from {least} to {most}")));
        }
    }
    let rule = FaultRule::from_options(&given).ok_or_else(|| QmpError::generic("a rule without 'op'"))?;
    if let Some(why) = rule.no_effect() {
        return Err(QmpError::generic(format!("This rule has no effect: {why}")));
    }
    let id = match arguments.number("id")? {
        None => fault(&node)?.arm(rule),
        Some(id) if fault(&node)?.change(id, rule) => id,
        Some(id) => return Err(no_rule(id)),
    };
    Ok(json!({"id": id}))
}

/// Without an `id` all rules go.
async fn disarm(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let node = node(&daemon, &arguments)?;
    match arguments.number("id")? {
        None => fault(&node)?.disarm(),
        Some(id) if fault(&node)?.disarm_one(id) => {}
        Some(id) => return Err(no_rule(id)),
    }
    nothing()
}

async fn query(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let node = node(&daemon, &arguments)?;
    let fault = fault(&node)?;
    let rules = fault.rules();
    let rules: Vec<Value> = rules
        .iter()
        .map(|armed| json!({"id": armed.id, "hits": armed.hits, "rule": armed.rule.to_options()}))
        .collect();
    Ok(json!({"hits": fault.hits(), "rules": rules}))
}
