// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client of a monitor.

use super::MonitorContext;
use super::log::Log;
use crate::events::EventListener;
use crate::message::{Message, Reply};
use crate::monitor_properties::MonitorProperties;
use crate::version::version;
use cowshed_qmp::{Command, Event, Incoming, QmpError, Session, encode, reply};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;
use std::time::Duration;

/// This much waits for a client that doesn't read. Later events are dropped, and commands with further replies wait.
const MAX_WAITING_BYTES: usize = 1 << 20;

/// Bytes asked for in one read.
const READ_BYTES: usize = 16 << 10;

#[derive(Default)]
struct Waiting {
    messages: VecDeque<Vec<u8>>,
    /// The bytes of the messages, and of the one that is being written.
    bytes: usize,
    /// A command runs whose reply is still to come.
    owes_reply: bool,
    /// Nothing more will come, or no client takes it any more.
    closed: bool,
}

/// The output for a client: filled by the reader's thread and by events, emptied by the writer's thread.
pub struct Outlet {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    properties: Arc<MonitorProperties>,
}

impl Outlet {
    fn new(properties: Arc<MonitorProperties>) -> Arc<Outlet> {
        Arc::new(Outlet { waiting: Mutex::default(), changed: Condvar::new(), properties })
    }

    /// A message as the monitor prints it now.
    fn encode(&self, message: &Value) -> Vec<u8> {
        encode(message, self.properties.is_pretty())
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command starts: a reply follows.
    fn owe(&self) {
        self.lock().owes_reply = true;
    }

    /// Puts the reply in that is owed.
    fn answer(&self, message: &Value) {
        let mut waiting = self.lock();
        waiting.owes_reply = false;
        self.add(&mut waiting, self.encode(message));
    }

    /// Puts a message in, once there is room for it. False when the client is gone.
    fn put(&self, message: Vec<u8>) -> bool {
        let mut waiting = self.lock();
        while waiting.bytes > MAX_WAITING_BYTES && !waiting.closed {
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        self.add(&mut waiting, message)
    }

    fn add(&self, waiting: &mut Waiting, message: Vec<u8>) -> bool {
        if waiting.closed {
            return false;
        }
        if message.is_empty() {
            return true;
        }
        waiting.bytes += message.len();
        waiting.messages.push_back(message);
        self.changed.notify_all();
        true
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until it is closed.
    fn wait_for_close(&self) {
        let closed = self.changed.wait_while(self.lock(), |waiting| !waiting.closed);
        drop(closed);
    }

    /// The next message; `None` when it is closed and empty.
    fn next(&self) -> Option<Vec<u8>> {
        let mut waiting = self.lock();
        loop {
            if let Some(message) = waiting.messages.pop_front() {
                return Some(message);
            }
            if waiting.closed {
                return None;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Writes messages until there is no more, or the client is gone.
    fn drain(&self, mut output: impl Write, log: Option<&Log>) {
        while let Some(message) = self.next() {
            if let Some(log) = log {
                log.write(&message);
            }
            if output.write_all(&message).and_then(|()| output.flush()).is_err() {
                break;
            }
            self.lock().bytes -= message.len();
            self.changed.notify_all();
        }
        self.close();
        let mut waiting = self.lock();
        waiting.messages.clear();
        waiting.bytes = 0;
        self.changed.notify_all();
    }
}

impl EventListener for Outlet {
    fn event(&self, event: &Event) {
        let mut waiting = self.lock();
        if waiting.bytes > MAX_WAITING_BYTES {
            tracing::warn!(event = event.name, "a monitor's client doesn't read; the event is dropped for it");
            return;
        }
        self.add(&mut waiting, self.encode(&event.to_value()));
    }

    fn flush_and_close(&self, patience: Duration) {
        let owes = |waiting: &mut Waiting| (waiting.owes_reply || waiting.bytes > 0) && !waiting.closed;
        let settled = self.changed.wait_timeout_while(self.lock(), patience, owes);
        drop(settled);
        self.close();
    }
}

/// The meaning of the end of a client's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputEnd {
    /// The client has gone.
    Goes,
    /// The client still gets events.
    Stays,
}

/// Serves one client until it goes, on this thread and one more. `is_gone` tells whether nothing reaches it any more:
/// its remaining commands are not run then. `negotiated` is called once the client has negotiated its capabilities.
/// `hang_up` ends the connection, and with it the reader's wait for more, when the daemon stops first.
pub fn serve(
    context: &MonitorContext,
    (mut input, end): (impl Read, InputEnd),
    output: impl Write + Send + 'static,
    (is_gone, negotiated): (impl Fn() -> bool, impl Fn()),
    hang_up: impl FnOnce() + Send + 'static,
) {
    let outlet = Outlet::new(Arc::clone(&context.properties));
    let writer = {
        let (outlet, log) = (Arc::clone(&outlet), context.log.clone());
        thread::Builder::new().name("monitor-out".into()).spawn(move || {
            outlet.drain(output, log.as_deref());
            hang_up();
        })
    };
    let Ok(writer) = writer else {
        tracing::error!("there is no thread for a monitor's client");
        return;
    };
    converse(context, &mut input, &outlet, (is_gone, negotiated));
    if end == InputEnd::Stays {
        outlet.wait_for_close();
    }
    outlet.close();
    // A panic of the writer has been reported by the panic itself.
    let _ = writer.join();
}

/// The greeting of a monitor on a device without a client: it has no capabilities.
pub(crate) fn silent_greeting(context: &MonitorContext) -> Vec<u8> {
    encode(&json!({"QMP": {"version": version(), "capabilities": []}}), context.properties.is_pretty())
}

fn converse(
    context: &MonitorContext,
    input: &mut impl Read,
    outlet: &Arc<Outlet>,
    (is_gone, negotiated): (impl Fn() -> bool, impl Fn()),
) {
    let mut session = Session::new(Arc::clone(&context.schema));
    outlet.put(outlet.encode(&session.greeting(version())));
    let mut listens = false;
    let mut bytes = vec![0; READ_BYTES];
    loop {
        let len = match input.read(&mut bytes) {
            Ok(0) => return,
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                tracing::debug!(%error, "a monitor's client is gone");
                return;
            }
        };
        for incoming in session.feed(&bytes[..len]) {
            let reply = match incoming {
                Incoming::Reply(reply) => match say(context, reply, outlet) {
                    Ran::Answered => Vec::new(),
                    Ran::Dropped(reply) => reply,
                    Ran::Stopped => return outlet.close(),
                },
                Incoming::Run(command) if is_gone() => {
                    tracing::info!(command = command.name, "not run: the monitor's client has gone");
                    return;
                }
                Incoming::Run(command) => {
                    outlet.owe();
                    match run(context, command, outlet) {
                        Ran::Answered => Vec::new(),
                        Ran::Dropped(reply) => reply,
                        // Behind `quit` nothing is answered.
                        Ran::Stopped => return outlet.close(),
                    }
                }
            };
            if !outlet.put(reply) {
                return;
            }
            if session.wants_events() && !listens {
                listens = true;
                negotiated();
                let listener: Weak<dyn EventListener> = Arc::downgrade(outlet) as Weak<dyn EventListener>;
                context.events.subscribe(listener);
            }
        }
    }
}

/// The outcome of a command.
enum Ran {
    /// The reply is in the outlet.
    Answered,
    /// The daemon stopped meanwhile; its last words about that.
    Dropped(Vec<u8>),
    /// The daemon had stopped before.
    Stopped,
}

/// Sends replies that need no command. The control thread does it, so that it doesn't come between events that belong
/// together.
fn say(context: &MonitorContext, reply: Value, outlet: &Arc<Outlet>) -> Ran {
    let (done, ended) = mpsc::sync_channel(1);
    let answered = Arc::clone(outlet);
    outlet.owe();
    let say = Box::new(move || {
        answered.answer(&reply);
        // Its client waits.
        let _ = done.send(());
    });
    if context.control.send(Message::Say(say)).is_err() || ended.recv().is_err() {
        return Ran::Stopped;
    }
    Ran::Answered
}

/// Has the control thread run a command and answer it, and waits for that.
fn run(context: &MonitorContext, command: Command, outlet: &Arc<Outlet>) -> Ran {
    let (done, ended) = mpsc::sync_channel(1);
    let (answered, id) = (Arc::clone(outlet), command.id.clone());
    let answer: Reply = Box::new(move |result| {
        answered.answer(&reply(result, id));
        // Its client waits.
        let _ = done.send(());
    });
    let id = command.id.clone();
    let monitor = Arc::clone(&context.properties);
    if context.control.send(Message::Run { command, monitor, reply: answer }).is_err() {
        return Ran::Stopped;
    }
    match ended.recv() {
        Ok(()) => Ran::Answered,
        Err(_) => {
            outlet.lock().owes_reply = false;
            let error = QmpError::generic("the daemon is shutting down");
            Ran::Dropped(outlet.encode(&reply(Err(error), id)))
        }
    }
}
