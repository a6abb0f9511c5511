// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The options of `blkdebug` as rules. Everything here has passed the schema.

use super::BlockdevOptions;
use cowshed_block::{Errno, Error, Result};
use cowshed_storage::fault::{Event, FaultAction, FaultRule, Faults, IoType, StateRule};
use serde_json::Value;
use std::time::Duration;

const SECTOR_BYTES: u64 = 512;

/// Options of `blkdebug`.
#[derive(Debug)]
pub(crate) struct BlkdebugOptions {
    pub faults: Faults,
    pub align: Option<u64>,
    pub max_transfer: Option<u64>,
}

impl BlkdebugOptions {
    /// `path` is where the node stands in the option tree, for messages.
    pub(crate) fn new(options: &BlockdevOptions, path: &str) -> Result<BlkdebugOptions> {
        if options.get("config").is_some() {
            let message = format!("'{path}config' is not yet supported: give the rules as '{path}inject-error'");
            return Err(Error::unsupported(message));
        }
        let faults = Faults::new(options.number("seed").unwrap_or(0));
        for rule in list(options, "set-state") {
            faults.on_event(StateRule {
                event: event(rule),
                state: state(rule),
                new_state: number(rule, "new_state").and_then(|state| u32::try_from(state).ok()).unwrap_or(0),
            });
        }
        for rule in list(options, "inject-error") {
            faults.arm(fault_rule(rule));
        }
        Ok(BlkdebugOptions { faults, align: options.number("align"), max_transfer: options.number("max-transfer") })
    }
}

fn list<'a>(options: &'a BlockdevOptions, key: &str) -> &'a [Value] {
    options.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

fn number(rule: &Value, key: &str) -> Option<u64> {
    rule.get(key).and_then(Value::as_u64)
}

fn event(rule: &Value) -> Event {
    rule.get("event").and_then(Value::as_str).and_then(Event::parse).unwrap_or(Event::None)
}

/// As in QEMU, 0 is any state.
fn state(rule: &Value) -> Option<u32> {
    number(rule, "state").and_then(|state| u32::try_from(state).ok()).filter(|state| *state != 0)
}

fn fault_rule(rule: &Value) -> FaultRule {
    let errno = number(rule, "errno").and_then(|errno| i32::try_from(errno).ok()).map_or(Errno::EIO, Errno);
    let bytes = number(rule, "bytes");
    let action = match rule.get("action").and_then(Value::as_str) {
        Some("torn") => FaultAction::Torn { errno, bytes },
        Some("short") => FaultAction::Short { bytes },
        Some("corrupt") => FaultAction::Corrupt,
        Some("lose") => FaultAction::Lose,
        Some("delay") => FaultAction::Pass,
        _ => FaultAction::Fail(errno),
    };
    let range = number(rule, "sector").map(|first| {
        let sectors = number(rule, "sectors").unwrap_or(1);
        let start = first.saturating_mul(SECTOR_BYTES);
        start..start.saturating_add(sectors.saturating_mul(SECTOR_BYTES))
    });
    let once = rule.get("once").and_then(Value::as_bool).unwrap_or(false);
    FaultRule {
        event: event(rule),
        state: state(rule),
        io_type: rule.get("iotype").and_then(Value::as_str).and_then(IoType::parse),
        range,
        skip: number(rule, "skip").unwrap_or(0),
        times: if once { 1 } else { number(rule, "times").unwrap_or(u64::MAX) },
        probability_percent: number(rule, "probability-percent").and_then(|p| u8::try_from(p).ok()).unwrap_or(100),
        delay: Duration::from_millis(number(rule, "delay-ms").unwrap_or(0)),
        action,
    }
}
