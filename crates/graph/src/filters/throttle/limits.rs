// SPDX-License-Identifier: Apache-2.0 OR MIT
//! I/O limits by their names. Options and throttle groups have `iops-total-max`, with prefixes (`throttling.`, `x-`).
//! QMP's `block_set_io_throttle` has `iops_max`.

use cowshed_types::{Error, Result};
use serde_json::{Map, Value};

/// Largest rate or burst, in bytes or operations per second.
pub const MAX_RATE: u64 = 1_000_000_000_000_000;

/// A limit of one kind: a leaky bucket that leaks at the base rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Base rate in units per second; 0 is no limit.
    pub average: u64,
    /// Burst rate in units per second; 0 is no burst.
    pub maximum: u64,
    /// The longest burst at the full burst rate, in seconds.
    pub length_seconds: u64,
}

impl Default for Limit {
    fn default() -> Self {
        Limit { average: 0, maximum: 0, length_seconds: 1 }
    }
}

/// The limited quantity, as index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Limited {
    BpsTotal,
    BpsRead,
    BpsWrite,
    IopsTotal,
    IopsRead,
    IopsWrite,
}

/// Names in options and in QMP.
const NAMES: [(&str, &str); 6] = [
    ("bps-total", "bps"),
    ("bps-read", "bps_rd"),
    ("bps-write", "bps_wr"),
    ("iops-total", "iops"),
    ("iops-read", "iops_rd"),
    ("iops-write", "iops_wr"),
];

/// The part of a limit that a name sets.
#[derive(Clone, Copy)]
enum Part {
    Average,
    Maximum,
    Length,
}

const PARTS: [(Part, &str, &str); 3] =
    [(Part::Average, "", ""), (Part::Maximum, "-max", "_max"), (Part::Length, "-max-length", "_max_length")];

/// The limits of a throttle group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// By [`Limited`] as index.
    pub limits: [Limit; 6],
    /// A larger request counts as one operation for each of this many bytes; 0: every request is one.
    pub iops_size: u64,
}

impl Limits {
    /// No limits.
    pub fn new() -> Limits {
        Limits::default()
    }

    /// The limit of a kind.
    pub fn limit(&self, kind: Limited) -> &Limit {
        &self.limits[kind as usize]
    }

    /// True when something is limited.
    pub fn is_limited(&self) -> bool {
        self.limits.iter().any(|limit| limit.average > 0)
    }

    /// The names in options, without prefix: `bps-total`, `bps-total-max`, `bps-total-max-length`, …, `iops-size`.
    pub fn option_names() -> impl Iterator<Item = String> {
        let of =
            |(name, _): (&'static str, &'static str)| PARTS.iter().map(move |(_, part, _)| format!("{name}{part}"));
        NAMES.into_iter().flat_map(of).chain(std::iter::once("iops-size".to_owned()))
    }

    /// The names in QMP: `bps`, `bps_max`, `bps_max_length`, …, `iops_size`.
    pub fn qmp_names() -> impl Iterator<Item = String> {
        let of =
            |(_, name): (&'static str, &'static str)| PARTS.iter().map(move |(_, _, part)| format!("{name}{part}"));
        NAMES.into_iter().flat_map(of).chain(std::iter::once("iops_size".to_owned()))
    }

    /// Where the value with this name is, in any spelling: `iops-total-max`, `throttling.iops-total-max`,
    /// `x-iops-total-max`, `iops_max`.
    fn value_mut(&mut self, name: &str) -> Option<&mut u64> {
        let name = name.strip_prefix("throttling.").or_else(|| name.strip_prefix("x-")).unwrap_or(name);
        if name == "iops-size" || name == "iops_size" {
            return Some(&mut self.iops_size);
        }
        for (index, (option, qmp)) in NAMES.into_iter().enumerate() {
            for (part, option_part, qmp_part) in PARTS {
                let is_option = name.strip_prefix(option) == Some(option_part);
                if is_option || name.strip_prefix(qmp) == Some(qmp_part) {
                    let limit = &mut self.limits[index];
                    return Some(match part {
                        Part::Average => &mut limit.average,
                        Part::Maximum => &mut limit.maximum,
                        Part::Length => &mut limit.length_seconds,
                    });
                }
            }
        }
        None
    }

    /// True when `name` is the name of a limit, in any spelling.
    pub fn is_name(name: &str) -> bool {
        Limits::default().value_mut(name).is_some()
    }

    /// The option's name of a limit that is given in any spelling: `iops-total` for `throttling.iops-total`, `iops`, ….
    pub fn option_name(name: &str) -> Option<String> {
        let mut marked = Limits::new();
        *marked.value_mut(name)? = u64::MAX;
        Limits::option_names().find(|option| marked.get(option) == Some(u64::MAX))
    }

    /// Sets a value by its name in any spelling. Call [`Limits::check`] when all are set.
    pub fn set(&mut self, name: &str, value: u64) -> Result<()> {
        match self.value_mut(name) {
            Some(place) => {
                *place = value;
                Ok(())
            }
            None => Err(Error::invalid_argument(format!("Parameter '{name}' is unexpected"))),
        }
    }

    /// A value by its name in any spelling.
    pub fn get(&self, name: &str) -> Option<u64> {
        let mut copy = *self;
        copy.value_mut(name).map(|value| *value)
    }

    /// From an object whose keys are names of limits (in any spelling) and whose values are numbers, or texts of
    /// numbers with size suffixes. Checked.
    pub fn from_json(map: &Map<String, Value>) -> Result<Limits> {
        let mut limits = Limits::new();
        for (name, value) in map {
            if name.starts_with("x-") && value.as_i64().is_some_and(|value| value < 0) {
                return Err(Error::invalid_argument("Property values cannot be negative"));
            }
            check_length(name, value)?;
            let number = match value {
                // A negative number is too large, as in QEMU, where there is a largest one.
                Value::Number(number) => number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned)),
                Value::String(text) => crate::options::parse_size(text).ok(),
                _ => None,
            };
            let wrong = || Error::invalid_argument(format!("Parameter '{name}' expects integer")).value(value);
            limits.set(name, number.ok_or_else(wrong)?)?;
        }
        limits.check()?;
        Ok(limits)
    }

    /// As an object with the names of options (the property `limits` of a throttle group).
    pub fn to_json(&self) -> Map<String, Value> {
        let value = |name: &str| Value::from(self.get(name).unwrap_or_default().cast_signed());
        Limits::option_names().map(|name| (name.clone(), value(&name))).collect()
    }

    /// Refuses contradictory limits, with QEMU's reasons.
    pub fn check(&self) -> Result<()> {
        let refuse = |message: &str| Err(Error::invalid_argument(message));
        for total in [0, 3] {
            let [all, read, write] = [0, 1, 2].map(|offset| self.limits[total + offset]);
            if (all.average > 0 && (read.average > 0 || write.average > 0))
                || (all.maximum > 0 && (read.maximum > 0 || write.maximum > 0))
            {
                return refuse("bps/iops/max total values and read/write values cannot be used at the same time");
            }
        }
        if self.iops_size > 0 && self.limits[3..].iter().all(|limit| limit.average == 0) {
            return refuse("iops size requires an iops value to be set");
        }
        self.limits.iter().try_for_each(check_limit)
    }
}

/// Refuses a length of bursts that 32 bits can't hold.
fn check_length(name: &str, value: &Value) -> Result<()> {
    let is_length = name.ends_with("-max-length");
    if !is_length || value.as_u64().is_none_or(|length| u32::try_from(length).is_ok()) {
        return Ok(());
    }
    // The sentence of QEMU's properties lacks a blank.
    let words = if name.starts_with("x-") { "in therange" } else { "in the range" };
    Err(Error::invalid_argument(format!("{name} value must be {words} [0, {}]", u32::MAX)))
}

fn check_limit(limit: &Limit) -> Result<()> {
    let refuse = |message: String| Err(Error::invalid_argument(message));
    let Limit { average, maximum, length_seconds } = *limit;
    if average > MAX_RATE || maximum > MAX_RATE {
        return refuse(format!("bps/iops/max values must be within [0, {MAX_RATE}]"));
    }
    if length_seconds == 0 {
        return refuse("the burst length cannot be 0".into());
    }
    if length_seconds > 1 && maximum == 0 {
        return refuse("burst length set without burst rate".into());
    }
    if maximum > 0 && length_seconds > MAX_RATE / maximum {
        return refuse("burst length too high for this burst rate".into());
    }
    if maximum > 0 && average == 0 {
        return refuse("bps_max/iops_max require corresponding bps/iops values".into());
    }
    if maximum > 0 && maximum < average {
        return refuse("bps_max/iops_max cannot be lower than bps/iops".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<Limits> {
        Limits::from_json(value.as_object().unwrap())
    }

    #[test]
    fn every_spelling_means_the_same() {
        let option = parse(json!({"iops-total": 100, "iops-total-max": 2000, "iops-total-max-length": 60})).unwrap();
        let dotted = json!({"throttling.iops-total": 100, "throttling.iops-total-max": "2000",
                            "throttling.iops-total-max-length": 60});
        let group = json!({"x-iops-total": 100, "x-iops-total-max": 2000, "x-iops-total-max-length": 60});
        let qmp = json!({"iops": 100, "iops_max": 2000, "iops_max_length": 60, "iops_rd": 0, "iops_wr": 0, "bps": 0,
                         "bps_rd": 0, "bps_wr": 0});
        for other in [dotted, group, qmp] {
            assert_eq!(parse(other).unwrap(), option);
        }
        assert_eq!(*option.limit(Limited::IopsTotal), Limit { average: 100, maximum: 2000, length_seconds: 60 });
        assert_eq!(Limits::from_json(&option.to_json()).unwrap(), option);
        assert_eq!((Limits::option_names().count(), Limits::qmp_names().count()), (19, 19));
        assert!(Limits::option_names().chain(Limits::qmp_names()).all(|name| Limits::is_name(&name)));
        for wrong in ["iops-totals", "iops_total", "iops-", "max", "iops_rd-max", "", "x-", "bps-total_max"] {
            assert!(!Limits::is_name(wrong), "{wrong}");
        }
    }

    #[test]
    fn contradictions_are_refused_with_their_reason() {
        for (limits, reason) in [
            (
                json!({"x-iops-total": 100, "x-iops-read": 5}),
                "bps/iops/max total values and read/write values cannot be used at the same time",
            ),
            (
                json!({"bps": 10, "bps_wr": 1}),
                "bps/iops/max total values and read/write values cannot be used at the same time",
            ),
            (
                json!({"x-bps-total": 100, "x-bps-read-max": 5}),
                "bps_max/iops_max require corresponding bps/iops values",
            ),
            (json!({"x-iops-total-max": 5}), "bps_max/iops_max require corresponding bps/iops values"),
            (json!({"x-iops-total": 100, "x-iops-total-max": 5}), "bps_max/iops_max cannot be lower than bps/iops"),
            (json!({"x-iops-total": 100, "x-iops-total-max-length": 5}), "burst length set without burst rate"),
            (
                json!({"x-iops-total": 100, "x-iops-total-max": 500, "x-iops-total-max-length": 0}),
                "the burst length cannot be 0",
            ),
            (json!({"x-iops-size": 4096}), "iops size requires an iops value to be set"),
            (
                json!({"x-iops-total": 1_000_000_000_000_001u64}),
                "bps/iops/max values must be within [0, 1000000000000000]",
            ),
            (
                json!({"iops": 10, "iops_max": 1_000_000_000_000_000u64, "iops_max_length": 2}),
                "burst length too high for this burst rate",
            ),
            (json!({"x-iops-total": -1}), "Property values cannot be negative"),
            (json!({"x-iops-total": "abc"}), "Parameter 'x-iops-total' expects integer"),
            (json!({"x-iops-foo": 1}), "Parameter 'x-iops-foo' is unexpected"),
        ] {
            let error = parse(limits.clone()).unwrap_err().to_string();
            assert!(error.contains(reason), "{limits}: {error}");
        }
        assert!(parse(json!({"iops_rd": 5, "iops_wr": 7, "bps": 1, "iops_size": 512})).unwrap().is_limited());
        assert!(!Limits::new().is_limited());
    }
}
