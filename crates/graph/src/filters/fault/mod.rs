// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk that fails on demand: requests that an armed rule hits fail, wait, are torn, lost or misdirected.
//!
//! - `rules`: which requests, and how
//! - `arguments`: rules of a command line

mod arguments;
mod rules;

pub use arguments::fault_options;
pub use rules::{ArmedRule, FaultAction, FaultOp, FaultRule};

use super::Filter;
use crate::node::{Below, Intent, Mapped, Node, Preallocation, Transfer, Work, ZeroFlags};
use crate::options::schemas::key;
use crate::options::{BlockdevOptions, DriverKind, DriverSchema, Key, KeyType, REQUIRED, check_list};
use cowshed_storage::{IoBuf, path_of_text, rt};
use cowshed_types::{Error, Result};
use rules::{FaultTable, RULE, RequestFault, SECTOR_BYTES};
use serde_json::Value;
use std::io::Read;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The driver and its keys.
pub(crate) const SCHEMA: DriverSchema =
    DriverSchema { name: "fault", kind: DriverKind::Filter, about: "fails chosen requests", keys: FAULT_KEYS };

const FAULT_KEYS: &[Key] = &[
    key("file", KeyType::Child, REQUIRED, "the node whose requests fail"),
    key("rules", KeyType::List(RULE), "", "which requests fail"),
    key("scenario", KeyType::Text, "", "a file with a list of rules (JSON), which count before the others"),
    key("seed", KeyType::Number(0, u64::MAX), "0", "decides about what is left to chance"),
];

/// Most bytes of a file with rules.
const MAX_SCENARIO_BYTES: u64 = 1 << 20;
/// Between two looks whether a request goes on waiting.
const LOOK: Duration = Duration::from_millis(10);

/// The filter. Without armed rules a request costs one load of an atomic more than without the filter.
pub struct Fault {
    below: Below,
    table: FaultTable,
}

/// Pieces of a range that a request reaches in another way than all at once.
struct Pieces {
    /// Parts of the request, and where each of them goes on the disk.
    parts: Vec<(Range<u64>, u64)>,
    /// The answer in the end.
    result: Result<()>,
}

impl Fault {
    pub(crate) fn new(below: Below, rules: Vec<FaultRule>, seed: u64) -> Fault {
        Fault { below, table: FaultTable::new(rules, seed) }
    }

    /// Adds a rule behind the others; it counts from now on. The number takes it away again.
    pub fn arm(&self, rule: FaultRule) -> u64 {
        self.table.arm(rule, None).unwrap_or_default()
    }

    /// Puts a rule in the place of another one; false where that isn't there.
    pub fn change(&self, id: u64, rule: FaultRule) -> bool {
        self.table.arm(rule, Some(id)).is_some()
    }

    /// Takes a rule away; false where it isn't there. Requests that wait by it go on.
    pub fn disarm_one(&self, id: u64) -> bool {
        self.table.disarm(id)
    }

    /// Takes all rules away. Requests that wait by them go on.
    pub fn disarm(&self) {
        self.table.disarm_all();
    }

    /// The rules that are armed, in their order.
    pub fn rules(&self) -> Vec<ArmedRule> {
        self.table.rules()
    }

    /// Number of requests that were hit so far.
    pub fn hits(&self) -> u64 {
        self.table.hits()
    }

    /// Waits as the rules demand, and returns the rule with a further effect.
    async fn meet(&self, op: FaultOp, offset: u64, len: u64) -> Option<FaultRule> {
        let RequestFault { id, delay, rule, is_released } = self.table.decide(op, offset, len, self.below.size())?;
        let end = rt::now().saturating_add(delay);
        while let Some(rest) = end.checked_sub(rt::now()).filter(|rest| !rest.is_zero())
            && !is_released.load(Ordering::Acquire)
            && !rt::is_left()
        {
            rt::sleep(rest.min(LOOK)).await;
        }
        if rule.action == FaultAction::Hang {
            // A request that its caller has given up on must not keep the node from closing.
            while self.table.hangs(id) && !rt::is_left() {
                rt::sleep(LOOK).await;
            }
        }
        Some(rule)
    }

    fn error(&self, rule: &FaultRule, offset: u64) -> Error {
        let error = Error::os(rule.errno, "injected error").offset(offset);
        self.below.node().map_or(error.clone(), |child| error.file(child.filename()))
    }

    /// For requests that fail, are lost, or are carried out as a whole. True: lost.
    async fn check(&self, op: FaultOp) -> Result<bool> {
        let Some(rule) = self.meet(op, 0, u64::MAX).await else { return Ok(false) };
        match rule.action {
            FaultAction::Fail | FaultAction::Torn => Err(self.error(&rule, 0)),
            FaultAction::Lose => Ok(true),
            _ => Ok(false),
        }
    }

    /// For requests that change a range; nothing: it is carried out as it is.
    async fn pieces(&self, op: FaultOp, offset: u64, len: u64) -> Option<Pieces> {
        let rule = self.meet(op, offset, len).await?;
        Some(match rule.action {
            FaultAction::Fail => Pieces { parts: Vec::new(), result: Err(self.error(&rule, offset)) },
            FaultAction::Lose => Pieces { parts: Vec::new(), result: Ok(()) },
            FaultAction::Torn => {
                Pieces { parts: vec![(0..rule.moved(len), offset)], result: Err(self.error(&rule, offset)) }
            }
            FaultAction::Short => Pieces { parts: vec![(0..rule.moved(len), offset)], result: Ok(()) },
            FaultAction::Misdirect => {
                Pieces { parts: vec![(0..len, rule.astray(offset, len, self.below.size()))], result: Ok(()) }
            }
            FaultAction::Stuck => {
                let stuck = rule.range.unwrap_or(0..u64::MAX);
                let before = 0..stuck.start.saturating_sub(offset).min(len);
                let behind = stuck.end.saturating_sub(offset).min(len)..len;
                let parts = [before, behind].map(|part| (part.clone(), offset.saturating_add(part.start)));
                Pieces { parts: parts.into(), result: Ok(()) }
            }
            FaultAction::Corrupt | FaultAction::Hang | FaultAction::Delay => return None,
        })
    }

    /// Writes pieces of a buffer, which is whole again afterwards.
    async fn write_pieces(&self, buf: IoBuf, pieces: Pieces) -> (Result<()>, IoBuf) {
        let (mut result, mut whole) = (Ok(()), buf);
        for (part, place) in pieces.parts.into_iter().filter(|(part, _)| !part.is_empty()) {
            let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(whole.len());
            let piece = IoBuf::copy_from(&whole[index(part.start)..index(part.end)]);
            let (written, _) = self.below.write(place, piece).await;
            result = result.and(written);
        }
        (result.and(pieces.result), std::mem::take(&mut whole))
    }

    /// Flips a bit in each sector of the read bytes.
    fn corrupt(&self, buf: &mut [u8]) {
        for sector in buf.chunks_mut(SECTOR_BYTES as usize) {
            let bit = self.table.random_below(sector.len() as u64 * 8) as usize;
            sector[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

impl Filter for Fault {
    fn name(&self) -> &'static str {
        SCHEMA.name
    }

    fn moves_freely(&self) -> bool {
        true
    }

    fn below(&self) -> &Below {
        &self.below
    }

    fn map(&self, _offset: u64, _len: u64, _intent: Intent) -> Mapped<'_> {
        Mapped::Special
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let Some(rule) = self.meet(FaultOp::Read, offset, buf.len() as u64).await else {
                return self.below.read(offset, buf).await;
            };
            match rule.action {
                FaultAction::Fail | FaultAction::Torn => (Err(self.error(&rule, offset)), buf),
                FaultAction::Corrupt => {
                    let (result, mut buf) = self.below.read(offset, buf).await;
                    self.corrupt(&mut buf);
                    (result, buf)
                }
                FaultAction::Short => {
                    let (result, mut buf) = self.below.read(offset, buf).await;
                    let end = usize::try_from(rule.moved(buf.len() as u64)).unwrap_or(buf.len());
                    buf[end..].fill(0);
                    (result, buf)
                }
                FaultAction::Misdirect => {
                    let place = rule.astray(offset, buf.len() as u64, self.below.size());
                    self.below.read(place, buf).await
                }
                _ => self.below.read(offset, buf).await,
            }
        })
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            match self.pieces(FaultOp::Write, offset, buf.len() as u64).await {
                None => self.below.write(offset, buf).await,
                Some(pieces) => self.write_pieces(buf, pieces).await,
            }
        })
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Box::pin(async move {
            let mut rest = Vec::new();
            for (offset, buf) in clusters {
                match self.pieces(FaultOp::Write, offset, buf.len() as u64).await {
                    None => rest.push((offset, buf)),
                    Some(pieces) => self.write_pieces(buf, pieces).await.0?,
                }
            }
            self.below.write_compressed(rest).await
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            let Some(pieces) = self.pieces(FaultOp::WriteZeroes, offset, len).await else {
                return self.below.write_zeroes(offset, len, flags).await;
            };
            for (part, place) in pieces.parts.into_iter().filter(|(part, _)| !part.is_empty()) {
                self.below.write_zeroes(place, part.end - part.start, flags).await?;
            }
            pieces.result
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            let Some(pieces) = self.pieces(FaultOp::Discard, offset, len).await else {
                return self.below.discard(offset, len).await;
            };
            for (part, place) in pieces.parts.into_iter().filter(|(part, _)| !part.is_empty()) {
                self.below.discard(place, part.end - part.start).await?;
            }
            pieces.result
        })
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(async move {
            match self.check(FaultOp::Flush).await? {
                true => Ok(()),
                false => self.below.flush().await,
            }
        })
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(async move {
            match self.check(FaultOp::Resize).await? {
                true => Ok(()),
                false => self.below.resize(size, preallocation).await,
            }
        })
    }
}

impl Node {
    /// The fault filter, when this node is one.
    pub fn fault(&self) -> Option<&Fault> {
        self.driver().downcast()
    }
}

/// The rules of a `fault` filter.
pub(crate) fn rules_of(options: &BlockdevOptions) -> Vec<FaultRule> {
    let rules = options.get("rules").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    rules.iter().filter_map(|rule| FaultRule::from_options(rule.as_object()?)).collect()
}

/// Puts the rules of the file that `scenario` names in front of those that the options give. Both are checked here, since
/// each rule has a number of its own place.
pub(crate) fn read_scenario(options: &mut BlockdevOptions) -> Result<()> {
    let Some(path) = options.text("scenario").map(str::to_owned) else {
        let given = options.get("rules").and_then(Value::as_array);
        return check_effect(given.map(Vec::as_slice).unwrap_or_default());
    };
    let mut rules = scenario(&path).map_err(|error| {
        let sentence = format!("Could not use the scenario '{path}': {}", error.message());
        error.file(&path).qemu(sentence)
    })?;
    match options.remove("rules") {
        None => {}
        Some(Value::Array(mut given)) => {
            check_list(RULE, &mut given, "rules")?;
            rules.extend(given);
        }
        Some(_) => return Err(Error::invalid_argument("'rules' is a list of rules")),
    }
    check_effect(&rules)?;
    options.insert("rules", Value::Array(rules));
    Ok(())
}

/// Refuses rules that can never have an effect.
fn check_effect(rules: &[Value]) -> Result<()> {
    for (number, rule) in rules.iter().enumerate() {
        let why = rule.as_object().and_then(FaultRule::from_options).and_then(|rule| rule.no_effect());
        if let Some(why) = why {
            return Err(Error::invalid_argument(format!("rule {number} has no effect: {why}")));
        }
    }
    Ok(())
}

fn scenario(path: &str) -> Result<Vec<Value>> {
    let failed = |error: std::io::Error| Error::io(&error, "could not read the scenario");
    let mut text = String::new();
    // The open of a FIFO would wait for its writer.
    if !std::fs::metadata(path_of_text(path)).map_err(failed)?.is_file() {
        return Err(Error::invalid_argument("a scenario is a regular file"));
    }
    let file = std::fs::File::open(path_of_text(path)).map_err(failed)?;
    file.take(MAX_SCENARIO_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_SCENARIO_BYTES {
        return Err(Error::invalid_argument("a scenario has at most 1 MiB"));
    }
    let mut rules: Vec<Value> = serde_json::from_str(&text)
        .map_err(|error| Error::invalid_argument(format!("a scenario is a list of rules in JSON: {error}")))?;
    check_list(RULE, &mut rules, "rules")?;
    check_effect(&rules)?;
    Ok(rules)
}
