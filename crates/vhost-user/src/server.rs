// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The export as its owner sees it, and the thread that takes front ends.

use crate::queue::RingHandle;
use crate::session;
use cowshed_image::graph::{Attachment, images_below};
use cowshed_storage::rt::{self, PollLimit};
use cowshed_storage::signal::Watched;
use cowshed_storage::{Listener, MappingBudget, PassedFiles, Socket, SocketAddress};
use cowshed_types::{Error, Result};
use futures_util::future::{Either, select};
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// The most queues of an export.
pub const MAX_QUEUES: u16 = 64;
/// The largest logical block, in bytes.
const MAX_BLOCK_BYTES: u32 = 2 << 20;
/// The most mappings of guest memory: its regions, and as many that requests use still though they were removed. Other exports of the
/// process have theirs besides.
const MAX_MAPPINGS: usize = 1024;
/// Between two attempts to accept a front end when the process has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// So long may the process of a front end that has gone keep the next one waiting.
const LEAVE_GRACE: Duration = Duration::from_secs(5);

/// Random keys of the process: no other one has its lives.
static LIVES: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The settings of serving a disk.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The export's name, which the guest reads as the disk's serial number (its first 20 bytes).
    pub id: String,
    /// The guest may write.
    pub writable: bool,
    /// Each change is durable before its status is reported.
    pub writethrough: bool,
    /// Logical block size in bytes: a power of two from 512 to 2 MiB.
    pub block_bytes: u32,
    /// Queues: 1 to 64.
    pub queues: u16,
    /// The most threads, at least 1: each queue has one of its own where there are enough, else the queues share them.
    pub threads: usize,
    /// The longest time that the threads look for requests before they sleep.
    pub poll_limit: PollLimit,
}

impl ServerConfig {
    /// Checks the settings that a user may get wrong, in QEMU's words where it has some.
    pub fn check(&self) -> Result<()> {
        if !self.block_bytes.is_power_of_two() || !(512..=MAX_BLOCK_BYTES).contains(&self.block_bytes) {
            let message = "parameter logical-block-size must be a power of 2 between 512 and 2097152";
            return Err(Error::invalid_argument(message));
        }
        match self.queues {
            0 => Err(Error::invalid_argument("num-queues must be greater than 0")),
            queues if queues > MAX_QUEUES => {
                let message = format!("num-queues is {queues}, and an export has at most {MAX_QUEUES}");
                Err(Error::invalid_argument(message))
            }
            _ => Ok(()),
        }
    }
}

/// The state that the owner and the control thread share.
#[derive(Debug)]
pub(crate) struct BackendState {
    pub config: ServerConfig,
    pub attachment: Arc<Attachment>,
    pub queues: Vec<RingHandle>,
    /// The guest's switch of the write cache, which outlives front ends: they send it only where it changes.
    pub writeback: Arc<AtomicBool>,
    /// The number of this back end's life in the notes that outlive it.
    pub life: u64,
    /// The mappings of the front end's memory.
    pub mappings: MappingBudget,
    /// The looks at the files that front ends pass.
    pub passed: PassedFiles,
    /// The front end that is connected.
    pub client: Watched<Option<Socket>>,
    /// The owner has looked at the size so often.
    pub looks: Watched<u64>,
    stopping: Watched<bool>,
    ended: Watched<bool>,
}

/// A disk that is served to one front end at a time. Usable from any thread.
#[derive(Debug)]
pub struct Server {
    shared: Arc<BackendState>,
    address: SocketAddress,
}

impl Server {
    /// Starts the threads, and takes front ends.
    pub fn start(config: ServerConfig, listener: Listener, attachment: Arc<Attachment>) -> Result<Server> {
        config.check()?;
        let threads = spawn_threads(&config, &attachment)?;
        let queues = spread(threads, config.queues.into());
        let mut images: Vec<_> = images_below(&attachment.node()).iter().map(|image| image.number()).collect();
        images.sort_unstable();
        let shared = Arc::new(BackendState {
            writeback: Arc::new(AtomicBool::new(!config.writethrough)),
            // Changes in memory are the images': an export that comes back finds them, also one of another node above.
            life: LIVES.hash_one((std::process::id(), images)),
            config,
            attachment,
            queues,
            mappings: MappingBudget::new(MAX_MAPPINGS),
            passed: PassedFiles::default(),
            client: Watched::default(),
            looks: Watched::default(),
            stopping: Watched::default(),
            ended: Watched::default(),
        });
        let address = listener.address().clone();
        let serving = Arc::clone(&shared);
        let serve = move || {
            let _ending = Ending(Arc::clone(&serving));
            rt::block_on(accept_all(&serving, listener));
        };
        if let Err(error) = std::thread::Builder::new().name("vhost-control".to_owned()).spawn(serve) {
            shared.queues.iter().for_each(RingHandle::end);
            return Err(Error::io(&error, "could not start a thread"));
        }
        Ok(Server { shared, address })
    }

    /// The address that it listens on.
    pub fn address(&self) -> &SocketAddress {
        &self.address
    }

    /// True while a front end is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.client.look(|client| client.as_ref().is_some_and(|client| !client.has_hung_up()))
    }

    /// The size of the disk may have changed: the guest hears of it.
    pub fn look_at_size(&self) {
        self.shared.looks.change(|looks| *looks += 1);
    }

    /// Ends requests in flight, sends the front end away, and ends the threads. Call it inside of [`rt::block_on`].
    pub async fn stop(&self) {
        self.begin_stop();
        self.shared.ended.wait(|ended| ended.then_some(())).await;
        for queue in &self.shared.queues {
            queue.join().await;
        }
    }

    fn begin_stop(&self) {
        self.shared.stopping.change(|stopping| *stopping = true);
        self.shared.client.look(|client| {
            if let Some(client) = client {
                client.shutdown();
            }
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.begin_stop();
    }
}

/// Starts the threads of the rings, with as many rings each as they have to serve.
fn spawn_threads(config: &ServerConfig, attachment: &Arc<Attachment>) -> Result<Vec<Vec<RingHandle>>> {
    let queues = usize::from(config.queues);
    let count = queues.min(config.threads.max(1));
    let mut threads: Vec<Vec<RingHandle>> = Vec::new();
    for number in 0..count {
        let rings = queues / count + usize::from(number < queues % count);
        match RingHandle::spawn(format!("vhost-queue-{number}"), rings, attachment, &config.poll_limit) {
            Ok(served) => threads.push(served),
            Err(error) => {
                threads.iter().flatten().for_each(RingHandle::end);
                return Err(error);
            }
        }
    }
    Ok(threads)
}

/// The queues in their order: neighbours have different threads, so that a guest that uses the first ones uses all threads.
fn spread(threads: Vec<Vec<RingHandle>>, count: usize) -> Vec<RingHandle> {
    let mut threads: Vec<_> = threads.into_iter().map(Vec::into_iter).collect();
    let rounds = count.div_ceil(threads.len().max(1));
    (0..rounds).flat_map(|_| threads.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()).collect()
}

/// Ends the rings' threads with that of their control, also by a panic.
struct Ending(Arc<BackendState>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.queues.iter().for_each(RingHandle::end);
        self.0.ended.change(|ended| *ended = true);
    }
}

async fn accept_all(shared: &Arc<BackendState>, listener: Listener) {
    let id = &shared.config.id;
    let mut session: Option<rt::JoinHandle<()>> = None;
    loop {
        let accepted = {
            let stopping = pin!(shared.stopping.wait(|stopping| stopping.then_some(())));
            match select(pin!(listener.accept()), stopping).await {
                Either::Left((accepted, _)) => accepted,
                Either::Right(_) => break,
            }
        };
        let socket = match accepted {
            Ok(socket) => socket,
            Err(error) if Listener::is_transient(&error) => {
                tracing::warn!(%error, "can't take front ends at the moment");
                rt::sleep(ACCEPT_PAUSE).await;
                continue;
            }
            Err(error) => {
                tracing::error!(%error, "can't take front ends any more");
                break;
            }
        };
        if let Some(before) = &mut session {
            let is_gone = shared.client.look(|client| client.as_ref().is_none_or(Socket::has_hung_up));
            let left = match is_gone {
                true => matches!(select(before, pin!(rt::sleep(LEAVE_GRACE))).await, Either::Left(_)),
                false => false,
            };
            if !left {
                tracing::warn!(
                    export = id,
                    peer = socket.peer(),
                    "another front end is connected, and this one is closed"
                );
                socket.shutdown();
                continue;
            }
        }
        shared.client.change(|client| *client = Some(socket.clone()));
        if shared.stopping.look(|stopping| *stopping) {
            socket.shutdown();
        }
        let shared = Arc::clone(shared);
        session = Some(rt::spawn(async move {
            let peer = socket.peer();
            tracing::info!(export = shared.config.id, peer, "front end connected");
            match session::run(&shared, socket).await {
                Ok(()) => tracing::info!(export = shared.config.id, peer, "front end left"),
                Err(error) => tracing::warn!(export = shared.config.id, peer, %error, "front end lost"),
            }
            shared.client.change(|client| *client = None);
        }));
    }
    drop(listener);
    if let Some(session) = session {
        session.await;
    }
}
