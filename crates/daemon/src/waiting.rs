// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that wait: each runs in a task of its own, those that change the graph take turns, and whatever takes long is
//! reported. A disk that never answers so keeps its own command waiting, and no monitor.

use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::rt::{self, JoinHandle};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// A command that runs for so long is reported in the log.
const REPORT_AFTER: Duration = Duration::from_secs(5);

/// The output of `work`, or nothing when `limit` is over first; then `work` is dropped. Requests of nodes must run to their
/// end, so they come as tasks, which go on without their handle.
pub(crate) async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let (mut work, mut over) = (pin!(work), pin!(rt::sleep(limit)));
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => over.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// A command between its arrival and its answer.
pub(crate) struct Running {
    pub name: String,
    since: Duration,
    /// It waits for its turn, and has done nothing yet.
    pub waits_for_turn: Cell<bool>,
}

impl Running {
    pub fn seconds(&self) -> u64 {
        rt::now().saturating_sub(self.since).as_secs()
    }
}

/// The commands that run.
pub(crate) struct Commands {
    /// So long a command waits for its turn before it is refused.
    turn_limit: Duration,
    running: RefCell<Vec<Rc<Running>>>,
    turns: Turns,
    tasks: RefCell<Vec<JoinHandle<()>>>,
}

/// Takes the command off the list when it ends.
pub(crate) struct Listed<'a> {
    commands: &'a Commands,
    running: Rc<Running>,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.commands.running.borrow_mut().retain(|known| !Rc::ptr_eq(known, &self.running));
    }
}

impl Commands {
    pub fn new(turn_limit: Duration) -> Commands {
        Commands { turn_limit, running: RefCell::default(), turns: Turns::default(), tasks: RefCell::default() }
    }

    /// Lists a command until the guard is dropped, and reports it when it takes long.
    pub fn begin(&self, name: &str) -> Listed<'_> {
        let running = Rc::new(Running { name: name.to_owned(), since: rt::now(), waits_for_turn: Cell::new(false) });
        self.running.borrow_mut().push(Rc::clone(&running));
        Listed { commands: self, running }
    }

    /// Runs a command's work to its end, with a line in the log when that takes long.
    pub async fn watched<T>(&self, name: &str, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        if let Some(output) = within(REPORT_AFTER, work.as_mut()).await {
            return output;
        }
        let seconds = REPORT_AFTER.as_secs();
        tracing::warn!(command = name, "the command has run for {seconds} s: I/O that it waits for does not end");
        work.await
    }

    /// The commands that run, the oldest first.
    pub fn list(&self) -> Vec<Rc<Running>> {
        self.running.borrow().clone()
    }

    /// Waits until no other command changes the graph; in vain for too long it names the command in the way.
    pub async fn turn<'a>(&'a self, listed: &Listed<'_>) -> QmpResult<Turn<'a>> {
        listed.running.waits_for_turn.set(true);
        let turn = within(self.turn_limit, self.turns.take()).await;
        listed.running.waits_for_turn.set(false);
        turn.ok_or_else(|| {
            let list = self.list();
            let other = list.iter().find(|one| !one.waits_for_turn.get() && !Rc::ptr_eq(one, &listed.running));
            let other = other.map_or_else(|| "another command".to_owned(), |one| format!("'{}'", one.name));
            let (name, seconds) = (&listed.running.name, self.turn_limit.as_secs());
            QmpError::generic(format!(
                "'{name}' has waited {seconds} s for {other} to end, which waits for I/O; nothing was changed"
            ))
        })
    }

    /// Runs a command's task.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        tasks.retain(|task| !task.is_finished());
        tasks.push(rt::spawn(task));
    }

    /// Waits for the commands to end, for at most `limit`. The names of those that don't; their tasks go on, as requests of
    /// nodes must run to their end.
    pub async fn stop(&self, limit: Duration) -> Vec<String> {
        let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        let end = rt::now() + limit;
        for task in tasks {
            within(end.saturating_sub(rt::now()), task).await;
        }
        self.list().iter().map(|one| one.name.clone()).collect()
    }
}

/// One command after the other, in the order of their coming. All on one thread.
#[derive(Default)]
struct Turns(RefCell<Queue>);

#[derive(Default)]
struct Queue {
    next_ticket: u64,
    /// The first one has its turn.
    tickets: VecDeque<(u64, Option<Waker>)>,
}

/// A command's turn, or its place in the queue; the next one is woken when it is dropped.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    ticket: u64,
}

impl Turns {
    async fn take(&self) -> Turn<'_> {
        let turn = {
            let mut queue = self.0.borrow_mut();
            let ticket = queue.next_ticket;
            queue.next_ticket += 1;
            queue.tickets.push_back((ticket, None));
            Turn { turns: self, ticket }
        };
        poll_fn(|context| {
            let mut queue = self.0.borrow_mut();
            if queue.tickets.front().is_some_and(|(first, _)| *first == turn.ticket) {
                return Poll::Ready(());
            }
            if let Some((_, waker)) = queue.tickets.iter_mut().find(|(ticket, _)| *ticket == turn.ticket) {
                *waker = Some(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
        turn
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.turns.0.borrow_mut();
        queue.tickets.retain(|(ticket, _)| *ticket != self.ticket);
        let next = queue.tickets.front_mut().and_then(|(_, waker)| waker.take());
        drop(queue);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_taken_in_order_and_given_up_ones_are_passed_over() {
        let turns = Rc::new(Turns::default());
        let order: Rc<RefCell<Vec<u32>>> = Rc::default();
        rt::block_on(async {
            let first = turns.take().await;
            assert!(within(Duration::from_millis(1), turns.take()).await.is_none(), "the turn is another one's");
            let tasks: Vec<JoinHandle<()>> = (0..3)
                .map(|number| {
                    let (turns, order) = (Rc::clone(&turns), Rc::clone(&order));
                    rt::spawn(async move {
                        let _turn = turns.take().await;
                        rt::yield_now().await;
                        order.borrow_mut().push(number);
                    })
                })
                .collect();
            rt::yield_now().await;
            assert!(order.borrow().is_empty());
            drop(first);
            for task in tasks {
                task.await;
            }
        });
        assert_eq!(*order.borrow(), [0, 1, 2]);
    }
}
