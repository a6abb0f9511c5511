// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The options of `blkdebug` as rules. Everything here has passed the schema.

use super::BlockdevOptions;
use cowshed_storage::fault::{Event, FaultAction, FaultRule, Faults, IoType, StateRule};
use cowshed_storage::path_of_text;
use cowshed_types::{Errno, Error, Result};
use serde_json::Value;
use std::io::Read;
use std::time::Duration;

const SECTOR_BYTES: u64 = 512;

/// Options of `blkdebug`.
#[derive(Debug)]
pub(crate) struct BlkdebugOptions {
    pub faults: Faults,
    pub align: Option<u64>,
    pub max_transfer: Option<u64>,
}

/// Keys that only our rules have.
const OWN: &[&str] = &["action", "bytes", "delay-ms", "probability-percent", "skip", "times"];

impl BlkdebugOptions {
    /// Refuses a rule without an event, as QEMU does, unless it has a key of ours. `path`: the place of the node.
    pub(crate) fn check_events(options: &BlockdevOptions, path: &str) -> Result<()> {
        let is_ours = |rule: &Value| OWN.iter().any(|key| rule.get(key).is_some());
        let lacks = |rule: &Value| rule.get("event").is_none() && !is_ours(rule);
        match list(options, "inject-error").iter().position(lacks) {
            Some(number) => {
                let error = Error::invalid_argument(format!("option '{path}inject-error.{number}.event' is missing"));
                Err(error.qemu("Missing event name for rule"))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn new(options: &BlockdevOptions) -> BlkdebugOptions {
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
        BlkdebugOptions { faults, align: options.number("align"), max_transfer: options.number("max-transfer") }
    }
}

/// Most bytes of a file with rules.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Puts the rules of the file that `config` names in front of those of the options, still unchecked. The file has
/// sections `[inject-error]` and `[set-state]` with lines `key = "value"`; comments begin with `#`.
pub(crate) fn read_config(options: &mut BlockdevOptions) -> Result<()> {
    let Some(path) = options.text("config").map(str::to_owned) else { return Ok(()) };
    let text = read_text(&path).map_err(|error| error.file(&path))?;
    let mut sections = rules_of(&text).map_err(|error| match error.message().starts_with("Invalid parameter") {
        true => error,
        false => error.file(&path),
    })?;
    for (name, rules) in &mut sections {
        match options.remove(name) {
            None => {}
            Some(Value::Array(given)) => rules.extend(given),
            // As dotted keys give it: numbers, then the rule.
            Some(Value::Object(given)) => {
                let mut numbered: Vec<(usize, Value)> = Vec::new();
                for (index, rule) in given {
                    let index = index.parse().map_err(|_| {
                        Error::invalid_argument(format!("'{name}.{index}': rules have numbers")).file(&path)
                    })?;
                    numbered.push((index, rule));
                }
                numbered.sort_by_key(|(index, _)| *index);
                rules.extend(numbered.into_iter().map(|(_, rule)| rule));
            }
            Some(_) => return Err(Error::invalid_argument(format!("'{name}' is a list of rules")).file(&path)),
        }
        if !rules.is_empty() {
            options.insert(*name, Value::Array(std::mem::take(rules)));
        }
    }
    Ok(())
}

fn read_text(path: &str) -> Result<String> {
    let failed =
        |error: std::io::Error| Error::io(&error, "could not read the rules").qemu(format!("Could not open '{path}'"));
    // The open of a FIFO would wait for its writer.
    if !std::fs::metadata(path_of_text(path)).map_err(failed)?.is_file() {
        return Err(Error::invalid_argument("a file with rules is a regular file"));
    }
    let file = std::fs::File::open(path_of_text(path)).map_err(failed)?;
    let mut text = String::new();
    file.take(MAX_CONFIG_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    match text.len() as u64 > MAX_CONFIG_BYTES {
        true => Err(Error::invalid_argument("a file with rules has at most 1 MiB")),
        false => Ok(text),
    }
}

type Sections = [(&'static str, Vec<Value>); 2];

fn rules_of(text: &str) -> Result<Sections> {
    let mut sections: Sections = [("inject-error", Vec::new()), ("set-state", Vec::new())];
    let mut current = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        let wrong = |what: &str| Err(Error::invalid_argument(format!("line {}: {what}", number + 1)));
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let Some(place) = sections.iter().position(|(known, _)| *known == name.trim()) else {
                return wrong("a section is [inject-error] or [set-state]");
            };
            sections[place].1.push(Value::Object(serde_json::Map::new()));
            current = Some(place);
            continue;
        }
        // As in QEMU a key ends at a blank.
        let key = line.split_whitespace().next().unwrap_or_default();
        if key.contains('=') {
            return Err(Error::invalid_argument(format!("Invalid parameter '{key}'")));
        }
        let value = line.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
        let value = value.and_then(|(key, value)| Some((key, value.strip_prefix('"')?.strip_suffix('"')?)));
        let rule = current.and_then(|place| sections[place].1.last_mut());
        match (value, rule) {
            (Some((key, value)), Some(Value::Object(rule))) => {
                if rule.insert(key.to_owned(), value.into()).is_some() {
                    return wrong("the key is given twice");
                }
            }
            (Some(_), _) => return wrong("no section has begun"),
            (None, _) => return wrong("expected key = \"value\""),
        }
    }
    Ok(sections)
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
        // As in QEMU a rule without an error only waits.
        _ if errno.0 == 0 => FaultAction::Pass,
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
        delay: Duration::from_millis(number(rule, "delay-ms").unwrap_or(0))
            .saturating_add(Duration::from_nanos(number(rule, "delay-ns").unwrap_or(0))),
        action,
    }
}
