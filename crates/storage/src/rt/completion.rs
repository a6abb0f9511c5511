// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Futures that run to their end, also when their callers drop them.
//!
//! The kernel can't take back an operation that it has begun. A request that changes something therefore can't stop
//! half-way. It must keep the protection of the operation (pins, range locks, its count in a drain) until that ends. It
//! must finish or undo its change. A [`Completion`] that is dropped hands the request to the executor, which runs it to
//! its end.

use super::executor::{self, LocalState};
use super::{Obligation, with_current};
use cowshed_types::slip;
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

/// Makes a future that runs to its end once it was polled. A drop before the first poll drops `future`, which has done nothing
/// then. A later drop leaves `future` to the executor that polled it; [`super::block_on`] doesn't return before `future` ends.
pub fn to_completion<F: Future<Output: 'static> + 'static>(future: F) -> Completion<F> {
    Completion { future: Some(Box::pin(future)), home: Home::None, owner: Some(()) }
}

/// As [`to_completion`]. When the future is left to the executor, `owner` hears of it, and its guard lives until the
/// end.
pub fn to_completion_of<F: Future<Output: 'static> + 'static, O: Owner>(owner: O, future: F) -> Completion<F, O> {
    Completion { future: Some(Box::pin(future)), home: Home::None, owner: Some(owner) }
}

/// See [`to_completion_of`].
pub trait Owner {
    /// Lives until the end of a future that was left to its executor.
    type Guard: 'static;

    /// A future is left to its executor.
    fn leave(self) -> Self::Guard;
}

impl Owner for () {
    type Guard = ();

    fn leave(self) {}
}

/// A future from [`to_completion`].
#[must_use = "futures do nothing unless they are polled"]
pub struct Completion<F: Future<Output: 'static> + 'static, O: Owner = ()> {
    /// `None` after the end, and during a poll: a panic must not leave a future here that would be polled again.
    future: Option<Pin<Box<F>>>,
    home: Home,
    /// `None` once it has heard of it.
    owner: Option<O>,
}

// Only the contents of the box are pinned.
impl<F: Future<Output: 'static> + 'static, O: Owner> Unpin for Completion<F, O> {}

/// The executor whose wakers and ring the future uses.
enum Home {
    /// The future was not polled, or did not have to wait.
    None,
    Executor(Weak<LocalState>),
    /// An executor that isn't ours. The future uses no ring.
    Foreign,
}

impl<F: Future<Output: 'static> + 'static, O: Owner> Future for Completion<F, O> {
    type Output = F::Output;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Some(mut future) = self.future.take() else { panic!("a future was polled after its end") };
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(output),
            Poll::Pending => {
                self.future = Some(future);
                if let Home::None = self.home {
                    self.home = with_current(|local| local.map_or(Home::Foreign, |x| Home::Executor(Rc::downgrade(x))));
                }
                Poll::Pending
            }
        }
    }
}

impl<F: Future<Output: 'static> + 'static, O: Owner> Drop for Completion<F, O> {
    #[inline]
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            hand_over(future, &self.home, self.owner.take());
        }
    }
}

#[cold]
fn hand_over<F: Future<Output: 'static> + 'static, O: Owner>(future: Pin<Box<F>>, home: &Home, owner: Option<O>) {
    match home {
        Home::None => drop(future),
        Home::Executor(home) => match home.upgrade() {
            Some(home) if !home.is_abandoned() && !slip!("dropped_requests_let_go") => {
                adopt(&home, future, owner.map(O::leave))
            }
            // Its guards must not outlive their operation, but may be kept for ever.
            Some(home) if home.simulation().is_none() => std::mem::forget(future),
            // A simulated machine that has stopped.
            _ => drop(future),
        },
        Home::Foreign => match with_current(|local| local.cloned()) {
            Some(local) => adopt(&local, future, owner.map(O::leave)),
            None => drop(executor::block_on_thread(future)),
        },
    }
}

thread_local! {
    /// See [`is_left`].
    static IS_LEFT: Cell<bool> = const { Cell::new(false) };
}

/// True while a future runs that its caller has dropped: nothing should hold the future back on purpose, for [`super::block_on`]
/// waits for its end.
pub fn is_left() -> bool {
    IS_LEFT.get()
}

struct PollingLeft;

impl PollingLeft {
    fn begin() -> PollingLeft {
        IS_LEFT.set(true);
        PollingLeft
    }
}

impl Drop for PollingLeft {
    fn drop(&mut self) {
        IS_LEFT.set(false);
    }
}

/// Leaves the future to an executor of this thread. Outside of any executor, the future ends before this function returns: nothing
/// else might run it for a long time.
fn adopt<F: Future<Output: 'static> + 'static, G: 'static>(home: &Rc<LocalState>, future: Pin<Box<F>>, guard: G) {
    let obligation = Obligation::new(home);
    let mut future = future;
    let task = home.spawn(async move {
        let _held = (guard, obligation);
        let output = std::future::poll_fn(|context| {
            let _polling = PollingLeft::begin();
            future.as_mut().poll(context)
        });
        drop(output.await);
    });
    task.detach();
    let is_outside = with_current(|local| local.is_none());
    if is_outside && home.simulation().is_none() && !std::thread::panicking() {
        home.run_obligations();
    }
}
