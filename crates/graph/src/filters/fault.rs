// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Error injection: requests that match an armed rule fail with its errno.

use super::Filter;
use crate::node::{Below, Intent, Mapped, Node, Preallocation, Transfer, Work, ZeroFlags};
use crate::options::schemas::key;
use crate::options::{BlockdevOptions, DriverKind, DriverSchema, Key, KeyType, REQUIRED};
use cowshed_block::{Errno, Error, Result};
use cowshed_storage::IoBuf;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The driver and its keys.
pub(crate) const SCHEMA: DriverSchema =
    DriverSchema { name: "fault", kind: DriverKind::Filter, about: "fails chosen requests", keys: FAULT_KEYS };

const FAULT_KEYS: &[Key] = &[
    key("file", KeyType::Child, REQUIRED, "the node whose requests fail"),
    key("rules", KeyType::List(FAULT_RULE), "", "which requests fail"),
];

const FAULT_RULE: &[Key] = &[
    key("op", KeyType::Choice(FaultOp::NAMES), REQUIRED, "the kind of request"),
    key("errno", KeyType::Number(1, 4095), "5", "the error number"),
    key("offset", KeyType::Size, "0", "first byte of the range"),
    key("len", KeyType::Size, "up to the end", "length of the range"),
    key("after", KeyType::Number(0, u64::MAX), "0", "so many matching requests pass first"),
    key("once", KeyType::Bool, "off", "fail only once"),
];

/// Which requests a [`FaultRule`] is for.
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
}

impl FaultOp {
    /// The spellings of the option.
    pub const NAMES: &'static [&'static str] = &["read", "write", "write-zeroes", "discard", "flush", "resize"];

    /// From the option's spelling.
    pub fn parse(text: &str) -> Option<FaultOp> {
        Some(match text {
            "read" => FaultOp::Read,
            "write" => FaultOp::Write,
            "write-zeroes" => FaultOp::WriteZeroes,
            "discard" => FaultOp::Discard,
            "flush" => FaultOp::Flush,
            "resize" => FaultOp::Resize,
            _ => return None,
        })
    }
}

/// One rule: fails the requests that match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// The kind of request.
    pub op: FaultOp,
    /// The error of the request.
    pub errno: Errno,
    /// Only requests that touch these bytes; `None` for all. Flushes always match.
    pub range: Option<std::ops::Range<u64>>,
    /// So many matching requests pass first.
    pub after: u64,
    /// Disarmed after its first failure.
    pub once: bool,
}

impl FaultRule {
    /// Fails every request of a kind.
    pub fn always(op: FaultOp, errno: Errno) -> FaultRule {
        FaultRule { op, errno, range: None, after: 0, once: false }
    }

    /// Decides on one request, counting it. `true`: fail it.
    fn hit(&mut self, op: FaultOp, offset: u64, len: u64) -> bool {
        let touches = match &self.range {
            Some(range) if op != FaultOp::Flush => offset < range.end && offset.saturating_add(len) > range.start,
            _ => true,
        };
        if self.op != op || !touches {
            return false;
        }
        if self.after > 0 {
            self.after -= 1;
            return false;
        }
        true
    }
}

/// The filter. Without armed rules a request costs one load of an atomic more than without the filter.
pub struct Fault {
    below: Below,
    armed: AtomicBool,
    rules: Mutex<Vec<FaultRule>>,
}

impl Fault {
    pub(crate) fn new(below: Below, rules: Vec<FaultRule>) -> Fault {
        Fault { below, armed: AtomicBool::new(!rules.is_empty()), rules: Mutex::new(rules) }
    }

    /// Adds a rule; it counts from now on.
    pub fn arm(&self, rule: FaultRule) {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner).push(rule);
        self.armed.store(true, Ordering::Release);
    }

    /// Takes all rules away.
    pub fn disarm(&self) {
        self.armed.store(false, Ordering::Release);
        self.rules.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn check(&self, op: FaultOp, offset: u64, len: u64) -> Result<()> {
        if !self.armed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = rules.iter_mut().position(|rule| rule.hit(op, offset, len)) else { return Ok(()) };
        let rule = if rules[at].once { rules.remove(at) } else { rules[at].clone() };
        let error = Error::os(rule.errno, "injected error").offset(offset);
        Err(self.below.node().map_or(error.clone(), |child| error.file(child.filename())))
    }
}

impl Filter for Fault {
    fn name(&self) -> &'static str {
        "fault"
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
            match self.check(FaultOp::Read, offset, buf.len() as u64) {
                Ok(()) => self.below.read(offset, buf).await,
                Err(error) => (Err(error), buf),
            }
        })
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            match self.check(FaultOp::Write, offset, buf.len() as u64) {
                Ok(()) => self.below.write(offset, buf).await,
                Err(error) => (Err(error), buf),
            }
        })
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Box::pin(async move {
            for (offset, buf) in &clusters {
                self.check(FaultOp::Write, *offset, buf.len() as u64)?;
            }
            self.below.write_compressed(clusters).await
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            self.check(FaultOp::WriteZeroes, offset, len)?;
            self.below.write_zeroes(offset, len, flags).await
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            self.check(FaultOp::Discard, offset, len)?;
            self.below.discard(offset, len).await
        })
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(async move {
            self.check(FaultOp::Flush, 0, 0)?;
            self.below.flush().await
        })
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(async move {
            self.check(FaultOp::Resize, 0, u64::MAX)?;
            self.below.resize(size, preallocation).await
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
    rules.iter().filter_map(fault_rule).collect()
}

fn fault_rule(rule: &Value) -> Option<FaultRule> {
    let number = |key: &str| rule.get(key).and_then(Value::as_u64);
    let range = match (number("offset"), number("len")) {
        (None, None) => None,
        (offset, len) => {
            let start = offset.unwrap_or(0);
            Some(start..len.map_or(u64::MAX, |len| start.saturating_add(len)))
        }
    };
    Some(FaultRule {
        op: FaultOp::parse(rule.get("op")?.as_str()?)?,
        errno: number("errno").and_then(|errno| i32::try_from(errno).ok()).map_or(Errno::EIO, Errno),
        range,
        after: number("after").unwrap_or(0),
        once: rule.get("once").and_then(Value::as_bool).unwrap_or(false),
    })
}
