// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control thread: starts the parts of a setup, runs commands as tasks, stops in order.

use crate::commands;
use crate::faults;
use crate::inbox::{Inbox, Sender, inbox};
use crate::message::{Message, StopReason};
use crate::metrics;
use crate::monitor::MonitorAddress;
use crate::options::Step;
use crate::schema;
use crate::shutdown::shut_down;
use crate::state::{Daemon, Served, Settings};
use cowshed_fuse::GuardProgram;
use cowshed_storage::rt;
use cowshed_types::{Error, Result};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// So long may the last messages take to reach the monitors' clients.
const FAREWELL: Duration = Duration::from_secs(2);

/// A file that grows with each write tells its sizes together.
const SIZE_PAUSE: Duration = Duration::from_millis(50);

/// The daemon to start.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The parts of the daemon, in this order.
    pub steps: Vec<Step>,
    /// Threads that serve clients: 1 to 256.
    pub queues: usize,
    /// Queues of an export of the type `vhost-user-blk` that does not say their number: 1 to 64. QEMU's programs make 1.
    pub vhost_queues: u16,
    /// Stop when the last NBD client goes, or the last export is ended from outside.
    pub stop_when_idle: bool,
    /// The time limit for stopping in order; `None`: no limit.
    pub stop_limit: Option<Duration>,
    /// The time that a command waits for its turn to change the graph before it is refused.
    pub turn_limit: Duration,
    /// Memory for the data of all clients' requests, in bytes, at least [`MIN_REQUEST_MEMORY_BYTES`]. Each connection has 1 MiB
    /// besides.
    pub request_memory_bytes: u64,
    /// The program that unmounts served files when this process has gone. `None`: a killed daemon leaves its mounts
    /// behind.
    pub mount_guard: Option<GuardProgram>,
}

/// [`Setup::request_memory_bytes`] by default.
pub const REQUEST_MEMORY_BYTES: u64 = 256 << 20;

/// The longest request, in bytes.
pub const MIN_REQUEST_MEMORY_BYTES: u64 = 32 << 20;

/// The time limit for stopping in order, by default.
pub const STOP_LIMIT: Duration = Duration::from_secs(30);

/// [`Setup::turn_limit`] by default.
pub const TURN_LIMIT: Duration = Duration::from_secs(30);

/// The addresses of a daemon that has started.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Monitors, with the ports that were found free.
    pub monitors: Vec<MonitorAddress>,
    /// Metrics endpoints, with the ports that were found free.
    pub metrics: Vec<String>,
    /// Exports.
    pub exports: Vec<Served>,
    /// The way to stop the daemon.
    pub control: Sender<Message>,
}

/// Runs a daemon on this thread until it gets the order to stop. `started` is called once everything is there that the
/// steps ask for. When a step fails, the parts that were there already are taken back.
pub fn run(setup: Setup, started: impl FnOnce(&Ready) -> Result<()>) -> Result<StopReason> {
    run_with(setup, started, |_| ())
}

/// As [`run`]. `overdue` is called when stopping in order takes longer than the limit: I/O hangs that keeps the threads which
/// wait for it, so the process is best ended there.
pub fn run_with(
    setup: Setup,
    started: impl FnOnce(&Ready) -> Result<()>,
    overdue: impl FnOnce(&Error),
) -> Result<StopReason> {
    let stop_limit = setup.stop_limit;
    let (control, messages) = inbox();
    let schema = schema::build()?;
    let settings = Settings {
        queues: setup.queues,
        vhost_queues: setup.vhost_queues,
        request_memory_bytes: setup.request_memory_bytes,
        stop_when_idle: setup.stop_when_idle,
        turn_limit: setup.turn_limit,
        mount_guard: setup.mount_guard.clone(),
    };
    let daemon = Rc::new(Daemon::new(control.clone(), schema, &settings));
    faults::watch(&daemon.graph, daemon.events.clone(), control.clone());
    rt::block_on(async {
        let result = match start(&daemon, setup.steps).await {
            Ok(()) => {
                let ready = Ready {
                    monitors: daemon.monitor_addresses(),
                    metrics: daemon.metrics_addresses(),
                    exports: daemon.served(),
                    control,
                };
                match started(&ready) {
                    Ok(()) => Ok(serve(&daemon, &messages).await),
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        };
        let stopped = shut_down(&daemon, stop_limit).await;
        // Clients that still wait for a command's reply learn that there won't be one.
        drop(messages);
        for reply in daemon.farewells.take() {
            reply(commands::nothing());
        }
        daemon.events.flush_and_close(FAREWELL);
        if let (true, Err(error)) = (stopped.is_overdue, &stopped.result) {
            overdue(error);
        }
        result.and_then(|reason| stopped.result.map(|()| reason))
    })
}

async fn start(daemon: &Rc<Daemon>, steps: Vec<Step>) -> Result<()> {
    for step in steps {
        step.run(daemon).await?;
    }
    daemon.is_starting.set(false);
    if let Some(nbd) = daemon.nbd() {
        nbd.release();
    }
    Ok(())
}

async fn serve(daemon: &Rc<Daemon>, messages: &Inbox<Message>) -> StopReason {
    loop {
        match messages.receive().await {
            Message::Run { command, monitor, reply } => {
                tracing::debug!(command = command.name, "command");
                let running = Rc::clone(daemon);
                daemon.commands.spawn(async move {
                    let name = command.name.clone();
                    let result = commands::run(&running, command, monitor).await;
                    if let Err(error) = &result {
                        tracing::info!(command = name.as_str(), %error, "command failed");
                    }
                    match result {
                        // As in QEMU the answer comes last, behind the events of all that ends.
                        Ok(_) if name == "quit" => running.farewells.borrow_mut().push(reply),
                        result => reply(result),
                    }
                });
            }
            Message::Metrics { reply, is_awaited } => {
                if is_awaited() {
                    // The scraper may go meanwhile.
                    let _ = reply.send(metrics::render(daemon));
                }
            }
            Message::EventsDue(delay) => {
                let events = daemon.events.clone();
                drop(rt::spawn(async move {
                    rt::sleep(delay).await;
                    events.emit_due();
                }));
            }
            Message::Say(say) => say(),
            Message::MonitorClosed(properties) => daemon.close_monitor(&properties),
            // Requests that hang can keep the export's server: the limit of the stop counts.
            Message::ExportEnded(_)
                if daemon.stop_when_idle && daemon.nbd().is_none() && daemon.servers.have_ended() =>
            {
                daemon.stop(StopReason::Idle);
            }
            Message::ExportEnded(id) => {
                let daemon = Rc::clone(daemon);
                drop(rt::spawn(async move {
                    daemon.servers.remove_ended(&id).await;
                    if daemon.stop_when_idle && daemon.exports().is_empty() {
                        daemon.stop(StopReason::Idle);
                    }
                }));
            }
            Message::SizeChanged(is_told) => {
                let daemon = Rc::clone(daemon);
                drop(rt::spawn(async move {
                    rt::sleep(SIZE_PAUSE).await;
                    is_told.store(false, Ordering::SeqCst);
                    daemon.servers.look_at_sizes();
                }));
            }
            Message::Stop(reason) => return reason,
        }
    }
}
