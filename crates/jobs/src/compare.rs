// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares what two images read as.

use crate::{ImageSpec, JobHandle};
use cowshed_block::Result;

/// What to compare.
#[derive(Clone, Debug)]
pub struct CompareOptions {
    /// One image.
    pub first: ImageSpec,
    /// The other.
    pub second: ImageSpec,
    /// `-s`: other sizes or other allocation count as different.
    pub strict: bool,
}

/// The verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Same bytes (the tail of the longer one is zero).
    Identical,
    /// The first difference.
    Mismatch {
        /// Offset of the first differing byte.
        offset: u64,
    },
    /// Strict mode: the sizes differ.
    SizeMismatch,
    /// Strict mode: allocated in one, not in the other.
    AllocationMismatch {
        /// Offset of the run.
        offset: u64,
    },
}

/// Verdict and remarks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompareOutcome {
    /// The verdict.
    pub verdict: Verdict,
    /// The sizes differ, but not in strict mode: worth a warning.
    pub size_warning: bool,
}

impl CompareOutcome {
    /// qemu-img's text, line by line (without its "qemu-img: " before warnings).
    pub fn messages(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.size_warning {
            lines.push("Warning: Image size mismatch!".to_owned());
        }
        lines.push(match self.verdict {
            Verdict::Identical => "Images are identical.".to_owned(),
            Verdict::Mismatch { offset } => format!("Content mismatch at offset {offset}!"),
            Verdict::SizeMismatch => "Strict mode: Image size mismatch!".to_owned(),
            Verdict::AllocationMismatch { offset } => {
                format!("Strict mode: Offset {offset} block status mismatch!")
            }
        });
        lines
    }

    /// qemu-img's exit code: 0 identical, 1 different. (2 and more are errors.)
    pub fn exit_code(&self) -> i32 {
        i32::from(self.verdict != Verdict::Identical)
    }
}

/// Compares.
pub async fn run(options: &CompareOptions, job: &JobHandle) -> Result<CompareOutcome> {
    let _ = (options, job);
    todo!()
}
