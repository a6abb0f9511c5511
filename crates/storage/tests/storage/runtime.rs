// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The executor: tasks, wakes from other threads, timers, the pools, and the behaviour without a ring.

use cowshed_simulator::{Config, World};
use cowshed_storage::rt::{beside, block_on, now, run_on_cpu_pool, sleep, spawn, spawn_critical, yield_now};
use cowshed_storage::{File, IoBuf, IoEngine, OpenOptions};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Set by one side, awaited by the other, over threads.
#[derive(Clone, Default)]
struct Signal(Arc<Mutex<(bool, Option<Waker>)>>);

impl Signal {
    fn set(&self) {
        let mut state = self.0.lock().expect("lock");
        state.0 = true;
        if let Some(waker) = state.1.take() {
            waker.wake();
        }
    }
}

impl Future for Signal {
    type Output = ();
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock().expect("lock");
        if state.0 {
            return Poll::Ready(());
        }
        state.1 = Some(context.waker().clone());
        Poll::Pending
    }
}

/// Makes the thread's ring, so that the executor sleeps in it.
async fn use_ring() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = dir.path().join("file");
    let options = OpenOptions { create: true, engine: IoEngine::IoUring, ..OpenOptions::default() };
    let file = File::open(&path, &options).expect("open");
    file.write_at(IoBuf::zeroed(512), 0).await.0.expect("write");
}

#[test]
fn tasks_run_in_turn_and_give_results() {
    let order = block_on(async {
        let order = Rc::new(Cell::new(0u32));
        let tasks: Vec<_> = (0..3u32)
            .map(|task| {
                let order = Rc::clone(&order);
                spawn(async move {
                    for _ in 0..2 {
                        order.set(order.get() * 10 + task + 1);
                        yield_now().await;
                    }
                    task
                })
            })
            .collect();
        for (index, task) in tasks.into_iter().enumerate() {
            assert_eq!(task.await, index as u32);
        }
        order.get()
    });
    assert_eq!(order, 123_123);
}

#[test]
fn a_dropped_handle_detaches_and_cancel_drops() {
    struct Noted(Rc<Cell<bool>>);
    impl Drop for Noted {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    block_on(async {
        let ran = Rc::new(Cell::new(false));
        let noted = Rc::clone(&ran);
        drop(spawn(async move {
            yield_now().await;
            noted.set(true);
        }));
        while !ran.get() {
            yield_now().await;
        }
        let dropped = Rc::new(Cell::new(false));
        let noted = Noted(Rc::clone(&dropped));
        let task = spawn(async move {
            let _noted = noted;
            std::future::pending::<()>().await;
        });
        yield_now().await;
        assert!(!task.is_finished());
        assert_eq!(task.cancel().await, None);
        assert!(dropped.get());
    });
}

#[test]
fn tasks_left_over_go_on_in_the_next_call() {
    let signal = Signal::default();
    let dropped = Arc::new(());
    let held = Arc::clone(&dropped);
    std::thread::spawn(move || {
        let waited = signal.clone();
        let task = block_on(async move {
            drop(spawn(async move {
                let _forgotten = held;
                std::future::pending::<()>().await;
            }));
            let task = spawn(async move {
                waited.await;
                5
            });
            [task]
        });
        signal.set();
        let [task] = task;
        assert_eq!(block_on(task), 5);
    })
    .join()
    .expect("thread");
    assert_eq!(Arc::strong_count(&dropped), 1);
}

#[test]
fn other_threads_wake_an_executor_that_sleeps() {
    for with_ring in [false, true] {
        block_on(async {
            if with_ring {
                use_ring().await;
            }
            for round in 0..200u64 {
                let signals = [Signal::default(), Signal::default()];
                let theirs = signals.clone();
                let waker = std::thread::spawn(move || {
                    // Hits the moment of falling asleep from both sides.
                    std::thread::sleep(Duration::from_micros(round % 7 * 20));
                    theirs.iter().for_each(Signal::set);
                });
                let [first, second] = signals;
                let task = spawn(second);
                first.await;
                task.await;
                waker.join().expect("thread");
            }
        });
    }
}

/// Obligations to others end before the thread does, and the thread ends then: nothing else will ever wake it.
#[test]
fn a_thread_ends_with_its_last_obligation() {
    async fn leave_obligations(with_ring: bool) {
        if with_ring {
            use_ring().await;
        }
        for obligation in 0..3u64 {
            let last = async move {
                match obligation {
                    // A timer, work of the pool, and a yield each end an obligation.
                    0 => sleep(Duration::from_millis(2)).await,
                    1 => run_on_cpu_pool(|| std::thread::sleep(Duration::from_millis(2))).await,
                    _ => yield_now().await,
                }
            };
            assert!(spawn_critical(last).is_ok(), "this is inside of an executor");
        }
    }
    let (ended, end) = std::sync::mpsc::channel();
    for with_ring in [false, true] {
        let ended = ended.clone();
        std::thread::spawn(move || {
            block_on(leave_obligations(with_ring));
            ended.send(with_ring).expect("the test waits");
        });
    }
    let ended: Vec<bool> = (0..2).map_while(|_| end.recv_timeout(Duration::from_secs(60)).ok()).collect();
    assert_eq!(ended.len(), 2, "ended with or without a ring: {ended:?}");
    let world = World::new(Config::new(1));
    world.run(leave_obligations(false));
}

#[test]
fn timers_ring_in_order() {
    for with_ring in [false, true] {
        block_on(async {
            if with_ring {
                use_ring().await;
            }
            let start = now();
            let order = Rc::new(Cell::new(0u32));
            let tasks: Vec<_> = [(3u32, 30), (1, 10), (2, 20)]
                .into_iter()
                .map(|(task, millis)| {
                    let order = Rc::clone(&order);
                    spawn(async move {
                        // The order of timers is tested.
                        sleep(Duration::from_millis(millis)).await;
                        order.set(order.get() * 10 + task);
                    })
                })
                .collect();
            // A timer without a waiter holds nothing up.
            drop(sleep(Duration::from_secs(1000)));
            for task in tasks {
                task.await;
            }
            assert_eq!(order.get(), 123);
            let elapsed = now() - start;
            assert!(elapsed >= Duration::from_millis(30) && elapsed < Duration::from_secs(5), "{elapsed:?}");
        });
    }
}

#[test]
fn offloaded_work_comes_back() {
    block_on(async {
        let mine = std::thread::current().id();
        let tasks: Vec<_> = (0..200u64)
            .map(|number| spawn(run_on_cpu_pool(move || (std::thread::current().id(), number * number))))
            .collect();
        for (number, task) in tasks.into_iter().enumerate() {
            let (thread, square) = task.await;
            assert_ne!(thread, mine);
            assert_eq!(square, (number * number) as u64);
        }
    });
}

#[test]
fn work_beside_has_its_own_executor_on_two_cores() {
    let has_cores = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
    block_on(async {
        let mine = std::thread::current().id();
        let work = |number: u64| {
            beside(move || async move {
                // The duties of an executor: timers and tasks, also those that are left behind as obligations.
                sleep(Duration::from_millis(1)).await;
                let task = spawn(async move { number + 1 });
                let (left, looked) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
                let (noted, seen) = (Arc::clone(&left), Arc::clone(&looked));
                let obligation = spawn_critical(async move {
                    // The obligation ends behind the work.
                    sleep(Duration::from_millis(2)).await;
                    noted.store(seen.load(Ordering::SeqCst), Ordering::SeqCst);
                });
                assert!(obligation.is_ok());
                looked.store(number + 1, Ordering::SeqCst);
                (std::thread::current().id(), task.await, left)
            })
        };
        let tasks: Vec<_> = (0..20u64).map(|number| spawn(work(number))).collect();
        for (number, task) in tasks.into_iter().enumerate() {
            let (thread, next, left) = task.await;
            assert_eq!(thread != mine, has_cores);
            assert_eq!(next, number as u64 + 1);
            if has_cores {
                assert_eq!(left.load(Ordering::SeqCst), next, "a thread goes on until its obligations have ended");
            }
        }
    });
}

#[test]
#[should_panic(expected = "a bug in the work")]
fn a_panic_of_work_beside_goes_on_where_it_is_awaited() {
    block_on(beside(|| async { panic!("a bug in the work") }));
}

#[test]
#[should_panic(expected = "a bug in the work")]
fn a_panic_of_offloaded_work_goes_on_where_it_is_awaited() {
    block_on(run_on_cpu_pool(|| panic!("a bug in the work")));
}

#[test]
#[should_panic(expected = "block_on inside of block_on")]
fn executors_do_not_nest() {
    block_on(async { block_on(async {}) });
}

/// A system call filter like a container's, for this thread only.
fn forbid_io_uring(errno: i32) {
    forbid(&[libc::SYS_io_uring_setup], errno);
}

/// These calls fail on this thread from now on.
fn forbid(calls: &[i64], errno: i32) {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    let rules = calls.iter().map(|&call| (call, Vec::new())).collect();
    let arch = std::env::consts::ARCH.try_into().expect("architecture");
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(errno as u32), arch);
    let program: BpfProgram = filter.expect("filter").try_into().expect("program");
    seccompiler::apply_filter(&program).expect("apply");
}

#[test]
fn threads_do_the_work_where_io_uring_is_forbidden() {
    for errno in [libc::EPERM, libc::ENOSYS, libc::ENOMEM] {
        std::thread::spawn(move || {
            forbid_io_uring(errno);
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
            let path = dir.path().join("file");
            block_on(async {
                let options = OpenOptions { create: true, ..OpenOptions::default() };
                let file = File::open(&path, &options).expect("open");
                file.write_at(IoBuf::copy_from(&[7; 1000]), 10).await.0.expect("write");
                file.sync().await.expect("sync");
                let (result, buf) = file.read_at(IoBuf::zeroed(1010), 0).await;
                result.expect("read");
                assert!(buf[..10] == [0; 10] && buf[10..] == [7; 1000]);
                let forced = OpenOptions { engine: IoEngine::IoUring, ..OpenOptions::default() };
                let error = File::open(&path, &forced).expect_err("no io_uring here");
                assert_eq!(error.errno().0, errno);
                assert_eq!(error.message(), "io_uring is not available");
            });
        })
        .join()
        .expect("thread");
    }
}

/// A limit of processes is reached: the caller does the work itself, in a process where no thread of the pools runs yet.
#[test]
fn work_is_done_where_no_thread_can_be_made() {
    const ROLE: &str = "COWSHED_TEST_NO_THREADS";
    if std::env::var_os(ROLE).is_none() {
        let output = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "work_is_done_where_no_thread_can_be_made"])
            .env(ROLE, "1")
            .output()
            .expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    forbid(&[libc::SYS_clone, libc::SYS_clone3, libc::SYS_io_uring_setup], libc::EAGAIN);
    assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "no thread can be made");
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    block_on(async {
        let options = OpenOptions { create: true, ..OpenOptions::default() };
        let file = File::open(&dir.path().join("file"), &options).expect("open");
        let writes: Vec<_> = (0..100u64)
            .map(|block| {
                let file = file.clone();
                spawn(async move { file.write_at(IoBuf::copy_from(&[block as u8; 512]), block * 512).await.0 })
            })
            .collect();
        for write in writes {
            write.await.expect("write");
        }
        file.sync().await.expect("sync");
        let (result, buf) = file.read_at(IoBuf::zeroed(512), 99 * 512).await;
        result.expect("read");
        assert_eq!(buf[..], [99; 512]);
        let here = std::thread::current().id();
        assert_eq!(run_on_cpu_pool(|| std::thread::current().id()).await, here);
        assert_eq!(beside(|| async { std::thread::current().id() }).await, here);
    });
}

#[test]
fn files_work_without_our_executor() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let options = OpenOptions { create: true, ..OpenOptions::default() };
    let file = File::open(&dir.path().join("file"), &options).expect("open");
    let mut work = Box::pin(async move {
        file.write_at(IoBuf::copy_from(&[3; 100]), 0).await.0.expect("write");
        file.sync().await.expect("sync");
        file.len()
    });
    // The poorest executor there is.
    let mut context = Context::from_waker(Waker::noop());
    let len = loop {
        if let Poll::Ready(len) = work.as_mut().poll(&mut context) {
            break len;
        }
        std::thread::yield_now();
    };
    assert_eq!(len, 100);
}
