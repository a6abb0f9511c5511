// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk that is served to front ends.

use crate::{Server, ServerConfig};
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::{Node, OpenRequest};
use cowshed_storage::{Listener, SocketAddress, rt};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::vhost::FrontEnd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

pub const DISK_BYTES: u64 = 16 << 20;

/// Makes a qcow2 image of [`DISK_BYTES`] without data.
pub fn qcow2_image(image: &Path) {
    tool("qemu-img", &["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "16M"]);
}

/// A disk that is served.
pub struct Served {
    pub folder: TempDir,
    pub attachment: Arc<Attachment>,
    pub node: Arc<Node>,
    _graph: Arc<Graph>,
    pub server: Option<Server>,
    pub config: ServerConfig,
}

impl Served {
    pub fn new(change: impl FnOnce(&mut ServerConfig)) -> Served {
        Self::on("driver=raw,node-name=d,discard=unmap,file.driver=file,file.filename=", change)
    }

    /// On a node by its options, the last of which names the file.
    pub fn on(options: &str, change: impl FnOnce(&mut ServerConfig)) -> Served {
        let make = |image: &Path| std::fs::File::create(image).unwrap().set_len(DISK_BYTES).unwrap();
        Self::made(options, make, change)
    }

    /// As [`Served::on`], of an image that is made first.
    pub fn made(options: &str, make: impl FnOnce(&Path), change: impl FnOnce(&mut ServerConfig)) -> Served {
        let folder = temp_dir();
        let image = folder.path().join("disk.raw");
        make(&image);
        let options = format!("{options}{}", image.display());
        let request = OpenRequest::image_opts(&options).unwrap().writable(true);
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let (node, attachment) = rt::block_on(async {
            let node = graph.add_with(request).await.unwrap();
            let attachment = graph.attach(&node, AttachRequest::export("disk", true)).await.unwrap();
            (node, attachment)
        });
        let mut config = ServerConfig {
            id: "the-disk".to_owned(),
            writable: true,
            writethrough: false,
            block_bytes: 512,
            queues: 2,
            threads: 2,
            poll_limit: rt::PollLimit::default(),
        };
        change(&mut config);
        let mut served = Served { folder, attachment, node, _graph: graph, server: None, config };
        served.start();
        served
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("vhost.sock")
    }

    pub fn start(&mut self) {
        let address = SocketAddress::Unix(self.path().to_str().unwrap().to_owned());
        let listener = Listener::bind(&address).unwrap().pop().unwrap();
        self.server = Some(Server::start(self.config.clone(), listener, Arc::clone(&self.attachment)).unwrap());
    }

    pub fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            rt::block_on(server.stop());
        }
    }

    pub fn disk(&self, offset: u64, len: usize) -> Vec<u8> {
        let buf = cowshed_storage::IoBuf::zeroed(len);
        let (result, buf) = rt::block_on(self.node.read(offset, buf));
        result.unwrap();
        buf.to_vec()
    }

    pub fn connect(&self) -> FrontEnd {
        FrontEnd::connect(&self.path())
    }

    /// A front end whose first ring runs.
    pub fn driver(&self) -> FrontEnd {
        let mut front_end = self.connect();
        front_end.negotiate(u64::MAX);
        front_end.share_memory();
        front_end.start_ring(0, 0);
        front_end
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop();
    }
}
