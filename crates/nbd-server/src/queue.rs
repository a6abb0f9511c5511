// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The threads that serve: each has its connections, which never leave it.

use crate::Disk;
use crate::admission::{ConnectionSlot, PARKED};
use crate::config::{Event, LOG_LOST, LOG_REFUSED};
use crate::negotiation::negotiate;
use crate::registry::Registry;
use crate::session;
use crate::signal::{Mailbox, Watched};
use cowshed_nbd::{Receiver, Stream};
use cowshed_storage::rt::JoinHandle;
use cowshed_storage::{Listener, Socket, rt};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::StreamExt;
use futures_util::future::{Either, pending, select};
use futures_util::stream::FuturesUnordered;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Between two attempts to accept a client when the process has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A task of a queue.
pub(crate) enum QueueMessage<D: Disk> {
    /// Accept clients and hand them to the queues in turn.
    Listen { listener: Listener, mailboxes: Vec<Arc<Mailbox<QueueMessage<D>>>>, next: Arc<AtomicUsize> },
    /// Serve a client.
    Serve { socket: Socket, slot: Option<ConnectionSlot<D>> },
    /// Accept no more clients, and end when the last one is gone.
    Stop,
}

/// The owner's end of a queue.
pub(crate) struct QueueHandle<D: Disk> {
    mailbox: Arc<Mailbox<QueueMessage<D>>>,
    ended: Arc<Watched<bool>>,
}

impl<D: Disk> std::fmt::Debug for QueueHandle<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Queue")
    }
}

/// Notes that a queue's thread has ended, also by a panic.
struct Ending(Arc<Watched<bool>>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.change(|ended| *ended = true);
    }
}

impl<D: Disk> QueueHandle<D> {
    /// Starts all threads of a server.
    pub(crate) fn start_all(registry: &Arc<Registry<D>>) -> Result<Vec<QueueHandle<D>>> {
        let mut queues: Vec<QueueHandle<D>> = Vec::new();
        for number in 0..registry.config.queues {
            match Self::start(registry, number) {
                Ok(queue) => queues.push(queue),
                Err(error) => {
                    queues.iter().for_each(|queue| queue.send(QueueMessage::Stop));
                    return Err(error);
                }
            }
        }
        Ok(queues)
    }

    fn start(registry: &Arc<Registry<D>>, number: usize) -> Result<QueueHandle<D>> {
        let mailbox: Arc<Mailbox<QueueMessage<D>>> = Arc::default();
        let ended = Arc::new(Watched::new(false));
        let (registry, inbox, ending) = (Arc::clone(registry), Arc::clone(&mailbox), Ending(Arc::clone(&ended)));
        let (prepared, is_prepared) = std::sync::mpsc::sync_channel(1);
        std::thread::Builder::new()
            .name(format!("nbd-queue-{number}"))
            .spawn(move || {
                let _ending = ending;
                let outcome = rt::prepare();
                let can_serve = outcome.is_ok();
                let is_awaited = prepared.send(outcome).is_ok();
                if can_serve && is_awaited {
                    rt::block_on(serve_all(registry, inbox));
                }
            })
            .map_err(|error| Error::io(&error, "could not start a thread"))?;
        match is_prepared.recv() {
            Ok(outcome) => outcome.map(|()| QueueHandle { mailbox, ended }),
            Err(_) => Err(Error::internal("a queue's thread ended at once")),
        }
    }

    pub(crate) fn send(&self, message: QueueMessage<D>) {
        self.mailbox.send(message);
    }

    pub(crate) fn mailbox(&self) -> Arc<Mailbox<QueueMessage<D>>> {
        Arc::clone(&self.mailbox)
    }

    /// Waits for the thread's end.
    pub(crate) async fn join(self) {
        self.ended.wait(|ended| ended.then_some(())).await;
    }
}

async fn serve_all<D: Disk>(registry: Arc<Registry<D>>, inbox: Arc<Mailbox<QueueMessage<D>>>) {
    rt::poll_up_to(registry.config.poll_limit.clone());
    rt::sleep_exactly();
    let mut listening: Vec<JoinHandle<()>> = Vec::new();
    let mut serving: Vec<JoinHandle<()>> = Vec::new();
    loop {
        match inbox.receive().await {
            QueueMessage::Listen { listener, mailboxes, next } => {
                listening.push(rt::spawn(accept_all(Arc::clone(&registry), listener, mailboxes, next)));
            }
            QueueMessage::Serve { socket, slot } => {
                serving.retain(|task| !task.is_finished());
                serving.push(rt::spawn(serve(Arc::clone(&registry), socket, slot)));
            }
            QueueMessage::Stop => break,
        }
    }
    for task in listening {
        task.cancel().await;
    }
    for task in serving {
        task.await;
    }
}

async fn accept_all<D: Disk>(
    registry: Arc<Registry<D>>,
    listener: Listener,
    mailboxes: Vec<Arc<Mailbox<QueueMessage<D>>>>,
    next: Arc<AtomicUsize>,
) {
    registry.held.wait(|held| (!*held).then_some(())).await;
    let mut parked = FuturesUnordered::new();
    loop {
        let count = parked.len();
        let accepted = {
            let accept = pin!(async {
                match count < PARKED {
                    true => listener.accept().await,
                    // The clients behind are left where the system keeps them.
                    false => pending().await,
                }
            });
            let seated = pin!(async {
                if parked.next().await.is_none() {
                    pending::<()>().await;
                }
            });
            match select(accept, seated).await {
                Either::Left((accepted, _)) => accepted,
                Either::Right(_) => continue,
            }
        };
        match accepted {
            Ok(socket) => {
                let (registry, mailboxes, next) = (&registry, &mailboxes, &next);
                parked.push(async move {
                    let Some(slot) = ConnectionSlot::take(registry, &socket).await else {
                        let peer = socket.peer();
                        tracing::info!(peer, "too many connections of this address wait, and this one is closed");
                        socket.shutdown();
                        return;
                    };
                    let queue = next.fetch_add(1, Ordering::Relaxed) % mailboxes.len();
                    mailboxes[queue].send(QueueMessage::Serve { socket, slot: Some(slot) });
                });
            }
            Err(error) if Listener::is_transient(&error) => {
                tracing::warn!(%error, "can't take clients at the moment");
                rt::sleep(ACCEPT_PAUSE).await;
            }
            Err(error) => {
                tracing::error!(%error, "can't take clients any more");
                return;
            }
        }
    }
}

/// One connection from its first byte to its last.
pub(crate) async fn serve<D: Disk>(registry: Arc<Registry<D>>, socket: Socket, slot: Option<ConnectionSlot<D>>) {
    let peer = socket.peer();
    socket.keep_alive();
    tracing::debug!(peer, "client connected");
    let stream = Arc::new(Stream::new(socket));
    let mut receiver = Receiver::default();
    let config = &registry.config;
    // Only one that is counted can lose its seat or place.
    let haggling = slot.as_ref().map(|slot| (slot, registry.admissions.enter(stream.socket())));
    let mut negotiated = negotiate(&registry, &stream, &mut receiver, haggling.as_ref()).await;
    if haggling.is_some_and(|(_, haggling)| haggling.was_cut()) {
        let message = "the client was silent, or its peer had most connections, and others waited for room";
        negotiated = Err(Error::new(ErrorKind::Limit, message));
    }
    let (stay, terms) = match negotiated {
        Ok(Some(negotiated)) => negotiated,
        Ok(None) => {
            stream.close().await;
            tracing::debug!(peer, "client left without choosing an export");
            return;
        }
        Err(reason) => {
            let sentence = reason.sentence();
            match reason.kind() {
                ErrorKind::Cancelled => tracing::debug!(target: LOG_REFUSED, peer, sentence, "{reason}"),
                _ => tracing::info!(target: LOG_REFUSED, peer, %reason, sentence, "client refused"),
            }
            // The next client's line stands behind this one's.
            stream.socket().shutdown();
            config.notify(Event::ClientRefused { peer, reason: reason.to_string() });
            return;
        }
    };
    let export = stay.served.export.name.clone();
    tracing::info!(peer, export, "client uses export");
    config.notify(Event::ClientConnected { export: export.clone(), peer: peer.clone() });
    let result = session::run(stay, terms, Arc::clone(&stream), receiver, config.limits, &registry.pool).await;
    let error = result.err().map(|error| error.to_string());
    match &error {
        None => tracing::info!(peer, export, "client left"),
        Some(error) => tracing::warn!(target: LOG_LOST, peer, export, error, "client lost"),
    }
    config.notify(Event::ClientDisconnected { export, peer, error });
}
