// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random requests of a guest: made from a seed, written as text, and made fewer while they still show a fault.

use crate::model::COMPRESSIBLE;
use cowshed_simulator::Rng;
use std::fmt;
use std::str::FromStr;

/// A request of a guest. Offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Op {
    /// Writes [`crate::model::fill`] with a stamp.
    Write {
        offset: u64,
        len: u64,
        stamp: u64,
    },
    Zero {
        offset: u64,
        len: u64,
        may_unmap: bool,
    },
    Discard {
        offset: u64,
        len: u64,
    },
    Read {
        offset: u64,
        len: u64,
    },
    /// Writes one cluster compressed; may be refused.
    Compressed {
        offset: u64,
        len: u64,
        stamp: u64,
    },
    /// Changes the size of the disk, with nothing else under way.
    Resize {
        bytes: u64,
    },
    Flush,
    /// Puts a new overlay on top of the image; for disks that can ([`crate::live`]).
    Snapshot,
}

impl Op {
    /// Gives the data of a write another stamp (below [`COMPRESSIBLE`]), so that no two writes of a longer run are
    /// alike.
    pub fn set_stamp(&mut self, number: u64) {
        match self {
            Op::Write { stamp, .. } => *stamp = number,
            Op::Compressed { stamp, .. } => *stamp = COMPRESSIBLE + number,
            _ => {}
        }
    }

    /// The bytes touched, as offset and length.
    pub fn range(&self) -> (u64, u64) {
        match *self {
            Op::Write { offset, len, .. }
            | Op::Zero { offset, len, .. }
            | Op::Discard { offset, len }
            | Op::Read { offset, len }
            | Op::Compressed { offset, len, .. } => (offset, len),
            Op::Resize { .. } | Op::Flush | Op::Snapshot => (0, 0),
        }
    }
}

/// A request and the stream that issues it: requests of one stream follow one another, streams run side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Number of the stream.
    pub stream: u8,
    /// The request.
    pub op: Op,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.stream)?;
        match self.op {
            Op::Write { offset, len, stamp } => write!(f, "write {offset:#x} {len:#x} {stamp}"),
            Op::Zero { offset, len, may_unmap: false } => write!(f, "zero {offset:#x} {len:#x}"),
            Op::Zero { offset, len, may_unmap: true } => write!(f, "unmap {offset:#x} {len:#x}"),
            Op::Discard { offset, len } => write!(f, "discard {offset:#x} {len:#x}"),
            Op::Read { offset, len } => write!(f, "read {offset:#x} {len:#x}"),
            Op::Compressed { offset, len, stamp } => write!(f, "compressed {offset:#x} {len:#x} {stamp}"),
            Op::Resize { bytes } => write!(f, "resize {bytes:#x}"),
            Op::Flush => write!(f, "flush"),
            Op::Snapshot => write!(f, "snapshot"),
        }
    }
}

impl FromStr for Step {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        let stream = words.next().and_then(|word| word.parse().ok()).ok_or_else(|| format!("no stream in {text:?}"))?;
        let verb = words.next().unwrap_or_default();
        let mut number = || {
            let word = words.next().unwrap_or_default();
            let value = match word.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16),
                None => word.parse(),
            };
            value.map_err(|_| format!("{word:?} in {text:?} is no number"))
        };
        let op = match verb {
            "write" => Op::Write { offset: number()?, len: number()?, stamp: number()? },
            "zero" => Op::Zero { offset: number()?, len: number()?, may_unmap: false },
            "unmap" => Op::Zero { offset: number()?, len: number()?, may_unmap: true },
            "discard" => Op::Discard { offset: number()?, len: number()? },
            "read" => Op::Read { offset: number()?, len: number()? },
            "compressed" => Op::Compressed { offset: number()?, len: number()?, stamp: number()? },
            "resize" => Op::Resize { bytes: number()? },
            "flush" => Op::Flush,
            "snapshot" => Op::Snapshot,
            _ => return Err(format!("{text:?} is no request")),
        };
        Ok(Step { stream, op })
    }
}

/// Reads requests as they are printed: one a line or separated by `;`.
///
/// # Errors
/// The request that can't be read.
pub fn parse_steps(text: &str) -> Result<Vec<Step>, String> {
    let lines = text.split(['\n', ';']).map(str::trim).filter(|line| !line.is_empty());
    lines.map(str::parse).collect()
}

/// The requests as [`parse_steps`] reads them.
pub fn print_steps(steps: &[Step]) -> String {
    steps.iter().map(Step::to_string).collect::<Vec<_>>().join("; ")
}

/// The requests to generate.
#[derive(Clone, Debug)]
pub struct OpGen {
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// Cluster size in bytes.
    pub cluster_bytes: u64,
    /// Subcluster size in bytes; the cluster size without subclusters.
    pub subcluster_bytes: u64,
    /// Offsets and lengths are multiples of this many bytes.
    pub align_bytes: u64,
    /// Longest request in bytes.
    pub max_bytes: u64,
    /// Number of streams.
    pub streams: u8,
    /// Zero writes and discards among the requests.
    pub zeroes: bool,
    /// Compressed clusters among the requests.
    pub compressed: bool,
    /// Changes of the size among the requests.
    pub resizes: bool,
    /// The number of requests for each flush.
    pub flush_every: u64,
}

impl OpGen {
    /// Requests for a disk with clusters of one size: four streams, sectors of 512 bytes.
    pub fn new(disk_bytes: u64, cluster_bytes: u64) -> Self {
        OpGen {
            disk_bytes,
            cluster_bytes,
            subcluster_bytes: cluster_bytes,
            align_bytes: 512,
            max_bytes: (cluster_bytes * 3).min(disk_bytes / 2),
            streams: 4,
            zeroes: true,
            compressed: false,
            resizes: false,
            flush_every: 12,
        }
    }

    /// `count` requests.
    pub fn steps(&self, seed: u64, count: usize) -> Vec<Step> {
        let mut rng = Rng::new(seed);
        let hot = self.hot_range(&mut rng);
        let mut now = self.clone();
        let steps = (0..count).map(|number| {
            if self.resizes && rng.chance(1, 20) {
                now.disk_bytes = self.new_size(&mut rng);
                return Step { stream: 0, op: Op::Resize { bytes: now.disk_bytes } };
            }
            now.step(&mut rng, &hot, number as u64 + 1)
        });
        steps.collect()
    }

    /// Somewhat smaller or larger than at the start, never so small that nothing fits.
    fn new_size(&self, rng: &mut Rng) -> u64 {
        let least = self.disk_bytes / 2;
        let bytes = least + rng.below(self.disk_bytes);
        let unit = if rng.chance(1, 2) { 512 } else { self.cluster_bytes };
        bytes.next_multiple_of(unit)
    }

    /// A few clusters that get most of the requests, so that requests meet.
    fn hot_range(&self, rng: &mut Rng) -> std::ops::Range<u64> {
        let len = (self.cluster_bytes * 4).min(self.disk_bytes);
        let start = rng.below((self.disk_bytes - len) / self.cluster_bytes + 1) * self.cluster_bytes;
        start..start + len
    }

    fn step(&self, rng: &mut Rng, hot: &std::ops::Range<u64>, stamp: u64) -> Step {
        let stream = rng.below(u64::from(self.streams)) as u8;
        if rng.chance(1, self.flush_every) {
            return Step { stream, op: Op::Flush };
        }
        let within = if rng.chance(1, 2) { hot.clone() } else { 0..self.disk_bytes };
        let (offset, len) = self.extent(rng, &within);
        if self.compressed && rng.chance(1, 8) {
            let offset = offset / self.cluster_bytes * self.cluster_bytes;
            let len = self.cluster_bytes.min(self.disk_bytes - offset);
            return Step { stream, op: Op::Compressed { offset, len, stamp: COMPRESSIBLE + stamp } };
        }
        let op = match rng.below(20) {
            0..=1 => Op::Read { offset, len },
            2..=3 if self.zeroes => Op::Zero { offset, len, may_unmap: false },
            4..=5 if self.zeroes => Op::Zero { offset, len, may_unmap: true },
            6..=7 if self.zeroes => Op::Discard { offset, len },
            _ => Op::Write { offset, len, stamp },
        };
        Step { stream, op }
    }

    /// A range, with a liking for the edges of clusters and subclusters.
    fn extent(&self, rng: &mut Rng, within: &std::ops::Range<u64>) -> (u64, u64) {
        let unit = match rng.below(4) {
            0 => self.cluster_bytes,
            1 => self.subcluster_bytes.max(self.align_bytes),
            _ => self.align_bytes,
        };
        let start = within.start + rng.below((within.end - within.start).div_ceil(unit)) * unit;
        let start = start.min(self.disk_bytes - self.align_bytes) / self.align_bytes * self.align_bytes;
        let len = match rng.below(6) {
            0 => self.cluster_bytes,
            1 => self.subcluster_bytes,
            2 => self.cluster_bytes - start % self.cluster_bytes,
            3 => self.cluster_bytes * 2 - start % self.cluster_bytes,
            4 => self.align_bytes,
            _ => 1 + rng.below(self.max_bytes),
        };
        let len = len.next_multiple_of(self.align_bytes).min(self.max_bytes.next_multiple_of(self.align_bytes));
        (start, len.min(self.disk_bytes - start))
    }
}

/// Takes requests away as long as `fails` is true: first halves, then ever smaller parts.
pub fn shrink(steps: &[Step], mut fails: impl FnMut(&[Step]) -> bool) -> Vec<Step> {
    let mut steps = steps.to_vec();
    let mut part = (steps.len() / 2).max(1);
    loop {
        let mut start = 0;
        let mut shorter = false;
        while start < steps.len() {
            let end = (start + part).min(steps.len());
            let candidate: Vec<Step> = [&steps[..start], &steps[end..]].concat();
            if fails(&candidate) {
                steps = candidate;
                shorter = true;
            } else {
                start = end;
            }
        }
        if part == 1 && !shorter {
            return steps;
        }
        part = (part / 2).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let steps = OpGen::new(1 << 20, 4096).steps(5, 200);
        assert_eq!(parse_steps(&print_steps(&steps)).unwrap(), steps);
        assert!(parse_steps("0 writ 1 2 3").unwrap_err().contains("writ"));
        let in_disk = |step: &Step| step.op.range().0 + step.op.range().1 <= 1 << 20;
        assert!(steps.iter().all(in_disk));
        let more = "0 snapshot; 1 resize 0x2000; 2 flush";
        assert_eq!(print_steps(&parse_steps(more).unwrap()), more);
        let all = OpGen { compressed: true, resizes: true, ..OpGen::new(1 << 20, 4096) }.steps(6, 200);
        assert_eq!(parse_steps(&print_steps(&all)).unwrap(), all);
        assert!(all.iter().any(|step| matches!(step.op, Op::Resize { .. })));
        assert!(all.iter().any(|step| matches!(step.op, Op::Compressed { .. })));
    }

    #[test]
    fn shrinking_keeps_what_matters() {
        let steps = OpGen::new(1 << 20, 4096).steps(6, 100);
        let (a, b) = (steps[17], steps[80]);
        let small = shrink(&steps, |steps| steps.contains(&a) && steps.contains(&b));
        assert_eq!(small, [a, b]);
    }
}
