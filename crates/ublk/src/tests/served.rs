// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk that is served on the driver of the tests.

use super::fake::{Answer, Fake, Ticket, answer};
use crate::proto::{Operation, Request};
use crate::{Config, Recover, Server};
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::{Node, OpenRequest};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

pub const DISK_BYTES: u64 = 16 << 20;
/// A raw image; the name of the file follows.
pub const RAW: &str = "driver=raw,node-name=d,discard=unmap,file.driver=file,file.filename=";

/// A disk that is served.
pub struct Served {
    pub folder: TempDir,
    pub fake: Fake,
    pub graph: Arc<Graph>,
    pub node: Arc<Node>,
    pub attachment: Arc<Attachment>,
    pub server: Option<Server>,
    pub config: Config,
    /// Ends that the owner has heard of.
    pub ends: Arc<AtomicUsize>,
}

impl Served {
    pub fn new(change: impl FnOnce(&mut Config)) -> Served {
        Self::on(RAW, Fake::new(super::fake::ALL), change)
    }

    /// On a node by its options, the last of which names the file, and with a driver.
    pub fn on(options: &str, fake: Fake, change: impl FnOnce(&mut Config)) -> Served {
        let mut served = Self::unserved(options, fake, change);
        served.start().unwrap();
        served
    }

    pub fn unserved(options: &str, fake: Fake, change: impl FnOnce(&mut Config)) -> Served {
        let folder = temp_dir();
        let image = folder.path().join("disk");
        match options.contains("qcow2") {
            true => Qemu::system().create(&image, "qcow2", "", DISK_BYTES),
            false => std::fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap(),
        }
        let mut config = Config {
            id: "the-disk".to_owned(),
            writable: true,
            writethrough: false,
            block_bytes: 512,
            queues: 2,
            depth: 8,
            device: None,
            recover: Recover::Off,
            unprivileged: false,
            poll_limit: rt::PollLimit::default(),
            notes: folder.path().join("notes"),
        };
        change(&mut config);
        std::fs::create_dir(folder.path().join("notes")).unwrap();
        let options = format!("{options}{}", image.display());
        let request = OpenRequest::image_opts(&options).unwrap().writable(true);
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let (node, attachment) = rt::block_on(async {
            let node = graph.add_with(request).await.unwrap();
            let request = AttachRequest::export("disk", config.writable);
            let attachment = graph.attach(&node, request).await.unwrap();
            (node, attachment)
        });
        Served { folder, fake, graph, node, attachment, server: None, config, ends: Arc::default() }
    }

    pub fn start(&mut self) -> Result<()> {
        let ends = Arc::clone(&self.ends);
        let on_end = Box::new(move || {
            ends.fetch_add(1, Ordering::SeqCst);
        });
        let start = Server::start(self.fake.clone(), self.config.clone(), Arc::clone(&self.attachment), on_end);
        self.server = Some(rt::block_on(start)?);
        Ok(())
    }

    pub fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            rt::block_on(server.stop());
        }
    }

    /// The server's process dies and another one takes its place.
    pub fn die(&mut self) {
        self.fake.kill(0);
        self.fake.wait_closed(0);
        // A dead process doesn't do its owner's work.
        let dead = self.server.take().unwrap();
        std::mem::forget(dead);
        self.config.recover = Recover::On;
        self.config.device = Some(0);
    }

    pub fn send(&self, operation: Operation, offset: u64, len: u64, data: Vec<u8>) -> Ticket {
        self.fake.send(0, 0, &Request { operation, offset, len }, data)
    }

    pub fn write(&self, offset: u64, data: Vec<u8>) -> i32 {
        let len = data.len() as u64;
        answer(&self.send(Operation::Write { is_durable: false }, offset, len, data)).0
    }

    pub fn read(&self, offset: u64, len: u64) -> Answer {
        answer(&self.send(Operation::Read, offset, len, Vec::new()))
    }

    pub fn flush(&self) -> i32 {
        answer(&self.send(Operation::Flush, 0, 0, Vec::new())).0
    }

    /// Bytes of the disk, past the server.
    pub fn disk(&self, offset: u64, len: usize) -> Vec<u8> {
        let (result, buf) = rt::block_on(self.node.read(offset, IoBuf::zeroed(len)));
        result.unwrap();
        buf.to_vec()
    }

    /// Notes that are there.
    pub fn notes(&self) -> usize {
        std::fs::read_dir(self.folder.path().join("notes")).unwrap().count()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}
