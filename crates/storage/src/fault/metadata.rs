// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tells the rules which operations are a format's own: they are no reads and writes of guest data.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

thread_local! {
    static IS_METADATA: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` so that its operations on files with faults cause neither [`super::Event::ReadAio`] nor
/// [`super::Event::WriteAio`].
pub fn as_metadata<F: Future>(work: F) -> AsMetadata<F> {
    AsMetadata(Box::pin(work))
}

/// See [`as_metadata`].
pub struct AsMetadata<F>(Pin<Box<F>>);

impl<F: Future> Future for AsMetadata<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let _scope = Scope(IS_METADATA.replace(true));
        self.0.as_mut().poll(cx)
    }
}

/// Restores the former state, also after a panic.
struct Scope(bool);

impl Drop for Scope {
    fn drop(&mut self) {
        IS_METADATA.set(self.0);
    }
}

pub(super) fn is_metadata() -> bool {
    IS_METADATA.get()
}
