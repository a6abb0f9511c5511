// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The course of a job whose copying meets an error.

use crate::JobHandle;
use cowshed_image::filters::CopyFailure;
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::time::Duration;

/// Wait before an ignored operation is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// The end that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The source: reading.
    Read,
    /// The target: writing.
    Write,
}

/// One piece that could not be copied.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The end that failed.
    pub side: Side,
    /// The reason of the failure.
    pub error: Error,
}

impl Failure {
    /// Reading failed.
    pub fn read(error: Error) -> Failure {
        Failure { side: Side::Read, error }
    }

    /// Writing failed.
    pub fn write(error: Error) -> Failure {
        Failure { side: Side::Write, error }
    }
}

impl From<CopyFailure> for Failure {
    fn from(failure: CopyFailure) -> Failure {
        let side = if failure.writing { Side::Write } else { Side::Read };
        Failure { side, error: failure.error }
    }
}

/// QEMU's `BlockdevOnError`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The job fails.
    #[default]
    Report,
    /// Try again, or leave it out, by the kind of job.
    Ignore,
    /// Pause where there is no space, else fail.
    Enospc,
    /// Pause; a resume tries again.
    Stop,
}

impl OnError {
    /// From QEMU's spelling; `auto` is `enospc`.
    pub fn parse(text: &str) -> Option<OnError> {
        Some(match text {
            "report" => OnError::Report,
            "ignore" => OnError::Ignore,
            "enospc" | "auto" => OnError::Enospc,
            "stop" => OnError::Stop,
            _ => return None,
        })
    }

    /// The action for this error.
    pub fn action(self, error: &Error) -> ErrorAction {
        match self {
            OnError::Report => ErrorAction::Report,
            OnError::Ignore => ErrorAction::Ignore,
            OnError::Enospc if error.kind() == ErrorKind::NoSpace => ErrorAction::Stop,
            OnError::Enospc => ErrorAction::Report,
            OnError::Stop => ErrorAction::Stop,
        }
    }
}

/// The reaction to one error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorAction {
    /// The job fails with it.
    Report,
    /// It goes on.
    Ignore,
    /// It pauses.
    Stop,
}

/// Decides about the action of a job after an error.
pub trait Judge {
    /// Decides on one error, and reports it to its listeners.
    fn judge(&self, failure: &Failure) -> ErrorAction;
}

/// Every error ends the job.
#[derive(Clone, Copy, Debug, Default)]
pub struct Strict;

impl Judge for Strict {
    fn judge(&self, _: &Failure) -> ErrorAction {
        ErrorAction::Report
    }
}

/// Asks the judge: an error ends the job, otherwise the same is to be tried again. A paused job waits at its next pause
/// point.
pub(crate) async fn settle(failure: Failure, judge: &dyn Judge, job: &JobHandle) -> Result<()> {
    match judge.judge(&failure) {
        ErrorAction::Report => Err(failure.error),
        ErrorAction::Ignore => {
            rt::sleep(RETRY).await;
            Ok(())
        }
        ErrorAction::Stop => {
            job.pause();
            Ok(())
        }
    }
}
