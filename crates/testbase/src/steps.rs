// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Steps of one change that fail in turn.

use std::cell::Cell;

thread_local! {
    /// Steps that succeed before the others fail.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Has this many steps of the thread succeed, and all behind them fail. `None`: no step fails.
pub fn let_pass(steps: Option<usize>) {
    LEFT.set(steps);
}

/// Counts a step.
///
/// # Errors
/// That of `error`, where the step is to fail.
pub fn fail_in_turn<E>(error: impl FnOnce() -> E) -> Result<(), E> {
    match LEFT.get() {
        Some(0) => Err(error()),
        left => {
            LEFT.set(left.map(|left| left - 1));
            Ok(())
        }
    }
}
