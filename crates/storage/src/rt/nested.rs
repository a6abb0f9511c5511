// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Futures within futures. A request of a node polls the request of the node below it. A chain of 200 images would need
//! more stack than a thread has. So nested futures count the polls on the stack of their thread. Where there are many,
//! the next future goes on as a task of its own, whose polls begin at the executor.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// This many nested futures are polled on one stack.
const MOST_NESTED: u32 = 8;

thread_local! {
    /// Nested futures whose polls are on the stack.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// True where the next nested future goes on as a task of its own: see [`super::spawn`].
pub fn is_deep() -> bool {
    DEPTH.get() >= MOST_NESTED
}

/// A future in a box that is polled by another one.
pub fn nested<'a, T>(future: impl Future<Output = T> + 'a) -> Pin<Box<dyn Future<Output = T> + 'a>> {
    Box::pin(Nested { future })
}

struct Nested<F> {
    future: F,
}

impl<F: Future> Future for Nested<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let _level = Level::enter();
        // SAFETY: the field is pinned with its struct: nothing moves it out, and the struct has no `Drop` and is `Unpin` only where
        // the field is.
        let future = unsafe { self.map_unchecked_mut(|nested| &mut nested.future) };
        future.poll(context)
    }
}

/// A poll on the stack; it ends also by a panic.
struct Level;

impl Level {
    fn enter() -> Level {
        DEPTH.set(DEPTH.get() + 1);
        Level
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt;
    use std::rc::Rc;

    /// Goes down `levels`, and notes the depth of the deepest stack.
    fn down(levels: u32, deepest: Rc<Cell<u32>>) -> Pin<Box<dyn Future<Output = u32>>> {
        let below = async move {
            deepest.set(deepest.get().max(DEPTH.get()));
            rt::yield_now().await;
            if levels == 0 { 0 } else { down(levels - 1, deepest).await + 1 }
        };
        if is_deep() { Box::pin(rt::spawn(below)) } else { nested(below) }
    }

    #[test]
    fn deep_futures_go_on_as_tasks() {
        let deepest = Rc::new(Cell::new(0));
        assert_eq!(rt::block_on(down(1000, Rc::clone(&deepest))), 1000);
        assert_eq!((deepest.get(), DEPTH.get()), (MOST_NESTED, 0));
    }

    #[test]
    fn a_panic_leaves_no_depth() {
        let panicking = std::panic::catch_unwind(|| rt::block_on(nested(async { panic!("on purpose") })));
        assert!(panicking.is_err());
        assert_eq!(DEPTH.get(), 0);
    }
}
