// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a server serves: an attachment to the graph, through a queue for each of the server's threads.

use cowshed_block::Result;
use cowshed_image::ZeroFlags;
use cowshed_image::graph::{Attachment, Queue};
use cowshed_nbd_server::{Disk, DiskRun};
use cowshed_storage::IoBuf;
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The disk of one export.
#[derive(Debug)]
pub(crate) struct ExportDisk {
    attachment: Arc<Attachment>,
    /// Tells its queues from those of other exports.
    key: u64,
    /// Its end is the end of its queues, on each thread at the next look.
    alive: Arc<()>,
}

struct Held {
    key: u64,
    queue: Queue,
    alive: Weak<()>,
}

thread_local! {
    /// This thread's queues, the one used last in front.
    static QUEUES: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
}

impl ExportDisk {
    pub fn new(attachment: Arc<Attachment>) -> ExportDisk {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        ExportDisk { attachment, key: NEXT.fetch_add(1, Ordering::Relaxed), alive: Arc::default() }
    }

    fn queue(&self) -> Queue {
        QUEUES.with_borrow_mut(|queues| {
            if let Some(first) = queues.first()
                && first.key == self.key
            {
                return first.queue.clone();
            }
            match queues.iter().position(|held| held.key == self.key) {
                Some(at) => queues.swap(0, at),
                None => {
                    queues.retain(|held| held.alive.strong_count() > 0);
                    let alive = Arc::downgrade(&self.alive);
                    queues.insert(0, Held { key: self.key, queue: self.attachment.queue(), alive });
                }
            }
            queues[0].queue.clone()
        })
    }
}

impl Disk for ExportDisk {
    fn size(&self) -> u64 {
        self.attachment.size()
    }

    fn is_read_only(&self) -> bool {
        !self.attachment.is_writable()
    }

    async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.queue().read(offset, buf).await
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.queue().write(offset, buf).await
    }

    async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.queue().write_zeroes(offset, len, flags).await
    }

    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.queue().discard(offset, len).await
    }

    async fn flush(&self) -> Result<()> {
        self.queue().flush().await
    }

    async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<DiskRun>> {
        let runs = self.queue().block_status_chain(offset, len, max_runs).await?;
        let run = |run: &cowshed_image::StatusExtent| DiskRun {
            len: run.len,
            data: run.data,
            zero: run.zero,
            depth: if run.present { run.depth.saturating_add(1) } else { 0 },
        };
        Ok(runs.iter().map(run).collect())
    }
}
