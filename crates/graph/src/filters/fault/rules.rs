// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rules of faults: which requests they hit, and how. No I/O here.

use crate::options::schemas::key;
use crate::options::{Key, KeyType, REQUIRED};
use cowshed_storage::rng::Rng;
use cowshed_storage::rt;
use cowshed_types::Errno;
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const FOREVER: u64 = u64::MAX;
/// The unit of tears, corruptions and stuck places, in bytes.
pub(super) const SECTOR_BYTES: u64 = 512;
/// The longest delay, in milliseconds: a day.
const MAX_MS: u64 = 86_400_000;

/// The keys of a rule.
pub(super) const RULE: &[Key] = &[
    key("op", KeyType::Choice(FaultOp::NAMES), REQUIRED, "the kind of request"),
    key("action", KeyType::Choice(FaultAction::NAMES), "fail", "what happens to it"),
    key("errno", KeyType::Number(1, 4095), "5", "the error number of fail and torn"),
    key("offset", KeyType::Size, "0", "first byte of the range"),
    key("len", KeyType::Size, "up to the end", "length of the range"),
    key("after", KeyType::Number(0, u64::MAX), "0", "the number of matching requests that pass first"),
    key("once", KeyType::Bool, "off", "only one request is hit"),
    key("times", KeyType::Number(1, u64::MAX), "no bound", "the number of requests that are hit"),
    key("probability-percent", KeyType::Number(1, 100), "100", "how many of the rest are hit"),
    key("bytes", KeyType::Size, "half", "what moves of a torn or short request"),
    key("distance", KeyType::Size, "1M", "how far a misdirected request goes astray"),
    key("delay-ms", KeyType::Number(0, MAX_MS), "0", "how long a request waits that is hit"),
    key("jitter-ms", KeyType::Number(0, MAX_MS), "0", "the most that is added, at random"),
    key("start-ms", KeyType::Number(0, u64::MAX), "0", "from then on, counted from the opening of the node"),
    key("end-ms", KeyType::Number(0, u64::MAX), "never", "until then"),
];

/// The requests that a [`FaultRule`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOp {
    /// Reads.
    Read,
    /// Writes, compressed ones too.
    Write,
    /// Zero writes.
    WriteZeroes,
    /// Discards.
    Discard,
    /// Flushes.
    Flush,
    /// Changes of the size.
    Resize,
    /// All of these: the device has gone.
    Any,
}

impl FaultOp {
    /// The spellings of the option, in the order of the variants.
    pub const NAMES: &'static [&'static str] = &["read", "write", "write-zeroes", "discard", "flush", "resize", "any"];

    const ALL: [FaultOp; 7] = [
        FaultOp::Read,
        FaultOp::Write,
        FaultOp::WriteZeroes,
        FaultOp::Discard,
        FaultOp::Flush,
        FaultOp::Resize,
        FaultOp::Any,
    ];

    /// From the option's spelling.
    pub fn parse(text: &str) -> Option<FaultOp> {
        Self::NAMES.iter().position(|known| *known == text).map(|index| Self::ALL[index])
    }

    fn name(self) -> &'static str {
        Self::NAMES[Self::ALL.iter().position(|known| *known == self).unwrap_or(0)]
    }
}

/// The effect on a request that a rule hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// It fails with the rule's error.
    Fail,
    /// A part of it arrives, then it fails. Reads, flushes and changes of the size fail without effect.
    Torn,
    /// A part of it moves, and it succeeds: the rest of a change doesn't arrive, the rest of a read is zeroes. No effect on flushes
    /// and changes of the size.
    Short,
    /// A read has one wrong bit in each sector. No effect on others.
    Corrupt,
    /// It succeeds without any effect. No effect on reads.
    Lose,
    /// It goes to another place, which is by the rule's distance away. No effect on flushes and changes of the size.
    Misdirect,
    /// The bytes of the rule's range keep their values, and the request succeeds. No effect on reads.
    Stuck,
    /// It waits until the rule is gone, and is carried out then.
    Hang,
    /// Nothing but the delay.
    Delay,
}

impl FaultAction {
    /// The spellings of the option, in the order of the variants.
    pub const NAMES: &'static [&'static str] =
        &["fail", "torn", "short", "corrupt", "lose", "misdirect", "stuck", "hang", "delay"];

    const ALL: [FaultAction; 9] = [
        FaultAction::Fail,
        FaultAction::Torn,
        FaultAction::Short,
        FaultAction::Corrupt,
        FaultAction::Lose,
        FaultAction::Misdirect,
        FaultAction::Stuck,
        FaultAction::Hang,
        FaultAction::Delay,
    ];

    /// From the option's spelling.
    pub fn parse(text: &str) -> Option<FaultAction> {
        Self::NAMES.iter().position(|known| *known == text).map(|index| Self::ALL[index])
    }

    fn name(self) -> &'static str {
        Self::NAMES[Self::ALL.iter().position(|known| *known == self).unwrap_or(0)]
    }

    /// False where each request of this kind is carried out as it is, in spite of a hit.
    fn changes(self, op: FaultOp) -> bool {
        let has_place = !matches!(op, FaultOp::Flush | FaultOp::Resize);
        match self {
            FaultAction::Fail | FaultAction::Torn | FaultAction::Hang | FaultAction::Delay => true,
            FaultAction::Corrupt => op == FaultOp::Read,
            FaultAction::Lose => op != FaultOp::Read,
            FaultAction::Short | FaultAction::Misdirect => has_place,
            FaultAction::Stuck => has_place && op != FaultOp::Read,
        }
    }
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// The kind of request.
    pub op: FaultOp,
    /// The effect on the request.
    pub action: FaultAction,
    /// The error of the request.
    pub errno: Errno,
    /// Only requests that touch these bytes; `None` for all. A rule for flushes or changes of the size, which have no place,
    /// disregards it.
    pub range: Option<Range<u64>>,
    /// The number of matching requests that pass first.
    pub after: u64,
    /// Disarmed after this many hits. In a rule that is armed: 0 where requests that it has hit hang still.
    pub times: u64,
    /// The share of the matching requests that is hit, in percent.
    pub probability_percent: u8,
    /// The part of a torn or short request that moves, in bytes; `None`: half of it.
    pub bytes: Option<u64>,
    /// The distance by which a misdirected request goes astray, in bytes.
    pub distance: u64,
    /// The delay of a request that is hit.
    pub delay: Duration,
    /// The largest random addition to the delay.
    pub jitter: Duration,
    /// Counts from then on, from the opening of the node.
    pub start: Duration,
    /// Counts until then.
    pub end: Option<Duration>,
}

impl FaultRule {
    /// Fails every request of a kind.
    pub fn always(op: FaultOp, errno: Errno) -> FaultRule {
        FaultRule {
            op,
            action: FaultAction::Fail,
            errno,
            range: None,
            after: 0,
            times: FOREVER,
            probability_percent: 100,
            bytes: None,
            distance: 1 << 20,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            start: Duration::ZERO,
            end: None,
        }
    }

    /// As [`FaultRule::always`], for the first request alone.
    pub fn once(op: FaultOp, errno: Errno) -> FaultRule {
        FaultRule { times: 1, ..FaultRule::always(op, errno) }
    }

    /// From options that have the keys and types of the driver's rules. Nothing where `op` is missing.
    pub fn from_options(rule: &Map<String, Value>) -> Option<FaultRule> {
        let number = |key: &str| rule.get(key).and_then(Value::as_u64);
        let time = |key: &str| number(key).map(Duration::from_millis);
        let text = |key: &str| rule.get(key).and_then(Value::as_str);
        let range = match (number("offset"), number("len")) {
            (None, None) => None,
            (offset, len) => {
                let start = offset.unwrap_or(0);
                Some(start..len.map_or(u64::MAX, |len| start.saturating_add(len)))
            }
        };
        let errno = number("errno").and_then(|errno| i32::try_from(errno).ok()).map_or(Errno::EIO, Errno);
        let rest = FaultRule::always(FaultOp::parse(text("op")?)?, errno);
        let is_once = rule.get("once").and_then(Value::as_bool).unwrap_or(false);
        Some(FaultRule {
            action: text("action").and_then(FaultAction::parse).unwrap_or(FaultAction::Fail),
            range,
            after: number("after").unwrap_or(0),
            times: if is_once { 1 } else { number("times").unwrap_or(FOREVER) },
            probability_percent: number("probability-percent").and_then(|p| u8::try_from(p).ok()).unwrap_or(100),
            bytes: number("bytes"),
            distance: number("distance").unwrap_or(rest.distance),
            delay: time("delay-ms").unwrap_or_default(),
            jitter: time("jitter-ms").unwrap_or_default(),
            start: time("start-ms").unwrap_or_default(),
            end: time("end-ms"),
            ..rest
        })
    }

    /// As options: those that aren't the default.
    pub fn to_options(&self) -> Map<String, Value> {
        let mut map = Map::new();
        let always = FaultRule::always(self.op, Errno::EIO);
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        map.insert("op".to_owned(), json!(self.op.name()));
        map.insert("action".to_owned(), json!(self.action.name()));
        let mut add = |key: &str, is_said: bool, value: u64| {
            if is_said {
                map.insert(key.to_owned(), json!(value));
            }
        };
        let is_failure = matches!(self.action, FaultAction::Fail | FaultAction::Torn);
        add("errno", is_failure, u64::try_from(self.errno.0).unwrap_or(0));
        if let Some(range) = &self.range {
            add("offset", true, range.start);
            add("len", range.end != u64::MAX, range.end - range.start);
        }
        add("after", self.after > 0, self.after);
        add("times", self.times != FOREVER, self.times);
        add("probability-percent", self.probability_percent < 100, self.probability_percent.into());
        add("bytes", self.bytes.is_some(), self.bytes.unwrap_or(0));
        add("distance", self.distance != always.distance, self.distance);
        add("delay-ms", !self.delay.is_zero(), milliseconds(self.delay));
        add("jitter-ms", !self.jitter.is_zero(), milliseconds(self.jitter));
        add("start-ms", !self.start.is_zero(), milliseconds(self.start));
        add("end-ms", self.end.is_some(), milliseconds(self.end.unwrap_or_default()));
        map
    }

    /// The reason for which the rule can never have an effect; `None` where it can.
    pub fn no_effect(&self) -> Option<&'static str> {
        use FaultAction::{Corrupt, Delay, Lose, Misdirect, Short, Stuck, Torn};
        let reads = matches!(self.op, FaultOp::Read | FaultOp::Any);
        let changes_place = matches!(self.op, FaultOp::Flush | FaultOp::Resize);
        match self.action {
            _ if self.range.as_ref().is_some_and(|range| i64::try_from(range.start).is_err()) => {
                Some("'offset': behind the end of any disk")
            }
            _ if self.range.as_ref().is_some_and(Range::is_empty) => Some("'len': a range without bytes"),
            _ if self.end.is_some_and(|end| end <= self.start) => Some("'end-ms' is not behind 'start-ms'"),
            _ if self.delay.max(self.jitter) > Duration::from_millis(MAX_MS) => {
                Some("'delay-ms' and 'jitter-ms' are a day (86400000) at most")
            }
            action if self.bytes.is_some() && !matches!(action, Torn | Short) => {
                Some("'bytes' is for 'torn' and 'short': 'offset' and 'len' are the place of a rule")
            }
            Misdirect if self.distance == 0 => Some("'distance': 0 is the place of the request"),
            Delay if self.delay.is_zero() && self.jitter.is_zero() => {
                Some("'action': 'delay' needs 'delay-ms' or 'jitter-ms'")
            }
            Corrupt if !reads => Some("'action': 'corrupt' is for reads"),
            Lose if self.op == FaultOp::Read => Some("'action': 'lose' is not for reads"),
            Stuck if self.op == FaultOp::Read => Some("'action': 'stuck' is not for reads"),
            Stuck | Misdirect | Short if changes_place => {
                Some("'action': flushes and changes of the size have no place")
            }
            _ => None,
        }
    }

    fn matches(&self, op: FaultOp, offset: u64, len: u64, size: u64) -> bool {
        let touches = match &self.range {
            None => true,
            // They have no place: a rule for places leaves them alone, unless it names them.
            Some(_) if matches!(op, FaultOp::Flush | FaultOp::Resize) => self.op == op,
            // No request touches a range without bytes, also where it lies within the request.
            Some(range) => !range.is_empty() && offset < range.end && offset.saturating_add(len) > range.start,
        };
        let has_effect = self.changes(op, offset, len, size) || !self.delay.is_zero() || !self.jitter.is_zero();
        // A request that the rule would leave as it is doesn't count for it.
        (self.op == op || self.op == FaultOp::Any) && touches && has_effect
    }

    /// False where the request is carried out as it is, in spite of a hit.
    fn changes(&self, op: FaultOp, offset: u64, len: u64, size: u64) -> bool {
        self.action.changes(op)
            && match self.action {
                FaultAction::Short => self.moved(len) < len,
                FaultAction::Misdirect => self.astray(offset, len, size) != offset,
                FaultAction::Corrupt | FaultAction::Lose | FaultAction::Stuck => len > 0,
                FaultAction::Fail | FaultAction::Torn | FaultAction::Hang | FaultAction::Delay => true,
            }
    }

    /// The part of a request of `len` bytes that it lets through, in whole sectors.
    pub(super) fn moved(&self, len: u64) -> u64 {
        self.bytes.unwrap_or(len / 2).min(len) / SECTOR_BYTES * SECTOR_BYTES
    }

    /// The place to which a request goes that misses its own, on a disk of `size` bytes. It lies behind its own or before, or else as
    /// far away as the disk goes. A request for the whole disk has no other one.
    pub(super) fn astray(&self, offset: u64, len: u64, size: u64) -> u64 {
        let last = size.saturating_sub(len);
        let behind = offset.checked_add(self.distance).filter(|place| *place <= last);
        let farthest = if last.saturating_sub(offset) > offset { last } else { 0 };
        behind.or_else(|| offset.checked_sub(self.distance)).unwrap_or(farthest)
    }

    fn counts_at(&self, age: Duration) -> bool {
        self.start <= age && self.end.is_none_or(|end| age < end)
    }
}

/// A rule that is armed, as it is read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArmedRule {
    /// The number by which it is disarmed.
    pub id: u64,
    /// The rule, with the rest of its `after` and `times`.
    pub rule: FaultRule,
    /// Number of requests that it has hit.
    pub hits: u64,
}

/// The fate of one request.
#[derive(Clone, Debug)]
pub(super) struct RequestFault {
    pub id: u64,
    pub delay: Duration,
    pub rule: FaultRule,
    /// The rule was taken away: the delay is over.
    pub is_released: Arc<AtomicBool>,
}

struct RulesState {
    rules: Vec<ArmedRule>,
    /// Requests that a delay may hold up: the numbers of their rules, which may be spent, and the switch that ends the
    /// delay.
    delayed: Vec<(u64, Arc<AtomicBool>)>,
    next_id: u64,
    rng: Rng,
}

impl RulesState {
    /// Ends the delays of rules; true where there was one.
    fn release(&mut self, is_meant: impl Fn(u64) -> bool) -> bool {
        let mut any = false;
        self.delayed.retain(|(id, flag)| {
            let is_released = is_meant(*id);
            if is_released {
                any |= Arc::strong_count(flag) > 1;
                flag.store(true, Ordering::Release);
            }
            !is_released
        });
        any
    }
}

/// The rules of a node. They can be changed while it is in use, from any thread.
pub(super) struct FaultTable {
    armed: AtomicBool,
    hits: AtomicU64,
    state: Mutex<RulesState>,
    /// When the node was opened.
    began: Duration,
}

impl FaultTable {
    pub fn new(rules: Vec<FaultRule>, seed: u64) -> FaultTable {
        let state = RulesState { rules: Vec::new(), delayed: Vec::new(), next_id: 1, rng: Rng::new(seed) };
        let table = FaultTable {
            armed: AtomicBool::new(false),
            hits: AtomicU64::new(0),
            state: Mutex::new(state),
            began: rt::now(),
        };
        for rule in rules {
            table.arm(rule, None);
        }
        table
    }

    fn state(&self) -> MutexGuard<'_, RulesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a rule behind the others, or puts it in the place of one of them; nothing where that one isn't there.
    pub fn arm(&self, rule: FaultRule, in_place_of: Option<u64>) -> Option<u64> {
        let mut state = self.state();
        let id = match in_place_of {
            Some(id) => {
                state.rules.iter_mut().find(|armed| armed.id == id)?.rule = rule;
                id
            }
            None => {
                let id = state.next_id;
                state.next_id += 1;
                state.rules.push(ArmedRule { id, rule, hits: 0 });
                id
            }
        };
        self.armed.store(true, Ordering::Release);
        Some(id)
    }

    /// Takes a rule away; false where neither it nor a request that waits by it is there.
    pub fn disarm(&self, id: u64) -> bool {
        let mut state = self.state();
        let before = state.rules.len();
        state.rules.retain(|armed| armed.id != id);
        self.armed.store(!state.rules.is_empty(), Ordering::Release);
        let is_there = state.rules.len() < before;
        state.release(|rule| rule == id) || is_there
    }

    pub fn disarm_all(&self) {
        self.armed.store(false, Ordering::Release);
        let mut state = self.state();
        state.rules.clear();
        state.release(|_| true);
    }

    pub fn rules(&self) -> Vec<ArmedRule> {
        self.state().rules.clone()
    }

    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// Decides on one request to a disk of `size` bytes, counting it.
    pub fn decide(&self, op: FaultOp, offset: u64, len: u64, size: u64) -> Option<RequestFault> {
        if !self.armed.load(Ordering::Acquire) {
            return None;
        }
        let age = rt::now().saturating_sub(self.began);
        let mut state = self.state();
        let RulesState { rules, delayed, rng, .. } = &mut *state;
        let hit = rules.iter_mut().position(|ArmedRule { rule, .. }| {
            if rule.times == 0 || !rule.counts_at(age) || !rule.matches(op, offset, len, size) {
                return false;
            }
            if rule.after > 0 {
                rule.after -= 1;
                return false;
            }
            rule.probability_percent >= 100 || rng.chance(u64::from(rule.probability_percent), 100)
        })?;
        let armed = &mut rules[hit];
        let jitter = u64::try_from(armed.rule.jitter.as_nanos()).unwrap_or(u64::MAX - 1);
        let jitter = if jitter == 0 { 0 } else { rng.below(jitter + 1) };
        armed.hits += 1;
        let verdict = RequestFault {
            id: armed.id,
            delay: armed.rule.delay.saturating_add(Duration::from_nanos(jitter)),
            rule: armed.rule.clone(),
            is_released: Arc::default(),
        };
        if !verdict.delay.is_zero() {
            delayed.retain(|(_, flag)| Arc::strong_count(flag) > 1);
            delayed.push((armed.id, Arc::clone(&verdict.is_released)));
        }
        // A spent rule still holds up requests that hang.
        if armed.rule.times != FOREVER {
            armed.rule.times -= 1;
            if armed.rule.times == 0 && armed.rule.action != FaultAction::Hang {
                rules.remove(hit);
            }
        }
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(verdict)
    }

    /// True while a request that this rule has hit is to hang.
    pub fn hangs(&self, id: u64) -> bool {
        let age = rt::now().saturating_sub(self.began);
        let state = self.state();
        state
            .rules
            .iter()
            .any(|armed| armed.id == id && armed.rule.action == FaultAction::Hang && armed.rule.counts_at(age))
    }

    /// A random number below `bound`, which isn't 0.
    pub fn random_below(&self, bound: u64) -> u64 {
        self.state().rng.below(bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_back_as_they_were_armed() {
        for text in [
            r#"{"op":"read","action":"fail","errno":5}"#,
            r#"{"op":"any","action":"hang","times":1,"end-ms":500,"start-ms":20}"#,
            r#"{"op":"write","action":"torn","errno":28,"offset":4096,"len":512,"bytes":1024,"after":3}"#,
            r#"{"op":"write","action":"misdirect","distance":512,"probability-percent":10,"delay-ms":1,"jitter-ms":7}"#,
        ] {
            let given: Map<String, Value> = serde_json::from_str(text).unwrap();
            let table = FaultTable::new(vec![FaultRule::from_options(&given).unwrap()], 0);
            assert_eq!(table.rules()[0].rule.to_options(), given);
        }
    }

    fn rule(text: &str) -> FaultRule {
        FaultRule::from_options(&serde_json::from_str(text).unwrap()).unwrap()
    }

    #[test]
    fn a_range_without_bytes_hits_nothing() {
        let table = FaultTable::new(vec![rule(r#"{"op":"write","offset":4096,"len":0}"#)], 0);
        assert!([0, 4096].iter().all(|offset| table.decide(FaultOp::Write, *offset, 16384, u64::MAX).is_none()));
    }

    #[test]
    fn a_rule_for_places_leaves_alone_what_has_none() {
        let hits = |text: &str| {
            let table = FaultTable::new(vec![rule(text)], 0);
            [(FaultOp::Flush, 0, u64::MAX), (FaultOp::Resize, 0, u64::MAX), (FaultOp::Write, 0, 512)]
                .map(|(op, offset, len)| table.decide(op, offset, len, u64::MAX).is_some())
        };
        assert_eq!(hits(r#"{"op":"any","offset":0,"len":512}"#), [false, false, true]);
        assert_eq!(hits(r#"{"op":"any"}"#), [true, true, true]);
        assert_eq!(hits(r#"{"op":"flush","offset":4096}"#), [true, false, false]);
        assert_eq!(hits(r#"{"op":"resize","offset":4096}"#), [false, true, false]);
    }

    #[test]
    fn requests_without_effect_do_not_spend_a_rule() {
        let hits = |text: &str| {
            let table = FaultTable::new(vec![rule(text)], 0);
            [FaultOp::Flush, FaultOp::Resize, FaultOp::Read, FaultOp::Write, FaultOp::Discard, FaultOp::WriteZeroes]
                .map(|op| table.decide(op, 0, 512, u64::MAX).is_some())
        };
        let of = |action: &str| hits(&format!(r#"{{"op":"any","action":"{action}","once":true}}"#));
        assert_eq!(of("corrupt"), [false, false, true, false, false, false]);
        assert_eq!(of("lose"), [true, false, false, false, false, false]);
        assert_eq!(of("short"), [false, false, true, false, false, false]);
        assert_eq!(of("misdirect"), [false, false, true, false, false, false]);
        assert_eq!(of("stuck"), [false, false, false, true, false, false]);
        let after = hits(r#"{"op":"any","action":"stuck","after":1}"#);
        assert_eq!(after, [false, false, false, false, true, true]);
        // A delay is an effect on all of them.
        let delayed = hits(r#"{"op":"any","action":"corrupt","times":2,"delay-ms":1}"#);
        assert_eq!(delayed, [true, true, false, false, false, false]);
    }

    #[test]
    fn lengths_without_effect_do_not_spend_a_rule() {
        let hits = |text: &str, requests: &[(u64, u64)]| {
            let table = FaultTable::new(vec![rule(text)], 0);
            let hit = |&(offset, len): &(u64, u64)| table.decide(FaultOp::Write, offset, len, 65536).is_some();
            requests.iter().map(hit).collect::<Vec<_>>()
        };
        let short =
            hits(r#"{"op":"write","action":"short","bytes":4096,"once":true}"#, &[(0, 4096), (0, 4608), (0, 8192)]);
        assert_eq!(short, [false, true, false]);
        // Half of a sector is no sector.
        assert_eq!(hits(r#"{"op":"write","action":"short","once":true}"#, &[(0, 0), (0, 512)]), [false, true]);
        let misdirect = hits(r#"{"op":"write","action":"misdirect","once":true}"#, &[(0, 65536), (0, 65024)]);
        assert_eq!(misdirect, [false, true]);
        assert_eq!(hits(r#"{"op":"write","action":"lose","once":true}"#, &[(0, 0), (0, 512)]), [false, true]);
        // It fails in any case, or waits.
        assert_eq!(hits(r#"{"op":"write","action":"torn","bytes":4096,"once":true}"#, &[(0, 512)]), [true]);
        assert_eq!(hits(r#"{"op":"write","action":"short","bytes":4096,"delay-ms":1}"#, &[(0, 512)]), [true]);
    }

    #[test]
    fn a_request_that_misses_its_place_goes_to_another_one() {
        let astray = |offset, distance, size| {
            FaultRule { distance, ..FaultRule::always(FaultOp::Write, Errno::EIO) }.astray(offset, 1024, size)
        };
        assert_eq!([astray(0, 1024, 5120), astray(4096, 1024, 5120)], [1024, 3072]);
        // The disk is shorter than the distance.
        assert_eq!([astray(0, 8192, 5120), astray(1024, 8192, 5120), astray(3072, 8192, 5120)], [4096, 4096, 0]);
        assert_eq!(astray(0, u64::MAX, 5120), 4096);
        // A request for the whole disk has no other place.
        assert_eq!(astray(0, 1, 1024), 0);
    }

    #[test]
    fn a_rule_that_is_spent_is_read_back_as_it_was() {
        let rules = vec![rule(r#"{"op":"read","action":"hang","times":1,"probability-percent":99}"#)];
        let table = FaultTable::new(rules, 3);
        while table.decide(FaultOp::Read, 0, 1, u64::MAX).is_none() {}
        assert!(table.decide(FaultOp::Read, 0, 1, u64::MAX).is_none() && table.hangs(1));
        let armed = table.rules()[0].rule.to_options();
        assert_eq!(
            armed,
            *json!({"op": "read", "action": "hang", "times": 0, "probability-percent": 99}).as_object().unwrap()
        );
    }

    #[test]
    fn rules_that_can_do_nothing_say_why() {
        for (text, why) in [
            (r#"{"op":"write","offset":4096,"len":0}"#, Some("'len'")),
            (r#"{"op":"read","offset":18446744073709551615}"#, Some("'offset'")),
            (r#"{"op":"read","start-ms":5,"end-ms":5}"#, Some("'end-ms'")),
            (r#"{"op":"read","action":"delay","delay-ms":86400001}"#, Some("'delay-ms'")),
            (r#"{"op":"read","action":"delay","jitter-ms":4294967295}"#, Some("'delay-ms'")),
            (r#"{"op":"read","action":"stuck"}"#, Some("'stuck'")),
            (r#"{"op":"read","action":"hang","bytes":512}"#, Some("'bytes'")),
            (r#"{"op":"read","action":"lose"}"#, Some("'lose'")),
            (r#"{"op":"write","action":"corrupt"}"#, Some("'corrupt'")),
            (r#"{"op":"flush","action":"misdirect"}"#, Some("no place")),
            (r#"{"op":"any","action":"stuck"}"#, None),
            (r#"{"op":"any","action":"corrupt","end-ms":1}"#, None),
            (r#"{"op":"read","action":"delay","delay-ms":86400000}"#, None),
        ] {
            let said = rule(text).no_effect();
            assert_eq!(said.is_some(), why.is_some(), "{text}: {said:?}");
            assert!(said.zip(why).is_none_or(|(said, why)| said.contains(why)), "{text}: {said:?}");
        }
    }

    #[test]
    fn a_delay_ends_with_its_rule() {
        let table = FaultTable::new(Vec::new(), 0);
        let arm = |text| table.arm(rule(text), None).unwrap();
        let decide = || table.decide(FaultOp::Read, 0, 1, u64::MAX).unwrap();
        let first = arm(r#"{"op":"read","action":"delay","delay-ms":60000,"times":1}"#);
        let one = decide();
        let second = arm(r#"{"op":"read","action":"delay","delay-ms":60000}"#);
        let (two, three) = (decide(), decide());
        let released = |verdict: &RequestFault| verdict.is_released.load(Ordering::Acquire);
        assert_eq!((released(&one), released(&two)), (false, false));
        // The rule is spent, and its request waits still.
        assert!(table.disarm(first) && released(&one) && !released(&two));
        assert!(!table.disarm(first), "nothing waits by it any more");
        drop(three);
        assert!(table.disarm(second) && released(&two));
        arm(r#"{"op":"read","action":"delay","delay-ms":60000,"times":1}"#);
        let four = decide();
        table.disarm_all();
        assert!(released(&four));
    }

    #[test]
    fn one_seed_is_one_run() {
        let run = |seed| {
            let rule = FaultRule { probability_percent: 30, ..FaultRule::always(FaultOp::Any, Errno::EIO) };
            let table = FaultTable::new(vec![rule], seed);
            (0..1000).map(|_| table.decide(FaultOp::Read, 0, 1, u64::MAX).is_some()).collect::<Vec<bool>>()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
        let hits = run(7).into_iter().filter(|hit| *hit).count();
        assert!((200..400).contains(&hits), "{hits}");
    }

    #[test]
    fn rules_are_changed_in_their_place_and_count_in_their_time() {
        let table = FaultTable::new(Vec::new(), 0);
        let first = table.arm(FaultRule::always(FaultOp::Read, Errno::EIO), None).unwrap();
        let second = table.arm(FaultRule::once(FaultOp::Any, Errno::ENOSPC), None).unwrap();
        let decide = |op| table.decide(op, 0, 1, u64::MAX).map(|verdict| verdict.id);
        assert_eq!(
            (decide(FaultOp::Read), decide(FaultOp::Write), decide(FaultOp::Write)),
            (Some(first), Some(second), None)
        );
        let later = FaultRule { start: Duration::from_secs(3600), ..FaultRule::always(FaultOp::Read, Errno::EIO) };
        assert_eq!(table.arm(later.clone(), Some(first)), Some(first));
        assert_eq!(decide(FaultOp::Read), None);
        let over = FaultRule { start: Duration::ZERO, end: Some(Duration::ZERO), ..later };
        assert_eq!((table.arm(over, Some(first)), decide(FaultOp::Read)), (Some(first), None));
        assert_eq!(table.arm(FaultRule::always(FaultOp::Read, Errno::EIO), Some(99)), None);
        assert!(table.disarm(first) && !table.disarm(first) && table.rules().is_empty());
        assert_eq!(table.hits(), 2);
    }
}
