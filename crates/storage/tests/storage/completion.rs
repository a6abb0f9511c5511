// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Futures that run to their end although they are dropped.

use cowshed_simulator::{Config, World};
use cowshed_storage::rt::{
    Owner, block_on, is_left, run_on_cpu_pool, sleep, spawn, to_completion, to_completion_of, yield_now,
};
use cowshed_storage::{File, IoBuf, OpenOptions};
use futures_util::future::{Either, select};
use futures_util::poll;
use std::cell::Cell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Counts to 3: by a yield, by a thread of a pool, by a timer.
async fn steps(count: Arc<AtomicU32>) {
    yield_now().await;
    count.fetch_add(1, Ordering::SeqCst);
    run_on_cpu_pool(|| ()).await;
    count.fetch_add(1, Ordering::SeqCst);
    // A timer: one of the three kinds of wakers.
    sleep(Duration::from_millis(2)).await;
    count.fetch_add(1, Ordering::SeqCst);
}

fn counter() -> Arc<AtomicU32> {
    Arc::default()
}

/// Makes the executor's ring, which a file's operation asks for.
async fn use_ring() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let options = OpenOptions { create: true, ..OpenOptions::default() };
    let file = File::open(&dir.path().join("file"), &options).expect("open");
    file.write_at(IoBuf::copy_from(&[7; 1000]), 10).await.0.expect("write");
    file.sync().await.expect("sync");
}

#[test]
fn a_dropped_completion_ends_before_block_on_returns() {
    for with_ring in [false, true] {
        let count = counter();
        block_on(async {
            if with_ring {
                use_ring().await;
            }
            let mut work = Box::pin(to_completion(steps(Arc::clone(&count))));
            assert!(poll!(&mut work).is_pending());
            drop(work);
            assert_eq!(count.load(Ordering::SeqCst), 0);
        });
        assert_eq!(count.load(Ordering::SeqCst), 3);
    }
    let (world, count) = (World::new(Config::new(1)), counter());
    world.run(async {
        let work = Box::pin(to_completion(steps(Arc::clone(&count))));
        let now = pin!(yield_now());
        assert!(matches!(select(now, work).await, Either::Left(_)));
    });
    assert_eq!(count.load(Ordering::SeqCst), 3);
}

#[test]
fn the_future_of_block_on_leaves_its_rest_to_block_on() {
    let count = counter();
    let mut work = to_completion(steps(Arc::clone(&count)));
    // It ends while it holds the other future.
    block_on(std::future::poll_fn(move |context| {
        assert!(pin!(&mut work).poll(context).is_pending());
        std::task::Poll::Ready(())
    }));
    assert_eq!(count.load(Ordering::SeqCst), 3);
}

#[test]
fn a_completion_dropped_outside_of_an_executor_ends_at_once() {
    let count = counter();
    let mut work = to_completion(steps(Arc::clone(&count)));
    block_on(async { assert!(poll!(&mut work).is_pending()) });
    assert_eq!(count.load(Ordering::SeqCst), 0);
    drop(work);
    assert_eq!(count.load(Ordering::SeqCst), 3);
}

#[test]
fn a_completion_that_was_not_polled_does_nothing() {
    let count = counter();
    block_on(async { drop(to_completion(steps(Arc::clone(&count)))) });
    assert_eq!(count.load(Ordering::SeqCst), 0);
    assert_eq!(Arc::strong_count(&count), 1, "the future is still there");
}

#[test]
fn a_completion_in_a_task_ends_with_its_thread() {
    for with_ring in [false, true] {
        let count = counter();
        let counted = Arc::clone(&count);
        std::thread::spawn(move || {
            block_on(async {
                if with_ring {
                    use_ring().await;
                }
                // The task is detached, and its thread ends while the task waits.
                drop(spawn(async move { to_completion(steps(counted)).await }));
                yield_now().await;
            });
        })
        .join()
        .expect("the thread");
        assert_eq!(count.load(Ordering::SeqCst), 3);
    }
}

#[test]
fn a_cancelled_task_leaves_its_completion() {
    let count = counter();
    block_on(async {
        let task = spawn(to_completion(steps(Arc::clone(&count))));
        yield_now().await;
        assert!(task.cancel().await.is_none());
    });
    assert_eq!(count.load(Ordering::SeqCst), 3);
}

#[test]
fn a_simulated_machine_stops_with_its_requests() {
    let (world, count) = (World::new(Config::new(1)), counter());
    let work = world.run(async {
        drop(spawn(to_completion(steps(Arc::clone(&count)))));
        let mut work = to_completion(steps(Arc::clone(&count)));
        assert!(poll!(&mut work).is_pending());
        yield_now().await;
        // The request outlives its machine, unfinished.
        Some(work)
    });
    drop(work);
    assert!(count.load(Ordering::SeqCst) < 6, "something ran after the power cut");
    assert_eq!(Arc::strong_count(&count), 1, "a future is still there");
}

#[test]
fn a_completion_that_panicked_is_not_polled_again() {
    let polls = Rc::new(Cell::new(0));
    let counted = Rc::clone(&polls);
    let work = to_completion(async move {
        counted.set(counted.get() + 1);
        yield_now().await;
        counted.set(counted.get() + 1);
        panic!("a bug in the request");
    });
    let run = catch_unwind(AssertUnwindSafe(|| block_on(work)));
    assert!(run.is_err());
    block_on(yield_now());
    assert_eq!((polls.get(), Rc::strong_count(&polls)), (2, 1));
}

/// Counts futures that were left, as long as they run.
struct Owned(Rc<Cell<u32>>);
struct Guard(Rc<Cell<u32>>);

impl Owner for Owned {
    type Guard = Guard;

    fn leave(self) -> Guard {
        self.0.set(self.0.get() + 1);
        Guard(self.0)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[test]
fn an_owner_knows_what_was_left() {
    let (left, count) = (Rc::new(Cell::new(0)), counter());
    block_on(async {
        let owned = || Owned(Rc::clone(&left));
        to_completion_of(owned(), steps(counter())).await;
        drop(to_completion_of(owned(), steps(counter())));
        assert_eq!(left.get(), 0);
        let mut work = to_completion_of(owned(), steps(Arc::clone(&count)));
        assert!(poll!(&mut work).is_pending());
        drop(work);
        assert_eq!(left.get(), 1);
    });
    assert_eq!((left.get(), count.load(Ordering::SeqCst)), (0, 3));
}

#[test]
fn only_a_dropped_future_is_left() {
    let seen = Rc::new(Cell::new(0));
    let noted = Rc::clone(&seen);
    block_on(async {
        let mut work = to_completion(async move {
            while !is_left() {
                yield_now().await;
                noted.set(noted.get() + 1);
            }
        });
        assert!(poll!(&mut work).is_pending() && poll!(&mut work).is_pending());
        assert!(!is_left());
        drop(work);
        yield_now().await;
        assert!(!is_left());
    });
    assert_eq!((seen.get(), Rc::strong_count(&seen)), (2, 1));
}
