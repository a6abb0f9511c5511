// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The same work on several threads.

use cowshed_storage::rt;
use cowshed_types::{Error, Result};

/// Runs `work` once on each of `threads` threads and waits for all; the workers share their tasks among themselves.
/// With one thread it runs on the caller's, which the simulator needs.
pub(super) async fn fan_out<F, W>(threads: usize, work: F) -> Result<()>
where
    F: Fn() -> W + Sync,
    W: Future<Output = Result<()>>,
{
    if threads <= 1 {
        return work().await;
    }
    std::thread::scope(|scope| {
        let start = || {
            let worker = std::thread::Builder::new().name("check".to_owned());
            worker.spawn_scoped(scope, || rt::prepare().and_then(|()| rt::block_on(work())))
        };
        let workers: Vec<_> = (0..threads).map(|_| start()).collect();
        let results = workers.into_iter().map(|worker| match worker.map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::internal("a thread of the check panicked")),
            Err(error) => Err(Error::io(&error, "could not start a thread")),
        });
        // All are joined before the first error is looked at.
        results.collect::<Vec<_>>().into_iter().collect()
    })
}
