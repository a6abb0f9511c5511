// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The steps that end the work of a job.

use cowshed_image::node::LocalFuture;
use cowshed_types::Result;

/// Ends the work of a job.
pub(crate) struct JobFinish {
    /// Makes the data durable on which a completed job counts, where [`JobFinish::end`] doesn't.
    pub(super) flush: Box<dyn FnOnce() -> LocalFuture<'static, Result<()>>>,
    /// Completes the job (`true`), or takes back its preparation.
    pub(super) end: Box<dyn FnOnce(bool) -> LocalFuture<'static, Result<()>>>,
}

impl JobFinish {
    /// The finish of a job whose end needs nothing before it.
    pub fn new(end: impl FnOnce(bool) -> LocalFuture<'static, Result<()>> + 'static) -> JobFinish {
        JobFinish { flush: Box::new(|| Box::pin(async { Ok(()) })), end: Box::new(end) }
    }

    /// The job completes only behind this flush.
    pub(super) fn behind(self, flush: impl FnOnce() -> LocalFuture<'static, Result<()>> + 'static) -> JobFinish {
        JobFinish { flush: Box::new(flush), ..self }
    }
}
