// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that wait: each runs in a task of its own, and whatever takes long is reported. Commands that change the same part of
//! the graph take turns. So a disk that never answers delays only the commands for its own part, and no monitor.

use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::rt::{self, JoinHandle, within};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// The time after which a running command is reported in the log.
const REPORT_AFTER: Duration = Duration::from_secs(5);

/// A command between its arrival and its answer.
pub(crate) struct RunningCommand {
    pub name: String,
    since: Duration,
    /// It waits for its turn, and has done nothing yet.
    pub waits_for_turn: Cell<bool>,
}

impl RunningCommand {
    pub fn seconds(&self) -> u64 {
        rt::now().saturating_sub(self.since).as_secs()
    }
}

/// The commands that run.
pub(crate) struct Commands {
    /// So long a command waits for its turn before it is refused.
    turn_limit: Duration,
    running: RefCell<Vec<Rc<RunningCommand>>>,
    turns: Turns,
    tasks: RefCell<Vec<JoinHandle<()>>>,
}

/// Takes the command off the list when it ends.
pub(crate) struct ListedCommand<'a> {
    commands: &'a Commands,
    running: Rc<RunningCommand>,
}

impl Drop for ListedCommand<'_> {
    fn drop(&mut self) {
        self.commands.running.borrow_mut().retain(|known| !Rc::ptr_eq(known, &self.running));
    }
}

impl Commands {
    pub fn new(turn_limit: Duration) -> Commands {
        Commands { turn_limit, running: RefCell::default(), turns: Turns::default(), tasks: RefCell::default() }
    }

    /// Lists a command until the guard is dropped, and reports it when it takes long.
    pub fn begin(&self, name: &str) -> ListedCommand<'_> {
        let running =
            Rc::new(RunningCommand { name: name.to_owned(), since: rt::now(), waits_for_turn: Cell::new(false) });
        self.running.borrow_mut().push(Rc::clone(&running));
        ListedCommand { commands: self, running }
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
    pub fn list(&self) -> Vec<Rc<RunningCommand>> {
        self.running.borrow().clone()
    }

    /// Waits until no other command changes the nodes of this one. After too long a wait the error names the command in
    /// the way.
    pub async fn turn<'a>(&'a self, listed: &ListedCommand<'_>, scope: CommandScope<'_>) -> QmpResult<Turn<'a>> {
        listed.running.waits_for_turn.set(true);
        let name = &listed.running.name;
        let turn = within(self.turn_limit, self.turns.take(name, scope.clone())).await;
        listed.running.waits_for_turn.set(false);
        turn.ok_or_else(|| {
            let other = self.turns.in_the_way(&scope);
            let other = other.map_or_else(|| "another command".to_owned(), |name| format!("'{name}'"));
            let (name, seconds) = (&listed.running.name, self.turn_limit.as_secs());
            QmpError::generic(format!(
                "'{name}' has waited {seconds} s for {other} to end, which waits for I/O; nothing was changed"
            ))
        })
    }

    /// From now on the command with this turn concerns `name` alone: commands for its other nodes need not wait for it.
    pub fn narrow(&self, turn: TurnId, name: &str) {
        self.turns.change(|tickets| {
            if let Some(ticket) = tickets.iter_mut().find(|ticket| ticket.id == turn.0) {
                ticket.names = BTreeSet::from([name.to_owned()]);
                ticket.began_with = ticket.names.clone();
            }
        });
    }

    /// Runs a command's task.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut tasks = self.tasks.borrow_mut();
        tasks.retain(|task| !task.is_finished());
        tasks.push(rt::spawn(task));
    }

    /// Waits for the commands to end, for at most `limit`. The names of those that don't. Their tasks go on: a command that
    /// stopped between two steps would leave the graph half changed.
    pub async fn stop(&self, limit: Duration) -> Vec<String> {
        let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        let end = rt::now() + limit;
        for task in tasks {
            within(end.saturating_sub(rt::now()), task).await;
        }
        self.list().iter().map(|one| one.name.clone()).collect()
    }
}

/// The names that a command is about, with the function that adds those of everything connected with them. Without names it is
/// about everything.
#[derive(Clone)]
pub(crate) struct CommandScope<'a> {
    pub names: BTreeSet<String>,
    pub connected: &'a dyn Fn(&BTreeSet<String>) -> BTreeSet<String>,
}

impl CommandScope<'_> {
    fn reach(&self, names: &BTreeSet<String>) -> BTreeSet<String> {
        (self.connected)(names)
    }

    /// True when this scope and the one of an older command have something in common.
    fn meets(&self, older: &Ticket) -> bool {
        if self.names.is_empty() || older.names.is_empty() {
            return true;
        }
        let mine = self.reach(&self.names);
        // Half-way through a command, nodes may have lost their connection that it still works on.
        !mine.is_disjoint(&older.began_with) || !mine.is_disjoint(&self.reach(&older.names))
    }
}

/// Commands with something in common go one after the other, in the order of their coming. All on one thread.
#[derive(Default)]
struct Turns(RefCell<Queue>);

#[derive(Default)]
struct Queue {
    next_id: u64,
    /// The oldest first.
    tickets: VecDeque<Ticket>,
}

struct Ticket {
    id: u64,
    command: String,
    names: BTreeSet<String>,
    runs: bool,
    /// The names that it reached when it began to run.
    began_with: BTreeSet<String>,
    waker: Option<Waker>,
}

/// A turn by its number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurnId(u64);

/// A command's turn, or its place in the queue; the waiting ones look again when it is dropped.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    id: u64,
}

impl Turns {
    async fn take(&self, command: &str, scope: CommandScope<'_>) -> Turn<'_> {
        let turn = {
            let mut queue = self.0.borrow_mut();
            let id = queue.next_id;
            queue.next_id += 1;
            let (command, names) = (command.to_owned(), scope.names.clone());
            queue.tickets.push_back(Ticket {
                id,
                command,
                names,
                runs: false,
                began_with: BTreeSet::new(),
                waker: None,
            });
            Turn { turns: self, id }
        };
        poll_fn(|context| {
            let mut queue = self.0.borrow_mut();
            let Some(at) = queue.tickets.iter().position(|ticket| ticket.id == turn.id) else { return Poll::Ready(()) };
            let waits = queue.tickets.iter().take(at).any(|older| scope.meets(older));
            let ticket = &mut queue.tickets[at];
            if waits {
                ticket.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
            ticket.runs = true;
            ticket.began_with = scope.reach(&scope.names);
            Poll::Ready(())
        })
        .await;
        turn
    }

    /// The name of a command that runs and has something in common with this scope.
    fn in_the_way(&self, scope: &CommandScope<'_>) -> Option<String> {
        let queue = self.0.borrow();
        queue.tickets.iter().find(|ticket| ticket.runs && scope.meets(ticket)).map(|ticket| ticket.command.clone())
    }
}

impl Turn<'_> {
    pub fn id(&self) -> TurnId {
        TurnId(self.id)
    }
}

impl Turns {
    fn change(&self, change: impl FnOnce(&mut VecDeque<Ticket>)) {
        let mut queue = self.0.borrow_mut();
        change(&mut queue.tickets);
        let waiting: Vec<Waker> = queue.tickets.iter_mut().filter_map(|ticket| ticket.waker.take()).collect();
        drop(queue);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.change(|tickets| tickets.retain(|ticket| ticket.id != self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alone(names: &BTreeSet<String>) -> BTreeSet<String> {
        names.clone()
    }

    fn scope(names: &[&str]) -> CommandScope<'static> {
        CommandScope { names: names.iter().map(|name| (*name).to_owned()).collect(), connected: &alone }
    }

    #[test]
    fn commands_wait_for_those_they_have_something_in_common_with() {
        let turns = Turns::default();
        rt::block_on(async {
            let first = turns.take("first", scope(&["a", "b"])).await;
            let _other = turns.take("other", scope(&["c"])).await;
            for names in [&["b"][..], &["c", "d"], &[]] {
                let late = within(Duration::from_millis(1), turns.take("late", scope(names))).await;
                assert!(late.is_none(), "{names:?}");
            }
            assert_eq!(turns.in_the_way(&scope(&["c"])).as_deref(), Some("other"));
            drop(first);
            drop(turns.take("late", scope(&["b"])).await);
        });
    }

    #[test]
    fn turns_are_taken_in_order() {
        let turns = Rc::new(Turns::default());
        let order: Rc<RefCell<Vec<u32>>> = Rc::default();
        rt::block_on(async {
            let first = turns.take("one", scope(&[])).await;
            assert!(
                within(Duration::from_millis(1), turns.take("two", scope(&[]))).await.is_none(),
                "the turn is another one's"
            );
            let tasks: Vec<JoinHandle<()>> = (0..3)
                .map(|number| {
                    let (turns, order) = (Rc::clone(&turns), Rc::clone(&order));
                    rt::spawn(async move {
                        let _turn = turns.take("more", scope(&[])).await;
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
