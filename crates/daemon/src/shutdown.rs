// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stopping in order, in a bounded time: I/O that never returns keeps neither the daemon nor the disks that answer.

use crate::state::Daemon;
use cowshed_image::Node;
use cowshed_image::graph::nodes_below;
use cowshed_storage::rt::within;
use cowshed_storage::rt::{self, JoinHandle};
use cowshed_types::{Error, ErrorKind, Result};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A limit that is none.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// Requests of clients that take longer may wait for a job.
const PATIENCE: Duration = Duration::from_secs(5);

/// The outcome of a stop.
pub(crate) struct Stopped {
    /// The first error.
    pub result: Result<()>,
    /// Something did not end in time.
    pub is_overdue: bool,
}

/// Stops everything, users before the nodes that they use. The first error is the result; the rest is stopped all the
/// same. Commands and jobs get a sixth of the limit each, clients' requests a third; the disks get the rest.
pub(crate) async fn shut_down(daemon: &Rc<Daemon>, limit: Option<Duration>) -> Stopped {
    let limit = limit.unwrap_or(FOR_EVER);
    let end = rt::now() + limit;
    let mut late: Vec<String> = Vec::new();
    let commands = or_without_jobs(daemon, limit, daemon.commands.stop(limit / 6)).await;
    late.extend(commands.into_iter().map(|name| format!("command '{name}'")));
    let nbd = daemon.nbd();
    daemon.set_nbd(None);
    let mut result = Ok(());
    if let Some(nbd) = nbd {
        // A late job may hold a node that a detach needs; then the closing of the nodes flushes them.
        let hung;
        (result, hung) = or_without_jobs(daemon, limit, nbd.stop(limit / 3, late.is_empty())).await;
        late.extend(hung);
    }
    let (stopped, hung) = or_without_jobs(daemon, limit, daemon.servers.stop(limit / 6, late.is_empty())).await;
    result = result.and(stopped);
    late.extend(hung);
    late.extend(daemon.jobs.stop(limit / 6).await.into_iter().map(|id| format!("job '{id}'")));
    let nodes = daemon.graph.owned_nodes();
    if late.is_empty() {
        let graph = Arc::clone(&daemon.graph);
        let closing = rt::spawn(async move { graph.close_all().await });
        let patience = end.saturating_sub(rt::now()) / 2;
        match within(patience, closing).await {
            Some(closed) => {
                // The first one is the result, and the caller reports it.
                if result.is_err() {
                    log(&closed);
                }
                daemon.chardevs.clear();
                return Stopped { result: result.and(closed), is_overdue: false };
            }
            None => late.push("the closing of a disk".to_owned()),
        }
    }
    // Nodes that answer are completed beside those that don't.
    late.extend(close_each(daemon, nodes, end).await);
    daemon.chardevs.clear();
    log(&result);
    let message = format!(
        "could not stop in order (stop timeout {} s): {} did not end; what clients have not flushed there is lost",
        limit.as_secs(),
        late.join(", ")
    );
    let overdue = Error::new(ErrorKind::Limit, message);
    tracing::error!("{overdue}");
    Stopped { result: result.and(Err(overdue)), is_overdue: true }
}

/// The output of `work`, which stops commands or servers within a part of `limit`. A job may hold a client's request back, for
/// which a command may wait: the jobs are cancelled where the work takes long.
async fn or_without_jobs<T>(daemon: &Daemon, limit: Duration, work: impl Future<Output = T>) -> T {
    let mut work = Box::pin(work);
    match within((limit / 12).min(PATIENCE), &mut work).await {
        Some(output) => output,
        None => {
            daemon.jobs.cancel_all();
            work.await
        }
    }
}

fn log(result: &Result<()>) {
    if let Err(error) = result {
        tracing::error!(%error, "could not stop in order");
    }
}

/// Closes the nodes that no stuck request can reach, users before the nodes that they use, all of one height at once.
/// Returns those that don't end.
async fn close_each(daemon: &Rc<Daemon>, mut nodes: Vec<Arc<Node>>, end: Duration) -> Vec<String> {
    let stuck: Vec<Arc<Node>> = daemon
        .graph
        .attachments()
        .iter()
        .filter(|attachment| attachment.statistics().in_flight > 0)
        .flat_map(|attachment| nodes_below(&attachment.node()))
        .collect();
    let is_in = |list: &[Arc<Node>], node: &Arc<Node>| list.iter().any(|one| Arc::ptr_eq(one, node));
    nodes.retain(|node| !is_in(&stuck, node));
    let mut late = Vec::new();
    while !nodes.is_empty() {
        let below: Vec<Arc<Node>> = nodes.iter().flat_map(|node| nodes_below(node).into_iter().skip(1)).collect();
        let (lower, top): (Vec<_>, Vec<_>) = nodes.into_iter().partition(|node| is_in(&below, node));
        let closing: Vec<(Arc<Node>, JoinHandle<Result<()>>)> =
            top.into_iter().map(|node| (Arc::clone(&node), rt::spawn(async move { node.close().await }))).collect();
        // Half of the time for each height, so that one that hangs leaves some for those below.
        let deadline = rt::now() + end.saturating_sub(rt::now()) / 2;
        for (node, task) in closing {
            match within(deadline.saturating_sub(rt::now()), task).await {
                Some(closed) => log(&closed),
                None => late.push(format!("node '{}'", node.name())),
            }
        }
        nodes = lower;
    }
    late
}
