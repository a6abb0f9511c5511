// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The faults of a simulated machine, and their moments.

use cowshed_storage::rng::Rng;
use cowshed_types::Errno;
use std::ops::Range;
use std::time::Duration;

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum OpKind {
    Read,
    Write,
    Sync,
    PunchHole,
    ZeroRange,
    Allocate,
    SetLen,
    NextData,
    CopyRange,
}

/// The effect on an operation that a [`Fault`] has chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It fails and nothing of it happens. A failed sync drops the dirty pages: later ones succeed without them. A sync
    /// that a signal interrupts (`EINTR`) drops nothing.
    Fail(Errno),
    /// A sync that reports success and makes nothing durable: a disk that lies. Other operations are not changed.
    Lie,
    /// A write, of which some random sectors are written before it fails; an allocation that fails after a random part.
    Torn(Errno),
    /// A read or write that moves only this many bytes (at least one sector in direct mode) and reports that.
    Short(u64),
    /// It is not even looked at before this much (virtual) time has passed.
    Delay(Duration),
}

/// A rule: the operations that it chooses, and its effect on them.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Only this file.
    pub file: Option<String>,
    /// Only this kind.
    pub kind: Option<OpKind>,
    /// Only operations that touch a byte of this range. Operations without a range never do.
    pub range: Option<Range<u64>>,
    /// The number of matching operations that pass unharmed first.
    pub skip: u64,
    /// The number of operations that are hit then.
    pub times: u64,
    /// In this many of 1000 cases.
    pub per_mille: u64,
    /// The effect on the operation.
    pub effect: Effect,
}

impl Fault {
    /// A rule that hits the first operation, whatever it is.
    pub fn new(effect: Effect) -> Self {
        Fault { file: None, kind: None, range: None, skip: 0, times: 1, per_mille: 1000, effect }
    }

    /// Only operations of this kind.
    #[must_use]
    pub fn kind(mut self, kind: OpKind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Only operations on this file.
    #[must_use]
    pub fn file(mut self, name: &str) -> Self {
        self.file = Some(name.to_owned());
        self
    }

    /// Only operations that touch a byte of `range`.
    #[must_use]
    pub fn range(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// Lets `skip` matching operations pass first.
    #[must_use]
    pub fn skip(mut self, skip: u64) -> Self {
        self.skip = skip;
        self
    }

    /// Hits `times` operations (`u64::MAX`: all).
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    /// Hits in `per_mille` of 1000 cases.
    #[must_use]
    pub fn per_mille(mut self, per_mille: u64) -> Self {
        self.per_mille = per_mille;
        self
    }

    fn matches(&self, file: &str, kind: OpKind, range: &Range<u64>) -> bool {
        self.file.as_deref().is_none_or(|name| name == file)
            && self.kind.is_none_or(|wanted| wanted == kind)
            && self.range.as_ref().is_none_or(|wanted| range.start < wanted.end && wanted.start < range.end)
    }
}

/// The rules of a world. The first that hits decides.
#[derive(Clone, Debug, Default)]
pub(crate) struct FaultPlan {
    pub rules: Vec<Fault>,
    pub hits: u64,
}

impl FaultPlan {
    pub fn decide(&mut self, rng: &mut Rng, file: &str, kind: OpKind, range: &Range<u64>) -> Option<Effect> {
        for rule in &mut self.rules {
            if rule.times == 0 || !rule.matches(file, kind, range) {
                continue;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
                continue;
            }
            if rule.per_mille < 1000 && !rng.chance(rule.per_mille, 1000) {
                continue;
            }
            rule.times -= 1;
            self.hits += 1;
            return Some(rule.effect);
        }
        None
    }
}
