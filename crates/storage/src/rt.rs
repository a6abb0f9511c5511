// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The runtime: one small executor and one ring per thread.

use std::future::Future;

/// Runs `future` to its end on this thread, with this thread's ring and executor. Must not be nested.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let _ = future;
    todo!()
}

/// Starts a task on this thread's executor; it may be not `Send` and never migrates. Dropping the handle detaches it.
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    let _ = future;
    todo!()
}

/// The result of a task.
pub struct JoinHandle<T> {
    _private: std::marker::PhantomData<T>,
}

impl<T> Future for JoinHandle<T> {
    type Output = T;
    fn poll(self: std::pin::Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<T> {
        let _ = cx;
        todo!()
    }
}

/// Runs CPU work on a process-wide pool sized to the cores and waits without blocking this thread. Under the
/// simulator the work runs inline, so that runs stay deterministic.
pub async fn offload<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let _ = work;
    todo!()
}

/// Waits. Under the simulator time is virtual.
pub async fn sleep(duration: std::time::Duration) {
    let _ = duration;
    todo!()
}

/// Lets other tasks of this thread run.
pub async fn yield_now() {
    todo!()
}
