// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The export as its owner sees it, and the thread that sends commands to the driver. Commands wait for requests, so no
//! other thread may send them.

use crate::config::Config;
use crate::device::Device;
use cowshed_image::graph::Attachment;
use cowshed_storage::signal::{Watched, lock};
use cowshed_storage::{UblkDriver, rt};
use cowshed_types::{Error, Result};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// Called once, when another process than the server has removed the device.
pub type OnEnd = Box<dyn FnOnce() + Send>;

/// An order of the owner.
enum Order {
    LookAtSize,
}

#[derive(Default)]
struct Shared {
    /// The number of the device, or why there is none.
    started: Watched<Option<Result<u32>>>,
    /// The thread has ended.
    ended: Watched<bool>,
    on_end: Mutex<Option<OnEnd>>,
}

/// A disk that is served as a block device. Usable from any thread.
pub struct Server {
    shared: Arc<Shared>,
    /// Without it, the thread takes the device away.
    orders: Mutex<Option<Sender<Order>>>,
    device: u32,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Notes that the thread has ended, also by a panic.
struct Ending(Arc<Shared>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.started.change(|started| {
            started.get_or_insert_with(|| Err(Error::internal("the thread of an export ended at once")));
        });
        self.0.ended.change(|ended| *ended = true);
    }
}

impl Server {
    /// Makes the device, or takes it over, and serves it. Call it inside of [`rt::block_on`]. Dropped before its end, it leaves nothing
    /// behind.
    ///
    /// # Errors
    /// The driver's refusals, with their remedies. Nothing is left behind then.
    pub async fn start<D: UblkDriver>(
        driver: D,
        config: Config,
        attachment: Arc<Attachment>,
        on_end: OnEnd,
    ) -> Result<Server> {
        config.check()?;
        let shared: Arc<Shared> = Arc::default();
        let (orders, receiver) = channel();
        let ending = Ending(Arc::clone(&shared));
        let serve = move || {
            let ending = ending;
            run(driver, &config, &attachment, (&ending.0, on_end), &receiver);
        };
        let spawned = std::thread::Builder::new().name("ublk-control".to_owned()).spawn(serve);
        spawned.map_err(|error| Error::io(&error, "could not start a thread"))?;
        let device = shared.started.wait(Option::take).await?;
        Ok(Server { shared, orders: Mutex::new(Some(orders)), device })
    }

    /// The path of the block device.
    pub fn path(&self) -> String {
        format!("/dev/ublkb{}", self.device)
    }

    /// The size of the disk may have changed: the kernel hears of it.
    pub fn look_at_size(&self) {
        if let Some(orders) = &*lock(&self.orders) {
            // Fails only when the thread has ended.
            let _ = orders.send(Order::LookAtSize);
        }
    }

    /// Ends requests in flight, and takes the device away. Call it inside of [`rt::block_on`].
    pub async fn stop(&self) {
        // The owner knows of this end.
        drop(lock(&self.shared.on_end).take());
        drop(lock(&self.orders).take());
        self.shared.ended.wait(|ended| ended.then_some(())).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(lock(&self.shared.on_end).take());
    }
}

impl Shared {
    /// The queues have ended. The owner gets the news, unless it knows.
    fn tell_end(&self) {
        let told = lock(&self.on_end).take();
        if let Some(told) = told {
            told();
        }
    }
}

fn run<D: UblkDriver>(
    driver: D,
    config: &Config,
    attachment: &Arc<Attachment>,
    (shared, on_end): (&Arc<Shared>, OnEnd),
    orders: &Receiver<Order>,
) {
    let told = Arc::clone(shared);
    let tell_end = Arc::new(move || told.tell_end());
    let started = rt::prepare().and_then(|()| Device::start(driver, config, attachment, tell_end));
    let mut device = match started {
        Ok(device) => device,
        Err(error) => {
            shared.started.change(|started| *started = Some(Err(error)));
            return;
        }
    };
    // From here on there is an export that can end.
    *lock(&shared.on_end) = Some(on_end);
    if device.has_ended() {
        shared.tell_end();
    }
    shared.started.change(|started| *started = Some(Ok(device.number)));
    while let Ok(Order::LookAtSize) = orders.recv() {
        device.look_at_size();
    }
    device.stop();
}
