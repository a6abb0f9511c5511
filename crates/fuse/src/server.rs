// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The export as its owner sees it.

use crate::attributes::FileAttributes;
use crate::guard::{GuardProgram, MountGuard};
use crate::mount::{AllowOther, Mount, MountPoint, shown, unmount};
use crate::session::{self, SessionEnd};
use cowshed_fuse_proto::reply;
use cowshed_image::graph::Attachment;
use cowshed_storage::rt::{self, PollLimit};
use cowshed_storage::signal::{Watched, lock};
use cowshed_storage::{FuseDevice, ServedMount, mounted_device};
use cowshed_types::{Error, Result};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The most bytes of one read or write.
pub(crate) const MAX_REQUEST_BYTES: u32 = 1 << 20;
/// The most threads of an export.
pub const MAX_THREADS: usize = 64;

/// The settings of serving a disk.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The export's name.
    pub id: String,
    /// The file may be written to.
    pub writable: bool,
    /// Writes behind the end make the disk longer. The attachment has the right to resize.
    pub growable: bool,
    /// Each change is durable before it is answered.
    pub writethrough: bool,
    /// The users that may reach the file.
    pub allow_other: AllowOther,
    /// Threads that take requests: 1 to 64.
    pub threads: usize,
    /// The longest time that the threads look for requests before they sleep.
    pub poll_limit: PollLimit,
    /// The program that unmounts the file when this process has gone. Without it a killed process leaves a mount
    /// behind.
    pub guard: Option<GuardProgram>,
}

/// Called once, when another process than the server has unmounted the file system.
pub type OnUnmount = Box<dyn FnOnce() + Send>;

/// Called after each change of the size by a writer of the file, on the thread that serves it.
pub type OnResize = Box<dyn Fn() + Send + Sync>;

/// The part of a server that the owner and the threads share.
pub(crate) struct MountState {
    pub config: ServerConfig,
    pub attachment: Arc<Attachment>,
    pub attributes: FileAttributes,
    /// Something was written since the last flush.
    pub is_unflushed: AtomicBool,
    /// One change of the size at a time.
    pub resizing: futures_util::lock::Mutex<()>,
    /// Changes of the size so far, each from before requests that have waited for it go on.
    pub resizes: AtomicU64,
    pub orders: Watched<Orders>,
    /// Threads that run.
    threads: Watched<usize>,
    /// Those of them that have nothing but reads to end, of a file that is unmounted.
    pub reading: AtomicUsize,
    on_unmount: Mutex<Option<OnUnmount>>,
    pub on_resize: OnResize,
}

impl MountState {
    /// True where no thread has anything but reads to end.
    pub(crate) fn has_reads_alone(&self) -> bool {
        self.threads.look(|threads| self.reading.load(Ordering::SeqCst) >= *threads)
    }

    /// Tells the owner, once, that the file is unmounted.
    pub(crate) fn tell_unmounted(&self) {
        let told = lock(&self.on_unmount).take();
        if let Some(told) = told {
            told();
        }
    }
}

/// Interrupts that are kept for threads that have not seen them. Requests that they name have long begun.
const MAX_INTERRUPTS: usize = 256;

/// The orders of the owner, and reports of one thread to the others.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    has_to_stop: bool,
    /// Interrupts so far.
    count: u64,
    /// The last ones: the numbers of requests.
    last: VecDeque<u64>,
}

/// The news of [`Orders`] for a thread.
#[derive(Debug)]
pub(crate) enum Order {
    Stop,
    /// Signals came for the callers of these requests; `seen` is the count with them.
    Interrupts {
        seen: u64,
        uniques: Vec<u64>,
    },
}

impl Orders {
    fn stop(&mut self) {
        self.has_to_stop = true;
    }

    pub fn interrupt(&mut self, unique: u64) {
        self.count += 1;
        self.last.truncate(MAX_INTERRUPTS - 1);
        self.last.push_front(unique);
    }

    /// The news for a thread that has seen so many interrupts.
    pub fn since(&self, seen: u64) -> Option<Order> {
        if self.has_to_stop {
            return Some(Order::Stop);
        }
        let new = usize::try_from(self.count - seen).unwrap_or(usize::MAX);
        (new > 0)
            .then(|| Order::Interrupts { seen: self.count, uniques: self.last.iter().take(new).copied().collect() })
    }
}

/// A disk that is served as a file. Usable from any thread.
pub struct Server {
    shared: Arc<MountState>,
    path: PathBuf,
    /// Gone with the threads: the kernel ends requests that wait for an answer then.
    session: Mutex<Option<FuseDevice>>,
    /// Number of the file system.
    device: u64,
    guard: Mutex<Option<MountGuard>>,
    known_size: Mutex<u64>,
    served: Mutex<Option<ServedMount>>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Server {
    /// Mounts and starts the threads.
    ///
    /// # Errors
    /// Where the file can't be mounted on, or there are no threads to be had. Nothing is left behind then.
    pub fn start(
        config: ServerConfig,
        point: &MountPoint,
        attachment: Arc<Attachment>,
        (on_unmount, on_resize): (OnUnmount, OnResize),
    ) -> Result<Server> {
        let mount =
            Mount { point, writable: config.writable, allow_other: config.allow_other, max_read: MAX_REQUEST_BYTES };
        let mounted = mount.mount()?;
        let guard = config.guard.as_ref().map(|program| MountGuard::start(program, &mounted.path, mounted.device));
        let shared = Arc::new(MountState {
            attributes: FileAttributes::new(config.writable, mounted.allows_other),
            attachment,
            is_unflushed: AtomicBool::new(false),
            resizing: futures_util::lock::Mutex::new(()),
            resizes: AtomicU64::new(0),
            orders: Watched::default(),
            threads: Watched::default(),
            reading: AtomicUsize::new(0),
            on_unmount: Mutex::new(Some(on_unmount)),
            on_resize,
            config,
        });
        let size = shared.attachment.size();
        let mut server = Server {
            shared,
            path: mounted.path,
            device: mounted.device,
            session: Mutex::new(Some(mounted.session)),
            guard: Mutex::default(),
            known_size: Mutex::new(size),
            served: Mutex::new(Some(mounted.served)),
        };
        match guard.transpose().and_then(|guard| server.start_threads().map(|()| guard)) {
            Ok(guard) => server.guard = Mutex::new(guard),
            Err(error) => {
                // The session ends with its descriptors, so nothing waits for an answer.
                if let Err(errno) = unmount(&server.path) {
                    tracing::warn!(path = shown(&server.path), errno = errno.0, "could not unmount");
                }
                return Err(error);
            }
        }
        Ok(server)
    }

    fn start_threads(&self) -> Result<()> {
        let session = lock(&self.session).clone();
        let session = session.ok_or_else(|| Error::internal("a FUSE session that has ended"))?;
        for number in 0..self.shared.config.threads.clamp(1, MAX_THREADS) {
            let device = if number == 0 { session.clone() } else { session.of_same_session() };
            let shared = Arc::clone(&self.shared);
            shared.threads.change(|threads| *threads += 1);
            let running = Running(Arc::clone(&shared));
            let (prepared, is_prepared) = std::sync::mpsc::sync_channel(1);
            let serve = move || {
                let running = running;
                let outcome = rt::prepare();
                let can_serve = outcome.is_ok();
                if prepared.send(outcome).is_ok() && can_serve {
                    serve(&running.0, device);
                }
            };
            let spawned = std::thread::Builder::new().name(format!("fuse-{number}")).spawn(serve);
            spawned.map_err(|error| Error::io(&error, "could not start a thread"))?;
            is_prepared.recv().unwrap_or_else(|_| Err(Error::internal("a thread of an export ended at once")))?;
        }
        Ok(())
    }

    /// The file, absolute and without links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size of the disk may have changed: the kernel hears of it.
    pub fn look_at_size(&self) {
        let size = self.shared.attachment.size();
        if std::mem::replace(&mut *lock(&self.known_size), size) != size
            && let Some(session) = &*lock(&self.session)
            && let Err(errno) = session.send(&[IoSlice::new(&reply::attributes_changed())])
        {
            tracing::debug!(export = self.shared.config.id, errno = errno.0, "the kernel knows no attributes yet");
        }
    }

    /// Unmounts the file, ends requests in flight, and ends the threads. Call it inside of [`rt::block_on`].
    pub async fn stop(&self) {
        // The owner knows of this end.
        drop(lock(&self.shared.on_unmount).take());
        if self.shared.threads.look(|threads| *threads == 0) {
            // Nothing is answered any more, so waiting requests must not wait on.
            drop(lock(&self.session).take());
        }
        let guard = lock(&self.guard).take();
        match (mounted_device(&self.path), guard) {
            (Ok(device), guard) if device == self.device => self.unmount(guard).await,
            (_, Some(guard)) => guard.end(),
            (_, None) => {}
        }
        // Descriptors that processes have open are dead from here on.
        self.shared.orders.change(Orders::stop);
        self.shared.threads.wait(|threads| (*threads == 0).then_some(())).await;
        drop(lock(&self.session).take());
        drop(lock(&self.served).take());
    }

    /// On a thread of its own: processes that hold the file may write to it until the last moment.
    async fn unmount(&self, guard: Option<MountGuard>) {
        let ended: Arc<Watched<bool>> = Arc::default();
        let (path, told) = (self.path.clone(), Arc::clone(&ended));
        let work = move || {
            let unmounted = match guard {
                // A guard that was killed leaves the work to this process.
                Some(guard) => guard.unmount().or_else(|_| unmount(&path)),
                None => unmount(&path),
            };
            if let Err(errno) = unmounted {
                tracing::warn!(path = shown(&path), errno = errno.0, "could not unmount");
            }
            told.change(|ended| *ended = true);
        };
        match std::thread::Builder::new().name("fuse-unmount".to_owned()).spawn(work) {
            Ok(_) => ended.wait(|ended| ended.then_some(())).await,
            Err(error) => tracing::warn!(%error, "could not start a thread that unmounts"),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Dropped without a stop, its guard unmounts.
        self.shared.orders.change(Orders::stop);
    }
}

/// Counts a thread, also where it panics.
struct Running(Arc<MountState>);

impl Drop for Running {
    fn drop(&mut self) {
        let left = self.0.threads.change(|threads| {
            *threads -= 1;
            *threads
        });
        if left == 0 {
            self.0.tell_unmounted();
        }
    }
}

fn serve(shared: &Arc<MountState>, device: FuseDevice) {
    let id = shared.config.id.clone();
    let outcome = rt::block_on(async {
        rt::poll_up_to(shared.config.poll_limit.clone());
        rt::sleep_exactly();
        session::serve(Arc::clone(shared), device).await
    });
    match outcome {
        Ok(SessionEnd::Told | SessionEnd::Unmounted) => return,
        Ok(SessionEnd::Failed(errno)) => {
            tracing::error!(export = id, errno = errno.0, "no more requests of the kernel")
        }
        Err(error) => tracing::error!(export = id, %error, "no more requests of the kernel"),
    }
    // A request may be left that woke this thread alone, so the others end, too. The owner hears of it.
    shared.orders.change(Orders::stop);
}
